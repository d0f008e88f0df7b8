"""The processes of benchmarks/startup.py, which starts each and gives it its arguments.

TensorFlow and the framework are imported in functions: when, and what of them, is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

CONFIGS = {
  "digits": "digits_cnn", "mobilenet": "benchmarks/startup.gin", "language_model": "language_model"
}  # fmt: skip
PICTURES, PICTURE_SHAPE = 2000, (32, 32, 3)


class Watch:
  """Seconds of the parts of a process, one after the other; some come more than once."""

  def __init__(self, started_s: float, result: str) -> None:
    """Takes the clock of the process that started this one: Linux has one for all."""
    self._since, self._result = started_s, result
    self.seconds: dict[str, float] = {}

  def end(self, part: str) -> None:
    """Ends a part, which began where the one before it ended."""
    now = time.perf_counter()
    self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
    self._since = now

  def finish(self) -> NoReturn:
    """Writes the seconds and ends the process."""
    with open(self._result, "w") as file:
      json.dump({**self.seconds, "cpu": time.process_time()}, file)
    os._exit(0)


def main(who: str, model: str, replicas: str, folder: str, result: str, started_s: str) -> None:
  watch = Watch(float(started_s), result)
  (loopwright if who == "loopwright" else by_hand)(model, int(replicas), folder, watch)


# ---- Loopwright ----


def loopwright(model: str, replicas: int, folder: str, watch: Watch) -> None:
  """Runs the command line with the clock in five functions."""
  from loopwright import commands
  from loopwright.configurables import table

  register_roots = table.register_roots

  def imported() -> None:
    register_roots()
    if "imports" not in watch.seconds:
      watch.end("imports")
      _set_clock(watch)

  table.register_roots = imported
  params = ["run.steps_per_loop=1", f"auto.cpu_replicas={replicas}", f"--model_dir={folder}/run"]
  commands.run_process(["loopwright", "train", CONFIGS[model], *params])


def _set_clock(watch: Watch) -> None:
  """Makes the parts of a run, which are imported, tell when they begin and end."""
  from loopwright import trainer
  from loopwright.distribution.reduction import Reduction

  made, proved = "data, model, optimizer", Reduction.prove
  make_iterator, loop = trainer.Trainer.make_iterator, trainer.Trainer.loop
  train = trainer.Trainer.train

  def timed(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
      watch.end(before)
      try:
        return function(*args, **kwargs)
      finally:
        watch.end(after)

    return call

  def first(*args: Any) -> Any:
    train(*args)
    watch.end("first step")
    watch.finish()

  Reduction.prove = timed(proved, made, "proof")
  trainer.Trainer.make_iterator = timed(make_iterator, made, "input pipeline")
  trainer.Trainer.loop = timed(loop, "tracing", "tracing")
  trainer.Trainer.train = first


# ---- The script ----


class Trained(NamedTuple):
  """What a script trains.

  Attributes:
    network: makes the model.
    optimizer: makes the optimizer.
    arrays: features and labels of all examples.
    prepared: (features, labels) of a batch -> those that the loss reads.
    losses: (labels, outputs) -> one for each example, or each element of it.
    batch_size: examples of a step.
  """

  network: Callable[[], Any]
  optimizer: Callable[[], Any]
  arrays: tuple[Any, Any]
  prepared: Callable[[Any, Any], tuple[Any, Any]]
  losses: Callable[[Any, Any], Any]
  batch_size: int


def by_hand(model: str, replicas: int, folder: str, watch: Watch) -> None:
  """A loop as an expert writes it, with the documented calls of Keras 3 and tf.distribute."""
  del folder
  absent = ("sklearn", "matplotlib")
  sys.modules.update(dict.fromkeys(absent))  # so that importing them fails
  import keras
  import tensorflow as tf

  keras.Model  # noqa: B018 (nothing of it is left for later)
  for name in absent:
    del sys.modules[name]
  watch.end("imports")
  made = "data, model, optimizer"
  _without_framework()
  trained = {"digits": _digits, "mobilenet": _mobilenet, "language_model": _language_model}[model]()
  strategy = _strategy(tf, replicas)
  with strategy.scope():
    network, optimizer = trained.network(), trained.optimizer()
    optimizer.build(network.trainable_variables)
  variables = network.trainable_variables
  watch.end(made)
  data = tf.data.Dataset.from_tensor_slices(trained.arrays).shuffle(10_000, seed=0).repeat()
  data = data.batch(trained.batch_size, drop_remainder=True)
  data = data.map(trained.prepared, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
  iterator = iter(strategy.experimental_distribute_dataset(data))
  watch.end("input pipeline")

  def replica_step(features, labels):
    with tf.GradientTape() as tape:
      losses = trained.losses(labels, network(features, training=True))
      loss = tf.reduce_sum(losses) / (trained.batch_size * int(np.prod(losses.shape[1:])))
    gradients = tape.gradient(loss, [v.value for v in variables])
    optimizer.apply(gradients, variables)
    return loss

  @tf.function
  def loop(iterator, num_steps):
    total = 0.0
    for _ in tf.range(num_steps):
      loss = strategy.run(replica_step, args=next(iterator))
      total += strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)
    watch.end("tracing")
    return total

  float(loop(iterator, tf.constant(1)))
  watch.end("first step")
  watch.finish()


def _strategy(tf: Any, replicas: int) -> Any:
  if replicas == 1:
    return tf.distribute.get_strategy()
  cpu = tf.config.list_physical_devices("CPU")[0]
  logical = [tf.config.LogicalDeviceConfiguration()] * replicas
  tf.config.set_logical_device_configuration(cpu, logical)
  return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(replicas)])


def _without_framework() -> None:
  """Lets the script take networks and data from tasks/ although it does not import Loopwright."""

  class Standin(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
      if name.startswith("__"):
        raise AttributeError(name)
      return object

  for name in ("", ".host", ".host.bounded", ".metrics", ".inputs", ".inputs.sources"):
    sys.modules[f"loopwright{name}"] = Standin(f"loopwright{name}")
  loopwright, bounded = sys.modules["loopwright"], sys.modules["loopwright.host.bounded"]
  loopwright.register = lambda made: made
  loopwright.ArraySource = lambda features: features
  loopwright.host, bounded.content = sys.modules["loopwright.host"], _content
  loopwright.host.bounded = bounded


def _content(path: str, *unused: Any, **also_unused: Any) -> bytes:
  with open(path, "rb") as file:
    return file.read()


def _digits() -> Trained:
  import keras
  import tensorflow as tf

  from loopwright.tasks import image_classification

  found = image_classification.digits().sources["train"]
  schedule = keras.optimizers.schedules.CosineDecay(0.002, 1500)

  def prepared(image, label):
    image = tf.pad(tf.cast(image, tf.float32) / 255.0, [[0, 0], [1, 1], [1, 1], [0, 0]])
    return tf.image.random_crop(image, [64, 8, 8, 1]), label

  return Trained(
    lambda: image_classification.cnn(input_shape=(8, 8, 1), classes=10, dropout=0.3),
    lambda: keras.optimizers.Adam(schedule), (found["image"], found["label"]), prepared,
    tf.nn.sparse_softmax_cross_entropy_with_logits, 64,
  )  # fmt: skip


def _mobilenet() -> Trained:
  import keras
  import tensorflow as tf

  def prepared(image, label):
    return tf.cast(image, tf.float32) / 255.0, label

  return Trained(
    mobilenet_v2, keras.optimizers.Adam, pictures(), prepared,
    tf.nn.sparse_softmax_cross_entropy_with_logits, 32,
  )  # fmt: skip


def _language_model() -> Trained:
  import keras
  import tensorflow as tf

  from loopwright.tasks import language_model

  corpus = language_model.python_library()
  found, _ = (language_model.packed(corpus.documents(s), 256) for s in ("train", "eval"))
  schedule = keras.optimizers.schedules.CosineDecay(
    0.0, 3800, alpha=0.1, warmup_target=0.003, warmup_steps=200
  )

  def optimizer():
    made = keras.optimizers.AdamW(schedule, weight_decay=0.1, beta_2=0.98, global_clipnorm=1.0)
    made.exclude_from_weight_decay(var_names=["scale", "embeddings"])
    return made

  def prepared(features, labels):
    return {name: tf.cast(each, tf.int32) for name, each in features.items()}, labels

  def losses(labels, logits):
    target = tf.cast(labels, tf.int32)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(target, 0), logits)
    return each * tf.cast(target >= 0, tf.float32)

  features = {name: found[name] for name in language_model.INPUTS}
  return Trained(
    language_model.transformer, optimizer, (features, found["target"]), prepared, losses, 8
  )


# ---- Both: MobileNetV2, which no config has for images so small ----


def mobilenet_v2() -> Any:
  import keras

  return keras.applications.MobileNetV2(PICTURE_SHAPE, weights=None, classifier_activation=None)


def pictures() -> tuple[np.ndarray, np.ndarray]:
  """Returns uint8 images [n, 32, 32, 3] and int32 labels [n], of noise."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (PICTURES, *PICTURE_SHAPE), np.uint8)
  return images, rng.integers(0, 10, PICTURES, np.int32)


if __name__ == "__main__":
  main(*sys.argv[1:])
