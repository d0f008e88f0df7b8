"""A task with one planted example that makes its loss, or one variable's gradient, not finite."""

import keras
import numpy as np
import runs
import tensorflow as tf
from toys import KERAS

import loopwright
from loopwright import ArraySource, Loss, StreamSource, Task
from loopwright.graphs import randomness
from loopwright.inputs import datasets

EXAMPLES, BATCH, SEED = 96, 8, 3
LOSSES = ("loss", "layer")
VARIABLES = (
  "hidden/kernel", "hidden/bias", "norm/gamma", "norm/beta", "output/kernel", "output/bias",
)  # fmt: skip
WHERE = (*LOSSES, *VARIABLES)


@tf.custom_gradient
def poisoned(variable, guilty):
  """Returns zero; the gradient's first element is infinite where `guilty`, all others are zero."""

  def gradient(upstream):
    first = tf.where(guilty, np.inf, 0.0)
    flat = tf.pad(first[None], [[0, variable.shape.num_elements() - 1]])
    return tf.reshape(flat, variable.shape), None

  return tf.zeros([]), gradient


@loopwright.register
class Planted(Task):
  """Regression by a small network with batch normalisation and dropout.

  `where` is "loss" (nan for the one example, all gradients finite), "layer" (the example has a
  negative number under a logarithm) or the variable whose gradient is infinite.
  """

  def __init__(
    self, *, example: int = -1, where: str = "loss", stream: bool = False, library: str = "keras"
  ):
    self.example, self.where, self.library, self._stream = example, where, library, stream

  def build_model(self):
    library = KERAS[self.library]
    layers = library.layers

    class Logarithm(layers.Layer):
      def call(self, inputs):
        return tf.math.log(inputs)

    x, scale = library.Input([4], name="x"), library.Input([], name="scale")
    y = layers.Dense(8, activation="tanh", name="hidden")(x)
    y = layers.BatchNormalization(momentum=0.9, name="norm")(y)
    y = layers.Dense(1, name="output")(layers.Dropout(0.25)(y))
    return library.Model([x, scale], y[:, 0] + Logarithm(name="root")(scale))

  def source(self, split):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[EXAMPLES, 4]).astype(np.float32)
    scale = np.ones([EXAMPLES], np.float32)
    if self.where == "layer" and self.example >= 0:
      scale[self.example] = -1.0
    features = {"x": x, "y": np.sin(x.sum(1)), "scale": scale}
    if self._stream:
      return StreamSource(dataset=tf.data.Dataset.from_tensor_slices(features))
    return ArraySource(features=features)

  def forward(self, batch, training):
    return self.model([batch["x"], batch["scale"]], training=training)

  def loss(self, outputs, batch):
    guilty = batch["example_id"] == self.example
    losses = tf.square(outputs - batch["y"])
    if self.where == "loss":
      losses = tf.where(guilty, np.nan, losses)
    loss = Loss.from_examples(losses, batch["weight"])
    return loss if self.where in LOSSES else self.with_poison(loss, tf.reduce_any(guilty))

  def with_poison(self, loss, guilty):
    [variable] = [v for v in self.model.trainable_variables if v.path == self.where]
    return Loss(loss.total + poisoned(tf.convert_to_tensor(variable), guilty), loss.weight)


def example_at(*, step, replica, row, replicas, micro_batches=1):
  """The id of one row of one replica's part of a step's batch (from 1); negative for padding."""
  batches = datasets.train_dataset(
    ArraySource(features={"x": np.zeros([EXAMPLES], np.float32)}), global_batch_size=BATCH,
    pad_multiple=replicas * micro_batches, seed=SEED, position=(step - 1) * BATCH,
  )  # fmt: skip
  ids = next(batches.as_numpy_iterator())["example_id"]
  return int(ids.reshape([replicas, -1])[replica, row])


def make_trainer(strategy, task, **options):
  """Returns a trainer, from the same initial weights each time."""
  keras.backend.clear_session(free_memory=False)  # or names would count up
  randomness.seed_everything(1)
  given = {"optimizer": KERAS[task.library].optimizers.Adam, "ema_decay": 0.9, **options}
  return runs.make_trainer(task, strategy, batch=BATCH, data={"seed": SEED}, seed=SEED, **given)
