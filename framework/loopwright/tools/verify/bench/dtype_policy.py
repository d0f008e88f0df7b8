"""The dtype policy of both Keras generations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tf_keras


@contextlib.contextmanager
def under(policy: str) -> Iterator[None]:
  """Sets the dtype policy of both Keras generations inside the context (host)."""
  ours, theirs = keras.config.dtype_policy(), tf_keras.mixed_precision.global_policy()
  keras.config.set_dtype_policy(policy)
  tf_keras.mixed_precision.set_global_policy(policy)
  try:
    yield
  finally:
    keras.config.set_dtype_policy(ours)
    tf_keras.mixed_precision.set_global_policy(theirs)
