"""Packed rows in a mixture are those of a plain loop: on replicas, on workers, after kill -9."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import packed_texts
import pytest
import tensorflow as tf
from packed_texts import BATCH, LENGTH, RATE, STEPS
from places import PLACES, strategy_of

import launch
from loopwright.runs.builder import Recipe
from loopwright.tasks import decoder
from loopwright.tools.ledger import __main__
from loopwright.tools.ledger.recorder import Recorder

ROOT = Path(launch.__file__).parent
SUPPORT = ROOT / "tests" / "support"


def rows(documents):
  """The documents of each row: in order, a new row where the next does not fit."""
  made, left = [], 0
  for document in documents:
    if len(document) - 1 > left:
      made.append([])
      left = LENGTH
    made[-1].append(document)
    left -= len(document) - 1
  return made


def batches():
  """The documents of each step, without shuffling: 1 : 1 for 4 steps, then 3 : 1."""
  parts = [rows(packed_texts.corpus(name)) for name in ("few", "many")]
  order, read, stream = [0, 1] * 10 + [0, 0, 0, 1] * 10, [0, 0], []
  for part in order:
    stream.append(parts[part][read[part] % len(parts[part])])
    read[part] += 1
  steps = [stream[at : at + BATCH] for at in range(0, len(stream), BATCH)]
  return [[document for row in step for document in row] for step in steps]


def plain_loop():
  """Returns losses and weights of a plain loop in which each document has a row of its own."""
  model, optimizer = packed_texts.network(), keras.optimizers.SGD(RATE, momentum=0.9)
  losses = []
  for documents in batches():
    token, target = (np.zeros([len(documents), LENGTH], np.int32) for _ in range(2))
    real = np.zeros([len(documents), LENGTH], np.float32)
    for row, document in enumerate(documents):
      size = len(document) - 1
      token[row, :size], target[row, :size], real[row, :size] = document[:-1], document[1:], 1
    position = np.tile(np.arange(LENGTH), [len(documents), 1])
    mask = np.tile(np.tri(LENGTH, dtype=bool), [len(documents), 1, 1])
    with tf.GradientTape() as tape:
      each = tf.nn.sparse_softmax_cross_entropy_with_logits(target, model([token, position, mask]))
      loss = tf.reduce_sum(each * real) / real.sum()
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply([tf.convert_to_tensor(each) for each in gradients], model.trainable_variables)
    losses.append(float(loss))
  return losses, model.get_weights()


def require_same(weights, expected):
  for one, other in zip(weights, expected, strict=True):
    assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fast(place=["mirrored x3"], accumulation_steps=[2])
def test_training_is_that_of_a_plain_loop(place, accumulation_steps, mirrored, tmp_path):
  """Replicas and micro-batches have unequal numbers of tokens; 5 rows are padded to 6 or 8."""
  strategy = strategy_of(place, mirrored)
  recipe = Recipe(
    optimizer=lambda: keras.optimizers.SGD(RATE, momentum=0.9), global_batch_size=BATCH,
    shuffle=False, options={"accumulation_steps": accumulation_steps},
  )  # fmt: skip
  recorder = Recorder(model_dir=str(tmp_path), strategy=strategy)
  trainer = recipe.trainer(packed_texts.PackedTexts(), strategy, observers=[recorder])
  losses = [trainer.train(tf.constant(1))["loss"] for _ in range(5)]
  trainer.reset_input()  # as after a restart
  losses += [trainer.train(tf.constant(1))["loss"] for _ in range(STEPS - 5)]
  expected_losses, expected = plain_loop()
  assert trainer.traces == 1
  assert losses == pytest.approx(expected_losses, rel=1e-5)
  require_same(trainer.task.model.get_weights(), expected)
  assert __main__.main([str(tmp_path)]) == 0


# ---- Whole runs ----

CONFIG = f"""
import clustered
import packed_texts

run.task = @PackedTexts()
run.actions = [@Keeper()]
Keeper.folder = '{{folder}}'
run.optimizer = @keras.Adam
keras.Adam.learning_rate = 0.02
run.global_batch_size = {BATCH}
run.train_steps = {STEPS}
run.steps_per_loop = 1
run.checkpoint_every_steps = 4
run.ledger = True
run.seed = 3
"""


def run(folder, *arguments, config=CONFIG):
  """Runs the command until it ends; returns its status."""
  folder.mkdir(exist_ok=True)
  text, config = config.format(folder=folder), folder / "config.gin"
  config.write_text(text)
  command = [
    sys.executable,
    str(ROOT / "launch.py"),
    f"--gin_file={config}",
    "--mode=train",
    *arguments,
  ]
  environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
  command.append(f"--model_dir={folder / 'm'}")
  done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, env=environment)
  print(done.stdout, done.stderr)
  return done.returncode


def kept(folder):
  with np.load(folder / "variables-0.npz") as arrays:
    return [arrays[name] for name in arrays.files]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  assert run(folder) == 0
  return folder


@pytest.mark.whole
@pytest.mark.parametrize("step", [3, 6, 11])
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(step, whole, tmp_path, capsys):
  """Before the first checkpoint, and after the weights have changed."""
  signals = f"--gin_param=Keeper.signals = {{'worker 0 step {step}': 9}}"
  assert run(tmp_path, signals) == -signal.SIGKILL
  assert run(tmp_path, signals) == 0
  for one, other in zip(kept(tmp_path), kept(whole), strict=True):
    np.testing.assert_array_equal(one, other)
  assert __main__.main([str(tmp_path / "m")]) == 0
  assert "2 starts" in capsys.readouterr().out


PREFERENCE = f"""
import clustered
import loopwright.tasks.preference

run.task = @Preferred()
Preferred.corpus = @TextFiles()
Preferred.start = '{{folder}}/start'
Preferred.prompt_bytes = 16
Preferred.continued_bytes = 8
TextFiles.path = '{ROOT / "configs"}'
decoder.layers = 1
decoder.width = 16
run.actions = [@Keeper()]
Keeper.folder = '{{folder}}'
run.strategy = @mirrored
mirrored.cpu_replicas = 2
run.optimizer = @keras.Adam
run.global_batch_size = 5
run.train_steps = 12
run.steps_per_loop = 1
run.checkpoint_every_steps = 4
run.ledger = True
"""


@pytest.mark.whole
def test_a_killed_preference_run_ends_bit_for_bit_and_needs_its_start_once(tmp_path):
  """The frozen reference too: both networks are kept."""
  names = ("whole", "killed")
  for name in names:
    model = decoder.decoder(layers=1, width=16)
    model.set_weights([np.random.default_rng(1).normal(size=w.shape) for w in model.get_weights()])
    path = tmp_path / name / "start" / "checkpoints" / "ckpt-1"
    tf.train.Checkpoint(model=model).write(str(path))
  whole, killed = (tmp_path / name for name in names)
  signals = "--gin_param=Keeper.signals = {'worker 0 step 6': 9}"
  assert run(whole, config=PREFERENCE) == 0
  assert run(killed, signals, config=PREFERENCE) == -signal.SIGKILL
  shutil.rmtree(killed / "start")
  assert run(killed, signals, config=PREFERENCE) == 0
  before = [w.tolist() for w in model.get_weights()]
  arrays = kept(whole)
  assert sum(one.tolist() in before for one in arrays) == len(before)
  for one, other in zip(kept(killed), arrays, strict=True):
    np.testing.assert_array_equal(one, other)
  assert __main__.main([str(killed / "m")]) == 0


@pytest.mark.ci
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_workers_train_as_one(workers, whole, tmp_path, capsys):
  strategy = "--gin_param=run.strategy = @multi_worker_mirrored"
  assert run(tmp_path, f"--local_workers={workers}", strategy) == 0
  require_same(kept(tmp_path), kept(whole))
  assert __main__.main([str(tmp_path / "m")]) == 0
  assert "'few': 40 examples, 66.67 %" in capsys.readouterr().out
