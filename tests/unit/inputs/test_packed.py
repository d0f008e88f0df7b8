"""Packed documents: each once, none seen by another, trained as each in a row of its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from input_cases import arrays, numbered, one_line_error, train_ids
from packed_texts import NextToken
from places import PLACES, strategy_of

from loopwright import ArraySource, Mixture, Packed, attention_mask
from loopwright.inputs.datasets import eval_dataset, train_dataset
from loopwright.runs.builder import Recipe
from loopwright.tools.ledger import __main__
from loopwright.tools.ledger.recorder import Recorder

LENGTH = 16
RNG = np.random.default_rng(2)
LENGTHS = RNG.integers(1, LENGTH + 1, 60)
TOKENS = np.arange(1, LENGTHS.sum() + 1)
DOCUMENTS = np.split(TOKENS, np.cumsum(LENGTHS)[:-1])


def packed(lengths=LENGTHS, length=LENGTH, **options):
  """Documents whose tokens are numbered through from 1."""
  tokens = ArraySource(features={"token": np.arange(1, sum(lengths) + 1)})
  return Packed(tokens, lengths=lengths, length=length, **options)


def rows_of(source):
  [rows] = arrays(eval_dataset(source, global_batch_size=source.num_examples))
  return rows


def pieces(rows):
  """The tokens of each segment of each row, after checking where they lie."""
  found = []
  for token, segment, position in zip(
    rows["token"], rows["segment"], rows["position"], strict=True
  ):
    used = int((segment > 0).sum())
    assert (np.diff(segment[:used]) >= 0).all()
    assert (token[used:] == 0).all()
    assert (position[used:] == 0).all()
    assert segment[0] == 1
    for number in range(1, segment.max() + 1):
      here = segment == number
      np.testing.assert_array_equal(position[here], np.arange(here.sum()))
      found.append(token[here].tolist())
  return found


@pytest.mark.parametrize("packing", ["best_fit", "in_order"])
def test_each_document_is_whole_and_once(packing):
  source = packed(packing=packing)
  rows = rows_of(source)
  assert sorted(pieces(rows)) == [document.tolist() for document in DOCUMENTS]
  assert rows["token"].shape == (source.num_examples, LENGTH)
  assert source.padding == pytest.approx((rows["segment"] == 0).mean())
  if packing == "in_order":
    assert pieces(rows) == [document.tolist() for document in DOCUMENTS]
  else:
    assert source.num_examples == -(-LENGTHS.sum() // LENGTH)  # not one row more than needed


@pytest.mark.parametrize("packing", ["best_fit", "in_order"])
def test_long_documents_are_cut_only_if_asked(packing):
  lengths = [3, 40, 5, 16, 1]
  with one_line_error("document 1 has 40 tokens, above Packed.length, 16; raise it, leave"):
    packed(lengths, packing=packing)
  source = packed(lengths, packing=packing, cut=True)
  assert source.num_examples == 5  # 65 tokens
  found = pieces(rows_of(source))
  assert sorted(token for piece in found for token in piece) == list(range(1, 66))
  if packing == "in_order":
    assert [len(piece) for piece in found] == [3, 13, 16, 11, 5, 16, 1]
  else:
    assert sorted(map(len, found)) == [1, 3, 5, 8, 16, 16, 16]


def test_the_window_keeps_documents_together():
  first, second = packed(LENGTHS, window=30), packed(LENGTHS)
  assert first.num_examples >= second.num_examples
  documents = np.repeat(np.arange(60), LENGTHS)
  for row in rows_of(first)["token"]:
    assert len({documents[token - 1] // 30 for token in row if token}) == 1


def test_order_resume_and_workers_are_those_of_any_source():
  source, options = packed(), {"global_batch_size": 4, "seed": 3}
  ids = train_ids(source, 30, **options)
  assert sorted(ids[: source.num_examples]) == list(range(source.num_examples))
  np.testing.assert_array_equal(train_ids(source, 5, position=20, **options), ids[20:40])
  whole = arrays(train_dataset(source, pad_multiple=6, **options), 5)
  shares = [
    arrays(train_dataset(source, pad_multiple=6, rows=range(i, i + 3), **options), 5)
    for i in (0, 3)
  ]
  for batch, *parts in zip(whole, *shares, strict=True):
    for name, value in batch.items():
      np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), value)


def test_packings_are_parts_of_a_mixture_and_told_apart():
  both = Mixture(parts={"a": packed(), "b": packed(LENGTHS[::-1])}, weights={"a": 2, "b": 1})
  batch = arrays(train_dataset(both, global_batch_size=6), 1)[0]
  assert batch["token"].shape == (6, LENGTH)
  digests = {packed(packing=each).fingerprint() for each in ("best_fit", "in_order")}
  assert len(digests) == 2
  assert packed().fingerprint() in digests


def test_the_mask_is_that_by_hand():
  segment = tf.constant([[1, 1, 2, 0], [1, 2, 2, 2]])
  causal, both_ways = (attention_mask(segment, causal=each).numpy() for each in (True, False))
  for row, to, of in np.ndindex(2, 4, 4):
    same = segment[row, to] == segment[row, of]
    assert causal[row, to, of] == (same and of <= to)
    assert both_ways[row, to, of] == same


def test_mistakes():
  with one_line_error("Packed got a list; it must be a Source, each example a token"):
    Packed([1], lengths=[1], length=4)
  with one_line_error("Packed.lengths adds up to 3, but there are 4 tokens"):
    Packed(numbered(4), lengths=[1, 2], length=4)
  with one_line_error("Packed.lengths must be whole numbers of at least 1"):
    Packed(numbered(4), lengths=[4, 0], length=4)
  with one_line_error("unknown Packed.packing 'bestfit'; it must be one of best_fit, in_order"):
    Packed(numbered(4), lengths=[4], length=4, packing="bestfit")


# ---- Training: attention of Keras, packed against each document in a row of its own ----

BATCH, STEPS, KINDS = 5, 10, 11


def network():
  """Predicts a number from the document up to each token."""
  initializer = keras.initializers.RandomNormal(stddev=0.3, seed=1)
  keras.utils.set_random_seed(4)
  token, position = keras.Input([None], dtype="int32"), keras.Input([None], dtype="int32")
  mask = keras.Input([None, None], dtype="bool")
  x = keras.layers.Embedding(KINDS, 8, embeddings_initializer=initializer)(token)
  x = x + keras.layers.Embedding(LENGTH, 8, embeddings_initializer=initializer)(position)
  x = x + keras.layers.MultiHeadAttention(2, 4, use_bias=False)(x, x, attention_mask=mask)
  return keras.Model([token, position, mask], keras.layers.Dense(KINDS)(x)[..., :])


class Numbered(NextToken):
  """Tokens numbered over all documents, each to be told from those before it."""

  def build_model(self):
    return network()

  def source(self, split):
    tokens = TOKENS * 7 % KINDS
    features = {"token": tokens.astype("int32"), "target": np.roll(tokens, -1).astype("int32")}
    return Packed(ArraySource(features=features), lengths=LENGTHS, length=LENGTH)


def unpacked_training():
  """A plain loop over batches of the same documents, each in a row of its own."""
  model, optimizer = network(), keras.optimizers.SGD(0.3, momentum=0.9)
  source = Numbered().source("train")
  batches = arrays(train_dataset(source, global_batch_size=BATCH, seed=3), STEPS)
  losses = []
  for batch in batches:
    rows = [
      (row, batch["segment"][row] == number)
      for row in range(BATCH) for number in range(1, batch["segment"][row].max() + 1)
    ]  # fmt: skip
    alone = {name: np.zeros([len(rows), LENGTH], np.int32) for name in ("token", "target")}
    real = np.zeros([len(rows), LENGTH], np.float32)
    for place, (row, here) in enumerate(rows):
      real[place, : here.sum()] = 1
      for name, value in alone.items():
        value[place, : here.sum()] = batch[name][row][here]
    position = np.tile(np.arange(LENGTH), [len(rows), 1])
    mask = np.tile(np.tri(LENGTH, dtype=bool), [len(rows), 1, 1])
    with tf.GradientTape() as tape:
      logits = model([alone["token"], position, mask])
      each = tf.nn.sparse_softmax_cross_entropy_with_logits(alone["target"], logits)
      loss = tf.reduce_sum(each * real) / real.sum()
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply([tf.convert_to_tensor(each) for each in gradients], model.trainable_variables)
    losses.append(float(loss))
  return losses, model.get_weights()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fast(place=["mirrored x2"])
def test_packed_training_equals_unpacked_training(place, mirrored, tmp_path):
  """5 rows are padded to 6 on 2 and 3 replicas, and replicas have unequal numbers of tokens."""
  strategy = strategy_of(place, mirrored)
  recipe = Recipe(
    optimizer=lambda: keras.optimizers.SGD(0.3, momentum=0.9), global_batch_size=BATCH, seed=3
  )
  recorder = Recorder(model_dir=str(tmp_path), strategy=strategy)
  trainer = recipe.trainer(Numbered(), strategy, observers=[recorder])
  losses = [trainer.train(tf.constant(1))["loss"] for _ in range(STEPS)]
  expected_losses, expected = unpacked_training()
  assert trainer.traces == 1
  assert losses == pytest.approx(expected_losses, rel=1e-5)
  assert losses[-1] < 0.9 * losses[0]
  for one, other in zip(trainer.task.model.get_weights(), expected, strict=True):
    assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()
  assert __main__.main([str(tmp_path)]) == 0
