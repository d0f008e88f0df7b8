"""`loopwright stacks RUN`: what the processes of a running run do now. Imports no TensorFlow."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from loopwright.errors import ConfigError, printable
from loopwright.host import stacks
from loopwright.run_folder import flights, layout, legs
from loopwright.run_folder.legs import Leg

if TYPE_CHECKING:
  from loopwright.commands.arguments import Parsed
  from loopwright.commands.parser import Parser

_POLL_S, _SIGNALLED_S = 0.1, 2.0


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  parser.number("wait_s", 5.0, "Seconds in which the processes may answer; default: 5.")


def run(parsed: Parsed) -> int:
  """Prints the stacks of each worker; returns 1 if one did not answer (host).

  Raises:
    ConfigError: no process of the run keeps a flight record now.
  """
  if len(parsed.arguments) != 1:
    raise ConfigError("`loopwright stacks` takes one run folder, as in `stacks runs/a`.")
  path = parsed.arguments[0]
  running = {worker: leg for worker, leg in flights.last(path).items() if not leg.ended}
  if not running:
    raise ConfigError(f"no process trains in {path!r}, as far as {layout.FLIGHT}/ tells.")
  before = {worker: _size(path, worker) for worker in running}
  legs.ask(path, legs.STACKS)
  silent = _wait(path, before, parsed.values.wait_s)
  for worker in silent:
    if _takes_signal(running[worker]):
      os.kill(running[worker].process, stacks.SIGNAL)
  if silent:
    silent = _wait(path, {worker: before[worker] for worker in silent}, _SIGNALLED_S)
  now = flights.last(path)
  for worker, leg in now.items():
    if worker in running:
      print(printable(_told(worker, leg)))
    if worker in running and worker not in silent:
      with open(os.path.join(path, layout.stacks(worker)), errors="replace") as file:
        file.seek(before[worker] if before[worker] <= _size(path, worker) else 0)
        print("\n".join(map(printable, file.read().strip().split("\n"))))
    elif worker in running:
      print("  no answer: it is stopped, has ended without a word, or is on another machine")
  return int(bool(silent))


def _wait(path: str, before: dict[int, int], seconds: float) -> list[int]:
  """Returns the workers whose stacks have not changed in this time, nor is their writing over."""
  until = time.monotonic() + seconds
  while True:
    silent = [worker for worker, size in before.items() if _size(path, worker) == size]
    if not silent or time.monotonic() > until:
      time.sleep(_POLL_S)
      return silent
    time.sleep(_POLL_S)


def _size(path: str, worker: int) -> int:
  file = Path(path, layout.stacks(worker))
  return file.stat().st_size if file.exists() else -1


def _takes_signal(leg: Leg) -> bool:
  """Whether the process is still the one of the record, on this machine, with a handler."""
  here = leg.boot == legs.boot() and leg.ticks == legs.ticks(leg.process) > 0
  return here and stacks.takes_signal(leg.process)


def _told(worker: int, leg: Leg) -> str:
  doing = leg.doing or leg.path
  return f"worker {worker}, process {leg.process} on {leg.host}, at step {leg.step}: {doing}"
