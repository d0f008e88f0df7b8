"""Evaluation by generation: a decoder continues texts, each replica its part of them.

    import loopwright.tasks.generation
    run.task = @Continued()
    Continued.corpus = @python_library()
    Continued.context = 256
    Continued.continued_bytes = 32

It trains as `LanguageModel` does. In evaluation each row is the beginning of a text and its end:
the network reads the beginning and writes the rest, the likeliest byte each time. See
docs/language-model.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import keras
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, ConfigError, EvalStep
from loopwright.metrics import weighted_sum
from loopwright.tasks.decoder import Cache, Decoder, decoder
from loopwright.tasks.language_model import LanguageModel, TextFiles, packed


def continued(
  model: Decoder, prompt: tf.Tensor, count: int, *, cached: bool = True
) -> tuple[tf.Tensor, tf.Tensor]:
  """Continues each prompt, the likeliest byte each time (host or replica).

  Args:
    model: the decoder.
    prompt: int32 [n, p], p >= 1 known: the first tokens of each document.
    count: bytes to write, at least 1.
    cached: keep keys and values, so that a step reads one token; else it reads all of them.

  Returns:
    The bytes, int32 [n, count], and the logits of each, float32 [n, count, 256].
  """
  rows, begun = tf.shape(prompt)[0], int(prompt.shape[1])

  def at(place: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_to(place, [rows, tf.size(place)])

  def read(token: tf.Tensor, place: tf.Tensor, cache: Cache) -> tuple[tf.Tensor, Cache]:
    logits, cache = model.read_on({"token": token, "position": at(place)}, cache)
    return logits[:, -1], cache

  def next_cached(done: tf.Tensor, token: tf.Tensor, cache: Cache) -> tuple[tf.Tensor, Cache]:
    return read(token[:, tf.newaxis], tf.reshape(begun + done, [1]), cache)

  def next_anew(
    done: tf.Tensor, token: tf.Tensor, window: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    here = tf.range(begun + count) == begun + done
    window = tf.where(here, token[:, tf.newaxis], window)
    logits = model({"token": window, "position": at(tf.range(begun + count))})
    return logits[:, begun + done], window

  further: Callable[..., Any]
  state: Any
  if cached:
    further, empty = next_cached, model.empty_cache(rows, begun + count)
    first, state = read(prompt, tf.range(begun), empty)
  else:
    further, state = next_anew, tf.pad(prompt, [[0, 0], [0, count]])
    first = model({"token": state, "position": at(tf.range(begun + count))})[:, begun - 1]
  written = tf.TensorArray(tf.float32, count, element_shape=first.shape)

  def body(done: tf.Tensor, logits: tf.Tensor, state: Any, written: tf.TensorArray) -> Any:
    found, state = further(done, likeliest(logits), state)
    return done + 1, found, state, written.write(done, logits)

  _, last, _, written = tf.while_loop(
    lambda done, *_: done < count - 1, body, (tf.constant(0), first, state, written)
  )
  logits = tf.transpose(written.write(count - 1, last).stack(), [1, 0, 2])
  return likeliest(logits), logits


def likeliest(logits: tf.Tensor) -> tf.Tensor:
  """Returns the byte with the largest logit, the first of equal ones, int32."""
  return tf.argmax(logits, axis=-1, output_type=tf.int32)


@loopwright.register
class Continued(LanguageModel):
  """A language model that is also evaluated by what it writes."""

  def __init__(
    self,
    *,
    corpus: TextFiles,
    network: Callable[[], keras.Model] = decoder,
    context: int = 256,
    packing: str = "cut",
    continued_bytes: int = 32,
    cached: bool = True,
  ) -> None:
    """Keeps its arguments; those not described here are as for `LanguageModel`.

    Args:
      network: makes a `Decoder`.
      continued_bytes: at the end of each row of `context` bytes of evaluation, to be written.
      cached: write with a cache of keys and values.

    Raises:
      ConfigError: no byte is left to begin with, or to write.
    """
    super().__init__(corpus=corpus, network=network, context=context, packing=packing)
    if not 0 < continued_bytes < context:
      raise ConfigError(
        f"Continued.continued_bytes is {continued_bytes}; it must be from 1 to {context - 1}, as "
        f"Continued.context is {context}."
      )
    self._count, self._cached = continued_bytes, cached

  def source(self, split: str) -> loopwright.Source | dict[str, loopwright.Source]:
    """Returns the packed documents; for evaluation the rows that one document fills."""
    if split == "train":
      return super().source(split)
    rows = packed(cast(TextFiles, self._corpus).documents(split), self.context)
    whole = rows["position"][:, -1] == self.context - 1
    if not whole.any():
      raise ConfigError(
        f"no text of evaluation has {self.context} bytes; make Continued.context smaller."
      )
    return ArraySource(features={name: array[whole] for name, array in rows.items()})

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Also logs how many of the bytes that it writes are those of the text.

    "byte_accuracy" is the share of bytes, "exact" that of rows without a wrong one.
    """
    super().eval_step(step, batch)
    prompt, text = batch["token"][:, : -self._count + 1 or None], batch["target"][:, -self._count :]
    written, _ = continued(self.model, prompt, self._count, cached=self._cached)
    right = tf.cast(written == text, tf.float32)
    step.log(
      {
        "byte_accuracy": weighted_sum(tf.reduce_mean(right, axis=1), batch["weight"]),
        "exact": weighted_sum(tf.reduce_min(right, axis=1), batch["weight"]),
      }
    )
