"""Each known trap: first the naive way and how it fails, then the framework on the very same case.

The table of traps is in docs/architecture.md.
"""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import slope
import tensorflow as tf
from runs import make_evaluator, make_trainer

import loopwright
from loopwright import trainer
from loopwright.distribution import reduction
from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.optimizers import loss_scale
from loopwright.strategies import factories


@pytest.fixture
def two(mirrored):
  return mirrored(2)


# ---- HierarchicalCopyAllReduce with an odd number of replicas ----


def odd_hierarchical_copy():
  return tf.distribute.MirroredStrategy(
    ["CPU:0", "CPU:1", "CPU:2"], cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
  )


def sum_over(strategy, values, all_reduce):
  """What the first replica gets."""

  @tf.function
  def run(given):
    return strategy.run(all_reduce, args=(given,))

  results = run(slope.per_replica(strategy, values))
  return float(strategy.experimental_local_results(results)[0])


def all_reduce_by_hand(value):
  value = tf.identity(value)  # on the replica's device, which NCCL asks for
  return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def test_hierarchical_copy_drops_the_last_of_an_odd_number(mirrored):
  assert sum_over(odd_hierarchical_copy(), [1.0, 2.0, 4.0], all_reduce_by_hand) == 3.0

  with pytest.raises(ConfigError, match="'hierarchical_copy' with 3 replicas"):
    factories.mirrored(cpu_replicas=3, cross_device_ops="hierarchical_copy")
  summed = sum_over(
    mirrored(3), [1.0, 2.0, 4.0], lambda v: reduction.Reduction().all_reduce([v], [])[0][0]
  )
  assert summed == 7.0


def test_a_trainer_finds_out_that_its_strategy_sums_wrongly():
  with pytest.raises(ConfigError, match=r"float32 over 3 replicas is wrong.*choose another"):
    slope.train(odd_hierarchical_copy(), [1.0, 2.0, 4.0])


# ---- Keras 3's apply sums the gradients once more ----


def test_keras_apply_after_an_all_reduce_doubles_the_update(two):
  with two.scope():
    model, optimizer = slope.model(), slope.sgd()
    optimizer.build(model.trainable_variables)

  def replica_step(local_sum):
    gradient = all_reduce_by_hand(local_sum) / 4.0
    optimizer.apply([gradient[None, None]], model.trainable_variables)

  @tf.function
  def step(local_sums):
    two.run(replica_step, args=(local_sums,))

  step(slope.per_replica(two, [1.0 + 2.0, 3.0 + 6.0]))
  assert slope.value_of(model) == -2 * 3.0

  assert slope.weight_after(two) == -3.0


# ---- Keras 3's global_clipnorm clips before the all-reduce ----


def test_keras_clips_each_replica_by_itself(two):
  def clipping():
    return slope.sgd(global_clipnorm=1.0)

  one = tf.distribute.get_strategy()
  assert slope.apply_by_hand(one, clipping, [12.0 / 4]) == -1.0
  assert slope.apply_by_hand(two, clipping, [3.0 / 4, 9.0 / 4]) == -1.75  # 0.75 + 1

  assert slope.weight_after(one, clip_norm=1.0) == -1.0
  assert slope.weight_after(two, clip_norm=1.0) == -1.0
  with pytest.raises(ConfigError, match=r"global_clipnorm=1.0.*use Trainer.clip_norm"):
    slope.train(two, optimizer=clipping)


# ---- Keras 3's LossScaleOptimizer looks at replica 0 ----


def test_keras_loss_scale_optimizer_lets_in_a_nan_of_replica_1(two):
  def scaling():
    return keras.optimizers.LossScaleOptimizer(slope.sgd())

  assert np.isnan(slope.apply_by_hand(two, scaling, [1.0, np.nan]))

  run, metrics = slope.train(two, [1.0, 2.0, 3.0, np.nan], scale=loss_scale.dynamic)
  assert slope.value_of(run.task.model) == 0.0
  assert (metrics["skipped_steps"], metrics["loss_scale"]) == (1, 2.0**14)
  with pytest.raises(ConfigError, match=r"LossScaleOptimizer.*use Trainer.loss_scale"):
    slope.train(two, optimizer=scaling)


# ---- Keras 3's gradient_accumulation_steps in a tf.function under Mirrored ----


def test_keras_gradient_accumulation_raises_under_mirrored(two):
  def accumulating():
    return slope.sgd(gradient_accumulation_steps=2)

  with pytest.raises(RuntimeError, match="merge_call"):
    slope.apply_by_hand(two, accumulating, [1.0, 2.0])

  assert slope.weight_after(two, accumulation_steps=2) == -3.0
  with pytest.raises(
    ConfigError, match=r"gradient_accumulation_steps=2.*Trainer.accumulation_steps"
  ):
    slope.train(two, optimizer=accumulating)


# ---- tf.cond around apply in replica context ----


class AppliedIfFinite(keras.optimizers.SGD):
  """The obvious way to skip a bad step."""

  def apply(self, gradients, variables=None):
    finite = tf.reduce_all(tf.math.is_finite(gradients[0]))
    tf.cond(finite, lambda: super(AppliedIfFinite, self).apply(gradients, variables), lambda: None)


@pytest.mark.whole
def test_a_branch_around_apply_works_on_one_device_only(two):
  one = tf.distribute.get_strategy()
  assert slope.apply_by_hand(one, lambda: AppliedIfFinite(1.0), [3.0]) == -3.0
  with pytest.raises(RuntimeError, match="merge_call"):
    slope.apply_by_hand(two, lambda: AppliedIfFinite(1.0), [3.0, 3.0])

  for strategy in (one, two):
    assert slope.weight_after(strategy) == -3.0
    assert slope.weight_after(strategy, [1.0, 2.0, np.inf, 6.0]) == 0.0


# ---- Keras 3's metric.result() in replica context ----


def test_a_keras_metric_read_by_a_replica_is_local(two):
  with two.scope():
    mean = keras.metrics.Mean()

  def replica_step(values):
    mean.update_state(values)
    return mean.result()

  @tf.function
  def step(values):
    return two.run(replica_step, args=(values,))

  results = step(slope.per_replica(two, [[1.0, 2.0], [3.0, 6.0]]))
  assert [float(r) for r in two.experimental_local_results(results)] == [1.5, 4.5]

  _, metrics = slope.train(two)
  assert metrics["mean_x"] == 3.0


# ---- 5 examples, batches of 4, 2 replicas: the last step has an empty replica ----

FIVE = np.array([1.0, 2.0, 3.0, 6.0, 8.0], np.float32)


@pytest.mark.whole
def test_an_empty_replica_has_no_mean(two):
  @tf.function
  def step(values):
    return two.run(tf.reduce_mean, args=(values,))

  dataset = two.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(FIVE).batch(4))
  means = [[float(m) for m in two.experimental_local_results(step(batch))] for batch in dataset]
  np.testing.assert_array_equal(means, [[1.5, 4.5], [8.0, np.nan]])

  task = slope.Slope()
  task.source = lambda split: ArraySource(features={"x": FIVE})
  evaluated = make_evaluator(task, two, batch=4).evaluate()
  assert evaluated["mean_x"] == 4.0


def test_an_idle_replica_leaves_the_update_finite(two):
  task = slope.Slope()
  features = {"x": FIVE, "weight": np.float32([1, 1, 0, 0, 1])}
  task.source = lambda split: ArraySource(features=features)
  run = make_trainer(task, two, batch=4, optimizer=slope.sgd, data={"shuffle": False})
  run.train(tf.constant(1))
  assert slope.value_of(run.task.model) == -1.5


# ---- A DistributedIterator cannot be checkpointed ----


@pytest.mark.whole
def test_a_distributed_iterator_cannot_be_checkpointed(two, tmp_path):
  def counting(position):
    return tf.data.Dataset.range(position // 4, 100).map(
      lambda k: {"x": tf.fill([4], tf.cast(k + 1, tf.float32)), "weight": tf.ones([4])}
    )

  tf.train.Checkpoint(iterator=iter(counting(0))).write(str(tmp_path / "plain"))
  for strategy in (two, factories.one_device()):
    iterator = iter(strategy.experimental_distribute_dataset(counting(0)))
    with pytest.raises(ValueError, match=r"(?i)trackable"):
      tf.train.Checkpoint(iterator=iterator)

  def make():
    return trainer.Trainer(
      task=slope.Slope(),
      strategy=two,
      dataset_fn=counting,
      global_batch_size=4,
      optimizer=slope.sgd,
    )

  first, second = make(), make()
  first.train(tf.constant(2))
  assert slope.value_of(first.task.model) == -(1 + 2)
  saved = tf.train.Checkpoint(**first.checkpoint_items()).write(str(tmp_path / "framework"))
  tf.train.Checkpoint(**second.checkpoint_items()).read(saved).assert_existing_objects_matched()
  second.reset_input()
  second.train(tf.constant(2))
  assert slope.value_of(second.task.model) == -(1 + 2 + 3 + 4)


# ---- NCCL on CPUs ----


def test_nccl_has_no_kernel_for_cpus():
  nccl = tf.distribute.MirroredStrategy(
    ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.NcclAllReduce(num_packs=0)
  )
  with pytest.raises(tf.errors.InvalidArgumentError, match="No OpKernel was registered"):
    sum_over(nccl, [1.0, 2.0], all_reduce_by_hand)

  with pytest.raises(ConfigError, match="'nccl', but CPU:0 is not a GPU; use 'collective'"):
    factories.mirrored(cpu_replicas=2, cross_device_ops="nccl")


# ---- Two MirroredStrategies in one process ----

IN_ONE_PROCESS = """
import sys
import tensorflow as tf
from loopwright.strategies import factories

factories.split_cpu(3)

def total(strategy, size):
  def replica():
    context = tf.distribute.get_replica_context()
    mine = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.fill([size], mine))
  per_replica = tf.function(lambda: strategy.run(replica))()
  return sum(float(tf.reduce_sum(v)) for v in strategy.experimental_local_results(per_replica))

def naive(replicas):
  return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])

for replicas, size in ((2, 1), (2, 4), (3, 1), (2, 2)):
  print(total(factories.mirrored(cpu_replicas=replicas, cross_device_ops="collective"), size))
print("naive", total(naive(2), 1))
try:
  print("naive", total(naive(int(sys.argv[1])), int(sys.argv[2])))
except tf.errors.OpError as error:  # after which no collective works in this process
  print("naive", sys.argv[3] in str(error))
"""


@pytest.mark.parametrize(
  ("replicas", "size", "says"),
  [(3, 1, "a group with size3, but that group has size 2"), (2, 4, "Shape mismatch in the coll")],
)
@pytest.mark.whole
def test_collectives_of_one_strategy_do_not_meet_those_of_another(replicas, size, says):
  """Sums of replica ids from 1, over `size` numbers on each replica."""
  root = pathlib.Path(loopwright.__file__).parents[1]
  done = subprocess.run(
    [sys.executable, "-c", IN_ONE_PROCESS, str(replicas), str(size), says],
    cwd=root, capture_output=True, text=True, timeout=120, check=False,
  )  # fmt: skip
  assert done.stdout.splitlines() == [
    *["6.0", "24.0", "18.0", "12.0"],
    "naive 6.0",
    "naive True",
  ], done.stderr[-3000:]
