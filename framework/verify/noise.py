"""The same noise for every row, so that a random task can be compared on 1 and on N replicas.

A row's dropout mask depends, and should depend, on its replica. To compare updates, all random ops
of the step that take a seed draw for one row and repeat it: what is left depends on neither the
replica nor the number of its rows, and still has the right distribution along every other axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.ops import stateless_random_ops as ops

_DRAWS = {
  "stateless_uniform": "stateless_random_uniform",
  "stateless_normal": "stateless_random_normal",
  "stateless_truncated_normal": "stateless_truncated_normal",
}


@contextlib.contextmanager
def alike_for_all_rows() -> Iterator[None]:
  """Makes what is traced, or run eagerly, inside of it draw so (host)."""
  with contextlib.ExitStack() as stack:
    for public, internal in _DRAWS.items():
      alike = _of_one_row(getattr(ops, internal))
      stack.enter_context(mock.patch.object(tf.random, public, alike))
      stack.enter_context(mock.patch.object(ops, internal, alike))
    yield


def _of_one_row(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  def alike(shape: Any, seed: Any, *args: Any, **options: Any) -> tf.Tensor:
    wanted = tf.convert_to_tensor(shape, tf.int32)
    if (wanted.shape[0] or 0) < 2:  # a vector is as likely a seed as one number a row
      return draw(shape, seed, *args, **options)
    one = draw(tf.concat([[1], wanted[1:]], axis=0), [11, 29], *args, **options)
    return tf.broadcast_to(one, wanted)

  return alike
