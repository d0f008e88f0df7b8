"""The dtype policy of both Keras generations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tf_keras

from loopwright.host import lazy_keras


@contextlib.contextmanager
def under(policy: str) -> Iterator[None]:
  """Sets the dtype policy of both Keras generations inside the context (host)."""
  before = keras.config.dtype_policy().name
  _set(policy)
  try:
    yield
  finally:
    _set(before)


def _set(policy: str) -> None:
  keras.config.set_dtype_policy(policy)
  lazy_keras.when_tf_keras_loads(lambda: tf_keras.mixed_precision.set_global_policy(policy))
