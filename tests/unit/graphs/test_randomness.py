"""Masks equal those computed from the documented formula, whatever the strategy and the mode."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loopwright import errors
from loopwright.graphs.randomness import RandomStream, random_streams, seed_everything, step_key

SHAPE = (16, 32)
SEED = 11
GENERATIONS = [pytest.param(keras, id="keras3"), pytest.param(tf_keras, id="tf_keras")]


# The formula of the module's docstring, in NumPy but for the generator itself.


def stateless_hash(key):
  return tf.random.stateless_uniform([2], seed=key, minval=0, maxval=2**30, dtype=tf.int32).numpy()


def words(first, second):
  return np.array([first, second], np.int32)


def expected_key(seed, step, replica, micro_batch=0):
  return stateless_hash(stateless_hash(words(seed, step)) + words(replica, micro_batch))


def expected_mask(seed, rate=0.5, jit_compile=False):
  uniform = tf.function(tf.random.stateless_uniform, jit_compile=jit_compile)
  return uniform(SHAPE, seed=tf.constant(seed)).numpy() >= rate


def expected_masks(steps, replicas, jit_compile=False):
  """Returns bool [steps, replicas, 2, *SHAPE]: the first two draws of every replica."""
  return np.array(
    [
      [
        [
          expected_mask(expected_key(SEED, step, replica) + words(0, i), jit_compile=jit_compile)
          for i in range(2)
        ]
        for replica in range(replicas)
      ]
      for step in steps
    ]
  )


def test_masks_of_formula_are_fair_and_independent():
  masks = expected_masks(range(4), 3).reshape(-1, math.prod(SHAPE))
  pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
  # Two fair independent masks agree in n/2 of n places, with a standard deviation of sqrt(n)/2.
  bound = 5 * math.sqrt(math.prod(SHAPE)) / 2
  assert max(abs((a == b).sum() - math.prod(SHAPE) / 2) for a, b in pairs) < bound


# Strategies and modes.


def make_strategy(name, mirrored):
  return {
    "default": tf.distribute.get_strategy,
    "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "mirrored_collective": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored_merge_call": lambda: mirrored(3),
    "central_storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
      ["CPU:0", "CPU:1"]
    ),
  }[name]()


STRATEGIES = [
  "default",
  "one_device",
  "mirrored_collective",
  "mirrored_merge_call",
  "central_storage",
]


def replica_id():
  return tf.distribute.get_replica_context().replica_id_in_sync_group


def two_masks(layer):
  """Calls `layer` twice in replica context; the replicas take turns at the merge_call between."""
  first = layer(tf.ones(SHAPE), training=True)
  tf.distribute.get_replica_context().merge_call(lambda strategy: None)
  return tf.stack([first, layer(tf.ones(SHAPE), training=True)]) > 0


def two_masks_compiled(layer):
  """As `two_masks`, compiled by XLA: no merge_call can be inside."""

  def draw(key):
    with random_streams(key):
      return tf.stack([layer(tf.ones(SHAPE), training=True) for _ in range(2)]) > 0

  return tf.function(draw, jit_compile=True)


def loop_of_steps(strategy, draw):
  """Returns a tf.function: masks [num_steps, replicas, 2, *SHAPE] drawn in a tf.while_loop."""

  @tf.function
  def masks(first_step, num_steps):
    def one_step(i, rows):
      per_replica = strategy.run(draw, args=(first_step + tf.cast(i, tf.int64),))
      row = tf.stack(strategy.experimental_local_results(per_replica))
      return i + 1, rows.write(i, row)

    rows = tf.TensorArray(tf.bool, num_steps)
    return tf.while_loop(lambda i, _: i < num_steps, one_step, (0, rows))[1].stack()

  return masks


def eager_steps(strategy, draw):
  def masks(first_step, num_steps):
    steps = [first_step + i for i in range(num_steps)]
    per_replica = [strategy.experimental_local_results(strategy.run(draw, (s,))) for s in steps]
    return tf.stack([tf.stack(row) for row in per_replica])

  return masks


def int64(value):
  return tf.constant(value, tf.int64)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
@pytest.mark.fast(name=["mirrored_merge_call"], generation=[keras])
@pytest.mark.fast(
  name=["central_storage", "default"], generation=[tf_keras], mode=["graph", "eager"]
)
def test_masks_follow_the_formula(name, generation, mode, mirrored):
  strategy = make_strategy(name, mirrored)
  with strategy.scope():
    layer = generation.layers.Dropout(0.5)
  compiled = two_masks_compiled(layer)

  def draw(step):
    key = step_key(SEED, step, replica_id())
    if mode == "xla":
      return compiled(key)
    with random_streams(key):
      return two_masks(layer)

  masks = (eager_steps if mode == "eager" else loop_of_steps)(strategy, draw)
  actual = masks(int64(2), 2)
  np.testing.assert_array_equal(
    actual, expected_masks([2, 3], strategy.num_replicas_in_sync, jit_compile=mode == "xla")
  )


def test_keras_alone_gives_every_replica_the_same_mask(mirrored):
  strategy = mirrored(2)
  with strategy.scope():
    layer = keras.layers.Dropout(0.5)
  masks = loop_of_steps(strategy, lambda step: two_masks(layer))(int64(0), 2).numpy()
  np.testing.assert_array_equal(masks[:, 0], masks[:, 1])


def test_resumed_run_and_other_number_of_replicas_repeat_the_masks(mirrored):
  def masks(replicas, first_step, num_steps):
    strategy = mirrored(replicas)
    with strategy.scope():
      layer = keras.layers.Dropout(0.5)

    def draw(step):
      with random_streams(step_key(SEED, step, replica_id())):
        return two_masks(layer)

    steps = loop_of_steps(strategy, draw)
    result = steps(int64(first_step), tf.constant(num_steps)).numpy()
    steps(int64(0), tf.constant(1))
    assert steps.experimental_get_tracing_count() == 1
    return result

  whole = masks(3, 0, 4)
  np.testing.assert_array_equal(masks(3, 2, 2), whole[2:])
  np.testing.assert_array_equal(masks(1, 2, 2), whole[2:, :1])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rate(generation):
  layer, rate, draws = generation.layers.Dropout(0.2), 0.2, 200
  with random_streams(tf.constant([1, 2])):
    kept = np.mean([layer(tf.ones(SHAPE), training=True) > 0 for _ in range(draws)])
  deviation = math.sqrt(rate * (1 - rate) / (draws * math.prod(SHAPE)))
  assert abs(kept - (1 - rate)) < 5 * deviation


# The key.


def test_step_key_depends_on_all_of_its_parts():
  arguments = [(s, t, r, m) for s in (0, 2**31 - 1) for t in (0, 1) for r in (0, 1) for m in (0, 1)]
  keys = [step_key(s, int64(t), r, m) for s, t, r, m in arguments]
  assert {key.dtype for key in keys} == {tf.int32}
  assert len({tuple(key.numpy()) for key in keys}) == 16
  for key, parts in zip(keys, arguments, strict=True):
    np.testing.assert_array_equal(key, expected_key(*parts))


@pytest.mark.parametrize("seed", [-1, 2**31, 1.0, "1", None])
def test_seed_must_be_a_nonnegative_int32(seed):
  with pytest.raises(errors.ConfigError, match="whole number from 0 to 2147483647"):
    step_key(seed, int64(0), 0)
  with pytest.raises(errors.ConfigError, match="whole number from 0 to 2147483647"):
    seed_everything(seed)


# Where layers draw: loops, branches, functions, recurrent cells, lists of generators.


def mask_of(layer):
  return layer(tf.ones(SHAPE), training=True) > 0


def draw_in_loops(layer, sizes):
  """Returns [prod(sizes), *SHAPE]: masks drawn inside nested tf.while_loops of these sizes."""

  def loop(sizes, position, rows):
    if not sizes:
      return rows.write(position, mask_of(layer))

    def body(i, rows):
      return i + 1, loop(sizes[1:], position * sizes[0] + i, rows)

    return tf.while_loop(lambda i, _: i < sizes[0], body, (0, rows))[1]

  return loop(sizes, 0, tf.TensorArray(tf.bool, math.prod(sizes))).stack()


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.fast(jit_compile=[False])
def test_iterations_of_a_loop_draw_apart(generation, jit_compile):
  layer = generation.layers.Dropout(0.5)

  @functools.partial(tf.function, jit_compile=jit_compile)
  def draw(step):
    with random_streams(step_key(SEED, step, 0)):
      return draw_in_loops(layer, [2, 3]), mask_of(layer)

  in_loops, after = draw(int64(5))
  key = expected_key(SEED, 5, 0)
  for i in range(2):
    for j in range(3):
      inner = stateless_hash(stateless_hash(key + words(1 + i, 0)) + words(1 + j, 0))
      np.testing.assert_array_equal(
        in_loops[3 * i + j], expected_mask(inner, jit_compile=jit_compile)
      )
  np.testing.assert_array_equal(after, expected_mask(key + words(0, 1), jit_compile=jit_compile))


def test_autograph_loop_of_a_users_own_noise():
  @tf.function
  def draw(key):
    rows = tf.TensorArray(tf.float32, 3)
    with random_streams(key) as stream:
      for i in tf.range(3):
        rows = rows.write(i, tf.random.stateless_uniform(SHAPE, seed=stream.next_seed()))
    return rows.stack()

  noise = draw(tf.constant([3, 4])).numpy()
  for i in range(3):
    key = stateless_hash(words(3, 4) + words(1 + i, 0))
    np.testing.assert_array_equal(noise[i] >= 0.5, expected_mask(key))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_branch_draws_from_the_stream(generation):
  layer = generation.layers.Dropout(0.5)

  @tf.function
  def draw(which):
    with random_streams(tf.constant([3, 4])):
      return tf.cond(which, lambda: mask_of(layer), lambda: mask_of(layer))

  for which, i in ((True, 0), (False, 1)):
    np.testing.assert_array_equal(draw(tf.constant(which)), expected_mask(words(3, 4 + i)))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("outer", [tf.function, lambda f: f], ids=["graph", "eager"])
@pytest.mark.fast(jit_compile=[False])
def test_every_call_of_a_nested_function_draws_anew(generation, jit_compile, outer):
  layer, dense = generation.layers.Dropout(0.5), generation.layers.Dense(2)

  @functools.partial(tf.function, jit_compile=jit_compile)
  def forward():
    dense(tf.ones([1, 1]))  # makes variables, so that TensorFlow traces the first call twice
    return tf.stack([mask_of(layer), mask_of(layer)])

  def draw(step):
    with random_streams(step_key(SEED, step, 0)) as stream:
      return forward(), stream.next_seed(), forward(), stream.next_seed()

  draw = outer(draw)
  for step in (5, 6, 5):
    key = expected_key(SEED, step, 0)
    first, seed_between, second, seed_after = draw(int64(step))
    np.testing.assert_array_equal(seed_between, key + words(0, 1))
    np.testing.assert_array_equal(seed_after, key + words(0, 3))
    for masks, call in ((first, 0), (second, 2)):
      for i in range(2):
        seed = stateless_hash(key + words(0, call)) + words(0, i)
        np.testing.assert_array_equal(masks[i], expected_mask(seed, jit_compile=jit_compile))
  assert (forward().numpy() != forward().numpy()).any()  # outside: not frozen to the last key


def test_recomputation_sees_the_same_mask_in_a_stream_of_its_own():
  layer = keras.layers.Dropout(0.5)

  @tf.function
  def gradient_and_output(key):
    with random_streams(key) as stream, tf.GradientTape() as tape:
      seed = stream.next_seed()

      @tf.recompute_grad
      def block(x):
        with random_streams(seed):
          return layer(x, training=True) * x

      x = tf.ones(SHAPE)
      tape.watch(x)
      output = block(x)
    return tape.gradient(output, x), output

  gradient, output = gradient_and_output(tf.constant([3, 4]))
  np.testing.assert_array_equal(gradient, 2 * output)  # d(mask * x * x) at x = 1


class Twice(keras.layers.Layer):
  """Holds its generators in a list, and calls a nested layer twice."""

  def __init__(self):
    super().__init__()
    self.generators = [keras.random.SeedGenerator(1), keras.random.SeedGenerator(1)]
    self.dropout = keras.layers.Dropout(0.5)

  def call(self, inputs, training=False):
    noise = [keras.random.normal(inputs.shape, seed=g) for g in self.generators]
    noise.append(keras.random.normal(inputs.shape))  # the global generator
    return tf.stack(
      [*noise, self.dropout(inputs, training=training), self.dropout(inputs, training=training)]
    )


def test_every_draw_of_a_nested_layer_differs():
  layer = Twice()
  with random_streams(tf.constant([3, 4])):
    outputs = layer(tf.ones(SHAPE), training=True).numpy()
  assert len({output.tobytes() for output in outputs}) == 5
  for i, output in enumerate(outputs[:3]):
    seed = words(3, 4 + i)
    np.testing.assert_array_equal(output, tf.random.stateless_normal(SHAPE, seed=seed))


class TfKerasDropoutCell(tf_keras.layers.Layer):
  """A recurrent cell whose output is its mask."""

  state_size = output_size = 32

  def __init__(self):
    super().__init__()
    self.dropout = tf_keras.layers.Dropout(0.5)

  def call(self, inputs, states, training=False):
    return self.dropout(inputs, training=training), states


class KerasDropoutCell(keras.layers.Layer):
  state_size = output_size = 32

  def __init__(self):
    super().__init__()
    self.dropout = keras.layers.Dropout(0.5)

  def call(self, inputs, states, training=False):
    return self.dropout(inputs, training=training), states


@pytest.mark.parametrize(
  ("rnn", "cell"), [(keras.layers.RNN, KerasDropoutCell), (tf_keras.layers.RNN, TfKerasDropoutCell)]
)
def test_timesteps_of_a_recurrent_layer_draw_apart(rnn, cell):
  layer = rnn(cell(), return_sequences=True)

  @tf.function
  def draw(key):
    with random_streams(key):
      return layer(tf.ones([4, 5, 32]), training=True)

  masks = draw(tf.constant([3, 4])).numpy()
  assert len({masks[:, t].tobytes() for t in range(5)}) == 5


IMAGES = (4, 32, 32, 3)
SEQUENCES = (4, 6, 8)
RANDOM_LAYERS = {
  "AlphaDropout": (lambda k: k.layers.AlphaDropout(0.5), SHAPE),
  "GaussianDropout": (lambda k: k.layers.GaussianDropout(0.5), SHAPE),
  "GaussianNoise": (lambda k: k.layers.GaussianNoise(0.5), SHAPE),
  "SpatialDropout2D": (lambda k: k.layers.SpatialDropout2D(0.5), IMAGES),
  "RandomFlip": (lambda k: k.layers.RandomFlip(), IMAGES),
  "RandomRotation": (lambda k: k.layers.RandomRotation(0.3), IMAGES),
  "RandomCrop": (lambda k: k.layers.RandomCrop(4, 4), IMAGES),
  "LSTM": (lambda k: k.layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5), SEQUENCES),
  "GRU": (lambda k: k.layers.GRU(3, dropout=0.5, recurrent_dropout=0.5), SEQUENCES),
  "mixed_precision": (lambda k: k.layers.Dropout(0.5, dtype="mixed_float16"), SHAPE),
}


@pytest.mark.parametrize("name", RANDOM_LAYERS)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.fast(generation=[keras])
def test_random_layer_is_a_function_of_step_and_replica(name, generation, mirrored):
  make, shape = RANDOM_LAYERS[name]
  strategy = mirrored(2)
  with strategy.scope():
    layer = make(generation)
    layer.build(shape)
  inputs = tf.random.stateless_uniform(shape, seed=[0, 0])

  @tf.function
  def outputs(step):
    def draw():
      with random_streams(step_key(SEED, step, replica_id())):
        return layer(inputs, training=True)

    return tf.stack(strategy.experimental_local_results(strategy.run(draw)))

  first, second, again = (outputs(int64(step)).numpy() for step in (1, 2, 1))
  np.testing.assert_array_equal(first, again)
  assert len({a.tobytes() for a in (*first, *second)}) == 4


# What must stay as it is.


def test_outside_a_stream_keras_draws_as_ever():
  layer = keras.layers.Dropout(0.5, seed=3)
  with random_streams(tf.constant([1, 2])):
    mask_of(layer)
  np.testing.assert_array_equal(layer.seed_generator.state.numpy(), [3, 0])
  for i in range(2):
    np.testing.assert_array_equal(mask_of(layer), expected_mask(words(3, i)))


@pytest.mark.parametrize("rng_type", ["legacy_stateful", "stateful"])
def test_outside_a_stream_tf_keras_draws_as_ever(rng_type):
  def outside():
    tf_keras.utils.set_random_seed(4)
    return mask_of(tf_keras.layers.Dropout(0.5, rng_type=rng_type)).numpy()

  before = outside()
  layer = tf_keras.layers.Dropout(0.5, rng_type=rng_type)
  with random_streams(tf.constant([1, 2])):
    np.testing.assert_array_equal(mask_of(layer), expected_mask(words(1, 2)))
  assert (mask_of(layer).numpy() != mask_of(layer).numpy()).any()
  np.testing.assert_array_equal(outside(), before)


def test_inner_stream_hides_the_outer_one():
  layer = keras.layers.Dropout(0.5)
  with random_streams(tf.constant([1, 2])):
    with random_streams(tf.constant([3, 4])):
      np.testing.assert_array_equal(mask_of(layer), expected_mask(words(3, 4)))
    np.testing.assert_array_equal(mask_of(layer), expected_mask(words(1, 2)))


class Lazy(keras.Model):
  """Unbuilt: Keras first runs `call` on symbols, and then makes the weights."""

  def __init__(self):
    super().__init__()
    self.dense = keras.layers.Dense(2)
    self.dropout = keras.layers.Dropout(0.5)

  def call(self, inputs, training=False):
    self.dense(inputs)
    return self.dropout(inputs, training=training)


@pytest.mark.parametrize("wrap", [tf.function, lambda f: f], ids=["graph", "eager"])
def test_building_inside_a_stream_costs_no_draw(wrap):
  model = Lazy()

  def draw(key):
    with random_streams(key):
      return mask_of(model)

  draw = wrap(draw)
  for _ in range(2):
    np.testing.assert_array_equal(draw(tf.constant([3, 4])), expected_mask(words(3, 4)))


def test_what_is_lifted_out_of_the_graph_keeps_its_own_generator():
  layer = keras.layers.Dropout(0.5, seed=3)
  lifted = []

  @tf.function
  def draw(key):
    with random_streams(key), tf.init_scope():
      lifted.append(mask_of(layer))

  draw(tf.constant([1, 2]))
  np.testing.assert_array_equal(lifted, [expected_mask(words(3, 0))])


def test_stream_of_another_function_is_an_error():
  kept: list[RandomStream] = []

  @tf.function
  def keep(key):
    kept.append(random_streams(key))
    return key

  keep(tf.constant([1, 2]))
  with pytest.raises(RuntimeError, match="belongs to another"):
    kept[0].next_seed()


def test_nested_function_draws_only_from_an_entered_stream():
  stream = random_streams(tf.constant([1, 2]))
  nested = tf.function(stream.next_seed)
  with pytest.raises(RuntimeError, match="only from the stream entered"):
    nested()
  with stream:
    np.testing.assert_array_equal(nested(), stateless_hash(words(1, 2)))


# Initial weights.


def initial_weights(generation, strategy, seed):
  """Returns float32 [replicas, 35]: every replica's copy of the kernels."""
  seed_everything(seed)
  layers = generation.layers
  with strategy.scope():
    model = generation.Sequential(
      [
        layers.Input((4,)),
        layers.Dense(5, use_bias=False),
        layers.Dropout(0.1),
        layers.Dense(3, use_bias=False, kernel_initializer="random_normal"),
      ]
    )
  copies = strategy.run(
    lambda: tf.concat([tf.reshape(w, [-1]) for w in model.trainable_variables], 0)
  )
  return np.stack(strategy.experimental_local_results(copies))


def test_unseeded_draws_on_the_host_follow_from_the_seed():
  def draws():
    seed_everything(5)
    return keras.random.normal([3]), tf.random.normal([3]), np.random.normal(size=3)

  np.testing.assert_array_equal(np.stack(draws()), np.stack(draws()))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_initial_weights_follow_from_the_seed(generation, mirrored):
  one = initial_weights(generation, tf.distribute.get_strategy(), seed=5)
  assert one.shape == (1, 35)
  again = initial_weights(generation, tf.distribute.get_strategy(), seed=5)
  np.testing.assert_array_equal(again, one)
  three = initial_weights(generation, mirrored(3), seed=5)
  np.testing.assert_array_equal(three, np.repeat(one, 3, axis=0))
  assert (initial_weights(generation, tf.distribute.get_strategy(), seed=6) != one).any()
