"""Keeps a store, such as s3://bucket/run, equal to a local run folder.

It uploads the folder as it was at one instant, so a reader of the store finds what a kill at that
instant would have left on disk. The order of the uploads ensures this at every moment:

    0  an export's mark, without which nobody replaces it
    1  whatever nothing else names: data of best/, an export's variables, pictures, events
    2  .index files, 3  best.json, manifest.json, saved_model.pb, 4  TensorFlow's state files
    5  metrics.jsonl, which is never behind a checkpoint
    6  checkpoints/*.data, 7  checkpoints/*.index, 8  checkpoints/checkpoint

Then older files are removed, those that make others count first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import posixpath
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

from absl import logging

from loopwright.errors import ConfigError
from loopwright.host import files, signals
from loopwright.host.stores import File, Store, StoreError
from loopwright.run_folder import layout

RECORD = layout.MIRROR
"""File in the local folder that says what of it is in the store."""
LINEAGE = "mirrored.json"
"""Object in the store that says which local folder it is the mirror of."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
GIVE_UP_S = 30.0
"""How long the end of a run waits for a store that fails."""
_TRIES = 100
_OURS = (layout.OWNER, RECORD, LINEAGE, layout.PROBE)
_UNFINISHED = re.compile(r"(^|/)(checkpoints/unfinished/|[^/]+\.(new|old)-[0-9a-f]{32}/)")
_CHECKPOINT = re.compile(r"(?P<path>(?:.*/)?ckpt-(?P<step>\d+)(?:\.\d+)?)\.(?:index|data-.*)")
_MARK, _MODEL = "assets.extra/loopwright", "saved_model.pb"
_LAST = ("best.json", "manifest.json", _MODEL)

Stat = tuple[int, int]
"""Size in bytes and time of the last change in ns, of a local file."""


@dataclasses.dataclass
class Known:
  """A file that is the same here and in the store: `local` here, `version` there."""

  local: Stat
  version: str


class Record:
  """The files of a local folder that are in the store, as far as this machine knows.

  Attributes:
    folder: the local folder.
    cache: an id of this folder.
    files: name -> what is known.
  """

  def __init__(self, folder: str) -> None:
    """Reads the record of a folder; a folder without one gets a new id."""
    self.folder, self.cache, self.files = folder, uuid.uuid4().hex, dict[str, Known]()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
      with open(os.path.join(folder, RECORD), encoding="utf-8") as file:
        read = json.load(file)
      found = {name: Known((a, b), version) for name, (a, b, version) in read["files"].items()}
      self.cache, self.files = str(read["cache"]), found

  def save(self) -> None:
    """Writes the record."""
    known = {name: [*each.local, each.version] for name, each in self.files.items()}
    text = json.dumps({"cache": self.cache, "files": known})
    files.atomic_write(os.path.join(self.folder, RECORD), text)

  def settle(self, listing: dict[str, File]) -> None:
    """Takes over the versions that the store has now, and saves."""
    for name, each in self.files.items():
      each.version = listing[name].version if name in listing else ""
    self.save()


def is_kept(name: str) -> bool:
  """Whether a file of a run folder belongs in the store, and a file of the store on this disk."""
  parts = name.split("/")
  if {"", ".", ".."} & set(parts) or "\\" in name or "\0" in name:
    return False
  return not (name in _OURS or name.endswith(".tmp") or _UNFINISHED.search(name))


def whole(names: Iterable[str]) -> set[str]:
  """Returns the names without those of incomplete checkpoints and exports."""
  kept = set(filter(is_kept, names))
  marked = (name.removesuffix(_MARK) for name in kept if name.endswith(f"/{_MARK}"))
  torn = tuple(top for top in marked if f"{top}{_MODEL}" not in kept)
  return {
    name
    for name in kept
    if not (torn and name.startswith(torn))
    and not ((one := _CHECKPOINT.fullmatch(name)) and f"{one['path']}.index" not in kept)
  }


def superseded(name: str, local: Iterable[str]) -> bool:
  """Whether a file is of a checkpoint that a newer local one in the same folder has replaced."""
  if not (one := _CHECKPOINT.fullmatch(name)):
    return False
  beside = (_CHECKPOINT.fullmatch(each) for each in local if each.endswith(".index"))
  folder, step = posixpath.dirname(name), int(one["step"])
  return any(
    found and posixpath.dirname(found[0]) == folder and int(found["step"]) > step
    for found in beside
  )


def scan(folder: str, *, torn: bool = False) -> dict[str, os.stat_result]:
  """Returns name -> facts of the files in a local folder that belong in the store.

  Args:
    torn: whether to include parts of checkpoints and exports.
  """
  found = {}
  for parent, _, names in os.walk(folder):
    inside = os.path.relpath(parent, folder)
    for name in names:
      path = posixpath.normpath(posixpath.join(inside, name))
      with contextlib.suppress(FileNotFoundError):
        if is_kept(path) and not os.path.islink(os.path.join(parent, name)):
          found[path] = os.stat(os.path.join(parent, name))
  return found if torn else {name: found[name] for name in whole(found)}


def stat(facts: os.stat_result) -> Stat:
  """Returns facts that change when a local file changes."""
  return facts.st_size, facts.st_mtime_ns


class Mirror:
  """Uploads what changed in a local folder, in a thread beside the training."""

  def __init__(
    self,
    store: Store,
    record: Record,
    *,
    require: Callable[[], None] = lambda: None,
    only: str = "",
  ) -> None:
    """Starts nothing yet.

    Args:
      require: raises a ConfigError if the run folder in the store belongs to another process now.
      only: the beginning of the names that are mirrored.
    """
    self._store, self._record, self._require, self._only = store, record, require, only
    self._wanted, self._ending = threading.Event(), threading.Event()
    self._give_up_at = float("inf")
    self._failed: Exception | None = None
    self._thread = threading.Thread(target=self._run, name="loopwright-mirror", daemon=True)

  def start(self) -> None:
    """Starts the thread, which waits for `changed`."""
    self._thread.start()

  def changed(self) -> None:
    """Says that there is something to upload; returns at once (any thread)."""
    self._wanted.set()

  def finish(self) -> Exception | None:
    """Waits until the store has everything; after `GIVE_UP_S` returns why it does not (host).

    SIGTERM does not interrupt it, a second Ctrl-C does.
    """
    self._give_up_at = time.monotonic() + GIVE_UP_S
    self._ending.set()
    self._wanted.set()
    waiting = f"Ctrl-C: uploading to {self._store.url}; press it again to end at once"
    with signals.StopSignals().noticed(lambda _: logging.warning("%s", waiting)):
      self._thread.join()
    return self._failed

  def push(self) -> None:
    """Uploads what has changed since the last time, and removes what is gone (host).

    Raises:
      StoreError: the store fails; a part may be uploaded, and is whole for readers.
      ConfigError: the store belongs to another process.
    """
    self._require()
    with self._snapshot() as (frozen, local):
      known = self._record.files
      changed = {n for n in local if n not in known or known[n].local != local[n]}
      self._remove([n for n in changed if n.endswith(f"/{_MODEL}") and n in known])
      for _, names in itertools.groupby(sorted(changed, key=_rank), key=_rank):
        group = list(names)
        self._require()
        self._store.put_all(group, frozen)
        known.update({name: Known(local[name], "") for name in group})
      gone = [n for n in known if n not in local and n.startswith(self._only)]
      self._remove([n for n in gone if n.endswith((".index", *_LAST))])
      self._remove([n for n in gone if n in known and not n.endswith(f"/{_MARK}")])
      self._remove([n for n in gone if n in known])
      if changed or gone:
        self._record.settle(self._store.files())

  def _remove(self, names: list[str]) -> None:
    self._store.remove(names)
    for name in names:
      del self._record.files[name]

  @contextlib.contextmanager
  def _snapshot(self) -> Iterator[tuple[str, dict[str, Stat]]]:
    """Gives the folder as it is at one instant: of what has changed, links to the files."""
    frozen = os.path.join(os.path.dirname(self._record.folder), "outgoing")
    try:
      for _ in range(_TRIES):
        shutil.rmtree(frozen, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # a file was removed in the meantime
          before = self._scan()
          local = {name: self._freeze(name, facts, frozen) for name, facts in before.items()}
          if _places(before) == _places(self._scan()):
            yield frozen, local
            return
        time.sleep(0.01)
      raise StoreError(f"{self._record.folder} changes too often to be read")
    finally:
      shutil.rmtree(frozen, ignore_errors=True)

  def _scan(self) -> dict[str, os.stat_result]:
    found = scan(self._record.folder)
    return {name: facts for name, facts in found.items() if name.startswith(self._only)}

  def _freeze(self, name: str, facts: os.stat_result, frozen: str) -> Stat:
    known, now = self._record.files.get(name), stat(facts)
    if known is None or known.local != now:
      source, target = os.path.join(self._record.folder, name), os.path.join(frozen, name)
      os.makedirs(os.path.dirname(target), exist_ok=True)
      if name.endswith(".jsonl"):  # it grows: no line may be newer than what is uploaded before it
        shutil.copyfile(source, target)
        return os.stat(target).st_size, now[1]
      try:
        os.link(source, target)
      except OSError:  # a file system without links
        shutil.copyfile(source, target)
    return now

  def _run(self) -> None:
    delay = RETRY_S
    while self._wanted.wait():
      last = self._ending.is_set()
      self._wanted.clear()
      try:
        self.push()
      except ConfigError as error:
        self._failed = error
        return
      except Exception as error:
        self._report(error)
        if last and time.monotonic() + delay > self._give_up_at:
          return
        self._wait(delay)
        delay = min(2 * delay, LONGEST_RETRY_S if not last else RETRY_S)
        self._wanted.set()
        continue
      if self._failed:
        logging.warning("%s answers again and is up to date", self._store.url)
      self._failed, delay = None, RETRY_S
      if last:
        return

  def _wait(self, delay_s: float) -> None:
    if self._ending.is_set():
      time.sleep(delay_s)
    else:
      self._ending.wait(delay_s)

  def _report(self, error: Exception) -> None:
    if self._failed is None:
      logging.warning(
        "cannot write to %s (%s); the run goes on in %s and is uploaded when the store answers",
        self._store.url, error, self._record.folder,
      )  # fmt: skip
    self._failed = error


def _places(found: dict[str, os.stat_result]) -> dict[str, int]:
  return {name: facts.st_ino for name, facts in found.items()}


def _rank(name: str) -> int:
  folder, _, base = name.rpartition("/")
  if name.endswith(f"/{_MARK}"):
    return 0
  if name == layout.METRICS:
    return 5
  rank = 2 if base.endswith(".index") else 3 if base in _LAST else 4 if base == "checkpoint" else 1
  return rank if folder != layout.CHECKPOINTS else {2: 7, 4: 8}.get(rank, 6)
