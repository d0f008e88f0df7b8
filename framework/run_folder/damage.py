"""What is damaged in a run folder, a line each; reads names, sizes and indexes of checkpoints.

An index file of a checkpoint is a table of LevelDB (its doc/table_format.md): blocks of key and
value, and a footer that says where the last block is, which says where the others are. A value is
a `BundleEntryProto` of TensorFlow (core/protobuf/tensor_bundle.proto): it says which bytes of which
data file a variable has. What is in those bytes is not read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping

from framework.errors import ConfigError
from framework.host import bounded
from framework.run_folder import layout
from framework.run_folder.folders import CHECKPOINTS, CONFIG, HISTORY, METRICS, Lines, Run

_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_MAX_INDEX, _MOST_SHARDS = 2**26, 100_000
_SHARDS, _SHARD, _OFFSET, _SIZE = 1, 3, 4, 5
"""Fields of the two messages: of the header the first, of an entry the others."""
_WIDTHS = {1: 8, 5: 4}


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
  history = os.path.join(run.path, HISTORY)
  with contextlib.suppress(OSError):
    if os.path.isfile(history) and not os.stat(history).st_size:
      yield f"{history!r} is empty."


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


def _of_checkpoint(path: str) -> str:
  """Returns what is wrong with a checkpoint; "" if its files are there in their whole length."""
  try:
    index = bounded.content(f"{path}.index", "an index", max_bytes=_MAX_INDEX, remedy="restore it")
  except ConfigError:
    return f"'{path}.index' cannot be read."
  try:
    needed = _needed(index)
  except (ValueError, LookupError, struct.error):
    return f"'{path}.index' is damaged."
  for shard, size in sorted(needed.items()):
    data = f"{path}.data-{shard:05d}-of-{len(needed):05d}"
    if not os.path.lexists(data):
      return f"{data!r} is missing."
    if (found := os.stat(data).st_size) < size:
      return f"{data!r} is cut off: it has {found:,} bytes of {size:,}."
  return ""


def _needed(index: bytes) -> Mapping[int, int]:
  """Returns how many bytes an index needs of each data file.

  Raises:
    ValueError, LookupError, struct.error: it is damaged.
  """
  if index[-8:] != _MAGIC:
    raise ValueError
  at = len(index) - 48
  for _ in range(2):  # over the place of the meta index
    _, at = _varint(index, at)
  sizes: dict[int, int] = {}
  for _, place in _entries(_block(index, at)):
    for key, value in _entries(_block(place, 0, index)):
      fields = dict(_fields(value))
      if not key:
        sizes |= dict.fromkeys(range(min(fields.get(_SHARDS, 1), _MOST_SHARDS)), 0)
      else:
        shard = fields.get(_SHARD, 0)
        sizes[shard] = max(sizes[shard], fields.get(_OFFSET, 0) + fields.get(_SIZE, 0))
  return sizes


def _block(place: bytes, at: int, index: bytes | None = None) -> bytes:
  """Returns the block of `index` whose offset and size are in `place` from `at` on."""
  offset, at = _varint(place, at)
  size, _ = _varint(place, at)
  whole = place if index is None else index
  if offset + size > len(whole):
    raise ValueError
  return whole[offset : offset + size]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
  """Yields key and value; a key leaves out what it shares with the one before."""
  restarts = struct.unpack("<I", block[-4:])[0]
  key, at, end = b"", 0, len(block) - 4 - 4 * restarts
  while at < end:
    shared, at = _varint(block, at)
    own, at = _varint(block, at)
    size, at = _varint(block, at)
    key = key[:shared] + block[at : at + own]
    at += own + size
    if at > end:
      raise ValueError
    yield key, block[at - size : at]


def _fields(message: bytes) -> Iterator[tuple[int, int]]:
  """Yields number and value of the fields of a protocol buffer that are whole numbers."""
  at = 0
  while at < len(message):
    tag, at = _varint(message, at)
    number, kind = divmod(tag, 8)
    if kind == 0:
      value, at = _varint(message, at)
      yield number, value
    elif kind == 2:
      size, at = _varint(message, at)
      at += size
    else:
      at += _WIDTHS[kind]


def _varint(content: bytes, at: int) -> tuple[int, int]:
  """Returns a number of seven bits a byte, the lowest first, and where it ends."""
  value = shift = 0
  while True:
    byte = content[at]
    value |= (byte & 127) << shift
    at, shift = at + 1, shift + 7
    if byte < 128:
      return value, at
    if shift > 63:
      raise ValueError
