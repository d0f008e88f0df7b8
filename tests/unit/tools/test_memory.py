"""`--mode=memory`: the lines of its table, against counts by hand and TensorFlow's allocator."""

import math
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import launch
import loopwright
from loopwright import commands
from loopwright.errors import ConfigError
from loopwright.tools import memory

REPOSITORY = Path(launch.__file__).parent
MIB = 2**20
WIDTH, DEPTH, LAYERS, BATCH = 256, 4, 16, 2048
PARAMETERS = LAYERS * (WIDTH + 1) * WIDTH
ACTIVATION = BATCH * WIDTH * 4
FITS_GIB = 0.03
pytestmark = pytest.mark.whole
CONFIG = """
run.task = @Tower()
run.train_steps = 1
run.global_batch_size = 2048
"""
MESH = """
run.strategy = @model_parallel
model_parallel.mesh = {'batch': 2, 'model': 2}
model_parallel.layouts = {'kernel': (None, 'model'), 'bias': ('model',)}
model_parallel.shard_parameters = True
"""


class Block(keras.layers.Layer):
  """Layers of one width."""

  def __init__(self, **options):
    super().__init__(**options)
    self.inner = [keras.layers.Dense(WIDTH, "tanh") for _ in range(DEPTH)]

  def build(self, shape):
    for layer in self.inner:
      layer.build(shape)

  def call(self, x):
    for layer in self.inner:
      x = layer(x)
    return x


def full(x):
  raise tf.errors.ResourceExhaustedError(
    None, None, "OOM when allocating tensor with shape[9,9] and type float on CPU:0"
  )


@loopwright.register
class Tower(toys.Regression):
  """Blocks of layers; one that fails does so as on a device that is full."""

  features = {"x": np.ones([BATCH, WIDTH], np.float32)}

  def __init__(self, *, fails: bool = False):
    self.fails = fails

  def build_model(self):
    return toys.network(
      [WIDTH], *(Block(name=f"block_{number}") for number in range(LAYERS // DEPTH))
    )

  def forward(self, batch, training):
    x = batch["x"]
    if self.fails:
      x = tf.ensure_shape(tf.numpy_function(full, [x], tf.float32), x.shape)
    return self.model(x, training=training)

  def losses(self, outputs, batch):
    return tf.reduce_mean(tf.square(outputs), axis=1)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
  """The rows of the table by name, and what is printed."""
  config = tmp_path_factory.mktemp("memory") / "tower.gin"
  config.write_text(CONFIG + MESH)
  lines = []
  rows = memory.memory([str(config)], device_gib=FITS_GIB, show=lines.append)
  return {row.name: row for row in rows}, lines


def test_the_precision_is_the_configs_again(shown):
  assert keras.config.dtype_policy().name == "float32"


def test_weights_and_state_are_those_of_the_parameters(shown):
  need = shown[0]["one_device"].need
  assert need.weights == need.gradients == 4 * PARAMETERS
  assert need.state == pytest.approx(2 * 4 * PARAMETERS, rel=0.01)


def test_activations_are_those_of_each_layer(shown):
  """Also alive at the peak: those of the loss, which are as large as those of a layer."""
  need = shown[0]["one_device"].need
  assert (LAYERS + 1) * ACTIVATION <= need.gradients + need.activations <= (LAYERS + 4) * ACTIVATION


def test_the_estimate_is_what_tensorflow_allocates():
  """In a process of its own: on the logical CPUs of these tests the allocator counts less."""
  command = [sys.executable, "-m", "benchmarks.memory", "--one", "--configs", "language_model"]
  done = subprocess.run(
    [*command, "--replicas", "1"], capture_output=True, text=True, check=True, cwd=REPOSITORY
  )
  ratio = float(done.stdout.split()[-1])
  assert 0.9 < ratio < 1.1, done.stdout


def test_each_strategy_has_its_share(shown):
  rows = shown[0]
  whole = rows["one_device"].need
  for replicas in (2, 4, 8):
    row = rows[f"mirrored, multi_worker_mirrored, tpu x {replicas}"]
    assert row.examples == BATCH // replicas
    assert (row.need.weights, row.need.state) == (whole.weights, whole.state)
    per_replica = LAYERS * ACTIVATION / replicas
    assert row.need.activations >= max(per_replica - whole.gradients, whole.gradients)
    sharded = rows[f"  with Trainer.shard_optimizer_state x {replicas}"].need
    saved = 2 * 4 * PARAMETERS * (1 - 1 / replicas)
    assert row.need.total - sharded.total == pytest.approx(saved, rel=0.001)
    assert rows[f"central_storage x {replicas}"].need.state == 0
  mesh = rows["model_parallel, batch 2 x model 2"]
  assert mesh.examples == BATCH // 2
  part = 4 * LAYERS * (WIDTH * WIDTH / 4 + WIDTH / 2)
  assert mesh.need.weights == mesh.need.gradients == part
  assert mesh.need.state == pytest.approx(2 * part, rel=0.01)
  gathered = 4 * LAYERS * WIDTH * WIDTH / 2  # all along "batch"
  mirrored = rows["mirrored, multi_worker_mirrored, tpu x 2"].need
  assert mesh.need.activations == mirrored.activations + gathered


def test_changes_of_the_config_need_less(shown):
  rows = shown[0]
  whole = rows["one_device"].need
  half = rows["Trainer.accumulation_steps = 2"].need
  assert whole.total - half.total == pytest.approx(LAYERS * ACTIVATION / 2, rel=0.3)
  for name in ("Trainer.recompute = ['block_.*']", "run.precision = 'mixed_bfloat16'"):
    assert rows[name].need.activations < 0.9 * whole.activations
    assert rows[name].need.weights == whole.weights


def test_the_table_says_what_fits(shown):
  rows, lines = shown
  text = "\n".join(lines)
  verdicts = {
    name: next(line for line in lines if line.startswith(name)).rpartition("  ")[2] for name in rows
  }
  for name, row in rows.items():
    assert verdicts[name] == ("fits" if row.need.total <= FITS_GIB * 2**30 else "too large"), name
  assert {*verdicts.values()} == {"fits", "too large"}
  assert f"{rows['one_device'].need.total / MIB:.1f}" in text
  assert "largest tensors on one_device, in MiB: " in text


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_a_device_without_memory_is_refused(size):
  with pytest.raises(ConfigError, match=r"--device_gib is .*; it must be above 0 GiB"):
    memory.memory([], device_gib=size)


# ---- The largest micro-batch ----


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(shown):
  """Weights, Adam's two slots, and LAYERS + 1 to + 4 activations of each example, as above."""
  [line] = [line for line in shown[1] if line.startswith("largest micro-batch")]
  found = re.search(r"GiB: (\d+) examples.*accumulation_steps = (\d+): ([\d.]+) MiB", line)
  rows, steps, need = int(found[1]), int(found[2]), float(found[3])
  left = FITS_GIB * 2**30 - 3 * 4 * PARAMETERS
  assert left / ((LAYERS + 4) * WIDTH * 4) * 0.96 <= rows <= left / ((LAYERS + 1) * WIDTH * 4)
  assert steps == math.ceil(BATCH / rows)
  assert need < 1.3 * FITS_GIB * 1024


def test_a_run_without_memory_names_tensors_and_a_remedy(tmp_path, capsys):
  (tmp_path / "tower.gin").write_text(CONFIG + "Tower.fails = True\n")
  command = ["loopwright", "train", str(tmp_path / "tower.gin"), f"--model_dir={tmp_path / 'run'}"]
  assert commands.main([*command, "auto.cpu_replicas = 2"]) == 1
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("failed: a device has too little memory: a step of 1024 examples needs")
  found = re.search(
    r"about ([\d.]+) MiB on it \(weights ([\d.]+), state ([\d.]+), gradients ([\d.]+), "
    r"activations ([\d.]+); largest tensors \S+ ([\d.]+).*accumulation_steps = 2 about ([\d.]+)\.",
    line,
  )
  total, weights, state, gradients, activations, largest, less = map(float, found.groups())
  assert total == pytest.approx(weights + state + gradients + activations, abs=0.3)
  assert weights == pytest.approx(4 * PARAMETERS / MIB, abs=0.1)
  assert largest == pytest.approx(ACTIVATION / 2 / MIB, abs=0.1)
  assert total - less > 0.3 * LAYERS * ACTIVATION / 2 / MIB
