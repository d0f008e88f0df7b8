"""Sharded optimizer state: its size, its checkpoints under any number of replicas, its refusals.

That updates are right is shown in tests/conformance, against float64.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_trainer
from toys import KERAS

from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.models import models
from loopwright.optimizers import sharding
from loopwright.run_folder.checkpoints import CheckpointManager

UNITS, INPUTS, ROWS = (130, 130, 1), 150, 12
LARGE = INPUTS * 130 + 130 * 130
SMALL = 130 + 130 + 130 + 1  # two biases, the last kernel and its bias: one flat variable


class Network(toys.Regression):
  def __init__(self, library="keras", constraint=None, bad_step=-1):
    self.library, self.constraint, self.bad_step = KERAS[library], constraint, bad_step

  def build_model(self):
    normal = self.library.initializers.RandomNormal
    dense = functools.partial(
      self.library.layers.Dense, activation="tanh", kernel_constraint=self.constraint
    )
    layers = [
      dense(units, kernel_initializer=normal(stddev=0.1, seed=i)) for i, units in enumerate(UNITS)
    ]
    return toys.network([INPUTS], *layers, library=self.library)

  def source(self, split):
    rng = np.random.default_rng(5)
    return ArraySource(features={"x": rng.normal(size=[48, INPUTS]).astype(np.float32)})

  def forward(self, batch, training):
    bad = tf.where(tf.cast(batch["step"], tf.int32) == self.bad_step, np.inf, 1.0)
    return super().forward(batch, training) * bad

  def losses(self, outputs, batch):
    return tf.square(outputs - batch["x"][:, 0])


def trainer_of(strategy, library="keras", *, task=None, optimizer=None, **options):
  adam = optimizer or (lambda: KERAS[library].optimizers.Adam(0.01, epsilon=1e-3))
  return make_trainer(
    task or Network(library), strategy, batch=ROWS, optimizer=adam,
    data={"pad_multiple": 12, "seed": 3}, **options,
  )  # fmt: skip


def whole_state(trainer):
  """Weights, and slots as a checkpoint has them."""
  weights = [models.raw(v).numpy() for v in models.trainable_variables(trainer.task.model)]
  slots = [models.raw(v) for v in trainer.parts.optimizers["default"].optimizer.variables]
  return weights, [
    v._serialize_to_tensors()["VARIABLE_VALUE"].tensor.numpy() if hasattr(v, "saved_shape")
    else v.numpy() for v in slots
  ]  # fmt: skip


def equal(one, other, atol):
  for some, others in zip(one, other, strict=True):
    for a, b in zip(some, others, strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.fast(replicas=[3])
def test_each_replica_keeps_its_part_of_the_state(library, replicas, mirrored):
  trainer = trainer_of(mirrored(replicas), library, shard_optimizer_state=True)
  sizes = []
  for replica in range(replicas):
    slots = [models.raw(v) for v in trainer.parts.optimizers["default"].optimizer.variables]
    copies = [trainer.strategy.experimental_local_results(v)[replica] for v in slots]
    assert {c.device[-5:] for c in copies} == {f"CPU:{replica}"}
    sizes.append(sum(c.shape.num_elements() for c in copies if c.shape.rank))
  assert max(sizes) == min(sizes)
  assert 0 <= sizes[0] - 2 * (LARGE + SMALL) / replicas <= 2 * 3 * 2  # 3 pieces, rounded up


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.parametrize(
  ("first", "then"),
  [
    ((3, True), (2, True)),
    ((2, True), (3, False)),
    ((2, False), (4, True)),
    ((3, True), (1, True)),
  ],
)
@pytest.mark.fast(library=["tf_keras"])
def test_a_checkpoint_fits_other_replicas_sharded_or_not(first, then, library, mirrored, tmp_path):
  def made(place, folder):
    replicas, shard = place
    trainer = trainer_of(mirrored(replicas), library, shard_optimizer_state=shard)
    options = {"directory": str(tmp_path / folder), "experiment": {"task": "t"}}
    return trainer, CheckpointManager(trainer=trainer, **options)

  trainer, manager = made(first, "one")
  trainer.train(tf.constant(3))
  manager.save()
  manager.wait()
  other, reader = made(then, "one")
  path = reader.restore_or_initialize()
  assert path.endswith("ckpt-3")
  sizes = [np.prod(shape, dtype=int) for _, shape in tf.train.list_variables(path)]
  assert sizes.count(INPUTS * 130) == 3  # a kernel, its mean and its square
  equal(whole_state(trainer), whole_state(other), atol=0)
  assert any(np.abs(slot).max() > 0 for slot in whole_state(other)[1] if slot.ndim == 2)
  trainer.train(tf.constant(3))
  other.train(tf.constant(3))
  equal(whole_state(trainer), whole_state(other), atol=3e-6)


def test_a_gathering_that_gives_wrong_values_is_refused(mirrored, monkeypatch):
  wrong = sharding._all_gather
  monkeypatch.setattr(sharding, "_all_gather", lambda own: wrong(own)[::-1])
  with pytest.raises(ConfigError, match=r"gathering over 2 replicas is wrong: expected \[0.0, 1.0"):
    trainer_of(mirrored(2), shard_optimizer_state=True)


def central(mirrored):
  return tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


@pytest.mark.parametrize(
  ("options", "line"),
  [
    ({"optimizer": keras.optimizers.Adafactor}, "optimizer 'default', a Adafactor, is not known"),
    ({"optimizer": lambda: keras.optimizers.Adam(clipnorm=1.0)}, "use SGD, Adam, .* clipnorm"),
    ({"task": Network(constraint=keras.constraints.NonNeg())}, "'sequential.*kernel' has a constr"),
    ({"strategy": central}, "with CentralStorageStrategy; it needs mirrored or multi_worker_mirr"),
  ],
)
def test_what_cannot_be_sharded_is_one_line(options, line, mirrored):
  strategy = options.pop("strategy", lambda make: make(2))(mirrored)
  with pytest.raises(ConfigError, match=line) as error:
    trainer_of(strategy, shard_optimizer_state=True, **options)
  assert "Trainer.shard_optimizer_state=True" in str(error.value)


def test_a_single_replica_keeps_everything(mirrored):
  trainer = trainer_of(mirrored(1), shard_optimizer_state=True)
  assert not isinstance(trainer.parts.optimizers["default"].fusion, sharding.ShardedFusion)
