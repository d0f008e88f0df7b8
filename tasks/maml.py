"""Model-agnostic meta-learning (MAML): weights from which one step on ten points fits a sine wave.

An example is a whole task: points to adapt to (support) and points to be judged by (query). The
inner update is part of `forward`, so the gradient of the loss goes through it, second order
included; all tasks of a batch adapt at once, each with weights of its own.

Finn et al., "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import framework
from framework import Batch, ConfigError, EvalStep, Loss, Source, Task
from framework.metrics import weighted_sum

SEEDS = {"train": 1, "eval": 2}
"""Another one for each split, so that no wave is in both."""


class Sinusoids(Source):
  """Sine waves as in section 5.1 of the paper: example i is a function of (seed, i) alone.

  Each has "support_x", "support_y", "query_x", "query_y", float32 [rows, points]: amplitude in
  [0.1, 5], phase in [0, pi], x in [-5, 5], all uniform.
  """

  def __init__(self, *, num_examples: int, seed: int, support: int, query: int) -> None:
    """Keeps its arguments: how many waves, their seed, and the points of each."""
    self.num_examples = num_examples
    self._seed, self._support, self._query = seed, support, query

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    names = ("support_x", "support_y", "query_x", "query_y")
    sizes = [*2 * [self._support], *2 * [self._query]]
    shapes = [tf.TensorSpec([size], tf.float32) for size in sizes]
    # Wave by wave: a sine of many numbers at once is rounded by where each stands among them.
    waves = tf.map_fn(self._wave, tf.cast(indices, tf.int32), fn_output_signature=shapes)
    return dict(zip(names, waves, strict=True))

  def _wave(self, number: tf.Tensor) -> list[tf.Tensor]:
    count = 2 + self._support + self._query
    drawn = tf.random.stateless_uniform([count], seed=[self._seed, number])
    amplitude, phase, x = 0.1 + 4.9 * drawn[0], math.pi * drawn[1], 10.0 * drawn[2:] - 5.0
    y, cut = amplitude * tf.sin(x - phase), self._support
    return [x[:cut], y[:cut], x[cut:], y[cut:]]


@framework.register
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
      support: points that the inner update sees, K in the paper.
      query: points that the loss is taken of.
      inner_rate: of the inner gradient descent, alpha in the paper.
      inner_steps: inner updates in training.
      second_order: False takes the inner gradient for a constant: the paper's first-order MAML.
      train_waves: examples in an epoch.
      eval_waves: to evaluate on.
      eval_steps: after how many inner updates an evaluation logs the loss, as "loss_after_<n>".

    Raises:
      ConfigError: a number is out of its range.
    """
    for name, value in (("support", support), ("query", query), ("inner_steps", inner_steps)):
      if value < 1:
        raise ConfigError(f"SinusoidMaml.{name} is {value}; it must be 1 or more.")
    if not eval_steps or min(eval_steps) < 0:
      raise ConfigError(
        f"SinusoidMaml.eval_steps is {tuple(eval_steps)}; it must be numbers of inner updates of 0 "
        "or more, such as (0, 1, 10)."
      )
    self._units, self._activation = tuple(units), activation
    self._points = {"support": support, "query": query}
    self._rate, self._inner_steps, self._second_order = inner_rate, inner_steps, second_order
    self._waves = {"train": train_waves, "eval": eval_waves}
    self._eval_steps = sorted(set(eval_steps))

  def build_model(self) -> keras.Model:
    """Returns an MLP [n, 1] -> [n, 1]; training calls it by `predict`, not by itself."""
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
    """The mean squared error of each wave's query points."""
    return Loss.from_examples(squared_error(outputs, batch["query_y"]), batch["weight"])

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs the loss after each number of inner updates asked for; "loss" is that of training."""
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
    """Returns kernels and biases in turn, a copy for each wave: [waves, in, out], [waves, out]."""
    return [
      tf.repeat(tf.convert_to_tensor(v)[tf.newaxis], waves, axis=0)
      for v in self.model.trainable_variables
    ]

  def adapted(self, weights: Sequence[tf.Tensor], batch: Batch) -> list[tf.Tensor]:
    """One inner update of each wave's own weights, from its own support points."""
    with tf.GradientTape() as tape:
      tape.watch(weights)
      predicted = self.predict(weights, batch["support_x"])
      # A sum over waves: each has weights of its own, so each gets its own gradient.
      total = tf.reduce_sum(squared_error(predicted, batch["support_y"]))
    slopes = tape.gradient(total, weights)
    if not self._second_order:
      slopes = [tf.stop_gradient(slope) for slope in slopes]
    return [w - self._rate * slope for w, slope in zip(weights, slopes, strict=True)]

  def predict(self, weights: Sequence[tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """The model with a set of weights for each wave: x [waves, points] -> the same shape."""
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
  """[waves, points] twice -> [waves], the mean over points."""
  return tf.reduce_mean(tf.square(predicted - wanted), axis=1)
