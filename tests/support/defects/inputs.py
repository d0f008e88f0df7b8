"""Mistakes that people make in sources and preprocess(); see test_verify_inputs.py."""

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects import randomness
from defects.right import CLASSES, Right, points
from defects.small import planted
from loopwright import ArraySource, Loss, Source, StreamSource

DEFECTS, defect = planted()
"""Of a task: the check that fails (or several), the cause in each, what one says, words of the line
that it names, and options: `owner` of that line if it is another class, others of the subject."""


@defect(
  "train and eval apart", "source() ignores the split", "32 of 32 eval in 96 train", "count ="
)
class SameSplit(Right):
  def source(self, split):
    features = points("train")
    count = 96 if split == "train" else 32
    return ArraySource(features={name: value[:count] for name, value in features.items()})


@defect(
  "train and eval apart", "train and eval overlap", "repeated inside train; eval", "default_rng(0)"
)
class OversampledBeforeSplit(Right):
  def source(self, split):
    features, rng = points("train"), np.random.default_rng(0)
    rare, common = np.arange(12), np.arange(12, 96)
    rows = rng.permutation(np.concatenate([common, rng.choice(rare, size=84)]))
    rows = rows[:120] if split == "train" else rows[120:]
    return ArraySource(features={name: value[rows] for name, value in features.items()})


@defect(
  ("train and eval apart", "source() repeats"),
  ("train and eval overlap", "source() is random"),
  "a second call of source('train') gives other examples",
  "np.random.permutation",
)
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


@defect(
  "source() repeats",
  "fetch() mixes up its rows",
  "Sorting.fetch gives another example",
  "tf.sort(indices)",
  owner=Sorting,
)
class SortedIndices(Right):
  def source(self, split):
    return Sorting(split)


@defect(
  ("each example once", "evaluation in batches of any size"),
  ("preprocess() repeats or drops examples", "preprocess() mixes rows"),
  "in an epoch, example ",
  "tf.gather(value, rows)",
)
class Oversampled(Right):
  def preprocess(self, batch, training):
    rare = tf.where(batch["label"] == 2, 0.0, -2.0)
    rows = tf.math.top_k(rare, k=batch["label"].shape[0]).indices // 2
    return {name: tf.gather(value, rows) for name, value in batch.items()}


@defect(
  "each example once",
  "preprocess() numbers examples itself",
  "in an epoch, example 0 comes 6 times, 80 of 96 never come, such as 16",
  "tf.range(",
)
class Renumbered(Right):
  def preprocess(self, batch, training):
    rows = batch["x"].shape[0]
    batch["example_id"] = tf.range(rows, dtype=tf.int64)
    return batch


@defect(
  "shared out to 2 and 3 workers",
  "preprocess() numbers examples itself",
  "2 workers make [0, 1, 2, ...] and [0, 1, 2, ...]",
  "tf.range(",
  owner=Renumbered,
  global_batch_size=96,
)
class RenumberedEpoch(Renumbered):
  """A batch is an epoch, so that the numbers look right on one worker."""


@defect(
  "evaluation repeats", "augmentation in evaluation", "'x' differs when the same 16", "random_flip"
)
class FlippedAlways(Right):
  def preprocess(self, batch, training):
    flipped = tf.image.random_flip_left_right(batch["x"][:, None, :, None])
    return {**batch, "x": flipped[:, 0, :, 0]}


@defect(
  "evaluation repeats",
  "augmentation in evaluation",
  "reads batch['seed'], which only training has",
  'batch["seed"]',
  owner=randomness.SeedInEvaluation,
)
class SeedInEvaluation(randomness.SeedInEvaluation):
  pass


@defect(
  ("evaluation in batches of any size", "shared out to 2 and 3 workers"),
  ("preprocess() mixes rows", "preprocess() mixes rows"),
  "'x' of the same examples differs in batches of 8 and of 16",
  "tf.nn.moments",
)
class BatchStatistics(Right):
  def preprocess(self, batch, training):
    mean, variance = tf.nn.moments(batch["x"], axes=[0])
    return {**batch, "x": (batch["x"] - mean) / tf.sqrt(variance + 1e-6)}


@defect("weights", "negative weights", "-1 at the lowest, first at example", "weight")
class NegativeWeights(Right):
  def source(self, split):
    features = points(split)
    dataset = tf.data.Dataset.from_tensor_slices(features)
    weigh = lambda row: tf.where(row["label"] == 0, -1.0, 1.0)  # noqa: E731
    return StreamSource(dataset=dataset.map(lambda row: {**row, "weight": weigh(row)}))


@defect("weights", "all weights are zero", "all of 96 examples have weight 0", "weight")
class NoWeights(Right):
  def preprocess(self, batch, training):
    known = tf.cast(batch["label"] > CLASSES, tf.float32)
    return {**batch, "weight": known}


@defect(
  "finite features", "non-finite features", "'x' has 2 numbers that are not", 'x = features["x"]'
)
class MissingValues(Right):
  def source(self, split):
    features = points(split)
    x = features["x"]
    x[3, 1] = x[30, 0] = np.nan
    return ArraySource(features=features)


@defect(
  "features vary", "preprocess() makes a feature constant", "'x' is 0 for all of 96", "// 255"
)
class WholeDivision(Right):
  def source(self, split):
    features = points(split)
    pixels = np.clip(features["x"] * 60 + 120, 0, 250).astype(np.uint8)
    return ArraySource(features={**features, "x": pixels})

  def preprocess(self, batch, training):
    return {**batch, "x": tf.cast(batch["x"] // 255, tf.float32)}


@defect("scale of features", "inputs are not scaled", "'x' has mean 1", 'tf.cast(batch["x"]')
class RawPixels(Right):
  def source(self, split):
    features = points(split)
    pixels = np.clip(features["x"] * 60 + 120, 0, 255).astype(np.uint8)
    return ArraySource(features={**features, "x": pixels})

  def preprocess(self, batch, training):
    return {**batch, "x": tf.cast(batch["x"], tf.float32)}


@defect("label range", "labels start at 1", "'label' is 1 to 3, but forward() returns 3", "Dense(")
class LabelsFromOne(Right):
  def source(self, split):
    features = points(split)
    return ArraySource(features={**features, "label": features["label"] + 1})

  def build_model(self):
    return network([6], keras.layers.Dense(CLASSES))


@defect(
  "label range",
  "labels out of range",
  "'label' is 0 to 4, but forward() returns 3 classes, 0 to 2: the loss treats 4 as no class",
  "one_hot",
)
class OneHotLabels(Right):
  def source(self, split):
    features = points(split)
    return ArraySource(features={**features, "label": features["label"] * 2})

  def build_model(self):
    return super().build_model()

  def loss(self, outputs, batch):
    losses = tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(batch["label"], 3), outputs)
    return Loss.from_examples(losses, batch["weight"])


@defect(
  "label range",
  "all labels are the same",
  "'label' is 0 for all of 96 examples, of 3",
  '"label": np.zeros',
)
class OneLabel(Right):
  def source(self, split):
    features = points(split)
    return ArraySource(features={**features, "label": np.zeros(len(features["x"]), np.int32)})


@defect(
  "labels in mixed order",
  "examples sorted by label",
  "12 batches of 8 hold only one class of 'label', and run.shuffle is False",
  "np.argsort",
  shuffle=False,
  global_batch_size=8,
)
class Sorted(Right):
  def source(self, split):
    features = points(split)
    order = np.argsort(features["label"])
    return ArraySource(features={name: value[order] for name, value in features.items()})


@defect(
  "train and eval apart", "source() ignores the split", "48 of 48 eval in 192 train", "np.tile("
)
class Repeated(Right):
  """Training examples twice, evaluation examples among them."""

  def source(self, split):
    features = points("train")
    rows = np.tile(np.arange(96), 2) if split == "train" else np.arange(48, 96)
    return ArraySource(features={name: value[rows] for name, value in features.items()})


@defect(
  "train and eval apart", "source() ignores the split", "32 of 32 eval in 96 train", "count ="
)
class Numbered(Right):
  """A number of its own for each example."""

  def source(self, split):
    features = points("train")
    count = 96 if split == "train" else 32
    features = {name: value[:count] for name, value in features.items()}
    return ArraySource(features={**features, "index": np.arange(count) + 10 * len(split)})


WORKERS = "shared out to 2 and 3 workers"


@defect(WORKERS, "preprocess() mixes rows", "'x' of an example depends on the other", "tf.roll")
class MixesNeighbours(Right):
  def preprocess(self, batch, training):
    if not training:
      return batch
    return {**batch, "x": 0.8 * batch["x"] + 0.2 * tf.roll(batch["x"], 1, axis=0)}


@defect(WORKERS, "preprocess() mixes rows", "'weight' of an example depends on", "bincount")
class BalancedInTheBatch(Right):
  """Rare classes get more weight, by their number in the batch."""

  def preprocess(self, batch, training):
    if not training:
      return batch
    counts = tf.math.bincount(batch["label"], minlength=CLASSES, dtype=tf.float32)
    return {**batch, "weight": batch["weight"] / tf.gather(counts, batch["label"])}


@defect(
  WORKERS, "one seed for the whole batch", "'x' of an example depends on the seed of another",
  'batch["seed"][0]',
)  # fmt: skip
class FirstSeed(Right):
  def preprocess(self, batch, training):
    if not training:
      return batch
    noise = tf.random.stateless_normal(batch["x"].shape, seed=batch["seed"][0])
    return {**batch, "x": batch["x"] + 0.1 * noise}


@defect(
  WORKERS, "one seed for the whole batch", "'x' of an example depends on its place",
  "stateless_normal",
)  # fmt: skip
class SeedOfTheStep(Right):
  def preprocess(self, batch, training):
    if not training:
      return batch
    seed = tf.stack([5, tf.cast(batch["step"][0], tf.int32)])
    return {**batch, "x": batch["x"] + tf.random.stateless_normal(batch["x"].shape, seed=seed)}


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
