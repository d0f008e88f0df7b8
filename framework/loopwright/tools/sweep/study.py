"""Optuna's study: which trial is next, what each gave. Every change is stored at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import uuid
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import optuna
from optuna.trial import FrozenTrial, TrialState

from loopwright.errors import ConfigError, first_line, unknown
from loopwright.run_folder import folders
from loopwright.tools.sweep.runner import SAVED, Job, require_same
from loopwright.tools.sweep.space import Dimension

FILE, IDENTITY = "sweep.db", "sweep.id"
OF, OWN, FAILURE = "of", "folder", "failure"


class Study:
  """A sweep's study in its storage; the trials that `runner.run` runs.

  Attributes:
    folder: the sweep folder, with a folder for each trial that runs here.
    space, metric, maximize: what varies, and what is best.
    known: Optuna's study.
  """

  def __init__(
    self,
    folder: str,
    url: str | None,
    space: Sequence[Dimension],
    *,
    metric: str,
    maximize: bool,
    bindings: Mapping[str, str],
    sampler: str,
    seed: int,
    prune: bool,
    trials: int | None,
  ) -> None:
    """Makes the study, or opens the one that is there.

    Args:
      folder: in a new one, its last part is the name of the study.
      url: an Optuna storage; None for a file in the folder.
      sampler, seed: how values of ranges are chosen: "tpe" or "random".
      bindings, prune, trials: of the config; whether trials below the median end; how many.

    Raises:
      ConfigError: the folder or the storage cannot be used, the study is of something else, or it
        is gone and its trials are not.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    self.folder, self.space, self.metric, self.maximize = folder, list(space), metric, maximize
    self._sampler, self._seed = sampler, seed
    has_begun = Path(folder, IDENTITY).exists()
    self._identity = _identity(folder)
    self._owner = "" if url else self._identity  # of a trial that was killed before it had one
    self._url = url or f"sqlite:///{os.path.join(folder, FILE)}"
    name = self._name(is_shared=url is not None)
    self.known = _opened(name, self._url, maximize=maximize, prune=prune)
    if has_begun and not self.known.trials and any(Path(folder).glob("trial-*")):
      raise ConfigError(
        f"{folder!r} has trials that {url or FILE!r} does not know: it was removed, or the folder "
        "has another name than before; put it back, or give a new sweep another --dir."
      )
    varied = {each.name: str(each) for each in space}
    now = {**bindings, **varied, "--metric": metric, "--maximize": f"{maximize}"}
    kept = self.known.user_attrs  # of earlier versions in three parts
    parts = [json.loads(kept[name]) for name in ("config", "--vary", "goal", OF) if name in kept]
    before = {"--maximize": f"{maximize}", **dict(ChainMap(*parts))} if parts else now
    require_same(folder, before, now)
    self.known.set_user_attr(OF, json.dumps(before))
    lists = [each.values for each in space]
    grid = [*itertools.product(*lists)] if all(lists) else []
    for point in grid:
      self.known.enqueue_trial(dict(zip(varied, point, strict=True)), skip_if_exists=True)
    self._total = min(trials or len(grid), len(grid)) if grid else trials or 20
    self._left: list[FrozenTrial] | None = None
    self._running: dict[int, optuna.Trial] = {}

  def _name(self, *, is_shared: bool) -> str:
    """Returns the name of the study: that of the folder, which may have had another one before."""
    if not is_shared and Path(self.folder, FILE).exists():
      with contextlib.suppress(Exception):  # what is wrong with the file, `_opened` says
        [name] = optuna.get_all_study_names(self._url)
        return name
    return os.path.basename(os.path.abspath(self.folder))

  def trials(self, *states: TrialState) -> list[FrozenTrial]:
    """Returns the trials in these states, by default all, by number."""
    return self.known.get_trials(deepcopy=False, states=states or None)

  def folder_of(self, number: int) -> str:
    """Returns the run folder of a trial."""
    return os.path.join(self.folder, f"trial-{number:04d}")

  def begin(self) -> tuple[int, dict[str, str]] | None:
    """Returns a trial that an earlier process left, or a new one; None if there are enough."""
    if self._left is None:  # now, as the processes of an earlier sweep have ended
      running = self.trials(TrialState.RUNNING)
      self._left = [t for t in running if t.user_attrs.get(OWN, self._owner) == self._identity]
    begun = sum(each.state != TrialState.WAITING for each in self.trials())
    if not self._left and begun >= self._total:
      return None
    left = self._left and self._left.pop(0)
    trial = optuna.Trial(self.known, left._trial_id) if left else self.known.ask()  # noqa: SLF001
    trial.set_user_attr(OWN, self._identity)
    self._running[trial.number] = trial
    # A sampler begins anew in each process. Seeded by the trial's number it gives what it would
    # have given without a restart, and never the same again.
    seed = (self._seed * 1_000_003 + trial.number) % 2**32
    kinds = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    self.known.sampler = kinds[self._sampler](seed=seed)
    return trial.number, {each.name: each.chosen(trial) for each in self.space}

  def look(self, number: int) -> bool:
    """Stores the evaluations that are new; returns whether the pruner ends the trial.

    Raises:
      ConfigError: they do not have the metric; a sweep without a result can begin anew.
    """
    trial, metric = self._running[number], self.metric
    last = max(self.trials()[number].intermediate_values, default=-1)
    evaluations: Mapping[int, Mapping[str, object]] = {}
    with contextlib.suppress(OSError, ConfigError):  # not there yet, or damaged
      evaluations = folders.Run(self.folder_of(number)).evaluations
    for step, values in evaluations.items():
      if step > last and metric not in values:
        if not any(each.state.is_finished() for each in self.trials()):
          optuna.delete_study(study_name=self.known.study_name, storage=self._url)
          Path(self.folder, IDENTITY).unlink(missing_ok=True)
        raise unknown("metric", metric, [*values])
      if step > last:
        trial.report(float(str(values[metric])), step)
    return trial.should_prune()

  def end(self, number: int, job: Job, status: int) -> str:
    """Stores how a trial ended, unless it goes on later; returns a line about it."""
    trial, value = self._running.pop(number), value_of(self.trials()[number])
    if status == 0 and value is not None and math.isfinite(value):
      self.known.tell(trial, value)
    elif job.stopped and status:
      self.known.tell(trial, state=TrialState.PRUNED)
    elif status != SAVED:
      reason = job.failure(status) or f"{self.metric} is {value}"
      trial.set_user_attr(FAILURE, reason[:1000])
      self.known.tell(trial, state=TrialState.FAIL)
    told = "" if value is None else f", {self.metric} {value:.5g}"
    return f"trial {number} {state(self.trials()[number])}{told}"


def state(trial: FrozenTrial) -> str:
  """Returns how a trial stands, for the table."""
  if trial.state == TrialState.PRUNED:
    return f"pruned at step {max(trial.intermediate_values, default=0)}"
  if trial.state == TrialState.FAIL:
    return f"failed: {trial.user_attrs.get(FAILURE, 'unknown')}"
  return trial.state.name.lower()


def value_of(trial: FrozenTrial) -> float | None:
  """Returns the value of a trial's last evaluation."""
  return max(trial.intermediate_values.items(), default=(0, None))[1]


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


def _opened(name: str, url: str, *, maximize: bool, prune: bool) -> optuna.Study:
  direction: Literal["minimize", "maximize"]
  direction = "maximize" if maximize else "minimize"
  pruner = optuna.pruners.MedianPruner() if prune else optuna.pruners.NopPruner()
  try:
    return optuna.create_study(
      storage=url, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
    )
  except Exception as error:  # of SQLAlchemy and of each database's own package
    secret = re.compile(r"(?<=://)[^/@]*@")
    reason = secret.sub("***@", first_line(error))
    raise ConfigError(
      f"the storage {secret.sub('***@', url)} cannot be opened ({reason}); give a URL such as "
      "--storage=sqlite:////shared/sweep.db, or leave the flag out."
    ) from error
