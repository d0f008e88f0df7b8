"""Reads variables from a checkpoint or a Keras file, by name."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

import h5py
import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.trackable import trackable_utils

from framework.backend import bounded, models
from framework.errors import ConfigError
from framework.saving import checkpoints

Match = Literal["name", "path"]
_KERAS = (".keras", ".h5", ".hdf5")
_NO_WEIGHTS = {"optimizer", "optimizers", "save_counter", "global_step"}
_MOST_NAMES_BYTES = 2**17
_RANDOM = "seed_generator"
"""Part of the name of the state of Keras 3's random layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """One variable in a file; `read` loads its value."""

  dtype: str
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]

  def __str__(self) -> str:
    """Returns "float32 [3, 3]"."""
    return f"{self.dtype} {list(self.shape)}"


def located(path: str) -> str:
  """Returns the Keras file, or the checkpoint without suffix, that a path means (host).

  Raises:
    ConfigError: there is none.
  """
  if path.endswith(_KERAS) and tf.io.gfile.exists(path):
    return path
  if found := checkpoints.find(path):
    return found
  raise ConfigError(
    f"WarmStart.path is {path!r}, where no weights are; give a run folder, its checkpoints or best "
    "folder, a checkpoint without its suffix, or a Keras file, .keras or .weights.h5."
  )


@contextlib.contextmanager
def contents(source: str, match: Match = "name") -> Iterator[dict[str, Stored]]:
  """Yields name -> variable of a path from `located`; they can be read inside the context."""
  if not source.endswith(_KERAS):
    yield _of_checkpoint(tf.train.load_checkpoint(source), match)
    return
  if match == "path":
    raise ConfigError(
      f"WarmStart.match is 'path', but {source!r} is a Keras file, which has names; remove match."
    )
  content = _content(source)
  if source.endswith(".keras"):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
      member = archive.getinfo("model.weights.h5")
      # Keras does not compress, so nothing is larger than its archive, except in a small file.
      bounded.require_bytes(source, member.file_size, max(bounded.MAX_BYTES, len(content)))
      content = archive.read(member)
  with h5py.File(io.BytesIO(content), "r") as file:
    yield _of_h5(file, source)


def _content(source: str) -> bytes:
  if os.path.exists(source):
    bounded.require_file(source, "a Keras file")  # a pipe or a device may have no end
  with tf.io.gfile.GFile(source, "rb") as file:
    return file.read()


def _of_checkpoint(reader: Any, match: Match) -> dict[str, Stored]:
  """Returns the model's variables by the names in the checkpoint's object graph."""
  shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
  found = [each for each in _saved(reader) if each[2] in shapes]
  found = [each for each in found if _RANDOM not in f"{each[0]} {each[1]}"]
  counts = collections.Counter(name for name, _, _ in found)
  return {
    name if match == "name" and name and counts[name] == 1 else path: Stored(
      dtype=dtypes[key].name,
      shape=tuple(shapes[key]),
      read=functools.partial(reader.get_tensor, key),
    )
    for name, path, key in found
  }


def _saved(reader: Any) -> Iterator[tuple[str, str, str]]:
  """Yields (name, path, key) of the model's variables; a key may go through an optimizer."""
  graph = trackable_object_graph_pb2.TrackableObjectGraph()
  graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
  tops = {child.local_name for child in graph.nodes[0].children}
  ours = {"model", "untracked"} if "model" in tops else tops - _NO_WEIGHTS
  queue, seen = collections.deque([("", 0)]), {0}
  while queue:
    path, number = queue.popleft()
    for child in graph.nodes[number].children:
      if child.node_id in seen or (number == 0 and child.local_name not in ours):
        continue
      seen.add(child.node_id)
      child_path = f"{path}{trackable_utils.escape_local_name(child.local_name)}"
      queue.append((f"{child_path}/", child.node_id))
      for attribute in graph.nodes[child.node_id].attributes:
        if attribute.checkpoint_key.endswith(checkpoints._VALUE):
          yield _plain(attribute.full_name), _path(child_path), attribute.checkpoint_key


def _of_h5(file: h5py.File, source: str) -> dict[str, Stored]:
  """Names: "<layer>/<number>" in a file of Keras 3, the variables' own names in one of tf_keras."""
  root = file.get("model_weights", file)
  if "layer_names" in root.attrs:
    return {
      _plain(_text(name)): _dataset(root[_text(layer)][_text(name)])
      for layer in _attribute(root, "layer_names")
      for name in _texts(root[_text(layer)], "weight_names")
    }
  groups: list[h5py.Group] = []
  file.visititems(lambda name, each: groups.append(each) if _is_layer(name, each) else None)
  if any("name" not in group.attrs for group in groups) or not groups:
    raise ConfigError(
      f"WarmStart.path {source!r} does not name its layers, as is usual for tf_keras or an older "
      "Keras; load it there and save the weights again: model.save_weights('x.weights.h5') with a "
      "newer Keras 3, 'x.h5' with tf_keras."
    )
  counts = collections.Counter(_text(_attribute(group, "name")) for group in groups)
  return {
    f"{name if counts[name] == 1 else group.name.strip('/').removesuffix('/vars')}/{number}":
      _dataset(group[number])
    for group in groups
    for name in [_text(_attribute(group, "name"))]
    for number in group
    if not name.startswith("seed_generator")
  }  # fmt: skip


def _is_layer(name: str, each: Any) -> bool:
  of_optimizer = name.startswith("optimizer/")
  return isinstance(each, h5py.Group) and name.endswith("vars") and bool(each) and not of_optimizer


def _dataset(dataset: h5py.Dataset) -> Stored:
  """Refuses what Keras never writes: a chunk can expand a thousandfold, a link leads anywhere.

  Raises:
    TypeError: it is not a plain array of numbers.
  """
  if not isinstance(dataset, h5py.Dataset) or dataset.chunks or dataset.external:
    raise TypeError(f"{dataset.name} is not stored as Keras stores weights")
  dtype = tf.as_dtype(dataset.dtype.name).name
  return Stored(dtype=dtype, shape=tuple(dataset.shape), read=lambda: np.asarray(dataset))


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


def _plain(name: str) -> str:
  return name.partition(":")[0]


def _path(key: str) -> str:
  return key.removeprefix("model/").removesuffix(checkpoints._VALUE)


def _numbered(model: Any) -> Iterator[tuple[str, tf.Variable]]:
  """Yields ("<layer>/<number>", variable): the names of weights in files of Keras 3."""
  for part in models.parts(model):
    for layer in part._flatten_layers() if isinstance(part, keras.Layer) else ():
      own: dict[str, Any] = {}
      layer.save_own_variables(own)
      for number, variable in own.items():
        yield f"{layer.name}/{number}", models.raw(variable)
