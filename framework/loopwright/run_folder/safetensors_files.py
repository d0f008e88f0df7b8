"""Weights in safetensors files: read lazily, written, averaged, under the names of other libraries.

WarmStart(path="model.safetensors", rename={
  "model.embed_tokens.weight": "embedding/embeddings",
  "model.layers.{}.mlp.up_proj.weight": "block_{}/up/kernel.T",  # PyTorch has [out, in]
})
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host import bounded, files
from loopwright.run_folder.layouts import Layout

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
_DTYPES = {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"}
_LETTERS = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint"}
_TRANSPOSED = ".T"
"""At the end of a name: see layouts.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """One variable in a file; `read` loads its value."""

  dtype: str
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]

  def __str__(self) -> str:
    """Returns "float32 [3, 3]"."""
    return f"{self.dtype} {list(self.shape)}"

  def turned(self, layout: Layout) -> Stored:
    """Returns it with its axes as here; in the file they are PyTorch's."""
    read = self.read
    shape = layout.from_torch(np.broadcast_to(0, self.shape)).shape
    return dataclasses.replace(self, shape=shape, read=lambda: layout.from_torch(read()))


def find(path: str) -> str | None:
  """Returns the file, or the index of several, that a path means (host); None if it means none.

  Of a folder that has both it is the file, as for transformers.
  """
  if path.endswith((SUFFIX, INDEX)):
    return path if os.path.isfile(path) else None
  made = (os.path.join(path, f"model{ending}") for ending in (SUFFIX, INDEX))
  return next(filter(os.path.isfile, made), None)


def shards(source: str) -> list[str]:
  """Returns the files that hold what a path from `find` means, the index first if it is one.

  Raises:
    ConfigError: the index is damaged, or names a file outside of its folder.
  """
  if not source.endswith(INDEX):
    return [source]
  names = sorted({*_index(source).values()})
  paths = [os.path.join(os.path.dirname(source), name) for name in names]
  for name, path in zip(names, paths, strict=True):
    if os.path.basename(name) != name or not os.path.isfile(path):
      raise ConfigError(f"{source!r} names the file {name!r}; it must be one beside it.")
  return [source, *paths]


def _index(source: str) -> dict[str, str]:
  """Returns name -> file of an index."""
  with bounded.reading(source, "give the index that belongs to the files"):
    bounded.require_file(source, "an index of safetensors files")
    return dict(json.loads(files.read(source))["weight_map"])


@contextlib.contextmanager
def contents(source: str) -> Iterator[dict[str, Stored]]:
  """Yields name -> variable of a path from `find`; each is read when it is asked for.

  Raises:
    Exception: a file is missing or damaged; whatever the library raises.
    ConfigError: a file lacks a variable that the index has there.
  """
  library, found = _library(), dict[str, Stored]()
  index = _index(source) if source.endswith(INDEX) else {}
  with contextlib.ExitStack() as stack:
    for path in [each for each in shards(source) if each.endswith(SUFFIX)]:
      file, shard = (
        stack.enter_context(library.safe_open(path, framework="tf")),
        os.path.basename(path),
      )
      names = [*file.keys()]
      for name in index:
        if index[name] == shard and name not in names:
          raise ConfigError(f"{source!r} has {name!r} in {shard!r}, which lacks it; give the index "
                            "that belongs to the files.")  # fmt: skip
      for name in names:
        if index.get(name, shard) == shard:
          part, read = file.get_slice(name), functools.partial(_read, file, name)
          found[name] = Stored(dtype=_dtype(part), shape=tuple(part.get_shape()), read=read)
    yield found


def write(path: str, values: Mapping[str, np.ndarray]) -> None:
  """Writes arrays as a safetensors file, complete or not at all (host)."""
  _library()
  from safetensors.numpy import save

  arrays = {  # ascontiguousarray gives a scalar an axis
    name: np.asarray(value, value.dtype.newbyteorder("="), order="C")
    for name, value in values.items()
  }
  content = save(arrays, {"format": "pt"})  # which transformers asks for
  files.atomic_write(path, content)


def average(paths: Sequence[str], to: str) -> str:
  """Writes the means of the variables of several files; returns a line about it (host).

  Whole numbers are those of the first.

  Raises:
    ConfigError: `to` exists; a file is missing or damaged, or has other variables than the first.
  """
  if os.path.exists(to) or not to.endswith(SUFFIX):
    raise ConfigError(f"to={to!r} must be a new file, and end in {SUFFIX}.")
  with contextlib.ExitStack() as stack:
    opened = []
    for path in paths:
      if (source := find(path)) is None:
        raise ConfigError(f"{path!r} is no safetensors file; give files, and to=NEW{SUFFIX}.")
      with bounded.reading(source, "it is damaged or no safetensors file: give another"):
        opened.append(stack.enter_context(contents(source)))
    for path, other in zip(paths, opened, strict=True):
      for name in sorted({*opened[0]} | {*other}):
        here, there = (str(each.get(name, "nothing")) for each in (opened[0], other))
        if here != there:
          raise ConfigError(f"{name!r} is {here} in {paths[0]!r} and {there} in {path!r}; average "
                            "files of one model.")  # fmt: skip
    write(to, {name: _mean([each[name] for each in opened]) for name in opened[0]})
  return f"{to}: the mean of {len(paths)} file{'s' * (len(paths) > 1)}"


def _mean(stored: Sequence[Stored]) -> np.ndarray:
  first = stored[0].read()
  if not tf.as_dtype(stored[0].dtype).is_floating:
    return first
  others = (each.read().astype(np.float64) for each in stored[1:])
  return (sum(others, first.astype(np.float64)) / len(stored)).astype(first.dtype)


def _read(file: Any, name: str) -> np.ndarray:
  try:
    return file.get_tensor(name).numpy()
  except AttributeError as error:  # of NumPy, for the name of a dtype that it lacks
    raise ConfigError(
      f"{name!r} is {_dtype(file.get_slice(name))}, which safetensors cannot read for TensorFlow; "
      "store it as bfloat16, or leave it out with WarmStart.exclude."
    ) from error


def _dtype(part: Any) -> str:
  code = part.get_dtype()
  letters, bits = re.fullmatch(r"([A-Z]+)(\w*)", code).groups()  # type: ignore[union-attr]
  return _DTYPES.get(code) or f"{_LETTERS[letters]}{bits}"


def _library() -> Any:
  try:
    import safetensors
  except ModuleNotFoundError as error:
    raise ConfigError(
      "safetensors files need the package safetensors, which is not installed; run: "
      "pip install 'loopwright[safetensors]'."
    ) from error
  return safetensors


@dataclasses.dataclass(frozen=True)
class Renaming:
  """Names in a file -> names in the model.

  Attributes:
    rules: of a whole name, if it has "{}", which is a part without "/" and ".", or if the model's
      name ends in ".T": then the axes in the file are PyTorch's. All others are of prefixes; the
      longest that matches counts.
  """

  rules: Mapping[str, str]

  def inverse(self) -> Renaming:
    """Returns names in the model -> names in a file."""
    turned = ((key, value.removesuffix(_TRANSPOSED), value) for key, value in self.rules.items())
    return Renaming({new: key + _TRANSPOSED * (new != old) for key, new, old in turned})

  def fitting(self, name: str) -> list[str]:
    """Returns the keys that fit a name, the one that counts first."""
    whole = [key for key in self.rules if self._is_whole(key) and _pattern(key).fullmatch(name)]
    prefixes = [key for key in self.rules if not self._is_whole(key) and name.startswith(key)]
    return whole + sorted(prefixes, key=len, reverse=True)

  def of(self, name: str) -> tuple[str, bool]:
    """Returns the new name, and whether the axes in the file are PyTorch's."""
    if not (fitting := self.fitting(name)):
      return name, False
    key, value = fitting[0], self.rules[fitting[0]]
    if not self._is_whole(key):
      return value + name.removeprefix(key), False
    for part in _pattern(key).fullmatch(name).groups():  # type: ignore[union-attr]
      value = value.replace("{}", part, 1)
    return value.removesuffix(_TRANSPOSED), value.endswith(_TRANSPOSED)

  def _is_whole(self, key: str) -> bool:
    return "{}" in key or self.rules[key].endswith(_TRANSPOSED)


def _pattern(key: str) -> re.Pattern[str]:
  return re.compile(re.escape(key).replace(r"\{\}", r"([^/.]+)"))
