"""Models that others made: each trains on two replicas as on one, is saved, served and verified."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toys
from runs import make_trainer

from loopwright import ArraySource, ConfigError
from loopwright.models import models
from loopwright.runs.runner import run
from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.checks import replicas

STEPS, BATCH, EXAMPLES = 10, 6, 15
RNG = np.random.default_rng(0)
X = RNG.normal(size=[EXAMPLES, 3]).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
IMAGES = RNG.normal(size=[EXAMPLES, 32, 32, 3]).astype(np.float32)


class Line(toys.Regression):
  """Squared error of what a model of one's own gives; `make` makes it."""

  features = {"x": X, "y": Y}

  def forward(self, batch, training):
    return self.outputs(batch["x"])[:, 0]

  def outputs(self, x):
    return self.model(x)

  def export_signature(self):
    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
    def serve(x):
      return {"y": self.outputs(x)}

    return serve


# ---- The models ----


class Variables(tf.Module):
  """Variables in a list, in a dict, and one for itself."""

  def __init__(self):
    super().__init__()
    rng = np.random.default_rng(1)
    widths = [3, 4, 1]
    self.kernels = [
      tf.Variable(rng.normal(size=shape).astype(np.float32), name=f"kernel_{i}")
      for i, shape in enumerate(itertools.pairwise(widths))
    ]
    self.others = {"bias": tf.Variable([0.5] * 4, name="bias"), "factor": tf.Variable(1.5)}

  def __call__(self, x):
    hidden = tf.tanh(x @ self.kernels[0] + self.others["bias"])
    return self.others["factor"] * (hidden @ self.kernels[1])


class Lazy(tf_keras.Model):
  """Makes its variables at the first call."""

  def __init__(self):
    super().__init__()
    self.blocks = [tf_keras.layers.Dense(4, activation="tanh"), tf_keras.layers.Dense(1)]

  def call(self, x, training=False):
    for block in self.blocks:
      x = block(x)
    return x


def lazy():
  model = Lazy()
  model(X[:1])
  return model


class Holder(tf.Module):
  """A Keras 3 model and a tf_keras layer inside a tf.Module, deeper than it looks itself."""

  def __init__(self):
    super().__init__()
    hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")
    self.parts = {"body": [keras.Sequential([keras.Input([3]), hidden])]}
    self.head = tf_keras.layers.Dense(1)
    self.head.build([None, 4])
    self.factor = tf.Variable(1.5, name="factor")

  def __call__(self, x):
    return self.factor * self.head(self.parts["body"][0](x))


def both_generations():
  layer = keras.layers.Dense(4, activation="tanh")
  return {
    "body": keras.Sequential([keras.Input([3]), layer]),
    "head": tf_keras.Sequential([tf_keras.Input([4]), tf_keras.layers.Dense(1)]),
  }


class Parts(Line):
  def outputs(self, x):
    return self.model["head"](self.model["body"](x))


CASES = {
  "a tf.Module with a list and a dict": (Line, Variables, 4),
  "a tf_keras model built at its first call": (Line, lazy, 4),
  "Keras inside a tf.Module": (Line, Holder, 5),
  "both generations in a dict": (Parts, both_generations, 4),
}
each = pytest.mark.parametrize("name", CASES)
OPTIMIZERS = {"keras": keras.optimizers.Adam, "tf_keras": tf_keras.optimizers.Adam}


def made(name):
  task, make, _ = CASES[name]
  return task(make)


def values(task):
  return [np.array(models.raw(v).read_value()) for v in models.trainable_variables(task.model)]


def trained(
  task, strategy, *, steps=STEPS, optimizer=lambda: keras.optimizers.Adam(0.05), **options
):
  """Returns the trainer of a task after some steps from the same initial weights."""
  keras.utils.set_random_seed(1)
  tf_keras.utils.set_random_seed(1)
  trainer = make_trainer(task, strategy, batch=BATCH, optimizer=optimizer, **options)
  trainer.train(tf.constant(steps))
  return trainer


# ---- Right on two replicas, saved, averaged, served ----


@each
@pytest.mark.parametrize("library", OPTIMIZERS)
@pytest.mark.fast(name=["Keras inside a tf.Module"], library=["keras"])
def test_two_replicas_train_as_one(mirrored, name, library):
  trainers = [
    trained(made(name), mirrored(count), optimizer=lambda: OPTIMIZERS[library](0.05), ema_decay=0.9)
    for count in (1, 2)
  ]
  one, two = (values(trainer.task) for trainer in trainers)
  assert len(one) == CASES[name][2]
  averages = [[average.numpy() for average in t.parts.ema.averages] for t in trainers]
  for a, b in zip(one + averages[0], two + averages[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
  fresh = made(name)
  keras.utils.set_random_seed(1)
  tf_keras.utils.set_random_seed(1)
  fresh.model = fresh.build_model()
  for a, b, average in zip(one, values(fresh), averages[0], strict=True):  # each one has moved
    assert np.abs(a - b).max() > 1.5 * np.abs(average - b).max() > 0.01


class Sum(Line):
  """All of them at once."""

  def build_model(self):
    return {"a": Variables(), "b": lazy(), "c": Holder(), "d": both_generations()}

  def outputs(self, x):
    a, b, c = (self.model[name](x) for name in "abc")
    return a + b + c + self.model["d"]["head"](self.model["d"]["body"](x))


@pytest.mark.whole
def test_a_run_of_all_is_resumed_and_served(mirrored, tmp_path):
  strategy = mirrored(2)

  def go(folder, steps, mode="train"):
    task = Sum()
    results = run(
      task=task, mode=mode, model_dir=str(tmp_path / folder), train_steps=steps,
      global_batch_size=BATCH, steps_per_loop=2, strategy=lambda: strategy,
      optimizer=lambda: keras.optimizers.Adam(0.05),
    )  # fmt: skip
    return task, results

  whole, expected = go("whole", 6)
  go("parts", 2)
  parts, resumed = go("parts", 6)
  assert resumed["loss"] == expected["loss"]
  assert len(values(parts)) == sum(variables for _, _, variables in CASES.values())
  for a, b in zip(values(parts), values(whole), strict=True):
    np.testing.assert_array_equal(a, b)
  go("parts", 6, mode="export")
  served = tf.saved_model.load(str(tmp_path / "parts" / "export")).signatures["serving_default"]
  np.testing.assert_allclose(served(x=tf.constant(X))["y"], whole.outputs(X), rtol=1e-5, atol=1e-6)


def test_a_penalty_inside_a_module_counts():
  keras.utils.set_random_seed(1)
  holder = Holder()
  kernel = holder.parts["body"][0].get_weights()[0]
  assert float(models.regularization(holder)) == pytest.approx(0.01 * (kernel**2).sum(), rel=1e-6)
  assert models.untracked(holder) == {}


# ---- keras.applications ----


def backbone():
  """The first three blocks of the least of them: 8 batch normalisations."""
  whole = keras.applications.MobileNet(
    input_shape=(32, 32, 3), alpha=0.25, weights=None, include_top=False
  )
  pooled = keras.layers.GlobalAveragePooling2D()(whole.get_layer("conv_pw_3_relu").output)
  return keras.Model(whole.input, keras.layers.Dense(1)(pooled))


def synchronized(model):
  """The same model, whose batch normalisations take their statistics over all replicas."""

  def clone(layer):
    config = layer.get_config()
    if isinstance(layer, keras.layers.BatchNormalization):
      config["synchronized"] = True
    return type(layer).from_config(config)

  return keras.models.clone_model(model, clone_function=clone)


class Application(Line):
  def source(self, split):
    return ArraySource(features={"x": IMAGES, "y": Y})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]


@pytest.fixture(scope="module")
def local_statistics():
  """A step on one replica and on two, each normalising by its own rows."""
  found = []
  for count in (1, 2):
    strategy = tf.distribute.MirroredStrategy(
      [f"CPU:{i}" for i in range(count)],
      cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    task = Application(backbone)
    trained(task, strategy, steps=2, optimizer=lambda: keras.optimizers.SGD(0.01))
    found.append(values(task))
  return found


@pytest.mark.whole
def test_local_statistics_are_another_update(local_statistics):
  one, two = local_statistics
  assert max(np.abs(a - b).max() for a, b in zip(one, two, strict=True)) > 1e-3


@pytest.mark.whole
def test_an_application_trains_on_two_replicas_as_on_one(mirrored):
  """With frozen statistics too: tests/tasks/test_transfer_learning.py."""
  tasks = [Application(lambda: synchronized(backbone())) for _ in range(2)]
  for count, task in enumerate(tasks, 1):
    trained(task, mirrored(count), optimizer=lambda: keras.optimizers.SGD(0.01))
  for a, b in zip(*map(values, tasks), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


# ---- Mistakes ----


def unbuilt_in_module():
  module = tf.Module()
  module.layer = keras.layers.Dense(1)
  return module


def message_of(make, strategy, **options):
  with pytest.raises(ConfigError) as caught:
    trained(Line(make), strategy, steps=1, **options)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize("library", [keras, tf_keras])
@pytest.mark.fast(library=[keras])
def test_variables_from_outside_the_scope_are_refused(mirrored, library):
  model = library.Sequential([library.layers.Input([3]), library.layers.Dense(1, name="late")])
  message = message_of(lambda: model, mirrored(2))
  assert "late/kernel" in message
  assert "was not made in strategy.scope()" in message
  trained(Line(lambda: model), tf.distribute.get_strategy(), steps=1)  # of one replica it will do


@pytest.mark.parametrize(
  "make", [Lazy, unbuilt_in_module, lambda: keras.Sequential([keras.layers.Dense(1)])]
)
def test_layers_that_are_not_built_are_refused(mirrored, make):
  assert "has no trainable variable to update; build the model" in message_of(make, mirrored(1))


def test_a_legacy_optimizer_is_refused(mirrored):
  legacy = tf_keras.optimizers.legacy.Adam
  assert "that is not legacy" in message_of(lazy, mirrored(1), optimizer=legacy)


# ---- Verification ----


@pytest.mark.whole
def test_verification_has_nothing_against_keras_inside_a_module():
  task = functools.partial(made, "Keras inside a tf.Module")
  subject = Subject(task=task, optimizer=keras.optimizers.Adam, global_batch_size=BATCH)
  results = replicas.check(subject)
  assert not [each for each in results if each.status == "failed"]
  assert len([each for each in results if each.status == "passed"]) > 5
