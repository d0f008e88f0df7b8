"""Kills training in every part of a run, restarts it, and compares with an uninterrupted run.

  python -m benchmarks.kill_trials --kills 500 --sigterms 300

Each trial runs the same command until it ends by itself, and interrupts it one to `--most_kills`
times, each time in another part: `PARTS` below, at a random moment of the part. SIGKILL ends it at
once. After SIGTERM it must end within 30 s with status 75, the state saved. In the end every tensor
of the kept checkpoints and of best/ and the export, every value of metrics.jsonl that is not a
time, and the examples of every step in the ledger must be those of the uninterrupted run. Exit
status 1 if any trial differs or hangs.

Most runs are forks of one process that has imported TensorFlow; those that are interrupted in their
imports are real commands.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import comparison, forks

CONFIG = "benchmarks/trials.gin"
CHECKPOINTS = "loopwright.run_folder.checkpoints:CheckpointManager"
PARTS = {
  "imports": "",
  "config": "loopwright.configurables:parse",
  "fit": "loopwright.run_folder.assets:fitted",
  "assets": "loopwright.run_folder.assets:save",
  "proof": "loopwright.strategies.reduction:Reduction.prove",
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
IMPORTS_S = 5.0
LIMIT_S = 30.0
ENDS = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGTERM: (75,)}
_MARK = struct.Struct("<id")  # how often the part began, and when


@dataclasses.dataclass
class Trial:
  """What was done to one run folder, and what was wrong with it."""

  kills: list[str] = dataclasses.field(default_factory=list)
  misses: list[str] = dataclasses.field(default_factory=list)


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

  def begins(self, number: int, run: forks.Fork) -> bool:
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


class Trials:
  """All trials, in folders below `base`."""

  def __init__(self, base: Path, replicas: int) -> None:
    """Makes the uninterrupted run, and measures when each part runs, and for how long."""
    self._base, self._replicas = base, replicas
    self.reference = base / "reference"
    self.spans: dict[str, list[float]] = {}
    whole = self._fork(self.reference)
    if (status := whole.wait(60)) != 0:
      raise SystemExit(f"the uninterrupted run ended with {status}: {whole.last_line()}")

  def parts(self) -> list[str]:
    """Measures the parts; returns those that this run has; imports run in every run."""
    parts = [Part(name) for name in PARTS if name != "imports"]
    run = self._fork(self._base / "measured", *parts)
    self.spans = {part.name: part.spans() for part in parts}
    run.wait(60)
    for part in parts:
      part.close()
    return ["imports", *(name for name, spans in self.spans.items() if spans)]

  def _arguments(self, folder: Path) -> list[str]:
    arguments = [f"--gin_file={CONFIG}", f"--model_dir={folder}"]
    if self._replicas > 1:
      arguments.append(f"--gin_param=auto.cpu_replicas = {self._replicas}")
    return arguments

  def _fork(self, folder: Path, *parts: Part) -> forks.Fork:
    def plant() -> None:
      for part in parts:
        part.plant()

    return forks.Fork(self._arguments(folder), self._log(folder), before=plant)

  def _log(self, folder: Path) -> Path:
    return self._base / f"{folder.name}.txt"

  def run(self, number: int, wanted: list[tuple[str, int]], rng: random.Random) -> Trial:
    """Interrupts a run in each of the wanted (part, signal), lets it end, and compares."""
    trial, folder = Trial(), self._base / f"trial{number}"
    for name, number_of_signal in wanted:
      interrupt = self._in_imports if name == "imports" else self._in_part
      status, line = interrupt(folder, name, number_of_signal, rng)
      if status not in (0, *ENDS[number_of_signal]):
        trial.misses.append(f"{name}: status {status}, {line}")
      if status == 0:  # it was faster than the signal, or it had no such part any more
        continue
      trial.kills.append(f"{signal.Signals(number_of_signal).name} in {name}")
    last = self._fork(folder)
    if (status := last.wait(LIMIT_S)) != 0:
      last.kill()
      trial.misses.append(f"status {status} at the end: {last.last_line()}")
    else:
      same = all(number == signal.SIGKILL for _, number in wanted)
      trial.misses += comparison.differences(folder, self.reference, same_steps=same)
    if not trial.misses:
      shutil.rmtree(folder)
    return trial

  def _in_part(
    self, folder: Path, name: str, number: int, rng: random.Random
  ) -> tuple[int | None, str]:
    part, spans = Part(name), self.spans[name]
    run = self._fork(folder, part)
    which = rng.randrange(-(-len(spans) // 2))  # the others may not come again after a restart
    if part.begins(which + 1, run):
      time.sleep(rng.uniform(0, spans[which]))
      run.send(number)
    status = run.wait(LIMIT_S)
    part.close()
    run.kill()
    return status, run.last_line()

  def _in_imports(
    self, folder: Path, name: str, number: int, rng: random.Random
  ) -> tuple[int | None, str]:
    del name
    command = [sys.executable, "launch.py", *self._arguments(folder)]
    with self._log(folder).open("a") as log:
      run = subprocess.Popen(command, cwd=forks.REPOSITORY, stdout=log, stderr=log)
    time.sleep(rng.uniform(0, IMPORTS_S))
    run.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
      status = run.wait(LIMIT_S)
      # Before its first line, Python has no handler yet: the signal itself ends it.
      return (75 if status == -signal.SIGTERM else status), self._log(folder).read_text()[-200:]
    run.kill()
    run.wait()
    return None, "it did not end"


def plan(parts: list[str], kills: int, sigterms: int, most: int, rng: random.Random):
  """Returns the interruptions of each trial: every part in turn, each trial of one signal."""
  for number, count in ((signal.SIGKILL, kills), (signal.SIGTERM, sigterms)):
    left = [(parts[i % len(parts)], int(number)) for i in range(count)]
    rng.shuffle(left)
    while left:
      size = rng.randint(1, most)
      yield sorted(left[:size], key=lambda one: list(PARTS).index(one[0]))
      left = left[size:]


def processes_of(folder: Path) -> list[str]:
  """Returns the processes that work in a folder."""
  found = []
  for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      if str(folder) in path.read_text():
        found.append(path.parent.name)
  return found


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--kills", type=int, default=20, help="SIGKILLs in all")
  parser.add_argument("--sigterms", type=int, default=10, help="SIGTERMs in all")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--replicas", type=int, default=2)
  parser.add_argument("--most_kills", type=int, default=3, help="of one trial")
  parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these")
  options = parser.parse_args()
  forks.warm_up()
  base = Path(tempfile.mkdtemp(prefix="kill_trials_"))
  trials, rng = Trials(base, options.replicas), random.Random(options.seed)
  parts = [name for name in trials.parts() if name in (options.parts or PARTS)]
  planned = list(plan(parts, options.kills, options.sigterms, options.most_kills, rng))
  done, missed = collections.Counter[str](), 0
  for number, wanted in enumerate(planned):
    began = time.monotonic()
    trial = trials.run(number, wanted, rng)
    done.update(trial.kills)
    missed += bool(trial.misses)
    outcome = "identical" if not trial.misses else f"MISS: {'; '.join(trial.misses[:5])}"
    seconds, kills = time.monotonic() - began, ", ".join(trial.kills) or "ended before"
    print(f"trial {number + 1}/{len(planned)}  {kills}; {seconds:.1f} s: {outcome}", flush=True)
  return summarize(done, len(planned), missed, base)


def summarize(done: collections.Counter[str], trials: int, missed: int, base: Path) -> int:
  for name in PARTS:
    counts = [done[f"{kind} in {name}"] for kind in ("SIGKILL", "SIGTERM")]
    print(f"| {name} | {counts[0]} | {counts[1]} |")
  left = processes_of(base)
  outcome = f"{missed} missed, see {base}" if missed else "all identical to the uninterrupted run"
  print(f"{trials} trials, {sum(done.values())} kills, {len(left)} processes left: {outcome}")
  if not missed:
    shutil.rmtree(base)
  return 1 if missed or left else 0


if __name__ == "__main__":
  sys.exit(main())
