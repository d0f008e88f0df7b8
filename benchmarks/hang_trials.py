"""Hangs that name themselves: a run of two workers with one planted, and the line it ends with.

tests/clusters/test_hangs.py has each kind. The disk that blocks is a pipe that nobody reads, in
place of the checkpoint's file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
_SILENT = r"and does not answer: .*; last seen in"
_CALLS = r".*training: input or host function"
EXPECTED = {
  "input": rf"worker 1 is behind, at step 4\d, {_CALLS} \(deadlock, hang_task.py",
  "file": r"worker 1 is behind, at step 4\d, .*training: input \(openat of .*fifo",
  "host function": rf"worker 1 is behind, at step 4\d, {_CALLS} \(sleep, hang_task",
  "action": r"worker 1 is behind, at step 40, .*action Hangs \(deadlock, hang_task.py",
  "skipped rendezvous": r"worker 0 is behind, at step 40, .*(action Hangs|host)",
  "stopped 0": rf"worker 0 is behind, at step 40, {_SILENT} (host|action Hangs)",
  "stopped 1": rf"worker 1 is behind, at step 40, {_SILENT} (host|action Hangs)",
  "disk": r"worker 0 is behind, at step 50, .*checkpoints \(.*openat of .*fifo",
  "evaluation": r"worker 1 is behind, at step \d+, .*evaluation: .* \(sleep, hang_task.py",
  "lock held": rf"worker 1 is behind, at step \d+, {_SILENT} training",
}
"""Kind -> what the line must match."""


def trial(kind: str, folder: str) -> tuple[int, str]:
  """Runs it; returns the exit status and the line, "" if there is none."""
  fifo = os.path.join(folder, "fifo")
  os.mkfifo(fifo)
  command = [
    sys.executable,
    "launch.py",
    "train",
    "benchmarks/hang_trials.gin",
    "--local_workers=2",
  ]
  done = subprocess.run(
    [*command, f"--model_dir={folder}/run"], cwd=REPOSITORY, capture_output=True, text=True,
    env={**os.environ, "HANG": kind, "HANG_FIFO": fifo}, timeout=300, check=False,
  )  # fmt: skip
  lines = [line for line in done.stderr.splitlines() if "WARNING: hang: worker" in line]
  return done.returncode, lines[0] if lines else done.stderr[-2000:]
