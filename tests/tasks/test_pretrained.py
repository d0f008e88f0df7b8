"""Fine-tuning of KerasHub's models, from folders written here: beside Keras's fit, and resumed.

Those of Hugging Face's transformers are also computed with NumPy, before and after.
"""

import json
import subprocess
import sys
import types

import keras
import numpy as np
import properties
import pytest
import runs
import safetensors.numpy
import tensorflow as tf
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer
from tokenizers.models import BPE, Unigram

import loopwright
from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.models import models
from loopwright.runs import runner
from loopwright.strategies import factories
from loopwright.tasks import pretrained
from loopwright.tasks.language_model import TextFiles
from loopwright.tasks.pretrained import FineTunedClassifier, FineTunedLM
from loopwright.tasks.text_classification import TextData, text_files
from loopwright.tools.exports import export

hub = pytest.importorskip("keras_hub").models
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "is", "good", "bad", "a"]
PIECES = {"Ġ": 0, "a": 1, "b": 2, "Ġa": 3, "Ġb": 4, "ab": 5, "Ġab": 6, "<|endoftext|>": 7}
MERGES = ["Ġ a", "Ġ b", "a b", "Ġa b"]
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "dropout": 0.0}
BATCH, STEPS, RATE = 6, 4, 0.1


BERT = {
  "model_type": "bert", "vocab_size": len(WORDS), "num_hidden_layers": 2, "num_attention_heads": 2,
  "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 8,
  "hidden_act": "gelu_new", "architectures": ["BertForMaskedLM"],
}  # fmt: skip
GPT2 = {
  "model_type": "gpt2", "vocab_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16,
  "resid_pdrop": 0.0, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip


def bert_shapes():
  """Hugging Face's names -> shapes; a Linear has [out, in]."""
  linear, norms = {"pooler.dense": (16, 16)}, ["embeddings.LayerNorm"]
  for layer in ("encoder.layer.0", "encoder.layer.1"):
    linear |= {f"{layer}.attention.self.{n}": (16, 16) for n in ("query", "key", "value")}
    linear |= {f"{layer}.attention.output.dense": (16, 16)}
    linear |= {f"{layer}.intermediate.dense": (32, 16), f"{layer}.output.dense": (16, 32)}
    norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
  rows = {"word": len(WORDS), "position": 8, "token_type": 2}
  shapes = {f"embeddings.{n}_embeddings.weight": (count, 16) for n, count in rows.items()}
  shapes |= {f"{n}.{part}": (16,) for n in norms for part in ("weight", "bias")}
  shapes |= {f"{n}.weight": shape for n, shape in linear.items()}
  shapes |= {f"{n}.bias": shape[:1] for n, shape in linear.items()}
  return {f"bert.{name}": shape for name, shape in shapes.items()}


def gpt2_shapes():
  """The same; a Conv1D has [in, out], and one has queries, keys and values."""
  shapes = {"wte.weight": (8, 16), "wpe.weight": (16, 16), "ln_f.weight": (16,), "ln_f.bias": (16,)}
  sizes = {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16)}
  sizes |= {"mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)}
  for layer in ("h.0", "h.1"):
    shapes |= {f"{layer}.{n}.{p}": (16,) for n in ("ln_1", "ln_2") for p in ("weight", "bias")}
    shapes |= {f"{layer}.{n}.weight": shape for n, shape in sizes.items()}
    shapes |= {f"{layer}.{n}.bias": shape[1:] for n, shape in sizes.items()}
  return shapes


def write(folder, config, shapes, five=False):
  """A folder as transformers 4 writes it, or 5; with a tensor that no network here has."""
  folder.mkdir()
  rng = np.random.default_rng(7)
  values = {n: rng.normal(0, 0.3, shape).astype(np.float32) for n, shape in shapes.items()}
  values["cls.predictions.bias"] = np.ones(3, np.float32)
  safetensors.numpy.save_file(values, folder / "model.safetensors", {"format": "pt"})
  (folder / "config.json").write_text(json.dumps(config))
  if five:
    bert = BertWordPieceTokenizer({word: row for row, word in enumerate(WORDS)})
    gpt2 = ByteLevelBPETokenizer(PIECES, [(one, other) for one, other in map(str.split, MERGES)])
    gpt2.add_special_tokens(["<|endoftext|>"])
    {"bert": bert, "gpt2": gpt2}[config["model_type"]].save(str(folder / "tokenizer.json"))
    return
  (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
  (folder / "vocab.txt").write_text("\n".join(WORDS))
  (folder / "vocab.json").write_text(json.dumps(PIECES))
  (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))


class Computed:
  """Both architectures with NumPy in float64, of one row, from a file's arrays."""

  def __init__(self, folder, head):
    held = safetensors.numpy.load_file(folder / "model.safetensors") | head
    self.of = {name.removeprefix("bert."): x.astype(np.float64) for name, x in held.items()}

  def linear(self, x, name):
    return x @ self.of[f"{name}.weight"].T + self.of[f"{name}.bias"]

  def conv1d(self, x, name):
    return x @ self.of[f"{name}.weight"] + self.of[f"{name}.bias"]

  def norm(self, x, name, epsilon):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * self.of[f"{name}.weight"] + self.of[f"{name}.bias"]

  def attention(self, q, k, v, seen):
    q, k, v = (each.reshape(len(each), 2, 8) for each in (q, k, v))
    scores = np.exp(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)) * seen
    scores = scores / scores.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", scores, v).reshape(len(q), 16)

  def gelu(self, x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

  def bert(self, token, segment, real):
    """Returns the logits of the classes."""
    x = self.of["embeddings.word_embeddings.weight"][token]
    x = x + self.of["embeddings.token_type_embeddings.weight"][segment]
    x = self.norm(x + self.of["embeddings.position_embeddings.weight"], "embeddings.LayerNorm", 0)
    for layer in ("encoder.layer.0", "encoder.layer.1"):
      own = f"{layer}.attention"
      parts = (self.linear(x, f"{own}.self.{n}") for n in ("query", "key", "value"))
      y = self.linear(self.attention(*parts, real), f"{own}.output.dense")
      x = self.norm(x + y, f"{own}.output.LayerNorm", 0)
      y = self.linear(self.gelu(self.linear(x, f"{layer}.intermediate.dense")),
                      f"{layer}.output.dense")  # fmt: skip
      x = self.norm(x + y, f"{layer}.output.LayerNorm", 0)
    return self.linear(np.tanh(self.linear(x[0], "pooler.dense")), "classifier")

  def gpt2(self, token, real):
    """Returns the logits of the next tokens."""
    x = self.of["wte.weight"][token] + self.of["wpe.weight"][: len(token)]
    for layer in ("h.0", "h.1"):
      parts = self.conv1d(self.norm(x, f"{layer}.ln_1", 1e-5), f"{layer}.attn.c_attn")
      mixed = self.attention(*np.split(parts, 3, axis=-1), np.tri(len(token)) * real)
      x = x + self.conv1d(mixed, f"{layer}.attn.c_proj")
      y = self.conv1d(self.norm(x, f"{layer}.ln_2", 1e-5), f"{layer}.mlp.c_fc")
      x = x + self.conv1d(self.gelu(y), f"{layer}.mlp.c_proj")
    return self.norm(x, "ln_f", 1e-5) @ self.of["wte.weight"].T


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
  """A folder with a preset "bert" of KerasHub, "gpt2" of transformers, films.csv and text.txt."""
  folder, rng = tmp_path_factory.mktemp("presets"), np.random.default_rng(0)
  keras.utils.set_random_seed(3)
  backbone = hub.BertBackbone(vocabulary_size=len(WORDS), max_sequence_length=8, **SIZES)
  read = hub.BertTextClassifierPreprocessor(hub.BertTokenizer(vocabulary=WORDS), sequence_length=8)
  made = hub.BertTextClassifier(backbone, num_classes=2, preprocessor=read, dropout=0.0)
  made.save_to_preset(str(folder / "bert"))
  write(folder / "gpt2", GPT2, gpt2_shapes())
  texts = [" ".join(rng.choice(WORDS[5:], 5)) for _ in range(40)]
  lines = [f"{text},{'yes' if 'good' in text else 'no'}" for text in texts]
  (folder / "films.csv").write_text("\n".join(["text,label", *lines]))
  (folder / "text.txt").write_text(" ".join(rng.choice(["a", "b", "ab"], 600)))
  return folder


def classifier(folder, preset="bert", **options):
  data = text_files(train=str(folder / "films.csv"))
  options = {"lora_rank": 2, "length": 8, **options}
  return FineTunedClassifier(data=data, preset=str(folder / preset), **options)


def language_model(folder, preset="gpt2", **options):
  corpus = TextFiles(path=str(folder / "text.txt"))
  options = {"lora_rank": 2, "length": 8, **options}
  return FineTunedLM(corpus=corpus, preset=str(folder / preset), **options)


def given(task, count):
  """The network's inputs and targets of the first training examples."""
  part = {n: x.numpy() for n, x in task.source("train").fetch(tf.range(count)).items()}
  if "label" in part:
    return {spec.name: part[spec.name] for spec in task.network.inputs}, part["label"]
  token = part["token"]
  return {"token_ids": token[:, :-1], "padding_mask": np.ones_like(token[:, 1:])}, token[:, 1:]


@pytest.mark.parametrize(
  ("make", "config", "shapes", "options", "five"),
  [
    (classifier, BERT, bert_shapes, {}, True),
    (language_model, GPT2, gpt2_shapes, {"lora_rank": None}, True),
    (language_model, GPT2, gpt2_shapes, {"int8": True}, False),
  ],
)
def test_folders_of_transformers_in_and_out(presets, tmp_path, make, config, shapes, options, five):
  """What NumPy computes from the file is what the network does, untrained and written again."""
  write(tmp_path / "in", config, shapes(), five)
  task = make(presets, preset=tmp_path / "in", **options)
  task.build_model()
  x = given(task, 1)[0]
  row = [np.array(x[n])[0] for n in ("token_ids", "segment_ids", "padding_mask") if n in x]

  def computed(folder, **head):
    return getattr(Computed(folder, head), config["model_type"])(*row)

  head = {v.path.replace("logits/", "classifier."): np.array(v) for v in task.network.variables}
  head = {"classifier.weight": head["classifier.kernel"].T, **head} if make is classifier else {}
  if not task.int8:
    np.testing.assert_allclose(task.network(x)[0], computed(tmp_path / "in", **head), atol=2e-5)
  rng = np.random.default_rng(5)
  for variable in task.network.trainable_variables:
    variable.assign(variable + rng.normal(0, 0.2, variable.shape))
  trained = task.network(x)[0]
  pretrained.to_transformers(task, str(tmp_path / "out"))
  if options.get("int8"):  # the adapters are merged into the matrices that were not rounded
    assert 1e-5 < np.abs(trained - task.network(x)[0]).max() < 0.2
    trained = task.network(x)[0]
  np.testing.assert_allclose(trained, computed(tmp_path / "out"), atol=2e-5)
  before, after = (
    safetensors.numpy.load_file(tmp_path / n / "model.safetensors") for n in ("in", "out")
  )
  assert after.keys() - {"classifier.weight", "classifier.bias"} == shapes().keys()
  if task.lora_rank:
    moved = {name for name in shapes() if not np.array_equal(before[name], after[name])}
    assert len(moved) == {classifier: 2 * 2, language_model: 2}[make]  # queries and values alone
  again = make(presets, preset=tmp_path / "out", lora_rank=None)
  again.build_model()
  one, other = (each.network.backbone(x) for each in (task, again))
  for left, right in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
    np.testing.assert_allclose(left, right, atol=1e-6)


def test_tokens_are_those_of_transformers(presets, tmp_path):
  """KerasHub itself keeps accents and what is no character, and takes [SEP] apart."""
  for config, shapes in ((BERT, bert_shapes), (GPT2, gpt2_shapes)):
    write(tmp_path / config["model_type"], config, shapes(), five=True)
  task = classifier(presets, preset=tmp_path / "bert", length=6)
  texts = (b"Th\xc3\xa9 F\x07ILM", b"a\xc2\xa0film [SEP] is so good", b"\xff")
  task._data = TextData(splits={"train": (texts, ("no", "yes", "no"))})
  made = task.source("train").fetch(tf.range(3))
  expected = [[2, 5, 6, 3, 0, 0], [2, 10, 6, 3, 7, 3], [2, 3, 0, 0, 0, 0]]
  assert made["token_ids"].numpy().tolist() == expected
  assert made["padding_mask"].numpy().sum(1).tolist() == [4, 6, 2]
  assert not made["segment_ids"].numpy().any()
  task = language_model(presets, preset=tmp_path / "gpt2", length=6)
  task._corpus = types.SimpleNamespace(documents=lambda split: [b"a  ab<|endoftext|>b a"])
  row = task.source("train").fetch(tf.range(1))["token"].numpy().tolist()
  assert row == [[1, 0, 6, 7, 2, 3, 7]]


def fitted(task):
  """The trained variables before and after Keras's fit, in source order, on one device."""
  variables = models.trainable_variables(task.build_model())
  for variable in variables:  # Keras's adapters begin at zero, where half of the gradients are
    variable.assign(variable + np.random.default_rng(5).normal(0, 0.2, variable.shape))
  before = [np.array(variable) for variable in variables]
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  task.network.compile(keras.optimizers.SGD(RATE), loss)
  task.network.preprocessor = None
  x, y = given(task, BATCH * STEPS)
  task.network.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
  return before, [np.array(variable) for variable in variables]


@pytest.mark.fast(replicas=[2], make=[classifier])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
  ("make", "options"),
  [(classifier, {}), (classifier, {"lora_rank": None}), (language_model, {"int8": True})],
  ids=["adapters", "everything", "int8"],
)
def test_it_trains_as_fit_does_and_the_base_stays(presets, make, options, replicas):
  (start, expected), task = fitted(make(presets, **options)), make(presets, **options)
  strategy = factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default()
  trainer = runs.make_trainer(
    task, strategy, batch=BATCH, optimizer=lambda: keras.optimizers.SGD(RATE),
    data={"shuffle": False},
  )  # fmt: skip
  trained = models.trainable_variables(task.model)
  for variable, value in zip(trained, start, strict=True):
    variable.assign(value)
  before = {v.path: np.array(v) for v in task.network.variables}
  trainer.train(tf.constant(STEPS))
  for replica in runs.copies(strategy, trained):
    for one, other in zip(replica, expected, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
  moved = {v.path for v in task.network.variables if not np.array_equal(before[v.path], v)}
  still = {v.path for v in trained} - moved
  assert moved <= {v.path for v in trained}
  assert all("key/bias" in path for path in still)  # the softmax takes its effect away


@pytest.mark.ci
@pytest.mark.parametrize(
  "make", [classifier, pytest.param(language_model, marks=pytest.mark.whole)]
)
def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_to_the_bit(presets, make, tmp_path):
  own = {
    classifier: ("@FineTunedClassifier()", "FineTunedClassifier", "bert"),
    language_model: ("@FineTunedLM()", "FineTunedLM", "gpt2"),
  }[make]

  def train(folder, steps, *more):
    data = ["FineTunedClassifier.data = @text_files()", f"text_files.train = '{presets}/films.csv'"]
    corpus = ["FineTunedLM.corpus = @TextFiles()", f"TextFiles.path = '{presets}/text.txt'"]
    lines = [
      "import loopwright.tasks.pretrained", "import loopwright.tasks.text_classification",
      f"run.task = {own[0]}", f"{own[1]}.preset = '{presets}/{own[2]}'", f"{own[1]}.length = 8",
      f"{own[1]}.lora_rank = 2", *(data if make is classifier else corpus),
      f"run.train_steps = {steps}", "run.global_batch_size = 6", *more,
    ]  # fmt: skip
    configurables.parse([], lines)
    configurables.configured(runner.run)(mode="train", model_dir=str(tmp_path / folder))
    return tf.train.load_checkpoint(str(tmp_path / folder / "checkpoints" / f"ckpt-{steps}"))

  whole, names = properties.resumed_equals_uninterrupted(train, steps=6, at=3)
  kept = {n for n in names if n.startswith("model")}
  head = 2 if make is classifier else 0
  assert len(kept) == 2 * 2 * 2 + head  # query and value, two matrices each, in two layers
  parameters, state = (sum(whole.get_tensor(n).size for n in of) for of in (kept, names - kept))
  assert 2 * parameters <= state < 2 * parameters + 10  # Adam's moments, of the adapters alone
  (presets / own[2] / "config.json").touch()
  text = (presets / own[2] / "config.json").read_text()
  (presets / own[2] / "config.json").write_text(text + " ")
  try:
    with pytest.raises(ConfigError, match="has other files than when the run began; restore them"):
      train("b", 9)
  finally:
    (presets / own[2] / "config.json").write_text(text)
  to, form = tmp_path / "preset", "keras" if make is classifier else "transformers"
  arguments = [str(tmp_path / "a"), f"--to={to}", f"--format={form}"]
  if make is classifier:
    assert pretrained.main(arguments) == 0
  else:
    subprocess.run([sys.executable, "-m", pretrained.__name__, *arguments], check=True)
  task = loopwright.load(tmp_path / "a").task
  kind = hub.TextClassifier if make is classifier else hub.CausalLM
  x, _ = given(task, 5)
  logits = kind.from_preset(str(to))(x)  # its own matrices, merged
  np.testing.assert_allclose(task.network(x), logits, atol=1e-5)
  if make is classifier:
    export.export(task, str(tmp_path / "export"))
    serve = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    served = serve(**{name: tf.cast(each, tf.int32) for name, each in x.items()})["probabilities"]
    np.testing.assert_allclose(served, keras.ops.softmax(logits), atol=1e-6)


@pytest.mark.whole
def test_gradients_through_8_bits_are_those_of_the_whole_numbers(presets):
  """Keras's own choice of layers turns them away: the tied output layer passes none by rounding."""

  def gradients(int8, everything=False):
    keras.utils.set_random_seed(0)
    task = language_model(presets)
    task.build_model()
    if int8:
      filters = None if everything else pretrained._is_frozen_matrix
      task.network.backbone.quantize("int8", filters=filters)
    rng = np.random.default_rng(1)
    variables = task.network.trainable_variables
    for variable in variables:
      variable.assign(rng.normal(0, 0.1, variable.shape))
    x, y = given(task, 16)
    with tf.GradientTape() as tape:
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, task.network(x, training=True))
    found = tape.gradient(losses, [variable.value for variable in variables])
    return np.concatenate([np.ravel(each) for each in found])

  plain = gradients(int8=False)

  def likeness(found):
    return found @ plain / np.linalg.norm(found) / np.linalg.norm(plain)

  assert likeness(gradients(int8=True)) > 0.999
  assert likeness(gradients(int8=True, everything=True)) < 0.9


@pytest.mark.whole
def test_a_compiled_classifier_reads_texts_as_fit_does(presets, tmp_path):
  def made():
    keras.utils.set_random_seed(1)
    model = hub.BertTextClassifier.from_preset(str(presets / "bert"), num_classes=2)
    model.compile(
      keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model

  x, y = np.array(["the film is good", "a bad film", "the good"] * 2), np.array([1, 0, 1] * 2)
  expected, model = made(), made()
  expected.fit(x, y, batch_size=2, shuffle=False, verbose=0)
  task = loopwright.from_keras(model, x, y)
  runner.run(
    task=task, mode="train", train_steps=3, global_batch_size=2, shuffle=False,
    strategy=factories.default, model_dir=str(tmp_path),
  )  # fmt: skip
  for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
  ("options", "line"),
  [
    ({"lora_rank": 0}, "lora_rank is 0; it must be at least 1, or None"),
    ({"length": 1}, "length is 1; it must be at least 2 tokens"),
    ({"lora_rank": None, "int8": True}, "whole numbers cannot be trained; set lora_rank"),
  ],
)
def test_wrong_options_are_one_line(presets, options, line):
  with pytest.raises(ConfigError, match=line):
    classifier(presets, **options)
  with pytest.raises(ConfigError, match=r"length is 9, but .* positions for 8 tokens"):
    classifier(presets, length=9).build_model()


@pytest.mark.parametrize(
  ("config", "tokenizer", "line"),
  [
    (
      BERT,
      None,
      r"which keras_hub.models.TextClassifier cannot read \(File does not contain tensor",
    ),
    (BERT | {"hidden_act": "relu"}, None, "has hidden_act = 'relu', but KerasHub computes with"),
    (BERT, Unigram([("a", 0.0)], 0), "is of the kind 'Unigram'; it must be WordPiece or byte-leve"),
    (BERT, BPE({"a": 0}, []), "is of the kind 'BPE'; it must be WordPiece or byte-level BPE, or"),
    (BERT, "{", r"tokenizer.json' cannot be read \(EOF while parsing an object"),
  ],
)
def test_a_preset_that_cannot_be_read_is_one_line(presets, tmp_path, config, tokenizer, line):
  write(tmp_path / "in", config, {"wte.weight": (8, 16)})
  if tokenizer is not None:
    told = tokenizer if tokenizer == "{" else Tokenizer(tokenizer).to_str()
    (tmp_path / "in" / "tokenizer.json").write_text(told)
  task = classifier(presets, preset=tmp_path / "in")
  with pytest.raises(ConfigError, match=line):
    task.build_model()
  with pytest.raises(ConfigError, match=r"and --to a new folder; .* use --format=keras"):
    pretrained.to_transformers(task, str(tmp_path))
