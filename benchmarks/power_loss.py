"""Copies the disk of a run at random moments, as a power loss would leave it, and looks for losses.

  python -m benchmarks.trials power --snapshots 25     # as root, on Linux

A run trains with its folder in a file system of its own: ext4, xfs or btrfs in a file, which is
mounted as a loop device. The file is itself in an xfs, whose reflinks copy it in one atomic step,
beside the writes that still wait in memory and are lost. Each copy is mounted, which replays its
journal, and

- the newest checkpoint that was there `SETTLED_S` before, or a later one, must be whole: every
  tensor bit-identical to that of an uninterrupted run at the same step;
- metrics.jsonl must have every line up to that step, and the ledger every step;
- operative_config.gin and the assets must be whole, as must be best/ and the export once an
  evaluation is in metrics.jsonl;
- from one in eight copies training goes on, and must end bit-identical to the uninterrupted run.

A trial is a run with so many copies; half of them are made within a second after a checkpoint has
appeared. Its kind is the file system, the number of kept checkpoints and the seconds between them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fcntl
import itertools
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import comparison, forks
from benchmarks.trials import Outcome, Run

MIB = {"ext4": 64, "xfs": 300, "btrfs": 128}
STEPS_PER_LOOP, CHECKPOINT_EVERY, EVAL_EVERY = 5, 10, 20  # as in CONFIG
RESUMED = 8
"""From one in so many copies training goes on."""
SETTLED_S = 1.0
"""A checkpoint counts as promised when it has been visible for this long."""
_FICLONE = 0x40049409
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True)
class Cell:
  """One combination; `every_s`: seconds between checkpoints."""

  filesystem: str
  keep: int
  every_s: float

  def __str__(self) -> str:
    """Returns a line's beginning, and a file's name."""
    return f"{self.filesystem}-keep{self.keep}-every{self.every_s:g}s"


class Disk:
  """A file system in a file, of which copies can be made while it is in use."""

  def __init__(self, folder: Path, filesystem: str) -> None:
    """Makes and mounts both file systems."""
    self._folder = folder
    folder.mkdir(parents=True)
    self._outer, self.path = folder / "outer", folder / "disk"
    _make(folder / "outer.img", "xfs", 1024)
    _mount(folder / "outer.img", self._outer)
    self._image, self._copy = self._outer / "disk.img", self._outer / "copy.img"
    _make(self._image, filesystem, MIB[filesystem])
    _mount(self._image, self.path)
    self._look = folder / "copy"

  def snapshot(self) -> None:
    """Copies the device as it is now."""
    with self._image.open("rb") as source, self._copy.open("wb") as copy:
      fcntl.ioctl(copy, _FICLONE, source.fileno())

  def mounted(self) -> Path:
    """Mounts the last copy."""
    options = "nouuid" if self._image_is_xfs() else "rw"
    return _mount(self._copy, self._look, f"loop,{options}")

  def forget(self) -> None:
    """Unmounts and removes the copy."""
    _umount(self._look)
    self._copy.unlink()

  def close(self) -> None:
    """Unmounts and removes all."""
    for path in (self._look, self.path, self._outer):
      _umount(path)
    shutil.rmtree(self._folder)

  def _image_is_xfs(self) -> bool:
    return self._image.open("rb").read(4) == b"XFSB"


def _make(image: Path, filesystem: str, mib: int) -> None:
  with image.open("wb") as file:
    file.truncate(mib * 2**20)
  subprocess.run([f"mkfs.{filesystem}", "-q", image], check=True, stdout=-3, stderr=-3)


def _mount(image: Path, path: Path, options: str = "loop") -> Path:
  path.mkdir(exist_ok=True)
  subprocess.run(["mount", "-o", options, image, path], check=True)
  return path


def _umount(path: Path) -> None:
  while path.is_mount():
    if subprocess.run(["umount", path], stderr=-3).returncode:
      time.sleep(0.2)


class Trial:
  """A run of one cell, and what its copies have lost."""

  def __init__(self, base: Path, cell: Cell, snapshots: int, rng: random.Random) -> None:
    """Makes the uninterrupted runs: one as in the cell, and one that keeps every checkpoint."""
    self.cell, self._rng, self._base = cell, rng, base
    self._loop_s = cell.every_s * STEPS_PER_LOOP / CHECKPOINT_EVERY
    self._seconds = max(40.0, 6 * cell.every_s)
    loops = int(self._seconds / self._loop_s) + 4
    self._steps = -(-loops * STEPS_PER_LOOP // EVAL_EVERY) * EVAL_EVERY
    self._snapshots = snapshots
    self._base.mkdir()
    self.reference, self.every = self._base / "reference", self._base / "every"
    for folder, keep in ((self.reference, cell.keep), (self.every, self._steps)):
      forks.whole(self._base, *self._bindings(keep), name=folder.name)
    self.counts: collections.Counter[str] = collections.Counter()

  def _bindings(self, keep: int) -> list[str]:
    actions = "run.actions = [@BestCheckpoint(), @Export(), @Pace()]"
    return [f"run.train_steps = {self._steps}", f"run.keep_checkpoints = {keep}", actions]

  def _run(self, folder: Path, *, loop_s: float = 0.0) -> forks.Fork:
    own = {"LOOP_S": str(loop_s)}
    return forks.small(folder, *self._bindings(self.cell.keep), environment=own)

  def losses(self) -> Iterator[str]:
    """Trains, copies the disk and yields what each copy has lost."""
    disk = Disk(self._base / "disk", self.cell.filesystem)
    try:
      number = 0
      while number < self._snapshots:
        run = self._run(disk.path / "run", loop_s=self._loop_s)
        for moment in self._moments(run, disk.path / "run", self._snapshots - number):
          number += 1
          yield from self._lost(disk, moment, number)
        if run.poll():
          raise SystemExit(f"{self.cell}: status {run.poll()}: {run.last_line()}")
        run.kill()
        shutil.rmtree(disk.path / "run")
    finally:
      disk.close()

  def _moments(self, run: forks.Fork, folder: Path, count: int) -> Iterator[dict[int, float]]:
    """Yields at random moments of the run: step of each visible checkpoint -> seconds visible."""
    seen: dict[int, float] = {}
    self._removed = False
    gap_s = self._seconds / max(count, 1)
    due, after_next = time.monotonic() + self._rng.uniform(1, 3), False
    while count and run.poll() is None:
      steps, now = visible(folder), time.monotonic()
      new = [step for step in steps if step not in seen]
      self._removed |= bool(seen.keys() - set(steps))
      seen = {step: seen.get(step, now) for step in steps}
      if new and after_next:
        due, after_next = now + self._rng.choice([0, self._rng.random()]), False
      if now >= due and not after_next:
        yield {step: now - since for step, since in seen.items()}
        count -= 1
        after_next = self._rng.random() < 0.5
        due = time.monotonic() + self._rng.uniform(0, 2 * gap_s)
      time.sleep(_POLL_S)

  def _lost(self, disk: Disk, moment: dict[int, float], number: int) -> list[str]:
    disk.snapshot()
    folder = disk.mounted() / "run"
    try:
      found = self.check(folder, moment)
      if not found and number % RESUMED == 0:
        found = self._resume(folder)
    finally:
      disk.forget()
    self.counts["lost" if found else "whole"] += 1
    what = f"copy {number}, steps visible {sorted(moment)}: {'; '.join(found)}"
    return [what] if found else []

  def check(self, folder: Path, moment: dict[int, float]) -> list[str]:
    """Returns what the copied run folder has lost, with the checkpoints that were visible."""
    promised = max((step for step, age in moment.items() if age >= SETTLED_S), default=0)
    if not promised and self._removed:  # only what is on the disk may replace an older one
      promised = min(moment, default=0)
    damaged, whole = [], 0
    for name in comparison.kept(folder):
      step = int(name.rpartition("-")[2])
      paths = [f / "checkpoints" / name for f in (folder, self.every)]
      if different := comparison.different_tensors(*paths):
        damaged.append(f"damaged: {different[0]}")
      else:
        whole = max(whole, step)
    self.counts["damaged"] += bool(damaged)
    found = []
    if whole < promised:
      found += [f"step {promised} is lost, {whole} is left", *damaged[:1]]
    return found + (self._lost_files(folder, whole) if whole else [])

  def _lost_files(self, folder: Path, step: int) -> list[str]:
    """Returns what is lost beside the checkpoint of `step`, from which the run would continue."""
    found = []
    for split in ("train", "eval"):
      ours, theirs = (
        [r for r in comparison.records(f, split) if r["step"] <= step] for f in (folder, self.every)
      )
      before = [record for record in theirs if split == "train" or record["step"] < step]
      if ours != theirs and ours != before:
        found.append(f"metrics.jsonl has {len(ours)} of {len(theirs)} {split} lines to step {step}")
    for file in ("operative_config.gin", "assets/scale.bin", "assets/manifest.json"):
      path = folder / file
      theirs_bytes = (self.reference / file).read_bytes()
      if not path.exists() or path.read_bytes() != theirs_bytes:
        found.append(f"{file} is {'damaged' if path.exists() else 'lost'}")
    if step > EVAL_EVERY:
      found += self._lost_best(folder)
    return found + lost_steps(folder, self.every, step)

  def _lost_best(self, folder: Path) -> list[str]:
    best = comparison.best(folder)
    if best is None:
      return ["best.json is lost or damaged"]
    try:
      comparison.tensors(folder / "best" / best["checkpoint"])
    except Exception as error:
      return [f"best/{best['checkpoint']}: {error}"[:200]]
    paths = folder.glob("export*")
    return [] if any(map(is_export, paths)) else ["the export is lost or damaged"]

  def _resume(self, folder: Path) -> list[str]:
    copied = self._base / "resumed"
    shutil.copytree(folder, copied)
    run = self._run(copied)
    if (status := run.wait(120)) != 0:
      run.kill()
      found = [f"resumed, it ended with status {status}: {run.last_line()}"]
    else:
      found = comparison.differences(copied, self.reference)
    self.counts["resumed"] += 1
    if not found:
      shutil.rmtree(copied)
    return found


def visible(folder: Path) -> list[int]:
  """Returns the steps of the checkpoints that another process sees."""
  return [int(p.stem.rpartition("-")[2]) for p in (folder / "checkpoints").glob("ckpt-*.index")]


def is_export(folder: Path) -> bool:
  """Whether a folder has a SavedModel of which every file can be read."""
  from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

  try:
    model = SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    return bool(model.meta_graphs and comparison.tensors(folder / "variables" / "variables"))
  except Exception:
    return False


def lost_steps(folder: Path, reference: Path, step: int) -> list[str]:
  """Compares the ledgers up to `step`."""
  found = []
  for file in reference.glob("ledger-*.jsonl"):
    texts = [p.read_text() if p.exists() else "" for p in (folder / file.name, file)]
    paths = [comparison.Ledger(text.split("\n")).path for text in texts]
    ours, theirs = ({s: row[:2] for s, row in path.items() if s <= step} for path in paths)
    if ours != theirs:
      found.append(f"{file.name} has {len(ours)} of {len(theirs)} steps to step {step}")
  return found


HERE = [name for name in MIB if shutil.which(f"mkfs.{name}")]
CELLS = {str(c): c for c in itertools.starmap(Cell, itertools.product(HERE, (1, 3), (1, 10, 60)))}
KINDS = tuple(CELLS)


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Returns what runs a trial."""
  del base
  forks.warm_up()

  def trial(kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    run = Trial(folder, CELLS[kind], options.snapshots, rng)
    return Outcome([*run.losses()], str(dict(run.counts)))

  return trial
