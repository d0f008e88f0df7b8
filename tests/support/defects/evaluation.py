"""Mistakes that people make in evaluations, and what is right; see test_verify_evaluation.py."""

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects.right import CLASSES, Dropout, Normalised, Right, points
from defects.small import planted
from loopwright import ArraySource, Loss, PerExample, Sum, weighted_sum

DEFECTS, defect = planted()
"""Of a task: the checks that fail, their only cause, what the first says, its line."""
ON_TWO = "same evaluation on 2 replicas"
SMALLER, ORDER = "same evaluation in smaller batches", "same evaluation in another order"
MIXED = "examples that depend on one another"
PADDING, MODE = "same evaluation with padding", "no layer in training mode"


class Towers(Right):
  """Right: two towers; `rank` counts the candidates that are nearer than an example's own."""

  def build_model(self):
    return {name: network([6], keras.layers.Dense(4, name=name)) for name in ("query", "item")}

  def source(self, split):
    x = points(split)["x"]
    return ArraySource(features={"x": x, "y": x + 0.1 * x[::-1]})

  def forward(self, batch, training):
    return self.model["query"](batch["x"]), self.model["item"](batch["y"])

  def loss(self, outputs, batch):
    query, item = outputs
    return Loss.from_examples(tf.reduce_sum(tf.square(query - item), axis=1), batch["weight"])

  def metrics(self, outputs, batch):
    query, item = outputs
    return {"query": PerExample(query, batch["weight"]), "item": PerExample(item, batch["weight"])}

  def derived(self, values):
    if "query" not in values:
      return {}
    scores = values["query"] @ values["item"].T
    rank = np.sum(scores > np.diag(scores)[:, None], axis=1)
    return {"recall": np.mean(rank < 2)}


@defect((SMALLER, ORDER, ON_TWO), MIXED, "recall is ", "tf.matmul")
class LocalRecall(Towers):
  def metrics(self, outputs, batch):
    query, item = outputs
    hidden = 1e9 * (1.0 - batch["weight"])
    scores = tf.matmul(query, item, transpose_b=True) - hidden[None, :]
    own = tf.linalg.diag_part(scores)
    rank = tf.reduce_sum(tf.cast(scores > own[:, None], tf.int32), axis=1)
    return {"recall": weighted_sum(rank < 2, batch["weight"])}

  def derived(self, values):
    return {}


@defect((SMALLER, ORDER, ON_TWO), "metric divided by a local count", "error is ", '"error"')
class OfLargeOnes(Towers):
  """A mean over the items that are large, times the rows."""

  def metrics(self, outputs, batch):
    query, item = outputs
    large = tf.cast(tf.abs(batch["y"][:, :4]) > 0.5, tf.float32) * batch["weight"][:, None]
    rows = tf.reduce_sum(batch["weight"])
    mean = tf.reduce_sum(tf.abs(query - item) * large) / tf.maximum(tf.reduce_sum(large), 1.0)
    return {"error": (rows * mean, rows)}

  def derived(self, values):
    return {}


class GatheredRecall(Towers):
  """Right: ranked in the batch of all replicas, without padding: it depends on the batch size."""

  def hidden(self, weight):
    return 1e9 * (1.0 - weight)

  def eval_step(self, step, batch):
    query, item = self.forward(batch, training=False)
    scores = tf.matmul(query, step.all_gather(item), transpose_b=True)
    scores -= self.hidden(step.all_gather(batch["weight"]))
    own = tf.reduce_sum(query * item, axis=1, keepdims=True)
    rank = tf.reduce_sum(tf.cast(scores > own + 1e-5, tf.int32), axis=1)
    step.log({"recall": weighted_sum(rank < 2, batch["weight"])})


@defect((PADDING,), "padding counts", "recall is ", '"recall"')
class PaddedCandidates(GatheredRecall):
  """Rows of padding are candidates too."""

  def hidden(self, weight):
    return 0.0


@defect((PADDING,), "padding counts", "examples is 12, and 6", "def derived")
class CountsPadding(Right):
  def metrics(self, outputs, batch):
    return {"count": Sum(tf.ones_like(batch["weight"]))}

  def derived(self, values):
    count = np.sum(values["count"])
    return {"examples": count}


@defect((SMALLER, ON_TWO), "metric read in replica context", "accuracy is ", "tf.sign")
class MeanOfMeans(Right):
  def metrics(self, outputs, batch):
    hits, weight = super().metrics(outputs, batch)["accuracy"]
    return {"accuracy": (tf.math.divide_no_nan(hits, weight), tf.sign(weight))}


@defect((SMALLER, ORDER, ON_TWO), MIXED, "jump is ", "outputs[1:, 0]")
class Neighbours(Right):
  """Compares each row with the row before."""

  def metrics(self, outputs, batch):
    jumps = tf.abs(outputs[1:, 0] - outputs[:-1, 0])
    return {"jump": weighted_sum(tf.pad(jumps, [[1, 0]]), batch["weight"])}


@defect((ORDER,), "metric depends on the order", "early is ", "def derived")
class FirstHalf(Towers):
  def derived(self, values):
    early = values["query"][: len(values["query"]) // 2]
    return {"early": np.mean(early)}


def running_mean(size):
  return tf.Variable(
    tf.zeros([size]), trainable=False, name="mean", aggregation=tf.VariableAggregation.MEAN,
    synchronization=tf.VariableSynchronization.ON_READ,
  )  # fmt: skip


@defect((MODE,), "evaluation in training mode", "moving_mean, as only training", "training=True")
class NormalisesInEvaluation(Normalised):
  def forward(self, batch, training):
    return self.model(batch["x"], training=True)


@defect((MODE,), "evaluation changes the model", "an evaluation changes mean", "0.9 * mean + ")
class MovesInEvaluation(Right):
  """A running mean of the task's own."""

  def build_model(self):
    return {"net": super().build_model(), "mean": running_mean(6)}

  def forward(self, batch, training):
    mean = self.model["mean"]
    mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(batch["x"], 0))
    return self.model["net"](batch["x"] - mean, training=training)


class Counts(Right):
  """Right: evaluations are counted, and nothing uses the number."""

  def build_model(self):
    count = tf.Variable(0, trainable=False, name="count")
    return {"net": super().build_model(), "count": count}

  def forward(self, batch, training):
    self.model["count"].assign_add(1)
    return self.model["net"](batch["x"], training=training) * self.factor()

  def factor(self):
    return 1.0


@defect((MODE,), "evaluation changes the model", "an evaluation changes count", "assign_add(1)")
class CountsForTraining(Counts):
  def factor(self):
    return 1.0 / (1.0 + tf.cast(self.model["count"] % 7, tf.float32))


# ---- Right ----


class MovesInTraining(MovesInEvaluation):
  def forward(self, batch, training):
    mean = self.model["mean"]
    if training:
      mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(batch["x"], 0))
    return self.model["net"](batch["x"] - mean, training=training)


class Confusion(Dropout):
  """A Sum of shape [classes, classes], and an array that is derived of it."""

  def metrics(self, outputs, batch):
    guess = tf.one_hot(tf.argmax(outputs, axis=1), CLASSES) * batch["weight"][:, None]
    true = tf.one_hot(batch["label"], CLASSES)
    return {"confusion": Sum(tf.matmul(true, guess, transpose_a=True))}

  def derived(self, values):
    return {"share": values["confusion"] / np.sum(values["confusion"])}


class FewOfOneClass(Right):
  """Five examples of one class: what is derived of two cannot be computed."""

  def source(self, split):
    features = points(split, 96 if split == "train" else 5)
    return ArraySource(features={**features, "label": features["label"] * (split == "train")})

  def derived(self, values):
    return {"ratio": 1.0 / (values["accuracy"] - values["accuracy"]) if values else 0.0}


class TopTen(GatheredRecall):
  """Needs at least ten rows."""

  def eval_step(self, step, batch):
    tf.math.top_k(batch["weight"], k=10)
    super().eval_step(step, batch)


class TwoSets(Right):
  def source(self, split):
    source = super().source(split)
    return source if split == "train" else {"one": source, "two": source}
