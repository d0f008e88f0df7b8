"""GPUs that a machine does not have: what TensorFlow asks of CUDA is counted, nothing is computed.

  library = fake_gpu.library()
  subprocess.run([sys.executable, "program.py"], env=fake_gpu.environment(library, count=2))

In that process TensorFlow has two GPUs, and `counts` says what was asked of them. Real are its GPU
runtime, the placement of operations, its graph rewritings and its copies; not real are numbers,
times, and what NVIDIA's libraries do inside. See cuda.cpp. For TensorFlow 2.21.

A value that a kernel should have computed is whatever its memory held before. Ask for one that is
not used as an index or a shape, and start a process for each thing that you measure.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda.cpp")
TENSORFLOW = Path(sysconfig.get_paths()["purelib"]) / "tensorflow"
LIBRARIES = {
  "cuda": "libcuda.so.1",
  "cudart": "libcudart.so.12",
  "cublas": "libcublas.so.12",
  "cublasLt": "libcublasLt.so.12",
  "cudnn": "libcudnn.so.9",
  "cufft": "libcufft.so.11",
  "cupti": "libcupti.so.12",
  "cusolver": "libcusolver.so.11",
  "cusparse": "libcusparse.so.12",
  "nccl": "libnccl.so.2",
  "nvml": "libnvidia-ml.so.1",
}
"""What TensorFlow loads, by the name of its list of functions."""
OF_THE_DRIVER = ("cuda", "nvml")
MAKES = re.compile(r"(cublas|cublasLt|cudnn|cusolver|cusparse)\w*Create\w*$")
LAUNCHES = re.compile(
  r"cublas[SDHCZGL]\w*(gemm|gemv|Gemm|axpy|scal|dot|trsm|copy)|cublasGemm|cublasLtMatmul$"
  r"|cudnnBackendExecute|cudnn(SetTensor|ScaleTensor)$|cudnn(Pooling|BatchNormalization"
  r"|NormalizationF|Convolution|Softmax|Activation|Dropout|TransformTensor|AddTensor|OpTensor|RNN)"
  r"\w*(Forward|Backward|Tensor|Training|Inference)"
)


def can_be_built() -> bool:
  """Whether there is g++, and a TensorFlow that can use GPUs of NVIDIA."""
  return bool(shutil.which("g++")) and (TENSORFLOW / "include/xla/tsl/cuda/cuda.inc").exists()


def library() -> Path:
  """Returns the folder of the stand-in's libraries, made in seconds if it is not there yet."""
  others = _others()
  digest = hashlib.sha256((SOURCE.read_text() + others).encode()).hexdigest()[:16]
  folder = Path(tempfile.gettempdir()) / f"fake-gpu-{digest}"
  if folder.exists():
    return folder
  made = Path(tempfile.mkdtemp(dir=folder.parent))
  (made / "others.cpp").write_text(others)
  headers = f"-I{TENSORFLOW / 'include/third_party/gpus/cuda/include'}"
  options = ["-O1", "-fPIC", "-shared", "-std=c++17", "-w", headers, SOURCE, "others.cpp"]
  subprocess.run(["g++", *options, "-o", "fake.so", "-lpthread"], cwd=made, check=True)
  (made / "driver").mkdir()
  for part, name in LIBRARIES.items():
    (made / name).symlink_to("fake.so")
    if part in OF_THE_DRIVER:
      (made / "driver" / name).symlink_to("../fake.so")
  try:
    made.rename(folder)  # whole or not at all
  except OSError:  # another process has made it meanwhile
    shutil.rmtree(made)
  return folder


def environment(
  folder: Path,
  *,
  count: int = 1,
  memory_mib: int = 8192,
  busy_mib: int = 0,
  only_driver: bool = False,
) -> dict[str, str]:
  """Returns the environment of a process with so many GPUs.

  Args:
    folder: what `library` returns.
    count: of GPUs.
    memory_mib: of each; an allocation beyond it is refused.
    busy_mib: how much of it other processes have.
    only_driver: CUDA's libraries are missing.
  """
  here = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
  return here | {
    "LD_LIBRARY_PATH": str(folder / "driver" if only_driver else folder),
    "FAKE_GPU_COUNT": str(count),
    "FAKE_GPU_MEMORY_MIB": str(memory_mib),
    "FAKE_GPU_BUSY_MIB": str(busy_mib),
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # Each launch by itself, so that it counts; nothing is chosen by its time.
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
  }


def counts() -> Counter[str]:
  """Returns what this process has asked of its GPUs since `reset`."""
  driver = ctypes.CDLL(LIBRARIES["cuda"])
  driver.fake_gpu_counts.restype = ctypes.c_char_p
  lines = driver.fake_gpu_counts().decode().splitlines()
  return Counter({name: int(number) for name, number in (line.split("\t") for line in lines)})


def reset() -> None:
  """Counts from 0 again."""
  ctypes.CDLL(LIBRARIES["cuda"]).fake_gpu_reset()


def _others() -> str:
  """Returns C++ for all functions that TensorFlow may call: `cuda.cpp` has its own of some."""
  lists = [TENSORFLOW / f"include/xla/tsl/cuda/{name}.inc" for name in LIBRARIES]
  names = {name for each in lists for name in re.findall(r'"(\w+)"', each.read_text())}
  written = set(re.findall(r"\b(\w+)\(", SOURCE.read_text()))
  launch = 'extern "C" void fake_gpu_launch(const char*);'
  return "\n".join([launch, *map(_other, sorted(names - written))])


def _other(name: str) -> str:
  if MAKES.match(name):
    return f'extern "C" long {name}(const void** to) {{ *to = "{name}"; return 0; }}'
  asks = f' fake_gpu_launch("{name}");' if LAUNCHES.match(name) else ""
  return f'extern "C" long {name}() {{{asks} return 0; }}'
