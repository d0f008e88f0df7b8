"""The formats of an export: each is compared with the model, and one that differs is refused."""

import json
import math
import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from framework import ArraySource
from framework.errors import ConfigError
from framework.tools.exports import conversion, formats
from framework.tools.exports.export import export

X = np.random.default_rng(0).standard_normal([11, 3]).astype(np.float32)


class Task:
  """Serves what `serve` makes of the model."""

  def __init__(self, model, serve=None, features=None):
    self.model, self.serve, self.features = model, serve, features or {"x": X}

  def source(self, split):
    assert split == "eval"
    return ArraySource(features=self.features)

  def export_signature(self):
    if self.serve is not None:
      return self.serve

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
    def serve(x):
      return {"y": tf.nn.softmax(self.model(2.0 * x, training=False))}

    return serve


def dense(library=keras):
  layers = library.layers
  start = layers.Input([3]) if library is keras else layers.InputLayer([3])
  model = library.Sequential([start, layers.Dense(4, activation="tanh"), layers.Dense(2)])
  for variable in model.trainable_variables:
    variable.assign(np.random.default_rng(1).standard_normal(tuple(variable.shape)))
  return model


def compared(task, directory, names, capsys):
  """Runs the other process's part here: format -> (largest difference, reason)."""
  given = {
    "directory": directory, "formats": names, "files": formats.FILES, "modules": [],
    "examples": formats.EXAMPLES, "staged": formats.STAGED, "tolerances": formats.TOLERANCES,
    "library": formats._library(task.model), "path": list(sys.path),
  }  # fmt: skip
  capsys.readouterr()
  conversion.main(given)
  lines = [line[8:] for line in capsys.readouterr().out.splitlines() if line.startswith("OUTCOME ")]
  return {name: (largest, reason) for name, largest, _, reason in map(json.loads, lines)}


def tampered(directory, change):
  """Changes the kept outputs, as if the model were another one."""
  path = os.path.join(directory, formats.EXAMPLES)
  with np.load(path) as file:
    arrays = dict(file)
  arrays |= {key: change(value) for key, value in arrays.items() if "|out|" in key}
  np.savez(path, **arrays)


@pytest.mark.parametrize("library", [keras, tf_keras])
@pytest.mark.fast(library=[keras])
def test_a_format_that_is_the_model_is_kept(library, tmp_path, capsys):
  task, directory = Task(dense(library)), str(tmp_path / "export")
  export(task, directory, formats=["saved_model", "keras"])
  assert not os.path.exists(os.path.join(directory, "model.keras"))  # not yet compared
  outcomes = compared(task, directory, ["saved_model", "keras"], capsys)
  for largest, reason in outcomes.values():
    assert largest < 1e-6
    assert reason == ""
  loaded = library.models.load_model(os.path.join(directory, "model.keras"))
  np.testing.assert_allclose(loaded(X), task.model(X), rtol=1e-6)
  export(task, directory, formats=["keras"])  # still an export, which another may replace


def test_the_batch_is_of_the_evaluation_data_and_the_outputs_of_the_model(tmp_path):
  task, directory = Task(dense()), str(tmp_path / "export")
  export(task, directory, formats=["saved_model"])
  with np.load(os.path.join(directory, formats.EXAMPLES)) as file:
    np.testing.assert_array_equal(file["8|serving_default|in|x"], X[:8])
    np.testing.assert_array_equal(file["1|serving_default|in|x"], X[:1])
    (kernel, bias, last, end) = map(np.array, task.model.get_weights())
    logits = np.tanh(2 * X[:8] @ kernel + bias) @ last + end
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(file["8|serving_default|out|y"], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["saved_model", "keras"])
def test_a_format_that_differs_is_refused_with_its_figure(name, tmp_path, capsys):
  task, directory = Task(dense()), str(tmp_path / "export")
  export(task, directory, formats=[name])
  tampered(directory, lambda outputs: outputs * np.float32(1.01))
  largest, reason = compared(task, directory, [name], capsys)[name]
  assert largest == pytest.approx(0.01 / 1.01, rel=1e-3)
  assert reason == (
    "its outputs differ from the model's by 9.90e-03 of their largest value, where 1e-04 is allowed"
  )
  assert not os.path.exists(os.path.join(directory, "model.keras"))
  assert not os.path.exists(os.path.join(directory, formats.STAGED))


@pytest.mark.parametrize("structure", ["list", "dict"])
def test_a_model_of_two_inputs_is_called_as_the_signature_calls_it(structure, tmp_path, capsys):
  a, b = keras.Input([3], name="a"), keras.Input([3], name="b")
  out = keras.layers.Dense(2)(keras.layers.Concatenate()([a, 3.0 * b]))
  model = keras.Model([a, b] if structure == "list" else {"a": a, "b": b}, out)

  @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
  def serve(x):
    inputs = {"a": x, "b": -x}
    return model(inputs if structure == "dict" else list(inputs.values()), training=False)

  task, directory = Task(model, serve), str(tmp_path / "export")
  export(task, directory, formats=["keras"])
  largest, reason = compared(task, directory, ["keras", "saved_model"], capsys)["keras"]
  assert (largest < 1e-6, reason) == (True, "")


def test_a_signature_that_does_not_call_the_model_has_nothing_to_compare(tmp_path, capsys):
  model = dense()

  @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
  def serve(x):
    return model.layers[0](x)

  task, directory = Task(model, serve), str(tmp_path / "export")
  export(task, directory, formats=["keras"])
  _, reason = compared(task, directory, ["keras"], capsys)["keras"]
  assert "the signature does not call the model" in reason


def test_noise_of_no_feature_is_drawn_and_other_inputs_are_named(tmp_path):
  noise, token = (
    tf.TensorSpec([None, 5], tf.float32, "noise"),
    tf.TensorSpec([None, None], tf.int32, "token"),
  )

  @tf.function(input_signature=[noise, token])
  def draw(noise, token):
    return {"y": noise + tf.reduce_mean(tf.cast(token, tf.float32))}

  directory = str(tmp_path / "export")
  export(Task(dense(), draw), directory, formats=["saved_model"])
  with np.load(os.path.join(directory, formats.EXAMPLES)) as file:
    assert file["8|serving_default|in|noise"].shape == (8, 5)
    assert set(file["8|serving_default|in|token"].ravel()) == {0, 1}

  @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])  # named by its parameter
  def read(text):
    return {"y": tf.strings.length(text)}

  with pytest.raises(
    ConfigError, match=r"needs a batch for 'text' \(string\) of the signature 'ser"
  ):
    export(Task(dense(), read), str(tmp_path / "other"), formats=["saved_model"])
  assert sorted(os.listdir(tmp_path)) == ["export"]
  words = Task(dense(), read, features={"text": np.array(["one", "two"] * 4)})
  export(words, str(tmp_path / "other"), formats=["saved_model"])


@pytest.mark.parametrize(
  ("found", "expected", "distance"),
  [
    ([1.0, 2.0], [1.0, 2.0], 0.0),
    ([1.0, 2.5], [1.0, 2.0], 0.25),
    ([-4.5, 2.0], [-4.0, 2.0], 0.125),
    ([0.5, 0.0], [0.0, 0.0], 0.5),  # all expected are 0: the difference itself
    ([1.0], [1.0, 2.0], math.inf),
    ([1.0, math.nan], [1.0, 2.0], math.inf),
    ([math.inf, 1.0], [math.inf, 1.0], 0.0),
    ([-math.inf, 1.0], [math.inf, 1.0], math.inf),
    ([math.nan, 1.5], [math.nan, 1.0], 0.5),
  ],
)
def test_distance(found, expected, distance):
  assert conversion.distance(np.array(found), np.array(expected)) == distance


def test_whole_numbers_and_texts_must_be_equal():
  assert conversion.distance(np.array([1, 2]), np.array([1, 2])) == 0.0
  assert conversion.distance(np.array([1, 2]), np.array([1, 3])) == math.inf
  assert conversion.distance(np.array([b"a"]), np.array([b"b"])) == math.inf


# -- before training


@pytest.mark.parametrize(
  ("names", "model", "directory", "line"),
  [
    (
      ["onxx"],
      None,
      "e",
      "unknown format in Export.formats 'onxx'; it must be one of keras, litert",
    ),
    ("onnx", None, "e", "Export.formats is 'onnx'; it must be a list, such as ['onnx']."),
    (["keras"], {}, "e", "Export.formats has 'keras', but the model of Task is a dict"),
    (["saved_model"], None, "gs://e", "'gs://e' is remote; choose a local Export.directory"),
  ],
)
def test_what_cannot_be_made_is_refused(names, model, directory, line):
  with pytest.raises(ConfigError) as raised:
    formats.require(Task(model), names, directory)
  assert line in str(raised.value)


@pytest.mark.parametrize(
  ("name", "packages"), [("onnx", "tf2onnx onnxruntime"), ("litert", "ai-edge-litert")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, packages, monkeypatch):
  monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=f"is not installed; run: pip install {packages}$"):
    formats.require(Task(None), [name], "e")


# -- the process


def answers(monkeypatch, *outcomes, stderr=""):
  lines = "".join(f"OUTCOME {json.dumps(outcome)}\n" for outcome in outcomes)
  done = types.SimpleNamespace(stdout=f"noise\n{lines}", stderr=stderr, returncode=-11)
  monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)


def test_a_saved_model_that_differs_is_moved_away(tmp_path, monkeypatch):
  directory = str(tmp_path / "export")
  os.makedirs(directory)
  answers(monkeypatch, ["saved_model", 0.5, 1e-4, "it differs by 0.5"], ["keras", 0.0, 1e-4, ""])
  with pytest.raises(ConfigError, match=r"export' is refused as 'saved_model': it differs by 0.5$"):
    formats.prove(Task(dense()), directory, ["saved_model", "keras"])
  assert os.listdir(tmp_path) == ["export.refused"]


def test_a_process_that_dies_refuses_what_it_did_not_reach(tmp_path, monkeypatch):
  answers(monkeypatch, ["saved_model", 0.0, 1e-4, ""], stderr="a\nSegmentation fault\n")
  with pytest.raises(ConfigError, match=r"refused as 'onnx': its process failed: Segmentation"):
    formats.prove(Task(dense()), str(tmp_path), ["saved_model", "onnx"])


@pytest.mark.whole
def test_all_formats_in_a_fresh_process(tmp_path):
  import onnxruntime

  task, directory = Task(dense()), str(tmp_path / "export")
  export(task, directory, formats=formats.FORMATS)
  outcomes = formats.prove(task, directory, formats.FORMATS)
  assert [one.format for one in outcomes] == list(formats.FORMATS)
  assert all(0 <= one.largest < 1e-5 for one in outcomes)
  session = onnxruntime.InferenceSession(os.path.join(directory, "model.onnx"))
  (found,) = session.run(None, {"x": X})
  np.testing.assert_allclose(found, task.export_signature()(X)["y"], rtol=1e-5)
  assert os.path.getsize(os.path.join(directory, "model.tflite")) > 0
  lines = formats.told(directory, outcomes).splitlines()
  assert lines[2].startswith(f"exported {directory}/model.onnx: loaded again, largest difference ")
