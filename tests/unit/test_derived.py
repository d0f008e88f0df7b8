"""Task.derived: functions of the means over all examples, on one replica and on several."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

from loopwright.errors import ConfigError
from loopwright.evaluator import Evaluator
from loopwright.inputs import datasets
from loopwright.metrics import weighted_sum
from loopwright.task import Task, derived_metrics
from loopwright.trainer import Trainer

VALUES = np.array([0.0, 1.0, 2.0, 7.0, 3.0, 0.5, 4.0], np.float32)  # 7: an odd number of examples


class Exponential(toys.Regression):
  """The loss is the value itself, whatever the weight; exp of its mean is derived."""

  features = {"value": VALUES}

  def build_model(self):
    return toys.linear([1.0])

  def forward(self, batch, training):
    return batch["value"] + 0.0 * self.model(batch["value"][:, tf.newaxis])[:, 0]

  def losses(self, outputs, batch):
    return outputs

  def metrics(self, outputs, batch):
    return {"square": weighted_sum(tf.square(outputs), batch["weight"])}

  def derived(self, means):
    return {"exponential": np.exp(means["loss"]), "rms": means["square"] ** 0.5}


@pytest.mark.parametrize("replicas", [1, 2])
def test_train_and_eval_derive_from_the_mean_over_all(replicas, mirrored):
  task, strategy = Exponential(), mirrored(replicas)
  trainer = Trainer(
    task=task,
    strategy=strategy,
    dataset_fn=lambda position: datasets.train_dataset(
      task.source("train"), global_batch_size=3, pad_multiple=trainer.batch_multiple
    ),
    global_batch_size=3,
    optimizer=lambda: keras.optimizers.SGD(0.1),
  )
  dataset = datasets.eval_dataset(task.source("eval"), global_batch_size=3, pad_multiple=replicas)
  evaluator = Evaluator(task=task, strategy=strategy, dataset=dataset)
  expected = {"exponential": np.exp(2.5), "rms": np.sqrt(np.mean(VALUES.astype(float) ** 2))}
  assert abs(np.mean(np.exp(VALUES)) - expected["exponential"]) > 100  # a mean of exps is another
  train, evaluated = trainer.train(tf.constant(7)), evaluator.evaluate()  # three epochs, and one
  for metrics in (train, evaluated):
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert type(metrics["rms"]) is float


def test_no_batch_derives_nothing():
  task = Exponential()
  task.model = task.build_model()
  dataset = datasets.eval_dataset(task.source("eval"), global_batch_size=3)
  strategy = tf.distribute.get_strategy()
  assert Evaluator(task=task, strategy=strategy, dataset=dataset).evaluate(0) == {}


@pytest.mark.parametrize(
  ("derived", "line"),
  [
    ({"loss": 1.0}, r"returns 'loss', which is already reported; rename it, .* 'my_loss'"),
    ({"square": 1.0}, r"returns 'square', which is already reported"),
    ({"skipped": 1.0}, r"returns 'skipped', which is already reported"),
    (3.0, r"returns a float; it must be a dict of name -> float"),
  ],
)
def test_what_would_hide_another_value_is_refused(derived, line):
  class Hiding(Task):
    def derived(self, means):
      return derived

  with pytest.raises(ConfigError, match=rf"^Hiding.derived\(\) {line}"):
    derived_metrics(Hiding(), {"loss": 2.0, "square": 4.0})
