"""Attention in one function, fused where the device has it.

There are three ways, and "auto" chooses one of them: "plain" is Keras's, which keeps the weights of
all queries for the backward pass; "blocks" computes them for 128 queries at a time, and again in
the backward pass, so memory grows with the length, not with its square; "cudnn" is the fused one of
NVIDIA's library. Dropout of the weights is in none of them: put it on what comes out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import config

from loopwright.distribution import placement
from loopwright.errors import ConfigError, unknown
from loopwright.graphs import randomness
from loopwright.graphs.autograph import as_written
from loopwright.host.replacing import wrap
from loopwright.layers import cudnn

WAYS = ("auto", "plain", "blocks", "cudnn")
BLOCK = 128
"""Queries at a time."""
LONG = 2048
"""Queries from which on "auto" takes blocks on GPUs, where the fused one cannot be had."""


class Seen(NamedTuple):
  """Which keys a query sees: all, but for what these say; see `attention`."""

  causal: bool = False
  segment_ids: tf.Tensor | None = None
  mask: tf.Tensor | None = None

  def tokens(self, to: Any, length: Any, at: tf.Tensor | None = None) -> tf.Tensor | None:
    """Returns bool [to, from] or [n, to, from], None for all.

    Args:
      to: queries.
      length: of the keys.
      at: int32, the places of the queries that are asked about; None for all.
    """
    # Of operations that DTensor can lay out over a mesh, unlike band_part and `[:, tf.newaxis]`.
    found = []
    if self.segment_ids is not None:
      own = self.segment_ids if at is None else tf.gather(self.segment_ids, at, axis=1)
      found.append(tf.equal(tf.expand_dims(own, 2), tf.expand_dims(self.segment_ids, 1)))
    if self.causal:
      # In float32: the host computes with int32, also where the model is on a GPU.
      places = tf.cast(tf.range(to) if at is None else at, tf.float32)
      order = tf.cast(tf.range(length), tf.float32)
      found.append(tf.expand_dims(places, 1) >= tf.expand_dims(order, 0))
    return functools.reduce(tf.logical_and, found) if found else None

  def heads(self, to: Any, length: Any, at: tf.Tensor | None = None) -> tf.Tensor | None:
    """Returns the same for each head, [..., 1 or heads, to, from], with the mask."""
    pairs = self.tokens(to, length, at)
    found = [] if pairs is None else [tf.expand_dims(pairs, -3)]
    if self.mask is not None:
      found.append(self.mask if at is None else tf.gather(self.mask, at, axis=2))
    return functools.reduce(tf.logical_and, found) if found else None


def attention_mask(segment: tf.Tensor, *, causal: bool = True) -> tf.Tensor:
  """Returns bool [n, to, from]: whether a token sees another, for segments int [n, length].

  It sees those of its own document, with `causal` up to itself. Make it once for all layers, such
  as `keras.layers.MultiHeadAttention(...)(x, x, attention_mask=mask)`. Padding sees padding, so no
  row is empty, and no document sees it.

  >>> lw.attention_mask(tf.constant([[1, 1, 2]]))[0].numpy().astype(int).tolist()
  [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
  """
  length = tf.shape(segment)[1]
  return Seen(causal, segment).tokens(length, length)


@as_written
def attention(
  query: tf.Tensor,
  key: tf.Tensor,
  value: tf.Tensor,
  *,
  causal: bool = False,
  segment_ids: tf.Tensor | None = None,
  mask: tf.Tensor | None = None,
  scale: float | None = None,
  way: str = "auto",
) -> tf.Tensor:
  """Returns the mean of values that each query sees, weighted by softmax(scale * query . key).

  Vaswani et al., "Attention Is All You Need" (2017), section 3.2; grouped queries: Ainslie et al.,
  "GQA" (2023). The softmax is in float32. A query that sees nothing gets a mean without meaning.

  >>> query = key = value = tf.ones([1, 3, 2, 4]) * tf.reshape([1.0, 2.0, 3.0], [1, 3, 1, 1])
  >>> lw.attention(query, 0 * key, value, causal=True)[0, :, 0, 0].numpy().tolist()
  [1.0, 1.5, 2.0]

  Args:
    query: [n, to, heads, size].
    key: [n, from, groups, size]; `heads / groups` heads of queries share one of keys and values.
    value: as `key`.
    causal: token i sees tokens up to i.
    segment_ids: numbers [n, length]; a token sees those with the same number, as the documents of
      a packed row have. Only where queries and keys are of the same tokens.
    mask: bool [1 or n, 1 or heads, to, from], which further limits what is seen.
    scale: None for 1 / sqrt(size).
    way: "plain", "blocks", "cudnn" (on a GPU, in float16 or bfloat16, with static shapes; it has no
      second derivative), or "auto": plain on CPUs; on GPUs cudnn in a training step, if a trial on
      the device agrees with plain, else blocks for long rows and plain for others.

  Raises:
    ConfigError: `way` is unknown or cannot be had here, or the shapes do not fit.
  """
  require_way("way", way)
  seen = Seen(causal, segment_ids, mask)
  _require_shapes(query, key, seen)
  shape = _shape(query, key, value, seen, scale)
  chosen = _auto(shape, query) if way == "auto" else way
  if chosen == "cudnn":
    if (why := _missing(shape)) or shape is None:
      raise _error(f"attention cannot take the way 'cudnn': {why}; take 'auto' or 'blocks'.")
    return _fused(query, key, value, seen, shape)
  if chosen == "blocks":
    return _blocks(query, key, value, seen, scale)
  return _plain(query, key, value, seen.heads(tf.shape(query)[1], tf.shape(key)[1]), scale)


def require_way(what: str, way: str) -> None:
  """Raises a ConfigError, which begins with `what`, unless there is such a way of attention."""
  if way not in WAYS:
    raise unknown(what, way, WAYS)


def use_in_keras() -> None:
  """Keras's layers with `flash_attention=True` use `attention` from now on (host).

  On TensorFlow Keras refuses this option; layers without it do not change.
  """
  from keras.src.backend.tensorflow import nn

  if not hasattr(nn.dot_product_attention, "__wrapped__"):
    wrap(nn, "dot_product_attention", _for_keras)


def _for_keras(
  usual: Any, query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None,
  scale: Any = None, is_causal: bool = False, flash_attention: bool | None = None, **options: Any,
) -> tf.Tensor:  # fmt: skip
  if not flash_attention or bias is not None or any(each is not None for each in options.values()):
    return usual(query, key, value, bias, mask, scale, is_causal, flash_attention, **options)
  return attention(query, key, value, causal=is_causal, mask=mask, scale=scale)


def _require_shapes(query: tf.Tensor, key: tf.Tensor, seen: Seen) -> None:
  heads = [(x.shape[2] if len(x.shape) == 4 else 0) or 0 for x in (query, key)]
  if not all(heads) or heads[0] % heads[1]:
    raise _error(
      f"attention got queries of shape {query.shape} and keys of {key.shape}; both must be "
      "[n, length, heads, size], and the heads of the keys a number that divides the queries'."
    )
  if seen.segment_ids is not None and query.shape[1] != key.shape[1]:
    raise _error(
      f"attention got segment_ids, {query.shape[1]} queries and {key.shape[1]} keys; these must be "
      "of the same tokens: give a mask instead."
    )
  if not tf.as_dtype(query.dtype).is_floating:
    raise _error(f"attention got queries of {query.dtype}; they must be floats: cast them.")
  if seen.mask is not None and tf.as_dtype(seen.mask.dtype) != tf.bool:
    raise _error(f"attention got a mask of {seen.mask.dtype}; it must be bool, True where seen.")
  n, to = query.shape[:2]
  for name, given, shape in (
    ("segment_ids", seen.segment_ids, (n, to)),
    ("a mask", seen.mask, (n, heads[0], to, key.shape[1])),
  ):
    has = tf.TensorShape(shape if given is None else given.shape)
    try:
      tf.broadcast_static_shape(has, tf.TensorShape(shape))
    except ValueError:
      raise _error(f"attention got {name} of shape {has}; it must be {shape}.") from None


def _error(text: str) -> ConfigError:
  error = ConfigError(text)
  error._keras_call_info_injected = True  # type: ignore[attr-defined]  # Keras adds nothing to it
  return error


# ---- The ways ----


def _plain(
  query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, visible: tf.Tensor | None, scale: float | None
) -> tf.Tensor:
  share = query.shape[2] // key.shape[2]
  if share > 1:
    key, value = (keras.ops.repeat(each, share, axis=2) for each in (key, value))
  return keras.ops.dot_product_attention(query, key, value, mask=visible, scale=scale)


def _blocks(
  query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, seen: Seen, scale: float | None
) -> tf.Tensor:
  """A block of queries at a time; as it sees all its keys, its softmax needs no second pass."""
  length, to = (each.shape[1] or tf.shape(each)[1] for each in (key, query))
  count = -(-to // BLOCK)
  sums = tf.float32 if query.dtype.size < 4 else query.dtype

  def split(x: tf.Tensor) -> tf.Tensor:
    """[n, to, heads, size] -> [blocks, n, BLOCK, heads, size]."""
    n, _, *rest = tf.unstack(tf.shape(x))
    padded = tf.pad(x, [[0, 0], [0, count * BLOCK - to], [0, 0], [0, 0]])
    parts = tf.reshape(padded, [n, count, BLOCK, *rest])
    return tf.ensure_shape(tf.transpose(parts, [1, 0, 2, 3, 4]), [None, None, BLOCK, *x.shape[2:]])

  def joined(parts: tf.Tensor) -> tf.Tensor:
    whole = tf.reshape(tf.transpose(parts, [1, 0, 2, 3, 4]), [-1, count * BLOCK, *query.shape[2:]])
    return tf.ensure_shape(whole[:, :to], query.shape)

  def one(number: tf.Tensor, queries: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    at = tf.minimum(number * BLOCK + tf.range(BLOCK), to - 1)
    return _plain(queries, key, value, seen.heads(to, length, at), scale)

  @tf.custom_gradient
  def run(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> Any:
    parts = split(query)

    def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
      given = split(upstream)

      def body(number: tf.Tensor, found: Any, of_key: tf.Tensor, of_value: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
          inputs = [tf.gather(parts, number), tf.identity(key), tf.identity(value)]
          tape.watch(inputs)
          out = one(number, *inputs)
        own, *more = tape.gradient(out, inputs, output_gradients=tf.gather(given, number))
        more = [tf.cast(each, sums) for each in more]
        return number + 1, found.write(number, own), of_key + more[0], of_value + more[1]

      begin = tf.TensorArray(query.dtype, count, element_shape=parts.shape[1:])
      zeros = [tf.zeros_like(each, sums) for each in (key, value)]
      _, found, *more = tf.while_loop(
        lambda number, *_: number < count, body, [0, begin, *zeros],
        parallel_iterations=1, maximum_iterations=count,
      )  # fmt: skip
      return [joined(found.stack()), *(tf.cast(each, query.dtype) for each in more)]

    out = tf.map_fn(
      lambda number: one(number, tf.gather(parts, number), key, value), tf.range(count),
      fn_output_signature=tf.TensorSpec(parts.shape[1:], query.dtype), parallel_iterations=1,
    )  # fmt: skip
    return joined(out), gradient

  return run(query, key, value)


def _fused(
  query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, seen: Seen, shape: cudnn.Shape
) -> tf.Tensor:
  """The fused one is causal by itself; all else that is not seen gets a bias."""
  bias = None
  if shape.bias:
    visible = seen._replace(causal=False).heads(shape.to, shape.origin)
    zero, hidden = (tf.constant(each, shape.dtype) for each in (0.0, cudnn.HIDDEN[shape.dtype]))
    bias = tf.where(visible, zero, hidden)
  return cudnn.attention(query, key, value, bias, shape)


# ---- The choice ----


def _shape(
  query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, seen: Seen, scale: float | None
) -> cudnn.Shape | None:
  """Returns what the fused one would be written for; None if it cannot be."""
  rows, to, heads, size = query.shape
  given = [*query.shape, *key.shape, *([] if seen.mask is None else seen.mask.shape)]
  alike = key.shape == value.shape and query.dtype == key.dtype == value.dtype
  if None in given or not alike or not isinstance(scale, int | float | None):
    return None
  bias = [] if seen.segment_ids is None else [rows, 1]
  if seen.mask is not None:
    bias = [max(pair) for pair in zip(bias or [1, 1], seen.mask.shape[:2], strict=True)]
  return cudnn.Shape(
    tf.as_dtype(query.dtype), rows, to, key.shape[1], heads, key.shape[2], size,
    1 / math.sqrt(size) if scale is None else float(scale), seen.causal, tuple(bias),
    config.is_op_determinism_enabled(),
  )  # fmt: skip


def _auto(shape: cudnn.Shape | None, query: tf.Tensor) -> str:
  if not placement.here().on_gpus:
    return "plain"
  # Outside a step, such as in an export, what is traced may run on a device without the library.
  if shape and randomness.entered_stream() is not None and not _missing(shape):
    return "cudnn"
  return "blocks" if (query.shape[1] or 0) >= LONG else "plain"


def _missing(shape: cudnn.Shape | None) -> str:
  """Why the fused one cannot be had here, or ""; tries it on the device, once for its kind."""
  if shape is None:
    return "it needs static shapes, values as wide as keys, and one dtype"
  if not placement.here().on_gpus:
    return "its kernels need a GPU"
  if why := shape.refused():
    return why
  small = shape._replace(
    rows=2, to=64, origin=64, heads=2 * shape.heads // shape.groups, groups=2,
    bias=shape.bias and (2, 1),
  )  # fmt: skip
  return tried(small, placement.here().devices[0])


@functools.cache
def tried(shape: cudnn.Shape, device: str) -> str:
  """Compares the fused one and its gradients with the plain one (any context).

  Returns:
    Why it cannot be used there, which the log says too; "" if it can.
  """
  try:
    with futures.ThreadPoolExecutor(1) as aside:  # no graph, tape or replica is around it there
      apart = aside.submit(_apart, shape, device).result()
  except Exception as error:
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
  else:
    near = 2**-8 if shape.dtype == tf.float16 else 2**-5  # four units in the last place of 1
    why = "" if apart < near else f"it differs from plain by {apart:.2g} of the largest value"
  kind = f"{shape.dtype.name}, heads of {shape.size}"
  if why:
    logging.warning("attention on %s (%s) is not cuDNN's, because %s", device, kind, why)
  else:
    logging.info("attention on %s (%s): cuDNN's, %.1g from plain", device, kind, apart)
  return why


def _apart(shape: cudnn.Shape, device: str) -> float:
  """Returns the largest difference of output and gradients, relative to the largest value."""
  of_query = [shape.rows, shape.to, shape.heads, shape.size]
  of_key = [shape.rows, shape.origin, shape.groups, shape.size]
  rng = np.random.default_rng(0)
  with tf.device(device):
    given = [tf.cast(rng.normal(size=x), shape.dtype) for x in (of_query, of_key, of_key, of_query)]
    wide = [tf.cast(each, tf.float32) for each in given]
    documents = tf.constant(np.sort(rng.integers(0, 3, [shape.rows, shape.to])))
    seen = Seen(shape.causal, documents if shape.bias else None)
    visible = seen.heads(shape.to, shape.origin)
    expected = _with_gradients(lambda q, k, v: _plain(q, k, v, visible, shape.scale), *wide)
    found = _with_gradients(lambda q, k, v: _fused(q, k, v, seen, shape), *given)
    return max(
      (float(tf.reduce_max(tf.abs(tf.cast(one, tf.float32) - two)) / tf.reduce_max(tf.abs(two)))
       for one, two in zip(found, expected, strict=True)),
      key=lambda apart: (math.isnan(apart), apart),
    )  # fmt: skip


def _with_gradients(function: Callable[..., tf.Tensor], *given: tf.Tensor) -> list[tf.Tensor]:
  """Returns the output for all but the last, and their gradients from the last, the output's."""
  *inputs, upstream = given
  with tf.GradientTape() as tape:
    tape.watch(inputs)
    out = function(*inputs)
  return [out, *tape.gradient(out, inputs, output_gradients=upstream)]
