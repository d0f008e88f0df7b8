"""Strategies of one device, and `auto`, which chooses one; mirrored.py has those of several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf
from absl import logging
from tensorflow.python.distribute import distribute_lib

from loopwright import registry
from loopwright.distribution import placement
from loopwright.distribution.placement import Placement, register
from loopwright.errors import ConfigError, require_integer, unknown

CrossDeviceOps = Literal[
  "auto", "nccl", "hierarchical_copy", "reduction_to_one_device", "collective"
]


@register(distribute_lib._DefaultDistributionStrategy)  # noqa: SLF001
class Default(Placement):
  """TensorFlow's default strategy: the first device, without distribution."""

  name = "default"
  loops_evaluation = True

  @property
  def devices(self) -> list[str]:
    """See `Placement`; the first GPU, where TensorFlow has one."""
    return ["GPU:0"] if tf.config.list_logical_devices("GPU") else []


@register(tf.distribute.OneDeviceStrategy)
class OneDevice(Placement):
  """One replica on one device."""

  loops_evaluation = True

  def distribute(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """See `Placement`; the step copies what it uses to a GPU.

    TensorFlow's iterator of devices would cost 90 us a step on a CPU. To a GPU it copies every
    feature, and integers of 32 bits back again, because a function returns them to the host.
    """
    return dataset


def default() -> tf.distribute.Strategy:
  """TensorFlow's default strategy on the first device: no distribution. Call it outside a scope."""
  return tf.distribute.get_strategy()


def one_device(*, device: str | None = None) -> tf.distribute.Strategy:
  """One replica on `device`, such as "GPU:0"; None uses the first GPU, or the CPU without one."""
  names = logical("GPU") + logical("CPU")
  return tf.distribute.OneDeviceStrategy(known_device(device, names) if device else names[0])


def auto(
  *, cpu_replicas: int = 1, cross_device_ops: CrossDeviceOps = "auto"
) -> tf.distribute.Strategy:
  """Every GPU mirrored; without a GPU, the CPU, split into `cpu_replicas` logical devices.

  If TF_CONFIG names several processes, as with --local_workers, it is `multi_worker_mirrored`.

  Args:
    cpu_replicas: the number of logical CPUs without a GPU.
    cross_device_ops: with several replicas of one process; see docs/reduction.md.

  Raises:
    ConfigError: `cpu_replicas` beside several processes; an unknown op, or an op that does not work
      on these devices.
  """
  if (tasks := placement.tasks_in(os.environ)) > 1:
    if cpu_replicas > 1:
      raise ConfigError(
        f"auto.cpu_replicas is {cpu_replicas}, but TF_CONFIG names {tasks} processes, each with "
        "one replica on its CPU; remove one of the two."
      )
    logging.info("strategy auto: multi_worker_mirrored, as TF_CONFIG names %d processes", tasks)
    return registry.load("strategy", "multi_worker_mirrored")()
  # Physical devices first: listing logical ones initialises them, and the CPU can no longer be
  # split.
  gpus = logical("GPU") if tf.config.list_physical_devices("GPU") else []
  if len(gpus) > 1:
    logging.info("strategy auto: mirrored over %s, all GPUs visible to TensorFlow", gpus)
    mirrored = registry.load("strategy", "mirrored")
    return mirrored(devices=gpus, cross_device_ops=cross_device_ops)
  if gpus:
    logging.info("strategy auto: one_device on %s, the only GPU visible to TensorFlow", gpus[0])
    return one_device(device=gpus[0])
  if cpu_replicas > 1:
    logging.info("strategy auto: mirrored over %d logical CPUs (auto.cpu_replicas)", cpu_replicas)
    mirrored = registry.load("strategy", "mirrored")
    return mirrored(cpu_replicas=cpu_replicas, cross_device_ops=cross_device_ops)
  logging.info("strategy auto: one_device on the CPU, no GPU is visible to TensorFlow")
  return one_device(device="CPU:0")


def split_cpu(replicas: int) -> list[str]:
  """Splits the CPU into logical devices, to run several replicas without a GPU (host).

  Call it before TensorFlow initialises its devices. A later call with the same or a smaller number
  has no effect.

  Args:
    replicas: at least 1.

  Returns:
    The names of the logical devices, such as "CPU:0".

  Raises:
    ConfigError: `replicas` is below 1, or TensorFlow has initialised fewer devices.
  """
  require_integer("cpu_replicas", replicas, at_least=1)
  cpu = tf.config.list_physical_devices("CPU")[0]
  configured = tf.config.get_logical_device_configuration(cpu)
  if replicas > len(configured or [None]):
    try:
      tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
      )
    except RuntimeError as error:
      raise ConfigError(
        f"cpu_replicas is {replicas}, but TensorFlow is already initialised with fewer logical "
        "CPUs, as by a task that makes its model at once: write run.task = @my_task, without "
        "parentheses, which is called after the split; in Python, give lw.run the function, or "
        "split the CPU before making the first tensor."
      ) from error
  return logical("CPU")[:replicas]


def known_device(device: str, known: Sequence[str]) -> str:
  """Returns a device; raises ConfigError if it is not a known one."""
  if device.removeprefix("/").removeprefix("device:") not in known:
    raise unknown("device", device, known)
  return device


def logical(kind: str) -> list[str]:
  """Returns the logical devices of a kind, such as ["GPU:0", "GPU:1"] (host)."""
  return [d.name.removeprefix("/device:") for d in tf.config.list_logical_devices(kind)]
