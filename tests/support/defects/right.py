"""Right tasks, of which the others break one part, and of which nothing may be reported."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from toys import network

from loopwright import ArraySource, Loss, StreamSource, Task, weighted_sum

CLASSES = 3


def points(split, count=None):
  """Clouds around three corners: x float32 [n, 6], label int32 [n]."""
  count = count or {"train": 96, "eval": 32}[split]
  rng = np.random.default_rng([7, len(split)])
  label = rng.integers(0, CLASSES, count).astype(np.int32)
  x = rng.normal(size=[count, 6]) + np.eye(CLASSES, 6)[label]
  return {"x": x.astype(np.float32), "label": label}


class Right(Task):
  """Softmax regression."""

  def build_model(self):
    return network([6], keras.layers.Dense(CLASSES))

  def source(self, split):
    return ArraySource(features=points(split))

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def loss(self, outputs, batch):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs, batch):
    hits = tf.equal(tf.argmax(outputs, axis=-1, output_type=tf.int32), batch["label"])
    return {"accuracy": weighted_sum(hits, batch["weight"])}


class Dropout(Right):
  """Dropout of Keras 3."""

  library, rate = keras, 0.5

  def build_model(self):
    layers = self.library.layers
    hidden = (layers.Dense(8), layers.Dropout(self.rate))
    return network([6], *hidden, layers.Dense(CLASSES), library=self.library)


class OldDropout(Dropout):
  """Dropout of tf_keras."""

  library = tf_keras


class Normalised(Right):
  """Batch normalisation over all replicas."""

  def build_model(self):
    layers = keras.layers
    hidden = [layers.Dense(4), layers.BatchNormalization(synchronized=True)]
    return network([6], *hidden, layers.Dense(CLASSES))


class Augmented(Dropout):
  """Noise from batch["seed"], in training alone."""

  def preprocess(self, batch, training):
    if not training:
      return batch
    draw = lambda seed: tf.random.stateless_normal([6], seed=seed)  # noqa: E731
    noise = tf.map_fn(draw, batch["seed"], fn_output_signature=tf.float32)
    return {**batch, "x": batch["x"] + 0.1 * noise}


class Module(Right):
  """Without Keras, and with noise of its own in train_step."""

  def build_model(self):
    module = tf.Module()
    module.kernel = tf.Variable(tf.random.stateless_normal([6, CLASSES], seed=[1, 2]))
    module.bias = tf.Variable(tf.zeros([CLASSES]))
    return module

  def forward(self, batch, training):
    return batch["x"] @ self.model.kernel + self.model.bias

  def train_step(self, step, batch):
    noise = tf.random.stateless_normal(batch["x"].shape, seed=step.seed())
    step.update(lambda b: self.training_loss(step, b), {**batch, "x": batch["x"] + 0.1 * noise})


class Weighted(Right):
  """Weights of the source; a NaN and an ignored label where they are 0."""

  def source(self, split):
    features = points(split)
    weight = (1 + features["label"]).astype(np.float32)
    weight[5] = 0.0
    features["x"][5] = np.nan
    return ArraySource(features={**features, "weight": weight})


class Ignoring(Right):
  """Some labels are -1, and left out of the loss; float64 features and int64 labels."""

  def source(self, split):
    features = points(split)
    label = np.where(np.arange(len(features["label"])) % 5, features["label"], -1)
    return ArraySource(features={"x": features["x"].astype(np.float64), "label": label})

  def loss(self, outputs, batch):
    label = tf.maximum(batch["label"], 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, outputs)
    kept = tf.cast(batch["label"] >= 0, tf.float32)
    return Loss.from_examples(losses, batch["weight"] * kept)


class Streamed(Right):
  """A stream without a known length, named by strings."""

  def source(self, split):
    features = points(split)
    names = np.array([f"{split} {i}".encode() for i in range(len(features["label"]))])
    dataset = tf.data.Dataset.from_tensor_slices({**features, "name": names})
    return StreamSource(dataset=dataset.shuffle(16).filter(lambda example: True))

  def preprocess(self, batch, training):
    return {name: value for name, value in batch.items() if name not in ("name", "seed")}


class Endless(Right):
  """A stream without an end; evaluation takes 32."""

  def source(self, split):
    dataset = tf.data.Dataset.from_tensor_slices(points(split)).repeat()
    return StreamSource(dataset=dataset, num_examples=32 if split == "eval" else None)


class Regression(Right):
  """Whole numbers far from 0 as features and targets: no classes, nothing to scale."""

  outputs = 1

  def build_model(self):
    return network([2], keras.layers.Dense(self.outputs))

  def source(self, split):
    x = np.random.default_rng(len(split)).integers(0, 500, [64, 2])
    return ArraySource(features={"x": x.astype(np.float32), "y": x.sum(axis=1) - 100})

  def metrics(self, outputs, batch):
    return {}

  def loss(self, outputs, batch):
    errors = tf.square(outputs[:, 0] - tf.cast(batch["y"], tf.float32))
    return Loss.from_examples(errors, batch["weight"])


class Quantiles(Regression):
  """Three outputs for one whole number, which is no class."""

  outputs = 3

  def loss(self, outputs, batch):
    errors = tf.cast(batch["y"], tf.float32)[:, None] - outputs
    tilted = tf.maximum(errors * [0.1, 0.5, 0.9], errors * [-0.9, -0.5, -0.1])
    return Loss.from_examples(tf.reduce_sum(tilted, axis=1), batch["weight"])


class Rescaling(Right):
  """Pixels from 0 to 255, that the model itself brings to [0, 1]."""

  def build_model(self):
    layers = keras.layers
    return network([6], layers.Rescaling(1 / 255), layers.Dense(8), layers.Dense(CLASSES))

  def source(self, split):
    features = points(split)
    pixels = np.clip(features["x"] * 60 + 128, 0, 255).astype(np.float32)
    return ArraySource(features={**features, "x": pixels})


class FewValues(Right):
  """Two switches and a label: by chance, train and eval have the same rows."""

  def build_model(self):
    return network([2], keras.layers.Dense(2))

  def source(self, split):
    x = np.random.default_rng(len(split)).integers(0, 2, [64, 2])
    label = (x[:, 0] ^ x[:, 1]).astype(np.int32)
    return ArraySource(features={"x": x.astype(np.float32), "label": label})


class TrainOnly(Augmented):
  """There is nothing to evaluate on."""

  def source(self, split):
    return {"train": ArraySource(features=points("train"))}[split]


RIGHT = [
  *(Right, Dropout, OldDropout, Augmented, Module, Weighted, Ignoring, Streamed, Endless),
  *(Regression, Quantiles, Rescaling, FewValues, TrainOnly),
]
