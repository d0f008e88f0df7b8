"""`loopwright.load`: a trained run in Python, against weights computed by hand."""

import keras
import numpy as np
import pytest
import toys

import loopwright
from loopwright import ConfigError, configurables, load
from loopwright.runs.runner import run

DECAY = 0.5
CONFIG = (
  "run.task = @Climbing()", "run.train_steps = 4", "run.global_batch_size = 4",
  "run.strategy = @mirrored", "mirrored.cpu_replicas = 2", "run.optimizer = @keras.SGD",
  "keras.SGD.learning_rate = 1.0", "run.eval_every_steps = 2", "run.actions = [@BestCheckpoint()]",
  "BestCheckpoint.mode = 'max'", f"Trainer.ema_decay = {DECAY}",
)  # fmt: skip


@loopwright.register
class Climbing(toys.Regression):
  """One weight, which is t after step t; the losses, -t, are least at the end."""

  features = {"x": np.ones([4, 1], np.float32)}

  def build_model(self):
    return toys.linear([0.0])

  def losses(self, outputs, batch):
    return -outputs


def weight(loaded):
  assert loaded.model is loaded.task.model
  return loaded.model.predict(np.ones([1, 1], np.float32), verbose=0).item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  made = str(tmp_path_factory.mktemp("run") / "run")
  configurables.parse([], CONFIG)
  configurables.configured(run)(mode="train_and_evaluate", model_dir=made)
  return made


def test_a_run_is_loaded_with_its_averages_or_its_weights(folder):
  configurables.parse([], CONFIG[:3])
  before = configurables.bindings()
  average = [0.0]
  for step in range(1, 5):
    average.append(DECAY * average[-1] + (1 - DECAY) * step)
  loaded = load(folder)
  assert (weight(loaded), loaded.step, loaded.averaged) == (average[4], 4, True)
  assert isinstance(loaded.task, Climbing)
  best = load(folder, checkpoint=f"{folder}/best")
  assert (weight(best), best.step, weight(loaded)) == (average[2], 2, average[4])
  trained = load(folder, averages=False)
  assert (weight(trained), trained.averaged) == (4.0, False)
  assert configurables.bindings() == before


def test_a_run_that_python_started_is_loaded_with_what_it_got(tmp_path):
  given = {"task": Climbing(), "optimizer": lambda: keras.optimizers.SGD(1.0, momentum=0.5)}
  with configurables.apart():
    run(**given, train_steps=2, global_batch_size=4, mode="train", model_dir=tmp_path)
  with pytest.raises(ConfigError, match=r"^model_dir is None; it must be the path of a folder"):
    load(None)
  loaded = load(tmp_path, **(given | {"task": Climbing}))
  assert (weight(loaded), loaded.step, loaded.averaged) == (1.0 + 1.5, 2, False)
  with pytest.raises(ConfigError, match=r"^'.*' has no operative_config.gin with a task: it is no"):
    load(str(tmp_path))
  for index in (tmp_path / "checkpoints").glob("*.index"):
    index.write_bytes(b"")
  with pytest.raises(ConfigError, match=r"^all \d checkpoints in .* are damaged; restore"):
    load(tmp_path, **(given | {"task": Climbing}))


def test_the_precision_of_a_run_is_not_that_of_what_comes_after(tmp_path, policy):
  configurables.parse([], [*CONFIG[:3], "run.precision = 'mixed_bfloat16'"])
  configurables.configured(run)(mode="train", model_dir=str(tmp_path))
  policy("float32")
  assert load(str(tmp_path)).model.layers[0].compute_dtype == "bfloat16"
  assert keras.config.dtype_policy().name == "float32"
