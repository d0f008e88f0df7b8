"""The time that a restart takes after the loss of a worker, by its parts.

    python -m benchmarks.recovery                                  # 15 minutes
    python -m benchmarks.recovery --workers 2 --megabytes 1 --kills 5
    python -m benchmarks.recovery --kinds forks new    # in turns

A cluster of N workers trains a network with so many megabytes of weights; now and then SIGKILL ends
worker 1, and all restart from the newest checkpoint. The parts are those of worker 0's flight
record (docs/goodput.md), medians over the restarts, and the most; "until seen" is from the signal
to the start of the new process, and "all" from the signal to the end of the first loop. The new
processes are forks of one that has imported everything, as in a local cluster that may restart, or
import by themselves. "its steps" is how long the steps of that loop take later on, so that "all"
without it is what the restart costs. "cpu" is the processor time of worker 0 until its first loop
has ended, to 0.1 s; on a busy machine it tells more than the seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from loopwright.run_folder import legs

REPOSITORY = Path(__file__).parents[1]
KINDS = ("forks", "new")
STARTING = ("imports", "setup", "connecting", "restoring", "tracing")
PARTS = ("until seen", *STARTING, "its steps", "all", "cpu")
_BYTES_A_UNIT = 4 * (64 + 1 + 10)
"""Of one hidden layer between 64 pixels and 10 classes."""
PARAMS = (
  "run.strategy = @multi_worker_mirrored", "run.train_steps = 1000000", "run.steps_per_loop = 5",
  "run.checkpoint_every_steps = 10", "run.ledger = False",
)  # fmt: skip
_TIMEOUT_S = 300.0
_RUN = """
import sys
from loopwright.host.children import PROGRAM
from loopwright.tools.local_cluster import run_local
folder, workers, restarts, kind, *params = sys.argv[1:]
sys.exit(run_local(command=[*PROGRAM, "--mode=train", *params], model_dir=folder,
                   workers=int(workers), max_restarts=int(restarts), imports=kind == "forks"))
"""

Seconds = dict[str, float]


def main() -> None:
  """Measures each size and prints the table."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4])
  parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 10, 100])
  parser.add_argument("--kills", type=int, default=3, help="restarts of each run")
  parser.add_argument("--rounds", type=int, default=1, help="runs of each size")
  parser.add_argument("--config", help="this config, not the network of so many megabytes")
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["forks"])
  asked = parser.parse_args()
  print(f"| workers | processes | weights | {' | '.join(f'{each}, s' for each in PARTS)} |")
  print(f"|{'---|' * (3 + len(PARTS))}")
  for workers in asked.workers:
    for megabytes in asked.megabytes[: 1 if asked.config else None]:
      found: dict[str, list[Seconds]] = {kind: [] for kind in asked.kinds}
      for number in range(asked.rounds):
        for kind in asked.kinds[:: 1 if number % 2 else -1]:
          params = [f"--gin_file={asked.config}"] if asked.config else sized(megabytes)
          found[kind] += restarts(kind, workers, params, kills=asked.kills)
      for kind, each in found.items():
        what = asked.config or f"{megabytes:g} MB"
        print(f"| {workers} | {kind} | {what} | {' | '.join(medians(each))} |", flush=True)


def sized(megabytes: float) -> list[str]:
  """Returns what makes a run whose trainable weights take so many megabytes."""
  units = round(megabytes * 1e6 / _BYTES_A_UNIT)
  return ["--gin_file=benchmarks/elastic_trials.gin", f"--gin_param=cnn.units = {units}"]


def medians(found: Sequence[Seconds]) -> list[str]:
  """Returns each part's median and, in brackets, the most."""
  columns = [[each.get(part, 0.0) for each in found] for part in PARTS]
  return [f"{statistics.median(column):.2f} ({max(column):.2f})" for column in columns]


def restarts(kind: str, workers: int, params: Sequence[str], *, kills: int) -> list[Seconds]:
  """Trains, kills worker 1 so often; returns part -> seconds of each restart.

  Raises:
    RuntimeError: the run ended, or made no progress.
  """
  draws = random.Random(workers)
  with tempfile.TemporaryDirectory() as folder:
    params = [*params, *(f"--gin_param={each}" for each in PARAMS), f"--model_dir={folder}"]
    command = [sys.executable, "-c", _RUN, folder, str(workers), str(kills), kind, *params]
    with open(f"{folder}.log", "w") as log:
      process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=log,
        stderr=log,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
      )
    try:
      killed_at, cpu_s = [], []
      for number in range(kills):
        cpu_s.append(wait_for_loops(folder, process, start=number))
        time.sleep(draws.uniform(0, 0.5))
        killed_at.append(time.time())
        os.kill(legs.last(folder)[1].process, signal.SIGKILL)
      cpu_s.append(wait_for_loops(folder, process, start=kills))
      return [
        {**parts(folder, number + 1, at), "cpu": cpu_s[number + 1]}
        for number, at in enumerate(killed_at)
      ]
    finally:
      process.send_signal(signal.SIGTERM)
      process.wait()
      os.remove(f"{folder}.log")


def wait_for_loops(folder: str, process: subprocess.Popen[bytes], *, start: int) -> float:
  """Waits until two saves in this start of the run; returns the processor time up to a loop."""
  end, cpu_s = time.monotonic() + _TIMEOUT_S, 0.0
  while True:
    first = legs.starts(legs.read(folder).get(0, []))
    if len(first) > start and first[start][0].traced and not cpu_s:
      with contextlib.suppress(OSError):
        ticks = Path(f"/proc/{first[start][0].process}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    if len(first) > start and len(first[start]) > 2:
      return cpu_s
    if process.poll() is not None or time.monotonic() > end:
      raise RuntimeError(f"the run ended or stands still: {Path(f'{folder}.log').read_text()}")
    time.sleep(0.05)


def parts(folder: str, start: int, killed_at: float) -> Seconds:
  """Returns part -> seconds of worker 0's start of this number, after a kill at that time."""
  first, *later = legs.starts(legs.read(folder)[0])[start]
  found = {part: first.parts.get(part, 0.0) for part in STARTING}
  found["until seen"] = first.began - killed_at
  took_s = sum(leg.parts.get("training", 0.0) for leg in later)
  usual_s = took_s / max(1, sum((leg.step or 0) - (leg.from_step or 0) for leg in later))
  return {**found, "its steps": first.traced * usual_s, "all": sum(found.values())}


if __name__ == "__main__":
  main()
