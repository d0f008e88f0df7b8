"""The fused update kernels: Keras's own update rules, as NumPy computes them in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from toys import KERAS

from loopwright.models import models
from loopwright.optimizers import adapters, kernels, rule
from loopwright.optimizers.fusion import Gradients

STEPS = 20
SHAPES = ((3, 2), (5,), (), (kernels.FORKED.start,))
RULES = {
  "adam": ("Adam", {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 2.0**-20}),
  "adamw": ("AdamW", {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 2.0**-20, "weight_decay": 0.25}),
  "sgd": ("SGD", {}),
  "sgd_decay": ("SGD", {"weight_decay": 0.25}),
  "momentum": ("SGD", {"momentum": 0.75}),
  "nesterov": ("SGD", {"momentum": 0.75, "nesterov": True}),
}
RATE = 2.0**-6
"""Like every number above a sum of a few powers of two: exact in float32, which Keras keeps."""


def initial(dtype):
  rng = np.random.default_rng(0)
  return [rng.normal(size=shape).astype(dtype) for shape in SHAPES]


def gradients_of(step, dtype):
  rng = np.random.default_rng([1, step])
  return [
    (scale * rng.normal(size=s)).astype(dtype)
    for scale, s in zip((1, 10, 100, 1), SHAPES, strict=True)
  ]


def reference(name, *, amsgrad=False, rate=lambda step: RATE, dtype=np.float64, **changed):
  """Returns the weights after STEPS steps, by the formulas of the papers, in float64."""
  options = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, **RULES[name][1], **changed}
  weights = [np.asarray(w, np.float64) for w in initial(dtype)]
  m, v, largest = ([np.zeros_like(w) for w in weights] for _ in range(3))
  for step in range(STEPS):
    gradients, lr = [g.astype(np.float64) for g in gradients_of(step, dtype)], rate(step)
    for i, g in enumerate(gradients):
      weights[i] = weights[i] - lr * options["weight_decay"] * weights[i]
      if "beta_1" in options:
        beta_1, beta_2 = options["beta_1"], options["beta_2"]
        m[i] = beta_1 * m[i] + (1 - beta_1) * g
        v[i] = beta_2 * v[i] + (1 - beta_2) * g**2
        largest[i] = np.maximum(largest[i], v[i])
        correction = np.sqrt(1 - beta_2 ** (step + 1)) / (1 - beta_1 ** (step + 1))
        second = largest[i] if amsgrad else v[i]
        weights[i] = weights[i] - lr * correction * m[i] / (np.sqrt(second) + options["epsilon"])
      else:
        m[i] = options["momentum"] * m[i] - lr * g
        ahead = options["momentum"] * m[i] - lr * g
        weights[i] = weights[i] + (ahead if options["nesterov"] else m[i])
  return weights


def make(library, name, *, learning_rate=RATE, **changed):
  kind, options = RULES[name]
  return getattr(KERAS[library].optimizers, kind)(learning_rate, **{**options, **changed})


def with_kernels_of(optimizer, variables):
  """Returns the rule of a new optimizer, by kernels where there are some."""
  one = rule.of(optimizer)(optimizer, variables)
  if update := kernels.update_of(optimizer, one.usual):
    one.update = one.decayed(update)
  return one


def trained(library, optimizer, *, with_kernels, dtype=np.float64):
  """Returns the weights after STEPS updates by the optimizer alone, without any of the loop."""
  make_variable = keras.Variable if library == "keras" else tf.Variable
  variables = [make_variable(w, dtype=np.dtype(dtype).name) for w in initial(dtype)]
  one = with_kernels_of(optimizer, variables) if with_kernels else None
  for step in range(STEPS):
    gradients = list(map(tf.constant, gradients_of(step, dtype)))
    if one:
      one.apply(gradients)
    else:
      optimizer.apply_gradients(zip(gradients, variables, strict=True))
  return [models.raw(v).numpy() for v in variables]


class Ops:
  """Names of the operations that a traced update consists of."""

  def __init__(self, library, optimizer, size=2):
    variable = tf.Variable(tf.ones([size]))
    one = with_kernels_of(optimizer, [variable])
    update = tf.function(lambda: one.apply([tf.ones([size])]))
    self.names = {op.type for op in update.get_concrete_function().graph.get_operations()}


def assert_close(got, expected, **tolerance):
  for one, other in zip(got, expected, strict=True):
    np.testing.assert_allclose(one, other, **tolerance)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.fast(library=["keras"])
def test_kernels_follow_the_formula_in_float64(library, name):
  """All hyperparameters are exact, so the only tolerance is that of float64: 1e-12, not 1e-6."""
  expected = reference(name)
  usual = trained(library, make(library, name), with_kernels=False)
  fast = trained(library, make(library, name), with_kernels=True)
  assert_close(usual, expected, rtol=1e-12, atol=1e-12)
  assert_close(fast, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.fast(library=["tf_keras"])
def test_kernels_equal_keras_but_for_rounding_in_float32(library, name):
  """With the default betas, whose complements float32 rounds most.

  Adam: 1 - 0.999 has a relative error of up to 2**-25 / 0.001 = 3e-5 in the first step, falling
  as 1 / step; each step moves a weight by about the rate, 0.016, so all of it is within
  0.016 * 3e-5 * (1 + 1/2 + ... + 1/20) = 1.7e-6, and the 20 roundings of a weight below 4 within
  20 * 2**-23 = 2.4e-6. SGD: weights grow to 100, which the relative tolerance covers.
  """
  betas = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7} if "adam" in name else {}
  expected = reference(name, dtype=np.float32, **betas)
  made = [make(library, name, **betas) for _ in range(2)]
  usual = trained(library, made[0], with_kernels=False, dtype=np.float32)
  fast = trained(library, made[1], with_kernels=True, dtype=np.float32)
  assert_close(fast, usual, rtol=2e-6, atol=4e-6)
  assert_close(fast, expected, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", ["adam", "nesterov"])
def test_learning_rate_schedules_are_followed(library, name):
  schedule = KERAS[library].optimizers.schedules.PiecewiseConstantDecay(
    [4, 11], [RATE, RATE / 2, RATE / 8]
  )
  fast = trained(library, make(library, name, learning_rate=schedule), with_kernels=True)
  rates = [RATE] * 5 + [RATE / 2] * 7 + [RATE / 8] * 8
  assert_close(fast, reference(name, rate=lambda step: rates[step]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize(
  ("name", "kernel"),
  [
    ("adamw", "ResourceApplyAdam"),
    ("sgd", "ResourceApplyGradientDescent"),
    ("momentum", "ResourceApplyKerasMomentum"),
  ],
)
def test_an_update_is_one_operation(library, name, kernel):
  found = Ops(library, make(library, name)).names
  assert kernel in found
  assert not {"Sqrt", "Square", "Rsqrt"} & found


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize(
  ("name", "size", "kernel"),
  [
    ("adam", kernels.FORKED.start - 1, True),
    ("adam", kernels.FORKED.start, False),
    ("adam", kernels.FORKED.stop - 1, False),
    ("adam", kernels.FORKED.stop, True),
    ("momentum", kernels.FORKED.start, True),
  ],
)
def test_adam_on_a_cpu_leaves_middle_sizes_to_keras(library, name, size, kernel):
  found = Ops(library, make(library, name), size).names
  assert kernel == bool({"ResourceApplyAdam", "ResourceApplyKerasMomentum"} & found)
  assert kernel != bool({"Sqrt", "Rsqrt"} & found)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_amsgrad_falls_back_to_keras(library):
  made = [make(library, "adam", amsgrad=True) for _ in range(2)]
  usual = trained(library, made[0], with_kernels=False)
  fast = trained(library, made[1], with_kernels=True)
  assert_close(fast, usual, rtol=0, atol=0)
  assert_close(fast, reference("adam", amsgrad=True), rtol=1e-12, atol=1e-12)


def test_amsgrad_would_be_noticed():
  plain, largest = reference("adam"), reference("adam", amsgrad=True)
  assert max(np.max(np.abs(a - b)) for a, b in zip(plain, largest, strict=True)) > 1e-3


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_a_subclass_keeps_its_own_rule(library):
  class Uphill(KERAS[library].optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate=None):
      variable.assign_add(tf.cast(self.learning_rate, gradient.dtype) * gradient)

  fast = trained(library, Uphill(RATE), with_kernels=True)
  moved = [
    sum(RATE * gradients_of(s, np.float64)[i] for s in range(STEPS)) for i in range(len(SHAPES))
  ]
  expected = [w + m for w, m in zip(initial(np.float64), moved, strict=True)]
  assert_close(fast, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "Nadam", "Adafactor"])
def test_other_optimizers_are_left_alone(library, kind):
  optimizer = getattr(KERAS[library].optimizers, kind)(RATE)
  assert kernels.update_of(optimizer, None) is None


# ---- Without a branch ----


@pytest.mark.parametrize(
  ("name", "changed"),
  [
    ("momentum", {}),
    ("adamw", {}),
    ("sgd_decay", {}),
    ("adam", {"amsgrad": True}),
    ("adam", {"clipnorm": 1.0}),
    ("adam", {"global_clipnorm": 1.0}),
    ("sgd", {"clipvalue": 1.0}),
    ("sgd", {"use_ema": True}),
    ("adam", {"gradient_accumulation_steps": 2}),
  ],
)
def test_what_a_mask_cannot_stop_is_updated_in_a_branch(name, changed):
  def masks(optimizer, variables):
    return kernels.masks(optimizer, variables, originals=len(variables))

  variables = [keras.Variable(w) for w in initial(np.float32)]
  assert not masks(make("keras", name, **changed), variables)
  assert not masks(make("tf_keras", "adam"), variables)
  constrained = keras.Variable(np.ones(3))
  constrained.constraint = keras.constraints.NonNeg()
  adam = make("keras", "adam")
  assert not masks(adam, [*variables, constrained])
  assert not masks(adam, [keras.Variable(np.ones(3), dtype="float16")])
  assert masks(adam, variables)


@pytest.mark.parametrize(
  ("sizes", "expected"),
  [
    ([kernels.MASKED], True),
    ([kernels.MASKED + 1], False),
    ([kernels.MASKED_EACH] * 200, True),  # more than that, but in small variables
    ([kernels.MASKED_EACH] * 199 + [kernels.MASKED_EACH + 1], False),
  ],
)
def test_small_models_and_small_variables_are_updated_without_a_branch(sizes, expected):
  variables = [tf.Variable(tf.zeros([size])) for size in sizes]
  counter = tf.Variable(0, dtype=tf.int64, trainable=False)
  [adapter] = adapters.build(
    lambda: make("keras", "adam"), lambda _: variables, counter, fuse=True
  ).values()
  assert adapter.masks == expected


class Masked:
  """Updates without a branch, as on GPUs, on two replicas: one update of `gradients` a call."""

  def __init__(self, name, strategy, *, fuse, jit_compile):
    self.jit_compile = jit_compile
    with strategy.scope():
      self.variables = [keras.Variable(w, dtype="float32") for w in initial(np.float32)]
      self.optimizer = adapters.made(
        make("keras", name),
        self.variables,
        step=tf.Variable(0, dtype=tf.int64),
        factory=lambda: make("keras", name),
        fuse=fuse,
      )
    self.strategy, self.update = strategy, tf.function(self._update)

  def _update(self, finite, *gradients):
    def in_replica(finite, *gradients):
      packed = Gradients.of(self.optimizer.fusion, gradients)
      tf.distribute.get_replica_context().merge_call(
        lambda strategy, finite, tensors: self.optimizer.apply(
          strategy, packed.replaced(tensors), finite, jit_compile=self.jit_compile
        ),
        args=(finite, packed.tensors),
      )

    self.strategy.run(in_replica, args=(finite, *gradients))

  def state(self):
    """Every replica's weights and slots."""
    every = [*self.variables, *self.optimizer.optimizer.variables]
    copies = [self.strategy.experimental_local_results(models.raw(v)) for v in every]
    return [copy.numpy() for one in copies for copy in one]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.fast(fuse=[True])
def test_updates_without_a_branch_follow_the_formula_and_skip_to_the_bit(
  name, fuse, jit_compile, mirrored
):
  one = Masked(name, mirrored(2), fuse=fuse, jit_compile=jit_compile)
  for step in range(STEPS):
    good = gradients_of(step, np.float32)
    one.update(tf.constant(True), *map(tf.constant, good))
    before, bad = one.state(), (np.nan, np.inf, -np.inf)[step % 3]
    one.update(tf.constant(False), *(tf.where(tf.abs(g) > 0.5, bad, g) for g in good))
    for was, now in zip(before, one.state(), strict=True):
      np.testing.assert_array_equal(now, was)
  assert one.optimizer.optimizer.iterations.numpy() == STEPS
  weights = one.state()[: 2 * len(SHAPES)]
  for first in (0, 1):
    assert_close(weights[first::2], reference(name, dtype=np.float32), rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("name", RULES)
def test_on_gpus_every_rule_and_size_goes_without_a_branch(name):
  optimizer = make("keras", name)
  large = [tf.Variable(tf.zeros([2 * kernels.MASKED]))]
  optimizer.build(large)
  assert kernels.masks(optimizer, large, originals=1, on_gpus=True)
  assert not kernels.masks(optimizer, large, originals=1)
