import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loopwright.errors import ConfigError
from loopwright.optimizers import schedules
from loopwright.optimizers.schedule import Schedule, bind

# Around every boundary used below, and far beyond 2**24, where float32 skips whole numbers.
STEPS = [0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 19, 20, 21, 30, 99, 100, 101, 110, 10**3, 10**4]
LARGE = 1_000_000_000
LARGE_STEPS = [0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, LARGE // 3, LARGE - 1, LARGE, 2**40]


def cosine(step, initial, decay_steps, final=0.0):
  done = np.minimum(np.asarray(step, np.float64) / decay_steps, 1.0)
  return final + (initial - final) * np.cos(0.5 * np.pi * done) ** 2


def rates(schedule, steps):
  return np.array([schedule.at(tf.constant(s, tf.int64)).numpy() for s in steps])


def assert_float32_exact(schedule, steps, expected):
  """Equal to the float64 closed form to two units in the last place of float32."""
  actual = rates(schedule, steps)
  assert actual.dtype == np.float32
  np.testing.assert_allclose(actual, np.asarray(expected, np.float32), rtol=2.4e-7, atol=1e-12)


def test_the_synopsis():
  after = schedules.cosine_decay(initial=0.1, decay_steps=10_000)
  rate = schedules.linear_warmup(warmup_steps=500, after=after)
  assert rate.at(250).numpy() == np.float32(0.05)


def exponential(final, staircase):
  exponent = np.asarray(STEPS) / 10
  return final + (0.5 - final) * 0.96 ** (np.floor(exponent) if staircase else exponent)


def decay(**options):
  return schedules.exponential_decay(initial=0.5, decay_steps=10, decay_rate=0.96, **options)


def warmup(steps, after, **options):
  return schedules.linear_warmup(warmup_steps=steps, after=after, **options)


SMOOTH = {"of": schedules.cosine_decay(initial=0.3, decay_steps=10), "staircase": False}
CLOSED_FORMS = {
  "constant": (schedules.constant(learning_rate=0.3), STEPS, np.full(len(STEPS), 0.3)),
  "exponential": (decay(), STEPS, exponential(0.0, False)),
  "stairs": (decay(staircase=True), STEPS, exponential(0.0, True)),
  "near a final rate": (decay(final=0.1), STEPS, exponential(0.1, False)),
  "stairs to a final rate": (decay(staircase=True, final=0.1), STEPS, exponential(0.1, True)),
  "by epoch, smooth": (
    schedules.by_epoch(steps_per_epoch=7, **SMOOTH), STEPS, cosine(STEPS, 0.3, 70),
  ),
  "no boundaries": (
    schedules.piecewise_constant(boundaries=(), values=(0.2,)), [0, 7], [0.2, 0.2],
  ),
  "warm-up to a number": (warmup(4, 0.8), range(7), [0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
  "warm-up of no steps": (warmup(0, 0.8), [0, 1], [0.8, 0.8]),
  "nested warm-ups": (
    warmup(2, warmup(2, 1.0, start=0.5)), range(6), [0, 0.25, 0.5, 0.75, 1.0, 1.0],
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_a_schedule_is_its_closed_form(name):
  assert_float32_exact(*CLOSED_FORMS[name])


@pytest.mark.parametrize("final", [0.0, 0.01])
def test_cosine_decay_is_the_closed_form(final):
  schedule = schedules.cosine_decay(initial=0.3, decay_steps=100, final=final)
  assert_float32_exact(schedule, STEPS, cosine(STEPS, 0.3, 100, final))
  assert schedule.at(0).numpy() == np.float32(0.3)
  assert schedule.at(100).numpy() == np.float32(final)
  assert schedule.at(10**9).numpy() == np.float32(final)


@pytest.mark.parametrize("replicas", [1, 2])
def test_by_epoch_a_ramp_and_a_decay_to_a_floor(replicas, mirrored):
  """1e-5 to 5e-5 x replicas in 5 epochs, then x 0.8 an epoch toward 1e-5; as of each border."""
  epoch, most = 47, 5e-5 * replicas
  with mirrored(replicas).scope():
    decay = schedules.exponential_decay(
      initial=schedules.times_replicas(value=5e-5), decay_steps=1, decay_rate=0.8, final=1e-5
    )
  ramp = schedules.linear_warmup(warmup_steps=5, start=1e-5, after=decay)
  schedule = schedules.by_epoch(of=ramp, steps_per_epoch=epoch)

  def closed_form(number):
    if number < 5:
      return 1e-5 + (most - 1e-5) * number / 5
    return 1e-5 + (most - 1e-5) * 0.8 ** (number - 5)

  borders = range(epoch, 30 * epoch, epoch)
  steps = [0, *(border + offset for border in borders for offset in (-1, 0, 1))]
  expected = [closed_form(step // epoch) for step in steps]
  assert_float32_exact(schedule, steps, expected)
  assert max(expected) == most
  assert_float32_exact(schedule, [10**6], [1e-5])
  compiled = tf.function(schedule.at)
  assert [compiled(tf.constant(s, tf.int64)).numpy() for s in steps] == list(rates(schedule, steps))


def test_piecewise_constant_takes_the_next_value_at_the_boundary():
  schedule = schedules.piecewise_constant(boundaries=[10, 20, 100], values=[1.0, 0.1, 0.01, 0.0])
  index = np.searchsorted([10, 20, 100], STEPS, side="right")
  assert_float32_exact(schedule, STEPS, np.array([1.0, 0.1, 0.01, 0.0])[index])
  np.testing.assert_array_equal(rates(schedule, [9, 10]), np.float32([1.0, 0.1]))


def test_warmup_then_a_schedule_that_counts_from_the_end_of_the_warmup():
  after = schedules.cosine_decay(initial=0.4, decay_steps=100)
  schedule = schedules.linear_warmup(warmup_steps=10, after=after, start=0.1)
  steps = np.asarray(STEPS)
  expected = np.where(
    steps < 10, 0.1 + 0.3 * steps / 10, cosine(np.maximum(steps - 10, 0), 0.4, 100)
  )
  assert_float32_exact(schedule, STEPS, expected)
  assert schedule.at(10).numpy() == np.float32(0.4)
  assert schedule.at(109).numpy() > 0
  assert schedule.at(110).numpy() == 0


def test_steps_beyond_two_to_the_24_do_not_blur():
  n = np.asarray(LARGE_STEPS, np.float64)
  assert_float32_exact(
    schedules.cosine_decay(initial=0.1, decay_steps=LARGE), LARGE_STEPS, cosine(n, 0.1, LARGE)
  )
  assert_float32_exact(
    schedules.exponential_decay(initial=0.1, decay_steps=10_000, decay_rate=0.9999),
    LARGE_STEPS[:-1],
    0.1 * np.exp(n[:-1] / 10_000 * math.log(0.9999)),
  )
  odd = schedules.piecewise_constant(boundaries=[2**24 + 1], values=[1.0, 2.0])
  np.testing.assert_array_equal(rates(odd, [2**24, 2**24 + 1]), [1.0, 2.0])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_stairs_are_exact_when_compiled(jit_compile):
  schedule = schedules.exponential_decay(
    initial=1.0, decay_steps=49, decay_rate=0.5, staircase=True
  )
  compiled = tf.function(schedule.at, jit_compile=jit_compile)
  for stair in range(1, 20):
    at = tf.constant(49 * stair, tf.int64)
    assert compiled(at).numpy() == np.float32(0.5**stair)
    assert compiled(at - 1).numpy() == np.float32(0.5 ** (stair - 1))


STEP_OF_ANY_KIND = [
  *(50, 50.0, np.int64(50), np.float32(50)),
  *(tf.constant(50, dtype) for dtype in (tf.int32, tf.int64, tf.float32, tf.float64)),
  *(tf.Variable(50, dtype=tf.int64), keras.Variable(50, dtype="int64")),
]


def test_any_scalar_is_a_step():
  schedule = schedules.cosine_decay(initial=0.2, decay_steps=100)
  assert [schedule.at(step).numpy() for step in STEP_OF_ANY_KIND] == 10 * [np.float32(0.1)]


@pytest.mark.parametrize(("replicas", "expected"), [(1, 0.1), (2, 0.2), (3, 0.3)])
def test_scale_by_replicas_multiplies_by_those_in_scope(mirrored, replicas, expected):
  with mirrored(replicas).scope():
    schedule = schedules.scale_by_replicas(schedule=0.1)
  assert_float32_exact(schedule, [0, 5], [expected, expected])
  assert_float32_exact(Schedule.from_config(schedule.get_config()), [0], [expected])


def test_scale_by_replicas_scales_a_schedule(mirrored):
  with mirrored(2).scope():
    schedule = schedules.linear_warmup(
      warmup_steps=5,
      start=0.1,
      after=schedules.scale_by_replicas(
        schedule=schedules.cosine_decay(initial=0.1, decay_steps=100)
      ),
    )
  assert_float32_exact(schedule, [0, 5, 55, 105], [0.1, 0.2, 0.1, 0.0])


def test_a_users_own_function():
  schedule = Schedule(lambda step: 0.1 / tf.sqrt(1.0 + step))
  assert_float32_exact(schedule, STEPS, 0.1 / np.sqrt(1.0 + np.asarray(STEPS)))
  warmed = schedules.linear_warmup(warmup_steps=2, after=schedule)
  assert_float32_exact(warmed, [1, 2, 5], [0.05, 0.1, 0.05])


# Betas of 0.5 make Adam's moments and bias corrections exact in float32: its step is the rate.
BETAS = {"beta_1": 0.5, "beta_2": 0.5}
OPTIMIZERS = {
  "keras.SGD": lambda rate: keras.optimizers.SGD(rate),
  "keras.Adam": lambda rate: keras.optimizers.Adam(rate, **BETAS),
  "keras.AdamW": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1, **BETAS),
  "tf_keras.SGD": lambda rate: tf_keras.optimizers.SGD(rate),
  "tf_keras.Adam": lambda rate: tf_keras.optimizers.Adam(rate, **BETAS),
  "tf_keras.AdamW": lambda rate: tf_keras.optimizers.AdamW(rate, weight_decay=0.1, **BETAS),
}
UPDATES = 6


def expected_weight(name, learning_rates):
  """The weight, from 1.0, after one update a rate under a constant gradient of 1 (or 1/2 twice)."""
  weight = 1.0
  for rate in learning_rates:
    if name.endswith("AdamW"):
      weight -= weight * 0.1 * rate
    weight -= rate
  return weight


def warmup_and_cosine():
  after = schedules.cosine_decay(initial=0.1, decay_steps=4)
  return schedules.linear_warmup(warmup_steps=2, after=after, start=0.02)


RATES = [0.02, 0.06, 0.1, *cosine([1, 2, 3], 0.1, 4)]


def apply(optimizer, gradient, variable):
  if isinstance(optimizer, keras.optimizers.Optimizer):
    optimizer.apply([gradient], [variable])
  else:
    optimizer.apply_gradients([(gradient, variable)])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.fast(replicas=[2], compiled=[True])
def test_optimizers_of_both_generations_follow_their_own_counter(
  name, replicas, compiled, mirrored
):
  strategy = mirrored(2) if replicas == 2 else tf.distribute.get_strategy()
  with strategy.scope():
    variable = tf.Variable(1.0)
    optimizer = OPTIMIZERS[name](warmup_and_cosine())
    optimizer.build([variable])

  def step():
    strategy.run(lambda: apply(optimizer, tf.constant(1.0 / replicas), variable))

  step = tf.function(step) if compiled else step
  for _ in range(UPDATES):
    step()
  np.testing.assert_allclose(variable.numpy(), expected_weight(name, RATES), rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.fast(replicas=[2], name=["keras.Adam", "tf_keras.Adam"])
def test_a_bound_schedule_follows_the_global_step(name, replicas, mirrored):
  """Every second step is skipped, as after a gradient overflow: the rate moves on all the same."""
  strategy = mirrored(2) if replicas == 2 else tf.distribute.get_strategy()
  with strategy.scope():
    variable = tf.Variable(1.0)
    global_step = tf.Variable(
      0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
    )
    optimizer = OPTIMIZERS[name](warmup_and_cosine())
    optimizer.build([variable])
  bind(optimizer, global_step)

  @tf.function
  def train(steps):
    for _ in tf.range(steps):
      if global_step % 2 == 0:
        strategy.run(lambda: apply(optimizer, tf.constant(1.0 / replicas), variable))
      global_step.assign_add(1)

  train(tf.constant(4))
  train(tf.constant(2))
  assert train.experimental_get_tracing_count() == 1
  np.testing.assert_allclose(variable.numpy(), expected_weight(name, RATES[::2]), rtol=1e-6)


@pytest.mark.parametrize("generation", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_bind_makes_a_keras_schedule_follow_the_global_step_too(generation):
  decay = generation.optimizers.schedules.CosineDecay(0.1, decay_steps=4)
  optimizer = generation.optimizers.SGD(decay)
  global_step = tf.Variable(2, dtype=tf.int64)
  variable = tf.Variable(1.0)
  optimizer.build([variable])
  bind(optimizer, global_step)
  apply(optimizer, tf.constant(1.0), variable)
  np.testing.assert_allclose(variable.numpy(), 1.0 - cosine(2, 0.1, 4), rtol=1e-6)


@pytest.mark.parametrize("generation", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_bind_leaves_a_plain_learning_rate_alone(generation):
  optimizer = generation.optimizers.SGD(0.25)
  bind(optimizer, tf.Variable(2, dtype=tf.int64))
  assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize("generation", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_an_optimizer_config_round_trips(generation):
  rate = schedules.linear_warmup(
    warmup_steps=3,
    after=schedules.scaled(
      of=schedules.piecewise_constant(boundaries=[4], values=[1.0, 0.5]), factor=0.1
    ),
  )
  config = generation.optimizers.Adam(rate).get_config()
  restored = generation.optimizers.Adam.from_config(config, custom_objects={"Schedule": Schedule})
  again = restored._learning_rate
  assert isinstance(again, Schedule)
  np.testing.assert_array_equal(rates(again, STEPS), rates(rate, STEPS))


@pytest.mark.parametrize("generation", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_bound_schedule_of_keras_is_saved_as_such(generation):
  rate = generation.optimizers.schedules.ExponentialDecay(1.0, 2, 0.5)
  optimizer = generation.optimizers.SGD(rate)
  bind(optimizer, tf.Variable(2, dtype=tf.int64))
  again = generation.optimizers.SGD.from_config(optimizer.get_config())._learning_rate
  assert type(again) is type(rate)
  assert [float(again(step)) for step in (0, 2, 4)] == [1, 0.5, 0.25]
  assert float(optimizer._learning_rate(0)) == 0.5  # at the bound step


@pytest.mark.parametrize(
  "schedule",
  [
    schedules.constant(learning_rate=0.1),
    schedules.cosine_decay(initial=0.3, decay_steps=10, final=0.1),
    schedules.exponential_decay(initial=0.3, decay_steps=3, decay_rate=0.5, staircase=True),
    schedules.by_epoch(
      of=schedules.exponential_decay(initial=0.3, decay_steps=1, decay_rate=0.5, final=0.1),
      steps_per_epoch=4,
    ),
  ],
)
def test_a_config_rebuilds_the_schedule(schedule):
  again = Schedule.from_config(schedule.get_config())
  assert again.get_config() == schedule.get_config()
  np.testing.assert_array_equal(rates(again, STEPS), rates(schedule, STEPS))


def test_a_users_own_function_has_no_config():
  with pytest.raises(ConfigError, match=r"your own function cannot be saved"):
    Schedule(lambda step: 0.1).get_config()


EXPONENTIAL = {"initial": 1, "decay_steps": 5, "decay_rate": 0.5}


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("constant", {"learning_rate": -0.1}, "learning_rate is -0.1; it must be"),
    ("constant", {"learning_rate": math.nan}, "learning_rate is nan"),
    ("constant", {"learning_rate": "0.1"}, "learning_rate is '0.1'"),
    ("constant", {"learning_rate": True}, "learning_rate is True"),
    ("linear_warmup", {"warmup_steps": -1, "after": 0.1}, "warmup_steps is -1; it must be a whole"),
    ("linear_warmup", {"warmup_steps": 1.5, "after": 0.1}, "warmup_steps is 1.5"),
    ("linear_warmup", {"warmup_steps": 1, "after": -1.0}, "after is -1.0"),
    ("linear_warmup", {"warmup_steps": 1, "after": "x"}, "after is 'x'"),
    ("linear_warmup", {"warmup_steps": 1, "after": 1, "start": -2}, "start is -2"),
    (
      "cosine_decay",
      {"initial": 0.1, "decay_steps": 0},
      "decay_steps is 0; it must be a whole num",
    ),
    ("cosine_decay", {"initial": -1, "decay_steps": 1}, "initial is -1"),
    ("cosine_decay", {"initial": 1, "decay_steps": 1, "final": -1}, "final is -1"),
    ("exponential_decay", {**EXPONENTIAL, "decay_steps": -5}, "decay_steps is -5"),
    ("exponential_decay", {**EXPONENTIAL, "decay_rate": 0}, "decay_rate is 0; it must be above 0."),
    ("exponential_decay", {**EXPONENTIAL, "final": -1}, "final is -1"),
    (
      "piecewise_constant",
      {"boundaries": [5, 5], "values": [1, 2, 3]},
      r"boundaries is \[5, 5\]; each must be above",
    ),
    ("piecewise_constant", {"boundaries": [0], "values": [1, 2]}, "boundaries is 0"),
    ("piecewise_constant", {"boundaries": [2], "values": [1, -2]}, "values is -2"),
    ("scaled", {"of": 0.1, "factor": -1}, "factor is -1"),
    (
      "by_epoch",
      {"of": 0.1, "steps_per_epoch": 0},
      "steps_per_epoch is 0; it must be a whole numb",
    ),
    ("times_replicas", {"value": -1}, "value is -1"),
  ],
)
def test_a_bad_value_is_named(name, options, message):
  with pytest.raises(ConfigError, match=rf"^{name}\.{message}"):
    getattr(schedules, name)(**options)


def test_each_stretch_has_a_value():
  line = "has 2 boundaries and 2 values; it must have one value more than boundaries."
  with pytest.raises(ConfigError, match=line):
    schedules.piecewise_constant(boundaries=[5, 7], values=[1, 2])
