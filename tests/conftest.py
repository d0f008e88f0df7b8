"""One process, four logical CPUs: what every in-process test of N replicas runs on.

`pytest` runs the fast tier, `--ci` those of `.ci/run`, `--everything` all tests, see
tests/support/tiers.py. With TESTS_ON_GPUS=1 in the environment TensorFlow sees the GPUs; see
docs/gpu.md for what then runs.
"""

import gc
import os
import signal
import sys

import compiled
import pytest
import tiers

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "TESTS_ON_GPUS" in os.environ:  # processes share one, and compare in float32
  os.environ.update(TF_FORCE_GPU_ALLOW_GROWTH="true", NVIDIA_TF32_OVERRIDE="0")
else:
  os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
# Without bytecode each of the many processes takes three times as long to import TensorFlow.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LOGICAL_CPUS = 4
LONG = (
  *("test_update", "test_verify", "test_multi_worker", "test_resume", "test_verify_newcomers"),
  *("test_slurm", "test_parameter_server", "test_verify_restore", "test_inputs", "test_tune"),
  *("test_trials", "test_language_model", "test_verify_configs", "test_forensics"),
  *("test_notebooks", "test_verify_inputs", "test_full_control_tasks", "test_assets"),
  *("test_randomness", "test_models_from_elsewhere", "test_verify_mesh", "test_ledger"),
  *("test_checkpoints", "test_configs", "test_mistakes", "test_model_garden"),
  *("test_places", "test_keras_task", "test_model_parallel", "test_several_steps", "test_tape"),
)
"""Files that take long, the longest first, so that no process is left with one at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
  group = parser.getgroup("tiers")
  group.addoption("--everything", action="store_true", help="run all tests")
  group.addoption("--ci", action="store_true", help="run the fast tier and CI's")
  group.addoption("--rest", action="store_true", help="of these, leave out the fast tier")


def pytest_configure(config: pytest.Config) -> None:
  if not hasattr(config, "workerinput") and config.option.dist != "no":
    return  # this process hands out the tests and runs none
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
  import tensorflow as tf

  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
  )


def pytest_xdist_auto_num_workers() -> int:
  """One more than cores: the tests of clusters wait for their processes a good part of the time."""
  return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  options, named = config.option, any("::" in argument for argument in config.args)
  items[:], left = tiers.split(
    items, everything=options.everything or named, ci=options.ci, rest=options.rest and not named
  )
  if left:
    config.hook.pytest_deselected(items=left)
  items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
  gc.freeze()  # what is there for good need not be looked through each time
  gc.set_threshold(50_000, 20, 50)  # traces make many objects that last


@pytest.fixture(autouse=compiled.COMPILED, scope="session")
def as_on_gpus():
  """Trainers of CPUs are as on GPUs."""
  with compiled.as_on_gpus():
    yield


@pytest.fixture(autouse=compiled.STEPS > 1, scope="session")
def in_programs():
  """Several steps of a trainer are one program."""
  with compiled.in_programs():
    yield


@pytest.fixture(autouse=True)
def process_restored():
  """Takes back what a run sets for the whole process; the next test would run with it."""
  path, environment = [*sys.path], dict(os.environ)
  yield
  from tensorflow.python.data.ops import debug_mode
  from tensorflow.python.framework import config

  sys.path[:] = path
  os.environ.clear()
  os.environ.update(environment)
  config.disable_op_determinism()  # run.deterministic
  debug_mode.toggle_debug_mode(False)  # run.eager
  if gin := sys.modules.get("gin"):  # what it has bound are the arguments of `run`
    gin.clear_config()
  keras = sys.modules.get("keras")
  if keras and keras.config.dtype_policy().name != "float32":
    set_precision("float32")


def set_precision(name):
  """Sets the dtype policy of both generations of Keras."""
  import keras
  import tf_keras

  keras.config.set_dtype_policy(name)
  tf_keras.mixed_precision.set_global_policy(name)


@pytest.fixture
def policy():
  """Sets the dtype policy of a test."""
  return set_precision


@pytest.fixture
def mirrored():
  """Makes a MirroredStrategy of N logical CPUs, reduced without collectives."""
  import tensorflow as tf

  def make(replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(
      [f"CPU:{i}" for i in range(replicas)],
      cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )

  return make
