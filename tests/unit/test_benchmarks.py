"""Benchmarks that no machine here can run in full do run in small."""

import subprocess
import sys
from pathlib import Path

import pytest

import launch
from benchmarks import growth


@pytest.mark.whole
def test_the_table_of_gpus_in_small():
  command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--rounds=1", "--block_s=0.05"]
  command += ["--models", "cnn", "--precisions", "mixed_float16"]
  done = subprocess.run(
    command, capture_output=True, text=True, check=True, cwd=Path(launch.__file__).parent
  )
  [row] = [line for line in done.stdout.splitlines() if line.startswith("| cnn")]
  _, _, precision, step_ms, rate, *ratios, flops, _, memory, _ = row.split("|")
  assert precision.strip() == "mixed_float16"
  assert float(rate) == pytest.approx(32 / float(step_ms) * 1e3, rel=1e-2)
  # Two convolutions 3x3, to 8 and 16 channels, and the dense layer: multiply-adds count as 2.
  dense = 8 * 8 * 16 * 10
  adds = 32 * (32 * 32 * 9 * 3 * 8 + 16 * 16 * 9 * 8 * 16 + dense)
  assert float(flops) * 1e12 == pytest.approx(3 * 2 * adds / float(step_ms) * 1e3, rel=0.05)
  assert [float(ratio) > 0 for ratio in ratios] == [True, True]
  assert float(memory) > 0
  assert "ReductionToOneDevice" in done.stdout
  assert "NCCL in 1 trace: no" in done.stdout


def test_bytes_a_step_leave_out_the_warm_part():
  filling = [(step, 10**6 * step) for step in (0, 1000)]
  grown = [(step, 5 * 10**6 + 3 * step) for step in range(2000, 11_000, 1000)]
  assert growth.bytes_a_step([*filling, *grown]) == pytest.approx(3)
