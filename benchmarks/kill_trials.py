"""Kills training in every part of a run, restarts it, and compares with an uninterrupted run.

  python -m benchmarks.trials kills --trials 250

Each trial runs the same command until it ends by itself, and interrupts it one to three times, each
time in another part: `PARTS` below, at a random moment of the part; the first part is each in turn.
SIGKILL ends it at once. After SIGTERM it must end within 30 s with status 75, the state saved. In
the end every tensor of the kept checkpoints and of best/ and the export, every value of
metrics.jsonl that is not a time, and the examples of every step in the ledger must be those of the
uninterrupted run.

Most runs are forks of one process that has imported TensorFlow; those that are interrupted in their
imports are real commands.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import comparison, forks
from benchmarks.trials import Outcome, Run

CHECKPOINTS = "loopwright.run_folder.checkpoints:CheckpointManager"
PARTS = {
  "imports": "",
  "config": "loopwright.configurables:parse",
  "fit": "loopwright.run_folder.assets:fitted",
  "assets": "loopwright.run_folder.assets:save",
  "proof": "loopwright.distribution.reduction:Reduction.prove",
  "restore": f"{CHECKPOINTS}.restore_or_initialize",
  "trace": "loopwright.trainer:Trainer.loop",
  "loop": "loopwright.trainer:Trainer.train",
  "write": f"{CHECKPOINTS}._write",
  "complete": f"{CHECKPOINTS}._complete",
  "sweep": f"{CHECKPOINTS}._sweep",
  "evaluation": "loopwright.evaluator:Evaluator.evaluate",
  "best": "loopwright.actions.best:BestCheckpoint.on_best",
  "export": "loopwright.tools.exports.action:Export.on_best",
  "teardown": "loopwright.reporting.reports:Reports.result",
}
KINDS = ("SIGKILL", "SIGTERM")
MOST = 3
IMPORTS_S = 5.0
LIMIT_S = 30.0
ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75}
_MARK = struct.Struct("<id")  # how often the part began, and when


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Makes the uninterrupted run; returns what runs a trial."""
  forks.warm_up()
  several = options.replicas > 1
  return Kills(base, [f"auto.cpu_replicas = {options.replicas}"] if several else []).trial


class Part:
  """Observes one part of a run in another process, through a pipe."""

  def __init__(self, name: str) -> None:
    """Opens the pipe; `plant` is for the other process."""
    self.name, self.count = name, 0
    self._reader, self._writer = os.pipe()

  def plant(self) -> None:
    """Tells through the pipe when the part begins and ends (in the other process)."""
    module, _, path = PARTS[self.name].partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, name)

    @functools.wraps(function)
    def told(*args: object, **kwargs: object) -> object:
      self.count += 1
      os.write(self._writer, _MARK.pack(self.count, time.monotonic()))
      try:
        return function(*args, **kwargs)
      finally:
        os.write(self._writer, _MARK.pack(-self.count, time.monotonic()))

    setattr(owner, name, told)

  def begins(self, number: int) -> bool:
    """Returns True when the part begins for the `number`-th time; False if the run ends before."""
    os.close(self._writer)
    return any(mark == number for mark, _ in self._marks())

  def spans(self) -> list[float]:
    """Returns the seconds of each time that the part ran, until the run has ended."""
    os.close(self._writer)
    times = dict(self._marks())
    return [times.get(-n, times[n] + 0.05) - times[n] for n in times if n > 0]

  def _marks(self) -> Iterator[tuple[int, float]]:
    while data := os.read(self._reader, _MARK.size):
      yield _MARK.unpack(data)

  def close(self) -> None:
    """Closes the pipe."""
    for descriptor in (self._reader, self._writer):
      with contextlib.suppress(OSError):
        os.close(descriptor)


class Kills:
  """What all trials need: the uninterrupted run, and when each part runs, and for how long."""

  def __init__(self, base: Path, bindings: list[str]) -> None:
    """Makes the run, and another that measures the parts."""
    self._bindings, self._reference = bindings, forks.whole(base, *bindings)
    parts = [Part(name) for name in PARTS if name != "imports"]
    run = forks.small(base / "measured", *bindings, before=lambda: [p.plant() for p in parts])
    self._spans = {part.name: part.spans() for part in parts}
    run.wait(60)
    for part in parts:
      part.close()
    self._parts = ["imports", *(name for name, spans in self._spans.items() if spans)]

  def trial(self, kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    """Interrupts a run in some parts, lets it end, and compares."""
    wanted = [self._parts[number % len(self._parts)]]
    wanted += rng.sample(self._parts, rng.randrange(MOST))
    outcome, kill, done = Outcome(), signal.Signals[kind], []
    for name in sorted({*wanted}, key=[*PARTS].index):
      interrupt = self._in_imports if name == "imports" else self._in_part
      status, line = interrupt(folder, name, kill, rng)
      if status not in (0, ENDS[kill]):
        outcome.misses.append(f"{name}: status {status}, {line}")
      if status:  # else it was faster than the signal, or it had no such part any more
        done.append(name)
    outcome.done = f"in {', '.join(done)}" if done else "ended before"
    last = forks.small(folder, *self._bindings)
    if (status := last.wait(LIMIT_S)) != 0:
      last.kill()
      outcome.misses.append(f"status {status} at the end: {last.last_line()}")
    else:
      same = kill == signal.SIGKILL
      outcome.misses += comparison.differences(folder, self._reference, same_steps=same)
    return outcome

  def _in_part(
    self, folder: Path, name: str, kill: signal.Signals, rng: random.Random
  ) -> tuple[int | None, str]:
    part, spans = Part(name), self._spans[name]
    run = forks.small(folder, *self._bindings, before=part.plant)
    which = rng.randrange(-(-len(spans) // 2))  # the others may not come again after a restart
    if part.begins(which + 1):
      time.sleep(rng.uniform(0, spans[which]))
      run.send(kill)
    status = run.wait(LIMIT_S)
    part.close()
    run.kill()
    return status, run.last_line()

  def _in_imports(
    self, folder: Path, name: str, kill: signal.Signals, rng: random.Random
  ) -> tuple[int | None, str]:
    del name
    params = [f"--gin_param={binding}" for binding in self._bindings]
    arguments = [f"--gin_file={forks.CONFIG}", f"--model_dir={folder}", *params]
    with folder.with_name(f"{folder.name}.txt").open("a") as log:
      run = subprocess.Popen(
        [sys.executable, "launch.py", *arguments], cwd=forks.REPOSITORY, stdout=log, stderr=log
      )
    time.sleep(rng.uniform(0, IMPORTS_S))
    run.send_signal(kill)
    try:
      status = run.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
      run.kill()
      run.wait()
      return None, "it did not end"
    # Before its first line, Python has no handler yet: the signal itself ends it.
    return 75 if status == -signal.SIGTERM else status, "ended in its imports"
