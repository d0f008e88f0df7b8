"""The base of trackers: a thread reads metrics.jsonl and sends each line to the tracker once.

The file is the queue: it is on disk, so what a tracker misses waits there, in this process or until
the next one. Training never waits for the thread. <model_dir>/trackers/<name>.json keeps the
tracker's run id and how far the thread is. A kill can come between a line's arrival and that note.
So after each start and each failure the thread asks the tracker what it has, where it can tell.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.errors import ConfigError, Preempted, first_line, require_positive
from loopwright.host import files
from loopwright.host.json_lines import Record
from loopwright.run_folder import layout
from loopwright.run_folder.checkpoint_files import list_checkpoints
from loopwright.run_folder.metrics_log import Number, scalars

Status = Literal["finished", "failed", "killed"]

POLL_S = 1.0
"""How often the thread looks for new lines."""
PICTURES_S = 10.0
"""How often the thread looks for new pictures: it lists a folder."""
_AT_ONCE = 2**16
"""About how many bytes of metrics.jsonl one call of `log` gets."""
_LONGEST_PAUSE_S = 60.0
_PREEMPTED_WAIT_S = 5.0
_RESERVED = ("step", "split", "wall_time")
_PICTURE = re.compile(r"(.+)-(\d+)\.png")


@dataclasses.dataclass
class Kept:
  """What a tracker keeps of a run in its file.

  Attributes:
    id: made once for a run folder, before the tracker has heard of the run.
    run: the tracker's own id, "" until it has made one.
    sent: split -> the last step that was sent.
    pictures: [last step whose pictures were sent, the names of this step's].
    uploaded: the step whose files were uploaded at the end of the run.
  """

  id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
  run: str = ""
  sent: dict[str, int] = dataclasses.field(default_factory=dict)
  pictures: list[Any] = dataclasses.field(default_factory=lambda: [-1, []])
  uploaded: int = -1


class Tracker(Action):
  """Sends a run's config, metrics, pictures and files to a tracker; see docs/trackers.md.

  A subclass defines `connect`, `log` and what else its tracker can do. These methods run in one
  thread of the chief. Whatever they raise becomes one line for the user; the thread tries again.
  """

  on = "both"
  package: ClassVar[str] = ""
  """What the subclass imports, at first use."""
  install: ClassVar[str] = ""
  """The packages to install for it."""

  def __init__(self, *, wait_s: float = 30.0, upload: Sequence[str] = ()) -> None:
    """Sets what happens at the end of the run.

    Args:
      wait_s: the most seconds that the end of the run waits for what is not sent yet.
      upload: files and folders of the run folder to upload when training is over.

    Raises:
      ConfigError: `wait_s` is not above 0, or `upload` is no list of names in the run folder.
    """
    require_positive(f"{type(self).__name__}.wait_s", wait_s, unit="seconds")
    if isinstance(upload, str) or any(os.path.isabs(u) or ".." in u.split("/") for u in upload):
      raise ConfigError(
        f"{type(self).__name__}.upload is {upload!r}; it must be a list of files and folders of "
        "the run folder, such as ['export', 'best']."
      )
    self.wait_s, self.upload = wait_s, tuple(upload)
    self.kept = Kept()
    self._sender: Sender | None = None

  def connect(self) -> None:
    """Finds or makes this run at the tracker; sends its config.

    Called before everything else, and again after an error. Sets `kept.run`.
    """
    raise NotImplementedError

  def held(self) -> Mapping[str, int]:
    """Returns split -> the last step that the tracker has; called after `connect`."""
    return self.kept.sent

  def log(self, records: Sequence[Record]) -> None:
    """Sends records of metrics.jsonl, each later than `held`, in file order."""
    raise NotImplementedError

  def show(self, name: str, step: int, path: str) -> None:
    """Sends a picture, the PNG file at `path`."""

  def close(self, status: Status, uploads: Mapping[str, str]) -> None:
    """Sends what is left, uploads name -> path, and ends the tracker's run."""

  def abandon(self) -> None:
    """Removes what would keep this process alive until everything is sent (host)."""

  def bind(self, run: Run) -> None:
    """Checks that the tracker's package is there.

    Raises:
      ConfigError: it is not.
    """
    super().bind(run)
    if self.package and importlib.util.find_spec(self.package) is None:
      raise ConfigError(
        f"run.actions has @{type(self).__name__}(), but the package {self.package!r} is not "
        f"installed; run: pip install {self.install}"
      )

  def begin(self) -> None:
    """Starts the thread."""
    if self.run.is_chief:
      self._sender = Sender(self)
      self._sender.start()

  def __call__(self, output: Output) -> None:
    """Prints what the thread has to say; the thread itself reads metrics.jsonl."""
    if self._sender is not None:
      self._sender.speak()

  def end(self) -> None:
    """Waits until everything is sent, at most `wait_s`, or 5 s if a signal ends the run."""
    if self._sender is not None:
      self._sender.finish(self.wait_s)
      self._sender.speak()
      self._sender = None

  @property
  def run_name(self) -> str:
    """The name of the run folder."""
    return os.path.basename(os.path.abspath(self.run.model_dir))

  @property
  def label(self) -> str:
    """The class, with a number if the run has several of it: "MLflow", "MLflow.2"."""
    same = [action for action in self.run.actions if type(action) is type(self)]
    number = next((i for i, action in enumerate(same) if action is self), 0)
    return f"{type(self).__name__}.{number + 1}" if number else type(self).__name__


class Sender:
  """The thread of a tracker."""

  def __init__(self, tracker: Tracker) -> None:
    self._tracker, self._run = tracker, tracker.run
    self._path = os.path.join(self._run.model_dir, layout.TRACKERS, f"{tracker.label}.json")
    self._offset, self._connected, self._failing = 0, False, False
    self._sent: dict[str, int] = {}
    self._looked = -PICTURES_S
    self._lines: collections.deque[str] = collections.deque(maxlen=100)
    self._status: Status = "finished"
    self._over = threading.Event()
    name = f"loopwright-{tracker.label}"
    self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

  def start(self) -> None:
    """Starts the thread (host)."""
    self._thread.start()

  def speak(self) -> None:
    """Prints what the thread has to say, in the thread that prints progress (host)."""
    while self._lines:
      self._run.message(self._lines.popleft())

  def finish(self, wait_s: float) -> None:
    """Returns when everything is sent, or after `wait_s` (host)."""
    error = sys.exc_info()[0]  # of the run, which ends in a `finally`
    killed = error is not None and issubclass(error, (Preempted, KeyboardInterrupt))
    self._status = "killed" if killed else "failed" if error else "finished"
    self._over.set()
    self._thread.join(min(wait_s, _PREEMPTED_WAIT_S) if killed else wait_s)
    if self._thread.is_alive() or self._failing:
      with contextlib.suppress(Exception):  # it uses what belongs to the tracker's package
        self._tracker.abandon()
      last = max(self._tracker.kept.sent.values(), default=0)
      self._say(f"has this run up to step {last}; start the same command again to send the rest")

  def _loop(self) -> None:
    pause = POLL_S
    while True:
      over = self._over.wait(0 if not self._connected and not self._failing else pause)
      try:
        self._send()
        if over:
          self._tracker.close(self._status, self._uploads())
          self._keep(uploaded=self._run.step)
      except BaseException as error:  # also SystemExit, which a tracker may raise
        self._connected = False
        self._fail(error)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
      else:
        self._recover()
        pause = POLL_S
      if over:
        return

  def _send(self) -> None:
    """Sends everything that is new."""
    tracker = self._tracker
    if not self._connected:
      tracker.kept = self._read()
      self._keep()  # the id, before the tracker knows it
      tracker.connect()
      self._keep()
      self._sent, self._offset, self._connected = dict(tracker.held()), 0, True
    while True:
      records, offset = self._run.metrics_log.read_from(self._offset, most=_AT_ONCE)
      if offset == self._offset:
        break
      self._offset = offset
      if new := [record for record in records if self._take(record)]:
        tracker.log(new)
        self._keep(sent=dict(self._sent))
    self._show()

  def _take(self, record: Record) -> bool:
    """Returns whether a record is to be sent, and counts it as sent."""
    split, step = record.get("split"), record["step"]
    if not isinstance(split, str) or step <= self._sent.get(split, -1):
      return False
    self._sent[split] = step
    return True

  def _show(self) -> None:
    """Sends the pictures that are new."""
    now = time.monotonic()
    if now - self._looked < PICTURES_S and not self._over.is_set():
      return
    self._looked = now
    step, names = self._tracker.kept.pictures
    for at, name, path in sorted(pictures(os.path.join(self._run.model_dir, layout.MEDIA))):
      if at > step or (at == step and name not in names):
        self._tracker.show(name, at, path)
        step, names = at, [name] if at > step else [*names, name]
        self._keep(pictures=[step, names])

  def _uploads(self) -> dict[str, str]:
    """Returns name -> path of what is there to upload."""
    if self._status != "finished" or self._tracker.kept.uploaded == self._run.step:
      return {}
    paths = {name: os.path.join(self._run.model_dir, name) for name in self._tracker.upload}
    return {name: path for name, path in paths.items() if tf.io.gfile.exists(path)}

  def _fail(self, error: BaseException) -> None:
    if not self._failing:
      self._failing = True
      reason = textwrap.shorten(without_secrets(first_line(error)), 160, placeholder=" ...")
      self._say(f"fails ({reason}); training goes on, and what it misses is sent later", warn=True)

  def _recover(self) -> None:
    if self._failing:
      self._failing = False
      self._say("has caught up")

  def _say(self, text: str, *, warn: bool = False) -> None:
    self._lines.append(f"{'warning: ' if warn else ''}{self._tracker.label} {text}")

  def _read(self) -> Kept:
    """Returns what the file says; a damaged one starts another run at the tracker."""
    try:
      return Kept(**json.loads(files.read(self._path)))
    except (tf.errors.NotFoundError, ValueError, TypeError):
      return Kept()

  def _keep(self, **changes: Any) -> None:
    kept = dataclasses.replace(self._tracker.kept, **changes)
    self._tracker.kept = kept
    files.make_folder(os.path.dirname(self._path))
    files.atomic_write(self._path, json.dumps(dataclasses.asdict(kept)) + "\n")


def values(record: Record) -> dict[str, Number]:
  """Returns the values of a record that are one number, as "split/name"."""
  named = {name: value for name, value in record.items() if name not in _RESERVED}
  return {f"{record['split']}/{name}": value for name, value in scalars(named).items()}


def pictures(folder: str) -> Iterator[tuple[int, str, str]]:
  """Yields (step, name, path) of the pictures that `Board.image` wrote."""
  if not tf.io.gfile.isdir(folder):
    return
  for parent, _, names in tf.io.gfile.walk(folder):
    for found in names:
      if match := _PICTURE.fullmatch(found):
        path = os.path.join(parent, found)
        name = os.path.relpath(os.path.join(parent, match[1]), folder)
        yield int(match[2]), name, path


def newest_checkpoint(model_dir: str) -> str:
  """Returns the path of the newest complete checkpoint, or ""."""
  return next(reversed(list_checkpoints(os.path.join(model_dir, layout.CHECKPOINTS))), "")


def require_no_password(what: str, url: str | None) -> None:
  """Raises a ConfigError if an address contains a password or a token: files keep the config."""
  parts = urlsplit(url or "")
  if parts.username or parts.password or re.search(r"token|key|password", parts.query, re.I):
    raise ConfigError(
      f"{what} contains a password or token, which the files of the run would keep; write the "
      "address without it, and set it in the environment as the tracker's documentation says."
    )


def without_secrets(text: str) -> str:
  """Returns a text without the user's part of addresses and without keys of the environment."""
  text = re.sub(r"//[^/@\s]+@", "//***@", text)
  text = re.sub(r"(?i)((?:token|key|password)=)[^&\s'\"]+", r"\1***", text)
  for name, value in os.environ.items():
    if re.search(r"TOKEN|KEY|PASSWORD|SECRET", name) and len(value) >= 6:
      text = text.replace(value, "***")
  return text
