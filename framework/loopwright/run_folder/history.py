"""history.jsonl: how each process that trained in a run folder was started.

One JSON object per line: start, time, step, command, commit of the task's code, versions, config,
data, what was in use. A run that goes on must have the config and the data of the last line,
because a checkpoint does not say what it was trained with. It names its line by the id `start`, so
that a checkpoint without its history is noticed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host import files, json_lines, redaction
from loopwright.run_folder import layout

_PACKAGES = ("loopwright", "tensorflow", "keras", "tf_keras", "numpy")

Values = Mapping[str, str]


def starts(model_dir: str) -> set[str]:
  """Returns the ids of all starts (host)."""
  return {str(record["start"]) for record in records(model_dir) if "start" in record}


def changed_versions(model_dir: str) -> str:
  """Returns how the versions differ from those of the last start, in words; "" if not (host)."""
  last, now = (records(model_dir) or [{}])[-1].get("versions"), versions()
  before = last if isinstance(last, Mapping) else {}
  names = [name for name in now if before.get(name, now[name]) != now[name]]
  return ", ".join(f"{name} {before[name]}, now {now[name]}" for name in names)


def append(
  model_dir: str,
  *,
  start: str,
  step: int,
  task: object,
  config: Values,
  data: Values,
  in_use: Values,
  train_steps: int | None = None,
) -> None:
  """Appends one start; the file is replaced, and on disk, on return (host).

  Args:
    start: its id.
    in_use: name -> value, read from what uses it.
    train_steps: at which the run ends, also if no config says it.
    began: of a run that begins, see `initial_values`.
  """
  path = os.path.join(model_dir, layout.HISTORY)
  record = {
    "start": start,
    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    "step": step,
    "command": redaction.command(),
    "commit": _commit(task),
    "versions": versions(),
    "config": dict(config),
    "data": dict(data),
    "in_use": dict(in_use),
    "train_steps": train_steps,
  }
  earlier = "".join(f"{json.dumps(each)}\n" for each in records(model_dir))
  files.atomic_write(path, f"{earlier}{json.dumps(record)}\n")


def records(model_dir: str) -> list[json_lines.Record]:
  """Returns all starts, oldest first.

  Raises:
    ConfigError: the file is damaged.
  """
  path = os.path.join(model_dir, layout.HISTORY)
  if not tf.io.gfile.exists(path):
    return []
  lines = files.read(path).splitlines()
  found = [r for line in lines if (r := json_lines.parsed(line)) is not None and _is_start(r)]
  if len(found) < len(lines):
    raise ConfigError(f"{path!r} is damaged; restore it, or move it away to go on without it.")
  return found


def _is_start(record: json_lines.Record) -> bool:
  return all(isinstance(record.get(part, {}), Mapping) for part in ("config", "data", "in_use"))


def described(arguments: Mapping[str, Any]) -> dict[str, str]:
  """Returns arguments of a Python call as text that is the same in the next process."""
  return {name: _named(name, value) for name, value in arguments.items()}


def _named(name: object, value: Any) -> str:
  return _text(redaction.shown(str(name), value))


def _text(value: Any) -> str:
  if value is None or isinstance(value, bool | int | float | str):
    return repr(value)
  if isinstance(value, functools.partial):
    given = [*map(_text, value.args), *(f"{k}={_named(k, v)}" for k, v in value.keywords.items())]
    return f"{_text(value.func)}({', '.join(given)})"
  if isinstance(value, Mapping):
    return f"{{{', '.join(f'{key}: {_named(key, each)}' for key, each in value.items())}}}"
  if isinstance(value, list | tuple):
    return f"[{', '.join(map(_text, value))}]"
  target = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
  return f"{target.__module__}.{target.__qualname__}"


def versions() -> dict[str, str]:
  """Returns the versions of what computes: Python, packages, and a digest of this framework."""
  found = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a clone that is not installed
      found[name] = "not installed"
  return {**found, "framework's files": _digest(Path(__file__).parents[1])}


@functools.cache
def _digest(folder: Path) -> str:
  """Returns a digest of the Python files in a folder: a clone changes and keeps its version."""
  digest = hashlib.sha256()
  for path in sorted(folder.rglob("*.py")):
    digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
  return digest.hexdigest()[:12]


def _commit(task: object) -> str:
  """Returns the git commit of the task's file, with "+changes" if files differ from it; or ""."""
  file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
  if not file:
    return ""
  git = ["git", "-C", os.path.dirname(os.path.abspath(file))]
  try:
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=5, check=True)
    commit = run([*git, "rev-parse", "HEAD"]).stdout.strip()
    changed = run([*git, "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return ""
  return f"{commit}+changes" if changed else commit
