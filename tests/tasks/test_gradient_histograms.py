"""Pretraining by gradient histograms: NumPy, ten steps of a plain loop, a start for FixMatch."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from properties import batches_of, descended
from shipped import RATE, STEPS, by_brightness, fixmatch, make_trainer, untrained
from shipped import histograms as task

from loopwright.run_folder.matching import DIFFERS, MATCHED
from loopwright.run_folder.warm_start import WarmStart
from loopwright.tasks.gradient_histograms import gradients_in_cells, histograms

BATCH = 5
SIZE = 2 * 8 * (2 * 2 + 1)
"""Of 8 x 8 pixels: four cells of side 4 and one of 7, 8 directions, twice."""


def by_pixels(image, side):
  """The histograms of one image [h, w], a pixel at a time."""
  root, (height, width) = np.sqrt(image), image.shape
  found = np.zeros([height // side, width // side, 8])
  for y, x in itertools.product(range(height // side * side), range(width // side * side)):
    right = root[y, x + 1] - root[y, x - 1] if 0 < x < width - 1 else 0.0
    down = root[y + 1, x] - root[y - 1, x] if 0 < y < height - 1 else 0.0
    place = math.atan2(down, right) % math.pi / math.pi * 8
    lower = math.floor(place)
    length, upper_share = math.hypot(right, down), place - lower
    found[y // side, x // side, lower % 8] += length * (1 - upper_share)
    found[y // side, x // side, (lower + 1) % 8] += length * upper_share
  return found


@pytest.mark.parametrize("side", [2, 3])
def test_gradients_are_summed_by_cell_and_direction(side):
  image = np.random.default_rng(3).uniform(size=[2, 7, 8]).astype(np.float32)
  image[0, :, :4] = image[0, :1, :4]  # a part without vertical gradients
  got = gradients_in_cells(tf.constant(image), side).numpy()
  np.testing.assert_allclose(got, [by_pixels(each, side) for each in image], atol=1e-5)


def of_numpy(image):
  """The histograms of an image [8, 8]."""
  wanted = []
  for side in (4, 7):
    cells = by_pixels(image, side)
    own = np.sqrt((cells**2).sum(axis=2, keepdims=True))
    wanted += [10 * cells / (np.sqrt((cells**2).sum()) + 0.5), 2 * cells / (own + 0.5)]
  return np.concatenate([each.ravel() for each in wanted])


def test_histograms_are_beside_all_cells_and_cell_by_cell():
  image = np.random.default_rng(4).uniform(size=[1, 8, 8, 1]).astype(np.float32)
  [got] = histograms(tf.constant(image)).numpy()
  np.testing.assert_allclose(got, of_numpy(image[0, :, :, 0]), atol=1e-5)
  assert len(got) == SIZE


def plain_loop():
  made = untrained("histograms")
  model = made.model["network"]

  def loss(batch):
    return tf.reduce_mean(tf.square(model(batch["image"]) - batch["histograms"]))

  losses = descended(model.trainable_variables, batches_of(made, STEPS, BATCH), loss, RATE)
  return [v.numpy() for v in model.variables], np.mean(losses)


@pytest.fixture(scope="module")
def expected():
  return plain_loop()


def trained(strategy):
  trainer = make_trainer(task(), strategy, batch=BATCH)
  return trainer, trainer.train(tf.constant(STEPS))


@pytest.mark.parametrize("replicas", [1, 2])
def test_ten_steps_are_those_of_a_plain_loop(replicas, expected, mirrored):
  trainer, metrics = trained(mirrored(replicas))
  weights, loss = expected
  assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
  got = trainer.task.model["network"].variables
  for mine, wanted in zip(got, weights, strict=True):
    np.testing.assert_allclose(mine.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_the_histograms_are_of_the_image_before_the_square():
  made = task(rotation=0.0, zoom=1.0, move=0.0)
  image = by_brightness().sources["eval"].fetch(tf.range(4, dtype=tf.int64))["image"]
  batch = {"image": image, "example_id": tf.range(4, dtype=tf.int64)}
  seen = made.preprocess(batch, training=False)
  scaled = image.numpy() / 255.0
  for row, got in enumerate(seen["histograms"].numpy()):
    np.testing.assert_allclose(got, of_numpy(scaled[row, :, :, 0]), atol=1e-4)
  ratio = seen["image"].numpy() / scaled
  for each in ratio:
    factor = each.max()  # outside of the square, the contrast's
    cut = np.isclose(each, 0.0)
    assert 0.5 <= factor <= 1.5
    assert 4 <= cut.sum() <= 9  # at least a corner of 3 x 3 pixels
    np.testing.assert_allclose(each[~cut], factor, rtol=1e-4)


def test_fixmatch_starts_from_all_of_it_but_the_logits(mirrored, tmp_path):
  keras.backend.clear_session(free_memory=False)  # layers are named as in a process of their own
  trainer, _ = trained(mirrored(2))
  learned = trainer.task.model
  path = tf.train.Checkpoint(model=learned).write(str(tmp_path / "checkpoints" / "ckpt-1"))
  keras.backend.clear_session(free_memory=False)
  with mirrored(2).scope():
    model = fixmatch().build_model()
    report = WarmStart(path=path).load(model)
  pairs = zip(model["network"].variables, learned["network"].variables, strict=True)
  equal = [np.array_equal(mine.numpy(), theirs.numpy()) for mine, theirs in pairs]
  assert equal == [True, True, True, True, False, False]  # the last two are the logits'
  assert (report.count(MATCHED), report.count(DIFFERS)) == (4, 2)
