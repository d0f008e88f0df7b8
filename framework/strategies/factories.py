"""Name -> `tf.distribute` strategy, with the choice of cross-device op checked before training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from framework.errors import ConfigError, unknown
from framework.strategies import rendezvous, resolvers, servers

CrossDeviceOps = Literal[
  "auto", "nccl", "hierarchical_copy", "reduction_to_one_device", "collective"
]
Communication = Literal["auto", "ring", "nccl"]
StrategyFactory = Callable[[], tf.distribute.Strategy | servers.Server]
_KEYS_EACH = 1000
_first_keys = itertools.count(_KEYS_EACH, _KEYS_EACH)


class MirroredStrategy(tf.distribute.MirroredStrategy):
  """TensorFlow's, with group keys of its own for collectives.

  All of TensorFlow's count from 1, so that in one process the second would find the groups of the
  first under its keys, of other sizes and with tensors of other shapes. Each asks
  `_collective_key_base` where to begin; the strategies for several workers begin at 0.
  """

  def __init__(
    self, devices: Sequence[str], *, cross_device_ops: tf.distribute.CrossDeviceOps | None = None
  ) -> None:
    """Takes what TensorFlow's takes; each call takes the next keys of this process."""
    self._collective_key_base = next(_first_keys)
    super().__init__(devices, cross_device_ops=cross_device_ops)


def default() -> tf.distribute.Strategy:
  """No distribution: TensorFlow's default strategy on the first device; call it outside a scope."""
  return tf.distribute.get_strategy()


def one_device(*, device: str | None = None) -> tf.distribute.Strategy:
  """Everything on one device: `device` such as "GPU:0", or the first GPU, else the CPU."""
  names = _gpus() + _logical("CPU")
  return tf.distribute.OneDeviceStrategy(_known_device(device, names) if device else names[0])


def mirrored(
  *,
  devices: Sequence[str] | None = None,
  cpu_replicas: int | None = None,
  cross_device_ops: CrossDeviceOps = "auto",
  num_packs: int = 1,
) -> tf.distribute.Strategy:
  """One replica a device, variables mirrored, gradients summed by the chosen op.

  Args:
    devices: such as ("GPU:0", "GPU:1"); None takes every GPU, else the CPU.
    cpu_replicas: instead of `devices`, split the CPU into this many logical devices.
    cross_device_ops: see docs/reduction.md; "auto" says in the log what it took.
    num_packs: into how many buffers `nccl` and `hierarchical_copy` pack a batch of tensors.

  Raises:
    ConfigError: an unknown device or op, or an op that cannot work on these devices.
  """
  names = _replica_devices(devices, cpu_replicas)
  op = _checked_op(cross_device_ops, names, num_packs)
  return MirroredStrategy(names, cross_device_ops=op)


def central_storage(
  *,
  devices: Sequence[str] | None = None,
  cpu_replicas: int | None = None,
  parameter_device: str | None = None,
) -> tf.distribute.Strategy:
  """One replica a device, variables on one parameter device; gradients are summed there.

  Args:
    devices: compute devices; None takes every GPU, else the CPU.
    cpu_replicas: instead of `devices`, split the CPU into this many logical devices.
    parameter_device: where variables live; None takes the CPU.

  Raises:
    ConfigError: an unknown device.
  """
  names = _replica_devices(devices, cpu_replicas)
  parameters = parameter_device or _logical("CPU")[0]
  return tf.distribute.experimental.CentralStorageStrategy(
    compute_devices=names, parameter_device=_known_device(parameters, _logical("CPU") + _gpus())
  )


def multi_worker_mirrored(
  *,
  resolver: resolvers.ResolverFactory = resolvers.tf_config,
  communication: Communication = "auto",
  start_timeout_s: float = 300.0,
  heartbeat_timeout_s: float = 30.0,
) -> tf.distribute.Strategy:
  """One process a worker, every GPU of each a replica (else its CPU), gradients summed over all.

  The processes meet and compare versions, code and config before TensorFlow connects them.

  Args:
    resolver: where the addresses come from: @tf_config, @slurm, @kubernetes or @gce, or your own
      factory of a `tf.distribute.cluster_resolver.ClusterResolver`.
    communication: how tensors travel: "ring" over gRPC, "nccl" between GPUs, "auto" TensorFlow's
      choice.
    start_timeout_s: how long to wait for the other workers to come.
    heartbeat_timeout_s: how long a worker may be silent before the others give it up.

  Raises:
    ConfigError: no cluster, an unknown communication, or workers that were not started alike.
    ClusterError: a worker does not come, or the own port is taken.
  """
  kinds = tf.distribute.experimental.CommunicationImplementation
  choices = {"auto": kinds.AUTO, "ring": kinds.RING, "nccl": kinds.NCCL}
  if communication not in choices:
    raise unknown("multi_worker_mirrored.communication", communication, choices)
  if communication == "nccl" and not tf.config.list_physical_devices("GPU"):
    raise ConfigError(
      "multi_worker_mirrored.communication is 'nccl', but this worker has no GPU; use 'ring' or "
      "'auto'."
    )
  for name, seconds in (("start", start_timeout_s), ("heartbeat", heartbeat_timeout_s)):
    if not seconds > 0:
      raise ConfigError(
        f"multi_worker_mirrored.{name}_timeout_s is {seconds}; it must be above 0 seconds."
      )
  found = resolver()
  rendezvous.preflight(found, timeout_s=start_timeout_s)
  rendezvous.configure_runtime(
    found, start_timeout_s=start_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s
  )
  with rendezvous.ending_after(start_timeout_s):
    return tf.distribute.MultiWorkerMirroredStrategy(
      found, tf.distribute.experimental.CommunicationOptions(implementation=choices[communication])
    )


def tpu(
  *,
  address: str = "local",
  zone: str | None = None,
  project: str | None = None,
  start_timeout_s: float = 300.0,
) -> tf.distribute.Strategy:
  """Every core of a TPU is a replica; XLA compiles the step, whose shapes are all static.

  Args:
    address: "local" on a TPU VM, the name of a Cloud TPU, or "grpc://host:port".
    zone: of a TPU given by its name; None takes this machine's.
    project: of a TPU given by its name; None takes this machine's.
    start_timeout_s: how long connecting may take.

  Raises:
    ConfigError: there is no such TPU.
    ClusterError: nothing answers at a "grpc://" address.
  """
  remedy = "give 'local' on a TPU VM, a TPU's name with zone and project, or 'grpc://host:port'"
  if address.startswith("grpc://"):
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


def parameter_server(
  *,
  resolver: resolvers.ResolverFactory = resolvers.tf_config,
  start_timeout_s: float = 300.0,
  heartbeat_timeout_s: float = 30.0,
  min_shard_bytes: int | None = None,
  max_shards: int | None = None,
) -> tf.distribute.Strategy | servers.Server:
  """Asynchronous training: workers compute, variables live on servers, one chief coordinates.

  For a cluster of the jobs "chief" (one task), "worker" and "ps". See docs/multi-process.md.

  Args:
    resolver: where the addresses come from; see `multi_worker_mirrored`.
    start_timeout_s: how long the chief waits for workers and servers to come, a server or worker
      for its chief, and a run for a worker to come back when all of them are gone.
    heartbeat_timeout_s: how long a worker or server that takes connections may be silent before the
      chief gives the run up.
    min_shard_bytes: partition variables along their first axis, into parts of at least so many
      bytes (float32); None keeps each whole on one server. For tf.Module and tf_keras models.
    max_shards: into at most so many parts; None takes the number of servers.

  Returns:
    The strategy on the chief; on a worker or server a `Server`, which serves the chief.

  Raises:
    ConfigError: no cluster, one without the three jobs, or options out of range.
    ClusterError: a worker or server does not come.
  """
  return servers.join(
    resolver(),
    start_timeout_s=start_timeout_s,
    heartbeat_timeout_s=heartbeat_timeout_s,
    min_shard_bytes=min_shard_bytes,
    max_shards=max_shards,
  )


def auto(
  *, cpu_replicas: int = 1, cross_device_ops: CrossDeviceOps = "auto"
) -> tf.distribute.Strategy:
  """Every GPU mirrored; without a GPU the CPU, split into `cpu_replicas` logical devices.

  Args:
    cpu_replicas: without a GPU, split the CPU into this many logical devices.
    cross_device_ops: of several replicas; see docs/reduction.md.

  Raises:
    ConfigError: an unknown op, or one that cannot work on these devices.
  """
  # Physical devices first: asking for logical ones ends the time in which the CPU can be split.
  gpus = _gpus() if tf.config.list_physical_devices("GPU") else []
  if len(gpus) > 1:
    logging.info("strategy auto: mirrored over %s, all the GPUs that TensorFlow sees", gpus)
    return mirrored(devices=gpus, cross_device_ops=cross_device_ops)
  if gpus:
    logging.info("strategy auto: one_device on %s, the only GPU that TensorFlow sees", gpus[0])
    return one_device(device=gpus[0])
  if cpu_replicas > 1:
    logging.info("strategy auto: mirrored over %d logical CPUs (auto.cpu_replicas)", cpu_replicas)
    return mirrored(cpu_replicas=cpu_replicas, cross_device_ops=cross_device_ops)
  logging.info("strategy auto: one_device on the CPU, as TensorFlow sees no GPU")
  return one_device(device="CPU:0")


def split_cpu(replicas: int) -> list[str]:
  """Splits the CPU into logical devices, so that N replicas can be tried on a laptop.

  Must run before TensorFlow has initialised its devices. Asking again for as many or fewer is fine.

  Raises:
    ConfigError: fewer than one, or TensorFlow is already initialised with fewer devices.
  """
  if replicas < 1:
    raise ConfigError(f"cpu_replicas is {replicas}; it must be 1 or more.")
  cpu = tf.config.list_physical_devices("CPU")[0]
  configured = tf.config.get_logical_device_configuration(cpu)
  if replicas > len(configured or [None]):
    try:
      tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
      )
    except RuntimeError as error:
      raise ConfigError(
        f"cpu_replicas is {replicas}, but TensorFlow has already started with fewer logical CPUs; "
        "split the CPU before the first tensor is made, or start a fresh process."
      ) from error
  return _logical("CPU")[:replicas]


def _replica_devices(devices: Sequence[str] | None, cpu_replicas: int | None) -> list[str]:
  if devices and cpu_replicas:
    raise ConfigError(
      f"received both devices={list(devices)} and cpu_replicas={cpu_replicas}; choose one."
    )
  if cpu_replicas is not None:
    return split_cpu(cpu_replicas)
  if devices is not None:
    known = _gpus() + _logical("CPU")
    if len(set(devices)) != len(devices) or not devices:
      raise ConfigError(f"devices is {list(devices)}; name at least one device, each once.")
    return [_known_device(device, known) for device in devices]
  return _gpus() or _logical("CPU")[:1]


def _known_device(device: str, known: Sequence[str]) -> str:
  if device.removeprefix("/").removeprefix("device:") not in known:
    raise unknown("device", device, known)
  return device


def _gpus() -> list[str]:
  return _logical("GPU")


def _logical(kind: str) -> list[str]:
  return [d.name.removeprefix("/device:") for d in tf.config.list_logical_devices(kind)]


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
  """Returns TensorFlow's op for a name; None stands for its own collectives."""
  makers = {
    "nccl": lambda: tf.distribute.NcclAllReduce(num_packs=num_packs),
    "hierarchical_copy": lambda: tf.distribute.HierarchicalCopyAllReduce(num_packs=num_packs),
    "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    "collective": lambda: None,
  }
  if num_packs < 1:
    raise ConfigError(f"mirrored.num_packs is {num_packs}; it must be 1 or more.")
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
      "drops the last one of an odd number: use an even number, or 'collective' or "
      "'reduction_to_one_device'."
    )
  return makers[name]()


def _automatic_op(devices: Sequence[str]) -> tuple[str, str]:
  if len(devices) == 1:
    return "reduction_to_one_device", "a single replica has nothing to reduce"
  if all("GPU" in device for device in devices) and _has_nccl():
    return "nccl", f"all {len(devices)} replicas are GPUs and NCCL's kernel is there"
  if all("CPU" in device for device in devices):
    return "reduction_to_one_device", "measured fastest on logical CPUs, which share their memory"
  return "collective", "TensorFlow's own default for these devices"


def _has_nccl() -> bool:
  return bool(kernels.get_registered_kernels_for_op("NcclAllReduce").kernel)


def _require_nccl(devices: Sequence[str]) -> None:
  on_cpu = [device for device in devices if "GPU" not in device]
  if on_cpu or not _has_nccl():
    why = f"{on_cpu[0]} is not a GPU" if on_cpu else "this TensorFlow has no NCCL kernel"
    raise ConfigError(
      f"mirrored.cross_device_ops is 'nccl', but {why}; use 'collective', "
      "'reduction_to_one_device', or 'hierarchical_copy' (an even number of replicas)."
    )
