"""Keras callbacks in a run: what they get and change, beside `fit`; over a restart."""

import functools

import keras
import numpy as np
import pytest
import runs
import toys

from loopwright import Action, ArraySource, ConfigError, KerasCallback
from loopwright.runs.runner import run
from loopwright.strategies import factories

RNG = np.random.default_rng(1)
X = RNG.normal(size=[12, 2]).astype(np.float32)
Y = (X @ [1.5, -2.0] + RNG.normal(0, 0.4, 12)).astype(np.float32)
BATCH, EPOCHS, RATE = 4, 6, 0.35
PER_EPOCH = len(X) // BATCH


class Line(toys.Regression):
  """y = x @ kernel, evaluated on the same rows in another scale, where it gets worse."""

  def build_model(self):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    return keras.Sequential([keras.Input([2]), dense])

  def source(self, split):
    scale = 1.0 if split == "train" else -1.0
    return ArraySource(features={"x": X, "y": Y * scale})


class Noted(keras.callbacks.Callback):
  """Notes every hook that a run honours; stops after `most` epochs."""

  def __init__(self, most=None):
    super().__init__()
    self.notes, self.most = [], most

  def on_train_begin(self, logs=None):
    self.notes.append("begin")

  def on_epoch_begin(self, epoch, logs=None):
    self.notes.append(f"epoch {epoch}")

  def on_train_batch_end(self, batch, logs=None):
    self.notes.append([batch, logs["loss"]])

  def on_epoch_end(self, epoch, logs=None):
    self.notes.append([epoch, logs["loss"], logs["val_loss"]])
    self.model.stop_training = self.most == epoch + 1

  def on_train_end(self, logs=None):
    self.notes.append("end")


def plateau():
  return keras.callbacks.ReduceLROnPlateau(
    monitor="val_loss", mode="min", factor=0.5, patience=1, min_delta=0.05
  )


def start(folder, *callbacks, epochs=EPOCHS, replicas=1, actions=(), **options):
  several = functools.partial(factories.mirrored, cpu_replicas=replicas)
  given = {"task": Line, "optimizer": lambda: keras.optimizers.SGD(RATE, momentum=0.9)}
  return run(
    **given | options, train_steps=epochs * PER_EPOCH, global_batch_size=BATCH,
    mode="train_and_evaluate", model_dir=str(folder), shuffle=False,
    strategy=several if replicas > 1 else factories.default,
    eval_every_steps=PER_EPOCH, steps_per_loop=PER_EPOCH, checkpoint_every_steps=PER_EPOCH,
    actions=[*(KerasCallback(callback=each) for each in callbacks), *actions],
  )  # fmt: skip


class Weights(Action):
  """Keeps the kernel and the rate after each evaluation."""

  on = "eval"

  def __init__(self):
    self.seen = []

  def __call__(self, output):
    [kernel] = runs.values(self.run.task.model)
    rate = self.run.trainer.parts.optimizers["default"].optimizer.learning_rate
    self.seen.append((kernel[:, 0], float(rate.numpy())))


def fitted():
  """The kernel and the rate after each epoch of `fit` with the same callback."""
  model, seen = Line().build_model(), []
  model.compile(keras.optimizers.SGD(RATE, momentum=0.9), "mse")
  note = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: seen.append(
      (model.get_weights()[0][:, 0], float(model.optimizer.learning_rate.numpy()))
    )
  )
  model.fit(
    X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=(X, -Y),
    callbacks=[plateau(), note],
  )  # fmt: skip
  return seen


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_plateau_lowers_the_rate_as_in_fit(tmp_path, replicas):
  weights = Weights()
  start(tmp_path / "run", plateau(), replicas=replicas, actions=[weights])
  expected = fitted()
  assert len({rate for _, rate in expected}) > 2
  for (kernel, rate), (wanted, of_fit) in zip(weights.seen, expected, strict=True):
    np.testing.assert_allclose(kernel, wanted, rtol=1e-5)
    assert rate == pytest.approx(of_fit)


@pytest.mark.parametrize("replicas", [1, 3])
def test_its_state_survives_a_restart(tmp_path, replicas):
  whole, second = Weights(), Weights()
  start(tmp_path / "whole", plateau(), actions=[whole], replicas=replicas)
  start(tmp_path / "parts", plateau(), epochs=3, replicas=replicas)
  start(tmp_path / "parts", plateau(), actions=[second], replicas=replicas)
  # The checkpoint is from before its evaluation, which comes again.
  for (kernel, rate), (other, again) in zip(whole.seen[2:], second.seen, strict=True):
    np.testing.assert_array_equal(kernel, other)
    assert rate == again


def test_hooks_come_in_order_with_the_values_of_the_log(tmp_path):
  noted = Noted(most=2)
  start(tmp_path, noted)
  losses = [record["loss"] for record in runs.records(tmp_path, "train")]
  held_out = [record["loss"] for record in runs.records(tmp_path, "eval")]
  assert noted.notes == [
    *("begin", "epoch 0", [2, losses[0]], [0, losses[0], held_out[0]]),
    *("epoch 1", [5, losses[1]], [1, losses[1], held_out[1]], "end"),
  ]


class TooEarly(keras.callbacks.Callback):
  """Wants to be called before each batch."""

  def on_train_batch_begin(self, batch, logs=None):
    raise NotImplementedError


class Scaled(keras.Model):
  """x @ kernel * beta."""

  def __init__(self):
    super().__init__()
    self.dense, self.beta = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"), 1.0
    self.build([None, 2])

  def build(self, shape):
    self.dense.build(shape)

  def call(self, x):
    return self.dense(x) * self.beta


class ScaledLine(Line):
  def build_model(self):
    return Scaled()


class Annealing(keras.callbacks.Callback):
  """Sets a number of the model after each epoch, and what no trace reads."""

  def on_epoch_end(self, epoch, logs=None):
    self.model.beta = epoch + 2.0
    self.model.noted = self


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_callback_sets_on_the_model_counts_and_survives(replicas, tmp_path):
  def evaluations(folder, *epochs):
    for each in epochs:
      task = ScaledLine()
      start(folder, Annealing(), epochs=each, replicas=replicas, task=task, optimizer=sgd)
    return [r["loss"] for r in runs.records(folder, "eval")], task.model

  sgd = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
  found, model = evaluations(tmp_path / "a", 5)
  kernel, expected = np.ones(2), []
  for epoch in range(5):
    beta = epoch + 1.0
    for rows in np.split(np.arange(12), 3):
      x = X[rows].astype(np.float64)
      kernel = kernel - 0.01 * 2 * beta * (x @ kernel * beta - Y[rows]) @ x / BATCH
    expected.append(np.mean((X @ kernel * beta + Y) ** 2))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert (model.beta, type(model.noted)) == (6.0, Annealing)
  assert evaluations(tmp_path / "b", 2, 4, 5)[0] == found


class Freezing(keras.callbacks.Callback):
  def on_epoch_end(self, epoch, logs=None):
    self.model.trainable = False


def test_a_model_that_a_callback_freezes_is_frozen(tmp_path):
  with pytest.raises(ConfigError, match="optimizer 'default' has no trainable variable left"):
    start(tmp_path, Freezing())


class AnotherOptimizer(keras.callbacks.Callback):
  """Sets what the compiled loop does not follow."""

  def on_epoch_end(self, epoch, logs=None):
    self.model.optimizer = keras.optimizers.SGD(0.1)


def test_another_optimizer_is_refused(tmp_path):
  with pytest.raises(ConfigError, match=r"set self.model.optimizer, .*; change the optimizer that"):
    start(tmp_path, AnotherOptimizer())


@pytest.mark.parametrize(
  ("actions", "line"),
  [
    (KerasCallback(Noted()), r"run.actions is a KerasCallback; it must be a list"),
    ([Noted()], r"run.actions has a Noted; .*: lw.KerasCallback\("),
    ([Weights], r"run.actions has a type; .*: Weights\(\)"),
  ],
)
def test_actions_that_are_none_are_one_line(actions, line):
  with pytest.raises(ConfigError, match=line):
    run(task=Line, train_steps=1, global_batch_size=1, model_dir="m", actions=actions)


@pytest.mark.parametrize(
  ("callback", "line"),
  [
    (lambda: 3, "callback is a int; it must be a keras.callbacks.Callback"),
    (
      TooEarly,
      r"TooEarly defines on_train_batch_begin, which a compiled loop .*; a run calls",
    ),
    (lambda: keras.callbacks.EarlyStopping(), r"needs fit; here it is lw.EarlyStopping\("),
    (lambda: keras.callbacks.BackupAndRestore("x"), "here it is nothing, as each run goes on"),
    (
      lambda: keras.callbacks.LambdaCallback(on_train_batch_begin=print),
      "LambdaCallback defines on_train_batch_begin",
    ),
  ],
)
def test_what_cannot_be_honoured_is_one_line(callback, line):
  with pytest.raises(ConfigError, match=line):
    KerasCallback(callback=callback())
