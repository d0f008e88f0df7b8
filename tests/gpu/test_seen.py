"""GPUs are chosen, limited, described and reached by the tests: on the stand-in for CUDA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest

pytestmark = [
  pytest.mark.ci,
  pytest.mark.skipif(not fake_gpu.can_be_built(), reason="no g++ for the stand-in of a GPU"),
]
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

RUN = """
import json, os, sys
import keras, numpy as np, tensorflow as tf
import loopwright
from loopwright.runs import runner
from loopwright.distribution import gpus, placement
from loopwright.strategies import factories
from loopwright.distribution.reduction import Reduction

Reduction.prove = lambda *_: None  # the stand-in computes no sum that could be right


class Line(loopwright.Task):
  def build_model(self):
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])

  def source(self, split):
    return loopwright.ArraySource(features={"x": np.ones([4, 8], np.float32)})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    return loopwright.Loss.from_examples(outputs**2, batch["weight"])


options = json.loads(sys.argv[2])
try:
  runner.run(
    task=Line(), train_steps=1, global_batch_size=4, model_dir=sys.argv[1], mode="train", **options
  )
except loopwright.ConfigError as error:  # no weight was computed
  print(error, file=sys.stderr)
place = placement.of(factories.auto())
before = place.usage["gpu_memory_mib"]
try:
  kept = tf.zeros([2**28])  # 1 GiB
except tf.errors.ResourceExhaustedError:
  pass
grown = place.usage["gpu_memory_mib"] - before
peaks = [gpus.peak_flops(place.devices, dtype) for dtype in ("float32", "bfloat16")]
print(json.dumps({"grown": grown, "devices": place.devices, "peaks": peaks}))
sys.stdout.flush()
os._exit(0)  # the driver's thread never ends
"""


def on_two_gpus(program, *arguments, **variables):
  """Runs a program on the stand-in; returns the object in its last line, and its stderr."""
  environment = fake_gpu.environment(fake_gpu.library(), count=2) | variables
  environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, TESTS / "support")))
  command = [sys.executable, "-c", program, *map(str, arguments)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert not done.returncode, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_run_says_what_it_is_on(tmp_path):
  """It takes all GPUs, products are in TF32, and the most of one GPU's memory is logged.

  Their peaks are those of an H100, in TF32 and in 16 bits.
  """
  found, said = on_two_gpus(RUN, tmp_path, "{}")
  assert "GPUs        GPU:0, GPU:1: Stand-in for an NVIDIA H100, 8.0 GiB\n" in said
  assert "precision   float32; products of float32 in TF32, with 10 bits of mantissa (ru" in said
  assert found["devices"] == ["GPU:0", "GPU:1"]
  assert 1023 < found["grown"] < 1025
  assert found["peaks"] == [494e12, 989e12]
  assert "this machine has" not in said


@pytest.mark.whole
def test_a_run_uses_the_gpus_and_the_memory_that_it_may(tmp_path):
  options = {"gpus": [1], "gpu_memory": 512, "tf32": False}
  found, said = on_two_gpus(RUN, tmp_path, json.dumps(options))
  assert "Stand-in for an NVIDIA H100, 8.0 GiB, at most 512 MiB used (run.gpu_memory)\n" in said
  assert "precision   float32\n" in said
  assert found["devices"] == ["GPU:0"]
  assert found["grown"] == 0  # a GiB was refused


REACHED = """
import json, os, sys
sys.path[:0] = sys.argv[1:]
import conftest, worker, fake_gpu
import tensorflow as tf
from loopwright.distribution.reduction import Reduction

Reduction.prove = lambda *_: None
case = worker.cases.CASES["everything-mirrored_collective-x2-keras"]
worker.split_gpu(case.devices)
trainer = worker.make_trainer(case)
trainer._iterator = trainer.make_iterator()
fake_gpu.reset()
trainer._run_loop(tf.constant(2))
[variable, *_] = trainer.task.model.trainable_variables
copies = trainer.strategy.experimental_local_results(variable.value)
launches, on = fake_gpu.counts()["launches"], [copy.device[-5:] for copy in copies]
print(json.dumps({"launches": launches, "on": on}))
sys.stdout.flush()
os._exit(0)
"""


def test_the_conformance_tests_reach_a_gpu():
  """With TESTS_ON_GPUS=1; two replicas are two parts of the first GPU."""
  found, _ = on_two_gpus(REACHED, TESTS, TESTS / "conformance", TESTS_ON_GPUS="1")
  assert found["on"] == ["GPU:0", "GPU:1"]
  assert found["launches"] > 20
