"""Model-agnostic meta-learning (MAML): initial weights that fit a sine wave after one update.

An example is a whole task: points to adapt to (support) and points to evaluate (query). The inner
update is part of `forward`, so the gradient of the loss goes through it, with second derivatives.
All tasks of a batch adapt at once, each with its own weights.

Finn et al., "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, EvalStep, Loss, Source, Task
from loopwright.metrics import weighted_sum

SEEDS = {"train": 1, "eval": 2}
"""A seed per split, so that the splits share no wave."""


class Sinusoids(Source):
  """Sine waves as in section 5.1 of the paper: example i is a function of (seed, i) alone.

  Each has "support_x", "support_y", "query_x", "query_y", float32 [rows, points]: amplitude in
  [0.1, 5], phase in [0, pi], x in [-5, 5], all uniform.
  """

  def __init__(self, *, num_examples: int, seed: int, support: int, query: int) -> None:
    """Keeps its arguments: number of waves, their seed, and points per wave."""
    self.num_examples = num_examples
    self._seed, self._support, self._query = seed, support, query

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    names = ("support_x", "support_y", "query_x", "query_y")
    sizes = [*2 * [self._support], *2 * [self._query]]
    shapes = [tf.TensorSpec([size], tf.float32) for size in sizes]
    # One wave at a time: in a vectorised sine, rounding depends on the element's place.
    waves = tf.map_fn(self._wave, tf.cast(indices, tf.int32), fn_output_signature=shapes)
    return dict(zip(names, waves, strict=True))

  def _wave(self, number: tf.Tensor) -> list[tf.Tensor]:
    count = 2 + self._support + self._query
    drawn = tf.random.stateless_uniform([count], seed=[self._seed, number])
    amplitude, phase, x = 0.1 + 4.9 * drawn[0], math.pi * drawn[1], 10.0 * drawn[2:] - 5.0
    y, cut = amplitude * tf.sin(x - phase), self._support
    return [x[:cut], y[:cut], x[cut:], y[cut:]]


@loopwright.register
class SinusoidMaml(Task):
  """Learns initial weights of a small MLP; one example is one sine wave."""

  def __init__(
    self,
    *,
    units: Sequence[int] = (40, 40),
    activation: str = "relu",
    support: int = 10,
    query: int = 10,
    inner_rate: float = 0.01,
    inner_steps: int = 1,
    second_order: bool = True,
    train_waves: int = 1_000_000,
    eval_waves: int = 1000,
    eval_steps: Sequence[int] = (0, 1, 5, 10),
  ) -> None:
    """Keeps its arguments.

    Args:
      units: of the hidden layers.
      activation: of the hidden layers, a Keras name.
      support: points for the inner update, K in the paper.
      query: points for the loss.
      inner_rate: learning rate of the inner update, alpha in the paper.
      inner_steps: inner updates in training.
      second_order: False treats the inner gradient as a constant: the paper's first-order MAML.
      train_waves: examples in an epoch.
      eval_waves: examples of an evaluation.
      eval_steps: numbers of inner updates after which to log the loss, as "loss_after_<n>".

    Raises:
      ConfigError: a number is out of its range.
    """
    for name, value in (("support", support), ("query", query), ("inner_steps", inner_steps)):
      if value < 1:
        raise ConfigError(f"SinusoidMaml.{name} is {value}; it must be 1 or more.")
    if not eval_steps or min(eval_steps) < 0:
      raise ConfigError(
        f"SinusoidMaml.eval_steps is {tuple(eval_steps)}; it must have numbers of inner updates of "
        "0 or more, such as (0, 1, 10)."
      )
    self._units, self._activation = tuple(units), activation
    self._points = {"support": support, "query": query}
    self._rate, self._inner_steps, self._second_order = inner_rate, inner_steps, second_order
    self._waves = {"train": train_waves, "eval": eval_waves}
    self._eval_steps = sorted(set(eval_steps))

  def build_model(self) -> keras.Model:
    """Returns an MLP [n, 1] -> [n, 1]; training uses its weights through `predict`."""
    hidden = [keras.layers.Dense(width, activation=self._activation) for width in self._units]
    return keras.Sequential([keras.Input([1]), *hidden, keras.layers.Dense(1)])

  def source(self, split: str) -> Source:
    """Returns the waves of a split."""
    return Sinusoids(num_examples=self._waves[split], seed=SEEDS[split], **self._points)

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Adapts to the support points and returns the query's predictions, float32 [n, query]."""
    weights = self.initial(batch["support_x"].shape[0])
    for _ in range(self._inner_steps):
      weights = self.adapted(weights, batch)
    return self.predict(weights, batch["query_x"])

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Mean squared error of each wave's query points."""
    return Loss.from_examples(squared_error(outputs, batch["query_y"]), batch["weight"])

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs the loss after each of `eval_steps` inner updates; "loss" is after `inner_steps`."""
    weights = self.initial(batch["support_x"].shape[0])
    for done in range(max(*self._eval_steps, self._inner_steps) + 1):
      weights = self.adapted(weights, batch) if done else weights
      errors = squared_error(self.predict(weights, batch["query_x"]), batch["query_y"])
      named = weighted_sum(errors, batch["weight"])
      if done in self._eval_steps:
        step.log({f"loss_after_{done}": named})
      if done == self._inner_steps:
        step.log({"loss": named})

  def initial(self, waves: int) -> list[tf.Tensor]:
    """Returns kernels [waves, in, out] and biases [waves, out] in turn, one copy per wave."""
    return [
      tf.repeat(tf.convert_to_tensor(v)[tf.newaxis], waves, axis=0)
      for v in self.model.trainable_variables
    ]

  def adapted(self, weights: Sequence[tf.Tensor], batch: Batch) -> list[tf.Tensor]:
    """Makes one inner update of each wave's weights, from its own support points."""
    with tf.GradientTape() as tape:
      tape.watch(weights)
      predicted = self.predict(weights, batch["support_x"])
      # Each wave has its own weights, so the gradient of the sum is each wave's own gradient.
      total = tf.reduce_sum(squared_error(predicted, batch["support_y"]))
    slopes = tape.gradient(total, weights)
    if not self._second_order:
      slopes = [tf.stop_gradient(slope) for slope in slopes]
    return [w - self._rate * slope for w, slope in zip(weights, slopes, strict=True)]

  def predict(self, weights: Sequence[tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Applies the model with one set of weights per wave: x [waves, points] -> the same shape."""
    hidden = x[..., tf.newaxis]
    for layer, kernel, bias in zip(self.model.layers, weights[::2], weights[1::2], strict=True):
      hidden = layer.activation(tf.matmul(hidden, kernel) + bias[:, tf.newaxis])
    return hidden[..., 0]

  def export_signature(self) -> Any:
    """Serves support points [n, k] and query x [n, m] -> query y [n, m], after adapting."""
    points = tf.TensorSpec((None, None), tf.float32)

    @tf.function(input_signature=[points, points, points])
    def serve(
      support_x: tf.Tensor, support_y: tf.Tensor, query_x: tf.Tensor
    ) -> dict[str, tf.Tensor]:
      weights = self.initial(tf.shape(support_x)[0])
      for _ in range(self._inner_steps):
        weights = self.adapted(weights, {"support_x": support_x, "support_y": support_y})
      return {"query_y": self.predict(weights, query_x)}

    return serve


def squared_error(predicted: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
  """Returns the mean over points: two [waves, points] -> [waves]."""
  return tf.reduce_mean(tf.square(predicted - wanted), axis=1)
