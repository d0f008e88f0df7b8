"""A small task in which all that a checkpoint must hold is at work, and what makes its trainer.

Dropout, augmentation by the examples' seeds, skipped steps under a dynamic loss scale, a moving
average, and in the model itself the stream of example ids that it was trained on.
"""

import keras
import numpy as np
import tensorflow as tf
from toys import KERAS

from loopwright import metrics, task
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.optimizers import loss_scale
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.trainer import Trainer

EXAMPLES, BATCH, OVERFLOW_EVERY, SEED = 30, 12, 17, 5


class Stream(tf.Module):
  """The ids of all examples trained on, in order."""

  def __init__(self, *, capacity=200):
    super().__init__()
    first = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
    self.ids = tf.Variable(tf.fill([capacity], tf.constant(-1, tf.int64)), **first)
    self.count = tf.Variable(0, dtype=tf.int32, **first)

  def append(self, ids):
    """Adds a global batch (replica context)."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 1:
      ids = context.all_gather(ids, axis=0)
    ids = tf.boolean_mask(ids, ids >= 0)
    places = self.count + tf.range(tf.size(ids))
    self.ids.assign(tf.tensor_scatter_nd_update(self.ids, places[:, None], ids))
    self.count.assign(self.count + tf.size(ids))

  def seen(self):
    return self.ids.numpy()[: self.count.numpy()].tolist()


@tf.custom_gradient
def overflowing(value, where):
  """Returns `value`; its gradient is infinite where `where`."""
  return tf.identity(value), lambda upstream: (tf.where(where, np.inf, upstream), None)


class Everything(task.Task):
  """Regression by a small MLP of either Keras generation."""

  def __init__(self, *, library="keras", dropout=0.5, units=8, normalized=False):
    self._keras, self._dropout, self._units = KERAS[library], dropout, units
    self._normalized = normalized

  def build_model(self):
    layers = self._keras.layers
    network = self._keras.Sequential(
      [
        self._keras.Input([5]),
        layers.Dense(self._units, activation="relu", name="hidden"),
        *([layers.BatchNormalization(momentum=0.9)] if self._normalized else []),
        layers.Dropout(self._dropout),
        layers.Dense(1, name="output"),
      ]
    )
    return {"network": network, "stream": Stream()}

  def source(self, split):
    rng = np.random.default_rng(split == "train")
    x = rng.normal(size=[EXAMPLES, 5]).astype(np.float32)
    return ArraySource(features={"x": x, "y": np.sin(x.sum(1))})

  def preprocess(self, batch, training):
    if not training:
      return batch
    noise = tf.cast(batch["seed"] % 1000, tf.float32) / 1000
    return {**batch, "x": batch["x"] + 0.1 * noise[:, :1]}

  def forward(self, batch, training):
    return self.model["network"](batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    outputs = overflowing(outputs, batch["example_id"] % OVERFLOW_EVERY == 0)
    return metrics.Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

  def train_step(self, step, batch):
    super().train_step(step, batch)
    self.model["stream"].append(batch["example_id"])


class Other(Everything):
  """Another task with the same model."""


def make_trainer(strategy, *, made=None, library="keras", batch=BATCH, weights_seed=5, **options):
  """Returns a fresh trainer."""
  made = made or Everything(library=library)
  keras.utils.set_random_seed(weights_seed)
  return Trainer(
    task=made,
    strategy=strategy,
    dataset_fn=lambda position: dataset(made, batch, strategy.num_replicas_in_sync, position),
    global_batch_size=batch,
    seed=SEED,
    **{
      "optimizer": KERAS[library].optimizers.Adam,
      "loss_scale": lambda: loss_scale.dynamic(initial=1024.0, growth_steps=3),
      "ema_decay": 0.8,
      **options,
    },
  )


def dataset(made, batch, replicas, position):
  return datasets.train_dataset(
    made.source("train"),
    global_batch_size=batch,
    pad_multiple=replicas,
    seed=SEED,
    position=position,
    preprocess=made.preprocess,
  )


def make_manager(trainer, directory, **options):
  experiment = {"task": type(trainer.task).__name__}
  return CheckpointManager(
    trainer=trainer, directory=str(directory), experiment=experiment, **options
  )


def train(trainer, steps):
  """Returns the loop's metrics that are no times."""
  metrics = trainer.train(tf.constant(steps))
  return {k: v for k, v in metrics.items() if k not in ("input_wait_s", "examples_per_second")}


def read(path):
  """Returns every value in a checkpoint, by key, but the graph of objects, which has names."""
  reader = tf.train.load_checkpoint(str(path))
  keys = reader.get_variable_to_shape_map().keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
  return {k: reader.get_tensor(k) for k in keys}


def differing(one, other):
  """The keys of two `read`s whose values are not equal to the bit."""
  bits = [
    {k: v if isinstance(v, bytes) else v.tobytes() for k, v in r.items()} for r in (one, other)
  ]
  return sorted(k for k in bits[0].keys() | bits[1].keys() if bits[0].get(k) != bits[1].get(k))
