"""Tasks of many kinds that are right: no check may fail on any of them."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from defects.small import FEATURES, Small, Written, data
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss, weighted_sum


class Dropout(Small):
  def hidden(self):
    return [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.4)]


class BatchNorm(Small):
  def hidden(self):
    return [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]


class Weighted(Small):
  """Examples of unequal weight, some of none."""

  def source(self, split):
    weight = np.random.default_rng(7).choice([0.0, 0.5, 2.0], 40).astype(np.float32)
    return ArraySource(features={**data(), "weight": weight})


class Regularised(Small):
  def hidden(self):
    return [keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.01))]


class TfKeras(Small):
  def build_model(self):
    layers = tf_keras.layers
    return tf_keras.Sequential(
      [tf_keras.Input([FEATURES]), layers.Dense(4, "tanh"), layers.Dropout(0.2), layers.Dense(1)]
    )


class Module(Small):
  def build_model(self):
    module = tf.Module()
    module.kernel = tf.Variable(
      tf.random.stateless_normal([FEATURES, 1], seed=[1, 2]), name="kernel"
    )
    module.bias = tf.Variable(tf.zeros([1]), name="bias")
    return module

  def forward(self, batch, training):
    return (batch["x"] @ self.model.kernel + self.model.bias)[:, 0]


class Recurrent(Small):
  """Words as integers, an embedding, a recurrent layer with dropout between its steps too."""

  def build_model(self):
    layers = keras.layers
    return keras.Sequential(
      [
        keras.Input([6], dtype="int32"),
        layers.Embedding(30, 5, mask_zero=True),
        layers.SimpleRNN(4, dropout=0.2, recurrent_dropout=0.2),
        layers.Dense(1),
      ]
    )

  def source(self, split):
    rng = np.random.default_rng(2 if split == "train" else 3)
    words = rng.integers(1, 30, [40, 6]).astype(np.int32)
    words[:, 4:] *= rng.integers(0, 2, [40, 1]).astype(np.int32)
    return ArraySource(features={"x": words, "y": (words[:, 0] > 15).astype(np.float32)})

  def loss(self, outputs, batch):
    losses = tf.nn.sigmoid_cross_entropy_with_logits(batch["y"], outputs)
    return Loss.from_examples(losses, batch["weight"])


class TwoOptimizers(Small):
  """Two models, each with its optimizer, the second updated by what the first has become."""

  def build_model(self):
    def made(name):
      return keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(1)], name=name)

    return {"first": made("first"), "second": made("second")}

  def train_step(self, step, batch):
    def first(part):
      outputs = self.model["first"](part["x"], training=True)[:, 0]
      return Loss.from_examples(tf.square(outputs - part["y"]), part["weight"])

    def second(part):
      target = tf.stop_gradient(self.model["first"](part["x"], training=True)[:, 0])
      outputs = self.model["second"](part["x"], training=True)[:, 0]
      return Loss.from_examples(tf.abs(outputs - target), part["weight"])

    step.update(first, batch, optimizer="first")
    step.update(second, batch, optimizer="second")

  def eval_step(self, step, batch):
    outputs = self.model["second"](batch["x"], training=False)[:, 0]
    step.log({"loss": weighted_sum(tf.square(outputs - batch["y"]), batch["weight"])})


class Sharpness(Small):
  """Two backward passes: the gradient where the loss is highest nearby (SAM)."""

  def train_step(self, step, batch):
    variables = step.variables()

    def reduced():
      gradients, local = step.gradients(lambda b: self.plain_loss(b), batch, variables)
      gradients, loss = step.all_reduce(gradients, local)
      return step.unscale(gradients, loss), loss

    gradients, _ = reduced()
    _, norm = step.check(gradients)
    up = [0.05 * g / (norm + 1e-6) for g in gradients]
    for variable, e in zip(variables, up, strict=True):
      variable.value.assign_add(e)
    gradients, loss = reduced()
    for variable, e in zip(variables, up, strict=True):
      variable.value.assign_sub(e)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)

  def plain_loss(self, batch):
    return self.loss(self.forward(batch, training=True), batch)


class Classes(Small):
  """Labels, chance level, metrics."""

  chance_loss = float(np.log(3.0))

  def build_model(self):
    return keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(3)])

  def source(self, split):
    features = data(seed=0 if split == "train" else 1)
    label = np.argmax(features["x"], axis=1).astype(np.int32)
    return ArraySource(features={"x": features["x"], "label": label})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def loss(self, outputs, batch):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs, batch):
    hits = tf.argmax(outputs, axis=-1, output_type=tf.int32) == batch["label"]
    return {"accuracy": weighted_sum(hits, batch["weight"])}


class Noise(Small):
  """Noise on the inputs, by step.seed()."""

  def train_step(self, step, batch):
    noise = tf.random.stateless_normal(tf.shape(batch["x"]), seed=step.seed())
    batch = {**batch, "x": batch["x"] + 0.1 * noise}
    step.update(lambda part: self.training_loss(step, part), batch)


class Shares(Small):
  """Two updates, each on half of the rows."""

  def train_step(self, step, batch):
    for first in range(2):
      share = {name: value[first::2] for name, value in batch.items()}
      step.update(lambda part: self.training_loss(step, part), share)


RIGHT = (
  Small, Dropout, BatchNorm, Weighted, Regularised, TfKeras, Module, Recurrent, Written,
  TwoOptimizers, Sharpness, Classes, Noise,
)  # fmt: skip
