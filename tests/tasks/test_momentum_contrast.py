"""MoCo: ten steps against a plain loop with a list as queue, on 1, 2 and 3 replicas, padded."""

import numpy as np
import pytest
import tensorflow as tf
from properties import batches_of, descended
from shipped import RATE, STEPS, make_trainer, moco, untrained

from loopwright.models import models

BATCH, QUEUE = 7, 16


def plain_loop():
  """SGD on whole batches without padding; the queue is a list of the newest keys."""
  task = untrained("moco")
  model = task.model
  queue = tf.unstack(model["queue"][:QUEUE])
  fast = [*model["encoder"].variables, *model["head"].variables]
  slow = [*model["slow_encoder"].variables, *model["slow_head"].variables]

  def embedded(image, prefix=""):
    rows = model[f"{prefix}head"](model[f"{prefix}encoder"](image))
    return rows / tf.norm(rows, axis=1, keepdims=True)

  for batch in batches_of(task, STEPS, BATCH):
    keys = embedded(batch["second"], "slow_")

    def loss(batch, keys=keys, queue=queue):
      query = embedded(batch["first"])
      negative = query @ tf.transpose(tf.stack(queue))
      logits = tf.concat([tf.reduce_sum(query * keys, 1, keepdims=True), negative], 1) / 0.2
      labels = tf.zeros([BATCH], tf.int32)
      return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    descended(fast, [batch], loss, RATE)
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
  trainer = make_trainer(moco(), mirrored(replicas))
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
