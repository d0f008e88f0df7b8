"""The GPUs of this process: which ones, how much of their memory, what they are."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from loopwright.errors import ConfigError
from loopwright.host import nvidia
from loopwright.options.groups import Gpus

_AMPERE = (8, 0)
_INSTALL = "install CUDA's libraries with the extra gpu: pip install 'loopwright[gpu]'"
_HIDE = f"{nvidia.VISIBLE}=-1 in the environment says that the CPU is meant"

PEAKS = {
  # Words of a GPU's model, the first that fits -> TFLOP/s of float32, TF32, 16 bits, dense; from
  # the vendor's data sheets. H100 and H200 alone are those with HBM3 on SXM.
  "H100 PCIe": (51, 378, 756), "H100 NVL": (60, 418, 835), "H200 NVL": (60, 418, 835),
  "H200": (67, 494, 989), "H100": (67, 494, 989), "A100": (19.5, 156, 312), "L4": (30, 60, 121),
  "L40": (90.5, 90.5, 181), "L40S": (91.6, 183, 362), "A10": (31.2, 62.5, 125),
  "V100": (15.7, 15.7, 125), "T4": (8.1, 8.1, 65),
}  # fmt: skip


def configure(options: Gpus) -> None:
  """Chooses the GPUs and limits their memory, before TensorFlow initialises its devices (host).

  Raises:
    ConfigError: a GPU that there is not, or TensorFlow has initialised its devices already.
  """
  if options == Gpus():
    return
  found = tf.config.list_physical_devices("GPU")
  chosen = range(len(found)) if options.gpus is None else options.gpus
  if any(index >= len(found) for index in chosen):
    raise ConfigError(
      f"run.gpus is {[*chosen]}, but TensorFlow sees {len(found)} GPUs, numbered from 0; "
      "leave it out for all of them."
    )
  try:
    tf.config.set_visible_devices([found[index] for index in chosen], "GPU")
    for index in chosen:
      _limit(found[index], options.gpu_memory)
  except (RuntimeError, ValueError) as error:
    raise ConfigError(
      f"run.gpus and run.gpu_memory cannot be set ({str(error).splitlines()[0]}); TensorFlow uses "
      "its devices already: set them in the first run of a process, before any tensor is made."
    ) from error


def _limit(gpu: tf.config.PhysicalDevice, memory: int | str) -> None:
  if memory == "grow":
    tf.config.experimental.set_memory_growth(gpu, True)
  elif memory != "all":
    part = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
    tf.config.set_logical_device_configuration(gpu, [part])


def unseen() -> str | None:
  """Returns what to say of GPUs of this machine that TensorFlow does not see; None if all is well.

  If CUDA_VISIBLE_DEVICES hides them all, that is meant.
  """
  installed, visible = nvidia.installed(), nvidia.visible()
  seen = len(tf.config.list_physical_devices("GPU"))
  if not installed or (not visible and nvidia.VISIBLE in os.environ):
    return None
  if visible and seen >= len(visible):
    return None
  if not tf.test.is_built_with_cuda():
    remedy = "this TensorFlow is built without CUDA: install tensorflow, not tensorflow-cpu"
  elif not visible:
    remedy = "this process may not open them: ask for them (Slurm's --gpus, docker's --gpus)"
  else:
    remedy = f"{_INSTALL}; TF_CPP_MIN_LOG_LEVEL=0 shows TensorFlow's own reason"
  return (
    f"this machine has {len(installed)} NVIDIA GPU(s), of which TensorFlow sees {seen or 'none'} "
    f"({', '.join(installed)}): {remedy}. {_HIDE}."
  )


def warn_of_unseen() -> None:
  """Logs what `unseen` returns, as a warning (host); call it once devices are initialised."""
  if (text := unseen()) is not None:
    logging.warning("%s", text)


def described(names: Sequence[str]) -> list[str]:
  """Returns a text for each kind of GPU among devices such as ["GPU:0", "CPU:0"] (host).

  It has the names, the model, and the memory that TensorFlow may take of it.
  """
  texts: dict[str, list[str]] = {}
  for name, (gpu, limit_mib) in zip(names, map(_of, names), strict=True):
    if gpu is not None:
      model = tf.config.experimental.get_device_details(gpu).get("device_name", "unknown model")
      texts.setdefault(f"{model}{_memory_text(gpu, limit_mib)}", []).append(name)
  return [f"{', '.join(names)}: {text}" for text, names in texts.items()]


def in_tf32(names: Sequence[str]) -> bool:
  """Whether products and convolutions of float32 are computed in TF32 on some of these devices."""
  if not tf.config.experimental.tensor_float_32_execution_enabled():
    return False
  details = tf.config.experimental.get_device_details
  gpus = [gpu for gpu, _ in map(_of, names) if gpu is not None]
  return any(details(gpu).get("compute_capability", (0, 0)) >= _AMPERE for gpu in gpus)


def peak_flops_of(model: str, dtype: str, *, tf32: bool) -> float | None:
  """Returns the peak FLOP/s of a GPU's model, dense; None if it is not known.

  Args:
    model: such as "NVIDIA H100 PCIe"; a part of a GPU (MIG) is not known.
    dtype: of products, such as "float32".
    tf32: whether TensorFlow computes float32 in TF32.
  """
  columns = {"float32": int(tf32), "float16": 2, "bfloat16": 2}
  found = next((PEAKS[name] for name in PEAKS if re.search(rf"\b{name}\b", model)), None)
  if found is None or dtype not in columns or "MIG" in model:
    return None
  return 1e12 * found[columns[dtype]]


def peak_flops(names: Sequence[str], dtype: str) -> float | None:
  """Returns the same of the slowest of some devices; None if that of one is not known (host)."""
  details = tf.config.experimental.get_device_details
  peaks = [
    gpu and peak_flops_of(details(gpu).get("device_name", ""), dtype, tf32=in_tf32([name]))
    for name, (gpu, _) in zip(names, map(_of, names), strict=True)
  ]
  return min((peak for peak in peaks if peak), default=None) if all(peaks) else None


def peak_mib(names: Sequence[str]) -> float | None:
  """Returns the most memory that TensorFlow's allocator has used on one of these devices (host).

  Since the process began, in MiB; None without a GPU.
  """
  info = tf.config.experimental.get_memory_info
  used = [info(name)["peak"] for name in names if _of(name)[0] is not None]
  return max(used) / 2**20 if used else None


def utilization(names: Sequence[str]) -> float | None:
  """Returns the share of the last second in which a kernel ran, as the driver has it (host).

  The mean over the GPUs among these devices. None without the package nvidia-ml-py, or if the
  driver does not say it, as of a part of a GPU (MIG).
  """
  if (found := _in_nvml(tuple(names))) is None:
    return None
  nvml, handles = found
  try:
    percents = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]
  except nvml.NVMLError:
    return None
  return sum(percents) / len(percents) / 100


@functools.cache
def _in_nvml(names: tuple[str, ...]) -> tuple[Any, list[Any]] | None:
  """Returns the driver's library, and a handle of each GPU: as CUDA numbers them, if all are alike.

  None without the library.
  """
  try:
    import pynvml
  except ImportError:
    return None
  gpus = [gpu.name.rpartition(":")[2] for gpu, _ in map(_of, names) if gpu is not None]
  try:
    pynvml.nvmlInit()
    entries = [nvidia.visible()[int(number)] for number in dict.fromkeys(gpus)]
    by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    handles = [by_index(int(e)) if e.isdecimal() else by_uuid(e) for e in entries]
  except (pynvml.NVMLError, IndexError):
    return None
  return (pynvml, handles) if handles else None


def _of(name: str) -> tuple[tf.config.PhysicalDevice | None, int | None]:
  """Returns the GPU of a logical device, and the limit of its memory in MiB, if any."""
  kind, _, index = name.partition(":")
  if kind != "GPU":
    return None, None
  logical = [
    (gpu, part and part.memory_limit)
    for gpu in tf.config.get_visible_devices("GPU")
    for part in tf.config.get_logical_device_configuration(gpu) or [None]
  ]
  return logical[int(index)] if int(index) < len(logical) else (None, None)


def _memory_text(gpu: tf.config.PhysicalDevice, limit_mib: int | None) -> str:
  total, number = ctypes.c_size_t(), int(gpu.name.rpartition(":")[2])
  try:
    failed = ctypes.CDLL("libcuda.so.1").cuDeviceTotalMem_v2(ctypes.byref(total), number)
  except (OSError, AttributeError):
    failed = True
  texts = [] if failed else [f"{total.value / 2**30:.1f} GiB"]
  texts += [] if limit_mib is None else [f"at most {limit_mib} MiB used (run.gpu_memory)"]
  return "".join(f", {text}" for text in texts)
