"""The language model: packing, masks, the network against NumPy, N replicas as one, sampling."""

import collections
import math
import os
import subprocess
import sys
from pathlib import Path

import gin
import keras
import numpy as np
import pytest
import runs
import tensorflow as tf
from properties import softmax
from runs import make_evaluator, records

import launch
import loopwright
from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.optimizers import adapters, groups
from loopwright.tasks import language_model
from loopwright.tasks.language_model import (
  NO_TARGET,
  START,
  LanguageModel,
  TextFiles,
  packed,
  transformer,
)
from loopwright.tools.exports import export

ROOT = Path(launch.__file__).parent
CONTEXT, LAYERS, WIDTH, HEADS = 12, 2, 16, 2


def random_documents(*lengths):
  rng = np.random.default_rng(3)
  return [rng.integers(0, 256, length).astype(np.uint8).tobytes() for length in lengths]


class Documents(TextFiles):
  """A corpus in memory, the same for both splits."""

  def __init__(self, documents):
    self._documents = documents

  def documents(self, split):
    return self._documents


def network(**options):
  return transformer(**{"layers": LAYERS, "width": WIDTH, "heads": HEADS, **options})


def make_task(documents, *, context=CONTEXT, **options):
  """A small one."""
  corpus = Documents(documents)
  return LanguageModel(corpus=corpus, network=lambda: network(**options), context=context)


def with_model(task):
  """Always with the same weights, gains other than 1 among them."""
  keras.utils.set_random_seed(5)
  task.model = task.build_model()
  for number, variable in enumerate(task.model.trainable_variables):
    noise = np.random.default_rng(number).normal(size=variable.shape) * 0.3
    variable.assign(variable + noise)
  return task


def batch_of(task):
  """All packed sequences as one batch."""
  batch = {name: tf.constant(each) for name, each in task.source("train")._arrays.items()}
  batch["weight"] = tf.ones([len(batch["token"])])
  return task.preprocess(batch, training=False)


def logits_alone(task, document):
  """The logits of a document by itself, without any packing: START, then its bytes."""
  token = np.array([[START, *document[:-1]]], np.int32)
  position = np.arange(len(document))[None].astype(np.int32)
  return task.model({"token": token, "position": position}).numpy()[0]


# ---- Packing ----


def packed_by_hand(documents, context):
  """The same, byte by byte."""
  rows = []
  for number, document in enumerate(documents):
    for place, byte in enumerate(document):
      if len(rows) % context == 0 or place == 0:
        start = len(rows)
      token = document[place - 1] if place else START
      rows.append((token, len(rows) - start, byte, (number, place)))
  while len(rows) % context:
    rows.append((START, 0, NO_TARGET, None))
  return rows


@pytest.mark.parametrize("context", [1, 4, 12, 100])
def test_packing_is_that_by_hand(context):
  documents = random_documents(3, 1, 12, 30, 1, 1, 7)
  made, expected = packed(documents, context), packed_by_hand(documents, context)
  for column, name in enumerate(("token", "position", "target")):
    np.testing.assert_array_equal(made[name].ravel(), [row[column] for row in expected])
    assert made[name].shape == (-(-55 // context), context)
  assert made["token"].dtype == np.uint16
  assert made["target"].dtype == np.int16


def test_an_epoch_has_each_byte_as_a_target_once():
  documents = random_documents(5, 40, 1, 17, 26)
  task = make_task(documents)
  dataset = datasets.train_dataset(
    task.source("train"), global_batch_size=4, pad_multiple=3, preprocess=task.preprocess
  )
  size = task.source("train").num_examples
  assert size % 4 == 0
  seen = collections.Counter()
  for batch in dataset.take(size // 4).as_numpy_iterator():
    counted = (batch["target"] != NO_TARGET) & (batch["weight"][:, None] > 0)
    seen.update(batch["target"][counted].tolist())
  assert seen == collections.Counter(b"".join(documents))


# ---- The network ----


def norm(x, scale):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def by_hand(weights, token, position):
  """The network in NumPy, float64, document by document, head by head -> logits."""
  embedding = weights["embedding/embeddings"]
  x = embedding[token]
  size = WIDTH // HEADS
  layers = {int(name.split("/")[0]) for name in weights if name[0].isdigit()}
  for layer in sorted(layers):
    w = {name.split("/", 1)[1]: v for name, v in weights.items() if name.startswith(f"{layer}/")}
    normed = norm(x, w["attention_norm/scale"])
    parts = (normed @ w["query_key_value/kernel"]).reshape([*token.shape, 3, HEADS, size])
    turn = np.exp(1j * position[:, :, None] * 10_000.0 ** (-np.arange(size // 2) / (size // 2)))
    mixed = np.zeros([*token.shape, HEADS, size])
    for n, to, head in np.ndindex(*token.shape, HEADS):
      seen = slice(to - position[n, to], to + 1)
      pairs = parts[n, :, :2, head, : size // 2] + 1j * parts[n, :, :2, head, size // 2 :]
      pairs = pairs * turn[n][:, None]
      scores = np.real(pairs[seen, 1] @ np.conj(pairs[to, 0])) / np.sqrt(size)
      mixed[n, to, head] = softmax(scores) @ parts[n, seen, 2, head]
    x = x + mixed.reshape([*token.shape, WIDTH]) @ w["output/kernel"]
    normed = norm(x, w["mlp_norm/scale"])
    gate = normed @ w["gate/kernel"]
    x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up/kernel"])) @ w["down/kernel"]
  return (norm(x, weights["norm/scale"]) @ embedding.T)[..., :256]


def weights_of(model):
  """Name -> value, float64; "0/gate/kernel" is in the first block."""
  values = {"norm/scale": model.norm.scale, "embedding/embeddings": model.embedding.embeddings}
  for layer, block in enumerate(model.blocks):
    values |= {
      f"{layer}/attention_norm/scale": block.attention_norm.scale,
      f"{layer}/query_key_value/kernel": block.attention.project.kernel,
      f"{layer}/output/kernel": block.attention.output_layer.kernel,
      f"{layer}/mlp_norm/scale": block.mlp_norm.scale,
      f"{layer}/gate/kernel": block.gate.kernel,
      f"{layer}/up/kernel": block.up.kernel,
      f"{layer}/down/kernel": block.down.kernel,
    }
  assert len(values) == len(model.trainable_variables)
  return {name: variable.numpy().astype(np.float64) for name, variable in values.items()}


def test_the_network_is_that_by_hand(policy):
  policy("float64")
  task = with_model(make_task(random_documents(4, 15, 9, 3)))
  batch = batch_of(task)
  expected = by_hand(weights_of(task.model), batch["token"].numpy(), batch["position"].numpy())
  logits = task.forward(batch, training=False)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-6)
  assert expected.std() > 0.5


def mean_loss(logits, target):
  log_odds = np.log(softmax(logits))
  chosen = np.take_along_axis(log_odds, np.maximum(target, 0)[..., None], axis=-1)[..., 0]
  return -chosen[target != NO_TARGET].mean()


def test_the_loss_at_the_start_is_about_that_of_guessing():
  task = make_task(random_documents(200))
  keras.utils.set_random_seed(0)
  task.model = task.build_model()
  loss = task.loss(task.forward(batch_of(task), training=False), batch_of(task))
  assert float(loss.weight) == 200
  assert float(loss.total) / 200 == pytest.approx(math.log(256), rel=0.05)
  assert task.chance_loss == math.log(256)


def test_dropout_is_for_training():
  task = with_model(make_task(random_documents(CONTEXT), dropout=0.5))
  batch = batch_of(task)
  twice = [task.forward(batch, training=False) for _ in range(2)]
  np.testing.assert_array_equal(*twice)
  assert np.abs(task.forward(batch, training=True) - twice[0]).max() > 0.01


@pytest.mark.whole
def test_mixed_precision_keeps_weights_and_logits_in_float32(policy):
  policy("mixed_bfloat16")
  task = with_model(make_task(random_documents(4, 15, 9, 3)))
  batch = batch_of(task)
  logits = task.forward(batch, training=True)
  assert logits.dtype == tf.float32
  assert {v.dtype for v in task.model.trainable_variables} == {"float32"}
  expected = by_hand(weights_of(task.model), batch["token"].numpy(), batch["position"].numpy())
  error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
  assert 1e-4 < error < 0.05  # so the blocks are in bfloat16, and right


# ---- The loss ----


def test_the_loss_is_the_sum_over_targets_times_the_weights():
  task = with_model(make_task(random_documents(20, 9)))  # 29 targets in three sequences of 12
  batch = {**batch_of(task), "weight": tf.constant([1.0, 0.0, 3.0])}
  logits = task.forward(batch, training=False)
  loss, metrics = task.loss(logits, batch), task.metrics(logits, batch)
  arrays = {n: batch[n].numpy() for n in batch}
  expected = by_hand(weights_of(task.model), arrays["token"], arrays["position"])
  parts = [mean_loss(expected[[row]], arrays["target"][[row]]) for row in (0, 2)]
  assert float(loss.weight) == 12 + 3 * 5
  assert float(loss.total) == pytest.approx(12 * parts[0] + 3 * 5 * parts[1], rel=1e-5)
  bits, count = metrics["bits_per_byte"]
  assert float(bits / count) == pytest.approx(float(loss.total) / 27 / math.log(2), rel=1e-5)


# ---- Replicas ----


def adamw():
  return groups.without_decay(
    of=lambda: keras.optimizers.AdamW(0.003, weight_decay=0.1), names=["scale", "embeddings"]
  )


def make_trainer(task, strategy, batch, **options):
  with strategy.scope():
    with_model(task)
  return runs.make_trainer(task, strategy, batch=batch, optimizer=adamw, **options)


def uneven_task():
  """Its documents fill 8 sequences and 1 byte of a ninth; one layer is traced in half the time."""
  return make_task([bytes(range(48, 74)) * 3, b"abc" * 6, b"x"], layers=1)


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"clip_norm": 0.1}])
@pytest.mark.whole
def test_replicas_with_unequal_numbers_of_targets_train_as_one(options, mirrored):
  losses, finals = [], []
  for replicas in (1, 2, 3):
    task = uneven_task()
    trainer = make_trainer(task, mirrored(replicas), 5, **options)
    metrics = [trainer.train(tf.constant(1)) for _ in range(10)]
    losses.append([each["loss"] for each in metrics])
    finals.append([v.numpy() for v in task.model.trainable_variables])
    assert trainer.traces == 1
    for each in metrics:
      assert each["bits_per_byte"] == pytest.approx(each["loss"] / math.log(2), rel=1e-5)
      assert each["perplexity"] == pytest.approx(math.exp(each["loss"]), rel=1e-5)
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)
  assert losses[0] == pytest.approx(losses[2], rel=1e-5)
  assert losses[0][-1] < 0.8 * losses[0][0]
  for one, *others in zip(*finals, strict=True):
    for other in others:
      np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.fast(replicas=[2])
def test_evaluation_is_a_mean_over_bytes(replicas, mirrored):
  """Of 97 bytes in 9 sequences, in batches of 4 rows: not a mean over batches, nor of exps."""
  task, strategy = uneven_task(), mirrored(replicas)
  with strategy.scope():
    with_model(task)
  metrics = make_evaluator(task, strategy, batch=4).evaluate()
  arrays = packed(task._corpus.documents("eval"), CONTEXT)
  logits = by_hand(weights_of(task.model), arrays["token"].astype(int), arrays["position"])
  mean = mean_loss(logits, arrays["target"].astype(int))
  expected = {"loss": mean, "bits_per_byte": mean / math.log(2), "perplexity": math.exp(mean)}
  assert metrics == pytest.approx(expected, rel=1e-5)


# ---- The corpus ----


@pytest.fixture
def folder(tmp_path):
  for name in ("a.txt", "b.txt", "sub/c.txt", "sub/d.md", "tests/e.txt", ".git/f.txt", ".g.txt"):
    path = tmp_path / "texts" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"text of {name}")
  (tmp_path / "texts" / "empty.txt").write_bytes(b"")
  return tmp_path / "texts"


def both_splits(files):
  return [files.documents(split) for split in ("train", "eval")]


def test_each_file_is_in_one_split(folder):
  for number in range(200):
    (folder / f"n{number}.txt").write_text(f"number {number}")
  options = {"path": str(folder), "pattern": "*.txt", "leave_out": ["test*"]}
  train, evaluated = both_splits(TextFiles(**options, eval_fraction=0.2))
  wanted = ["a.txt", "b.txt", "sub/c.txt"]
  numbers = {f"number {number}".encode() for number in range(200)}
  assert {*train, *evaluated} == {f"text of {n}".encode() for n in wanted} | numbers
  assert len(train) + len(evaluated) == 203
  assert 20 < len(evaluated) < 65
  (folder / "another.txt").write_text("one more")  # moves none of the others
  again = TextFiles(**options, eval_fraction=0.2).documents("eval")
  assert set(evaluated) == set(again) - {b"one more"}


def test_the_share_of_a_name_is_its_hash():
  assert language_model._share("abc.py") == pytest.approx(0.769194722847125)


def test_a_single_file_is_cut(tmp_path):
  (tmp_path / "one.txt").write_bytes(b"0123456789")
  files = TextFiles(path=str(tmp_path / "one.txt"), eval_fraction=0.3)
  assert both_splits(files) == [[b"0123456"], [b"789"]]


def test_the_python_library_is_there_and_apart():
  train, evaluated = both_splits(language_model.python_library())
  source = Path(os.__file__).read_bytes()
  assert (source in train) + (source in evaluated) == 1
  assert not {*train} & {*evaluated}
  sizes = [sum(map(len, each)) for each in (train, evaluated)]
  assert 0.01 < sizes[1] / sum(sizes) < 0.15
  assert sum(sizes) > 3e6
  assert b"site-packages/keras" not in b"".join(evaluated)


def test_hardly_any_text_of_the_python_library_is_in_both_splits():
  """In blocks of 64 bytes of training; with `encodings`, whose tables are alike, it is 10 %."""
  train, evaluated = both_splits(language_model.python_library())
  blocks = {text[at : at + 64] for text in train for at in range(0, len(text), 64)}
  again = 0
  for text in evaluated:
    starts = [at for at in range(len(text) - 63) if text[at : at + 64] in blocks]
    again += len({place for at in starts for place in range(at, at + 64)})
  assert again < 0.02 * sum(map(len, evaluated))


def test_a_corpus_without_documents_is_refused(folder):
  files = TextFiles(path=str(folder), pattern="*.doc")
  with pytest.raises(ConfigError, match=r"^no text for 'train' in .*\(pattern '\*.doc'\); check"):
    files.documents("train")


def test_a_file_that_cannot_be_read_is_named(folder):
  (folder / "broken.txt").symlink_to(folder / "gone.txt")
  with pytest.raises(ConfigError, match=r"broken.txt' does not exist; give the path of a text"):
    both_splits(TextFiles(path=str(folder)))


# ---- Sampling ----


def drawn_by_hand(task, prompt, count, temperature, seed):
  """From the logits of the last `context` tokens alone, of a length of their own each time."""
  rng, text = np.random.default_rng(seed), bytearray(prompt)
  for _ in range(count):
    seen = [START, *text][-task.context :]
    position = np.arange(len(seen), dtype=np.int32)[None]
    seen_alone = {"token": np.array([seen], np.int32), "position": position}
    logits = task.model(seen_alone).numpy()[0, -1]
    text.append(
      np.argmax(logits) if temperature == 0 else rng.choice(256, p=softmax(logits / temperature))
    )
  return bytes(text)


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
@pytest.mark.fast(temperature=[0.5])
def test_sampling_is_that_by_hand(temperature):
  task = with_model(make_task([b"abc"]))
  text = language_model.sample(task, b"ab", 20, temperature=temperature, seed=4)
  assert text == drawn_by_hand(task, b"ab", 20, temperature, 4)
  assert len(text) == 22 > task.context
  other = language_model.sample(task, b"ab", 20, temperature=temperature, seed=5)
  assert (other == text) == (temperature == 0)


def test_a_negative_temperature_is_refused():
  with pytest.raises(ConfigError, match=r"^temperature is -1; it must be 0 or more"):
    language_model.sample(make_task([b"abc"]), b"", 1, temperature=-1)


SMALL = """
import loopwright.tasks.language_model
run.task = @LanguageModel()
LanguageModel.corpus = @TextFiles()
LanguageModel.context = 16
TextFiles.path = '{folder}'
transformer.layers = 1
transformer.width = 8
transformer.heads = 2
run.train_steps = 3
run.global_batch_size = 4
{ema}
"""


@pytest.fixture
def ema():
  return ""


@pytest.fixture
def run_folder(tmp_path, monkeypatch, ema):
  """A run of three steps, with a moving average if `ema` says so."""
  (tmp_path / "texts").mkdir()
  for number in range(20):
    (tmp_path / "texts" / f"{number}.txt").write_text(f"this is text {number}. " * 5)
  (tmp_path / "small.gin").write_text(SMALL.format(folder=tmp_path / "texts", ema=ema))
  model_dir = str(tmp_path / "run")
  arguments = [f"--gin_file={tmp_path / 'small.gin'}", f"--model_dir={model_dir}"]
  assert launch.main(["launch.py", *arguments]) == 0
  return model_dir


@pytest.mark.parametrize("ema", ["Trainer.ema_decay = 0.5", ""])
@pytest.mark.fast(ema=[""])
def test_a_run_is_restored_as_it_was_evaluated(run_folder):
  """With the same loss on the evaluation split as the run's last line."""
  task = loopwright.load(run_folder).task
  assert task.context == 16
  arrays = packed(task._corpus.documents("eval"), 16)
  inputs_of = {name: tf.constant(arrays[name], tf.int32) for name in ("token", "position")}
  mean = mean_loss(task.model(inputs_of).numpy().astype(float), arrays["target"].astype(int))
  [*_, last] = records(run_folder)
  assert (last["split"], last["loss"]) == ("eval", pytest.approx(mean, rel=1e-6))


def test_the_model_itself_is_in_a_checkpoint(tmp_path):
  """Each of its variables, not through the optimizer alone."""
  path = tf.train.Checkpoint(model=network()).write(str(tmp_path / "ckpt"))
  assert len([name for name, _ in tf.train.list_variables(path) if name.startswith("model/")]) == (
    2 + LAYERS * 7
  )


@pytest.mark.whole
def test_the_command_draws_the_same_text_for_the_same_seed(run_folder, capsys):
  arguments = [run_folder, "--prompt", "this ", "--bytes", "9", "--temperature", "1"]
  expected = language_model.sample(loopwright.load(run_folder).task, b"this ", 9, seed=7)
  assert language_model.main([*arguments, "--seed", "7"]) == 0
  assert capsys.readouterr().out == f"{expected.decode(errors='replace')}\n"
  command = [sys.executable, "-m", "loopwright.tasks.language_model", *arguments, "--seed", "7"]
  made = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
  assert made.stdout.decode() == f"{expected.decode(errors='replace')}\n"


@pytest.mark.whole
def test_the_command_names_a_mistake(tmp_path, run_folder, capsys):
  assert language_model.main([str(tmp_path / "none")]) == 2
  assert "has no operative_config.gin with a task" in capsys.readouterr().err
  for path in Path(run_folder, "checkpoints").iterdir():
    path.unlink()
  assert language_model.main([run_folder]) == 2
  assert "there is no complete checkpoint in" in capsys.readouterr().err


@pytest.mark.whole
def test_the_export_gives_log_probabilities_of_each_byte_and_the_next(tmp_path):
  task = with_model(make_task([b"abc"]))
  export.export(task, str(tmp_path / "export"))
  serve = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
  text = np.array([[*b"hello"], [*b"world"]], np.int32)
  served = serve(text=tf.constant(text))["log_probabilities"].numpy()
  assert served.shape == (2, 6, 256)
  for row, document in enumerate((b"hello?", b"world?")):
    expected = np.log(softmax(logits_alone(task, document).astype(np.float64)))
    np.testing.assert_allclose(served[row], expected, rtol=0, atol=1e-5)
  nothing = serve(text=tf.zeros([1, 0], tf.int32))["log_probabilities"]
  np.testing.assert_allclose(nothing[0, 0], served[0, 0], rtol=0, atol=1e-5)


# ---- The config's optimizer ----


def test_the_config_decays_kernels_and_nothing_else(monkeypatch):
  configurables.parse([str(ROOT / "configs" / "language_model.gin")])
  factory = gin.query_parameter("run.optimizer").scoped_configurable_fn
  model = network()
  step = tf.Variable(0, dtype=tf.int64)
  made = adapters.build(factory, lambda name: model.trainable_variables, step)["default"]
  step.assign(200)  # the warm-up is over
  rate, decay = float(made.learning_rate()), made.optimizer.weight_decay
  assert (rate, decay) == (pytest.approx(0.003), 0.1)
  before = {v.path: v.numpy() for v in model.trainable_variables}
  made.apply(
    tf.distribute.get_strategy(),
    adapters.Gradients.of(made.fusion, [tf.zeros(v.shape) for v in model.trainable_variables]),
  )
  decayed = {v.path.rsplit("/", 1)[1]: 1 - v.numpy() / before[v.path] for v in made.variables}
  assert decayed.keys() == {"kernel", "scale", "embeddings"}
  for variable in made.variables:
    share = rate * decay if variable.name == "kernel" else 0.0
    np.testing.assert_allclose(variable, before[variable.path] * (1 - share), rtol=1e-6)
