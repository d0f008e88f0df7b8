"""Small versions of the long trials in benchmarks/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.whole


def trial(name, *arguments):
  command = [sys.executable, "-m", "benchmarks.trials", name, *arguments]
  done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout.splitlines()


def test_a_run_ends_as_documented_while_slow_python_code_reads_its_examples():
  """Without launch.py's own end, an error and Ctrl-C hang in most runs."""
  ends = "(error|ctrl_c|sighup|closed_output) numpy_function replicas-1"
  *_, last = trial("exits", f"--only={ends}")
  assert last == "4 trials, 0 with losses, 0 processes left"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles a library: needs gcc")
def test_a_fault_of_the_disk_loses_nothing():
  *_, last = trial("disk", "--only=^E", "--trials=2")
  assert last == "6 trials, 0 with losses, 0 processes left"


def can_mount():
  """Whether there is all that the trial needs, which puts an ext4 image into an xfs image."""
  tools = all(map(shutil.which, ("mkfs.ext4", "mkfs.xfs")))
  return os.geteuid() == 0 and tools and Path("/dev/loop-control").exists()


@pytest.mark.skipif(
  not can_mount(), reason="mounts images: needs root, mkfs.ext4, mkfs.xfs and loop devices"
)
def test_a_power_loss_loses_no_checkpoint():
  *_, last = trial("power", "--snapshots=8", "--only=ext4-keep1-every1s")
  assert last == "1 trials, 0 with losses, 0 processes left"
