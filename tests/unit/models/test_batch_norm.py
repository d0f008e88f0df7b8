"""Padding and batch normalisation: a batch that does not divide trains like one on one replica."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_trainer
from toys import KERAS

from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.reporting.summary import describe

BATCH = 7
RNG = np.random.default_rng(0)
X = (3.0 + RNG.normal(size=[BATCH, 4, 2])).astype(np.float32)
Y = RNG.normal(size=BATCH).astype(np.float32)


class Normalised(toys.Regression):
  """Batch normalisation over rows and places, the mean over places, one output."""

  features = {"x": X, "y": Y}

  def __init__(self, *, library="keras", synchronized=True, views=1, training=True):
    self._keras, self._views, self._training = KERAS[library], views, training
    self._options = {"synchronized": synchronized} if library == "keras" else {}

  def build_model(self):
    layers = self._keras.layers
    return toys.network(
      [4, 2],
      layers.BatchNormalization(momentum=0.9, name="norm", **self._options),
      layers.Activation("tanh"),
      layers.GlobalAveragePooling1D(),
      layers.Dense(1, kernel_initializer="ones"),
      library=self._keras,
    )

  def forward(self, batch, training):
    x = tf.concat([batch["x"]] * self._views, axis=0)
    outputs = self.model(x, training=training and self._training)
    return outputs[: tf.shape(batch["x"])[0], 0]


def trained(task, strategy, steps=3, **options):
  """Returns the loss of `steps` steps and the weights after them, on each replica the same."""
  sgd = functools.partial(task._keras.optimizers.SGD, 0.5)
  trainer = make_trainer(task, strategy, batch=BATCH, optimizer=sgd, **options)
  loss = trainer.train(tf.constant(steps))["loss"]
  return loss, [np.array(weight) for weight in task.model.get_weights()]


@pytest.mark.fast(replicas=[3], eager=[False])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_synchronised_statistics_are_those_of_the_examples(replicas, eager, mirrored):
  loss, weights = trained(Normalised(), mirrored(1))
  other, others = trained(Normalised(), mirrored(replicas), eager=eager)
  assert other == pytest.approx(loss, rel=1e-6)
  for one, two in zip(weights, others, strict=True):
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)


def test_local_statistics_are_those_of_the_replicas_examples(mirrored):
  """On four replicas of 2 rows, the last has one example; its moving mean is that row's."""
  order = next(datasets.train_dataset(
    Normalised().source("train"), global_batch_size=BATCH, pad_multiple=4
  ).as_numpy_iterator())["x"]  # fmt: skip
  rows = [order[0:2], order[2:4], order[4:6], order[6:7]]
  _, weights = trained(Normalised(synchronized=False), mirrored(4), steps=1)
  mean = np.mean([0.1 * part.mean((0, 1)) for part in rows], axis=0)
  variance = np.mean([0.9 + 0.1 * part.var((0, 1)) for part in rows], axis=0)
  np.testing.assert_allclose(weights[2], mean, rtol=1e-5)
  np.testing.assert_allclose(weights[3], variance, rtol=1e-5)


def test_a_replica_without_examples_leaves_its_statistics(mirrored, monkeypatch):
  monkeypatch.setitem(globals(), "BATCH", 5)  # 8 rows on four replicas: the last has none
  task = Normalised(synchronized=False)
  order = next(datasets.train_dataset(
    task.source("train"), global_batch_size=BATCH, pad_multiple=4
  ).as_numpy_iterator())["x"]  # fmt: skip
  _, weights = trained(task, mirrored(4), steps=1)
  seen = [0.1 * part.mean((0, 1)) for part in (order[0:2], order[2:4], order[4:5])]
  np.testing.assert_allclose(weights[2], np.mean([*seen, [0.0, 0.0]], axis=0), rtol=1e-5)


@pytest.mark.parametrize(
  ("options", "reason"),
  [
    ({"library": "tf_keras"}, "tf_keras would count the padded rows"),
    ({"views": 2}, "its input has 8 rows and the batch 4"),
  ],
)
def test_what_cannot_leave_out_padding_is_refused(options, reason, mirrored):
  with pytest.raises(ConfigError) as caught:
    trained(Normalised(**options), mirrored(2))
  line, place = str(caught.value).split(" (test_batch_norm.py:")
  assert line == (
    "global_batch_size is 7 for 2 replicas, so rows are padded, and batch normalisation 'norm' "
    f"cannot leave them out: {reason}; choose a batch size that divides."
  )
  assert place.endswith(", in forward)")


@pytest.mark.parametrize("library", KERAS)
def test_inference_mode_is_not_refused(library, mirrored):
  loss, _ = trained(Normalised(library=library, training=False), mirrored(1))
  other, _ = trained(Normalised(library=library, training=False), mirrored(2))
  assert other == pytest.approx(loss, rel=1e-6)


class Penalised(Normalised):
  """A layer adds the mean square of its rows or of its weights to the loss, or regularises rows."""

  def __init__(self, kind):
    super().__init__()
    self._kind = kind

  def build_model(self):
    kind = self._kind

    class Adds(KERAS["keras"].layers.Dense):
      def call(self, inputs):
        made = super().call(inputs)
        if kind != "activity":
          self.add_loss(tf.reduce_mean(tf.square(made if kind == "rows" else self.kernel)))
        return made

    own = {"activity_regularizer": "l2"} if kind == "activity" else {}
    flat = KERAS["keras"].layers.Flatten()
    return toys.network([4, 2], flat, Adds(1, kernel_initializer="ones", **own))


@pytest.mark.parametrize("kind", ["rows", "activity", "weights"])
def test_a_penalty_never_counts_padded_rows(kind, mirrored, monkeypatch):
  if kind != "weights":
    for compiled in (False, True):
      with pytest.raises(ConfigError, match="rows are padded, and a layer's add_loss"):
        trained(Penalised(kind), mirrored(2), jit_compile=compiled)
    monkeypatch.setitem(globals(), "BATCH", 6)  # which divides
  one, two = (trained(Penalised(kind), mirrored(n), steps=1)[1][0] for n in (1, 2))
  np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize(
  ("task", "line"),
  [
    (
      Normalised(synchronized=False),
      "batch norm  norm, in training: over each replica's own rows,",
    ),
    (Normalised(), None),
    (Penalised("weights"), "penalties   of layers, as in fit"),
  ],
)
def test_a_line_of_the_start_says_what_is_unlike_a_plain_loop(task, line, mirrored):
  trainer = make_trainer(task, mirrored(2), batch=6, optimizer=task._keras.optimizers.SGD)
  trainer.examine()
  text = describe(trainer, precision="float32", start_step=0, train_steps=3, model_dir="x")
  found = [row for row in text.splitlines() if row.startswith(("batch norm", "penalties"))]
  assert [row[: len(line or "")] for row in found] == ([line] if line else [])
