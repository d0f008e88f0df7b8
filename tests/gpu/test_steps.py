"""What a training step asks of GPUs, as budgets: a change that adds a copy or a launch fails.

Counted on the stand-in of tests/support/fake_gpu, on which TensorFlow's own GPU runtime runs. The
smallest figures for the same with a hand-written loop are in docs/gpu.md.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_gpu
import pytest

pytestmark = [
  pytest.mark.ci,
  pytest.mark.skipif(not fake_gpu.can_be_built(), reason="no g++ for the stand-in of a GPU"),
]
STEPS = Path(__file__).with_name("steps.py")

# A step's launches, copies to the device, copies to the host, copies between devices, and the
# collectives: how many, of how many elements. Of several GPUs it is the sum over them.
BUDGETS = {
  "digits_cnn/float32/1": (123, 7, 0, 0, {}),
  "digits_cnn/mixed_float16/1": (156, 7, 0, 0, {}),
  "language_model/float32/1": (845, 9, 1, 0, {}),
  "fashion_mnist_gan/float32/1": (437, 15, 0, 0, {}),
  "fashion_mnist_gan/mixed_float16/1": (524, 15, 0, 0, {}),
  "pendulum_sac/float32/1": (442, 10, 5, 0, {}),
}
PROCESSES = [[*BUDGETS]]
"""The cases of a process each: what kernels should have written is never there, so that the values
which one case leaves in memory can mislead another."""


@pytest.fixture(scope="module")
def measured():
  """Case -> what steps.py prints of it."""
  folder = fake_gpu.library()

  def run(cases):
    count = max(int(case.split("/")[2]) for case in cases)
    made = subprocess.run(
      [sys.executable, STEPS, *cases],
      env=fake_gpu.environment(folder, count=count),
      capture_output=True,
      text=True,
      check=False,
    )
    assert not made.returncode, made.stderr[-3000:]
    return [json.loads(line) for line in made.stdout.splitlines()]

  with ThreadPoolExecutor(2) as threads:
    return {one["case"]: one for each in threads.map(run, PROCESSES) for one in each}


@pytest.mark.parametrize("case", BUDGETS)
def test_a_step_keeps_within_its_budget(measured, case):
  launches, to_device, to_host, between, collectives = BUDGETS[case]
  step = measured[case]["step"]
  assert 0.8 * launches <= step["launches"] <= launches  # far fewer: not all is on the GPU
  assert step.get("copies to the device", 0) <= to_device
  assert step.get("copies to the host", 0) <= to_host
  assert step.get("copies between", 0) <= between
  assert step.get("synchronisations", 0) == 0
  nccl = {name: number for name, number in step.items() if name.startswith("nccl ")}
  assert nccl == collectives


@pytest.mark.parametrize("case", BUDGETS)
def test_variables_lie_on_the_gpus(measured, case):
  assert measured[case]["places"] == [f"GPU:{i}" for i in range(int(case.split("/")[2]))]
