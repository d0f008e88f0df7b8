"""Finds the weights in Keras's HDF5 files."""

from __future__ import annotations

import collections
import re
from typing import Any

import h5py


def variables(file: h5py.File) -> dict[str, h5py.Dataset]:
  """Returns name -> variable; {} if the file does not name its layers.

  Names: "<layer>/<number>" in a file of Keras 3, the variables' own names in one of tf_keras.

  Raises:
    Exception: it is damaged, or no file of Keras; whatever h5py raises.
  """
  root = file.get("model_weights", file)
  if "layer_names" in root.attrs:
    return {
      plain(_text(name)): root[_text(layer)][_text(name)]
      for layer in root.attrs["layer_names"]
      for name in _texts(root[_text(layer)], "weight_names")
    }
  groups: list[h5py.Group] = []
  file.visititems(lambda name, each: groups.append(each) if _is_layer(name, each) else None)
  if any("name" not in group.attrs for group in groups):
    return {}
  counts = collections.Counter(_text(group.attrs["name"]) for group in groups)
  return {
    f"{name if counts[name] == 1 else group.name.strip('/').removesuffix('/vars')}/{number}":
      group[number]
    for group in groups
    for name in [_text(group.attrs["name"])]
    for number in group
    if not name.startswith("seed_generator")
  }  # fmt: skip


def plain(name: str) -> str:
  """Returns a variable's name without TensorFlow's ":0"."""
  return name.partition(":")[0]


def _is_layer(name: str, each: Any) -> bool:
  of_optimizer = name.startswith("optimizer/")
  return isinstance(each, h5py.Group) and name.endswith("vars") and bool(each) and not of_optimizer


def _texts(group: h5py.Group, attribute: str) -> list[Any]:
  """Returns an attribute of a tf_keras file, which splits a long one into numbered parts."""
  if attribute in group.attrs:
    return list(group.attrs[attribute])
  parts = [name for name in group.attrs if re.fullmatch(rf"{attribute}\d+", name)]
  parts.sort(key=lambda name: int(name.removeprefix(attribute)))
  return [text for part in parts for text in group.attrs[part]]


def _text(value: Any) -> str:
  return value.decode() if isinstance(value, bytes) else str(value)
