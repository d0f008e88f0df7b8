"""What a checkpoint holds, that it is whole or absent, and what is done about one that is neither."""

import itertools
import os
import shutil

import everything
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl import logging as absl_logging

from framework import checkpoints, errors, loss_scale

KERNEL = "model/network/_functional/_operations/1/_kernel/.ATTRIBUTES/VARIABLE_VALUE"
GOOD = (10, 20, 30)


def one_replica():
  return tf.distribute.OneDeviceStrategy("CPU:0")


@pytest.fixture
def strategies(mirrored):
  return {1: one_replica(), 4: mirrored(4)}


@pytest.fixture
def log(caplog):
  """What was logged, as text."""
  absl_logging.use_absl_handler()
  logger = absl_logging.get_absl_logger()
  logger.addHandler(caplog.handler)
  yield lambda: "\n".join(record.getMessage() for record in caplog.records)
  logger.removeHandler(caplog.handler)


# ---- Exact resume: these compile ----


@pytest.mark.parametrize(("library", "replicas"), [("keras", 1), ("keras", 4), ("tf_keras", 4)])
def test_resume_is_exact_to_the_bit(strategies, tmp_path, library, replicas):
  whole = everything.make_trainer(strategies[replicas], library=library)
  manager = everything.make_manager(whole, tmp_path)
  everything.train(whole, 3)
  everything.train(whole, 3)
  manager.save(check_interval=False)
  metrics = everything.train(whole, 6)
  expected = everything.read(manager.checkpoint.write(str(tmp_path / "whole")))

  resumed = everything.make_trainer(strategies[replicas], library=library, seed=6)
  resumed.parts = whole.parts.__class__(**{**vars(resumed.parts), "seed": 5})
  manager = everything.make_manager(resumed, tmp_path)
  assert manager.restore_or_initialize() == str(tmp_path / "ckpt-6")
  assert everything.train(resumed, 6) == metrics
  got = everything.read(manager.checkpoint.write(str(tmp_path / "resumed")))
  assert everything.differing(got, expected) == []

  skipped = [
    int(read["skipped_steps/.ATTRIBUTES/VARIABLE_VALUE"])
    for read in (everything.read(tmp_path / "ckpt-6"), expected)
  ]
  assert 0 < skipped[0] < skipped[1] < 12  # so the loss scale and skipping were at work
  assert resumed.task.model["stream"].seen() == expected_ids(12 * everything.BATCH)


def expected_ids(count):
  batches = everything.dataset(everything.Everything(), count, 1, 0)
  return next(batches.as_numpy_iterator())["example_id"].tolist()


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_other_numbers_of_replicas_go_on_alike(strategies, tmp_path, library):
  """Without dropout, whose masks are each replica's own."""
  trainers = {
    n: everything.make_trainer(
      strategy, library=library, made=everything.Everything(library=library, dropout=0.0)
    )
    for n, strategy in strategies.items()
  }
  managers = {n: everything.make_manager(t, tmp_path / str(n)) for n, t in trainers.items()}
  saved, final = {}, {}
  for n, trainer in trainers.items():
    everything.train(trainer, 6)
    saved[n] = managers[n].save(check_interval=False)
    everything.train(trainer, 6)
    final[n] = everything.read(managers[n].checkpoint.write(str(tmp_path / f"final{n}")))
  for n, other in ((1, 4), (4, 1)):
    managers[n].restore(saved[other])
    restored = everything.read(managers[n].checkpoint.write(str(tmp_path / f"restored{n}")))
    assert everything.differing(restored, everything.read(saved[other])) == []
    assert_copies_agree(trainers[n])
    everything.train(trainers[n], 6)
    got = everything.read(managers[n].checkpoint.write(str(tmp_path / f"again{n}")))
    assert_close(got, final[other])
    assert trainers[n].traces == 1  # restoring does not retrace


def assert_copies_agree(trainer):
  for variable in checkpoints._variables(
    everything.make_manager(trainer, "unused").checkpoint
  ).values():
    raw = getattr(variable, "value", variable) if isinstance(variable, keras.Variable) else variable
    copies = [c.numpy() for c in trainer.strategy.experimental_local_results(raw)]
    assert all(np.array_equal(copy, copies[0]) for copy in copies)


def assert_close(got, expected):
  for key in expected.keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}:
    value = np.asarray(expected[key])
    if value.dtype.kind == "f":
      np.testing.assert_allclose(got[key], value, rtol=2e-5, atol=2e-6, err_msg=key)
    else:
      assert np.array_equal(got[key], value), key


def test_another_batch_size_goes_on_at_the_right_example(tmp_path):
  first = everything.make_trainer(one_replica())
  everything.train(first, 2)
  everything.make_manager(first, tmp_path).save(check_interval=False)
  second = everything.make_trainer(one_replica(), batch=7)
  everything.make_manager(second, tmp_path).restore_or_initialize()
  everything.train(second, 3)
  assert second.task.model["stream"].seen() == expected_ids(2 * everything.BATCH + 3 * 7)
  assert second.position.numpy() == 2 * everything.BATCH + 3 * 7
