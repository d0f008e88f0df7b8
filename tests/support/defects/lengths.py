"""Graphs and texts of several lengths: mistakes with their padding, and what is right."""

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects.small import planted
from loopwright import ArraySource, Buckets, Loss, Task, weighted_sum

N, LONGEST, SIZES = 60, 12, (4, 8, 12)
EVALUATION, STEP, CONTENTS = (
  "same evaluation if padded further", "same step if padded further", "contents of padding",
)  # fmt: skip
AXES = {"nodes": (1,), "edges": (1, 2), "mask": (1,)}
DEFECTS, defect = planted()
"""Of a task: the check that fails, what it says, words of the line it names."""


def graphs(split, *, noise=0.0):
  """Graphs of 2 to 12 nodes, most of them small, padded to 12 with zeros or with noise."""
  rng = np.random.default_rng(len(split))
  count = np.minimum(rng.geometric(0.3, N) + 1, LONGEST)
  mask = np.arange(LONGEST) < count[:, None]
  nodes = np.where(mask[:, :, None], rng.normal(size=[N, LONGEST, 3]), 0)
  edges = (rng.random([N, LONGEST, LONGEST]) < 0.4) & mask[:, :, None] & mask[:, None, :]
  y = nodes.sum(axis=(1, 2))
  nodes += noise * rng.normal(size=nodes.shape) * ~mask[:, :, None]
  made = {"nodes": nodes, "edges": edges, "mask": mask, "y": y}
  return {name: value.astype(np.float32) for name, value in made.items()} | {
    "count": count.astype(np.int32)
  }


class Graphs(Task):
  """Right: a graph network whose mean is that of the nodes, in buckets."""

  noise = 0.0

  def build_model(self):
    layers = keras.layers
    return keras.Sequential([keras.Input([None, 3]), layers.Dense(5, "tanh"), layers.Dense(1)])

  def features(self, split):
    return graphs(split, noise=self.noise)

  def source(self, split):
    features = self.features(split)
    lengths = features["count"]
    return Buckets(ArraySource(features=features), lengths=lengths, boundaries=SIZES, trim=AXES)

  def forward(self, batch, training):
    nodes = batch["nodes"] + tf.matmul(batch["edges"], batch["nodes"])
    return self.read(self.model(nodes, training=training)[:, :, 0], batch)

  def read(self, values, batch):
    total = tf.reduce_sum(values * batch["mask"], axis=1)
    return total / tf.reduce_sum(batch["mask"], axis=1)

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

  def metrics(self, outputs, batch):
    return {"mae": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}


@defect(EVALUATION, "rows of 4 and of 12, lengths by Buckets: loss is ", "tf.reduce_mean")
class WithoutMask(Graphs):
  def read(self, values, batch):
    return tf.reduce_mean(values, axis=1)


@defect(EVALUATION, "rows of 4 and of 12, lengths by Buckets: loss is ", "tf.nn.softmax")
class AttendsToPadding(Graphs):
  def read(self, values, batch):
    attention = tf.nn.softmax(values, axis=-1)
    return tf.reduce_sum(values * attention * batch["mask"], axis=1)


@defect(STEP, "rows of 4 and of 12, lengths by Buckets: loss is ", "def train_step")
class DividesByTheBucket(Graphs):
  def train_step(self, step, batch):
    def loss(part):
      outputs = self.forward(part, training=True)
      total, weight = self.loss(outputs, part)
      return Loss(total / tf.cast(tf.size(part["nodes"][0]), tf.float32), weight)

    step.update(loss, batch)


class OwnPadding(Graphs):
  """Right: all rows have 12 places; the mask says which are nodes."""

  without = "count"

  def source(self, split):
    features = self.features(split)
    del features[self.without]
    return ArraySource(features=features)


@defect(EVALUATION, "rows of 12 and of 15, lengths by 'mask': loss is ", "tf.reduce_max")
class OwnPaddingWithoutMask(OwnPadding):
  def features(self, split):
    features = super().features(split)
    return {**features, "nodes": features["nodes"] + features["mask"][:, :, None] * 0.1}

  def read(self, values, batch):
    return tf.reduce_max(values - 10.0, axis=1) + tf.reduce_mean(values, axis=1)


class OwnCount(OwnPadding):
  """Right: all rows have 12 places; a number says how many are nodes."""

  without = "mask"

  def forward(self, batch, training):
    mask = tf.sequence_mask(batch["count"], tf.shape(batch["nodes"])[1], tf.float32)
    return super().forward({**batch, "mask": mask}, training)


@defect(EVALUATION, "rows of 12 and of 15, lengths by 'count': loss is ", "tf.reduce_mean")
class OwnCountWithoutMask(OwnCount):
  def read(self, values, batch):
    return tf.reduce_mean(values, axis=1)


@defect(CONTENTS, "other numbers in the padding: loss is ", "[:, :4]")
class ReadsPadding(Graphs):
  """Its padding is noise, and only the sum of all nodes is divided by the right number."""

  noise = 0.3

  def source(self, split):
    features = self.features(split)
    lengths = np.minimum(features["count"], 11)
    source = ArraySource(features=features)
    return Buckets(source, lengths=lengths, boundaries=(4, 12), trim=AXES)

  def forward(self, batch, training):
    first = batch["nodes"][:, :4]
    return tf.reduce_sum(self.model(first)[:, :, 0], axis=1)


# ---- Right ----


class OneLength(OwnPadding):
  """The model takes rows of one length, so padding is always as long."""

  def build_model(self):
    layers = keras.layers
    places = (layers.Dense(LONGEST), layers.Reshape([-1, 1]))
    return network([LONGEST, 3], layers.Flatten(), *places)


class Texts(Graphs):
  """Words in buckets, a recurrent layer that skips 0, and dropout."""

  def build_model(self):
    layers = keras.layers
    words = (layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4, dropout=0.2))
    return network([None], *words, layers.Dropout(0.3), layers.Dense(1))

  def source(self, split):
    features = graphs(split)
    words = (features["mask"] * (1 + np.arange(LONGEST) % 7)).astype(np.int32)
    source = ArraySource(features={"words": words, "y": features["y"]})
    return Buckets(source, lengths=features["count"], boundaries=SIZES, trim=("words",))

  def forward(self, batch, training):
    return self.model(batch["words"], training=training)[:, 0]


class NumbersOfElsewhere(Graphs):
  """Two numbers of each example, of which none is a length."""

  def source(self, split):
    features = graphs(split)
    return ArraySource(
      features={"x": features["nodes"][:, :8, 0], "age": features["count"], "y": features["y"]}
    )

  def build_model(self):
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]


RIGHT = {
  Graphs: 2, OwnPadding: 2, OwnCount: 2, Texts: 2, OneLength: 0, NumbersOfElsewhere: 0,
}  # fmt: skip
"""Task -> the number of checks that pass; the others do not apply."""


@defect(EVALUATION, "rows of 4 and of 12, lengths by Buckets: mae is ", "tf.reduce_max(error")
class WrongOnlyInAMetric(Graphs):
  """The loss pools the largest of the nodes alone, in a line that comes first and is right."""

  def read(self, values, batch):
    largest = tf.reduce_max(values - 1e9 * (1 - batch["mask"]), axis=1)
    return super().read(values, batch) + largest

  def metrics(self, outputs, batch):
    error = tf.abs(outputs - batch["y"])[:, None] - batch["mask"]
    return {"mae": weighted_sum(tf.reduce_max(error, axis=1), batch["weight"])}
