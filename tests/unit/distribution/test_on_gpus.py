"""What is different on GPUs: the same numbers, with the host's part of a step on the host.

Two logical CPUs stand for two GPUs.
"""

import functools
import re
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import copies, make_trainer

from loopwright.distribution import placement
from loopwright.graphs import operations, xla
from loopwright.inputs.sources import ArraySource
from loopwright.models import models
from loopwright.optimizers import schedules
from loopwright.strategies import factories, local, mirrored

STEPS_PER_LOOP = 3
OneDevice = tf.distribute.OneDeviceStrategy


class AsOnGpus(factories.MirroredStrategy):
  """Trains as if its devices were GPUs."""


@placement.register(AsOnGpus)
class AsOnGpusPlacement(mirrored.Mirrored):
  on_gpus = True


class AsOnOneGpu(OneDevice):
  """Trains as if its device was a GPU."""


@placement.register(AsOnOneGpu)
class AsOnOneGpuPlacement(local.OneDevice):
  on_gpus = True


class Noisy(toys.Regression):
  """A regression with dropout, whose masks depend on the number of the step."""

  def build_model(self):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    return toys.network([2], *layers)

  def source(self, split):
    x = np.random.default_rng(0).normal(size=[14, 2]).astype(np.float32)  # 3 batches and a half
    return ArraySource(features={"x": x})

  def losses(self, outputs, batch):
    return tf.square(outputs - batch["x"][:, 0])


def trained(strategy, **options):
  """Returns a trainer after two loops."""
  rate = schedules.cosine_decay(initial=0.125, decay_steps=10)
  trainer = make_trainer(
    Noisy(), strategy, batch=4, data={"shuffle": False},
    optimizer=lambda: keras.optimizers.Adam(rate), **options,
  )  # fmt: skip
  for _ in range(2):
    trainer.train(tf.constant(STEPS_PER_LOOP))
  return trainer


def weights(trainer):
  """The weights on every replica."""
  held = copies(trainer.strategy, models.trainable_variables(trainer.task.model))
  return [value for replica in held for value in replica]


@pytest.fixture(scope="module")
def pair():
  names = factories.split_cpu(2)
  one_device = tf.distribute.ReductionToOneDevice
  return [
    trained(kind(names, cross_device_ops=one_device()), jit_compile=False)
    for kind in (AsOnGpus, factories.MirroredStrategy)
  ]


def test_the_host_counts_steps_as_the_device_does(pair):
  """Masks and rates of six steps in two loops: another number in one changes the weights."""
  on_gpus, usual = pair
  for ours, theirs in zip(weights(on_gpus), weights(usual), strict=True):
    np.testing.assert_array_equal(ours, theirs)


def test_the_rate_is_computed_once_a_step_and_keys_on_the_host(pair):
  on_gpus, usual = ([*operations.operations(one.graph())] for one in pair)
  assert sum(op.type == "Cos" for op in on_gpus) == 1
  assert sum(op.type == "Cos" for op in usual) > 1
  keys = [op for op in on_gpus if op.type == "StatelessRandomUniformIntV2"]
  assert len(keys) == 4  # two for each replica
  assert {tf.DeviceSpec.from_string(op.device).device_index for op in keys} == {0}
  assert not any(op.type in ("If", "StatelessIf") for op in on_gpus)


class Odd(Noisy):
  """Computes the same, with something more in its loss or in its step."""

  def __init__(self, more):
    super().__init__()
    self.more = more

  def build_model(self):
    keras.utils.set_random_seed(0)
    return toys.network([2], keras.layers.Dense(4), keras.layers.Dense(1))

  def losses(self, outputs, batch):
    losses = super().losses(outputs, batch)
    return losses + 0.0 * MORE[self.more](losses) if self.more in MORE else losses

  def train_step(self, step, batch):
    def loss(part):
      found = self.loss(self.forward(part, training=True), part)
      if self.more != "all_gather":
        return found
      return type(found)(
        found.total + 0.0 * tf.reduce_sum(step.all_gather(part["x"])), found.weight
      )

    if self.more == "print":
      tf.print("", end="", output_stream=sys.stdout)
    step.update(loss, batch)


def of_python(losses):
  return tf.ensure_shape(tf.numpy_function(np.zeros_like, [losses], tf.float32), losses.shape)


MORE = {
  "PyFunc": of_python,
  "StringLength": lambda losses: tf.cast(tf.strings.length("a"), tf.float32),
  "Where": lambda losses: tf.cast(tf.size(tf.where(losses > 0)), tf.float32),
  "RandomUniform": lambda losses: tf.random.uniform([]),
}
PASS, UPDATE = "the forward and backward pass", "the mean, check and update"


@pytest.mark.parametrize("kind", [AsOnOneGpu, AsOnGpus])
@pytest.mark.parametrize("more", ["nothing", "print", "all_gather", *MORE])
@pytest.mark.fast(more=["nothing", "all_gather", "PyFunc"])
def test_xla_compiles_what_it_can(more, kind, caplog):
  """It says what, and what not, in one line before the first step; the update is the same."""
  names, several = factories.split_cpu(2), kind is AsOnGpus
  one = {"cross_device_ops": tf.distribute.ReductionToOneDevice()}
  made = functools.partial(kind, names, **one) if several else lambda: kind("CPU:0")
  optimizer = functools.partial(keras.optimizers.Adam, 0.1)

  def trainer(**options):
    return make_trainer(Odd(more), made(), batch=4, optimizer=optimizer, **options)

  ours, theirs = trainer(), trainer(jit_compile=False)
  with caplog.at_level("INFO", logger="absl"):
    ours.examine()
  for each in (ours, theirs):
    each.train(tf.constant(STEPS_PER_LOOP))
  for one, other in zip(weights(ours), weights(theirs), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7)
  [said] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("XLA compiles ")]
  place = r" \(test_on_gpus.py:\d+(, in \w+)?\)"
  whole = f"{PASS}, {UPDATE}" if several else "the step as one program"
  expected = whole if (more, several) == ("all_gather", False) else {
    "nothing": whole,
    "print": whole if several else f"{PASS}, {UPDATE}; not the step: StringFormat{place}",
    "all_gather": f"{UPDATE}; not {PASS}: the replicas communicate in it{place}",
  }.get(more, f"{UPDATE}; not {PASS}: {more}{place}")  # fmt: skip
  assert re.fullmatch(f"XLA compiles {expected}", said)
  assert (ours.compiled, theirs.compiled) == (said.removeprefix("XLA compiles "), "")
  if more == "nothing" and several:  # before the reduction one on each replica, and one after it
    assert len([*xla.programs(ours.graph())]) == 4


@pytest.mark.parametrize("options", [{"eager": True}, {}])
def test_nothing_is_compiled_by_itself_where_it_is_not_known_to_win(options):
  kind = AsOnOneGpu if options else OneDevice
  made = make_trainer(Odd(""), kind("CPU:0"), batch=4, optimizer=keras.optimizers.SGD, **options)
  assert made.parts.jit_compile is False


def test_what_xla_refuses_only_when_it_compiles_is_trained_without_it(monkeypatch, caplog):
  """A step that has not run is run again, with the batch that it has read."""
  expected = trained(AsOnOneGpu("CPU:0"), jit_compile=False)
  monkeypatch.setattr(xla, "program", refused)
  with caplog.at_level("INFO", logger="absl"):
    found = trained(AsOnOneGpu("CPU:0"))
  assert "XLA compiles nothing: " in caplog.text
  for one, other in zip(weights(found), weights(expected), strict=True):
    np.testing.assert_array_equal(one, other)


def refused(function):
  def program():
    message = "tf2xla conversion failed while converting __inference_1"
    with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
      return tf.nest.map_structure(tf.identity, function())

  return tf.function(program, autograph=False)


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 2.0, np.nan]])
def test_weights_are_those_that_the_host_has_read(weight):
  """Those that are all 1 are not copied: tests/gpu counts it."""
  place = placement.of(AsOnOneGpu("CPU:0"))
  read = tf.function(lambda weight: place.per_replica({"weight": weight})["weight"])
  np.testing.assert_array_equal(read(tf.constant(weight)), np.float32(weight))


@pytest.mark.parametrize("kind", [AsOnOneGpu, AsOnGpus, OneDevice])
def test_the_wait_for_input_is_that_of_the_loop(kind):
  """One batch of this loop takes a second; fewer than the loop has steps are read ahead."""
  pauses_s = []

  def pause():
    time.sleep(pauses_s.pop() if pauses_s else 0)
    return np.float32(0)

  def slow(batch, training):
    del training
    with tf.control_dependencies([tf.numpy_function(pause, [], tf.float32)]):
      return {**batch, "x": tf.identity(batch["x"])}

  names = factories.split_cpu(2)
  strategy = kind(names) if kind is AsOnGpus else kind("CPU:0")
  sgd = functools.partial(keras.optimizers.SGD, 0.1)
  trainer = make_trainer(Noisy(), strategy, batch=4, optimizer=sgd, data={"preprocess": slow})
  trainer.train(tf.constant(1))  # traced
  pauses_s.append(1.0)
  started = time.perf_counter()
  waited_s = trainer.train(tf.constant(64))["input_wait_s"]
  assert 0.1 < waited_s <= time.perf_counter() - started


@pytest.mark.parametrize("count", [2, 8])
def test_auto_is_collective_on_gpus(count, caplog):
  """NcclAllReduce has no bfloat16; TensorFlow's collectives call NCCL between GPUs."""
  names = [f"GPU:{index}" for index in range(count)]
  with caplog.at_level("INFO", logger="absl"):
    assert factories.works("auto", names)
  assert "cross-device ops auto: collective, NCCL between GPUs" in caplog.text
