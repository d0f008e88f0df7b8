"""Strategies of several devices of one process: mirrored variables, or central storage.

Each has a factory, which checks devices and ops before training, and a placement.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from loopwright.distribution.placement import Placement, register
from loopwright.errors import ConfigError, require_integer, unknown
from loopwright.graphs.aliases import PerReplica
from loopwright.strategies.local import CrossDeviceOps, known_device, logical, split_cpu

_KEYS_EACH = 1000
_first_keys = itertools.count(_KEYS_EACH, _KEYS_EACH)


@register(tf.distribute.MirroredStrategy)
class Mirrored(Placement):
  """One replica per device of this process."""

  loops_evaluation = True

  refused: Mapping[str, str] = {}

  @property
  def cross_device_op(self) -> type:
    """See `Placement`."""
    return type(self.strategy.extended._cross_device_ops)  # noqa: SLF001

  def distribute(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """See `Placement`; the step splits the rows of whole batches, see `per_replica`."""
    whole = self.splits_batches and self._divides(dataset.element_spec)
    return dataset if whole else super().distribute(dataset)

  def per_replica(self, batch: Mapping[str, PerReplica]) -> Mapping[str, PerReplica]:
    """See `Placement`.

    TensorFlow's iterator for several devices takes 100 ms to make and, on CPUs, 0.2 ms a batch. To
    GPUs it copies every feature, and integers of 32 bits back again.
    """
    whole = self.splits_batches and all(map(tf.is_tensor, tf.nest.flatten(batch)))
    return self.split(batch) if whole else batch

  @functools.cached_property
  def splits_batches(self) -> bool:
    """Whether the step splits whole batches by `shares`; else TensorFlow's iterator splits them."""
    return len(self.devices) > 1

  def _divides(self, specs: Any) -> bool:
    """Whether all replicas get as many rows of a batch."""
    replicas = self.strategy.num_replicas_in_sync
    rows = [spec.shape[:1].as_list() for spec in tf.nest.flatten(specs)]
    return isinstance(specs, dict) and all(r and r[0] and r[0] % replicas == 0 for r in rows)


@register(tf.distribute.experimental.CentralStorageStrategy)
class CentralStorage(Placement):
  """One replica per device; several replicas share variables on a parameter device."""

  @property
  def shares_variables(self) -> bool:
    """See `Placement`."""
    return self.strategy.num_replicas_in_sync > 1

  @property
  def refused(self) -> Mapping[str, str]:
    """See `Placement`."""
    if not self.shares_variables:
      return {}
    return {
      **super().refused,
      "jit_compile": "received both Trainer.jit_compile=True and "
      "run.strategy=@central_storage; XLA cannot access variables on another device: use mirrored, "
      "or jit_compile=False.",
    }


class MirroredStrategy(tf.distribute.MirroredStrategy):
  """TensorFlow's MirroredStrategy, with group keys for collectives that are unique in the process.

  TensorFlow's count from 1 in every strategy, so a second strategy in one process would find the
  groups of the first, with other sizes and shapes. Each strategy starts at `_collective_key_base`;
  the multi-worker strategies start at 0.
  """

  def __init__(
    self, devices: Sequence[str], *, cross_device_ops: tf.distribute.CrossDeviceOps | None = None
  ) -> None:
    """See `tf.distribute.MirroredStrategy`; each call reserves the next keys of this process."""
    self._collective_key_base = next(_first_keys)
    super().__init__(devices, cross_device_ops=cross_device_ops)


def mirrored(
  *,
  devices: Sequence[str] | None = None,
  cpu_replicas: int | None = None,
  cross_device_ops: CrossDeviceOps = "auto",
  num_packs: int = 1,
) -> tf.distribute.Strategy:
  """One replica per device, variables mirrored, gradients summed by the chosen op.

  Args:
    devices: such as ("GPU:0", "GPU:1"); None uses every GPU, or the CPU if there is none.
    cpu_replicas: instead of `devices`: the number of logical devices to split the CPU into.
    cross_device_ops: see docs/reduction.md; "auto" logs its choice.
    num_packs: the number of buffers that `nccl` and `hierarchical_copy` pack tensors into.

  Raises:
    ConfigError: an unknown device or op, or an op that does not work on these devices.
  """
  names = replica_devices(devices, cpu_replicas)
  op = _checked_op(cross_device_ops, names, num_packs)
  return MirroredStrategy(names, cross_device_ops=op)


def central_storage(
  *,
  devices: Sequence[str] | None = None,
  cpu_replicas: int | None = None,
  parameter_device: str | None = None,
) -> tf.distribute.Strategy:
  """One replica per device, variables on one parameter device, where gradients are summed.

  Args:
    devices: compute devices; None uses every GPU, or the CPU if there is none.
    cpu_replicas: instead of `devices`: the number of logical devices to split the CPU into.
    parameter_device: the device of the variables; None uses the CPU.

  Raises:
    ConfigError: an unknown device.
  """
  names = replica_devices(devices, cpu_replicas)
  parameters = parameter_device or logical("CPU")[0]
  return tf.distribute.experimental.CentralStorageStrategy(
    compute_devices=names,
    parameter_device=known_device(parameters, logical("CPU") + logical("GPU")),
  )


def replica_devices(devices: Sequence[str] | None, cpu_replicas: int | None) -> list[str]:
  """Returns the devices to use; None for both means every GPU, or the CPU (host).

  Raises:
    ConfigError: both are given, or an unknown device.
  """
  if devices and cpu_replicas:
    raise ConfigError(
      f"received both devices={list(devices)} and cpu_replicas={cpu_replicas}; choose one."
    )
  if cpu_replicas is not None:
    return split_cpu(cpu_replicas)
  if devices is not None:
    known = logical("GPU") + logical("CPU")
    if len(set(devices)) != len(devices) or not devices:
      raise ConfigError(f"devices is {list(devices)}; list at least one device, each once.")
    return [known_device(device, known) for device in devices]
  return logical("GPU") or logical("CPU")[:1]


def works(name: str, devices: Sequence[str]) -> bool:
  """Whether a cross-device op works on these devices, such as ["GPU:0", "GPU:1"]."""
  try:
    _checked_op(name, devices, num_packs=1)
  except ConfigError:
    return False
  return True


def _checked_op(
  name: str, devices: Sequence[str], num_packs: int
) -> tf.distribute.CrossDeviceOps | None:
  """Returns TensorFlow's op for a name; None means the strategy's own collectives."""
  makers = {
    "nccl": lambda: tf.distribute.NcclAllReduce(num_packs=num_packs),
    "hierarchical_copy": lambda: tf.distribute.HierarchicalCopyAllReduce(num_packs=num_packs),
    "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    "collective": lambda: None,
  }
  require_integer("mirrored.num_packs", num_packs, at_least=1)
  if name == "auto":
    name, reason = _automatic_op(devices)
    logging.info("cross-device ops auto: %s, %s", name, reason)
  if name not in makers:
    raise unknown("mirrored.cross_device_ops", name, ["auto", *makers])
  if name == "nccl":
    _require_nccl(devices)
  if name == "hierarchical_copy" and len(devices) % 2 and len(devices) > 1:
    raise ConfigError(
      f"mirrored.cross_device_ops is 'hierarchical_copy' with {len(devices)} replicas; TensorFlow "
      "ignores the last one of an odd number: use an even number, 'collective' or "
      "'reduction_to_one_device'."
    )
  return makers[name]()


def _automatic_op(devices: Sequence[str]) -> tuple[str, str]:
  if len(devices) == 1:
    return "reduction_to_one_device", "a single replica has nothing to reduce"
  if all("CPU" in device for device in devices):
    return "reduction_to_one_device", "measured fastest on logical CPUs, which share memory"
  # The same calls of NCCL on GPUs as "nccl" makes. TensorFlow takes its own ring for logical GPUs,
  # which NCCL refuses.
  return "collective", "NCCL between GPUs, TensorFlow's ring between other devices"


def _require_nccl(devices: Sequence[str]) -> None:
  on_cpu = [device for device in devices if "GPU" not in device]
  if on_cpu or not kernels.get_registered_kernels_for_op("NcclAllReduce").kernel:
    why = f"{on_cpu[0]} is not a GPU" if on_cpu else "this TensorFlow has no NCCL kernel"
    raise ConfigError(
      f"mirrored.cross_device_ops is 'nccl', but {why}; use 'collective', "
      "'reduction_to_one_device', or 'hierarchical_copy' (an even number of replicas)."
    )
