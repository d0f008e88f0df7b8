"""Mistakes that people make with random numbers; see test_verify_randomness.py."""

import random

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects.right import CLASSES, Dropout, Normalised, Right
from defects.small import every_variable, planted

DEFECTS, defect = planted()
"""Of a task: check -> cause, what the first of them says, words of the line it names."""
OWN_STATE = {"repeats with the seed": "stateful random op"}
FROZEN = {"differs between steps": "np.random while tracing"}
AUGMENTS = {"augmentation repeats with the seed": "stateful random op"}
FROZEN_EPOCHS = {"augmentation differs between epochs": "np.random while tracing"}
FIXED_EPOCHS = {"augmentation differs between epochs": "a fixed seed"}
ONE_SEED = {"augmentation differs between examples": "one seed for the whole batch"}
EVALUATED = {"no augmentation in evaluation": "augmentation in evaluation"}
EQUAL = "equal examples of a batch come out equal (StatelessRandomUniformV2), and different in"


@defect(OWN_STATE, "again gives another update (RandomStandardNormal)", "tf.random.normal")
class StatefulNoise(Right):
  def forward(self, batch, training):
    x = batch["x"]
    if training:
      x += tf.random.normal(x.shape)
    return self.model(x, training=training)


@defect(OWN_STATE, "(RngReadAndSkip)", "self.generator.normal")
class OwnGenerator(Right):
  def build_model(self):
    self.generator = tf.random.Generator.from_seed(3)
    return super().build_model()

  def train_step(self, step, batch):
    noise = self.generator.normal(batch["x"].shape)
    step.update(lambda b: self.training_loss(step, b), {**batch, "x": batch["x"] + noise})


@defect(FROZEN, "in Python while the step was traced", "np.random.normal")
class NoiseOfNumPy(Right):
  def forward(self, batch, training):
    x = batch["x"]
    if training:
      x += np.random.normal(size=x.shape).astype(np.float32)
    return self.model(x, training=training)


@defect(FROZEN, "in Python while the step was traced", "sign * batch")
class CoinOfPython(Right):
  def train_step(self, step, batch):
    sign = 1.0 if random.random() < 0.5 else -1.0
    step.update(lambda b: self.training_loss(step, b), {**batch, "x": sign * batch["x"]})


@defect(
  {"differs between steps": "a fixed seed"},
  "steps draw the same numbers (StatelessRandomUniformV2)",
  "stateless_dropout",
)
class FixedSeed(Right):
  def forward(self, batch, training):
    x = batch["x"]
    if training:
      x = tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2])
    return self.model(x, training=training)


@defect(
  {"differs between replicas": "a seed without the replica"},
  "two replicas draw the same numbers on their rows",
  "stateless_normal",
)
class SeedOfTheStep(Right):
  def train_step(self, step, batch):
    seed = tf.stack([5, tf.cast(step.parts.global_step, tf.int32)])
    noise = tf.random.stateless_normal(batch["x"].shape, seed=seed)
    step.update(lambda b: self.training_loss(step, b), {**batch, "x": batch["x"] + noise})


@defect(
  {"dropout is active": "layer called without training"},
  "no layer draws in a training step, although the model has dropout",
  "self.model(",
)
class WithoutTraining(Dropout):
  def forward(self, batch, training):
    return self.model(batch["x"])


@defect(
  {"evaluation draws nothing": "dropout active in evaluation"},
  "for the same batch again",
  "training=True",
)
class AlwaysTraining(Dropout):
  def forward(self, batch, training):
    return self.model(batch["x"], training=True)


@defect(
  {"evaluation draws nothing": "evaluation depends on something else than its batch"},
  "for the same batch again",
  "def forward",
)
class CountsInEvaluation(Right):
  """It has no random layer, so dropout is not the cause."""

  def build_model(self):
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    seen = tf.Variable(0.0, trainable=False, aggregation=first, name="seen")
    return {"model": super().build_model(), "seen": seen}

  def forward(self, batch, training):
    if not training:
      self.model["seen"].assign_add(1.0)
    scale = 1.0 + tf.convert_to_tensor(self.model["seen"])
    return self.model["model"](batch["x"] * scale, training=training)


@defect(
  AUGMENTS,
  "'x' differs for the same examples with the same seeds (RandomUniform)",
  "tf.image.random_flip",
)
class StatefulFlip(Right):
  def preprocess(self, batch, training):
    x = batch["x"][:, None, :, None]
    if training:
      x = tf.image.random_flip_left_right(x)
    return {**batch, "x": x[:, 0, :, 0]}


@defect(AUGMENTS | EVALUATED, "'x' differs for the same examples with the same seeds", "self.flip(")
class LayerOfKeras(Right):
  def __init__(self):
    self.flip = keras.layers.RandomFlip("horizontal", seed=3)

  def preprocess(self, batch, training):
    return {**batch, "x": self.flip(batch["x"][:, None, :, None])[:, 0, :, 0]}


@defect(EVALUATED, "reads batch['seed']", 'batch["seed"]')
class SeedInEvaluation(Right):
  def preprocess(self, batch, training):
    shift = tf.cast(batch["seed"][:, :1] % 3, tf.float32) / 10
    return {**batch, "x": batch["x"] + shift}


@defect(FROZEN_EPOCHS, "in Python while preprocess() is traced", "default_rng()")
class AnotherGenerator(Right):
  def preprocess(self, batch, training):
    if training and np.random.default_rng().random() < 0.5:
      batch["x"] = -batch["x"]
    return batch


@defect(FIXED_EPOCHS, "drawn in all batches (StatelessRandomNormalV2)", "stateless_normal")
class FixedAugmentation(Right):
  def preprocess(self, batch, training):
    if training:
      noise = tf.random.stateless_normal(batch["x"].shape, seed=(1, 2))
      batch["x"] = batch["x"] + noise
    return batch


@defect(ONE_SEED, EQUAL, "stateless_uniform")
class OneBrightness(Right):
  def preprocess(self, batch, training):
    if training:
      brightness = tf.random.stateless_uniform([], batch["seed"][0], 0.8, 1.2)
      batch["x"] = batch["x"] * brightness
    return batch


@defect(ONE_SEED, EQUAL, "stateless_uniform")
class BrightnessOfTheStep(Right):
  def preprocess(self, batch, training):
    if training:
      seed = tf.stack([5, tf.cast(batch["step"][0], tf.int32)])
      batch["x"] = batch["x"] * tf.random.stateless_uniform([], seed, 0.8, 1.2)
    return batch


@defect(
  {"random numbers mix no rows": "examples that depend on one another"},
  "rows of weight 0 change the step (StatelessRandomUniformV2)",
  "stateless_uniform",
)
class MixesOwnRows(Right):
  """Mixup: with equal noise for all rows, the order is the identity."""

  def train_step(self, step, batch):
    order = tf.argsort(tf.random.stateless_uniform(batch["x"].shape[:1], step.seed()))
    mixed = 0.7 * batch["x"] + 0.3 * tf.gather(batch["x"], order)
    step.update(lambda b: self.training_loss(step, b), {**batch, "x": mixed})


@defect(
  {"batch norm is active": "layer called without training"},
  "a training step does not move the statistics of batch_normalization",
  "self.model(",
)
class NormalisesWithMovingAverages(Normalised):
  def forward(self, batch, training):
    return self.model(batch["x"])


# ---- Right ----


class FineTuned(Right):
  """Fine-tunes a body whose batch normalisation stays in evaluation mode, on purpose."""

  def build_model(self):
    layers = keras.layers
    body = network([6], layers.Dense(4), layers.BatchNormalization())
    return {"body": body, "head": network([4], layers.Dense(CLASSES))}

  variables_of = every_variable

  def forward(self, batch, training):
    return self.model["head"](self.model["body"](batch["x"], training=False), training=training)


class MixesAllRows(Right):
  """Mixup over all replicas, in an order equal on all of them, without padding."""

  def train_step(self, step, batch):
    x, weight = step.all_gather(batch["x"]), step.all_gather(batch["weight"])
    seed = tf.stack([3, tf.cast(step.number, tf.int32)])
    order = tf.argsort(tf.random.stateless_uniform(weight.shape, seed))
    rows = batch["x"].shape[0]
    first = tf.distribute.get_replica_context().replica_id_in_sync_group * rows
    other = order[first : first + rows]
    share = 0.3 * tf.sign(tf.gather(weight, other))[:, None]
    mixed = (1 - share) * batch["x"] + share * tf.gather(x, other)
    step.update(lambda b: self.training_loss(step, b), {**batch, "x": mixed})


class RandomFeatures(Right):
  """A fixed random projection, in preprocess() and in forward()."""

  def preprocess(self, batch, training):
    projection = tf.random.stateless_normal([6, 6], seed=(1, 2))
    return {**batch, "x": batch["x"] @ projection}

  def forward(self, batch, training):
    projection = tf.random.stateless_normal([6, 6], seed=(3, 4))
    return self.model(batch["x"] @ projection, training=training)


class NoiseOfExamples(Right):
  """Noise by the example's id, and by id and step."""

  def preprocess(self, batch, training):
    return {**batch, "x": batch["x"] + self._noise(batch["example_id"], 0)}

  def train_step(self, step, batch):
    noise = self._noise(batch["example_id"], step.parts.global_step)
    step.update(lambda b: self.training_loss(step, b), {**batch, "x": batch["x"] + noise})

  def _noise(self, ids, step):
    step = tf.cast(step, tf.int32)
    draw = lambda i: tf.random.stateless_normal([6], seed=tf.stack([i, step]))  # noqa: E731
    return tf.map_fn(draw, tf.cast(ids, tf.int32), fn_output_signature=tf.float32)


class SeededNumPyFunction(Right):
  """NumPy's global generator, seeded by each example's seed, while the pipeline runs."""

  def preprocess(self, batch, training):
    if not training:
      return batch

    def noisy(x, seeds):
      noise = np.empty_like(x)
      for row, seed in enumerate(seeds):
        np.random.seed(abs(int(seed[0])))
        noise[row] = np.random.normal(size=x.shape[1:])
      return x + noise

    x = tf.numpy_function(noisy, [batch["x"], batch["seed"]], tf.float32)
    return {**batch, "x": tf.ensure_shape(x, batch["x"].shape)}


class NoDropout(Dropout):
  """Dropout with a rate of 0."""

  rate = 0.0
