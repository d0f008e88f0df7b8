"""One process, four logical CPUs: what every in-process test of N replicas runs on."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import pytest
import tensorflow as tf

LOGICAL_CPUS = 4


def pytest_configure() -> None:
  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
  )


@pytest.fixture
def mirrored():
  """Makes a MirroredStrategy of N logical CPUs.

  Reduced without collectives: a process can hold only one size of collective group.
  """

  def make(replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(
      [f"CPU:{i}" for i in range(replicas)],
      cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )

  return make
