"""The contract of a task: its sums, its defaults, and what it says of what is missing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from toys import KERAS

from loopwright.errors import ConfigError
from loopwright.metrics import Loss, weighted_sum
from loopwright.metrics.names import REPORTED
from loopwright.metrics.sums import MetricSums
from loopwright.step import EvalStep
from loopwright.task import Task

RNG = np.random.default_rng(3)
VALUES = RNG.normal(size=7).astype(np.float32)
WEIGHT = RNG.uniform(0.5, 2.0, size=7).astype(np.float32)
X = RNG.normal(size=[7, 2]).astype(np.float32)
Y = RNG.normal(size=7).astype(np.float32)
KERNEL = np.array([[0.5], [-1.5]], np.float32)
L2 = 0.25

# ---- weighted_sum ----


@pytest.mark.parametrize(
  ("values", "dtype"),
  [
    (VALUES, tf.float32),
    (VALUES.astype(np.float64), tf.float64),
    (np.array([1.5, -2.0, 0.25], np.float16), tf.float32),
    (np.array([3, -4, 70_000], np.int64), tf.float32),
    (np.array([True, False, True]), tf.float32),
  ],
)
def test_a_weighted_sum_is_numpys(values, dtype):
  weight = WEIGHT[: len(values)]
  total, weights = weighted_sum(tf.constant(values), tf.constant(weight))
  assert total.dtype == weights.dtype == dtype
  exact = weight.astype(np.float64)
  assert float(total) == pytest.approx(values.astype(np.float64) @ exact, rel=1e-6)
  assert float(weights) == pytest.approx(exact.sum(), rel=1e-6)


def test_float64_values_keep_all_their_digits():
  total, weight = weighted_sum(tf.constant([1.0, 2.0**-40], tf.float64), tf.constant([1.0, 1.0]))
  assert (float(total), float(weight)) == (1.0 + 2.0**-40, 2.0)


def test_narrow_values_are_summed_in_float32():
  """In bfloat16, 256 + 1 is 256."""
  total, weight = weighted_sum(tf.ones([1000], tf.bfloat16))
  assert (float(total), float(weight)) == (1000.0, 1000.0)


def test_without_weights_each_example_has_a_weight_of_one():
  total, weight = weighted_sum(tf.constant(VALUES))
  assert float(total) == pytest.approx(VALUES.astype(np.float64).sum(), rel=1e-6)
  assert float(weight) == 7.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_example_without_weight_adds_nothing_to_value_or_gradient(bad):
  values = tf.Variable([1.0, bad, 3.0])
  with tf.GradientTape() as tape:
    total, weight = weighted_sum(values, tf.constant([2.0, 0.0, 0.5]))
  assert (float(total), float(weight)) == (3.5, 2.5)
  np.testing.assert_array_equal(tape.gradient(total, values), [2.0, 0.0, 0.5])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_example_with_weight_is_never_hidden(bad):
  total, _ = weighted_sum(tf.constant([1.0, bad]), tf.constant([1.0, 1e-6]))
  assert not np.isfinite(float(total))


@pytest.mark.parametrize(
  ("values", "weight", "message"),
  [
    ((), None, r"per-example values must be a vector \[n\].*got shape \(\)"),
    ((4, 1), None, r"per-example values must be a vector \[n\].*got shape \(4, 1\); reduce every"),
    ((4,), (4, 1), r"weight must be a vector \[n\].*got shape \(4, 1\)"),
    ((4,), (), r"weight must be a vector \[n\].*got shape \(\)"),
    ((4,), (3,), r"values have shape \(4,\) but weight has shape \(3,\); give one value and one"),
    ((4,), (1,), r"values have shape \(4,\) but weight has shape \(1,\)"),
  ],
)
def test_a_weighted_sum_refuses_other_shapes(values, weight, message):
  """Above all those that TensorFlow would broadcast to a wrong sum."""
  with pytest.raises(ConfigError, match=message):
    weighted_sum(tf.ones(values), None if weight is None else tf.ones(weight))
  with pytest.raises(ConfigError, match=r"values are complex64; use tf\.abs or"):
    weighted_sum(tf.zeros([3], tf.complex64))


def test_a_length_that_is_known_only_while_running_will_do():
  vector = tf.TensorSpec([None], tf.float32)
  compiled = tf.function(weighted_sum, input_signature=[vector, vector])
  for rows in (7, 3):
    total, weight = compiled(VALUES[:rows], WEIGHT[:rows])
    assert float(total) == pytest.approx(VALUES[:rows] @ WEIGHT[:rows], rel=1e-5)
    assert float(weight) == pytest.approx(WEIGHT[:rows].sum(), rel=1e-6)


# ---- Loss ----


@pytest.mark.parametrize("cuts", [[], [3], [1, 1, 6]])
def test_the_sums_of_parts_add_up_to_those_of_the_whole(cuts):
  """Whatever their sizes, an empty part included: a mean of means would not."""
  parts = [
    Loss.from_examples(tf.constant(values), tf.constant(weight))
    for values, weight in zip(np.split(VALUES, cuts), np.split(WEIGHT, cuts), strict=True)
  ]
  mean = sum(float(p.total) for p in parts) / sum(float(p.weight) for p in parts)
  assert mean == pytest.approx(np.average(VALUES, weights=WEIGHT), rel=1e-5)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_a_penalty_is_added_once_to_the_mean(dtype):
  """Over three replicas, the last of which has padding only."""
  weight = np.where(np.arange(7) < 4, WEIGHT, 0.0)
  penalty = tf.constant(2.0)
  parts = []
  for rows in (slice(0, 3), slice(3, 5), slice(5, 7)):
    loss = Loss.from_examples(tf.constant(VALUES[rows], dtype), tf.constant(weight[rows]))
    parts.append(loss.plus_regularization(penalty))
  assert {p.total.dtype for p in parts} == {dtype}
  mean = sum(float(p.total) for p in parts) / sum(float(p.weight) for p in parts)
  assert mean == pytest.approx(np.average(VALUES, weights=weight) + 2.0, rel=1e-6)
  assert float(parts[2].total) == 0.0


def test_the_gradient_of_a_penalty_is_scaled_by_the_weight():
  kernel = tf.Variable(3.0)
  with tf.GradientTape() as tape:
    loss = Loss.from_examples(tf.constant(VALUES), tf.constant(WEIGHT))
    total = loss.plus_regularization(tf.square(kernel)).total
  assert float(tape.gradient(total, kernel)) == pytest.approx(6.0 * WEIGHT.sum(), rel=1e-6)


def test_no_penalty_leaves_the_loss_as_it_is():
  loss = Loss.from_examples(tf.constant(VALUES))
  assert loss.plus_regularization(0.0) is loss


def test_a_right_loss_passes_the_check():
  loss = Loss.checked(Loss(tf.constant(1.0, tf.float64), 2))
  assert [part.dtype for part in loss] == [tf.float64, tf.float32]
  assert [float(part) for part in loss] == [1.0, 2.0]


@pytest.mark.parametrize(
  ("loss", "message"),
  [
    ((tf.constant(1.0), tf.constant(2.0)), "the loss is a tuple; it must be a Loss"),
    (3.0, "the loss is a float; it must be a Loss"),
    (Loss(tf.ones([]), tf.ones([4])), r"Loss.weight has shape \(4,\); it must be a scalar"),
    (Loss(tf.ones([4]), tf.ones([])), r"Loss.total has shape \(4,\); it must be a scalar"),
  ],
)
def test_what_is_no_loss_of_scalars_is_refused(loss, message):
  with pytest.raises(ConfigError, match=message):
    Loss.checked(loss)


# ---- Task ----


@pytest.mark.parametrize(
  ("call", "method"),
  [
    (lambda task: task.build_model(), "build_model()"),
    (lambda task: task.source("train"), "source(split)"),
    (lambda task: task.forward({}, training=True), "forward(batch, training)"),
    (lambda task: task.loss(None, {}), "loss(outputs, batch)"),
  ],
)
def test_a_missing_method_is_named(call, method):
  class Lazy(Task):
    pass

  with pytest.raises(ConfigError) as caught:
    call(Lazy())
  assert str(caught.value) == (
    f"Lazy does not define {method}, but every Task must; see loopwright/task.py."
  )


class Linear(toys.Regression):
  """x @ kernel with an L2 penalty; logs what `named` says."""

  features = {"x": X, "y": Y}

  def __init__(self, *, library="keras", named=None):
    self.keras, self.named, self.trained = KERAS[library], named, []

  def build_model(self):
    return toys.linear(KERNEL, self.keras, kernel_regularizer=self.keras.regularizers.L2(L2))

  def forward(self, batch, training):
    self.trained.append(training)
    return super().forward(batch, training)

  def metrics(self, outputs, batch):
    if self.named is None:
      return super().metrics(outputs, batch)
    return {self.named: weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}


def built(**options):
  task = Linear(**options)
  task.model = task.build_model()
  return task


BATCH = {"x": tf.constant(X), "y": tf.constant(Y), "weight": tf.constant(WEIGHT)}
ERROR = (X @ KERNEL)[:, 0] - Y
MEAN_SQUARE = np.average(np.square(ERROR), weights=WEIGHT)
PENALTY = L2 * (0.5**2 + 1.5**2)


def logged(step):
  sums = MetricSums()
  step.record.close(sums)
  return sums.result()


def test_preprocessing_is_the_identity_by_default():
  assert Linear().preprocess(BATCH, training=True) is BATCH
  assert Linear().preprocess(BATCH, training=False) is BATCH


@pytest.mark.parametrize("library", KERAS)
def test_the_training_loss_is_regularised_and_logs_the_metrics(library):
  task, step = built(library=library, named="mae"), EvalStep()
  loss = task.training_loss(step, BATCH)
  assert float(loss.total / loss.weight) == pytest.approx(MEAN_SQUARE + PENALTY, rel=1e-5)
  assert float(loss.weight) == pytest.approx(WEIGHT.sum(), rel=1e-6)
  mae = np.average(np.abs(ERROR), weights=WEIGHT)
  assert logged(step) == {"mae": pytest.approx(mae, rel=1e-5)}
  assert task.trained == [True]


@pytest.mark.parametrize("library", KERAS)
def test_an_evaluation_logs_the_bare_loss(library):
  task, step = built(library=library), EvalStep()
  task.eval_step(step, BATCH)
  assert logged(step) == {"loss": pytest.approx(MEAN_SQUARE, rel=1e-5)}
  assert task.trained == [False]


@pytest.mark.parametrize("name", REPORTED)
def test_a_metric_may_not_bear_the_name_of_what_is_reported_anyway(name):
  task = built(named=name)
  message = rf"^Linear.metrics\(\) returns '{name}', .* rename it, for example 'my_{name}'\.$"
  for evaluate in (task.training_loss, task.eval_step):
    with pytest.raises(ConfigError, match=message):
      evaluate(EvalStep(), BATCH)


@pytest.mark.parametrize("library", KERAS)
def test_the_default_penalty_is_that_of_the_layers_of_every_model(library):
  task = built(library=library)
  assert float(task.regularization()) == pytest.approx(PENALTY, rel=1e-6)
  task.model = {"a": task.model, "b": task.build_model()}
  assert float(task.regularization()) == pytest.approx(2 * PENALTY, rel=1e-6)
  task.model = tf.Module()
  assert task.regularization() == 0.0


def test_an_optimizer_owns_the_model_of_its_name_or_all():
  task = Linear()
  task.model = {"a": task.build_model(), "b": task.build_model()}
  [a], [b] = (task.model[name].trainable_variables for name in "ab")
  assert [id(v) for v in task.variables_of("a")] == [id(a)]
  assert [id(v) for v in task.variables_of("b")] == [id(b)]
  assert [id(v) for v in task.variables_of("default")] == [id(a), id(b)]
  task.model = task.model["b"]
  assert [id(v) for v in task.variables_of("a")] == [id(b)]


@pytest.mark.parametrize("library", KERAS)
def test_a_keras_model_of_one_input_is_served_by_default(library):
  serve = built(library=library).export_signature()
  [spec] = serve.input_signature
  assert (spec.shape.as_list(), spec.dtype) == ([None, 2], tf.float32)
  np.testing.assert_allclose(serve(tf.constant(X)), X @ KERNEL, rtol=1e-6)


@pytest.mark.parametrize("names", [None, ("left", "right")])
def test_several_inputs_are_served_by_their_names(names):
  task, inputs = Linear(), [keras.Input([2], name="a"), keras.Input([2], name="b")]
  structure = dict(zip(names, inputs, strict=True)) if names else inputs
  task.model = keras.Model(structure, keras.layers.Subtract()(inputs))
  serve = task.export_signature()
  assert {each.name for each in tf.nest.flatten(serve.input_signature)} == {*(names or "ab")}
  given = [tf.constant(X), tf.constant(2 * X)]
  np.testing.assert_array_equal(serve(dict(zip(names, given, strict=True)) if names else given), -X)


@pytest.mark.parametrize("make", [tf.Module, lambda: {"a": Linear().build_model()}])
def test_what_cannot_be_served_by_default_says_so(make):
  task = Linear()
  task.model = make()
  with pytest.raises(ConfigError, match=r"override Task.export_signature\(\)"):
    task.export_signature()
