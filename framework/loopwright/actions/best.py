"""Actions that compare evaluations: keep or export the best one, stop early."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import tensorflow as tf

from loopwright.actions.base import Action, Output, Run, StopTraining
from loopwright.errors import ConfigError, require_integer, unknown
from loopwright.host import files
from loopwright.options.declaration import COUNT
from loopwright.reporting.progress import named
from loopwright.run_folder import folders, layout
from loopwright.run_folder.checkpoint_files import PREFIX, write_state, write_with_the_chief
from loopwright.run_folder.metrics_log import flatten, scalars

Mode = Literal["max", "min"]


@dataclasses.dataclass(frozen=True)
class Goal:
  """A metric, and what is best of it."""

  metric: str
  mode: Mode

  @classmethod
  def of(cls, action: Action, metric: str, mode: Mode | None) -> Goal:
    """Returns the goal of an action; without a mode that of a loss or an accuracy.

    Raises:
      ConfigError: `mode` is neither "max" nor "min", or missing and the name does not tell.
    """
    if mode is None and not (best := folders.direction(metric)):
      raise ConfigError(
        f"{type(action).__name__}.metric is {metric!r}, of which more or less may be better; set "
        f"{type(action).__name__}.mode to 'max' or 'min'."
      )
    if mode not in (None, "max", "min"):
      raise unknown("mode", mode, ("max", "min"))
    return cls(metric, cast(Mode, mode or best))

  def value(self, output: Output, who: str) -> float:
    """Returns the metric's value; nested names are joined by "/".

    Args:
      output: of an evaluation.
      who: the action that an error names.

    Raises:
      ConfigError: `output` has no such metric, or it is an array.
    """
    values = scalars(flatten(output))
    if self.metric not in values:
      raise unknown(f"{who}.metric", self.metric, values)
    return float(values[self.metric])

  def better(self, value: float, best: float | None, *, by: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `by`; a value that is not finite beats nothing."""
    if not math.isfinite(value):
      return False
    if best is None:
      return True
    return value - best > by if self.mode == "max" else best - value > by

  def best(self, values: Sequence[float]) -> float | None:
    """Returns the best finite value, or None."""
    finite = [value for value in values if math.isfinite(value)]
    return None if not finite else max(finite) if self.mode == "max" else min(finite)


class MetricHistory(Action):
  """Keeps one metric of all evaluations: those in metrics.jsonl, then those of this process."""

  on = "eval"

  def __init__(self, *, metric: str = "loss", mode: Mode | None = None) -> None:
    """Sets the metric to compare; reads nothing until `begin` or the first call.

    Args:
      metric: its name among the evaluation's values ("a/b" if nested).
      mode: "max" if more is better, "min" if less is; None: less of a loss, more of an accuracy.

    Raises:
      ConfigError: another `mode`, or none for a metric of another name.
    """
    self._goal = Goal.of(self, metric, mode)
    self._values: list[float] | None = None

  def reads(self) -> Mapping[str, str]:
    """Returns the metric."""
    return {"metric": self._goal.metric}

  def begin(self) -> None:
    """Reads the values of all evaluations up to the restored step."""
    self._values = self.recall(before_step=self.run.step + 1)

  def recall(self, *, before_step: int) -> list[float]:
    """Returns the values in metrics.jsonl before a step, one per evaluated step, oldest first."""
    return [value for step, value in self._logged().items() if step < before_step]

  def result(self) -> str:
    """Returns the best evaluation, if it is not the last."""
    logged = self._logged()
    best = self._goal.best(list(logged.values()))
    step = next((step for step, value in logged.items() if value == best), None)
    if best is None or step == max(logged):
      return ""
    return f"best {named(self._goal.metric, best)} at step {step}"

  def _logged(self) -> dict[int, float]:
    """Returns step -> value in metrics.jsonl, in the order of steps."""
    records = self.run.metrics_log.records("eval")
    by_step = {r["step"]: r[self._goal.metric] for r in records if self._goal.metric in r}
    return {step: float(by_step[step]) for step in sorted(by_step)}

  def observe(self, output: Output) -> tuple[float, list[float]]:
    """Returns this evaluation's value, and those of all evaluations before it, oldest first.

    Raises:
      ConfigError: the evaluation has no such metric.
    """
    value = self._goal.value(output, type(self).__name__)
    earlier = self.recall(before_step=self.run.step) if self._values is None else self._values
    self._values = [*earlier, value]
    return value, earlier


class OnBest(MetricHistory):
  """Does something after each evaluation that is better than all before it."""

  def __call__(self, output: Output) -> None:
    """Calls `on_best` if the value is finite and better than those of all earlier evaluations.

    Raises:
      ConfigError: the evaluation has no such metric.
    """
    value, earlier = self.observe(output)
    if self._goal.better(value, self._goal.best(earlier)):
      self.on_best(value)

  def on_best(self, value: float) -> None:
    """Called with the metric's new best value (host)."""
    raise NotImplementedError


class BestCheckpoint(OnBest):
  """Keeps the checkpoint of the best evaluation in <model_dir>/best.

  best.json holds the step, value and checkpoint; `tf.train.latest_checkpoint(<model_dir>/best)`
  finds it. The new checkpoint is complete and on disk before best.json names it, and the old one is
  removed after that. All this comes before the evaluation's line in metrics.jsonl, so a run that
  resumes either finds both or evaluates again.
  """

  def __init__(
    self, *, metric: str = "loss", mode: Mode | None = None, directory: str = layout.BEST
  ) -> None:
    """Sets the metric to compare and where to keep the checkpoint.

    Args:
      metric: its name among the evaluation's values ("a/b" if nested).
      mode: "max" if more is better, "min" if less is; None: less of a loss, more of an accuracy.
      directory: a folder in <model_dir>, of this action alone.

    Raises:
      ConfigError: another `mode`, none for a metric of another name, or `directory` is not a plain
        name.
    """
    super().__init__(metric=metric, mode=mode)
    if not re.fullmatch(r"\w[\w.-]*", directory) or directory in layout.FOLDERS:
      raise ConfigError(
        f"BestCheckpoint.directory is {directory!r}; it must be one name, such as 'best_loss', and "
        f"not one of {', '.join(layout.FOLDERS)}."
      )
    self.directory = directory

  def bind(self, run: Run) -> None:
    """Checks the folder before training.

    Raises:
      ConfigError: another BestCheckpoint has the same folder, it is a link, or best.json is not
        from one.
    """
    super().bind(run)
    require_own_directory(self)
    layout.require_no_link(os.path.join(run.model_dir, self.directory))
    self._read()

  def begin(self) -> None:
    """Reads the earlier evaluations; finishes what a kill may have interrupted."""
    super().begin()
    kept = self._read()
    if kept and self.run.is_chief:
      self._tidy(kept["checkpoint"])

  def recall(self, *, before_step: int) -> list[float]:
    """Adds the value in best.json, which may be missing in the log after a kill."""
    kept = self._read() or {"step": before_step}
    same = all(kept.get(k) == v for k, v in dataclasses.asdict(self._goal).items())
    logged = super().recall(before_step=before_step)
    return [*logged, kept["value"]] if same and kept["step"] < before_step else logged

  def on_best(self, value: float) -> None:
    """Saves a checkpoint, names it in best.json and removes the previous one."""
    _ = self.run.checkpoint.save_counter  # created on first use; without it `restore` complains
    if not self.run.is_chief:
      write_with_the_chief(self.run.checkpoint)
      return
    name = self._new_name()
    self.run.checkpoint.write(self._path(name))  # unlike `save`, it does not change save_counter
    self.run.require()
    files.sync_tree(self._path(""))
    record = {"step": self.run.step, **dataclasses.asdict(self._goal), "value": value}
    files.atomic_write(self._path("best.json"), json.dumps({**record, "checkpoint": name}) + "\n")
    self._tidy(name)

  def _new_name(self) -> str:
    """Returns ckpt-<step>, or ckpt-<step>.1 and so on if the step is evaluated again."""
    first = f"{PREFIX}-{self.run.step}"
    names = itertools.chain([first], (f"{first}.{again}" for again in itertools.count(1)))
    return next(name for name in names if not tf.io.gfile.exists(self._path(f"{name}.index")))

  def _tidy(self, best: str) -> None:
    """Makes TensorFlow's state file name `best`; removes all other checkpoints, complete or not."""
    write_state(self._path(""), [best])
    for name in tf.io.gfile.listdir(self._path("")):
      if name.startswith(f"{PREFIX}-") and name.rstrip("/").rsplit(".", 1)[0] != best:
        files.remove(self._path(name.rstrip("/")))

  def _read(self) -> dict[str, Any] | None:
    """Returns best.json, or None if there is none.

    Raises:
      ConfigError: it is not from a BestCheckpoint.
    """
    path = self._path("best.json")
    if not tf.io.gfile.exists(path):
      return None
    with contextlib.suppress(ValueError):
      kept = json.loads(files.read(path))
      if isinstance(kept, dict) and {"step", "value", "checkpoint"} <= kept.keys():
        return kept
    raise ConfigError(f"{path!r} is damaged, or not from a BestCheckpoint; move its folder away.")

  def _path(self, name: str) -> str:
    return os.path.join(self.run.model_dir, self.directory, name)


def require_own_directory(action: Any) -> None:
  """Raises a ConfigError if another action of the same kind has the same directory."""
  kind = type(action)
  for other in action.run.actions:
    if isinstance(other, kind) and other is not action and other.directory == action.directory:
      raise ConfigError(
        f"two {kind.__name__} actions have the directory {action.directory!r}, and would remove "
        f"what the other keeps; bind another one in a scope: second/{kind.__name__}.directory."
      )


class EarlyStopping(MetricHistory):
  """Stops training after `patience` evaluations in a row without improvement of a metric."""

  def __init__(
    self, *, metric: str = "loss", mode: Mode | None = None, patience: Annotated[int, COUNT],
    min_delta: float = 0.0,
  ) -> None:  # fmt: skip
    """Sets when to stop; evaluations before a restart count too.

    Args:
      metric: its name among the evaluation's values ("a/b" if nested).
      mode: "max" if more is better, "min" if less is; None: less of a loss, more of an accuracy.
      patience: evaluations in a row without improvement after which to stop.
      min_delta: an improvement must be larger than this.

    Raises:
      ConfigError: a mode as above, `patience` below 1, or `min_delta` below 0.
    """
    if not min_delta >= 0:
      raise ConfigError(f"EarlyStopping.min_delta is {min_delta}; it must be 0 or more.")
    super().__init__(metric=metric, mode=mode)
    self._patience = require_integer("EarlyStopping.patience", patience, at_least=1)
    self._min_delta = min_delta

  def begin(self) -> None:
    """Reads the earlier evaluations.

    Raises:
      StopTraining: they already used up the patience, so a stopped run stays stopped.
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
