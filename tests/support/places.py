"""Where a test of "the same on every strategy" trains: logical CPUs of one process."""

import tensorflow as tf

PLACES = ("one_device", "mirrored x2", "mirrored x3", "central_storage x2")


def strategy_of(place, mirrored):
  """Returns the strategy of one of `PLACES`; `mirrored` is the fixture."""
  if place.startswith("mirrored"):
    return mirrored(int(place[-1]))
  return tf.distribute.OneDeviceStrategy("CPU:0") if place == "one_device" else central_storage()


def central_storage():
  """Variables on the first of two logical CPUs."""
  return tf.distribute.experimental.CentralStorageStrategy(
    compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
  )
