"""How long the steps of a worker wait for the others, by timestamps in the compiled step."""

from __future__ import annotations

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.host import timing
from loopwright.observers import AllReduce, Observer, StepObserver, Tensors


class Communication(Observer):
  """Adds "communication_s" to a loop's results: how long its steps waited in the all-reduce.

  From the last gradient of a replica until the sums over all replicas are there; the mean over the
  replicas of this process. It holds nothing up, and changes no number.
  """

  def __init__(self, replicas: int) -> None:
    """Makes the variable that adds up, over this process's replicas; not in a strategy's scope."""
    self._replicas, self._clock = replicas, timing.LoopClock()
    with tf.device("CPU:0"):
      self.sum = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="communication")

  @classmethod
  def of(cls, strategy: tf.distribute.Strategy) -> list[Communication]:
    """Returns one for a strategy; none on GPUs and TPUs, which the host does not wait for."""
    devices = placement.of(strategy).devices
    several = strategy.num_replicas_in_sync > 1
    apart = several and not any("GPU" in name or "TPU" in name for name in devices)
    return [cls(len(devices))] if apart else []

  def of_replica(self) -> StepObserver:
    """Times the all-reduce of a replica."""
    return _Timed(self.sum)

  def loop_begins(self, *, after_step: int, steps: int) -> None:
    """Starts at 0 s."""
    del after_step, steps
    self.sum.assign(0.0)
    self._clock = timing.LoopClock()

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Adds "communication_s", in seconds, the mean over this process's replicas."""
    seconds = float(self.sum.numpy()) / self._replicas
    results["communication_s"] = self._clock.corrected(seconds)


class _Timed(StepObserver):
  def __init__(self, total: tf.Variable) -> None:
    self._sum = total

  def all_reduce(
    self, reduce: AllReduce, gradients: Tensors, scalars: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    with tf.control_dependencies([*gradients, *scalars]), tf.device("CPU:0"):
      began = timing.timestamp()
    sums, scalar_sums = reduce(gradients, scalars)
    with tf.control_dependencies([*sums, *scalar_sums, began]), tf.device("CPU:0"):
      waited_s = tf.maximum(timing.timestamp() - began, 0.0)
      self._sum.assign_add(waited_s, read_value=False)
    return sums, scalar_sums
