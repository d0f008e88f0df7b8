"""A real Slurm on this machine, with nodes of their own: what tests/clusters/test_slurm.py breaks.

Slurm has a controller and some nodes, each with a host name, network and process ids of its own
(Linux namespaces, joined by benchmarks/network.py) and the files of this machine. All of it lives
in a temporary folder. Needs root, slurm-wlm, munge and iproute2. A requeued job waits two minutes
by default; `Job.wait` lets it start at once.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import network
from benchmarks.comparison import reached

REPOSITORY = Path(__file__).resolve().parent.parent
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
TIMEOUT_S = 600.0
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

  def submit(self, folder: Path, config: Path, options: Sequence[str]) -> Job:
    """Submits deploy/slurm.sh with model_dir `folder`/m."""
    folder.mkdir(parents=True)
    arguments = [f"--gin_file={config}", f"--model_dir={folder}/m"]
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

  def records(self) -> list[Path]:
    """Returns the files with the job's nodes that slurm.sh has made."""
    return list(REPOSITORY.glob(f"runs/.nodes-loopwright{os.getpid()}-{self.number}"))

  def task(self, index: int) -> int:
    """Returns the process id of a task; of one that has forked, the oldest."""
    found = {}
    for pid, words, environment in all_processes():
      ours = f"--model_dir={self.folder}/m" in words and words[0].endswith("python")
      if ours and environment.get("SLURM_PROCID") == str(index):
        found[pid] = parent(pid)
    return next(pid for pid, above in found.items() if above not in found)

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
