"""The decoder in NumPy, and what it writes."""

import numpy as np


def with_noise(model):
  for number, variable in enumerate(model.trainable_variables):
    noise = np.random.default_rng(number).normal(size=variable.shape) * 0.3
    variable.assign(variable + noise)


def norm(x, gain):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * gain


def by_hand(model, tokens):
  """Float64 logits of one document: each head of queries looks up its group's key and value."""
  length, attention = len(tokens), model.block_0.attention
  size = attention._size
  heads_of_queries = attention.query.units // size
  sharing = heads_of_queries // (attention.key.units // size)
  [embedding] = [v.numpy().astype(np.float64) for v in model.variables if "embedding" in v.path]
  angle = np.arange(length)[:, None] * 10_000.0 ** -(np.arange(size // 2) / (size // 2))

  def turned(x):
    pairs = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=1)

  x = embedding[tokens]
  for layer in range(len(model._names)):
    block = getattr(model, f"block_{layer}")
    weight = {
      name: getattr(block.attention, name).kernel.numpy().astype(np.float64)
      for name in ("query", "key", "value", "to_output")
    }
    y = norm(x, block.attention_norm.scale.numpy())
    heads = []
    for head in range(heads_of_queries):
      group = head // sharing
      query, key, mixed = (
        y @ weight[name][:, at * size : (at + 1) * size]
        for name, at in (("query", head), ("key", group), ("value", group))
      )
      query = turned(norm(query, block.attention.query_norm.scale.numpy()))
      key = turned(norm(key, block.attention.key_norm.scale.numpy()))
      scores = np.where(np.tri(length, dtype=bool), query @ key.T / np.sqrt(size), -np.inf)
      odds = np.exp(scores - scores.max(axis=1, keepdims=True))
      heads.append(odds / odds.sum(axis=1, keepdims=True) @ mixed)
    x = x + np.concatenate(heads, axis=1) @ weight["to_output"]
    y = norm(x, block.mlp_norm.scale.numpy())
    gate, up, down = (
      getattr(block, name).kernel.numpy().astype(np.float64) for name in ("gate", "up", "down")
    )
    gated = y @ gate
    x = x + (gated / (1 + np.exp(-gated)) * (y @ up)) @ down
  return norm(x, model.norm.scale.numpy()) @ embedding.T[:, :256]


def written_by_hand(model, prompts, count):
  """The likeliest bytes and their logits, each document anew from its beginning for each byte."""
  found = []
  for prompt in prompts:
    tokens, logits = list(prompt), []
    for _ in range(count):
      logits.append(by_hand(model, tokens)[-1])
      tokens.append(int(np.argmax(logits[-1])))
    found.append((tokens[len(prompt) :], logits))
  return tuple(map(np.array, zip(*found, strict=True)))
