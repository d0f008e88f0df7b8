"""Where the addresses of a cluster come from: TF_CONFIG or Slurm; the clouds are in cloud.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import tensorflow as tf

from framework.errors import ConfigError
from framework.strategies.cluster import ClusterResolver

ResolverFactory = Callable[[], ClusterResolver]
_MANY = 2**16


def tf_config() -> ClusterResolver:
  """The cluster in the environment variable TF_CONFIG: Kubeflow, Vertex AI, Ray, a local cluster.

  Raises:
    ConfigError: it is missing or not a cluster in JSON.
  """
  resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
  try:
    jobs = resolver.cluster_spec().jobs
  except (ValueError, TypeError) as error:
    raise ConfigError(f"TF_CONFIG is not a cluster in JSON ({error}).") from error
  if not jobs:
    raise ConfigError(
      "the environment variable TF_CONFIG names no cluster; start the processes with it, or try a "
      "cluster on this machine with --local_workers=2."
    )
  return resolver


def slurm(*, port_base: int = 8888, gpus_per_node: int | None = None) -> ClusterResolver:
  """The cluster of a Slurm job: one worker for each task of the step that `srun` started.

  Args:
    port_base: the first port; tasks on one node take consecutive ones.
    gpus_per_node: divided among the tasks of a node, by CUDA_VISIBLE_DEVICES; None takes what
      Slurm gave the job (SLURM_GPUS_ON_NODE), 0 uses none.

  Raises:
    ConfigError: not inside a Slurm step.
  """
  if gpus_per_node is None:
    gpus_per_node = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
  # TensorFlow's resolver fails without GPUs, so it then gets some that nobody will look for.
  some = {"gpus_per_node": gpus_per_node, "auto_set_gpu": True}
  none = {"gpus_per_node": _MANY, "gpus_per_task": 1, "auto_set_gpu": False}
  try:
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
      port_base=port_base, **(some if gpus_per_node else none)
    )
    resolver.cluster_spec()  # sets task_type and task_id
  except (KeyError, RuntimeError, ValueError) as error:
    reason = str(error).strip("'")
    raise ConfigError(
      f"this is no step of a Slurm job ({reason}); start it with srun, as deploy/slurm.sh does."
    ) from error
  return resolver


# ---- What they must agree on ----
