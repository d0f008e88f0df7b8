"""The examples of CONTRIBUTING.md do what it says."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from loopwright import testing
from loopwright.actions.base import Run
from loopwright.distribution import placement
from loopwright.inputs import datasets
from loopwright.metrics import Loss
from loopwright.optimizers import kernels
from loopwright.run_folder.metrics_log import MetricsLog
from loopwright.step import replica_id
from loopwright.task import Task
from loopwright.tools import verify
from loopwright.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
X = [1.0, 2.0, 3.0, 6.0]


def example(word):
  """Returns the names that the example with this word defines."""
  blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
  [code] = [block for block in blocks if word in block]
  names = {"__name__": "contributed"}
  exec(code, names)
  return names


class Weighted(Task):
  """With SGD and a rate of 1, the weight moves to minus a mean of x.

  With `by_replica`, rows on the second replica weigh twice as much, so the weight tells which they
  are.
  """

  def __init__(self, *, by_replica=False, dtype="float32"):
    self.by_replica, self.dtype = by_replica, dtype

  def build_model(self):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=self.dtype)
    return keras.Sequential([keras.Input([1]), layer])

  def source(self, split):
    return example("class Squares")["Squares"]()

  def forward(self, batch, training):
    return tf.cast(self.model(batch["x"][:, None])[:, 0], tf.float32)

  def loss(self, outputs, batch):
    factor = tf.cast(1 + replica_id(), tf.float32) if self.by_replica else 1.0
    return Loss.from_examples(outputs, batch["weight"] * factor)


def trained(strategy, steps, *, dataset=None, optimizer=None, by_replica=False):
  """Returns a trainer after some steps on X, or on a dataset of batches of 4."""
  batch = {"x": tf.constant(X), "weight": tf.ones(4)}
  trainer = Trainer(
    task=Weighted(by_replica=by_replica),
    strategy=strategy,
    dataset_fn=lambda position: dataset or tf.data.Dataset.from_tensors(batch).repeat(),
    global_batch_size=4,
    optimizer=optimizer or (lambda: keras.optimizers.SGD(1.0)),
  )
  trainer.train(tf.constant(steps))
  return trainer


def weight_of(trainer):
  return trainer.task.model.get_weights()[0].item()


def test_the_strategy_splits_rows_in_its_own_way():
  strategy = example("class Striped(")["striped"]()
  assert type(placement.of(strategy)).__name__ == "StripedPlacement"
  expected = -3 * np.average(X, weights=[1, 2, 1, 2])
  assert weight_of(trained(strategy, 3, by_replica=True)) == pytest.approx(expected, rel=1e-6)


def test_the_usual_strategy_splits_them_in_order(mirrored):
  expected = -3 * np.average(X, weights=[1, 1, 2, 2])
  assert weight_of(trained(mirrored(2), 3, by_replica=True)) == pytest.approx(expected, rel=1e-6)


def test_an_epoch_of_the_source_has_each_example_once(mirrored):
  source = example("class Squares")["Squares"]()
  batches = datasets.train_dataset(source, global_batch_size=4, position=0, seed=5)
  rows = [batch["y"].numpy() for batch in batches.take(3)]
  assert np.concatenate(rows).tolist() != [n * n for n in range(12)]
  assert sorted(np.concatenate(rows)) == [n * n for n in range(12)]
  trainer = trained(mirrored(2), 3, dataset=batches)
  assert weight_of(trainer) == pytest.approx(-sum(range(12)) / 4, rel=1e-6)


def test_the_action_logs_a_statistic_of_adams_slots(mirrored, tmp_path):
  trainer = trained(mirrored(2), 3, optimizer=lambda: keras.optimizers.Adam(0.1, beta_2=0.9))
  log = MetricsLog(str(tmp_path / "metrics.jsonl"))
  action = example("class SecondMoment")["SecondMoment"]()
  action.bind(
    Run(
      task=trainer.task, strategy=trainer.strategy, trainer=trainer, evaluator=None,
      checkpoint=tf.train.Checkpoint(), metrics_log=log, global_step=trainer.global_step,
      model_dir=str(tmp_path),
    )
  )  # fmt: skip
  action({})
  [record] = log.records("adam")
  [mean] = [value for name, value in record.items() if name.endswith("second_moment")]
  assert record["step"] == 3
  assert mean == pytest.approx((1 - 0.9**3) * np.mean(X) ** 2, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_finds_weights_of_16_bits(monkeypatch, dtype):
  monkeypatch.setattr(verify, "_OWN", {})
  example("def narrow_weights")
  [result] = testing.check(lambda: Weighted(dtype=dtype), groups=["narrow_weights"])
  assert result.status == ("passed" if dtype == "float32" else "failed")
  assert result.cause == ("" if dtype == "float32" else "weights of 16 bits")


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_kernel_is_kerass_rule(mirrored, monkeypatch, momentum):
  monkeypatch.setattr(kernels, "_KERNELS", dict(kernels._KERNELS))
  example("def rmsprop")
  options = {"learning_rate": 0.1, "rho": 0.8, "epsilon": 0.01, "momentum": momentum}
  trainer = trained(mirrored(2), 4, optimizer=lambda: keras.optimizers.RMSprop(**options))
  weight = mean_square = moved = 0.0
  for _ in range(4):
    gradient = np.mean(X)
    mean_square = 0.8 * mean_square + 0.2 * gradient**2
    moved = momentum * moved + 0.1 * gradient / np.sqrt(mean_square + 0.01)
    weight -= moved
  assert weight_of(trainer) == pytest.approx(weight, rel=1e-6)
  assert ("RMSProp" in str(kinds_of(trainer))) == bool(momentum)


def kinds_of(trainer):
  """Returns the types of all operations of the trainer's loop."""
  graph = trainer.graph().as_graph_def()
  nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
  return {node.op for node in nodes}
