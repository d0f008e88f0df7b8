"""What a report depends on, and which of its results still hold: `loopwright verify --changed`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

import loopwright
from loopwright import configurables, errors
from loopwright.errors import UsageError
from loopwright.options import BatchSize, names_of
from loopwright.runs.runner import defaults
from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.report import Report, Result

_READ = {*names_of(Subject), *names_of(BatchSize), "strategy"}


def inputs() -> dict[str, str]:
  """Returns what the checks of the config in force depend on: name -> value or digest (host).

  The bindings of what a step, an evaluation or the data can reach, the user's files that are
  imported, and the versions. Not files of data.
  """
  versions = {each.__name__: each.__version__ for each in (loopwright, tf, keras)}
  loaded = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
  files = {
    file: hashlib.sha256(Path(file).read_bytes()).hexdigest()
    for file in sorted(loaded)
    if file.endswith(".py") and errors.is_the_users(file) and Path(file).is_file()
  }
  bindings = configurables.values_that_matter(defaults().keys() - _READ)
  return {**versions, **files, **bindings}


def holding(path: str, now: Mapping[str, str], groups: Sequence[str]) -> tuple[Report, str]:
  """Returns what still holds of the report in a file, and a line that says why.

  A group holds if it ran, nothing in it failed, and none of the inputs has changed since.

  Args:
    path: of the file.
    now: what `inputs` returns.
    groups: those that are asked for.

  Raises:
    UsageError: there is no such report.
  """
  try:
    last = json.loads(Path(path).read_text())
    before, shares = last["inputs"], last["shares"]
    results = [Result(**each) for each in last["results"]]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UsageError(
      f"--changed needs the report of last time, and --json={path!r} has none "
      f"({type(error).__name__}); leave --changed out once"
    ) from error
  changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
  failed = {result.group for result in results if result.status == "failed"}
  held = [] if changed else [group for group in groups if group in shares.keys() - failed]
  kept = [result for result in results if result.group in held]
  why = (
    f"changed since the last report: {', '.join(changed)}"
    if changed
    else (f"nothing has changed since the last report; still ok: {', '.join(held) or 'none'}")
  )
  return Report(kept, shares={group: shares[group] for group in held}), why
