"""Sequences as somebody writes them who does not know the framework, then right ones.

`DEFECTS` (name -> cause, line) and `RIGHT` say what the group "sequences" must find.
"""

import keras
import numpy as np
import tensorflow as tf

from defects.small import line_of
from loopwright import ArraySource, Loss, Mixture, Packed, Task, attention_mask

KINDS, LENGTH, WIDTH, DOCUMENTS = 29, 24, 16, 160
DEFECTS, RIGHT = {}, {}
APART, LATER, LABELS = "documents see one another", "a token sees later ones", "label shifted twice"
PADDING, PLACES = "padding enters the mean", "positions do not restart"


def defect(cause, words):
  """Registers a task: the cause that names it, words of the line."""

  def register(task):
    DEFECTS[task.__name__] = cause, line_of(task, words)
    return task

  return register


def right(task):
  RIGHT[task.__name__] = task
  return task


def texts(split, *, count=DOCUMENTS):
  """Documents of 4 to 13 tokens above 0; each token depends on the one before it."""
  random = np.random.default_rng(0 if split == "train" else 1)
  documents = []
  for size in random.integers(4, 14, count):
    tokens = [random.integers(1, KINDS)]
    for _ in range(size - 1):
      tokens.append(1 + (3 * tokens[-1] + random.integers(0, 9)) % (KINDS - 1))
    documents.append(np.array(tokens, np.int32))
  return documents


def shifted(documents):
  """Inputs and targets of all documents, shifted within each, and their lengths."""
  features = {
    "token": np.concatenate([each[:-1] for each in documents]),
    "target": np.concatenate([each[1:] for each in documents]),
  }
  return features, [len(each) - 1 for each in documents]


def by_hand(documents):
  """Rows as a collator makes them, with labels of -100 in padding."""
  features, lengths = shifted(documents)
  source = Packed(ArraySource(features=features), lengths=lengths, length=LENGTH)
  fetched = source.fetch(tf.range(source.num_examples, dtype=tf.int64))
  token, target, segment, position = (
    fetched[name].numpy() for name in ("token", "target", "segment", "position")
  )
  labels = np.where(segment > 0, target, -100)
  return {"tokens": token, "labels": labels, "segment_ids": segment, "position_ids": position}


def network(mixing=None, outputs=KINDS):
  """Attention of Keras between learned embeddings and logits; or another layer that mixes."""
  token, position = (keras.Input([None], dtype="int32", name=n) for n in ("token", "position"))
  mask = keras.Input([None, None], dtype="bool", name="mask")
  x = keras.layers.Embedding(KINDS, WIDTH)(token) + keras.layers.Embedding(64, WIDTH)(position)
  if mixing is None:
    y = keras.layers.MultiHeadAttention(2, 5)(x, x, attention_mask=mask)
  else:
    y = mixing(x)
  return keras.Model([token, position, mask], keras.layers.Dense(outputs)(x + y))


@right
class Texts(Task):
  """Packed documents, attention within each, sums over tokens."""

  def build_model(self):
    return network()

  def source(self, split):
    features, lengths = shifted(texts(split))
    return Packed(ArraySource(features=features), lengths=lengths, length=LENGTH)

  def mask(self, batch):
    return attention_mask(batch["segment"])

  def positions(self, batch):
    return batch["position"]

  def forward(self, batch, training):
    inputs = [batch["token"], self.positions(batch), self.mask(batch)]
    return self.model(inputs, training=training)

  def real(self, batch):
    return tf.cast(batch["segment"] > 0, tf.float32) * batch["weight"][:, tf.newaxis]

  def losses(self, outputs, batch):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["target"], outputs)

  def loss(self, outputs, batch):
    losses, real = self.losses(outputs, batch), self.real(batch)
    return Loss(tf.reduce_sum(losses * real), tf.reduce_sum(real))

  def metrics(self, outputs, batch):
    hits = tf.argmax(outputs, axis=-1, output_type=tf.int32) == batch["target"]
    real = self.real(batch)
    return {"accuracy": (tf.reduce_sum(tf.cast(hits, tf.float32) * real), tf.reduce_sum(real))}


# ---- Masks ----


@defect(APART, "tf.repeat(lower")
class CausalAlone(Texts):
  """nanoVLM 204, transformers 25452: only the causal mask."""

  def mask(self, batch):
    size = tf.shape(batch["token"])[1]
    lower = tf.linalg.band_part(tf.ones([size, size]), -1, 0) > 0
    return tf.repeat(lower[tf.newaxis], tf.shape(batch["token"])[0], axis=0)


@defect(APART, "attention_mask(before)")
class BoundaryOffByOne(Texts):
  """A document's first token counts to the one before."""

  def mask(self, batch):
    begins = tf.cast(batch["position"] == 0, tf.int32)
    before = tf.cumsum(begins, axis=1, exclusive=True)
    return attention_mask(before)


@defect(LATER, "causal=False")
class NotCausal(Texts):
  def mask(self, batch):
    return attention_mask(batch["segment"], causal=False)


@defect(LATER, "order + 1")
class CausalOffByOne(Texts):
  def mask(self, batch):
    order = tf.range(LENGTH)
    segment = batch["segment"]
    same = segment[:, :, tf.newaxis] == segment[:, tf.newaxis, :]
    return same & (order[:, tf.newaxis] >= order - 1) & (order < order + 1)


@defect(APART, "order[:, tf.newaxis] > order")
class WithoutItself(Texts):
  """The first token of a document sees nothing, and so, by softmax, everything."""

  def mask(self, batch):
    order, segment = tf.range(LENGTH), batch["segment"]
    same = segment[:, :, tf.newaxis] == segment[:, tf.newaxis, :]
    return same & (order[:, tf.newaxis] > order)


@defect(APART, "self.model(")
class StateGoesOn(Texts):
  """A recurrent layer over packed rows, whose state is not reset."""

  def build_model(self):
    return network(keras.layers.GRU(WIDTH, return_sequences=True))


class Alone(Texts):
  """One document a row, with a length."""

  mixing = None

  def build_model(self):
    return network(self.mixing and self.mixing())

  def source(self, split):
    documents = texts(split)
    size = np.array([len(each) - 1 for each in documents], np.int32)
    rows = {n: np.zeros([len(documents), 13], np.int32) for n in ("token", "target")}
    for row, document in enumerate(documents):
      rows["token"][row, : size[row]] = document[:-1]
      rows["target"][row, : size[row]] = document[1:]
    return ArraySource(features={**rows, "size": size})

  def positions(self, batch):
    return tf.broadcast_to(tf.range(13), tf.shape(batch["token"]))

  def mask(self, batch):
    return tf.cast(tf.ones_like(batch["token"])[:, :, None] * batch["token"][:, None], tf.bool)

  def real(self, batch):
    return tf.sequence_mask(batch["size"], 13, tf.float32) * batch["weight"][:, tf.newaxis]


@defect(LATER, "self.model(")
class SameConvolution(Alone):
  def mixing(self):
    return keras.layers.Conv1D(WIDTH, 3, padding="same", activation="relu")


# ---- Positions ----


@defect(PLACES, "def forward")
class PositionsGoOn(Texts):
  def positions(self, batch):
    return tf.broadcast_to(tf.range(LENGTH), tf.shape(batch["token"]))


class ByHand(Texts):
  """Packed by the task's own collator."""

  def source(self, split):
    return ArraySource(features=self.rows(by_hand(texts(split))))

  def rows(self, rows):
    return rows

  def forward(self, batch, training):
    mask = attention_mask(batch["segment_ids"])
    return self.model([batch["tokens"], batch["position_ids"], mask], training=training)

  def real(self, batch):
    return tf.cast(batch["labels"] >= 0, tf.float32) * batch["weight"][:, tf.newaxis]

  def losses(self, outputs, batch):
    labels = tf.maximum(batch["labels"], 0)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)

  def metrics(self, outputs, batch):
    return {}


@defect(PLACES, "def source")
class CollatedPositions(ByHand):
  """The collator numbers the row through."""

  def rows(self, rows):
    return {**rows, "position_ids": np.arange(LENGTH, dtype=np.int32) + 0 * rows["position_ids"]}


# ---- Labels ----


@defect(LABELS, "Loss(")
class ShiftedTwice(Texts):
  """The targets are shifted already; as in a loss that was made for labels = tokens."""

  def loss(self, outputs, batch):
    real = self.real(batch)[:, 1:]
    logits, target = outputs[:, :-1], batch["target"][:, 1:]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
    same = tf.cast(batch["segment"][:, 1:] == batch["segment"][:, :-1], tf.float32)
    return Loss(tf.reduce_sum(losses * real * same), tf.reduce_sum(real * same))


@defect("label already seen", "Loss(")
class NeverShifted(Texts):
  def losses(self, outputs, batch):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["token"], outputs)


@defect("label of the next document", "def source")
class RolledOverAll(Texts):
  """All documents are shifted as one, and then packed."""

  def source(self, split):
    documents = texts(split)
    tokens = np.concatenate(documents)
    features = {"token": tokens, "target": np.roll(tokens, -1)}
    lengths = [len(each) for each in documents]
    return Packed(
      ArraySource(features=features), lengths=lengths, length=LENGTH, packing="in_order"
    )


# ---- Padding and sums ----


@defect(PADDING, "tf.reduce_sum(losses)")
class PaddingCounts(Texts):
  def loss(self, outputs, batch):
    losses = self.losses(outputs, batch) * batch["weight"][:, tf.newaxis]
    return Loss(tf.reduce_sum(losses), tf.reduce_sum(batch["weight"]) * LENGTH)


@defect(PADDING, "Loss(")
class PaddingInMean(Texts):
  """The sum is of real tokens, the mean over all places."""

  def loss(self, outputs, batch):
    losses = self.losses(outputs, batch) * self.real(batch)
    return Loss(tf.reduce_sum(losses), tf.reduce_sum(batch["weight"]) * LENGTH)


@defect(PADDING, '"accuracy"')
class MetricOverPadding(Texts):
  def metrics(self, outputs, batch):
    hits = tf.argmax(outputs, axis=-1, output_type=tf.int32) == batch["target"]
    each = tf.reduce_mean(tf.cast(hits, tf.float32), axis=1)
    return {"accuracy": (tf.reduce_sum(each * batch["weight"]), tf.reduce_sum(batch["weight"]))}


@right
class Rows(Texts):
  """Rows cut from a stream of tokens, without documents, as GPT-2's; labels are made in loss()."""

  def part(self, split, seed=0):
    tokens = np.concatenate(texts(split, count=300 + 60 * seed))[7 * seed :]
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape([-1, LENGTH])[:90]

  def source(self, split):
    return ArraySource(features={"tokens": self.part(split)})

  def forward(self, batch, training):
    order = tf.range(LENGTH)
    mask = tf.repeat((order[:, None] >= order)[None], tf.shape(batch["tokens"])[0], axis=0)
    position = tf.broadcast_to(order, tf.shape(batch["tokens"]))
    return self.model([batch["tokens"], position, mask], training=training)

  def loss(self, outputs, batch):
    labels = batch["tokens"][:, 1:]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs[:, :-1])
    return Loss.from_examples(tf.reduce_mean(losses, axis=1), batch["weight"])

  def metrics(self, outputs, batch):
    return {}


# ---- Right ----


@right
class RowMeans(Texts):
  """The mean of each row's own tokens, and then over rows."""

  def loss(self, outputs, batch):
    real = tf.cast(batch["segment"] > 0, tf.float32)
    each = tf.reduce_sum(self.losses(outputs, batch) * real, axis=1) / tf.reduce_sum(real, axis=1)
    return Loss.from_examples(each, batch["weight"])


@right
class SumOfEach(Texts):
  """The likelihood of whole rows, over the number of rows."""

  def loss(self, outputs, batch):
    each = tf.reduce_sum(self.losses(outputs, batch) * self.real(batch), axis=1)
    return Loss(tf.reduce_sum(each), tf.reduce_sum(batch["weight"]))


@right
class Collated(ByHand):
  """Its own collator, labels of -100 where nothing is predicted."""


@right
class CompletionsOnly(ByHand):
  """The first two tokens of each document are a prompt, which is not predicted."""

  def rows(self, rows):
    return {**rows, "labels": np.where(rows["position_ids"] < 2, -100, rows["labels"])}


@right
class DistancesAlone(Texts):
  """Positions of the row, of which only distances count: a slope of attention (ALiBi)."""

  def build_model(self):
    layers = keras.layers
    parts = {"embed": layers.Embedding(KINDS, WIDTH), "q": layers.Dense(WIDTH)}
    parts |= {"k": layers.Dense(WIDTH), "v": layers.Dense(WIDTH), "out": layers.Dense(KINDS)}
    for name, layer in parts.items():
      layer.build([None, None] if name == "embed" else [None, None, WIDTH])
    return parts

  def forward(self, batch, training):
    parts, place = self.model, tf.range(LENGTH, dtype=tf.float32)
    x = parts["embed"](batch["token"])
    scores = tf.matmul(parts["q"](x), parts["k"](x), transpose_b=True) / WIDTH**0.5
    scores -= 0.3 * tf.abs(place[:, None] - place)
    scores = tf.where(attention_mask(batch["segment"]), scores, -1e9)
    return parts["out"](x + tf.matmul(tf.nn.softmax(scores), parts["v"](x)))


@right
class EndOfText(Texts):
  """Documents begin with one token, which the last one of the document before predicts."""

  def source(self, split):
    documents = [np.concatenate([[KINDS - 1], each % (KINDS - 1)]) for each in texts(split)]
    tokens = np.concatenate(documents).astype(np.int32)
    target = np.append(tokens[1:], np.int32(KINDS - 1))
    lengths = [len(each) for each in documents]
    return Packed(
      ArraySource(features={"token": tokens, "target": target}), lengths=lengths, length=LENGTH
    )


@right
class Masked(Texts):
  """Predicts hidden tokens, from both sides."""

  def mask(self, batch):
    return attention_mask(batch["segment"], causal=False)

  def source(self, split):
    features, lengths = shifted(texts(split))
    target = features["token"]
    hidden = np.arange(len(target)) % 5 == 2
    features = {"token": np.where(hidden, 0, target), "target": target, "hidden": hidden}
    features["hidden"] = hidden.astype(np.float32)
    return Packed(ArraySource(features=features), lengths=lengths, length=LENGTH)

  def real(self, batch):
    return super().real(batch) * batch["hidden"]


@right
class Autoencoder(Texts):
  """Reproduces each token, from all of its document."""

  def mask(self, batch):
    return attention_mask(batch["segment"], causal=False)

  def losses(self, outputs, batch):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["token"], outputs)


@right
class Prefix(Texts):
  """Sees the first three tokens of a document from all of it, and predicts none of them."""

  def mask(self, batch):
    both = attention_mask(batch["segment"], causal=False)
    seen = batch["position"][:, tf.newaxis, :] < 3
    return attention_mask(batch["segment"]) | (both & seen)

  def real(self, batch):
    return super().real(batch) * tf.cast(batch["position"] >= 3, tf.float32)


@right
class Tagger(Alone):
  """A label of each token that is no token; sees both sides, but no padding."""

  def build_model(self):
    return network(outputs=5)

  def mask(self, batch):
    real = tf.sequence_mask(batch["size"], 13)
    return tf.repeat(real[:, tf.newaxis], 13, axis=1)

  def losses(self, outputs, batch):
    label = (batch["token"] + batch["target"]) % 5
    return tf.nn.sparse_softmax_cross_entropy_with_logits(label, outputs)


@right
class Forwards(Alone):
  """A recurrent layer over single documents."""

  def mixing(self):
    return keras.layers.GRU(WIDTH, return_sequences=True)


@right
class CausalConvolution(Alone):
  def mixing(self):
    return keras.layers.Conv1D(WIDTH, 3, padding="causal", activation="relu")


@right
class SmoothMixture(Texts):
  """Two packed corpora, smoothed labels."""

  def source(self, split):
    parts = {}
    for name, documents in (("first", texts(split)), ("second", texts(split)[::2])):
      features, lengths = shifted([each[::-1] if name == "second" else each for each in documents])
      parts[name] = Packed(ArraySource(features=features), lengths=lengths, length=LENGTH)
    return Mixture(parts=parts, weights={"first": 2, "second": 1})

  def losses(self, outputs, batch):
    target = 0.9 * tf.one_hot(batch["target"], KINDS) + 0.1 / KINDS
    return tf.nn.softmax_cross_entropy_with_logits(target, outputs)
