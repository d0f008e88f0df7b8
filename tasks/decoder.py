"""A decoder-only network as they are built today, for `LanguageModel`; see docs/language-model.md.

    import loopwright.tasks.decoder
    LanguageModel.network = @decoder

Beside rotary positions, RMSNorm and SwiGLU of `transformer` it has grouped queries: several heads
of queries share one head of keys and values (Ainslie et al., "GQA", 2023); queries and keys are
normalised (Henry et al., "Query-Key Normalization", 2020); and each projection is a matrix of its
own, as an optimizer of matrices, such as Muon, wants them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import tensorflow as tf

import loopwright
from loopwright.errors import ConfigError
from loopwright.layers.attention import require_way
from loopwright.optimizers.groups import grouped
from loopwright.tasks.language_model import (
  BYTES,
  ROTARY_BASE,
  START,
  Attend,
  pieces,
  rotary_angles,
  rotated,
)

if TYPE_CHECKING:
  from loopwright.host.lazy_keras import KerasOptimizer

Pair: TypeAlias = tuple[tf.Tensor, tf.Tensor]
Cache: TypeAlias = list[Pair]
"""Of each block the keys and values so far, [n, length, groups, size] each."""


def as_they_are(key: tf.Tensor, value: tf.Tensor) -> Pair:
  """Returns what attention looks up where there is no cache."""
  return key, value


def matrix(units: int, name: str) -> keras.layers.Layer:
  """Returns a projection without a bias."""
  return keras.layers.Dense(units, use_bias=False, name=name)


class GroupedAttention(keras.layers.Layer):
  """Causal self-attention whose heads of queries share fewer heads of keys and values."""

  def __init__(self, *, width: int, heads: int, groups: int) -> None:
    """Makes the four projections and the norms of queries and keys."""
    super().__init__(name="attention")
    self._size = width // heads
    self.query, self.to_output = matrix(width, "query"), matrix(width, "output")
    self.key = matrix(groups * self._size, "key")
    self.value = matrix(groups * self._size, "value")
    self.query_norm, self.key_norm = (keras.layers.RMSNormalization() for _ in range(2))

  def call(
    self,
    x: tf.Tensor,
    rotation: Pair,
    *,
    attend: Attend,
    looked_up: Callable[..., Pair] = as_they_are,
  ) -> tf.Tensor:
    """Returns [n, length, width].

    Args:
      x: as `rotation`, of `language_model.Attention`.
      rotation: of these tokens.
      attend: as well; what each of them sees, and the way.
      looked_up: keys and values of these tokens, before the heads share them, -> those to look up.
    """
    n, length, width = keras.ops.shape(x)
    query, key, value = (
      keras.ops.reshape(project(x), [n, length, project.units // self._size, self._size])
      for project in (self.query, self.key, self.value)
    )
    query = rotated(self.query_norm(query), rotation)
    key, value = looked_up(rotated(self.key_norm(key), rotation), value)
    mixed = attend(query, key, value)
    return self.to_output(keras.ops.reshape(mixed, [n, length, width]))


class DecoderBlock(keras.layers.Layer):
  """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

  def __init__(self, *, name: str, width: int, heads: int, groups: int) -> None:
    """Makes the layers; the MLP has about as many weights as one four times as wide."""
    super().__init__(name=name)
    self.attention_norm, self.mlp_norm = (keras.layers.RMSNormalization() for _ in range(2))
    self.attention = GroupedAttention(width=width, heads=heads, groups=groups)
    hidden = -(-8 * width // 24) * 8
    self.gate, self.up, self.down = (
      matrix(units, name) for units, name in ((hidden, "gate"), (hidden, "up"), (width, "down"))
    )

  def call(
    self,
    x: tf.Tensor,
    rotation: Pair,
    *,
    attend: Attend,
    looked_up: Callable[..., Pair] = as_they_are,
  ) -> tf.Tensor:
    """Returns [n, length, width]; the arguments are those of its attention."""
    x = x + self.attention(self.attention_norm(x), rotation, attend=attend, looked_up=looked_up)
    y = self.mlp_norm(x)
    return x + self.down(keras.ops.silu(self.gate(y)) * self.up(y))


_IN_BLOCK = {
  "input_layernorm.weight": "attention_norm/scale",
  "post_attention_layernorm.weight": "mlp_norm/scale",
  "self_attn.q_norm.weight": "attention/query_norm/scale",
  "self_attn.k_norm.weight": "attention/key_norm/scale",
  "self_attn.q_proj.weight": "attention/query/kernel.T",
  "self_attn.k_proj.weight": "attention/key/kernel.T",
  "self_attn.v_proj.weight": "attention/value/kernel.T",
  "self_attn.o_proj.weight": "attention/to_output/kernel.T",
  "mlp.gate_proj.weight": "gate/kernel.T",
  "mlp.up_proj.weight": "up/kernel.T",
  "mlp.down_proj.weight": "down/kernel.T",
}


class Decoder(keras.Model):
  """Tokens and positions -> float32 logits of the next byte; the embedding is also the output.

  Attributes:
    weight_names: names of the weights in Hugging Face's safetensors files of this architecture,
      Qwen3 with one matrix for input and output -> names here; see `WarmStart.rename`.
  """

  weight_names: Mapping[str, str] = {
    "model.embed_tokens.weight": "embedding/embeddings",
    "model.norm.weight": "norm/scale",
    **{f"model.layers.{{}}.{name}": f"block_{{}}/{here}" for name, here in _IN_BLOCK.items()},
  }

  def __init__(
    self, *, layers: int, width: int, heads: int, groups: int, base_width: int | None = None,
    attention: str = "auto",
  ) -> None:  # fmt: skip
    """Makes the layers; see `decoder`."""
    super().__init__(name="decoder")
    self._size, self._groups, self._way = width // heads, groups, attention
    self._output_scale = 1.0 if base_width is None else base_width / width
    self.embedding = keras.layers.ReversibleEmbedding(
      START + 1, width, name="embedding",
      embeddings_initializer=keras.initializers.RandomNormal(stddev=0.02),
      dtype=keras.config.dtype_policy().variable_dtype,
    )  # fmt: skip
    self._names = [f"block_{number}" for number in range(layers)]
    for name in self._names:  # attributes: tf.train.Checkpoint does not track a list
      setattr(self, name, DecoderBlock(name=name, width=width, heads=heads, groups=groups))
    self.norm = keras.layers.RMSNormalization()

  @property
  def transformers_config(self) -> dict[str, Any]:
    """The config.json of transformers for the weights; {} if none fits."""
    first = getattr(self, self._names[0])
    return {} if self._output_scale != 1.0 else {
      "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
      "vocab_size": START + 1, "bos_token_id": START, "tie_word_embeddings": True,
      "num_hidden_layers": len(self._names), "hidden_size": first.down.units,
      "intermediate_size": first.up.units, "hidden_act": "silu", "rms_norm_eps": 1e-6,
      "num_attention_heads": first.down.units // self._size, "num_key_value_heads": self._groups,
      "head_dim": self._size, "rope_theta": ROTARY_BASE,
    }  # fmt: skip

  def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> tf.Tensor:
    """Returns logits [n, length, 256] for "token" and "position", both int32 [n, length]."""
    del training
    attend = functools.partial(
      loopwright.attention, causal=True, segment_ids=pieces(inputs["position"]), way=self._way
    )
    return self._logits(inputs, attend, [as_they_are for _ in self._names])

  def read_on(self, inputs: Mapping[str, tf.Tensor], cache: Cache) -> tuple[tf.Tensor, Cache]:
    """Returns the logits of further tokens, which see those in the cache, and a cache with them.

    Args:
      inputs: as for `call`, of one document a row; its position is also the place in the cache.
      cache: from `empty_cache` or `read_on`. A token sees the places up to its own.
    """
    place = inputs["position"]
    rows = tf.broadcast_to(tf.range(tf.shape(place)[0])[:, tf.newaxis], tf.shape(place))
    at, new = tf.stack([rows, place], axis=-1), list(cache)
    before = tf.range(tf.shape(cache[0][0])[1]) <= place[:, tf.newaxis, :, tf.newaxis]

    def add_to(block: int) -> Callable[..., Pair]:
      def looked_up(key: tf.Tensor, value: tf.Tensor) -> Pair:
        old_key, old_value = cache[block]
        new[block] = (
          tf.tensor_scatter_nd_update(old_key, at, key),
          tf.tensor_scatter_nd_update(old_value, at, value),
        )
        return new[block]

      return looked_up

    attend = functools.partial(loopwright.attention, mask=before, way="plain")  # few queries
    return self._logits(inputs, attend, [add_to(block) for block in range(len(cache))]), new

  def empty_cache(self, rows: int | tf.Tensor, length: int) -> Cache:
    """Returns a cache for so many rows and tokens, all zeros."""
    zeros = tf.zeros([rows, length, self._groups, self._size], self.compute_dtype)
    return [(zeros, zeros) for _ in self._names]

  def _logits(
    self, inputs: Mapping[str, tf.Tensor], attend: Attend, looked_up: list[Callable[..., Pair]]
  ) -> tf.Tensor:
    rotation = rotary_angles(inputs["position"], self._size, self.variable_dtype)
    x = self.embedding(inputs["token"])
    for name, each in zip(self._names, looked_up, strict=True):
      x = getattr(self, name)(x, rotation, attend=attend, looked_up=each)
    x = self.norm(x)
    x = x if self._output_scale == 1.0 else x * self._output_scale
    return self.embedding(x, reverse=True)[..., :BYTES]


@loopwright.register
def decoder(
  *, layers: int = 4, width: int = 128, heads: int = 4, groups: int = 2,
  base_width: int | None = None, attention: str = "auto",
) -> keras.Model:  # fmt: skip
  """A decoder-only transformer over bytes with grouped queries.

  Args:
    layers: number of blocks.
    width: of the residual stream.
    heads: of queries; width / heads must be an even number.
    groups: heads of keys and values; must divide `heads`.
    base_width: divides the logits by width / base_width, as the width of a network needs whose
      rates were chosen at another one; see `by_width`. None for none.
    attention: the way of `loopwright.attention`: "auto", "plain", "blocks" or "cudnn".

  Raises:
    ConfigError: numbers that do not divide one another, or an unknown way of attention.
  """
  if heads < 1 or width % (2 * heads):
    raise ConfigError(
      f"decoder.width is {width} and decoder.heads {heads}; width / heads must be an even number, "
      f"because rotary positions need pairs: such as {2 * max(1, heads) * 16}."
    )
  if groups < 1 or heads % groups:
    raise ConfigError(
      f"decoder.groups is {groups} and decoder.heads {heads}; groups must divide heads, such as 1."
    )
  if base_width is not None and base_width < 1:
    raise ConfigError(f"decoder.base_width is {base_width}; it must be at least 1, or None.")
  require_way("decoder.attention", attention)
  model = Decoder(
    layers=layers, width=width, heads=heads, groups=groups, base_width=base_width,
    attention=attention,
  )  # fmt: skip
  model({name: keras.Input([None], dtype="int32") for name in ("token", "position")})
  return model


@loopwright.register
def by_width(
  *,
  of: Callable[[], KerasOptimizer],
  width: int,
  base_width: int,
  matrices: str = r".*/(query|key|value|output|gate|up|down)/kernel",
) -> KerasOptimizer:
  """An optimizer like Adam whose rate is right for every width if it is for `base_width`.

  Rates of matrices between hidden layers are in proportion to 1 / width; those of embedding and
  gains stay. Yang et al., "Tensor Programs V" (2022), table 8. The initial weights of `decoder`
  are in proportion already; give it the same `base_width`, and heads of one size at all widths.

  Args:
    of: a factory of the optimizer: `keras.Adam` or one with such updates, whatever the gradient's
      size. Not `keras.Muon`, whose rule has another width in it.
    width: of the network.
    base_width: at which the rate was chosen.
    matrices: a regular expression for the names of these matrices.
  """
  if base_width < 1 or width < 1:
    raise ConfigError(
      f"by_width.width is {width} and by_width.base_width {base_width}; both must be at least 1."
    )
  scale = {"learning_rate_scale": base_width / width}
  return grouped(of=of, groups={matrices: scale})
