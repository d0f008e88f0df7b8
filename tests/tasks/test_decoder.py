"""The decoder, by hand in NumPy, and Muon on replicas; a document in a packed row is as alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from places import PLACES, strategy_of

from framework.builder import Recipe
from framework.errors import ConfigError
from framework.inputs.datasets import train_dataset
from framework.tasks import decoder
from framework.tasks.language_model import LanguageModel

LAYERS, WIDTH, HEADS, GROUPS, SIZE = 2, 16, 4, 2, 4


@pytest.fixture(scope="module")
def model():
  """With noise on all weights, gains among them."""
  keras.utils.set_random_seed(3)
  made = decoder.decoder(layers=LAYERS, width=WIDTH, heads=HEADS, groups=GROUPS)
  for number, variable in enumerate(made.trainable_variables):
    noise = np.random.default_rng(number).normal(size=variable.shape) * 0.3
    variable.assign(variable + noise)
  return made


def norm(x, gain):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * gain


def by_hand(model, tokens):
  """Float64 logits of one document: each head of queries looks up its group's key and value."""
  length = len(tokens)
  [embedding] = [v.numpy().astype(np.float64) for v in model.variables if "embedding" in v.path]
  angle = np.arange(length)[:, None] * 10_000.0 ** -(np.arange(SIZE // 2) / (SIZE // 2))

  def turned(x):
    pairs = (x[:, : SIZE // 2] + 1j * x[:, SIZE // 2 :]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=1)

  x = embedding[tokens]
  for layer in range(LAYERS):
    block = getattr(model, f"block_{layer}")
    weight = {
      name: getattr(block.attention, name).kernel.numpy().astype(np.float64)
      for name in ("query", "key", "value", "to_output")
    }
    y = norm(x, block.attention_norm.scale.numpy())
    heads = []
    for head in range(HEADS):
      group = head // (HEADS // GROUPS)
      query, key, mixed = (
        y @ weight[name][:, at * SIZE : (at + 1) * SIZE]
        for name, at in (("query", head), ("key", group), ("value", group))
      )
      query = turned(norm(query, block.attention.query_norm.scale.numpy()))
      key = turned(norm(key, block.attention.key_norm.scale.numpy()))
      scores = np.where(np.tri(length, dtype=bool), query @ key.T / np.sqrt(SIZE), -np.inf)
      odds = np.exp(scores - scores.max(axis=1, keepdims=True))
      heads.append(odds / odds.sum(axis=1, keepdims=True) @ mixed)
    x = x + np.concatenate(heads, axis=1) @ weight["to_output"]
    y = norm(x, block.mlp_norm.scale.numpy())
    gate, up, down = (
      getattr(block, name).kernel.numpy().astype(np.float64) for name in ("gate", "up", "down")
    )
    gated = y @ gate
    x = x + (gated / (1 + np.exp(-gated)) * (y @ up)) @ down
  return norm(x, model.norm.scale.numpy()) @ embedding.T[:, :256]


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


@pytest.mark.parametrize(
  ("options", "line"),
  [
    (
      {"width": 18, "heads": 4},
      "decoder.width is 18 and decoder.heads 4; width / heads must be an",
    ),
    ({"groups": 3}, "decoder.groups is 3 and decoder.heads 4; groups must divide heads"),
    ({"groups": 0}, "decoder.groups is 0 and decoder.heads 4; groups must divide heads"),
  ],
)
def test_numbers_that_do_not_divide_are_refused(options, line):
  with pytest.raises(ConfigError, match=f"^{line}"):
    decoder.decoder(**options)


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
