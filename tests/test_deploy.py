"""What can be checked of deploy/ without a cluster: the script, with an srun of our own."""

import os
import subprocess
from pathlib import Path

import pytest

import launch

SCRIPT = Path(launch.__file__).parent / "deploy" / "slurm.sh"


@pytest.fixture
def slurm(tmp_path):
  """Runs the script where each srun ends with the next of the given statuses."""

  def run(*statuses, restarts=3):
    for name, body in (
      ("srun", 'echo "$@" >> srun.txt; status=$(head -1 next); sed -i 1d next; exit "$status"'),
      ("scontrol", 'echo "$@" >> scontrol.txt'),
    ):
      (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
      (tmp_path / name).chmod(0o755)
    (tmp_path / "next").write_text("".join(f"{status}\n" for status in statuses))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4321"}
    done = subprocess.run(
      ["bash", str(SCRIPT), "--gin_file=my config.gin"],
      cwd=tmp_path, env={**env, "MAX_RESTARTS": str(restarts)}, capture_output=True, text=True,
    )  # fmt: skip
    requeued = tmp_path / "scontrol.txt"
    calls = (tmp_path / "srun.txt").read_text().splitlines()
    return done.returncode, calls, requeued.read_text() if requeued.exists() else ""

  return run


def test_it_trains_with_the_slurm_resolver(slurm):
  status, [call], requeued = slurm(0)
  assert (status, requeued) == (0, "")
  assert "python launch.py --gin_file=my config.gin" in call
  assert "--gin_param=multi_worker_mirrored.resolver = @slurm" in call
  assert call.endswith(f"--gin_param=slurm.port_base = {10000 + 321 * 16}")


def test_a_saved_run_goes_back_into_the_queue(slurm):
  status, calls, requeued = slurm(75)
  assert (status, len(calls), requeued) == (75, 1, "requeue 4321\n")


def test_a_mistake_ends_the_job(slurm):
  status, calls, _ = slurm(2)
  assert (status, len(calls)) == (2, 1)


def test_a_failure_is_tried_again(slurm):
  assert len(slurm(1, 1, 0)[1]) == 3


def test_but_not_for_ever(slurm):
  status, calls, _ = slurm(1, 1, 1, restarts=2)
  assert (status, len(calls)) == (1, 3)
