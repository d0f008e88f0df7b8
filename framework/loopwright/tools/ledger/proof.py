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


def file_name(worker: int) -> str:
  """Returns the name of a worker's ledger in the run folder."""
  return layout.ledger(worker)


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
        for step, row in _rows(entry, self._start):
          self._add(step, row)

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
    split = [
      (r.start.rows, r.start.global_batch_size, r.start.order, r.start.left_out)
      for r in (before, row)
    ]
    if split[0] == split[1] and before[:2] != row[:2]:
      raise Problem(f"{where}: rerun after a restart, with other examples than the first time")


def _parsed(line: str) -> dict[str, Any]:
  return json_lines.parsed(line) or {}


def _rows(entry: dict[str, Any], start: Start) -> Iterator[tuple[int, StepRecord]]:
  pairs = zip(entry["counts"], entry["hashes"], strict=True)
  for step, (count, digest) in enumerate(pairs, entry["first_step"]):
    yield step, StepRecord(count, int(digest, 16), start)


def read(model_dir: str) -> dict[str, list[Ledger]]:
  """Returns part -> the ledgers of all workers, worker 0's first; the main source is "".

  Raises:
    ConfigError: there is no ledger.
    Problem: see `Ledger`.
  """
  import tensorflow as tf

  files: list[list[str]] = []
  while tf.io.gfile.exists(path := os.path.join(model_dir, file_name(len(files)))):
    with tf.io.gfile.GFile(path) as file:
      files.append(file.read().split("\n"))
  if not files:
    raise ConfigError(
      f"no {file_name(0)} in {model_dir!r}; train with `run.ledger = True`, then give this command "
      "the run folder."
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

  count = start.num_examples
  assert count is not None
  positions = np.arange(first, last)
  if (shares := shares_of(start)) and len(positions):
    of_run: dict[str, Any] = {"seed": start.seed, "shuffle": start.shuffle}
    return shares.ids(tf.constant(positions), **of_run).numpy()
  if not start.shuffle or not len(positions):
    return start.first + positions % count
  ids = examples_at(tf.constant(positions), num_examples=count, seed=start.seed)
  return start.first + ids.numpy()


def shares_of(start: Start) -> Shares | None:
  """Returns which part each position reads, of a mixture."""
  from loopwright.inputs.mixture import Shares

  return Shares(**start.shares) if start.shares else None


def hashes_of(ids: np.ndarray) -> np.ndarray:
  """Returns what each example adds to its step's hash, uint64 of the shape of `ids`."""
  import tensorflow as tf

  from loopwright.graphs.randomness import hashed

  return hashed(tf.constant(ids, tf.int64), 0, PURPOSE).numpy()


def _share(start: Start) -> tuple[int, int]:
  """Returns [first, last): this worker's examples of a global batch, without padding rows."""
  first, last = (min(row, start.global_batch_size) for row in start.rows)
  return first, last


# ---- The proof ----


@dataclasses.dataclass
class Proof:
  """What was proven of the steps from 1, or from where the ledger begins, to the last one.

  Attributes:
    workers: number of workers at the last step.
    starts: how many times training was started.
    reruns: steps that worker 0 ran again with the same examples.
    epochs: complete epochs, each with every example once.
    num_examples: examples in an epoch; None if unknown, then the order was not compared.
    left_over: examples of the epoch that has begun.
    parts: of a mixture, a line about each part.
    left_out: how often an example was left out, as each start says.
  """

  first_step: int
  last_step: int
  workers: int
  starts: int
  reruns: int
  epochs: int = 0
  num_examples: int | None = None
  left_over: int = 0
  parts: Sequence[str] = ()
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
    if self.parts:
      lines += self.parts
    elif self.num_examples is None:
      lines.append("examples: not compared, the length of the stream is unknown")
    else:
      lines.append(
        f"epochs: {self.epochs} complete, {self.num_examples} distinct examples in each; "
        f"{self.left_over} examples of the next"
      )
    if self.left_out:
      lines.append(f"left out: {self.left_out} of the examples in these steps were padding instead")
    return "\n".join(lines)


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
    _require_recorded(ledgers, step)
  if checkpoint_step is not None and checkpoint_step > last:
    raise Problem(
      f"step {last + 1}: the newest checkpoint is of step {checkpoint_step}, but worker 0 recorded "
      f"no step after {last}"
    )
  proof = Proof(first, last, chief.path[last].start.workers, len(chief.starts), chief.reruns)
  tally = _Tally()
  position = chief.path[first].start.position
  for steps in _runs(chief, first, last):
    start = chief.path[steps[0]].start
    if start.num_examples is not None:
      _compare(ledgers, steps, position, tally)
    position += len(steps) * start.global_batch_size
  proof.num_examples = chief.path[last].start.num_examples
  proof.epochs, proof.left_over, proof.parts = tally.epochs, tally.left_over, tally.of_parts()
  proof.left_out = tally.left_out
  return proof


def _require_recorded(ledgers: Sequence[Ledger], step: int) -> None:
  if step not in ledgers[0].path:
    raise Problem(f"step {step}, worker 0: skipped, no line records it")
  for worker in range(1, ledgers[0].path[step].start.workers):
    if worker >= len(ledgers) or step not in ledgers[worker].path:
      raise Problem(f"step {step}, worker {worker}: skipped, no line records it")


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


class _Tally:
  def __init__(self, ends: int = 0) -> None:
    self.epochs, self.left_over, self.ends, self.left_out = 0, 0, ends, 0
    self.seen = np.zeros(0, bool)
    self._order: tuple[int | None, int | None] | None = None
    self._whole = False
    self.count = 0
    self.parts: dict[str, _Tally] = {}

  def of_parts(self) -> list[str]:
    """Returns a line for each part of a mixture."""
    every = sum(part.count for part in self.parts.values())
    return [
      f"{name!r}: {part.count} examples, {100 * part.count / every:.2f} %; epochs: {part.epochs} "
      f"complete, {len(part.seen)} distinct examples in each; {part.left_over} of the next"
      for name, part in self.parts.items()
    ]

  def add_mixture(self, ids: np.ndarray, position: int, start: Start, step: int) -> None:
    """Counts the examples of a mixture, each part's by themselves."""
    from loopwright.inputs.ordering import seed_of_part

    shares = shares_of(start)
    assert shares is not None
    own = zip(shares.counts.items(), shares.firsts, shares.before(position).values(), strict=True)
    for (name, count), first, before in own:
      part = self.parts.setdefault(name, _Tally(before))
      if part.ends != before:
        raise Problem(
          f"step {step}: a restart changed the weights of what was consumed: part {name!r} would "
          f"go on at its example {before}, but {part.ends} were read"
        )
      here = ids[(ids >= first) & (ids < first + count)]
      of_part = start._replace(num_examples=count, first=first, seed=seed_of_part(start.seed, name))
      part.add(here, before, of_part, step)

  def add(self, ids: np.ndarray, position: int, start: Start, step: int) -> None:
    """Counts the examples at the positions from `position` on; `step` reads the first of them."""
    count = start.num_examples
    assert count is not None
    if start.order != self._order:
      if self._order is not None and position % count:
        raise Problem(
          f"step {step}: a restart changed the order of the examples (num_examples, seed) from "
          f"{self._order} to {start.order} within an epoch"
        )
      self._order, self.seen, self._whole = start.order, np.zeros(count, bool), False
    self.count, self.ends = self.count + len(ids), position + len(ids)
    while len(ids):
      within = position % count
      if within == 0:
        self.seen[:], self._whole = False, True
      part, ids = ids[: count - within] - start.first, ids[count - within :]
      if self.seen[part].any() or len(np.unique(part)) < len(part):
        raise Problem(f"step {step}: an example occurs twice in the epoch of position {position}")
      self.seen[part] = True
      position += len(part)
      self.left_over = position % count
      self.epochs += self._whole and self.left_over == 0


def _compare(ledgers: Sequence[Ledger], steps: Sequence[int], position: int, tally: _Tally) -> None:
  start = ledgers[0].path[steps[0]].start
  batch = start.global_batch_size
  ids = ids_of(start, position, position + len(steps) * batch)
  stay = ~np.isin(ids, start.left_out).reshape(len(steps), batch)
  hashes = hashes_of(ids).reshape(len(steps), batch) * stay
  tally.left_out += int((~stay).sum())
  wrong: list[tuple[int, int]] = []
  for worker in range(start.workers):
    rows = [ledgers[worker].path[step] for step in steps]
    first, last = _share(rows[0].start)
    expected = hashes[:, first:last].sum(axis=1, dtype=np.uint64)
    got = np.array([row.digest for row in rows], np.uint64)
    counts = np.array([row.examples for row in rows])
    differ = np.flatnonzero((got != expected) | (counts != stay[:, first:last].sum(axis=1)))
    wrong += [(int(index), worker) for index in differ[:1]]
  if wrong:
    index, worker = min(wrong)
    step = steps[index]
    row = ledgers[worker].path[step]
    first, last = _share(row.start)
    must = int(stay[index, first:last].sum())
    raise Problem(
      f"step {step}, worker {worker}: differs: its {row.examples} examples are not the {must} of "
      "its positions"
    )
  add = tally.add_mixture if start.shares else tally.add
  add(ids, position, start, steps[0])
