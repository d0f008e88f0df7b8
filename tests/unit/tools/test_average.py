"""The mean of runs, trained on two replicas, against NumPy."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import loopwright
from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.runs.from_config import load
from loopwright.runs.runner import run
from loopwright.tools.runs import average

RNG = np.random.default_rng(0)
X = RNG.normal(2.0, 3.0, size=[24, 3]).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5]).astype(np.float32)
BASE = (
  "run.task = @Normalised()", "run.train_steps = 6", "run.global_batch_size = 8",
  "run.strategy = @mirrored", "mirrored.cpu_replicas = 2", "run.optimizer = @keras.SGD",
  "keras.SGD.learning_rate = 0.02", "run.shuffle = False",
)  # fmt: skip


@loopwright.register
class Normalised(toys.Regression):
  """Regression by two dense layers, with batch normalisation between them."""

  features = {"x": X, "y": Y}

  def __init__(self, *, units: int = 4):
    self.units = units

  def build_model(self):
    layers = keras.layers
    norm = layers.BatchNormalization(synchronized=True)
    first, last = (layers.Dense(units, use_bias=False) for units in (self.units, 1))
    return toys.network([3], first, norm, last)


def start(folder, *bindings, mode="train"):
  """Runs as launch.py does; the last value of a binding counts."""
  last = {line.partition(" = ")[0]: line for line in (*BASE, *bindings)}
  configurables.parse([], list(last.values()))
  return configurables.configured(run)(mode=mode, model_dir=str(folder))


KEYS = {
  "first": "1/_kernel", "gamma": "2/gamma", "beta": "2/beta", "last": "3/_kernel",
  "mean": "2/moving_mean", "variance": "2/moving_variance",
}  # fmt: skip


def saved(folder, averages=False):
  """Returns name -> value in the newest checkpoint; of what is trained, the averages if asked."""
  reader = tf.train.load_checkpoint(str(folder / "checkpoints" / "ckpt-6"))
  places = {name: f"model/_functional/_operations/{key}" for name, key in KEYS.items()}
  if averages:
    places |= {name: f"ema/{number}" for number, name in enumerate(list(KEYS)[:4])}
  return {n: reader.get_tensor(f"{p}/.ATTRIBUTES/VARIABLE_VALUE") for n, p in places.items()}


def moments(first):
  """Returns the means of mean and variance over the three batches of an epoch."""
  parts = np.split(X.astype(float) @ first, 3)
  return np.mean([p.mean(0) for p in parts], axis=0), np.mean([p.var(0) for p in parts], axis=0)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.fast(averaged=[True])
def test_it_is_the_mean_and_has_statistics_of_its_own(averaged, tmp_path):
  """The weights that a run evaluates: with `weight_averaging`, its averages."""
  options = ("Trainer.ema_decay = @weight_averaging()", "weight_averaging.start_step = 3")
  given = options if averaged else ()
  folders = [tmp_path / "a", tmp_path / "b"]
  for seed, folder in enumerate(folders):
    start(folder, f"run.seed = {seed}", *given)
  told = average.average([str(f) for f in folders], str(tmp_path / "soup"), batches=3)
  assert told.endswith("the mean of 2 runs, at step 6; batch normalisation has the statistics of "
                       "3 batches")  # fmt: skip
  runs, soup = [saved(f, averages=averaged) for f in folders], saved(tmp_path / "soup", averaged)
  for name in ("first", "gamma", "beta", "last"):
    np.testing.assert_allclose(soup[name], (runs[0][name] + runs[1][name]) / 2, rtol=1e-6)
  mean, variance = moments(soup["first"])
  np.testing.assert_allclose(soup["mean"], mean, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(soup["variance"], variance, rtol=1e-4)
  hidden = (X @ soup["first"] - mean) / np.sqrt(variance + 1e-3) * soup["gamma"] + soup["beta"]
  loss = np.square((hidden @ soup["last"])[:, 0] - Y).mean()
  evaluated = start(tmp_path / "soup", *given, mode="evaluate")
  assert evaluated["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.whole
def test_what_cannot_be_averaged_is_one_line(tmp_path):
  start(tmp_path / "a")
  start(tmp_path / "b", "Normalised.units = 5")
  with pytest.raises(ConfigError, match="have other variables; average runs of one model"):
    average.average([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c"))
  with pytest.raises(ConfigError, match=r"to='.*' exists; give a new folder"):
    average.average([str(tmp_path / "a")], str(tmp_path / "b"))
  told = average.average([str(tmp_path / "a")], str(tmp_path / "c"))
  assert "the mean of 1 run, at step 6" in told


def test_the_checkpoint_of_another_run_is_in_no_mean_and_not_exported(tmp_path):
  one, other = tmp_path / "a", tmp_path / "b"
  start(one)
  start(other, "run.seed = 1", "run.train_steps = 7")
  for path in (other / "checkpoints").glob("ckpt-7.*"):
    shutil.copy(path, one / "checkpoints")
  stranger = r"ckpt-7 was written by a start that history\.jsonl does not have.*run\.checkpoint="
  for mode in ("evaluate", "export"):
    with pytest.raises(ConfigError, match=stranger):
      start(one, mode=mode)
  with pytest.raises(ConfigError, match=stranger):
    average.average([str(one)], str(tmp_path / "c"))
  assert not (tmp_path / "c").exists()
  (one / "history.jsonl").unlink()  # as after a copy of config and checkpoints
  assert load(str(one)).task.units == 4
