"""In a process of its own, since this one has imported Keras by other ways."""

import json
import random
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
before = [*sys.meta_path]
import loopwright
unpatched = before == sys.meta_path
from loopwright.host import lazy_keras
lazy_keras.install()
import keras, tensorflow as tf
from keras import visualization

here = lambda: [name for name in ("sklearn", "matplotlib") if name in sys.modules]
seen = {"imported": here(), "unpatched": unpatched}
double = tf.function(lambda x: 2 * x if x > 0 else x)
seen["double"] = float(double(tf.constant(3.0)))
seen["traced"] = here()
seen["no such name"] = hasattr(keras.wrappers, "SKLearnNothing")
seen["same class"] = keras.wrappers.SKLearnClassifier is keras.src.wrappers.SKLearnClassifier
from keras.wrappers import *
seen["starred"] = [SKLearnClassifier.__name__, SKLearnRegressor.__name__]
seen["plots"] = callable(visualization.plot_image_gallery)
seen["asked"] = here()

from loopwright import configurables
from loopwright.runs import builder
from loopwright.models import batch_norm, recomputation
from loopwright.graphs import randomness
from loopwright.configurables import table
from loopwright.optimizers import adapters, schedules
from loopwright.options.groups import Numerics

import tf_keras

rate = schedules.constant(learning_rate=0.5)
builder.set_globals(Numerics(seed=7, precision="mixed_bfloat16"))
for patch in (randomness._patch_generators, batch_norm._patch, recomputation._patch_statistics):
  patch()
config = ["configs/digits_cnn.gin"]
configurables.parse(config)
seen["operative"] = configurables.operative_config()
seen["executed early"] = "Model" in vars(tf_keras)
from tf_keras.src import backend  # a module in it comes first
from tf_keras.src.layers.normalization.batch_normalization import BatchNormalizationBase as Base

seen["executed"] = "Model" in vars(tf_keras)
seen["policy"] = tf_keras.mixed_precision.global_policy().name
seen["drawn"] = backend._SEED_GENERATOR.generator.random()
patched = (backend.RandomGenerator.dropout, Base.call, Base._assign_moving_average)
seen["patched"] = [hasattr(each, "__wrapped__") for each in patched]
optimizer = tf_keras.optimizers.SGD(rate)
seen["rate"] = float(optimizer.learning_rate)
seen["fits"] = isinstance(optimizer, lazy_keras.KerasOptimizer)
seen["elementwise"] = adapters.is_elementwise(optimizer)
for name in ("keras.Adam", "tf_keras.Adam", "Adam"):
  try:
    configurables.parse(config, [f"run.optimizer = @{name}"])
  except Exception as error:
    seen["mistake"] = str(error)
  seen[name] = "tf_keras.Adam" in table.registry()
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
  file = tmp_path_factory.mktemp("lazy") / "program.py"  # AutoGraph reads sources
  file.write_text(PROGRAM)
  done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True)
  return json.loads(done.stdout.splitlines()[-1])


def test_a_program_that_trains_imports_neither_library(seen):
  assert (seen["imported"], seen["double"], seen["traced"]) == ([], 6.0, [])


def test_to_import_loopwright_patches_nothing(seen):
  assert seen["unpatched"]


def test_what_is_asked_for_is_there(seen):
  assert seen["asked"] == ["sklearn", "matplotlib"]
  assert seen["same class"]
  assert seen["starred"] == ["SKLearnClassifier", "SKLearnRegressor"]
  assert seen["plots"]
  assert not seen["no such name"]


def test_tf_keras_is_executed_when_it_is_used(seen):
  assert (seen["executed early"], seen["executed"]) == (False, True)


def test_what_was_set_before_holds_in_tf_keras(seen):
  assert seen["policy"] == "mixed_bfloat16"
  assert seen["drawn"] == random.Random(7).random()
  assert seen["patched"] == [True, True, True]
  assert seen["rate"] == 0.5
  assert (seen["fits"], seen["elementwise"]) == (True, True)


def test_a_config_registers_tf_keras_only_if_a_name_may_mean_it(seen):
  assert "\nrun.optimizer = @keras.Adam\n" in seen["operative"]
  assert (seen["keras.Adam"], seen["tf_keras.Adam"]) == (False, True)
  assert seen["mistake"].endswith("'Adam' is ambiguous; it must be keras.Adam or tf_keras.Adam.")


@pytest.mark.whole
def test_a_run_executes_neither_tf_keras_nor_scikit_learn(tmp_path):
  program = """
import sys
from loopwright import commands
options = ["run.train_steps=2", "run.eval_steps=1", f"--model_dir={sys.argv[1]}"]
status = commands.main(["loopwright", "train", "digits_cnn", "auto.cpu_replicas=2", *options])
print(status, "tf_keras.src" in sys.modules, "sklearn" in sys.modules)
"""
  command = [sys.executable, "-c", program, str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == "0 False False"
