"""The models of `benchmarks.models` in JAX with Optax, for `benchmarks.ecosystems`.

All data lies on the device. "jax" calls a jitted step from Python, "jax_scan" runs a block of steps
in one `lax.scan`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Weights = Sequence[Any]


def make(
  name: str,
  model: str,
  weights: Sequence[np.ndarray],
  batches: Any,
  steps: int,
) -> Callable[[], float]:
  """Returns what runs `steps` steps and gives their mean loss.

  Args:
    name: a key of `MAKERS`.
    model: a key of `FORWARD`.
    weights: in the order of Keras.
    batches: (features, labels), arrays [batches, examples, ...]; read over and over.
    steps: of a block.
  """
  forward, optimizer = FORWARD[model], optax.adam(1e-3, eps=1e-7)

  def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    def mean_loss(params: Any) -> Any:
      logits = forward(params, batch[0])
      return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    loss, gradients = jax.value_and_grad(mean_loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = [jnp.array(value) for value in weights]
  return MAKERS[name](step, params, optimizer.init(params), batches, steps)


def _stepwise(step: Any, params: Any, state: Any, batches: Any, steps: int) -> Callable[[], float]:
  count = len(batches[1])
  on_device = [jax.tree.map(lambda a, i=i: jnp.array(a[i]), batches) for i in range(count)]

  @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
  def compiled(params: Any, state: Any, total: Any, batch: Any) -> tuple[Any, Any, Any]:
    params, state, loss = step(params, state, batch)
    return params, state, total + loss

  done = 0

  def block() -> float:
    nonlocal params, state, done
    total = jnp.zeros(())
    for number in range(done, done + steps):
      params, state, total = compiled(params, state, total, on_device[number % count])
    done += steps
    return float(total) / steps

  return block


def _scanned(step: Any, params: Any, state: Any, batches: Any, steps: int) -> Callable[[], float]:
  data, count = jax.tree.map(jnp.array, batches), len(batches[1])

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def compiled(params: Any, state: Any, data: Any, first: Any) -> tuple[Any, Any, Any]:
    def body(carry: Any, number: Any) -> tuple[Any, Any]:
      batch = jax.tree.map(lambda a: a[number % count], data)
      params, state, loss = step(*carry, batch)
      return (params, state), loss

    (params, state), losses = lax.scan(body, (params, state), first + jnp.arange(steps))
    return params, state, losses.mean()

  done = 0

  def block() -> float:
    nonlocal params, state, done
    params, state, loss = compiled(params, state, data, done)
    done += steps
    return float(loss)

  return block


MAKERS = {"jax": _stepwise, "jax_scan": _scanned}


# --- the models: logits from weights and features -----------------------------------------------


def _dense(weights: Weights, x: Any) -> Any:
  return x @ weights[0] + weights[1]


def _mlp(weights: Weights, x: Any) -> Any:
  return _dense(weights[2:], jax.nn.relu(_dense(weights, x.reshape(len(x), -1))))


def _cnn(weights: Weights, x: Any) -> Any:
  for kernel, bias in (weights[:2], weights[2:4]):
    layout = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout)
    x = jax.nn.relu(x + bias)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
  return _dense(weights[4:], x.reshape(len(x), -1))


def _many(weights: Weights, x: Any) -> Any:
  x = jax.nn.relu(_dense(weights, x.reshape(len(x), -1)))
  for layer in range(2, len(weights) - 2, 2):
    x = x + jax.nn.relu(_dense(weights[layer:], x))
  return _dense(weights[-2:], x)


def _embedding(weights: Weights, words: Any) -> Any:
  return _dense(weights[1:], weights[0][words].mean(axis=1))


def _rms_norm(x: Any, scale: Any) -> Any:
  wide = x.astype(jnp.float32)
  normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale
  return normed.astype(x.dtype)


def _rotated(x: Any, position: Any) -> Any:
  half = x.shape[-1] // 2
  angle = position[:, :, None, None] * 10_000.0 ** -(jnp.arange(half) / half)
  cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def language_model(
  weights: Weights, inputs: Any, heads: int = 4, layers: int = 4, dtype: Any = jnp.float32,
  implementation: str | None = None,
) -> Any:  # fmt: skip
  """Returns float32 logits, computed in `dtype`, with attention as JAX names it."""
  weights = [each.astype(dtype) if each.ndim > 1 else each for each in weights]
  embedding, position = weights[0], inputs["position"]
  x = embedding[inputs["token"]]
  n, length, width = x.shape
  for layer in range(layers):
    norm_1, project, output, norm_2, gate, up, down = weights[1 + 7 * layer : 8 + 7 * layer]
    mixed = (_rms_norm(x, norm_1) @ project).reshape(n, length, 3, heads, width // heads)
    query, key, value = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]
    query, key = _rotated(query, position), _rotated(key, position)
    mixed = jax.nn.dot_product_attention(
      query, key, value, is_causal=True, implementation=implementation
    )
    x = x + mixed.reshape(n, length, width) @ output
    normed = _rms_norm(x, norm_2)
    x = x + (jax.nn.silu(normed @ gate) * (normed @ up)) @ down
  return (_rms_norm(x, weights[-1]) @ embedding.T)[..., :256].astype(jnp.float32)


FORWARD: dict[str, Callable[[Weights, Any], Any]] = {
  "mlp": _mlp,
  "cnn": _cnn,
  "many": _many,
  "embedding": _embedding,
  "language_model": language_model,
}
