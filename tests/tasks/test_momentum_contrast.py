"""MoCo: ten steps against a plain loop with a list as queue, on 1, 2 and 3 replicas, padded."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.models import models
from loopwright.runs.builder import Recipe
from loopwright.tasks.image_classification import ImageData
from loopwright.tasks.momentum_contrast import MomentumContrast

BATCH, STEPS, QUEUE = 7, 10, 16


def images():
  rng = np.random.default_rng(8)
  features = {
    "image": rng.integers(0, 256, [21, 8, 8, 1]).astype(np.uint8),
    "label": rng.integers(0, 4, 21).astype(np.int32),
  }
  source = ArraySource(features=features)
  return ImageData(sources={"train": source, "eval": source}, image_shape=(8, 8, 1), labels=4)


def moco(**options):
  small = {"filters": (3,), "units": 6, "projection": 4, "queue_size": QUEUE, "momentum": 0.8}
  return MomentumContrast(data=images(), input_shape=(8, 8, 1), **{**small, **options})


def batches(task):
  data = datasets.train_dataset(
    task.source("train"), global_batch_size=BATCH, preprocess=task.preprocess
  )
  return itertools.islice(data.as_numpy_iterator(), STEPS)


def plain_loop():
  """SGD on whole batches without padding; the queue is a list of the newest keys."""
  keras.utils.set_random_seed(1)
  task = moco()
  model = task.build_model()
  queue = tf.unstack(model["queue"][:QUEUE])
  fast = [*model["encoder"].variables, *model["head"].variables]
  slow = [*model["slow_encoder"].variables, *model["slow_head"].variables]

  def embedded(image, prefix=""):
    rows = model[f"{prefix}head"](model[f"{prefix}encoder"](image))
    return rows / tf.norm(rows, axis=1, keepdims=True)

  for batch in batches(task):
    keys = embedded(batch["second"], "slow_")
    with tf.GradientTape() as tape:
      query = embedded(batch["first"])
      negative = query @ tf.transpose(tf.stack(queue))
      logits = tf.concat([tf.reduce_sum(query * keys, 1, keepdims=True), negative], 1) / 0.2
      labels = tf.zeros([BATCH], tf.int32)
      loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    gradients = tape.gradient(loss, [v.value for v in fast])
    for variable, gradient in zip(fast, gradients, strict=True):
      variable.assign(variable - 0.05 * gradient)
    for old, new in zip(slow, fast, strict=True):
      old.assign(0.8 * old + 0.2 * new)
    queue = [*queue, *tf.unstack(keys)][-QUEUE:]
  return [v.numpy() for v in (*fast, *slow)], np.stack(queue)


@pytest.fixture(scope="module")
def expected():
  return plain_loop()


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ten_steps_are_those_of_a_plain_loop(replicas, expected, mirrored):
  keras.utils.set_random_seed(1)
  recipe = Recipe(optimizer=lambda: keras.optimizers.SGD(0.05), global_batch_size=BATCH)
  trainer = recipe.trainer(moco(), mirrored(replicas))
  assert trainer.padded_batch_size == {1: 7, 2: 8, 3: 9}[replicas]
  trainer.train(tf.constant(4))
  trainer.train(tf.constant(STEPS - 4))
  model, (weights, queue) = trainer.task.model, expected
  names = ("encoder", "head", "slow_encoder", "slow_head")
  got = [models.raw(v).numpy() for name in names for v in model[name].variables]
  for one, wanted in zip(got, weights, strict=True):
    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)
  end = STEPS * BATCH % QUEUE
  assert int(model["end"].numpy()) == end
  for copy in trainer.strategy.experimental_local_results(model["queue"]):
    rows = np.roll(copy.numpy()[:QUEUE], -end, axis=0)  # the oldest first
    np.testing.assert_allclose(rows, queue, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "value"), [("queue_size", 0), ("momentum", 1.0)])
def test_options_out_of_range_are_refused(name, value):
  with pytest.raises(ConfigError, match=f"MomentumContrast.{name} is {value}"):
    moco(**{name: value})
