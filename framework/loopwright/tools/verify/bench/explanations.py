"""Known mistakes of a step on N replicas: name, words of the line, predicted update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from loopwright.tools.verify.bench import random_draws
from loopwright.tools.verify.report import Explanation

FITS = 0.02
"""The largest relative difference between an update and the one that a mistake predicts."""
PADDING = "padding counts"
SUMS = ("reduce_mean", "from_examples(", "weighted_sum(", "Loss(")


STATEFUL = Explanation(random_draws.STATEFUL, ("tf.random.", "np.random", "random."))
NEVER_REDUCED = Explanation("never reduced", ("apply(", "apply_gradients", "gradients("))
COUNTS = Explanation(PADDING, SUMS)
BATCH_NORM = Explanation("batch-norm statistics", ("BatchNormalization",))
KEPT_STATE = Explanation("state changed by a skipped step", (".assign",))
TWICE = Explanation("reduced twice", ("all_reduce", "apply_gradients", ".apply("))
MEAN_OF_MEANS = Explanation(
  "mean of means", ("reduce_mean", "/ tf.reduce_sum", "divide_no_nan", "Loss(")
)
LOCAL_BATCH = Explanation(
  "loss divided by the local batch", ("reduce_mean", "/ ", "divide_no_nan", "Loss(")
)
REGULARISATION = Explanation(
  "regularisation counted N times", ("l2_loss", "losses", "regular", "penalty", "+ ")
)
REPLICA_FACTOR = Explanation("loss scaled by the number of replicas")
CLOCK = Explanation("a loss by the clock")
IN_PYTHON = Explanation("Python in the step")
TRACED_VALUE = Explanation(
  "Python value that changes", ("time.", "datetime", "np.random", "random.", "global ")
)
PYTHON_VALUE = Explanation("Python value that changes")
COUPLED = Explanation(
  "examples that depend on one another",
  ("reduce_mean", "reduce_std", "matmul", "transpose", "top_k", "moments", "[None, :]", "bincount"),
  mixes_rows=True,
)
LOCAL_COUNT = Explanation(
  "loss divided by a local count", ("divide_no_nan", "boolean_mask", "reduce_mean", "/ ")
)
MEAN_OF_ROWS = Explanation(PADDING, mixes_rows=True)
PLACES = Explanation(COUPLED.cause, ("replica_id",))
GATHERED = dataclasses.replace(PLACES, mixes_rows=True)
SHIFTED = Explanation("rows run into one another", mixes_rows=True)
NO_SUM = Explanation(COUPLED.cause, mixes_rows=True)
PADDED = Explanation("padded rows among the others", COUPLED.containing, mixes_rows=True)
UNKNOWN = Explanation("unknown")
OPTIMIZER = Explanation("optimizer")
CLIPPED_FIRST = Explanation("clipped before the reduction", ("clip",))
CHECKED_FIRST = Explanation("finite check before the reduction")
NEVER_UNSCALED = Explanation("never unscaled")
LOCAL_STATE = Explanation("state fed from local rows only")
LOCAL_CONDITION = Explanation("a condition that differs between replicas")
LOCAL_UPDATE = Explanation("an update that differs between replicas")
LOCAL_WEIGHT = Explanation("divided by the weight of one replica")
LOCAL_OFFSETS = Explanation("perturbed by the gradients of one replica")
BY_OPTION = {
  "clip_norm": CLIPPED_FIRST,
  "accumulation": Explanation("mean over micro-batches", ("gradients(", "reduce_mean", "/ ")),
  "loss scaling": Explanation("loss scale", ("unscale", "scale")),
}


Part = tuple[np.ndarray, float]


def weighted_mean(parts: Sequence[Part]) -> np.ndarray:
  """Returns the update of all rows, if that of each replica does not depend on other rows."""
  total = sum(weight for _, weight in parts)
  return np.sum([part * (weight / total) for part, weight in parts], axis=0)


Predict: TypeAlias = Callable[[np.ndarray, Sequence[Part]], np.ndarray]
PREDICTIONS: Sequence[tuple[Explanation, Predict]] = (
  (TWICE, lambda whole, parts: whole * len(parts)),
  (MEAN_OF_MEANS, lambda whole, parts: np.mean([part for part, _ in parts], axis=0)),
  (LOCAL_BATCH, lambda whole, parts: np.sum([part for part, _ in parts], axis=0)),
  (LOCAL_BATCH, lambda whole, parts: whole / len(parts)),
)


def fits(seen: np.ndarray, predicted: np.ndarray) -> bool:
  """Whether an update is the predicted one."""
  size = np.linalg.norm(predicted)
  return bool(size and np.linalg.norm(seen - predicted) <= FITS * size)
