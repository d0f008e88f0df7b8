"""What a run computes for each example, and its model as one file, beside NumPy."""

import keras
import numpy as np
import onnxruntime
import pyarrow.parquet
import pytest
import tensorflow as tf
import toys

import loopwright
from loopwright import commands, configurables
from loopwright.runs import runner

RNG = np.random.default_rng(6)
X = RNG.normal(size=[11, 3]).astype(np.float32)


@loopwright.register
class TwoHeads(toys.Regression):
  """y = 2 x @ kernel + bias, in two parts; preprocess doubles x."""

  features = {"x": X, "y": X[:, 0]}

  def build_model(self):
    return toys.network([3], keras.layers.Dense(2, name="head"))

  def preprocess(self, batch, training):
    return {**batch, "x": 2 * batch["x"]}

  def forward(self, batch, training):
    both = self.model(batch["x"], training=training)
    return {"first": both[:, 0], "all": {"both": both}}

  def loss(self, outputs, batch):
    return loopwright.Loss.from_examples(tf.square(outputs["first"] - batch["y"]), batch["weight"])

  def metrics(self, outputs, batch):
    return {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run") / "a"
  bindings = ("run.task = @TwoHeads()", "run.global_batch_size = 4", "run.train_steps = 3")
  configurables.parse([], bindings)
  configurables.configured(runner.run)(mode="train", model_dir=str(folder))
  reader = tf.train.load_checkpoint(str(folder / "checkpoints" / "ckpt-3"))
  keys = [key for key in reader.get_variable_to_shape_map() if key.startswith("model/")]
  return folder, *(
    reader.get_tensor(next(key for key in keys if name in key)) for name in ("kernel", "bias")
  )


def called(*arguments):
  assert commands.main(["loopwright", *map(str, arguments)]) == 0


@pytest.mark.parametrize("batch", [4, 11, 128])
def test_each_example_has_its_row(batch, trained, tmp_path):
  folder, kernel, bias = trained
  path = tmp_path / "p.npz"
  called("predict", folder, f"--output={path}", f"--batch_size={batch}")
  found, expected = np.load(path), 2 * X @ kernel + bias
  assert sorted(found) == ["all/both", "example_id", "first"]
  np.testing.assert_array_equal(found["example_id"], np.arange(11))
  np.testing.assert_allclose(found["all/both"], expected, rtol=1e-5)
  np.testing.assert_allclose(found["first"], expected[:, 0], rtol=1e-5)


def test_a_file_of_features_as_a_table(trained, tmp_path):
  folder, kernel, bias = trained
  np.savez(tmp_path / "new.npz", x=-X[:5])
  path = tmp_path / "p.parquet"
  called("predict", folder, f"--data={tmp_path / 'new.npz'}", f"--output={path}")
  table = pyarrow.parquet.read_table(path)
  np.testing.assert_allclose(table["all/both"].to_pylist(), -2 * X[:5] @ kernel + bias, rtol=1e-5)


def test_mistakes_are_one_line(trained, tmp_path, capsys):
  folder, *_ = trained
  for arguments, line in (
    ((), "takes one run folder, as in `predict runs/a`"),
    ((folder, "--output=p.csv"), "--output='p.csv' must end in .npz or .parquet"),
    ((tmp_path,), "has no operative_config.gin with a task"),
  ):
    assert commands.main(["loopwright", "predict", *map(str, arguments)]) == 2
    assert line in capsys.readouterr().err


def of_onnx(path):
  session = onnxruntime.InferenceSession(str(path))
  return session.run(None, {session.get_inputs()[0].name: X})[0]


def of_litert(path):
  served = tf.lite.Interpreter(str(path)).get_signature_runner("serving_default")
  [name] = served.get_input_details()
  return next(iter(served(**{name: X}).values()))


@pytest.mark.parametrize(
  ("kind", "file", "read"),
  [
    ("keras", "model.keras", lambda path: keras.models.load_model(path)(X).numpy()),
    ("onnx", "model.onnx", of_onnx),
    ("litert", "model.tflite", of_litert),
  ],
)
def test_the_model_as_one_file_computes_the_same(kind, file, read, trained):
  folder, kernel, bias = trained
  config = folder / "operative_config.gin"
  called("export", config, f"--model_dir={folder}", f"--format={kind}")
  np.testing.assert_allclose(read(folder / file), X @ kernel + bias, rtol=1e-5, atol=1e-6)
