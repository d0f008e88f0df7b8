"""Cluster resolvers for TF_CONFIG and Slurm."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from loopwright.errors import ConfigError, is_integer
from loopwright.host import nvidia
from loopwright.options.declaration import COMPUTES_THERE, may_change
from loopwright.strategies.workers.identity import ClusterResolver

ResolverFactory = Callable[[], ClusterResolver]
_MANY = 2**16
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})", re.ASCII)
_SHOWN = 100


@may_change(COMPUTES_THERE)
def tf_config() -> ClusterResolver:
  """Reads the cluster from TF_CONFIG, which Kubeflow, Vertex AI, Ray and local clusters set.

  Raises:
    ConfigError: TF_CONFIG is missing, or does not describe a cluster and a task of it.
  """
  if not addresses_in(os.environ):
    raise ConfigError(
      "the environment variable TF_CONFIG names no cluster; set it for each process, or start a "
      "cluster on this machine with --local_workers=2."
    )
  return tf.distribute.cluster_resolver.TFConfigClusterResolver()


def addresses_in(environ: Mapping[str, str]) -> dict[str, list[str]]:
  """Returns job -> addresses of a checked TF_CONFIG; {} if it names no cluster.

  Raises:
    ConfigError: TF_CONFIG does not describe a cluster and a task of it.
  """
  try:
    config = json.loads(environ.get("TF_CONFIG", "{}"))
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"TF_CONFIG is not JSON ({error}).") from error
  if not isinstance(config, dict):
    raise _wrong("", config, "an object with 'cluster' and 'task'")
  cluster = config.get("cluster", {})
  if not isinstance(cluster, dict):
    raise _wrong("cluster", cluster, "an object: job -> list of 'host:port'")
  jobs = {job: _checked_job(job, addresses) for job, addresses in cluster.items()}
  jobs = {job: addresses for job, addresses in jobs.items() if addresses}
  twice = [each for each, n in Counter(a for of in jobs.values() for a in of).items() if n > 1]
  if twice:
    raise ConfigError(f"TF_CONFIG has the address {twice[0]} twice; each task needs its own.")
  if len(jobs.get("chief", ())) > 1:
    raise _wrong("cluster.chief", jobs["chief"], "one address")
  if jobs:
    _check_task(config.get("task"), jobs)
    if not isinstance(config.get("rpc_layer", ""), str):
      raise _wrong("rpc_layer", config["rpc_layer"], "a name, such as 'grpc'")
  return jobs


def _checked_job(job: str, addresses: Any) -> list[str]:
  if not re.fullmatch(r"[A-Za-z]\w{0,62}", job, re.ASCII):
    raise _wrong("cluster", job, "the name of a job, such as 'worker'")
  if not isinstance(addresses, list):
    raise _wrong(f"cluster.{job}", addresses, "a list of 'host:port'")
  for address in addresses:
    match = isinstance(address, str) and _ADDRESS.fullmatch(address)
    if not match or not 0 < int(match[1]) < 2**16:
      expected = "'host:port' with a port from 1 to 65535, such as '10.0.0.2:2222' or '[::1]:2222'"
      raise _wrong(f"cluster.{job}", address, expected)
  return addresses


def _check_task(task: Any, jobs: Mapping[str, Sequence[str]]) -> None:
  if not isinstance(task, dict):
    raise _wrong("task", task, "an object with 'type' and 'index'")
  job, index = task.get("type"), task.get("index")
  if not isinstance(job, str):
    raise _wrong("task.type", job, f"one of {', '.join(jobs)}")
  if isinstance(index, str) and re.fullmatch(r"\d{1,9}", index, re.ASCII):
    index = int(index)  # as TensorFlow does
  if job not in jobs:
    if not is_integer(index, at_least=0):
      raise _wrong("task.index", index, "an integer from 0")
  elif not is_integer(index, at_least=0, at_most=len(jobs[job]) - 1):
    raise _wrong("task.index", index, f"an integer from 0 to {len(jobs[job]) - 1}")


def _wrong(place: str, value: object, expected: str) -> ConfigError:
  name = f"TF_CONFIG has {place} = " if place else "TF_CONFIG is "
  text = json.dumps(value)
  short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
  return ConfigError(f"{name}{short}; it must be {expected}.")


class _Slurm(tf.distribute.cluster_resolver.SlurmClusterResolver):
  """TensorFlow's resolver, without its division of GPUs: it writes numbers that count from 0.

  The job may have others, and each task may have its own already. It fails for 0 GPUs; a made-up
  number works, as it sets no devices.
  """

  def __init__(self, port_base: int) -> None:
    super().__init__(port_base=port_base, gpus_per_node=_MANY, gpus_per_task=1, auto_set_gpu=False)

  def num_accelerators(self, *unused: Any, **named: Any) -> dict[str, int]:
    return {"GPU": len(tf.config.get_visible_devices("GPU"))}


@may_change(COMPUTES_THERE)
def slurm(*, port_base: int = 8888, gpus_per_node: int | None = None) -> ClusterResolver:
  """Reads the cluster of a Slurm job: one worker per task of the step that `srun` started.

  Args:
    port_base: the first port; tasks on one node use consecutive ports.
    gpus_per_node: GPUs of a node, divided among its tasks, unless Slurm has done so: then a task
      sees fewer. None uses SLURM_GPUS_ON_NODE; 0 uses no GPU.

  Raises:
    ConfigError: this process is not in a Slurm step.
  """
  if gpus_per_node is None:
    gpus_per_node = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
  try:
    resolver = _Slurm(port_base)
    tasks = resolver.cluster_spec().as_dict()[resolver.task_type]  # which this sets
  except (KeyError, RuntimeError, ValueError) as error:
    reason = str(error).strip("'")
    raise ConfigError(
      f"this process is not in a Slurm step ({reason}); start it with srun, as deploy/slurm.sh "
      "does."
    ) from error
  _take_gpus([address.rpartition(":")[0] for address in tasks], resolver.task_id, gpus_per_node)
  return resolver


def _take_gpus(hosts: Sequence[str], index: int, gpus_per_node: int) -> None:
  """Hides the GPUs of the other tasks on the host of task `index`."""
  seen = tf.config.get_visible_devices("GPU")
  if gpus_per_node and len(seen) < gpus_per_node:
    return  # Slurm has given this task its own
  here = hosts[index]
  parts = nvidia.divided(seen[:gpus_per_node], max(Counter(hosts).values()))
  tf.config.set_visible_devices([*parts[hosts[:index].count(here)]], "GPU")
