"""Training on TPUs."""

from __future__ import annotations

import tensorflow as tf

from loopwright.distribution.placement import Placement, register
from loopwright.errors import ConfigError
from loopwright.strategies.workers import rendezvous


@register(tf.distribute.TPUStrategy)
class Tpu(Placement):
  """One replica per core of a TPU."""

  joins_processes = True


def tpu(
  *,
  address: str = "local",
  zone: str | None = None,
  project: str | None = None,
  start_timeout_s: float = 300.0,
) -> tf.distribute.Strategy:
  """One replica per TPU core; XLA compiles the step, in which all shapes are static.

  Args:
    address: "local" on a TPU VM, the name of a Cloud TPU, or "grpc://host:port".
    zone: the zone of a TPU given by name; None uses this machine's.
    project: the project of a TPU given by name; None uses this machine's.
    start_timeout_s: seconds that connecting may take.

  Raises:
    ConfigError: no TPU at `address`.
    ClusterError: nothing answers at a "grpc://" address.
  """
  remedy = "give 'local' on a TPU VM, a TPU's name with zone and project, or 'grpc://host:port'"
  if address.startswith("grpc://"):
    rendezvous.avoid_proxies()
    rendezvous.require_answer(address.removeprefix("grpc://"), timeout_s=start_timeout_s)
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
      tpu=address, zone=zone, project=project
    )
    with rendezvous.ending_after(start_timeout_s):
      if address != "local":
        tf.config.experimental_connect_to_cluster(resolver)
      tf.tpu.experimental.initialize_tpu_system(resolver)
  except (OSError, ImportError, RuntimeError, ValueError, tf.errors.OpError) as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0].partition(" Failed in")[0]
    raise ConfigError(
      f"there is no TPU at tpu.address {address!r} ({reason}); {remedy}."
    ) from error
  return tf.distribute.TPUStrategy(resolver)
