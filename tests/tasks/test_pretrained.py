"""Fine-tuning of KerasHub's models, from presets written here: beside Keras's fit, and resumed."""

import keras
import numpy as np
import pytest
import runs
import tensorflow as tf

from loopwright import configurables, running
from loopwright.errors import ConfigError
from loopwright.models import models
from loopwright.strategies import factories
from loopwright.tasks import pretrained
from loopwright.tasks.language_model import TextFiles
from loopwright.tasks.pretrained import FineTunedClassifier, FineTunedLM
from loopwright.tasks.text_classification import text_files

hub = pytest.importorskip("keras_hub").models
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "is", "good", "bad", "a"]
PIECES = {"Ġ": 0, "a": 1, "b": 2, "Ġa": 3, "Ġb": 4, "ab": 5, "Ġab": 6, "<|endoftext|>": 7}
MERGES = ["Ġ a", "Ġ b", "a b", "Ġa b"]
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "dropout": 0.0}
BATCH, STEPS, RATE = 6, 4, 0.1


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
  """A folder with the presets "bert" and "gpt2", films.csv and text.txt."""
  folder, rng = tmp_path_factory.mktemp("presets"), np.random.default_rng(0)
  keras.utils.set_random_seed(3)
  backbone = hub.BertBackbone(vocabulary_size=len(WORDS), max_sequence_length=8, **SIZES)
  read = hub.BertTextClassifierPreprocessor(hub.BertTokenizer(vocabulary=WORDS), sequence_length=8)
  made = hub.BertTextClassifier(backbone, num_classes=2, preprocessor=read, dropout=0.0)
  made.save_to_preset(str(folder / "bert"))
  backbone = hub.GPT2Backbone(vocabulary_size=8, max_sequence_length=16, **SIZES)
  tokenizer = hub.GPT2Tokenizer(vocabulary=PIECES, merges=MERGES)
  read = hub.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
  hub.GPT2CausalLM(backbone, preprocessor=read).save_to_preset(str(folder / "gpt2"))
  texts = [" ".join(rng.choice(WORDS[5:], 5)) for _ in range(40)]
  lines = [f"{text},{'yes' if 'good' in text else 'no'}" for text in texts]
  (folder / "films.csv").write_text("\n".join(["text,label", *lines]))
  (folder / "text.txt").write_text(" ".join(rng.choice(["a", "b", "ab"], 600)))
  return folder


def classifier(folder, **options):
  data = text_files(train=str(folder / "films.csv"))
  options = {"lora_rank": 2, "length": 8, **options}
  return FineTunedClassifier(data=data, preset=str(folder / "bert"), **options)


def language_model(folder, **options):
  corpus = TextFiles(path=str(folder / "text.txt"))
  options = {"lora_rank": 2, "length": 8, **options}
  return FineTunedLM(corpus=corpus, preset=str(folder / "gpt2"), **options)


def given(task, count):
  """The network's inputs and targets of the first training examples."""
  part = {n: x.numpy() for n, x in task.source("train").fetch(tf.range(count)).items()}
  if "label" in part:
    return {spec.name: part[spec.name] for spec in task.network.inputs}, part["label"]
  token = part["token"]
  return {"token_ids": token[:, :-1], "padding_mask": np.ones_like(token[:, 1:])}, token[:, 1:]


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
    configurables.configured(running.run)(mode="train", model_dir=str(tmp_path / folder))
    return tf.train.load_checkpoint(str(tmp_path / folder / "checkpoints" / f"ckpt-{steps}"))

  whole = train("a", 6)
  train("b", 3)
  resumed = train("b", 6)
  names = [n for n in whole.get_variable_to_shape_map() if n.startswith(("model", "optimizer"))]
  for name in names:
    np.testing.assert_array_equal(whole.get_tensor(name), resumed.get_tensor(name))
  kept = {n for n in names if n.startswith("model")}
  head = 2 if make is classifier else 0
  assert len(kept) == 2 * 2 * 2 + head  # query and value, two matrices each, in two layers
  parameters, state = (sum(whole.get_tensor(n).size for n in of) for of in (kept, {*names} - kept))
  assert 2 * parameters <= state < 2 * parameters + 10  # Adam's moments, of the adapters alone
  (presets / own[2] / "config.json").touch()
  text = (presets / own[2] / "config.json").read_text()
  (presets / own[2] / "config.json").write_text(text + " ")
  try:
    with pytest.raises(ConfigError, match="has other files than when the run began; restore them"):
      train("b", 9)
  finally:
    (presets / own[2] / "config.json").write_text(text)
  to = tmp_path / "preset"
  pretrained.main([str(tmp_path / "a"), f"--to={to}"])
  task = make(presets)
  task.build_model()
  for variable in task.network.trainable_variables:
    [key] = [n for n in kept if variable.path.replace("/", ".S") in n]
    variable.assign(whole.get_tensor(key))
  kind = hub.TextClassifier if make is classifier else hub.CausalLM
  x, _ = given(task, 5)
  np.testing.assert_allclose(kind.from_preset(str(to))(x), task.network(x), atol=1e-5)


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


def test_a_preset_that_is_none_is_one_line(presets, tmp_path):
  data = text_files(train=str(presets / "films.csv"))
  task = FineTunedClassifier(data=data, preset=str(tmp_path))
  with pytest.raises(ConfigError, match=r"which keras_hub.models.TextClassifier cannot read \("):
    task.build_model()
