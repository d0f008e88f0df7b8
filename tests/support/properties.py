"""What every training must keep, as assertions that any task's trainer can be given.

`Ended` is a training that has ended; two of them that began from the same weights are compared.
"""

import collections

import numpy as np
import pytest
import runs
import tensorflow as tf

from loopwright.inputs import datasets

Ended = collections.namedtuple("Ended", "trainer start replicas metrics")
TIMES = ("input_wait_s", "examples_per_second")


def vectors(trainer):
  """What each optimizer trains as one vector, by its name, for each replica."""
  found = [{} for _ in range(trainer.strategy.num_replicas_in_sync)]
  for name, optimizer in trainer.parts.optimizers.items():
    copies = runs.copies(trainer.strategy, optimizer.variables)
    for vector, replica in zip(found, copies, strict=False):  # central storage has one copy
      vector[name] = np.concatenate([v.ravel() for v in replica])
  return [each for each in found if each]


def ended(trainer, steps):
  """Trains; keeps the weights of before and after, on every replica, and the metrics."""
  start = vectors(trainer)[0]
  metrics = trainer.train(tf.constant(steps))
  return Ended(trainer, start, vectors(trainer), metrics)


def has_moved(training, least=1e-2):
  """What each optimizer trains has, and by `least` somewhere."""
  end = training.replicas[0]
  moves = [np.abs(end[name] - start).max() for name, start in training.start.items()]
  assert max(moves) > least
  assert min(moves) > 1e-3


def traces_once(training):
  assert training.trainer.traces == 1


def n_replicas_equal_one(one, several, *, atol=1e-5, rel=2e-5):
  """Weights of each replica, counts of updates and logged values; one trace, no skipped step."""
  for copy in several.replicas:
    for name, vector in one.replicas[0].items():
      np.testing.assert_allclose(copy[name], vector, rtol=0, atol=atol, err_msg=name)
  has_moved(one)
  assert counts(several.trainer) == counts(one.trainer)
  means = {name: value for name, value in one.metrics.items() if name not in TIMES}
  assert {n: several.metrics[n] for n in means} == pytest.approx(means, rel=rel, abs=1e-6)
  assert several.metrics["skipped_steps"] == 0
  traces_once(several)


def counts(trainer):
  """The updates that each optimizer has made."""
  return {k: int(o.optimizer.iterations.numpy()) for k, o in trainer.parts.optimizers.items()}


def resumed_equals_uninterrupted(train, *, steps, at, names=("model", "optimizer"), but=()):
  """To the bit: `train(folder, steps)` returns the checkpoint that a run has at the end.

  Returns the uninterrupted run's and the names of what was compared: those that begin with `names`.
  """
  whole, begun = train("a", steps), train("b", at)
  resumed = train("b", steps)
  assert begun.get_variable_to_shape_map() == whole.get_variable_to_shape_map()
  assert resumed.get_variable_to_shape_map() == whole.get_variable_to_shape_map()
  compared = {n for n in whole.get_variable_to_shape_map() if n.startswith(names)} - {*but}
  for name in compared:
    np.testing.assert_array_equal(whole.get_tensor(name), resumed.get_tensor(name), name)
  moved = [not np.array_equal(begun.get_tensor(n), whole.get_tensor(n)) for n in compared]
  assert any(moved)
  return whole, compared


def order_is_function_of_seed(task, batch):
  """Each batch, as `preprocess` leaves it: from any position on, and another of another seed."""
  first = batches_of(task, 4, batch)
  for one, other in zip(batches_of(task, 2, batch, position=2 * batch), first[2:], strict=True):
    for name, value in one.items():
      np.testing.assert_array_equal(value, other[name], name)
  [other] = batches_of(task, 1, batch, seed=1)
  assert not all(np.array_equal(value, first[0][name]) for name, value in other.items())


def batches_of(task, count, batch, **options):
  """The first global batches as training reads them, without padding."""
  dataset = datasets.train_dataset(
    task.source("train"), global_batch_size=batch, preprocess=task.preprocess, **options
  )
  return [dict(b) for b in dataset.take(count)]


def descended(variables, batches, mean_loss, rate):
  """Plain gradient descent on `mean_loss(batch)`; returns the losses."""
  losses = []
  for batch in batches:
    with tf.GradientTape() as tape:
      loss = mean_loss(batch)
    for variable, slope in zip(variables, tape.gradient(loss, variables), strict=True):
      variable.assign_sub(rate * (0.0 if slope is None else slope))
    losses.append(float(loss))
  return losses


def softmax(logits):
  powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return powers / powers.sum(axis=-1, keepdims=True)


class SoftmaxRegression:
  """On rows `x` from the weights of a dense layer, by gradient descent in float64."""

  def __init__(self, x, labels, weights):
    self.x, self.labels, self.examples = x.astype(np.float64), labels, len(x)
    self.weights = [np.array(w, np.float64) for w in weights]

  def judge(self, rows):
    """Returns the probabilities, mean loss and accuracy of some examples."""
    kernel, bias = self.weights
    probabilities = softmax(self.x[rows] @ kernel + bias)
    loss = -np.log(probabilities[np.arange(len(rows)), self.labels[rows]]).mean()
    return probabilities, loss, np.mean(probabilities.argmax(axis=1) == self.labels[rows])

  def step(self, rows, rate):
    """Makes one update; returns loss and accuracy from before it."""
    probabilities, loss, accuracy = self.judge(rows)
    slope = (probabilities - np.eye(len(self.weights[1]))[self.labels[rows]]) / len(rows)
    gradients = self.x[rows].T @ slope, slope.sum(axis=0)
    self.weights = [w - rate * g for w, g in zip(self.weights, gradients, strict=True)]
    return loss, accuracy


def update_of_float64_numpy(trainer, reference, *, batch, steps, rate, **tolerance):
  """In source order. `reference` has `weights` and `examples`, judges rows and steps with them."""
  metrics = trainer.train(tf.constant(steps))
  rows = [(batch * step + np.arange(batch)) % reference.examples for step in range(steps)]
  means = np.mean([reference.step(each, rate) for each in rows], axis=0)
  assert [metrics["loss"], metrics["accuracy"]] == pytest.approx(means, rel=1e-5)
  weights = trainer.task.model.get_weights()
  for got, wanted in zip(weights, reference.weights, strict=True):
    np.testing.assert_allclose(got, wanted, **tolerance)
  assert np.abs(weights[0]).max() > 0.1


def evaluation_of_float64_numpy(evaluator, reference, examples):
  """Of the first examples."""
  _, loss, accuracy = reference.judge(np.arange(examples))
  expected = {"loss": pytest.approx(loss, rel=1e-5), "accuracy": pytest.approx(accuracy, rel=1e-6)}
  assert evaluator.evaluate() == expected
