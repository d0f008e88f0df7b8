"""metrics.jsonl: one JSON object per line."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host import files, json_lines
from loopwright.host.json_lines import Record

Number = int | float
Value = int | float | list[Any]
"""A number, or an array as nested lists of numbers."""
Clock = Callable[[], float]

_RESERVED = ("step", "split", "wall_time")
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
  """Flattens nested dicts to one dict of Python numbers and lists; joins names with "/".

  Args:
    values: numbers, NumPy or TensorFlow scalars and arrays of any dtype, and dicts of them.
    prefix: added before every name.

  Raises:
    ConfigError: a value is neither a number nor an array of numbers.
  """
  flat: dict[str, Value] = {}
  for key, value in values.items():
    name = f"{prefix}{key}"
    flat.update(
      flatten(value, f"{name}/") if isinstance(value, Mapping) else {name: _plain(name, value)}
    )
  return flat


def scalars(values: Mapping[str, Value]) -> dict[str, Number]:
  """Returns those of `flatten` that are one number."""
  return {name: value for name, value in values.items() if not isinstance(value, list)}


def _plain(name: str, value: Any) -> Value:
  array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
  kind = array.dtype.kind
  if kind not in "biufV":  # V: bfloat16
    raise ConfigError(
      f"metric {name!r} is of type {array.dtype} and shape {array.shape}; it must be a number, or "
      "an array of numbers."
    )
  return array.astype(
    np.float64 if kind == "V" else np.int64 if kind in "bi" else array.dtype
  ).tolist()


class MetricsLog:
  """Reads and appends metrics.jsonl; survives kills, restarts and partial writes.

  Several processes may append at the same time, such as an evaluation beside training: on a file
  system with locks (a local disk, NFS) no line is lost.

  A line holds "step" (int), "split" ("train", "eval", "time" or an action's own), "wall_time"
  (float, seconds since the epoch), then the values by name. JSON has no NaN or infinities, so the
  file has the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON; `records` returns
  them as floats. Arrays are nested lists.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    clock: Clock = time.time,
    require: Callable[[], None] = lambda: None,
  ) -> None:
    """Writes nothing yet; the folder must exist.

    Args:
      require: called before each write; raises if the folder is no longer the run's.
    """
    self.path = os.fspath(path)
    self._clock, self._require = clock, require

  def append(self, step: int, split: str, values: Mapping[str, object]) -> None:
    """Appends one line, which a kill of this process then leaves; see `flatten` (host).

    The next checkpoint puts it on disk.

    Raises:
      ConfigError: a value is neither a number nor an array of numbers, or it is named "step",
        "split" or "wall_time".
    """
    flat = flatten(values)
    for name in _RESERVED:
      if name in flat:
        raise ConfigError(f"a metric is named {name!r}, which metrics.jsonl reserves; rename it.")
    record = {"step": int(step), "split": split, "wall_time": self._clock()}
    line = json.dumps({**record, **{k: _encode(v) for k, v in flat.items()}}, allow_nan=False)
    with self._opened() as append:
      append(f"{line}\n".encode())

  def records(self, split: str | None = None) -> list[Record]:
    """Returns the records of one split, or of all, in file order; skips unreadable lines (host)."""
    parsed = (_parse(line) for line in self._lines())
    return [r for r in parsed if r is not None and split in (None, r.get("split"))]

  def trim(self, step: int, *, evaluation: bool = False) -> int:
    """Removes the records after `step`; a run that restarts there writes them again (host).

    With `evaluation`, also removes those of split "eval" at `step`.

    Also removes a last line that a kill cut off. All other lines stay unchanged. The records that
    it removes are appended to <path>.undone: the user may have lost checkpoints by mistake.

    Returns:
      How many records were removed.
    """
    if not tf.io.gfile.exists(self.path):
      return 0
    with self._opened():
      lines = self._lines()
      undone = [line for line in lines if _is_after(_parse(line) or {}, step, evaluation)]
      gone = set(undone)
      kept = b"".join(line + b"\n" for line in lines if line not in gone)
      if undone:
        with tf.io.gfile.GFile(f"{self.path}.undone", "ab") as file:
          file.write(b"".join(line + b"\n" for line in undone))
      if kept != self._content():
        files.atomic_write(self.path, kept)
    return len(undone)

  @contextlib.contextmanager
  def _opened(self) -> Iterator[Callable[[bytes], object]]:
    """Locks the file and gives a function that appends to it, after its last whole line."""
    self._require()
    with files.locked(self.path) as descriptor:
      size = os.fstat(descriptor).st_size
      if size and os.pread(descriptor, 1, size - 1) != b"\n":
        whole = self._content().rpartition(b"\n")
        if _parse(whole[2]) is None:
          os.ftruncate(descriptor, len(whole[0] + whole[1]))
        else:
          os.write(descriptor, b"\n")
      yield functools.partial(files.write, self.path, descriptor)

  def _content(self) -> bytes:
    return files.read(self.path) if tf.io.gfile.exists(self.path) else b""

  def _lines(self) -> list[bytes]:
    *lines, last = self._content().split(b"\n")
    return lines if _parse(last) is None else [*lines, last]


def _is_after(record: Record, step: int, evaluation: bool) -> bool:
  at = record.get("step", 0)
  return at > step or (evaluation and at == step and record.get("split") == "eval")


def _encode(value: Value) -> Any:
  if isinstance(value, list):
    return [_encode(each) for each in value]
  if math.isfinite(value):
    return value
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _parse(line: bytes) -> Record | None:
  record = json_lines.of_a_step(line)
  return record and {name: _decode(value) for name, value in record.items()}


def _decode(value: Any) -> Any:
  if isinstance(value, list):
    return [_decode(each) for each in value]
  return float(value) if value in _NON_FINITE else value
