"""What is tried: scenarios (what happens in training), places (strategy, op, replicas), models."""

from __future__ import annotations

import dataclasses
import functools

import compiled
import numpy as np
import reference


@dataclasses.dataclass(frozen=True)
class Dynamic:
  """The arguments of a dynamic loss scale."""

  initial: float = 2.0**15
  growth_steps: int = 3
  factor: float = 2.0
  floor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
  """One kind of training: data with something planted in it, and the trainer's options.

  Steps count from 0. `overflow_step`: the backward pass of one example of the *last* replica gives
  an infinite gradient, its loss stays finite. `infinite_label_step`: the loss too is infinite.
  `idle_first_step` / `idle_last_step`: all weights of the first / last replica are zero.
  `empty_step`: all weights of the global batch are zero. `fused_below`: in place of fusion.SMALL.
  `jit_compile`: True also trains as on GPUs, where XLA compiles the update too.
  """

  name: str
  batch_size: int = 24
  steps: int = 20
  first_loop: int = 6
  random_weights: bool = False
  optimizer: str = "adam"
  rate: float = 0.01
  schedule: bool = False
  l2: float = 0.0
  clip_norm: float | None = None
  clip_value: float | None = None
  accumulation_steps: int = 1
  loss_scale: Dynamic | float | None = None
  ema_decay: float | None = None
  overflow_step: int | None = None
  infinite_label_step: int | None = None
  idle_first_step: int | None = None
  idle_last_step: int | None = None
  empty_step: int | None = None
  packing: str = "flat"
  num_packs: int = 1
  wire_dtype: str | None = None
  fuse_updates: bool = True
  fused_below: int | None = None
  shard: bool = False
  eager: bool = False
  jit_compile: bool | str = "auto"
  steps_per_program: int | str = "auto"
  evaluated: bool = False
  framework_inputs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One scenario at one place.

  `model`: "keras" (3), "tf_keras", or a tf.Module that one or the other optimizes, "module" and
  "module_tf_keras". `op`: under "model_parallel" the mesh, such as "2x4" for batch and model.
  """

  scenario: Scenario
  strategy: str = "mirrored"
  replicas: int = 2
  op: str = "reduction_to_one_device"
  model: str = "keras"

  @property
  def id(self):
    place = f"{self.strategy}_{self.op}" if self.op else self.strategy
    return f"{self.scenario.name}-{place}-x{self.replicas}-{self.model}"

  @property
  def mesh(self):
    """Devices along "batch" and "model"; elsewhere each replica is one along "batch"."""
    on_mesh = self.strategy == "model_parallel"
    return tuple(map(int, self.op.split("x"))) if on_mesh else (self.replicas, 1)

  @property
  def compiled(self):
    """Whether XLA compiles its steps, as on GPUs."""
    shares = self.strategy == "central_storage" and self.replicas > 1
    can = not (shares or self.scenario.eager or self.strategy == "model_parallel")
    asked = self.scenario.jit_compile is True or compiled.COMPILED
    return can and asked and self.steps_per_program == "auto"

  @property
  def steps_per_program(self):
    """How many of its steps are one program; "auto" where they run one by one."""
    given = compiled.STEPS if compiled.STEPS > 1 else self.scenario.steps_per_program
    return "auto" if self.scenario.eager else given

  @property
  def devices(self):
    return self.mesh[0] * self.mesh[1]

  @property
  def padded_batch_size(self):
    multiple = self.mesh[0] * self.scenario.accumulation_steps
    return -(-self.scenario.batch_size // multiple) * multiple

  def rows_of_replica(self, replica):
    """Which rows of a padded global batch a replica gets."""
    share = self.padded_batch_size // self.replicas
    return slice(replica * share, (replica + 1) * share)


def global_batches(case):
  """Returns the case's batches, without padding: dicts of float32 arrays, one a step."""
  return [_batch(case, step) for step in range(case.scenario.steps)]


def _batch(case, step):
  scenario = case.scenario
  n, rng = scenario.batch_size, np.random.default_rng([3, step])
  x = rng.normal(size=(n, reference.INPUTS))
  y = np.sin(x @ np.arange(1, reference.INPUTS + 1)) + 0.3 * rng.normal(size=n)
  weight = rng.uniform(0.1, 3.0, size=n) if scenario.random_weights else np.ones(n)
  overflow = np.ones(n)
  last = n - 1  # the last example: one of the last replica's, which the slices below prove
  if step in (scenario.overflow_step, scenario.infinite_label_step):
    assert last >= case.rows_of_replica(case.replicas - 1).start
  if step == scenario.overflow_step:
    overflow[last] = np.inf
  if step == scenario.infinite_label_step:
    y[last] = np.inf
  if step == scenario.idle_first_step:
    weight[: n // max(case.replicas, 2)] = 0
    weight[case.rows_of_replica(0)] *= case.replicas == 1
  if step == scenario.idle_last_step and case.replicas > 1:
    weight[case.rows_of_replica(case.replicas - 1)] = 0
  if step == scenario.empty_step:
    weight[:] = 0
  batch = {"x": x, "y": y, "weight": weight, "overflow": overflow}
  return {name: value.astype(np.float32) for name, value in batch.items()}


def padded_batches(case):
  """Returns the batches as the framework gets them: the first row repeated with weight 0."""
  return [_padded(batch, case.padded_batch_size) for batch in global_batches(case)]


def _padded(batch, size):
  missing = size - len(batch["weight"])
  rows = {k: np.concatenate([v, np.repeat(v[:1], missing, axis=0)]) for k, v in batch.items()}
  rows["weight"][size - missing :] = 0
  return rows


@functools.cache
def expected(case):
  """Returns the float64 trajectory of a case."""
  return reference.train(case.scenario, float64_batches(case))


def float64_batches(case):
  return [{k: v.astype(np.float64) for k, v in b.items()} for b in global_batches(case)]


# 47 rows and one of padding can be shared out to 1, 2, 3 and 4 replicas of 4 micro-batches each.
EVERYTHING = Scenario(
  name="everything",
  batch_size=47,
  random_weights=True,
  l2=0.02,
  clip_norm=1.5,
  accumulation_steps=4,
  loss_scale=Dynamic(),
  ema_decay=0.8,
  overflow_step=7,
  idle_first_step=11,
  idle_last_step=14,
)
PLAIN = Scenario(name="plain", first_loop=13)
ALONE = [  # one feature a scenario: what to look at when EVERYTHING fails
  Scenario(name="weights", random_weights=True),
  Scenario(name="remainder", batch_size=10),
  Scenario(name="clip_norm", clip_norm=1.0),
  Scenario(name="clip_value", clip_value=0.2),
  Scenario(name="l2", l2=0.05, batch_size=10),
  Scenario(name="accumulation", accumulation_steps=4, batch_size=22),
  Scenario(name="idle_replica", idle_first_step=3, idle_last_step=9, loss_scale=Dynamic()),
  Scenario(name="empty_batch", empty_step=5, l2=0.05, loss_scale=Dynamic(), ema_decay=0.8),
  Scenario(name="overflow", overflow_step=7, loss_scale=Dynamic()),
  Scenario(name="overflow_at_floor", overflow_step=7, loss_scale=Dynamic(initial=1.0)),
  Scenario(name="overflow_fixed_scale", overflow_step=7, loss_scale=1024.0),
  Scenario(name="overflow_unscaled", overflow_step=7),
  Scenario(name="infinite_label", infinite_label_step=7, loss_scale=Dynamic()),
]
EVALUATED_BATCHES = 5  # the first ones, before anything is planted
COMBINED = dataclasses.replace(EVERYTHING, accumulation_steps=1, evaluated=True)
"""EVERYTHING but its accumulation, which costs most of the tracing."""


def _variant(name, **options):
  return dataclasses.replace(COMBINED, name=name, **options)


def _places():
  """Yields every (strategy, replicas, op) of this machine."""
  yield "default", 1, ""
  yield "one_device", 1, ""
  for replicas in (1, 2, 3, 4):
    yield "central_storage", replicas, ""
    yield "mirrored", replicas, "collective"
    yield "mirrored", replicas, "reduction_to_one_device"
    if replicas % 2 == 0:
      yield "mirrored", replicas, "hierarchical_copy"


def _matrix():
  for strategy, replicas, op in _places():
    for model in ("keras", "tf_keras"):
      yield Case(scenario=EVERYTHING, strategy=strategy, replicas=replicas, op=op, model=model)


def _alone():
  yield Case(scenario=PLAIN, strategy="default", replicas=1)
  yield Case(scenario=PLAIN, replicas=2, op="collective")
  yield Case(scenario=PLAIN, replicas=3, op="collective", model="tf_keras")
  yield Case(scenario=PLAIN, replicas=4, op="collective")
  for scenario in ALONE:
    yield Case(scenario=scenario)


def _optimizers():
  for model in ("keras", "tf_keras"):
    for optimizer in ("momentum", "adamw", "two"):
      yield Case(scenario=_variant(optimizer, optimizer=optimizer), model=model)
    scheduled = _variant("schedule", schedule=True)
    yield Case(scenario=scheduled, model=model)
    yield Case(scenario=scheduled, strategy="central_storage", replicas=2, model=model)
    for strategy, replicas in (("default", 1), ("mirrored", 3), ("central_storage", 2)):
      place = {"strategy": strategy, "replicas": replicas, "model": model}
      yield Case(scenario=_variant("unfused", fuse_updates=False), **place)
      yield Case(scenario=_variant("partly_fused", optimizer="adamw", fused_below=20), **place)
  for replicas, op, model, options in (
    (2, "reduction_to_one_device", "tf_keras", {"optimizer": "momentum"}),
    (3, "collective", "keras", {"optimizer": "adamw", "fused_below": 20}),
    (3, "reduction_to_one_device", "tf_keras", {"optimizer": "two"}),
    (4, "hierarchical_copy", "keras", {"fuse_updates": False}),
    (4, "reduction_to_one_device", "module_tf_keras", {"optimizer": "adamw"}),
  ):
    sharded = _variant("sharded", shard=True, **options)
    yield Case(scenario=sharded, replicas=replicas, op=op, model=model)
  for model in ("module", "module_tf_keras"):
    for fuse in (True, False):
      scenario = _variant(f"untouched_{fuse}", optimizer="adamw", fuse_updates=fuse)
      yield Case(scenario=scenario, model=model)


def _modes():
  eager = _variant("eager", eager=True)
  xla = _variant("xla", jit_compile=True, ema_decay=None)
  yield Case(scenario=eager)
  yield Case(scenario=eager, strategy="central_storage", model="tf_keras")
  yield Case(scenario=eager, strategy="default", replicas=1, model="module")
  yield Case(scenario=xla, strategy="default", replicas=1)
  yield Case(scenario=xla, replicas=3)
  for steps, where, model in ((3, "default", "tf_keras"), (16, "one_device", "module")):
    several = _variant("several", steps_per_program=steps)
    yield Case(scenario=several, strategy=where, replicas=1, op="", model=model)
  yield Case(scenario=_variant("inputs", framework_inputs=True), replicas=3)
  yield Case(scenario=_variant("inputs", framework_inputs=True), replicas=4, op="collective")


def _reductions():
  per_tensor = _variant("per_tensor", packing="per_tensor", num_packs=2, fuse_updates=False)
  yield Case(scenario=per_tensor, replicas=4, op="hierarchical_copy")
  yield Case(scenario=per_tensor, replicas=3, op="collective")
  yield Case(scenario=per_tensor, strategy="central_storage", replicas=2)
  for replicas in (2, 4):
    for dtype in ("bfloat16", "float16"):
      yield Case(scenario=_wire(dtype), replicas=replicas, op="collective")
  yield Case(scenario=WIRE_OVERFLOW, op="collective")


def _meshes():
  place = {"strategy": "model_parallel", "replicas": 1}
  for op, model in (
    *(("1x1", "keras"), ("2x1", "tf_keras"), ("1x2", "keras"), ("1x4", "tf_keras")),
    *(("4x1", "keras"), ("2x2", "tf_keras"), ("2x2", "keras"), ("2x2", "module_tf_keras")),
  ):
    scenario = EVERYTHING if (op, model) == ("2x2", "keras") else COMBINED
    yield Case(scenario=scenario, op=op, model=model, **place)
  for op, optimizer, model in (("2x1", "adamw", "module_tf_keras"), ("4x1", "two", "keras")):
    scenario = _variant("sharded", shard=True, optimizer=optimizer)
    yield Case(scenario=scenario, op=op, model=model, **place)
  for scenario, model in (
    *((_variant("momentum", optimizer="momentum"), "keras"),),
    *((_variant("adamw", optimizer="adamw"), each) for each in ("keras", "tf_keras")),
    *((_variant("two", optimizer="two"), "keras"), (_variant("schedule", schedule=True), "keras")),
    (_variant("inputs", framework_inputs=True), "tf_keras"),
  ):
    yield Case(scenario=scenario, op="2x2", model=model, **place)


def _wire(dtype):
  """A single plain step: its update *is* the gradient, so a bound on the one bounds the other."""
  return Scenario(
    name=f"wire_{dtype}", wire_dtype=dtype, optimizer="sgd", rate=1.0, steps=1, first_loop=1,
    batch_size=10, random_weights=True,
  )  # fmt: skip


WIRE_OVERFLOW = Scenario(
  name="wire_overflow",
  wire_dtype="float16",
  loss_scale=Dynamic(initial=2.0**18, growth_steps=100),
  optimizer="sgd",
  rate=0.02,
)

_GROUPS = (_matrix, _alone, _optimizers, _modes, _reductions, _meshes)
CASES = {case.id: case for group in _GROUPS for case in group()}
if compiled.STEPS > 1:  # what only one replica does
  _ONE = {"strategy": "one_device", "replicas": 1, "op": ""}
  CASES = {(each := dataclasses.replace(case, **_ONE)).id: each for case in CASES.values()}
