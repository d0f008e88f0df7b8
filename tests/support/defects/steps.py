"""Steps of people who write their own models and losses: first mistaken, then right ones.

test_verify_steps.py says what verification must find.
"""

import keras
import numpy as np
import tensorflow as tf

from defects.newcomers import Classes, network
from defects.small import FEATURES, Small, every_variable
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss
from loopwright.step import replica_id

EXPERTS, NODES = 3, 5


# ---- Variables


class Forgotten(Small):
  """Of three networks, two have an optimizer."""

  def build_model(self):
    return {"first": network("first", 4), "between": network("between", 4), "last": network("last")}

  def variables_of(self, optimizer):
    return self.model[optimizer].trainable_variables

  def widened(self, x):
    return tf.pad(self.model["first"](x), [[0, 0], [0, FEATURES]])[:, :FEATURES]

  def forward(self, batch, training):
    between = self.model["between"](self.widened(batch["x"]))[:, :FEATURES]
    return self.model["last"](between)[:, 0]

  def train_step(self, step, batch):
    for name in ("first", "last"):
      step.update(lambda part: self.training_loss(step, part), batch, name)


class Positions(Small):
  """The positions are embedded once, while the model is built, and are never trained."""

  def build_model(self):
    inputs = keras.Input([FEATURES])
    positions = keras.layers.Embedding(FEATURES, 4, name="positions")
    added = positions(tf.range(FEATURES))
    words = keras.layers.Dense(4)(inputs[:, :, None])
    hidden = keras.layers.Flatten()(keras.layers.Activation("tanh")(words + added))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


class PartOfLarger(Small):
  """Right: a part of a larger model, whose other layers are not used."""

  def build_model(self):
    whole = super().build_model()
    keras.layers.Dense(7).build([None, 2])
    larger = keras.Model(whole.inputs, [*whole.outputs, keras.layers.Dense(2)(whole.inputs[0])])
    return keras.Model(larger.inputs, larger.outputs[0])


class MadeByForward(Small):
  """A layer that the first call of forward() builds."""

  def __init__(self):
    self.scale = keras.layers.Dense(FEATURES)

  def forward(self, batch, training):
    return super().forward({**batch, "x": self.scale(batch["x"])}, training)


class MadeInForward(Small):
  """A new layer in each call of forward()."""

  def forward(self, batch, training):
    scaled = keras.layers.Dense(FEATURES)(batch["x"])
    return super().forward({**batch, "x": scaled}, training)


# ---- Rates


class LocalEpochs(Small):
  """An epoch is counted in batches of one replica."""

  def train_step(self, step, batch):
    steps_per_epoch = 4000 // batch["x"].shape[0]
    rate = 0.1 ** tf.cast(step.number // steps_per_epoch, tf.float32)

    def loss(part):
      total, weight = self.training_loss(step, part)
      return Loss(rate * total, weight)

    step.update(loss, batch)


def sgd_by_local_epochs():
  """Divides by 10 after ten epochs, counted in batches of one replica."""
  per_replica = 12 // tf.distribute.get_strategy().num_replicas_in_sync
  epoch = 400 // per_replica
  rate = keras.optimizers.schedules.PiecewiseConstantDecay([10 * epoch], [0.01, 0.001])
  return keras.optimizers.SGD(rate)


# ---- Rows that depend on one another


class Router(keras.layers.Layer):
  """Each expert takes the first rows that want it."""

  def __init__(self, capacity):
    super().__init__()
    self.capacity = capacity
    self.gate, self.experts = keras.layers.Dense(EXPERTS), keras.layers.Dense(EXPERTS)

  def build(self, shape):
    self.gate.build(shape)
    self.experts.build(shape)

  def call(self, x):
    shares = tf.nn.softmax(self.gate(x))
    chosen = tf.one_hot(tf.argmax(shares, axis=1), EXPERTS)
    if self.capacity is not None:
      place = tf.cumsum(chosen, axis=0)
      chosen *= tf.cast(place <= self.capacity, tf.float32)
    return tf.reduce_sum(chosen * shares * self.experts(x), axis=1, keepdims=True)


class Crowded(Small):
  """A mixture of experts, each with a capacity for rows of this replica."""

  capacity = 2

  def build_model(self):
    inputs = keras.Input([FEATURES])
    return keras.Model(inputs, Router(self.capacity)(inputs))

  def preprocess(self, batch, training):
    return {**batch, "x": tf.transpose(tf.transpose(batch["x"]))}


class Mixture(Crowded):
  """Right: experts without a limit."""

  capacity = None


class Balanced(Small):
  """Right: each row has one of six networks, and a small loss balances them over all replicas."""

  names = tuple(f"expert{number}" for number in range(6))

  def build_model(self):
    gate = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(6)], name="gate")
    return {"gate": gate, **{name: network(name) for name in self.names}}

  variables_of = every_variable

  def routed(self, batch):
    shares = tf.nn.softmax(self.model["gate"](batch["x"]))
    chosen = tf.one_hot(tf.argmax(shares, axis=1), 6)
    answers = tf.stack([self.model[name](batch["x"])[:, 0] for name in self.names], axis=1)
    return tf.reduce_sum(chosen * shares * answers, axis=1), shares, chosen

  def forward(self, batch, training):
    return self.routed(batch)[0]

  def training_loss(self, step, batch):
    outputs, shares, chosen = self.routed(batch)
    weight = step.all_gather(batch["weight"])
    load, share = (
      tf.linalg.matvec(step.all_gather(each), weight, transpose_a=True) / tf.reduce_sum(weight)
      for each in (chosen, shares)
    )
    losses = tf.square(outputs - batch["y"]) + 0.05 * 6 * tf.reduce_sum(load * share)
    return Loss.from_examples(losses, batch["weight"])


class Towers(Small):
  """Two towers, and the items of the other rows of this replica as negatives."""

  def build_model(self):
    tanh = [keras.layers.Dense(16, activation="tanh") for _ in range(2)]
    return {"default": network("query", 4, tanh[0]), "item": network("item", 4, tanh[1])}

  variables_of = every_variable

  def forward(self, batch, training):
    query = tf.transpose(tf.transpose(self.model["default"](batch["x"])))
    return query, self.model["item"](batch["x"] ** 2)

  def candidates(self, items, batch):
    return items, batch["weight"]

  def contrast(self, step, outputs, batch):
    queries, items = outputs
    self.step = step
    candidates, weight = self.candidates(items, batch)
    logits = tf.matmul(queries, candidates, transpose_b=True)
    logits = self.masked(logits, weight)
    own = len(batch["weight"])
    rows = tf.range(own) + (own * replica_id() if candidates.shape[0] > own else 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(rows, logits)
    return Loss.from_examples(losses, batch["weight"])

  def masked(self, logits, weight):
    return logits - 1e9 * tf.cast(weight == 0, tf.float32)

  def training_loss(self, step, batch):
    return self.contrast(step, self.forward(batch, training=True), batch)

  def eval_step(self, step, batch):
    loss = self.contrast(step, self.forward(batch, training=False), batch)
    step.log({"loss": (loss.total, loss.weight)})


class PaddedCandidates(Towers):
  """All replicas' items, padded rows among them."""

  def candidates(self, items, batch):
    return self.step.all_gather(items), self.step.all_gather(batch["weight"])

  def masked(self, logits, weight):
    return logits


class Candidates(PaddedCandidates):
  """Right: all replicas' items of weight above 0."""

  masked = Towers.masked


class InForward(Classes):
  """Rows are centred by the mean of this replica's rows, in forward()."""

  def forward(self, batch, training):
    x = tf.transpose(tf.transpose(batch["x"]))
    centre = tf.reduce_mean(x, axis=0)
    return self.model(x - centre, training=training)


# ---- Targets


class Bootstrapped(Small):
  """A network learns from its own prediction, through which the gradient flows too."""

  def errors(self, outputs, batch):
    target = batch["y"] + 0.5 * self.model(1.0 - batch["x"])[:, 0]
    return tf.square(outputs - target)


class Detached(Bootstrapped):
  """Right: a target is a constant."""

  def errors(self, outputs, batch):
    target = batch["y"] + 0.5 * tf.stop_gradient(self.model(1.0 - batch["x"])[:, 0])
    return tf.square(outputs - target)


# ---- Right


@tf.custom_gradient
def reverse(x):
  return tf.identity(x), lambda upstream: -upstream


@tf.custom_gradient
def rounded(x):
  return tf.round(4.0 * x) / 4.0, lambda upstream: upstream


class Reversal(Classes):
  """Two heads, of which one is trained against the trunk (DANN)."""

  chance_loss = None

  def build_model(self):
    trunk = [keras.layers.Dense(4, activation="tanh")]
    heads = {name: keras.Sequential([keras.Input([4]), keras.layers.Dense(3)]) for name in "ab"}
    return {"trunk": keras.Sequential([keras.Input([FEATURES]), *trunk]), **heads}

  def forward(self, batch, training):
    hidden = self.model["trunk"](batch["x"])
    return self.model["a"](hidden), self.model["b"](reverse(hidden))

  def errors(self, outputs, batch):
    domain = tf.cast(batch["x"][:, 0] > 0, tf.int32)
    of = tf.nn.sparse_softmax_cross_entropy_with_logits
    return of(batch["label"], outputs[0]) + of(domain, outputs[1])


class Quantised(Small):
  """Rounded activations, whose gradient passes straight through."""

  def forward(self, batch, training):
    return rounded(super().forward(batch, training))


class LogsOne(Small):
  """Two optimizers, of which only the first is logged as an update."""

  def errors(self, outputs, batch):
    return tf.square(tf.cast(outputs, tf.float32) - batch["y"])

  def metrics(self, outputs, batch):
    return {}

  def build_model(self):
    return {"slow": network("slow"), "fast": network("fast")}

  def forward(self, batch, training):
    return self.model["slow"](batch["x"])[:, 0] + self.model["fast"](batch["x"])[:, 0]

  def train_step(self, step, batch):
    for name in ("slow", "fast"):
      variables = step.variables(name)
      gradients, local = step.gradients(
        lambda part: self.loss(self.forward(part, training=True), part), batch, variables
      )
      gradients, loss = step.all_reduce(gradients, local)
      gradients = step.unscale(gradients, loss)
      finite, norm = step.check(gradients)
      step.apply(step.clip(gradients, norm), finite & (loss.weight > 0), name)
      if name == "slow":
        step.log_update(loss, finite, norm, name)


class Graphs(Small):
  """A graph network: nodes of a graph are padded, and masked where messages are summed."""

  def build_model(self):
    layers = keras.layers
    return {
      "message": keras.Sequential([keras.Input([NODES, 2]), layers.Dense(6, activation="tanh")]),
      "default": keras.Sequential([keras.Input([6]), layers.Dense(1)]),
    }

  variables_of = every_variable

  def source(self, split):
    rng = np.random.default_rng(3 if split == "train" else 4)
    nodes = rng.normal(size=[40, NODES, 2]).astype(np.float32)
    count = rng.integers(2, NODES + 1, 40)
    mask = (np.arange(NODES) < count[:, None]).astype(np.float32)
    edges = rng.integers(0, 2, [40, NODES, NODES]).astype(np.float32)
    y = (nodes.sum(2) * mask).sum(1).astype(np.float32)
    return ArraySource(features={"nodes": nodes, "mask": mask, "edges": edges, "y": y})

  def forward(self, batch, training):
    mask = batch["mask"][:, :, None]
    messages = self.model["message"](batch["nodes"]) * mask
    received = (tf.matmul(batch["edges"], messages) + messages) * mask
    pooled = tf.reduce_sum(received, axis=1) / tf.reduce_sum(mask, axis=1)
    return self.model["default"](pooled)[:, 0]
