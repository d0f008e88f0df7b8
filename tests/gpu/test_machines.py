"""Machines whose GPU is of no use as it is: without CUDA's libraries, with too little memory."""

import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest

import launch

pytestmark = [
  pytest.mark.ci,
  pytest.mark.skipif(not fake_gpu.can_be_built(), reason="no g++ for the stand-in of a GPU"),
]
ROOT = Path(launch.__file__).parent


def ran(command, **machine):
  return subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    env=fake_gpu.environment(fake_gpu.library(), **machine),
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
  )


@pytest.mark.parametrize(("only_driver", "seen"), [(False, 2), (True, 0)])
def test_tensorflow_sees_gpus_only_with_cudas_libraries(only_driver, seen):
  program = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
  done = ran(["-c", program], only_driver=only_driver, count=2)
  assert done.stdout.strip() == str(seen), done.stderr[-2000:]


BUSY = pytest.param({"memory_mib": 8192, "busy_mib": 7932}, marks=pytest.mark.whole)


@pytest.mark.parametrize("machine", [{"memory_mib": 260}, BUSY])
def test_too_little_memory_is_one_line(tmp_path, machine):
  """Of 260 MiB TensorFlow takes what it leaves to the driver; a batch of 256 does not fit."""
  command = [ROOT / "launch.py", "train", "digits_cnn", "run.global_batch_size=256"]
  command.append("Trainer.jit_compile=False")  # the stand-in's programs of XLA compute nothing
  done = ran([*command, f"--model_dir={tmp_path / 'm'}"], **machine)
  last = done.stderr.strip().splitlines()[-1]
  assert (done.returncode, last.partition(": ")[0]) == (1, "failed"), done.stderr[-2000:]
  assert "a device has too little memory; lower run.global_batch_size or raise" in last


def test_bfloat16_is_refused_where_tensorflow_cannot_sum_it():
  """TensorFlow's error comes in the first sum, and ends all collectives of the process."""
  program = """
import tensorflow as tf
from loopwright.strategies import factories
from loopwright.distribution.reduction import Reduction
for op in ("auto", "nccl", "hierarchical_copy"):
  try:
    Reduction(wire_dtype="bfloat16").prove(factories.mirrored(cross_device_ops=op), [tf.float32])
  except Exception as error:
    print(*str(error).split())
"""
  done = ran(["-c", program], count=2)
  [*refused, tried] = done.stdout.splitlines()
  assert len(refused) == 2, done.stderr[-2000:]
  assert all("summed in bfloat16 (Reduction.wire_dtype" in line for line in refused), refused
  assert "the all-reduce of float32 over 2 replicas is wrong" in tried  # with hierarchical_copy
