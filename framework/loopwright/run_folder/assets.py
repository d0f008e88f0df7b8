"""Assets: files that a task learns from its training split, such as a vocabulary.

    <model_dir>/assets/vocabulary.txt    one file for each that Task.fit returned
    <model_dir>/assets/manifest.json     name -> SHA-256; written last: the folder is complete

`provide` gives them to the task before its model is built. Each checkpoint holds the digest that it
returns, so weights are never restored with the assets of another run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import tensorflow as tf

from loopwright.distribution.cluster import Cluster
from loopwright.errors import ConfigError, kind
from loopwright.host import files
from loopwright.run_folder import layout

if TYPE_CHECKING:
  from loopwright.task import Task

Assets = Mapping[str, bytes]
"""File name -> content."""
FOLDER = layout.ASSETS
MANIFEST = "manifest.json"
_NAME = re.compile(r"\w[\w.-]*")
_POLL_S = 1.0


def provide(
  task: Task,
  *,
  model_dir: str,
  cluster: Cluster,
  training: bool,
  timeout_s: float | None = 0.0,
  changed: bool = False,
) -> str:
  """Gives the task the assets of a run; fits them first if the run is new (host).

  The chief of a cluster fits and writes. All workers must call this and can read the same files.

  Args:
    task: its model is not built yet.
    training: False never fits.
    timeout_s: if not training, seconds to wait for another process to write the assets; None waits
      without limit.
    changed: whether the run goes on with another config of the task, which must learn the same.

  Returns:
    The digest of the assets; "" for a task without any.

  Raises:
    ConfigError: `fit` returned something other than files, there are no assets and this process may
      not fit them, a file has changed, or the changed config would make other files.
    ClusterError: the chief is lost, or the workers read different files.
  """
  if not task.has_fit:
    return ""
  folder = os.path.join(model_dir, FOLDER)
  with cluster.blaming(lambda: 0):
    if training and cluster.is_chief and not is_whole(folder):
      save(folder, fitted(task))
    cluster.barrier()  # the other workers wait until the files are written
    if not training:
      _await(folder, timeout_s)
    assets = load(folder)
    name = digest(assets)
    cluster.require_same(f"digest of {folder}", int(name[:8], 16))
  if changed and digest(fitted(task)) != name:
    raise ConfigError(
      f"with the changed config, {type(task).__name__}.fit() makes other files than those in "
      f"{folder}, with which the run has trained: set it back, or choose another --model_dir for "
      "another run."
    )
  task.use(assets)
  return name


def provide_in_memory(task: Task, assets: Assets | None = None) -> Assets:
  """Gives the task assets that are not saved, and returns them; None fits them (host).

  Raises:
    ConfigError: `fit` returned something other than files.
  """
  if not task.has_fit:
    return {}
  assets = fitted(task) if assets is None else assets
  task.use(assets)
  return assets


def fitted(task: Task) -> Assets:
  """Returns what `task.fit()` returns, after checking it (host).

  Raises:
    ConfigError: it is not a dict of file name -> bytes.
  """
  assets, who = task.fit(), f"{type(task).__name__}.fit()"
  if not isinstance(assets, Mapping):
    raise ConfigError(
      f"{who} returned {kind(assets)}; it must return a dict of file name -> bytes, such as "
      "{'vocabulary.txt': '\\n'.join(words).encode()}."
    )
  for name, content in assets.items():
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == MANIFEST:
      raise ConfigError(
        f"{who} returned a file named {name!r}; a name must consist of letters, digits, '_', '-' "
        f"and '.', without folders, and must not be {MANIFEST!r}."
      )
    if not isinstance(content, bytes):
      raise ConfigError(
        f"{who} returned {kind(content)} for {name!r}; it must be bytes: encode it."
      )
  return dict(assets)


def digest(assets: Assets) -> str:
  """Returns the SHA-256 of all names and contents, 64 hexadecimal digits."""
  return _sha256(_manifest(assets))


def is_whole(folder: str) -> bool:
  """Whether the folder holds all assets of a run."""
  return tf.io.gfile.exists(os.path.join(folder, MANIFEST))


def save(folder: str, assets: Assets) -> None:
  """Writes the assets, each file atomically and the manifest last (host)."""
  files.make_folder(folder)
  for name, content in assets.items():
    files.atomic_write(os.path.join(folder, name), content)
  files.atomic_write(os.path.join(folder, MANIFEST), _manifest(assets))


def load(folder: str) -> Assets:
  """Returns the assets of a run (host).

  Raises:
    ConfigError: there are none, or a file has changed.
  """
  if not is_whole(folder):
    raise ConfigError(
      f"no assets in {folder}, and this task needs those that it learned in training; train first, "
      "or correct --model_dir."
    )
  written = _parsed(os.path.join(folder, MANIFEST))
  return {name: _read_checked(os.path.join(folder, name), sha) for name, sha in written.items()}


def _read_checked(path: str, sha256: str) -> bytes:
  there = tf.io.gfile.exists(path)
  content = files.read(path) if there else b""
  if not there or _sha256(content) != sha256:
    raise ConfigError(
      f"{path} {'has changed' if there else 'is missing'} since this run began (expected SHA-256 "
      f"{sha256[:12]}...); restore the file, or choose another --model_dir to fit it again."
    )
  return content


def _parsed(path: str) -> dict[str, str]:
  try:
    parsed = json.loads(files.read(path))
  except ValueError:
    parsed = None
  if not isinstance(parsed, dict) or not all(map(_NAME.fullmatch, parsed)):
    raise ConfigError(
      f"{path} is not a manifest that the framework wrote; restore the file, or choose another "
      "--model_dir."
    )
  return {name: str(sha256) for name, sha256 in parsed.items()}


def _await(folder: str, timeout_s: float | None) -> None:
  since = time.monotonic()
  while not is_whole(folder) and (timeout_s is None or time.monotonic() - since < timeout_s):
    time.sleep(_POLL_S)


def _manifest(assets: Assets) -> bytes:
  hashes = {name: _sha256(assets[name]) for name in sorted(assets)}
  return json.dumps(hashes, indent=2).encode() + b"\n"


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()
