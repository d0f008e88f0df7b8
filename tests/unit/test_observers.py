"""The seam for instruments: what an observer hears of a loop, and that it changes no number."""

import everything
import numpy as np
import pytest
import tensorflow as tf
from runs import make_evaluator

from loopwright.observers import Observer, StepObserver
from loopwright.step import EvalStep, Step

STEPS = 8


class Everything(Observer):
  """Writes down what it hears; `vetoed` is a step whose update it forbids, from 1."""

  def __init__(self, strategy, vetoed=None):
    self.strategy, self.heard = strategy, []
    self.vetoed = vetoed
    self.ids = tf.Variable(tf.fill([STEPS, everything.BATCH], tf.constant(-2, tf.int64)))
    self.step = tf.Variable(0, dtype=tf.int64)

  def of_replica(self):
    return EverythingOfReplica(self)

  def loop_begins(self, *, after_step, steps):
    self.heard.append(("loop_begins", after_step, steps))

  def loop_starts(self):
    self.heard.append("loop_starts")

  def step_begins(self):
    self.heard.append("step_begins")

  def batch_taken(self, batch, step):
    self.heard.append("batch_taken")
    self.step.assign(step + 1)
    parts = self.strategy.experimental_local_results(batch["example_id"])
    row = tf.concat(parts, axis=0)[None, : everything.BATCH]
    self.ids.assign(tf.tensor_scatter_nd_update(self.ids, [[step]], row))

  def step_ends(self, finite, loss_finite):
    self.heard.append("step_ends")
    return super().step_ends(finite, loss_finite)

  def loop_ends(self, results, *, done, ran):
    self.heard.append(("loop_ends", done, ran))
    results["observed"] = 7.0


class EverythingOfReplica(StepObserver):
  def __init__(self, observer):
    self.observer = observer

  def all_reduce(self, reduce, gradients, scalars):
    self.observer.heard.append("all_reduce")
    return reduce(gradients, scalars)

  def checked(self, finite, norm):
    self.observer.heard.append("checked")

  def allowed(self, finite):
    self.observer.heard.append("allowed")
    return finite & (self.observer.step != (self.observer.vetoed or -1))

  def applies(self, optimizer, gradients):
    self.observer.heard.append("applies")
    assert len(gradients) == len(optimizer.variables)

  def before_update(self, optimizer):
    self.observer.heard.append("before_update")

  def metrics(self):
    return {"twos": (tf.constant(2.0), tf.constant(1.0))}


def weights(trainer):
  return np.concatenate([v.numpy().ravel() for v in trainer.parts.optimizers["default"].variables])


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_observer_hears_everything_in_order(mirrored, replicas):
  strategy = mirrored(replicas)
  observer = Everything(strategy)
  trainer = everything.make_trainer(strategy, observers=[observer])
  results = trainer.train(tf.constant(STEPS))
  of_replicas = [
    e for e in ("all_reduce", "checked", "allowed", "applies") for _ in range(replicas)
  ]
  cross = [e for e in observer.heard if e not in of_replicas]
  assert cross == [
    "loop_starts", "step_begins", "batch_taken", "before_update", "step_ends",
    ("loop_begins", 0, STEPS), ("loop_ends", STEPS, STEPS),
  ]  # fmt: skip
  assert sorted(e for e in observer.heard if e in of_replicas) == sorted(of_replicas)
  assert (results["observed"], results["twos"]) == (7.0, 2.0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_observer_that_only_listens_changes_no_bit(mirrored, replicas):
  strategy = mirrored(replicas)
  alone, observed = everything.make_trainer(strategy), everything.make_trainer(strategy)
  observer = Everything(strategy)
  observed.observe(observer)
  before, after = alone.train(tf.constant(STEPS)), observed.train(tf.constant(STEPS))
  np.testing.assert_array_equal(weights(alone), weights(observed))
  assert before["loss"] == after["loss"]
  seen = observed.task.model["stream"].seen()  # what the model itself was trained on
  assert observer.ids.numpy()[observer.ids.numpy() >= 0].tolist() == seen


def moves(trainer):
  """Whether each step moves the weights; one with an infinite gradient does not."""
  moved = []
  for _ in range(STEPS):
    before = weights(trainer)
    trainer.train(tf.constant(1))
    moved.append(bool(np.any(weights(trainer) != before)))
  return moved


def test_an_observer_may_forbid_one_update(mirrored):
  strategy = mirrored(2)
  usual = moves(everything.make_trainer(strategy))
  vetoed = usual.index(True)
  observer = Everything(strategy, vetoed=vetoed + 1)
  found = moves(everything.make_trainer(strategy, observers=[observer]))
  assert found == [moved and step != vetoed for step, moved in enumerate(usual)]
  assert sum(found) > 1


def test_a_new_observer_has_the_loop_traced_once_more(mirrored):
  strategy = mirrored(2)
  trainer = everything.make_trainer(strategy)
  for _ in range(2):
    trainer.train(tf.constant(2))
  assert trainer.traces == 1
  observer = Everything(strategy)
  trainer.observe(observer)
  for _ in range(2):
    trainer.train(tf.constant(2))
  assert trainer.traces == 1  # of the new loop
  assert observer.heard.count("step_begins") == 1


class Still(Step):
  """A step whose gradients are clipped to nothing."""

  def clip(self, gradients, norm):
    return super().clip(gradients, norm).map(tf.zeros_like)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_of_ones_own_replaces_a_verb_until_another_is_used(mirrored, replicas):
  trainer = everything.make_trainer(mirrored(replicas), step=Still)
  assert not any(moves(trainer))
  trainer.use(step=Step)
  assert any(moves(trainer))
  assert trainer.traces == 1  # of the new loop


def test_an_evaluation_step_of_ones_own(mirrored):
  class Counting(EvalStep):
    def log(self, metrics):
      super().log({**metrics, "ones": (tf.constant(2.0), tf.constant(2.0))})

  evaluator = make_evaluator(everything.Everything(), mirrored(2), batch=10, step=Counting)
  assert evaluator.evaluate()["ones"] == 1.0
