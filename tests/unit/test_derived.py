"""Task.derived: functions of the means over all examples, on one replica and on several."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_evaluator, make_trainer

from loopwright.errors import ConfigError
from loopwright.metrics import weighted_sum
from loopwright.task import Task, derived_metrics

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
  sgd = functools.partial(keras.optimizers.SGD, 0.1)
  trainer = make_trainer(task, strategy, batch=3, optimizer=sgd)
  evaluator = make_evaluator(task, strategy, batch=3)
  expected = {"exponential": np.exp(2.5), "rms": np.sqrt(np.mean(VALUES.astype(float) ** 2))}
  assert abs(np.mean(np.exp(VALUES)) - expected["exponential"]) > 100  # a mean of exps is another
  train, evaluated = trainer.train(tf.constant(7)), evaluator.evaluate()  # three epochs, and one
  for metrics in (train, evaluated):
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert type(metrics["rms"]) is float


def test_no_batch_derives_nothing():
  evaluator = make_evaluator(Exponential(), tf.distribute.get_strategy(), batch=3)
  assert evaluator.evaluate(0) == {}


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
