"""`NoiseScale`: how large a batch is worth while, from the gradients of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.errors import ConfigError
from loopwright.observers import AllReduce, Observer, StepObserver, Tensors
from loopwright.strategies import placement

_DECAY = 0.99
"""Of the running means, a step."""


class NoiseScale(Action):
  """Logs the gradient noise scale: about the largest batch that makes steps better in proportion.

  It is ``tr(S) / |G|^2``: G is the gradient over all examples, S the covariance of those of single
  ones (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A). A batch
  of this size needs about twice as many examples as the smallest one, and twice as many steps as
  the largest. With g_i the summed gradient of replica i, w_i the sum of its weights, and A the sum
  of ``|g_i|^2``, ``|G|^2`` is estimated by ``(|sum g_i|^2 - A) / ((sum w_i)^2 - sum w_i^2)``, and
  tr(S) by ``(A - |G|^2 sum w_i^2) / sum w_i``, without bias for weights of 1. Both have running
  means over about 100 steps. The sums travel with the all-reduce of the step's first update.
  """

  on = "train"

  def __init__(self) -> None:
    self._square = self._variance = 0.0

  def bind(self, run: Run) -> None:
    """Makes the trainer measure its replicas' gradients.

    Raises:
      ConfigError: there are no two replicas to compare, or training is asynchronous.
    """
    super().bind(run)
    place = placement.of(run.strategy)
    if not place.replays or run.strategy.num_replicas_in_sync < 2:
      raise ConfigError(
        f"NoiseScale compares the gradients of replicas, and {place.name} has "
        f"{run.strategy.num_replicas_in_sync} that train together; use two or more, such as "
        "run.strategy = @mirrored with mirrored.cpu_replicas = 2."
      )
    assert run.trainer is not None
    trainer = run.trainer

    def factor() -> tf.Tensor | None:
      return trainer.parts.loss_scale.factor(trainer.global_batch_size)

    trainer.observe(_Noise(self._seen, factor))

  def state(self) -> dict[str, float]:
    """Returns the running means."""
    return {"square": self._square, "variance": self._variance}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a `state`."""
    self._square, self._variance = state["square"], state["variance"]

  def __call__(self, output: Output) -> None:
    """Does nothing: the trainer logs it."""

  def result(self) -> str:
    """Returns the last value."""
    scale = self._scale()
    return f"noise scale {scale:.3g}" if math.isfinite(scale) else ""

  def _seen(self, square: float, variance: float, steps: int) -> float:
    """Adds the means of a loop; returns the noise scale."""
    if math.isfinite(square) and math.isfinite(variance):
      kept = _DECAY**steps
      self._square = kept * self._square + (1 - kept) * square
      self._variance = kept * self._variance + (1 - kept) * variance
    return self._scale()

  def _scale(self) -> float:
    """Returns the ratio; NaN while the gradient is not seen above its noise."""
    return self._variance / self._square if self._square > 0 else math.nan


class _Noise(Observer):
  """Turns what the replicas measure into one value of a loop, "noise_scale"."""

  def __init__(
    self, seen: Callable[[float, float, int], float], factor: Callable[[], tf.Tensor | None]
  ) -> None:
    self._seen, self._factor = seen, factor

  def of_replica(self) -> StepObserver:
    return _NoiseOfReplica(self._factor)

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    square = results.pop("noise_square", math.nan)
    results["noise_scale"] = self._seen(square, results.pop("noise_variance", math.nan), done)


class _NoiseOfReplica(StepObserver):
  """Measures the first all-reduce of a step."""

  def __init__(self, factor: Callable[[], tf.Tensor | None]) -> None:
    self._factor = factor
    self._found: dict[str, tuple[tf.Tensor, tf.Tensor]] | None = None

  def all_reduce(
    self, reduce: AllReduce, gradients: Tensors, scalars: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    if self._found is not None:
      return reduce(gradients, scalars)
    factor = self._factor()  # gradients come scaled
    per_square = 1.0 / tf.square(1.0 if factor is None else factor)
    own = per_square * _square(gradients), tf.square(tf.cast(scalars[1], tf.float32))
    sums, more = reduce(gradients, [*scalars, *own])
    *scalar_sums, squares, weights_squared = more
    weight = tf.cast(scalar_sums[1], tf.float32)
    pairs = tf.square(weight) - weights_squared
    square = tf.math.divide_no_nan(per_square * _square(sums) - squares, pairs)
    variance = tf.math.divide_no_nan(squares - square * weights_squared, weight)
    counts = tf.cast((pairs > 0) & tf.math.is_finite(variance), tf.float32)
    self._found = {
      "noise_square": (tf.math.multiply_no_nan(square, counts), counts),
      "noise_variance": (tf.math.multiply_no_nan(variance, counts), counts),
    }
    return sums, scalar_sums

  def metrics(self) -> Mapping[str, tuple[tf.Tensor, tf.Tensor]]:
    return self._found or {}


def _square(tensors: Tensors) -> tf.Tensor:
  """Returns the sum of squares of all elements, a float32 scalar."""
  return 2 * tf.add_n([tf.nn.l2_loss(tf.cast(each, tf.float32)) for each in tensors])
