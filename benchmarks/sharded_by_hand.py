"""Weights in parts under MirroredStrategy, gathered by hand: the memory and CPU time of a step.

  uv run python -m benchmarks.sharded_by_hand WAY [REPLICAS]

A network of 12 dense layers of 512 units, Adam. Ways: "whole"; each replica keeps a part of each
layer's weights and gathers all at the "start" of the step, each in its "layer", or each in its
layer and again in the backward pass, by tf.recompute_grad ("again").
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

WIDTH, LAYERS, BATCH = 512, 12, 24
MIB = 2**20


def main(way: str, count: int = 2) -> None:
  parts = [tf.config.LogicalDeviceConfiguration()] * count
  tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
  strategy = tf.distribute.MirroredStrategy(
    [f"CPU:{number}" for number in range(count)],
    cross_device_ops=tf.distribute.ReductionToOneDevice(),
  )
  rng, size = np.random.default_rng(0), WIDTH * WIDTH // count
  first = [rng.normal(size=[WIDTH, WIDTH]).astype(np.float32) / WIDTH**0.5 for _ in range(LAYERS)]

  def variable(value: Any) -> tf.Variable:
    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(value, trainable=False, aggregation=aggregation)

  with strategy.scope():
    kept = [variable(value if way == "whole" else tf.zeros([size])) for value in first]
    slots = [[variable(tf.zeros(v.shape)) for v in kept] for _ in range(2)]
  if way != "whole":
    for weight, value in zip(kept, first, strict=True):
      for number, copy in enumerate(weight.values):
        copy.assign(value.reshape(-1)[number * size : (number + 1) * size])

  def own(mirrored: Any) -> tf.Variable:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return mirrored.values[tf.get_static_value(replica)]

  def gathered(part: tf.Tensor) -> tf.Tensor:
    whole = tf.distribute.get_replica_context().all_gather(part, axis=0)
    return tf.reshape(whole, [WIDTH, WIDTH])

  def layer(x: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    return tf.tanh(x @ (part if way in ("whole", "start") else gathered(part)))

  def replica_step(x: tf.Tensor) -> tf.Tensor:
    values = [own(v).read_value() for v in kept]
    with tf.GradientTape() as tape:
      tape.watch(values)
      used = [gathered(v) for v in values] if way == "start" else values
      for value in used:
        x = (tf.recompute_grad(layer) if way == "again" else layer)(x, value)
      loss = tf.reduce_sum(tf.square(x - 1.0))
    gradients = tape.gradient(loss, values)  # of parts: all_gather's gradient sums over replicas
    if way == "whole":
      gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    for index, gradient in enumerate(gradients):
      weight, mean, square = own(kept[index]), own(slots[0][index]), own(slots[1][index])
      mean.assign_add(0.1 * (gradient - mean))
      square.assign_add(0.01 * (tf.square(gradient) - square))
      weight.assign_sub(1e-4 * mean / (tf.sqrt(square) + 1e-3))
    return loss

  step = tf.function(lambda x: strategy.run(replica_step, args=(x,)), autograph=False)
  rows = tf.split(tf.constant(rng.normal(size=[BATCH, WIDTH]), tf.float32), count)
  batch = strategy.experimental_distribute_values_from_function(
    lambda context: rows[context.replica_id_in_sync_group]
  )
  peaks, taken, total = [], [], 0.0
  for _ in range(15):
    tf.config.experimental.reset_memory_stats("CPU:0")
    began = time.process_time()
    total = sum(float(loss) for loss in strategy.experimental_local_results(step(batch)))
    taken.append(time.process_time() - began)
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] / count / MIB)
  state = 3 * kept[0].shape.num_elements() * 4 * LAYERS / MIB
  print(
    f"{way} | {state:.1f} MiB kept, peak {statistics.median(peaks[3:]):.1f} | "
    f"{statistics.median(taken[3:]) * 1e3:.0f} ms of CPU | loss {total:.6f}"
  )


if __name__ == "__main__":
  main(sys.argv[1], *map(int, sys.argv[2:]))
