"""FixMatch: ten steps against a plain TensorFlow loop on 1 and 2 replicas with padded rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from properties import batches_of, descended
from shipped import RATE, STEPS, by_brightness, fixmatch, make_trainer, untrained

from loopwright.tasks.fixmatch import chosen, without_square

BATCH, RATIO, THRESHOLD = 5, 3, 0.268


def plain_loop():
  task, confident = untrained("fixmatch"), 0
  model = task.model["network"]
  answers = np.full(4, 0.25)
  for batch in batches_of(task, STEPS, BATCH):
    weak = tf.reshape(batch["unlabelled/image"], [-1, 8, 8, 1])
    strong = tf.reshape(batch["unlabelled/strong"], [-1, 8, 8, 1])
    found = tf.nn.softmax(model(weak)).numpy()
    guess = found / answers / (found / answers).sum(1, keepdims=True)
    answers = 0.9 * answers + 0.1 * found.mean(0)
    mask = (guess.max(1) >= THRESHOLD).astype(np.float32)
    confident += mask.sum()

    def loss(batch, strong=strong, guess=guess, mask=mask):
      entropy = keras.losses.sparse_categorical_crossentropy
      own = entropy(batch["label"], model(batch["image"]), from_logits=True)
      others = entropy(guess.argmax(1), model(strong), from_logits=True)
      return tf.reduce_mean(own) + tf.reduce_mean(mask * others)

    descended(model.trainable_variables, [batch], loss, RATE)
  return [v.numpy() for v in model.variables], answers, confident / (STEPS * BATCH * RATIO)


@pytest.fixture(scope="module")
def expected():
  return plain_loop()


@pytest.mark.parametrize("replicas", [1, 2])
def test_ten_steps_are_those_of_a_plain_loop(replicas, expected, mirrored):
  trainer = make_trainer(fixmatch(), mirrored(replicas), batch=BATCH)
  metrics = trainer.train(tf.constant(STEPS))
  weights, answers, confident = expected
  assert 0.1 < confident < 0.9
  assert metrics["confident"] == pytest.approx(confident, abs=1e-6)
  model = trainer.task.model
  np.testing.assert_allclose(model["answers"].numpy(), answers, rtol=1e-5)
  for got, wanted in zip(model["network"].variables, weights, strict=True):
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_the_labelled_images_are_a_few_of_each_class():
  source = by_brightness().sources["train"]
  indices = chosen(source, 3, seed=1)
  assert np.bincount(indices % 4).tolist() == [3, 3, 3, 3]  # an image's label is its index mod 4
  assert chosen(source, 3, seed=2).tolist() != indices.tolist()


def test_a_square_is_cut_out():
  image = tf.ones([2, 6, 5, 1])
  got = without_square(image, 3, tf.constant([[0.0, 0.5], [0.99, 0.99]])).numpy()[..., 0]
  wanted = np.ones([2, 6, 5])
  wanted[0, 0:2, 1:4] = 0
  wanted[1, 4:6, 3:5] = 0
  assert np.array_equal(got, wanted)
