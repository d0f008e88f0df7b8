"""The loop as a generator: `for step, metrics in trainer.steps(1000, every=100): ...`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

from loopwright.errors import require_integer


class Iterated:
  """A trainer that can be iterated over.

  Attributes:
    global_step: the number of the last step.
    train: runs so many steps.
  """

  global_step: tf.Variable
  train: Callable[[tf.Tensor], dict[str, float]]

  def steps(self, end: int, *, every: int = 100) -> Iterator[tuple[int, dict[str, float]]]:
    """Trains up to the step `end`, and yields (step, metrics) after each loop (host).

        for step, metrics in trainer.steps(1000, every=100):
          print(step, metrics["loss"])

    What the body does lies between two loops: evaluate, save, set the learning rate, break. Then
    `steps` may be called again, which goes on from there.

    Args:
      end: the step at which training ends, counted from the trainer's first.
      every: steps in one call of the compiled loop; the last loop may be shorter.

    Raises:
      ConfigError: `end` or `every` is no whole number, or below 1.
    """
    require_integer("steps(end)", end, at_least=1)
    require_integer("steps(every)", every, at_least=1)
    while (done := int(self.global_step.numpy())) < end:
      metrics = self.train(tf.constant(min(every, end - done)))
      yield int(self.global_step.numpy()), metrics
