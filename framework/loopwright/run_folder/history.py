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
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host import files, json_lines, modules, redaction
from loopwright.run_folder import layout

_PACKAGES = ("loopwright", "tensorflow", "keras", "tf_keras", "numpy")
_SHOWN = 3
_UNSET = "(unset)"
_MACRO = re.compile(r"%([\w./-]+)")

Values = Mapping[str, str]


class Change(NamedTuple):
  """What differs from the last start."""

  name: str
  now: str
  before: str

  def __str__(self) -> str:
    """Returns a phrase such as "run.seed = 1, which was 0"."""
    return f"{self.name} = {self.now}, which was {self.before}"


def changes(model_dir: str, part: str, values: Values) -> list[Change]:
  """Returns what differs from the last start (host).

  Args:
    part: "config"; or "data", of which only what both starts have is compared: a run that only
      trains reads no evaluation examples.
    values: name -> value, as text; a macro counts where it is used.
  """
  record = (records(model_dir) or [{}])[-1]
  before = record.get(part)
  if not isinstance(before, Mapping):
    return []  # the folder is new, or from a version without a history
  before = {name: modules.current(value) for name, value in _without_macros(before).items()}
  values = {name: modules.current(value) for name, value in _without_macros(values).items()}
  names = [n for n in {*values, *before} if not redaction.same(before.get(n), values.get(n))]
  in_both = values.keys() & before.keys()
  if part == "data":
    names = [name for name in names if name in in_both]
  elif "in_use" not in record:  # of a version that compared less
    names = [name for name in names if name in before]
  names.sort(key=lambda name: (name not in in_both, name not in values, name))
  return [Change(n, values.get(n, _UNSET), before.get(n, _UNSET)) for n in names]


def require_unchanged(
  model_dir: str, part: str, values: Values, *, accept: bool, rule: Callable[[str], Any]
) -> list[Change]:
  """Returns what differs from the last start, which the user accepts (host).

  Args:
    rule: returns the `Rule` of a name, or None.

  Raises:
    ConfigError: something differs that must not, or the user does not accept it.
  """
  found = changes(model_dir, part, values)
  for each in found:
    of = rule(each.name)
    if of is not None and of.may == "no" and _UNSET not in (each.now, each.before):
      raise refusal(model_dir, each, of.says)
  if found and not accept:
    raise ConfigError(
      f"the run in {model_dir!r} would go on with {listed(found)}: choose another --model_dir for "
      "another run, or add --accept_changes to go on with the new values."
    )
  return found


def starts(model_dir: str) -> set[str]:
  """Returns the ids of all starts; lines of earlier versions have none (host)."""
  return {str(record["start"]) for record in records(model_dir) if "start" in record}


def changed_versions(model_dir: str) -> str:
  """Returns how the versions differ from those of the last start, in words; "" if not (host)."""
  last, now = (records(model_dir) or [{}])[-1].get("versions"), versions()
  before = last if isinstance(last, Mapping) else {}
  names = [name for name in now if before.get(name, now[name]) != now[name]]
  return ", ".join(f"{name} {before[name]}, now {now[name]}" for name in names)


def refusal(model_dir: str, change: Change, why: str) -> ConfigError:
  """Returns the error for a change that is not possible."""
  return ConfigError(
    f"the run in {model_dir!r} cannot go on with {change}: {why}; set it back, or choose another "
    "--model_dir for another run."
  )


def listed(found: Sequence[Change]) -> str:
  """Returns the first changes in one line."""
  more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
  return f"{'; '.join(map(str, found[:_SHOWN]))}{more}"


def began(model_dir: str) -> Mapping[str, Sequence[float]]:
  """Returns what the run's variables began with, see `initial_values`; {} if unknown (host)."""
  return next((r["began"] for r in reversed(records(model_dir)) if r.get("began")), {})


def _without_macros(values: Values) -> Values:
  """Replaces macros where they are used; those that are used are no values of their own."""
  used = {name for value in values.values() for name in _MACRO.findall(value) if name in values}
  for _ in used:  # a macro may be used in another one
    known = values
    values = {
      name: _MACRO.sub(lambda found: known.get(found[1], found[0]), value)  # noqa: B023
      for name, value in known.items()
    }
  return {name: value for name, value in values.items() if name not in used}


def append(
  model_dir: str,
  *,
  start: str,
  step: int,
  task: object,
  config: Values,
  data: Values,
  in_use: Values,
  began: Mapping[str, Sequence[float]] | None = None,
) -> None:
  """Appends one start; the file is replaced, and on disk, on return (host).

  Args:
    start: its id.
    in_use: name -> value, read from what uses it.
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
    **({"began": dict(began)} if began else {}),
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
  found = [record for line in lines if (record := json_lines.parsed(line)) is not None]
  if len(found) < len(lines):
    raise ConfigError(f"{path!r} is damaged; restore it, or move it away to go on without it.")
  return found


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
