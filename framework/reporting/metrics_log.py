"""metrics.jsonl: one JSON object a line.

log = MetricsLog("runs/digits/metrics.jsonl")
log.append(100, "train", {"loss": 0.25})
log.records("train")  # [{"step": 100, "split": "train", "wall_time": ..., "loss": 0.25}]
"""

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
  """Turns nested dicts of scalars into one dict of Python numbers, names joined by "/".

  Args:
    values: numbers, NumPy scalars or TensorFlow scalars of any dtype, and dicts of them.
    prefix: put before every name.

  Raises:
    ConfigError: a value is not a scalar number.
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
  """metrics.jsonl: one JSON object a line, which survives kills, restarts and torn writes.

  A line holds "step" (int), "split" ("train" or "eval"), "wall_time" (float, seconds since the
  epoch), then the values under plain names. JSON has no NaN or infinities: they are written as the
  strings "NaN", "Infinity" and "-Infinity", as protobuf's JSON does; `records` gives floats again.
  """

  def __init__(self, path: str | os.PathLike[str], *, clock: Clock = time.time) -> None:
    """Writes nothing yet; the folder is made by the first `append`."""
    self.path = os.fspath(path)
    self._clock = clock
    self._checked = False

  def append(self, step: int, split: str, values: Mapping[str, Any]) -> None:
    """Adds one line, complete on return; see `flatten` for what `values` may hold.

    Raises:
      ConfigError: a value is not a number, or its name is "step", "split" or "wall_time".
    """
    flat = flatten(values)
    for name in _RESERVED:
      if name in flat:
        raise ConfigError(f"a metric is named {name!r}, which metrics.jsonl keeps; rename it.")
    record = {"step": int(step), "split": split, "wall_time": self._clock()}
    line = json.dumps({**record, **{k: _encode(v) for k, v in flat.items()}}, allow_nan=False)
    self._prepare()
    with tf.io.gfile.GFile(self.path, "a") as file:
      file.write(line + "\n")

  def records(self, split: str | None = None) -> list[Record]:
    """Returns the records of one split, or all, in the order written, without unreadable lines."""
    parsed = (_parse(line) for line in self._lines())
    return [r for r in parsed if r is not None and split in (None, r.get("split"))]

  def trim(self, step: int) -> int:
    """Drops the records after `step`, which a run restarted at `step` will write again.

    Also mends a last line torn by a kill. Every other line is kept to the byte.

    Returns:
      How many records were dropped.
    """
    lines = self._lines()
    kept = [line for line in lines if (_parse(line) or {"step": 0})["step"] <= step]
    self._replace(kept)
    return len(lines) - len(kept)

  def _prepare(self) -> None:
    """Before the first append: a folder to write in, and no torn line to write behind."""
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
    """The lines, without a torn last one."""
    *lines, last = self._content().split(b"\n")
    return lines if _parse(last) is None else [*lines, last]


def _encode(value: Number) -> Number | str:
  if math.isfinite(value):
    return value
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _parse(line: bytes) -> Record | None:
  """Returns the record, or None if the line is not one."""
  try:
    record = json.loads(line)
  except ValueError:
    return None
  if not isinstance(record, dict) or not isinstance(record.get("step"), int):
    return None
  return {k: float(v) if v in _NON_FINITE else v for k, v in record.items()}
