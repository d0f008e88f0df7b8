"""`--mode=memory`: what a training step needs on each device, without running it.

Weights and the optimizer's state are counted; gradients and activations are estimated from one
traced step, see loopwright/tools/liveness.py. docs/large-models.md says how near that is.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from loopwright import configurables, errors
from loopwright.distribution import placement
from loopwright.graphs.aliases import Batch, Model, Variable
from loopwright.graphs.autograph import compiled
from loopwright.models import models
from loopwright.options import Numerics
from loopwright.run_folder import assets
from loopwright.runs import builder
from loopwright.runs import from_config as runs
from loopwright.strategies import factories
from loopwright.tools import liveness
from loopwright.trainer import Trainer

MIB = 2**20
REPLICAS = (2, 4, 8)
SHOWN = 5
MOST_ROWS = 2**20
"""The largest micro-batch that is looked for."""


class Need(NamedTuple):
  """Bytes on one device.

  Attributes:
    weights: all variables of the model.
    state: slots of the optimizers, moving averages, counters.
    gradients: one for each trainable variable.
    activations: what else is alive at the moment that needs most.
  """

  weights: float
  state: float
  gradients: float
  activations: float

  @property
  def total(self) -> float:
    """The sum."""
    return sum(self)


class Row(NamedTuple):
  """One line of the table.

  Attributes:
    name: the strategy, or the bindings that are added to the config.
    examples: the rows of a batch on one device.
    need: what one device needs.
  """

  name: str
  examples: int
  need: Need


def memory(
  gin_files: Sequence[str],
  gin_params: Sequence[str] = (),
  *,
  device_gib: float | None = None,
  show: Callable[[str], None] = lambda text: None,
) -> list[Row]:
  """Estimates and shows what a config needs on each device (host).

  Args:
    gin_files: as for `configurables.parse`, like `gin_params`.
    device_gib: the memory of one device, in GiB, to show what fits.
    show: gets each line.

  Returns:
    The lines of the table: first the strategies, then changes of the config on one device.

  Raises:
    ConfigError: a mistake in the config.
  """
  if device_gib is not None:
    errors.require_positive("--device_gib", device_gib, unit="GiB")
  logging.getLogger("tensorflow").setLevel(logging.ERROR)  # no warnings about retracing
  config = _Config(gin_files, gin_params)
  rows: list[Row] = []

  def add(found: Iterator[Row]) -> None:
    for row in found:
      rows.append(row)
      show(_line(row, device_gib))

  show(f"{'MiB on one device':47} rows  weights    state gradients activations    total")
  add(config.strategies())
  show("one_device, with a change of the config:")
  add(config.changes())
  show(f"largest tensors on one_device, in MiB: {_largest(config.peak)}")
  if device_gib is not None:
    show(config.fitting(device_gib))
  if unknown := config.peak.unknown:
    show(f"not counted: what {len(unknown)} loops and unknown shapes keep, such as {unknown[0]}")
  return rows


def advice(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> str:
  """Returns a line for a run that found too little memory: what a step needs, and a remedy (host).

  It traces the config's step on the CPU, with the examples of one of its replicas.

  Args:
    gin_files: as for `configurables.parse`, like `gin_params`.

  Raises:
    ConfigError: a mistake in the config.
  """
  config = _Config(gin_files, gin_params, device="CPU:0")
  replicas = placement.of(placement.made(runs.bound("strategy"))).row_shares
  need, peak, rows = config.share(replicas, {})
  parts = ", ".join(f"{name} {size / MIB:.1f}" for name, size in need._asdict().items())
  line = (
    f"a device has too little memory: a step of {rows} examples needs about "
    f"{need.total / MIB:.1f} MiB on it ({parts}; largest tensors {_largest(peak)})"
  )
  steps = 2 * config.accumulation_steps
  if steps > rows:
    return f"{line}; see docs/large-models.md"
  less, *_ = config.share(replicas, {"Trainer.accumulation_steps": steps})
  return (
    f"{line}; with Trainer.accumulation_steps = {steps} about {less.total / MIB:.1f}. "
    "`loopwright memory CONFIG --device_gib=N` finds the largest micro-batch that fits."
  )


def estimate(trainer: Trainer, rows: int) -> tuple[Need, liveness.Peak]:
  """Returns what one step needs on the only device of a trainer, and its peak (host).

  Args:
    trainer: on one device.
    rows: examples of the batch, padding included.
  """

  def step(batch: Batch) -> Any:
    return trainer.strategy.run(trainer.replica_step, args=(batch, tf.constant(0.0)))

  given = trainer.dataset_fn(0).element_spec
  batch = tf.nest.map_structure(functools.partial(_of_rows, trainer, rows), given)
  traced = compiled(step).get_concrete_function(batch)
  peak = liveness.peak(traced)
  weights = _bytes(models.all_variables(trainer.task.model))
  gradients = _bytes(models.trainable_variables(trainer.task.model))
  state = liveness.variables_size(traced) - weights
  need = Need(weights, max(0, state), gradients, max(0, peak.size - gradients))
  return need, peak


def reduced(need: Need) -> Need:
  """Returns what a replica needs if it sums its gradients with others.

  The sum is beside its own gradients, when the activations are gone.
  """
  return need._replace(activations=max(need.activations, need.gradients))


class _Config:
  """A config, traced on one device with several batch sizes.

  Attributes:
    peak: of the step with the config's batch.
  """

  def __init__(
    self, gin_files: Sequence[str], gin_params: Sequence[str], device: str | None = None
  ) -> None:
    self._files, self._params, self._device = gin_files, gin_params, device
    self._assets: assets.Assets | None = None
    configurables.parse(gin_files, gin_params)
    make_mesh, _ = runs.bound_mesh()
    self._mesh: Any = make_mesh() if make_mesh else None  # before the first tensor: splits the CPU
    self._trainer = self._alone()
    self._need, self.peak = estimate(self._trainer, self._trainer.padded_batch_size)

  def strategies(self) -> Iterator[Row]:
    """Yields what each strategy needs, with the config's batch divided among its devices."""
    whole, size = self._need, self._trainer.global_batch_size
    yield Row("one_device", size, whole)
    yield Row("parameter_server, a worker", size, whole._replace(state=0))
    for replicas in REPLICAS:
      rows = size if runs.bound("per_replica_batch_size") else math.ceil(size / replicas)
      if size < replicas:
        break
      need = self._with(rows)
      yield Row(f"mirrored, multi_worker_mirrored, tpu x {replicas}", rows, need)
      sharded = need._replace(state=need.state - _slots(self._trainer) * (1 - 1 / replicas))
      yield Row(f"  with Trainer.shard_optimizer_state x {replicas}", rows, sharded)
      yield Row(f"central_storage x {replicas}", rows, need._replace(state=0))
    if self._mesh:
      yield self._on_mesh()

  def changes(self) -> Iterator[Row]:
    """Yields what one device needs with one binding more."""
    size, steps = self._trainer.global_batch_size, 2 * self._trainer.parts.accumulation_steps
    found = {
      "Trainer.accumulation_steps": steps if steps <= size else None,
      "Trainer.recompute": _blocks(self._trainer.task.model),
      "run.precision": "mixed_bfloat16" if runs.bound("precision") == "float32" else None,
    }
    for name, value in found.items():
      if value:
        trainer = self._alone({name: value})
        need, _ = estimate(trainer, trainer.padded_batch_size)
        yield Row(f"{name} = {value!r}", size, need)
    self._configure()

  @property
  def accumulation_steps(self) -> int:
    """Those of the config."""
    return self._trainer.parts.accumulation_steps

  def fitting(self, device_gib: float) -> str:
    """Returns a line about the largest micro-batch that fits on a device.

    The shapes are the same on all replicas, so one number holds for all: with devices of several
    sizes, that of the smallest. It is searched to 3 %.
    """
    limit, trainer = device_gib * 2**30, self._alone({"Trainer.accumulation_steps": 1})
    rows, fits, over = trainer.global_batch_size, 0, MOST_ROWS
    while over - fits > max(1, fits // 32):
      need = reduced(estimate(trainer, rows)[0])
      fits, over = (rows, over) if need.total <= limit else (fits, rows)
      rows = min(2 * rows, MOST_ROWS) if over == MOST_ROWS else (fits + over) // 2
    line = f"largest micro-batch that fits in {device_gib:g} GiB: {fits} examples on each replica"
    steps = math.ceil(trainer.global_batch_size / max(fits, 1))
    if fits and steps > 1:
      need, *_ = self.share(1, {"Trainer.accumulation_steps": steps})
      line += f"; on one_device Trainer.accumulation_steps = {steps}: {need.total / MIB:.1f} MiB"
    self._configure()
    return line

  def share(self, replicas: int, bindings: Mapping[str, Any]) -> tuple[Need, liveness.Peak, int]:
    """Returns what one of some replicas needs with some bindings, its peak, and its examples."""
    trainer = self._alone(bindings) if bindings else self._trainer
    rows = math.ceil(trainer.global_batch_size / replicas)
    padded = math.ceil(rows / trainer.batch_multiple) * trainer.batch_multiple
    need, peak = estimate(trainer, padded)
    return (reduced(need) if replicas > 1 else need), peak, rows

  def _alone(self, bindings: Mapping[str, Any] = MappingProxyType({})) -> Trainer:
    """Returns a trainer on one device, of the config and some bindings."""
    added = [f"{name} = {value!r}" for name, value in bindings.items()]
    return self._make(factories.one_device(device=self._device), *added)

  def _with(self, rows: int) -> Need:
    multiple = self._trainer.batch_multiple
    need, _ = estimate(self._trainer, math.ceil(rows / multiple) * multiple)
    return reduced(need)

  def _on_mesh(self) -> Row:
    """Returns what the config's mesh needs: of activations at most, as layers may split them."""
    rows = math.ceil(self._trainer.global_batch_size / placement.of(self._mesh).row_shares)
    need = self._with(rows)
    trainer = self._make(self._mesh)
    weights = _bytes(models.all_variables(trainer.task.model))
    gradients = _bytes(models.trainable_variables(trainer.task.model))
    raws = map(models.raw, models.trainable_variables(trainer.task.model))
    gathered = _bytes(v for v in raws if v.gathered) * placement.of(self._mesh).row_shares
    on_mesh = Need(weights, _slots(trainer), gradients, need.activations + gathered)
    mesh = self._mesh.mesh
    sizes = " x ".join(f"{name} {mesh.dim_size(name)}" for name in mesh.dim_names)
    return Row(f"model_parallel, {sizes}", rows, on_mesh)

  def _configure(self, *bindings: str) -> None:
    """Puts the config in force, and its precision."""
    configurables.parse(self._files, [*self._params, *bindings])
    builder.set_globals(runs.bound_group(Numerics, deterministic=False, eager=False))

  def _make(self, strategy: tf.distribute.Strategy, *bindings: str) -> Trainer:
    self._configure(*bindings)
    task = builder.made_task(runs.bound("task"))
    self._assets = assets.provide_in_memory(task, self._assets)
    recipe = dataclasses.replace(
      runs.bound_recipe(), one_shape=True, options={"shard_optimizer_state": False}
    )
    return recipe.trainer(task, strategy)


def _of_rows(trainer: Trainer, rows: int, spec: tf.TensorSpec) -> tf.TensorSpec:
  """Returns a feature's spec with as many rows as a batch of `rows` has."""
  count = spec.shape[0] * rows // trainer.padded_batch_size
  return tf.TensorSpec([count, *spec.shape[1:]], spec.dtype)


def _slots(trainer: Trainer) -> int:
  return _bytes(v for o in trainer.parts.optimizers.values() for v in o.optimizer.variables)


def _bytes(variables: Iterable[Variable]) -> int:
  """Returns the bytes of variables on one device."""
  found = (models.raw(variable) for variable in variables)
  return sum(math.prod(v.shape) * v.dtype.size // _parts(v) for v in found)


def _parts(variable: Variable) -> int:
  """Returns the number of devices that a variable is split over."""
  layout = getattr(variable, "layout", None)
  return math.prod(map(layout.num_shards, range(layout.rank))) if layout else 1


def _blocks(model: Model) -> list[str]:
  """Returns patterns for the layers that hold others, alike but for a number: "block_.*"."""
  layers = [layer for part in models.parts(model) for layer in getattr(part, "layers", ())]
  holders = [layer.name for layer in layers if len(list(models.layers(layer))) > 1]
  patterns = [re.sub(r"\d+$", ".*", name) for name in holders]
  return sorted({pattern for pattern in patterns if patterns.count(pattern) > 1})


def _largest(peak: liveness.Peak) -> str:
  return ", ".join(f"{name} {size / MIB:.1f}" for name, size in peak.largest[:SHOWN])


def _line(row: Row, device_gib: float | None) -> str:
  sizes = (*row.need, row.need.total)
  widths = (8, 8, 9, 11, 8)
  cells = [f"{size / MIB:{width}.1f}" for size, width in zip(sizes, widths, strict=True)]
  line = f"{row.name:46} {row.examples:5} {' '.join(cells)}"
  if device_gib is None:
    return line
  return f"{line}  {'fits' if row.need.total <= device_gib * 2**30 else 'too large'}"
