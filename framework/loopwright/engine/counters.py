"""What a trainer counts, exactly under every strategy; a checkpoint has it."""

from __future__ import annotations

import tensorflow as tf

NEVER = tf.int64.max


class Counters:
  """Int64 scalars; all attributes are saved, under their names.

  Attributes:
    global_step: completed steps.
    skipped_steps: those whose update was not made.
    nonfinite_step: the first one whose loss was not finite, from 1; `NEVER` if there is none.
    position: examples consumed.
  """

  def __init__(self) -> None:
    """Makes them; call it in the strategy's scope."""
    self.global_step = _counter("global_step")
    self.skipped_steps = _counter("skipped_steps")
    self.nonfinite_step = _counter("nonfinite_step")
    self.nonfinite_step.assign(NEVER)
    self.position = tf.Variable(0, dtype=tf.int64, trainable=False, name="position")

  def count(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> None:
    """Counts one step; the arguments are bool scalars (cross-replica)."""
    with tf.control_dependencies([finite]):  # do not count a step whose input fails
      step = self.global_step.assign_add(1, read_value=True)
    bad_step = tf.maximum(step, NEVER * tf.cast(loss_finite, tf.int64))  # a tf.where costs 28 us
    self.nonfinite_step.assign(tf.minimum(self.nonfinite_step, bad_step), read_value=False)

  def skip(self, steps: int) -> None:
    """Counts steps without an update, if there are any (host)."""
    if steps > 0:
      self.skipped_steps.assign_add(steps)

  def metrics(self) -> dict[str, float]:
    """Returns "skipped_steps" so far, and "nonfinite_step" if there was one (host)."""
    found = {"skipped_steps": float(self.skipped_steps.numpy())}
    step = int(self.nonfinite_step.numpy())
    return found if step == NEVER else {**found, "nonfinite_step": float(step)}


def _counter(name: str) -> tf.Variable:
  first = tf.VariableAggregation.ONLY_FIRST_REPLICA
  return tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=first, name=name)
