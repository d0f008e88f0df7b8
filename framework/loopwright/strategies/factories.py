"""Factories of `tf.distribute` strategies by name; each kind is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from loopwright import registry
from loopwright.distribution.placement import Server

if TYPE_CHECKING:
  from loopwright.strategies.local import auto, default, one_device, split_cpu
  from loopwright.strategies.mesh.strategy import model_parallel
  from loopwright.strategies.mirrored import MirroredStrategy, central_storage, mirrored, works
  from loopwright.strategies.parameter_server.strategy import parameter_server
  from loopwright.strategies.tpu import tpu
  from loopwright.strategies.workers.strategy import multi_worker_mirrored

StrategyFactory = Callable[[], tf.distribute.Strategy | Server]

__all__ = [
  "MirroredStrategy",
  "auto",
  "central_storage",
  "default",
  "mirrored",
  "model_parallel",
  "multi_worker_mirrored",
  "one_device",
  "parameter_server",
  "split_cpu",
  "tpu",
  "works",
]


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  if name in ("MirroredStrategy", "split_cpu", "works"):  # which are no factories
    return getattr(importlib.import_module("loopwright.strategies.mirrored"), name)
  return registry.load("strategy", name)
