"""A model that is split over a mesh: its parts, checkpoints, draws, and one line for mistakes.

That updates are right is shown in tests/conformance, against float64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toys
from runs import make_trainer

from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.models import models
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.strategies import factories
from loopwright.strategies.mesh import updates, variables
from loopwright.tasks import language_model
from loopwright.tools.ledger.recorder import Recorder

LAYOUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}


def mesh(batch=2, model=2, layouts=LAYOUTS, **options):
  sizes = {"batch": batch, "model": model}
  return factories.model_parallel(mesh=sizes, layouts=layouts, **options)


class Images(toys.Regression):
  """A convolution, dropout, and a network of two layers."""

  def __init__(self, library=keras, dropout=0.5):
    self.library, self.dropout = library, dropout

  def build_model(self):
    layers, normal = self.library.layers, self.library.initializers.RandomNormal
    return toys.network(
      [6, 6, 1],
      layers.Conv2D(4, 3, activation="relu", kernel_initializer=normal(seed=1), name="conv"),
      layers.Flatten(),
      layers.Dense(16, "tanh", kernel_initializer=normal(seed=2), name="up"),
      layers.Dropout(self.dropout),
      layers.Dense(3, kernel_initializer=normal(seed=3), name="down"),
      library=self.library,
    )

  def source(self, split):
    rng = np.random.default_rng(0)
    return ArraySource(features={"x": rng.normal(size=[40, 6, 6, 1]).astype(np.float32)})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def losses(self, outputs, batch):
    return tf.reduce_sum(tf.square(outputs - 1.0), axis=1)


class Bytes:
  """The documents of a split."""

  def documents(self, split):
    return [bytes(np.random.default_rng(1).integers(0, 256, 400, dtype=np.uint8))]


def text():
  keras.utils.set_random_seed(5)
  return language_model.LanguageModel(
    corpus=Bytes(), context=8,
    network=lambda: language_model.transformer(layers=1, width=16, heads=2, dropout=0.3),
  )  # fmt: skip


def trainer_of(task, strategy, *, optimizer=None, **options):
  adam = optimizer or (lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=0.1))
  data = {"pad_multiple": 12}
  return make_trainer(task, strategy, batch=10, optimizer=adam, data=data, **options)


def weights(trainer):
  return [models.raw(v).numpy() for v in models.trainable_variables(trainer.task.model)]


def assert_equal(one, other, atol):
  for a, b in zip(weights(one), weights(other), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


ATTENTION = {
  "gate/kernel": (None, "model"), "up/kernel": (None, "model"), "down/kernel": ("model", None),
  "output/kernel": ("model", None),
}  # fmt: skip
THREE = {"batch": 3, "model": 1, "layouts": {}, "shard_parameters": True}
"""Each weight split over the rows' three devices, where it divides."""


@pytest.mark.parametrize(
  ("make", "place", "options"),
  [
    (Images, {}, {}),
    (text, {"layouts": ATTENTION}, {}),
    (text, {"layouts": ATTENTION, "shard_parameters": True}, {}),
    (text, THREE, {"recompute": ["block_.*"], "accumulation_steps": 2, "ema_decay": 0.9}),
  ],
  ids=["cnn", "transformer", "sharded", "sharded_over_3"],
)
def test_the_same_as_one_device_with_dropout_and_padding(make, place, options):
  options = {"clip_norm": 1.0, **options}
  alone = trainer_of(make(), tf.distribute.OneDeviceStrategy("CPU:0"), **options)
  split = trainer_of(make(), mesh(**place), **options)
  assert_equal(alone, split, atol=0)
  for steps in (2, 4):
    one, other = (t.train(tf.constant(steps)) for t in (alone, split))
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
  assert_equal(alone, split, atol=1e-5)
  assert split.traces == 1


@pytest.mark.parametrize(
  ("library", "shards", "conv", "up", "down"),
  [(keras, False, 4, (64, 8), (8, 3)), (tf_keras, True, 2, (32, 8), (8, 3))],
  ids=["keras", "sharded"],
)
def test_each_device_has_its_part_of_weights_and_slots(library, shards, conv, up, down):
  place = mesh(shard_parameters=shards)
  trainer = trainer_of(Images(library), place, optimizer=lambda: library.optimizers.Adam(0.01))
  [adam] = trainer.parts.optimizers.values()
  kept = [models.raw(v) for v in [*adam.variables, *adam.optimizer.variables]]
  whole = {(64, 16): up, (16,): (8,), (16, 3): down, (3, 3, 1, 4): (3, 3, 1, conv)}
  seen = []
  for variable in kept:
    parts = [part.shape for part in variables.dtensor.unpack(variable.read_value())]
    shape = tuple(variable.shape)
    assert parts == [whole.get(shape, shape)] * 4
    seen.append(shape)
  assert [seen.count(shape) for shape in whole] == [3] * 4  # the weight, mean and square


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_checkpoint_moves_between_meshes_and_replicas(library, mirrored, tmp_path):
  def made(strategy):
    trainer = trainer_of(
      Images(library, dropout=0.0),
      strategy,
      optimizer=lambda: library.optimizers.Adam(0.01, epsilon=1e-3),
    )
    manager = CheckpointManager(
      trainer=trainer, directory=str(tmp_path), experiment={"task": "images"}
    )
    return trainer, manager

  def passed_on(giver, taker):
    giver[1].save()
    giver[1].wait()
    assert taker[1].restore_or_initialize()
    assert_equal(giver[0], taker[0], atol=0)
    taker[0].train(tf.constant(2))

  first = made(mesh(shard_parameters=True))
  first[0].train(tf.constant(2))
  second, third = made(mirrored(3)), made(mesh(4, 1))
  passed_on(first, second)
  passed_on(second, third)
  unbroken, _ = made(mesh(1, 2))
  unbroken.train(tf.constant(6))
  assert_equal(unbroken, third[0], atol=3e-6)


def test_a_run_with_sharded_parameters_goes_on_to_the_bit(tmp_path):
  whole, first, second = (trainer_of(Images(), mesh(**THREE)) for _ in range(3))
  broken = [
    CheckpointManager(trainer=each, directory=str(tmp_path), experiment={"task": "images"})
    for each in (first, second)
  ]
  whole.train(tf.constant(4))
  first.train(tf.constant(2))
  broken[0].save()
  broken[0].wait()
  assert broken[1].restore_or_initialize()
  second.train(tf.constant(2))
  assert_equal(whole, second, atol=0)


def test_a_trial_update_that_goes_wrong_is_refused(monkeypatch):
  usual = updates.update

  def stuck(optimizer, index, *args):
    if index != 2:
      usual(optimizer, index, *args)

  monkeypatch.setattr(updates, "update", stuck)
  with pytest.raises(ConfigError, match=r"wrong values of variable 'sequential.*/up/kernel', off"):
    trainer_of(Images(), mesh())


class Called(Images):
  def build_model(self):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(16, name="up")])
    model(np.zeros([2, 6, 6, 1], np.float32))
    return model


@pytest.mark.parametrize(
  ("layouts", "line"),
  [
    ({"up/kernel": (None, "modle")}, r"unknown dimension .*'modle'; .*Did you mean 'model'"),
    ({"up/kernal": (None, "model")}, r"unknown variable .*'up/kernal'; .*Did you mean 'up/kernel'"),
    ({"up/kernel": ("model",)}, r"has shape \(64, 16\); give one entry for each of its 2 axes"),
    ({"down/kernel": (None, "model")}, "splits axis 1 .* into 2 parts; the size must be a multi"),
    ({"up/kernel": (None, None), "u./kernel": (None, None)}, "which both match variable"),
    ({"up/(kernel": (None, None)}, "which is no regular expression"),
  ],
)
def test_a_wrong_layout_is_one_line(layouts, line):
  with pytest.raises(ConfigError, match=line):
    trainer_of(Images(), mesh(layouts=layouts))


@pytest.mark.parametrize(
  ("options", "line"),
  [
    (
      {"optimizer": keras.optimizers.Lion},
      "is a Lion, but model_parallel can update only with SGD",
    ),
    ({"optimizer": lambda: keras.optimizers.Adam(amsgrad=True)}, "without amsgrad"),
    ({"eager": True}, "received eager=True, which model_parallel does not have"),
    ({"jit_compile": True}, "received Trainer.jit_compile=True"),
    ({"shard_optimizer_state": True}, "received Trainer.shard_optimizer_state=True"),
    ({"task": Called()}, "give the model keras.Input tensors instead of arrays"),
  ],
)
def test_what_a_mesh_does_not_have_is_one_line(options, line):
  with pytest.raises(ConfigError, match=line):
    trainer_of(options.pop("task", None) or Images(), mesh(layouts={}), **options)


def test_the_ledger_is_refused_in_one_line(tmp_path):
  with pytest.raises(ConfigError, match=r"under model_parallel .* remove run.ledger"):
    Recorder(model_dir=str(tmp_path), strategy=mesh())


def test_a_mesh_needs_its_devices():
  with pytest.raises(ConfigError, match=r"has 4 devices, but model_parallel\.devices names 1"):
    factories.model_parallel(mesh={"batch": 2, "model": 2}, devices=["CPU:0"])
  with pytest.raises(ConfigError, match=r"mesh\['model'\] is 0; it must be"):
    factories.model_parallel(mesh={"model": 0})
  with pytest.raises(ConfigError, match=r"mesh is {'model': 2}; add 'batch'"):
    factories.model_parallel(mesh={"model": 2}, shard_parameters=True)


def test_parameters_that_no_device_can_have_a_part_of_are_one_line():
  with pytest.raises(ConfigError, match="but 3 devices along 'batch' divide no axis of a weight"):
    trainer_of(toys.Regression(lambda: toys.linear([1.0] * 4)), mesh(**THREE))
