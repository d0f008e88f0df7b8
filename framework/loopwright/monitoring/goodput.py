"""`loopwright goodput RUN`: where the wall time of a run went, over all its starts.

It reads the flight record of worker 0 (record.py), and imports no TensorFlow.
"""

from __future__ import annotations

import collections
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from loopwright.errors import ConfigError, printable
from loopwright.monitoring import record, stragglers
from loopwright.monitoring.record import Leg
from loopwright.run_folder import folders, layout

if TYPE_CHECKING:
  from loopwright.commands.arguments import Parsed
  from loopwright.commands.parser import Parser

PRODUCTIVE, REPEATED, DOWN = "productive steps", "steps repeated", "down"
_START = ("imports", "setup", "connecting", "restoring", "tracing")
"""The parts of a process's time before its first step ends."""
_ALIVE_S = 5.0
"""A record that was not written for so long is of a process that has ended."""


class Goodput(NamedTuple):
  """Where the wall time of a run went.

  Attributes:
    began: of its first process, in seconds since the epoch.
    parts: name -> seconds; they exclude each other and add up to the time from `began` to the last
      sign of the last process.
    starts, broken: how many processes worker 0 has had; and of them, were killed or failed.
    steps, repeated: steps that count, and steps that were done in vain.
  """

  began: float
  parts: dict[str, float]
  starts: int
  broken: int
  steps: int
  repeated: int

  @property
  def seconds(self) -> float:
    """The wall time."""
    return sum(self.parts.values())

  def share(self, part: str) -> float:
    """Returns the share of a part in the wall time, from 0 to 1."""
    return self.parts.get(part, 0.0) / self.seconds if self.seconds > 0 else 0.0

  def ordered(self) -> list[tuple[str, float]]:
    """Returns (part, seconds), the productive steps first, then the largest losses."""
    return sorted(self.parts.items(), key=lambda item: (item[0] != PRODUCTIVE, -item[1]))


def of(worker: Sequence[Leg], now: float) -> Goodput:
  """Returns the goodput of the legs of a worker, oldest first.

  Args:
    now: seconds since the epoch, which tells whether the last process still runs.
  """
  starts = _starts(worker)
  kept = _kept(starts, now)
  usual_s = _step_s(worker)
  parts: dict[str, float] = collections.defaultdict(float)
  repeated, end = 0, worker[0].began
  for number, of_start in enumerate(starts):
    parts[DOWN] += max(0.0, of_start[0].began - end)
    end = of_start[-1].end
    for leg in of_start:
      counts = kept[id(leg)]
      repeated += round((1 - counts) * _steps(leg))
      for name, seconds in _divided(leg, usual_s).items():
        parts[_called(name, counts=True, recovers=number > 0)] += counts * seconds
        parts[_called(name, counts=False, recovers=number > 0)] += (1 - counts) * seconds
  alive = _is_alive(worker[-1], now)
  broken = sum(each[-1].ended in ("", "failed") for each in starts) - alive
  return Goodput(
    began=worker[0].began,
    parts={name: seconds for name, seconds in parts.items() if seconds > 0},
    starts=len(starts),
    broken=broken,
    steps=max(
      (
        (leg.from_step or 0) + round(kept[id(leg)] * _steps(leg)) for leg in worker if kept[id(leg)]
      ),
      default=0,
    ),
    repeated=repeated,
  )


def _starts(worker: Sequence[Leg]) -> list[list[Leg]]:
  """Returns the legs of each process."""
  starts: list[list[Leg]] = []
  for leg in worker:
    if leg.first or not starts:
      starts.append([])
    starts[-1].append(leg)
  return starts


def _steps(leg: Leg) -> int:
  return 0 if leg.from_step is None else leg.step - leg.from_step


def _kept(starts: Sequence[Sequence[Leg]], now: float) -> dict[int, float]:
  """Returns the id of each leg -> the share of its steps that count, from 0 to 1.

  Those count that no later process repeats; of the last process, those that are saved, or that it
  may still save. So what was restored from a copy in memory counts, without a save of its own.
  """
  kept: dict[int, float] = {}
  restored = math.inf
  for of_start in reversed(starts):
    for leg in of_start:
      if restored == math.inf:
        last = leg is starts[-1][-1] and _is_alive(leg, now)
        kept[id(leg)] = float(leg.saved or last)
      elif not _steps(leg):
        kept[id(leg)] = float(leg.saved and leg.step <= restored)
      else:
        kept[id(leg)] = max(0, min(leg.step, restored) - (leg.from_step or 0)) / _steps(leg)
    if of_start[0].from_step is not None:
      restored = min(restored, of_start[0].from_step)
  return kept


def _is_alive(leg: Leg, now: float) -> bool:
  return not leg.ended and now - leg.end < _ALIVE_S


def _step_s(worker: Sequence[Leg]) -> float:
  """Returns the usual seconds of a step, without loops that were traced; 0 if unknown."""
  known = []
  for leg in worker:
    steps = leg.step - (leg.from_step or 0) - leg.traced
    if leg.from_step is not None and steps > 0:
      trained_s = leg.parts.get("training", 0.0) + leg.parts.get("input wait", 0.0)
      known.append(trained_s / steps)
  return statistics.median(known) if known else 0.0


def _divided(leg: Leg, usual_s: float) -> dict[str, float]:
  """Returns the parts of a leg; the loop that was traced gets what its steps usually take."""
  parts = dict(leg.parts)
  trained_s = min(parts.get("tracing", 0.0), leg.traced * usual_s)
  if trained_s:
    parts["tracing"] -= trained_s
    parts["training"] = parts.get("training", 0.0) + trained_s
  if leg.step == leg.from_step and not leg.saved and leg.first and not leg.traced:
    parts["tracing"] = parts.get("tracing", 0.0) + parts.pop("training", 0.0)
  return parts


def _called(name: str, *, counts: bool, recovers: bool) -> str:
  """Returns what the table calls a part of a leg."""
  if name in _START:
    return f"{'recovery' if recovers else 'start'}: {name}"
  if name == "training":
    return PRODUCTIVE if counts else REPEATED
  return REPEATED if name == "input wait" and not counts else name


def table(found: Goodput) -> str:
  """Returns the lines to print: the productive steps, then each loss, the largest first."""
  rows = found.ordered()
  width = max(len(name) for name, _ in rows)
  began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.began))
  head = (
    f"goodput {100 * found.share(PRODUCTIVE):.1f} % of {found.seconds:.1f} s since {began}: "
    f"{found.steps} steps, {found.repeated} repeated; starts: {found.starts}, broken: "
    f"{found.broken}"
  )
  lines = [
    f"  {name:{width}} {seconds:10.2f} s {100 * found.share(name):5.1f} %" for name, seconds in rows
  ]
  total = f"  {'total':{width}} {found.seconds:10.2f} s 100.0 %"
  return "\n".join([head, *lines, total])


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  parser.switch("json", "Print a JSON object, with all that is known.")


def run(parsed: Parsed) -> int:
  """Prints the table of a run; returns 0 (host).

  Raises:
    ConfigError: there is not one run folder, or it has no flight record.
  """
  if len(parsed.arguments) != 1:
    raise ConfigError("`loopwright goodput` takes one run folder, as in `goodput runs/a`.")
  told = folders.Run(folders.local(parsed.arguments[0]))
  found = read(told.path)
  if found is None:
    raise ConfigError(
      f"{parsed.arguments[0]!r} has no flight record, {layout.flight(0)}: no process has "
      "trained there with a version that keeps one."
    )
  if parsed.values.json:
    print(json.dumps({**found._asdict(), "seconds": found.seconds}, indent=2))
    return 0
  lines = [table(found), stragglers.table(stragglers.paces(told.path))]
  print("\n".join(map(printable, "\n".join(filter(None, lines)).split("\n"))))
  return 0


def read(path: str) -> Goodput | None:
  """Returns the goodput of a run folder; None if it has no flight record (host)."""
  worker = record.read(path).get(0)
  return of(worker, time.time()) if worker else None
