"""A run goes on only with the config and the data that it has had so far."""

import functools
import json
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource, Source
from loopwright.inputs.streams import StreamSource
from loopwright.run_folder import history
from loopwright.runs import resume_rules
from loopwright.runs.runner import run
from loopwright.strategies import factories


class Slope(toys.Regression):
  """y = 3x; the model's one weight."""

  def __init__(self, examples=8, scale=1.0):
    x = np.linspace(-1, 1, examples, dtype=np.float32)
    self.features = {"x": x[:, None], "y": scale * 3 * x}

  def build_model(self):
    return toys.network([1], keras.layers.Dense(1, use_bias=False))


SGD = functools.partial(keras.optimizers.SGD, learning_rate=0.1)


def go(folder, steps, task=None, **changes):
  arguments = {"optimizer": SGD, "global_batch_size": 4, **changes}
  return run(task=task or Slope(), train_steps=steps, model_dir=str(folder), **arguments)


RATE = functools.partial(keras.optimizers.SGD, learning_rate=1e-7)
WAS = r"keras\..*SGD\(learning_rate=0.1\)"
REST = pytest.mark.whole


@pytest.mark.parametrize(
  ("changes", "line"),
  [
    ({"optimizer": RATE}, rf"optimizer = keras\..*SGD\(learning_rate=1e-07\), which was {WAS}:"),
    pytest.param({"seed": 1}, "seed = 1, which was 0:", marks=REST),
    pytest.param(
      {"global_batch_size": 2},
      "global batch size = 2, which was 4; global_batch_size = 2, which was 4:", marks=REST,
    ),
    pytest.param({"shuffle": False}, "shuffle = False, which was True:", marks=REST),
    pytest.param(
      {"task": Slope(examples=6)}, "training = 6 examples, .*, which was 8 examples, ", marks=REST
    ),
    ({"task": Slope(scale=2.0)}, "training = 8 examples, .*, which was 8 examples, "),
  ],
)  # fmt: skip
def test_what_changes_numbers_is_refused_and_nothing_is_written(tmp_path, changes, line):
  go(tmp_path, 2)
  before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
  with pytest.raises(ConfigError, match=line):
    go(tmp_path, 4, **changes)
  assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
  go(tmp_path, 4, accept_changes=True, **changes)
  go(tmp_path, 6, **changes)
  assert [record["step"] for record in history.records(str(tmp_path))] == [0, 2, 4]


@pytest.mark.whole
def test_how_far_how_often_and_where_may_change(tmp_path, mirrored):
  go(tmp_path, 2)
  two = functools.partial(factories.mirrored, cpu_replicas=2)
  go(tmp_path, 4, steps_per_loop=1, eval_every_steps=2, checkpoint_every_steps=1,
     keep_checkpoints=1, strategy=two, eager=False)  # fmt: skip
  assert len(history.records(str(tmp_path))) == 2


def test_a_complete_run_says_so_and_writes_nothing(tmp_path, capsys):
  go(tmp_path, 2)
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  go(tmp_path, 2)
  assert (
    "nothing to train: the run is at step 2 of 2; raise run.train_steps" in capsys.readouterr().err
  )
  assert set(before) == set(tmp_path.rglob("*"))
  kept = [path for path in before if path.is_file() and "tfevents" not in path.name]
  assert all(path.stat().st_mtime_ns == before[path] for path in kept)


def test_a_start_that_fails_changes_nothing(tmp_path):
  go(tmp_path, 2)
  broken = Slope()
  broken.loss = lambda outputs, batch: 1 / 0
  with pytest.raises(Exception, match="division by zero"):
    go(tmp_path, 4, optimizer=RATE, task=broken, accept_changes=True)
  go(tmp_path, 4)
  assert [record["step"] for record in history.records(str(tmp_path))] == [0, 2]


def test_a_start_is_recorded(tmp_path):
  go(tmp_path, 2)
  (record,) = history.records(str(tmp_path))
  assert record["config"]["optimizer"] == "keras.src.optimizers.sgd.SGD(learning_rate=0.1)"
  assert record["versions"]["numpy"] == np.__version__
  git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
  commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
  assert record["commit"] in (commit, f"{commit}+changes")
  assert "train_steps" not in record["config"]


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}\nnull\n', '{"data": 3}'])
def test_a_damaged_history_is_one_line(tmp_path, content):
  (tmp_path / "history.jsonl").write_text(content)
  with pytest.raises(ConfigError, match=r"history\.jsonl' is damaged; restore it"):
    history.records(str(tmp_path))


def test_another_format_of_the_last_line_is_no_change(tmp_path):
  (tmp_path / "history.jsonl").write_text(json.dumps({"time": "then"}) + "\n")
  assert resume_rules.changes(str(tmp_path), "config", {"a": "1"}) == []


# ---- Fingerprints ----


class Mine(Source):
  def __init__(self, values):
    self.num_examples, self._values = len(values), values

  def fetch(self, indices):
    return {"x": tf.gather(tf.constant(self._values), indices)}


def arrays(values):
  return ArraySource(features={"x": np.array(values, np.float32)})


@pytest.mark.parametrize("made", [arrays, Mine])
def test_equal_data_has_an_equal_fingerprint_and_other_data_has_not(made):
  first = made([1.0, 2.0, 3.0]).fingerprint()
  assert first == made([1.0, 2.0, 3.0]).fingerprint()
  assert first.startswith("3 examples, ")
  for other in ([1.0, 2.0], [1.0, 2.5, 3.0], [2.0, 1.0, 3.0], [[1.0], [2.0], [3.0]]):
    assert made(other).fingerprint() != first


def test_text_and_streams_have_fingerprints():
  words = ArraySource(features={"x": np.array([b"a", b"bc"])})
  assert words.fingerprint() != ArraySource(features={"x": np.array([b"a", b"bd"])}).fingerprint()
  stream = tf.data.Dataset.from_tensor_slices({"x": [1.0, 2.0]})
  assert StreamSource(dataset=stream).fingerprint().startswith("2 examples, ")
  endless = StreamSource(dataset=stream.repeat())
  assert endless.fingerprint().startswith("unknown number of examples, ")
