"""`from_keras`: 20 steps of a compiled model beside Keras's own `fit`, on one replica and two."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from runs import make_evaluator, make_trainer
from toys import KERAS

import loopwright
from loopwright import ArraySource, ConfigError, configurables
from loopwright.inputs import datasets
from loopwright.runs.from_config import load
from loopwright.runs.runner import run
from loopwright.strategies import factories

BATCH, ROWS, EPOCHS = 7, 35, 4  # 20 steps; two replicas do not divide a batch
RNG = np.random.default_rng(0)
X = RNG.normal(size=[ROWS, 4]).astype(np.float32)
TARGET = np.tanh(X @ RNG.normal(size=[4, 1])).astype(np.float32)
LABEL = RNG.integers(0, 3, size=[ROWS]).astype(np.int32)
WEIGHT = RNG.uniform(0, 2, size=[ROWS]).astype(np.float32)
WEIGHT[::5] = 0.0
STEPS_OF_TIME = RNG.normal(size=[ROWS, 5, 2]).astype(np.float32)


def dense(k, units, **options):
  return k.layers.Dense(
    units, kernel_initializer=k.initializers.GlorotUniform(seed=units), **options
  )


def line(k, *, optimizer="sgd", loss="mse", **options):
  model = k.Sequential([k.layers.Input([4]), dense(k, 8, activation="tanh"), dense(k, 1)])
  model.compile(optimizer, loss, **options)
  return model


def own_loss(y_true, y_pred):
  return tf.reduce_mean(tf.abs(y_true - y_pred) ** 3, axis=-1)


class Cubic(keras.losses.Loss):
  """Not registered, and with an argument that its get_config does not have."""

  def __init__(self, factor, **options):
    super().__init__(**options)
    self.factor = factor

  def call(self, y_true, y_pred):
    return self.factor * tf.reduce_mean(tf.abs(y_true - y_pred) ** 3, axis=-1)


class CubicOfTf(tf_keras.losses.Loss):
  def call(self, y_true, y_pred):
    return 2.0 * tf.reduce_mean(tf.abs(y_true - y_pred) ** 3, axis=-1)


def with_own_loss(k):
  return line(k, loss=Cubic(2.0) if k is keras else CubicOfTf())


def with_huber(k):
  return line(k, loss=k.losses.Huber(delta=0.5))


def over_time(k):
  model = k.Sequential([k.layers.Input([5, 2]), dense(k, 4, activation="tanh"), dense(k, 2)])
  model.compile(k.optimizers.SGD(0.1), k.losses.CosineSimilarity(axis=1))
  return model


def classifier(k, **options):
  model = k.Sequential([k.layers.Input([4]), dense(k, 8, activation="tanh"), dense(k, 3)])
  loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(k.optimizers.Adam(0.01), loss, **options)
  return model


def normalised(k):
  """With penalties, batch normalisation, a schedule and clipping by each variable's norm."""
  synchronized = {"synchronized": True}
  layers = [
    k.layers.Input([4]),
    dense(k, 8, kernel_regularizer="l2", use_bias=False),
    k.layers.BatchNormalization(momentum=0.9, **synchronized),
    k.layers.Activation("tanh"),
    dense(k, 1, kernel_regularizer=k.regularizers.L1(0.01)),
  ]
  model = k.Sequential(layers)
  rate = k.optimizers.schedules.ExponentialDecay(0.05, 10, 0.5)
  model.compile(k.optimizers.Adam(rate, clipnorm=0.5), "mse")
  return model


def two_heads(k, **options):
  left, right = k.layers.Input([4], name="left"), k.layers.Input([4], name="right")
  hidden = k.layers.Concatenate()([dense(k, 6, activation="tanh")(left), right])
  outputs = [dense(k, 3, name="kind")(hidden), dense(k, 1, name="size")(hidden)]
  model = k.Model([left, right], outputs)
  entropy = k.losses.SparseCategoricalCrossentropy(from_logits=True)
  given = {
    "loss": {"kind": entropy, "size": "mae"},
    "loss_weights": {"kind": 0.5, "size": 2.0},
    "metrics": {"kind": ["accuracy"], "size": [k.metrics.RootMeanSquaredError(name="rmse")]},
    "weighted_metrics": {"size": [k.metrics.MeanAbsoluteError(name="error")]},
  }
  model.compile(k.optimizers.RMSprop(0.01), **{**given, **options})
  model.set_weights([weight + 0.1 for weight in model.get_weights()])  # as if trained before
  return model


def binary(k):
  model = k.Sequential([k.layers.Input([4]), dense(k, 1, activation="sigmoid")])
  metrics = ["accuracy", k.metrics.AUC(name="auc"), k.metrics.Precision(name="precision")]
  model.compile(k.optimizers.AdamW(0.02), "binary_crossentropy", weighted_metrics=metrics)
  return model


def sequence(k):
  model = k.Sequential([k.layers.Input([5, 2]), dense(k, 4, activation="tanh"), dense(k, 1)])
  model.compile(k.optimizers.SGD(0.1, momentum=0.9), k.losses.Huber())
  return model


def of_words(k, optimizer=None):
  model = k.Sequential(
    [
      k.layers.Input([5], dtype="int32"),
      k.layers.Embedding(20, 4, embeddings_initializer=k.initializers.RandomUniform(seed=1)),
      k.layers.Flatten(),
      dense(k, 1),
    ]
  )
  model.compile(optimizer or k.optimizers.SGD(0.1), "mse")
  return model


BOTH = [X, X[:, ::-1].copy()]
POSITIVE = (TARGET > 0).astype(np.float32)
CASES = {
  "a loss by name": (line, X, TARGET, {}),
  "targets without the last axis": (line, X, TARGET[:, 0], {"sample_weight": WEIGHT}),
  "a function as loss": (
    functools.partial(line, loss=own_loss, metrics=["mae"]), X, TARGET, {},
  ),
  "a loss that is not registered": (with_own_loss, X, TARGET, {"sample_weight": WEIGHT}),
  "an argument of a loss": (with_huber, X, TARGET, {}),
  "an axis of a loss": (over_time, STEPS_OF_TIME, STEPS_OF_TIME[:, ::-1].copy(), {}),
  "classes and their weights": (
    functools.partial(classifier, metrics=["accuracy"], weighted_metrics=["accuracy"]),
    X, LABEL, {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
  ),
  "penalties, batch normalisation, a schedule": (normalised, X, TARGET, {}),
  "several inputs and outputs": (two_heads, BOTH, [LABEL, TARGET], {"sample_weight": WEIGHT}),
  "lists, and a weight for each output": (
    functools.partial(two_heads, loss_weights=[0.5, 2.0]),
    {"left": BOTH[0], "right": BOTH[1]},
    [LABEL, TARGET],
    {"sample_weight": [WEIGHT, WEIGHT[::-1]]},
  ),
  "an AUC and others that are not means": (binary, X, POSITIVE, {"sample_weight": WEIGHT}),
  "a loss over time": (sequence, STEPS_OF_TIME, STEPS_OF_TIME[..., :1], {}),
  "an embedding": (of_words, RNG.integers(0, 20, size=[ROWS, 5]), TARGET, {}),
}  # fmt: skip


def made(task, strategy, batch=BATCH, **options):
  return make_trainer(
    task, strategy, batch=batch, optimizer=task.own_optimizer, data={"shuffle": False}, **options
  )


def evaluated_by(task, strategy, batch=9):
  """Returns what an evaluation of a trained task reports."""
  return make_evaluator(task, strategy, batch=batch).evaluate()


def trained(task, strategy, **options):
  """Returns what each epoch reports, the weights, and what an evaluation reports."""
  trainer = made(task, strategy, **options)
  epochs = [trainer.train(tf.constant(ROWS // BATCH)) for _ in range(EPOCHS)]
  weights = [np.array(w) for w in task.model.get_weights()]
  return epochs, weights, evaluated_by(task, strategy)


def task_of(name, k):
  make, x, y, options = CASES[name]
  validation = (x, y, options["sample_weight"]) if "sample_weight" in options else (x, y)
  # Variables of tf_keras cannot be moved into a strategy's scope.
  given = make(k) if k is keras else functools.partial(make, k)
  return loopwright.from_keras(given, x, y, validation_data=validation, **options)


@functools.cache
def fitted(name, library):
  """Returns what `fit` reports in each epoch, the weights, and what `evaluate` reports."""
  make, x, y, options = CASES[name]
  model = make(KERAS[library])
  given = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **options}
  history = model.fit(x, y, **given).history
  given = {"batch_size": ROWS, "verbose": 0, "sample_weight": options.get("sample_weight")}
  return history, model.get_weights(), model.evaluate(x, y, return_dict=True, **given)


def assert_as_fitted(name, library, strategy):
  history, expected, evaluation = fitted(name, library)
  epochs, weights, evaluated = trained(task_of(name, KERAS[library]), strategy)
  for ours, theirs in zip(weights, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
  for key, values in history.items():
    np.testing.assert_allclose([e[key] for e in epochs], values, rtol=0, atol=1e-5, err_msg=key)
  for key, value in evaluation.items():
    np.testing.assert_allclose(evaluated[key], value, rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(name=["several inputs and outputs"])
@pytest.mark.fast(name=["classes and their weights"], library=["tf_keras"])
def test_20_steps_equal_those_of_fit(name, library):
  assert_as_fitted(name, library, factories.default())


@pytest.mark.parametrize(
  ("name", "library"),
  [
    ("several inputs and outputs", "keras"),
    ("several inputs and outputs", "tf_keras"),
    ("classes and their weights", "keras"),
    ("an AUC and others that are not means", "tf_keras"),
    ("penalties, batch normalisation, a schedule", "keras"),
    ("a function as loss", "keras"),
  ],
)
@pytest.mark.fast(name=["several inputs and outputs"], library=["keras"])
def test_two_replicas_that_do_not_divide_the_batch_equal_fit(name, library, mirrored):
  assert_as_fitted(name, library, mirrored(2))


@pytest.mark.whole
def test_repeated_rows_of_an_embedding_update_it_once(mirrored):
  """Keras 3's Adam squares each repeat's gradient alone; tf_keras and the framework their sum."""
  CASES["adam"] = (lambda k: of_words(k, k.optimizers.Adam(0.01)), *CASES["an embedding"][1:])
  _, expected, _ = fitted("adam", "tf_keras")
  _, wrong, _ = fitted("adam", "keras")
  _, weights, _ = trained(task_of("adam", keras), factories.default())
  np.testing.assert_allclose(weights[0], expected[0], rtol=0, atol=1e-5)
  assert np.abs(wrong[0] - expected[0]).max() > 1e-3  # if this fails, Keras has mended it


# ---- What a run makes of it ----


def run_task(task, model_dir, **options):
  given = {"train_steps": 4, "steps_per_loop": 2, "global_batch_size": BATCH, "shuffle": False}
  given |= {"strategy": factories.default, **options}
  return run(task=task, model_dir=str(model_dir), **given)


@pytest.mark.parametrize(
  ("kind", "strategy"),
  [(keras.optimizers.SGD, factories.default), (keras.optimizers.Lamb, factories.auto)],
)
def test_a_run_trains_the_model_itself_with_its_own_optimizer(kind, strategy, tmp_path):
  ours, theirs = line(keras, optimizer=kind(0.3)), line(keras)
  theirs.compile(kind(0.3), "mse")
  task = loopwright.from_keras(ours, X.astype(np.float64), TARGET, validation_data=(X, TARGET))
  result = run_task(task, tmp_path, strategy=strategy)
  theirs.fit(X[: 4 * BATCH], TARGET[: 4 * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
  for mine, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
    np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)
  assert result["loss"] == pytest.approx(theirs.evaluate(X, TARGET, verbose=0), abs=1e-5)


def test_a_floatx_that_a_run_replaces_is_named(tmp_path, caplog):
  task = loopwright.from_keras(line(keras), X, TARGET)
  keras.config.set_floatx("float64")
  run_task(task, tmp_path, mode="train")
  assert "floatx() is 'float64', which a run sets to float32: give layers dtype=" in caplog.text


def test_another_optimizer_does_not_go_unnoticed(tmp_path):
  first, other = (line(keras, optimizer=keras.optimizers.SGD(rate)) for rate in (0.25, 0.5))
  run_task(loopwright.from_keras(first, X, TARGET), tmp_path, mode="train")
  task = loopwright.from_keras(other, X, TARGET)
  with pytest.raises(ConfigError, match=r"would go on with optimizer = .*SGD, {.*rate: 0.5.*0.25"):
    run_task(task, tmp_path, mode="train", train_steps=6)
  with pytest.raises(ConfigError, match="but a KerasTask has its own, that of its compiled"):
    run_task(task, tmp_path / "new", mode="train", optimizer=keras.optimizers.SGD)


@loopwright.register
def compiled_line():
  return loopwright.from_keras(
    lambda: line(keras, optimizer=keras.optimizers.RMSprop(0.1)), X, TARGET
  )


def test_a_config_names_a_function_that_returns_the_task(tmp_path):
  (tmp_path / "line.gin").write_text(
    "run.task = @compiled_line()\nrun.train_steps = 4\nrun.global_batch_size = 7\n"
  )
  configurables.parse([str(tmp_path / "line.gin")])
  configurables.configured(run)(model_dir=str(tmp_path / "run"), mode="train")
  task = load(str(tmp_path / "run")).task  # fails with slots of another optimizer
  assert isinstance(task.own_optimizer(), keras.optimizers.RMSprop)


class Subclassed(keras.Model):
  """Not built before its first call, and without `training`."""

  def __init__(self):
    super().__init__()
    self.layer = keras.layers.Dense(1, kernel_initializer="ones")

  def call(self, x):
    return self.layer(x)


def subclassed():
  model = Subclassed()
  model.compile("sgd", "mse")
  return model


def test_a_function_makes_the_model_in_the_strategys_scope(mirrored):
  task = loopwright.from_keras(subclassed, X, TARGET, validation_data=(X, TARGET))
  _, weights, _ = trained(task, mirrored(2))
  expected = subclassed()
  expected.fit(X, TARGET, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
  np.testing.assert_allclose(weights[0], expected.get_weights()[0], rtol=0, atol=1e-5)


def test_a_source_of_ones_own_names_its_features():
  def source(split):
    return ArraySource(features={"x": X, "y": TARGET, "weight": WEIGHT})

  one = loopwright.from_keras(line(keras), source=source)
  two = loopwright.from_keras(line(keras), X, TARGET, sample_weight=WEIGHT)
  weights = [made(task, factories.default()).task.model.get_weights() for task in (one, two)]
  assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
  batches = [
    next(iter(datasets.train_dataset(t.source("train"), global_batch_size=4))) for t in (one, two)
  ]
  assert batches[0].keys() == batches[1].keys()


# ---- What it cannot take ----


class OwnStep(keras.Model):
  def train_step(self, data):
    return super().train_step(data)


class OwnLoss(tf_keras.Sequential):
  def compute_loss(self, *arguments, **options):
    return super().compute_loss(*arguments, **options)


def own_step():
  entry = keras.layers.Input([4])
  model = OwnStep(entry, dense(keras, 1)(entry))
  model.compile("sgd", "mse")
  return model


def own_compute_loss():
  model = OwnLoss([tf_keras.layers.Input([4]), dense(tf_keras, 1)])
  model.compile("sgd", "mse")
  return model


def used():
  model = line(keras)
  model.fit(X, TARGET, verbose=0)
  return model


def uncompiled():
  return keras.Sequential([keras.layers.Input([4])])


def without_decay():
  optimizer = keras.optimizers.AdamW()
  optimizer.exclude_from_weight_decay(var_names=["bias"])
  return line(keras, optimizer=optimizer)


class Scaled(keras.optimizers.SGD):
  """Has an argument that its get_config does not."""

  def __init__(self, *, scale, **options):
    super().__init__(**options)


def legacy():
  return line(tf_keras, optimizer=tf_keras.optimizers.legacy.SGD())


class Unnamed(keras.optimizers.schedules.LearningRateSchedule):
  """Without get_config."""

  def __call__(self, step):
    return 0.1


def own_step_without_a_loss():
  entry = keras.layers.Input([4])
  model = OwnStep(entry, dense(keras, 1)(entry))
  model.compile("sgd")
  return model


def two_outputs(loss):
  entry = keras.layers.Input([4])
  model = keras.Model(entry, [dense(keras, 1, name=name)(entry) for name in "ab"])
  model.compile("sgd", loss, metrics={"a": ["mae"]})
  return model


def without_b():
  return two_outputs({"a": "mse"})


def with_b():
  return two_outputs({"a": "mse", "b": "mse"})


class Hidden(keras.metrics.Metric):
  """Its state is no variable of Keras."""

  def __init__(self):
    super().__init__(name="hidden")
    self.total = tf.Variable(0.0)

  def update_state(self, y_true, y_pred, sample_weight=None):
    self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

  def result(self):
    return self.total + 0.0


class Pairs(keras.losses.Loss):
  """Compares each row with the others of the batch."""

  def call(self, y_true, y_pred):
    return tf.reduce_mean(tf.abs(y_pred - tf.transpose(y_pred)) * tf.cast(y_true, tf.float32), 1)


def of(library, **options):
  return lambda: line(KERAS[library], **options)


def huber(reduction, library):
  return of(library, loss=KERAS[library].losses.Huber(reduction=reduction))


REFUSED = {
  "a tf.Module": (tf.Module, "got a Module; it takes a compiled keras.Model or tf_keras.Model"),
  "not compiled": (uncompiled, "is not compiled; call model.compile"),
  "only an optimizer": (of("keras", loss=None), "is compiled without a loss; call model.compile"),
  "only an optimizer of tf_keras": (of("tf_keras", loss=None), "is compiled without a loss; call"),
  "its own train_step and no loss": (own_step_without_a_loss, r"defines its own train_step\(\)"),
  "a schedule without get_config": (
    of("keras", optimizer=keras.optimizers.SGD(Unnamed())), "SGD cannot be copied from its get_con",
  ),
  "an output without a loss": (
    without_b, "a dict of losses without the output 'b'; give it a loss",
  ),
  "no targets for an output": (
    with_b, "y has nothing for the output 'b', which has a",
  ),
  "its own train_step": (own_step, r"OwnStep defines its own train_step\(\)"),
  "its own compute_loss": (own_compute_loss, r"OwnLoss defines its own compute_loss\(\)"),
  "an optimizer in use": (used, "SGD has already made 2 updates"),
  "a legacy optimizer": (legacy, "must be a Keras 3 optimizer or a tf_keras optimizer that is not"),
  "exceptions from weight decay": (without_decay, "excludes variables from weight decay"),
  "no complete get_config": (
    of("keras", optimizer=Scaled(scale=1.0)), r"model's Scaled cannot be copied .*'scale'",
  ),
  "clipping by a wrong norm": (
    of("keras", optimizer=keras.optimizers.SGD(global_clipnorm=1.0)), "use Trainer.clip_norm",
  ),
  "a loss scale": (
    of("keras", optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
    "use Trainer.loss_scale",
  ),
  "a sum as loss": (huber("sum", "keras"), "'huber_loss' has reduction='sum', but only a mean"),
  "no reduction": (huber("none", "tf_keras"), "has reduction='none', but only a mean"),
  "a mean by weight": (huber("mean_with_sample_weight", "keras"), "='mean_with_sample_weight'"),
  "a loss without rows": (
    of("keras", loss=lambda y, p: tf.reduce_mean(tf.square(y - p))), "returns a scalar, but N",
  ),
  "an unknown name": (of("keras", loss="nonsense"), "the loss 'nonsense', which keras.losses.get"),
  "weights of too many outputs": (
    of("keras", loss_weights=[1.0, 2.0]), "loss_weights has 2 entries, but the model has 1 outputs",
  ),
  "a metric with a state of its own": (
    of("keras", metrics=[Hidden()]), "'hidden' keeps a state that Keras does not know",
  ),
  "a loss that mixes rows": (
    of("keras", loss=Pairs()), "the value of an example depends on the others",
  ),
  "a loss for no output": (of("keras", loss={"other": "mse"}), "names the output 'other', but"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_refuses(name, tmp_path):
  make, message = REFUSED[name]
  y = {"a": TARGET} if make in (without_b, with_b) else TARGET
  with pytest.raises(ConfigError, match=message) as caught:
    run_task(loopwright.from_keras(make(), X, y), tmp_path, mode="train")
  assert "\n" not in str(caught.value)


def metric_of(k, update, *, begin="zeros", result=None, **options):
  """Returns a metric with one variable."""

  class Own(k.metrics.Metric):
    def __init__(self):
      super().__init__(name="own", **options)
      self.value = self.add_weight(shape=(), initializer=begin, name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
      self.value.assign(update(self.value, y_true, y_pred))

    def reset_state(self):
      self.value.assign(tf.ones([]) if begin == "ones" else tf.zeros([]))

    def result(self):
      return self.value

  return Own()


def scalar(y_true, y_pred):
  return tf.reduce_mean(tf.square(y_true - y_pred))


NO_SUMS = {
  "the largest output": lambda k: metric_of(k, lambda v, y, p: tf.maximum(v, tf.reduce_max(p))),
  "the largest target": lambda k: metric_of(k, lambda v, y, p: tf.maximum(v, tf.reduce_max(y))),
  "the last batch": lambda k: metric_of(k, lambda v, y, p: tf.reduce_sum(y)),
  "a product": lambda k: metric_of(k, lambda v, y, p: v * tf.reduce_prod(1 + y), begin="ones"),
  "a function with a scalar": lambda k: scalar,
}


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.parametrize("name", NO_SUMS)
@pytest.mark.fast(name=["the largest target"], library=["keras"])
@pytest.mark.fast(name=["a function with a scalar"], library=["tf_keras"])
def test_a_metric_that_is_no_sum_is_refused(name, library, tmp_path):
  model = line(KERAS[library], metrics=[NO_SUMS[name](KERAS[library])])
  task = loopwright.from_keras(model, X, np.zeros_like(TARGET))
  with pytest.raises(ConfigError, match="a state that is not a sum over rows") as caught:
    run_task(task, tmp_path, mode="train")
  assert "\n" not in str(caught.value)


def test_masks_of_several_outputs_are_refused(tmp_path):
  entropy = keras.losses.SparseCategoricalCrossentropy(ignore_class=0, from_logits=True)
  model = two_heads(keras, loss={"kind": entropy, "size": "mae"})
  task = loopwright.from_keras(model, BOTH, [LABEL, TARGET])
  with pytest.raises(ConfigError, match="the loss of output 'kind' has a mask, so it is a mean"):
    run_task(task, tmp_path, mode="train")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("batch", [4, 20])
def test_an_evaluation_is_the_mean_over_all_valid_labels(replicas, batch, mirrored):
  """Keras's depends on the batch size: the means of batches, weighted by their rows."""
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=[20, 5, 3]).astype(np.float32), rng.integers(0, 4, [20, 5])
  y[rng.random([20, 5]) < 0.4] = -100
  model = keras.Sequential([keras.Input([5, 3]), keras.layers.Dense(4)])
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)
  model.compile("sgd", loss)
  scores = x.astype(np.float64) @ model.get_weights()[0]
  losses = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, y[..., None] % 4, -1)[..., 0]
  strategy = mirrored(replicas) if replicas > 1 else factories.default()
  task = loopwright.from_keras(model, x, y, validation_data=(x, y))
  made(task, strategy)
  found = evaluated_by(task, strategy, batch=batch)["loss"]
  assert found == pytest.approx(losses[y >= 0].mean(), rel=1e-6)


# ---- Rows that a layer, a loss or a metric counts otherwise ----


def compared(model_of, x, y, strategy, **options):
  """Trains on one batch of all rows; returns fit's and our loss, evaluation and weights."""
  model = model_of()
  given = {"batch_size": ROWS, "verbose": 0}
  history = model.fit(x, y, epochs=3, shuffle=False, **given, **options).history
  expected = history, model.evaluate(x, y, return_dict=True, **given), model.get_weights()
  is_keras = isinstance(model, keras.Model)
  task = loopwright.from_keras(
    model_of() if is_keras else model_of, x, y, validation_data=(x, y), **options
  )
  trainer = made(task, strategy, batch=ROWS)
  epochs = [trainer.train(tf.constant(1)) for _ in range(3)]
  evaluated = evaluated_by(task, strategy, batch=ROWS)
  ours = {key: [each[key] for each in epochs] for key in history}
  return expected, (ours, evaluated, task.model.get_weights())


def assert_equal(expected, ours):
  for theirs, mine in zip(expected[:2], ours[:2], strict=True):
    for key, value in theirs.items():
      np.testing.assert_allclose(mine[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
  for one, other in zip(ours[2], expected[2], strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def masked_words(k):
  """The mask of an embedding reaches the loss and the metrics."""
  layers = [
    k.layers.Input([5], dtype="int32"),
    k.layers.Embedding(
      20, 4, mask_zero=True, embeddings_initializer=k.initializers.RandomUniform(seed=1)
    ),
    dense(k, 1),
  ]
  model = k.Sequential(layers)
  model.compile(k.optimizers.SGD(0.1), "mse", metrics=["mae"], weighted_metrics=["mse"])
  return model


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2], library=["keras"])
def test_the_mask_of_a_layer_leaves_out_steps(replicas, library, mirrored):
  words = np.random.default_rng(3).integers(0, 4, size=[ROWS, 5])
  strategy = mirrored(replicas) if replicas > 1 else factories.default()
  model = functools.partial(masked_words, KERAS[library])
  assert_equal(*compared(model, words, STEPS_OF_TIME[..., :1], strategy))


class TruePositives(keras.metrics.Metric):
  """The metric of Keras's own documentation; `result` returns its variable."""

  def __init__(self, name="binary_true_positives", **kwargs):
    super().__init__(name=name, **kwargs)
    self.true_positives = self.add_weight(shape=(), initializer="zeros", name="tp")

  def update_state(self, y_true, y_pred, sample_weight=None):
    y_true, y_pred = keras.ops.cast(y_true, "bool"), keras.ops.cast(y_pred, "bool")
    values = keras.ops.logical_and(keras.ops.equal(y_true, True), keras.ops.equal(y_pred, True))
    self.true_positives.assign(
      self.true_positives + keras.ops.sum(keras.ops.cast(values, self.dtype))
    )

  def result(self):
    return self.true_positives


def test_a_metric_that_returns_its_variable():
  task = loopwright.from_keras(
    line(keras, metrics=[TruePositives()]), X, POSITIVE, validation_data=(X, POSITIVE)
  )
  epochs, _, evaluated = trained(task, factories.default())
  assert evaluated["binary_true_positives"] == POSITIVE.sum()  # no output is exactly 0
  assert [each["binary_true_positives"] for each in epochs] == [POSITIVE.sum()] * EPOCHS


def test_metrics_of_tf_keras_made_in_a_strategys_scope(mirrored):
  def make():
    mae = tf_keras.metrics.MeanAbsoluteError(name="mae")
    auc = tf_keras.metrics.AUC(name="auc", from_logits=True)
    return line(tf_keras, metrics=[mae], weighted_metrics=[auc])

  options = {"sample_weight": WEIGHT}
  task = loopwright.from_keras(make, X, POSITIVE, validation_data=(X, POSITIVE, WEIGHT), **options)
  _, _, evaluated = trained(task, mirrored(2))
  model = make()
  model.fit(X, POSITIVE, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, **options)
  assert evaluated == pytest.approx(
    model.evaluate(X, POSITIVE, verbose=0, return_dict=True, **options), abs=1e-5
  )


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.fast(library=["keras"])
def test_a_metric_sees_the_logits_behind_a_softmax(library):
  """As in `fit`: of a probability that is 0 the crossentropy is no infinity, nor clipped."""
  k = KERAS[library]
  model = k.Sequential([k.layers.Input([4]), dense(k, 3, activation="softmax")])
  metric = k.metrics.SparseCategoricalCrossentropy(name="entropy")
  model.compile("sgd", "sparse_categorical_crossentropy", metrics=[metric])
  model.set_weights([100 * weight for weight in model.get_weights()])
  expected = model.evaluate(X, LABEL, verbose=0, return_dict=True)
  logits = X @ model.get_weights()[0]
  exact = tf.nn.sparse_softmax_cross_entropy_with_logits(LABEL, logits)
  task = loopwright.from_keras(model, X, LABEL, validation_data=(X, LABEL))
  task.model = task.build_model()
  evaluated = evaluated_by(task, factories.default())
  assert evaluated["entropy"] == pytest.approx(float(tf.reduce_mean(exact)), rel=1e-5)
  assert evaluated == pytest.approx(expected, rel=1e-5)


def active(k):
  model = k.Sequential([k.layers.Input([4]), dense(k, 8, activity_regularizer="l2"), dense(k, 1)])
  model.compile(k.optimizers.SGD(0.1), "mse")
  return model


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.fast(library=["keras"])
def test_an_activity_regulariser_does_not_see_padding(library, tmp_path, mirrored):
  """Its evaluation, in batches of 9 of 35 rows, is that of `evaluate` in the same batches."""
  k = KERAS[library]
  model, y = active(k), TARGET
  task = loopwright.from_keras(active(k), X, y, validation_data=(X, y))
  _, weights, evaluated = trained(task, factories.default())
  model.fit(X, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
  for ours, theirs in zip(weights, model.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
  assert evaluated["loss"] == pytest.approx(model.evaluate(X, y, batch_size=9, verbose=0), abs=1e-5)
  several = loopwright.from_keras(functools.partial(active, k), X, y)
  with pytest.raises(ConfigError, match="has an activity regulariser, and each of N replicas"):
    made(several, mirrored(2))


def test_labels_that_are_no_integers_are_rounded_for_their_classes_weight():
  labels = np.array([[0.95], [0.05], [0.5], [1.5], [-0.2]], np.float32)
  task = loopwright.from_keras(line(keras), X[:5], labels, class_weight={0: 3.0, 1: 5.0, 2: 7.0})
  batch = task.preprocess({**datasets_rows(task, 5), "weight": tf.ones([5])}, training=True)
  np.testing.assert_array_equal(batch["weight"], [5.0, 3.0, 3.0, 7.0, 3.0])  # as np.round
  wide = loopwright.from_keras(sequence(keras), STEPS_OF_TIME, STEPS_OF_TIME, class_weight={0: 2.0})
  with pytest.raises(ConfigError, match="class_weight is for one class of each example"):
    wide.preprocess({**datasets_rows(wide, 5), "weight": tf.ones([5])}, training=True)


def datasets_rows(task, count):
  return task.source("train").fetch(tf.range(count, dtype=tf.int64))


def of_batch_norm():
  layers = [keras.layers.Input([4]), keras.layers.BatchNormalization(), dense(keras, 1)]
  model = keras.Sequential(layers)
  model.compile("sgd", "mse")
  return model


class Adding(keras.layers.Layer):
  def call(self, x):
    self.add_loss(tf.reduce_sum(x))
    return x


def of_add_loss():
  model = keras.Sequential([keras.layers.Input([4]), Adding(), dense(keras, 1)])
  model.compile("sgd", "mse")
  return model


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (of_batch_norm, "averages over each replica's own rows, unlike fit on one device; set synchr"),
    (of_add_loss, r"has add_loss\(\), and each of N replicas sees its own rows only"),
  ],
)
def test_layers_that_see_a_replicas_rows_are_refused_on_several(make, message, mirrored):
  with pytest.raises(ConfigError, match=message):
    made(loopwright.from_keras(make(), X, TARGET), mirrored(2)).train(tf.constant(1))


class Matching(keras.Model):
  """As in Keras's example of collaborative filtering: the product is summed over the batch too."""

  def __init__(self):
    super().__init__()
    self.users, self.films = (
      keras.layers.Embedding(9, 4, embeddings_initializer=keras.initializers.HeNormal(seed=seed))
      for seed in (1, 2)
    )

  def call(self, pairs):
    users, films = self.users(pairs[:, 0]), self.films(pairs[:, 1])
    return tf.sigmoid(tf.tensordot(users, films, 2) * tf.ones_like(users[:, :1]))


def matching(k):
  model = Matching()
  model.compile("sgd", "mse")
  return model


def over_the_batch(k):
  model = k.Sequential([k.layers.Input([4]), k.layers.UnitNormalization(axis=0), dense(k, 1)])
  model.compile("sgd", "mse")
  return model


PAIRS = np.random.default_rng(5).integers(0, 9, size=[ROWS, 2]).astype(np.int32)


@pytest.mark.parametrize(
  ("make", "library", "x"),
  [(matching, "keras", PAIRS), (over_the_batch, "keras", X), (over_the_batch, "tf_keras", X)],
)
def test_a_model_that_mixes_rows_is_refused_on_several_replicas_alone(make, library, x, mirrored):
  k = KERAS[library]
  expected = make(k)
  expected.fit(x, TARGET, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
  task = loopwright.from_keras(functools.partial(make, k), x, TARGET, validation_data=(x, TARGET))
  _, weights, _ = trained(task, factories.default())
  for ours, theirs in zip(weights, expected.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
  several = loopwright.from_keras(functools.partial(make, k), x, TARGET)
  with pytest.raises(ConfigError, match="the outputs of an example depend on the others") as caught:
    made(several, mirrored(2)).train(tf.constant(1))
  assert "\n" not in str(caught.value)


class Normalising(keras.Model):
  """Its `call` has no `training`, so `fit` normalises by the moving averages."""

  def __init__(self):
    super().__init__()
    self.norm, self.layer = keras.layers.BatchNormalization(), dense(keras, 1)

  def call(self, x):
    return self.layer(self.norm(x))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_call_without_training_is_called_as_fit_calls_it(replicas, mirrored):
  def make():
    model = Normalising()
    model.compile("sgd", "mse")
    return model

  x, expected = X + 3.0, make()
  expected.fit(x, TARGET, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
  task = loopwright.from_keras(make, x, TARGET, validation_data=(x, TARGET))
  _, weights, _ = trained(task, mirrored(2) if replicas > 1 else factories.default())
  for ours, theirs in zip(weights, expected.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["callbacks", "validation_split"])
def test_other_arguments_of_fit_are_refused(name):
  place = "run.actions=" if name == "callbacks" else "see docs/models-from-elsewhere.md"
  with pytest.raises(ConfigError, match=f"from_keras.. takes no {name}; {place}"):
    loopwright.from_keras(line(keras), X, TARGET, **{name: []})


def test_what_a_user_of_keras_tries_first():
  with pytest.raises(ConfigError, match=r"itself; loopwright.run\(task=..., train_epochs=10, "):
    loopwright.from_keras(line(keras), X, TARGET).fit(epochs=2)
  with pytest.raises(
    AttributeError, match=r"no attribute 'fit'; loopwright.run\(task=..., ...\) tr"
  ):
    loopwright.fit  # noqa: B018
  with pytest.raises(ConfigError, match="as source; it must be a function of the split"):
    loopwright.from_keras(line(keras), source=ArraySource({"x": X, "y": TARGET}))
  data = tf.data.Dataset.from_tensors(X)
  with pytest.raises(
    ConfigError, match=r"give source=lambda split: StreamSource\(dataset=...\), w"
  ):
    loopwright.from_keras(line(keras), data, TARGET).source("train")


def test_arguments_that_contradict_or_are_missing(tmp_path, mirrored):
  with pytest.raises(ConfigError, match="either x and y, or source"):
    loopwright.from_keras(line(keras))
  with pytest.raises(ConfigError, match="got None as y; it must be an array"):
    loopwright.from_keras(line(keras), X).source("train")
  with pytest.raises(ConfigError, match="got no validation_data, so there is nothing to evaluate"):
    run_task(loopwright.from_keras(line(keras), X, TARGET), tmp_path)
  weighted = loopwright.from_keras(two_heads(keras), BOTH, [LABEL, TARGET], class_weight={0: 2.0})
  with pytest.raises(ConfigError, match="class_weight is for a model with one output"):
    weighted.preprocess(datasets_rows(weighted, 1), training=True)
  with pytest.raises(ConfigError, match=r"cannot be moved into it; pass a function that makes and"):
    made(loopwright.from_keras(line(tf_keras), X, TARGET), mirrored(2))
  with pytest.raises(ConfigError, match="does not exist yet"):
    loopwright.from_keras(subclassed, X, TARGET).compiled  # noqa: B018
