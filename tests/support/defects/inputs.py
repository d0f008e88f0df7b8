"""Mistakes that people make in sources and preprocess(); see test_verify_inputs.py."""

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects.right import CLASSES, Right, points
from defects.small import planted
from loopwright import ArraySource, Loss, Source, StreamSource

DEFECTS, defect = planted()
"""Of a task: check -> cause of what fails, words of the line that the first names, and options:
`owner` of that line if it is another class, what the first `says`, others of the subject."""
APART, RANGE, WORKERS = "train and eval apart", "label range", "shared out to 2 workers"
ANY_SIZE, IGNORED = "evaluation in batches of any size", "source() ignores the split"
MIXES, NUMBERS = "preprocess() mixes rows", "preprocess() numbers examples itself"
OVERLAP = "train and eval overlap"


@defect({APART: IGNORED}, "def source", says="32 of 32 eval in 96 train")
class SameSplit(Right):
  def source(self, split):
    features = points("train")
    count = 96 if split == "train" else 32
    return ArraySource(features={name: value[:count] for name, value in features.items()})


@defect({"source() repeats": "source() is random", APART: OVERLAP}, "def source")
class SplitAtRandom(Right):
  def source(self, split):
    features = points("train")
    order = np.random.permutation(96)
    rows = order[:72] if split == "train" else order[72:]
    return ArraySource(features={name: value[rows] for name, value in features.items()})


class Sorting(Source):
  """A format that wants its indices sorted, as h5py does."""

  def __init__(self, split):
    features = points(split)
    self.num_examples = len(features["label"])
    self._features = {name: tf.constant(value) for name, value in features.items()}

  def fetch(self, indices):
    indices = tf.sort(indices)
    return {name: tf.gather(value, indices) for name, value in self._features.items()}


@defect({"source() repeats": "fetch() mixes up its rows"}, "def fetch", owner=Sorting)
class SortedIndices(Right):
  def source(self, split):
    return Sorting(split)


class Drawn(Sorting):
  """A mixture of two halves, of which one is drawn each time."""

  def fetch(self, indices):
    half = tf.numpy_function(lambda: np.random.randint(2), [], tf.int64)
    return super().fetch((indices + tf.ensure_shape(half, []) * 48) % self.num_examples)


@defect({"source() repeats": "fetch() is random"}, "def fetch", owner=Drawn)
class DrawnMixture(Right):
  def source(self, split):
    return Drawn(split)


@defect({APART: OVERLAP}, "def source", says="repeated inside train; eval")
class OversampledBeforeSplit(Right):
  def source(self, split):
    features, rng = points("train"), np.random.default_rng(0)
    rare, common = np.arange(12), np.arange(12, 96)
    rows = rng.permutation(np.concatenate([common, rng.choice(rare, size=84)]))
    rows = rows[:120] if split == "train" else rows[120:]
    return ArraySource(features={name: value[rows] for name, value in features.items()})


@defect(
  {"each example once": "preprocess() repeats or drops examples", ANY_SIZE: MIXES},
  "tf.gather(value, rows)",
)
class Oversampled(Right):
  def preprocess(self, batch, training):
    rare = tf.where(batch["label"] == 2, 0.0, -2.0)
    rows = tf.math.top_k(rare, k=batch["label"].shape[0]).indices // 2
    return {name: tf.gather(value, rows) for name, value in batch.items()}


@defect(
  {"each example once": NUMBERS},
  "tf.range(",
  says="example 0 comes 6 times, 80 of 96 never come, such as 16",
)
class Renumbered(Right):
  def preprocess(self, batch, training):
    rows = batch["x"].shape[0]
    batch["example_id"] = tf.range(rows, dtype=tf.int64)
    return batch


@defect(
  {WORKERS: NUMBERS},
  "tf.range(",
  owner=Renumbered,
  global_batch_size=96,
  says="2 workers make [0, 1, 2, ...] and [0, 1, 2, ...]",
)
class RenumberedEpoch(Renumbered):
  """A batch is an epoch, so that the numbers look right on one worker."""


@defect({WORKERS: MIXES, ANY_SIZE: MIXES}, "tf.sqrt(variance")
class BatchStatistics(Right):
  def preprocess(self, batch, training):
    mean, variance = tf.nn.moments(batch["x"], axes=[0])
    return {**batch, "x": (batch["x"] - mean) / tf.sqrt(variance + 1e-6)}


@defect({"weights": "negative weights"}, "def source")
class NegativeWeights(Right):
  def source(self, split):
    features = points(split)
    dataset = tf.data.Dataset.from_tensor_slices(features)
    weigh = lambda row: tf.where(row["label"] == 0, -1.0, 1.0)  # noqa: E731
    return StreamSource(dataset=dataset.map(lambda row: {**row, "weight": weigh(row)}))


@defect({"weights": "all weights are zero"}, "tf.cast(")
class NoWeights(Right):
  def preprocess(self, batch, training):
    known = tf.cast(batch["label"] > CLASSES, tf.float32)
    return {**batch, "weight": known}


@defect({"finite features": "non-finite features"}, "def source", says="'x' has 2 numbers that")
class MissingValues(Right):
  def source(self, split):
    features = points(split)
    x = features["x"]
    x[3, 1] = x[30, 0] = np.nan
    return ArraySource(features=features)


@defect(
  {"features vary": "preprocess() makes a feature constant"},
  "// 255",
  says="'x' is 0 for all of 96",
)
class WholeDivision(Right):
  def source(self, split):
    features = points(split)
    pixels = np.clip(features["x"] * 60 + 120, 0, 250).astype(np.uint8)
    return ArraySource(features={**features, "x": pixels})

  def preprocess(self, batch, training):
    return {**batch, "x": tf.cast(batch["x"] // 255, tf.float32)}


@defect({"scale of features": "inputs are not scaled"}, 'tf.cast(batch["x"]', says="'x' has mean 1")
class RawPixels(Right):
  def source(self, split):
    features = points(split)
    pixels = np.clip(features["x"] * 60 + 120, 0, 255).astype(np.uint8)
    return ArraySource(features={**features, "x": pixels})

  def preprocess(self, batch, training):
    return {**batch, "x": tf.cast(batch["x"], tf.float32)}


@defect(
  {RANGE: "labels start at 1"}, "def source", says="'label' is 1 to 3, but forward() returns 3"
)
class LabelsFromOne(Right):
  def source(self, split):
    features = points(split)
    return ArraySource(features={**features, "label": features["label"] + 1})

  def build_model(self):
    return network([6], keras.layers.Dense(CLASSES))


@defect({RANGE: "labels out of range"}, "def source", says="the loss treats 4 as no class")
class OneHotLabels(Right):
  def source(self, split):
    features = points(split)
    return ArraySource(features={**features, "label": features["label"] * 2})

  def build_model(self):
    return super().build_model()

  def loss(self, outputs, batch):
    losses = tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(batch["label"], 3), outputs)
    return Loss.from_examples(losses, batch["weight"])


@defect({RANGE: "all labels are the same"}, "def source", says="0 for all of 96 examples, of 3")
class OneLabel(Right):
  def source(self, split):
    features = points(split)
    return ArraySource(features={**features, "label": np.zeros(len(features["x"]), np.int32)})


@defect(
  {"labels in mixed order": "examples sorted by label"},
  "def source",
  shuffle=False,
  global_batch_size=8,
  says="12 batches of 8 hold only one class of 'label'",
)
class Sorted(Right):
  def source(self, split):
    features = points(split)
    order = np.argsort(features["label"])
    return ArraySource(features={name: value[order] for name, value in features.items()})


@defect({APART: IGNORED}, "def source", says="48 of 48 eval in 192 train")
class Repeated(Right):
  """Training examples twice, evaluation examples among them."""

  def source(self, split):
    features = points("train")
    rows = np.tile(np.arange(96), 2) if split == "train" else np.arange(48, 96)
    return ArraySource(features={name: value[rows] for name, value in features.items()})


@defect({APART: IGNORED}, "def source", says="32 of 32 eval in 96 train")
class Numbered(Right):
  """A number of its own for each example."""

  def source(self, split):
    features = points("train")
    count = 96 if split == "train" else 32
    features = {name: value[:count] for name, value in features.items()}
    return ArraySource(features={**features, "index": np.arange(count) + 10 * len(split)})


@defect({WORKERS: MIXES}, "tf.roll", says="'x' of an example depends on the other")
class MixesNeighbours(Right):
  def preprocess(self, batch, training):
    if not training:
      return batch
    return {**batch, "x": 0.8 * batch["x"] + 0.2 * tf.roll(batch["x"], 1, axis=0)}


@defect({WORKERS: "one seed for the whole batch"}, 'batch["seed"][0]')
class FirstSeed(Right):
  def preprocess(self, batch, training):
    if not training:
      return batch
    noise = tf.random.stateless_normal(batch["x"].shape, seed=batch["seed"][0])
    return {**batch, "x": batch["x"] + 0.1 * noise}


# ---- Right ----


class Episodes(Right):
  """Places of a buffer that the run fills, and seeds of episodes to evaluate."""

  def source(self, split):
    count = 64 if split == "train" else 10
    return ArraySource(features={"number": np.arange(count)})

  def preprocess(self, batch, training):
    sign = 1.0 if training else -1.0
    x = sign * tf.math.sin(tf.cast(batch["number"], tf.float32)[:, None] * np.arange(1.0, 7.0))
    return {**batch, "x": x, "label": tf.cast(x[:, 0] > 0, tf.int32)}
