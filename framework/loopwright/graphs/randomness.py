"""Random numbers that depend only on (seed, step, micro-batch, replica, draw).

In Keras all replicas read the same generator state, so their dropout masks are identical. Inside
`random_streams(key)` the random layers of Keras 3 and tf_keras derive their seeds from `key`
instead. Then replicas differ, a resumed run is bit-identical to an uninterrupted one, and no state
is saved.

    key = step_key(seed, step, replica_id)        # in replica context
    with random_streams(key) as stream:
      outputs = model(images, training=True)
      noise = tf.random.stateless_normal([8, 64], seed=stream.next_seed())

With `hash(k) = tf.random.stateless_uniform([2], seed=k, minval=0, maxval=2**30, dtype=tf.int32)`:

    step_key        hash(hash([seed, step]) + [replica_id, micro_batch])
    i-th draw       step_key + [0, i], where i counts from 0 in the order of the Python calls
    in a loop       each enclosing traced tf.while_loop, from the outermost to the innermost,
                    replaces step_key by hash(step_key + [1 + iteration, 0])
    in a function   each call of a nested tf.function draws one seed, whose hash is its step_key; a
                    function that is recomputed likewise

docs/randomness.md lists the limits.
"""

import contextlib
import functools
import hashlib
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

from loopwright import errors
from loopwright.host import lazy_keras
from loopwright.host.replacing import replaced, wrap

# Seeds are never negative: XLA computes other numbers than TensorFlow from a negative seed.
_HASH_BOUND = 2**30
_MAX_SEED = 2**31 - 1
_LOOPS = (control_flow.WhileBodyFuncGraph, control_flow.WhileCondFuncGraph)


def seed_everything(seed: int) -> None:
  """Makes initial weights, and Python's, NumPy's and TensorFlow's random numbers, depend on `seed`.

  Call it on the host, in the thread that then builds the model. Seeds both Keras generations.

  Args:
    seed: an integer from 0 to 2**31 - 1.

  Raises:
    ConfigError: `seed` is out of range.
  """
  seed = _checked_seed(seed)
  keras.utils.set_random_seed(seed)
  lazy_keras.when_tf_keras_loads(functools.partial(_seed_tf_keras, seed))


def _seed_tf_keras(seed: int) -> None:
  """Seeds tf_keras itself; what it shares with Keras 3 is seeded already."""
  from tf_keras.src import backend

  backend._SEED_GENERATOR.generator = random.Random(seed)


def step_key(
  seed: int, step: tf.Tensor, replica_id: tf.Tensor | int, micro_batch: tf.Tensor | int = 0
) -> tf.Tensor:
  """Returns the key of one replica's work on one micro-batch of one step, int32 [2] (any context).

  Args:
    seed: an integer from 0 to 2**31 - 1.
    step: an integer scalar below 2**31.
    replica_id: `tf.distribute.get_replica_context().replica_id_in_sync_group`.
    micro_batch: an integer scalar.

  Raises:
    ConfigError: `seed` is out of range.
  """
  key = _hash(tf.stack([_checked_seed(seed), tf.cast(step, tf.int32)]))
  return _hash(key + tf.stack([tf.cast(replica_id, tf.int32), tf.cast(micro_batch, tf.int32)]))


def random_streams(key: tf.Tensor) -> "RandomStream":
  """Returns a stream of seeds; inside `with` it, all random layers draw from it (replica context).

  Enter it where the model is called: the threads of `strategy.run` do not inherit it, and a
  tf.function traced outside keeps Keras's draws. The first call patches both Keras generations,
  which are unchanged outside the `with`.

  Args:
    key: int32 [2], such as `step_key` returns.
  """
  _patch_generators()
  return RandomStream(key)


def entered_stream() -> "RandomStream | None":
  """Returns the stream that random layers draw from here, or None (any context)."""
  return _entered.stream()


def example_seeds(batch: Mapping[str, tf.Tensor], training: bool) -> tf.Tensor:
  """Returns a seed for each example in a `Task.preprocess`, int32 [n, 2] (inside tf.data).

  In training these are the batch's "seed", different in each epoch. In evaluation they are derived
  from "example_id", so each evaluation makes the same draws.
  """
  if training:
    return batch["seed"]
  ids = tf.cast(batch["example_id"], tf.int32)
  return tf.stack([ids, tf.zeros_like(ids)], axis=1)


def draw_each(
  draw: Callable[..., tf.Tensor], seeds: tf.Tensor, shape: Sequence[int] = ()
) -> tf.Tensor:
  """Returns float32 [n, *shape], where row i is `draw(shape, seed=seeds[i])` (any context).

  A row depends only on its seed, not on its place in the batch or its replica.

  Args:
    draw: such as `tf.random.stateless_normal`.
    seeds: int32 [n, 2].
    shape: the shape of one row.
  """
  return tf.map_fn(
    lambda seed: draw(shape, seed=seed),
    seeds,
    fn_output_signature=tf.TensorSpec(shape, tf.float32),
  )


def uniform_each(seeds: tf.Tensor, shape: Sequence[int] = ()) -> tf.Tensor:
  """Returns float32 [n, *shape] in [0, 1), where row i depends only on `seeds[i]` (any context).

  As `draw_each` with a uniform draw, but all rows in a few operations.

  Args:
    seeds: int32 [n, 2], such as a batch's "seed" in `Task.preprocess`.
    shape: the shape of one row.
  """
  return tf.reshape(_bits_each(seeds, math.prod(shape)), [-1, *shape])


def normal_each(seeds: tf.Tensor, shape: Sequence[int] = ()) -> tf.Tensor:
  """Returns standard normal draws, float32 [n, *shape], where row i depends only on `seeds[i]`.

  All rows in a few operations, unlike `draw_each` (any context). From pairs of uniform draws: Box
  and Muller, "A Note on the Generation of Random Normal Deviates" (1958).
  """
  # In float64: TensorFlow's log and cos differ in the last digit with a row's place in the batch.
  bits = tf.cast(_bits_each(seeds, 2 * math.prod(shape)), tf.float64)
  radius, angle = tf.split(bits, 2, axis=1)
  draws = tf.sqrt(-2.0 * tf.math.log(1.0 - radius)) * tf.cos(2.0 * math.pi * angle)
  return tf.reshape(tf.cast(draws, tf.float32), [-1, *shape])


def _bits_each(seeds: tf.Tensor, count: int) -> tf.Tensor:
  """Returns uniform draws with 24 random bits, float32 [n, count] in [0, 1)."""
  rows = hashed(tf.bitcast(seeds, tf.int64), 0, "rows")  # neighbouring seeds must not overlap
  columns = tf.range(count, dtype=tf.int64)
  words = hashed(tf.bitcast(rows, tf.int64)[:, tf.newaxis] + columns, 0, "columns")
  bits = tf.bitwise.right_shift(words, _uint64(40))
  return tf.cast(tf.cast(bits, tf.int32), tf.float32) * 2.0**-24


def hashed(values: tf.Tensor, seed: int, purpose: str) -> tf.Tensor:
  """Hashes int64 to uint64 of the same shape, one-to-one (any context).

  One step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), from a start that depends on `seed` and
  `purpose`.
  """
  key = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
  mixed = tf.cast(values, tf.uint64) * _uint64(0x9E3779B97F4A7C15)
  mixed += _uint64(int.from_bytes(key, "little"))
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    mixed = (mixed ^ tf.bitwise.right_shift(mixed, _uint64(shift))) * _uint64(factor)
  return mixed ^ tf.bitwise.right_shift(mixed, _uint64(31))


def _uint64(value: int) -> tf.Tensor:
  return tf.constant(value, tf.uint64)


class RandomStream:
  """Seeds derived from one key; see `random_streams`.

  Attributes:
    recomputed: whether it is that of a function of models/recomputation.py.
  """

  recomputed = False

  def __init__(self, key: tf.Tensor) -> None:
    """Starts counting draws from `key`, int32 [2], in the current graph."""
    self._key = tf.convert_to_tensor(key, tf.int32)
    self._graph = current_graph()
    self._draws = 0
    self._streams_of_functions: dict[tf.Graph, RandomStream] = {}

  def __enter__(self) -> "RandomStream":
    _entered.streams.append(self)
    return self

  def __exit__(self, *unused: object) -> None:
    _entered.streams.pop()

  @tf.autograph.experimental.do_not_convert
  def next_seed(self) -> tf.Tensor:
    """Returns a new seed, int32 [2], for one op of `tf.random.stateless_*` (replica context).

    Raises:
      RuntimeError: called in another tf.function, or outside the `with` in a nested tf.function.
    """
    if not self.is_in_reach():
      raise RuntimeError(
        "this random stream belongs to another tf.function; make a stream in this one"
      )
    function, iterations = enclosing_function(stop=self._graph)
    if function is not self._graph:
      return self._stream_of(function).next_seed()
    key = self._key
    for iteration in iterations:
      key = _hash(key + tf.stack([1 + iteration, 0]))
    self._draws += 1
    return key + [0, self._draws - 1]

  def next_key(self) -> tf.Tensor:
    """Returns the key, int32 [2], of a stream whose draws differ from all of this one's."""
    return _hash(self.next_seed())

  def is_in_reach(self) -> bool:
    """Whether the current graph is the stream's graph or lies inside it."""
    graph = current_graph()
    while graph is not self._graph and graph is not None:
      graph = getattr(graph, "outer_graph", None)
    return graph is self._graph

  def _stream_of(self, function: tf.Graph) -> "RandomStream":
    """Returns the stream inside a nested tf.function, whose trace is reused with other keys."""
    if _entered.stream() is not self:
      raise RuntimeError("a nested tf.function draws only from the stream entered around its call")
    if function not in self._streams_of_functions:
      with function.as_default():
        key = function.capture_call_time_value(
          _seed_of_call, tf.TensorSpec([2], tf.int32), key=_seed_of_call
        )
        # Otherwise TensorFlow evaluates it in the outermost caller, once for all steps of a loop.
        function.function_captures.by_ref_external[_seed_of_call] = _seed_of_call
        self._streams_of_functions[function] = RandomStream(key)
    return self._streams_of_functions[function]


class _Entered(threading.local):
  """The streams that a thread has entered, innermost last; each mirrored replica has a thread."""

  def __init__(self) -> None:
    self.streams: list[RandomStream] = []
    self.repeating = False

  def stream(self) -> RandomStream | None:
    return self.streams[-1] if self.streams and self.streams[-1].is_in_reach() else None


_entered = _Entered()


def recomputed_stream() -> RandomStream | None:
  """Returns the stream of the innermost recomputed function that is being traced, or None."""
  return next((stream for stream in _entered.streams[::-1] if stream.recomputed), None)


def is_repeating() -> bool:
  """Whether the trace is that of a recomputation, whose side effects must not count."""
  return _entered.repeating


def repeating() -> contextlib.AbstractContextManager[None]:
  """Inside `with`, the trace is that of a recomputation."""
  return replaced(_entered, repeating=True)


@functools.cache
def _patch_generators() -> None:
  wrap(keras.random.SeedGenerator, "next", _next)
  lazy_keras.when_tf_keras_loads(_patch_tf_keras)


def _patch_tf_keras() -> None:
  from tf_keras.src.backend import RandomGenerator

  for kind in ("random_normal", "random_uniform", "truncated_normal", "dropout"):
    wrap(RandomGenerator, kind, _draw)
  wrap(RandomGenerator, "make_seed_for_stateless_op", _draw)


def _next(
  keras_next: Callable[..., tf.Tensor], layers: keras.random.SeedGenerator, ordered: bool = True
) -> tf.Tensor:
  stream = _entered.stream()
  return stream.next_seed() if stream else keras_next(layers, ordered)


def _draw(draw: Callable[..., Any], layers: Any, *args: Any, **kwargs: Any) -> Any:
  stream = _entered.stream()
  if stream is None or layers._rng_type == layers.RNG_STATELESS:  # initializers are stateless
    return draw(layers, *args, **kwargs)
  return getattr(_stream_generator(stream), draw.__name__)(*args, **kwargs)


def _stream_generator(stream: RandomStream) -> Any:
  """Returns a generator of tf_keras, each draw of which uses a new seed of `stream`."""
  from tf_keras.src.backend import RandomGenerator

  made = RandomGenerator(seed=0, rng_type=RandomGenerator.RNG_STATELESS)
  made.make_seed_for_stateless_op = stream.next_seed
  return made


def _seed_of_call() -> tf.Tensor:
  """Returns the key for one call of a tf.function traced inside a stream."""
  stream = _entered.stream()
  return stream.next_key() if stream else keras.random.randint([2], 0, _HASH_BOUND)


def current_graph() -> Any:
  """Returns the graph being traced, or None in eager mode, which is outside all graphs."""
  return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def enclosing_function(stop: Any) -> tuple[Any, list[tf.Tensor]]:
  """Returns the graph around all loops and branches up to `stop`, and the loops' iterations."""
  iterations: list[tf.Tensor] = []
  graph = current_graph()
  while graph is not stop and getattr(graph, "is_control_flow_graph", False):
    if isinstance(graph, _LOOPS):
      iterations.insert(0, graph.inputs[0])  # the counter of tf.while_loop
    graph = graph.outer_graph
  return graph, iterations


def _hash(key: tf.Tensor) -> tf.Tensor:
  return tf.random.stateless_uniform([2], seed=key, minval=0, maxval=_HASH_BOUND, dtype=tf.int32)


def _checked_seed(seed: int) -> int:
  return errors.require_integer("seed", seed, at_least=0, at_most=_MAX_SEED)
