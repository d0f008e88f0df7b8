"""The base of trackers: an action that gives the values of a run to a tracker's own client.

The client buffers, and sends in the background. <model_dir>/trackers/<class>.json has an id, by
which each start in the run folder finds the tracker's run. A tracker that fails ends no run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal
from urllib.parse import urlsplit

import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.errors import ConfigError, Preempted, first_line
from loopwright.host import files
from loopwright.run_folder import layout
from loopwright.run_folder.metrics_log import Number, flatten, scalars

Status = Literal["finished", "failed", "killed"]

_NOT_SENT = ("step", "split", "wall_time", "steps_per_second")


class Tracker(Action):
  """Sends a run's config, metrics, pictures and files to a tracker; see docs/trackers.md.

  A subclass defines `connect` and `log`, and what else its tracker can do. They run on the chief,
  `close` in a thread of its own. What they raise is a warning, and the last thing that is sent.
  """

  on = "both"
  package: ClassVar[str] = ""
  """What the subclass imports, at first use; the extra that installs it has the same name."""
  uploads: Sequence[str] = ("operative_config.gin", "export")
  """Files and folders of the run folder that are uploaded when training is over."""

  _sends = False

  def connect(self, run_id: str) -> Mapping[str, int] | None:
    """Starts the tracker's run, or continues that of this id; sends its config.

    Returns metric -> the last step that the tracker has; None if nothing is to be sent again.
    """
    raise NotImplementedError

  def log(self, split: str, step: int, wall_time: float, values: Mapping[str, Number]) -> None:
    """Sends the values of one loop or evaluation: "train/loss" -> value."""
    raise NotImplementedError

  def show(self, name: str, step: int, path: str) -> None:
    """Sends a picture, the PNG file at `path`."""

  def close(self, status: Status, uploads: Mapping[str, str]) -> None:
    """Sends what is left, uploads name -> path, and ends the tracker's run."""

  def bind(self, run: Run) -> None:
    """Raises a ConfigError if the tracker's package is not installed (host)."""
    super().bind(run)
    self._label = type(self).__name__
    if self.package and importlib.util.find_spec(self.package) is None:
      raise ConfigError(
        f"run.actions has @{self._label}(), but the package {self.package!r} is not installed; "
        f"run: pip install 'loopwright[{self.package}]'"
      )

  def begin(self) -> None:
    """Connects, and sends what metrics.jsonl has and the tracker has not."""
    self._sends, self._shown = self.run.is_chief, 0
    self._try(self._catch_up)

  def __call__(self, output: Output) -> None:
    """Sends the values, and new pictures."""
    values = scalars(flatten(output))
    self._try(lambda: self._log(self.run.split, self.run.step, time.time(), values))
    self._try(self._show)

  def end(self) -> None:
    """Ends the tracker's run; waits at most 30 s, or 5 s if a signal ends the run."""
    if not self._sends:
      return
    error = sys.exc_info()[0]  # of the run, which ends in a `finally`
    killed = error is not None and issubclass(error, (Preempted, KeyboardInterrupt))
    status: Status = "killed" if killed else "failed" if error else "finished"
    paths = {} if error else {n: os.path.join(self.run.model_dir, n) for n in self.uploads}
    uploads = {name: path for name, path in paths.items() if tf.io.gfile.exists(path)}
    closing = [lambda: self.close(status, uploads)]
    thread = threading.Thread(target=self._try, args=closing, daemon=True)
    thread.start()
    thread.join(5 if killed else 30)
    if thread.is_alive():
      self.run.message(f"warning: {self._label} does not answer; it may lack the last values")

  def _try(self, send: Callable[[], None]) -> None:
    if not self._sends:
      return
    try:
      send()
    except (Exception, SystemExit) as error:  # a client may raise either
      self._sends = False
      reason = textwrap.shorten(without_secrets(first_line(error)), 160, placeholder=" ...")
      self.run.message(
        f"warning: {self._label} fails ({reason}); training goes on without it, and the next start "
        "sends what it lacks"
      )

  def _catch_up(self) -> None:
    held = self.connect(self._id())
    self._held: Mapping[str, int] = held or {}
    for record in self.run.metrics_log.records() if held is not None else ():
      if (split := record.get("split")) in ("train", "eval"):
        values = {name: value for name, value in record.items() if name not in _NOT_SENT}
        self._log(split, record["step"], record["wall_time"], scalars(values))

  def _log(self, split: str, step: int, at: float, values: Mapping[str, Number]) -> None:
    """Logs what the tracker did not have at the start: a restart repeats some steps."""
    named = {allowed(f"{split}/{name}"): value for name, value in values.items()}
    if new := {n: value for n, value in named.items() if step > self._held.get(n, -1)}:
      self.log(split, step, at, new)

  def _show(self) -> None:
    for name, step, path in self.run.board.pictures[self._shown :]:
      self.show(name, step, path)
      self._shown += 1

  def _id(self) -> str:
    path = os.path.join(self.run.model_dir, layout.TRACKERS, f"{self._label}.json")
    try:
      return str(json.loads(files.read(path))["id"])
    except (tf.errors.NotFoundError, ValueError, TypeError, KeyError):  # new, or damaged
      made = uuid.uuid4().hex
      files.make_folder(os.path.dirname(path))
      files.atomic_write(path, json.dumps({"id": made}) + "\n")
      return made


def allowed(name: str) -> str:
  """Returns the name of a metric or parameter with the characters that MLflow allows."""
  return re.sub(r"[^\w\-. /]", "_", name)[:250]


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
