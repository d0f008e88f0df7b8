"""The same noise for every row, so that a random task can be compared on 1 and on N replicas.

A row's dropout mask depends on its replica. To compare updates, all random ops of the step that
take a seed draw for one row and repeat it. So the noise depends neither on the replica nor on its
number of rows, and still has the right distribution along every other axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.ops import stateless_random_ops as ops

Draw = Callable[..., tf.Tensor]
"""A random op, with the arguments of `tf.random.stateless_uniform`."""
_DRAWS = {
  "stateless_uniform": "stateless_random_uniform",
  "stateless_normal": "stateless_random_normal",
  "stateless_truncated_normal": "stateless_truncated_normal",
}


@contextlib.contextmanager
def replaced(by: Callable[[str, Draw], Draw]) -> Iterator[None]:
  """Replaces the random ops that take a seed, inside the context, traced or eager (host).

  Args:
    by: (name in `tf.random`, op) -> the op to call instead.
  """
  with contextlib.ExitStack() as stack:
    for public, internal in _DRAWS.items():
      draw = by(public, getattr(ops, internal))
      stack.enter_context(mock.patch.object(tf.random, public, draw))
      stack.enter_context(mock.patch.object(ops, internal, draw))
    yield


def alike_for_all_rows() -> contextlib.AbstractContextManager[None]:
  """Makes random ops inside the context draw the same for all rows (host)."""
  return replaced(lambda name, draw: _of_one_row(draw))


def _of_one_row(draw: Draw) -> Draw:
  def alike(shape: Any, seed: Any, *args: Any, **options: Any) -> tf.Tensor:
    wanted = tf.convert_to_tensor(shape, tf.int32)
    if (wanted.shape[0] or 0) < 2:  # a vector may be a seed as well as one number per row
      return draw(shape, seed, *args, **options)
    one = draw(tf.concat([[1], wanted[1:]], axis=0), [11, 29], *args, **options)
    return tf.broadcast_to(one, wanted)

  return alike
