"""Optuna's study: which trial is next, and what each gave. Every change is stored at once."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import uuid
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from loopwright.errors import ConfigError, first_line, unknown
from loopwright.tools.sweep.jobs import Lock
from loopwright.tools.sweep.space import Dimension, Goal

FILE, IDENTITY = "sweep.db", "sweep.id"
OWN, FAILURE = "folder", "failure"
_UNCLAIMED_S = 60.0
"""A trial of a shared storage that has no folder for so long was lost by a kill; we take it."""
DEFAULT_TRIALS = 20

Values = Mapping[str, str]
Direction = Literal["minimize", "maximize"]


class Sampling(NamedTuple):
  """How values are chosen: "tpe", "random", "grid" or "in order", and whether trials are pruned."""

  kind: str
  seed: int
  prune: bool


class Study:
  """A sweep's study in its storage.

  Attributes:
    folder: the sweep folder, with a folder for each trial that runs here.
    space: what varies.
    goal: what is best.
    known: Optuna's study.
  """

  def __init__(
    self,
    folder: str,
    url: str | None,
    space: Sequence[Dimension],
    goal: Goal,
    *,
    bindings: Values,
    sampling: Sampling,
  ) -> None:
    """Makes the study, or opens the one that is there.

    Args:
      folder: its last part is the name of the study.
      url: an Optuna storage; None for a file in the folder.
      space: see the attribute.
      goal: see the attribute.
      bindings: of the config, without what varies.
      sampling: see there.

    Raises:
      ConfigError: the folder or the storage cannot be used, or the study is of something else.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    self.folder, self.space, self.goal = folder, list(space), goal
    self._sampling, self._is_shared = sampling, url is not None
    self._identity = _identity(folder)
    name = os.path.basename(os.path.abspath(folder))
    self._url = url or f"sqlite:///{os.path.join(folder, FILE)}"
    self.known = _opened(name, self._url, goal, sampling)
    self._require_same(
      {
        "--vary": {each.name: str(each) for each in space},
        "goal": {"--metric": goal.metric},
        "config": dict(bindings),
      }
    )

  def total(self, wanted: int | None) -> int:
    """Returns how many trials the sweep is to have."""
    if self._sampling.kind != "grid":
      return wanted or DEFAULT_TRIALS
    size = math.prod(len(each.values) for each in self.space)
    return min(wanted or size, size)

  def trials(self, *states: TrialState) -> list[FrozenTrial]:
    """Returns the trials in these states, by default all, by number."""
    return self.known.get_trials(deepcopy=False, states=states or None)

  def folder_of(self, number: int) -> str:
    """Returns the run folder of a trial."""
    return os.path.join(self.folder, f"trial-{number:04d}")

  def is_full(self, total: int) -> bool:
    """Whether so many trials have begun, on any machine."""
    return len(self.trials()) >= total

  def begun(self) -> Trial:
    """Returns a new trial, which is ours."""
    # A sampler begins anew in each process. Seeded by the trial's number it gives what it would
    # have given without a restart, and never the same again.
    self.known.sampler = self._sampler(len(self.trials()))
    asked = self.known.ask()
    lock = Lock(self.folder_of(asked.number))
    lock.take()
    return Trial(self, asked, lock)

  def in_this_folder(self) -> list[FrozenTrial]:
    """Returns the trials of this sweep folder that have not ended."""
    return [each for each in self.trials(TrialState.RUNNING) if self._is_ours(each)]

  def abandoned(self, besides: Collection[int]) -> Generator[Trial, None, None]:
    """Yields trials of this folder that no process runs any more; they go on.

    Args:
      besides: the numbers of those that this process runs.
    """
    for frozen in self.in_this_folder():
      if frozen.number in besides:
        continue
      lock = Lock(self.folder_of(frozen.number))
      if lock.take() and self._state(frozen.number) == TrialState.RUNNING:
        self.known.sampler = self._sampler(frozen.number)
        yield Trial(self, optuna.Trial(self.known, frozen._trial_id), lock)  # noqa: SLF001
      else:
        lock.close()

  def claim(self, trial: optuna.Trial) -> None:
    """Stores that a trial's folder is in this sweep folder."""
    if trial.user_attrs.get(OWN) != self._identity:
      trial.set_user_attr(OWN, self._identity)

  def require_metric(self, names: Sequence[str]) -> None:
    """Checks that evaluations have the metric; else the sweep can begin anew with another.

    Raises:
      ConfigError: they do not.
    """
    if self.goal.metric in names:
      return
    if not any(each.state.is_finished() for each in self.trials()):
      optuna.delete_study(study_name=self.known.study_name, storage=self._url)
    raise unknown("metric", self.goal.metric, names)

  def _state(self, number: int) -> TrialState:
    return next(each.state for each in self.trials() if each.number == number)

  def _is_ours(self, frozen: FrozenTrial) -> bool:
    if not self._is_shared:
      return True
    if owner := frozen.user_attrs.get(OWN):
      return owner == self._identity
    began = frozen.datetime_start or datetime.datetime.min
    return (datetime.datetime.now() - began).total_seconds() > _UNCLAIMED_S

  def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
    seed = (self._sampling.seed * 1_000_003 + number) % 2**32
    if self._sampling.kind == "random":
      return optuna.samplers.RandomSampler(seed=seed)
    if self._sampling.kind == "in order":
      return _InOrder()
    if self._sampling.kind == "tpe":
      return optuna.samplers.TPESampler(seed=seed)
    values = {each.name: each.values for each in self.space}
    return _Grid(values, seed=self._sampling.seed)

  def _require_same(self, now: Mapping[str, Values]) -> None:
    """Stores what the sweep is of; or compares it with what is stored."""
    stored = self.known.user_attrs
    for part, values in now.items():
      if part not in stored:
        self.known.set_user_attr(part, json.dumps(values))
        continue
      before = json.loads(stored[part])
      for name in sorted({*before, *values}):
        if before.get(name) != values.get(name):
          raise ConfigError(
            f"the sweep in {self.folder!r} has {name} = {before.get(name, '(unset)')}, now "
            f"{values.get(name, '(unset)')}; give a new sweep another --dir, or go on as before."
          )


class _InOrder(optuna.samplers.RandomSampler):
  """The trial's number is its value."""

  def sample_independent(
    self, study: object, trial: FrozenTrial, param_name: str, param_distribution: object
  ) -> int:
    """Returns the number."""
    del study, param_name, param_distribution
    return trial.number


class _Grid(optuna.samplers.GridSampler):
  """The trial's number says which point of the grid it has."""

  def after_trial(self, *unused: object) -> None:
    """Does nothing; Optuna's would stop `Study.optimize`, which we do not use."""


class Trial:
  """A trial that this process runs."""

  def __init__(self, study: Study, asked: optuna.Trial, lock: Lock) -> None:
    """Chooses its values, those that it does not have yet."""
    self._study, self._asked, self.lock = study, asked, lock
    study.claim(asked)
    self.number = asked.number
    self.values = {each.name: each.chosen(asked) for each in study.space}
    [frozen] = [each for each in study.trials() if each.number == asked.number]
    self._reported = max(frozen.intermediate_values, default=-1)
    self.value = frozen.intermediate_values.get(self._reported)

  @property
  def folder(self) -> str:
    """The run folder."""
    return self._study.folder_of(self.number)

  def report(self, evaluations: Mapping[int, Mapping[str, object]]) -> None:
    """Stores the evaluations that are new: step -> name -> value as JSON has it.

    Raises:
      ConfigError: they do not have the metric.
    """
    for step, values in evaluations.items():
      if step > self._reported:
        numbers = {n: float(v) for n, v in values.items() if isinstance(v, int | float | str)}
        self._study.require_metric([*numbers])
        self._reported, self.value = step, numbers[self._study.goal.metric]
        self._asked.report(self.value, step)

  def should_end(self) -> bool:
    """Whether the pruner ends it."""
    return self._asked.should_prune()

  def end(self, state: TrialState, failure: str = "") -> None:
    """Stores how it ended; of a complete one the last value reported."""
    if failure:
      self._asked.set_user_attr(FAILURE, failure[:1000])
    value = self.value if state == TrialState.COMPLETE else None
    self._study.known.tell(self._asked, value, state=state, skip_if_finished=True)


def _identity(folder: str) -> str:
  """Returns the text that stands for a sweep folder in a shared storage."""
  path = Path(folder, IDENTITY)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
      return path.read_text()
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(uuid.uuid4().hex)
    with contextlib.suppress(FileExistsError):  # another process has made it just now
      os.link(own, path)
    own.unlink()
    return path.read_text()
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    raise ConfigError(
      f"--dir={folder!r} cannot be made or read ({reason}); give a folder that can be written."
    ) from error


def _opened(name: str, url: str, goal: Goal, sampling: Sampling) -> optuna.Study:
  direction: Direction = "maximize" if goal.maximize else "minimize"
  pruner = optuna.pruners.MedianPruner() if sampling.prune else optuna.pruners.NopPruner()
  try:
    study = optuna.create_study(
      storage=url, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
    )
  except Exception as error:  # of SQLAlchemy and of each database's own package
    secret = re.compile(r"(?<=://)[^/@]*@")
    reason = secret.sub("***@", first_line(error))
    raise ConfigError(
      f"the storage {secret.sub('***@', url)} cannot be opened ({reason}); give a URL such as "
      "--storage=sqlite:////shared/sweep.db, or leave the flag out."
    ) from error
  if study.direction.name.lower() != direction:
    raise ConfigError(
      f"the sweep {name!r} was to {study.direction.name.lower()} its metric, now {direction}; give "
      "a new sweep another --dir."
    )
  return study
