"""Fine-tuning of pretrained models of KerasHub: a text classifier and a causal language model.

import loopwright.tasks.pretrained
import loopwright.tasks.text_classification
run.task = @FineTunedClassifier()
FineTunedClassifier.preset = 'bert_tiny_en_uncased'
FineTunedClassifier.data = @imdb_reviews()
FineTunedClassifier.lora_rank = 4

With LoRA `task.model` has the adapters and the head alone, and so have optimizer, averages and
checkpoints. The network around them is read from the preset at each start; a digest of its files is
kept with the run. See docs/transfer-learning.md. It needs the extra `hub`.

    python -m loopwright.tasks.pretrained runs/mine --to=mine_preset

writes the network of a run, its adapters merged, as a preset for KerasHub; with
`--format=transformers`, as a folder of Hugging Face's transformers, if the preset was one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, ConfigError, Loss
from loopwright.errors import first_line
from loopwright.host import bounded, files
from loopwright.metrics import Weighted, weighted_sum
from loopwright.run_folder import safetensors_files
from loopwright.tasks.language_model import TextFiles, cross_entropy
from loopwright.tasks.text_classification import TextData
from loopwright.tasks.transfer_learning import ReadAtEachStart

_AT_ONCE = 256  # texts
if __name__ == "__main__":  # gin would import this module a second time, under its real name
  from loopwright.tasks import pretrained

  sys.exit(pretrained.main())

_ADAPTER = "lora"
"""Part of the names that Keras gives the variables of LoRA."""
_PARTS = {"token_ids": "ids", "segment_ids": "type_ids", "padding_mask": "attention_mask"}
"""Inputs of KerasHub's classifiers -> what tokenizers calls them."""
_COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
  "bert": {
    "hidden_act": ("gelu", "gelu_new"), "layer_norm_eps": (1e-12,),
    "position_embedding_type": ("absolute",), "is_decoder": (False,),
  },
  "gpt2": {
    "activation_function": ("gelu_new",), "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
  },
}  # fmt: skip
"""What KerasHub computes, whatever the config of a folder of transformers says."""


class Pretrained(ReadAtEachStart):
  """What both tasks share: a network of KerasHub, whole or with adapters."""

  def __init__(
    self, *, preset: str, length: int = 128, lora_rank: int | None = None, int8: bool = False
  ) -> None:
    """Keeps its arguments.

    Args:
      preset: a folder that `save_to_preset` wrote, or one of Hugging Face's transformers, with
        safetensors; or a name that KerasHub knows and loads.
      length: of the texts, in tokens; longer ones are cut.
      lora_rank: trains adapters of this rank beside the frozen backbone; None trains everything.
      int8: holds the matrices of the frozen backbone in 8 bits.

    Raises:
      ConfigError: an argument is out of range, or int8 without adapters.
    """
    name = type(self).__name__
    if length < 2:
      raise ConfigError(f"{name}.length is {length}; it must be at least 2 tokens.")
    if lora_rank is not None and lora_rank < 1:
      raise ConfigError(f"{name}.lora_rank is {lora_rank}; it must be at least 1, or None.")
    if int8 and lora_rank is None:
      raise ConfigError(
        f"{name}.int8 is True and lora_rank None, but whole numbers cannot be trained; set "
        "lora_rank, such as 4."
      )
    self.preset, self.length, self.lora_rank, self.int8 = preset, length, lora_rank, int8
    self.read_from = ("preset", preset)

  def read(self) -> Any:
    """Returns the model of the preset (in strategy scope)."""
    raise NotImplementedError

  def of_preset(self, kind: str, **options: Any) -> Any:
    """Returns what a class of `keras_hub.models` makes of the preset, or one line if it cannot."""
    models, who = _keras_hub().models, f"{type(self).__name__}.preset is {self.preset!r}, "
    for name, known in _COMPUTED.get(self.config.get("model_type", ""), {}).items():
      if (value := self.config.get(name, known[0])) not in known:
        raise ConfigError(
          f"{who}whose config.json has {name} = {value!r}, but KerasHub computes with "
          f"{' or '.join(map(repr, known))}; give a model that was trained so."
        )
    try:
      with self._as_keras_hub_looks() as folder:
        return getattr(models, kind).from_preset(folder, **options)
    except ConfigError:
      raise
    except Exception as error:  # of KerasHub, safetensors and HDF5: each has its own
      raise ConfigError(
        f"{who}which keras_hub.models.{kind} cannot read ({first_line(error)[:200]}); give a "
        "folder that save_to_preset or transformers wrote, or a name that KerasHub knows."
      ) from error

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    """The config of a folder of transformers; {} for other presets."""
    path = os.path.join(self.preset, "config.json")
    if not os.path.isfile(path):
      return {}
    with bounded.reading(path, "give a folder that transformers wrote"):
      found = json.loads(files.read(path))
    return found if "model_type" in found else {}

  @functools.cached_property
  def tokenizer(self) -> Any:
    """The tokenizer of a folder of transformers that has tokenizer.json; None for other presets."""
    path = os.path.join(self.preset, "tokenizer.json")
    if not self.config or not os.path.isfile(path):
      return None
    try:
      made = importlib.import_module("tokenizers").Tokenizer.from_file(path)
    except Exception as error:  # of a library in Rust, which raises Exception itself
      raise ConfigError(
        f"{path!r} cannot be read ({first_line(error)[:200]}); give the tokenizer.json that "
        "transformers wrote, and the package tokenizers in a version that knows it."
      ) from error
    made.no_truncation()
    made.no_padding()
    return made

  @contextlib.contextmanager
  def _as_keras_hub_looks(self) -> Iterator[str]:
    """Gives the preset, with the vocabulary of tokenizer.json in the files that KerasHub reads."""
    if self.tokenizer is None:
      yield self.preset
      return
    told, vocabulary = json.loads(self.tokenizer.to_str()), self.tokenizer.get_vocab()
    kind, names = told["model"]["type"], os.listdir(self.preset)
    if kind == "WordPiece":
      lowercase = bool((told["normalizer"] or {}).get("lowercase"))
      made = {
        "vocab.txt": "\n".join(sorted(vocabulary, key=vocabulary.__getitem__)),
        "tokenizer_config.json": json.dumps({"do_lower_case": lowercase}),
      }
    elif kind == "BPE" and '"ByteLevel"' in json.dumps(told["pre_tokenizer"]):
      merges = "\n".join(map(" ".join, told["model"]["merges"]))
      made = {"vocab.json": json.dumps(vocabulary), "merges.txt": merges}
    elif any(name.endswith(".model") for name in names):  # SentencePiece, which KerasHub reads
      made = {}
    else:
      raise ConfigError(
        f"{type(self).__name__}.preset is {self.preset!r}, whose tokenizer.json is of the kind "
        f"{kind!r}; it must be WordPiece or byte-level BPE, or have SentencePiece's .model beside."
      )
    with tempfile.TemporaryDirectory() as folder:
      for name in set(names) - made.keys():
        os.symlink(os.path.abspath(os.path.join(self.preset, name)), os.path.join(folder, name))
      for name, text in made.items():
        files.atomic_write(os.path.join(folder, name), text.encode())
      yield folder

  def build_model(self) -> Any:
    """Returns the network; with adapters, those and the head alone, by name."""
    self.network = self.read()
    backbone = self.network.backbone
    longest = getattr(backbone, "max_sequence_length", None)  # None: any length
    if longest is not None and self.length > longest:
      raise ConfigError(
        f"{type(self).__name__}.length is {self.length}, but the backbone of {self.preset!r} has "
        f"positions for {longest} tokens; set at most that."
      )
    if self.lora_rank is None:
      return self.network
    if self.int8:
      backbone.quantize("int8", filters=_is_frozen_matrix)
    backbone.enable_lora(self.lora_rank)
    own = {id(variable) for variable in backbone.variables}
    for variable in self.network.trainable_variables:
      variable.trainable = id(variable) not in own or _ADAPTER in variable.path
    return self.trained_alone()

  def digest(self) -> str:
    """Returns the digest of config and weights, or the name of a preset that KerasHub loads."""
    if not os.path.isdir(self.preset):
      return self.preset
    content = hashlib.sha256()
    weights = os.path.join(self.preset, "model.weights.h5")
    found = safetensors_files.find(self.preset) if self.config else None
    config = os.path.join(self.preset, "config.json")
    for path in (config, *(safetensors_files.shards(found) if found else [weights])):
      with (
        bounded.reading(path, "give a folder that save_to_preset wrote"),
        open(path, "rb") as file,
      ):
        while block := file.read(2**20):
          content.update(block)
    return content.hexdigest()


@loopwright.register
class FineTunedClassifier(Pretrained):
  """A text classifier on a pretrained backbone; its loss is the mean cross-entropy, in nats."""

  def __init__(self, *, data: TextData, **options: Any) -> None:
    """Keeps its arguments.

    Args:
      data: the texts and labels of each split.
      options: of `Pretrained`.
    """
    super().__init__(**options)
    self._data = data
    self.labels = sorted({label for _, labels in data.splits.values() for label in labels})
    self.chance_loss = math.log(len(self.labels))

  def read(self) -> Any:
    """Returns the classifier, with a new head."""
    made = self.of_preset("TextClassifier", num_classes=len(self.labels))
    made.preprocessor.sequence_length = self.length
    return made

  def source(self, split: str) -> ArraySource:
    """Returns the tokens and labels of a split; all texts are tokenised here, once."""
    preprocessor = self.of_preset("TextClassifierPreprocessor", sequence_length=self.length)
    texts, labels = self._data.splits[split]
    if self.tokenizer is None:
      read = tf.data.Dataset.from_tensor_slices(list(texts)).batch(_AT_ONCE).map(preprocessor)
      batches = list(read.as_numpy_iterator())  # 20 times as fast as one call for all
      tokens = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    else:
      self.tokenizer.enable_truncation(self.length)
      self.tokenizer.enable_padding(length=self.length, pad_id=preprocessor.tokenizer.pad_token_id)
      rows = self.tokenizer.encode_batch([_decoded(text) for text in texts])
      parts = {name: np.array([getattr(row, part) for row in rows], np.int32)
               for name, part in _PARTS.items()}  # fmt: skip
      tokens = {name: parts[name] for name in preprocessor(["a"])}
    label = np.array([self.labels.index(each) for each in labels], np.int32)
    return ArraySource(features={**tokens, "label": label})

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns float32 logits [n, classes]."""
    given = {spec.name: batch[spec.name] for spec in self.network.inputs}
    return tf.cast(self.network(given, training=training), tf.float32)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """The cross-entropy of each text."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """The share of texts with the right label."""
    right = tf.argmax(outputs, axis=1, output_type=tf.int32) == tf.cast(batch["label"], tf.int32)
    return {"accuracy": weighted_sum(tf.cast(right, tf.float32), batch["weight"])}

  def export_signature(self) -> Callable[..., Any]:
    """Serves probabilities [n, classes] of tokens, the inputs of KerasHub's model, by name."""
    specs = {each.name: tf.TensorSpec([None, self.length], each.dtype, each.name)
             for each in self.network.inputs}  # fmt: skip

    @tf.function(input_signature=[specs])
    def serve(tokens: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      return {"probabilities": tf.nn.softmax(self.forward(dict(tokens), training=False))}

    return serve


@loopwright.register
class FineTunedLM(Pretrained):
  """A causal language model on texts; its loss is the mean cross-entropy per token, in nats."""

  def __init__(self, *, corpus: TextFiles, **options: Any) -> None:
    """Keeps its arguments.

    Args:
      corpus: the documents of each split; joined, with the end token between, and cut into rows.
      options: of `Pretrained`.
    """
    super().__init__(**options)
    self._corpus = corpus

  def read(self) -> Any:
    """Returns the language model."""
    return self.of_preset("CausalLM")

  def source(self, split: str) -> ArraySource:
    """Returns rows of `length` + 1 tokens; the rest at the end, shorter than a row, is left out."""
    tokenizer, stream = self.of_preset("Tokenizer"), list[int]()
    for document in self._corpus.documents(split):
      text = _decoded(document)
      if self.tokenizer is None:
        stream += np.asarray(tokenizer(text)).tolist()
      else:
        stream += self.tokenizer.encode(text, add_special_tokens=False).ids
      stream.append(tokenizer.end_token_id)
    width = self.length + 1
    rows = len(stream) // width
    if not rows:
      raise ConfigError(
        f"the {split} documents have {len(stream)} tokens, fewer than a row of FineTunedLM.length "
        f"{self.length}; give more text, or a smaller length."
      )
    token = np.array(stream[: rows * width], np.int32)
    return ArraySource(features={"token": token.reshape(rows, width)})

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns float32 logits [n, length, vocabulary]; row i is for token i + 1."""
    token = batch["token"][:, :-1]
    given = {"token_ids": token, "padding_mask": tf.ones_like(token)}
    return tf.cast(self.network(given, training=training), tf.float32)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """The cross-entropy of each token."""
    return Loss(*cross_entropy(outputs, {**batch, "target": batch["token"][:, 1:]}))

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """The loss in bits."""
    nats, count = self.loss(outputs, batch)
    return {"bits_per_token": (nats / math.log(2.0), count)}


class _Collected:
  """A loader for KerasHub's converters that takes the weights, under the names of transformers."""

  def __init__(self, stored: Mapping[str, safetensors_files.Stored]) -> None:
    """Begins without any; `stored` is what the preset has."""
    self._stored, self.values = stored, dict[str, np.ndarray]()

  def get_tensor(self, key: str) -> np.ndarray:
    """Returns what the preset has."""
    return self._stored[self._name(key)].read()

  def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
    """Puts the elements of a weight where the converter would read them."""
    name, value = self._name(hf_weight_key), np.array(keras_variable)
    into = self.values.setdefault(name, self.get_tensor(name).astype(value.dtype))
    turn = hook_fn or (lambda array, shape: array)
    np.put(into, turn(np.arange(into.size).reshape(into.shape), list(value.shape)), value)
    if not np.array_equal(turn(into, list(value.shape)), value):
      raise ConfigError(f"{name!r} is not only moved by KerasHub; use --format=keras.")

  def _name(self, key: str) -> str:
    """Returns the whole name; KerasHub leaves out the first part, such as "bert."."""
    return next((n for n in self._stored if n == key or n.endswith(f".{key}")), key)


def to_transformers(task: Pretrained, to: str) -> None:
  """Writes the network as a folder of transformers: the preset's, with the trained weights (host).

  Raises:
    ConfigError: the preset is no such folder, a classifier is no BERT, or `to` exists.
  """
  config, source = dict(task.config), safetensors_files.find(task.preset)
  kind, classifies = config.get("model_type"), isinstance(task, FineTunedClassifier)
  if source is None or kind is None or (classifies and kind != "bert") or os.path.exists(to):
    raise ConfigError(
      f"--format=transformers needs a preset of transformers, for a classifier of 'bert', and --to "
      f"a new folder; here are {task.preset!r}, {kind!r} and {to!r}: use --format=keras."
    )
  if task.int8:  # the adapters belong to the whole matrices too
    trained, task.int8 = task.trained_alone(), False
    for name, variable in task.build_model().items():
      variable.assign(trained[name])
  from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader

  with safetensors_files.contents(source) as stored:
    values = _Collected(stored)
    converter = TransformersPresetLoader(task.preset, config).converter
    converter.convert_weights(task.network.backbone, values, config)
  named = values.values
  if isinstance(task, FineTunedClassifier):
    named = {f"bert.{name.removeprefix('bert.')}": value for name, value in named.items()}
    head, labels = task.network.output_dense, dict(enumerate(task.labels))
    named |= {"classifier.weight": np.array(head.kernel).T, "classifier.bias": np.array(head.bias)}
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": labels}
    config |= {"hidden_act": "gelu_new", "label2id": {label: n for n, label in labels.items()}}
  os.makedirs(to)
  for name in os.listdir(task.preset):
    if name.endswith((".json", ".txt", ".model")) and not name.endswith(safetensors_files.INDEX):
      shutil.copy(os.path.join(task.preset, name), to)
  files.atomic_write(os.path.join(to, "config.json"), json.dumps(config, indent=2).encode())
  safetensors_files.write(os.path.join(to, f"model{safetensors_files.SUFFIX}"), named)


def _decoded(text: str | bytes) -> str:
  return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def _is_frozen_matrix(layer: keras.Layer) -> bool:
  """Whether 8 bits leave gradients right: Keras's tied output layer passes them by rounding."""
  kinds = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)
  return isinstance(layer, kinds) and not isinstance(layer, keras.layers.ReversibleEmbedding)


def _keras_hub() -> Any:
  try:
    return importlib.import_module("keras_hub")
  except ImportError as error:
    raise ConfigError(
      f"pretrained models need the package keras-hub, which cannot be imported ({error}); run: "
      "pip install 'loopwright[hub]'."
    ) from error


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the network of a run; returns the exit status (host)."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("run", help="the run folder")
  parser.add_argument("--to", required=True, help="the new folder")
  parser.add_argument("--format", choices=("keras", "transformers"), default="keras")
  given = parser.parse_args(argv)
  keras.config.disable_interactive_logging()
  try:
    task = loopwright.load(given.run).task
    if not isinstance(task, Pretrained):
      raise ConfigError(
        f"{given.run!r} is a run of {type(task).__name__}, not of a pretrained model."
      )
    if given.format == "keras":
      task.network.save_to_preset(given.to)
    else:
      to_transformers(task, given.to)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(f"{given.to}: the network of {given.run}, {task.network.count_params():,} parameters")
  return 0
