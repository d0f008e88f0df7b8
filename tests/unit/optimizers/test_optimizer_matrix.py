"""The matrix of optimizers: its rows, what it refuses, and those with odd state in each way."""

import keras
import pytest
import tensorflow as tf

from benchmarks import optimizer_matrix as matrix
from loopwright.errors import ConfigError
from loopwright.models import models
from loopwright.optimizers import adapters, rollback
from loopwright.optimizers.adapters import Optimizer
from tests.support import places

ODD = {"ScheduleFreeAdamW", "Muon", "Lamb", "Adafactor", "Nadam", "Lion"}


def test_every_optimizer_of_keras_is_in_the_matrix():
  assert matrix.missing() == []


def test_each_row_of_the_page_is_an_entry():
  calls = "; ".join(row.strip("| ").split(" | ")[0] for row in matrix.ROWS_OF_PAGE)
  assert calls == "; ".join(f"`{entry}`" for entry in matrix.ENTRIES)


@pytest.mark.parametrize("way", ["one", "sharded", "ema"])
@pytest.mark.fast(way=["sharded"])
def test_what_is_refused_is_refused_in_one_line(way):
  refused = [e for e in matrix.ENTRIES if e.refused or way in e.refuses]
  assert len(refused) > 10
  assert [line for entry in refused for line in matrix._unrefused(entry, way)] == []


@pytest.mark.parametrize("way", matrix.WAYS)
@pytest.mark.whole
def test_groups_are_equal_to_an_optimizer_for_each_variable(way):
  entries = [e for e in matrix.ENTRIES if e.groups and way not in e.refuses]
  assert matrix.TRIALS[way](entries) == []


@pytest.mark.parametrize("way", matrix.WAYS)
@pytest.mark.fast(way=["warm", "central"])
def test_those_with_odd_state_are_equal_to_a_plain_loop(way):
  entries = [
    e for e in matrix.ENTRIES
    if e.name in ODD and e.library == "keras" and not (e.groups or way in e.refuses)
  ]  # fmt: skip
  assert matrix.TRIALS[way](entries) == []


def test_a_warm_start_is_lost_where_the_state_keeps_the_first_weights(monkeypatch):
  """What Keras does by itself: the matrix must see it."""
  monkeypatch.setattr(Optimizer, "restart", lambda self: None)
  [free] = [e for e in matrix.ENTRIES if str(e) == "keras.ScheduleFreeAdamW()"]
  [line] = matrix.TRIALS["warm"]([free])
  assert line.startswith("keras.ScheduleFreeAdamW(): ")


def test_muon_is_refused_where_replicas_share_variables():
  """Its weight decay assigns outside of the strategy's update, which fails there."""
  with places.central_storage().scope():
    weights, step = [tf.Variable([[1.0]])], tf.Variable(0, dtype=tf.int64)
    with pytest.raises(ConfigError, match="optimizer 'default' is a Muon, whose weight decay"):
      adapters.build(keras.optimizers.Muon, lambda _: weights, step)
    adapters.build(keras.optimizers.AdamW, lambda _: weights, step)


def test_undoing_an_update_of_nadam_knows_its_schedule():
  weights, step = [tf.Variable([1.0])], tf.Variable(0, dtype=tf.int64)
  made = adapters.build(lambda: keras.optimizers.Nadam(0.1), lambda _: weights, step)["default"]
  product = models.raw(made.optimizer._u_product)
  assert any(v is product for v in rollback.changed_by(made, None))
