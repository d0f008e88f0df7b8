"""Injects faults into clusters and checks that no run is lost.

  python -m benchmarks.fault_trials --trials 10

Each trial starts the cluster, injects a fault at a random moment and waits for the end; restarts
are by `--max_restarts`, or else by running the same command again. A run is lost

- if it does not end with status 0 at the last step;
- on two synchronous workers: if a tensor of its last checkpoint is not bit-identical to an
  uninterrupted run's;
- on two workers and two parameter servers, where the order varies: if its optimizer has not counted
  as many updates as steps, or its last evaluation not every example.

The recovery time is from the fault to the first loop beyond the step already reached. Exit status 1
if any run is lost.

  kill_chief, kill_worker   SIGKILL at any moment
  kill_in_write             SIGKILL of the chief while it writes a checkpoint
  sigterm                   SIGTERM to one worker: all must save and end with status 75
  sigstop                   SIGSTOP: a worker that runs but does not answer
  port_taken                another program uses a worker's port: one line, status 1
  other_config              a worker with another config: one line on both, status 2
  never_comes               a worker is not started: one line on the other, status 1
  ps_kill_worker            SIGKILL of a worker beside parameter servers: the run continues
  ps_kill_server            SIGKILL of a parameter server: all restart
  ps_kill_coordinator       SIGKILL of the chief: all restart
  ps_sigterm                SIGTERM to the cluster: it must save and end with status 75
  ps_sigstop                SIGSTOP: a worker that runs but does not answer
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from benchmarks.comparison import different_tensors
from loopwright.run_folder import checkpoints
from loopwright.tools.local_cluster import make_cluster

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "benchmarks/fault_trials.gin"
SERVERS_CONFIG = "benchmarks/fault_trials_ps.gin"
STEPS = 400  # as in both
TEST_EXAMPLES = 359  # of digits
START_TIMEOUT_S = 6
TIMEOUT_S = 300.0


@dataclasses.dataclass
class Trial:
  """The result of one trial; `recovery_s` is None if nothing had to recover."""

  recovery_s: float | None = None
  misses: list[str] = dataclasses.field(default_factory=list)


class Training:
  """`launch.py --local_workers=2` on a folder, observed from outside."""

  def __init__(self, folder: Path, *, servers: int = 0) -> None:
    self.folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    config = SERVERS_CONFIG if servers else CONFIG
    command = [sys.executable, "launch.py", f"--gin_file={config}", f"--model_dir={folder}"]
    with (folder / "log.txt").open("a") as log:
      self.process = subprocess.Popen(
        [*command, "--local_workers=2", f"--local_ps={servers}", "--max_restarts=2"],
        cwd=REPOSITORY, env=environment(), stdout=log, stderr=log,
      )  # fmt: skip

  def pid(self, job: str, index: int) -> int | None:
    task = json.dumps({"type": job, "index": index})
    for pid in children(self.process.pid):
      try:
        if task in Path(f"/proc/{pid}/environ").read_text():
          return pid
      except OSError:
        continue
    record = self.folder / "flight" / f"{index}.jsonl"  # a fork has another process's environment
    if job != "worker" or not record.exists():
      return None
    process = int(json.loads(record.read_text().splitlines()[-1])["process"])
    return process if process in children(self.process.pid) else None

  def wait_until(self, happened: Callable[[], bool], poll_s: float = 0.01) -> None:
    end = time.time() + TIMEOUT_S
    while not happened():
      if self.process.poll() is not None or time.time() > end:
        raise RuntimeError(f"it ended ({self.process.poll()}) or hung before the fault")
      time.sleep(poll_s)

  def is_writing(self) -> bool:
    return (self.folder / "checkpoints" / checkpoints.UNFINISHED).is_dir()

  def end(self) -> int:
    try:
      return self.process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
      self.process.kill()
      return self.process.wait()


def environment() -> dict[str, str]:
  return {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}


def children(pid: int) -> list[int]:
  path = Path(f"/proc/{pid}/task/{pid}/children")
  return [int(child) for child in path.read_text().split()] if path.exists() else []


def records(folder: Path, split: str = "train") -> list[dict]:
  path = folder / "metrics.jsonl"
  lines = path.read_text().split("\n")[:-1] if path.exists() else []
  return [record for record in map(json.loads, lines) if record["split"] == split]


def reached(folder: Path) -> int:
  return max((record["step"] for record in records(folder)), default=0)


# ---- Faults of a cluster that trains ----


def target(training: Training, kind: str, rng: random.Random) -> tuple[int | None, int]:
  number = signal.SIGKILL
  if kind.endswith("sigterm"):
    number = signal.SIGTERM
  elif kind.endswith("sigstop"):
    number = signal.SIGSTOP
  if kind == "ps_sigterm":
    return training.process.pid, number  # it tells the chief
  index = {"kill_chief": 0, "kill_in_write": 0, "kill_worker": 1, "ps_kill_coordinator": 0}.get(
    kind, rng.randrange(2)
  )
  job = {"ps_kill_coordinator": "chief", "ps_kill_server": "ps"}.get(kind, "worker")
  return training.pid(job, index), number


def break_running(folder: Path, kind: str, rng: random.Random) -> Trial:
  servers = 2 if kind.startswith("ps_") else 0
  training = Training(folder, servers=servers)
  when = rng.randrange(20, STEPS - 60)
  training.wait_until(lambda: reached(folder) >= when)
  if kind == "kill_in_write":
    training.wait_until(training.is_writing, poll_s=0)
  pid, number = target(training, kind, rng)
  before, at = reached(folder), time.time()
  if pid is None:
    raise RuntimeError("the process to break is not there")
  os.kill(pid, number)
  status, trial, ended = training.end(), Trial(), at
  if number == signal.SIGTERM:
    if status != 75:
      trial.misses.append(f"status {status} after SIGTERM, not 75")
    ended = time.time()  # it finishes its loop first
    status = Training(folder, servers=servers).end()
  if status:
    trial.misses.append(f"status {status} at the end, see {folder}/log.txt")
  later = [r["wall_time"] for r in records(folder) if r["wall_time"] > ended and r["step"] > before]
  trial.recovery_s = min(later) - at if later else None
  return trial


# ---- Faults of a cluster that starts ----


class Worker:
  """One process of a cluster with addresses chosen by the trial."""

  def __init__(self, folder: Path, spec: dict[str, list[str]], index: int, *params: str) -> None:
    task = {"cluster": spec, "task": {"type": "worker", "index": index}}
    timeout = f"multi_worker_mirrored.start_timeout_s = {START_TIMEOUT_S}"
    command = [sys.executable, "launch.py", f"--gin_file={CONFIG}", f"--model_dir={folder}"]
    self.process = subprocess.Popen(
      [*command, *(f"--gin_param={param}" for param in (timeout, *params))],
      cwd=REPOSITORY, env={**environment(), "TF_CONFIG": json.dumps(task)},
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

  def end(self) -> tuple[int, str]:
    try:
      errors = self.process.communicate(timeout=TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
      self.process.kill()
      errors = self.process.communicate()[1] + "\nhung"
    return self.process.returncode, (errors.strip().splitlines() or [""])[-1]


def break_start(folder: Path, kind: str, rng: random.Random) -> Trial:
  """Starts a cluster that cannot work, reads its last lines, then starts a correct one."""
  spec = make_cluster(workers=2)
  victim, trial = rng.randrange(2), Trial()
  ends: dict[int, tuple[int, str]] = {}
  host, port = spec["worker"][victim].split(":")
  if kind == "port_taken":
    with socket.create_server((host, int(port))):
      workers = [Worker(folder, spec, index) for index in (0, 1)]
      ends = {index: worker.end() for index, worker in enumerate(workers)}
    wanted = {victim: (1, "another process uses the port")}
    wanted[1 - victim] = (1, "did not connect" if victim else "did not answer")
  elif kind == "other_config":
    params = [["run.seed = 7"] if index == victim else [] for index in (0, 1)]
    workers = [Worker(folder, spec, index, *params[index]) for index in (0, 1)]
    ends = {index: worker.end() for index, worker in enumerate(workers)}
    wanted = dict.fromkeys((0, 1), (2, "in its run.seed, which is "))
  else:
    ends = {1 - victim: Worker(folder, spec, 1 - victim).end()}
    wanted = {1 - victim: (1, "did not connect" if victim else "did not answer")}
  for index, (status, words) in wanted.items():
    if ends[index][0] != status or words not in ends[index][1]:
      trial.misses.append(f"worker {index} ended with {ends[index]}, not {status}: ...{words}...")
  if status := Training(folder).end():
    trial.misses.append(f"status {status} of the whole cluster, see {folder}/log.txt")
  return trial


RUNNING = ("kill_chief", "kill_worker", "kill_in_write", "sigterm", "sigstop")
SERVERS = ("ps_kill_worker", "ps_kill_server", "ps_kill_coordinator", "ps_sigterm", "ps_sigstop")
STARTING = ("port_taken", "other_config", "never_comes")


KINDS = RUNNING + STARTING + SERVERS


def run_trial(folder: Path, kind: str, reference: Path, rng: random.Random) -> Trial:
  trial = (break_start if kind in STARTING else break_running)(folder, kind, rng)
  if reached(folder) != STEPS:
    trial.misses.append(f"it ended at step {reached(folder)}, not {STEPS}")
    return trial
  name = f"checkpoints/ckpt-{STEPS}"
  if kind in SERVERS:
    trial.misses += miscounted(folder, tf.train.load_checkpoint(str(folder / name)))
    return trial
  trial.misses += different_tensors(folder / name, reference / name)
  return trial


def miscounted(folder: Path, checkpoint: tf.train.CheckpointReader) -> list[str]:
  """Returns what a run with parameter servers has counted wrongly."""
  found = []
  counters = [n for n in checkpoint.get_variable_to_shape_map() if "iteration" in n.lower()]
  for name in counters:
    if checkpoint.get_tensor(name) != STEPS:
      found.append(f"{name} is {checkpoint.get_tensor(name)}, not {STEPS}")
  if not counters:
    found.append("the checkpoint has no count of updates")
  [*_, last] = records(folder, "eval")
  right = last["accuracy"] * TEST_EXAMPLES
  if abs(right - round(right)) > 1e-3:
    found.append(f"an accuracy of {last['accuracy']} is not of {TEST_EXAMPLES} examples")
  return found


def table(done: dict[str, list[Trial]]) -> str:
  lines = ["| fault | trials | lost | seconds to recover: median (most) |", "|---|---|---|---|"]
  for kind, trials in done.items():
    times = [t.recovery_s for t in trials if t.recovery_s is not None]
    spent = f"{statistics.median(times):.1f} ({max(times):.1f})" if times else ""
    lines.append(f"| {kind} | {len(trials)} | {sum(bool(t.misses) for t in trials)} | {spent} |")
  return "\n".join(lines)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=10, help="of each kind")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  options = parser.parse_args()
  base = Path(tempfile.mkdtemp(prefix="fault_trials_"))
  if status := Training(base / "unbroken").end():
    raise SystemExit(f"the unbroken run ended with {status}; see {base}/unbroken/log.txt")
  done: dict[str, list[Trial]] = {kind: [] for kind in options.kinds}
  for number in range(options.trials):
    for kind in options.kinds:
      rng, began = random.Random(f"{options.seed}/{kind}/{number}"), time.time()
      folder = base / f"{kind}-{number}"
      trial = run_trial(folder, kind, base / "unbroken", rng)
      done[kind].append(trial)
      outcome = "; ".join(trial.misses[:3]) or "nothing lost"
      recovery = f", recovered in {trial.recovery_s:.1f} s" if trial.recovery_s else ""
      print(f"{kind} {number + 1}: {time.time() - began:.0f} s{recovery}: {outcome}", flush=True)
      if not trial.misses:
        shutil.rmtree(folder)
  print(table(done))
  lost = any(trial.misses for trials in done.values() for trial in trials)
  if not lost:
    shutil.rmtree(base)
  return 1 if lost else 0


if __name__ == "__main__":
  sys.exit(main())
