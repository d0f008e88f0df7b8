"""In a process of its own, since this one has imported Keras by other ways."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import framework
import keras, tensorflow as tf
from keras import visualization

here = lambda: [name for name in ("sklearn", "matplotlib") if name in sys.modules]
seen = {"imported": here()}
double = tf.function(lambda x: 2 * x if x > 0 else x)
seen["double"] = float(double(tf.constant(3.0)))
seen["traced"] = here()
seen["no such name"] = hasattr(keras.wrappers, "SKLearnNothing")
seen["same class"] = keras.wrappers.SKLearnClassifier is keras.src.wrappers.SKLearnClassifier
from keras.wrappers import *
seen["starred"] = [SKLearnClassifier.__name__, SKLearnRegressor.__name__]
seen["plots"] = callable(visualization.plot_image_gallery)
seen["asked"] = here()
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


def test_what_is_asked_for_is_there(seen):
  assert seen["asked"] == ["sklearn", "matplotlib"]
  assert seen["same class"]
  assert seen["starred"] == ["SKLearnClassifier", "SKLearnRegressor"]
  assert seen["plots"]
  assert not seen["no such name"]
