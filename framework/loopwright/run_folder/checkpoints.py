"""Checkpoints: written, kept, found and restored; the newest complete one counts."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from absl import logging
from tensorflow.python.trackable import trackable_utils

from loopwright import registry
from loopwright.errors import ConfigError, first_line
from loopwright.graphs.aliases import Variable
from loopwright.host import files
from loopwright.host.timing import timed
from loopwright.run_folder import layout
from loopwright.run_folder.checkpoint_files import (
  PREFIX,
  STATE,
  files_in,
  find,
  list_checkpoints,
  step_of,
  write_state,
  write_with_the_chief,
  written_at,
)
from loopwright.run_folder.layout import UNFINISHED

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

ASSETS = "assets"
"""Label of the assets' digest in a checkpoint; absent if the task has no assets."""
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_NO_DAMAGE = (
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
  tf.errors.PermissionDeniedError,
  tf.errors.ResourceExhaustedError,
  tf.errors.UnauthenticatedError,
  tf.errors.UnavailableError,
)
"""Errors that do not mean that a checkpoint is damaged; they are raised, not skipped."""


class CheckpointManager(tf.train.CheckpointManager):
  """Saves checkpoints that are complete or absent; restores the newest one that is not damaged.

  It keeps only the interface of TensorFlow's manager. That one writes an index file in place and
  trusts its state file; a kill can leave half of the one and make the other wrong. Here a
  checkpoint is written in its own folder and moved, the index file last, and the file names say
  which checkpoints exist. The state file is written for other readers.

  `save` returns when the values are read; training continues while a thread writes them, moves them
  and removes older ones. `wait` returns when it has, and `check` raises what it raised. No value is
  copied to read it: an update of a variable whose value is still being written goes to new memory.
  """

  def __init__(
    self,
    *,
    trainer: Trainer,
    directory: str,
    experiment: Mapping[str, str],
    assets: str = "",
    keep: int = 3,
    logs: Sequence[str] = (),
    before_first: Callable[[], None] | None = None,
    after_each: Callable[[], object] = lambda: None,
    actions: tf.train.experimental.PythonState | None = None,
    start: str = "",
    starts: Callable[[], Collection[str]] | None = None,
    require: Callable[[], None] = lambda: None,
    changed: str = "",
    accept: bool = False,
  ) -> None:
    """Defines what is saved; reads and writes nothing yet.

    Args:
      experiment: labels that must be the same on restore, such as the task's name.
      assets: digest of the task's assets, the same on restore; "" for none.
      keep: how many checkpoints to keep.
      logs: files that are flushed to disk before each checkpoint, so that none is ahead of its log.
      before_first: called on the chief before this process saves for the first time.
      after_each: called when a checkpoint is complete, in the thread that wrote it.
      actions: the state of actions, None for none; a checkpoint without it restores as "".
      start: id of this process in history.jsonl; "" keeps none in checkpoints.
      starts: reads the ids in history.jsonl: a checkpoint of any other start is refused. None
        accepts all; a checkpoint of a version that kept no id is always accepted.
      require: called before a write; raises if the folder no longer belongs to the run.
      changed: the values in which the config differs from that of the checkpoints; "" for none.
      accept: whether what a checkpoint has of the task, and the task does not take, is left out.
    """
    self._trainer, self._require, self._accept = trainer, require, accept
    self._of_run = {
      "experiment": dict(experiment), "assets": assets, "start": start, "starts": starts,
      "changed": changed,
    }  # fmt: skip
    self._directory, self._keep, self._checkpoint_interval = directory, keep, None
    self._logs, self._background = list(logs), files.Background()
    self._before_first, self._after_each = before_first, after_each
    self._saved_step = 0
    self._damaged: dict[str, int] = {}
    texts = {**experiment, ASSETS: assets} if assets else experiment
    labels = {k: tf.Variable(v, trainable=False) for k, v in texts.items()}
    self._checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items(), experiment=labels)
    if actions is not None:
      self._checkpoint.actions = actions
    if start:
      self._checkpoint.start = _Text(start)
    _ = self._checkpoint.save_counter  # created on first use; must exist before the first restore

  def renew(self) -> None:
    """Saves what the trainer has got since this was made; restores it if it was saved (host).

    Raises:
      ConfigError: the restored checkpoint has something that nothing takes, and nobody accepts it.
    """
    for name, item in self._trainer.checkpoint_items().items():
      if not hasattr(self._checkpoint, name):
        setattr(self._checkpoint, name, item)
    self._trainer.state.require_taken(
      self._path(f"{PREFIX}-{self._saved_step}"), accept=self._accept, trains=True
    )

  @property
  def checkpoints(self) -> list[str]:
    """Paths of all complete checkpoints, oldest first."""
    self.wait()
    return list_checkpoints(self._directory)

  @property
  def latest_checkpoint(self) -> str | None:
    """Path of the newest complete checkpoint, or None."""
    return next(reversed(self.checkpoints), None)

  @timed("checkpoints")
  def save(
    self,
    checkpoint_number: int | None = None,
    check_interval: bool = True,
    options: tf.train.CheckpointOptions | None = None,
  ) -> str | None:
    """Saves `ckpt-<global step>` and removes the oldest ones beyond `keep` (host).

    When that is due, saving.py says; the arguments are those of TensorFlow's manager.

    Returns:
      The path, complete after `wait`; None if the step is that of the last save or restore. Under
      parameter servers, which have the values in other processes, it is written on return.

    Raises:
      OSError, tf.errors.OpError: the disk has failed or is full, now or in the last save.
    """
    del checkpoint_number, check_interval
    step = int(self._trainer.global_step.numpy())
    if step == self._saved_step:
      return None
    self.wait()
    self._require()
    if self._trainer.cluster.is_chief:
      if self._before_first is not None:
        self._before_first()
        self._before_first = None
        files.make_folder(self._directory)
        model_dir = os.path.dirname(os.path.abspath(self._directory))
        files.sync(model_dir, os.path.dirname(model_dir))  # which hold the names of new folders
      self._start(step, options)
    else:
      write_with_the_chief(self._checkpoint, options)
    self._saved_step = step
    return self._path(f"{PREFIX}-{step}")

  def tidy(self) -> None:
    """Removes what a killed save left, and checkpoints beyond `keep`, before training (host)."""
    if self._trainer.cluster.is_chief:
      for remains in (UNFINISHED, f"{STATE}.tmp"):
        files.remove(self._path(remains))
      self._sweep(self._saved_step)

  def wait(self) -> None:
    """Waits until the last save is complete and on disk (host).

    Raises:
      OSError, tf.errors.OpError: the disk has failed or is full.
    """
    self._background.wait()

  def check(self) -> None:
    """Raises an error of the last save, as `wait` does, but does not wait (host)."""
    self._background.check()

  def restore_or_initialize(self) -> str | None:
    """Restores the newest complete checkpoint; reports and skips damaged ones (host).

    Returns:
      Its path, or None if there are no checkpoints.

    Raises:
      ConfigError: the checkpoint belongs to another experiment, or all are damaged.
    """
    self._report_unfinished()
    paths: list[str] = []
    while (found := self.checkpoints) != paths:  # again if a trainer has saved in the meantime
      if path := self.restore_newest():
        return path
      paths = found
    if paths:
      raise ConfigError(
        f"all {len(paths)} checkpoints in {self._directory} are damaged; restore the folder from a "
        "good copy, or choose another --model_dir to start afresh."
      )
    return None

  def restore_newest(self, *, after_step: int = -1) -> str | None:
    """Restores the newest complete checkpoint after a step; returns its path, or None.

    A damaged one is reported once, and tried again only after it was written again.
    """
    for path in reversed(self.checkpoints):
      if step_of(path) > after_step and self._restored(path):
        return path
    return None

  def follow(self, *, timeout_s: float | None = None, poll_s: float = 1.0) -> Iterator[str]:
    """Restores each new checkpoint that another process saves, and yields its path.

    If several are new, it takes only the newest complete one.

    Args:
      timeout_s: stop after this many seconds without a new one; None waits without limit.
      poll_s: seconds between two looks at the folder.
    """
    last, since = -1, time.monotonic()
    while timeout_s is None or time.monotonic() - since <= timeout_s:
      if path := self.restore_newest(after_step=last):
        last = step_of(path)
        yield path
        since = time.monotonic()
      else:
        time.sleep(poll_s)

  def restore_from(self, given: str) -> None:
    """Restores the checkpoint that `run.checkpoint` means (host).

    Raises:
      ConfigError: it is missing, damaged, or belongs to another task or model.
    """
    path = find(given)
    if path is None:
      raise ConfigError(
        f"run.checkpoint is {given!r}, where there is no checkpoint; give one without its "
        f"suffix, such as {self._path(f'{PREFIX}-100')}, or a folder that contains one."
      )
    self._of_run["starts"] = None  # the user has named it
    try:
      self.restore(path)
    except tf.errors.OpError as error:
      raise ConfigError(
        f"run.checkpoint {path!r} is damaged ({type(error).__name__}); choose another."
      ) from error

  def restore(self, path: str) -> None:
    """Restores one checkpoint into the trainer, with the input's position (host).

    Raises:
      ConfigError: it belongs to another task or model.
      tf.errors.OpError: it is damaged.
    """
    self.wait()
    try:
      registry.load("part", "Fitting")(
        checkpoint=self._checkpoint, trainer=self._trainer, **self._of_run
      ).restore(path)
    except IndexError as error:  # TensorFlow's reader raises it for a file that is too short
      raise tf.errors.DataLossError(None, None, str(error)) from error
    self._trainer.reset_input()
    self._saved_step = int(self._trainer.global_step.numpy())

  def _restored(self, path: str) -> bool:
    written = written_at(path)
    if written is None or self._damaged.get(path) == written:
      return False
    try:
      self.restore(path)
    except _NO_DAMAGE:
      raise
    except tf.errors.OpError as error:
      if written_at(path) is not None:  # else a trainer has removed it in the meantime
        self._damaged[path] = written
        logging.error("checkpoint %s is damaged (%s); skipping it", path, first_line(error)[:300])
      return False
    return True

  def _report_unfinished(self) -> None:
    newest = max(map(step_of, self.checkpoints), default=-1)
    paths = {
      self._path(f"{PREFIX}-{step}") for step, _, _ in files_in(self._directory) if step > newest
    }
    unfinished = self._path(UNFINISHED)
    for path in [*sorted(paths), *([unfinished] if tf.io.gfile.exists(unfinished) else [])]:
      logging.warning("checkpoint %s is incomplete, as after a kill; ignoring it", path)

  def _start(self, step: int, options: tf.train.CheckpointOptions | None) -> None:
    """Starts to write in a thread; returns when the values are read."""
    options = copy.copy(options or tf.train.CheckpointOptions())
    reading = options.experimental_sharding_callback = _Reading()

    def save() -> None:
      try:
        self._write(options)
      finally:
        reading.ended.set()
      self._require_still()
      self._complete(step)
      self._after_each()

    self._background.start(save)
    reading.ended.wait()

  def _write(self, options: tf.train.CheckpointOptions) -> None:
    """Writes to a separate folder, under one name: TensorFlow keeps 1 kB for each new name."""
    files.remove(self._path(UNFINISHED))
    self._checkpoint.write(os.path.join(self._path(UNFINISHED), PREFIX), options)

  def _require_still(self) -> None:
    """Raises if the folder is no longer the run's; then removes what TensorFlow has made again."""
    try:
      self._require()
    except ConfigError:
      model_dir = os.path.dirname(self._directory)
      if not os.path.exists(os.path.join(model_dir, layout.OWNER)):  # nor another run's
        files.remove(self._path(UNFINISHED))
        for made in (self._directory, model_dir):
          with contextlib.suppress(OSError):  # it has something else in it
            os.rmdir(made)
      raise

  def _complete(self, step: int) -> None:
    """Moves the files from there; the index file last: it makes them count."""
    folder = self._path(UNFINISHED)
    names = sorted(tf.io.gfile.listdir(folder), key=lambda name: name.endswith(".index"))
    files.sync(*self._logs, *(os.path.join(folder, name) for name in names))
    for name in names:
      final = self._path(f"{PREFIX}-{step}{name.removeprefix(PREFIX)}")
      tf.io.gfile.rename(os.path.join(folder, name), final, overwrite=True)
    self._damaged.pop(self._path(f"{PREFIX}-{step}"), None)
    self._sweep(step)
    files.remove(folder)

  def _sweep(self, step: int) -> None:
    """Removes checkpoints beyond `keep` or damaged, and files that a kill left without an index.

    Checkpoints after `step` stay and do not count: since they were not restored, they are damaged,
    or the user went back on purpose.
    """
    past = [path for path in list_checkpoints(self._directory) if step_of(path) <= step]
    kept = [path for path in past if path not in self._damaged][-self._keep :]
    if kept:
      write_state(self._directory, [os.path.basename(path) for path in kept])
    for path in past:
      if path not in kept:
        files.remove(f"{path}.index")
    indexed = set(map(step_of, list_checkpoints(self._directory)))
    for other, _, name in files_in(self._directory):
      if other not in indexed:
        files.remove(self._path(name))

  def _path(self, name: str) -> str:
    return os.path.join(self._directory, name)


class _Text(tf.train.experimental.PythonState):
  """A text in each checkpoint that this process writes, whatever it has restored."""

  def __init__(self, text: str) -> None:
    self._text = text

  def serialize(self) -> str:
    return self._text

  def deserialize(self, _: str) -> None:
    pass


class _Reading(tf.train.experimental.ShardByTaskPolicy):
  """Reads all values that TensorFlow is about to write, into host memory; then sets `ended`."""

  def __init__(self) -> None:
    self.ended = threading.Event()

  def __call__(self, shardable_tensors: Sequence[Any]) -> Any:
    """Returns what TensorFlow's own policy does, which is called with all values of a process."""
    shards = super().__call__(shardable_tensors)
    if not tf.executing_eagerly():  # the values of several processes are read when they are written
      return shards
    with tf.device("CPU"):  # a value may be a variable still
      shards = [tf.nest.map_structure(tf.identity, shard) for shard in shards]
    self.ended.set()
    return shards


def variables_of(root: tf.train.Checkpoint) -> dict[str, Variable]:
  """Returns every variable under `root` by its checkpoint key: the shortest path to it."""
  nodes, paths = tf.train.TrackableView(root)._descendants_with_paths()  # noqa: SLF001
  kinds = (tf.Variable, keras.Variable)
  found = [v for v in nodes if isinstance(v, kinds) or hasattr(v, "saved_shape")]
  return {f"{trackable_utils.object_path_to_string(paths[v])}{VALUE}": v for v in found}
