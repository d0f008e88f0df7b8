"""A task that learns from its training split what it scales by, and leaves a note of each fit."""

import json
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import toys

import loopwright
from loopwright import ArraySource, Task

RNG = np.random.default_rng(12)
EXAMPLES = 30
X = {
  "train": RNG.normal(3.0, 2.0, [EXAMPLES, 2]).astype(np.float32),
  "eval": RNG.normal(-1.0, 1.0, [EXAMPLES, 2]).astype(np.float32),
}
Y = {split: RNG.normal(size=EXAMPLES).astype(np.float32) for split in X}
KERNEL = np.array([[1.0], [-0.5]], np.float32)
TASK = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker", "index": 0}}'))["task"]
NAME = f"{TASK['type']}-{TASK['index']}"


def scaled(split, shift=0.0):
  """By NumPy in float64, what the model sees of a split."""
  x = X["train"].astype(np.float64) + shift
  return (X[split] + shift - x.mean(0)) / x.std(0)


@loopwright.register
class Scaled(toys.Regression):
  """Linear regression on standardised features; `folder` gets a line a fit, and what is used."""

  def __init__(self, *, folder: str, shift: float = 0.0, random: bool = False) -> None:
    self._folder, self._shift, self._random = Path(folder), shift, random

  def fit(self):
    with open(self._folder / "fits", "a") as fits:
      fits.write(f"{NAME}\n")
    if self._random:
      keras.random.uniform([3])
      np.random.uniform()
    x = X["train"].astype(np.float64) + self._shift
    scale = {"mean": x.mean(0).tolist(), "deviation": x.std(0).tolist()}
    return {"scale.json": json.dumps(scale).encode()}

  def use(self, assets):
    (self._folder / f"used-{NAME}").write_bytes(assets["scale.json"])
    scale = json.loads(assets["scale.json"])
    self._mean, self._deviation = np.float32(scale["mean"]), np.float32(scale["deviation"])

  def build_model(self):
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input([2]), dense])
    if not self._random:
      dense.kernel.assign(KERNEL)
    return model

  def source(self, split):
    return ArraySource(features={"x": X[split] + np.float32(self._shift), "y": Y[split]})

  def preprocess(self, batch, training):
    return {**batch, "x": (batch["x"] - self._mean) / self._deviation}

  def export_signature(self):
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, "x")])
    def serve(x):
      return {"y": self.forward(self.preprocess({"x": x}, False), False)}

    return serve


class Unscaled(Scaled):
  """Learns nothing."""

  fit = Task.fit

  def preprocess(self, batch, training):
    return batch
