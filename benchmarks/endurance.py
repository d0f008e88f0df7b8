"""Does a long run grow? Memory and file descriptors per checkpoint, over many checkpoints.

  python -m benchmarks.endurance --steps 1000000 --checkpoints 10000

The run of benchmarks/trials.gin without evaluations, with TensorBoard, metrics and ledger, observed
from outside. The first `--warm` of it does not count: allocators fill their pools. Growth is the
slope of a line through the rest, of the memory that the process alone holds. Exit status 1 if it is
1 kB a checkpoint or more, or if there are more file descriptors at the end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import forks

CONFIG = "benchmarks/trials.gin"
BOUND_BYTES = 1024
_POLL_S = 1.0


def observe(
  folder: Path, *, steps: int, checkpoints: int, params: Sequence[str] = ()
) -> np.ndarray:
  """Trains; returns a row for each second: checkpoints begun, bytes of memory, descriptors."""
  every = steps // checkpoints
  bindings = [
    f"run.train_steps = {steps}", f"run.steps_per_loop = {every}", "run.actions = ()",
    f"run.checkpoint_every_steps = {every}", f"run.eval_every_steps = {steps}", *params,
  ]  # fmt: skip
  arguments = [f"--gin_file={CONFIG}", "--mode=train", f"--model_dir={folder}/run"]
  run = forks.Fork([*arguments, *(f"--gin_param={b}" for b in bindings)], folder / "log.txt")
  rows, shown = [], time.monotonic()
  while run.wait(_POLL_S) is None:
    row = (done(folder / "run") / every, *usage(run.pid))
    rows.append(row)
    if time.monotonic() - shown > 30:
      shown = time.monotonic()
      print(f"{row[0]:.0f}: {row[1] / 2**20:.2f} MiB, {row[2]} descriptors", flush=True)
  if run.status:
    raise SystemExit(f"it ended with status {run.status}: {run.last_line()}")
  return np.array(rows)


def done(folder: Path) -> int:
  """Returns the newest visible checkpoint's step."""
  names = (folder / "checkpoints").glob("ckpt-*.index")
  return max((int(path.stem.rpartition("-")[2]) for path in names), default=0)


def usage(pid: int) -> tuple[int, int]:
  """Returns the bytes of memory that are the process's alone, and its open descriptors."""
  lines = Path(f"/proc/{pid}/status").read_text().splitlines()
  sizes = {line.split()[0]: line.split()[1] for line in lines if line.endswith("kB")}
  descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
  return 1024 * int(sizes["RssAnon:"]), descriptors


def growth(rows: np.ndarray, warm: float) -> tuple[float, int]:
  """Returns bytes a checkpoint and descriptors gained, after the part `warm` of the checkpoints."""
  late = rows[rows[:, 0] >= warm * rows[-1, 0]]
  return float(np.polyfit(late[:, 0], late[:, 1], 1)[0]), int(late[-1, 2] - late[0, 2])


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=1_000_000)
  parser.add_argument("--checkpoints", type=int, default=10_000)
  parser.add_argument("--warm", type=float, default=0.2, help="the part that does not count")
  parser.add_argument("--gin_param", action="append", default=[], help="for the run")
  options = parser.parse_args()
  forks.warm_up()
  base = Path(tempfile.mkdtemp(prefix="endurance_", dir="/dev/shm"))
  rows = observe(
    base, steps=options.steps, checkpoints=options.checkpoints, params=options.gin_param
  )
  per_checkpoint, descriptors = growth(rows, options.warm)
  print(
    f"{options.steps} steps, {options.checkpoints} checkpoints: {per_checkpoint:.0f} bytes a "
    f"checkpoint, {descriptors:+d} descriptors, {rows[-1, 1] / 2**20:.0f} MiB at the end"
  )
  shutil.rmtree(base)
  return 1 if per_checkpoint >= BOUND_BYTES or descriptors > 0 else 0


if __name__ == "__main__":
  sys.exit(main())
