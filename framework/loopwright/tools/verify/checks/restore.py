"""A run that is restored from a checkpoint continues like a run that never stopped.

A trainer takes three steps, saves, and takes a fourth. Another one, built from scratch, restores
and takes the fourth too: weights, optimizer slots and metrics must be equal to the bit. And a
checkpoint saved on one device must restore on three replicas, and the other way.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright import errors
from loopwright.graphs import operations as graphs
from loopwright.graphs import randomness
from loopwright.host import failures
from loopwright.models import models
from loopwright.optimizers.saved_layout import SavedRate
from loopwright.run_folder import checkpoints
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.task import Task
from loopwright.tools.verify.bench import bench, harness, held_state, random_draws, source_lines
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.held_state import Held
from loopwright.tools.verify.report import Group, Result

GROUP = Group("restore")
LOOPS = (1, 2)
"""Steps per loop before the checkpoint; the first loop traces the step."""
ROUNDING = 1e-5
NEXT_BATCH, SAME_STEP, ACROSS = (
  "same next batch", "same step after a restore", "restored on other replicas",
)  # fmt: skip
BUILDS = "task differs between builds"
_IGNORED = ("state/", "experiment/", "save_counter/")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  with tempfile.TemporaryDirectory() as folder:
    return list(Resumption(subject, folder).results())


class Resumption:
  """One uninterrupted run, and what resumes from its checkpoint."""

  def __init__(self, subject: Subject, folder: str) -> None:
    """Trains nothing yet."""
    self.subject, self.folder = subject, folder
    self.rows = subject.divisible_rows

  def results(self) -> Iterator[Result]:
    """Yields all results; later checks depend on earlier ones."""
    batch = self.same_next_batch()
    yield batch
    if batch.status == "failed":
      yield GROUP.skipped(SAME_STEP, "the resumed run reads another batch, see above")
    else:
      yield self.same_step()
    yield self.across_strategies()

  @functools.cached_property
  def whole(self) -> TrainerUnderTest:
    """The uninterrupted run."""
    return TrainerUnderTest(self.subject, self.folder, bench.strategy_of(1))

  def _batches(self, task: Task, position: int = 0) -> Iterator[Rows]:
    """Yields training batches from a position on, as a process that starts there does (host)."""
    randomness.seed_everything(self.subject.seed)
    return self.subject.dataset(task, self.rows, position=position).as_numpy_iterator()

  # ---- The data ----

  def same_next_batch(self) -> Result:
    """Compares the batch after the checkpoint: read on, and read by a new process."""
    steps, task, other = sum(LOOPS), self.subject.fresh_task(), self.subject.fresh_task()
    unlike = _unlike_task(task, other)
    running, place = self._batches(task), f"at example {steps * self.rows}"
    expected = [next(running) for _ in range(steps + 1)][-1]
    with random_draws.watch(other) as watched:
      resumed = next(self._batches(other, steps * self.rows))
    differing = [n for n, v in expected.items() if n not in resumed or not _equal(v, resumed[n])]
    if not differing:
      return GROUP.passed(NEXT_BATCH, f"{place}: {', '.join(sorted(expected))}")
    told = f"{place}, {', '.join(differing)} of the resumed run differ"
    if unlike:
      return _made_otherwise(NEXT_BATCH, *unlike, told)
    if "example_id" in differing:
      place = source_lines.method(task, "source")
      return GROUP.failed(NEXT_BATCH, told, "position of the data", place)
    places = [draw.place for draw in watched.stateful]
    place = next(iter(places), source_lines.method(task, "preprocess", "source"))
    return GROUP.failed(NEXT_BATCH, told, "random numbers outside the checkpoint", place)

  # ---- One step ----

  def same_step(self) -> Result:
    """Compares the fourth step of a restored run with that of the uninterrupted one."""
    whole = self.whole
    whole.train(LOOPS[0])
    traced, build = held_state.held(whole.task), source_lines.method(whole.task, "build_model")
    if late := whole.late():
      told = f"the first step creates {_told(late)}: not trained, and not restored"
      return GROUP.failed(SAME_STEP, told, "variables created late", build)
    whole.train(LOOPS[1])
    path = whole.save("whole")
    whole.train(1)
    resumed = TrainerUnderTest(self.subject, self.folder, bench.strategy_of(1))
    if not (found := _unlike(whole, resumed)):
      found = resumed.restore(path)
    if found:
      told = f"a second build makes another model: {found}"
      return GROUP.failed(SAME_STEP, told, "model differs between builds", build)
    resumed.train(1)
    differing, apart = _differing(whole, resumed)
    seen = f"after one more step {_told(differing)} differ, by {apart:.2g}" if differing else ""
    if lost := _lost(whole, resumed, traced):
      told = f"{_told(list(lost))} has another value, and is in no checkpoint; {seen}"
      cause = f"{next(iter(lost.values())).kind} outside the checkpoint"
      place, values = whole.python(), {"outside": sorted(lost)}
      return GROUP.failed(SAME_STEP, told.rstrip("; "), cause, place, values=values)
    if not differing:
      return GROUP.passed(SAME_STEP, f"{len(whole.variables())} variables, to the bit")
    if apart < ROUNDING and not _repeats(resumed, path):
      told = f"except rounding, {apart:.1e}, which differs each time anyway"
      return GROUP.passed(SAME_STEP, told)
    return self._differs(whole, resumed, seen)

  def _differs(self, whole: TrainerUnderTest, resumed: TrainerUnderTest, seen: str) -> Result:
    """Explains a step that differs although the checkpoint has all that the task holds."""
    if unlike := _unlike_task(whole.task, resumed.task):
      return _made_otherwise(SAME_STEP, *unlike, seen)
    random = [op for op in whole.operations() if random_draws.is_stateful(op.type)]
    if random:
      place = source_lines.of_operation(random[0], whole.task)
      return GROUP.failed(SAME_STEP, seen, random_draws.STATEFUL, place)
    if whole.drew:
      cause = "random generator outside the checkpoint"
      return GROUP.failed(SAME_STEP, seen, cause, whole.python())
    place = source_lines.method(whole.task, "train_step", "training_loss", "loss")
    return GROUP.failed(SAME_STEP, seen, "unknown", place)

  # ---- Strategies ----

  def across_strategies(self) -> Result:
    """Restores a run's state on three replicas, and what is saved there on one device again."""
    if not self.whole.metrics:
      self.whole.train(1)
    if self.whole.late():
      return GROUP.skipped(ACROSS, "the first step creates variables")
    path, values = self.whole.save("one"), self.whole.values()
    try:
      three = TrainerUnderTest(self.subject, self.folder, bench.strategy_of(3))
    except Exception as error:  # the checks on several replicas say more
      return GROUP.skipped(ACROSS, failures.mistake(error) or failures.failure(error))
    if found := three.restored_otherwise(path, values):
      return _across_failed("one device", "three replicas", found)
    back = TrainerUnderTest(self.subject, self.folder, bench.strategy_of(1))
    if found := back.restored_otherwise(three.save("three"), values):
      return _across_failed("three replicas", "one device", found)
    return GROUP.passed(ACROSS, "from one device to three replicas, and back")


def _made_otherwise(check: str, name: str, held: Held, seen: str) -> Result:
  told = f"{name} differs each time that the task is made; {seen}"
  return GROUP.failed(check, told, BUILDS, source_lines.method(held.owner, "__init__"))


def _across_failed(one: str, other: str, found: str) -> Result:
  told = f"saved on {one} and restored on {other}: {found}"
  return GROUP.failed(ACROSS, told, "per-replica value")


class TrainerUnderTest:
  """A trainer under one strategy, with its checkpoints.

  Attributes:
    metrics: of the last loop; {} before the first.
    drew: whether it has used Python's or NumPy's global generator.
  """

  def __init__(self, subject: Subject, folder: str, strategy: tf.distribute.Strategy) -> None:
    self._folder, self.task = folder, subject.fresh_task()
    self.trainer = harness.make_trainer(subject, self.task, strategy)
    self.manager = self._manager("")
    self.metrics: dict[str, float] = {}
    self.drew = False
    self._built = self.variables().keys()

  def train(self, steps: int) -> None:
    """Trains one loop."""
    before = held_state.numpy_and_python()
    self.metrics = harness.train(self.trainer, steps)
    self.drew = held_state.numpy_and_python() != before

  def save(self, name: str) -> str:
    """Saves into a folder of that name; returns the path."""
    manager = self._manager(name)
    path = manager.save()
    manager.wait()
    assert path is not None
    return path

  def restore(self, path: str) -> str:
    """Restores a checkpoint; returns why it does not fit, or ""."""
    try:
      self.manager.restore(path)
    except errors.ConfigError as error:
      return str(error)
    return ""

  def restored_otherwise(self, path: str, values: Mapping[str, np.ndarray]) -> str:
    """Restores what was saved with some values; returns what is another one, or ""."""
    if found := self.restore(path):
      return found
    variables, got = self.variables(), self.values()
    for key, saved in values.items():
      seen = got.get(key, np.array("missing"))
      if not _alike(seen, saved):
        told = [np.array2string(np.ravel(each)[:3], precision=6) for each in (seen, saved)]
        name = models.name(variables[key]) if key in variables else key
        return f"{name} is {told[0]}, but was saved as {told[1]}"
    for variable in variables.values():
      copies = self.trainer.strategy.experimental_local_results(models.raw(variable))
      if not all(_alike(np.array(each), np.array(copies[0])) for each in copies):
        return f"{models.name(variable)} differs between replicas"
    return ""

  def _manager(self, name: str) -> CheckpointManager:
    folder, experiment = os.path.join(self._folder, name), {"task": type(self.task).__name__}
    return CheckpointManager(trainer=self.trainer, directory=folder, experiment=experiment)

  def variables(self) -> dict[str, Any]:
    """Returns all variables that a checkpoint holds, by key; the model's first."""
    found = checkpoints.variables_of(self.manager.checkpoint)
    keys = sorted(found, key=lambda key: not key.startswith("model/"))
    wanted = (key for key in keys if not isinstance(found[key], SavedRate))
    return {key: found[key] for key in wanted if not key.startswith(_IGNORED)}

  def late(self) -> list[str]:
    """Returns the names of variables that a step has created."""
    return [models.name(v) for key, v in self.variables().items() if key not in self._built]

  def values(self) -> dict[str, np.ndarray]:
    """Returns the values of `variables`; the sum of what each replica counts for itself."""
    raws = {key: models.raw(variable) for key, variable in self.variables().items()}
    return {key: np.array(tf.convert_to_tensor(raw)) for key, raw in raws.items()}

  def operations(self) -> list[tf.Operation]:
    """Returns the operations of the traced loop; none if the trainer is eager."""
    return [] if self.trainer.eager else list(graphs.operations(self.trainer.graph()))

  def python(self) -> str:
    """Returns the only line by which the loop calls Python; "" if there are none, or several."""
    called = [op for op in self.operations() if random_draws.CHANGING.get(op.type) == "python"]
    places = {source_lines.of_operation(op, self.task) for op in called}
    return places.pop() if len(places) == 1 else ""


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
  if (
    one.dtype.kind == other.dtype.kind == "f"
  ):  # sums over replicas round when divided and summed again
    return np.allclose(one, other, rtol=1e-6, atol=1e-30, equal_nan=True)
  return np.array_equal(one, other)


def _differing(one: TrainerUnderTest, other: TrainerUnderTest) -> tuple[list[str], float]:
  """Returns what differs to the bit, variables and metrics, and the largest relative difference."""
  mine, yours = one.values(), other.values()
  names = {key: models.name(variable) for key, variable in one.variables().items()}
  for name in one.metrics.keys() | other.metrics.keys():
    names[name] = f"metric {name}"
    mine[name], yours[name] = (np.float64(run.metrics.get(name, np.nan)) for run in (one, other))
  unlike = [key for key, value in mine.items() if value.tobytes() != yours[key].tobytes()]
  apart = [0.0]
  for key in unlike:
    value, seen = mine[key].astype(np.float64), yours[key].astype(np.float64)
    size = np.linalg.norm(value) or 1.0
    apart.append(float(np.nan_to_num(np.linalg.norm(value - seen) / size, nan=np.inf)))
  return [names[key] for key in unlike], max(apart)


def _lost(
  whole: TrainerUnderTest, resumed: TrainerUnderTest, traced: Mapping[str, Held]
) -> dict[str, Held]:
  """Returns state outside of the checkpoint that training changed and a restore lost."""
  saved = {id(models.raw(v)) for v in whole.variables().values()}
  theirs, found = held_state.held(resumed.task), {}
  for name, mine in held_state.held(whole.task).items():
    others = [held[name].value for held in (theirs, traced) if name in held]
    if id(mine.variable) not in saved and mine.value not in others:
      found[name] = mine
  return found


def _unlike_task(one: Task, other: Task) -> tuple[str, Held] | None:
  theirs = held_state.held(other)
  for name, mine in held_state.held(one).items():
    if name not in theirs or theirs[name].value != mine.value:
      return name, mine
  return None


def _repeats(run: TrainerUnderTest, path: str) -> bool:
  values = []
  for _ in range(2):
    run.manager.restore(path)
    run.train(1)
    values.append(run.values())
  return all(v.tobytes() == values[1][key].tobytes() for key, v in values[0].items())


def _unlike(one: TrainerUnderTest, other: TrainerUnderTest) -> str:
  mine, yours = one.variables(), other.variables()
  for key in {**mine, **yours}:
    shapes = [str(models.raw(v[key]).shape) if key in v else "missing" for v in (mine, yours)]
    if shapes[0] != shapes[1]:
      return f"{models.name({**yours, **mine}[key])} is {shapes[0]} and then {shapes[1]}"
  return ""


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
  """Whether two features are equal to the bit."""
  if object in (one.dtype, other.dtype):
    return bool(one.tolist() == other.tolist())
  return one.tobytes() == other.tobytes()


def _told(names: list[str]) -> str:
  return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
