"""What the action TensorBoard writes, read from its files; a run without it pays nothing."""

import glob
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.hparams import metadata

from loopwright import ConfigError
from loopwright.actions import tensorboard
from loopwright.actions.base import Action
from loopwright.actions.tensorboard import TensorBoard, hyperparameters
from loopwright.runs.runner import run
from loopwright.strategies import factories
from loopwright.strategies.parameter_server.strategy import ParameterServer

RATE, BATCH, CLIP = 0.125, 6, 0.75
RNG = np.random.default_rng(3)
X = RNG.normal(size=[18, 2]).astype(np.float32)
Y = RNG.normal(size=18).astype(np.float32)
KERNEL = np.array([[0.5], [1.0]], np.float32)


class Linear(toys.Regression):
  """x @ kernel + bias."""

  features = {"x": X, "y": Y}

  def build_model(self):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="dense")], name="net")
    model.set_weights([KERNEL, np.array([0.25], np.float32)])
    return model


def reference(steps):
  """Returns by NumPy the weights after each step, the clipped gradients, and what both may lose.

  A gradient may be the small sum of large terms. Float32 loses at most half an epsilon of each term
  for each of the products and sums behind it; descent does not let errors of weights grow.
  """
  weights, states, gradients, lost = np.array([0.5, 1.0, 0.25]), [], [], []
  rows = np.concatenate([X, np.ones([18, 1])], axis=1).astype(np.float64)
  for step in range(steps):
    part = (step * BATCH + np.arange(BATCH)) % 18
    gradient = 2 * (rows[part] @ weights - Y[part]) @ rows[part] / BATCH
    terms = (
      2 * (np.abs(rows[part]) @ np.abs(weights) + np.abs(Y[part])) @ np.abs(rows[part]) / BATCH
    )
    lost.append((len(weights) + BATCH + 3) * np.finfo(np.float32).eps / 2 * terms)
    gradients.append(gradient * min(1.0, CLIP / np.linalg.norm(gradient)))
    weights = weights - RATE * gradients[-1]
    states.append(weights)
  return states, gradients, lost


class Spy(Action):
  """Keeps what the action before it in the list has of the gradients."""

  on = "train"

  def __init__(self):
    self.seen = {}

  def __call__(self, output):
    board = next(a for a in self.run.actions if isinstance(a, TensorBoard))
    self.seen[self.run.step] = board._gradients.values() if board._gradients else None


def start(folder, *actions, strategy=factories.default, **options):
  return run(
    **{
      "task": Linear, "train_steps": 6, "global_batch_size": BATCH, "model_dir": str(folder),
      "strategy": strategy, "steps_per_loop": 4, "actions": actions, "shuffle": False,
      "optimizer": lambda: keras.optimizers.SGD(RATE), "mode": "train_and_evaluate",
      "eval_every_steps": 4, **options,
    }
  )  # fmt: skip


def summaries(folder):
  """Returns (tag, step, value) of the action's own files, in order."""
  found = []
  for path in sorted(
    glob.glob(os.path.join(folder, "events.out.tfevents.*")), key=os.path.getmtime
  ):
    for text in tf.data.TFRecordDataset(path).as_numpy_iterator():
      event = event_pb2.Event.FromString(text)
      found += [(value.tag, event.step, value) for value in event.summary.value]
  return found


@pytest.fixture
def clipped(monkeypatch):
  from loopwright import configurables

  monkeypatch.setattr(
    configurables, "options", lambda c: {"clip_norm": CLIP} if c.__name__ == "Trainer" else {}
  )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.fast(replicas=[2])
@pytest.mark.usefixtures("clipped")
def test_histograms_are_of_the_weights_and_gradients_of_their_step(replicas, tmp_path, mirrored):
  spy = Spy()
  board = TensorBoard(histograms_every_steps=2)
  start(tmp_path, board, spy, strategy=lambda: mirrored(replicas))
  states, gradients, lost = reference(6)
  assert sorted(spy.seen) == [2, 4, 6]  # where loops end
  for step, seen in spy.seen.items():
    kernel, bias = seen["gradients/net/dense/kernel"], seen["gradients/net/dense/bias"]
    found = np.append(kernel[:, 0], bias)
    assert np.all(np.abs(found - gradients[step - 1]) <= lost[step - 1]), (found, lost[step - 1])
  found = [(tag, step, v) for tag, step, v in summaries(tmp_path) if "/dense/" in tag]
  drawn = {(tag, step): tf.make_ndarray(value.tensor) for tag, step, value in found}
  assert len(drawn) == 3 * 4
  for step in (2, 4, 6):
    for kind, of in (("weights", states), ("gradients", gradients)):
      histogram = drawn[f"{kind}/net/dense/kernel", step]
      assert histogram[:, 2].sum() == 2
      low, high = histogram[0, 0], histogram[-1, 1]
      expected = np.sort(of[step - 1][:2])
      np.testing.assert_allclose([low, high], expected, rtol=0, atol=lost[step - 1].max())


@pytest.mark.whole
def test_the_run_is_the_same_with_histograms(tmp_path):
  plain = start(tmp_path / "a")
  with_histograms = start(tmp_path / "b", TensorBoard(histograms_every_steps=3))
  assert with_histograms["loss"] == pytest.approx(plain["loss"], rel=1e-6)


def test_without_histograms_the_step_is_as_before(tmp_path):
  class Look(Action):
    on = "train"

    def __call__(self, output):
      self.observers = self.run.trainer.parts.observers

  look = Look()
  start(tmp_path, TensorBoard(), look, train_steps=1)
  assert look.observers == ()


def hparams(folder):
  """Returns the parts of the plugin's data, the newest of each kind."""
  found = {}
  for tag, _, value in summaries(folder):
    if value.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME:
      found[tag] = value.metadata.plugin_data.content
  return found


def test_hparams_has_the_config_and_the_evaluations_metrics(tmp_path):
  start(tmp_path, TensorBoard())
  found = hparams(tmp_path)
  experiment = metadata.parse_experiment_plugin_data(found[metadata.EXPERIMENT_TAG])
  assert [(m.name.group, m.name.tag) for m in experiment.metric_infos] == [("eval", "loss")]
  session = metadata.parse_session_start_info_plugin_data(found[metadata.SESSION_START_INFO_TAG])
  values = dict(session.hparams)
  assert values["train_steps"].number_value == 6
  assert values["shuffle"].bool_value is False
  assert values["task"].string_value.endswith("Linear")
  end = metadata.parse_session_end_info_plugin_data(found[metadata.SESSION_END_INFO_TAG])
  assert end.status == 1  # STATUS_SUCCESS
  eval_tags = [
    value.tag
    for path in glob.glob(str(tmp_path / "eval" / "events*"))
    for text in tf.data.TFRecordDataset(path).as_numpy_iterator()
    for value in event_pb2.Event.FromString(text).summary.value
  ]
  assert "loss" in eval_tags  # what the group and the tag mean


def test_a_run_that_fails_is_not_at_its_end(tmp_path):
  class Fails(Action):
    on = "train"

    def __call__(self, output):
      raise RuntimeError("no")

  with pytest.raises(RuntimeError):
    start(tmp_path, TensorBoard(), Fails())
  assert metadata.SESSION_END_INFO_TAG not in hparams(tmp_path)


def test_each_part_is_written_once_as_tensorboard_keeps_the_first(tmp_path):
  start(tmp_path, TensorBoard(), eval_every_steps=2)
  tags = [tag for tag, _, _ in summaries(tmp_path)]
  assert sorted(tags) == sorted(
    ["config", metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG]
    + [metadata.SESSION_END_INFO_TAG]
  )


def test_a_run_without_evaluations_lists_its_training_loss(tmp_path):
  start(tmp_path, TensorBoard(), mode="train", train_steps=1)
  experiment = metadata.parse_experiment_plugin_data(hparams(tmp_path)[metadata.EXPERIMENT_TAG])
  assert [(m.name.group, m.name.tag) for m in experiment.metric_infos] == [("train", "loss")]


def test_the_config_is_a_table(tmp_path):
  start(tmp_path, TensorBoard(), train_steps=1)
  text = next(tf.make_ndarray(v.tensor) for tag, _, v in summaries(tmp_path) if tag == "config")
  assert "| `train_steps` | `1` |" in text.item().decode().splitlines()


def test_hyperparameters_are_numbers_bools_or_text():
  config = {
    "a": "1",
    "b": "0.5",
    "c": "True",
    "d": "'x'",
    "e": "@keras.Adam",
    "f": "(1, 2)",
    "g": "1e999",
  }
  assert hyperparameters(config) == {
    "a": 1, "b": 0.5, "c": True, "d": "x", "e": "@keras.Adam", "f": "(1, 2)", "g": "1e999"
  }  # fmt: skip


def test_a_cadence_that_is_no_number_is_refused():
  with pytest.raises(ConfigError, match=r"TensorBoard\.histograms_every_steps is 0; it must be"):
    TensorBoard(histograms_every_steps=0)


def test_asynchronous_training_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(tensorboard.placement, "of", lambda _: ParameterServer(None))
  action = TensorBoard(histograms_every_steps=5)
  with pytest.raises(ConfigError, match=r"^TensorBoard\.histograms_every_steps is set, but under"):
    action.bind(type("Run", (), {"strategy": None}))
