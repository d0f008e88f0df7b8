"""Objectives and states that are odd, mistaken or right; test_verify_odd.py says which."""

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects.small import FEATURES, Small, data
from loopwright.graphs.randomness import draw_each, example_seeds
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss

# ---- Objectives without a gradient, with a bound, of data that the step collects: right


class Evolution(Small):
  """Evolution strategies: perturbations of the weights, the same on all replicas."""

  def hidden(self):
    return [keras.layers.Dense(12, activation="tanh")]

  def score(self, batch):
    wrong = tf.cast(tf.abs(self.forward(batch, True) - batch["y"]) > 0.5, tf.float32)
    errors = self.errors(self.forward(batch, True), batch)
    return tf.reduce_sum((wrong + errors) * batch["weight"])

  def train_step(self, step, batch):
    variables, weight = step.variables(), tf.reduce_sum(batch["weight"])
    totals = [tf.zeros(v.shape) for v in variables]
    for pair in range(3):
      seed = tf.cast(step.number, tf.int32)
      noise = [
        tf.random.stateless_normal(v.shape, tf.stack([seed, 100 * pair + i]))
        for i, v in enumerate(variables)
      ]
      scores = []
      for sign in (0.1, -0.1):
        with step.perturbed(variables, [sign * each for each in noise]):
          scores.append(self.score(batch))
      slope = (scores[0] - scores[1]) / 0.6
      totals = [total + slope * each for total, each in zip(totals, noise, strict=True)]
    gradients, loss = step.all_reduce(totals, Loss(self.score(batch), weight))
    gradients = self.means(step, gradients, loss)
    finite, norm = step.check(gradients)
    step.apply(step.clip(gradients, norm), finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)

  def means(self, step, gradients, loss):
    return [tf.math.divide_no_nan(each, loss.weight) for each in gradients]


class EvolutionWithoutScale(Evolution):
  """As above, by the framework's own mean, which a loss scale does not allow here."""

  def means(self, step, gradients, loss):
    return step.unscale(gradients, loss)


class ScoreMatching(Small):
  """An energy of which the loss has the derivative alone: its last bias has no gradient."""

  def forward(self, batch, training):
    x = batch["x"]
    with tf.GradientTape() as tape:
      tape.watch(x)
      energy = tf.reduce_sum(self.model(x, training=training))
    return tape.gradient(energy, x)[:, 0]


class EvolutionOfRows(Evolution):
  """Mistaken: each replica draws the same noise for its rows, of which one replica has twice."""

  def score(self, batch):
    noise = tf.random.stateless_normal(batch["x"].shape, [3, 5 + self.number])
    return super().score({**batch, "x": batch["x"] + noise})

  def train_step(self, step, batch):
    self.number = tf.cast(step.number, tf.int32)
    super().train_step(step, batch)


class Surrogate(Small):
  """A clipped surrogate (PPO): the old log-probability is the network's own, stopped."""

  def build_model(self):
    return network([FEATURES], keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3))

  def forward(self, batch, training):
    return tf.nn.log_softmax(self.model(batch["x"], training=training))[:, 1]

  def old(self, outputs, batch):
    return tf.stop_gradient(outputs)

  def errors(self, outputs, batch):
    ratio, gain = tf.exp(outputs - self.old(outputs, batch)), batch["y"]
    return -tf.minimum(ratio * gain, tf.clip_by_value(ratio, 0.8, 1.2) * gain)

  def metrics(self, outputs, batch):
    return {}


class OldSurrogate(Surrogate):
  """As above, with the log-probabilities of the policy that has acted, among the data."""

  def source(self, split):
    rows = data(seed=0 if split == "train" else 1)
    return ArraySource(features={**rows, "old": np.full(len(rows["y"]), -1.1, np.float32)})

  def old(self, outputs, batch):
    return batch["old"]


class Collected(Small):
  """Each row draws a place in a ring of what the step collects; the features become an index."""

  def build_model(self):
    ring = tf.Variable(data()["x"][:32], trainable=False, name="ring")
    return {"net": network([FEATURES], keras.layers.Dense(1)), "ring": ring}

  def source(self, split):
    rng = np.random.default_rng(len(split))
    return ArraySource(features={"u": rng.random([40, 1]).astype(np.float32)})

  def preprocess(self, batch, training):
    seeds = example_seeds(batch, training)
    return {**batch, "u": draw_each(tf.random.stateless_uniform, seeds, [1])}

  def forward(self, batch, training):
    place = tf.cast(batch["u"][:, 0] * 32.0, tf.int32)
    states = tf.gather(tf.convert_to_tensor(self.model["ring"]), place)
    return self.model["net"](states)[:, 0] - tf.reduce_sum(states, axis=1)

  def errors(self, outputs, batch):
    return tf.square(outputs)

  def metrics(self, outputs, batch):
    return {}

  def train_step(self, step, batch):
    step.update(lambda part: self.training_loss(step, part), batch)
    ring = tf.convert_to_tensor(self.model["ring"])
    seed = tf.stack([tf.cast(step.number, tf.int32), 77])
    new = 0.9 * ring[-1:] + tf.random.stateless_normal([1, FEATURES], seed)
    step.assign(self.model["ring"], tf.concat([ring[1:], new], axis=0))


# ---- Variables that a step moves twice


class SharedByTwo(Small):
  """Two optimizers whose lists both have the body."""

  names = ("a", "b")

  def build_model(self):
    parts = {name: network([4], keras.layers.Dense(1)) for name in self.names}
    return {"body": network([FEATURES], keras.layers.Dense(4, "tanh")), **parts}

  def variables_of(self, optimizer):
    return [*self.model["body"].trainable_variables, *self.model[optimizer].trainable_variables]

  def hidden_of(self, batch, name):
    return self.model["body"](batch["x"])

  def part_loss(self, batch, name):
    outputs = self.model[name](self.hidden_of(batch, name))[:, 0]
    target = batch["y"] if name == "a" else tf.reduce_sum(batch["x"], axis=1)
    return Loss.from_examples(tf.square(outputs - target), batch["weight"])

  def when(self, step, number):
    return None

  def train_step(self, step, batch):
    for number, name in enumerate(self.names):
      loss = lambda part, name=name: self.part_loss(part, name)  # noqa: E731
      step.update(loss, batch, name, when=self.when(step, number))

  def eval_step(self, step, batch):
    step.log({"loss": tuple(self.part_loss(batch, "a"))})


def shared(**changes):
  return type("Shared", (SharedByTwo,), changes)


SharedByThree = shared(names=("a", "b", "c"))


class SharedScale(SharedByTwo):
  """Only a scale is in both lists."""

  def build_model(self):
    return {**super().build_model(), "scale": tf.Variable(tf.ones([4]), name="scale")}

  def variables_of(self, optimizer):
    body = self.model["body"].trainable_variables if optimizer == "a" else []
    return [*body, self.model["scale"], *self.model[optimizer].trainable_variables]

  def hidden_of(self, batch, name):
    return super().hidden_of(batch, name) * self.model["scale"]


class SharedByVerbs(SharedByTwo):
  """The verbs are written out, and both gradients are made before the first update."""

  def train_step(self, step, batch):
    made = {}
    for name in self.names:
      loss = lambda part, name=name: self.part_loss(part, name)  # noqa: E731
      made[name] = step.gradients(loss, batch, step.variables(name))
    for name, (gradients, local) in made.items():
      gradients, loss = step.all_reduce(gradients, local)
      gradients = step.unscale(gradients, loss)
      finite, norm = step.check(gradients)
      step.apply(step.clip(gradients, norm), finite & (loss.weight > 0), name)
      step.log_update(loss, finite, norm, name)


# Right: each step updates the body once.
TakeTurns = shared(when=lambda self, step, number: step.number % 2 == number)


class StopsAtBody(SharedByTwo):
  """Right: the second loss passes no gradient to the body."""

  def hidden_of(self, batch, name):
    hidden = super().hidden_of(batch, name)
    return hidden if name == "a" else tf.stop_gradient(hidden)


class TwoBodies(SharedByTwo):
  """Right: the bodies have equal names, and are two."""

  def build_model(self):
    return {**super().build_model(), "body of b": SharedByTwo.build_model(self)["body"]}

  def variables_of(self, optimizer):
    body = self.model["body" if optimizer == "a" else "body of b"]
    return [*body.trainable_variables, *self.model[optimizer].trainable_variables]

  def hidden_of(self, batch, name):
    return self.model["body" if name == "a" else "body of b"](batch["x"])


class BodyOfFirst(SharedByTwo):
  """Right: the second loss passes through the body, whose list is the first one's."""

  def variables_of(self, optimizer):
    body = self.model["body"].trainable_variables if optimizer == "a" else []
    return [*body, *self.model[optimizer].trainable_variables]


class UpdatedTwice(SharedByTwo):
  """Right: one optimizer makes two updates."""

  names = ("a",)

  def train_step(self, step, batch):
    super().train_step(step, batch)
    super().train_step(step, batch)


# ---- Averages that an optimizer trains, too


class KeyTrained(Small):
  """A key encoder follows the query encoder; the loss trains it, too."""

  def build_model(self):
    layers = lambda: [keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)]  # noqa: E731
    model = {name: network([FEATURES], *layers()) for name in ("default", "key")}
    model["key"].set_weights(model["default"].get_weights())
    return model

  def variables_of(self, optimizer):
    return [v for part in self.model.values() for v in part.trainable_variables]

  def training_loss(self, step, batch):
    query, key = self.model["default"](batch["x"]), self.model["key"](1.2 * batch["x"] - 0.1)
    apart = tf.square(tf.reduce_sum(query * self.seen(key), axis=1) - batch["y"])
    return Loss.from_examples(apart, batch["weight"])

  def seen(self, target):
    return target

  def follow(self, slow, fast):
    return 0.99 * slow + 0.01 * fast

  def train_step(self, step, batch):
    step.update(lambda part: self.training_loss(step, part), batch)
    pairs = zip(self.model["key"].weights, self.model["default"].weights, strict=True)
    for slow, fast in pairs:
      step.assign(slow, self.follow(slow, fast))

  def eval_step(self, step, batch):
    step.log({"loss": tuple(self.training_loss(step, batch))})


class TeacherTrained(KeyTrained):
  """A mean teacher, to whose outputs the student's are pulled."""

  def training_loss(self, step, batch):
    student, teacher = (part(batch["x"]) for part in self.model.values())
    errors = tf.square(tf.reduce_sum(student, axis=1) - batch["y"])
    errors += tf.reduce_sum(tf.square(student - self.seen(teacher)), axis=1)
    return Loss.from_examples(errors, batch["weight"])


class TargetTrained(KeyTrained):
  """A target network by which the other one is bootstrapped; it moves by a fifth."""

  def training_loss(self, step, batch):
    value, later = (tf.reduce_sum(part(batch["x"]), axis=1) for part in self.model.values())
    apart = tf.square(value - batch["y"] - 0.5 * self.seen(later))
    return Loss.from_examples(apart, batch["weight"])

  def follow(self, slow, fast):
    return slow + 0.2 * (fast - slow)


class TrainedBySecond(TeacherTrained):
  """The second optimizer has the average."""

  def variables_of(self, optimizer):
    return self.model["default" if optimizer == "default" else "key"].trainable_variables

  def train_step(self, step, batch):
    step.update(lambda part: self.training_loss(step, part), batch, "second")
    super().train_step(step, batch)


class TrainedLast(TargetTrained):
  """Only the last layer of the target is trained."""

  def variables_of(self, optimizer):
    return [*self.model["default"].trainable_variables, *self.model["key"].weights[2:]]


class KeyStopped(KeyTrained):
  """Right: it only follows."""

  def seen(self, target):
    return tf.stop_gradient(target)

  def variables_of(self, optimizer):
    return self.model["default"].trainable_variables


class Lookahead(TeacherTrained):
  """Right: the weights that are trained are pulled back to slow ones, which no loss trains."""

  variables_of = KeyStopped.variables_of
  seen = KeyStopped.seen

  def train_step(self, step, batch):
    step.update(lambda part: self.training_loss(step, part), batch)
    pairs = zip(self.model["key"].weights, self.model["default"].weights, strict=True)
    for slow, fast in pairs:
      middle = 0.5 * slow + 0.5 * fast
      step.assign(slow, middle)
      step.assign(fast, middle)


class Mutual(TeacherTrained):
  """Right: two students, each pulled to the other."""

  def train_step(self, step, batch):
    step.update(lambda part: self.training_loss(step, part), batch)
    pairs = zip(self.model["key"].weights, self.model["default"].weights, strict=True)
    for one, other in pairs:
      step.assign(one, 0.9 * one + 0.1 * other)
      step.assign(other, 0.9 * other + 0.1 * one)


def followed(by):
  return type("Followed", (TeacherTrained,), {"follow": lambda self, slow, fast: by(slow)})


# Right: what is trained is kept within bounds, or decays by itself.
ClipsWeights = followed(lambda slow: tf.clip_by_value(slow, -0.3, 0.3))
Shrinks = followed(lambda slow: 0.99 * tf.convert_to_tensor(slow))


# ---- Masks of Keras


class Positions(keras.layers.Layer):
  """Adds a place to each word; knows nothing of masks."""

  def build(self, shape):
    self.table = self.add_weight(shape=[shape[1], shape[2]], name="table")

  def call(self, x):
    return x + self.table


class PositionsOfMasked(Positions):
  def __init__(self):
    super().__init__()
    self.supports_masking = True


class LostBeforePool(Small):
  """Words of several lengths, of which a layer loses the mask; a later one would use it."""

  padded = True

  def between(self):
    return [Positions(), keras.layers.GlobalAveragePooling1D()]

  def build_model(self):
    words = keras.layers.Embedding(20, 5, mask_zero=True)
    return network([6], words, *self.between(), keras.layers.Dense(1))

  def source(self, split):
    rng = np.random.default_rng(len(split))
    words = rng.integers(1, 20, [40, 6]).astype(np.int32)
    places = np.arange(6) < rng.integers(3, 7, [40, 1])
    y = (words[:, 0] > 10).astype(np.float32)
    return ArraySource(features={"x": words * (places if self.padded else 1), "y": y})


def lost(*between):
  made = lambda self: [layer() for layer in between]  # noqa: E731
  return type("Lost", (LostBeforePool,), {"between": made})


layers = keras.layers
pool = layers.GlobalAveragePooling1D
LostBeforeRecurrent = lost(Positions, lambda: layers.GRU(4))
LostByConvolution = lost(lambda: layers.Conv1D(4, 3, padding="same"), pool)
# Layers between pass on what they have, which is no mask any more.
LostEarlier = lost(Positions, lambda: layers.Dense(5), layers.LayerNormalization, pool)
LostBothWays = lost(Positions, lambda: layers.Bidirectional(layers.SimpleRNN(3)))
# Right: the mask is passed on; no word is padding; what follows has no use for a mask.
Kept = lost(PositionsOfMasked, pool)
NoPadding = type("NoPadding", (LostBeforePool,), {"padded": False})
OfTheLargest = lost(Positions, layers.GlobalMaxPooling1D)
Flat = lost(Positions, layers.Flatten)


class Given(LostBeforePool):
  """Right: the mask is given to the layer that uses it."""

  def build_model(self):
    ids = keras.Input([6], dtype="int32")
    places = Positions()(keras.layers.Embedding(20, 5, mask_zero=True)(ids))
    mean = keras.layers.GlobalAveragePooling1D()(places, mask=keras.ops.not_equal(ids, 0))
    return keras.Model(ids, keras.layers.Dense(1)(mean))


# ---- Weights of classes


class WholeTable(Small):
  """Weights that balance the classes, divided as whole numbers: the common class gets 0."""

  def labels(self, split):
    return np.random.default_rng(len(split)).choice(4, 160, p=[0.55, 0.25, 0.15, 0.05])

  def balance(self):
    return self.of_counts(np.bincount(self.labels("train"), minlength=4)).astype(np.float32)

  def of_counts(self, counts):
    return counts.sum() // (4 * counts)

  def build_model(self):
    return network([FEATURES], keras.layers.Dense(4))

  def features(self, split):
    y = self.labels(split)
    x = np.random.default_rng(7 + len(split)).normal(size=[160, FEATURES]) + np.eye(4)[y, :FEATURES]
    return {"x": x.astype(np.float32), "y": y.astype(np.int32)}

  def source(self, split):
    return ArraySource(features=self.features(split))

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def errors(self, outputs, batch):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], outputs)

  def of_rows(self, batch):
    return tf.gather(self.balance(), batch["y"])

  def loss(self, outputs, batch):
    return Loss.from_examples(self.errors(outputs, batch) * self.of_rows(batch), batch["weight"])

  def metrics(self, outputs, batch):
    return {}


class WholeInGraph(WholeTable):
  def of_rows(self, batch):
    counts = tf.constant(np.bincount(self.labels("train"), minlength=4))
    return tf.cast(160 // (4 * tf.gather(counts, batch["y"])), tf.float32)


class WholeInSource(WholeTable):
  def source(self, split):
    features = self.features(split)
    return ArraySource(features={**features, "weight": self.balance()[features["y"]]})

  def of_rows(self, batch):
    return tf.ones_like(batch["weight"])


class WholeInPreprocess(WholeTable):
  def preprocess(self, batch, training):
    return {**batch, "weight": tf.gather(self.balance(), batch["y"]) * batch["weight"]}

  def of_rows(self, batch):
    return tf.ones_like(batch["weight"])


def balanced(by):
  return type("Balances", (WholeTable,), {"of_counts": lambda self, counts: by(counts)})


# Right: no whole numbers; some that somebody has chosen; each class counts; rounded up; class 0
# stands for no label.
Balanced = balanced(lambda counts: counts.sum() / (4 * counts))
IgnoresCommon = balanced(lambda counts: np.array([0, 1, 2, 4]))
AtLeastOnce = balanced(lambda counts: np.maximum(counts.sum() // (4 * counts), 1))
RoundedUp = balanced(lambda counts: -(-counts.sum() // (4 * counts)))
Unlabelled = balanced(lambda counts: np.array([0, 1, 1, 1]))
