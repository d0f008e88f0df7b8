"""The smallest task with all that a run saves: assets, augmentation, skipped steps, metrics.

A run of it takes about a second after imports; its examples come from any kind of source.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from typing import Literal

import numpy as np
import tensorflow as tf

import loopwright
from loopwright import (
  Action,
  ArraySource,
  Batch,
  ConfigError,
  Loss,
  Source,
  StreamSource,
  Task,
  weighted_sum,
)
from loopwright.actions.base import Output

Kind = Literal["arrays", "numpy_function", "generator", "memory_mapped", "stream"]
EXAMPLES, FEATURES = 40, 3


@tf.custom_gradient
def _overflowing(value: tf.Tensor, where: tf.Tensor):
  return tf.identity(value), lambda upstream: (tf.where(where, np.inf, upstream), None)


class Slow(Source):
  """Arrays behind a `tf.numpy_function` that takes `read_s` seconds a batch."""

  def __init__(self, arrays: Mapping[str, np.ndarray], read_s: float) -> None:
    """Stores its arguments."""
    self._arrays, self._read_s, self.num_examples = arrays, read_s, EXAMPLES

  def fetch(self, indices: tf.Tensor) -> Batch:
    """Waits, then returns the rows."""

    def read(rows: np.ndarray) -> list[np.ndarray]:
      until = time.monotonic() + self._read_s
      while time.monotonic() < until:  # as Python code that decodes: it asks for the lock again
        time.sleep(0.001)
      return [array[rows] for array in self._arrays.values()]

    values = tf.numpy_function(read, [indices], [tf.float32, tf.float32], stateful=False)
    for value, array in zip(values, self._arrays.values(), strict=True):
      value.set_shape([indices.shape[0], *array.shape[1:]])
    return dict(zip(self._arrays, values, strict=True))


@loopwright.register
class Small(Task):
  """Linear regression."""

  def __init__(self, *, kind: Kind = "arrays", read_s: float = 0.0) -> None:
    """Stores its arguments.

    Args:
      kind: where the examples come from.
      read_s: seconds that reading a batch takes, of "numpy_function" and "generator".
    """
    self._kind, self._read_s = kind, read_s
    self._scale = np.ones([FEATURES], np.float32)

  def fit(self) -> Mapping[str, bytes]:
    """The largest value of each feature."""
    return {"scale.bin": np.abs(self._arrays("train")["x"]).max(0).tobytes()}

  def use(self, assets: Mapping[str, bytes]) -> None:
    """Takes what `fit` returned."""
    self._scale = np.frombuffer(assets["scale.bin"], np.float32)

  def build_model(self) -> tf.Module:
    """Returns the weights."""
    module = tf.Module()
    module.weights = tf.Variable(tf.zeros([FEATURES]), name="weights")
    module.bias = tf.Variable(0.0, name="bias")
    return module

  def source(self, split: str) -> Source | StreamSource:
    """Returns the examples of `split`."""
    arrays = self._arrays(split)
    if split == "eval" or self._kind == "arrays":
      return ArraySource(features=arrays)
    if self._kind == "numpy_function":
      return Slow(arrays, self._read_s)
    if self._kind == "memory_mapped":
      return ArraySource(features={name: _mapped(array) for name, array in arrays.items()})
    return StreamSource(dataset=self._dataset(arrays), num_examples=EXAMPLES)

  def _dataset(self, arrays: Mapping[str, np.ndarray]) -> tf.data.Dataset:
    if self._kind == "stream":
      return tf.data.Dataset.from_tensor_slices(dict(arrays))
    spec = {name: tf.TensorSpec(a.shape[1:], tf.float32) for name, a in arrays.items()}
    rows = [{name: array[i] for name, array in arrays.items()} for i in range(EXAMPLES)]

    def generate():
      for row in rows:
        time.sleep(self._read_s / 10)
        yield row

    return tf.data.Dataset.from_generator(generate, output_signature=spec)

  def _arrays(self, split: str) -> dict[str, np.ndarray]:
    x = np.random.default_rng(len(split)).normal(size=[EXAMPLES, FEATURES]).astype(np.float32)
    return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32) + 1}

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales; adds noise by the examples' seeds when training."""
    x = batch["x"] / self._scale
    if training:
      x += tf.cast(batch["seed"][:, :1] % 1000, tf.float32) / 1e4
    return {**batch, "x": x}

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns the predictions, some with an infinite gradient in training."""
    outputs = tf.linalg.matvec(batch["x"], self.model.weights) + self.model.bias
    return _overflowing(outputs, training & (batch["example_id"] % 17 == 16))

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """The squared error."""
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch):
    """The absolute error."""
    return {"error": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}

  def export_signature(self):
    """Serves predictions."""
    model = self.model

    @tf.function(input_signature=[tf.TensorSpec([None, FEATURES])], autograph=False)
    def serve(x: tf.Tensor) -> dict[str, tf.Tensor]:
      return {"y": tf.linalg.matvec(x, model.weights) + model.bias}

    return serve


@loopwright.register
class Pace(Action):
  """Waits after each loop for LOOP_S seconds, of the environment: time passes, no processor works.

  It is no option of the config, which must be the same when the run continues faster.
  """

  on = "train"

  def __call__(self, output: Output) -> None:
    """Waits."""
    time.sleep(float(os.environ.get("LOOP_S", "0")))


@loopwright.register
class Fail(Action):
  """Fails after the first loop that ends at a step."""

  on = "train"

  def __init__(self, *, as_mistake: bool, at_step: int = 20) -> None:
    """Stores its arguments; `as_mistake`: with a ConfigError."""
    self._as_mistake, self._at_step = as_mistake, at_step

  def __call__(self, output: Output) -> None:
    """Raises."""
    if self.run.step >= self._at_step:
      raise ConfigError("a mistake of the trial") if self._as_mistake else RuntimeError("a failure")


def _mapped(array: np.ndarray) -> np.ndarray:
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "array.npy")
    np.save(path, array)
    return np.load(path, mmap_mode="r")
