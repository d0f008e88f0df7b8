"""A user's file: a type checker must find what a line says is wrong, and nothing else.

mypy reads it in test_types.py; `uvx basedpyright tests/support/typing_mistakes.py` finds the same.
"""

import keras
import numpy as np
import tensorflow as tf

import loopwright as lw
from loopwright import Step
from loopwright.graphs.aliases import Batch, Structure
from loopwright.metrics import Metric


@lw.register
class Sound(lw.Task):
  def build_model(self) -> keras.Model:
    return keras.Sequential([keras.layers.Dense(1)])

  def source(self, split: str) -> lw.ArraySource:
    return lw.ArraySource(features={"x": np.zeros([4, 2]), "y": np.zeros([4])})

  def forward(self, batch: Batch, training: bool) -> Structure:
    return self.model(batch["x"], training=training)

  def loss(self, outputs: Structure, batch: Batch) -> lw.Loss:
    if split_by_hand := len(batch) > 3:
      return lw.Loss(tf.reduce_sum(outputs), 2.0 * split_by_hand)
    return lw.Loss.from_examples(np.ones([4]), batch["weight"])

  def metrics(self, outputs: Structure, batch: Batch) -> dict[str, Metric]:
    return {
      "hits": lw.weighted_sum(outputs, batch["weight"]),
      "share": (tf.constant(1.0), 2.0),
      "bins": lw.Sum(np.zeros([3])),
      "scores": lw.PerExample(outputs, [1.0, 1.0, 1.0, 0.0]),
    }

  def train_step(self, step: Step, batch: Batch) -> None:
    step.update(lambda part: self.training_loss(step, part), batch, when=step.number % 2 == 0)
    step.assign(self.model.variables[0], 0.0)
    step.log({"mean": (1.0, 2)})


class Wrong(lw.Task):
  def source(self, split: int) -> lw.ArraySource:  # wrong: a split is a str
    return lw.ArraySource(x=3)  # wrong: features=

  def loss(self, outputs: Structure, batch: Batch) -> float:  # wrong: a Loss
    return 0.5

  def metrics(self, outputs: Structure, batch: Batch) -> dict[str, float]:  # wrong: pairs
    return {}

  def train_step(self, step: Step, batch: Batch) -> None:
    step.updaet(lambda part: self.training_loss(step, part), batch)  # wrong: update
    step.update(self.loss, batch)  # wrong: takes outputs, too
    step.log({"text": "fine"})  # wrong: no pair
    step.assign(self.model.variables[0], None)  # wrong: no value
    step.gradients(batch, self.training_loss)  # wrong: three arguments, in another order


def drive(trainer: lw.Trainer, task: lw.Task) -> None:
  lw.Loss("x", 1.0)  # wrong: no number
  lw.Loss(1.0, None)  # wrong: no weight
  lw.Loss.from_examples("x")  # wrong: no values
  lw.Sum(None)  # wrong: no tensor
  trainer.use(clip_norm=0.5, observers=())
  trainer.use(clip_nrom=0.5)  # wrong: clip_norm
  trainer.use(clip_norm="a lot")  # wrong: a number
  lw.run(task=task, train_steps=10, global_batch_size=4, model_dir="m", steps_per_loop=5)
  lw.run(task=task, train_steps="10", model_dir="m")  # wrong: an int
  lw.run(task=task, train_steps=10, model_dir="m", step_per_loop=5)  # wrong: steps_per_loop
  lw.run(task=task, train_steps=10, model_dir="m", precision="float16")  # wrong: mixed_float16
