"""Reads variables from a checkpoint, a Keras file or safetensors files, by name."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import os
import zipfile
from collections.abc import Iterator
from typing import Any, Literal

import h5py
import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.trackable import trackable_utils

from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Model
from loopwright.host import bounded
from loopwright.models import models
from loopwright.run_folder import checkpoint_files, checkpoints, h5, places, safetensors_files
from loopwright.run_folder.safetensors_files import Stored

Match = Literal["name", "path"]
KERAS = (".keras", ".h5", ".hdf5")
FILES = (*KERAS, safetensors_files.SUFFIX, safetensors_files.INDEX)
_BESIDE = {"state", "task"}
"""Where checkpoints have what a task has beside its model; "task" in those of earlier versions."""
_NO_WEIGHTS = {"optimizer", "optimizers", "save_counter", "global_step"}
_RANDOM = "seed_generator"
"""Part of the name of the state of Keras 3's random layers."""


def located(path: str) -> str:
  """Returns the Keras file, or the checkpoint without suffix, that a path means (host).

  Raises:
    ConfigError: there is none.
  """
  path = places.local_copy(path)
  if path.endswith(KERAS) and tf.io.gfile.exists(path):
    return path
  if found := safetensors_files.find(path) or checkpoint_files.find(path):
    return found
  raise ConfigError(
    f"WarmStart.path is {path!r}, where no weights are; give a run folder, its checkpoints or best "
    "folder, a checkpoint without its suffix, a Keras file, .keras or .weights.h5, or safetensors."
  )


@contextlib.contextmanager
def contents(source: str, match: Match = "name") -> Iterator[dict[str, Stored]]:
  """Yields name -> variable of a path from `located`; they can be read inside the context."""
  if not source.endswith(FILES):
    yield _of_checkpoint(tf.train.load_checkpoint(source), match)
    return
  if match == "path":
    raise ConfigError(f"WarmStart.match is 'path', but {source!r} has names; remove match.")
  if source.endswith(KERAS):
    yield _of_h5(source)
    return
  with safetensors_files.contents(source) as found:
    yield found


def parts(source: str) -> list[str]:
  """Returns the files whose content is that of a path from `located` (host)."""
  if source.endswith(KERAS):
    return [source]
  # The index of a checkpoint has checksums of the data.
  return safetensors_files.shards(source) if source.endswith(FILES) else [f"{source}.index"]


def h5_variables(source: str) -> dict[str, h5py.Dataset]:
  """Returns the variables of the HDF5 file that a Keras file is, or has in it (host).

  Raises:
    Exception: it is damaged; whatever `zipfile` or h5py raises. A ConfigError: it is no file.
  """
  if os.path.exists(source):
    bounded.require_file(source, "a Keras file")  # a pipe or a device may have no end
  with tf.io.gfile.GFile(source, "rb") as file:
    content = file.read()
  if source.endswith(".keras"):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
      content = archive.read("model.weights.h5")
  return h5.variables(h5py.File(io.BytesIO(content), "r"))


def _of_checkpoint(reader: tf.train.CheckpointReader, match: Match) -> dict[str, Stored]:
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


def _saved(reader: tf.train.CheckpointReader) -> Iterator[tuple[str, str, str]]:
  """Yields (name, path, key) of the model's variables; a key may go through an optimizer.

  So does it those that a checkpoint has of the task beside the model, which have no name.
  """
  graph = trackable_object_graph_pb2.TrackableObjectGraph()
  graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
  tops = {child.local_name for child in graph.nodes[0].children}
  ours = {"model", "untracked"} | _BESIDE if "model" in tops else tops - _NO_WEIGHTS
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
        if attribute.checkpoint_key.endswith(checkpoints.VALUE):
          beside = path in ("state/", "task/")
          place = f"{path}{child.local_name}" if beside else path_of(child_path)
          yield "" if beside else h5.plain(attribute.full_name), place, attribute.checkpoint_key


def _of_h5(source: str) -> dict[str, Stored]:
  found = h5_variables(source)
  if not found:
    raise ConfigError(
      f"WarmStart.path {source!r} does not name its layers, as is usual for tf_keras or an older "
      "Keras; load it there and save the weights again: model.save_weights('x.weights.h5') with a "
      "newer Keras 3, 'x.h5' with tf_keras."
    )
  return {
    name: Stored(
      dtype=tf.as_dtype(dataset.dtype.name).name,
      shape=tuple(dataset.shape),
      read=functools.partial(np.asarray, dataset),
    )
    for name, dataset in found.items()
  }


def path_of(key: str) -> str:
  """Returns the path of a variable in the model from its key in a checkpoint."""
  return key.removeprefix("model/").removesuffix(checkpoints.VALUE)


def numbered(model: Model) -> Iterator[tuple[str, tf.Variable]]:
  """Yields ("<layer>/<number>", variable): the names of weights in files of Keras 3."""
  for layer in models.layers(model):
    own: dict[str, Any] = {}
    if isinstance(layer, keras.Layer):
      layer.save_own_variables(own)
    merged = iter(models.frozen_by_lora(layer))  # for which Keras saves a sum, and no variable
    for number, variable in own.items():
      known = variable if models.is_variable(variable) else next(merged, None)
      if known is not None:
        yield f"{layer.name}/{number}", models.raw(known)
