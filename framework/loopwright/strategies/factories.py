"""Factories of `tf.distribute` strategies; they check devices and ops before training."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from loopwright.errors import ConfigError, require_integer, require_positive, unknown
from loopwright.host import signals
from loopwright.strategies import servers
from loopwright.strategies.cluster import proxies, rendezvous, resolvers
from loopwright.strategies.cluster.identity import Cluster, ClusterError, workers
from loopwright.strategies.model_parallel import ModelParallelStrategy, make_mesh

CrossDeviceOps = Literal[
  "auto", "nccl", "hierarchical_copy", "reduction_to_one_device", "collective"
]
Communication = Literal["auto", "ring", "nccl"]
StrategyFactory = Callable[[], tf.distribute.Strategy | servers.Server]
_KEYS_EACH = 1000
_GRACE_S = 10.0
_first_keys = itertools.count(_KEYS_EACH, _KEYS_EACH)


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


def default() -> tf.distribute.Strategy:
  """TensorFlow's default strategy on the first device: no distribution. Call it outside a scope."""
  return tf.distribute.get_strategy()


def one_device(*, device: str | None = None) -> tf.distribute.Strategy:
  """One replica on `device`, such as "GPU:0"; None uses the first GPU, or the CPU without one."""
  names = _logical("GPU") + _logical("CPU")
  return tf.distribute.OneDeviceStrategy(_known_device(device, names) if device else names[0])


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
  names = _replica_devices(devices, cpu_replicas)
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
  names = _replica_devices(devices, cpu_replicas)
  parameters = parameter_device or _logical("CPU")[0]
  return tf.distribute.experimental.CentralStorageStrategy(
    compute_devices=names,
    parameter_device=_known_device(parameters, _logical("CPU") + _logical("GPU")),
  )


def multi_worker_mirrored(
  *,
  resolver: resolvers.ResolverFactory = resolvers.tf_config,
  communication: Communication = "auto",
  start_timeout_s: float = 300.0,
  heartbeat_timeout_s: float = 30.0,
) -> tf.distribute.Strategy:
  """One process per worker, one replica per GPU (or the CPU); sums gradients over all workers.

  The processes compare versions, code and config before TensorFlow connects them.

  Args:
    resolver: the source of the addresses: @tf_config, @slurm, or your own
      factory of a `tf.distribute.cluster_resolver.ClusterResolver`.
    communication: "ring" over gRPC, "nccl" between GPUs, or "auto": "nccl" if the workers have
      GPUs, else "ring".
    start_timeout_s: seconds to wait for the other workers to connect.
    heartbeat_timeout_s: seconds that a worker may not answer before the others fail.

  Raises:
    ConfigError: no cluster, an unknown communication, or workers with different facts.
    ClusterError: a worker does not connect, or this worker's port is in use.
  """
  if communication not in (choices := get_args(Communication)):
    raise unknown("multi_worker_mirrored.communication", communication, choices)
  if communication == "nccl" and not tf.config.get_visible_devices("GPU"):
    raise ConfigError(
      "multi_worker_mirrored.communication is 'nccl', but this worker has no GPU; set it to 'ring' "
      "or 'auto'."
    )
  for name, seconds in (("start", start_timeout_s), ("heartbeat", heartbeat_timeout_s)):
    require_positive(f"multi_worker_mirrored.{name}_timeout_s", seconds, unit="seconds")
  found = resolver()
  rendezvous.preflight(found, timeout_s=start_timeout_s)
  # Threads that TensorFlow starts in it leave SIGTERM to this one.
  with signals.kept():
    return _connected(
      found, communication, start_timeout_s=start_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s
    )


def _connected(
  found: tf.distribute.cluster_resolver.ClusterResolver,
  communication: Communication,
  *,
  start_timeout_s: float,
  heartbeat_timeout_s: float,
) -> tf.distribute.Strategy:
  """Returns the strategy once TensorFlow has connected the workers."""
  kinds = tf.distribute.experimental.CommunicationImplementation
  rendezvous.configure_runtime(
    found, start_timeout_s=start_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s
  )
  if communication == "auto":
    communication, reason = _automatic_communication()
    logging.info("communication of workers auto: %s, %s", communication, reason)
  peers, index = workers(found)
  cluster = Cluster(strategy=tf.distribute.get_strategy(), index=index, peers=tuple(peers))
  options = tf.distribute.experimental.CommunicationOptions(
    implementation=kinds[communication.upper()]
  )
  # TensorFlow's own limit is start_timeout_s, and its error names the worker.
  ends = rendezvous.ending_after(start_timeout_s + _GRACE_S)
  with cluster.blaming(lambda: 0), ends:
    try:
      return tf.distribute.MultiWorkerMirroredStrategy(found, options)
    except tf.errors.DeadlineExceededError as error:
      if cluster.named(str(error)):
        raise  # one of them is lost
      raise ClusterError(
        f"TensorFlow did not connect {peers[index]} with the other workers within "
        f"{start_timeout_s:g} s, although they answer: look for a proxy in the environment, or a "
        "firewall, between them"
      ) from error


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
    proxies.avoid([address.removeprefix("grpc://")])
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
  """Asynchronous training: workers compute, servers store the variables, one chief coordinates.

  Needs a cluster of the jobs "chief" (one task), "worker" and "ps". See docs/multi-process.md.

  Args:
    resolver: the source of the addresses; see `multi_worker_mirrored`.
    start_timeout_s: seconds that the chief waits for workers and servers to start, a worker or
      server for the chief, and a run without any worker for one to come back.
    heartbeat_timeout_s: seconds that a connected worker or server may not answer before the run
      fails.
    min_shard_bytes: partition variables along their first axis into parts of at least this many
      bytes (float32); None keeps each variable whole. For tf.Module and tf_keras models.
    max_shards: the maximum number of parts; None uses the number of servers.

  Returns:
    The strategy on the chief; on a worker or server a `Server`, which serves the chief.

  Raises:
    ConfigError: no cluster, a cluster without the three jobs, or an option out of range.
    ClusterError: a worker or server does not answer.
  """
  return servers.join(
    resolver(),
    start_timeout_s=start_timeout_s,
    heartbeat_timeout_s=heartbeat_timeout_s,
    min_shard_bytes=min_shard_bytes,
    max_shards=max_shards,
  )


def model_parallel(
  *,
  mesh: Mapping[str, int],
  layouts: Mapping[str, Sequence[str | None]] = types.MappingProxyType({}),
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
    devices: as many as the mesh has, such as ("GPU:0", "GPU:1"); None uses the GPUs, or logical
      CPUs if there are not enough.

  Raises:
    ConfigError: a size or device that does not exist, or a layout with an unknown dimension.
  """
  if not isinstance(mesh, Mapping) or not mesh:
    raise ConfigError(f"model_parallel.mesh is {mesh!r}; give sizes, such as {{'batch': 2}}.")
  for name, size in mesh.items():
    require_integer(f"model_parallel.mesh[{name!r}]", size, at_least=1)
  count = math.prod(mesh.values())
  if devices is None:
    gpus = _logical("GPU") if tf.config.list_physical_devices("GPU") else []
    devices = gpus[:count] if len(gpus) >= count else split_cpu(count)
  elif len(devices) != count:
    raise ConfigError(
      f"model_parallel.mesh has {count} devices, but model_parallel.devices names {len(devices)}."
    )
  else:
    devices = _replica_devices(devices, None)
  return ModelParallelStrategy(make_mesh(mesh, devices), layouts)


def auto(
  *, cpu_replicas: int = 1, cross_device_ops: CrossDeviceOps = "auto"
) -> tf.distribute.Strategy:
  """Every GPU mirrored; without a GPU, the CPU, split into `cpu_replicas` logical devices.

  Args:
    cpu_replicas: the number of logical CPUs without a GPU.
    cross_device_ops: with several replicas; see docs/reduction.md.

  Raises:
    ConfigError: an unknown op, or an op that does not work on these devices.
  """
  # Physical devices first: listing logical ones initialises them, and the CPU can no longer be
  # split.
  gpus = _logical("GPU") if tf.config.list_physical_devices("GPU") else []
  if len(gpus) > 1:
    logging.info("strategy auto: mirrored over %s, all GPUs visible to TensorFlow", gpus)
    return mirrored(devices=gpus, cross_device_ops=cross_device_ops)
  if gpus:
    logging.info("strategy auto: one_device on %s, the only GPU visible to TensorFlow", gpus[0])
    return one_device(device=gpus[0])
  if cpu_replicas > 1:
    logging.info("strategy auto: mirrored over %d logical CPUs (auto.cpu_replicas)", cpu_replicas)
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
        "CPUs; split the CPU before making the first tensor, or start a new process."
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
    known = _logical("GPU") + _logical("CPU")
    if len(set(devices)) != len(devices) or not devices:
      raise ConfigError(f"devices is {list(devices)}; list at least one device, each once.")
    return [_known_device(device, known) for device in devices]
  return _logical("GPU") or _logical("CPU")[:1]


def _known_device(device: str, known: Sequence[str]) -> str:
  if device.removeprefix("/").removeprefix("device:") not in known:
    raise unknown("device", device, known)
  return device


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


def _automatic_communication() -> tuple[Literal["ring", "nccl"], str]:
  """TensorFlow's own AUTO uses the ring, through the host, between GPUs too."""
  if gpus := tf.config.get_visible_devices("GPU"):
    return "nccl", f"each worker has {len(gpus)} GPU(s)"  # `preflight` compares devices
  return "ring", "no worker has a GPU that TensorFlow sees"


def _automatic_op(devices: Sequence[str]) -> tuple[str, str]:
  if len(devices) == 1:
    return "reduction_to_one_device", "a single replica has nothing to reduce"
  if all("CPU" in device for device in devices):
    return "reduction_to_one_device", "measured fastest on logical CPUs, which share memory"
  # The same calls of NCCL on GPUs as "nccl" makes. TensorFlow takes its own ring for logical GPUs,
  # which NCCL refuses.
  return "collective", "NCCL between GPUs, TensorFlow's ring between other devices"


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
