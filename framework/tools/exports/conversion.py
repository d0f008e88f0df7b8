"""The process that makes the formats of an export, loads each again, and compares it.

  python -m framework.tools.exports.conversion '{"directory": ...}'

formats.py starts it and explains the arguments. It prints one line per format:
OUTCOME [format, largest difference, tolerance, reason]. It imports nothing of the framework, so
that what it finds is what another program would find.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from framework.types import Structure

Arrays = Mapping[str, np.ndarray]
Serve = Callable[[dict[str, np.ndarray]], Arrays]
DEFAULT = "serving_default"
MODEL = "*model"
"""In place of a signature: the model's own inputs and outputs."""


def main(given: Mapping[str, Any]) -> None:
  """Makes and compares each format; a failure of one is its outcome."""
  directory = given["directory"]
  with np.load(os.path.join(directory, given["examples"])) as file:
    kept = dict(file)
  tolerance = given["tolerances"].get(str(kept.pop("dtype")), given["tolerances"]["float32"])
  for name in given["formats"]:
    final = os.path.join(directory, given["files"][name])
    made = f"{final}.tmp" if name in ("onnx", "litert") else final
    staged = os.path.join(directory, given["staged"])
    if name == "keras" and os.path.exists(staged):
      made = staged
    largest, reason = math.nan, ""
    try:
      largest = MAKERS[name](directory, made, kept, given)
      if not largest <= tolerance:
        reason = (
          f"its outputs differ from the model's by {largest:.2e} of their largest value, where "
          f"{tolerance:.0e} is allowed"
        )
      elif made != final:
        _sync(made)
        os.replace(made, final)
        _sync(directory)
    except Exception as error:
      reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if reason and name != "saved_model":
      with contextlib.suppress(FileNotFoundError):
        os.remove(made)
    print("OUTCOME " + json.dumps([name, largest, tolerance, reason]), flush=True)


def of_saved_model(directory: str, made: str, kept: Arrays, given: Mapping[str, Any]) -> float:
  """Returns the largest difference over all signatures."""
  import tensorflow as tf

  loaded = tf.saved_model.load(directory)

  def serve(name: str) -> Serve:
    function = loaded.signatures[name]
    return lambda inputs: {
      key: _array(value.numpy())
      for key, value in function(**{n: tf.constant(v) for n, v in inputs.items()}).items()
    }

  names = {key.split("|")[1] for key in kept} - {MODEL}
  return max(difference(serve(name), kept, name) for name in names)


def of_onnx(directory: str, made: str, kept: Arrays, given: Mapping[str, Any]) -> float:
  """Converts the default signature, and runs it with ONNX Runtime."""
  import onnxruntime
  import tf2onnx.convert

  command = ["tf2onnx", "--saved-model", directory, "--signature_def", DEFAULT, "--tag", "serve"]
  before, sys.argv = sys.argv, [*command, "--output", made]
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      tf2onnx.convert.main()
  finally:
    sys.argv = before
  session = onnxruntime.InferenceSession(made, providers=["CPUExecutionProvider"])
  names = [output.name for output in session.get_outputs()]

  def serve(inputs: dict[str, np.ndarray]) -> Arrays:
    texts = {name: v.astype(object) if v.dtype.kind == "S" else v for name, v in inputs.items()}
    return dict(zip(names, session.run(None, texts), strict=True))

  return difference(serve, kept, DEFAULT)


def of_litert(directory: str, made: str, kept: Arrays, given: Mapping[str, Any]) -> float:
  """Converts the default signature with TensorFlow's converter, and runs it with LiteRT."""
  import tensorflow as tf
  from ai_edge_litert.interpreter import Interpreter

  converter = tf.lite.TFLiteConverter.from_saved_model(directory, signature_keys=[DEFAULT])
  with open(made, "wb") as file:
    file.write(converter.convert())
  serve = Interpreter(model_path=made).get_signature_runner(DEFAULT)
  return difference(lambda inputs: serve(**inputs), kept, DEFAULT)


def of_keras(directory: str, made: str, kept: Arrays, given: Mapping[str, Any]) -> float:
  """Loads the file, and calls the model as the default signature has called it."""
  library = importlib.import_module(given["library"])
  sys.path[:] = given["path"]
  for module in given["modules"]:  # which may register layers
    importlib.import_module(module)
  model = library.saving.load_model(made) if given["library"] == "keras" else None
  model = model or library.models.load_model(made)
  largest = []
  for case in cases(kept, MODEL):
    expected = list(case["out"].values())
    found = [_array(value) for value in _flat(model(_structured(case["in"]), training=False))]
    largest += [distance(a, b) for a, b in zip(found, expected, strict=True)]
  if not largest:
    raise ValueError("the signature does not call the model, so there is nothing to compare")
  return max(largest)


def _structured(inputs: dict[str, np.ndarray]) -> Any:
  """Returns a tensor, list or dict of inputs, whose names are kind|name."""
  kind = next(iter(inputs)).partition("|")[0]
  named = {name.partition("|")[2]: value for name, value in inputs.items()}
  return {"dict": named, "list": list(named.values()), "one": next(iter(named.values()))}[kind]


def difference(serve: Serve, kept: Arrays, signature: str) -> float:
  """Returns the largest difference of the outputs for the kept batches."""
  largest = []
  for case in cases(kept, signature):
    found, expected = serve(case["in"]), case["out"]
    if set(found) != set(expected):
      raise ValueError(f"its outputs are {sorted(found)}, not {sorted(expected)}")
    largest += [distance(np.asarray(found[name]), expected[name]) for name in expected]
  return max(largest)


def cases(kept: Arrays, signature: str) -> list[dict[str, dict[str, np.ndarray]]]:
  """Returns for each batch "in" and "out" -> name -> array; a key is rows|signature|in|name."""
  found: dict[str, dict[str, dict[str, np.ndarray]]] = {}
  for key in sorted(kept):
    rows, of, side, name = key.split("|", 3)
    if of == signature:
      found.setdefault(rows, {"in": {}, "out": {}})[side][name] = kept[key]
  return list(found.values())


def distance(found: np.ndarray, expected: np.ndarray) -> float:
  """Returns the largest difference over the largest value; inf for other shapes, or other texts."""
  if found.shape != expected.shape:
    return math.inf
  if expected.dtype.kind not in "fc":
    return 0.0 if np.array_equal(found, expected) else math.inf
  found, expected = found.astype(np.float64), expected.astype(np.float64)
  special = ~np.isfinite(expected)
  if not np.array_equal(found[special], expected[special], equal_nan=True):
    return math.inf
  if not np.isfinite(found[~special]).all():
    return math.inf
  scale = np.abs(expected[~special]).max(initial=0.0)
  largest = np.abs(found - expected)[~special].max(initial=0.0)
  return float(largest / scale) if scale else float(largest)


def _flat(outputs: Structure) -> list[Any]:
  import tensorflow as tf

  return tf.nest.flatten(outputs)


def _array(value: Any) -> np.ndarray:
  array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
  if array.dtype == object:
    return array.astype(bytes)
  return array.astype(np.float32) if array.dtype.kind == "V" else array


def _sync(path: str) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


MAKERS: Mapping[str, Callable[[str, str, Arrays, Mapping[str, Any]], float]] = {
  "saved_model": of_saved_model, "keras": of_keras, "onnx": of_onnx, "litert": of_litert,
}  # fmt: skip

if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
