"""Known mistakes of a step on N replicas: name, remedy, words of the line, predicted update."""

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


STATEFUL = Explanation(
  cause=random_draws.STATEFUL,
  remedy="use Keras layers, or tf.random.stateless_* with step.seed()",
  containing=("tf.random.", "np.random", "random."),
)
NEVER_REDUCED = Explanation(
  cause="never reduced",
  remedy="call step.all_reduce(gradients, loss) before step.unscale and step.apply",
  containing=("apply(", "apply_gradients", "gradients("),
)
COUNTS = Explanation(
  cause=PADDING,
  remedy="weight each example, as Loss.from_examples(per_example, batch['weight']) and "
  "weighted_sum(per_example, batch['weight']) do, and never divide by a number of rows",
  containing=SUMS,
)
BATCH_NORM = Explanation(
  cause="batch-norm statistics",
  remedy="BatchNormalization(synchronized=True) normalises over the global batch; without it, each "
  "replica normalises by its own rows",
  containing=("BatchNormalization",),
)
MICRO_BATCH_NORM = Explanation(
  cause="batch-norm statistics",
  remedy="each micro-batch is normalised by its own rows, which are others on N replicas than on "
  "one: use accumulation_steps = 1, or normalise each row by itself, as LayerNormalization does",
  containing=("BatchNormalization",),
)
KEPT_STATE = Explanation(
  cause="state changed by a skipped step",
  remedy="use step.assign(variable, value), which assigns only if all updates are finite",
  containing=(".assign",),
)
TWICE = Explanation(
  cause="reduced twice",
  remedy="reduce once: step.all_reduce sums gradients and weight, and step.apply does not reduce; "
  "the apply() of your own optimizer must not either",
  containing=("all_reduce", "apply_gradients", ".apply("),
)
MEAN_OF_MEANS = Explanation(
  cause="mean of means",
  remedy="return sums, Loss.from_examples(per_example, batch['weight']); a mean per replica gives "
  "a replica with few examples the same weight as one with many",
  containing=("reduce_mean", "/ tf.reduce_sum", "divide_no_nan", "Loss("),
)
LOCAL_BATCH = Explanation(
  cause="loss divided by the local batch",
  remedy="return sums, Loss.from_examples(per_example, batch['weight']); the framework divides "
  "once, by the global weight",
  containing=("reduce_mean", "/ ", "divide_no_nan", "Loss("),
)
REGULARISATION = Explanation(
  cause="regularisation counted N times",
  remedy="return the penalty from Task.regularization(), or use loss.plus_regularization(penalty), "
  "which count it once",
  containing=("l2_loss", "losses", "regular", "penalty", "+ "),
)
REPLICA_FACTOR = Explanation(
  cause="loss scaled by the number of replicas",
  remedy="return this replica's sums as they are; the framework divides by the weight of all "
  "replicas",
)
CLOCK = Explanation(
  cause="a loss by the clock",
  remedy="compute it from step.number, which a restart and all replicas share",
)
IN_PYTHON = Explanation(
  cause="Python in the step",
  remedy="what tf.py_function and tf.numpy_function call must give the same for the same arguments",
)
TRACED_VALUE = Explanation(
  cause="Python value that changes",
  remedy="compute it from step.number or the batch: Python runs only when a step is traced, and "
  "the same step traced again is another one",
  containing=("time.", "datetime", "np.random", "random.", "global "),
)
PYTHON_VALUE = Explanation(
  cause="Python value that changes",
  remedy="compute it from step.number or the batch, or keep it in a tf.Variable of the model; each "
  "replica traces the step, and Python runs only then",
)
COUPLED = Explanation(
  cause="examples that depend on one another",
  mixes_rows=True,
  remedy="code that compares the examples of a batch (negatives, statistics, ranks) sees only "
  "those of its own replica: collect the others with step.all_gather, in train_step",
  containing=(
    *("reduce_mean", "reduce_std", "matmul", "transpose", "top_k", "moments", "[None, :]"),
    "bincount",
  ),
)
LOCAL_COUNT = Explanation(
  cause="loss divided by a local count",
  remedy="return sums and what they are divided by, Loss(tf.reduce_sum(losses * mask), "
  "tf.reduce_sum(mask)): each replica divides by its own number of tokens or labels, and the "
  "framework divides once, by that of all",
  containing=("divide_no_nan", "boolean_mask", "reduce_mean", "/ "),
)
MEAN_OF_ROWS = Explanation(
  cause=PADDING,
  mixes_rows=True,
  remedy="a mean over the rows, padding among them, is added to what each example has: leave the "
  "mean out, so that each example has its own term, and Loss.from_examples weights it",
)
PLACES = Explanation(
  cause=COUPLED.cause,
  remedy="the step gathers already: look for what it still takes from its own rows, or for a wrong "
  "place of theirs: step.all_gather puts the rows of all replicas one after the other, so those of "
  "this one begin at its number times the rows that each replica gives",
  containing=("replica_id",),
)
GATHERED = dataclasses.replace(PLACES, mixes_rows=True)
SHIFTED = Explanation(
  cause="rows run into one another",
  mixes_rows=True,
  remedy="shift within each row, such as labels[:, 1:] and logits[:, :-1]: where rows are put one "
  "after the other before, the last place of a row meets the first one of the next",
)
NO_SUM = Explanation(
  cause=COUPLED.cause,
  mixes_rows=True,
  remedy="a root, a logarithm or a ratio of a batch's mean is no sum over its examples, so that of "
  "N replicas is another: take it for each example, or compute the mean over all replicas first",
)
RANKED = Explanation(
  cause=COUPLED.cause,
  remedy="ranks, recall at k and negatives see only the examples of their own replica and batch: "
  "return PerExample(values, weight) and compare all examples in derived(), or collect the others "
  "with step.all_gather in eval_step()",
)
PADDED = Explanation(
  cause="padded rows among the others",
  mixes_rows=True,
  remedy="rows of weight 0 are no examples: collect the weights as well, by "
  "step.all_gather(batch['weight']), and leave these rows out: logits - 1e9 * (weight == 0)",
  containing=COUPLED.containing,
)
NOT_STEADY = Explanation(
  cause="unknown",
  remedy="the step draws nothing at random: look for what it reads beside its batch, such as a "
  "file, or a variable that is in neither the model nor the task",
)
UNKNOWN = Explanation(
  cause="unknown",
  remedy="no known mistake predicts this update; compare the verbs of your train_step with "
  "those of step.update",
)
OPTIMIZER = Explanation(
  cause="optimizer",
  remedy="gradient descent gives the same update and this optimizer does not: it reads something "
  "that differs between replicas",
)
CLIPPED_FIRST = Explanation(
  cause="clipped before the reduction",
  remedy="clip reduced gradients: step.clip after step.all_reduce and step.unscale",
  containing=("clip",),
)
CHECKED_FIRST = Explanation(
  cause="finite check before the reduction",
  remedy="call step.check on the reduced gradients, so that all replicas decide alike",
)
NEVER_UNSCALED = Explanation(
  cause="never unscaled",
  remedy="call step.unscale after step.all_reduce: it divides by the global weight and the loss "
  "scale",
)
LOCAL_STATE = Explanation(
  cause="state fed from local rows only",
  remedy="give step.assign() a value that is equal on every replica: step.all_gather() the rows, "
  "or compute it from sums over all replicas",
)
LOCAL_CONDITION = Explanation(
  cause="a condition that differs between replicas",
  remedy="compute `when` from step.number, variables or reduced values, such as the loss that "
  "step.update() returns, not from the rows of this replica",
)
LOCAL_UPDATE = Explanation(
  cause="an update that differs between replicas",
  remedy="give step.apply() the same on every replica: gradients and sums that step.all_reduce() "
  "returns, noise from a seed without the replica, such as [seed, step.number]",
)
LOCAL_WEIGHT = Explanation(
  cause="divided by the weight of one replica",
  remedy="give step.unscale() the loss that step.all_reduce() returns: its weight is that of all "
  "replicas",
)
LOCAL_OFFSETS = Explanation(
  cause="perturbed by the gradients of one replica",
  remedy="give step.perturbed() offsets that are equal on every replica: of gradients after "
  "step.all_reduce() and step.unscale()",
)
BY_OPTION = {
  "clip_norm": CLIPPED_FIRST,
  "accumulation": Explanation(
    cause="mean over micro-batches",
    remedy="add up the sums of the micro-batches and divide once, as step.gradients does",
    containing=("gradients(", "reduce_mean", "/ "),
  ),
  "loss scaling": Explanation(
    cause="loss scale",
    remedy="divide reduced gradients by the scale once, as step.unscale does",
    containing=("unscale", "scale"),
  ),
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
