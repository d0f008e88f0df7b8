"""What `benchmarks.keras_matrix` tries: each loss, metric and preprocessing layer, and its data."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

NO_CHOICE = {"self", "name", "kwargs", "args"}
BOTH = ("keras", "tf_keras")


@dataclasses.dataclass(frozen=True)
class Data:
  """Targets and an output for them.

  Attributes:
    shape: of an output's row.
    activation: of the output.
    y: number of rows -> targets.
  """

  shape: tuple[int, ...]
  activation: str | None
  y: Callable[[int], np.ndarray]

  def predicted(self, rows: int) -> np.ndarray:
    """Returns outputs of this shape and activation, without a model."""
    found = tf.constant(_draws(rows, *self.shape, seed=20))
    return getattr(tf.nn, self.activation)(found).numpy() if self.activation else found.numpy()


@dataclasses.dataclass(frozen=True)
class Entry:
  """One class with one choice of arguments.

  Attributes:
    name: of the class.
    arguments: of its constructor.
    data: a key of `DATA`, or for a layer of `INPUTS`.
    libraries: which of the two Kerases have it.
    refused: what the error says; "" if it equals `fit`.
    alone: refused on several replicas only.
    masked: has a mask, so that Keras divides by the number of valid elements.
    adapt: the layer learns from the data before.
    random: training draws random numbers, others than `fit`.
    unweighted: a metric that takes no weight for each example.
    direct: a loss that is only compared with its own call, without training.
  """

  name: str
  arguments: Mapping[str, Any]
  data: str
  libraries: tuple[str, ...] = BOTH
  refused: str = ""
  alone: bool = False
  masked: bool = False
  adapt: bool = False
  random: bool = False
  unweighted: bool = False
  direct: bool = False

  @property
  def is_shared(self) -> bool:
    """Whether its model may have other outputs too."""
    return not self.refused and not self.masked and not self.direct

  @property
  def shown(self) -> str:
    """Its arguments as code."""
    shown = ", ".join(f"{n}={getattr(v, '__name__', repr(v))}" for n, v in self.arguments.items())
    parts = [f"`{shown}`" if shown else "", "after `adapt`" if self.adapt else ""]
    return ", ".join(filter(None, parts))

  @property
  def result(self) -> str:
    """What the page says."""
    if self.refused:
      return f"refused{' on several replicas' if self.alone else ''}: {_REASONS[self.refused]}"
    if self.random:
      return "evaluation equal; training draws its [own numbers](randomness.md)"
    return "equal; alone, or in one batch" if self.masked else "equal"

  def is_unweighted(self, library: str) -> bool:
    """Whether `weighted_metrics` cannot have it: tf_keras's F scores take no weight [n, 1]."""
    return self.unweighted or (library == "tf_keras" and self.name in ("F1Score", "FBetaScore"))

  def made(self, module: Any, **options: Any) -> Any:
    """Returns an instance from a module such as keras.losses."""
    return getattr(module, self.name)(**self.arguments, **options)

  def __str__(self) -> str:
    """Returns the class and its arguments."""
    return f"{self.name}({', '.join(f'{n}={v!r}' for n, v in self.arguments.items())})"


def exported(k: Any, kind: str) -> dict[str, Any]:
  """Returns name -> class of all that a library exports of a kind, each class once."""
  module = getattr(k, kind)
  found: dict[str, Any] = {}
  for name, of in vars(module).items():
    if inspect.isclass(of) and _belongs(k, kind, of) and of not in found.values():
      found[of.__name__ if hasattr(module, of.__name__) else name] = of
  return found


def _belongs(k: Any, kind: str, of: Any) -> bool:
  if kind == "layers":
    return "preprocessing" in of.__module__
  base = {"losses": k.losses.Loss, "metrics": k.metrics.Metric}[kind]
  return issubclass(of, base) and of is not base


# ---- Data ----


def _draws(rows: int, *shape: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=[rows, *shape]).astype(np.float32)


def inputs(rows: int) -> np.ndarray:
  """Returns the input of the models of losses and metrics."""
  return _draws(rows, 4, seed=0)


def weight(rows: int) -> np.ndarray:
  """Returns sample weights, some of them 0."""
  found = np.abs(_draws(rows, seed=1))
  found[::5] = 0.0
  return found


def _labels(rows: int, *shape: int, classes: int = 4) -> np.ndarray:
  return np.random.default_rng(2).integers(0, classes, size=[rows, *shape]).astype(np.int32)


def _one_hot(rows: int, *shape: int) -> np.ndarray:
  return np.eye(4, dtype=np.float32)[_labels(rows, *shape)]


def _distribution(rows: int) -> np.ndarray:
  powers = np.exp(_draws(rows, 4, seed=3))
  return powers / powers.sum(axis=1, keepdims=True)


def _binary(rows: int, *shape: int) -> np.ndarray:
  return (_draws(rows, *shape, seed=4) > 0).astype(np.float32)


DATA = {
  "vector": Data((3,), None, lambda n: _draws(n, 3, seed=5)),
  "positive": Data((3,), "softplus", lambda n: np.abs(_draws(n, 3, seed=6)) + 0.5),
  "single": Data((1,), None, lambda n: _draws(n, 1, seed=7)),
  "flat": Data((1,), None, lambda n: _draws(n, seed=7)),
  "series": Data((5, 3), None, lambda n: _draws(n, 5, 3, seed=8)),
  "binary": Data((1,), "sigmoid", lambda n: _binary(n, 1)),
  "binary logits": Data((1,), None, lambda n: _binary(n, 1)),
  "binaries": Data((3,), "sigmoid", lambda n: _binary(n, 3)),
  "binary series": Data((5, 3), "sigmoid", lambda n: _binary(n, 5, 3)),
  "signs": Data((1,), None, lambda n: 2 * _binary(n, 1) - 1),
  "one hot": Data((4,), "softmax", _one_hot),
  "one hot logits": Data((4,), None, _one_hot),
  "one hot series": Data((4, 5), "sigmoid", lambda n: np.swapaxes(_one_hot(n, 5), 1, 2).copy()),
  "distribution": Data((4,), "softmax", _distribution),
  "labels": Data((4,), "softmax", _labels),
  "label logits": Data((4,), None, _labels),
  "label column": Data((4,), "softmax", lambda n: _labels(n, 1)),
  "label series": Data((5, 4), "softmax", lambda n: _labels(n, 5)),
  "label classes": Data((5,), "sigmoid", lambda n: _labels(n, 5, classes=2)),
  "transcript": Data((8, 5), None, lambda n: 1 + _labels(n, 3)),
  "pictures": Data((4, 4, 2), "sigmoid", lambda n: _binary(n, 4, 4, 2)),
}  # fmt: skip

WORDS = np.array(["one two", "two", "three one two", "four", "", "five two one"], object)
INPUTS: dict[str, Callable[[int], np.ndarray]] = {
  "numbers": lambda n: _draws(n, 3, seed=10) * 2 + 1,
  "series": lambda n: _draws(n, 4, 3, seed=10) * 2 + 1,
  "counts": lambda n: _labels(n, 3),
  "codes": lambda n: 3 * _labels(n, 3).astype(np.int64),
  "single code": lambda n: 3 * _labels(n, 1).astype(np.int64),
  "words": lambda n: WORDS[_labels(n, 2, classes=6)],
  "single word": lambda n: WORDS[_labels(n, 1, classes=6)],
  "pictures": lambda n: np.random.default_rng(11).uniform(0, 255, [n, 8, 8, 3]).astype(np.float32),
  "unit pictures": lambda n: np.random.default_rng(11).uniform(0, 1, [n, 8, 8, 3]).astype("f4"),
  "first pictures": lambda n: np.random.default_rng(11).uniform(0, 255, [n, 3, 8, 8]).astype("f4"),
  "waves": lambda n: _draws(n, 64, 1, seed=12),
  "sounds": lambda n: _draws(n, 64, seed=12),
}  # fmt: skip


def applied(entry: Entry, layer: Any, value: Any) -> Any:
  """Returns the layer's output; a crossing takes several features."""
  if entry.name == "HashedCrossing":
    return layer((value[:, 0:1], value[:, 1:2]))
  return layer(value)


def floats(k: Any, value: Any) -> Any:
  """Returns a layer's output as floats, inside a model of either Keras."""
  return k.ops.cast(value, "float32") if k.__name__ == "keras" else tf.cast(value, "float32")


# ---- Losses ----

KERAS = ("keras",)
_SCALAR = "returns a scalar, but N replicas need one value for each example"
_SHAPE = "but N replicas need one value for each example"
_NO_SUM = "keeps a state that is not a sum over rows"
_ROWS = "the value of an example depends on the others"
_MEAN = "but only a mean over the batch"
_MIXES = "which mixes examples"
_REASONS = {
  _SCALAR: "a scalar for the batch",
  _SHAPE: "no value for each example",
  _ROWS: "mixes the rows of the batch",
  _MEAN: "no mean over the batch",
  _NO_SUM: "its state is no sum over rows",
  _MIXES: "mixes the rows of the batch",
}


def _losses() -> list[Entry]:
  def of(name: str, data: str, **arguments: Any) -> Entry:
    return Entry(name, arguments, data)

  def of_3(name: str, data: str, **arguments: Any) -> Entry:
    return Entry(name, arguments, data, KERAS)

  tversky = {"alpha": 0.3, "beta": 0.7}
  return [
    of("BinaryCrossentropy", "binary"),
    of("BinaryCrossentropy", "binary logits", from_logits=True),
    of("BinaryCrossentropy", "binaries", label_smoothing=0.1),
    of("BinaryCrossentropy", "binary series", axis=1),
    of("BinaryFocalCrossentropy", "binary"),
    of("BinaryFocalCrossentropy", "binaries", apply_class_balancing=True, alpha=0.4, gamma=1.5),
    of("BinaryFocalCrossentropy", "binary logits", from_logits=True, label_smoothing=0.1),
    of("BinaryFocalCrossentropy", "binary series", axis=1),
    of("CategoricalCrossentropy", "one hot"),
    of("CategoricalCrossentropy", "one hot logits", from_logits=True),
    of("CategoricalCrossentropy", "distribution", label_smoothing=0.1),
    of("CategoricalCrossentropy", "one hot series", axis=1),
    of("CategoricalFocalCrossentropy", "one hot"),
    of("CategoricalFocalCrossentropy", "one hot", alpha=0.4, gamma=1.5, label_smoothing=0.1),
    of("CategoricalFocalCrossentropy", "one hot logits", from_logits=True),
    of("CategoricalFocalCrossentropy", "one hot series", axis=1),
    of_3("CategoricalGeneralizedCrossEntropy", "labels"),
    of_3("CategoricalGeneralizedCrossEntropy", "labels", q=0.3),
    of("CategoricalHinge", "one hot"),
    of("CosineSimilarity", "vector"),
    of("CosineSimilarity", "series", axis=1),
    Entry("CosineSimilarity", {"axis": 0}, "vector", refused=_SHAPE),
    of_3("CTC", "transcript"),
    Entry("Circle", {}, "labels", KERAS, refused=_ROWS),
    Entry("Circle", {"gamma": 20.0, "margin": 0.3, "remove_diagonal": False}, "labels", KERAS,
          refused=_ROWS),
    Entry("Dice", {}, "pictures", KERAS, refused=_SCALAR),
    of_3("Dice", "pictures", axis=(1, 2, 3)),
    of_3("Dice", "pictures", axis=(1, 2)),
    Entry("Tversky", {}, "pictures", KERAS, refused=_SCALAR),
    of_3("Tversky", "pictures", axis=(1, 2, 3), **tversky),
    of("Hinge", "signs"),
    of("Hinge", "binary logits"),
    of("Huber", "vector"),
    of("Huber", "vector", delta=0.5),
    of("KLDivergence", "distribution"),
    of("LogCosh", "vector"),
    of("MeanAbsoluteError", "vector"),
    of("MeanAbsoluteError", "flat"),
    of("MeanAbsolutePercentageError", "positive"),
    of("MeanSquaredError", "vector"),
    of("MeanSquaredError", "series"),
    of("MeanSquaredError", "pictures"),
    of("MeanSquaredLogarithmicError", "positive"),
    of("Poisson", "positive"),
    of("SparseCategoricalCrossentropy", "labels"),
    of("SparseCategoricalCrossentropy", "label column"),
    of("SparseCategoricalCrossentropy", "label series"),
    of("SparseCategoricalCrossentropy", "label logits", from_logits=True),
    Entry("SparseCategoricalCrossentropy", {"ignore_class": 0}, "labels", masked=True),
    Entry("SparseCategoricalCrossentropy", {"ignore_class": 0}, "label series", masked=True),
    of_3("SparseCategoricalCrossentropy", "label series", axis=-1),
    of("SquaredHinge", "signs"),
  ]  # fmt: skip


_REDUCTIONS = {"sum": BOTH, "none": BOTH, "mean_with_sample_weight": KERAS}


def _with_reductions(entries: list[Entry]) -> list[Entry]:
  """Adds each reduction, and each dtype, of one entry of each class."""
  found, seen = [*entries], set()
  for entry in entries:
    if entry.name in seen or entry.refused in (_SCALAR, _SHAPE):
      continue
    seen.add(entry.name)
    arguments = dict(entry.arguments)
    for reduction, libraries in _REDUCTIONS.items():
      both = tuple(name for name in entry.libraries if name in libraries)
      if both:
        given = {**arguments, "reduction": reduction}
        found.append(dataclasses.replace(entry, arguments=given, libraries=both, refused=_MEAN))
    for library, reduction in (("keras", "mean"), ("tf_keras", "sum_over_batch_size")):
      if library in entry.libraries:
        given = {**arguments, "reduction": reduction}
        found.append(
          dataclasses.replace(
            entry, arguments=given, libraries=(library,), direct=not entry.refused
          )
        )
    given = {**arguments, "dtype": "float64"}
    if "keras" in entry.libraries:
      found.append(
        dataclasses.replace(entry, arguments=given, libraries=KERAS, direct=not entry.refused)
      )
  return found


# ---- Metrics ----


def _metrics() -> list[Entry]:
  def of(name: str, data: str, **arguments: Any) -> Entry:
    return Entry(name, arguments, data)

  def whole(name: str, **arguments: Any) -> Entry:
    # Keras 3's `update_state` fails with axis=1.
    return Entry(name, arguments, "one hot series", ("tf_keras",), unweighted=True)

  at = {"num_thresholds": 20}
  iou = {"num_classes": 4, "sparse_y_pred": False}
  found = [
    of("Accuracy", "label classes"),
    of("BinaryAccuracy", "binaries", threshold=0.4),
    of("CategoricalAccuracy", "one hot"),
    of("SparseCategoricalAccuracy", "labels"),
    of("TopKCategoricalAccuracy", "one hot", k=2),
    of("SparseTopKCategoricalAccuracy", "labels", k=2),
    Entry("SparseTopKCategoricalAccuracy", {"k": 2, "from_sorted_ids": True}, "labels", KERAS),
    of("BinaryCrossentropy", "binary"),
    of("BinaryCrossentropy", "binaries", from_logits=True, label_smoothing=0.1),
    of("CategoricalCrossentropy", "one hot"),
    of("CategoricalCrossentropy", "one hot", from_logits=True, label_smoothing=0.1),
    of("CategoricalCrossentropy", "one hot series", axis=1),
    of("SparseCategoricalCrossentropy", "labels"),
    of("SparseCategoricalCrossentropy", "labels", from_logits=True),
    of("SparseCategoricalCrossentropy", "labels", ignore_class=0),
    of("SparseCategoricalCrossentropy", "label series", axis=-1),
    of("KLDivergence", "distribution"),
    of("Poisson", "positive"),
    of("CosineSimilarity", "vector"),
    of("CosineSimilarity", "series", axis=1),
    of("LogCoshError", "vector"),
    of("MeanAbsoluteError", "vector"),
    of("MeanAbsolutePercentageError", "positive"),
    of("MeanSquaredError", "series"),
    of("MeanSquaredLogarithmicError", "positive"),
    of("RootMeanSquaredError", "vector"),
    of("R2Score", "vector"),
    of("R2Score", "vector", class_aggregation="variance_weighted_average"),
    of("Hinge", "signs"),
    of("SquaredHinge", "signs"),
    of("CategoricalHinge", "one hot"),
    of("AUC", "binary"),
    of("AUC", "binary", num_thresholds=50, curve="PR", summation_method="minoring"),
    of("AUC", "binary", thresholds=[0.2, 0.5, 0.7]),
    of("AUC", "binary logits", from_logits=True),
    of("AUC", "binaries", multi_label=True, num_labels=3, label_weights=[0.2, 0.5, 1.0]),
    of("F1Score", "one hot", average="macro"),
    of("F1Score", "one hot", average="weighted", threshold=0.3),
    of("F1Score", "one hot"),
    Entry(
      "FBetaScore", {"average": "micro", "beta": 2.0, "threshold": 0.3}, "one hot", unweighted=True
    ),
    of("Precision", "binary", thresholds=[0.3, 0.6]),
    of("Precision", "one hot", top_k=2, class_id=1),
    of("Recall", "binary", thresholds=0.4),
    of("Recall", "one hot", top_k=2, class_id=1),
    of("PrecisionAtRecall", "binary", recall=0.5, **at),
    of("PrecisionAtRecall", "one hot", recall=0.5, class_id=1),
    of("RecallAtPrecision", "binary", precision=0.5, **at),
    of("RecallAtPrecision", "one hot", precision=0.5, class_id=1),
    of("SensitivityAtSpecificity", "binary", specificity=0.5, **at),
    of("SensitivityAtSpecificity", "one hot", specificity=0.5, class_id=1),
    of("SpecificityAtSensitivity", "binary", sensitivity=0.5, **at),
    of("SpecificityAtSensitivity", "one hot", sensitivity=0.5, class_id=1),
    *(of(f"{truth}{sign}", "binary", thresholds=0.4)
      for truth in ("True", "False") for sign in ("Positives", "Negatives")),
    of("BinaryIoU", "binary", target_class_ids=[1], threshold=0.4),
    of("IoU", "labels", target_class_ids=[0, 2], ignore_class=1, **iou),
    of("IoU", "one hot", target_class_ids=[0, 2], sparse_y_true=False, **iou),
    whole("IoU", target_class_ids=[0], sparse_y_true=False, axis=1, **iou),
    of("MeanIoU", "labels", ignore_class=1, **iou),
    whole("MeanIoU", sparse_y_true=False, axis=1, **iou),
    of("OneHotIoU", "one hot", num_classes=4, target_class_ids=[0, 2], ignore_class=1),
    whole("OneHotIoU", target_class_ids=[0], axis=1, **iou),
    of("OneHotMeanIoU", "one hot", num_classes=4, ignore_class=1),
    whole("OneHotMeanIoU", axis=1, **iou),
    of("MeanMetricWrapper", "vector", fn=squares),
    Entry("ConcordanceCorrelation", {}, "series", KERAS),
    Entry("ConcordanceCorrelation", {"axis": 1}, "series", KERAS),
    Entry(
      "ConcordanceCorrelation", {"axis": 0}, "vector", KERAS, refused=_NO_SUM, unweighted=True
    ),
    Entry("PearsonCorrelation", {}, "series", KERAS),
    Entry("PearsonCorrelation", {"axis": 1}, "series", KERAS),
    Entry("MeanMetricWrapper", {"fn": mean_square}, "vector", refused=_NO_SUM, unweighted=True),
  ]  # fmt: skip
  return found


def squares(y_true: Any, y_pred: Any) -> Any:
  """Returns a value for each row."""
  return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


def mean_square(y_true: Any, y_pred: Any) -> Any:
  """Returns a scalar, which no replica has."""
  return tf.reduce_mean(tf.square(y_true - y_pred))


# ---- Layers ----


def _layers() -> list[Entry]:
  def of(name: str, data: str, *, adapt: bool = False, **arguments: Any) -> Entry:
    return Entry(name, arguments, data, adapt=adapt)

  def of_3(name: str, data: str, **arguments: Any) -> Entry:
    return Entry(name, arguments, data, KERAS)

  def draws(name: str, libraries: tuple[str, ...] = KERAS, **arguments: Any) -> Entry:
    return Entry(name, arguments, "pictures", libraries, random=True)

  window = {"sequence_length": 16, "sequence_stride": 8, "fft_length": 16}
  deterministic = [
    of("CategoryEncoding", "counts", num_tokens=4, output_mode="multi_hot"),
    of("CategoryEncoding", "counts", num_tokens=4, output_mode="count"),
    of("CenterCrop", "pictures", height=6, width=6),
    of("Discretization", "numbers", bin_boundaries=[0.0, 1.0]),
    of("Discretization", "numbers", adapt=True, num_bins=3),
    of("HashedCrossing", "codes", num_bins=5),
    of("Hashing", "words", num_bins=5, output_mode="multi_hot"),
    of("Hashing", "codes", num_bins=5, salt=3),
    of("IntegerLookup", "codes", vocabulary=[0, 3, 6]),
    of("IntegerLookup", "codes", adapt=True, output_mode="multi_hot"),
    of("StringLookup", "words", vocabulary=["two", "four"]),
    of("StringLookup", "words", adapt=True, output_mode="count"),
    of("TextVectorization", "single word", adapt=True, output_sequence_length=4),
    of("TextVectorization", "single word", adapt=True, output_mode="tf_idf"),
    of("Normalization", "numbers", adapt=True),
    of("Normalization", "series", adapt=True, axis=-1),
    of("Normalization", "numbers", mean=1.0, variance=4.0),
    of("Normalization", "numbers", mean=1.0, variance=4.0, invert=True),
    of("Rescaling", "pictures", scale=1 / 128, offset=-1.0),
    of("Resizing", "pictures", height=4, width=5),
    of("Resizing", "pictures", height=4, width=5, interpolation="nearest"),
    of_3("AutoContrast", "pictures", value_range=(0, 255)),
    of_3("ContrastLimitedAdaptiveHistogramEqualization", "pictures", value_range=(0, 255)),
    of_3("MelSpectrogram", "sounds", num_mel_bins=8, sampling_rate=64, min_freq=1.0, **window),
    of_3("STFTSpectrogram", "waves", frame_length=16, frame_step=8, fft_length=16),
    *(Entry(name, {}, "pictures", KERAS, refused=_MIXES, alone=True)
      for name in ("CutMix", "MixUp")),
  ]  # fmt: skip
  span = {"value_range": (0, 255)}
  random = [
    draws("RandomBrightness", BOTH, factor=0.2),
    draws("RandomContrast", BOTH, factor=0.2),
    draws("RandomCrop", BOTH, height=8, width=8),
    draws("RandomFlip", BOTH),
    draws("RandomRotation", BOTH, factor=0.2),
    draws("RandomTranslation", BOTH, height_factor=0.2, width_factor=0.2),
    draws("RandomZoom", BOTH, height_factor=0.2),
    draws("AugMix", **span),
    draws("RandAugment", **span),
    draws("RandomColorDegeneration", factor=0.5, **span),
    draws("RandomColorJitter", brightness_factor=0.2, hue_factor=0.2, **span),
    draws("RandomElasticTransform", **span),
    draws("RandomErasing", **span),
    draws("RandomGaussianBlur", **span),
    draws("RandomGrayscale"),
    draws("RandomHue", factor=0.2, **span),
    draws("RandomInvert", **span),
    draws("RandomPerspective"),
    draws("RandomPosterization", factor=4, **span),
    draws("RandomSaturation", factor=0.5, **span),
    draws("RandomSharpness", factor=0.5, **span),
    draws("RandomShear", x_factor=0.2),
    draws("Solarization", threshold_factor=0.5, **span),
  ]  # fmt: skip
  return deterministic + random


ELSEWHERE = {
  "layers": {
    "Equalization": "Keras 3 cannot put it into a functional model: it returns its own input",
    "MaxNumBoundingBoxes": "takes labels too, so it belongs to the input pipeline, not to a model",
    "Pipeline": "calls the layers it is given, one after the other",
    "RandomHeight": "its outputs have no static size, so no `Dense` follows it",
    "RandomWidth": "its outputs have no static size, so no `Dense` follows it",
  },
  "metrics": {
    "Mean": "takes values, not targets and outputs",
    "MeanTensor": "takes values, not targets and outputs",
    "Sum": "takes values, not targets and outputs",
    "MeanRelativeError": "its normaliser has the shape of a whole batch",
  },
  "losses": {},
}
"""What no entry tries, and why."""


TITLES = {"losses": "Losses", "metrics": "Metrics", "layers": "Preprocessing layers in a model"}
HEAD = """# The Keras matrix

Every loss, metric and preprocessing layer of Keras 3 and tf_keras, compiled into a model and
trained by `fit` and by [`from_keras`](models-from-elsewhere.md#a-compiled-keras-model): 6 steps of
SGD on batches of 7 rows, some with sample weight 0, then an evaluation. `fit` and `evaluate` on one
device are the reference; here the same steps run on 1, 2 and 3 replicas (logical CPUs), which do
not divide the batch.

- **equal**: the history of losses and metrics, the evaluation and the weights differ by at most
  1e-5, relative to values above 1: some hundred roundings of float32.
- **refused**: a ConfigError of one line, which names the remedy.

The command

    uv run python -m benchmarks.keras_matrix

runs all of it and then writes this page. `tests/unit/test_keras_matrix.py` fails if Keras has a
class, or a loss an argument, that is not in the tables. Every metric is tried in `metrics` and in
`weighted_metrics`. Losses with `dtype=`, or with a reduction that is a mean, are compared with what
the loss itself returns for a batch. On several replicas, models of tf_keras come from a function.
"""


def entries(kind: str, library: str) -> list[Entry]:
  """Returns the entries of "losses", "metrics" or "layers" of a library."""
  made = {"losses": lambda: _with_reductions(_losses()), "metrics": _metrics, "layers": _layers}
  return [entry for entry in made[kind]() if library in entry.libraries]
