"""What `benchmarks.keras_matrix` tries: the rows of docs/keras-matrix.md, and their data."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
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
  """One class of a library with one choice of arguments: a row of the page.

  Attributes:
    kind: "losses", "metrics" or "layers".
    name: of the class.
    code: the arguments of its constructor.
    data: a key of `DATA`, or for a layer of `INPUTS`.
    result: what the page says.
    adapt: the layer learns from the data before.
    unweighted: a metric that takes no weight for each example.
  """

  kind: str
  name: str
  code: str
  data: str
  result: str
  adapt: bool = False
  unweighted: bool = False

  @property
  def arguments(self) -> Mapping[str, Any]:
    """Of the constructor."""
    return eval(f"dict({self.code})", {"squares": squares, "mean_square": mean_square})

  @property
  def refused(self) -> str:
    """What the error says; "" if it equals `fit`."""
    return _ERRORS[self.result.partition(": ")[2]] if self.result.startswith("refused") else ""

  @property
  def alone(self) -> bool:
    """Whether it is refused on several replicas only."""
    return "on several replicas" in self.result

  @property
  def masked(self) -> bool:
    """Whether it has a mask, so that Keras divides by the number of valid elements."""
    return "alone, or in one batch" in self.result

  @property
  def random(self) -> bool:
    """Whether training draws random numbers, others than `fit`."""
    return "own numbers" in self.result

  @property
  def direct(self) -> bool:
    """Whether it is a loss that is only compared with its own call, without training."""
    means = self.arguments.get("reduction") in ("mean", "sum_over_batch_size")
    return self.kind == "losses" and (means or "dtype" in self.arguments) and self.result == "equal"

  @property
  def is_shared(self) -> bool:
    """Whether its model may have other outputs too."""
    return not self.refused and not self.masked and not self.direct

  def is_unweighted(self, library: str) -> bool:
    """Whether `weighted_metrics` cannot have it: tf_keras's F scores take no weight [n, 1]."""
    return self.unweighted or (library == "tf_keras" and self.name in ("F1Score", "FBetaScore"))

  def made(self, module: Any, **options: Any) -> Any:
    """Returns an instance from a module such as keras.losses."""
    return getattr(module, self.name)(**self.arguments, **options)

  def __str__(self) -> str:
    """Returns the class and its arguments."""
    return f"{self.name}({self.code})"


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


# ---- The page ----


PAGE = Path(__file__).parent.parent / "docs" / "keras-matrix.md"
TITLES = {"losses": "Losses", "metrics": "Metrics", "layers": "Preprocessing layers in a model"}
_ERRORS = {
  "a scalar for the batch": "returns a scalar, but N replicas need one value for each example",
  "no value for each example": "but N replicas need one value for each example",
  "mixes the rows of the batch": "the value of an example depends on the others",
  "no mean over the batch": "but only a mean over the batch",
  "its state is no sum over rows": "keeps a state that is not a sum over rows",
  "a layer that mixes the rows": "which mixes examples",
}
"""The reason on the page -> what the error says."""


def squares(y_true: Any, y_pred: Any) -> Any:
  """Returns a value for each row."""
  return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


def mean_square(y_true: Any, y_pred: Any) -> Any:
  """Returns a scalar, which no replica has."""
  return tf.reduce_mean(tf.square(y_true - y_pred))


def section(kind: str) -> str:
  """Returns the text of the page about "losses", "metrics" or "layers"."""
  return PAGE.read_text().split(f"## {TITLES[kind]}\n")[1].partition("\n## ")[0]


def elsewhere(kind: str) -> set[str]:
  """Returns the classes that no entry tries; the page says why."""
  return set(re.findall(r"^- `(\w+)` is not tried: ", section(kind), re.MULTILINE))


def entries(kind: str, library: str) -> list[Entry]:
  """Returns the rows of the page about a kind that a library has."""
  found, known = list[Entry](), dict[str, str]()
  lines = [line for line in section(kind).splitlines()[3:] if line.startswith("| ")]
  rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
  named = [(name, row[1:]) for row in rows for name in row[0].split(", ")]
  for name, (arguments, data, *results) in named:
    result = results[BOTH.index(library)]
    data, _, without = data.replace("as above", known.get(name, "")).partition(", ")
    known.setdefault(name, data)
    for each in arguments.split("; ") if result != "-" else ():
      code, _, after = each.strip("`").partition("`, ")
      adapt = "after `adapt`" in (each, after + "`")
      code = "" if code.startswith("after") else code
      found.append(Entry(kind, name, code, data, result, adapt, bool(without)))
  return found
