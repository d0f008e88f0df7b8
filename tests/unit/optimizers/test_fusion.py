"""Fused updates: the same weights as Keras's own, variable by variable, whatever is left out."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toys
from runs import copies, make_trainer
from toys import KERAS

from loopwright.distribution.reduction import Reduction
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.optimizers import adapters, fusion, kernels, loss_scale, rule
from loopwright.optimizers.fusion import Fusion, Gradients
from loopwright.step import Step, StepParts

STEPS = 20
# name -> shape and dtype, in an order in which small and large, and dtypes, alternate.
VARIABLES = {
  "matrix": ((5, 3), "float32"),
  "large": ((130, 128), "float32"),
  "double": ((3,), "float64"),
  "vector": ((3,), "float32"),
  "short": ((4, 2), "bfloat16"),
  "constrained": ((4,), "float32"),
  "scalar": ((), "float32"),
  "sometimes": ((7,), "float32"),
  "never": ((2,), "float32"),
  "other_short": ((3,), "bfloat16"),
  "other_double": ((2, 2), "float64"),
  "lonely": ((2,), "float16"),
}
NAMES = list(VARIABLES)
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FUSED = [["matrix", "vector", "scalar", "sometimes", "never"], ["double", "other_double"]]
FUSED += [["short", "other_short"]]
# Powers of two, which bfloat16 holds; the defaults of Adam and others would round to 1 there.
OPTIONS = {
  "SGD": {"momentum": 0.75},
  "Adam": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 2.0**-10},
  "AdamW": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 2.0**-10},
  "RMSprop": {"rho": 0.5, "momentum": 0.5, "centered": True, "epsilon": 2.0**-10},
  "Adagrad": {"epsilon": 2.0**-10},
  "Adadelta": {"rho": 0.5, "epsilon": 2.0**-10},
  "Adamax": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 2.0**-10},
  "Lion": {"beta_1": 0.5, "beta_2": 0.75},
}


class NonNegative(keras.constraints.Constraint):
  def __call__(self, value):
    return tf.maximum(value, 0)


def make_variables(library):
  rng = np.random.default_rng(0)
  made = []
  for name, (shape, dtype) in VARIABLES.items():
    value = tf.constant(rng.normal(size=shape), dtype)
    constraint = NonNegative() if name == "constrained" else None
    if library == "keras":
      made.append(keras.Variable(value, dtype=dtype, name=name))
      made[-1].constraint = constraint
    else:
      made.append(tf.Variable(value, constraint=constraint, name=name))
  return made


@functools.cache
def gradients_of(step):
  """Gradients of one step; "sometimes" is there in half, "constrained" is drawn below zero."""
  rng = np.random.default_rng([1, step])
  values = {name: rng.normal(size=shape) for name, (shape, _) in VARIABLES.items()}
  values["constrained"] += 2
  found = [tf.constant(v, VARIABLES[name][1]) for name, v in values.items()]
  found[NAMES.index("never")] = None
  if step % 4 in (0, 3):
    found[NAMES.index("sometimes")] = None
  return found


def make_optimizer(library, name):
  options = {"learning_rate": 2.0**-4, "weight_decay": 2.0**-3, **OPTIONS[name]}
  return getattr(KERAS[library].optimizers, name)(**options)


def keras_alone(library, optimizer, *, steps=STEPS, with_kernels=False):
  """Returns the weights and slots after `steps` updates without fusion, strategy or framework."""
  variables = make_variables(library)
  one = rule.of(optimizer)(optimizer, variables)
  if update := kernels.update_of(optimizer, one.usual):
    one.update = one.decayed(update)
  for step in range(steps):
    if with_kernels:
      one.apply(gradients_of(step))
      continue
    pairs = zip(gradients_of(step), variables, strict=True)
    optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
  return [models.raw(v).numpy() for v in variables]


@functools.cache
def expected(library, name):
  # test_kernels.py has the kernels, which round otherwise; here all must be equal to the bit.
  return keras_alone(library, make_optimizer(library, name), with_kernels=True)


def make_parts(strategy, library, factory, *, fuse=True):
  """Returns (variables, parts of a step) of one optimizer."""
  with strategy.scope():
    counter = tf.Variable(0, dtype=tf.int64, trainable=False)
    variables = make_variables(library)
    built = adapters.build(factory, lambda _: variables, counter, fuse=fuse)
    parts = StepParts(
      optimizers=built, reduction=Reduction(), loss_scale=loss_scale.none(),
      global_step=counter, seed=0,
    )  # fmt: skip
  return variables, parts


def updated(strategy, library, factory, *, steps=STEPS):
  """Returns [replica][variable], after `steps` calls of `Step.apply`."""
  variables, parts = make_parts(strategy, library, factory)
  for step in range(steps):
    strategy.run(lambda s=step: Step(parts).apply(gradients_of(s), tf.constant(True)))
  copies = [strategy.experimental_local_results(models.raw(v)) for v in variables]
  return [[c.numpy() for c in replica] for replica in zip(*copies, strict=True)]


def strategy_of(mirrored, replicas):
  return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


def assert_equal(got, wanted, *, ulps=0):
  for name, one, other in zip(NAMES, got, wanted, strict=True):
    tolerance = ulps * EPSILON[one.dtype.name]
    one, other = one.astype(np.float64), other.astype(np.float64)
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=name)


# ---- Updates ----


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.fast(name=["Adam"])
@pytest.mark.fast(replicas=[2], library=["keras"], name=["SGD", "Lion"])
def test_fused_updates_are_those_of_keras(name, library, replicas, mirrored):
  copies = updated(strategy_of(mirrored, replicas), library, lambda: make_optimizer(library, name))
  assert len(copies) == replicas
  # rsqrt is vectorised, and the last elements of a tensor, which lie elsewhere in a flat one, are
  # not: an ulp or two of an increment in each step, here magnified by `centered` and `momentum`.
  ulps = 20 if (library, name) == ("tf_keras", "RMSprop") else 0
  for weights in copies:
    assert_equal(weights, expected(library, name), ulps=ulps)


def test_the_updates_of_this_file_would_show_a_mistake():
  """Each variable but "never" moves in each optimizer, and the constraint is at work."""
  start = [models.raw(v).numpy() for v in make_variables("keras")]
  for name in OPTIONS:
    for variable, before, after in zip(NAMES, start, expected("keras", name), strict=True):
      moved = np.abs(after.astype(np.float64) - before.astype(np.float64))
      assert (moved.max() > 0.01) == (variable != "never"), (name, variable)
    assert expected("keras", name)[NAMES.index("constrained")].min() == 0


def test_every_class_that_is_fused_is_tried_here():
  assert set(adapters._ELEMENTWISE) == set(OPTIONS)


# ---- What is fused ----


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_small_variables_of_a_dtype_share_a_flat_one(library, mirrored):
  with mirrored(2).scope():
    layout = Fusion(make_variables(library), enabled=True)
  assert [[NAMES[i] for i in group] for group in layout.groups] == FUSED
  assert [(f.shape.as_list(), f.dtype.name) for f in layout.flats] == [
    ([15 + 3 + 1 + 7 + 2], "float32"), ([3 + 4], "float64"), ([8 + 3], "bfloat16"),
  ]  # fmt: skip
  assert [NAMES[i] for i in layout.singles] == ["large", "constrained", "lonely"]


def test_the_limit_is_exclusive():
  below, at = (tf.Variable(tf.zeros([n])) for n in (fusion.SMALL - 1, fusion.SMALL))
  layout = Fusion([below, at, tf.Variable([1.0, 2.0])], enabled=True)
  assert (layout.groups, layout.singles) == ([[0, 2]], [1])


class OwnAdam(keras.optimizers.Adam):
  """A subclass may do anything."""


def excluding(library):
  """Weight decay for all but those that have "vector" in their names."""
  optimizer = KERAS[library].optimizers.SGD(0.125, weight_decay=0.5)
  optimizer.exclude_from_weight_decay(var_names=["vector"])
  return optimizer


UNFUSED = {
  "lamb": ("keras", lambda: keras.optimizers.Lamb(0.125)),
  "adafactor": ("keras", lambda: keras.optimizers.Adafactor(0.125)),
  "ftrl": ("tf_keras", lambda: tf_keras.optimizers.Ftrl(0.125)),
  "subclass": ("keras", lambda: OwnAdam(0.125)),
  "clipnorm": ("keras", lambda: keras.optimizers.SGD(0.125, clipnorm=0.5)),
  "tf_keras_clipnorm": ("tf_keras", lambda: tf_keras.optimizers.SGD(0.125, clipnorm=0.5)),
  "excluded": ("keras", lambda: excluding("keras")),
  "tf_keras_excluded": ("tf_keras", lambda: excluding("tf_keras")),
}


@pytest.mark.parametrize("case", UNFUSED)
def test_rules_that_look_at_whole_variables_are_not_fused(case, mirrored):
  library, factory = UNFUSED[case]
  assert not adapters.is_elementwise(factory())
  for weights in updated(mirrored(2), library, factory, steps=3):
    assert_equal(weights, keras_alone(library, factory(), steps=3))


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_variables_excluded_from_weight_decay_by_name_keep_their_weights(library):
  """A closed form: gradients of zero, so that the decay is all there is."""
  strategy = tf.distribute.get_strategy()
  variables, parts = make_parts(strategy, library, lambda: excluding(library))
  before = [models.raw(v).numpy() for v in variables]
  zeros = [tf.zeros_like(v) for v in before]
  strategy.run(lambda: Step(parts).apply(zeros, tf.constant(True)))
  after = [models.raw(v).numpy() for v in variables]
  for name in ("vector", "matrix"):
    kept = 1.0 if name == "vector" else 1 - 0.125 * 0.5
    np.testing.assert_array_equal(after[NAMES.index(name)], kept * before[NAMES.index(name)])


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_large_variable_of_the_shape_of_all_small_ones(library, replicas, mirrored, monkeypatch):
  """A flat variable of 3 + 4 + 2 would hide which slots are its own, which the large one's."""
  monkeypatch.setattr(fusion, "SMALL", 7)
  strategy = strategy_of(mirrored, replicas)
  with strategy.scope():
    make = keras.Variable if library == "keras" else tf.Variable
    variables = [make(tf.zeros([n])) for n in (3, 4, 2, 9)]
    counter = tf.Variable(0, dtype=tf.int64, trainable=False)
    built = adapters.build(
      lambda: KERAS[library].optimizers.SGD(0.5, momentum=0.5),
      lambda _: variables, counter, fuse=True,
    )  # fmt: skip
    parts = StepParts(
      optimizers=built, reduction=Reduction(), loss_scale=loss_scale.none(),
      global_step=counter, seed=0,
    )  # fmt: skip
  assert built["default"].fusion.groups == [[0, 1]]
  for _ in range(2):
    gradients = [None, tf.ones([4]), tf.ones([2]), tf.ones([9])]
    strategy.run(lambda g=gradients: Step(parts).apply(g, tf.constant(True)))
  # Momentum: -0.5, then -0.25 - 0.5.
  for variable, moved in zip(variables, (0.0, -1.25, -1.25, -1.25), strict=True):
    for copy in strategy.experimental_local_results(models.raw(variable)):
      np.testing.assert_array_equal(copy.numpy(), np.full(copy.shape, moved))


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_the_momentum_of_a_missing_gradient_is_kept_in_a_later_group_too(library):
  """The second of three updates finds no gradient of the last variable."""
  make = keras.Variable if library == "keras" else tf.Variable
  variables = [
    make(tf.zeros([2], dtype), dtype=dtype) for dtype in 2 * ["float32"] + 2 * ["float64"]
  ]
  counter = tf.Variable(0, dtype=tf.int64, trainable=False)
  factory = functools.partial(KERAS[library].optimizers.SGD, 0.5, momentum=0.5)
  optimizer = adapters.build(factory, lambda _: variables, counter, fuse=True)["default"]
  assert optimizer.fusion.groups == [[0, 1], [2, 3]]
  for there in (True, False, True):
    gradients = [tf.ones([2], models.raw(v).dtype) for v in variables]
    gradients[-1] = gradients[-1] if there else None
    optimizer.apply(tf.distribute.get_strategy(), Gradients.of(optimizer.fusion, gradients))
  # Momentum halves: -0.5, -0.75, -0.875; and of the last variable -0.5 and -0.75.
  for variable, moved in zip(variables, (-2.125, -2.125, -2.125, -1.25), strict=True):
    np.testing.assert_array_equal(models.raw(variable).numpy(), [moved, moved])


# ---- Gradients ----


@pytest.fixture
def packed():
  layout = Fusion(make_variables("keras"), enabled=True)
  return Gradients.of(layout, gradients_of(0)), gradients_of(0)


def test_gradients_are_a_sequence(packed):
  gradients, plain = packed
  assert len(gradients) == len(plain) == len(NAMES)
  assert [g is None for g in gradients] == [g is None for g in plain]
  for one, other in zip(gradients, plain, strict=True):
    if other is not None:
      assert one.dtype == other.dtype
      np.testing.assert_array_equal(one, other)
  np.testing.assert_array_equal(gradients[-2], plain[-2])
  np.testing.assert_array_equal(gradients[1:3][1], plain[2])
  with pytest.raises(IndexError):
    gradients[len(NAMES)]


def test_map_works_on_every_gradient(packed):
  gradients, plain = packed
  doubled = gradients.map(lambda g: 2 * g)
  assert len(doubled.pieces) == 6  # three flat ones, three alone
  for one, other in zip(doubled, plain, strict=True):
    assert (one is None) == (other is None)
    if other is not None:
      np.testing.assert_array_equal(one, 2 * other)


def test_gradients_of_another_layout_are_packed_again(packed):
  gradients, plain = packed
  assert Gradients.of(gradients.fusion, gradients) is gradients
  other = Fusion(make_variables("keras"), enabled=False)
  again = Gradients.of(other, gradients)
  assert again.fusion is other
  assert len(again.tensors) == sum(g is not None for g in plain)
  for one, wanted in zip(again, plain, strict=True):
    if wanted is not None:
      np.testing.assert_array_equal(one, wanted)


# ---- In the compiled loop ----


class TwoUpdates(toys.Regression):
  """Two updates by one optimizer; the second loss touches a part, and no loss touches "unused"."""

  def __init__(self, *, library, surgery=None):
    self.library, self.surgery = library, surgery

  def build_model(self):
    layers = KERAS[self.library].layers
    initializer = KERAS[self.library].initializers.RandomNormal(seed=7)
    model = {
      name: layers.Dense(units, kernel_initializer=initializer)
      for name, units in (("hidden", 6), ("output", 1), ("unused", 2))
    }
    for name, layer in model.items():
      layer.build((None, 6 if name == "output" else 4))
    return model

  def source(self, split):
    rng = np.random.default_rng(3)
    x = rng.normal(size=[20, 4]).astype(np.float32)
    return ArraySource(features={"x": x, "y": np.sin(x.sum(1))})

  def forward(self, batch, training):
    return self.model["output"](self.model["hidden"](batch["x"]))[:, 0]

  def train_step(self, step, batch):
    def second_loss(part):
      return Loss.from_examples(
        tf.reduce_mean(tf.square(self.model["hidden"](part["x"]) - 1.0), axis=1), part["weight"]
      )

    step.update(lambda part: self.training_loss(step, part), batch)
    if self.surgery is None:
      step.update(second_loss, batch)
      return
    gradients, local = step.gradients(second_loss, batch, step.variables())
    gradients, loss = step.all_reduce(self.surgery(gradients), local)
    gradients = step.unscale(self.surgery(gradients), loss)
    finite, norm = step.check(self.surgery(gradients))
    step.apply(self.surgery(step.clip(gradients, norm)), finite)
    step.log_update(loss, finite, norm)


def trained(strategy, library, **options):
  made = TwoUpdates(library=library, surgery=options.pop("surgery", None))
  adamw = functools.partial(KERAS[library].optimizers.AdamW, 0.01, weight_decay=0.1)
  trainer = make_trainer(
    made, strategy, batch=7, data={"pad_multiple": 2}, clip_norm=2.0,
    optimizer=lambda: adamw(beta_1=0.5, beta_2=0.75), **options,
  )  # fmt: skip
  assert bool(trainer.parts.optimizers["default"].fusion.groups) == options.get(
    "fuse_updates", True
  )
  metrics = trainer.train(tf.constant(STEPS))
  return copies(strategy, models.trainable_variables(made.model)), metrics


@pytest.mark.parametrize(("library", "replicas"), [("keras", 2), ("tf_keras", 1)])
@pytest.mark.fast(library=["keras"])
def test_two_updates_a_step_of_which_one_touches_a_part(library, replicas, mirrored):
  strategy = strategy_of(mirrored, replicas)
  fused, metrics = trained(strategy, library)
  single, other_metrics = trained(strategy, library, fuse_updates=False)
  assert len(fused) == len(single) == replicas
  for one, other in zip(fused, single, strict=True):
    for a, b in zip(one, other, strict=True):  # without fusion there are no kernels either
      np.testing.assert_allclose(a, b, rtol=0, atol=STEPS * 2 * 2**-24)  # a rounding an update
  assert metrics["loss"] == pytest.approx(other_metrics["loss"], rel=1e-6)
  assert metrics["gradient_norm"] == pytest.approx(other_metrics["gradient_norm"], rel=1e-6)
  initial = TwoUpdates(library=library).build_model()
  for layer, first in (("hidden", 0), ("unused", 4)):
    moved = np.abs(fused[0][first] - models.raw(initial[layer].trainable_variables[0]).numpy())
    assert (moved.max() > 0.01) == (layer == "hidden")


def test_a_plain_list_between_the_verbs_changes_nothing(mirrored):
  strategy = mirrored(2)
  plain, metrics = trained(strategy, "keras")
  surgery, other_metrics = trained(strategy, "keras", surgery=list)
  for one, other in zip(plain, surgery, strict=True):
    for a, b in zip(one, other, strict=True):
      np.testing.assert_array_equal(a, b)
  assert metrics["loss"] == other_metrics["loss"]
