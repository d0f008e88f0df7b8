"""Takes a node from a job of deploy/slurm.sh and gives it back; each job must be the same run.

  python -m benchmarks.slurm_elastic --trials 3   (as root; needs slurm-wlm, munge and iproute2)

On the Slurm of slurm_trials.py a job of two to three nodes begins on three, loses one at a random
step, and gets it back at another; nobody tells the job. It must end COMPLETED after starts on 3, 2
and 3 workers, without a file of the secret or the nodes left over. Its ledger must prove that each
example was read once, and losses and weights must be those of an uninterrupted job of two nodes,
to 1e-5. Exit status 1 if any trial fails.

  power   the node loses power, with its slurmd and all processes, and is switched on again
  hang    SIGSTOP of its slurmd, while its worker runs on; later it is switched off and on
  drain   scontrol update State=DRAIN, later State=RESUME

A requeued job waits two minutes by default. The trials let it start at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import elastic_trials
from benchmarks.fault_trials import reached
from benchmarks.slurm_trials import Job, Slurm, all_processes, available, longest_pause
from loopwright.tools.ledger import __main__ as ledger

CONFIG = "benchmarks/slurm_elastic.gin"
KINDS = ("power", "hang", "drain")


def nodes(least: int, most: int) -> list[str]:
  """Returns the options of a job on so many nodes, which looks at them every second."""
  own = f"LOOPWRIGHT_WORKERS={least}:{most},LOOK_S=1"
  return [f"--nodes={least}-{most}", f"--export=ALL,{own}"]


def take(slurm: Slurm, kind: str, node: int) -> None:
  if kind == "power":
    slurm.power_off(node)
  elif kind == "hang":
    stop_slurmd(slurm, node)
  else:
    slurm.command("scontrol", "update", f"NodeName=n{node}", "State=DRAIN", "Reason=trial")


def give_back(slurm: Slurm, kind: str, node: int) -> None:
  if kind == "hang":
    slurm.power_off(node)
  if kind != "drain":
    slurm.power_on(node)
  else:
    slurm.command("scontrol", "update", f"NodeName=n{node}", "State=RESUME")


def stop_slurmd(slurm: Slurm, node: int) -> None:
  for pid, words, environment in all_processes():
    ours = environment.get("SLURM_CONF") == f"{slurm.folder}/slurm.conf"
    if ours and words[:4] == ["slurmd", "-D", "-N", f"n{node}"]:
      os.kill(pid, signal.SIGSTOP)


def wait_for(job: Job, *, workers: int, steps: int) -> None:
  """Waits until so many workers have trained for some more steps."""
  job.wait(lambda: len(job.processes("python")) == workers)
  step = reached(job.folder / "m") + steps
  job.wait(lambda: reached(job.folder / "m") >= step)
  if job.ended():
    raise RuntimeError(f"the job ended too early; see {job.folder}/log.txt")


def sizes(folder: Path) -> list[int]:
  """Returns the numbers of workers that have saved, in turns."""
  lines = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
  return [size for size, _ in itertools.groupby(int(line["in_use"]["workers"]) for line in lines)]


def run_trial(slurm: Slurm, folder: Path, kind: str, rng: random.Random) -> tuple[Job, list[str]]:
  """Returns the job, which has ended, and what was wrong."""
  slow = 2.0 if kind == "hang" else 0.5  # Slurm misses it after SlurmdTimeout, 20 s here
  job = slurm.submit(folder, f"Paced.wait_s = {slow}", config=CONFIG, options=nodes(2, 3))
  wait_for(job, workers=3, steps=rng.randrange(50, 120))
  node = rng.choice(job.nodes())
  take(slurm, kind, node)
  wait_for(job, workers=2, steps=rng.randrange(20, 60))
  misses = [f"it trained on n{node}"] if node in job.nodes() else []
  give_back(slurm, kind, node)
  if (state := job.wait()) != "COMPLETED":
    return job, [*misses, f"it ended {state}, see {folder}/log.txt"]
  if (found := sizes(folder / "m")) != [3, 2, 3]:
    misses.append(f"it ran on {found} workers")
  left = [*job.secrets(), *job.records()]
  return job, misses + [f"{path} is left over" for path in left]


def check(folder: Path, reference: Path) -> tuple[int, list[str]]:
  """Returns how many steps were repeated, and what differs from the uninterrupted job."""
  said = io.StringIO()
  with contextlib.redirect_stdout(said):
    proved = ledger.main([str(folder)]) == 0
  misses = [] if proved else [f"the ledger: {said.getvalue().strip()}"]
  repeated = int((re.findall(r"(\d+) steps rerun", said.getvalue()) or [0])[0])
  return repeated, misses + elastic_trials.different(folder, reference)


def uninterrupted(slurm: Slurm, folder: Path) -> Path:
  job = slurm.submit(folder, config=CONFIG)
  if (state := job.wait()) != "COMPLETED":
    raise SystemExit(f"the uninterrupted job ended {state}; see {folder}/log.txt")
  return folder / "m"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=3)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  options = parser.parse_args()
  if reason := available():
    raise SystemExit(f"cannot start Slurm: {reason}")
  base, lost = Path(tempfile.mkdtemp(prefix="slurm_elastic_")), False
  with Slurm(base / "slurm") as slurm:
    reference = uninterrupted(slurm, base / "uninterrupted")
    for number in range(options.trials):
      kind = options.kinds[number % len(options.kinds)]
      rng, began = random.Random(f"{options.seed}/{kind}/{number}"), time.monotonic()
      job, misses = run_trial(slurm, base / f"{kind}-{number}", kind, rng)
      repeated, different = check(job.folder / "m", reference)
      outcome = "; ".join([*misses, *different][:4]) or "the same run"
      spent = f"{time.monotonic() - began:.0f} s, {longest_pause(job.folder / 'm'):.0f} s of them"
      print(
        f"{kind} {number}: {spent} without a loop, {repeated} steps repeated: {outcome}", flush=True
      )
      lost |= bool(misses or different)
  return int(lost)


if __name__ == "__main__":
  sys.exit(main())
