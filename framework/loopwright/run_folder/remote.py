"""Run folders behind a URL: a run works in a local folder, which is mirrored.

  with places.place("s3://bucket/run").opened(training=True, export=False) as at:
    ...  # at.folder is local; at.changed() after each checkpoint

At the start the content of the store counts, unless no other machine has trained there since: then
the local folder has all that the store has, and perhaps more. See docs/remote-folders.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import logging

from loopwright.errors import ConfigError
from loopwright.host import files, stores
from loopwright.host.stores import File, Store, StoreError
from loopwright.run_folder import ownership
from loopwright.run_folder.folders import natural
from loopwright.run_folder.mirror import (
  LINEAGE,
  Known,
  Mirror,
  Record,
  is_kept,
  scan,
  superseded,
  whole,
)
from loopwright.run_folder.mirror import stat as stat_of
from loopwright.run_folder.places import Opened, Place

BEAT_S, PATIENCE_S = 10.0, 60.0
"""As in loopwright/run_folder/ownership.py, for an owner on another machine."""
SETTLE_S = 5.0
"""After a dead owner's place is taken: seconds in which another taker would be seen."""
_SHOWN = ("train/", "eval/", "media/", "profile/", "trackers/", "wandb/", "logs/")
"""Folders that an evaluation or an export does not need."""
_TRIES = 5


class Remote(Place):
  """A run folder behind a URL."""

  def __init__(self, url: str) -> None:
    """Asks the store for its files.

    Raises:
      ConfigError: there is no such bucket, no access, or no library for it.
    """
    self.url, self.store, self.folder = url, Store(url), stores.cache_folder(url, "run")
    with stores.reading(url):
      self._names = whole(self.store.files())

  def checkpoints(self) -> bool:
    """Whether the run had a complete checkpoint at the start."""
    return any(n.startswith("checkpoints/") and n.endswith(".index") for n in self._names)

  def require_one_process(self, workers: int) -> None:
    """Raises a ConfigError for several workers, which share files while they train."""
    if workers > 1:
      raise ConfigError(
        f"model_dir is {self.store.url!r}, which one process works on, but the run has {workers}: "
        "choose a folder on a file system that all workers share."
      )

  @contextlib.contextmanager
  def opened(self, *, training: bool, export: bool) -> Iterator[Opened]:
    """Downloads the run to a local folder and gives it; while training, mirrors it (host).

    Args:
      training: the process owns the run folder, and its files are mirrored until the end.
      export: the process owns nothing; at the end `export/` alone is uploaded.

    Raises:
      ConfigError: another process owns it, or the store cannot be reached.
      StorageError: at the end, the store cannot be reached; nothing local is lost.
    """
    if not training:
      with self._borrowed(export=export) as folder:
        yield Opened(folder, self.url, functools.partial(ownership.require_there, folder))
      return
    with self._owned() as (owner, record):
      mirror = Mirror(self.store, record, require=owner.ask)
      mirror.start()
      try:
        with ownership.explained(owner.require):
          yield Opened(self.folder, self.url, owner.require, mirror.changed)
      except BaseException:
        failed = mirror.finish()
        if failed and not isinstance(failed, ConfigError):
          logging.error("%s", self._behind(failed))
        raise
      if failed := mirror.finish():
        raise failed if isinstance(failed, ConfigError) else self._behind(failed)

  def push(self) -> str:
    """Uploads what the local folder has beyond the store; returns the folder (host).

    Raises:
      ConfigError: there is no local folder, the run has gone on elsewhere, or it is in use.
      StorageError: the store fails.
    """
    if not scan(self.folder):
      raise ConfigError(f"this machine has no local folder of {self.store.url!r} to push.")
    with self._owned(push=True) as (owner, record):
      try:
        Mirror(self.store, record, require=owner.ask).push()
      except (StoreError, FileNotFoundError) as error:
        raise self._behind(error) from error
    return self.folder

  @contextlib.contextmanager
  def _owned(self, *, push: bool = False) -> Iterator[tuple[RemoteOwner, Record]]:
    """Owns the run folder in the `with`, with the local folder made equal to it, or newer."""
    _make(self.folder)
    owner = RemoteOwner(self.store, self.folder)
    with stores.reading(self.store.url):
      owner.claim()
    try:
      record = owner.record
      with stores.reading(self.store.url):
        if self._lineage() == record.cache:
          self._reconcile(record)
        elif push:
          raise ConfigError(
            f"the run in {self.store.url!r} has gone on elsewhere, or was never this machine's; "
            f"{self.folder!r} is not pushed over it."
          )
        else:
          _set_aside(record, self.store.url)
          pull(self.store, record)
          text = json.dumps({"cache": record.cache, "host": os.uname().nodename})
          self.store.write(LINEAGE, text.encode())
        for name in filter(is_kept, self.store.files()):  # what is not here, the next push removes
          record.files.setdefault(name, Known((-1, -1), ""))
      yield owner, record
    finally:
      owner.release()

  @contextlib.contextmanager
  def _borrowed(self, *, export: bool) -> Iterator[str]:
    folder = stores.cache_folder(self.store.url, "copy")
    _make(folder)
    one_at_a_time = files.locked(os.path.join(os.path.dirname(folder), "lock"))
    with one_at_a_time, stores.reading(self.store.url):
      record = Record(folder)
      pull(self.store, record, wanted=lambda name: not name.startswith(_SHOWN))
    yield folder
    if export:
      try:
        Mirror(self.store, record, only="export/").push()
      except (StoreError, FileNotFoundError) as error:
        raise files.StorageError(
          f"cannot write to {self.store.url!r} ({error}); the export is in {folder!r}."
        ) from error

  def _lineage(self) -> str:
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
      return str(json.loads(self.store.read(LINEAGE))["cache"])
    return ""

  def _reconcile(self, record: Record) -> None:
    """Downloads what someone has changed or added in the store, and what is missing here.

    What has changed here since the last upload stays, and is uploaded.
    """
    listing, local = self.store.files(), scan(record.folder)
    for name in whole(listing):
      known, here = record.files.get(name), local.get(name)
      unchanged = known is not None and here is not None and known.local == stat_of(here)
      same = known is not None and known.version == listing[name].version
      if (unchanged and not same) or (here is None and not superseded(name, local)):
        _get_all(self.store, record, [name], listing)
      elif not same:
        record.files.pop(name, None)
    for name in record.files.keys() - listing.keys():
      del record.files[name]

  def _behind(self, error: Exception) -> files.StorageError:
    return files.StorageError(
      f"cannot write to {self.store.url!r} ({error}); the run is whole in {self.folder!r}: when "
      f"the store answers, `loopwright push {self.store.url}` uploads it."
    )


class RemoteOwner(ownership.Owner):
  """The ownership of a run folder in a store, and of the local folder.

  The store has the same record as a folder on disk, and no lock. A new one is made by a conditional
  write, where the store can; a silent one is taken over after `PATIENCE_S`.
  """

  def __init__(self, store: Store, folder: str) -> None:
    super().__init__(folder)
    self._store, self._model_dir, self._folder = store, store.url, folder
    self._here, self.record = ownership.Owner(folder), Record(folder)

  def claim(self) -> None:
    """Waits until both are this process's; then `record` is that of the local folder.

    Raises:
      ConfigError: another process owns one of them.
    """
    self._here.claim()
    try:
      self.record = Record(self._folder)
      self.record.save()
      self._record["cache"] = self.record.cache
      self._take()
    except BaseException:
      self._here.release()
      raise
    self._thread.start()

  def require(self) -> None:
    """As for a folder on disk; for the store, as far as the last beat has found."""
    self._here.require()
    if self._lost is not None:
      raise self._lost

  def ask(self) -> None:
    """As `require`, but asks the store; raises StoreError if it fails."""
    self.require()
    self._require_own()

  def release(self) -> None:
    """Gives both back."""
    super().release()
    self._here.release()

  def _take(self) -> None:
    earlier = self._read()
    if earlier is None:
      try:
        self._store.write(ownership.FILE, self._content(), new=True)
      except FileExistsError:
        raise self._refusal(self._read() or {}) from None
    elif earlier.get("cache") == self.record.cache:  # its local folder is this process's now
      self._write()
    else:
      self._await_death(earlier, None)
      self._write()
      time.sleep(SETTLE_S)
      self._require_own()

  def _times(self) -> tuple[float, float]:
    return BEAT_S, PATIENCE_S

  def _write(self) -> None:
    self._store.write(ownership.FILE, self._content())

  def _load(self) -> bytes:
    with contextlib.suppress(FileNotFoundError):
      return self._store.read(ownership.FILE)
    return b""

  def _remove(self) -> None:
    if self._is_own(self._load()):
      self._store.remove([ownership.FILE])

  def _vanished(self) -> ConfigError:
    return ConfigError(
      f"the run in {self._store.url!r} was removed, at least {ownership.FILE}, while the run "
      f"trained there, so the run has ended and uploads nothing more; it is whole in "
      f"{self._folder!r}: copy that to another place to go on from it."
    )


def pull(store: Store, record: Record, *, wanted: Callable[[str], bool] = is_kept) -> None:
  """Makes a local folder equal to the store; another process may upload to it meanwhile (host)."""
  for _ in range(_TRIES):
    listing = store.files()
    names = set(filter(wanted, whole(listing)))
    local = scan(record.folder, torn=True)
    for name in local.keys() - names:
      os.remove(os.path.join(record.folder, name))
    for parent, *_ in os.walk(record.folder, topdown=False):
      with contextlib.suppress(OSError):  # it is not empty
        os.rmdir(parent)
    _make(record.folder)
    with contextlib.suppress(FileNotFoundError):  # it was removed in the meantime
      _get_all(store, record, [n for n in names if not _same(record, n, listing, local)], listing)
      if _checkpoints(store.files()) == _checkpoints(listing):
        break
  record.files = {name: known for name, known in record.files.items() if name in names}
  record.save()


@functools.cache
def local_copy(path: str) -> str:
  """Returns a local copy of the weights that a URL names; see `places.local_copy` (host).

  Raises:
    ConfigError: there are none, or the store cannot be reached.
  """
  above, name = stores.parent(path)
  with stores.reading(path):
    whole_names = whole(above.files(name))
    beside = whole_names or whole(each for each in above.files() if each.startswith(f"{name}."))
    chosen = _newest(beside, name)
  if not chosen:
    raise ConfigError(f"{path!r} has no weights; give a run folder, a checkpoint or a Keras file.")
  target = stores.cache_folder(path, "weights")
  shutil.rmtree(target, ignore_errors=True)
  with stores.reading(path):
    above.get_all(chosen, target)
  return os.path.join(target, name)


def _newest(names: Iterable[str], top: str) -> list[str]:
  """Returns the one file, the files of the one checkpoint, or those of a folder's newest one."""
  names = set(names)
  for folder in (f"{top}/checkpoints/", f"{top}/"):
    indexes = [n for n in names if n.startswith(f"{folder}ckpt-") and n.endswith(".index")]
    if indexes:
      stem = max(indexes, key=natural).removesuffix("index")
      return [n for n in names if n.startswith(stem) or n == f"{folder}checkpoint"]
  return sorted(n for n in names if n == top or n.startswith(f"{top}."))


def _make(folder: str) -> None:
  try:
    os.makedirs(folder, mode=0o700, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f"cannot make the local folder {folder!r} ({error.strerror}); set XDG_CACHE_HOME in the "
      "environment to a folder with space for the run."
    ) from error


def _same(record: Record, name: str, listing: dict[str, File], local: dict[str, Any]) -> bool:
  known = record.files.get(name)
  if known is None or name not in local or not known.version:
    return False
  return known == Known(stat_of(local[name]), listing[name].version)


def _get_all(store: Store, record: Record, names: list[str], listing: dict[str, File]) -> None:
  store.get_all(names, record.folder)
  for name in names:
    facts = os.stat(os.path.join(record.folder, name))
    record.files[name] = Known(stat_of(facts), listing[name].version)


def _checkpoints(listing: Iterable[str]) -> set[str]:
  return {name for name in listing if name.endswith(".index")}


def _set_aside(record: Record, url: str) -> None:
  """Moves checkpoints away that were never uploaded, with all that belongs to them."""
  local = scan(record.folder)
  ours = [
    name
    for name, facts in local.items()
    if name.endswith(".index")
    and (name not in record.files or record.files[name].local != stat_of(facts))
  ]
  if not ours:
    return
  beside = os.path.join(os.path.dirname(record.folder), "set-aside")
  numbered = (f"{beside}-{number}" for number in itertools.count(2))
  aside = next(path for path in itertools.chain([beside], numbered) if not os.path.exists(path))
  for name in local:
    target = os.path.join(aside, name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.rename(os.path.join(record.folder, name), target)
  logging.warning(
    "the run in %s has gone on elsewhere; what this machine had not uploaded is in %s", url, aside
  )
