"""A run that is restored from a checkpoint continues like a run that never stopped.

A trainer takes three steps, saves, and takes a fourth. Another one, built from scratch, restores
and takes the fourth too: weights, optimizer slots and metrics must be equal to the bit. And a
checkpoint saved under one strategy must restore under each of the others.
"""

from __future__ import annotations

import contextlib
import copy
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
from loopwright.graphs.aliases import Variable
from loopwright.host import failures
from loopwright.inputs.sources import main_source
from loopwright.models import models
from loopwright.optimizers.saved_layout import SavedRate
from loopwright.run_folder import checkpoints
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.task import Task
from loopwright.tools.verify.bench import bench, harness, held_state, random_draws, source_lines
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.held_state import Held
from loopwright.tools.verify.report import Explanation, Group, Result
from loopwright.trainer import Trainer

GROUP = Group("restore")
LOOPS = (1, 2)
"""Steps per loop before the checkpoint; the first loop traces the step."""
ROUNDING = 1e-5
NEXT_BATCH, SAME_STEP, ACROSS = (
  "same next batch", "same step after a restore", "restored under other strategies",
)  # fmt: skip
ONE, CENTRAL = "one device", "central storage on 2"
MUTABLE = (list, dict, set, np.ndarray, np.random.Generator, np.random.RandomState)
_IGNORED = ("state/", "experiment/", "save_counter/")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  with tempfile.TemporaryDirectory() as folder:
    return list(Resumption(subject, folder).results())


UNKNOWN = Explanation("unknown", ("def train_step", "def loss", "def forward"))
LATE = Explanation("variables created late", ("def build_model",))
REBUILT = Explanation(
  "model differs between builds",
  ("random", "set(", "hash(", "listdir", "glob", "time", "def build_model"),
)
PER_REPLICA = Explanation("per-replica value", ("ON_READ", "aggregation"))
KINDS = ("variable", "random generator", "metric", "Python value")
"""Of state, the likelier mistake first."""


class Resumption:
  """One uninterrupted run, and what resumes from its checkpoint."""

  def __init__(self, subject: Subject, folder: str) -> None:
    """Compares two tasks of the subject; trains nothing yet."""
    self.subject, self.folder = subject, folder
    self.rows = subject.divisible_rows
    first, second = subject.fresh_task(), subject.fresh_task()
    ours, theirs = vars(first), vars(second)
    shared = [n for n in ours if ours[n] is theirs.get(n) and isinstance(ours[n], MUTABLE)]
    self._as_made = _copies(first) if first is second or shared else {}

  def task(self) -> Task:
    """Returns a task as a new process makes it, even if the subject always returns the same one."""
    made = self.subject.fresh_task()
    for name, value in self._as_made.items():
      setattr(made, name, copy.deepcopy(value))
    return made

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
    return TrainerUnderTest(self, bench.strategy_of(1))

  def _batches(self, task: Task, position: int = 0) -> Iterator[Rows]:
    """Yields training batches from a position on, as a process that starts there does (host)."""
    randomness.seed_everything(self.subject.seed)
    return self.subject.dataset(task, self.rows, position=position).as_numpy_iterator()

  # ---- The data ----

  def same_next_batch(self) -> Result:
    """Compares the batch after the checkpoint: read on, and read by a new process."""
    steps, task, other = sum(LOOPS), self.task(), self.task()
    unlike = _unlike_task(task, other)
    running, place = self._batches(task), f"at example {steps * self.rows}"
    expected = [next(running) for _ in range(steps + 1)][-1]
    resumed = next(self._batches(other, steps * self.rows))
    differing = [n for n, v in expected.items() if n not in resumed or not _equal(v, resumed[n])]
    if not differing:
      return GROUP.passed(NEXT_BATCH, f"{place}: {', '.join(sorted(expected))}")
    told = f"{place}, {', '.join(differing)} of the resumed run differ from those of the "
    told += "uninterrupted one"
    if unlike:
      return _made_otherwise(NEXT_BATCH, *unlike, told)
    numbers = "random numbers outside the checkpoint"
    cause = "position of the data" if "example_id" in differing else numbers
    random = ("np.random", "tf.random.u", "tf.random.n", "tf.random.", "tf.image.random", "rng.")
    owners = (task, main_source(task.source("train")))
    places = [source_lines.mention(owner, *random) for owner in owners]
    places.append(source_lines.mention(task, "def preprocess", "def source"))
    return GROUP.failed(NEXT_BATCH, told, cause, next(filter(None, places), ""))

  # ---- One step ----

  def same_step(self) -> Result:
    """Compares the fourth step of a restored run with that of the uninterrupted one."""
    whole = self.whole
    whole.train(LOOPS[0])
    traced = held_state.held(whole.task)
    if late := whole.late():
      names = _told([whole.name_of(key) for key in late])
      told = f"the first step creates {names}: not trained, and a new process cannot restore it"
      return _explained(told, LATE, whole.task)
    whole.train(LOOPS[1])
    path = whole.save("whole")
    whole.train(1)
    resumed = TrainerUnderTest(self, bench.strategy_of(1))
    if not (found := _unlike(whole, resumed)):
      try:
        resumed.manager.restore(path)
      except errors.ConfigError as error:
        found = str(error)
    if found:
      return _explained(f"a second build makes another model: {found}", REBUILT, self.task())
    resumed.train(1)
    return self._compared(whole, resumed, traced, path)

  def _compared(
    self, whole: TrainerUnderTest, resumed: TrainerUnderTest, traced: Mapping[str, Held], path: str
  ) -> Result:
    differing, apart = _differing(whole, resumed)
    seen = f"after one more step {_told(differing)} differ, by {apart:.2g}" if differing else ""
    if lost := _lost(whole, resumed, traced):
      name, first = next(iter(lost.items()))
      others = f" (and {', '.join(list(lost)[1:4])})" if len(lost) > 1 else ""
      told = f"{name}{others} has another value, and is in no checkpoint"
      return GROUP.failed(
        SAME_STEP, told + (f"; {seen}" if seen else ""), f"{first.kind} outside the checkpoint",
        source_lines.change(first.owner, first.attribute), values={"outside": sorted(lost)},
      )  # fmt: skip
    if not differing:
      return GROUP.passed(SAME_STEP, f"{len(whole.keys())} variables and the metrics, to the bit")
    if apart < ROUNDING and not _repeats(resumed, path):
      told = f"except rounding, {apart:.1e}, which differs each time anyway"
      return GROUP.passed(SAME_STEP, told)
    return self._differs(whole, resumed, seen)

  def _differs(self, whole: TrainerUnderTest, resumed: TrainerUnderTest, seen: str) -> Result:
    """Explains a step that differs although the checkpoint has all that the task holds."""
    task = whole.task
    if unlike := _unlike_task(task, resumed.task):
      return _made_otherwise(SAME_STEP, *unlike, seen)
    if whole.layers_drew():
      return GROUP.failed(SAME_STEP, seen, *random_draws.outside(task))
    random = [op for op in whole.operations() if random_draws.is_stateful(op.type)]
    if not whole.drew and not random:
      return _explained(seen, UNKNOWN, task)
    cause = "random generator outside the checkpoint"
    place = source_lines.mention(task, "np.random", "random.", "numpy_function", "py_function")
    if random:
      cause, place = random_draws.STATEFUL, source_lines.of_operation(random[0], task)
    return GROUP.failed(SAME_STEP, seen, cause, place)

  # ---- Strategies ----

  def across_strategies(self) -> Result:
    """Saves the state of a run under each strategy, and restores it under each other.

    One device has taken steps. The others get its state, changed for each, in place of steps of
    their own, which the group "replicas" takes; but nothing else steps under central storage.
    """
    batch = next(self._batches(self.task()))
    if not self.whole.metrics:
      self.whole.step(batch)
    if self.whole.late():
      return GROUP.skipped(ACROSS, "the first step creates variables")
    made, refused = {ONE: self.whole}, dict[str, str]()
    saved = {ONE: self.whole.save("one")}
    for name, strategy in strategies().items():
      try:
        run = TrainerUnderTest(self, strategy)
        if name == CENTRAL:
          run.step(batch)
      except Exception as error:  # the checks for that strategy say more
        refused[name] = failures.mistake(error) or failures.failure(error)
        continue
      made[name], before = run, run.values()
      if found := _restored_otherwise(run, saved[ONE]):
        return _across_failed(run.task, ONE, name, found)
      run.change(before, 1 + len(made) / 4)
      saved[name] = run.save(name.replace(" ", "_"))
    if not made.keys() - {ONE}:
      return GROUP.skipped(ACROSS, "; ".join(f"{n}: {why}" for n, why in refused.items()))
    for one, path in [*saved.items()][1:]:
      for other, run in made.items():
        if one != other and (found := _restored_otherwise(run, path)):
          return _across_failed(run.task, one, other, found)
    told = f"{', '.join(made)}: the checkpoint of each under all others"
    left_out = "".join(f"; not under {name} ({why})" for name, why in refused.items())
    return GROUP.passed(ACROSS, told + left_out)


def _explained(detail: str, why: Explanation, task: Task) -> Result:
  place = source_lines.mention(task, *why.containing)
  return GROUP.explained(SAME_STEP, detail, why, place)


def _made_otherwise(check: str, name: str, held: Held, seen: str) -> Result:
  told = f"{name} differs each time that the task is made; {seen}"
  words = (f"self.{held.attribute} =", f"self.{held.attribute}")
  place = source_lines.mention(held.owner, *words)
  return GROUP.failed(check, told, "task differs between builds", place)


def _across_failed(task: Task, one: str, other: str, found: str) -> Result:
  owners = [task, *(part for part, _ in held_state.own_parts(task.model))]
  places = (source_lines.mention(owner, *PER_REPLICA.containing) for owner in owners)
  told = f"saved under {one} and restored under {other}: {found}"
  return GROUP.explained(ACROSS, told, PER_REPLICA, next(filter(None, places), ""))


class TrainerUnderTest:
  """A trainer under one strategy, with its checkpoints."""

  def __init__(self, resumption: Resumption, strategy: tf.distribute.Strategy) -> None:
    self._folder = resumption.folder
    self.task = resumption.task()
    self.trainer: Trainer = harness.make_trainer(
      resumption.subject, strategy, rows=resumption.rows, task=self.task
    )
    self.manager = self._manager("")
    self.metrics: dict[str, float] = {}
    self.drew, self._fresh = False, self._generators()
    self._built = self.keys()

  def train(self, steps: int) -> None:
    """Trains one loop; sets `drew`: whether Python's or NumPy's global generator was used."""
    before = held_state.numpy_and_python()
    self.metrics = harness.train(self.trainer, steps)
    self.drew = held_state.numpy_and_python() != before

  def step(self, batch: Rows) -> None:
    """Runs one compiled step, without an input pipeline."""
    bench.stepper(self.trainer)(self.trainer.placement.split(batch))

  def change(self, before: Mapping[str, np.ndarray], factor: float) -> None:
    """Changes what is not as it was `before`, the numbers that steps move, on every replica."""
    for key, variable in self.variables().items():
      if np.array_equal(self.copies(variable)[0], before[key]):
        continue
      for copy_of in self.trainer.strategy.experimental_local_results(models.raw(variable)):
        if copy_of.dtype.is_floating:
          copy_of.assign(tf.cast(factor, copy_of.dtype) * copy_of)
        elif copy_of.dtype.is_integer:
          copy_of.assign(copy_of + 1)

  def save(self, name: str) -> str:
    """Saves into a folder of that name; returns the path."""
    manager = self._manager(name)
    path = manager.save()
    manager.wait()
    assert path is not None
    return path

  def _manager(self, name: str) -> CheckpointManager:
    folder, experiment = os.path.join(self._folder, name), {"task": type(self.task).__name__}
    return CheckpointManager(trainer=self.trainer, directory=folder, experiment=experiment)

  def variables(self) -> dict[str, Any]:
    """Returns all variables that a checkpoint holds, by key; the model's first."""
    found = checkpoints.variables_of(self.manager.checkpoint)
    found = {key: v for key, v in found.items() if not isinstance(v, SavedRate)}
    keys = sorted(found, key=lambda key: not key.startswith("model/"))
    return {key: found[key] for key in keys if not key.startswith(_IGNORED)}

  def keys(self) -> list[str]:
    """Returns the keys of `variables`."""
    return list(self.variables())

  def late(self) -> list[str]:
    """Returns the keys of variables that a step has created."""
    return sorted(set(self.keys()) - set(self._built))

  def name_of(self, key: str) -> str:
    """Returns a variable's name, as the user knows it."""
    variable = self.variables().get(key)
    return key if variable is None else models.name(variable)

  def values(self) -> dict[str, np.ndarray]:
    """Returns the values of `variables` on the first replica."""
    return {key: self.copies(variable)[0] for key, variable in self.variables().items()}

  def copies(self, variable: Variable) -> list[np.ndarray]:
    """Returns a variable's value on each replica."""
    local = self.trainer.strategy.experimental_local_results(models.raw(variable))
    return [np.array(each) for each in local]

  def saved_values(self) -> dict[str, np.ndarray]:
    """Returns what a checkpoint would hold now."""
    with tempfile.TemporaryDirectory() as folder:
      return _read(self.manager.checkpoint.write(os.path.join(folder, "now")))

  def layers_drew(self) -> bool:
    """Whether a random layer drew from Keras's own generator instead of the step's seed."""
    fresh = self._fresh
    return any(not np.array_equal(v, fresh[key]) for key, v in self._generators().items())

  def _generators(self) -> dict[str, np.ndarray]:
    kept = models.all_variables(self.task.model)
    found = {models.name(v): models.raw(v) for v in kept}
    return {n: self.copies(v)[0] for n, v in found.items() if random_draws.is_generator(n)}

  def operations(self) -> list[tf.Operation]:
    """Returns the operations of the traced loop; none if the trainer is eager."""
    return [] if self.trainer.eager else list(graphs.operations(self.trainer.graph()))


def strategies() -> dict[str, tf.distribute.Strategy]:
  """Returns the strategies to which a checkpoint of one device must move, on logical CPUs."""
  devices = [device.name for device in tf.config.list_logical_devices("CPU")][:2]
  central = tf.distribute.experimental.CentralStorageStrategy(
    compute_devices=devices, parameter_device=devices[0]
  )
  return {f"mirrored on {n}": bench.strategy_of(n) for n in (2, 3)} | {CENTRAL: central}


def _restored_otherwise(run: TrainerUnderTest, path: str) -> str:
  try:
    run.manager.restore(path)
  except errors.ConfigError as error:
    return str(error)
  expected, got = _read(path), run.saved_values()
  for key in sorted(expected):
    if key not in got or not _alike(got[key], expected[key]):
      seen, saved = _short(got.get(key)), _short(expected[key])
      return f"{run.name_of(key)} is {seen}, but was saved as {saved}"
  for key, variable in run.variables().items():
    copies = run.copies(variable)
    if not all(_alike(copy, copies[0]) for copy in copies):
      return f"{run.name_of(key)} differs between replicas"
  return ""


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
  if one.dtype.kind == "f":  # sums over replicas round when divided and summed again
    return np.allclose(one, other, rtol=1e-6, atol=1e-30, equal_nan=True)
  return np.array_equal(one, other)


def _short(value: Any) -> str:
  return "missing" if value is None else np.array2string(np.ravel(value)[:3], precision=6)


def _read(path: str) -> dict[str, np.ndarray]:
  reader = tf.train.load_checkpoint(path)
  keys = [k for k in reader.get_variable_to_shape_map() if k.endswith(checkpoints.VALUE)]
  return {k: np.asarray(reader.get_tensor(k)) for k in keys if not k.startswith(_IGNORED)}


def _differing(one: TrainerUnderTest, other: TrainerUnderTest) -> tuple[list[str], float]:
  """Returns what differs to the bit, variables and metrics, and the largest relative difference."""
  mine, yours = one.values(), other.values()
  names, apart = [], [0.0]
  for key, value in mine.items():
    if value.tobytes() != yours[key].tobytes():
      names.append(one.name_of(key))
      size = np.linalg.norm(value.astype(np.float64)) or 1.0
      distance = np.linalg.norm(value.astype(np.float64) - yours[key].astype(np.float64))
      apart.append(float(np.nan_to_num(distance / size, nan=np.inf)))
  for name in sorted(one.metrics.keys() | other.metrics.keys()):
    pair = one.metrics.get(name, np.nan), other.metrics.get(name, np.nan)
    if not np.array_equal(*pair, equal_nan=True):
      names.append(f"metric {name}")
      apart.append(abs(pair[0] - pair[1]) / (abs(pair[0]) or 1.0))
  return names, max(apart)


def _lost(
  whole: TrainerUnderTest, resumed: TrainerUnderTest, traced: Mapping[str, Held]
) -> dict[str, Held]:
  """Returns state outside of the checkpoint that training changed and a restore lost."""
  saved = {id(models.raw(v)) for v in whole.variables().values()}
  theirs, found = held_state.held(resumed.task), {}
  for name, mine in held_state.held(whole.task).items():
    other = theirs.get(name)
    if id(mine.variable) in saved or (other is not None and other.value == mine.value):
      continue
    before = traced.get(name)
    if before is None or before.value != mine.value:
      found[name] = mine
  return dict(sorted(found.items(), key=lambda item: KINDS.index(item[1].kind)))


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
  for key in [*mine, *yours]:
    shapes = [str(models.raw(v[key]).shape) if key in v else "missing" for v in (mine, yours)]
    if shapes[0] != shapes[1]:
      return f"{one.name_of(key)} is {shapes[0]} and then {shapes[1]}"
  return ""


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
  """Whether two features are equal to the bit."""
  if object in (one.dtype, other.dtype):
    return bool(one.tolist() == other.tolist())
  return one.tobytes() == other.tobytes()


def _copies(task: Task) -> dict[str, Any]:
  found = {}
  for name, value in vars(task).items():
    with contextlib.suppress(Exception):
      if isinstance(value, (*MUTABLE, bool, int, float, str)):
        found[name] = copy.deepcopy(value)
  return found


def _told(names: list[str]) -> str:
  return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
