"""A row of `benchmarks.gpu` in PyTorch or JAX; needs no TensorFlow.

  python benchmarks/gpu_peers.py language_model mixed_bfloat16 JAX [--small]

The models and batches are those of benchmarks/gpu.py, with random weights; Adam is fused, or
Optax's. Without a GPU, on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import itertools

from benchmarks import gpu

Run = Callable[[int], float]
"""Trains some steps; returns their mean loss."""


def sizes_of(name: str, *, small: bool) -> tuple[int, int, int, int]:
  """Returns layers, width, heads and context of a language model."""
  return (1, 32, 2, 16) if small else (*gpu.TRANSFORMERS[name], 512)


def weights_of(layers: int, width: int) -> list[np.ndarray]:
  """Returns random weights of the language model, in the order of Keras."""
  rng, hidden = np.random.default_rng(0), -(-8 * width // 24) * 8

  def matrix(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))

  one, found = np.ones(width, np.float32), [0.02 * matrix(257, width) * np.float32(257**0.5)]
  for _ in range(layers):
    found += [one, matrix(width, 3 * width), matrix(width, width), one]
    found += [matrix(width, hidden), matrix(width, hidden), matrix(hidden, width)]
  return [*found, one]


def tokens(batch: int, context: int) -> Any:
  """Returns features and labels, [DISTINCT, batch, context] each."""
  rng, shape = np.random.default_rng(0), [gpu.DISTINCT, batch, context]
  position = np.tile(np.arange(context), [*shape[:2], 1])
  return {"token": rng.integers(0, 256, shape), "position": position}, rng.integers(0, 256, shape)


def in_torch(name: str, precision: str, who: str, *, small: bool) -> tuple[Run, Callable[[], int]]:
  """Returns what trains, and the peak of memory in bytes."""
  import torch
  from torch.nn import functional

  device = "cuda" if torch.cuda.is_available() else "cpu"
  torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
  torch.backends.cudnn.benchmark = True
  network, batches = torch_model(name, small=small)
  network = network.to(device)
  on_device = [(_to(features, device), labels.to(device)) for features, labels in batches]
  optimizer = torch.optim.Adam(network.parameters(), 1e-3, fused=True)
  called = torch.compile(network) if who == "torch.compile" else network
  half = precision == "mixed_bfloat16"

  def run(steps: int) -> float:
    total = torch.zeros((), device=device)
    for number in range(steps):
      features, labels = on_device[number % len(on_device)]
      optimizer.zero_grad(set_to_none=True)
      with torch.autocast(device, torch.bfloat16, enabled=half):
        logits = called(features)
        loss = functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
      loss.backward()
      optimizer.step()
      total += loss.detach()
    return float(total) / steps

  return run, torch.cuda.max_memory_allocated if device == "cuda" else lambda: 0


def _to(value: Any, device: str) -> Any:
  if isinstance(value, dict):
    return {name: each.to(device) for name, each in value.items()}
  return value.to(device)


def torch_model(name: str, *, small: bool) -> tuple[Any, list[Any]]:
  """Returns a network, and (features, labels) of each batch."""
  import torch
  from torch import nn

  from benchmarks import in_torch as models

  batch = gpu.BATCHES[name][small]
  if name in gpu.TRANSFORMERS:
    layers, width, heads, context = sizes_of(name, small=small)
    with torch.no_grad():
      network = models.Transformer([*map(torch.from_numpy, weights_of(layers, width))], heads)
    given, labels = tokens(batch, context)
    rows = [{key: torch.from_numpy(part[i]) for key, part in given.items()} for i in range(4)]
    return network, [(rows[i], torch.from_numpy(labels[i])) for i in range(4)]
  if name == "mlp":
    sizes = [784, *[64 if small else 4096] * 4]
    hidden = [[nn.Linear(*pair), nn.ReLU()] for pair in itertools.pairwise(sizes)]
    rows = [torch.rand(batch, 784) for _ in range(4)]
    network = nn.Sequential(*(each for pair in hidden for each in pair), nn.Linear(sizes[-1], 10))
    return network, [(x, torch.randint(0, 10, (batch,))) for x in rows]
  side = 32 if small or name == "cnn" else 224
  rows = [torch.rand(batch, 3, side, side) for _ in range(4)]
  rows = [each.to(memory_format=torch.channels_last) for each in rows]
  batches = [(x, torch.randint(0, 10, (batch,))) for x in rows]
  if name == "resnet50":
    import torchvision

    network = torchvision.models.resnet50()
  else:
    widths, blocks = [3, *((8, 16) if small else (64, 128, 256))], []
    for pair in itertools.pairwise(widths):
      blocks += [nn.Conv2d(*pair, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2)]
    last = widths[-1] * (side // 2 ** (len(widths) - 1)) ** 2
    network = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(last, 10))
  return network.to(memory_format=torch.channels_last), batches


def in_jax(name: str, precision: str, *, small: bool) -> tuple[Run, Callable[[], int]]:
  """The same, of a jitted step; on a GPU in bfloat16 attention is cuDNN's."""
  import jax
  import jax.numpy as jnp
  import optax

  from benchmarks.in_jax import language_model

  layers, width, heads, context = sizes_of(name, small=small)
  half, device = precision == "mixed_bfloat16", jax.devices()[0]
  fused = "cudnn" if half and device.platform == "gpu" and not small else "xla"
  dtype, optimizer = jnp.bfloat16 if half else jnp.float32, optax.adam(1e-3)

  def step(params: Any, state: Any, total: Any, features: Any, labels: Any) -> Any:
    def mean_loss(params: Any) -> Any:
      logits = language_model(params, features, heads, layers, dtype, fused)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(mean_loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, total + loss

  compiled = jax.jit(step, donate_argnums=(0, 1, 2))
  params = [jnp.asarray(each) for each in weights_of(layers, width)]
  state, data = optimizer.init(params), tokens(gpu.BATCHES[name][small], context)
  batches = [jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), data) for i in range(4)]

  def run(steps: int) -> float:
    nonlocal params, state
    total = jnp.zeros(())
    for number in range(steps):
      params, state, total = compiled(params, state, total, *batches[number % 4])
    return float(total) / steps

  return run, lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name in ("model", "precision", "who"):
    parser.add_argument(name)
  parser.add_argument("--small", action="store_true")
  parser.add_argument("--block_s", type=float, default=1.0)
  given = parser.parse_args()
  began = time.perf_counter()
  if given.who == "JAX":
    run, peak = in_jax(given.model, given.precision, small=given.small)
  else:
    run, peak = in_torch(given.model, given.precision, given.who, small=given.small)
  run(2)
  first_s = time.perf_counter() - began
  step_s = gpu.timed(run, given.block_s)
  batch = gpu.BATCHES[given.model][given.small]
  row = (given.model, given.precision, given.who, step_s, batch, first_s)
  print(gpu.line(*row, "-", "-", peak() / 2**20), flush=True)
  os._exit(0)


if __name__ == "__main__":
  main()
