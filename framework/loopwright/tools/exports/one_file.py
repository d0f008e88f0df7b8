"""`loopwright export --format=...`: the model of a run as one file, for other programs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from loopwright.errors import ConfigError
from loopwright.host import files
from loopwright.models import models
from loopwright.run_folder import safetensors_files
from loopwright.run_folder.matching import Names
from loopwright.runs import from_config
from loopwright.tools.exports import export


def export_file(model_dir: str, kind: str) -> str:
  """Writes <model_dir>/model.<ending>; returns a line about it (host).

  The weights are those that the run evaluates. "safetensors" has them under the model's
  `weight_names` if it has them, beside a config.json with its `transformers_config`; "keras" is the
  Keras model; "onnx" and "litert" are what `Task.export_signature` serves.

  Raises:
    ConfigError: the folder has no run, or no complete checkpoint of it, or a folder of that name;
      the model is none of Keras; a package is missing, or does not know an operation.
  """
  ending, write = FORMATS[kind]
  path = os.path.join(model_dir, f"model{ending}")
  if os.path.isdir(path):
    raise ConfigError(f"{path!r} is a folder, where the file must be; move it away.")
  return f"{path}: {write(from_config.load(model_dir).task, path)}"


def _safetensors(task: Any, path: str) -> str:
  values = Names(task.model).in_file(getattr(task.model, "weight_names", {}))
  safetensors_files.write(path, values)
  if config := getattr(task.model, "transformers_config", None):
    beside = os.path.join(os.path.dirname(path), "config.json")
    files.atomic_write(beside, json.dumps(config, indent=2).encode())
  return f"{len(values)} variables, {sum(v.size for v in values.values()):,} parameters"


def _keras(task: Any, path: str) -> str:
  if not models.is_keras(task.model):
    raise ConfigError(
      f"--format=keras needs a model of Keras, but {type(task).__name__}.build_model() returns a "
      f"{type(task.model).__name__}; use --format=savedmodel or safetensors."
    )
  task.model.save(path)
  return f"{task.model.count_params():,} parameters"


def _onnx(task: Any, path: str) -> str:
  if importlib.util.find_spec("tf2onnx") is None:
    raise ConfigError("--format=onnx needs the package tf2onnx: pip install 'loopwright[onnx]'.")

  def convert(folder: str) -> bytes:
    made = os.path.join(folder, "model.onnx")
    served = ["--signature_def", "serving_default", "--tag", "serve"]
    command = ["-m", "tf2onnx.convert", "--saved-model", folder, *served, "--output", made]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode or not os.path.exists(made):
      raise ValueError(done.stderr.strip().rpartition("\n")[2])
    return files.read(made)

  return _converted(task, path, convert)


def _litert(task: Any, path: str) -> str:
  import tensorflow as tf

  def convert(folder: str) -> bytes:
    served = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=["serving_default"])
    return bytes(served.convert())

  return _converted(task, path, convert)


def _converted(task: Any, path: str, convert: Callable[[str], bytes]) -> str:
  """Writes what `convert` makes of a SavedModel, the signature "serving_default" alone."""
  with tempfile.TemporaryDirectory() as folder:
    export.export(task, made := os.path.join(folder, "export"))
    try:
      content = convert(made)
    except Exception as error:
      raise ConfigError(
        f"{os.path.basename(path)!r} cannot be made of what {type(task).__name__} serves: "
        f"{str(error)[:300]!r}; see docs/serving.md for what converters refuse."
      ) from error
  files.atomic_write(path, content)
  return f"{len(content):,} bytes"


FORMATS: Mapping[str, tuple[str, Callable[[Any, str], str]]] = {
  "safetensors": (safetensors_files.SUFFIX, _safetensors),
  "keras": (".keras", _keras),
  "onnx": (".onnx", _onnx),
  "litert": (".tflite", _litert),
}
"""What --format writes, beside the SavedModel: ending and writer."""
