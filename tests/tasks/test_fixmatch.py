"""FixMatch: ten steps against a plain TensorFlow loop on 1 and 2 replicas with padded rows."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.runs.builder import Recipe
from loopwright.tasks import fixmatch
from loopwright.tasks.fixmatch import FixMatch
from loopwright.tasks.image_classification import ImageData, cnn

BATCH, STEPS, RATIO, THRESHOLD = 5, 10, 3, 0.268


def images():
  rng = np.random.default_rng(8)
  label = np.arange(48).astype(np.int32) % 4
  image = rng.integers(0, 128, [48, 8, 8, 1]) + 30 * label[:, None, None, None]
  source = ArraySource(features={"image": image.astype(np.uint8), "label": label})
  return ImageData(sources={"train": source, "eval": source}, image_shape=(8, 8, 1), labels=4)


def task(**options):
  network = functools.partial(cnn, filters=(3,), units=6, activation="silu")
  given = {
    "labels": 12,
    "ratio": RATIO,
    "threshold": THRESHOLD,
    "cutout": 3,
    "memory": 0.9,
    **options,
  }
  return FixMatch(
    data=images(), network=network, input_shape=(8, 8, 1), classes=4, flip=True, shift=1, **given
  )


def batches(made):
  data = datasets.train_dataset(
    made.source("train"), global_batch_size=BATCH, preprocess=made.preprocess
  )
  return itertools.islice(data.as_numpy_iterator(), STEPS)


def plain_loop():
  keras.utils.set_random_seed(1)
  made = task()
  model, confident = made.build_model()["network"], 0
  answers = np.full(4, 0.25)
  for batch in batches(made):
    weak = batch["unlabelled/image"].reshape([-1, 8, 8, 1])
    strong = batch["unlabelled/strong"].reshape([-1, 8, 8, 1])
    found = tf.nn.softmax(model(weak)).numpy()
    guess = found / answers / (found / answers).sum(1, keepdims=True)
    answers = 0.9 * answers + 0.1 * found.mean(0)
    mask = (guess.max(1) >= THRESHOLD).astype(np.float32)
    confident += mask.sum()
    with tf.GradientTape() as tape:
      own = keras.losses.sparse_categorical_crossentropy(
        batch["label"], model(batch["image"]), from_logits=True
      )
      others = keras.losses.sparse_categorical_crossentropy(
        guess.argmax(1), model(strong), from_logits=True
      )
      loss = tf.reduce_mean(own) + tf.reduce_mean(mask * others)
    variables = [v.value for v in model.trainable_variables]
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
      variable.assign_sub(0.05 * gradient)
  return [v.numpy() for v in model.variables], answers, confident / (STEPS * BATCH * RATIO)


@pytest.fixture(scope="module")
def expected():
  return plain_loop()


@pytest.mark.parametrize("replicas", [1, 2])
def test_ten_steps_are_those_of_a_plain_loop(replicas, expected, mirrored):
  keras.utils.set_random_seed(1)
  recipe = Recipe(optimizer=lambda: keras.optimizers.SGD(0.05), global_batch_size=BATCH)
  trainer = recipe.trainer(task(), mirrored(replicas))
  metrics = trainer.train(tf.constant(STEPS))
  weights, answers, confident = expected
  assert 0.1 < confident < 0.9
  assert metrics["confident"] == pytest.approx(confident, abs=1e-6)
  model = trainer.task.model
  np.testing.assert_allclose(model["answers"].numpy(), answers, rtol=1e-5)
  for got, wanted in zip(model["network"].variables, weights, strict=True):
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_the_labelled_images_are_a_few_of_each_class():
  source = images().sources["train"]
  indices = fixmatch.chosen(source, 3, seed=1)
  assert np.bincount(indices % 4).tolist() == [3, 3, 3, 3]  # an image's label is its index mod 4
  assert fixmatch.chosen(source, 3, seed=2).tolist() != indices.tolist()


def test_a_square_is_cut_out():
  image = tf.ones([2, 6, 5, 1])
  got = fixmatch.without_square(image, 3, tf.constant([[0.0, 0.5], [0.99, 0.99]])).numpy()[..., 0]
  wanted = np.ones([2, 6, 5])
  wanted[0, 0:2, 1:4] = 0
  wanted[1, 4:6, 3:5] = 0
  assert np.array_equal(got, wanted)


@pytest.mark.parametrize(
  ("labels", "line"),
  [(10, "FixMatch.labels is 10; it must be a multiple of the 4"), (400, "class 0 has fewer")],
)
def test_a_wrong_number_of_labels_is_refused(labels, line):
  with pytest.raises(ConfigError, match=line):
    task(labels=labels).source("train")
