"""Cluster resolvers for TF_CONFIG and Slurm; those for Kubernetes and GCE are in cloud.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import tensorflow as tf

from framework.errors import ConfigError
from framework.strategies.cluster import ClusterResolver

ResolverFactory = Callable[[], ClusterResolver]
_MANY = 2**16


def tf_config() -> ClusterResolver:
  """Reads the cluster from TF_CONFIG, which Kubeflow, Vertex AI, Ray and local clusters set.

  Raises:
    ConfigError: TF_CONFIG is missing or is not a cluster in JSON.
  """
  resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
  try:
    jobs = resolver.cluster_spec().jobs
  except (ValueError, TypeError) as error:
    raise ConfigError(f"TF_CONFIG is not a cluster in JSON ({error}).") from error
  if not jobs:
    raise ConfigError(
      "the environment variable TF_CONFIG names no cluster; set it for each process, or start a "
      "cluster on this machine with --local_workers=2."
    )
  return resolver


def slurm(*, port_base: int = 8888, gpus_per_node: int | None = None) -> ClusterResolver:
  """Reads the cluster of a Slurm job: one worker per task of the step that `srun` started.

  Args:
    port_base: the first port; tasks on one node use consecutive ports.
    gpus_per_node: GPUs of a node, divided among its tasks by CUDA_VISIBLE_DEVICES. None uses
      SLURM_GPUS_ON_NODE; 0 uses no GPU.

  Raises:
    ConfigError: this process is not in a Slurm step.
  """
  if gpus_per_node is None:
    gpus_per_node = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
  # TensorFlow's resolver fails for 0 GPUs. A made-up number works, as it then sets no devices.
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
      f"this process is not in a Slurm step ({reason}); start it with srun, as deploy/slurm.sh "
      "does."
    ) from error
  return resolver
