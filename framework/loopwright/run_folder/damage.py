"""What is damaged in a run folder, a line each; of a checkpoint it reads the index's end."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator

from loopwright.host import json_lines
from loopwright.run_folder import layout
from loopwright.run_folder.folders import CHECKPOINTS, CONFIG, HISTORY, METRICS, Lines, Run

_MAGIC = bytes.fromhex("57fb808b247547db")
"""The end of a table of LevelDB, which an index is."""
_DIGITS, _MOST_BYTES = "[0-9]" * 5, 2**16


def faults(run: Run, name: str) -> list[str]:
  """Returns a line for each thing that is damaged or missing; [] for a sound run (host).

  Args:
    run: see there.
    name: what the user calls its folder, which may be the local copy of a URL.
  """
  found = [*run.unreadable, *_of_files(run), *_of_checkpoints(run)]
  return [fault.replace(run.path, name) for fault in found]


def _of_files(run: Run) -> Iterator[str]:
  yield from _lines(run, METRICS, run.log)
  yield from _lines(run, HISTORY, run.history)
  path = os.path.join(run.path, CONFIG)
  if not os.path.lexists(path):
    if run.history.total:
      yield f"{path!r} is missing."
  elif not run.config:
    yield f"{path!r} is empty."
  elif "\N{REPLACEMENT CHARACTER}" in run.config or "\0" in run.config:
    yield f"{path!r} is not text."
  history, best = os.path.join(run.path, HISTORY), os.path.join(run.path, layout.BEST, "best.json")
  with contextlib.suppress(OSError):
    if os.path.isfile(history) and not os.stat(history).st_size:
      yield f"{history!r} is empty."
  # Only versions that write a history, before the first checkpoint, keep a flight record.
  needs_it = all(
    os.path.isdir(os.path.join(run.path, each)) for each in (layout.FLIGHT, CHECKPOINTS)
  )
  if needs_it and not os.path.lexists(history):
    yield f"{history!r} is missing."
  if os.path.isfile(best) and json_lines.parsed(_start_of(best)) is None:
    yield f"{best!r} is damaged."


def _lines(run: Run, name: str, found: Lines) -> Iterator[str]:
  if found.damaged:
    first = f", the first is line {found.damaged[0]}" if len(found.damaged) < found.total else ""
    yield (
      f"{os.path.join(run.path, name)!r}: {len(found.damaged)} of {found.total} lines cannot be "
      f"read{first}."
    )


def _of_checkpoints(run: Run) -> Iterator[str]:
  top = os.path.join(run.path, CHECKPOINTS)
  steps = layout.checkpoint_steps(run.path)
  for step in steps:
    with contextlib.suppress(FileNotFoundError):  # removed just now, by a run that goes on
      path = os.path.join(top, f"ckpt-{step}")
      if (fault := _of_checkpoint(path)) and os.path.lexists(f"{path}.index"):
        yield fault
  if run.is_running():
    return
  logged, newest = run.log.last, max(steps, default=0)
  every = run.whole_number("run.checkpoint_every_steps")
  was_saved = run.start.get("step") or os.path.isdir(top) or (every and logged >= every)
  if not steps and logged and (run.is_at_end() or was_saved):
    yield f"{top!r} has no checkpoint, but the log goes to step {logged}."
  elif steps and run.is_at_end() and newest < logged:
    yield f"{top!r} has no checkpoint of the last step, {logged}; the newest is of {newest}."
  elif newest and not logged:
    yield f"there is a checkpoint of step {newest}, but no line of a log that can be read."
  elif newest > logged:
    yield f"there is a checkpoint of step {newest}, but the log goes to step {logged} alone."


def _of_checkpoint(path: str) -> str:
  """Returns what is wrong with a checkpoint; "" if its index has its end and no data is missing."""
  try:
    with open(f"{path}.index", "rb", opener=_without_waiting) as index:
      index.seek(-len(_MAGIC), os.SEEK_END)
      if index.read() != _MAGIC:
        return f"'{path}.index' is damaged."
  except OSError:
    return f"'{path}.index' cannot be read."
  found = glob.glob(f"{glob.escape(path)}.data-{_DIGITS}-of-{_DIGITS}")
  count = int(found[0][-5:]) if found else 1
  for number in range(count):
    data = f"{path}.data-{number:05d}-of-{count:05d}"
    if data not in found:
      return f"{data!r} is missing."
  return ""


def _start_of(path: str) -> bytes:
  with contextlib.suppress(OSError), open(path, "rb", opener=_without_waiting) as file:
    return file.read(_MOST_BYTES)
  return b""


def _without_waiting(path: str, flags: int) -> int:
  return os.open(path, flags | os.O_NONBLOCK)  # for a pipe in place of the file
