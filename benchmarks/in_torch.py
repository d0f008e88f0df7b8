"""The models of `benchmarks.models` in PyTorch, for `benchmarks.ecosystems`.

Adam is the fused one. "torch_compile" compiles model and loss; "torch_channels_last" keeps images
and convolutions in that layout; "fabric" is the eager loop in Lightning Fabric, with its loader.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def make(
  name: str,
  model: str,
  weights: Sequence[np.ndarray],
  batches: Any,
  steps: int,
) -> Callable[[], float]:
  """Returns what runs `steps` steps and gives their mean loss; arguments as `in_jax.make`."""
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  with torch.no_grad():
    network = NETWORKS[model]([torch.from_numpy(value) for value in weights])
  layout = torch.channels_last if name == "torch_channels_last" else torch.contiguous_format
  if model == "cnn":
    network = network.to(memory_format=layout)
  data = [_tensors(batches, number, layout) for number in range(len(batches[1]))]
  optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, eps=1e-7, fused=True)

  def mean_loss(features: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = network(features)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

  def backward(loss: torch.Tensor) -> None:
    loss.backward()

  stream: Iterator[Any] = itertools.cycle(data)
  if name == "torch_compile":
    mean_loss = torch.compile(mean_loss)
  if name == "fabric":
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    network, optimizer = fabric.setup(network, optimizer)
    loader = torch.utils.data.DataLoader(data, batch_size=None)  # batches are ready
    stream = itertools.chain.from_iterable(itertools.repeat(fabric.setup_dataloaders(loader)))
    backward = fabric.backward

  def block() -> float:
    total = torch.zeros(())
    for features, labels in itertools.islice(stream, steps):
      optimizer.zero_grad()
      loss = mean_loss(features, labels)
      backward(loss)
      optimizer.step()
      total += loss.detach()
    return float(total) / steps

  return block


def _tensors(batches: Any, number: int, layout: torch.memory_format) -> tuple[Any, torch.Tensor]:
  features, labels = batches
  if isinstance(features, dict):
    ready: Any = {name: torch.from_numpy(part[number]).long() for name, part in features.items()}
  else:
    ready = torch.from_numpy(features[number])
    if ready.ndim == 4:
      ready = ready.permute(0, 3, 1, 2).contiguous(memory_format=layout)
  return ready, torch.from_numpy(labels[number]).long()


# --- the models: modules from weights in the order of Keras -------------------------------------


def _dense(weights: Sequence[torch.Tensor]) -> nn.Linear:
  layer = nn.Linear(*weights[0].shape, bias=len(weights) > 1)
  layer.weight.copy_(weights[0].T)
  if len(weights) > 1:
    layer.bias.copy_(weights[1])
  return layer


def _convolution(kernel: torch.Tensor, bias: torch.Tensor) -> nn.Conv2d:
  layer = nn.Conv2d(kernel.shape[2], kernel.shape[3], kernel.shape[0])
  layer.weight.copy_(kernel.permute(3, 2, 0, 1))
  layer.bias.copy_(bias)
  return layer


def _mlp(weights: Sequence[torch.Tensor]) -> nn.Module:
  return nn.Sequential(nn.Flatten(), _dense(weights[:2]), nn.ReLU(), _dense(weights[2:]))


class _RowsOfChannels(nn.Module):
  """Flattens images in the order of Keras, so that the same weights follow."""

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1).flatten(1)


def _cnn(weights: Sequence[torch.Tensor]) -> nn.Module:
  convolutions = [_convolution(*weights[:2]), _convolution(*weights[2:4])]
  layers = [[layer, nn.ReLU(), nn.MaxPool2d(2)] for layer in convolutions]
  return nn.Sequential(*layers[0], *layers[1], _RowsOfChannels(), _dense(weights[4:]))


class _Residual(nn.Module):
  def __init__(self, weights: Sequence[torch.Tensor]) -> None:
    super().__init__()
    self.layer = _dense(weights)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x + functional.relu(self.layer(x))


def _many(weights: Sequence[torch.Tensor]) -> nn.Module:
  middle = [_Residual(weights[place : place + 2]) for place in range(2, len(weights) - 2, 2)]
  return nn.Sequential(nn.Flatten(), _dense(weights[:2]), nn.ReLU(), *middle, _dense(weights[-2:]))


class _Embedding(nn.Module):
  def __init__(self, weights: Sequence[torch.Tensor]) -> None:
    super().__init__()
    self.table = nn.Embedding.from_pretrained(weights[0].clone(), freeze=False)
    self.head = _dense(weights[1:])

  def forward(self, words: torch.Tensor) -> torch.Tensor:
    return self.head(self.table(words).mean(dim=1))


class _Norm(nn.RMSNorm):
  def __init__(self, scale: torch.Tensor) -> None:
    super().__init__(scale.shape, eps=1e-6)
    self.weight.copy_(scale)


class _Block(nn.Module):
  def __init__(self, weights: Sequence[torch.Tensor], heads: int) -> None:
    super().__init__()
    self.heads = heads
    self.attention_norm, self.mlp_norm = _Norm(weights[0]), _Norm(weights[3])
    self.project, self.output = _dense(weights[1:2]), _dense(weights[2:3])
    self.gate, self.up, self.down = (_dense([weight]) for weight in weights[4:7])

  def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    n, length, width = x.shape
    parts = self.project(self.attention_norm(x)).view(n, length, 3, self.heads, -1)
    query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
    query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + self.output(mixed.transpose(1, 2).reshape(n, length, width))
    normed = self.mlp_norm(x)
    return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
  a, b = x.chunk(2, dim=-1)
  return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Transformer(nn.Module):
  def __init__(self, weights: Sequence[torch.Tensor], heads: int = 4) -> None:
    super().__init__()
    self.embedding = nn.Embedding.from_pretrained(weights[0].clone(), freeze=False)
    self.blocks = nn.ModuleList(
      _Block(weights[place : place + 7], heads) for place in range(1, len(weights) - 1, 7)
    )
    self.norm, self.half = _Norm(weights[-1]), weights[0].shape[1] // heads // 2

  def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    position = inputs["position"]
    frequency = 10_000.0 ** -(torch.arange(self.half, device=position.device) / self.half)
    angle = position[:, None, :, None] * frequency
    x = self.embedding(inputs["token"])
    dtype = (
      torch.get_autocast_dtype(x.device.type)
      if torch.is_autocast_enabled(x.device.type)
      else x.dtype
    )
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for block in self.blocks:
      x = block(x, cos, sin)
    return (self.norm(x) @ self.embedding.weight.T)[..., :256]


NETWORKS: dict[str, Callable[[Sequence[torch.Tensor]], nn.Module]] = {
  "mlp": _mlp,
  "cnn": _cnn,
  "many": _many,
  "embedding": _Embedding,
  "language_model": Transformer,
}
