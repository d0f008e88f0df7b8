"""Breaks jobs of deploy/slurm.sh under a real Slurm on this machine; nothing may be lost.

  python -m benchmarks.slurm_trials --trials 20   (as root; needs slurm-wlm, munge and iproute2)

Slurm has a controller and three nodes, each with a host name, network and process ids of its own
(Linux namespaces, joined by benchmarks/network.py) and the files of this machine. All of it lives
in a temporary folder. A job trains on two nodes, is broken at a random step and must end COMPLETED
by itself, without a process or file of the secret left over. Every tensor of the last checkpoint
and every value of metrics.jsonl that is not a time must be bit-identical to an uninterrupted job's,
and no process may have met another owner of the run folder. Exit status 1 if any trial fails.

  kill_chief, kill_worker   SIGKILL of a task: all tasks restart in the allocation
  kill_srun                 SIGKILL of srun's processes, which leaves the tasks alone
  sigterm                   scancel --signal=TERM: save, status 75, requeue
  time_limit                the same before the time limit, by --signal
  requeue                   scontrol requeue
  drain                     scontrol update State=DRAIN of a node, and requeue: it uses another node
  node_down                 a node loses power: all its processes are gone
  node_cut                  a node loses its network, while its processes run on

A requeued job waits two minutes by default. The trials let it start at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import loopwright
from benchmarks import network
from benchmarks.comparison import different_tensors, records
from benchmarks.fault_trials import reached
from loopwright import Action

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "benchmarks/slurm_trials.gin"
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
STEPS = 160
PARAMS = (f"run.train_steps = {STEPS}", f"run.eval_every_steps = {STEPS // 2}")
TIMEOUT_S = 600.0
IN_ALLOCATION = ("kill_chief", "kill_worker", "kill_srun")
KINDS = (*IN_ALLOCATION, "sigterm", "time_limit", "requeue", "drain", "node_down", "node_cut")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
MACHINE = 'mount --bind "$0/hosts" /etc/hosts && hostname "$1" && shift && exec "$@"'
SLURM_CONF = """
ClusterName=loopwright{number}
SlurmctldHost=n0({hosts[0]})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
KillWait=20
MinJobAge=3600
"""


@loopwright.register
class Paced(Action):
  """Waits after each loop."""

  on = "train"

  def __init__(self, *, wait_s: float = 0.0) -> None:
    self._wait_s = wait_s

  def __call__(self, output: object) -> None:
    time.sleep(self._wait_s)


def available() -> str:
  """Returns why there can be no such Slurm, or ""."""
  if missing := [name for name in PROGRAMS if not shutil.which(name)]:
    return f"there is no {', '.join(missing)} (Debian's packages slurm-wlm and munge)"
  return network.available()


# ---- Slurm ----


class Slurm:
  """A controller, n0, and nodes n1, n2, ... of a Slurm in a folder."""

  def __init__(self, folder: Path, nodes: int = 3) -> None:
    self.folder, self.nodes = folder, range(1, nodes + 1)
    self.network = network.Network(nodes + 1)
    self._daemons: dict[str, subprocess.Popen[bytes]] = {}

  def __enter__(self) -> Slurm:
    self._write_files()
    self.network.__enter__()
    try:
      self._start_daemons()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *unused: object) -> None:
    for daemon in reversed(self._daemons.values()):
      daemon.kill()
      daemon.wait()
    self.network.__exit__()

  def _write_files(self) -> None:
    (self.folder / "state").mkdir(parents=True)
    (self.folder / "munge.key").write_bytes(os.urandom(128))
    (self.folder / "munge.key").chmod(0o600)
    (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, and not used
    lines = [SLURM_CONF.format(hosts=self.network.hosts, folder=self.folder, number=os.getpid())]
    lines += [f"NodeName=n{i} NodeAddr={self.network.hosts[i]} CPUs=4" for i in self.nodes]
    lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE\n"]
    (self.folder / "slurm.conf").write_text("\n".join(lines))
    hosts = "".join(f"{host} n{i}\n" for i, host in enumerate(self.network.hosts))
    (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")

  def _start_daemons(self) -> None:
    names = {"key-file": "munge.key", "pid-file": "munged.pid", "socket": "munge.socket"}
    names |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    paths = [f"--{option}={self.folder / name}" for option, name in names.items()]
    self._start("munged", "munged", "--foreground", "--force", *paths)
    wait_until((self.folder / "munge.socket").exists, timeout_s=20)
    self._start("n0", *self._machine(0, alone=True), "slurmctld", "-D")
    for index in self.nodes:
      self.power_on(index)
    wait_until(lambda: self.idle() == len(self.nodes), timeout_s=60)

  def power_on(self, index: int) -> None:
    (self.folder / f"spool-n{index}").mkdir(exist_ok=True)
    command = f"slurmd -D -N n{index} & wait"  # the shell collects the processes of ended tasks
    self._start(f"n{index}", *self._machine(index, alone=True), "sh", "-c", command)

  def power_off(self, index: int) -> None:
    daemon = self._daemons.pop(f"n{index}")
    daemon.kill()
    daemon.wait()

  def _start(self, name: str, *command: str) -> None:
    with (self.folder / f"{name}.out").open("ab") as out:
      self._daemons[name] = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command], env=self._environment(), stdout=out,
        stderr=out,
      )  # fmt: skip

  def _machine(self, index: int, *, alone: bool = False) -> list[str]:
    """Returns the beginning of a command on a machine; `alone`: all its processes end with it."""
    spaces = ["--uts", *(["--pid", "--fork", "--kill-child", "--mount-proc"] if alone else [])]
    shell = ["sh", "-c", MACHINE, str(self.folder), f"n{index}"]
    return [*self.network.inside(index), "unshare", *spaces, *shell]

  def _environment(self) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path, "CUDA_VISIBLE_DEVICES": "-1"}
    return {**os.environ, **own}

  def command(self, *words: str) -> str:
    """Runs a command of Slurm and returns what it prints."""
    done = subprocess.run(
      [*self._machine(0), *words], cwd=REPOSITORY, env=self._environment(), check=True,
      capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip()

  def idle(self) -> int:
    return self.command("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").count("n")

  def submit(
    self, folder: Path, *params: str, config: Path | str = CONFIG, options: Sequence[str] = ()
  ) -> Job:
    """Submits deploy/slurm.sh with model_dir `folder`/m."""
    folder.mkdir(parents=True)
    arguments = [f"--gin_file={config}", f"--model_dir={folder}/m"]
    arguments += [f"--gin_param={param}" for param in params]
    log = f"--output={folder}/log.txt"
    number = self.command("sbatch", "--parsable", log, *options, "deploy/slurm.sh", *arguments)
    return Job(self, number, folder)


@dataclasses.dataclass(frozen=True)
class Job:
  """A submitted job."""

  slurm: Slurm
  number: str
  folder: Path

  def field(self, name: str) -> str:
    """Returns a field of the job, such as "JobState"."""
    words = self.slurm.command("scontrol", "--oneliner", "show", "job", self.number).split()
    return dict(word.partition("=")[::2] for word in words)[name]

  def log(self) -> str:
    file = self.folder / "log.txt"
    return file.read_text(errors="replace") if file.exists() else ""

  def wait_for_step(self, step: int) -> None:
    wait_until(lambda: reached(self.folder / "m") >= step or self.ended(), poll_s=0.3)
    if reached(self.folder / "m") < step:
      raise RuntimeError(f"the job ended before step {step}; see {self.folder}/log.txt")

  def ended(self) -> bool:
    """Whether the job has ended, and not shown an end for the moment of a requeue."""
    for _ in range(2):
      if self.field("JobState") not in ENDS:
        return False
      time.sleep(1)
    return True

  def secrets(self) -> list[Path]:
    """Returns the files that slurm.sh has made for the job's secret."""
    return list(REPOSITORY.glob(f"runs/.secret-loopwright{os.getpid()}-{self.number}-*"))

  def records(self) -> list[Path]:
    """Returns the files with the job's nodes that slurm.sh has made."""
    return list(REPOSITORY.glob(f"runs/.nodes-loopwright{os.getpid()}-{self.number}"))

  def processes(self, program: str) -> dict[int, dict[str, str]]:
    """Returns process id -> environment of the job's processes that run a program."""
    found, parents = {}, {}
    for pid, words, environment in all_processes():
      if f"--model_dir={self.folder}/m" in words and words[0].endswith(program):
        found[pid] = environment
        parents[pid] = parent(pid)
    if program == "srun":
      return found  # the second of two would end the tasks if only the first was killed
    return {pid: environment for pid, environment in found.items() if parents[pid] not in found}

  def task(self, index: int) -> int:
    """Returns the process id of a task."""
    tasks = self.processes("python").items()
    return next(pid for pid, environ in tasks if environ["SLURM_PROCID"] == str(index))

  def nodes(self) -> list[int]:
    """Returns the numbers of its nodes."""
    names = self.slurm.command("scontrol", "show", "hostnames", self.field("NodeList"))
    return [int(name.removeprefix("n")) for name in names.split()]

  def wait(self, happened: Callable[[], bool] = lambda: False) -> str:
    """Returns the job's state at its end, or when something happened; a requeue starts at once."""

    hurried = set()

    def over() -> bool:
      if self.field("Reason") == "BeginTime" and (start := self.field("Restarts")) not in hurried:
        hurried.add(start)  # two seconds, as nodes refuse a job in the second in which it ended
        self.slurm.command("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")
      return happened() or self.ended()

    wait_until(over, poll_s=0.5)
    return self.field("JobState")


def all_processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
  """Yields (process id, command, environment)."""
  for folder in Path("/proc").glob("[0-9]*"):
    try:
      words = (folder / "cmdline").read_text().split("\0")
      pairs = (folder / "environ").read_text().split("\0")
    except (OSError, UnicodeDecodeError):
      continue
    yield int(folder.name), words, dict(pair.partition("=")[::2] for pair in pairs)


def parent(pid: int) -> int:
  return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until(
  happened: Callable[[], bool], *, timeout_s: float = TIMEOUT_S, poll_s: float = 0.05
) -> None:
  end = time.monotonic() + timeout_s
  while not happened():
    if time.monotonic() > end:
      raise TimeoutError(f"it did not happen within {timeout_s:g} s")
    time.sleep(poll_s)


# ---- Trials ----


@dataclasses.dataclass
class Trial:
  """What was wrong, and the longest time between two training loops of the result."""

  misses: list[str] = dataclasses.field(default_factory=list)
  pause_s: float = 0.0


def break_job(job: Job, kind: str, rng: random.Random) -> int | None:
  """Breaks a job that trains; returns the number of the node that is out of order, if any."""
  slurm, number = job.slurm, job.number
  victim = rng.choice(job.nodes())
  if kind in ("kill_chief", "kill_worker"):
    os.kill(job.task(int(kind == "kill_worker")), signal.SIGKILL)
  elif kind == "kill_srun":
    for pid in job.processes("srun"):
      os.kill(pid, signal.SIGKILL)
  elif kind == "sigterm":
    slurm.command("scancel", "--signal=TERM", number)
  elif kind == "time_limit":
    wait_until(lambda: job.field("Restarts") == "1", poll_s=1)
  elif kind == "node_down":
    slurm.power_off(victim)
  elif kind == "node_cut":
    slurm.network.cut(victim)
  if kind == "drain":
    slurm.command("scontrol", "update", f"NodeName=n{victim}", "State=DRAIN", "Reason=trial")
  if kind in ("drain", "requeue"):
    slurm.command("scontrol", "requeue", number)
  return victim if kind in ("drain", "node_down", "node_cut") else None


def repair(slurm: Slurm, kind: str, node: int) -> None:
  if kind == "node_down":
    slurm.power_on(node)
  elif kind == "node_cut":
    slurm.network.heal()
  else:
    slurm.command("scontrol", "update", f"NodeName=n{node}", "State=RESUME")


def run_trial(slurm: Slurm, folder: Path, kind: str, reference: Path, rng: random.Random) -> Trial:
  limits = ["--time=2", "--signal=TERM@60"] if kind == "time_limit" else []
  wait_s = 6.0 if limits else 0.3
  job = slurm.submit(folder, *PARAMS, f"Paced.wait_s = {wait_s}", options=limits)
  job.wait_for_step(10 if limits else rng.randrange(20, STEPS - 60))
  node = break_job(job, kind, rng)
  trial = Trial(wrong(job, kind, job.wait(), node))
  if node:
    repair(slurm, kind, node)
  wait_until(lambda: slurm.idle() == len(slurm.nodes), timeout_s=120, poll_s=1)
  wait_until(lambda: not job.processes("python") and not job.processes("srun"), timeout_s=60)
  trial.misses += differences(folder / "m", reference / "m")
  trial.pause_s = longest_pause(folder / "m")
  return trial


def wrong(job: Job, kind: str, state: str, node: int | None) -> list[str]:
  """Returns what is wrong with a job that has ended."""
  misses, log, requeued = [], job.log(), int(job.field("Restarts"))
  if state != "COMPLETED":
    misses.append(f"the job ended {state}, see {job.folder}/log.txt")
  if (requeued > 0) == (kind in IN_ALLOCATION):
    misses.append(f"it was requeued {requeued} times")
  if kind in IN_ALLOCATION and "restarting all workers, attempt 1" not in log:
    misses.append("the workers were not restarted")
  if "is in use by" in log:
    misses.append("a process met another owner of model_dir")
  if node in job.nodes():
    misses.append(f"it ended on n{node}, which is out of order")
  if left := job.secrets():
    misses.append(f"{left[0]} is left over")
  return misses


def differences(folder: Path, reference: Path) -> list[str]:
  """Returns the differences to the uninterrupted job."""
  if reached(folder) != STEPS:
    return [f"it ended at step {reached(folder)}, not {STEPS}"]
  name = f"checkpoints/ckpt-{STEPS}"
  found = different_tensors(folder / name, reference / name)
  for split in ("train", "eval"):
    if records(folder, split) != records(reference, split):
      found.append(f"{split} records of metrics.jsonl differ")
  return found


def longest_pause(folder: Path) -> float:
  lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  times = [line["wall_time"] for line in lines if line["split"] == "train"]
  return max(later - earlier for earlier, later in itertools.pairwise(times))


def uninterrupted(slurm: Slurm, folder: Path) -> Path:
  job = slurm.submit(folder, *PARAMS)
  if (state := job.wait()) != "COMPLETED" or reached(folder / "m") != STEPS:
    raise SystemExit(f"the uninterrupted job ended {state}; see {folder}/log.txt")
  return folder


def table(done: dict[str, list[Trial]]) -> str:
  lines = ["| fault | trials | lost | seconds without a loop: median (most) |", "|---|---|---|---|"]
  for kind, trials in ((kind, trials) for kind, trials in done.items() if trials):
    times = [trial.pause_s for trial in trials]
    spent = f"{statistics.median(times):.0f} ({max(times):.0f})"
    lines.append(f"| {kind} | {len(trials)} | {sum(bool(t.misses) for t in trials)} | {spent} |")
  return "\n".join(lines)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--first", type=int, default=0, help="number of the first trial")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  options = parser.parse_args()
  if reason := available():
    raise SystemExit(f"cannot start Slurm: {reason}")
  base = Path(tempfile.mkdtemp(prefix="slurm_trials_"))
  done: dict[str, list[Trial]] = {kind: [] for kind in options.kinds}
  with Slurm(base / "slurm") as slurm:
    reference = uninterrupted(slurm, base / "uninterrupted")
    for number in range(options.first, options.first + options.trials):
      kind = options.kinds[number % len(options.kinds)]
      rng, began = random.Random(f"{options.seed}/{kind}/{number}"), time.time()
      folder = base / f"{kind}-{number}"
      trial = run_trial(slurm, folder, kind, reference, rng)
      done[kind].append(trial)
      outcome = "; ".join(trial.misses[:4]) or "nothing lost"
      spent = f"{time.time() - began:.0f} s, {trial.pause_s:.0f} s of them without a loop"
      print(f"{kind} {number}: {spent}: {outcome}", flush=True)
      if not trial.misses:
        shutil.rmtree(folder)
  print(table(done))
  lost = any(trial.misses for trials in done.values() for trial in trials)
  if not lost:
    shutil.rmtree(base)
  return 1 if lost else 0


if __name__ == "__main__":
  sys.exit(main())
