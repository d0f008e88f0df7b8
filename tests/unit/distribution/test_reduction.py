import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from loopwright.distribution import proof
from loopwright.distribution.reduction import WIRE_DTYPES, Reduction
from loopwright.errors import ConfigError

PACKINGS = ("flat", "per_tensor")
SHAPES = {"matrix": (2, 3), "scalar": (), "vector": (4,), "empty": (0, 2)}


def contribution(name, replica):
  """Small whole numbers, different on every replica and in every place; exact in every dtype."""
  shape = SHAPES[name]
  return np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape) * (replica + 1)


def reduced(strategy, how, dtypes, scalars=(1.0,)):
  """All-reduces one tensor a shape; returns, for each replica, (gradients, scalars) as NumPy."""

  def replica_step():
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    factor = tf.cast(replica + 1, tf.float64)
    gradients = [
      tf.cast(tf.constant(contribution(name, 0), tf.float64) * factor, dtype)
      for name, dtype in zip(SHAPES, dtypes, strict=True)
    ]
    return how.all_reduce(
      gradients, [tf.constant(s) * tf.cast(factor, tf.float32) for s in scalars]
    )

  results = tf.function(lambda: strategy.run(replica_step))()
  flat = [strategy.experimental_local_results(r) for r in tf.nest.flatten(results)]
  replicas = range(strategy.num_replicas_in_sync)
  per_replica = [[value[r] for value in flat] for r in replicas]
  return [(values[: len(SHAPES)], values[len(SHAPES) :]) for values in per_replica]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
  "dtypes",
  [["float32"] * 4, ["float32", "float64", "bfloat16", "float32"]],
  ids=["one_dtype", "mixed"],
)
def test_every_replica_gets_the_exact_sums_in_order_and_dtype(mirrored, packing, replicas, dtypes):
  factor = sum(range(1, replicas + 1))
  for gradients, scalars in reduced(mirrored(replicas), Reduction(packing=packing), dtypes):
    for name, dtype, got in zip(SHAPES, dtypes, gradients, strict=True):
      assert (got.dtype, got.shape) == (dtype, SHAPES[name])
      np.testing.assert_array_equal(tf.cast(got, "float64"), contribution(name, 0) * factor)
    assert [float(s) for s in scalars] == [factor]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_scalars_keep_their_dtype_on_a_narrow_wire(mirrored, packing, wire_dtype):
  how = Reduction(packing=packing, wire_dtype=wire_dtype)
  precise = float(np.float32(1000.123))
  for gradients, scalars in reduced(mirrored(2), how, ["float32"] * 4, scalars=(precise,)):
    assert scalars[0].dtype == tf.float32
    assert float(scalars[0]) == float(np.float32(precise) + np.float32(2 * precise))
    assert {g.dtype for g in gradients} == {tf.float32}


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_are_rounded_to_the_wire_dtype_on_one_replica_too(mirrored, replicas):
  def replica_step():
    gradients = [tf.constant([1 + 2.0**-9, 70000.0])]
    return Reduction(wire_dtype="float16").all_reduce(gradients, [])[0][0]

  strategy = mirrored(replicas)
  result = tf.function(lambda: strategy.run(replica_step))()
  for got in strategy.experimental_local_results(result):
    np.testing.assert_array_equal(got, [replicas * (1 + 2.0**-9), np.inf])


def test_a_flat_all_reduce_is_one_communication(mirrored):
  strategy = mirrored(2)

  def count(packing):
    calls = []

    def replica_step():
      context = tf.distribute.get_replica_context()
      original = context.all_reduce
      context.all_reduce = lambda op, value, options=None: (
        calls.append(len(tf.nest.flatten(value))) or original(op, value, options)
      )
      Reduction(packing=packing).all_reduce([tf.ones([3]), tf.ones([2, 2])], [tf.ones([])])

    tf.function(lambda: strategy.run(replica_step)).get_concrete_function()
    return calls

  assert count("flat") == [1, 1]  # each of two replicas hands over one buffer, once
  assert count("per_tensor") == [3, 3]


@pytest.mark.parametrize("wire_dtype", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_right_all_reduce_proves_itself(mirrored, packing, wire_dtype):
  how = Reduction(packing=packing, wire_dtype=wire_dtype)
  how.prove(mirrored(3), [tf.float32, tf.bfloat16, tf.float64, tf.float32])


PROOF_OF_MANY = """
import tensorflow as tf
from loopwright.distribution.reduction import Reduction

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 19)
strategy = tf.distribute.MirroredStrategy(
  [f"CPU:{i}" for i in range(19)], cross_device_ops=tf.distribute.ReductionToOneDevice()
)
Reduction(wire_dtype="bfloat16").prove(strategy, [tf.float32])
"""


@pytest.mark.whole
def test_a_right_all_reduce_over_many_replicas_proves_itself_in_bfloat16():
  """Added up over all 19, the contributions would come to 275, which bfloat16 does not hold."""
  root = Path(proof.__file__).parents[2]
  command = [sys.executable, "-c", PROOF_OF_MANY]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-3000:]


class Forgetful(tf.distribute.ReductionToOneDevice):
  """Leaves out one replica, or counts it twice."""

  def __init__(self, weights):
    super().__init__(accumulation_fn=lambda values: tf.add_n(self._weighted(values)))
    self._weights = weights

  def _weighted(self, values):
    return [v * tf.cast(w, v.dtype) for v, w in zip(values, self._weights, strict=True)]


@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (2, 1), (1, 2), (0.5, 0.5)])
def test_a_wrong_all_reduce_is_found_out(weights):
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=Forgetful(weights))
  with pytest.raises(ConfigError, match=r"float32 over 2 replicas is wrong: expected \[3.0"):
    Reduction().prove(strategy, [tf.float32])


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 2)])
def test_a_replica_of_a_later_group_is_left_out_or_counted_twice(weights, monkeypatch):
  """Replicas 0 and 1 fill one row with 1 + 2 times 1, ..., 6, and replica 2 fills the other."""
  monkeypatch.setattr(proof, "_GROUP", 2)
  devices = ["CPU:0", "CPU:1", "CPU:2"]
  strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=Forgetful(weights))
  refused = pytest.raises(ConfigError, match=r"over 3 replicas is wrong: expected \[[31]\.0, ")
  with contextlib.nullcontext() if weights == (1, 1, 1) else refused:
    Reduction().prove(strategy, [tf.float32])


def test_an_all_reduce_that_changes_the_dtype_is_found_out(mirrored, monkeypatch):
  how = Reduction()
  monkeypatch.setattr(
    how,
    "all_reduce",
    lambda g, s: ([tf.cast(2 * x, "float64") for x in g], [2 * x for x in s]),
  )
  with pytest.raises(ConfigError, match=r"of float32 over . replicas is wrong"):
    how.prove(mirrored(2), [tf.float32])


def test_one_replica_has_nothing_to_prove_and_nothing_to_gather(monkeypatch):
  how, rows = Reduction(), tf.constant([[1.0, 2.0]])
  monkeypatch.setattr(how, "all_reduce", None)
  how.prove(tf.distribute.get_strategy(), [tf.float32])
  assert how.all_gather(rows) is rows


def test_options_of_collectives_reach_tensorflow():
  given, usual = Reduction(bytes_per_pack=4096, timeout_s=7.0)._options, Reduction()._options
  assert (given.bytes_per_pack, given.timeout_seconds) == (4096, 7.0)
  assert (usual.bytes_per_pack, usual.timeout_seconds) == (0, None)


def test_unknown_options_are_refused_with_the_nearest_name():
  with pytest.raises(
    ConfigError, match=r"Reduction.packing 'flatt'.*flat, per_tensor.*mean 'flat'"
  ):
    Reduction(packing="flatt")
  with pytest.raises(ConfigError, match=r"Reduction.wire_dtype 'bfloat'.*mean 'bfloat16'"):
    Reduction(wire_dtype="bfloat")


def test_description_names_packing_and_wire():
  assert Reduction().describe() == "flat, own dtype"
  narrow = Reduction(packing="per_tensor", wire_dtype="bfloat16")
  assert narrow.describe() == "per_tensor, bfloat16 dtype"
  assert set(WIRE_DTYPES) == {"float32", "bfloat16", "float16"}
