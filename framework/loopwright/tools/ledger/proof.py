"""Proves from a run's ledgers that no example was skipped or repeated, whatever the restarts.

    python -m loopwright.tools.ledger runs/digits     # status 0: proven, 1: disproved, 2: no ledger

With `run.ledger = True` every worker writes <model_dir>/ledger-<worker>.jsonl (recorder.py), which
has two kinds of lines. Each start of the process, and each restore, says what is read from where:

    {"after_step": 40, "worker": 0, "workers": 2, "position": 480, "global_batch_size": 12,
     "rows": [0, 6], "num_examples": 30, "seed": 5, "shuffle": true}

Each loop, before a checkpoint can contain it, has the count and the hash of each step's examples:

    {"first_step": 41, "counts": [6, 6], "hashes": ["9f...", "03..."]}

Lines of a further source have "part", its name, and are proven by themselves. So have those of a
bucket, whose steps are its own batches.

docs/ledger.md describes what is compared. Computing what must have been read needs no data.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loopwright.errors import ConfigError
from loopwright.host import json_lines
from loopwright.run_folder import layout

if TYPE_CHECKING:
  from loopwright.inputs.mixture import Shares

PURPOSE = "ledger"
"""The key of the examples' hashes."""
_AT_ONCE = 1 << 16


class Start(NamedTuple):
  """What a worker reads from one start on.

  Attributes:
    position: examples that all workers together have consumed so far.
    global_batch_size: examples per step, over all workers.
    rows: [first, last) of this worker's rows of the padded global batch.
    num_examples: in the source; None for a stream of unknown length.
    shuffle: False for the source's own order.
    first: of a bucket, the number of examples in the shorter ones: its examples are numbered from
      there.
    shares: of a mixture, the arguments of `loopwright.inputs.mixture.Shares`.
    left_out: the examples that are read as padding, by their recorded numbers.
  """

  worker: int
  workers: int
  position: int
  global_batch_size: int
  rows: tuple[int, int]
  num_examples: int | None
  seed: int
  shuffle: bool
  first: int = 0
  shares: dict[str, Any] | None = None
  left_out: tuple[int, ...] = ()

  @property
  def order(self) -> tuple[int | None, int | None]:
    """(number of examples, seed or None): what decides which example a position reads."""
    return self.num_examples, self.seed if self.shuffle else None


class StepRecord(NamedTuple):
  """One step of one worker: the number of examples, and the sum of their hashes modulo 2**64."""

  examples: int
  digest: int
  start: Start


class Problem(Exception):  # noqa: N818 (it is not an error of the program)
  """The first step that is not as it must be, in one line."""


def start_line(after_step: int, start: Start, part: str = "") -> str:
  """Returns the line of a start; `part` names a further source."""
  fields = start._asdict()
  for name in ("first", "shares", "left_out"):
    if not fields[name]:
      del fields[name]
  return json.dumps({"after_step": after_step, **fields, **_of(part)})


def steps_line(
  first_step: int, counts: Sequence[int], digests: Sequence[int], part: str = ""
) -> str:
  """Returns the line of one loop; a count and a hash per step."""
  hashes = [f"{digest:016x}" for digest in digests]
  line = {"first_step": first_step, "counts": list(counts), "hashes": hashes}
  return json.dumps({**line, **_of(part)})


def _of(part: str) -> dict[str, str]:
  return {"part": part} if part else {}


class Ledger:
  """One worker's ledger of one source: the path to its last weights.

  Attributes:
    path: step -> record, of the steps that count.
    starts: the step after which each start continued, in order.
    base: the step after which the path begins: 0 unless the ledger was switched on later.
    reruns: number of steps that were recorded, discarded and recorded again.
  """

  def __init__(self, lines: Sequence[str], part: str = "") -> None:
    """Reads the lines of a part in order; ignores a line that a kill cut off.

    Raises:
      Problem: a step was recorded twice without a start in between, or rerun with other examples.
    """
    self.path: dict[int, StepRecord] = {}
    self.starts: list[int] = []
    self.base, self.reruns = 0, 0
    self._discarded: dict[int, StepRecord] = {}
    self._start: Start | None = None
    for entry in map(_parsed, lines):
      if entry.pop("part", "") != part:
        continue
      if "after_step" in entry:
        lists = {name: tuple(entry.get(name, ())) for name in ("rows", "left_out")}
        self._begin(entry.pop("after_step"), Start(**{**entry, **lists}))
      elif "first_step" in entry and self._start is not None:
        pairs = zip(entry["counts"], entry["hashes"], strict=True)
        for step, (count, digest) in enumerate(pairs, entry["first_step"]):
          self._add(step, StepRecord(count, int(digest, 16), self._start))

  @property
  def last_step(self) -> int:
    """The last step on the path."""
    return max(self.path, default=self.base)

  def _begin(self, after_step: int, start: Start) -> None:
    self._start = start
    self.base = min(self.base, after_step) if self.starts else after_step
    self.starts.append(after_step)
    for step in [step for step in self.path if step > after_step]:
      self._discarded[step] = self.path.pop(step)

  def _add(self, step: int, row: StepRecord) -> None:
    where = f"step {step}, worker {row.start.worker}"
    if step in self.path:
      raise Problem(
        f"{where}: recorded twice without a restart in between; do two runs share this folder?"
      )
    before = self._discarded.pop(step, None)
    self.path[step] = row
    if before is None:
      return
    self.reruns += 1
    one, other = (
      (r.start.rows, r.start.global_batch_size, r.start.order, r.start.left_out)
      for r in (before, row)
    )
    if one == other and before[:2] != row[:2]:
      raise Problem(f"{where}: rerun after a restart, with other examples than the first time")


def _parsed(line: str) -> dict[str, Any]:
  return json_lines.parsed(line) or {}


def read(model_dir: str) -> dict[str, list[Ledger]]:
  """Returns part -> the ledgers of all workers, worker 0's first; the main source is "".

  Raises:
    ConfigError: there is no ledger.
    Problem: see `Ledger`.
  """
  import tensorflow as tf

  files: list[list[str]] = []
  while tf.io.gfile.exists(path := os.path.join(model_dir, layout.ledger(len(files)))):
    with tf.io.gfile.GFile(path) as file:
      files.append(file.read().split("\n"))
  if not files:
    raise ConfigError(
      f"no {layout.ledger(0)} in {model_dir!r}; train with `run.ledger = True`, then give this "
      "command the run folder."
    )
  entries = [_parsed(line) for lines in files for line in lines]
  parts = {str(entry.get("part", "")) for entry in entries if entry} or {""}
  return {part: [Ledger(lines, part) for lines in files] for part in sorted(parts, key=_number)}


def _number(part: str) -> tuple[str, int]:
  """Sorts buckets by their lengths."""
  words = part.rpartition(" ")
  return (words[0], int(words[2])) if words[2].isdigit() else (part, 0)


# ---- What must have been read ----


def ids_of(start: Start, first: int, last: int) -> np.ndarray:
  """Returns int64 [last - first]: the examples at positions first, ..., last - 1."""
  import tensorflow as tf

  from loopwright.inputs.ordering import examples_at

  positions, count = np.arange(first, last), start.num_examples
  assert count is not None
  if shares := shares_of(start):
    of_run: dict[str, Any] = {"seed": start.seed, "shuffle": start.shuffle}
    return shares.ids(tf.constant(positions), **of_run).numpy()
  if not start.shuffle:
    return start.first + positions % count
  ids = examples_at(tf.constant(positions), num_examples=count, seed=start.seed)
  return start.first + ids.numpy()


def shares_of(start: Start) -> Shares | None:
  """Returns which part each position reads, of a mixture."""
  from loopwright.inputs.mixture import Shares

  return Shares(**start.shares) if start.shares else None


def parts_of(start: Start, position: int) -> dict[str, tuple[int, Start]]:
  """Returns name -> (its position, its order) of the parts of a mixture; "" of another source."""
  from loopwright.inputs.ordering import seed_of_part

  shares = shares_of(start)
  if shares is None:
    return {"": (position, start)}
  own = zip(shares.counts.items(), shares.firsts, shares.before(position).values(), strict=True)
  return {
    name: (
      before,
      start._replace(num_examples=count, first=first, seed=seed_of_part(start.seed, name)),
    )
    for (name, count), first, before in own
  }


def hashes_of(ids: np.ndarray) -> np.ndarray:
  """Returns what each example adds to its step's hash, uint64 of the shape of `ids`."""
  import tensorflow as tf

  from loopwright.graphs.randomness import hashed

  return hashed(tf.constant(ids, tf.int64), 0, PURPOSE).numpy()


# ---- The proof ----


@dataclasses.dataclass
class Proof:
  """What was proven of the steps from 1, or from where the ledger begins, to the last one.

  Attributes:
    workers: number of workers at the last step.
    starts: how many times training was started.
    reruns: steps that worker 0 ran again with the same examples.
    num_examples: in the source; None if unknown, then the order was not compared.
    parts: of a mixture, those of each part; "" is a whole source.
    left_out: how often an example was left out, as each start says.
  """

  first_step: int
  last_step: int
  workers: int
  starts: int
  reruns: int
  num_examples: int | None
  parts: dict[str, Epochs] = dataclasses.field(default_factory=dict)
  left_out: int = 0

  def __str__(self) -> str:
    workers = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
    starts = f"{self.starts} start{'' if self.starts == 1 else 's'}"
    lines = [
      f"steps {self.first_step} to {self.last_step}: each consumed exactly once ({workers}, "
      f"{starts}, {self.reruns} steps rerun with the same examples)"
    ]
    if self.first_step > 1:
      lines.append(f"steps 1 to {self.first_step - 1}: unknown, the ledger was switched on later")
    if self.num_examples is None:
      lines.append("examples: not compared, the length of the stream is unknown")
    every = sum(part.count for part in self.parts.values())
    for name, part in self.parts.items():
      said = f"epochs: {part.epochs} complete, {len(part.seen)} distinct examples in each"
      if name:
        share = f"{part.count} examples, {100 * part.count / every:.2f} %"
        lines.append(f"{name!r}: {share}; {said}; {part.left_over} of the next")
      else:
        lines.append(f"{said}; {part.left_over} examples of the next")
    if self.left_out:
      lines.append(f"left out: {self.left_out} of the examples in these steps were padding instead")
    return "\n".join(lines)


class Epochs:
  """Counts what is read of one source, or of one part of a mixture.

  Attributes:
    end: the position after the last example.
    count: the examples.
    epochs: those that are complete, each with every example once.
    left_over: examples of the epoch that has begun.
    seen: of this epoch, bool [num_examples].
  """

  def __init__(self, position: int) -> None:
    self.end, self.count, self.epochs, self.left_over = position, 0, 0, 0
    self.seen = np.zeros(0, bool)
    self._order: tuple[int | None, int | None] | None = None
    self._whole = False

  def add(self, ids: np.ndarray, start: Start, step: int) -> None:
    """Counts the examples at the next positions; `step` reads the first of them."""
    count = start.num_examples
    assert count is not None
    if start.order != self._order:
      if self._order is not None and self.end % count:
        raise Problem(
          f"step {step}: a restart changed the order of the examples (num_examples, seed) from "
          f"{self._order} to {start.order} within an epoch"
        )
      self._order, self.seen, self._whole = start.order, np.zeros(count, bool), False
    self.count += len(ids)
    while len(ids):
      within = self.end % count
      if within == 0:
        self.seen[:], self._whole = False, True
      part, ids = ids[: count - within] - start.first, ids[count - within :]
      if self.seen[part].any() or len(np.unique(part)) < len(part):
        raise Problem(f"step {step}: an example occurs twice in the epoch of position {self.end}")
      self.seen[part] = True
      self.end += len(part)
      self.left_over = self.end % count
      self.epochs += self._whole and self.left_over == 0


def prove(ledgers: Sequence[Ledger], *, checkpoint_step: int | None = None) -> Proof:
  """Compares every step on the path with the examples that it must have consumed (host).

  Args:
    ledgers: of all workers, worker 0's first; workers that no longer train may be among them.
    checkpoint_step: step of the newest checkpoint, which the path must reach.

  Raises:
    Problem: the first step that was skipped, repeated or differs, and its worker.
  """
  chief = ledgers[0]
  first, last = chief.base + 1, chief.last_step
  if last < first:
    raise Problem("no step was recorded")
  for step in range(first, last + 1):
    workers = chief.path[step].start.workers if step in chief.path else 1
    for worker in range(workers):
      if worker >= len(ledgers) or step not in ledgers[worker].path:
        raise Problem(f"step {step}, worker {worker}: skipped, no line records it")
  if checkpoint_step is not None and checkpoint_step > last:
    raise Problem(
      f"step {last + 1}: the newest checkpoint is of step {checkpoint_step}, but worker 0 recorded "
      f"no step after {last}"
    )
  end = chief.path[last].start
  proof = Proof(first, last, end.workers, len(chief.starts), chief.reruns, end.num_examples)
  position = chief.path[first].start.position
  for steps in _runs(chief, first, last):
    start = chief.path[steps[0]].start
    if start.num_examples is not None:
      ids = ids_of(start, position, position + len(steps) * start.global_batch_size)
      proof.left_out += _compare(ledgers, steps, ids)
      _count(proof.parts, ids, position, start, steps[0])
    position += len(steps) * start.global_batch_size
  return proof


def _runs(chief: Ledger, first: int, last: int) -> Iterator[list[int]]:
  """Yields lists of consecutive steps of one start, each short enough to compare at once."""
  steps: list[int] = []
  for step in range(first, last + 1):
    start = chief.path[step].start
    if steps and (
      start is not chief.path[steps[0]].start or len(steps) * start.global_batch_size >= _AT_ONCE
    ):
      yield steps
      steps = []
    steps.append(step)
  yield steps


def _compare(ledgers: Sequence[Ledger], steps: Sequence[int], ids: np.ndarray) -> int:
  """Requires that the workers have read these examples; returns how many were left out."""
  start = ledgers[0].path[steps[0]].start
  stay = ~np.isin(ids, start.left_out).reshape(len(steps), -1)
  hashes = hashes_of(ids).reshape(stay.shape) * stay
  wrong = []
  for worker in range(start.workers):
    rows = [ledgers[worker].path[step] for step in steps]
    mine = slice(*(min(row, start.global_batch_size) for row in rows[0].start.rows))
    digests = hashes[:, mine].sum(axis=1, dtype=np.uint64)
    expected = zip(stay[:, mine].sum(axis=1).tolist(), digests.tolist(), strict=True)
    for step, row, must in zip(steps, rows, expected, strict=True):
      if row[:2] != must:
        wrong.append((step, worker, row.examples, must[0]))
  if wrong:
    step, worker, examples, count = min(wrong)
    raise Problem(
      f"step {step}, worker {worker}: differs: its {examples} examples are not the {count} of its "
      "positions"
    )
  return int((~stay).sum())


def _count(
  parts: dict[str, Epochs], ids: np.ndarray, position: int, start: Start, step: int
) -> None:
  """Counts the examples from a position on, each part's by themselves."""
  for name, (before, own) in parts_of(start, position).items():
    part = parts.setdefault(name, Epochs(before))
    if part.end != before:
      raise Problem(
        f"step {step}: a restart changed the weights of what was consumed: part {name!r} would "
        f"go on at its example {before}, but {part.end} were read"
      )
    here = (ids >= own.first) & (ids < own.first + (own.num_examples or 0))
    part.add(ids[here], own, step)
