"""Step number, cadence and kept state under several strategies, against NumPy on whole batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from places import PLACES, strategy_of
from runs import make_trainer

from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.inputs.streams import StreamSource
from loopwright.metrics import Loss, weighted_sum
from loopwright.task import Task
from loopwright.trainer import Trainer

ROWS, STEPS, RATE, DECAY = 10, 7, 0.125, 0.75
X = np.random.default_rng(1).normal(size=[40, 3]).astype(np.float32)


class Kept(Task):
  """Two updates at two cadences, a slow copy, a queue of the last 24 rows' sums and a counter."""

  def __init__(self, *, bad_step=-1):
    self.bad_step, self.passes = bad_step, []

  def build_model(self):
    kept = {"slow": [1.0, 1.0, 1.0], "queue": np.zeros(24, np.float32)}
    made = {name: tf.Variable(v, trainable=False, name=name) for name, v in kept.items()}
    networks = {n: tf.Variable([1.0, 1.0, 1.0], name=n) for n in ("fast", "rare")}
    count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
    return {**networks, **made, "count": count}

  def variables_of(self, optimizer):
    return [self.model[optimizer]]

  def pull(self, name, batch):
    """Mean of a term that depends on the step, on the other network and on the slow copy."""
    slope = tf.cast(batch["step"], tf.float32) + tf.linalg.matvec(batch["x"], self.model["slow"])
    bad = tf.where(tf.cast(batch["step"], tf.int32) == self.bad_step, np.inf, 1.0)
    return Loss.from_examples(
      tf.linalg.matvec(batch["x"], self.model[name]) * slope * bad, batch["weight"]
    )

  def rarely(self, step, batch):
    step.log({"seen": weighted_sum(tf.cast(batch["step"], tf.float32), batch["weight"])})
    tf.numpy_function(lambda: self.passes.append(1), [], [])
    return self.pull("rare", batch)

  def train_step(self, step, batch):
    tf.debugging.assert_equal(batch["step"], tf.fill([len(batch["x"])], step.number))
    step.update(lambda b: self.pull("fast", b), batch, "fast")
    step.update(lambda b: self.rarely(step, b), batch, "rare", when=step.number % 3 == 1)
    slow, queue = self.model["slow"], self.model["queue"]
    step.assign(slow, DECAY * slow + (1 - DECAY) * self.model["fast"])
    new = step.all_gather(tf.reduce_sum(batch["x"], 1) * batch["weight"])
    step.assign(queue, tf.concat([queue, new], 0)[-24:], when=step.number % 2 == 0)
    step.assign(self.model["count"], self.model["count"] + 2)


def in_numpy(batches, bad_step=-1):
  """The same for whole padded batches, float64."""
  fast, rare, slow = np.ones(3), np.ones(3), np.ones(3)
  queue, count, seen = np.zeros(24), 0, []
  for step, (x, weight) in enumerate(batches):
    gradient = ((step + x @ slow) * weight) @ x / weight.sum()
    if step == bad_step:
      continue
    fast = fast - RATE * gradient
    if step % 3 == 1:
      rare = rare - RATE * gradient
      seen.append(step)
    if step % 2 == 0:
      queue = np.concatenate([queue, x.sum(1) * weight])[-24:]
    slow, count = DECAY * slow + (1 - DECAY) * fast, count + 2
  return {"fast": fast, "rare": rare, "slow": slow, "queue": queue, "count": count}, seen


def trainer_of(task, strategy, batch_size=ROWS, **options):
  task.source = lambda split: ArraySource(features={"x": X})
  sgd = dict.fromkeys(["fast", "rare"], lambda: keras.optimizers.SGD(RATE))
  return make_trainer(task, strategy, batch=batch_size, optimizer=sgd, **options)


def padded_batches(multiple):
  data = datasets.train_dataset(
    ArraySource(features={"x": X}), global_batch_size=ROWS, pad_multiple=multiple
  )
  return [(b["x"].astype(np.float64), b["weight"]) for b in data.take(STEPS).as_numpy_iterator()]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad_step", [-1, 4])
def test_cadence_and_state_are_those_of_the_whole_batch(place, bad_step, mirrored):
  task = Kept(bad_step=bad_step)
  trainer = trainer_of(task, strategy_of(place, mirrored))
  metrics = [trainer.train(tf.constant(n)) for n in (3, STEPS - 3)]
  expected, seen = in_numpy(padded_batches(trainer.batch_multiple), bad_step)
  for name, value in expected.items():
    for copy in trainer.strategy.experimental_local_results(task.model[name]):
      np.testing.assert_allclose(copy, value, rtol=1e-5, atol=1e-5)
  replicas = trainer.strategy.num_replicas_in_sync
  assert len(task.passes) == replicas * len([s for s in range(STEPS) if s % 3 == 1])
  first = [s for s in seen if s < 3]
  assert metrics[0]["seen"] == pytest.approx(np.mean(first))  # not averaged with zeros
  assert trainer.traces == 1


@pytest.mark.parametrize("options", [{"eager": True}, {"accumulation_steps": 2}])
def test_options_change_no_value(options, mirrored):
  task = Kept(bad_step=4)
  trainer = trainer_of(task, mirrored(2), **options)
  trainer.train(tf.constant(STEPS))
  expected, _ = in_numpy(padded_batches(trainer.batch_multiple), 4)
  for name, value in expected.items():
    np.testing.assert_allclose(task.model[name].numpy(), value, rtol=1e-5, atol=1e-5)


class Communicating(Kept):
  """The rare update gathers inside its loss, which a branch does not allow on several replicas."""

  def train_step(self, step, batch):
    def rare(part):
      rows = step.all_gather(part["x"])
      return Loss(self.pull("rare", part).total + 0.0 * tf.reduce_sum(rows), self.weight(part))

    step.update(lambda b: self.pull("fast", b), batch, "fast")
    step.update(rare, batch, "rare", when=step.number % 3 == 1)

  def weight(self, batch):
    return tf.reduce_sum(batch["weight"])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_conditional_update_may_communicate(replicas, mirrored):
  task = Communicating()
  trainer = trainer_of(task, mirrored(replicas))
  trainer.train(tf.constant(STEPS))
  slow, rare = np.ones(3), np.ones(3)
  for step, (x, weight) in enumerate(padded_batches(trainer.batch_multiple)):
    if step % 3 == 1:
      rare = rare - RATE * ((step + x @ slow) * weight) @ x / weight.sum()
  np.testing.assert_allclose(task.model["rare"].numpy(), rare, rtol=1e-5, atol=1e-5)


def test_the_trajectory_is_the_same_in_one_loop_and_after_a_restore(mirrored, tmp_path):
  whole = trainer_of(Kept(), mirrored(3))
  whole.train(tf.constant(STEPS))
  first = trainer_of(Kept(), mirrored(3))
  first.train(tf.constant(4))
  path = tf.train.Checkpoint(**first.checkpoint_items()).write(str(tmp_path / "state"))
  second = trainer_of(Kept(), mirrored(3))
  tf.train.Checkpoint(**second.checkpoint_items()).read(path).assert_consumed()
  second.reset_input()
  second.train(tf.constant(STEPS - 4))
  for name, variable in whole.task.model.items():
    assert np.array_equal(variable.numpy(), second.task.model[name].numpy()), name


def test_preprocess_gets_the_number_of_the_step():
  def numbered(batch, training):
    return {**batch, "x": batch["x"] * tf.cast(batch["step"], tf.float32)[:, tf.newaxis]}

  source = ArraySource(features={"x": np.ones([7, 1], np.float32)})
  make = {"global_batch_size": 3, "preprocess": numbered, "pad_multiple": 2}
  data = datasets.train_dataset(source, position=6, **make)
  batches = list(data.take(4).as_numpy_iterator())
  assert [batch["x"][:, 0].tolist() for batch in batches] == [[s] * 4 for s in (2, 3, 4, 5)]
  assert "step" not in batches[0]
  other = datasets.train_dataset(source, position=6, first_step=40, shard=(2, 1), **make)
  assert [b["x"][0, 0] for b in other.take(3).as_numpy_iterator()] == [41, 43, 45]
  stream = tf.data.Dataset.from_tensor_slices({"x": np.ones([7, 1], np.float32)})
  data = datasets.train_dataset(StreamSource(dataset=stream), position=6, **make)
  assert [b["x"][0, 0] for b in data.take(3).as_numpy_iterator()] == [2, 3, 4]


class Steps(Task):
  """One weight; `train_step` is given."""

  def __init__(self, body):
    self.body = body
    self.foreign = tf.Variable(1.0, trainable=False, name="foreign")

  def build_model(self):
    return {"w": tf.Variable([1.0]), "kept": tf.Variable([0.0, 0.0], trainable=False, name="kept")}

  def loss_of(self, batch):
    return Loss.from_examples(batch["x"][:, 0] * self.model["w"], batch["weight"])

  def train_step(self, step, batch):
    self.body(self, step, batch)


def conditional(task, step, batch):
  if step.number % 2 == 0:
    step.update(task.loss_of, batch)


def looping(task, step, batch):
  for _ in tf.range(2):
    step.update(task.loss_of, batch)


def at(when):
  def body(task, step, batch):
    step.update(task.loss_of, batch, when=when(step))

  return body


def assigning(name, value):
  def body(task, step, batch):
    step.update(task.loss_of, batch)
    step.assign(task.foreign if name == "foreign" else task.model[name], value)
    if name == "w":
      step.assign(task.model[name], value)

  return body


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
  ("body", "line"),
  [
    (conditional, r"step.update\(\) is called inside a branch or loop.*when=step.number"),
    (looping, r"step.update\(\) is called inside a branch or loop.*a Python range"),
    (at(lambda step: step.number % 2), r"when= is int64 of shape \(\); it must be one bool"),
    (at(lambda step: [True, False]), r"when= is bool of shape \(2,\); it must be one bool"),
    (assigning("kept", [1.0]), r"a value of shape \(1,\) for 'kept:0' of shape \(2,\)"),
    (assigning("w", [1.0]), "twice in a step"),
  ],
)
def test_mistakes_are_one_line(body, line, replicas, mirrored):
  source = ArraySource(features={"x": X})
  trainer = Trainer(
    task=Steps(body), strategy=mirrored(replicas), global_batch_size=4,
    dataset_fn=lambda position: datasets.train_dataset(source, global_batch_size=4),
    optimizer=lambda: keras.optimizers.SGD(RATE),
  )  # fmt: skip
  with pytest.raises(ConfigError, match=line):
    trainer.train(tf.constant(1))
