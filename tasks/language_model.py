"""A language model over bytes: a small decoder-only transformer, trained on any text.

    import loopwright.tasks.language_model
    run.task = @LanguageModel()
    LanguageModel.corpus = @TextFiles()
    TextFiles.path = 'my_texts/'

    python -m loopwright.tasks.language_model runs/language_model --prompt "def " --bytes 400

Documents are packed into sequences of one length. Attention never crosses document boundaries, and
each byte is a target once per epoch. The loss is a mean over bytes: each replica returns the sum
over its own bytes and their number, so N replicas match one although their numbers differ.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import hashlib
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, ConfigError, Loss, Mixture, Packed, Source, Task
from loopwright.host import bounded
from loopwright.layers.attention import require_way
from loopwright.metrics import Weighted, weighted_sum

if __name__ == "__main__":  # gin would import this module a second time, under its real name
  from loopwright.tasks import language_model

  sys.exit(language_model.main())

BYTES = 256
START = 256
"""The token before the first byte of a document; only an input, never a target."""
ROTARY_BASE = 10_000.0
NO_TARGET = -1
INPUTS = ("token", "position")
"""The features that the network reads."""
NOT_EVERYWHERE = (
  *("site-packages", "dist-packages", "config-*", "_sysconfigdata*", "__pycache__"),
  *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"),
)
"""What differs between installations of Python, or may be missing in one."""
ALIKE = ("encodings",)
"""Generated tables that repeat one another, so that most of one for evaluation is in training."""


# ---- The corpus ----


@loopwright.register
class TextFiles:
  """Documents: the files of a folder, or two parts of one file."""

  def __init__(
    self,
    *,
    path: str,
    pattern: str = "*",
    leave_out: Sequence[str] = (),
    eval_fraction: float = 0.1,
  ) -> None:
    """Keeps its arguments; `documents` reads the files.

    Args:
      path: a file, or a folder with its subfolders. Hidden files and folders are left out.
      pattern: of file names, such as `*.py`.
      leave_out: patterns for names of files and folders to leave out.
      eval_fraction: the share for evaluation. Of a single file, its end. Of a folder, about this
        share of the files, chosen by a hash of their names; so a new file moves no other.

    Raises:
      ConfigError: `path` does not exist, or `eval_fraction` is out of range.
    """
    if not os.path.exists(path):
      raise ConfigError(f"TextFiles.path is {path!r}, which does not exist; give a file or folder.")
    if not 0 < eval_fraction < 1:
      raise ConfigError(f"TextFiles.eval_fraction is {eval_fraction}; it must be between 0 and 1.")
    self._path, self._pattern, self._leave_out = path, pattern, tuple(leave_out)
    self._eval_fraction = eval_fraction

  def documents(self, split: str) -> list[bytes]:
    """Returns the documents of "train" or "eval" that are not empty, ordered by name.

    Raises:
      ConfigError: there are none.
    """
    parts = self._files(split) if os.path.isdir(self._path) else self._parts(split)
    documents = [part for part in parts if part]
    if not documents:
      raise ConfigError(
        f"no text for {split!r} in {self._path!r} (pattern {self._pattern!r}); check path and "
        "pattern, or change eval_fraction: a hash of its name puts a file in train or eval."
      )
    return documents

  def _parts(self, split: str) -> list[bytes]:
    text = _read(self._path)
    cut = len(text) - round(len(text) * self._eval_fraction)
    return [text[cut:] if split == "eval" else text[:cut]]

  def _files(self, split: str) -> Iterator[bytes]:
    for name in sorted(self._names()):
      if (_share(name) < self._eval_fraction) == (split == "eval"):
        yield _read(os.path.join(self._path, name))

  def _names(self) -> Iterator[str]:
    for folder, folders, files in os.walk(self._path):
      folders[:] = [name for name in folders if not self._is_left_out(name)]
      for name in files:
        if fnmatch.fnmatch(name, self._pattern) and not self._is_left_out(name):
          within = os.path.relpath(os.path.join(folder, name), self._path)
          yield within.replace(os.sep, "/")

  def _is_left_out(self, name: str) -> bool:
    return name.startswith(".") or any(fnmatch.fnmatch(name, each) for each in self._leave_out)


@loopwright.register
def python_library(*, eval_fraction: float = 0.05) -> TextFiles:
  """Python's standard library, without what some installations lack and tables that are alike."""
  return TextFiles(
    path=sysconfig.get_path("stdlib"),
    pattern="*.py",
    leave_out=(*NOT_EVERYWHERE, *ALIKE),
    eval_fraction=eval_fraction,
  )


def _read(path: str) -> bytes:
  return bounded.content(path, "a text", remedy="make it readable, or leave it out")


def _share(name: str) -> float:
  """Returns a number in [0, 1) that depends only on the name."""
  return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def shifted(documents: Sequence[bytes]) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns the bytes of all documents as "target", what is before each as "token"; the lengths."""
  lengths = np.array([len(document) for document in documents])
  target = np.frombuffer(b"".join(documents), np.uint8).astype(np.int16)
  token = np.concatenate([[START], target[:-1]]).astype(np.uint16)
  token[np.cumsum(lengths) - lengths] = START
  return {"token": token, "target": target}, lengths


def packed(documents: Sequence[bytes], context: int) -> dict[str, np.ndarray]:
  """Packs documents one after the other into sequences, and cuts where one is full (host, NumPy).

  Every byte is a target once. Its input is the byte before it, or START. A document that continues
  in the next sequence starts anew there: what is before the cut is not seen.

  Args:
    documents: at least one, none of them empty.
    context: tokens in a sequence.

  Returns:
    Arrays [sequences, context]: "token", uint16, 0 .. 255 or START; "position", int32, from 0 in
    each piece of a document; "target", int16, the byte to predict, or NO_TARGET in the padding of
    the last sequence, where each token is its own piece.
  """
  tokens, lengths = shifted(documents)
  total = int(lengths.sum())
  padded = -(-total // context) * context
  starts = np.cumsum(lengths) - lengths
  target = np.full(padded, NO_TARGET, np.int16)
  token = np.full(padded, START, np.uint16)
  target[:total], token[:total] = tokens["target"], tokens["token"]
  index = np.arange(padded)
  first = np.where(index < total, index // context * context, index)  # a piece begins here or later
  first[:total] = np.maximum(first[:total], np.repeat(starts, lengths))
  position = (index - first).astype(np.int32)
  arrays: dict[str, np.ndarray] = {"token": token, "position": position, "target": target}
  return {name: array.reshape([-1, context]) for name, array in arrays.items()}


# ---- The network ----

Attend: TypeAlias = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


class Attention(keras.layers.Layer):
  """Causal self-attention with rotary positions, without biases."""

  def __init__(self, *, width: int, heads: int) -> None:
    """Makes two projections: for queries, keys and values together, and for the output."""
    super().__init__()
    self._heads = heads
    self.project = keras.layers.Dense(3 * width, use_bias=False, name="query_key_value")
    self.output_layer = keras.layers.Dense(width, use_bias=False, name="output")

  def call(
    self, x: tf.Tensor, rotation: tuple[tf.Tensor, tf.Tensor], *, attend: Attend
  ) -> tf.Tensor:
    """Returns [n, length, width].

    Args:
      x: [n, length, width].
      rotation: from `rotary_angles`.
      attend: `loopwright.attention` of queries, keys and values: what a token sees, which way.
    """
    n, length, width = keras.ops.shape(x)
    shape = [n, length, 3, self._heads, width // self._heads]
    query, key, value = (
      keras.ops.squeeze(part, axis=2)
      for part in keras.ops.split(keras.ops.reshape(self.project(x), shape), 3, axis=2)
    )
    query, key = rotated(query, rotation), rotated(key, rotation)
    mixed = attend(query, key, value)
    return self.output_layer(keras.ops.reshape(mixed, [n, length, width]))


class Block(keras.layers.Layer):
  """x + attention(norm(x)), then x + mlp(norm(x)).

  The norm comes first: Xiong et al., "On Layer Normalization in the Transformer Architecture"
  (2020). RMSNorm: Zhang and Sennrich (2019). SwiGLU as the MLP: Shazeer, "GLU Variants Improve
  Transformer" (2020).
  """

  def __init__(self, *, name: str, width: int, heads: int, dropout: float) -> None:
    """Makes the layers; a gated MLP 8/3 as wide has as many parameters as a plain one 4 times."""
    super().__init__(name=name)
    hidden = -(-8 * width // 24) * 8
    self.attention_norm = keras.layers.RMSNormalization()
    self.attention = Attention(width=width, heads=heads)
    self.mlp_norm = keras.layers.RMSNormalization()
    self.gate = keras.layers.Dense(hidden, activation="silu", use_bias=False, name="gate")
    self.up = keras.layers.Dense(hidden, use_bias=False, name="up")
    self.down = keras.layers.Dense(width, use_bias=False, name="down")
    self.attention_dropout = keras.layers.Dropout(dropout)
    self.mlp_dropout = keras.layers.Dropout(dropout)

  def call(
    self,
    x: tf.Tensor,
    rotation: tuple[tf.Tensor, tf.Tensor],
    *,
    attend: Attend,
    training: bool = False,
  ) -> tf.Tensor:
    """Returns [n, length, width]."""
    mixed = self.attention(self.attention_norm(x), rotation, attend=attend)
    x = x + self.attention_dropout(mixed, training=training)
    normed = self.mlp_norm(x)
    mlp = self.down(self.gate(normed) * self.up(normed))
    return x + self.mlp_dropout(mlp, training=training)


class Transformer(keras.Model):
  """Tokens and positions -> float32 logits of the next byte; the embedding is also the output."""

  def __init__(
    self, *, layers: int, width: int, heads: int, dropout: float, attention: str
  ) -> None:
    """Makes the layers; see `transformer`."""
    super().__init__(name="transformer")
    self._head_width, self._way = width // heads, attention
    # float32 even under mixed precision, so that the logits are too.
    self.embedding = keras.layers.ReversibleEmbedding(
      START + 1,
      width,
      embeddings_initializer=keras.initializers.RandomNormal(stddev=0.02),
      dtype=keras.config.dtype_policy().variable_dtype,
      name="embedding",
    )
    self._names = [f"block_{number}" for number in range(layers)]
    for name in self._names:  # attributes: tf.train.Checkpoint does not track a list
      setattr(self, name, Block(name=name, width=width, heads=heads, dropout=dropout))
    self.dropout = keras.layers.Dropout(dropout)
    self.norm = keras.layers.RMSNormalization()

  @property
  def blocks(self) -> list[Block]:
    """The blocks, in order."""
    return [getattr(self, name) for name in self._names]

  def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> tf.Tensor:
    """Returns logits [n, length, 256] for "token" and "position", both int32 [n, length]."""
    token, position = inputs["token"], inputs["position"]
    rotation = rotary_angles(position, self._head_width, self.variable_dtype)
    attend = functools.partial(
      loopwright.attention, causal=True, segment_ids=pieces(position), way=self._way
    )
    x = self.dropout(self.embedding(token), training=training)
    for block in self.blocks:
      x = block(x, rotation, attend=attend, training=training)
    return self.embedding(self.norm(x), reverse=True)[..., :BYTES]


@loopwright.register
def transformer(
  *, layers: int = 4, width: int = 128, heads: int = 4, dropout: float = 0.0,
  attention: str = "auto",
) -> keras.Model:  # fmt: skip
  """A decoder-only transformer over bytes.

  Args:
    layers: number of blocks of attention and MLP.
    width: of the residual stream.
    heads: of attention; width / heads must be an even number.
    dropout: of the embedding and of the output of each attention and MLP.
    attention: the way of `loopwright.attention`: "auto", "plain", "blocks" or "cudnn".

  Raises:
    ConfigError: width / heads is not an even number, or the way of attention is unknown.
  """
  if heads < 1 or width % (2 * heads):
    raise ConfigError(
      f"transformer.width is {width} and transformer.heads {heads}; width / heads must be an even "
      f"number, because rotary positions need pairs: such as {2 * max(1, heads) * 16}."
    )
  require_way("transformer.attention", attention)
  model = Transformer(layers=layers, width=width, heads=heads, dropout=dropout, attention=attention)
  model({name: keras.Input([None], dtype="int32") for name in INPUTS})  # creates the variables
  return model


def pieces(position: tf.Tensor) -> tf.Tensor:
  """Returns the number of the piece of each token, int64 [n, length], for positions int.

  A piece begins at position 0. A token sees itself and the tokens before it in the same piece.
  """
  # Not in int32: the host computes with it, also where the model is on a GPU. The sums are exact.
  begins = tf.cast(tf.equal(tf.cast(position, tf.float32), 0.0), tf.float32)
  return tf.cast(tf.cumsum(begins, axis=1), tf.int64)


def rotary_angles(position: tf.Tensor, size: int, dtype: str) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns cosines and sines [n, length, 1, size / 2] for positions [n, length].

  Su et al., "RoFormer" (2021), equations 14 and 15.
  """
  frequency = ROTARY_BASE ** -(np.arange(size // 2) / (size // 2))
  angle = keras.ops.cast(position, dtype)[:, :, None, None] * keras.ops.cast(frequency, dtype)
  return keras.ops.cos(angle), keras.ops.sin(angle)


def rotated(x: tf.Tensor, rotation: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
  """Rotates the pairs (x[i], x[i + size / 2]) of [n, length, heads, size] by their angles."""
  cosine, sine = (keras.ops.cast(each, x.dtype) for each in rotation)
  left, right = keras.ops.split(x, 2, axis=-1)
  return keras.ops.concatenate(
    [left * cosine - right * sine, right * cosine + left * sine], axis=-1
  )


# ---- The task ----


@loopwright.register
class LanguageModel(Task):
  """Next-byte prediction; the loss is the mean cross-entropy per byte, in nats."""

  chance_loss = math.log(BYTES)

  def __init__(
    self,
    *,
    corpus: TextFiles | Mapping[str, TextFiles],
    network: Callable[[], keras.Model] = transformer,
    context: int = 256,
    packing: str = "cut",
    weights: Mapping[Any, Any] | None = None,
    examples_per_step: int = 1,
  ) -> None:
    """Keeps its arguments.

    Args:
      corpus: the documents of each split; or name -> such, to train on a mixture of them and to
        evaluate each.
      network: makes the model.
      context: bytes in a sequence, and so how far back a prediction can see.
      packing: "cut" cuts documents wherever a sequence is full; "best_fit" only those that are
        longer than a sequence, see `loopwright.Packed`.
      weights: of several corpora, see `loopwright.Mixture`; by steps of `examples_per_step`.
      examples_per_step: the batch size that these steps have.

    Raises:
      ConfigError: `context` is below 1, or `packing` is another.
    """
    if context < 1:
      raise ConfigError(f"LanguageModel.context is {context}; it must be 1 byte or more.")
    if packing not in ("cut", "best_fit"):
      raise ConfigError(f"LanguageModel.packing is {packing!r}; it must be 'cut' or 'best_fit'.")
    self._corpus, self._network, self.context = corpus, network, context
    self._packing, self._weights, self._each = packing, weights, examples_per_step

  def build_model(self) -> keras.Model:
    """Returns the network."""
    return self._network()

  def source(self, split: str) -> Source | dict[str, Source]:
    """Returns the packed documents of a split; of several corpora a mixture, or each."""
    if not isinstance(self._corpus, Mapping):
      return self._rows(self._corpus.documents(split))
    parts = {name: self._rows(corpus.documents(split)) for name, corpus in self._corpus.items()}
    if split == "eval":
      return parts
    weights = self._weights or dict.fromkeys(parts, 1)
    return Mixture(parts=parts, weights=weights, examples_per_step=self._each)

  def _rows(self, documents: Sequence[bytes]) -> Source:
    if self._packing == "cut":
      return ArraySource(features=packed(documents, self.context))
    tokens, lengths = shifted(documents)
    return Packed(ArraySource(features=tokens), lengths=lengths, length=self.context, cut=True)

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Casts the integers, which are stored small, to int32; marks the padding."""
    del training
    batch = {**batch, **{n: tf.cast(batch[n], tf.int32) for n in (*INPUTS, "target")}}
    if "segment" in batch:
      batch["target"] = tf.where(batch.pop("segment") > 0, batch["target"], NO_TARGET)
    return batch

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns float32 logits [n, context, 256] of each target."""
    return self.model({name: batch[name] for name in INPUTS}, training=training)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Cross-entropy: the weighted sum over this replica's targets, and their weighted number."""
    return Loss(*cross_entropy(outputs, batch))

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """The loss in bits."""
    nats, count = cross_entropy(outputs, batch)
    return {"bits_per_byte": (nats / math.log(2.0), count)}

  def derived(self, means: Mapping[str, float]) -> dict[str, float]:
    """Perplexity per byte, from the mean over all bytes; a mean of perplexities would differ."""
    return {"perplexity": float(np.exp2(means["bits_per_byte"]))}

  def export_signature(self) -> Any:
    """Serves text, int32 [n, length] -> float32 log-probabilities [n, length + 1, 256].

    Row i is for byte i, given the bytes before it; the last row is for the next byte.
    """

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32, "text")])
    def serve(text: tf.Tensor) -> dict[str, tf.Tensor]:
      token = tf.pad(text, [[0, 0], [1, 0]], constant_values=START)
      position = tf.broadcast_to(tf.range(tf.shape(token)[1]), tf.shape(token))
      logits = self.forward({"token": token, "position": position}, training=False)
      return {"log_probabilities": tf.nn.log_softmax(logits)}

    return serve


def cross_entropy(logits: tf.Tensor, batch: Batch) -> Weighted:
  """Returns (sum, number) of this replica's targets, each weighted by its row (replica)."""
  target = tf.cast(batch["target"], tf.int64)  # the host compares int32
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(target, 0), logits)
  counted = tf.cast(target >= 0, tf.float32) * batch["weight"][:, tf.newaxis]
  return weighted_sum(tf.reshape(losses, [-1]), tf.reshape(counted, [-1]))


# ---- Sampling ----


def sample(
  task: LanguageModel, prompt: bytes, count: int, *, temperature: float = 1.0, seed: int = 0
) -> bytes:
  """Continues `prompt` by `count` bytes (host).

  The document starts with the prompt. Only the last `context` tokens are seen.

  Args:
    task: with its model built.
    prompt: may be empty.
    count: bytes to draw.
    temperature: divides the logits; 0 always takes the most likely byte.
    seed: of the draws; the same seed gives the same text.

  Raises:
    ConfigError: `temperature` is negative.
  """
  if not temperature >= 0:
    raise ConfigError(f"temperature is {temperature}; it must be 0 or more.")
  rng, tokens, length = np.random.default_rng(seed), [START, *prompt], task.context
  positions = tf.range(length)[tf.newaxis]

  @tf.function
  def logits_at(token: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    return task.forward({"token": token, "position": positions}, training=False)[0, place]

  for _ in range(count):
    seen = tokens[-length:]
    window = np.zeros([1, length], np.int32)  # later places are not seen, so any value will do
    window[0, : len(seen)] = seen
    logits = logits_at(tf.constant(window), tf.constant(len(seen) - 1)).numpy().astype(np.float64)
    tokens.append(_draw(logits, temperature, rng))
  return bytes(tokens[1:])


def _draw(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
  if temperature == 0:
    return int(np.argmax(logits))
  scaled = (logits - logits.max()) / temperature
  odds = np.exp(scaled)
  return int(rng.choice(BYTES, p=odds / odds.sum()))


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints text drawn from a run's newest checkpoint, by its averages; returns the exit status."""
  parser = argparse.ArgumentParser(prog="python -m loopwright.tasks.language_model")
  parser.add_argument("model_dir", help="the folder of a run")
  parser.add_argument("--prompt", default="", help="start of the text")
  parser.add_argument("--bytes", type=int, default=400, help="bytes to draw")
  parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely")
  parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
  given = parser.parse_args(arguments)
  try:
    task = loopwright.load(given.model_dir).task
    if not isinstance(task, LanguageModel):
      raise ConfigError(
        f"{given.model_dir!r} is a run of {type(task).__name__}, not of a LanguageModel."
      )
    text = sample(
      task, given.prompt.encode(), given.bytes, temperature=given.temperature, seed=given.seed
    )
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(text.decode(errors="replace"))
  return 0
