"""Injects faults into clusters and checks that no run is lost.

  python -m benchmarks.trials cluster --trials 10

Each trial starts the cluster, injects a fault at a random moment and waits for the end; restarts
are by `--max_restarts`, or else by running the same command again. A run is lost

- if it does not end with status 0 at the last step;
- on two synchronous workers: if a tensor of its last checkpoint is not bit-identical to an
  uninterrupted run's;
- on two workers and two parameter servers, where the order varies: if its optimizer has not counted
  as many updates as steps, or its last evaluation not every example.

The recovery time is from the fault to the first loop beyond the step already reached.

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
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from benchmarks import forks
from benchmarks.comparison import different_tensors, reached, records
from benchmarks.trials import Outcome, Run
from loopwright.run_folder import checkpoints
from loopwright.tools.local_cluster import make_cluster

CONFIG = "benchmarks/fault_trials.gin"
SERVERS_CONFIG = "benchmarks/fault_trials_ps.gin"
STEPS = 400  # as in both
TEST_EXAMPLES = 359  # of digits
START_TIMEOUT_S = 6
TIMEOUT_S = 300.0
RUNNING = ("kill_chief", "kill_worker", "kill_in_write", "sigterm", "sigstop")
SERVERS = ("ps_kill_worker", "ps_kill_server", "ps_kill_coordinator", "ps_sigterm", "ps_sigstop")
STARTING = ("port_taken", "other_config", "never_comes")
KINDS = RUNNING + STARTING + SERVERS
TARGETS = {
  "kill_chief": "worker-0", "kill_in_write": "worker-0", "kill_worker": "worker-1",
  "ps_kill_coordinator": "chief", "ps_kill_server": "ps-0",
}  # fmt: skip


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Makes the uninterrupted run of two workers; returns what runs a trial."""
  del options
  forks.warm_up()
  reference = forks.whole(base, config=CONFIG, flags=["--local_workers=2"])

  def trial(kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    outcome = (break_start if kind in STARTING else break_running)(folder, kind, rng)
    if reached(folder) != STEPS:
      outcome.misses.append(f"it ended at step {reached(folder)}, not {STEPS}")
      return outcome
    name = f"checkpoints/ckpt-{STEPS}"
    outcome.misses += (
      miscounted(folder, tf.train.load_checkpoint(str(folder / name)))
      if kind in SERVERS
      else different_tensors(folder / name, reference / name)
    )
    return outcome

  return trial


def cluster(folder: Path, *, servers: int = 0) -> forks.Fork:
  """Starts two workers on a folder, and servers; the ids of the processes are beside it."""
  flags = ["--local_workers=2", f"--local_ps={servers}", "--max_restarts=2"]
  pids = folder.with_name(f"{folder.name}-pids")
  config = SERVERS_CONFIG if servers else CONFIG
  return forks.small(folder, config=config, flags=flags, before=lambda: forks.tasks_in(pids))


def ended(run: forks.Fork) -> list[str]:
  """Returns what is wrong with the end of a run."""
  status = run.wait(TIMEOUT_S)
  run.kill()
  return [f"status {status} at the end: {run.last_line()}"] if status != 0 else []


# ---- Faults of a cluster that trains ----


def break_running(folder: Path, kind: str, rng: random.Random) -> Outcome:
  """Breaks one process at a random step, and waits for the end."""
  servers = 2 if kind in SERVERS else 0
  run, when = cluster(folder, servers=servers), rng.randrange(20, STEPS - 60)
  wait_until(run, lambda: reached(folder) >= when)
  if kind == "kill_in_write":
    wait_until(run, (folder / "checkpoints" / checkpoints.UNFINISHED).is_dir, poll_s=0)
  name = TARGETS.get(kind, f"worker-{rng.randrange(2)}")
  pid = int((folder.with_name(f"{folder.name}-pids") / name).read_text())
  number = signal.SIGSTOP if kind.endswith("sigstop") else signal.SIGKILL
  number = signal.SIGTERM if kind.endswith("sigterm") else number
  before, at, outcome = reached(folder), time.time(), Outcome()
  with contextlib.suppress(ProcessLookupError):
    os.kill(run.pid if kind == "ps_sigterm" else pid, number)  # it tells the chief
  going_on = at
  if number == signal.SIGTERM:
    if (status := run.wait(TIMEOUT_S)) != 75:
      outcome.misses.append(f"status {status} after SIGTERM, not 75")
    run.kill()
    going_on = time.time()  # it finishes its loop first
    run = cluster(folder, servers=servers)
  outcome.misses += ended(run)
  lines = records(folder, "train", times=True)
  later = [r["wall_time"] for r in lines if r["wall_time"] > going_on and r["step"] > before]
  outcome.times += [(kind, min(later) - at)] if later else []
  return outcome


def wait_until(run: forks.Fork, happened: Callable[[], bool], poll_s: float = 0.01) -> None:
  """Waits; raises RuntimeError if the run ends before, or nothing happens."""
  end = time.monotonic() + TIMEOUT_S
  while not happened():
    if run.poll() is not None or time.monotonic() > end:
      raise RuntimeError(f"it ended ({run.poll()}) or hung before the fault: {run.last_line()}")
    time.sleep(poll_s)


# ---- Faults of a cluster that starts ----


def break_start(folder: Path, kind: str, rng: random.Random) -> Outcome:
  """Starts a cluster that cannot work, reads its last lines, then starts a correct one."""
  spec = make_cluster(workers=2)
  victim, outcome = rng.randrange(2), Outcome()
  host, port = spec["worker"][victim].split(":")
  wanted, params = {1 - victim: (1, "did not connect")}, {}
  with contextlib.ExitStack() as taken:
    if kind == "port_taken":
      taken.enter_context(socket.create_server((host, int(port))))
      wanted[victim] = (1, "another process uses the port")
    elif kind == "other_config":
      wanted, params = dict.fromkeys((0, 1), (2, "in its run.seed, ")), {victim: "7"}
    workers = {index: worker(folder, spec, index, params.get(index, "0")) for index in wanted}
    ends = {index: (run.wait(TIMEOUT_S), run.last_line()) for index, run in workers.items()}
  for index, (status, words) in wanted.items():
    workers[index].kill()
    if ends[index][0] != status or words not in ends[index][1]:
      outcome.misses.append(f"worker {index} ended with {ends[index]}, not {status}: ...{words}...")
  outcome.misses += ended(cluster(folder))
  return outcome


def worker(folder: Path, spec: dict[str, list[str]], index: int, seed: str) -> forks.Fork:
  """Starts one process of a cluster with addresses chosen by the trial."""
  task = {"cluster": spec, "task": {"type": "worker", "index": index}}
  timeout = f"multi_worker_mirrored.start_timeout_s = {START_TIMEOUT_S}"
  params = [f"--gin_param={each}" for each in (timeout, f"run.seed = {seed}")]
  return forks.Fork(
    [f"--gin_file={CONFIG}", f"--model_dir={folder}", *params],
    folder.with_name(f"{folder.name}-worker-{index}.txt"),
    environment={"TF_CONFIG": json.dumps(task)},
  )


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
