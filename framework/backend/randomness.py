"""Random numbers that are a function of (seed, step, micro-batch, replica, draw) and nothing else.

Keras lets all replicas read one generator state, so their dropout masks are identical. Inside
`random_streams(key)` the random layers of Keras 3 and tf_keras draw their seeds from `key` instead:
replicas differ, a resumed run repeats the uninterrupted one bit for bit, and no state is saved.

    key = step_key(seed, step, replica_id)        # in replica context
    with random_streams(key) as stream:
      outputs = model(images, training=True)
      noise = tf.random.stateless_normal([8, 64], seed=stream.next_seed())

With `hash(k) = tf.random.stateless_uniform([2], seed=k, minval=0, maxval=2**30, dtype=tf.int32)`:

    step_key        hash(hash([seed, step]) + [replica_id, micro_batch])
    i-th draw       step_key + [0, i], where i counts from 0 in the order in which Python draws
    in a loop       every enclosing traced tf.while_loop, from the outermost in, puts
                    hash(step_key + [1 + iteration, 0]) in the place of step_key
    in a function   a tf.function called inside draws one seed a call, and has it for its step_key

XLA gets the same seeds, and makes other masks of them. The `seed` argument of a layer has no effect
inside. Out of reach are ops that hold a state of their own (`tf.random.uniform`, `tf.nn.dropout`)
and code that asks Python's `random` while it is traced (`keras.layers.AugMix`). The elements of a
`tf.vectorized_map` share their draws. What runs again to recompute (`tf.recompute_grad`) draws
again, as in Keras, unless it enters a stream of its own with a seed from outside.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
import tf_keras
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow
from tf_keras.src import backend as tf_keras_backend

from framework import errors

# No seed is ever negative: of a negative one XLA makes other numbers than TensorFlow does.
_HASH_BOUND = 2**30
_MAX_SEED = 2**31 - 1
_LOOPS = (control_flow.WhileBodyFuncGraph, control_flow.WhileCondFuncGraph)


def seed_everything(seed: int) -> None:
  """Makes initial weights, and all that asks Python, NumPy or TensorFlow, a function of `seed`.

  For the host, in the thread that then builds the model: both Keras generations are seeded.

  Raises:
    ConfigError: `seed` is not an integer from 0 to 2**31 - 1.
  """
  _check_seed(seed)
  keras.utils.set_random_seed(seed)
  tf_keras.utils.set_random_seed(seed)


def step_key(
  seed: int, step: tf.Tensor, replica_id: tf.Tensor | int, micro_batch: tf.Tensor | int = 0
) -> tf.Tensor:
  """Returns the int32 [2] key of one replica's work on one micro-batch of one step.

  For any context, eager or traced. `step` is an integer scalar below 2**31; `replica_id` is
  `tf.distribute.get_replica_context().replica_id_in_sync_group`.

  Raises:
    ConfigError: `seed` is not an integer from 0 to 2**31 - 1.
  """
  _check_seed(seed)
  key = _hash(tf.stack([seed, tf.cast(step, tf.int32)]))
  return _hash(key + tf.stack([tf.cast(replica_id, tf.int32), tf.cast(micro_batch, tf.int32)]))


def random_streams(key: tf.Tensor) -> "RandomStream":
  """Returns a stream of seeds from `key`, int32 [2]; `with` it, all random layers draw from it.

  To be entered where the model is called, in replica context: the threads that `strategy.run`
  starts do not inherit it, and a tf.function that was traced outside keeps the draws of Keras. The
  first call patches both generations of Keras, which behave as ever outside of the `with`.
  """
  _patch_generators()
  return RandomStream(key)


def example_seeds(batch: Mapping[str, tf.Tensor], training: bool) -> tf.Tensor:
  """Returns int32 [n, 2], a seed for each example of a `Task.preprocess` (inside tf.data).

  In training it is the batch's "seed", new in each epoch; in evaluation it is made of
  "example_id", so that each evaluation draws the same.
  """
  if training:
    return batch["seed"]
  ids = tf.cast(batch["example_id"], tf.int32)
  return tf.stack([ids, tf.zeros_like(ids)], axis=1)


def draw_each(
  draw: Callable[..., tf.Tensor], seeds: tf.Tensor, shape: Sequence[int] = ()
) -> tf.Tensor:
  """Returns float32 [n, *shape], where row i is `draw(shape, seed=seeds[i])` (any context).

  A row is a function of its seed alone, wherever in a batch and on whichever replica it is.

  Args:
    draw: such as `tf.random.stateless_normal`.
    seeds: int32 [n, 2].
    shape: of one row.
  """
  return tf.map_fn(
    lambda seed: draw(shape, seed=seed),
    seeds,
    fn_output_signature=tf.TensorSpec(shape, tf.float32),
  )


class RandomStream:
  """Seeds that are functions of one key; made by `random_streams`."""

  def __init__(self, key: tf.Tensor) -> None:
    """Starts the count of draws from `key`, int32 [2], in the current graph."""
    self._key = tf.convert_to_tensor(key, tf.int32)
    self._graph = _current_graph()
    self._draws = 0
    self._streams_of_functions: dict[tf.Graph, RandomStream] = {}

  def __enter__(self) -> "RandomStream":
    """Makes this thread's random layers draw from here."""
    _entered.streams.append(self)
    return self

  def __exit__(self, *unused: object) -> None:
    """Gives the random layers back to the stream around this one, or to Keras."""
    _entered.streams.pop()

  @tf.autograph.experimental.do_not_convert
  def next_seed(self) -> tf.Tensor:
    """Returns a fresh seed, int32 [2], for one op of `tf.random.stateless_*`.

    Raises:
      RuntimeError: called in another tf.function, or in one nested in the stream's own but outside
        of the `with`.
    """
    if not self.is_in_reach():
      raise RuntimeError("this random stream belongs to another tf.function; make one in this one")
    function, iterations = _enclosing_function(stop=self._graph)
    if function is not self._graph:
      return self._stream_of(function).next_seed()
    key = self._key
    for iteration in iterations:
      key = _hash(key + tf.stack([1 + iteration, 0]))
    self._draws += 1
    return key + [0, self._draws - 1]

  def is_in_reach(self) -> bool:
    """Whether the current graph is the one that the stream was made in, or lies inside it."""
    graph = _current_graph()
    while graph is not self._graph and graph is not None:
      graph = getattr(graph, "outer_graph", None)
    return graph is self._graph

  def _stream_of(self, function: tf.Graph) -> "RandomStream":
    """Returns the stream inside a nested tf.function, whose trace outlives any one key."""
    if _entered.stream() is not self:
      raise RuntimeError("a nested tf.function draws only from the stream entered around its call")
    if function not in self._streams_of_functions:
      with function.as_default():
        key = function.capture_call_time_value(
          _seed_of_call, tf.TensorSpec([2], tf.int32), key=_seed_of_call
        )
        # Left alone, TensorFlow asks the outermost caller for it: once for all steps of a loop.
        function.function_captures.by_ref_external[_seed_of_call] = _seed_of_call
        self._streams_of_functions[function] = RandomStream(key)
    return self._streams_of_functions[function]


class _Entered(threading.local):
  """The streams a thread is in, innermost last; MirroredStrategy has a thread for every replica."""

  def __init__(self) -> None:
    self.streams: list[RandomStream] = []

  def stream(self) -> RandomStream | None:
    return self.streams[-1] if self.streams and self.streams[-1].is_in_reach() else None


_entered = _Entered()


class _StreamGenerator(tf_keras_backend.RandomGenerator):
  """Stands in for a generator of tf_keras: a fresh seed of `stream` for every draw."""

  def __init__(self, stream: RandomStream) -> None:
    super().__init__(seed=0, rng_type=self.RNG_STATELESS)
    self.make_seed_for_stateless_op = stream.next_seed


@functools.cache
def _patch_generators() -> None:
  keras.random.SeedGenerator.next = _patched_next(keras.random.SeedGenerator.next)
  generator = tf_keras_backend.RandomGenerator
  for draw in (
    generator.random_normal,
    generator.random_uniform,
    generator.truncated_normal,
    generator.dropout,
    generator.make_seed_for_stateless_op,
  ):
    setattr(generator, draw.__name__, _patched_draw(draw))


def _patched_next(keras_next: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  @functools.wraps(keras_next)
  def patched(self: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    stream = _entered.stream()
    return stream.next_seed() if stream else keras_next(self, ordered)

  return patched


def _patched_draw(draw: Callable[..., Any]) -> Callable[..., Any]:
  @functools.wraps(draw)
  def patched(self: tf_keras_backend.RandomGenerator, *args: Any, **kwargs: Any) -> Any:
    stream = _entered.stream()
    if stream is None or self._rng_type == self.RNG_STATELESS:  # initializers are stateless
      return draw(self, *args, **kwargs)
    return getattr(_StreamGenerator(stream), draw.__name__)(*args, **kwargs)

  return patched


def _seed_of_call() -> tf.Tensor:
  """Returns the seed for one call of a tf.function that was traced inside a stream."""
  stream = _entered.stream()
  return stream.next_seed() if stream else keras.random.randint([2], 0, _HASH_BOUND)


def _current_graph() -> Any:
  """Returns the graph that is being traced, or None: eager, which is outside of all graphs."""
  return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _enclosing_function(stop: Any) -> tuple[Any, list[tf.Tensor]]:
  """Returns the graph around all loops and branches up to `stop`, and those loops' iterations."""
  iterations: list[tf.Tensor] = []
  graph = _current_graph()
  while graph is not stop and getattr(graph, "is_control_flow_graph", False):
    if isinstance(graph, _LOOPS):
      iterations.insert(0, graph.inputs[0])  # tf.while_loop keeps its counter there
    graph = graph.outer_graph
  return graph, iterations


def _hash(key: tf.Tensor) -> tf.Tensor:
  return tf.random.stateless_uniform([2], seed=key, minval=0, maxval=_HASH_BOUND, dtype=tf.int32)


def _check_seed(seed: int) -> None:
  if not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
    raise errors.ConfigError(f"seed {seed!r} must be an integer from 0 to {_MAX_SEED}.")
