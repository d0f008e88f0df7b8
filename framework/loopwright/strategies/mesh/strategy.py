"""Model parallelism: the strategy, and how batches reach its mesh."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from loopwright.distribution.placement import Placement, register
from loopwright.errors import ConfigError, require_integer
from loopwright.graphs.aliases import PerReplica
from loopwright.strategies import local, mirrored
from loopwright.strategies.mesh import updates, variables
from loopwright.strategies.mesh.trainer import ModelParallelTrainer

_NOT_ON_A_MESH = "=True, which model_parallel does not have; set it to False."


@register(variables.ModelParallelStrategy)
class Mesh(Placement):
  """One replica on a mesh of devices, over which its tensors are split."""

  strategy: variables.ModelParallelStrategy
  trainer = ModelParallelTrainer
  replays = False
  make_optimizer = staticmethod(updates.made)
  on_gpus = False  # DTensor places every operation
  makes_variables = True
  refused = {  # noqa: RUF012
    "run.ledger": "run.ledger is True, but under model_parallel TensorFlow cannot compile the "
    "recording of examples; remove run.ledger.",
    "jit_compile": f"received Trainer.jit_compile{_NOT_ON_A_MESH}",
    "shard_optimizer_state": f"received Trainer.shard_optimizer_state{_NOT_ON_A_MESH}",
    "eager": f"received eager{_NOT_ON_A_MESH}",
    "Buckets": "the source is a Buckets, but model_parallel takes batches of one shape; give one "
    "length.",
  }

  @property
  def row_shares(self) -> int:
    """See `Placement`."""
    return self.strategy.row_shares

  @contextlib.contextmanager
  def building(self) -> Iterator[None]:
    """See `Placement`; also checks that each layout is of some variable."""
    with variables.building():
      yield
    self.strategy.require_all_match()

  def split(self, batch: Mapping[str, tf.Tensor | np.ndarray]) -> Mapping[str, PerReplica]:
    """See `Placement`."""
    of_rows, place = self.strategy.of_rows, variables.place
    return {name: place(value, of_rows(value.ndim)) for name, value in batch.items()}

  def split_rows(self, value: tf.Tensor, count: int) -> list[tf.Tensor]:
    """See `Placement`; DTensor cannot split along an axis that is split over devices."""
    rank, rows = value.shape.rank, value.shape[0] // count
    unsplit = dtensor.relayout(value, self.strategy.replicated(rank))
    parts = [unsplit[rows * number : rows * (number + 1)] for number in range(count)]
    return [dtensor.relayout(part, self.strategy.of_rows(rank)) for part in parts]

  def update_if(self, condition: tf.Tensor, update: Callable[[], None]) -> None:
    """See `Placement`; makes them in any case, of the old values if the condition is False."""
    with variables.assigning_if(condition):
      update()


def model_parallel(
  *,
  mesh: Mapping[str, int],
  layouts: Mapping[str, Sequence[str | None]] = types.MappingProxyType({}),
  shard_parameters: bool = False,
  devices: Sequence[str] | None = None,
) -> tf.distribute.Strategy:
  """One model, split over several devices by TensorFlow's DTensor; experimental there.

  Args:
    mesh: name -> number of devices along it, such as {"batch": 2, "model": 2}. The rows of a batch
      are split over "batch"; other names are yours, for `layouts`.
    layouts: pattern -> for each axis of a variable the mesh dimension that splits it, or None,
      such as {"up/kernel": (None, "model")}. A pattern is a regular expression for the end of a
      variable's name, from a "/" on. Other variables are on every device. Slots of optimizers are
      split as their variables are.
    shard_parameters: whether each weight matrix is split over "batch" as well, with its gradient
      and slots, and gathered for each pass: along its longest axis that this divides.
    devices: as many as the mesh has, such as ("GPU:0", "GPU:1"); None uses the GPUs, or logical
      CPUs if there are not enough.

  Raises:
    ConfigError: a size or device that does not exist, a layout with an unknown dimension, or
      `shard_parameters` without "batch".
  """
  if not isinstance(mesh, Mapping) or not mesh:
    raise ConfigError(f"model_parallel.mesh is {mesh!r}; give sizes, such as {{'batch': 2}}.")
  for name, size in mesh.items():
    require_integer(f"model_parallel.mesh[{name!r}]", size, at_least=1)
  if shard_parameters and variables.BATCH not in mesh:
    raise ConfigError(
      f"model_parallel.shard_parameters is True, but model_parallel.mesh is {mesh!r}; add 'batch', "
      "over which it splits the weights."
    )
  count = math.prod(mesh.values())
  if devices is None:
    gpus = local.logical("GPU") if tf.config.list_physical_devices("GPU") else []
    devices = gpus[:count] if len(gpus) >= count else local.split_cpu(count)
  elif len(devices) != count:
    raise ConfigError(
      f"model_parallel.mesh has {count} devices, but model_parallel.devices names {len(devices)}."
    )
  else:
    devices = mirrored.replica_devices(devices, None)
  made = dtensor.create_mesh(list(mesh.items()), devices=list(devices))
  return variables.ModelParallelStrategy(made, layouts, shards=shard_parameters)
