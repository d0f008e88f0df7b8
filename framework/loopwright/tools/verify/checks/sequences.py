"""Sequences: one document, one later token or the padding is changed, and nothing else may move.

Some rows of the training set are changed before preprocess(), see bench/changed_rows.py, and
forward() and loss() are asked in evaluation mode. Which token an output predicts is what the
gradient of the loss pulls up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs.autograph import converted
from loopwright.task import Task
from loopwright.tools.verify.bench import (
  changed_rows,
  evaluated,
  recorded_step,
  row_influence,
  source_lines,
)
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.changed_rows import Sequences
from loopwright.tools.verify.bench.evaluated import Evaluated
from loopwright.tools.verify.bench.recorded_step import Operation
from loopwright.tools.verify.report import Group, Result

GROUP = Group("sequences")
APART, ORDER, LATER = "documents apart", "order of documents", "no token sees later ones"
LABELS, PADDING = "labels are the next tokens", "padding does not count"
NAMES = (APART, ORDER, LATER, LABELS, PADDING)
SURE, SAME, COMMON = 0.9, 1e-4, 0.7
SHIFTS = (1, 0, 2, 3, -1)
"""How far from an output's own place the token may be that it predicts; the likely one first."""
_ROUNDING, _INFLUENCE, _MASK_VALUES = 2e-6, 2e-5, 3
REFUSED = (ConfigError, ValueError, TypeError, KeyError, IndexError, tf.errors.OpError)


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  task = subject.fresh_task()
  if type(task).forward is Task.forward or type(task).loss is Task.loss:
    return [GROUP.skipped(APART, f"{type(task).__name__} has no forward() and loss()")]
  sequences = changed_rows.sequences(task)
  if sequences is None:
    return [GROUP.skipped(APART, "no feature [n, length] of whole numbers")]
  try:
    checked = Tokens(subject, sequences)
  except REFUSED as error:
    return [GROUP.skipped(APART, f"nothing is known of each token: {type(error).__name__}")]
  return list(checked.results())


class Tokens:
  """The rows as they are, and what the task computes for each token."""

  def __init__(self, subject: Subject, sequences: Sequences) -> None:
    """Calls forward() and loss() once; raises what they raise."""
    self.of, self.here = sequences, Evaluated(subject)
    self.task = self.here.task
    for variable, value in zip(self.here.variables, self.here.values, strict=True):
      variable.assign(value)
    self.batch = self._preprocessed(sequences.rows)
    self.numbers = self._numbers(self.batch)
    self.size = self.numbers.shape[1]
    self.pulls = self._pulls(self._outputs(self.batch), self.batch)
    self.counted = _counted(self.pulls)
    self.number = sequences.number[:, : self.size]
    self.real = self.number > 0
    if not self.counted.any():
      raise ValueError("the loss depends on no token's output")

  def results(self) -> Iterator[Result]:
    """Yields a result for each of `NAMES`."""
    apart = self.apart()
    yield apart
    yield self.order(known=apart.status == "failed")
    self.tokens, self.shift = self._predicted()
    later = self.later()
    yield later
    yield self.labels(causal=later.status == "passed")
    yield self.padding()

  # ---- Documents ----

  def apart(self) -> Result:
    """Changes the first document of each row, then the last one."""
    if not self.of.several:
      return GROUP.skipped(APART, "no feature says which document a token belongs to")
    for told, number in (("first", 1), ("last", self.of.last())):
      changed = self.of.number == number
      other, own = self._preprocessed(self.of.changed(changed)), changed[:, : self.size]
      where = self._moved(other, self.real & ~own, own)
      if where.any():
        told = f"another {told} document in a row, by {self.of.known_by!r}, changes the outputs of "
        told += f"{where.sum()} of {(self.real & ~own).sum()} tokens of others"
        return GROUP.failed(APART, told, "documents see one another", self._line(other, where))
    told = f"the first or last of {len(self.number)} rows by {self.of.known_by!r}"
    return GROUP.passed(APART, told)

  def order(self, *, known: bool) -> Result:
    """Puts the first document of each row behind the others."""
    if known or not self.of.several:
      why = f"{APART!r} fails" if known else "no feature says which document a token belongs to"
      return GROUP.skipped(ORDER, why)
    rows, places = self.of.rotated()
    places = places[:, : self.size]
    numbers = self._numbers(self._preprocessed(rows))
    at = np.arange(len(places))[:, np.newaxis], np.minimum(places, self.size - 1)
    kept = self.real[at] & (places < self.size)
    where = _apart(self.numbers[at], numbers, kept, np.zeros_like(kept))
    if not where.any():
      return GROUP.passed(
        ORDER, "the outputs of a document are the same at another place of its row"
      )
    told = f"the first document behind the others changes the outputs of {where.sum()} tokens"
    place = source_lines.method(self.task, "forward" if self.of.restarts else "source")
    return GROUP.failed(ORDER, told, "positions do not restart", place)

  # ---- Labels ----

  def _predicted(self) -> tuple[str, int | None]:
    """Returns the feature of which outputs predict a token, and its distance; None if unknown."""
    self.label = self.pulls.argmin(axis=2)
    features = self._inputs() if self.pulls.shape[2] >= 4 else []
    for shift in SHIFTS:
      for name in features:
        hits, of = self._hits(name, shift)
        if of >= 10 and hits > SURE * of:
          return name, shift
    return "", None

  def _inputs(self) -> list[str]:
    """Returns the features [n, length] of whole numbers on which the outputs depend."""
    found = []
    for name, value in self.batch.items():
      if value.ndim != 2 or value.dtype.kind not in "iu" or value.shape[1] < self.size:
        continue
      if name not in (self.of.known_by, self.of.counted, "seed", "example_id"):
        numbers = self._numbers({**self.batch, name: np.roll(value, 1, axis=1)})
        if not np.allclose(numbers, self.numbers, atol=1e-6 * np.abs(self.numbers).max()):
          found.append(name)
    return found

  def _hits(self, name: str, shift: int) -> tuple[int, int]:
    """Returns at how many places a label is the token some places further, and of how many."""
    value, at = self.batch[name], np.arange(self.size) + shift
    last = min(value.shape[1], self.of.length) - 1
    clipped = np.clip(at, 0, last)
    same = self.counted & (at == clipped) & (self.of.number[:, clipped] == self.number)
    labels = self.label[same]
    if not labels.size or np.bincount(labels).max() > COMMON * labels.size:
      return 0, 0
    return int((value[:, clipped][same] == labels).sum()), int(labels.size)

  def later(self) -> Result:
    """Changes the tokens from one on; those before must not move if they predict the next ones."""
    if self.shift is None:
      return GROUP.skipped(LATER, "the loss predicts no tokens of the row")
    where = np.zeros_like(self.real)
    for row, number in enumerate(self.number):  # the second half of the longest document
      here = np.flatnonzero(number == np.bincount(number[number > 0]).argmax())
      where[row, here[len(here) // 2 :]] = True
    value = self.batch[self.tokens].copy()
    others = np.random.default_rng(2).permutation(value[:, : self.size][self.real])
    value[:, : self.size][where] = others[: where.sum()]
    other = {**self.batch, self.tokens: value}
    before = np.arange(self.size) < where.argmax(axis=1)[:, np.newaxis]
    found = self._moved(other, before & self.counted, where)
    if not found.any():
      return GROUP.passed(LATER, f"{self.tokens!r} from a token on changes no output before it")
    if self.shift <= 0:
      told = f"outputs reproduce {self.tokens!r} at their own place, and see all of it"
      return GROUP.skipped(LATER, told)
    told = f"other {self.tokens!r} from a token on change {found.sum()} outputs before it, whose "
    told += "label is the next token"
    return GROUP.failed(LATER, told, "a token sees later ones", self._line(other, found))

  def labels(self, *, causal: bool) -> Result:
    """Compares what outputs predict with the tokens around."""
    if self.shift is None:
      return GROUP.skipped(LABELS, "the loss predicts no tokens of the row")
    hits, of = self._hits(self.tokens, self.shift)
    told = f"{hits} of {of} labels are {self.tokens!r} {self.shift} places further"
    cause = "label shifted twice" if self.shift > 1 else ""
    if self.shift < 1 and causal:  # it sees what it predicts
      cause = "label already seen"
    if cause:
      return GROUP.failed(LABELS, told, cause, self.here.line("loss", self.batch))
    if self.shift == 1 and self.of.several and (crossing := self._crossing()):
      told = f"{crossing} last tokens of documents have the first one of the next as their label"
      place = source_lines.method(self.task, "preprocess", "source")
      return GROUP.failed(LABELS, told, "label of the next document", place)
    return GROUP.passed(LABELS, told)

  def _crossing(self) -> int:
    """Returns how many labels are the first token of the next document, if it is no chance."""
    value = self.batch[self.tokens]
    ends = np.argwhere((np.diff(self.number, axis=1) > 0) & self.counted[:, :-1])
    row, at = ends[ends[:, 1] + 1 < value.shape[1]].T
    firsts = value[row, at + 1]
    several = len(firsts) >= 3 and np.bincount(firsts).max() <= COMMON * len(firsts)
    hits = int((self.label[row, at] == firsts).sum())
    return hits if several and hits > SURE * len(firsts) else 0

  # ---- Padding ----

  def padding(self) -> Result:
    """Changes the outputs of padding, and looks at what share of the loss a token has."""
    where = self.of.number == 0
    if self.of.several:
      every_other = np.arange(len(where))[:, np.newaxis] % 2 == 0
      where = where | ((self.of.number == self.of.last()) & every_other)
    if self.of.padding is None or not where.any():
      return GROUP.skipped(PADDING, "no padding is known")
    batch, cut = self._preprocessed(self.of.emptied(where)), where[:, : self.size]
    outputs, numbers = self._outputs(batch), self._numbers(batch)
    noise = np.random.default_rng(3).normal(size=numbers.shape) * np.abs(numbers).max()
    other = self._replaced(outputs, numbers + noise * cut[:, :, np.newaxis])
    means, changed = self._means(outputs, batch), self._means(other, batch)
    name, told = "loss", self._share(numbers, self._pulls(outputs, batch), means["loss"][1])
    for each, mean in means.items():
      if not np.allclose(mean, changed[each], rtol=SAME, equal_nan=True):
        name = each
        told = f"other outputs in padding change {name}: {mean[0]:.6g}, and {changed[name][0]:.6g}"
    if told:
      place = self.here.line(name, batch)
      return GROUP.failed(PADDING, told, "padding enters the mean", place)
    return GROUP.passed(PADDING, f"{cut.sum()} tokens of padding change nothing")

  def _share(self, numbers: np.ndarray, pulls: np.ndarray, weight: float) -> str:
    """Returns how a token's share of the loss shows that padding is in the mean; "" if it is not.

    Of cross-entropy, a label's gradient is its weight times 1 - its probability.
    """
    if pulls.shape[2] < 2 or np.abs(pulls.sum(axis=2)).max() > 1e-3 * np.abs(pulls).max():
      return ""
    label = pulls.argmin(axis=2)[:, :, np.newaxis]
    chances = np.exp(numbers - numbers.max(axis=2, keepdims=True))
    chance = np.take_along_axis(chances / chances.sum(axis=2, keepdims=True), label, axis=2)
    counted = _counted(pulls)
    shares = (-np.take_along_axis(pulls, label, axis=2) / (1 - chance))[:, :, 0] / weight
    alike = np.allclose(shares[counted], 1 / counted.size, rtol=0.02)
    if not alike or counted.sum() > 0.98 * counted.size:
      return ""
    return f"{counted.sum()} tokens count, each 1/{counted.size} of the loss, as if padding did too"

  # ---- Parts ----

  def _preprocessed(self, rows: Rows) -> Rows:
    return changed_rows.preprocessed(self.task, rows)

  def _moved(self, other: Rows, kept: np.ndarray, changed: np.ndarray) -> np.ndarray:
    return _apart(self.numbers, self._numbers(other), kept, changed)

  # ---- What the task computes ----

  def _outputs(self, batch: Rows) -> Any:
    """Returns what forward() does."""
    return evaluated.forward(self.here, batch)

  def _numbers(self, batch: Rows) -> np.ndarray:
    """Returns the output of each token, float64 [n, length, -1]."""
    flat, index = self._flat(self._outputs(batch))
    return _of_tokens(flat[index]).astype(np.float64)

  def _flat(self, outputs: Any) -> tuple[list[Any], int]:
    """Returns all outputs, and which has numbers of each token, at all positions or all but one."""
    flat = tf.nest.flatten(outputs)
    for index, value in enumerate(flat):
      number = isinstance(value, tf.Tensor) and value.dtype.is_floating and len(value.shape) >= 2
      if number and value.shape[1] in (self.of.length, self.of.length - 1):
        return flat, index
    raise ValueError("forward() returns nothing for each token")

  def _means(self, outputs: Any, batch: Rows) -> dict[str, tuple[float, float]]:
    """Returns (mean, weight) of the loss and of metrics of some outputs; only of pairs."""
    batch_here, found = evaluated.placed(self.here, batch), {}
    if type(self.task).metrics is not Task.metrics:
      metrics = converted(self.task.metrics)
      found = self.here.strategy.run(lambda: dict(metrics(outputs, batch_here)))
    found["loss"] = tuple(evaluated.loss(self.here, outputs, batch))
    pairs = {n: v for n, v in found.items() if isinstance(v, tuple) and len(v) == 2}
    return {
      name: (float(tf.math.divide_no_nan(*(tf.cast(v, tf.float64) for v in pair))), float(pair[1]))
      for name, pair in pairs.items()
    }

  def _pulls(self, outputs: Any, batch: Rows) -> np.ndarray:
    """Returns the gradient of the sum of the losses by each output, [n, length, -1]."""
    flat, index = self._flat(outputs)
    with tf.GradientTape() as tape:
      tape.watch(flat[index])
      total = evaluated.loss(self.here, outputs, batch).total
    return _of_tokens(tf.convert_to_tensor(tape.gradient(total, flat[index])))

  def _replaced(self, outputs: Any, value: np.ndarray) -> Any:
    """Returns outputs with other numbers of each token."""
    flat, index = self._flat(outputs)
    flat[index] = tf.constant(value.reshape(flat[index].shape), flat[index].dtype)
    return tf.nest.pack_sequence_as(outputs, flat)

  def _line(self, other: Rows, where: np.ndarray) -> str:
    """Returns the line of the mask by which tokens that are equal in two batches differ.

    The mask [.., length, length] goes into the first operation whose numbers change at `where`,
    bool [n, length], but is not made on the line of it: Keras makes its own form of a mask where a
    layer is called. Without such a mask it is that line.
    """
    kept, runs = np.pad(where, [(0, 0), (0, self.of.length - self.size)]), []
    for batch in (self.batch, other):
      with recorded_step.watched(self.task) as seen:
        self._outputs(batch)
      runs.append(seen)
    pairs = list(zip(*runs, strict=False))
    meeting = next((i for i, (a, b) in enumerate(pairs) if self._meets(a, b, kept)), None)
    if meeting is None:
      return source_lines.method(self.task, "forward")
    place = runs[0][meeting].place
    for index in sorted(row_influence.sources(runs[0], meeting), reverse=True):
      if self._is_mask(*pairs[index]) and runs[0][index].place not in ("", place):
        return runs[0][index].place
    return place

  def _is_mask(self, one: Operation, other: Operation) -> bool:
    return any(
      a.shape[-2:].count(self.of.length) == 2
      and np.array_equal(a, b) and len(np.unique(a)) <= _MASK_VALUES
      for a, b in zip(one.values, other.values, strict=False)
    )  # fmt: skip

  def _meets(self, one: Operation, other: Operation, kept: np.ndarray) -> bool:
    for a, b in zip(one.values, other.values, strict=False):
      if a.shape != b.shape or a.dtype.kind != "f" or a.shape.count(self.of.length) != 1:
        continue
      axis = a.shape.index(self.of.length)
      if axis and a.shape[0] == len(kept):
        before, after = (_of_tokens(np.moveaxis(v.astype(np.float64), axis, 1)) for v in (a, b))
        if _apart(before, after, kept, ~kept).any():
          return True
    return False


def _counted(pulls: np.ndarray) -> np.ndarray:
  """Returns which outputs the loss depends on, bool [n, length]."""
  size = np.abs(pulls).max(axis=2)
  return size > 1e-6 * size.max()


def _of_tokens(value: Any) -> np.ndarray:
  """Returns numbers as [n, length, -1]."""
  return np.reshape(value, [*value.shape[:2], -1])


def _apart(one: np.ndarray, other: np.ndarray, kept: np.ndarray, changed: np.ndarray) -> np.ndarray:
  """Returns which of the kept tokens have other numbers [n, length, -1], bool [n, length].

  The numbers of those that may change say what is more than rounding.
  """
  change = np.abs(one - other).max(axis=2)
  size = max(
    _INFLUENCE * float(change[changed].max(initial=0.0)),
    _ROUNDING * float(np.abs(one).max(initial=0.0)),
  )
  return kept & (change > size)
