import math

import numpy as np
import pytest
import tensorflow as tf

from loopwright import metrics
from loopwright.errors import ConfigError
from loopwright.metrics.rows import CollectedRows
from loopwright.metrics.sums import MetricSums
from loopwright.tools.verify.bench.bench import numbers


def pair(total, weight):
  return tf.constant(float(total)), tf.constant(float(weight))


def made(strategy):
  with strategy.scope():
    return MetricSums()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_result_is_the_weighted_mean_over_replicas_and_steps(mirrored, replicas):
  strategy = mirrored(replicas)
  sums = made(strategy)
  rng = np.random.default_rng(0)
  totals, weights = rng.integers(1, 9, size=(2, 5, replicas)).astype(np.float64)

  def replica_step(step):
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    total, weight = tf.gather(totals, step)[replica], tf.gather(weights, step)[replica]
    sums.add({"one": (total, weight), "two": (2 * total, weight)})

  @tf.function
  def loop():
    for step in tf.range(5):
      strategy.run(replica_step, args=(step,))

  loop()
  mean = totals.sum() / weights.sum()
  assert sums.result() == pytest.approx({"one": mean, "two": 2 * mean}, rel=1e-12)


def test_reading_starts_again_from_zero(mirrored):
  strategy = mirrored(2)
  sums = made(strategy)

  @tf.function
  def add(total):
    strategy.run(lambda: sums.add({"loss": (total, tf.constant(1.0))}))

  for value in (3.0, 5.0):
    add(tf.constant(value))
    assert sums.result() == {"loss": value}
  assert math.isnan(sums.result()["loss"])


def test_replicas_communicate_in_one_compiled_sum(mirrored, monkeypatch):
  strategy = mirrored(2)
  sums = made(strategy)
  eager = []
  reduce_to = type(strategy.extended).reduce_to

  def counted(*arguments, **options):
    eager.append(tf.executing_eagerly())
    return reduce_to(*arguments, **options)

  monkeypatch.setattr(type(strategy.extended), "reduce_to", counted)
  for _ in range(3):
    sums.reset()
    strategy.run(lambda: sums.add({"loss": pair(3, 2)}))
    assert sums.result() == {"loss": 1.5}
  assert eager == [False]  # traced once


def test_no_weight_at_all_is_nan_and_leaves_the_others_alone():
  sums = made(tf.distribute.get_strategy())
  sums.add({"idle": pair(0, 0), "busy": pair(6, 2)})
  results = sums.result()
  assert math.isnan(results["idle"])
  assert results["busy"] == 3.0


def test_small_steps_are_not_lost_in_a_long_sum():
  """In float32 a sum stops growing by ones at 2**24."""
  sums = made(tf.distribute.get_strategy())
  sums.add({"loss": pair(2**24, 1)})
  for _ in range(3):
    sums.add({"loss": pair(1, 0)})
  assert sums.result() == {"loss": 2**24 + 3}


def test_a_step_may_log_another_choice_of_names():
  sums = made(tf.distribute.get_strategy())
  sums.add({"a": pair(1, 1)})
  sums.add({"b": pair(4, 2), "a": pair(5, 1)})
  sums.add({})
  assert sums.result() == {"a": 3.0, "b": 2.0}


@pytest.mark.parametrize("replicas", [1, 3])
def test_there_is_no_limit_and_a_later_trace_may_have_more(replicas, mirrored):
  strategy = mirrored(replicas)
  sums = made(strategy)

  def add(names, total):
    tf.function(lambda: strategy.run(lambda: sums.add({n: pair(total, 2) for n in names})))()

  add([f"m{i}" for i in range(70)], 3)
  add([f"m{i}" for i in range(60, 200)], 5)
  results = sums.result()
  assert len(results) == 200
  expected = [1.5] * 60 + [(3 + 5) / 4] * 10 + [2.5] * 130
  assert [results[f"m{i}"] for i in range(200)] == expected


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sum_has_its_shape_and_is_not_divided(replicas, mirrored):
  strategy = mirrored(replicas)
  sums = made(strategy)
  table = np.arange(6).reshape(2, 3)

  def replica_step(step):
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    each = tf.constant(table) * (1 + tf.cast(replica + step, tf.int64))
    hits = tf.constant([True, False])
    values = {"table": metrics.Sum(each), "loss": pair(6, 3), "hits": metrics.Sum(hits)}
    sums.add({**values, "large": metrics.Sum(tf.constant(2**40 + 1, tf.int64))})

  @tf.function
  def loop():
    for step in tf.range(4):
      strategy.run(replica_step, args=(step,))

  loop()
  assert sums.result() == {"loss": 2.0}
  factors = sum(1 + replica + step for replica in range(replicas) for step in range(4))
  np.testing.assert_array_equal(sums.sums["table"], factors * table, strict=False)
  assert sums.sums["table"].dtype == np.float64
  assert sums.sums["hits"].tolist() == [4.0 * replicas, 0.0]
  assert sums.sums["large"] == 4 * replicas * (2**40 + 1)
  assert type(sums.sums["large"]) is float
  sums.result()
  assert not sums.sums["table"].any()


def test_rows_come_in_the_order_of_the_batches():
  rows = CollectedRows()
  for batch in range(40):
    values, weight = np.array([[batch], [batch + 0.5]]), np.array([1, batch % 2])
    rows.add({"x": metrics.PerExample(values, weight)})
  expected = [v for b in range(40) for v in ([b, b + 0.5] if b % 2 else [b])]
  assert rows.result()["x"][:, 0].tolist() == expected
  rows.add({"x": metrics.PerExample(np.ones([2, 3]), np.ones([2]))})
  with pytest.raises(ConfigError, match=r"'x' has rows of shape \(1,\) in one batch and \(3,\)"):
    rows.result()


def test_arrays_as_numbers_to_compare():
  values = {"loss": 0.5, "table": np.array([[1, 2], [3, 4]]), "bins": np.full([17], 2.0)}
  assert numbers(values) == {
    "loss": 0.5, "table[0, 0]": 1.0, "table[0, 1]": 2.0, "table[1, 0]": 3.0, "table[1, 1]": 4.0,
    "sum of bins": 34.0, "sum of squares of bins": 68.0,
  }  # fmt: skip


def test_a_sum_keeps_its_shape():
  sums = made(tf.distribute.get_strategy())
  sums.add({"bins": metrics.Sum(tf.ones([3]))})
  with pytest.raises(
    ConfigError, match=r"'bins' is a Sum of shape \(2,\), but it was a Sum of shape \(3,\)"
  ):
    sums.add({"bins": metrics.Sum(tf.ones([2]))})
  with pytest.raises(ConfigError, match=r"'bins' is a pair .*, but it was a Sum"):
    sums.add({"bins": pair(1, 1)})


@pytest.mark.parametrize(
  ("value", "message"),
  [
    (metrics.Sum("text"), r"metric 'loss' is a Sum of string; it must hold numbers"),
    (
      metrics.PerExample(tf.ones([3, 2]), tf.ones([2])),
      r"'loss' is a PerExample of values \(3, 2\) and weight \(2,\); they must be \[n, ...\]",
    ),
    (metrics.PerExample(tf.constant(1.0), tf.ones([1])), r"PerExample of values \(\) and weight"),
    (tf.constant(1.0), r"metric 'loss' is .*; it must be a pair \(total, weight\)"),
    ((1.0, 2.0, 3.0), r"metric 'loss' is .*tuple; it must be a pair"),
    ((tf.ones([2]), tf.constant(1.0)), r"metric 'loss' has shape \(2,\).*must be scalars"),
    ((tf.constant(1.0), tf.ones([2, 2])), r"metric 'loss' has shape \(2, 2\)"),
  ],
  ids=["text", "lengths", "scalar", "tensor", "triple", "vector_total", "matrix_weight"],
)
def test_what_is_no_pair_of_scalars_is_refused(value, message):
  with pytest.raises(ConfigError, match=message):
    made(tf.distribute.get_strategy()).add({"loss": value})


def test_metrics_without_names_are_refused():
  with pytest.raises(ConfigError, match="the metrics are a tuple; they must be a dict of name -> "):
    made(tf.distribute.get_strategy()).add(pair(1, 2))
