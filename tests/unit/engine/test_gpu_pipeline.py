"""Steps whose batches are read and sent before: the same numbers as when each reads its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_trainer

from loopwright.distribution import placement
from loopwright.engine import gpu_pipeline
from loopwright.graphs import xla
from loopwright.graphs.operations import operations
from loopwright.optimizers import schedules
from loopwright.strategies import local

ROWS, BATCH = 24, 4
RNG = np.random.default_rng(0)
LOOPS = (1, 2, 6)


class Kinds(toys.Regression):
  """Features of all kinds, random numbers, and a loss of which each step has its own."""

  features = {
    "x": RNG.normal(size=[ROWS, 3]).astype(np.float32),
    "pixels": RNG.integers(0, 255, [ROWS, 3]).astype(np.uint8),
    "small": RNG.integers(-9, 9, [ROWS]).astype(np.int32),
    "large": RNG.integers(-(2**40), 2**40, [ROWS, 2]).astype(np.int64),
    "flag": RNG.integers(0, 2, [ROWS]).astype(bool),
  }

  def build_model(self):
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2), keras.layers.Dropout(0.5)])

  def forward(self, batch, training):
    outputs = self.model(batch["x"] + tf.cast(batch["pixels"], tf.float32) / 255, training=training)
    return outputs * tf.where(batch["flag"], 1.0, 2.0)[:, None]

  def losses(self, outputs, batch):
    far = outputs - tf.cast(batch["large"], tf.float32) / 2**40
    return tf.reduce_sum(far**2, 1) + tf.cast(batch["small"], tf.float32)


def trained(**options):
  """The results of some loops, and the weights after them."""
  keras.utils.set_random_seed(1)
  trainer = make_trainer(
    Kinds(),
    local.one_device(device="CPU:0"),
    batch=BATCH,
    optimizer=lambda: keras.optimizers.Adam(schedules.linear_warmup(warmup_steps=5, after=0.1)),
    **options,
  )
  results = [trainer.train(tf.constant(steps)) for steps in LOOPS]
  assert int(trainer.position.numpy()) == BATCH * sum(LOOPS)
  found = [(each["loss"], each["learning_rate"], each["gradient_norm"]) for each in results]
  return found, [w.numpy() for w in trainer.task.model.trainable_variables], trainer.compiled


@pytest.mark.parametrize("several", [1, 2, 4])
def test_numbers_are_those_of_steps_that_read_their_own_batch(monkeypatch, several):
  monkeypatch.setattr(placement.Placement, "on_gpus", True)
  begun = []
  made = gpu_pipeline.Ahead.run
  monkeypatch.setattr(gpu_pipeline.Ahead, "run", lambda *given: (begun.append(1), made(*given)))
  found, weights, compiled = trained(jit_compile=True, steps_per_program=several)
  monkeypatch.setattr(gpu_pipeline, "of", lambda *_: None)
  expected, others, _ = trained(jit_compile=True)
  assert begun
  assert compiled == f"{'the step' if several == 1 else f'{several} steps'} as one program"
  assert found == expected
  for one, other in zip(weights, others, strict=True):
    np.testing.assert_array_equal(one, other)


class Slow(toys.Regression):
  """Assigns two variables in each step, and one in each second."""

  features = {"x": Kinds.features["x"], "y": Kinds.features["x"][:, 0]}

  def build_model(self):
    found = {name: tf.Variable(0.0, trainable=False, name=name) for name in "abc"}
    return {"net": toys.linear([0.0] * 3), **found}

  def forward(self, batch, training):
    return self.model["net"](batch["x"], training=training)[:, 0]

  def train_step(self, step, batch):
    super().train_step(step, batch)
    a, b, c = (self.model[name] for name in "abc")
    step.assign(a, a / 2 + 1)
    step.assign(b, b + 2)
    step.assign(c, c + 3, when=step.number % 2 == 1)


@pytest.mark.parametrize(("traced_for", "branches"), [("GPU", 0), ("", 2)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_assignments_take_no_branch_in_gpu_programs_and_one_for_each_condition_elsewhere(
  monkeypatch, mirrored, traced_for, branches, replicas
):
  strategy = local.one_device(device="CPU:0") if replicas == 1 else mirrored(replicas)
  monkeypatch.setattr(xla, "traced_for", lambda: traced_for)
  sgd = {"optimizer": lambda: keras.optimizers.SGD(0.1), "jit_compile": False}
  trainer = make_trainer(Slow(), strategy, batch=BATCH, **sgd)
  trainer.train(tf.constant(3))
  found = [float(trainer.task.model[name].numpy()) for name in "abc"]
  assert found == [1.75, 6.0, 3.0]
  assert [op.type for op in operations(trainer.graph())].count("If") == branches
