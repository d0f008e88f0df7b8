"""Copies of a run's state in memory that outlives the processes, for a restart after a fault.

They are checkpoints with TensorFlow's checksums, whole or absent, in a folder in memory. The
program that restarts the processes (tools/local_cluster.py) makes the folder, and removes it at its
end.
"""

from __future__ import annotations

import os
import time

import tensorflow as tf
from absl import logging

from loopwright.distribution.cluster import SNAPSHOTS, Cluster
from loopwright.errors import first_line
from loopwright.run_folder import layout
from loopwright.run_folder.checkpoints import CheckpointManager

_EVERY_S = 1.0
"""A copy costs some ms on each worker, so that it is not worth while after each short loop."""


class Snapshots:
  """Takes a copy after a loop, about once a second; `manager` restores the newest."""

  kept = 2

  def __init__(self, manager: CheckpointManager, cluster: Cluster, *, start: str) -> None:
    """Takes none yet.

    Args:
      manager: of the folder for them, keeping `kept`.
      start: the id of this process in history.jsonl, by which the copies are known as the run's.
    """
    self.manager, self._cluster, self._start = manager, cluster, start
    self._next_s, self._failed = 0.0, False

  def take(self) -> None:
    """Takes one if it is due, while training goes on; every worker must call it (host)."""
    if not self._cluster.any(self._cluster.is_chief and not self._failed and self._is_time()):
      return
    try:
      self._tell_start()
      self.manager.save()
    except (OSError, tf.errors.OpError) as error:  # of the one before
      self._failed = True
      logging.warning("no more copies in memory, only checkpoints: %s", first_line(error)[:300])

  def _tell_start(self) -> None:
    if self._start and self._cluster.is_chief:
      with open(os.path.join(os.environ[SNAPSHOTS], layout.STARTS), "a") as file:
        file.write(f"{self._start}\n")
    self._start = ""

  def _is_time(self) -> bool:
    now_s = time.monotonic()
    if now_s < self._next_s:
      return False
    self._next_s = now_s + _EVERY_S
    return True
