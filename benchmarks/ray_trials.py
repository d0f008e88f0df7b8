"""Breaks deploy/ray_train.py under a real Ray cluster on this machine; nothing may be lost.

  uv run --with "ray[train]" python -m benchmarks.ray_trials --trials 4

Ray has a head, where the driver runs, and three nodes of one CPU each, all as processes of this
machine. Two workers train on two of the nodes and are broken at a random step. The command must
end with status 0 by itself, and leave no process. Every tensor of the last checkpoint and every
value of metrics.jsonl that is not a time must be bit-identical to an uninterrupted run's. Exit
status 1 if any trial fails.

  kill_node    SIGKILL of a node: Ray restarts all workers, one of them on another node
  kill_launch  SIGKILL of the process that trains
  kill_worker  SIGKILL of the Ray worker that started it
  elastic      --workers=2:3 loses a node, goes on with two workers, and grows on a new node; losses
               and weights are those of an uninterrupted run of two, to 1e-5, and the ledger proves
               that each example was read once
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import slurm_elastic
from benchmarks.fault_trials import reached
from benchmarks.slurm_trials import (
  CONFIG,
  PARAMS,
  STEPS,
  all_processes,
  differences,
  longest_pause,
  parent,
  wait_until,
)

REPOSITORY = Path(__file__).resolve().parent.parent
KINDS = ("kill_node", "kill_launch", "kill_worker", "elastic")
PACED = "--gin_param=Paced.wait_s = "
FLAGS = ["--workers=2", f"--gin_file={CONFIG}", *(f"--gin_param={param}" for param in PARAMS)]
FLAGS += [f"{PACED}0.3"]
ELASTIC = f"--gin_file={slurm_elastic.CONFIG}"
NODES, TIMEOUT_S, MEMORY = 3, 600.0, 100 * 2**20


@dataclasses.dataclass
class Trial:
  """What was wrong, and the longest time between two training loops of the result."""

  misses: list[str] = dataclasses.field(default_factory=list)
  pause_s: float = 0.0


@contextlib.contextmanager
def ray_cluster() -> Iterator[Any]:
  """Starts a head without CPUs and nodes with one each."""
  from ray.cluster_utils import Cluster

  head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
  cluster = Cluster(initialize_head=True, head_node_args=head)
  try:
    for _ in range(NODES):
      cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    yield cluster
  finally:
    cluster.shutdown()


class Training:
  """deploy/ray_train.py on a folder, observed from outside."""

  def __init__(self, cluster: Any, folder: Path, *flags: str) -> None:
    folder.mkdir(parents=True)
    self.folder, self._log = folder, folder / "log.txt"
    flags += ("--max_restarts=2", f"--model_dir={folder}/m")
    own = {"RAY_ADDRESS": cluster.address, "CUDA_VISIBLE_DEVICES": "-1"}
    with self._log.open("w") as log:
      self.process = subprocess.Popen(
        [sys.executable, "deploy/ray_train.py", *flags],
        cwd=REPOSITORY, env={**os.environ, **own}, stdout=log, stderr=log,
      )  # fmt: skip

  def end(self) -> int:
    try:
      return self.process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
      self.process.kill()
      return self.process.wait()

  def tasks(self) -> dict[int, int]:
    """Returns the worker's index -> the process that trains."""
    found = {}
    for pid, words, environment in all_processes():
      script = len(words) > 1 and words[1].endswith("/launch.py")
      if script and f"--model_dir={self.folder}/m" in words:
        task = json.loads(environment["TF_CONFIG"])["task"]
        found[task["index"]] = min(pid, found.get(task["index"], pid))
    return found

  def break_it(self, cluster: Any, kind: str, index: int) -> None:
    task = self.tasks()[index]
    worker = parent(task)
    if kind == "kill_node":
      raylets = {process.pid: node for node in cluster.worker_nodes for process in raylets_of(node)}
      above = next(pid for pid in ancestors(worker) if pid in raylets)
      cluster.remove_node(raylets[above], allow_graceful=False)
    else:
      os.kill(task if kind == "kill_launch" else worker, signal.SIGKILL)


def ancestors(pid: int) -> Iterator[int]:
  """Yields the parent of a process, its parent, and so on."""
  while pid > 1:
    pid = parent(pid)
    yield pid


def raylets_of(node: Any) -> list[subprocess.Popen[bytes]]:
  return [info.process for info in node.all_processes["raylet"]]


def run_trial(cluster: Any, folder: Path, kind: str, reference: Path, rng: random.Random) -> Trial:
  training = Training(cluster, folder, *FLAGS)
  when = rng.randrange(20, STEPS - 60)
  wait_until(lambda: reached(folder / "m") >= when)
  training.break_it(cluster, kind, rng.randrange(2))
  status, trial = training.end(), Trial()
  if status:
    trial.misses.append(f"status {status}, see {folder}/log.txt")
  if left := training.tasks():
    trial.misses.append(f"processes {left} are left over")
  trial.misses += differences(folder / "m", reference / "m")
  trial.pause_s = longest_pause(folder / "m")
  return trial


def run_elastic(cluster: Any, folder: Path, reference: Path, rng: random.Random) -> Trial:
  training = Training(cluster, folder, "--workers=2:3", "--look_s=5", ELASTIC, f"{PACED}2")
  run = folder / "m"

  def wait_for(workers: int, steps: int) -> None:
    wait_until(lambda: len(training.tasks()) == workers)
    step = reached(run) + steps
    wait_until(lambda: reached(run) >= step)

  wait_for(3, rng.randrange(50, 120))
  training.break_it(cluster, "kill_node", rng.randrange(3))
  wait_for(2, rng.randrange(20, 100))
  cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
  status, trial = training.end(), Trial()
  if status:
    trial.misses.append(f"status {status}, see {folder}/log.txt")
  if (found := slurm_elastic.sizes(run)) != [3, 2, 3]:
    trial.misses.append(f"it ran on {found} workers")
  repeated, different = slurm_elastic.check(run, reference / "m")
  print(f"{repeated} steps repeated")
  trial.misses += different
  trial.pause_s = longest_pause(run)
  return trial


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=4)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  options = parser.parse_args()
  base = Path(tempfile.mkdtemp(prefix="ray_trials_"))
  with ray_cluster() as cluster:
    for varies in sorted({kind == "elastic" for kind in options.kinds}):
      name, flags = ("elastic", ["--workers=2", ELASTIC]) if varies else ("uninterrupted", FLAGS)
      if status := Training(cluster, base / name, *flags).end():
        raise SystemExit(f"the uninterrupted run ended with {status}; see {base}")
  lost = False
  for number in range(options.trials):
    kind = options.kinds[number % len(options.kinds)]
    rng, folder = random.Random(f"{options.seed}/{kind}/{number}"), base / f"{kind}-{number}"
    with ray_cluster() as cluster:
      if kind == "elastic":
        trial = run_elastic(cluster, folder, base / "elastic", rng)
      else:
        trial = run_trial(cluster, folder, kind, base / "uninterrupted", rng)
    outcome = "; ".join(trial.misses[:4]) or "nothing lost"
    print(f"{kind} {number}: {trial.pause_s:.0f} s without a loop: {outcome}", flush=True)
    lost |= bool(trial.misses)
  if not lost:
    shutil.rmtree(base)
  return 1 if lost else 0


if __name__ == "__main__":
  sys.exit(main())
