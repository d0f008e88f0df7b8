"""Which models and layers a step calls in training mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tf_keras

from loopwright.aliases import Layer, Model
from loopwright.models import models


class Calls:
  """The layers that were called with `training=True`, of both Keras generations."""

  def __init__(self) -> None:
    self._in_training: set[int] = set()

  def none_in_training(self, model: Model) -> bool:
    """Whether no part of a model was itself called with `training=True`."""
    return not any(id(part) in self._in_training for part in models.parts(model))

  def note(self, layer: Layer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Adds a call."""
    if options.get("training") is True or any(value is True for value in args[1:]):
      self._in_training.add(id(layer))


@contextlib.contextmanager
def watch() -> Iterator[Calls]:
  """Watches the calls inside the context (host)."""
  calls = Calls()

  def noted(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **options: Any) -> Any:
      calls.note(self, args, options)
      return call(self, *args, **options)

    return called

  with contextlib.ExitStack() as stack:
    for kind in (keras.layers.Layer, tf_keras.layers.Layer):
      stack.enter_context(mock.patch.object(kind, "__call__", noted(kind.__call__)))
    yield calls
