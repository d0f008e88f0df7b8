"""The GPUs of a process: which ones, and what is said of those that TensorFlow does not see.

Files in a folder stand for a machine's; TensorFlow itself sees no GPU here.
"""

import re
import subprocess
import sys
import types

import pytest
import tensorflow as tf
from input_cases import one_line_error

from loopwright.distribution import gpus
from loopwright.host import nvidia
from loopwright.options.groups import Gpus
from loopwright.strategies.workers import resolvers
from loopwright.tools import local_cluster
from loopwright.tools.sweep import runner


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Returns a function that makes a machine with so many GPUs."""
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  monkeypatch.setattr(nvidia, "ROOT", str(tmp_path))

  def made(files=(), driver=0):
    for name in files:
      (tmp_path / "dev").mkdir(exist_ok=True)
      (tmp_path / "dev" / name).touch()
    for number in range(driver):
      (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return tmp_path

  return made


def seen(monkeypatch, count, *, cuda=True):
  """TensorFlow sees so many GPUs; returns them, and where the visible ones are kept."""
  found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(count)]
  kept = {"visible": found}
  monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: found)
  monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: kept["visible"])
  monkeypatch.setattr(tf.config, "set_visible_devices", lambda each, _: kept.update(visible=each))
  monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: cuda)
  return found, kept


FILES = ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0")


@pytest.mark.parametrize(
  ("files", "driver", "cuda", "hidden", "says"),
  [
    ((), 0, True, None, None),
    (FILES, 3, True, None, "3 NVIDIA GPU.s., of which TensorFlow sees none .*loopwright.gpu."),
    (FILES, 3, True, "-1", None),
    (FILES, 3, True, "", None),
    (FILES, 3, True, "1", "which TensorFlow sees none .*loopwright.gpu."),
    (FILES, 3, False, None, "built without CUDA: install tensorflow, not tensorflow-cpu"),
    ((), 2, True, None, "2 NVIDIA GPU.s.* may not open them: ask for them .Slurm's --gpus"),
  ],
)
def test_gpus_that_tensorflow_does_not_see_are_told(
  files, driver, cuda, hidden, says, machine, monkeypatch, caplog
):
  root = machine(files, driver)
  seen(monkeypatch, 0, cuda=cuda)
  if hidden is not None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
  with caplog.at_level("WARNING", logger="absl"):
    gpus.warn_of_unseen()
  if says is None:
    assert not caplog.text
    return
  [record] = caplog.records
  assert re.search(says, record.getMessage())
  assert "\n" not in record.getMessage()
  if files:
    in_order = ", ".join(str(root / "dev" / f"nvidia{n}") for n in (0, 2, 10))
    assert f"({in_order})" in record.getMessage()


def test_nothing_is_told_if_tensorflow_sees_them_all(machine, monkeypatch):
  machine(FILES)
  seen(monkeypatch, 3)
  assert gpus.unseen() is None
  seen(monkeypatch, 2)
  assert "3 NVIDIA GPU(s), of which TensorFlow sees 2 " in gpus.unseen()
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
  assert gpus.unseen() is None


RUN = """
import sys
import types
from loopwright.host import nvidia
nvidia.ROOT = sys.argv[1]
import numpy as np, keras, loopwright
from loopwright.runs import runner

class Line(loopwright.Task):
  def build_model(self):
    return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
  def source(self, split):
    return loopwright.ArraySource(features={"x": np.ones([4, 1], np.float32)})
  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]
  def loss(self, outputs, batch):
    return loopwright.Loss.from_examples(outputs ** 2, batch["weight"])

runner.run(task=Line(), train_steps=1, global_batch_size=4, model_dir=sys.argv[2], mode="train")
"""


def test_a_run_tells_it_once(machine, tmp_path):
  root = machine(("nvidia0",))
  done = subprocess.run(
    [sys.executable, "-c", RUN, root, tmp_path / "run"], capture_output=True, text=True, check=True
  )
  assert done.stderr.count("this machine has 1 NVIDIA GPU(s), of which TensorFlow sees none") == 1
  assert "gpu_memory_mib" not in (tmp_path / "run" / "metrics.jsonl").read_text()
  assert "GPUs  " not in done.stderr
  assert "TF32" not in done.stderr


# ---- Divided among processes ----


def test_a_cgroup_limits_what_is_visible(machine, monkeypatch):
  machine(FILES)
  assert nvidia.visible() == ["0", "1", "2"]  # CUDA numbers what it may open
  monkeypatch.setattr("os.access", lambda path, mode: path.endswith("nvidia10"))
  assert nvidia.visible() == ["0"]


@pytest.mark.parametrize(
  ("given", "visible"),
  [("4,5", ["4", "5"]), ("", []), ("-1", []), ("1, 0 ,-1,2", ["1", "0"]), ("GPU-8a", ["GPU-8a"])],
)
def test_the_environment_limits_it_too(given, visible):
  assert nvidia.visible({"CUDA_VISIBLE_DEVICES": given}) == visible


def environments(monkeypatch, tmp_path, **options):
  """The environment of each process of a local cluster, none of which is started."""
  made = {}

  def process(name, command, env, log, **_):
    del command, log
    made[name] = env.get("CUDA_VISIBLE_DEVICES")
    return types.SimpleNamespace(status=0, has_ended=lambda **_: False, send=lambda *_: None)

  monkeypatch.setattr(local_cluster, "Process", process)
  workers = options["workers"]
  local_cluster.LocalCluster(
    command=["true"], model_dir=str(tmp_path), least=workers, **options
  ).run()
  return made


@pytest.mark.parametrize(
  ("given", "workers", "ps", "expected"),
  [
    ("0,1,2,3", 4, 0, {f"worker-{n}": f"{n}" for n in range(4)}),
    ("7,5,3,1", 2, 0, {"worker-0": "7,5", "worker-1": "3,1"}),
    ("0,1,2,3,4", 2, 0, {"worker-0": "0,1", "worker-1": "2,3"}),
    ("0,1", 2, 1, {"worker-0": "0", "worker-1": "1", "chief": "-1", "ps-0": "-1"}),
    ("-1", 2, 0, {"worker-0": "-1", "worker-1": "-1"}),
  ],
)
def test_local_workers_divide_the_gpus(given, workers, ps, expected, monkeypatch, tmp_path):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
  assert environments(monkeypatch, tmp_path, workers=workers, ps=ps) == expected


def test_more_local_workers_than_gpus(monkeypatch, tmp_path):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
  with one_line_error("--local_workers=3 is above the 2 GPUs here; give at most 2, or set CUDA_VI"):
    environments(monkeypatch, tmp_path, workers=3)


def test_trials_divide_the_gpus_of_the_machine(machine):
  machine(FILES)
  assert [each.environment for each in runner.slots(2)] == [
    {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"},
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("rank", "sees", "on_node", "left"),
  [
    (0, 4, "4", [0, 1]), (1, 4, "4", [2, 3]), (2, 4, "4", [0, 1]), (3, 4, "4", [2, 3]),
    (3, 2, "4", [0, 1]),  # Slurm has bound them: of the job's four each task sees its two
    (1, 1, "2", [0]),
    (1, 4, "0", []),
  ],
)  # fmt: skip
def test_slurm_tasks_divide_the_gpus_that_they_see(rank, sees, on_node, left, monkeypatch):
  found, kept = seen(monkeypatch, sees)
  for name, value in {
    "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": on_node,
  }.items():  # fmt: skip
    monkeypatch.setenv(name, value)
  resolver = resolvers.slurm()
  assert kept["visible"] == [found[number] for number in left]
  assert resolver.num_accelerators() == {"GPU": len(left)}


# ---- Options ----


@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"gpus": [0, -1]}, "each of run.gpus is -1; it must be a whole number of at least 0"),
    ({"gpus": [1, 1]}, "run.gpus is [1, 1]; list each GPU once"),
    ({"gpu_memory": 0}, "run.gpu_memory is 0; it must be a whole number of at least 1"),
    ({"gpu_memory": "groww"}, "unknown run.gpu_memory 'groww'; it must be one of a number"),
    ({"gpus": [2]}, "run.gpus is [2], but TensorFlow sees 0 GPUs"),
  ],
)
def test_mistakes(options, says):
  with one_line_error(re.escape(says)):
    gpus.configure(Gpus(**options))


def test_devices_that_are_in_use_cannot_be_chosen(monkeypatch):
  tf.constant(1)
  found = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
  monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: found)
  with one_line_error("run.gpus and run.gpu_memory cannot be set"):
    gpus.configure(Gpus(gpu_memory="grow"))


@pytest.mark.parametrize(
  ("model", "tera"),
  [
    ("NVIDIA H100 PCIe", [51, 378, 756]), ("NVIDIA H100 80GB HBM3", [67, 494, 989]),
    ("NVIDIA L40S", [91.6, 183, 362]), ("NVIDIA L4", [30, 60, 121]),
    ("NVIDIA A100-SXM4-80GB", [19.5, 156, 312]), ("NVIDIA A10G", [None] * 3),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", [None] * 3), ("", [None] * 3),
  ],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_that_of_its_whole_name(model, tera):
  found = [
    gpus.peak_flops_of(model, dtype, tf32=tf32)
    for dtype, tf32 in [("float32", False), ("float32", True), ("bfloat16", True)]
  ]
  assert found == [each and 1e12 * each for each in tera]
  assert gpus.peak_flops_of(model, "float64", tf32=True) is None


def test_the_peak_of_several_gpus_is_that_of_the_slowest(monkeypatch):
  found, _ = seen(monkeypatch, 3)
  models = dict(zip(found, ["NVIDIA H100 PCIe", "NVIDIA L4", "another"], strict=True))
  monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
  monkeypatch.setattr(
    tf.config.experimental,
    "get_device_details",
    lambda gpu: {"device_name": models[gpu], "compute_capability": (9, 0)},
  )
  assert gpus.peak_flops(["GPU:0", "GPU:1"], "float16") == 121e12
  assert gpus.peak_flops(["GPU:0", "GPU:2"], "float16") is None
  assert gpus.peak_flops(["CPU:0"], "float32") is None
  assert gpus.peak_flops([], "float32") is None


# ---- Utilisation ----


class NVMLError(Exception):
  """As of pynvml."""


def nvml(busy):
  """Returns a module pynvml on a machine whose GPUs are so busy, in percent."""

  def rates(handle):
    if busy[handle] is None:
      raise NVMLError("Not Supported")
    return types.SimpleNamespace(gpu=busy[handle])

  return types.SimpleNamespace(
    NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=list(busy).__getitem__,
    nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetUtilizationRates=rates,
  )  # fmt: skip


@pytest.mark.parametrize(
  ("visible", "devices", "busy", "wanted"),
  [
    ("0,1", ["GPU:0", "GPU:1"], {"a": 90, "b": 70}, 0.8),
    ("1,0", ["GPU:0"], {"a": 90, "b": 70}, 0.7),
    ("GPU-x", ["GPU:0"], {"a": 90, "GPU-x": 30}, 0.3),
    ("MIG-x", ["GPU:0"], {"MIG-x": None}, None),
    ("0", ["GPU:0", "GPU:1"], {"a": 90}, None),
    ("0", ["CPU:0"], {"a": 90}, None),
  ],
)
def test_the_utilisation_is_that_of_the_gpus_in_use(monkeypatch, visible, devices, busy, wanted):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
  monkeypatch.setitem(sys.modules, "pynvml", nvml(busy))
  found = lambda name: types.SimpleNamespace(name=f"/physical_device:{name}")  # noqa: E731
  monkeypatch.setattr(
    gpus, "_of", lambda name: (found(name) if name.startswith("GPU") else None, None)
  )
  gpus._in_nvml.cache_clear()
  assert gpus.utilization(devices) == (None if wanted is None else pytest.approx(wanted))
  monkeypatch.setitem(sys.modules, "pynvml", None)
  gpus._in_nvml.cache_clear()
  assert gpus.utilization(devices) is None
