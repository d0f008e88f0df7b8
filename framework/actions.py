"""What may happen after a loop or an evaluation: keep the best, stop early or on NaN, export.

An action is called by Orbit's Controller with the values of a loop (`on = "train"`) or of an
evaluation (`on = "eval"`), before these are written to metrics.jsonl. To write one's own:

    class Beep(Action):
      on = "eval"

      def __call__(self, output):
        print("\\a", output["accuracy"])

None of `orbit.actions` does for the ones below: NewBestMetric keeps a file of its own, which knows
nothing of a restart from an earlier checkpoint, and ExportSavedModel can leave half an export.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orbit
import tensorflow as tf
from absl import logging
from tensorflow.python.ops import lookup_ops

from framework import forensics, models
from framework.errors import ConfigError, unknown
from framework.reporting import MetricsLog, atomic_write, flatten
from framework.trainer import Trainer

if TYPE_CHECKING:
  from framework.task import Task

Mode = Literal["max", "min"]
Output = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What an action may use of the run it belongs to.

  Attributes:
    task: its model is built.
    strategy: the strategy in use.
    trainer: None where nothing is trained.
    evaluator: None where nothing is evaluated.
    checkpoint: everything that training needs to go on, already restored.
    metrics_log: the log on disk. Workers other than the chief only read it, so that all decide
      alike: it must be the chief's file.
    global_step: int64 scalar, training steps completed.
    model_dir: the run folder.
    replay_command: what shows the step again at which `StopOnNonFinite` has stopped.
    is_chief: whether this process writes to the run folder.
    message: tells the user some lines, above the line of progress.
    evaluated_weights: makes a context in which the model holds the weights that evaluations use:
      the moving average, if there is one.
  """

  task: Task
  strategy: tf.distribute.Strategy
  trainer: orbit.AbstractTrainer | None
  evaluator: orbit.AbstractEvaluator | None
  checkpoint: tf.train.Checkpoint
  metrics_log: MetricsLog
  global_step: tf.Variable
  model_dir: str
  replay_command: str = ""
  is_chief: bool = True
  message: Callable[[str], None] = print
  evaluated_weights: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

  @property
  def step(self) -> int:
    """How many training steps are completed (host)."""
    return int(self.global_step.numpy())


class StopTraining(Exception):  # noqa: N818 (it is no error)
  """Raised by an action to end training in good order; the run succeeds.

  Attributes:
    reason: one line for the user.
    output: the values the action was called with. Orbit writes them after its actions, so whoever
      catches this still has to.
  """

  def __init__(self, reason: str, output: Output | None = None) -> None:
    """Keeps both."""
    super().__init__(reason)
    self.reason = reason
    self.output = dict(output or {})


class NonFiniteLoss(RuntimeError):  # noqa: N818 (it reads as what happened)
  """The loss or a gradient became NaN or infinite: a failure, in one line: where, what to try."""


class Action:
  """Something to do after each training loop or each evaluation; subclass it.

  Attributes:
    on: "train" or "eval".
    run: set by `bind`.
  """

  on: ClassVar[Literal["train", "eval"]]
  run: Run

  def bind(self, run: Run) -> None:
    """Called once by the framework, when the run is assembled (host)."""
    self.run = run

  def begin(self) -> None:
    """Called once before the first training step, all being restored (host).

    Raises:
      StopTraining: an earlier process had already come to the end.
    """

  def loop_ends(self) -> Sequence[int]:
    """Returns steps at which a training loop must end, whatever `run.steps_per_loop` (host)."""
    return ()

  def end(self) -> None:
    """Called once when training is over and saved, or has failed, in this process (host).

    `begin` may not have been called; other workers may be gone.
    """

  def __call__(self, output: Output) -> None:
    """Called with the loop's or the evaluation's values, which may be tensors or nested (host)."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Goal:
  """A metric and which way is better.

  Raises:
    ConfigError: `mode` is neither "max" nor "min".
  """

  metric: str
  mode: Mode

  def __post_init__(self) -> None:
    """Checks the mode."""
    if self.mode not in ("max", "min"):
      raise unknown("mode", self.mode, ("max", "min"))

  def value(self, output: Output) -> float:
    """Returns the metric's value; nested names are joined by "/".

    Raises:
      ConfigError: `output` has no such metric.
    """
    values = flatten(output)
    if self.metric not in values:
      raise unknown("metric", self.metric, values)
    return float(values[self.metric])

  def better(self, value: float, best: float | None, *, by: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `by`; one that is not finite beats nothing."""
    if not math.isfinite(value):
      return False
    if best is None:
      return True
    return value - best > by if self.mode == "max" else best - value > by

  def best(self, values: Sequence[float]) -> float | None:
    """Returns the best finite value, None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return None if not finite else max(finite) if self.mode == "max" else min(finite)


class Watch(Action):
  """Knows one metric of all evaluations: those in metrics.jsonl, then those of this process."""

  on = "eval"

  def __init__(self, goal: Goal) -> None:
    """Knows nothing until `begin` or the first call."""
    self._goal = goal
    self._values: list[float] | None = None

  def begin(self) -> None:
    """Recalls the evaluations up to the restored step."""
    self._values = self.recall(before_step=self.run.step + 1)

  def recall(self, *, before_step: int) -> list[float]:
    """Returns the values in metrics.jsonl, one an evaluated step, oldest first."""
    records = self.run.metrics_log.records("eval")
    by_step = {r["step"]: r[self._goal.metric] for r in records if self._goal.metric in r}
    return [float(by_step[step]) for step in sorted(by_step) if step < before_step]

  def observe(self, output: Output) -> tuple[float, list[float]]:
    """Returns this evaluation's value and, oldest first, those of all before it.

    Raises:
      ConfigError: the evaluation has no such metric.
    """
    value = self._goal.value(output)
    earlier = self.recall(before_step=self.run.step) if self._values is None else self._values
    self._values = [*earlier, value]
    return value, earlier


class OnBest(Watch):
  """Does something after each evaluation that is better than every earlier one."""

  def __init__(self, *, metric: str = "accuracy", mode: Mode = "max") -> None:
    """Compares by `metric`, a name in the evaluation's values ("a/b" where nested).

    Args:
      metric: the name.
      mode: "max" if more is better, "min" if less is.

    Raises:
      ConfigError: `mode` is something else.
    """
    super().__init__(Goal(metric, mode))

  def __call__(self, output: Output) -> None:
    """Calls `on_best` if there was no better or equal evaluation; one that is not finite never is.

    Raises:
      ConfigError: the evaluation has no such metric.
    """
    value, earlier = self.observe(output)
    if self._goal.better(value, self._goal.best(earlier)):
      self.on_best(value)

  def on_best(self, value: float) -> None:
    """What to do (host); `value` is the metric's."""
    raise NotImplementedError


class BestCheckpoint(OnBest):
  """Keeps the checkpoint of the best evaluation so far in <model_dir>/best.

  best.json says which step, value and checkpoint; `tf.train.latest_checkpoint(<model_dir>/best)`
  finds it. The new best is complete before best.json names it, and only then does the old one go.
  """

  def begin(self) -> None:
    """Recalls the evaluations, and finishes what a kill may have cut short."""
    super().begin()
    kept = self._read()
    if kept and self.run.is_chief:
      self._tidy(kept["checkpoint"])

  def recall(self, *, before_step: int) -> list[float]:
    """Adds best.json's value, which a kill may have kept from the log."""
    kept = self._read() or {}
    same = all(kept.get(k) == v for k, v in dataclasses.asdict(self._goal).items())
    logged = super().recall(before_step=before_step)
    return [*logged, kept["value"]] if same else logged

  def on_best(self, value: float) -> None:
    """Saves a checkpoint, names it in best.json, removes the one before."""
    if not self.run.is_chief:  # every worker takes part in reading distributed variables
      with tempfile.TemporaryDirectory() as scratch:
        self._write(os.path.join(scratch, "ckpt"))
      return
    name = self._new_name()
    self._write(self._path(name))
    record = {"step": self.run.step, **dataclasses.asdict(self._goal), "value": value}
    atomic_write(self._path("best.json"), json.dumps({**record, "checkpoint": name}) + "\n")
    self._tidy(name)

  def _write(self, path: str) -> None:
    _ = self.run.checkpoint.save_counter  # made at first use; `restore` misses it in the file
    self.run.checkpoint.write(path)  # unlike `save`, it counts nothing

  def _new_name(self) -> str:
    """Returns ckpt-<step>, or ckpt-<step>.1 and so on where a step is evaluated again."""
    first = f"ckpt-{self.run.step}"
    names = itertools.chain([first], (f"{first}.{again}" for again in itertools.count(1)))
    return next(name for name in names if not tf.io.gfile.exists(self._path(f"{name}.index")))

  def _tidy(self, best: str) -> None:
    """Makes TensorFlow's state file point to `best` and removes all others, torn ones included."""
    state = f'model_checkpoint_path: "{best}"\nall_model_checkpoint_paths: "{best}"\n'
    atomic_write(self._path("checkpoint"), state)
    for name in tf.io.gfile.listdir(self._path("")):
      if name.startswith("ckpt-") and name.rstrip("/").rsplit(".", 1)[0] != best:
        tf.io.gfile.rmtree(self._path(name))

  def _read(self) -> dict[str, Any] | None:
    if not tf.io.gfile.exists(self._path("best.json")):
      return None
    with tf.io.gfile.GFile(self._path("best.json")) as file:
      return json.loads(file.read())

  def _path(self, name: str) -> str:
    return os.path.join(self.run.model_dir, "best", name)


class EarlyStopping(Watch):
  """Stops training once an evaluation metric has not improved for `patience` evaluations."""

  def __init__(
    self, *, metric: str = "loss", mode: Mode = "min", patience: int, min_delta: float = 0.0
  ) -> None:
    """Counts evaluations, those before a restart included.

    Args:
      metric: a name in the evaluation's values ("a/b" where nested).
      mode: "max" if more is better, "min" if less is.
      patience: stop at this many evaluations in a row without improvement.
      min_delta: an improvement must be more than this.

    Raises:
      ConfigError: an unknown mode, `patience` below 1, or `min_delta` below 0.
    """
    if patience < 1:
      raise ConfigError(f"EarlyStopping.patience is {patience}; it must be 1 evaluation or more.")
    if not min_delta >= 0:
      raise ConfigError(f"EarlyStopping.min_delta is {min_delta}; it must be 0 or more.")
    super().__init__(Goal(metric, mode))
    self._patience = patience
    self._min_delta = min_delta

  def begin(self) -> None:
    """Recalls the evaluations up to the restored step.

    Raises:
      StopTraining: they already say to stop, so a run that has stopped stays so.
    """
    super().begin()
    self._stop_if_stalled({})

  def __call__(self, output: Output) -> None:
    """Counts this evaluation.

    Raises:
      StopTraining: the patience is used up.
      ConfigError: the evaluation has no such metric.
    """
    self.observe(output)
    self._stop_if_stalled(output)

  def _stop_if_stalled(self, output: Output) -> None:
    best, waited = None, 0
    for value in self._values or ():
      improved = self._goal.better(value, best, by=self._min_delta)
      best, waited = (value, 0) if improved else (best, waited + 1)
    if waited >= self._patience:
      wanted = "finite" if best is None else f"better than {best:g}"
      evaluations = f"{waited} evaluation{'' if waited == 1 else 's'}"
      raise StopTraining(
        f"eval {self._goal.metric} has not been {wanted} for {evaluations} "
        f"(patience {self._patience})",
        output,
      )


class StopOnNonFinite(Action):
  """Fails the run at the first NaN or infinity, and tells where it came from; deletes nothing.

  The loop stops before the first step with a loss, or without dynamic loss scaling a reduced
  gradient, that is not finite. The state before it and a report, of replicas, variables and
  examples, are left in <model_dir>/nonfinite; see framework/forensics.py.
  """

  on = "train"

  def __init__(self, *, forensics: bool = True) -> None:
    """Chooses how much to do.

    Args:
      forensics: False, or under parameter servers, stops only after the loop in which the loss was
        not finite, and tells only the step.
    """
    self._forensics = forensics

  def bind(self, run: Run) -> None:
    """Has the trainer watch its steps."""
    super().bind(run)
    trainer = run.trainer
    if not self._forensics or not isinstance(trainer, Trainer):
      return
    if trainer.watchable:
      trainer.watch_nonfinite(lambda: self._examine(trainer))
    else:
      logging.warning("StopOnNonFinite tells no more than the step under parameter_server")

  def _examine(self, trainer: Trainer) -> None:
    """Saves the step that the trainer stands before, reports on it, and fails the run."""
    forensics.save(self.run.checkpoint, self.run.model_dir, is_chief=self.run.is_chief)
    try:
      report = forensics.examine(trainer)
    except tf.errors.OpError as error:  # such as memory that is too small to run eagerly
      raise self._failure("loss or a gradient", self.run.step + 1) from error
    print(report, file=sys.stderr)
    if self.run.is_chief:
      forensics.save_report(report, self.run.model_dir)
    trainer.cluster.barrier()  # the first process to fail may end the others
    what = "loss" if any(f.is_loss for f in report.findings) else "gradients"
    raise self._failure(what, report.step, f"; replay the step: {self.run.replay_command}")

  def __call__(self, output: Output) -> None:
    """Looks at the trainer's "nonfinite_step": the first such step; absent or -1 if there is none.

    Raises:
      NonFiniteLoss: there was one.
    """
    step = int(output.get("nonfinite_step", -1))
    if step >= 0:
      raise self._failure("loss", step)

  def _failure(self, what: str, step: int, replay: str = "") -> NonFiniteLoss:
    return NonFiniteLoss(
      f"the {what} became NaN or infinite at step {step}. Try a lower learning rate or a warm-up, "
      "Trainer.clip_norm, float32 precision or Trainer.loss_scale; checkpoints of earlier steps "
      f"are in {os.path.join(self.run.model_dir, 'checkpoints')}{replay or '.'}"
    )


class Export(OnBest):
  """Exports a SavedModel of the best evaluation so far; see `export`."""

  def __init__(
    self, *, metric: str = "accuracy", mode: Mode = "max", directory: str | None = None
  ) -> None:
    """Exports to `directory`, always the same one.

    Args:
      metric: a name in the evaluation's values ("a/b" where nested).
      mode: "max" if more is better, "min" if less is.
      directory: None is <model_dir>/export.

    Raises:
      ConfigError: an unknown mode.
    """
    super().__init__(metric=metric, mode=mode)
    self._directory = directory

  def on_best(self, value: float) -> None:
    """Exports the weights that were evaluated."""
    directory = self._directory or os.path.join(self.run.model_dir, "export")
    with self.run.evaluated_weights():
      export(self.run.task, directory, is_chief=self.run.is_chief)


def export(task: Task, directory: str, *, is_chief: bool = True) -> None:
  """Writes what `task.export_signature()` serves as a SavedModel (host).

  Signatures may use lookup tables and a `tf.Module` that are attributes of the task.

  It is written beside `directory` and then renamed, so that a reader finds a whole one or, for
  the instant between two renames where an older one is replaced, none.

  Args:
    task: with its model built; `export_signature` returns a `tf.function` with an input signature,
      or a dict name -> `tf.function`. A single one is served as "serving_default".
    directory: what to load from.
    is_chief: False on the other workers of a cluster, which must take part but keep nothing.

  Raises:
    ConfigError: a signature is not a `tf.function` with an input signature.
  """
  signatures = _signatures(task)
  module = tf.Module()
  module.model = task.model
  # Keras 3 does not track the seeds of random layers, which an LSTM reads even when it serves.
  module.variables_of_model = [models.raw(each) for each in models.all_variables(task.model)]
  module.held = [each for each in vars(task).values() if _is_served(each)]
  if not is_chief:
    with tempfile.TemporaryDirectory() as scratch:
      tf.saved_model.save(module, scratch, signatures=signatures)
    return
  directory = directory.rstrip("/")
  _mend(directory)
  tf.saved_model.save(module, f"{directory}.new", signatures=signatures)
  _swap(directory)


def _is_served(held: Any) -> bool:
  kinds = (tf.Module, lookup_ops.LookupInterface)
  return isinstance(held, kinds) and not models.is_keras(held)


def _signatures(task: Task) -> dict[str, Callable[..., Any]]:
  signature = task.export_signature()
  named = signature if isinstance(signature, Mapping) else {"serving_default": signature}
  for name, function in named.items():
    if getattr(function, "input_signature", None) is None:
      raise ConfigError(
        f"{type(task).__name__}.export_signature() gives {function!r} for {name!r}; it must be a "
        "tf.function with an input_signature: @tf.function(input_signature=[tf.TensorSpec(...)])."
      )
  return dict(named)


def _swap(directory: str) -> None:
  if tf.io.gfile.exists(directory):
    tf.io.gfile.rename(directory, f"{directory}.old")
  tf.io.gfile.rename(f"{directory}.new", directory)
  _mend(directory)


def _mend(directory: str) -> None:
  """Takes back the old export if a kill came between the renames; removes any other remains."""
  if tf.io.gfile.exists(f"{directory}.old") and not tf.io.gfile.exists(directory):
    tf.io.gfile.rename(f"{directory}.old", directory)
  for remains in (f"{directory}.old", f"{directory}.new"):
    if tf.io.gfile.exists(remains):
      tf.io.gfile.rmtree(remains)
