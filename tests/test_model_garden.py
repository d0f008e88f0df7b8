"""A Model Garden task in this loop gives what the Garden's own trainer gives; what it refuses."""

import dataclasses
import itertools
from types import SimpleNamespace

import gin
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from sklearn import metrics as sklearn_metrics

from framework import ConfigError, Evaluator, inputs
from tasks import model_garden
from tasks.model_garden import ModelGarden, garden_experiment, garden_optimizer

pytest.importorskip("tensorflow_datasets", reason="the extra 'garden' is not installed")

from benchmarks.model_garden import ours, theirs, trainer_of  # noqa: E402

STEPS, BATCH, EXAMPLES, WORDS = 50, 8, 21, 6
RNG = np.random.default_rng(0)
TEXT = RNG.integers(1, 11, size=[EXAMPLES, WORDS]).astype(np.int32)
LENGTH = RNG.integers(2, WORDS + 1, size=[EXAMPLES, 1])
DATA = {
  "input_word_ids": TEXT,
  "input_mask": (np.arange(WORDS) < LENGTH).astype(np.int32),
  "input_type_ids": np.zeros_like(TEXT),
  "label_ids": (TEXT[:, 0] > 5).astype(np.int32),
}


@pytest.fixture(scope="module", autouse=True)
def garden():
  """What the tests need of the Garden, imported late: it registers a `Trainer` in gin."""
  from official.core import base_task, config_definitions, exp_factory
  from official.nlp.modeling import models, networks

  yield made(base_task, config_definitions, exp_factory, models, networks)
  for name in [name for name, _ in gin.config._REGISTRY.items() if name.startswith("official.")]:
    gin.config._REGISTRY.pop(name)


def made(base_task, definitions, exp_factory, models, networks):
  """A small BERT that classifies made sentences, as a task of the Garden's."""

  class Sentences(base_task.Task):
    def build_model(self):
      encoder = networks.BertEncoder(
        vocab_size=11, hidden_size=8, num_layers=1, num_attention_heads=2, inner_dim=16,
        max_sequence_length=WORDS, output_dropout=0.0, attention_dropout=0.0,
      )  # fmt: skip
      return models.BertClassifier(encoder, num_classes=2, dropout_rate=0.0)

    def build_inputs(self, params, input_context=None):
      size = params.global_batch_size
      if input_context is not None:
        size = input_context.get_per_replica_batch_size(size)
      dataset = tf.data.Dataset.from_tensor_slices(DATA)
      if params.is_training:
        dataset = dataset.repeat()
      return dataset.batch(size, drop_remainder=params.is_training)

    def build_losses(self, labels, model_outputs, aux_losses=None):
      losses = tf_keras.losses.sparse_categorical_crossentropy(
        labels["label_ids"], model_outputs, from_logits=True
      )
      return tf.reduce_mean(losses)

    def build_metrics(self, training=True):
      return [
        tf_keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        tf_keras.metrics.AUC(name="auc", num_thresholds=20),
      ]

    def process_metrics(self, metrics, labels, model_outputs):
      accuracy, auc = metrics
      accuracy.update_state(labels["label_ids"], model_outputs)
      auc.update_state(labels["label_ids"], tf.nn.softmax(model_outputs)[:, 1])

  data = definitions.DataConfig(global_batch_size=BATCH, is_training=True)
  validation = definitions.DataConfig(global_batch_size=BATCH, is_training=False)
  config = definitions.TaskConfig(train_data=data, validation_data=validation)

  def experiment(**optimizer_config):
    given = {
      "optimizer": {"type": "adam"},
      "learning_rate": {
        "type": "polynomial",
        "polynomial": {"initial_learning_rate": 0.01, "decay_steps": 60},
      },
      "warmup": {"type": "linear", "linear": {"warmup_steps": 10}},
    }
    trainer = definitions.TrainerConfig(
      optimizer_config=definitions.OptimizationConfig({**given, **optimizer_config})
    )
    return definitions.ExperimentConfig(task=config, trainer=trainer)

  return SimpleNamespace(
    Task=Sentences, config=config, experiment=experiment, definitions=definitions,
    factory=exp_factory,
  )  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2])
def both(request, garden):
  """What both trainers log of each step, on one replica and on two."""
  strategy = tf.distribute.MirroredStrategy(
    [f"CPU:{i}" for i in range(request.param)],
    cross_device_ops=tf.distribute.ReductionToOneDevice(),
  )
  experiment = garden.experiment()
  return [
    list(itertools.islice(run(experiment, lambda: garden.Task(garden.config), strategy), STEPS))
    for run in (theirs, ours)
  ]


@pytest.mark.parametrize("name", ["loss", "accuracy", "auc", "learning_rate"])
def test_its_own_trainer_logs_the_same(both, name):
  # Its learning rate is that of the next step.
  expected, actual = ([float(logs[name]) for logs in run] for run in both)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-9)
  assert len({round(value, 6) for value in actual}) > 3
