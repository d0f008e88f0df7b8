"""The replay buffer against a Python list, and draws per example against their distribution."""

import numpy as np
import pytest
import tensorflow as tf
from places import PLACES, strategy_of
from scipy import stats

from loopwright.errors import ConfigError
from loopwright.graphs import randomness
from loopwright.inputs import datasets
from loopwright.inputs.replay import Draws, ReplayBuffer

FEATURES = {"x": tf.TensorSpec([2]), "k": tf.TensorSpec([], tf.int64)}


def strategies(mirrored):
  return [strategy_of(place, mirrored) for place in PLACES]


def rows(first, count):
  numbers = np.arange(first, first + count)
  return {"x": np.stack([numbers, -numbers], 1).astype(np.float32), "k": numbers}


def sampled(strategy, buffer, draws):
  def sample():
    index = tf.distribute.get_replica_context().replica_id_in_sync_group
    return buffer.rows(tf.gather(tf.reshape(draws, [strategy.num_replicas_in_sync, -1]), index))

  found = tf.function(lambda: strategy.run(sample), autograph=False)()
  local = [strategy.experimental_local_results(found[name]) for name in ("x", "k")]
  return [np.concatenate([part.numpy() for part in parts]) for parts in local]


@pytest.mark.parametrize("place", range(4))
def test_the_newest_rows_are_sampled_by_their_draws(place, mirrored):
  strategy = strategies(mirrored)[place]
  with strategy.scope():
    buffer = ReplayBuffer(capacity=5, features=FEATURES)
  draws, places = np.array([0, 3, 4, 7, 2**62, 11]), [None] * 5
  with pytest.raises(ConfigError, match=r"found no row: the step would learn from zeros\. Add the"):
    sampled(strategy, buffer, tf.constant(draws))
  assert buffer.size == 0
  added = 0
  for count in (2, 1, 4, 13):
    buffer.add(rows(added, count))
    for number in range(added, added + count):
      places[number % 5] = number
    added += count
    x, k = sampled(strategy, buffer, tf.constant(draws))
    wanted = [places[draw % min(added, 5)] for draw in draws.tolist()]
    assert buffer.size == min(added, 5)
    assert k.tolist() == wanted
    assert x.tolist() == [[number, -number] for number in wanted]


def test_a_checkpoint_has_the_rows(tmp_path, mirrored):
  made = []
  for _ in range(2):
    with mirrored(2).scope():
      made.append(ReplayBuffer(capacity=5, features=FEATURES))
  made[0].add(rows(0, 7))
  path = tf.train.Checkpoint(model={"replay": made[0]}).write(str(tmp_path / "c"))
  tf.train.Checkpoint(model={"replay": made[1]}).read(path).assert_consumed()
  for one in made:
    one.add(rows(7, 1))
  draws = tf.range(5, dtype=tf.int64)
  assert made[1].rows(draws)["k"].numpy().tolist() == [5, 6, 7, 3, 4]
  assert np.array_equal(made[0].rows(draws)["x"], made[1].rows(draws)["x"])


def test_draws_are_uniform_and_the_same_on_any_number_of_workers():
  data = datasets.train_dataset(Draws(), global_batch_size=4096, seed=3)
  [batch] = data.take(1).as_numpy_iterator()
  assert batch["draw"].min() >= 0
  assert stats.kstest(batch["draw"] / 2.0**63, "uniform").pvalue > 0.01
  share = datasets.train_dataset(Draws(), global_batch_size=4096, seed=3, rows=range(1024, 2048))
  assert np.array_equal(next(share.as_numpy_iterator())["draw"], batch["draw"][1024:2048])
  in_order = datasets.train_dataset(Draws(), global_batch_size=4096, shuffle=False)
  draws = next(in_order.as_numpy_iterator())["draw"] / 2.0**63
  assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.05


def test_draws_of_each_row_are_normal_and_its_own():
  seeds = tf.stack([tf.range(20_000), tf.zeros(20_000, tf.int32)], 1)
  draws = randomness.normal_each(seeds, [3]).numpy()
  uniform = randomness.uniform_each(seeds, [2, 2]).numpy()
  assert (draws.shape, uniform.shape) == ((20_000, 3), (20_000, 2, 2))
  assert stats.kstest(draws.reshape([-1]), "norm").pvalue > 0.01
  assert stats.kstest(uniform[:, 1, 0], "uniform").pvalue > 0.01
  assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.03
  assert abs(np.corrcoef(draws[1:, 0], draws[:-1, 0])[0, 1]) < 0.03
  for part in (slice(0, 2), slice(7, 8), slice(13, 1000)):
    assert np.array_equal(randomness.normal_each(seeds[part], [3]), draws[part])


@pytest.mark.parametrize(
  ("added", "line"),
  [
    ({"x": np.zeros([1, 2], np.float32)}, r"got \['x'\]; it must get \['k', 'x'\]"),
    ({**rows(0, 1), "k": np.zeros(1, np.int32)}, "'k' as int32 .* it must be int64"),
    ({**rows(0, 1), "x": np.zeros([1, 3], np.float32)}, r"shape \(1, 3\); .* float32 \[n, 2\]"),
    ({**rows(0, 1), "k": np.arange(2)}, "the same number of rows"),
    (rows(0, 0), "at least 1"),
  ],
)
def test_other_rows_are_refused(added, line):
  with pytest.raises(ConfigError, match=line):
    ReplayBuffer(capacity=5, features=FEATURES).add(added)


@pytest.mark.parametrize(
  ("options", "line"),
  [
    ({"capacity": 0, "features": FEATURES}, "ReplayBuffer.capacity is 0"),
    ({"capacity": 1, "features": {}}, "features is empty"),
    ({"capacity": 1, "features": {"x": tf.TensorSpec([None])}}, "must be a tf.TensorSpec of one"),
  ],
)
def test_a_buffer_needs_rows_of_static_shapes(options, line):
  with pytest.raises(ConfigError, match=line):
    ReplayBuffer(**options)


def test_an_evaluation_of_draws_needs_an_end():
  with pytest.raises(ConfigError, match=r"a Draws, which has no end; .*run.eval_steps"):
    datasets.eval_dataset(Draws(), global_batch_size=4)
  assert len(list(datasets.eval_dataset(Draws(), global_batch_size=4, steps=3))) == 3
