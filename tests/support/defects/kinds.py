"""Tasks of many kinds that are right: no check may fail on any of them."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from toys import network

from defects.small import FEATURES, Small, Written, data
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss, weighted_sum


class Dropout(Small):
  def hidden(self):
    return [self.library.layers.Dense(8, activation="relu"), self.library.layers.Dropout(0.4)]


class TfKeras(Dropout):
  library = tf_keras


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


class Module(Small):
  def build_model(self):
    module = tf.Module()
    kernel = tf.random.stateless_normal([FEATURES, 1], seed=[1, 2])
    module.kernel = tf.Variable(kernel, name="kernel")
    module.bias = tf.Variable(tf.zeros([1]), name="bias")
    return module

  def forward(self, batch, training):
    return (batch["x"] @ self.model.kernel + self.model.bias)[:, 0]


class Recurrent(Small):
  """Words as integers, an embedding, a recurrent layer with dropout between its steps too."""

  def build_model(self):
    words = keras.layers.Embedding(30, 5, mask_zero=True)
    recurrent = keras.layers.SimpleRNN(4, dropout=0.2, recurrent_dropout=0.2)
    return network([6], words, recurrent, keras.layers.Dense(1))

  def source(self, split):
    rng = np.random.default_rng(2 if split == "train" else 3)
    words = rng.integers(1, 30, [40, 6]).astype(np.int32)
    words[:, 4:] *= rng.integers(0, 2, [40, 1]).astype(np.int32)
    return ArraySource(features={"x": words, "y": (words[:, 0] > 15).astype(np.float32)})

  def errors(self, outputs, batch):
    return tf.nn.sigmoid_cross_entropy_with_logits(batch["y"], outputs)


class TwoOptimizers(Small):
  """Two models, each with its optimizer, the second updated by what the first has become."""

  def build_model(self):
    return {name: network([FEATURES], keras.layers.Dense(1)) for name in ("first", "second")}

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
      gradients, local = step.gradients(lambda b: self.training_loss(step, b), batch, variables)
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


class Classes(Small):
  """Labels, chance level, metrics."""

  chance_loss = float(np.log(3.0))

  def build_model(self):
    return network([FEATURES], keras.layers.Dense(3))

  def source(self, split):
    x = data(seed=0 if split == "train" else 1)["x"]
    return ArraySource(features={"x": x, "label": np.argmax(x, axis=1).astype(np.int32)})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def errors(self, outputs, batch):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)

  def metrics(self, outputs, batch):
    hits = tf.argmax(outputs, axis=-1, output_type=tf.int32) == batch["label"]
    return {"accuracy": weighted_sum(hits, batch["weight"])}


class Shares(Small):
  """Two updates, each on half of the rows."""

  def train_step(self, step, batch):
    for first in range(2):
      share = {name: value[first::2] for name, value in batch.items()}
      step.update(lambda part: self.training_loss(step, part), share)


RIGHT = (
  Small, Dropout, BatchNorm, Weighted, Regularised, TfKeras, Module, Recurrent, Written,
  TwoOptimizers, Sharpness, Classes,
)  # fmt: skip
