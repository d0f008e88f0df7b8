"""Sequences: one document, one later token or the padding is changed, and nothing else may move.

Some rows of the training set are changed before preprocess(), see bench/documents.py, and
forward() and loss() are asked in evaluation mode. Which token an output predicts is what the
gradient of the loss pulls up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.task import Task
from loopwright.tools.verify.bench import documents, longer_rows, per_token
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.documents import Sequences
from loopwright.tools.verify.bench.per_token import PerToken, moved
from loopwright.tools.verify.report import Group, Result

GROUP = Group("sequences")
APART, ORDER, LATER = "documents apart", "order of documents", "no token sees later ones"
LABELS, PADDING, SUMS = "labels are the next tokens", "padding does not count", "sums over tokens"
NAMES = (APART, ORDER, LATER, LABELS, PADDING, SUMS)
NO_RESTART = "positions do not restart"
IN_MEAN = "padding enters the mean"
SURE, SAME = 0.9, 1e-4
SHIFTS = (1, 0, 2, 3, -1)
"""How far from an output's own place the token may be that it predicts; the likely one first."""
MEANS = ("reduce_mean", "Loss(", "weighted_sum(", "tf.size", "tf.shape")
REFUSED = (ConfigError, ValueError, TypeError, KeyError, IndexError, tf.errors.OpError)
SHIFTED = ("[:, :-1]", "[:, 1:]", "[:-1]", "[1:]", "roll(", "shift")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  task = subject.fresh_task()
  if type(task).forward is Task.forward or type(task).loss is Task.loss:
    return [GROUP.skipped(APART, f"{type(task).__name__} has no forward() and loss()")]
  sequences = documents.find(task)
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
    self.of, self.model = sequences, PerToken(subject, sequences.length)
    self.task = self.model.task
    self.batch = self._preprocessed(sequences.rows)
    self.outputs = self.model.outputs(self.batch)
    self.numbers = self.model.numbers(self.batch)
    self.size = self.numbers.shape[1]
    self.pulls = self.model.pulls(self.outputs, self.batch)
    self.counted = self._counted(self.pulls)
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
    yield self.sums()

  # ---- Documents ----

  def apart(self) -> Result:
    """Changes the first document of each row, then the last one."""
    if not self.of.several:
      return GROUP.skipped(APART, "no feature says which document a token belongs to")
    for told, changed in (
      ("first", self.of.number == 1),
      ("last", self.of.number == self.of.last()),
    ):
      other = self._preprocessed(self.of.changed(changed))
      own = changed[:, : self.size]
      where = self._moved(other, self.real & ~own, own)
      if where.any():
        told = f"another {told} document in a row, by {self.of.known_by!r}, changes the outputs of "
        told += f"{where.sum()} of {(self.real & ~own).sum()} tokens of others, {_first(where)}"
        return GROUP.failed(APART, told, "documents see one another", self._line(other, where))
    told = f"the first or last of {len(self.number)} rows by {self.of.known_by!r}"
    return GROUP.passed(APART, told)

  def order(self, *, known: bool) -> Result:
    """Puts the first document of each row behind the others; then restarts positions."""
    if known or not self.of.several:
      why = f"{APART!r} fails" if known else "no feature says which document a token belongs to"
      return GROUP.skipped(ORDER, why)
    rows, places = self.of.rotated()
    numbers = self.model.numbers(self._preprocessed(rows))
    inside = (places < self.size)[:, : self.size]
    expected = np.take_along_axis(
      self.numbers, np.minimum(places, self.size - 1)[:, : self.size, np.newaxis], axis=1
    )
    real = np.take_along_axis(self.of.number, places, axis=1)[:, : self.size] > 0
    where = moved(expected, numbers, inside & real, np.zeros_like(real))
    words = ("position", "range(")
    if where.any():
      place = per_token.text(self.task, *words[::-1], methods=("forward",))
      told = f"the first document behind the others changes the outputs of {where.sum()} tokens"
      return GROUP.failed(ORDER, told, NO_RESTART, place)
    if anew := self.of.anew():
      where = self._moved(self._preprocessed(anew), self.real, ~self.real)
      if where.any():
        told = f"{self.of.counted!r} goes on from document to document: {where.sum()} outputs "
        place = per_token.text(self.task, f'"{self.of.counted}"', *words, methods=("source",))
        return GROUP.failed(ORDER, f"{told}differ", NO_RESTART, place)
    return GROUP.passed(ORDER, "the outputs of a document are the same at another place of its row")

  # ---- Labels ----

  def _predicted(self) -> tuple[str, int | None]:
    """Returns the feature of which outputs predict a token, and its distance; None if unknown."""
    if self.pulls.shape[2] < 4:
      return "", None
    self.label = self.pulls.argmin(axis=2)
    for shift in SHIFTS:
      for name in self._inputs():
        hits, of = self._hits(name, shift)
        if of >= 10 and hits > SURE * of:
          return name, shift
    return "", None

  def _inputs(self) -> list[str]:
    """Returns the features [n, length] of whole numbers on which the outputs depend."""
    if not hasattr(self, "_found"):
      self._found = []
      for name, value in self.batch.items():
        if value.ndim != 2 or value.dtype.kind not in "iu" or value.shape[1] < self.size:
          continue
        if name in (self.of.known_by, self.of.counted) or name in ("seed", "example_id"):
          continue
        numbers = self.model.numbers({**self.batch, name: np.roll(value, 1, axis=1)})
        if not np.allclose(numbers, self.numbers, atol=1e-6 * np.abs(self.numbers).max()):
          self._found.append(name)
    return self._found

  def _hits(self, name: str, shift: int) -> tuple[int, int]:
    """Returns at how many places a label is the token some places further, and of how many."""
    value, at = self.batch[name], np.arange(self.size) + shift
    inside = (at >= 0) & (at < min(value.shape[1], self.of.length))
    clipped = np.clip(at, 0, min(value.shape[1], self.of.length) - 1)
    same = self.counted & inside & (self.of.number[:, clipped] == self.number)
    labels = self.label[same]
    if not labels.size or np.bincount(labels).max() > 0.7 * labels.size:
      return 0, 0
    return int((value[:, clipped][same] == labels).sum()), int(labels.size)

  def later(self) -> Result:
    """Changes the tokens from one on; those before must not move if they predict the next ones."""
    if self.shift is None:
      return GROUP.skipped(LATER, "the loss predicts no tokens of the row")
    where = self._tail()
    value = self.batch[self.tokens].copy()
    random = np.random.default_rng(2)
    full = np.zeros(value.shape, bool)
    full[:, : where.shape[1]] = where
    value[full] = random.permutation(value[:, : self.size][self.real])[: full.sum()]
    other = {**self.batch, self.tokens: value}
    before = np.arange(self.size) < where.argmax(axis=1)[:, np.newaxis]
    found = self._moved(other, before & self.counted, where)
    if not found.any():
      return GROUP.passed(LATER, f"{self.tokens!r} from a token on changes no output before it")
    if self.shift <= 0:
      told = f"outputs reproduce {self.tokens!r} at their own place, and see all of it"
      return GROUP.skipped(LATER, told)
    back = int((where.argmax(axis=1)[:, np.newaxis] - np.arange(self.size))[found].max())
    told = f"other {self.tokens!r} from a token on change {found.sum()} outputs before it, up to "
    told += f"{back} places before, whose label is the next token"
    return GROUP.failed(LATER, told, "a token sees later ones", self._line(other, found))

  def _tail(self) -> np.ndarray:
    """Returns the second half of each row's longest document, bool [n, length]."""
    made = np.zeros_like(self.real)
    for row, number in enumerate(self.number):
      longest = np.bincount(number[number > 0]).argmax()
      here = np.flatnonzero(number == longest)
      made[row, here[len(here) // 2 :]] = True
    return made

  def labels(self, *, causal: bool) -> Result:
    """Compares what outputs predict with the tokens around."""
    if self.shift is None:
      return GROUP.skipped(LABELS, "the loss predicts no tokens of the row")
    hits, of = self._hits(self.tokens, self.shift)
    told = f"{hits} of {of} labels are {self.tokens!r}"
    methods = ("loss", "preprocess", "source")
    if self.shift > 1:
      place = per_token.text(self.task, *SHIFTED, methods=methods)
      return GROUP.failed(
        LABELS, f"{told} {self.shift} places further", "label shifted twice", place
      )
    if self.shift < 1 and causal:
      told += f" {'at the same place' if not self.shift else 'before it'}, which is seen"
      place = per_token.text(self.task, "entropy", "accuracy", methods=methods)
      return GROUP.failed(LABELS, told, "label already seen", place)
    if self.shift == 1 and self.of.several and (crossing := self._crossing()):
      told = f"{crossing} last tokens of documents have the first one of the next as their label"
      place = per_token.text(self.task, *SHIFTED, methods=methods)
      return GROUP.failed(LABELS, told, "label of the next document", place)
    return GROUP.passed(LABELS, f"{told} {self.shift} places further")

  def _crossing(self) -> int:
    """Returns how many labels are the first token of the next document, if it is no chance."""
    value, labels, firsts = self.batch[self.tokens], [], []
    for row, at in np.argwhere(np.diff(self.number, axis=1) > 0):
      if self.counted[row, at] and at + 1 < value.shape[1]:
        labels.append(self.label[row, at])
        firsts.append(value[row, at + 1])
    several = len(firsts) >= 3 and np.bincount(firsts).max() <= 0.7 * len(firsts)
    hits = int(np.equal(labels, firsts).sum())
    return hits if several and hits > SURE * len(firsts) else 0

  # ---- Padding and sums ----

  def _padded(self) -> tuple[Rows, np.ndarray] | None:
    """Returns the rows with padding at their ends, and where it is; None if that is unknown."""
    if self.of.padding is None:
      return None
    where = self.of.number == 0
    if self.of.several:
      every_other = np.arange(len(where))[:, np.newaxis] % 2 == 0
      where = where | ((self.of.number == self.of.last()) & every_other)
    return self.of.emptied(where), where

  def padding(self) -> Result:
    """Changes outputs and contents of padding, and what a row has of it."""
    padded = self._padded()
    if padded is None or not padded[1].any():
      return GROUP.skipped(PADDING, "no padding is known")
    rows, where = padded
    batch, cut = self._preprocessed(rows), where[:, : self.size]
    outputs, numbers = self.model.outputs(batch), self.model.numbers(batch)
    noise = np.random.default_rng(3).normal(size=numbers.shape) * np.abs(numbers).max()
    other = self.model.replaced(outputs, numbers + noise * cut[:, :, np.newaxis])
    sums, changed = self.model.sums(outputs, batch), self.model.sums(other, batch)
    place = per_token.text(self.task, *MEANS, methods=("loss",))
    for name in sums.of:
      if not np.allclose(sums.of[name], changed.of[name], rtol=SAME, equal_nan=True):
        told = f"other outputs in padding change {name}: {sums.mean(name):.6g}, and "
        told += f"{changed.mean(name):.6g}"
        return GROUP.failed(PADDING, told, IN_MEAN, self._line_of(name, place))
    if share := self._share(outputs, batch, sums.of["loss"][1], cut):
      return GROUP.failed(PADDING, share, IN_MEAN, place)
    donated = self.of.changed(where)
    contents = rows | {name: donated[name] for name in self.of.contents}
    other_batch = self._preprocessed(contents)
    seen = moved(numbers, self.model.numbers(other_batch), ~cut, cut)
    if seen.any():
      told = f"other contents of padding change the outputs of {seen.sum()} real tokens"
      place = self.model.line(batch, other_batch, seen) or place
      return GROUP.failed(PADDING, told, "padding is seen", place)
    return GROUP.passed(PADDING, f"{cut.sum()} tokens of padding change nothing")

  def _share(self, outputs: Any, batch: Rows, weight: float, padded: np.ndarray) -> str:
    """Returns how a token's share of the loss shows that padding is in the mean; "" if it is not.

    Of cross-entropy, a label's gradient is its weight times 1 - its probability.
    """
    pulls = self.model.pulls(outputs, batch)
    if pulls.shape[2] < 2 or np.abs(pulls.sum(axis=2)).max() > 1e-3 * np.abs(pulls).max():
      return ""
    label = pulls.argmin(axis=2)[:, :, np.newaxis]
    numbers = self.model.numbers(batch)
    chances = np.exp(numbers - numbers.max(axis=2, keepdims=True))
    chance = np.take_along_axis(chances / chances.sum(axis=2, keepdims=True), label, axis=2)
    counted = self._counted(pulls)
    shares = (-np.take_along_axis(pulls, label, axis=2) / (1 - chance))[:, :, 0] / weight
    places = counted.shape[0] * counted.shape[1]
    all_alike = np.allclose(shares[counted], 1 / places, rtol=0.02)
    if not all_alike or counted.sum() > 0.98 * places or not padded.any():
      return ""
    return f"{counted.sum()} tokens count, each 1/{places} of the loss, as if padding did too"

  def sums(self) -> Result:
    """Compares loss and metrics of a batch with those of its rows, which have other numbers."""
    batch = self.batch
    if (padded := self._padded()) is not None:
      batch = self._preprocessed(padded[0])
    outputs = self.model.outputs(batch)
    counts = self._counted(self.model.pulls(outputs, batch)).sum(axis=1)
    if len(set(counts.tolist())) < 2:
      return GROUP.skipped(SUMS, f"all rows have {counts[0]} tokens that count")
    whole = self.model.sums(outputs, batch)
    rows = [self.model.sums(_row(outputs, i), _row_of(batch, i)) for i in range(len(counts))]
    for name, (_, weight) in whole.of.items():
      total = sum(row.of[name][0] for row in rows)
      added = total / max(sum(row.of[name][1] for row in rows), 1e-12)
      local = float(np.average([row.mean(name) for row in rows], weights=counts))
      mean = whole.mean(name)
      if weight and not _near(mean, added) and _near(mean, local):
        told = f"{name} is {mean:.6g}, and {added:.6g} added up from its rows, which have "
        told += f"{counts.min()} to {counts.max()} tokens"
        cause = f"{'loss' if name == 'loss' else 'metric'} divided by the local count of tokens"
        place = per_token.text(self.task, "reduce_mean", " / ", "divide", "Loss(")
        return GROUP.failed(SUMS, told, cause, self._line_of(name, place))
    return GROUP.passed(SUMS, f"rows of {counts.min()} to {counts.max()} tokens add up")

  # ---- Parts ----

  def _preprocessed(self, rows: Rows) -> Rows:
    return longer_rows.preprocessed(self.task, rows)

  def _moved(self, other: Rows, kept: np.ndarray, changed: np.ndarray) -> np.ndarray:
    return moved(self.numbers, self.model.numbers(other), kept, changed)

  def _counted(self, pulls: np.ndarray) -> np.ndarray:
    size = np.abs(pulls).max(axis=2)
    return size > 1e-6 * size.max()

  def _line(self, other: Rows, where: np.ndarray) -> str:
    kept = np.zeros(self.of.number.shape, bool)
    kept[:, : self.size] = where
    return self.model.line(self.batch, other, kept) or per_token.text(
      self.task, "mask", "causal", methods=("forward", "build_model")
    )

  def _line_of(self, name: str, place: str) -> str:
    """Returns the line of a metric's name, or of the loss."""
    return place if name == "loss" else per_token.text(self.task, f'"{name}"') or place


def _first(where: np.ndarray) -> str:
  row, token = np.argwhere(where)[0]
  return f"first at token {token} of row {row}"


def _near(one: float, other: float) -> bool:
  return bool(np.isclose(one, other, rtol=SAME, atol=1e-7))


def _row(outputs: Any, index: int) -> Any:
  return tf.nest.map_structure(lambda value: value[index : index + 1], outputs)


def _row_of(batch: Rows, index: int) -> Rows:
  return {name: value[index : index + 1] for name, value in batch.items()}
