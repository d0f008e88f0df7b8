"""Variables and batches on a mesh: one model, split over a mesh of devices by TensorFlow's DTensor.

A mesh has named dimensions, such as 2 devices along "batch" and 2 along "model". A layout gives for
each axis of a variable the mesh dimension that it is split over. TensorFlow inserts the
communication. Shazeer et al., "Mesh-TensorFlow: Deep Learning for Supercomputers" (2018).

To the step the mesh is one replica that sees the whole batch, so gradients are global sums already.
Faults of DTensor in TensorFlow 2.20 that shape this module, and updates.py:

- An update in place (`assign_sub`, `assign_add`) of a split variable can have no effect.
- A variable that is read before and after an assignment can have the same value both times. Here a
  trace reads what it has assigned, and an update is made in no branch of `tf.cond`.
- Random numbers depend on the layout. Here they are drawn unsplit, as on one device.
- `tf.timestamp` and some operations in a `tf.while_loop` do not compile, so the host runs the loop.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_ops
from tensorflow.python.training.saving.saveable_object import SaveSpec

from loopwright.errors import ConfigError, unknown
from loopwright.host.replacing import replaced, wrap

BATCH = "batch"
"""The mesh dimension over which the rows of a batch are split."""
Axes = Sequence[str | None]
_VALUE = "VARIABLE_VALUE"
_DRAWS = (
  "stateless_random_uniform_v2",
  "stateless_random_normal_v2",
  "stateless_truncated_normal_v2",
  "stateless_random_uniform_int_v2",
  "stateless_random_uniform_full_int_v2",
)


class ModelParallelStrategy(tf.distribute.Strategy):
  """One replica on a mesh; see `model_parallel` in strategy.py.

  Attributes:
    mesh: the devices.
    layouts: pattern -> axes, as given.
    shards: whether weights are split over "batch" too.
    found: name -> layout of each variable made in the scope.
  """

  def __init__(
    self, mesh: dtensor.Mesh, layouts: Mapping[str, Axes], *, shards: bool = False
  ) -> None:
    """Stores its arguments (host).

    Raises:
      ConfigError: a layout names a dimension that the mesh does not have, or is no regular
        expression.
    """
    super().__init__(_Extended(self))
    self.mesh, self.layouts, self.shards = mesh, dict(layouts), shards
    self.found: dict[str, dtensor.Layout] = {}
    for pattern, axes in self.layouts.items():
      _compiled(pattern)
      for axis in axes:
        if axis is not None and axis not in mesh.dim_names:
          raise unknown(f"dimension in model_parallel.layouts[{pattern!r}]", axis, mesh.dim_names)

  @property
  def row_shares(self) -> int:
    """Into how many parts the rows of a batch are split."""
    return self.mesh.dim_size(BATCH) if BATCH in self.mesh.dim_names else 1

  def replicated(self, rank: int) -> dtensor.Layout:
    """Returns the layout of a tensor that every device has whole."""
    return dtensor.Layout.replicated(self.mesh, rank)

  def of_rows(self, rank: int) -> dtensor.Layout:
    """Returns the layout of a feature [n, ...], split by rows."""
    first = BATCH if BATCH in self.mesh.dim_names else dtensor.UNSHARDED
    return dtensor.Layout([first] + [dtensor.UNSHARDED] * (rank - 1), self.mesh)

  def layout_of(self, name: str, shape: tf.TensorShape, *, trained: bool) -> dtensor.Layout:
    """Returns the layout of a variable, replicated if no pattern matches its name.

    With `shards` the longest axis that is whole and divides is split over "batch" as well, if the
    variable is trained and no vector.

    Raises:
      ConfigError: the layout does not fit the shape, or two layouts match.
    """
    matching = [pattern for pattern in self.layouts if _compiled(pattern).fullmatch(name)]
    if len(matching) > 1:
      raise ConfigError(
        f"model_parallel.layouts has {matching[0]!r} and {matching[1]!r}, which both match "
        f"variable {name!r}; make one of them narrower."
      )
    axes: list[str | None] = list(self.layouts[matching[0]]) if matching else [None] * shape.rank
    if matching:
      self._require_fits(matching[0], axes, name, shape)
    if self.shards and trained and shape.rank > 1 and BATCH not in axes:
      free = [n for n, axis in enumerate(axes) if not axis and shape[n] % self.row_shares == 0]
      for longest in sorted(free, key=lambda n: -shape[n])[:1]:
        axes[longest] = BATCH
    return dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], self.mesh)

  def require_all_match(self) -> None:
    """Checks, once the model is built, that each layout is of some variable (host).

    Raises:
      ConfigError: a pattern matches no variable, or no weight can be split over "batch".
    """
    if self.shards and not any(BATCH in each.sharding_specs for each in self.found.values()):
      raise ConfigError(
        f"model_parallel.shard_parameters is True, but {self.row_shares} devices along 'batch' "
        "divide no axis of a weight; change model_parallel.mesh, or remove shard_parameters."
      )
    for pattern in self.layouts:
      if not any(_compiled(pattern).fullmatch(name) for name in self.found):
        ends = {"/".join(name.split("/")[-2:]) for name in self.found}
        raise unknown("variable in model_parallel.layouts", pattern, sorted(ends))

  def _require_fits(self, pattern: str, axes: Axes, name: str, shape: tf.TensorShape) -> None:
    if len(axes) != shape.rank:
      raise ConfigError(
        f"model_parallel.layouts[{pattern!r}] is {tuple(axes)}, but variable {name!r} has shape "
        f"{shape}; give one entry for each of its {shape.rank} axes, None for a whole axis."
      )
    for number, axis in enumerate(axes):
      if axis is not None and shape[number] % self.mesh.dim_size(axis):
        raise ConfigError(
          f"model_parallel.layouts[{pattern!r}] splits axis {number} of variable {name!r}, of "
          f"shape {shape}, into {self.mesh.dim_size(axis)} parts; the size must be a multiple of "
          "that."
        )


class Variable(dtensor.DVariable):
  """A variable on a mesh that the host reads, assigns and saves as if it were whole.

  Attributes:
    assigned: graph that is traced -> the tensor that it has assigned last, which it then reads.
  """

  def __init__(self, *args: Any, **kwargs: Any) -> None:
    self.assigned: weakref.WeakKeyDictionary[Any, tf.Tensor] = weakref.WeakKeyDictionary()
    super().__init__(*args, **kwargs)

  def numpy(self) -> np.ndarray:
    """Returns the whole value (host)."""
    return whole(self.read_value())

  def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Assigns a tensor of the mesh, or on the host any value of the variable's shape."""
    if tf.executing_eagerly() and not _is_on_mesh(value):
      value = tf.convert_to_tensor(value, self.dtype)
      self.shape.assert_is_compatible_with(value.shape)
      value = place(value, self.layout)
    if _entered.condition is not None:
      # A condition that is a scalar ends the process: TensorFlow crashes while it compiles.
      condition = _entered.condition
      chosen = tf.broadcast_to(condition, self.shape) if self.shape.rank else condition
      value = tf.where(chosen, value, self.read_value())
    if not tf.executing_eagerly():
      self.assigned[tf.compat.v1.get_default_graph()] = value = tf.cast(value, self.dtype)
    return super().assign(value, *args, **kwargs)

  @property
  def gathered(self) -> dtensor.Layout | None:
    """The layout in which a pass reads a variable that is split over "batch"; else None.

    Left to itself, DTensor would move the rows of the batch instead. The gradient comes back split.
    """
    axes = self.layout.sharding_specs
    kept = [dtensor.UNSHARDED if axis == BATCH else axis for axis in axes]
    return dtensor.Layout(kept, self.layout.mesh) if BATCH in axes else None

  def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
    value = self._last_value(no_copy)
    if tf.executing_eagerly() or _entered.condition is not None or not self.gathered:
      return value  # an update needs each device's part alone
    return dtensor.relayout(value, self.gathered)

  def _last_value(self, no_copy: bool) -> tf.Tensor:
    """Returns what the same trace has assigned last, or else the value.

    The gradient is that of the variable.
    """
    value = super()._read_variable_op(no_copy)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and graph not in self.assigned:
      graph = getattr(graph, "outer_graph", None)
    if graph is None:
      return value
    assigned = tf.stop_gradient(self.assigned[graph])
    return assigned + (value - tf.stop_gradient(value)) if self.dtype.is_floating else assigned

  def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Assigns the sum: an update in place can have no effect."""
    return self.assign(self.read_value() + tf.cast(delta, self.dtype), *args, **kwargs)

  def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
    """Assigns the difference: an update in place can have no effect."""
    return self.assign(self.read_value() - tf.cast(delta, self.dtype), *args, **kwargs)

  def _gather_saveables_for_checkpoint(self) -> Any:
    raise NotImplementedError  # TensorFlow prefers the two below

  def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
    def read() -> tf.Tensor:
      return tf.convert_to_tensor(self.numpy())

    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    return {_VALUE: SaveSpec(read, "", _VALUE, dtype=self.dtype, device=device)}

  def _restore_from_tensors(self, tensors: Mapping[str, tf.Tensor]) -> None:
    self.assign(tensors[_VALUE], read_value=False)


class _Extended(distribute_lib._DefaultDistributionExtended):
  """One replica; variables and batches are tensors of the mesh."""

  def _scope(self, strategy: ModelParallelStrategy) -> Any:
    _name_variables()
    return distribute_lib.StrategyExtendedV2._scope(self, strategy)

  def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    strategy = self._container_strategy()
    for name in ("use_resource", "colocate_with", "expected_shape"):
      kwargs.pop(name, None)
    given, dtype = kwargs.pop("initial_value"), kwargs.get("dtype")
    value = tf.convert_to_tensor(given() if callable(given) else given, dtype=dtype)
    if value.dtype == tf.string:
      return next_creator(initial_value=value, **kwargs)
    if not _is_on_mesh(value) or _entered.like is not None:
      layout = self._layout(strategy, value.shape, **kwargs)
      value = place(whole(value) if _is_on_mesh(value) else value, layout)
    kwargs.pop("synchronization", None)
    kwargs.pop("aggregation", None)
    return Variable(value, **kwargs)

  def _layout(
    self, strategy: ModelParallelStrategy, shape: Any, /, name: str | None = None,
    trainable: bool | None = None, **_: Any,
  ) -> dtensor.Layout:  # fmt: skip
    if _entered.like is not None:
      like, like_shape = _entered.like
      return like if like_shape == shape else strategy.replicated(shape.rank)
    in_scope = "/".join(filter(None, (tf.get_current_name_scope(), name or "variable")))
    name = (_entered.name or in_scope).partition(":")[0]
    layout = strategy.found[name] = strategy.layout_of(name, shape, trained=trainable is not False)
    return layout

  def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
    del colocate_with_variable  # its device is the mesh, on which Keras would compute slots
    return contextlib.nullcontext()

  def variable_created_in_scope(self, v: Any) -> bool:
    return isinstance(v, Variable)

  def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
    del options
    return _Batches(self._container_strategy(), dataset)

  def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with _drawn_unsplit(self._container_strategy()):
      return super()._call_for_each_replica(fn, args, kwargs)

  def _local_results(self, value: Any) -> tuple[Any]:
    if isinstance(value, tf.Tensor) and value.shape.rank:
      value = dtensor.relayout(value, self._container_strategy().replicated(value.shape.rank))
    return (value,)

  @property
  def worker_devices(self) -> tuple[str, ...]:
    return tuple(self._container_strategy().mesh.local_devices())


class _Batches:
  """The batches of a dataset, with their rows split over the mesh."""

  def __init__(self, strategy: ModelParallelStrategy, dataset: tf.data.Dataset) -> None:
    self._strategy, self._dataset = strategy, dataset
    self.element_spec = dataset.element_spec

  def __iter__(self) -> Iterator[dict[str, tf.Tensor]]:
    of_rows = self._strategy.of_rows
    for batch in self._dataset.prefetch(1):
      yield {name: place(value, of_rows(value.shape.rank)) for name, value in batch.items()}


def place(value: Any, layout: dtensor.Layout) -> tf.Tensor:
  """Returns a tensor on the mesh; each device gets its part alone (host)."""
  value = tf.convert_to_tensor(value)
  places = layout.mesh.local_device_locations()
  return dtensor.pack([value[_part(layout, value.shape, place)] for place in places], layout)


def whole(tensor: tf.Tensor) -> np.ndarray:
  """Returns the value of a tensor of the mesh, put together from its parts (host)."""
  layout = dtensor.fetch_layout(tensor)
  value = np.empty(tensor.shape, tensor.dtype.as_numpy_dtype)
  places = layout.mesh.local_device_locations()
  for part, place in zip(dtensor.unpack(tensor), places, strict=True):
    value[_part(layout, tensor.shape, place)] = part.numpy()
  return value


def made_like(variable: Any) -> contextlib.AbstractContextManager[None]:
  """Gives variables of this one's shape its layout, and others none, inside `with` (host)."""
  return replaced(_entered, like=(variable.layout, variable.shape))


@contextlib.contextmanager
def building() -> Iterator[None]:
  """Explains an error of DTensor while a model is built (host).

  Raises:
    ConfigError: the model is called on arrays or on tensors of one device.
  """
  try:
    yield
  except tf.errors.UnimplementedError as error:
    if "expecting a DTensor" not in str(error):
      raise
    raise ConfigError(
      "build_model() computes with tensors of one device, but under model_parallel its variables "
      "are on a mesh; give the model keras.Input tensors instead of arrays, or call model.build()."
    ) from error


def assigning_if(condition: tf.Tensor) -> contextlib.AbstractContextManager[None]:
  """Makes assignments in any case inside `with`: of the old value if a bool scalar is False."""
  return replaced(_entered, condition=condition)


class _Entered(threading.local):
  """What variables are made for."""

  like: tuple[dtensor.Layout, tf.TensorShape] | None = None
  name: str | None = None
  condition: tf.Tensor | None = None


_entered = _Entered()


def _part(layout: dtensor.Layout, shape: Any, place: Mapping[str, int]) -> tuple[slice, ...]:
  """Returns where a device at `place` has its part of a tensor."""
  found = []
  for size, dimension in zip(shape, layout.sharding_specs, strict=True):
    if dimension == dtensor.UNSHARDED:
      found.append(slice(0, size))
    else:
      share = size // layout.mesh.dim_size(dimension)
      found.append(slice(place[dimension] * share, (place[dimension] + 1) * share))
  return tuple(found)


def _is_on_mesh(value: Any) -> bool:
  if not isinstance(value, tf.Tensor):
    return False
  try:
    dtensor.fetch_layout(value)
  except (ValueError, tf.errors.InvalidArgumentError):
    return False
  return True


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
  """Returns the pattern of the end of a name, from a "/" on."""
  try:
    return re.compile(f"(?:.*/)?(?:{pattern})")
  except re.error as error:
    raise ConfigError(
      f"model_parallel.layouts has {pattern!r}, which is no regular expression ({error})."
    ) from error


@functools.cache
def _name_variables() -> None:
  """Notes the path of each Keras 3 variable that is made: TensorFlow gets only its last part."""

  def named(usual: Callable[..., None], variable: keras.Variable, value: Any) -> None:
    with replaced(_entered, name=variable.path):
      usual(variable, value)

  wrap(keras.Variable, "_initialize", named)


def _drawn_unsplit(strategy: ModelParallelStrategy) -> contextlib.AbstractContextManager[None]:
  """Draws random numbers as on one device, whatever the layout of what uses them."""

  def unsplit(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def drawn(*args: Any, **kwargs: Any) -> tf.Tensor:
      values = draw(*args, **kwargs)
      return dtensor.relayout(values, strategy.replicated(values.shape.rank))

    return drawn

  return replaced(random_ops, **{name: unsplit(getattr(random_ops, name)) for name in _DRAWS})
