"""The evaluator: each example once, whatever the replicas, the batches and the padding."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_evaluator

from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.inputs.streams import StreamSource
from loopwright.metrics import weighted_sum

EXAMPLES = 11
RNG = np.random.default_rng(7)
X = RNG.normal(size=[EXAMPLES, 3]).astype(np.float32)
Y = RNG.normal(size=EXAMPLES).astype(np.float32)
WEIGHT = RNG.uniform(0.5, 2.0, size=EXAMPLES).astype(np.float32)
WEIGHT[[2, 9]] = 0.0
KERNEL = np.array([[1.0], [-0.5], [2.0]], np.float32)
# One batch holds all, some divide by the replicas, one by the examples, most by neither.
BATCHES = (1, 3, 4, 5, 11, 16)


def errors(rows=slice(None)):
  return X[rows].astype(np.float64) @ KERNEL[:, 0] - Y[rows]


def expected(rows=slice(None)):
  weight = WEIGHT[rows]
  return {
    "loss": np.average(np.square(errors(rows)), weights=weight),
    "mae": np.average(np.abs(errors(rows)), weights=weight),
    "above": np.average(errors(rows) > 0, weights=weight),
  }


class Linear(toys.Regression):
  """x @ kernel."""

  def __init__(self, *, weight=WEIGHT, stream=False):
    self.features = {"x": X, "y": Y, "weight": weight}
    self.stream, self.forward_calls = stream, 0

  def build_model(self):
    return toys.linear(KERNEL, kernel_regularizer=keras.regularizers.L2(0.5))

  def source(self, split):
    if self.stream:
      dataset = tf.data.Dataset.from_tensor_slices(self.features)
      return StreamSource(dataset=dataset.filter(lambda example: True))  # of unknown length
    return super().source(split)

  def forward(self, batch, training):
    assert not training
    self.forward_calls += 1
    return super().forward(batch, training)

  def metrics(self, outputs, batch):
    error = outputs - batch["y"]
    return {
      "mae": weighted_sum(tf.abs(error), batch["weight"]),
      "above": weighted_sum(error > 0, batch["weight"]),
    }


class Counting(Linear):
  """Counts how often each example arrives, and how many replicas' steps there are."""

  def eval_step(self, step, batch):
    for example in range(EXAMPLES):
      here = tf.cast(batch["example_id"] == example, tf.float32)
      step.log({f"{example}": (tf.reduce_sum(here), 1.0 / EXAMPLES)})
      weighed = tf.cast(batch["weight"] > 0, tf.float32)
      step.log({f"{example} weighed": (tf.reduce_sum(here * weighed), 1.0 / EXAMPLES)})
    step.log({"ids": weighted_sum(batch["example_id"], tf.cast(batch["weight"] > 0, tf.float32))})


class PoisonedPadding(Linear):
  """The outputs of padding and of what has no weight are not finite."""

  def forward(self, batch, training):
    return tf.where(batch["weight"] > 0, super().forward(batch, training), np.nan)


def make(strategy, task=None, *, batch=4):
  return make_evaluator(task or Linear(), strategy, batch=batch)


@pytest.fixture
def one():
  return tf.distribute.get_strategy()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2], batch=[3, 11])
@pytest.mark.fast(replicas=[1, 3], batch=[5])
def test_the_means_are_those_of_numpy(replicas, batch, mirrored):
  results = make(mirrored(replicas), PoisonedPadding(), batch=batch).evaluate()
  assert results == pytest.approx(expected(), rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["array", "stream"])
@pytest.mark.fast(replicas=[2])
def test_every_example_arrives_exactly_once(replicas, stream, mirrored):
  """In 3 batches of 4, the last of 3: on 3 replicas 2 rows more, and one replica without a row."""
  results = make(mirrored(replicas), Counting(stream=stream)).evaluate()
  steps = 3 * replicas
  for example in range(EXAMPLES):
    assert results[f"{example}"] * steps / EXAMPLES == pytest.approx(1.0, rel=1e-6)
    weighed = results[f"{example} weighed"] * steps / EXAMPLES
    assert weighed == pytest.approx(float(WEIGHT[example] > 0), rel=1e-6)
  assert results["ids"] == pytest.approx(np.flatnonzero(WEIGHT).mean(), rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_bad_example_with_weight_shows(replicas, mirrored):
  weight = WEIGHT.copy()
  weight[9] = 1.0

  class Poisoned(Linear):
    def forward(self, batch, training):
      return tf.where(batch["example_id"] == 9, np.nan, super().forward(batch, training))

  results = make(mirrored(replicas), Poisoned(weight=weight)).evaluate()
  assert np.isnan(results["loss"])
  assert np.isnan(results["mae"])


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.fast(replicas=[3])
def test_some_batches_can_be_asked_for(replicas, mirrored):
  evaluator = make(mirrored(replicas))
  for batches in (2, tf.constant(1), -1, 3, 100):
    rows = slice(None) if batches == -1 else slice(0, 4 * int(batches))
    assert evaluator.evaluate(batches) == pytest.approx(expected(rows), rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.fast(replicas=[2])
def test_evaluating_again_starts_again_in_the_same_trace(replicas, mirrored):
  evaluator = make(mirrored(replicas))
  first = evaluator.evaluate()
  assert [evaluator.evaluate() for _ in range(2)] == [first, first]
  evaluator.task.model.set_weights([2 * KERNEL])
  doubled = 2 * X.astype(np.float64) @ KERNEL[:, 0] - Y
  assert evaluator.evaluate()["mae"] == pytest.approx(
    np.average(np.abs(doubled), weights=WEIGHT), rel=1e-6
  )
  assert evaluator.task.forward_calls == replicas


@pytest.mark.parametrize(("replicas", "batches"), [(1, 3), (3, 3)])
def test_no_weight_at_all_is_a_mistake(replicas, batches, mirrored):
  evaluator = make(mirrored(replicas), Linear(weight=np.zeros(EXAMPLES, np.float32)))
  with pytest.raises(ConfigError, match=rf"^all examples of {batches} evaluation batches have"):
    evaluator.evaluate()


def test_a_task_that_logs_nothing_has_no_results(one):
  class Silent(Linear):
    def eval_step(self, step, batch):
      step.log({})

  assert make(one, Silent()).evaluate() == {}


class Breaking(Linear):
  """Fails in the batch with example 5 while `broken`."""

  broken: tf.Variable

  def forward(self, batch, training):
    with tf.control_dependencies([tf.debugging.Assert(self.fine(batch), ["the disk"])]):
      return super().forward(batch, training)

  def fine(self, batch):
    return tf.reduce_all(batch["example_id"] != 5) | (self.broken < 1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["loops", "singly"])
def test_an_evaluation_after_a_failed_one_counts_only_its_own(replicas, stream, mirrored):
  task = Breaking(stream=stream)
  task.broken = tf.Variable(1)
  evaluator = make(mirrored(replicas), task)
  with pytest.raises(tf.errors.InvalidArgumentError, match="the disk"):
    evaluator.evaluate()
  task.broken.assign(0)
  assert evaluator.evaluate() == pytest.approx(expected(), rel=1e-6)


# ---- Several sets ----

HALVES = {"first": slice(0, 5), "second": slice(5, EXAMPLES)}


class Halved(Linear):
  """Two sets; the second has another feature, from which its examples get a metric of their own."""

  def source(self, split):
    sources = {
      name: ArraySource(features={key: value[rows] for key, value in self.features.items()})
      for name, rows in HALVES.items()
    }
    more = {**self.features, "ones": np.ones(EXAMPLES, np.float32)}
    return {**sources, "more": ArraySource(features=more)}

  def metrics(self, outputs, batch):
    own = {"ones": weighted_sum(batch["ones"], batch["weight"])} if "ones" in batch else {}
    return {**super().metrics(outputs, batch), **own}

  def derived(self, means):
    return {"twice": 2 * means["loss"]}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2])
def test_each_of_several_sets_has_its_own_means_and_derived_metrics(replicas, mirrored):
  evaluator = make(mirrored(replicas), Halved())
  wanted = {}
  for name, rows in {**HALVES, "more": slice(None)}.items():
    means = expected(rows)
    means |= {"twice": 2 * means["loss"]} | ({"ones": 1.0} if name == "more" else {})
    wanted |= {f"{name}/{metric}": value for metric, value in means.items()}
  for _ in range(2):
    assert evaluator.evaluate() == pytest.approx(wanted, rel=1e-6)
  assert evaluator.task.forward_calls == 2 * replicas  # the halves share a trace


def test_what_runs_between_batches_learns_the_set_and_its_batches(one):
  evaluator, calls = make(one, Halved()), []
  evaluator.between_batches = lambda *call: calls.append(call)
  evaluator.evaluate(1)
  assert calls == [("first", 1, 1), ("second", 1, 1), ("more", 1, 1)]
  del calls[:]
  evaluator.evaluate()
  assert [call for call in calls if call[1] == call[2]] == [
    ("first", 2, 2), ("second", 2, 2), ("more", 3, 3)
  ]  # fmt: skip
  assert all(1 <= done <= total for _, done, total in calls)


def test_an_empty_set_is_named(one):
  evaluator = make(one, Halved())
  second = evaluator._sets[1]
  second.shapes, second.lengths = [second.shapes[0].take(0)], [0]
  with pytest.raises(ConfigError, match=r"Halved.source\('eval'\)\['second'\] has no examples"):
    evaluator.evaluate()
