"""What the host does between the steps of a loop: nothing, however many steps there are."""

import contextlib
import functools
import gc
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_evaluator, make_trainer
from tensorflow.python.framework import op_callbacks, ops

from loopwright.inputs.sources import ArraySource

SOURCE = ArraySource(features={"x": np.ones([64, 3], np.float32)})


class Linear(toys.Regression):
  def build_model(self):
    return toys.network([3], keras.layers.Dense(1))

  def source(self, split):
    return SOURCE

  def losses(self, outputs, batch):
    return tf.square(outputs)


class Counted:
  """Operations that this thread starts, and tensors that it reads, within `counting`.

  Not those of objects that another test left to be collected.
  """

  def __init__(self):
    self.counts = []

  @contextlib.contextmanager
  def counting(self, monkeypatch):
    found, read = {"operations": 0, "reads": 0}, ops._EagerTensorBase._numpy
    own = threading.get_ident()

    def started(*unused, **unused_too):
      found["operations"] += 1

    def reading(tensor):
      found["reads"] += threading.get_ident() == own
      return read(tensor)

    with monkeypatch.context() as patch:
      patch.setattr(ops._EagerTensorBase, "_numpy", reading)
      gc.collect()
      gc.disable()
      op_callbacks.add_op_callback(started)
      try:
        yield
      finally:
        gc.enable()
        op_callbacks.remove_op_callback(started)
    self.counts.append(found)


def trainer_of(strategy, **options):
  sgd = functools.partial(keras.optimizers.SGD, 0.1)
  return make_trainer(Linear(), strategy, batch=4, optimizer=sgd, **options)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_nothing_is_read_or_started_between_training_steps(eager, monkeypatch):
  trainer, counted = trainer_of(tf.distribute.get_strategy(), eager=eager), Counted()
  trainer.train(tf.constant(1))
  for steps in (2, 12):
    with counted.counting(monkeypatch):
      trainer.train(tf.constant(steps))
  few, many = counted.counts
  assert (few == many) != eager  # each eager step starts operations of its own
  assert few["reads"] > 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_is_read_or_started_between_batches_of_an_evaluation(
  replicas, mirrored, monkeypatch
):
  strategy, counted = mirrored(replicas), Counted()
  trainer = trainer_of(strategy)
  evaluator = make_evaluator(trainer.task, strategy, batch=4)
  evaluator.evaluate()
  for batches in (2, 12):
    evaluator._sets[0].at_once = 100
    with counted.counting(monkeypatch):
      evaluator.evaluate(batches)
  few, many = counted.counts
  assert few == many
  assert few["reads"] > 0
