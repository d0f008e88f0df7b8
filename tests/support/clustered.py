"""A task for clusters: on disk it leaves what each worker read and learned, and it can fail."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import Action, ArraySource, Loss, Task
from loopwright.metrics import PerExample, Sum, weighted_sum
from loopwright.models import models

EXAMPLES = 30
RNG = np.random.default_rng(3)
X = RNG.normal(size=[EXAMPLES, 3]).astype(np.float32)
Y = RNG.normal(size=EXAMPLES).astype(np.float32)
WEIGHT = RNG.uniform(0.5, 2.0, size=EXAMPLES).astype(np.float32)
KERNEL = np.array([[1.0], [-0.5], [2.0]], np.float32)
WORKER = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]


def _terminate_once_connected():
  """Sends SIGTERM while the handler of TensorFlow's strategy is the process's."""
  made = tf.distribute.MultiWorkerMirroredStrategy

  def terminated(*arguments):
    strategy = made(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    return strategy

  tf.distribute.MultiWorkerMirroredStrategy = terminated


@loopwright.register
class Clustered(Task):
  """Linear regression; every worker appends the ids of its rows to ids-<worker>.

  The target of example `infinite` is infinite. Worker `terminates` gets SIGTERM while it builds its
  model, worker `connecting` as soon as TensorFlow has connected it. "rare" is updated in every
  third step, "slow" follows the kernel in every second one.
  """

  def __init__(
    self,
    *,
    folder: str,
    batch_norm: bool = False,
    infinite: int | None = None,
    terminates: int | None = None,
    connecting: int | None = None,
  ) -> None:
    if connecting == WORKER:
      _terminate_once_connected()
    self._folder, self._batch_norm, self._terminates = Path(folder), batch_norm, terminates
    self._targets = np.where(np.arange(EXAMPLES) == infinite, np.float32(np.inf), Y)

  def build_model(self):
    if self._terminates == WORKER:
      os.kill(os.getpid(), signal.SIGTERM)
    layers = [keras.layers.BatchNormalization()] if self._batch_norm else []
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input([3]), *layers, dense])
    dense.kernel.assign(KERNEL)
    self._kernel = dense.kernel
    slow = tf.Variable(tf.zeros([3, 1]), trainable=False, name="slow")
    return {"net": model, "rare": tf.Variable(tf.ones([3]), name="rare"), "slow": slow}

  def variables_of(self, optimizer):
    return [self.model["rare"]] if optimizer == "rare" else self.model["net"].trainable_variables

  def train_step(self, step, batch):
    super().train_step(step, batch)
    step.update(self._rare_loss, batch, "rare", when=step.number % 3 == 1)
    slow = 0.75 * self.model["slow"] + 0.25 * tf.convert_to_tensor(self._kernel)
    step.assign(self.model["slow"], slow, when=step.number % 2 == 0)

  def _rare_loss(self, batch):
    return Loss.from_examples(tf.linalg.matvec(batch["x"], self.model["rare"]), batch["weight"])

  def source(self, split):
    return ArraySource(features={"x": X, "y": self._targets, "weight": WEIGHT})

  def forward(self, batch, training):
    x = batch["x"]
    if training:
      zero = tf.numpy_function(self._note, [batch["example_id"]], tf.float32)
      x += tf.ensure_shape(zero, [])
    return self.model["net"](x, training=training)[:, 0]

  def _note(self, ids):
    with open(self._folder / f"ids-{WORKER}", "a") as file:
      file.write(" ".join(map(str, ids)) + "\n")
    return np.float32(0)

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

  def metrics(self, outputs, batch):
    weight = tf.cast(batch["weight"] > 0, tf.float32)
    return {
      "rows": weighted_sum(tf.ones_like(outputs), weight),
      "halves": Sum(tf.reduce_sum(tf.one_hot(batch["example_id"] // 15, 2), axis=0)),
      "ids": PerExample(batch["example_id"], weight),
    }

  def derived(self, values):
    """Fails where a worker has other rows than the others, which only the chief would report."""
    if "ids" in values and values["ids"].tolist() != list(range(EXAMPLES)):
      raise ValueError(f"worker {WORKER} has the rows {values['ids']}")
    return {"halves": values["halves"]}


@loopwright.register
class Keeper(Action):
  """Keeps each worker's variables after every loop, and sends signals to its own process.

  `signals` maps such as "worker 1 step 5" to the number of a signal; each is sent once. A loop
  takes `pause_s` longer.
  """

  on = "train"

  def __init__(
    self, *, folder: str, signals: Mapping[str, int] | None = None, pause_s: float = 0.0
  ) -> None:
    self._folder, self._signals, self._pause_s = Path(folder), signals or {}, pause_s

  def __call__(self, output):
    time.sleep(self._pause_s)
    values = [models.raw(v).numpy() for v in models.all_variables(self.run.task.model)]
    np.savez(self._folder / f"variables-{WORKER}.npz", *values)
    now = f"worker {WORKER} step {self.run.step}"
    done = self._folder / f"sent at {now}"
    if now in self._signals and not done.exists():
      done.touch()
      os.kill(os.getpid(), self._signals[now])
