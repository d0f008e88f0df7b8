"""Tasks as somebody writes them who does not know the framework: first mistaken, then right ones.

`DEFECTS` and `RIGHT` say what verification must find; see test_verify_newcomers.py.
"""

import time

import keras
import numpy as np
import tensorflow as tf

from defects import kinds
from defects.small import FEATURES, Small, Written, every_variable
from loopwright.metrics import Loss, weighted_sum
from loopwright.step import replica_id

CLASSES, QUEUE = 3, 24


def network(name, outputs=1, *hidden, trainable=True):
  layers = [keras.Input([FEATURES]), *hidden, keras.layers.Dense(outputs)]
  made = keras.Sequential(layers, name=name)
  made.trainable = trainable
  return made


class Classes(kinds.Classes):
  """Right: classification."""

  def metrics(self, outputs, batch):
    return {}


class ActorCritic(Small):
  """Right: three optimizers at three cadences, a target network, a queue of rows and an average."""

  def build_model(self):
    networks = {name: network(name) for name in ("actor", "critic", "entropy")}
    return {
      **networks,
      "target": network("target", trainable=False),
      "queue": tf.Variable(tf.zeros([QUEUE, FEATURES]), trainable=False, name="queue"),
      "average": tf.Variable(0.0, trainable=False, name="average"),
    }

  def value(self, name, batch):
    return self.model[name](batch["x"], training=True)[:, 0]

  def critic(self, batch):
    wanted = batch["y"] + 0.5 * tf.stop_gradient(self.value("target", batch))
    wanted -= 0.1 * tf.reduce_sum(self.model["queue"]) / QUEUE
    return self.apart(self.value("critic", batch), wanted, batch)

  def actor(self, batch):
    return self.apart(self.value("actor", batch), self.value("critic", batch), batch)

  def entropy(self, batch):
    return self.apart(self.value("entropy", batch), batch["y"], batch)

  def apart(self, one, other, batch):
    return Loss.from_examples(tf.square(one - other), batch["weight"])

  def train_step(self, step, batch):
    loss = step.update(self.critic, batch, "critic")
    step.update(self.actor, batch, "actor", when=step.number % 2 == 1)
    step.update(self.entropy, batch, "entropy", when=step.number % 3 == 2)
    for slow, fast in zip(self.model["target"].weights, self.model["critic"].weights, strict=True):
      step.assign(slow, 0.9 * slow + 0.1 * fast)
    mean = tf.math.divide_no_nan(loss.total, loss.weight)
    step.assign(self.model["average"], 0.9 * self.model["average"] + 0.1 * mean)
    self.remember(step, batch)

  def remember(self, step, batch):
    rows = step.all_gather(batch["x"] * batch["weight"][:, None])
    queue = tf.concat([self.model["queue"], rows], 0)[-QUEUE:]
    step.assign(self.model["queue"], queue, when=step.number % 2 == 0)

  def eval_step(self, step, batch):
    loss = self.critic(batch)
    step.log({"loss": (loss.total, loss.weight)})


# ---- Weights and means


class IgnoresWeights(kinds.BatchNorm):
  """Batch normalisation hides it from the check of padding."""

  def loss(self, outputs, batch):
    return Loss.from_examples(self.errors(outputs, batch))


class HalfWeights(IgnoresWeights):
  def loss(self, outputs, batch):
    return Loss(tf.reduce_sum(self.errors(outputs, batch)), tf.reduce_sum(batch["weight"]))


class LossOfKeras(Small):
  """Of vectors, Keras takes the mean over the rows, and applies the weights to the mean."""

  def loss(self, outputs, batch):
    squares = keras.losses.MeanSquaredError()
    return Loss(squares(batch["y"], outputs, sample_weight=batch["weight"]), tf.constant(1.0))


class MaskedMean(Small):
  """Tokens to be predicted, divided by their number on this replica."""

  def build_model(self):
    return network("tokens", FEATURES)

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def sums(self, outputs, batch):
    mask = tf.cast(batch["x"] > 0, tf.float32) * batch["weight"][:, None]
    return tf.reduce_sum(tf.square(outputs - batch["x"]) * mask), tf.reduce_sum(mask)

  def loss(self, outputs, batch):
    return Loss(tf.math.divide_no_nan(*self.sums(outputs, batch)), 1.0)

  def metrics(self, outputs, batch):
    return {}


class MaskedMeanOfRows(MaskedMean):
  """As above, times the number of rows."""

  def build_model(self):
    return network("tokens", FEATURES, keras.layers.Dense(8, activation="tanh"))

  def loss(self, outputs, batch):
    rows = tf.reduce_sum(batch["weight"])
    return Loss(rows * tf.math.divide_no_nan(*self.sums(outputs, batch)), rows)


class MeanOfPenalties(Small):
  """A penalty of each example, of which the mean over the batch is added to each."""

  def errors(self, outputs, batch):
    return super().errors(outputs, batch) + tf.reduce_mean(tf.square(outputs))


class RootOfMean(Small):
  def loss(self, outputs, batch):
    loss = Loss.from_examples(self.errors(outputs, batch), batch["weight"])
    return Loss(tf.sqrt(loss.total * loss.weight + 1e-12), loss.weight)


class FlatShift(MaskedMean):
  """Rows are put one after the other, and then shifted."""

  def loss(self, outputs, batch):
    outputs, x = tf.reshape(outputs, [-1])[:-1], tf.reshape(batch["x"], [-1])
    weight = tf.reshape(tf.ones_like(batch["x"]) * batch["weight"][:, None], [-1])[:-1]
    return Loss.from_examples(tf.square(outputs - x[1:]), weight)


class WrongPlaces(Small):
  """Negatives of all replicas; but of two from each row, the place of an own one is that of one."""

  def build_model(self):
    return network("rows", 2)

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def train_step(self, step, batch):
    def loss(part):
      outputs = self.forward(part, True)
      everything = step.all_gather(tf.concat([outputs, part["x"][:, :2]], 0))
      hidden = 1e9 * (1.0 - step.all_gather(tf.tile(part["weight"], [2])))
      rows = outputs.shape[0]
      place = replica_id() * rows + tf.range(rows)
      scores = tf.matmul(outputs, everything, transpose_b=True) - hidden[None, :]
      entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(place, scores)
      return Loss.from_examples(entropy, part["weight"])

    step.update(loss, batch)


class ByTheClock(Small):
  def errors(self, outputs, batch):
    return super().errors(outputs, batch) * (1.0 + tf.cast(tf.timestamp() % 1.0, tf.float32))


class ByTheClockOfPython(Small):
  def errors(self, outputs, batch):
    return super().errors(outputs, batch) * (1.0 + time.perf_counter() % 1.0)


class DividedByReplicas(Small):
  """As a tutorial of TensorFlow says."""

  def loss(self, outputs, batch):
    total, weight = super().loss(outputs, batch)
    return Loss(total / tf.distribute.get_strategy().num_replicas_in_sync, weight)


class Broadcast(Small):
  """[n, 1] minus [n] is [n, n]."""

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def errors(self, outputs, batch):
    return tf.reduce_mean(tf.square(outputs - batch["y"]), axis=-1)

  def metrics(self, outputs, batch):
    return {}


class Accumulated(kinds.BatchNorm):
  """Each micro-batch is normalised by itself."""

  options = {"accumulation_steps": 2}


class MetricAsMean(Small):
  def metrics(self, outputs, batch):
    return {"mae": tf.reduce_mean(tf.abs(outputs - batch["y"]))}


# ---- Verbs


class OneOfThree(ActorCritic):
  """One optimizer of three, never reduced."""

  def train_step(self, step, batch):
    step.update(self.actor, batch, "actor")
    gradients, loss = step.gradients(self.critic, batch, step.variables("critic"))
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite & (loss.weight > 0), "critic")
    step.log_update(loss, finite, norm, "critic")
    step.update(self.entropy, batch, "entropy")


class ClippedByHand(Written):
  def reduced(self, step, gradients, local):
    return super().reduced(step, tf.clip_by_global_norm(list(gradients), 1.0)[0], local)


class NoiseOnGradients(Written):
  """Another noise on each replica, whose weights drift apart."""

  def after(self, step, gradients, norm):
    return [g + 0.01 * tf.random.stateless_normal(g.shape, step.seed()) for g in gradients]


class DividedByOwnWeight(Written):
  """Reduced gradients, divided by the weight of this replica alone."""

  def reduced(self, step, gradients, local):
    gradients, loss = step.all_reduce(gradients, local)
    return step.unscale(gradients, local), loss


class Branch(Small):
  def train_step(self, step, batch):
    if step.number % 2 == 0:
      step.update(lambda part: self.training_loss(step, part), batch)


class NumberInPython(Small):
  def train_step(self, step, batch):
    if step.number.numpy() % 2 == 0:
      step.update(lambda part: self.training_loss(step, part), batch)


class LocalCondition(Small):
  def train_step(self, step, batch):
    large = tf.reduce_mean(tf.abs(batch["y"])) > 0.5
    step.update(lambda part: self.training_loss(step, part), batch, when=large)


# ---- State


class LocalQueue(ActorCritic):
  def remember(self, step, batch):
    rows = batch["x"] * batch["weight"][:, None]
    step.assign(self.model["queue"], tf.concat([self.model["queue"], rows], 0)[-QUEUE:])


class LocalAverage(ActorCritic):
  def train_step(self, step, batch):
    step.update(self.critic, batch, "critic")
    step.update(self.actor, batch, "actor")
    step.update(self.entropy, batch, "entropy")
    mean = tf.reduce_sum(batch["y"] * batch["weight"]) / 12.0
    step.assign(self.model["average"], 0.9 * self.model["average"] + 0.1 * mean)


class LocalCentre(Small):
  """The loss of the next step subtracts it, so padding counts, but in later steps alone."""

  def build_model(self):
    centre = tf.Variable(0.0, trainable=False, name="centre")
    return {"network": network("network"), "centre": centre}

  def forward(self, batch, training):
    return self.model["network"](batch["x"], training=training)[:, 0] - self.model["centre"]

  def train_step(self, step, batch):
    super().train_step(step, batch)
    mean = tf.reduce_mean(self.forward(batch, True))
    step.assign(self.model["centre"], 0.9 * self.model["centre"] + 0.1 * mean)


class PlainAssign(ActorCritic):
  """An average that a step which is skipped makes infinite."""

  def train_step(self, step, batch):
    loss = step.update(self.critic, batch, "critic")
    step.update(self.actor, batch, "actor")
    step.update(self.entropy, batch, "entropy")
    mean = tf.math.divide_no_nan(loss.total, loss.weight)
    self.model["average"].assign(0.9 * self.model["average"] + 0.1 * mean)


class PythonCounter(Small):
  steps = 0

  def train_step(self, step, batch):
    self.steps += 1
    warm = min(1.0, self.steps / 10)

    def loss(part):
      total, weight = self.training_loss(step, part)
      return Loss(warm * total, weight)

    step.update(loss, batch)


class TrainedTeacher(Small):
  """The optimizer is given the teacher's variables too."""

  def build_model(self):
    return {"student": network("student"), "teacher": network("teacher")}

  def forward(self, batch, training):
    return self.model["student"](batch["x"], training=training)[:, 0]

  def errors(self, outputs, batch):
    return tf.square(outputs - tf.stop_gradient(self.model["teacher"](batch["x"])[:, 0]))


# ---- Random numbers and preprocess()


class Recomputed(kinds.Dropout):
  """The backward pass drops other units than the forward pass."""

  def forward(self, batch, training):
    run = tf.recompute_grad(lambda x: self.model(x, training=training))
    return run(batch["x"])[:, 0]


class Mixup(Small):
  def training_loss(self, step, batch):
    order = tf.random.shuffle(tf.range(tf.shape(batch["x"])[0]))
    mixed = {name: 0.7 * batch[name] + 0.3 * tf.gather(batch[name], order) for name in "xy"}
    return super().training_loss(step, {**batch, **mixed})


class NumPyInPreprocess(Small):
  def preprocess(self, batch, training):
    return {**batch, "x": np.clip(batch["x"], -2.0, 2.0)}


class StepInEvaluation(Small):
  def preprocess(self, batch, training):
    easy = tf.cast(batch["step"] < 10, tf.float32)
    return {**batch, "x": batch["x"] * (1.0 - 0.5 * easy)[:, None]}


# ---- Right


class CadenceInLoss(Small):
  """Every third step computes a loss, the others none."""

  def loss(self, outputs, batch):
    total, weight = super().loss(outputs, batch)
    return Loss(tf.cond(batch["step"][0] % 3 == 2, lambda: total, lambda: 0.0), weight)


class SecondHead(Small):
  """A second head, which only every third step trains."""

  def build_model(self):
    return {"default": super().build_model(), "second": network("second")}

  variables_of = every_variable

  def forward(self, batch, training):
    return self.model["default"](batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    total, weight = super().loss(outputs, batch)

    def second():
      return super(SecondHead, self).loss(self.model["second"](batch["x"])[:, 0], batch).total

    return Loss(total + tf.cond(batch["step"][0] % 3 == 2, second, lambda: 0.0), weight)


class Annealed(Small):
  """A loss whose weight grows from 0 to 1."""

  def errors(self, outputs, batch):
    share = tf.minimum(1.0, tf.cast(batch["step"], tf.float32) / 1000.0)
    return share * super().errors(outputs, batch)


class Curriculum(kinds.Dropout):
  """Inputs that become larger with the step, after noise that becomes smaller."""

  def preprocess(self, batch, training):
    if not training:
      return batch
    step = tf.cast(batch["step"], tf.float32)[:, None]
    noise = tf.cast(batch["seed"][:, :1] % 1000, tf.float32) / 1000.0
    scale = tf.minimum(1.0, 0.5 + 0.1 * step)
    return {**batch, "x": scale * batch["x"] + 0.1 * noise / (1.0 + step)}


class Smoothing(Classes):
  """Label smoothing that becomes weaker with the step."""

  def errors(self, outputs, batch):
    share = 0.2 * 0.999 ** tf.cast(batch["step"], tf.float32)[:, None]
    wanted = (1 - share) * tf.one_hot(batch["label"], CLASSES) + share / CLASSES
    return tf.nn.softmax_cross_entropy_with_logits(wanted, outputs)


class ClassWeights(Classes):
  def loss(self, outputs, batch):
    rare = tf.gather([1.0, 2.0, 0.5], batch["label"])
    return Loss.from_examples(self.errors(outputs, batch), batch["weight"] * rare)


class MaskedTokens(MaskedMean):
  def loss(self, outputs, batch):
    return Loss(*self.sums(outputs, batch))


class PenaltyOfEach(Small):
  """Weight decay in the loss of each example."""

  def errors(self, outputs, batch):
    decay = tf.add_n([tf.nn.l2_loss(v) for v in self.model.trainable_variables])
    return super().errors(outputs, batch) + 0.01 * decay


class Teacher(Small):
  """A frozen teacher with dropout, and a student."""

  def build_model(self):
    drops = [keras.layers.Dropout(rate) for rate in (0.5, 0.2)]
    teacher = network("teacher", 1, drops[0], trainable=False)
    return {"student": network("student", 1, drops[1]), "teacher": teacher}

  def variables_of(self, optimizer):
    return self.model["student"].trainable_variables

  def forward(self, batch, training):
    return self.model["student"](batch["x"], training=training)[:, 0]

  def errors(self, outputs, batch):
    soft = self.model["teacher"](batch["x"], training=False)[:, 0]
    return tf.square(outputs - 0.5 * soft - 0.5 * batch["y"])


class NoisyTeacher(Teacher):
  """The teacher's dropout is on: it has other targets in each step."""

  def errors(self, outputs, batch):
    soft = self.model["teacher"](batch["x"], training=True)[:, 0]
    return tf.square(outputs - 0.5 * soft - 0.5 * batch["y"])


class MeanTeacher(NoisyTeacher):
  """Right: the teacher follows the student, and both are noisy."""

  def train_step(self, step, batch):
    super().train_step(step, batch)
    for slow, fast in zip(*(self.model[n].weights for n in ("teacher", "student")), strict=True):
      step.assign(slow, 0.9 * tf.convert_to_tensor(slow) + 0.1 * tf.convert_to_tensor(fast))


class Averages(Small):
  """Right: a teacher that follows a student with batch normalisation."""

  all_weights = True

  def build_model(self):
    layers = keras.layers
    hidden = ([layers.Dense(4), layers.BatchNormalization(synchronized=True)] for _ in range(2))
    student, teacher = (network(n, 1, *h) for n, h in zip(("fast", "slow"), hidden, strict=True))
    teacher.trainable = False
    return {"default": student, "slow": teacher}

  def forward(self, batch, training):
    return self.model["default"](batch["x"], training=training)[:, 0]

  def errors(self, outputs, batch):
    soft = self.model["slow"](batch["x"], training=False)[:, 0]
    return tf.square(outputs - 0.5 * tf.stop_gradient(soft) - 0.5 * batch["y"])

  def train_step(self, step, batch):
    super().train_step(step, batch)
    for slow, fast in zip(*(self.model[n].weights for n in ("slow", "default")), strict=True):
      if self.all_weights or fast.trainable:
        step.assign(slow, 0.9 * tf.convert_to_tensor(slow) + 0.1 * tf.convert_to_tensor(fast))


class LeavesOutStatistics(Averages):
  all_weights = False


class FollowsItself(Averages):
  """The average is that of itself."""

  def train_step(self, step, batch):
    Small.train_step(self, step, batch)
    for slow in self.model["slow"].weights:
      slow_value = tf.convert_to_tensor(slow)
      step.assign(slow, 0.9 * slow_value + 0.1 * slow_value)


class FollowsFrozen(Averages):
  """The average follows a network that no step changes."""

  def build_model(self):
    made = super().build_model()
    old = keras.models.clone_model(made["slow"])
    old.trainable = False
    return {**made, "old": old}

  def train_step(self, step, batch):
    Small.train_step(self, step, batch)
    for slow, old in zip(*(self.model[n].weights for n in ("slow", "old")), strict=True):
      step.assign(slow, 0.9 * tf.convert_to_tensor(slow) + 0.1 * tf.convert_to_tensor(old))


class Decays(Small):
  """Right: a number that becomes smaller now and then."""

  def build_model(self):
    self.rate = tf.Variable(1.0, trainable=False, name="rate")
    return {"default": super().build_model(), "rate": self.rate}

  def variables_of(self, optimizer):
    return self.model["default"].trainable_variables

  def forward(self, batch, training):
    return self.rate * self.model["default"](batch["x"], training=training)[:, 0]

  def train_step(self, step, batch):
    super().train_step(step, batch)
    step.assign(self.rate, 0.9 * self.rate, when=step.number % 10 == 9)


class MovesInSkipped(Teacher):
  """A teacher that also moves in a step which is skipped."""

  def train_step(self, step, batch):
    super().train_step(step, batch)
    for slow, fast in zip(*(self.model[n].weights for n in ("teacher", "student")), strict=True):
      slow.assign(0.9 * tf.convert_to_tensor(slow) + 0.1 * tf.convert_to_tensor(fast))


class Contrast(Small):
  """Momentum contrast: a slow encoder, and a queue of its keys; while empty, the loss is 0."""

  def build_model(self):
    kept = {"queue": np.random.default_rng(5).normal(size=[QUEUE, 2]), "there": np.zeros(QUEUE)}
    made = {n: tf.Variable(v, trainable=False, name=n, dtype=tf.float32) for n, v in kept.items()}
    return {"default": network("query", 2), "slow": network("slow", 2, trainable=False), **made}

  def keys(self, batch):
    return tf.math.l2_normalize(self.model["slow"](batch["x"] + 0.1, training=False), 1)

  def contrast(self, batch):
    query = tf.math.l2_normalize(self.model["default"](batch["x"], training=True), 1)
    negative = query @ tf.transpose(self.model["queue"]) - 1e9 * (1 - self.model["there"])
    logits = tf.concat([tf.reduce_sum(query * self.keys(batch), 1)[:, None], negative], 1)
    return Loss.from_examples(-tf.nn.log_softmax(5.0 * logits)[:, 0], batch["weight"])

  def train_step(self, step, batch):
    step.update(self.contrast, batch)
    pairs = zip(self.model["slow"].weights, self.model["default"].weights, strict=True)
    for slow, fast in pairs:
      step.assign(slow, 0.99 * slow + 0.01 * fast)
    for name, new in (("queue", self.keys(batch)), ("there", batch["weight"])):
      kept = tf.concat([step.all_gather(new), self.model[name]], 0)
      step.assign(self.model[name], kept[:QUEUE])

  def eval_step(self, step, batch):
    loss = self.contrast(batch)
    step.log({"loss": (loss.total, loss.weight)})


class GradientPenalty(Small):
  """A gradient inside of the loss, noise by step.seed(), an update every fifth step."""

  def build_model(self):
    return {
      "first": network("first", 1, keras.layers.Dense(4, activation="tanh")),
      "second": network("second"),
    }

  def critic(self, batch):
    x = batch["x"] + 0.1 * batch["noise"]
    with tf.GradientTape() as tape:
      tape.watch(x)
      value = self.model["first"](x, training=True)[:, 0]
    slope = tf.norm(tape.gradient(value, x) + 1e-6, axis=1)
    losses = tf.square(value - batch["y"]) + tf.square(slope - 1)
    return Loss.from_examples(losses, batch["weight"])

  def actor(self, batch):
    value, other = (self.model[name](batch["x"])[:, 0] for name in ("first", "second"))
    return Loss.from_examples(tf.square(value - other), batch["weight"])

  def train_step(self, step, batch):
    noise = tf.random.stateless_normal(tf.shape(batch["x"]), step.seed())
    step.update(self.critic, {**batch, "noise": noise}, "first")
    step.update(self.actor, batch, "second", when=step.number % 5 == 4)

  def eval_step(self, step, batch):
    value = self.model["first"](batch["x"], training=False)[:, 0]
    step.log({"loss": weighted_sum(value, batch["weight"])})


class Exploring(Classes):
  """Actions at random, fewer with the step, and updates at random steps, equal on all replicas."""

  def train_step(self, step, batch):
    rows, number = len(batch["label"]), tf.cast(step.number, tf.int32)
    share = 0.5 ** tf.cast(number + 1, tf.float32)
    explores = tf.random.stateless_uniform([rows], step.seed()) < share
    other = tf.random.stateless_categorical(tf.zeros([rows, CLASSES]), 1, step.seed())[:, 0]
    label = tf.where(explores, tf.cast(other, tf.int32), batch["label"])
    due = tf.random.stateless_uniform([], tf.stack([7, number])) < 0.5
    step.update(lambda part: self.training_loss(step, part), {**batch, "label": label}, when=due)


class SometimesUpdated(Small):
  """Updates at random steps, equal on all replicas."""

  def train_step(self, step, batch):
    seed = tf.stack([7, tf.cast(step.number, tf.int32)])
    due = tf.random.stateless_uniform([], seed) < 0.5
    step.update(lambda part: self.training_loss(step, part), batch, when=due)


class FrozenAdapter(Small):
  """A head learns first; later an adapter of low rank does, whose second matrix begins at 0."""

  def build_model(self):
    adapter = [
      keras.layers.Dense(2, use_bias=False),
      keras.layers.Dense(FEATURES, use_bias=False, kernel_initializer="zeros"),
    ]
    return {
      "head": network("head"),
      "adapter": keras.Sequential([keras.Input([FEATURES]), *adapter]),
    }

  def variables_of(self, optimizer):
    return self.model[optimizer].trainable_variables

  def forward(self, batch, training):
    return self.model["head"](batch["x"] + self.model["adapter"](batch["x"]))[:, 0]

  def train_step(self, step, batch):
    frozen = step.number < 30
    step.update(lambda part: self.training_loss(step, part), batch, "head", when=frozen)
    step.update(lambda part: self.training_loss(step, part), batch, "adapter", when=~frozen)


class ReducedStatistics(Small):
  """step.all_reduce() sums a statistic of all replicas, which centres the targets."""

  def train_step(self, step, batch):
    _, sums = step.all_reduce([], Loss.from_examples(batch["y"], batch["weight"]))
    centred = batch["y"] - tf.math.divide_no_nan(sums.total, sums.weight)
    step.update(lambda part: self.training_loss(step, part), {**batch, "y": centred})
