"""Names for values that Python's types cannot describe, or only at length.

TensorFlow and two Kerases have classes of their own for one thing, so most of these names are `Any`
for a type checker. They tell a reader what to pass and what comes back. No TensorFlow is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
  import tensorflow as tf
  from typing_extensions import Unpack as Unpack

  Tensor: TypeAlias = tf.Tensor

  class StepNumber(tf.Tensor):
    """Has the operator that TensorFlow's own annotations leave out."""

    def __mod__(self, other: int) -> tf.Tensor:
      """As in `step.number % 2`."""

else:
  Unpack = Any  # of Python 3.11
  StepNumber = Any
  """An int64 scalar, a `tf.Tensor`."""
  Tensor = Any
  """A `tf.Tensor`."""


class Array(Protocol):
  """A tensor, a variable or a NumPy array: not a text, not None."""

  @property
  def shape(self) -> Any:
    """The sizes of its axes."""

  @property
  def dtype(self) -> Any:
    """The type of its elements."""


Batch: TypeAlias = dict[str, Tensor]
"""Feature name -> tensor [rows, ...]. Besides the features of the source a task gets "weight"
(float32 [rows], 0 for padding), "example_id" (int64 [rows], -1 for padding) and "step" (int64
[rows], the number of the training step); see `loopwright.inputs.datasets`. In replica context the
rows are those of this replica, on the host all."""
Scalar: TypeAlias = Array | float
"""A number: a Python one, or a tensor, a variable or a NumPy array of shape []."""
TensorLike: TypeAlias = Array | float | list[Any] | tuple[Any, ...]
"""What TensorFlow takes for a tensor: a tensor, a variable, a NumPy array, a number, or a list."""
HostValue: TypeAlias = Any
"""What the host has of a metric: a float, or a float64 array of the metric's shape."""
Structure: TypeAlias = Any
"""A tensor, or a list, tuple or dict of structures, as `tf.nest` takes them: what a model returns,
or the targets of one with several outputs. The first axis of its tensors is the rows."""
PerReplica: TypeAlias = Any
"""One value of each replica of this process (cross-replica context): a tensor or structure as such
with one replica, else a `tf.distribute.DistributedValues` or a structure of them."""
Variable: TypeAlias = Any
"""A `tf.Variable`, or a `keras.Variable` of Keras 3. On several replicas it stands for all copies;
in replica context operations use that of this replica."""
Gradient: TypeAlias = Any
"""What `tf.GradientTape.gradient` returns for a variable: a tensor of its shape, a
`tf.IndexedSlices` (of an embedding), or None if the loss does not depend on it."""
Model: TypeAlias = Any
"""What `Task.build_model` returns: a model of Keras 3 or tf_keras, any `tf.Module`, or a dict of
models and variables."""
Layer: TypeAlias = Any
"""A layer of Keras 3 or tf_keras; a model is one too."""
AnySource: TypeAlias = Any
"""What `Task.source` returns: a `Source`, `StreamSource` or `Buckets`. For training also `Sources`,
for evaluation also name -> source."""
DatasetFn: TypeAlias = Callable[..., Any]
"""Position (examples consumed so far) -> infinite dataset of padded global batches.

In a cluster: this worker's rows of each batch (`Cluster.rows`). Parameter servers also pass
`shard=`: every n-th whole batch."""
