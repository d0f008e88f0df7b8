"""Finds the weights in Keras's HDF5 files; runs without TensorFlow.

The HDF5 library may crash on a damaged file, or read it without end. So another process reads each
file first, with a time limit:

    variables = h5.checked(content)  # then this process can read it too
"""

from __future__ import annotations

import collections
import io
import math
import re
import signal
import subprocess
import sys
from typing import Any

import h5py

from loopwright.host.children import module

PROGRAM = module("loopwright.run_folder.h5")
"""Runs `main`."""
_MOST_NAMES_BYTES = 2**17
_LEAST_S = 30
_BYTES_PER_S = 2**24


def checked(content: bytes) -> dict[str, h5py.Dataset]:
  """Returns `variables` of a file's content, which another process has read to the end (host).

  Raises:
    ValueError: that process has crashed or found it damaged, or no file of Keras.
  """
  require_readable(content)
  return variables(h5py.File(io.BytesIO(content), "r"))


def require_readable(content: bytes) -> None:
  """Reads a file's content in another process; raises ValueError if that cannot."""
  done = subprocess.run(
    PROGRAM, input=content, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    check=False,
  )  # fmt: skip
  if done.returncode == -signal.SIGALRM:
    raise ValueError(f"the HDF5 library was not done with it after {limit_s(content)} s")
  if done.returncode < 0:
    raise ValueError(f"the HDF5 library crashed with {signal.Signals(-done.returncode).name}")
  if done.returncode:
    raise ValueError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])


def limit_s(content: bytes) -> int:
  """Returns how many seconds `read_all` may take: many times what a sound file needs."""
  return _LEAST_S + len(content) // _BYTES_PER_S


def read_all(content: bytes) -> None:
  """Reads all variables of a file's content in this process."""
  for each in variables(h5py.File(io.BytesIO(content), "r")).values():
    each[()]


def variables(file: h5py.File) -> dict[str, h5py.Dataset]:
  """Returns name -> variable; {} if the file does not name its layers.

  Names: "<layer>/<number>" in a file of Keras 3, the variables' own names in one of tf_keras.

  Raises:
    Exception: it is damaged, or no file of Keras; whatever h5py raises.
  """
  root = file.get("model_weights", file)
  if "layer_names" in root.attrs:
    return {
      plain(_text(name)): _dataset(root[_text(layer)][_text(name)])
      for layer in _attribute(root, "layer_names")
      for name in _texts(root[_text(layer)], "weight_names")
    }
  groups: list[h5py.Group] = []
  file.visititems(lambda name, each: groups.append(each) if _is_layer(name, each) else None)
  if any("name" not in group.attrs for group in groups):
    return {}
  counts = collections.Counter(_text(_attribute(group, "name")) for group in groups)
  return {
    f"{name if counts[name] == 1 else group.name.strip('/').removesuffix('/vars')}/{number}":
      _dataset(group[number])
    for group in groups
    for name in [_text(_attribute(group, "name"))]
    for number in group
    if not name.startswith("seed_generator")
  }  # fmt: skip


def plain(name: str) -> str:
  """Returns a variable's name without TensorFlow's ":0"."""
  return name.partition(":")[0]


def _is_layer(name: str, each: Any) -> bool:
  of_optimizer = name.startswith("optimizer/")
  return isinstance(each, h5py.Group) and name.endswith("vars") and bool(each) and not of_optimizer


def _dataset(dataset: h5py.Dataset) -> h5py.Dataset:
  """Refuses what Keras never writes: a chunk can expand a thousandfold, a link leads anywhere.

  Raises:
    TypeError: it is not a plain array of numbers, or not all of it is in the file.
  """
  plain = isinstance(dataset, h5py.Dataset) and not (dataset.chunks or dataset.external)
  if not plain or dataset.id.get_storage_size() < dataset.nbytes:
    raise TypeError(f"{dataset.name} is not stored as Keras stores weights")
  return dataset


def _texts(group: h5py.Group, attribute: str) -> list[Any]:
  """Returns an attribute of a tf_keras file, which splits a long one into numbered parts."""
  if attribute in group.attrs:
    return list(_attribute(group, attribute))
  parts = [name for name in group.attrs if re.fullmatch(rf"{attribute}\d+", name)]
  parts.sort(key=lambda name: int(name.removeprefix(attribute)))
  return [text for part in parts for text in _attribute(group, part)]


def _attribute(group: h5py.Group, name: str) -> Any:
  """Reads a text or texts; HDF5 would take hours for a damaged attribute of 2**40 texts.

  Raises:
    TypeError: it is larger than Keras writes it; it splits names into parts of 64 KB.
  """
  found = group.attrs.get_id(name)
  if math.prod(found.shape or ()) * found.dtype.itemsize > _MOST_NAMES_BYTES:
    raise TypeError(f"the attribute {name!r} is not stored as Keras stores names")
  return group.attrs[name]


def _text(value: Any) -> str:
  return value.decode() if isinstance(value, bytes) else str(value)


def main(content: bytes) -> None:
  """Does what `read_all` does; ends the process by SIGALRM if that takes too long."""
  signal.alarm(limit_s(content))
  read_all(content)


if __name__ == "__main__":
  main(sys.stdin.buffer.read())
