"""The formats of an export: each is loaded again in a fresh process and compared with the model.

`examples` keeps a batch of the evaluation data with the outputs of the model in memory, as a part
of the SavedModel's folder. `prove` starts a process (conversion.py) that makes
model.onnx and model.tflite of the SavedModel, loads each format, and compares its outputs with the
kept ones. A file that differs never gets its name, and a SavedModel that differs is moved away.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from framework.errors import ConfigError, unknown
from framework.host import files
from framework.inputs import datasets
from framework.inputs.sources import eval_sets
from framework.models import models
from framework.types import Model, Structure

if TYPE_CHECKING:
  from framework.task import Task

FORMATS = ("saved_model", "keras", "onnx", "litert")
FILES: Mapping[str, str] = {
  "saved_model": "", "keras": "model.keras", "onnx": "model.onnx", "litert": "model.tflite",
}  # fmt: skip
"""Format -> its file in the export's folder."""
EXAMPLES = "assets.extra/examples.npz"
STAGED = "assets.extra/model.keras"
ROWS = 8
"""The rows of the batch that is compared; its first row is also compared alone."""
TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Compute dtype -> the allowed difference, as a part of the largest value of the output.

Other kernels add in another order, which is rounding: 1e-7 to 1e-6 in float32. A wrong layer,
layout or weight is 1e-2 or more. The narrow types are wider by their resolution.
"""
_PACKAGES: Mapping[str, Sequence[str]] = {
  "onnx": ("tf2onnx", "onnxruntime"), "litert": ("ai_edge_litert",),
}  # fmt: skip
_LIMIT_S = 1800.0


class Outcome(NamedTuple):
  """What became of one format.

  Attributes:
    format: its name.
    largest: the largest difference, as a part of the largest value of its output.
    tolerance: what is allowed.
    reason: why it is refused; "" if it is not.
  """

  format: str
  largest: float
  tolerance: float
  reason: str = ""


def require(task: Task, formats: Sequence[str], directory: str) -> None:
  """Checks formats before anything is trained or written (host).

  Raises:
    ConfigError: an unknown format, a package is missing, a model without a `.keras` file, or a
      remote directory.
  """
  if isinstance(formats, str):
    raise ConfigError(f"Export.formats is {formats!r}; it must be a list, such as [{formats!r}].")
  for name in formats:
    if name not in FORMATS:
      raise unknown("format in Export.formats", name, FORMATS)
    missing = [p for p in _PACKAGES.get(name, ()) if importlib.util.find_spec(p) is None]
    if missing:
      packages = " ".join(_PACKAGES[name]).replace("_", "-")
      raise ConfigError(
        f"Export.formats has {name!r}, but the package {missing[0]!r} is not installed; run: pip "
        f"install {packages}"
      )
  if "keras" in formats and not isinstance(task.model, keras.Model | tf_keras.Model):
    raise ConfigError(
      f"Export.formats has 'keras', but the model of {type(task).__name__} is a "
      f"{type(task.model).__name__}; a .keras file holds one keras.Model."
    )
  if formats and not files.is_local(directory):
    raise ConfigError(
      f"Export.formats is set, but {directory!r} is remote; choose a local Export.directory."
    )


def examples(task: Task, signatures: Mapping[str, Any]) -> bytes:
  """Returns a batch and the outputs of the model in memory for it, as an npz file (host).

  Args:
    task: with its model built and holding the weights to export.
    signatures: name -> `tf.function`; an input is the raw feature of the same name of
      `source("eval")`. A float input of another name gets normal noise, an integer input 0 and 1
      at random, which every vocabulary has.

  Raises:
    ConfigError: a text input is no feature.
  """
  raw = _raw_batch(task)
  arrays: dict[str, Any] = {"dtype": np.array(keras.config.dtype_policy().compute_dtype)}
  for signature, function in signatures.items():
    specs = _named_specs(function)
    inputs, names = [_input(signature, s, raw) for s in specs], [s.name for s in specs]
    for rows in (ROWS, 1):
      cut = [value[:rows] for value in inputs]
      with _calls(task.model) as calls:
        outputs = function.python_function(*map(tf.constant, cut))
      case = f"{rows}|{signature}"
      arrays |= {f"{case}|in|{n}": v for n, v in zip(names, cut, strict=True)}
      arrays |= {f"{case}|out|{n}": _array(v) for n, v in _named(outputs).items()}
      if calls and signature == "serving_default":
        arrays |= {f"{rows}|*model|{part}": value for part, value in _call(*calls[0]).items()}
  content = io.BytesIO()
  np.savez(content, **arrays)
  return content.getvalue()


def save_keras(task: Task, folder: str) -> None:
  """Writes the model below assets.extra of an export, from where `prove` moves it (host)."""
  task.model.save(os.path.join(folder, STAGED))


def prove(task: Task, directory: str, formats: Sequence[str]) -> list[Outcome]:
  """Makes and compares the formats of an export in a fresh process, which uses the CPU (host).

  Returns:
    One outcome per format.

  Raises:
    ConfigError: a format differs, or cannot be made; the other formats are in place.
  """
  module = type(task).__module__
  given = {
    "directory": directory, "formats": list(formats), "files": dict(FILES),
    "examples": EXAMPLES, "staged": STAGED,
    "tolerances": dict(TOLERANCES), "library": _library(task.model),
    "modules": [] if module == "__main__" else [module], "path": sys.path,
  }  # fmt: skip
  quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
  command = [sys.executable, "-m", "framework.tools.exports.conversion", json.dumps(given)]
  paths = os.pathsep.join(path for path in sys.path if path)
  try:
    done = subprocess.run(
      command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S,
      check=False, env=os.environ | quiet | {"PYTHONPATH": paths},
    )  # fmt: skip
  except subprocess.TimeoutExpired as error:
    raise ConfigError(f"the formats of {directory!r} take more than {_LIMIT_S:.0f} s.") from error
  marked = [line[8:] for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
  outcomes = [Outcome(*json.loads(line)) for line in marked]
  for name in formats[len(outcomes) :]:
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    outcomes.append(Outcome(name, float("nan"), 0.0, f"its process failed: {last}"))
  if any(one.format == "saved_model" and one.reason for one in outcomes):
    files.remove(f"{directory}.refused")
    tf.io.gfile.rename(directory, f"{directory}.refused")
  if refused := [f"as {one.format!r}: {one.reason[:300]}" for one in outcomes if one.reason]:
    raise ConfigError(f"the export to {directory!r} is refused {'; '.join(refused)}")
  return outcomes


def told(directory: str, outcomes: Sequence[Outcome]) -> str:
  """Returns one line per format: its path and figure."""
  return "\n".join(
    f"exported {os.path.join(directory, FILES[one.format]).rstrip('/')}: loaded again, largest "
    f"difference {one.largest:.1e}, allowed {one.tolerance:.0e}"
    for one in outcomes
  )


def _library(model: Model) -> str:
  return "tf_keras" if isinstance(model, tf_keras.Model) else "keras"


def _raw_batch(task: Task) -> dict[str, np.ndarray]:
  """Returns the first rows of the evaluation data as the source has them: name -> array."""
  source = next(iter(eval_sets(task.source("eval")).values()))
  made = datasets.eval_dataset(source, global_batch_size=ROWS, steps=1)
  first = next(iter(made[0] if isinstance(made, list) else made))
  return {name: _array(value) for name, value in first.items()}


def _input(signature: str, spec: tf.TensorSpec, raw: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns ROWS rows for an input."""
  known = raw.get(spec.name)
  if known is not None and _dtype(known) == spec.dtype:
    return known
  shape, draw = [ROWS, *(size or ROWS for size in spec.shape[1:])], np.random.default_rng(0)
  if spec.dtype.is_floating:
    return draw.standard_normal(shape).astype(spec.dtype.as_numpy_dtype)
  if spec.dtype.is_integer or spec.dtype.is_bool:
    return draw.integers(0, 2, shape).astype(spec.dtype.as_numpy_dtype)
  raise ConfigError(
    f"Export.formats needs a batch for {spec.name!r} ({spec.dtype.name}) of the signature "
    f"{signature!r}, but the evaluation data have {', '.join(sorted(raw))}; give the "
    "tf.TensorSpec the name of a feature of the same dtype."
  )


def _dtype(array: np.ndarray) -> tf.DType:
  return tf.string if array.dtype.kind in "OS" else tf.as_dtype(array.dtype)


def _named_specs(function: Any) -> list[tf.TensorSpec]:
  """Returns the inputs; one without a name in the signature has that of its parameter."""
  return tf.nest.flatten(function.get_concrete_function().structured_input_signature)


def _named(outputs: Structure) -> dict[str, Any]:
  """Returns outputs by name, as a SavedModel names them."""
  if isinstance(outputs, Mapping):
    return dict(outputs)
  return {f"output_{number}": value for number, value in enumerate(tf.nest.flatten(outputs))}


def _array(value: Any) -> np.ndarray:
  """Returns an array that an npz file can hold: bfloat16 as float32, texts as bytes."""
  array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
  if array.dtype == object:
    return array.astype(bytes)
  return array.astype(np.float32) if array.dtype.kind == "V" else array


@contextlib.contextmanager
def _calls(model: Model) -> Iterator[list[tuple[Any, Any]]]:
  """Gives the (inputs, outputs) of the calls of a Keras model within the `with`."""
  calls: list[tuple[Any, Any]] = []
  if not models.is_keras(model):
    yield calls
    return
  kind, original = type(model), type(model).__call__

  def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if self is model and len(args) == 1:
      calls.append((args[0], result))
    return result

  own = "__call__" in vars(kind)
  kind.__call__ = recorded
  try:
    yield calls
  finally:
    if own:
      kind.__call__ = original
    else:
      del kind.__call__


def _call(inputs: Any, outputs: Structure) -> dict[str, Any]:
  """Returns inputs, which are a tensor or a list or dict of tensors, and outputs by name."""
  if isinstance(inputs, Mapping):
    named = {f"in|dict|{name}": value for name, value in inputs.items()}
  elif isinstance(inputs, list | tuple):
    named = {f"in|list|{number:03}": value for number, value in enumerate(inputs)}
  else:
    named = {"in|one|": inputs}
  named |= {f"out|{number:03}": v for number, v in enumerate(tf.nest.flatten(outputs))}
  return {name: _array(value) for name, value in named.items()}
