"""A Model Garden task in this loop gives what the Garden's own trainer gives; what it refuses."""

import functools
import itertools
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import runs
import tensorflow as tf
import tf_keras
from config_data import forget_garden
from properties import SoftmaxRegression
from runs import make_evaluator

from loopwright import ConfigError, configurables
from loopwright.strategies import factories
from loopwright.tasks.model_garden import ModelGarden, garden_experiment, garden_optimizer

pytest.importorskip("tensorflow_datasets", reason="the extra 'garden' is not installed")

from benchmarks.model_garden import ours, theirs

STEPS, BATCH, EXAMPLES, WORDS = 50, 8, 21, 6
RNG = np.random.default_rng(0)
TEXT = RNG.integers(1, 11, size=[EXAMPLES, WORDS]).astype(np.int32)
LENGTH = RNG.integers(2, WORDS + 1, size=[EXAMPLES, 1])
SENTENCES = {
  "input_word_ids": TEXT,
  "input_mask": (np.arange(WORDS) < LENGTH).astype(np.int32),
  "input_type_ids": np.zeros_like(TEXT),
  "label_ids": (TEXT[:, 0] > 5).astype(np.int32),
}
X = RNG.normal(size=[EXAMPLES, 3]).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def garden():
  """What the tests need of the Garden, imported late: it registers a `Trainer` in gin."""
  from official.core import base_task, config_definitions, exp_factory, task_factory
  from official.nlp.modeling import models, networks

  yield made(base_task, config_definitions, exp_factory, task_factory, models, networks)
  forget_garden()


def made(base_task, definitions, exp_factory, task_factory, models, networks):
  """Two tasks of the Garden's: a small BERT on made sentences, and a single layer on points."""

  class Sentences(base_task.Task):
    data = SENTENCES

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
      dataset = tf.data.Dataset.from_tensor_slices(self.data)
      if params.is_training:
        dataset = dataset.repeat()
      return dataset.batch(size, drop_remainder=params.is_training)

    def labels_of(self, labels):
      return labels["label_ids"]

    def build_losses(self, labels, model_outputs, aux_losses=None):
      losses = tf_keras.losses.sparse_categorical_crossentropy(
        self.labels_of(labels), model_outputs, from_logits=True
      )
      return tf.reduce_mean(losses)

    def build_metrics(self, training=True):
      return [
        tf_keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        tf_keras.metrics.AUC(name="auc", num_thresholds=20),
      ]

    def process_metrics(self, metrics, labels, model_outputs):
      accuracy, auc = metrics
      accuracy.update_state(self.labels_of(labels), model_outputs)
      auc.update_state(self.labels_of(labels), tf.nn.softmax(model_outputs)[:, 1])

  class Points(Sentences):
    data = (X, Y)

    def build_model(self):
      return tf_keras.Sequential([tf_keras.layers.Dense(2, name="dense")])  # not built

    def labels_of(self, labels):
      return labels

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

  def registered():
    return experiment()

  if "points" not in exp_factory._REGISTERED_CONFIGS:
    exp_factory.register_config_factory("points")(registered)
    task_factory.register_task_cls(definitions.TaskConfig)(Points)
  return SimpleNamespace(
    Sentences=Sentences, Points=Points, config=config, experiment=experiment
  )  # fmt: skip


# ---- Beside its own trainer ----


@pytest.fixture(scope="module", params=[1, 2])
def both(request, garden):
  """What both trainers log of each step, on one replica and on two."""
  strategy = tf.distribute.MirroredStrategy(
    [f"CPU:{i}" for i in range(request.param)],
    cross_device_ops=tf.distribute.ReductionToOneDevice(),
  )
  experiment = garden.experiment()
  return [
    list(
      itertools.islice(run(experiment, lambda: garden.Sentences(garden.config), strategy), STEPS)
    )
    for run in (theirs, ours)
  ]


@pytest.mark.parametrize("name", ["loss", "accuracy", "auc", "learning_rate"])
def test_its_own_trainer_logs_the_same(both, name):
  expected, actual = ([float(logs[name]) for logs in run] for run in both)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-9)
  assert len({round(value, 6) for value in actual}) > 3


# ---- What the Garden's trainer does not do ----


def points(garden, **options):
  return ModelGarden(task=lambda: garden.Points(garden.config), **options)


def make_trainer(task, strategy, *, batch=BATCH, rate=0.1, **options):
  """Always from the same initial weights."""
  tf_keras.utils.set_random_seed(3)
  sgd = functools.partial(tf_keras.optimizers.SGD, rate)
  return runs.make_trainer(task, strategy, batch=batch, optimizer=sgd, **options)


@pytest.mark.parametrize(("replicas", "batch", "parts"), [(2, 7, 1), (3, 8, 2), (2, 5, 4)])
@pytest.mark.fast(batch=[7])
def test_padding_and_micro_batches_change_nothing(garden, mirrored, replicas, batch, parts):
  """Of 5 examples in 8 micro-batches, three have none."""
  task = points(garden)
  trainer = make_trainer(task, mirrored(replicas), batch=batch, accumulation_steps=parts)
  reference = SoftmaxRegression(X, Y, task.model.get_weights())
  logs = [trainer.train(tf.constant(1)) for _ in range(6)]
  rows = [(step * batch + np.arange(batch)) % EXAMPLES for step in range(6)]
  expected = [reference.step(each, 0.1) for each in rows]
  np.testing.assert_allclose([(n["loss"], n["accuracy"]) for n in logs], expected, rtol=1e-5)
  for actual, wanted in zip(task.model.get_weights(), reference.weights, strict=True):
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.fast(replicas=[3])
def test_an_evaluation_counts_every_example_once(garden, mirrored, replicas):
  """21 examples in batches of 8; of three replicas the last has none of the last batch."""
  task, strategy = points(garden), mirrored(replicas)
  make_trainer(task, strategy)
  evaluator = make_evaluator(task, strategy, batch=BATCH)
  reference = SoftmaxRegression(X, Y, task.model.get_weights())
  probabilities, loss, accuracy = reference.judge(np.arange(EXAMPLES))
  auc = tf_keras.metrics.AUC(num_thresholds=20)
  auc.update_state(Y, probabilities[:, 1])
  for _ in range(2):  # the second begins from nothing
    results = evaluator.evaluate()
    assert results["loss"] == pytest.approx(loss, rel=1e-5)
    assert results["accuracy"] == pytest.approx(accuracy)
    assert results["auc"] == pytest.approx(float(auc.result()), rel=1e-5)


def test_an_evaluation_takes_as_many_as_it_is_told(garden, mirrored):
  source = points(garden, eval_examples=5).source("eval")
  assert len(list(source.dataset)) == 5


def test_the_served_model_is_the_gardens(garden, mirrored):
  task = points(garden)
  make_trainer(task, mirrored(1))
  serve = task.export_signature()
  np.testing.assert_allclose(serve(tf.constant(X)), task.model(X), rtol=1e-6)


def test_it_begins_with_its_checkpoint(garden, mirrored, tmp_path):
  model = tf_keras.Sequential([tf_keras.Input([3]), tf_keras.layers.Dense(2, name="dense")])
  path = tf.train.Checkpoint(model=model).write(str(tmp_path / "pretrained"))
  config = garden.config.replace(init_checkpoint=path)
  task = ModelGarden(task=lambda: garden.Points(config))
  make_trainer(task, mirrored(2))
  for actual, expected in zip(task.model.get_weights(), model.get_weights(), strict=True):
    np.testing.assert_array_equal(actual, expected)


# ---- Its experiments and optimizers ----


def test_an_experiment_by_name(garden):
  overrides = {"task": {"train_data": {"global_batch_size": 16}}}
  experiment = garden_experiment(name="points", overrides=overrides)
  assert experiment.task.train_data.global_batch_size == 16
  assert experiment.task.validation_data.global_batch_size == BATCH
  batch = next(iter(ModelGarden(experiment=experiment).source("train").dataset.batch(2)))
  np.testing.assert_array_equal(batch["features"], X[:2])
  np.testing.assert_array_equal(batch["labels"], Y[:2])


def test_our_trainer_is_still_the_one_that_a_config_means(garden, tmp_path):
  (tmp_path / "x.gin").write_text(
    "import loopwright.tasks.model_garden\nrun.task = @ModelGarden()\nrun.train_steps = 1\n"
    "ModelGarden.experiment = @garden_experiment()\ngarden_experiment.name = 'points'\n"
    "run.global_batch_size = 8\nTrainer.clip_norm = 2.0\n"
  )
  configurables.parse([str(tmp_path / "x.gin")])
  assert configurables.bound("loopwright.trainer.Trainer", "clip_norm", None) == 2.0


@pytest.mark.parametrize(
  ("kind", "options", "expected"),
  [
    ("sgd", {"momentum": 0.9}, {"momentum": 0.9}),
    ("adam", {"beta_2": 0.99}, {"beta_2": 0.99}),
    ("rmsprop", {"rho": 0.8}, {"rho": 0.8}),
    ("adagrad", {}, {}),
    ("adamw_experimental", {"weight_decay": 0.1, "global_clipnorm": None}, {"weight_decay": 0.1}),
  ],
)
def test_an_optimizer_of_its_config(garden, kind, options, expected):
  optimizer = garden_optimizer(
    experiment=garden.experiment(optimizer={"type": kind, kind: options})
  )
  assert isinstance(optimizer, tf_keras.optimizers.Optimizer)
  assert {name: getattr(optimizer, name) for name in expected} == expected
  assert float(optimizer._learning_rate(5)) == pytest.approx(0.01 * (1 - 10 / 60) * 5 / 10, rel=0.2)


def error_of(call):
  with pytest.raises(ConfigError) as caught:
    call()
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"optimizer": {"type": "adamw"}}, "'adamw' is AdamWeightDecay, a legacy one"),
    ({"optimizer": {"type": "lamb"}}, "'lamb' is LAMB, a legacy one"),
    ({"optimizer": {"type": "sgd", "sgd": {"decay": 0.1}}}, "'sgd' sets decay"),
    ({"ema": {"average_decay": 0.9}}, "set Trainer.ema_decay"),
  ],
)
def test_an_optimizer_that_does_not_run(garden, config, message):
  experiment = garden.experiment(**config)
  assert message in error_of(lambda: garden_optimizer(experiment=experiment))


def test_an_experiment_that_there_is_not(garden):
  assert "'pints', which no imported" in error_of(lambda: garden_experiment(name="pints"))
  wrong = {"task": {"train_dta": {}}}
  message = error_of(lambda: garden_experiment(name="points", overrides=wrong))
  assert "overrides do not fit the experiment 'points'" in message
  assert "train_dta" in message


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "official.core.exp_factory", None)
  message = error_of(lambda: garden_experiment(name="points"))
  assert "official.core.exp_factory of the Model Garden cannot be imported" in message
  assert "pip install --no-deps tf-models-official==2.20.0 && pip install pyyaml" in message


def test_just_one_task(garden):
  assert "received neither" in error_of(ModelGarden)
  both = {"experiment": garden.experiment(), "task": garden.Points(garden.config)}
  assert "received both" in error_of(lambda: ModelGarden(**both))
  assert "ModelGarden.experiment is a str" in error_of(lambda: ModelGarden(experiment="points"))
  assert "ExperimentConfig" in error_of(lambda: garden_optimizer(experiment=garden.config))
  assert "ModelGarden.task is a Sequential" in error_of(lambda: ModelGarden(task=keras.Sequential))


def test_a_loss_scale_would_be_missed(garden):
  try:
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    assert "use 'mixed_bfloat16'" in error_of(points(garden).build_model)
  finally:
    tf_keras.mixed_precision.set_global_policy("float32")


def step_with(garden, what):
  class Stepping(garden.Points):
    def train_step(self, inputs, model, optimizer, metrics=None):
      what(optimizer, lambda: super(Stepping, self).train_step(inputs, model, optimizer, metrics))
      return {"loss": tf.constant(1.0)}

  return ModelGarden(task=Stepping(garden.config))


@pytest.mark.parametrize(
  ("what", "message"),
  [
    (lambda optimizer, step: (step(), step()), "applies gradients twice"),
    (lambda optimizer, step: None, "did not call optimizer.apply_gradients"),
    (lambda optimizer, step: optimizer.minimize, "uses optimizer.minimize"),
  ],
)
def test_a_step_that_cannot_be_taken_over(garden, mirrored, what, message):
  trainer = make_trainer(step_with(garden, what), mirrored(2))
  with pytest.raises(Exception, match=message):
    trainer.train(tf.constant(1))


def test_central_storage_is_refused(garden):
  with pytest.raises(ConfigError, match=r"metrics of a Model Garden task .* use mirrored\.$"):
    make_trainer(points(garden), factories.central_storage(cpu_replicas=2))


def test_several_data_sets_are_refused(garden):
  class Several(garden.Points):
    def build_inputs(self, params, input_context=None):
      return {"a": super().build_inputs(params)}

  task = ModelGarden(task=Several(garden.config))
  assert "build_inputs returns a dict" in error_of(lambda: task.source("train"))
