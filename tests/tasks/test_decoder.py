"""The decoder, by hand in NumPy, and Muon on replicas; a document in a packed row is as alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from decoder_by_hand import by_hand, with_noise, written_by_hand
from places import PLACES, strategy_of

from loopwright.inputs.datasets import train_dataset
from loopwright.runs.builder import Recipe
from loopwright.tasks import decoder, generation
from loopwright.tasks.language_model import LanguageModel

LAYERS, WIDTH, HEADS, GROUPS = 2, 16, 4, 2


@pytest.fixture(scope="module")
def model():
  """With noise on all weights, gains among them."""
  keras.utils.set_random_seed(3)
  made = decoder.decoder(layers=LAYERS, width=WIDTH, heads=HEADS, groups=GROUPS)
  with_noise(made)
  return made


def test_the_network_is_that_by_hand_and_a_packed_document_is_the_document_alone(model):
  random = np.random.default_rng(1)
  documents = [random.integers(0, 257, size) for size in (5, 1, 7)]
  batch = {
    "token": tf.constant([np.concatenate(documents)], tf.int32),
    "position": tf.constant([[at for each in documents for at in range(len(each))]], tf.int32),
  }
  logits = model(batch).numpy()[0]
  expected = np.concatenate([by_hand(model, each) for each in documents])
  assert expected.std() > 0.5
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("size", [1, 5])
def test_what_is_written_with_a_cache_and_without_is_that_by_hand(size, model):
  prompts = np.random.default_rng(2).integers(0, 257, [3, size])
  expected, logits = written_by_hand(model, prompts, 6)
  tolerance = 1e-4 * np.abs(logits).max()
  given = tf.constant(prompts, tf.int32)
  (cached, by_cache), (anew, without) = (
    generation.continued(model, given, 6, cached=each) for each in (True, False)
  )
  np.testing.assert_array_equal(cached, expected)
  np.testing.assert_array_equal(anew, expected)
  np.testing.assert_allclose(by_cache, logits, rtol=0, atol=tolerance)
  np.testing.assert_allclose(by_cache, without, rtol=0, atol=1e-5 * np.abs(logits).max())


class TwoLetters:
  """Documents of "a" and "b"; rows of 12 bytes begin at 0, 12, ... of all of them together."""

  sizes = (30, 5, 21, 12, 40)

  def documents(self, split):
    del split
    random = np.random.default_rng(5)
    return [bytes(random.integers(97, 99, size).tolist()) for size in self.sizes]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fast(place=["mirrored x2"])
def test_each_replica_continues_its_part(place, mirrored):
  """Rows that several documents share are left out: 6 of 9 stay, in batches of 4 and padding."""
  keras.utils.set_random_seed(3)
  task = generation.Continued(
    corpus=TwoLetters(), context=12, continued_bytes=2,
    network=lambda: decoder.decoder(layers=1, width=WIDTH, heads=HEADS, groups=GROUPS),
  )  # fmt: skip
  recipe = Recipe(optimizer=keras.optimizers.SGD, global_batch_size=3, eval_batch_size=4)
  trainer = recipe.trainer(task, strategy_of(place, mirrored))
  with_noise(task.model)
  [embedding] = [v for v in task.model.variables if "embedding" in v.path]
  rows = embedding.numpy()
  rows[98] = -5 * rows[97]
  rows[97] *= 5  # so that the likeliest byte is "a" or "b"
  embedding.assign(rows)
  found = recipe.evaluator(trainer).evaluate()

  text = np.frombuffer(b"".join(TwoLetters().documents("eval")), np.uint8)
  begins = {0, *np.cumsum(TwoLetters.sizes).tolist()}
  whole = [at for at in range(0, 108, 12) if not begins & set(range(at + 1, at + 12))]
  assert len(whole) == 6
  prompts = [[decoder.START if at in begins else text[at - 1], *text[at : at + 10]] for at in whole]
  written, _ = written_by_hand(task.model, prompts, 2)
  right = written == [text[at + 10 : at + 12] for at in whole]
  assert 0 < right.all(axis=1).mean() < right.mean() < 1
  assert found["byte_accuracy"] == pytest.approx(right.mean(), rel=1e-6)
  assert found["exact"] == pytest.approx(right.all(axis=1).mean(), rel=1e-6)


class Documents:
  """In the place of a corpus."""

  def documents(self, split):
    random = np.random.default_rng(split == "eval")
    return [bytes(random.integers(97, 105, size).tolist()) for size in random.integers(3, 12, 30)]


def make_task():
  keras.utils.set_random_seed(3)
  return LanguageModel(
    corpus=Documents(), packing="best_fit", context=16,
    network=lambda: decoder.decoder(layers=1, width=WIDTH, heads=HEADS, groups=GROUPS),
  )  # fmt: skip


def muon():
  return keras.optimizers.Muon(0.02, weight_decay=0.1, adam_weight_decay=0.0)


def plain_loop(steps):
  """Muon of Keras on whole batches."""
  task, optimizer = make_task(), muon()
  model = task.build_model()
  batches = train_dataset(
    task.source("train"), global_batch_size=5, seed=1,
    preprocess=lambda batch, training: task.preprocess(batch, training),
  )  # fmt: skip
  for batch in batches.take(steps):
    with tf.GradientTape() as tape:
      logits = model({name: batch[name] for name in ("token", "position")})
      real = tf.cast(batch["target"] >= 0, tf.float32)
      target = tf.maximum(batch["target"], 0)
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
      loss = tf.reduce_sum(losses * real) / tf.reduce_sum(real)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply([tf.convert_to_tensor(each) for each in gradients], model.trainable_variables)
  return model.get_weights()


@pytest.mark.parametrize("place", [each for each in PLACES if "central" not in each])
@pytest.mark.fast(place=["mirrored x2"])
def test_muon_on_replicas_is_that_of_a_plain_loop(place, mirrored):
  recipe = Recipe(optimizer=muon, global_batch_size=5, seed=1)
  trainer = recipe.trainer(make_task(), strategy_of(place, mirrored))
  trainer.train(tf.constant(5))
  for one, other in zip(trainer.task.model.get_weights(), plain_loop(5), strict=True):
    assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max()
