"""What a training step asks of GPUs, as budgets: a change that adds a copy or a launch fails.

Counted on the stand-in of tests/support/fake_gpu, on which TensorFlow's own GPU runtime runs.
docs/gpu.md has the figures of a hand-written loop beside them.
"""

import contextlib
import json
import re
import socket
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
# collectives: how many, of how many elements. Of several GPUs it is the sum over them. /plain is
# without XLA, which compiles the others; /4 has 4 steps in a program.
BUDGETS = {
  "pendulum_sac/float32/1": (108, 2, 2, 0, {}),
  "pendulum_sac/float32/1/4": (108, 1, 2, 0, {}),
  "digits_cnn/float32/1": (63, 2, 0, 0, {}),
  "digits_cnn/float32/1/4": (64, 1, 0, 0, {}),
  "language_model/float32/1": (266, 1, 0, 0, {}),
  "fashion_mnist_gan/float32/1": (150, 4, 0, 0, {}),
  "fashion_mnist_diffusion/float32/1": (366, 4, 1, 0, {}),
  "language_model_decoder/float32/1": (1146, 1, 1, 0, {}),
  "digits_cnn/mixed_float16/1": (70, 2, 0, 0, {}),
  "digits_cnn/float32/2": (130, 8, 0, 2, {"AllReduce 53004 float32": 2}),
  "language_model/float32/2": (566, 16, 0, 2, {"AllReduce 824578 float32": 2}),
  "fashion_mnist_gan/float32/2": (
    *(360, 12, 0, 1),
    {"AllReduce 237155 float32": 2, "AllReduce 36515 float32": 4},
  ),
  "pendulum_sac/float32/1/plain": (441, 3, 3, 0, {}),
  "digits_cnn/float32/1/plain": (124, 4, 0, 0, {}),
  "digits_cnn/mixed_float16/1/plain": (157, 4, 0, 0, {}),
  "language_model/float32/1/plain": (848, 6, 1, 0, {}),
  "fashion_mnist_gan/float32/1/plain": (437, 13, 0, 0, {}),
  "fashion_mnist_gan/mixed_float16/1/plain": (524, 13, 0, 0, {}),
  "pendulum_sac/float32/2/plain": (
    *(896, 6, 6, 1),
    {"AllReduce 3 float32": 2, "AllReduce 4548 float32": 2, "AllReduce 9092 float32": 2},
  ),
  "digits_cnn/float32/2/plain": (255, 8, 0, 2, {"AllReduce 53004 float32": 2}),
  "language_model/float32/2/plain": (1697, 20, 2, 2, {"AllReduce 824578 float32": 2}),
  "fashion_mnist_gan/float32/2/plain": (
    *(897, 26, 0, 1),
    {"AllReduce 237155 float32": 2, "AllReduce 36515 float32": 4},
  ),
  "digits_cnn/mixed_float16/2/plain": (310, 8, 0, 4, {"AllReduce 53004 float32": 2}),
  "digits_cnn/float32/8/plain": (1005, 32, 0, 14, {"AllReduce 53004 float32": 8}),
}
PROCESSES = [
  [case for case in BUDGETS if case.endswith("float32/2/plain") and "digits" not in case],
  ["digits_cnn/float32/2/plain"],
  ["digits_cnn/float32/8/plain"],
  [case for case in BUDGETS if case.endswith("/1/plain")],
  *([case] for case in BUDGETS if not case.endswith("/plain")),
  ["digits_cnn/mixed_float16/2/plain"],
]
"""The cases of a process each, the longest first. What kernels should have written is never there,
so the values that one case leaves in memory can mislead another: soft actor-critic, which reads a
seed back, comes first. TensorFlow does not give back all memory of a case, which a test reads."""

IN_CI = {f"digits_cnn/{each}" for each in ("float32/1", "float32/2/plain", "mixed_float16/1/plain")}
IN_CI |= {"digits_cnn/float32/1/plain", "digits_cnn/float32/1/4"}
OF_TENSORFLOW = re.compile(r"kernel (_Z|\w+_GPU_DT_)")
"""Kernels that TensorFlow launches, not a program of XLA."""


def each(cases):
  """The parameters `case`: those that CI leaves out are for the whole tier."""
  return [pytest.param(case, marks=() if case in IN_CI else pytest.mark.whole) for case in cases]


def started(cases, **more):
  """A process that measures cases on as many GPUs as they take."""
  count = max(int(case.split("/")[2]) for case in cases)
  environment = fake_gpu.environment(fake_gpu.library(), count=count) | more
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  return subprocess.Popen([sys.executable, STEPS, *cases], env=environment, **pipes)


def results(process):
  out, errors = process.communicate(timeout=500)
  assert not process.returncode, errors[-3000:]
  return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def measured(request):
  """Case -> what steps.py prints of it, for the cases of the tests that run."""
  fake_gpu.library()
  here = [item for item in request.session.items if item.path == request.path]
  wanted = {item.callspec.params["case"] for item in here if hasattr(item, "callspec")}
  chosen = [[case for case in process if case in wanted] for process in PROCESSES]
  with ThreadPoolExecutor(2) as threads:
    made = threads.map(lambda cases: results(started(cases)), filter(None, chosen))
    return {one["case"]: one for each in made for one in each}


def nccl(step):
  return {name[5:]: number for name, number in step.items() if name.startswith("nccl ")}


@pytest.mark.parametrize("case", each(BUDGETS))
def test_a_step_keeps_within_its_budget(measured, case):
  launches, to_device, to_host, between, collectives = BUDGETS[case]
  step = measured[case]["step"]
  assert 0.8 * launches <= step["launches"] <= launches  # far fewer: not all is on the GPU
  assert step.get("copies to the device", 0) <= to_device
  assert step.get("copies to the host", 0) <= to_host
  assert step.get("copies between", 0) <= between
  beside = sum(number for name, number in step.items() if OF_TENSORFLOW.match(name))
  if case.endswith("/plain"):
    assert (beside > 0, step.get("synchronisations", 0)) == (True, 0)
  else:  # all in one program, or around the reduction, in which the host reads conditions
    few = 20 if case.endswith("/2") else 0  # metrics, counters, and what is sent
    assert (beside <= few, step.get("synchronisations", 0)) == (True, to_host)
  assert nccl(step) == collectives


@pytest.mark.whole
def test_a_gpu_has_the_next_step_before_it_has_ended_one():
  """A launch takes 0.5 ms here. Once in 16 steps the host is behind, not at each."""
  [one] = results(started(["digits_cnn/float32/1"], FAKE_GPU_LAUNCH_US="500"))
  assert one["step"].get("gaps", 0) < 0.5


@pytest.mark.parametrize("case", each(BUDGETS))
def test_variables_lie_on_the_gpus(measured, case):
  assert measured[case]["places"] == [f"GPU:{i}" for i in range(int(case.split("/")[2]))]


@pytest.mark.parametrize("case", each(case for case in BUDGETS if not case.endswith("/4")))
def test_floats_lie_on_the_gpu_of_their_replica_and_integers_on_the_host(measured, case):
  """So that a float is copied once, and an integer only where the step uses it on a GPU."""
  of_floats = []
  for batch in measured[case]["batches"]:
    del batch["step"]  # a variable of the trainer
    floats = {device for dtype, device in batch.values() if dtype.startswith("float")}
    assert {device for _, device in batch.values()} - floats <= {"CPU:0", ""}
    of_floats += floats
  assert of_floats == [f"GPU:{i}" for i in range(int(case.split("/")[2]))]


@pytest.mark.parametrize(
  "case",
  each([f"digits_cnn/{each}/plain" for each in ("float32/2", "mixed_float16/2", "float32/8")]),
)
def test_each_gpu_holds_a_copy_of_the_model(measured, case):
  """Two convolutions, two dense layers, and Adam's two moments: three of each weight."""
  weights = 9 * 32 + 32 + 9 * 32 * 64 + 64 + 256 * 128 + 128 + 128 * 10 + 10
  for held in measured[case]["bytes"]:
    assert 3 * 4 * weights <= held < 3 * 4 * weights + 2**17


@pytest.mark.whole
def test_workers_with_gpus_sum_by_nccl():
  """Two processes with two GPUs each, `communication = 'auto'`: each GPU makes one call."""
  with contextlib.ExitStack() as sockets:
    bound = [sockets.enter_context(socket.create_server(("localhost", 0))) for _ in range(2)]
    workers = [f"localhost:{each.getsockname()[1]}" for each in bound]
  config = [
    json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
    for index in range(2)
  ]
  processes = [started(["digits_cnn/float32/2/plain"], TF_CONFIG=each) for each in config]
  for [one] in map(results, processes):
    assert nccl(one["step"]) == {"AllReduce 53004 float32": 2}
    assert one["step"]["bytes to the host"] < 1000  # the gradients do not go there
