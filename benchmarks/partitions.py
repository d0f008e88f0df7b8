"""Cuts, delays and loses packets between workers; each failure must be named, nothing may be lost.

  python -m benchmarks.partitions --trials 50     (as root; needs iproute2 and /dev/net/tun)

Two or three workers train in network namespaces of their own (benchmarks/network.py), with the
run folder on the disk that they share. At a random step the network breaks:

  cut        all packets from and to one worker are lost, without end
  one_way    all packets from one worker are lost, without end
  at_start   as `cut`, before the workers have met
  early      as `cut`, at any time from the start to the first steps
  pause      as `cut`, for less than half the heartbeat's limit: the run goes on
  delay      for up to `WINDOW_S`, each packet between two workers takes 5 to 100 ms longer: the run
             goes on
  loss       for as long, 1 to 5 % of the packets between two workers are lost: the run goes on
  much_loss  for as long, 20 to 60 % are lost: the run goes on, or all end with status 1 and name a
             lost worker

After a cut every process must end with status 1 within `LIMIT_S`. The line of each worker that is
not cut off must name the one that is, that of the latter another one. Then the network heals, and
the same command must end with status 0 and every tensor of the last checkpoint bit-identical to an
uninterrupted run's. Exit status 1 if any trial fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import launch
import loopwright.running  # noqa: F401  (with TensorFlow, once; each worker is a fork)
from benchmarks.comparison import different_tensors
from benchmarks.fault_trials import CONFIG, reached
from benchmarks.network import Network, available, enter
from loopwright.commands import process
from loopwright.tools.local_cluster import free_ports

STEPS, HEARTBEAT_S, START_S = 400, 10.0, 30.0
LIMIT_S = 2 * HEARTBEAT_S + 15.0
WINDOW_S, EARLY_S = 20.0, 6.0
HANG_S = 180.0
KINDS = ("cut", "one_way", "at_start", "early", "pause", "delay", "loss", "much_loss")
ENDS = ("cut", "one_way", "at_start", "early")
PARAMS = (
  f"run.train_steps = {STEPS}",
  f"multi_worker_mirrored.heartbeat_timeout_s = {HEARTBEAT_S}",
  f"multi_worker_mirrored.start_timeout_s = {START_S}",
)


@dataclasses.dataclass
class Trial:
  """What was wrong, the seconds from the cut to the last end, and what was done."""

  misses: list[str] = dataclasses.field(default_factory=list)
  ended_s: float | None = None
  what: str = ""


class Workers:
  """The processes of one start, forked from this one."""

  def __init__(self, network: Network, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    self.addresses = [f"{host}:{port}" for host in network.hosts]
    self._logs = [folder / f"log-{index}" for index in range(len(network.hosts))]
    self._begins = [log.stat().st_size if log.exists() else 0 for log in self._logs]
    self.status: dict[int, int] = {}
    self._pids = {self._fork(network, folder, i): i for i in range(len(network.hosts))}

  def _fork(self, network: Network, folder: Path, index: int) -> int:
    sys.stdout.flush()
    if pid := os.fork():
      return pid
    log = os.open(self._logs[index], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": self.addresses}, "task": task})
    enter(network.name(index))
    signal.signal(signal.SIGTERM, process.end_at_once)
    params = [f"--gin_param={param}" for param in PARAMS]
    status = launch.main(["launch.py", f"--gin_file={CONFIG}", f"--model_dir={folder}/m", *params])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

  def running(self) -> bool:
    while len(self.status) < len(self._pids):
      pid, status = os.waitpid(-1, os.WNOHANG)
      if not pid:
        return True
      self.status[self._pids[pid]] = os.waitstatus_to_exitcode(status)
    return False

  def wait(self, happened: Callable[[], bool] = lambda: False, timeout_s: float = HANG_S) -> bool:
    """Waits until it happened, and returns whether it has before all ended or time was over."""
    end = time.monotonic() + timeout_s
    while self.running() and time.monotonic() < end:
      if happened():
        return True
      time.sleep(0.02)
    return False

  def kill(self) -> list[int]:
    """Kills those that still run; returns their indices."""
    left = [index for index in self._pids.values() if index not in self.status]
    for pid, index in self._pids.items():
      if index in left:
        os.kill(pid, signal.SIGKILL)
    self.wait()
    return left

  def last_line(self, index: int) -> str:
    lines = self._logs[index].read_bytes()[self._begins[index] :].decode(errors="replace")
    return (lines.strip().splitlines() or [""])[-1]


def break_network(
  network: Network, workers: Workers, folder: Path, kind: str, rng: random.Random
) -> tuple[int, str]:
  """Waits for the moment and breaks the network; returns the worker that is cut off."""
  count = len(network.hosts)
  victim = rng.randrange(count)
  other = rng.choice([index for index in range(count) if index != victim])
  if kind == "at_start":
    network.cut(victim)
    return victim, ""
  if kind == "early":
    seconds = rng.uniform(0.0, EARLY_S)
    workers.wait(timeout_s=seconds)
    network.cut(victim)
    return victim, f"after {seconds:.1f} s"
  when = rng.randrange(20, STEPS - 100)
  if not workers.wait(lambda: reached(folder / "m") >= when):
    raise RuntimeError(f"it ended ({workers.status}) or hung before the fault; see {folder}")
  what = f"at step {reached(folder / 'm')}"
  if kind == "cut":
    network.cut(victim)
  elif kind == "one_way":
    for index in range(count):
      network.one_way(victim, index, loss=1.0)
  elif kind == "pause":
    network.cut(victim)
    seconds = rng.uniform(0.2, 0.45 * HEARTBEAT_S)
    workers.wait(timeout_s=seconds)
    network.heal()
    what += f", {seconds:.1f} s"
  else:
    low, high = {"delay": (0.005, 0.1), "loss": (0.01, 0.05), "much_loss": (0.2, 0.6)}[kind]
    value = rng.uniform(low, high)
    network.link(victim, other, **{"delay_s" if kind == "delay" else "loss": value})
    what += f", {value:.3f}"
  return victim, what


def wrong_blame(workers: Workers, kind: str, victim: int) -> list[str]:
  """Returns the lines that do not name who is cut off; for much_loss, anyone else."""
  wrong = []
  for index, address in enumerate(workers.addresses):
    line = workers.last_line(index)
    blamed = {int(number) for number in re.findall(r"worker-(\d+) \(", line)}
    right = blamed and index not in blamed
    if kind in ENDS and index != victim:
      right = victim in blamed
    if workers.status.get(index) != 1 or not line.startswith("failed: ") or not right:
      wrong.append(f"worker {index} ({address}) ends with {workers.status.get(index)}: {line}")
  return wrong


def run_trial(folder: Path, kind: str, reference: Path, count: int, rng: random.Random) -> Trial:
  trial = Trial()
  with Network(count, seed=rng.randrange(2**32)) as network:
    workers = Workers(network, folder)
    victim, trial.what = break_network(network, workers, folder, kind, rng)
    at = time.monotonic()
    starting = kind in ("at_start", "early")
    limit = START_S + LIMIT_S if starting else LIMIT_S if kind in ENDS else HANG_S
    if kind not in ENDS:
      workers.wait(timeout_s=WINDOW_S)
      network.heal()
    workers.wait(timeout_s=limit)
    trial.ended_s = time.monotonic() - at
    if hung := workers.kill():
      trial.misses.append(f"workers {hung} did not end within {limit:g} s")
    succeeded = set(workers.status.values()) == {0}
    if kind in ENDS or (kind == "much_loss" and not succeeded):
      trial.misses += wrong_blame(workers, kind, victim)
    elif not succeeded:
      trial.misses.append(f"status {workers.status}: {workers.last_line(victim)}")
    network.heal()
    if not succeeded:
      again = Workers(network, folder)
      again.wait()
      again.kill()
      if set(again.status.values()) != {0}:
        trial.misses.append(f"status {again.status} of the restart")
  name = f"m/checkpoints/ckpt-{STEPS}"
  if (folder / f"{name}.index").exists():
    trial.misses += different_tensors(folder / name, reference / name)
  else:
    trial.misses.append("there is no last checkpoint")
  return trial


def uninterrupted(folder: Path, count: int) -> Path:
  with Network(count) as network:
    workers = Workers(network, folder)
    workers.wait()
    workers.kill()
  if set(workers.status.values()) != {0}:
    raise SystemExit(f"the uninterrupted run ended with {workers.status}; see {folder}")
  return folder


def report(done: Sequence[tuple[str, Trial]]) -> str:
  lines = [
    "| network | trials | wrong | seconds until all ended: median (most) |",
    "|---|---|---|---|",
  ]
  for kind in KINDS:
    trials = [trial for each, trial in done if each == kind]
    times = [trial.ended_s for trial in trials if trial.ended_s is not None and kind in ENDS]
    spent = f"{statistics.median(times):.1f} ({max(times):.1f})" if times else ""
    if trials:
      lines.append(f"| {kind} | {len(trials)} | {sum(bool(t.misses) for t in trials)} | {spent} |")
  return "\n".join(lines)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=50)
  parser.add_argument("--first", type=int, default=0, help="number of the first trial")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  options = parser.parse_args()
  if reason := available():
    raise SystemExit(f"cannot make network namespaces: {reason}")
  base = Path(tempfile.mkdtemp(prefix="partitions_"))
  references: dict[int, Path] = {}
  done: list[tuple[str, Trial]] = []
  for number in range(options.first, options.first + options.trials):
    kind = options.kinds[number % len(options.kinds)]
    rng, began = random.Random(f"{options.seed}/{kind}/{number}"), time.time()
    count = 2 + (number // len(options.kinds)) % 2
    if count not in references:
      references[count] = uninterrupted(base / f"uninterrupted-{count}", count)
    folder = base / f"{kind}-{number}"
    trial = run_trial(folder, kind, references[count], count, rng)
    done.append((kind, trial))
    outcome = "; ".join(trial.misses[:4]) or f"as expected, ended after {trial.ended_s:.1f} s"
    print(
      f"{kind} {number}: {count} workers, {trial.what or 'start'}: {outcome} "
      f"({time.time() - began:.0f} s)",
      flush=True,
    )
    if not trial.misses:
      shutil.rmtree(folder)
  print(report(done))
  failed = any(trial.misses for _, trial in done)
  if not failed:
    shutil.rmtree(base)
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
