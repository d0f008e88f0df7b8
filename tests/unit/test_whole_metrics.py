"""Metrics that are no means, against scikit-learn, on one replica and on several."""

import functools
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import make_evaluator, make_trainer
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score

from loopwright import ArraySource, ConfigError, Loss, PerExample, Sum, Task, weighted_sum
from loopwright.task import derived_metrics

EXAMPLES, CLASSES, BATCH = 23, 3, 5  # the last batch has three examples, and no replica divides it
RNG = np.random.default_rng(5)
LOGITS = RNG.normal(size=[EXAMPLES, CLASSES]).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, EXAMPLES)
WEIGHT = np.where(np.arange(EXAMPLES) % 7 == 3, 0.0, 1.0).astype(np.float32)
REAL = WEIGHT > 0
BINS = 4


def softmax(logits):
  exps = np.exp(logits.astype(np.float64))
  return exps / exps.sum(axis=1, keepdims=True)


def calibration_error(confidence, hit):
  """Guo et al. (2017), equation 5."""
  bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
  gaps = [hit[bins == b].sum() - confidence[bins == b].sum() for b in range(BINS)]
  return np.abs(gaps).sum() / len(hit)


class Scored(Task):
  """The logits are a feature; a kernel of zero lets it be trained."""

  def build_model(self):
    layer = keras.layers.Dense(CLASSES, kernel_initializer="zeros", use_bias=False)
    return keras.Sequential([keras.Input([CLASSES]), layer])

  def source(self, split):
    features = {"x": LOGITS, "y": LABELS, "weight": WEIGHT}
    return ArraySource(features=features)

  def forward(self, batch, training):
    return batch["x"] + self.model(batch["x"])

  def loss(self, logits, batch):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, logits, batch):
    guess, weight = tf.argmax(logits, axis=1), batch["weight"]
    confidence = tf.reduce_max(tf.nn.softmax(logits), axis=1)
    hit = tf.cast(guess == batch["y"], tf.float32)
    bins = tf.one_hot(tf.minimum(tf.cast(confidence * BINS, tf.int32), BINS - 1), BINS)
    rows = tf.stack([hit, confidence], axis=1) * weight[:, tf.newaxis]
    return {
      "accuracy": weighted_sum(hit, weight),
      "confusion": Sum(tf.math.confusion_matrix(batch["y"], guess, CLASSES, weights=weight)),
      "bins": Sum(tf.matmul(bins, rows, transpose_a=True)),
      "scores": PerExample(logits, weight),
      "labels": PerExample(batch["y"], weight),
      "is_first": PerExample(batch["y"] == 0, weight),
    }

  def derived(self, values):
    table, bins = values["confusion"], values["bins"]
    hits, ends = np.diag(table), table.sum(axis=0) + table.sum(axis=1)
    found = {
      "perplexity": np.exp(values["loss"]),
      "f1": np.mean(2 * hits / ends),
      "calibration_error": np.abs(bins[:, 0] - bins[:, 1]).sum() / table.sum(),
      "confusion": table,
    }
    if "scores" in values:
      found["auc"] = roc_auc_score(values["is_first"], values["scores"][:, 0])
      found["order"] = [*values["labels"], *values["scores"][:, 1]]
    return found


def trained_and_evaluated(task, strategy, **options):
  data, sgd = {"shuffle": False}, functools.partial(keras.optimizers.SGD, 0.0)
  trainer = make_trainer(task, strategy, batch=EXAMPLES, optimizer=sgd, data=data, **options)
  evaluator = make_evaluator(task, strategy, batch=BATCH, eager=options.get("eager", False))
  return trainer.train(tf.constant(2)), evaluator.evaluate(), evaluator.evaluate()


def expected():
  logits, labels = LOGITS[REAL], LABELS[REAL]
  chances, guess = softmax(logits), logits.argmax(axis=1)
  losses = -np.log(chances[np.arange(len(labels)), labels])
  confidence = chances.max(axis=1)
  return {
    "perplexity": np.exp(losses.mean()),
    "f1": f1_score(labels, guess, average="macro"),
    "calibration_error": calibration_error(confidence, guess == labels),
    "auc": roc_auc_score(labels == 0, logits[:, 0]),
  }


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2])
def test_they_are_those_of_scikit_learn(replicas, mirrored):
  train, evaluated, again = trained_and_evaluated(Scored(), mirrored(replicas))
  numbers = expected()
  assert {n: evaluated[n] for n in numbers} == pytest.approx(numbers, rel=1e-6)
  table = confusion_matrix(LABELS[REAL], LOGITS[REAL].argmax(axis=1))
  np.testing.assert_array_equal(evaluated["confusion"], table)
  np.testing.assert_array_equal(train["confusion"], 2 * table)  # two epochs
  in_order = [*LABELS[REAL], *LOGITS[REAL][:, 1]]
  np.testing.assert_array_equal(evaluated["order"], in_order)  # of the source
  assert evaluated.keys() == {"loss", "accuracy", "confusion", "order", *numbers}
  assert "auc" not in train
  for name in evaluated:
    np.testing.assert_array_equal(again[name], evaluated[name])


def test_the_documented_task_reports_what_scikit_learn_does(mirrored):
  page = (Path(__file__).resolve().parents[2] / "docs" / "writing-a-task.md").read_text()
  [code] = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "PerExample" in c]
  names = {}
  exec(code.replace("CLASSES, BINS = 10, 15", f"CLASSES, BINS = {CLASSES}, {BINS}"), names)
  task = type("Documented", (names["Scored"], Scored), {})()
  evaluated = make_evaluator(task, mirrored(2), batch=BATCH).evaluate()
  assert {n: evaluated[n] for n in expected()} == pytest.approx(expected(), rel=1e-6)


@pytest.mark.parametrize(
  "options",
  [{"eager": True}, {"accumulation_steps": 3}, {"jit_compile": True}],
  ids=["eager", "accumulated", "xla"],
)
@pytest.mark.whole
def test_they_hold_in_every_way_of_running_a_step(options, mirrored):
  train, evaluated, _ = trained_and_evaluated(Scored(), mirrored(1), **options)
  assert evaluated["auc"] == pytest.approx(expected()["auc"], rel=1e-6)
  table = confusion_matrix(LABELS[REAL], LOGITS[REAL].argmax(axis=1))
  np.testing.assert_array_equal(train["confusion"], 2 * table)


class EverySecond(Scored):
  def train_step(self, step, batch):
    due = step.number % 2 == 1
    step.update(lambda part: self.training_loss(step, part), batch, when=due)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.whole
def test_an_update_that_is_not_due_adds_nothing_to_a_sum(eager, mirrored):
  train, _, _ = trained_and_evaluated(EverySecond(), mirrored(2), eager=eager)
  table = confusion_matrix(LABELS[REAL], LOGITS[REAL].argmax(axis=1))
  np.testing.assert_array_equal(train["confusion"], table)  # one of two epochs


def test_what_training_does_not_collect_gets_a_line(mirrored):
  class Careless(Scored):
    def derived(self, values):
      return {"auc": roc_auc_score(values["is_first"], values["scores"][:, 0])}

  line = (
    r"^Careless.derived\(\) reads 'is_first' after a training loop.* `if 'is_first' in values:`"
  )
  with pytest.raises(ConfigError, match=line):
    trained_and_evaluated(Careless(), mirrored(1))


def test_a_key_error_of_the_users_own_stays_what_it_is():
  class Mistyped(Task):
    def derived(self, values):
      return {"perplexity": np.exp(values["los"])}

  with pytest.raises(KeyError, match=r"^'los'$"):
    derived_metrics(Mistyped(), {"loss": 1.0}, only_evaluated={"scores"})


@pytest.mark.parametrize(
  ("value", "line"),
  [
    ("high", "'high' for 'x'; it must be a number, or an array of numbers"),
    ([[1.0], [1.0, 2.0]], r"\[\[1.0\], \[1.0, 2.0\]\] for 'x'; it must be a number"),
    (np.zeros([400, 300]), r"an array of shape \(400, 300\) for 'x'; .* at most 100,000 numbers"),
  ],
)
def test_a_derived_value_is_a_number_or_a_small_array(value, line):
  class Odd(Task):
    def derived(self, values):
      return {"x": value}

  with pytest.raises(ConfigError, match=rf"^Odd.derived\(\) returns {line}"):
    derived_metrics(Odd(), {"loss": 1.0})


def test_a_sum_may_keep_its_name_but_no_reported_metric():
  class Same(Task):
    def derived(self, values):
      return {"table": values["table"].tolist()}

  [(name, table)] = derived_metrics(Same(), {"loss": 1.0}, {"table": np.eye(2)}).items()
  assert (name, table.tolist()) == ("table", [[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
  ("second", "line"),
  [
    ((1.0, 1.0), "as a Sum of shape .* and as a pair"),
    (Sum(tf.ones([3])), r"as a Sum of shape \(2,\) and as a Sum of shape \(3,\)"),
  ],
)
def test_a_name_is_one_kind_of_metric(second, line):
  from loopwright.step import EvalStep

  step = EvalStep()
  step.log({"bins": Sum(tf.ones([2]))})
  with pytest.raises(ConfigError, match=f"^the step logs 'bins' twice, {line}"):
    step.log({"bins": second})
