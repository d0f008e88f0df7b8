"""What is different on GPUs: the same numbers, with the host's part of a step on the host.

Two logical CPUs stand for two GPUs.
"""

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import copies, make_trainer

from loopwright.graphs import operations
from loopwright.inputs.sources import ArraySource
from loopwright.models import models
from loopwright.optimizers import schedules
from loopwright.strategies import factories, local, placement

STEPS_PER_LOOP = 3
OneDevice = tf.distribute.OneDeviceStrategy


class AsOnGpus(factories.MirroredStrategy):
  """Trains as if its devices were GPUs."""


@placement.register(AsOnGpus)
class AsOnGpusPlacement(local.Mirrored):
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
    x = np.random.default_rng(0).normal(size=[12, 2]).astype(np.float32)
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


def test_jit_compile_compiles_what_follows_the_backward_pass_too():
  """The same numbers as where XLA has the passes alone."""
  pair = [trained(kind("CPU:0"), jit_compile=True) for kind in (AsOnOneGpu, OneDevice)]
  for ours, theirs in zip(*map(weights, pair), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)
  compiled = [str(one.graph().as_graph_def()).count('"_XlaMustCompile"') for one in pair]
  assert compiled[0] > compiled[1] > 0


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
