"""Where the time of a step goes: operations, threads, and the gaps between operations.

    python -m benchmarks.timeline mlp               # Loopwright
    python -m benchmarks.timeline mlp --only hand   # any contender of benchmarks.throughput

The trace has only operations that TensorFlow's executor takes for expensive: gaps are the others,
and the scheduling. An operation of several threads counts once, on the thread that started it.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

CALLS = ("While", "StatelessWhile", "If", "StatelessIf", "PartitionedCall",
         "StatefulPartitionedCall", "IteratorGetNext")  # fmt: skip
"""Operations that only run or wait for others."""


class Event(NamedTuple):
  """An operation that ran: its type, its thread, and when, in microseconds."""

  kind: str
  thread: str
  start: float
  end: float


def main(arguments: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("model", help="a model of benchmarks.models")
  parser.add_argument("--only", default="loopwright", help="the contender (default: %(default)s)")
  parser.add_argument("--replicas", type=int, default=1)
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--rows", type=int, default=12, help="operations to show")
  given = parser.parse_args(arguments)
  plain_us, traced_us, events = profiled(given.only, given.model, given.replicas, given.steps)
  print(f"{given.model} x{given.replicas}, {given.only}: {plain_us:.0f} us a step, "
        f"{traced_us:.0f} with the profiler. Of these, per step:")  # fmt: skip
  print("\n".join(summary(events, given.steps, traced_us, given.rows)))
  return 0


def profiled(name: str, model: str, replicas: int, steps: int) -> tuple[float, float, list[Event]]:
  """Returns microseconds of a step, without and with the profiler, and the operations."""
  import tensorflow as tf

  from benchmarks import contenders

  block = contenders.make(name, model, replicas, steps).block

  def step_us() -> float:
    started = time.perf_counter()
    block()
    return (time.perf_counter() - started) / steps * 1e6

  step_us()  # traces
  plain = float(np.median([step_us() for _ in range(5)]))
  with tempfile.TemporaryDirectory() as folder:
    tf.profiler.experimental.start(folder)
    traced = step_us()
    tf.profiler.experimental.stop()
    [file] = Path(folder).rglob("*.xplane.pb")
    return plain, traced, list(operations(file.read_bytes()))


def operations(trace: bytes) -> Iterable[Event]:
  """Yields the operations of a trace, without those that only call others."""
  from tensorflow.tsl.profiler.protobuf import xplane_pb2

  for plane in xplane_pb2.XSpace.FromString(trace).planes:
    for line in plane.lines:
      for event in line.events:
        name = plane.event_metadata[event.metadata_id].name  # "loop/Adam/Mul:Mul"
        _, found, kind = name.rpartition(":")
        if found and "::" not in name and kind.isidentifier() and kind not in CALLS:
          start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
          yield Event(kind, f"{line.name} {line.id}", start, start + event.duration_ps / 1e6)


def summary(events: Sequence[Event], steps: int, step_us: float, rows: int) -> list[str]:
  """Returns lines: how many threads run operations for how long, and the costliest operations."""
  at_once, threads = overlaps(events), len({event.thread for event in events})
  idle = step_us - sum(at_once.values()) / steps
  lines = [f"{idle:8.0f} us in gaps ({threads} threads run operations)"]
  lines += [f"{us / steps:8.0f} us {n} at a time" for n, us in sorted(at_once.items())]
  totals: dict[str, list[float]] = collections.defaultdict(list)
  for event in events:
    totals[event.kind].append(event.end - event.start)
  dear = sorted(totals.items(), key=lambda item: -sum(item[1]))[:rows]
  total = sum(map(sum, totals.values())) / steps
  lines += [f"{total:8.0f} us {len(events) / steps:.0f} operations, the costliest:"]
  return lines + [f"{sum(t) / steps:8.0f} us {len(t) / steps:.0f} {kind}" for kind, t in dear]


def overlaps(events: Sequence[Event]) -> dict[int, float]:
  """Returns number of operations at a time -> for how many microseconds."""
  changes = sorted([(e.start, 1) for e in events] + [(e.end, -1) for e in events])
  found: dict[int, float] = collections.defaultdict(float)
  running, last = 0, 0.0
  for at, change in changes:
    if running:
      found[running] += at - last
    running, last = running + change, at
  return dict(found)


if __name__ == "__main__":
  sys.exit(main())
