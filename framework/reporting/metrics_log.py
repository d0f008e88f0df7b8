"""metrics.jsonl: one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from framework.backend.files import atomic_write
from framework.errors import ConfigError

Number = int | float
Record = dict[str, Any]
Clock = Callable[[], float]

_RESERVED = ("step", "split", "wall_time")
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Number]:
  """Flattens nested dicts of scalars to one dict of Python numbers; joins names with "/".

  Args:
    values: numbers, NumPy or TensorFlow scalars of any dtype, and dicts of them.
    prefix: added before every name.

  Raises:
    ConfigError: a value is not one number.
  """
  flat: dict[str, Number] = {}
  for key, value in values.items():
    name = f"{prefix}{key}"
    flat.update(
      flatten(value, f"{name}/") if isinstance(value, Mapping) else {name: _number(name, value)}
    )
  return flat


def _number(name: str, value: Any) -> Number:
  array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
  if array.shape or array.dtype.kind not in "biufV":  # V: bfloat16
    raise ConfigError(
      f"metric {name!r} is of type {array.dtype} and shape {array.shape}; it must be one number."
    )
  return int(array) if array.dtype.kind in "biu" else float(array)


class MetricsLog:
  """Reads and appends metrics.jsonl; survives kills, restarts and partial writes.

  A line holds "step" (int), "split" ("train", "eval" or "time"), "wall_time" (float, seconds since
  the epoch), then the values by name. JSON has no NaN or infinities, so the file has the strings
  "NaN", "Infinity" and "-Infinity", as in protobuf's JSON; `records` returns them as floats.
  """

  def __init__(self, path: str | os.PathLike[str], *, clock: Clock = time.time) -> None:
    """Writes nothing yet; the first `append` creates the folder."""
    self.path = os.fspath(path)
    self._clock = clock
    self._checked = False

  def append(self, step: int, split: str, values: Mapping[str, Any]) -> None:
    """Appends one line, which is on disk on return; see `flatten` for `values` (host).

    Raises:
      ConfigError: a value is not one number, or its name is "step", "split" or "wall_time".
    """
    flat = flatten(values)
    for name in _RESERVED:
      if name in flat:
        raise ConfigError(f"a metric is named {name!r}, which metrics.jsonl reserves; rename it.")
    record = {"step": int(step), "split": split, "wall_time": self._clock()}
    line = json.dumps({**record, **{k: _encode(v) for k, v in flat.items()}}, allow_nan=False)
    self._prepare()
    with tf.io.gfile.GFile(self.path, "a") as file:
      file.write(line + "\n")

  def records(self, split: str | None = None) -> list[Record]:
    """Returns the records of one split, or of all, in file order; skips unreadable lines (host)."""
    parsed = (_parse(line) for line in self._lines())
    return [r for r in parsed if r is not None and split in (None, r.get("split"))]

  def trim(self, step: int) -> int:
    """Removes the records after `step`; a run that restarts there writes them again (host).

    Also removes a last line that a kill cut off. All other lines stay unchanged.

    Returns:
      How many records were removed.
    """
    lines = self._lines()
    kept = [line for line in lines if (_parse(line) or {"step": 0})["step"] <= step]
    self._replace(kept)
    return len(lines) - len(kept)

  def _prepare(self) -> None:
    """Before the first append: creates the folder and removes a last line that was cut off."""
    if not self._checked:
      tf.io.gfile.makedirs(os.path.dirname(self.path) or ".")
      self._replace(self._lines())
      self._checked = True

  def _replace(self, lines: Sequence[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    if content != self._content():
      atomic_write(self.path, content)

  def _content(self) -> bytes:
    if not tf.io.gfile.exists(self.path):
      return b""
    with tf.io.gfile.GFile(self.path, "rb") as file:
      return file.read()

  def _lines(self) -> list[bytes]:
    *lines, last = self._content().split(b"\n")
    return lines if _parse(last) is None else [*lines, last]


def _encode(value: Number) -> Number | str:
  if math.isfinite(value):
    return value
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _parse(line: bytes) -> Record | None:
  try:
    record = json.loads(line)
  except ValueError:
    return None
  if not isinstance(record, dict) or not isinstance(record.get("step"), int):
    return None
  return {k: float(v) if v in _NON_FINITE else v for k, v in record.items()}
