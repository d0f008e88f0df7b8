"""The smallest task: one weight, losses linear in it, so that an example's gradient is its `x`."""

import keras
import numpy as np
import tensorflow as tf

from loopwright import metrics, task, trainer
from loopwright.optimizers import loss_scale

GRADIENTS = [1.0, 2.0, 3.0, 6.0]
"""Of four examples; their mean is 3. Two replicas hold 1, 2 and 3, 6."""


class Slope(task.Task):
  """Minimises the mean of weight * x: SGD with a rate of 1 moves the weight to minus the mean."""

  def build_model(self):
    return model()

  def forward(self, batch, training):
    return self.model(batch["x"][:, None])[:, 0]

  def loss(self, outputs, batch):
    return metrics.Loss.from_examples(outputs, batch["weight"])

  def metrics(self, outputs, batch):
    return {"mean_x": metrics.weighted_sum(batch["x"], batch["weight"])}


def model():
  """A Keras 3 model of one weight, at zero."""
  dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
  return keras.Sequential([keras.Input([1]), dense])


def sgd(**options):
  return keras.optimizers.SGD(1.0, **options)


def batches(x, weight=None):
  """A dataset of one global batch again and again."""
  weight = np.ones(len(x)) if weight is None else weight
  rows = {"x": np.asarray(x, np.float32), "weight": np.asarray(weight, np.float32)}
  return tf.data.Dataset.from_tensors(rows).repeat()


def train(strategy, x=GRADIENTS, *, steps=1, optimizer=sgd, scale=loss_scale.none, **options):
  """Trains by the framework; returns (its trainer, what `train` returned)."""
  run = trainer.Trainer(
    task=Slope(),
    strategy=strategy,
    dataset_fn=lambda position: batches(x),
    global_batch_size=len(x),
    optimizer=optimizer,
    loss_scale=scale,
    **options,
  )
  return run, run.train(tf.constant(steps))


def weight_after(*arguments, **options):
  """Trains by the framework; returns the weight."""
  run, _ = train(*arguments, **options)
  return value_of(run.task.model)


def value_of(trained):
  [kernel] = trained.trainable_variables
  return float(kernel.numpy()[0, 0])


def per_replica(strategy, values):
  """One value a replica."""
  return strategy.experimental_distribute_values_from_function(
    lambda context: tf.constant(values[context.replica_id_in_sync_group])
  )


def apply_by_hand(strategy, optimizer, gradients):
  """One compiled step as one would write it, a gradient a replica; returns the weight."""
  with strategy.scope():
    trained, made = model(), optimizer()
    made.build(trained.trainable_variables)

  @tf.function
  def step(given):
    strategy.run(lambda g: made.apply([g[None, None]], trained.trainable_variables), args=(given,))

  step(per_replica(strategy, gradients))
  return value_of(trained)
