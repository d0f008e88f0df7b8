"""Evaluations per second: Loopwright beside a hand-written loop, Orbit and Keras.

  python -m benchmarks.evaluation                     # about 5 minutes
  python -m benchmarks.evaluation --models mlp --replicas 1 --rounds 5

Each contender evaluates the same model on the same batches, in memory, from the first to the last:
loss and accuracy. A call returns them as Python floats. All take turns in one process per model and
number of replicas; the first call, which traces, is not timed. A ratio is the median [quartiles]
over the rounds, to the faster of two hand-written loops.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from benchmarks import models, turns
from benchmarks.contenders import Classification
from loopwright.evaluator import Evaluator
from loopwright.metrics import weighted_sum
from loopwright.strategies import factories

MODELS = ("mlp", "cnn", "embedding")
BATCHES = 80
"""10,240 examples, about as many as test sets have."""
TOLERANCE = 1e-5

Evaluation = Callable[[], tuple[float, float]]
"""Returns loss and accuracy."""


class _Judged(Classification):
  def metrics(self, outputs: Any, batch: Any) -> Any:
    return {"accuracy": weighted_sum(_hits(batch["label"], outputs), batch["weight"])}


def _hits(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  return tf.cast(tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), labels), tf.float32)


def _loopwright(model: str, replicas: int, batches: int) -> Evaluation:
  strategy = factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default()
  task = _Judged(model)
  with strategy.scope():
    task.model = task.build_model()
  evaluator = Evaluator(task=task, strategy=strategy, dataset=models.dicts(model).take(batches))

  def evaluate() -> tuple[float, float]:
    found = evaluator.evaluate()
    return found["loss"], found["accuracy"]

  return evaluate


def _hand_written(counted: bool) -> Callable[[str, int, int], Evaluation]:
  """An expert's compiled loop; `counted`: over a known number of batches, else over a data set."""

  def make(model: str, replicas: int, batches: int) -> Evaluation:
    strategy = _peer_strategy(replicas)
    with strategy.scope():
      network = models.build(model, keras)
    data = strategy.experimental_distribute_dataset(models.pairs(model).take(batches))

    def replica_step(features: Any, labels: tf.Tensor) -> tf.Tensor:
      logits = network(features, training=False)
      losses = models.per_example_loss(model, labels, logits)
      return tf.stack([tf.reduce_sum(losses), tf.reduce_sum(_hits(labels, logits))])

    def summed(batch: Any) -> tf.Tensor:
      return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    @tf.function
    def over_number(iterator: Any, number: tf.Tensor) -> tf.Tensor:
      total = tf.zeros([2])
      for _ in tf.range(number):
        total += summed(next(iterator))
      return total

    @tf.function
    def over_data(data: Any) -> tf.Tensor:
      total = tf.zeros([2])
      for batch in data:
        total += summed(batch)
      return total

    def evaluate() -> tuple[float, float]:
      total = over_number(iter(data), tf.constant(batches)) if counted else over_data(data)
      loss, accuracy = total.numpy() / (batches * models.MODELS[model].batch_size)
      return float(loss), float(accuracy)

    return evaluate

  return make


class _OrbitEvaluator(orbit.StandardEvaluator):
  """orbit.StandardEvaluator, as the Model Garden uses it, with the loop inside TensorFlow."""

  def __init__(self, model: str, strategy: tf.distribute.Strategy, batches: int) -> None:
    self.strategy, self.judged = strategy, model
    self.network = models.build(model, keras)
    self.means = [tf_keras.metrics.Mean(), tf_keras.metrics.Mean()]
    data = strategy.experimental_distribute_dataset(models.pairs(model).take(batches))
    options = orbit.StandardEvaluatorOptions(use_tf_function=True, use_tf_while_loop=True)
    super().__init__(data, options)

  def eval_begin(self) -> None:
    for mean in self.means:
      mean.reset_state()

  def eval_step(self, iterator: Any) -> None:
    self.strategy.run(self._replica_step, args=next(iterator))

  def _replica_step(self, features: Any, labels: tf.Tensor) -> None:
    logits = self.network(features, training=False)
    self.means[0].update_state(models.per_example_loss(self.judged, labels, logits))
    self.means[1].update_state(_hits(labels, logits))

  def eval_end(self) -> tuple[float, float]:
    return tuple(float(mean.result()) for mean in self.means)


def _orbit(model: str, replicas: int, batches: int) -> Evaluation:
  strategy = _peer_strategy(replicas)
  with strategy.scope():
    evaluator = _OrbitEvaluator(model, strategy, batches)
  number = tf.constant(batches)
  return lambda: evaluator.evaluate(number)


def _keras(model: str, replicas: int, batches: int) -> Evaluation:
  strategy = _peer_strategy(replicas)
  with strategy.scope():
    network = models.build(model, keras)
    network.compile(loss=models.keras_loss(model, keras), metrics=["accuracy"])
  data = models.pairs(model).take(batches)
  return lambda: tuple(network.evaluate(data, verbose=0))


def _peer_strategy(replicas: int) -> tf.distribute.Strategy:
  if replicas == 1:
    return tf.distribute.get_strategy()
  return tf.distribute.MirroredStrategy(factories.split_cpu(replicas))


MAKERS: dict[str, Callable[[str, int, int], Evaluation]] = {
  "**Loopwright**": _loopwright,
  "hand-written, a number of batches": _hand_written(counted=True),
  "hand-written, `for batch in data`": _hand_written(counted=False),
  "orbit.StandardEvaluator": _orbit,
  "Keras 3 evaluate": _keras,
}
REFERENCES = ("hand-written, a number of batches", "hand-written, `for batch in data`")


def measure(model: str, replicas: int, rounds: int, batches: int = BATCHES) -> turns.Times:
  """Returns the seconds of each contender's evaluations.

  Raises:
    ValueError: a contender's loss or accuracy is not that of the others.
  """
  factories.split_cpu(replicas)
  evaluations = {name: make(model, replicas, batches) for name, make in MAKERS.items()}
  found = {name: evaluate() for name, evaluate in evaluations.items()}
  if not np.ptp(list(found.values()), axis=0).max() < TOLERANCE:
    raise ValueError(f"loss and accuracy differ: {found}")
  return turns.seconds(evaluations, rounds)


def report(results: dict[str, turns.Times], batches: int = BATCHES) -> str:
  """Returns a table of ratios, and one of microseconds a batch."""
  lines = [["", *results], ["---"] * (len(results) + 1)]
  for name in MAKERS:
    cells = [turns.ratio(t, name, turns.fastest(t, REFERENCES)) for t in results.values()]
    lines.append([name, *cells])
  for name in MAKERS:
    cells = [f"{np.median(t[name]) / batches * 1e6:.0f}" for t in results.values()]
    lines.append([f"{name}, us a batch", *cells])
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
  """Measures each model and number of replicas in a process of its own; prints the tables."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--models", default=",".join(MODELS))
  parser.add_argument("--replicas", default="1,2")
  parser.add_argument("--rounds", type=int, default=15)
  options = parser.parse_args(arguments)
  results = {}
  spawn = multiprocessing.get_context("spawn")
  for model in options.models.split(","):
    for replicas in map(int, options.replicas.split(",")):
      with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
        times = process.submit(measure, model, replicas, options.rounds).result()
      results[f"{model} x{replicas}"] = times
      print(f"{model} x{replicas} done", file=sys.stderr, flush=True)
  print(report(results))
  return 0


if __name__ == "__main__":
  sys.exit(main())
