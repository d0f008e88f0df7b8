"""What an error says in one line: a user's mistake, or a failure and its place in their code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path

from loopwright.errors import USER_ERROR, ConfigError, is_the_users, printable

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_FULL = re.compile(
  r"OOM when allocating tensor with shape\S+ and type \w+ on \S+"
  r"|Out of memory while trying to allocate \S+"
)
_WHEN_FULL = (
  "a device has too little memory; lower run.global_batch_size or raise Trainer.accumulation_steps "
  "(docs/large-models.md says what else takes less)"
)


def failure(error: BaseException) -> str:
  """Returns one line about an error that is not a `ConfigError`: reason and place in user code.

  TensorFlow and AutoGraph put both into a text of many lines, places first, reason last.
  """
  noise = ("In call to configurable", "File ", "[[", "Arguments received by", "•")
  lines = [line.strip() for line in re.sub(r"\x1b\[\d+m", "", str(error)).splitlines()]
  lines = [line for line in lines if line and not line.startswith(noise)] or [""]
  if len(lines) > 1 and lines[0].startswith("Exception encountered when calling "):
    lines = lines[1:]  # Keras's heading
  reason = lines[-1] if _PLACE.search(str(error)) else lines[0]
  if several := re.search(r"^\s*\(0\) [A-Z_]+: +(.+)$", str(error), re.MULTILINE):
    reason = re.sub(r"(?<=\S)\{\{node \S+\}\}$", "", several[1])  # the node, a second time
    reason = re.sub(r"\{\{node (\S+)\}\}", r"\1", reason)
  if full := _FULL.search(str(error)):
    reason = f"{full[0].rstrip('.')}: {_WHEN_FULL}"
  elif not re.match(r"\w+(Error|Exception): ", reason):
    reason = f"{type(error).__name__}: {reason}"
  place = place_of(error)
  return (f"{reason} ({place})" if place else reason) + _of_batch(error)


def _of_batch(error: BaseException | None) -> str:
  """Returns the names of the batch that a missing name was looked for in, if that is known."""
  while error and not isinstance(error, KeyError):
    error = error.__context__  # AutoGraph raises an error of its own
  frames = traceback.walk_tb(error.__traceback__) if error else ()
  found = [frame.f_locals.get("batch") for frame, _ in frames]
  batches = [list(batch) for batch in found if isinstance(batch, Mapping)]
  return f"; the batch has {', '.join(map(repr, batches[-1]))}" if batches else ""


def place_of(error: BaseException) -> str:
  """Returns the innermost line of the user's code in an error, "mine.py:3, in loss"; else ""."""
  frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
  converted = getattr(getattr(error, "ag_error_metadata", None), "translated_stack", ())
  frames += [(f.filename, f.lineno, f.function_name) for f in reversed(converted)]
  for file, line, name in reversed([*frames, *_PLACE.findall(str(error))]):
    if is_the_users(file):
      return f"{Path(file).name}:{line}, in {name}"
  return ""


def mistake(error: Exception) -> str | None:
  """Returns the line of a user's mistake; None for any other error.

  TensorFlow embeds a mistake found while tracing in the text of its own error, and one of the input
  pipeline after "user error: ". gin appends lines to any error.
  """
  line = _mistake(error)
  return None if line is None else printable(line)


def _mistake(error: Exception) -> str | None:
  if "[user error: " in str(error):
    return user_error(error)
  hidden = re.search(r"\b(?:user error|ConfigError): (.*)", str(error))
  if hidden:
    return hidden[1]
  return str(error).partition("\n")[0] if isinstance(error, ConfigError) else None


def user_error(error: BaseException) -> str | None:
  """Returns the line for the user in an error of a running pipeline; None if there is none.

  TensorFlow surrounds the line with descriptions of ops and iterators.
  """
  found = re.search(rf"\[{USER_ERROR}(.*?)\](?:\n|$)", str(error))
  return re.sub(r"\\(['\"\\])", r"\1", found[1]) if found else None
