"""The contenders: each trains the same model for a fixed number of steps per call.

A contender is a function (model name, replicas, steps) -> `Contender`. It makes everything but
traces and runs nothing. `block()` then runs exactly `steps` steps and returns their mean loss as a
Python float, so every block ends with the host waiting for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import orbit
import tensorflow as tf
import tf_keras

from benchmarks import models
from loopwright.engine.examination import LONG
from loopwright.engine.step_parts import JitCompile
from loopwright.metrics import Loss
from loopwright.options.groups import Cadence
from loopwright.strategies import factories
from loopwright.task import Task
from loopwright.trainer import Trainer

STEPS_PER_EXECUTION = 50
_ANSWER_TIMEOUT_S = 120.0


class Contender(NamedTuple):
  """One way to train, ready to run.

  Attributes:
    block: runs `steps` steps and returns their mean loss.
    steps_done: the steps that the optimizer has counted.
    close: stops what still runs.
  """

  block: Callable[[], float]
  steps_done: Callable[[], int]
  close: Callable[[], None] = lambda: None


def make(name: str, model: str, replicas: int, steps: int) -> Contender:
  factories.split_cpu(replicas)
  return _MAKERS[name](model, replicas, steps)


def _loopwright(jit_compile: JitCompile = "auto") -> Callable[[str, int, int], Contender]:
  """As a long run trains, whose loops are as long as a block."""

  def make_trainer(model: str, replicas: int, steps: int) -> Contender:
    trainer = Trainer(
      task=Classification(model),
      strategy=factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default(),
      dataset_fn=lambda position: models.dicts(model),
      global_batch_size=models.MODELS[model].batch_size,
      optimizer=lambda: models.adam(model, keras),
      jit_compile=jit_compile,
    )
    trainer.planned = Cadence(train_steps=LONG, steps_per_loop=steps)
    num_steps = tf.constant(steps)
    return Contender(
      block=lambda: trainer.train(num_steps)["loss"],
      steps_done=lambda: int(trainer.global_step.numpy()),
    )

  return make_trainer


class Classification(Task):
  def __init__(self, name: str) -> None:
    self._name = name

  def build_model(self):
    return models.build(self._name, keras)

  def forward(self, batch, training):
    return self.model(models.read(self._name, batch), training=training)

  def loss(self, outputs, batch):
    losses = models.per_example_loss(self._name, batch["label"], outputs)
    return Loss.from_examples(losses, batch["weight"])


def _hand_written(ops: str | None = None, xla: bool = False) -> Callable[..., Contender]:
  """An expert's loop: one tf.function with a loop in it, and the documented Keras 3 calls.

  It does less than the framework: no weights, no gradient norm, no check for NaN.
  """

  def make_loop(model: str, replicas: int, steps: int) -> Contender:
    strategy = _peer_strategy(replicas, ops)
    with strategy.scope():
      network, optimizer = models.build(model, keras), models.adam(model, keras)
      optimizer.build(network.trainable_variables)
    variables = network.trainable_variables
    iterator = iter(strategy.experimental_distribute_dataset(models.pairs(model)))

    def gradients(features, labels):
      with tf.GradientTape() as tape:
        per_example = models.per_example_loss(model, labels, network(features, training=True))
        loss = tf.reduce_sum(per_example) / models.MODELS[model].batch_size
      return tape.gradient(loss, [v.value for v in variables]), loss

    if xla:
      gradients = tf.function(gradients, jit_compile=True)

    def replica_step(features, labels):
      grads, loss = gradients(features, labels)
      optimizer.apply(grads, variables)  # sums over the replicas first
      return loss

    if xla and replicas == 1:
      replica_step = tf.function(replica_step, jit_compile=True)  # the update too

    @tf.function
    def loop(iterator, num_steps):
      total = 0.0
      for _ in tf.range(num_steps):
        loss = strategy.run(replica_step, args=next(iterator))
        total += strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)
      return total

    num_steps = tf.constant(steps)
    return Contender(
      block=lambda: float(loop(iterator, num_steps)) / steps,
      steps_done=lambda: iterations(optimizer),
    )

  return make_loop


def _orbit(model: str, replicas: int, steps: int) -> Contender:
  strategy = _peer_strategy(replicas)
  with strategy.scope():
    trainer = _OrbitTrainer(model, strategy)
  num_steps = tf.constant(steps)
  return Contender(
    block=lambda: float(trainer.train(num_steps)["loss"]),
    steps_done=lambda: iterations(trainer.optimizer),
  )


class _OrbitTrainer(orbit.StandardTrainer):
  """orbit.StandardTrainer, as its documentation and the Model Garden use it."""

  def __init__(self, model: str, strategy: tf.distribute.Strategy) -> None:
    self.strategy, self.trained = strategy, model
    self.model = models.build(model, keras)
    self.optimizer = models.adam(model, keras)
    self.optimizer.build(self.model.trainable_variables)
    self.mean_loss = tf_keras.metrics.Mean()
    super().__init__(strategy.experimental_distribute_dataset(models.pairs(model)))

  def train_loop_begin(self):
    self.mean_loss.reset_state()

  def train_step(self, iterator):
    self.strategy.run(self._replica_step, args=next(iterator))

  def train_loop_end(self):
    return {"loss": self.mean_loss.result()}

  def _replica_step(self, features, labels):
    variables = self.model.trainable_variables
    with tf.GradientTape() as tape:
      outputs = self.model(features, training=True)
      per_example = models.per_example_loss(self.trained, labels, outputs)
      loss = tf.reduce_sum(per_example) / models.MODELS[self.trained].batch_size
    self.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
    self.mean_loss.update_state(per_example)


def _keras_fit(library: Any, steps_per_execution: int = 1) -> Callable[..., Contender]:
  def make_fit(model: str, replicas: int, steps: int) -> Contender:
    strategy = _peer_strategy(replicas)
    with strategy.scope():
      network = models.build(model, library)
      network.compile(
        optimizer=models.adam(model, library),
        loss=models.keras_loss(model, library),
        steps_per_execution=steps_per_execution,
      )
    epochs = _Epochs(network, models.pairs(model), library, max(steps, steps_per_execution))
    return Contender(
      block=epochs.next, steps_done=lambda: iterations(network.optimizer), close=epochs.stop
    )

  return make_fit


class _Epochs:
  """One long `fit` in its own thread, paused after each epoch so that others run in between.

  One `fit` per block would be unfair to Keras, as each starts a new iterator.
  """

  def __init__(self, network: Any, data: tf.data.Dataset, library: Any, steps: int) -> None:
    self._network, self._data, self._steps = network, data, steps
    self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
    self._loss, self._error, self._stopped = 0.0, None, False
    self._callback = library.callbacks.LambdaCallback(
      on_epoch_begin=lambda epoch, logs: self._wait(), on_epoch_end=self._report
    )
    self._thread = threading.Thread(target=self._fit, daemon=True)

  def next(self) -> float:
    if not self._thread.is_alive():
      self._thread.start()
    self._go.release()
    if not self._done.acquire(timeout=_ANSWER_TIMEOUT_S):
      raise TimeoutError(f"an epoch did not end within {_ANSWER_TIMEOUT_S:.0f} s")
    if self._error:
      raise self._error
    return self._loss

  def stop(self) -> None:
    self._stopped = True
    self._go.release()

  def _fit(self) -> None:
    try:
      self._network.fit(
        self._data,
        steps_per_epoch=self._steps,
        epochs=1_000_000,
        verbose=0,
        callbacks=[self._callback],
      )
    except Exception as error:
      self._error = error
      self._done.release()

  def _wait(self) -> None:
    self._go.acquire()
    if self._stopped:
      raise SystemExit  # ends this thread only

  def _report(self, epoch: int, logs: dict[str, float]) -> None:
    self._loss = float(logs["loss"])
    self._done.release()


def _peer_strategy(replicas: int, ops: str | None = None) -> tf.distribute.Strategy:
  """TensorFlow's defaults; an `ops` that is not None selects its ReductionToOneDevice."""
  if replicas == 1:
    return tf.distribute.get_strategy()
  cross_device_ops = tf.distribute.ReductionToOneDevice() if ops else None
  return tf.distribute.MirroredStrategy(factories.split_cpu(replicas), cross_device_ops)


def iterations(optimizer: Any) -> int:
  return int(optimizer.iterations.numpy())


_MAKERS: dict[str, Callable[[str, int, int], Contender]] = {
  "hand": _hand_written(),
  "hand_one_device": _hand_written(ops="reduction_to_one_device"),
  "loopwright": _loopwright(),
  "orbit": _orbit,
  "keras_fit": _keras_fit(keras),
  "keras_fit_spe": _keras_fit(keras, STEPS_PER_EXECUTION),
  "tf_keras_fit": _keras_fit(tf_keras),
  "hand_xla": _hand_written(ops="reduction_to_one_device", xla=True),
  "loopwright_xla": _loopwright(jit_compile=True),
}

TITLES = {
  "hand": "hand-written loop",
  "hand_one_device": "hand-written, ReductionToOneDevice",
  "loopwright": "**Loopwright**",
  "orbit": "orbit.StandardTrainer",
  "keras_fit": "Keras 3 fit",
  "keras_fit_spe": f"Keras 3 fit, steps_per_execution={STEPS_PER_EXECUTION}",
  "tf_keras_fit": "tf_keras fit",
  "hand_xla": "hand-written, XLA",
  "loopwright_xla": "**Loopwright**, jit_compile=True",
}


def names(model: str, replicas: int) -> list[str]:
  """Returns who trains a model; with one replica there is no reduction to choose."""
  of = models.MODELS[model]
  without = {"hand_one_device"} if replicas == 1 else set()
  without |= {"tf_keras_fit"} if of.keras_3 else set()
  without |= set() if of.xla else {"hand_xla", "loopwright_xla"}
  return [name for name in TITLES if name not in without]
