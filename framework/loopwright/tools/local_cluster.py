"""Runs a TensorFlow cluster on this machine, for development: one process per task.

If a process fails, all end and start again from the newest checkpoint. TensorFlow's servers listen
on all interfaces and run what anyone sends: a firewall must close the ports of the machine.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from loopwright.distribution import cluster as clusters
from loopwright.errors import ConfigError
from loopwright.host import nvidia, redaction, signals, urls
from loopwright.host.children import with_parent
from loopwright.run_folder import layout

MISTAKE, SAVED, INTERRUPTED = 2, 75, 130
"""Exit statuses; launch.py lists all of them."""
_POLL_S, _DRAIN_S, _SHOWN_LINES = 0.1, 0.5, 20
_LOST = re.compile(r"failed: (lost )?worker-\d")
"""How the line of a process begins that has lost another, or that it did not meet."""
_LOUD = re.compile(
  r"(WARNING|ERROR|CRITICAL|FATAL)\b(?!: All log messages before absl)|[WEF]\d{4} \d\d:\d\d:"
  r"|\d{4}-\d\d-\d\d [\d:.]+: [WEF] |\S+:\d+: \w*Warning: "
)
"""How a warning or an error begins: of logging, absl, TensorFlow, and Python's warnings."""


def make_cluster(*, workers: int, ps: int = 0) -> dict[str, list[str]]:
  """Returns the "cluster" of TF_CONFIG, the chief's task first, with ports that are free now."""
  counts = {"chief": 1, "worker": workers, "ps": ps} if ps else {"worker": workers}
  with contextlib.ExitStack() as stack:

    def address() -> str:
      host, port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()
      return f"{host}:{port}"

    return {kind: [address() for _ in range(count)] for kind, count in counts.items()}


def say(line: str, stream: TextIO | None = None) -> None:
  """Prints a line, to stderr if nothing else is given; drops it if nobody can read it."""
  with contextlib.suppress(OSError):
    print(f"{line}\n", end="", file=stream or sys.stderr, flush=True)  # one write: of threads


class Process:
  """One task of the cluster, in a session of its own, as Ctrl-C in a terminal is not for it.

  The output of the chief, which `leads`, is shown; of others only warnings and errors are.
  """

  def __init__(
    self, name: str, command: Sequence[str], env: Mapping[str, str], log: str, *, leads: bool
  ) -> None:
    """Starts it; call from the main thread: the process dies with the thread that starts it."""
    self.name, self.log_path, self.leads = name, log, leads
    self.status: int | None = None  # while it runs; negative for a signal
    self.was_killed = self.has_lost = False  # by a signal that was not ours; another process
    self._killed_as, self._started = "", time.monotonic()
    self.last_lines: collections.deque[str] = collections.deque(maxlen=_SHOWN_LINES)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    config, shown = shlex.quote(env["TF_CONFIG"]), redaction.command(command)
    with open(log, "ab") as file:
      file.write(f"=== {now} {name}: TF_CONFIG={config} {shown}\n".encode())
    self._popen = subprocess.Popen(
      [*with_parent(), *command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE if leads else subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    outputs = [(self._popen.stdout, sys.stdout), (self._popen.stderr, sys.stderr)][: 1 + leads]
    self._readers = [threading.Thread(target=self._read, args=o, daemon=True) for o in outputs]
    for reader in self._readers:
      reader.start()

  def _read(self, pipe: Any, stream: TextIO) -> None:
    with pipe, open(self.log_path, "ab", buffering=0) as log:
      for line in pipe:
        text = line.decode(errors="replace").rstrip("\n")
        self.last_lines.append(text)
        self.has_lost |= bool(_LOST.match(text))
        log.write(f"{text}\n".encode())
        if self.leads:
          say(text, stream)
        elif _LOUD.match(text):
          say(f"[{self.name}] {text}")

  def has_ended(self, *, wait: bool = False) -> bool:
    """Whether it has ended since the last call; then its children are killed too."""
    pid, options = self._popen.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
    if self.status is not None or os.waitid(os.P_PID, pid, options) is None:
      return False
    os.killpg(pid, signal.SIGKILL)  # the id stays reserved until `wait`
    self.status = self._popen.wait()
    for reader in self._readers:
      reader.join(_DRAIN_S)  # a daemon of the process may keep the pipe open
    self.was_killed = self.status < 0 and not self._killed_as
    how = self._killed_as or f"ended with status {self.status}"
    if self.was_killed:
      how = f"was killed by {signal.Signals(-self.status).name}"
    self.ending = f"{self.name} {how} after {time.monotonic() - self._started:.1f} s"
    return True

  def send(self, number: int, why: str = "") -> None:
    """Sends a signal if it runs, SIGKILL also to its children; `why` it was killed."""
    if self.status is None:
      self._killed_as = why
      (os.killpg if why else os.kill)(self._popen.pid, number)


@dataclasses.dataclass(kw_only=True)
class LocalCluster:
  """Runs `command` once for each task of a cluster, and supervises the processes.

  Each process reads its task from TF_CONFIG. Without `ps` the cluster is N workers, of which worker
  0 is the chief. With `ps` it is a chief (the coordinator), N workers and M parameter servers.

  Attributes:
    model_dir: a local folder; output goes to <model_dir>/logs/<name>.log.
    least: go on after the loss of workers while so many are left.
    ps: the number of parameter servers; they and the workers end with the chief.
    max_restarts: how often to restart after a failure that `least` does not cover.
    grace_s: seconds from SIGTERM, which is forwarded to the processes, to SIGKILL.
    rest_s: seconds until lost workers may come back.
  """

  command: Sequence[str]
  model_dir: str
  workers: int
  least: int
  ps: int = 0
  max_restarts: int = 0
  grace_s: float = 60.0
  rest_s: float = 30.0

  def run(self) -> int:
    """Returns the exit status, as launch.py documents it, when no process is left (main thread).

    Raises:
      ConfigError: this is not Linux, more workers than GPUs, or the logs cannot be written.
    """
    gpus, folder = nvidia.visible(), os.path.join(self.model_dir, layout.LOGS)
    if sys.platform != "linux":
      raise ConfigError("a local cluster needs Linux; leave out --local_workers.")
    if gpus and self.workers > len(gpus):
      raise ConfigError(
        f"--local_workers={self.workers} is above the {len(gpus)} GPUs here; give at most "
        f"{len(gpus)}, or set {nvidia.VISIBLE}=-1 in the environment for workers on the CPU."
      )
    urls.require_path("model_dir", self.model_dir, "a local cluster writes its logs there")
    layout.require_no_links(self.model_dir)
    try:
      os.makedirs(folder, exist_ok=True)
    except OSError as error:
      raise ConfigError(
        f"cannot make the folder {folder!r} for the logs of the local cluster ({error.strerror}); "
        "set --model_dir to a folder that you can write to."
      ) from error
    self._size, self._restarts, self._lost_s, self._lost_step = self.workers, 0, 0.0, 0
    self._stopping = self._presses = 0
    self._heard: list[int] = []
    heard = [each for each in signals.NAMES if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, lambda n, _: self._heard.append(n)) for each in heard}
    try:
      self._attempt()
      while self._starts_again():
        self._attempt()
    finally:
      self._kill()
      for number, handler in before.items():
        signal.signal(number, handler)
    return self._report()

  def _attempt(self) -> None:
    self._processes: list[Process] = []
    self._ended: list[Process] = []
    self._growing, self._deadline = False, float("inf")
    cluster, gpus = make_cluster(workers=self._size, ps=self.ps), nvidia.visible()
    own = {"PYTHONUNBUFFERED": "1", **os.environ}  # keeps the last lines of a killed process
    own[clusters.WORKERS] = f"{self.least}:{self.workers}" if self.least < self.workers else ""
    for kind, index in [(kind, i) for kind, hosts in cluster.items() for i in range(len(hosts))]:
      config = {"cluster": cluster, "task": {"type": kind, "index": index}}
      env = {**own, "TF_CONFIG": json.dumps(config)}
      if gpus:  # each worker has its part, others have none
        part = nvidia.divided(gpus, self._size)[index] if kind == "worker" else ["-1"]
        env[nvidia.VISIBLE] = ",".join(part)
      name = kind if kind == "chief" else f"{kind}-{index}"
      log = os.path.join(self.model_dir, layout.LOGS, f"{name}.log")
      self._processes.append(Process(name, self.command, env, log, leads=not self._processes))
    while any(process.status is None for process in self._processes):
      time.sleep(_POLL_S)
      self._look()

  def _look(self) -> None:
    """Handles what has happened since the last look; who was killed ended first, others miss it."""
    ended = [process for process in self._processes if process.has_ended()]
    for process in sorted(ended, key=lambda each: (not each.was_killed, each.has_lost)):
      self._ended.append(process)
      failed = process.status not in (0, SAVED) and not self._stopping
      if failed or (self.ps and process.leads):
        self._limit(0)
      elif process.status == SAVED:  # the others either save soon or hang without this one
        self._limit(self.grace_s)
    while self._heard:
      self._pass_on(self._heard.pop(0))
    if time.monotonic() >= self._deadline:
      self._kill()
    elif self._size < self.workers and not (self._ended or self._stopping or self._growing):
      self._grow_if_due()

  def _pass_on(self, number: int) -> None:
    """Handles a signal to this process; a second Ctrl-C kills at once."""
    # The chief saves the variables of the parameter servers, so servers and workers end after it.
    for process in self._processes[:1] if self.ps else self._processes:
      if not self._stopping:
        process.send(number)
    self._presses += number == signal.SIGINT
    self._stopping = signal.SIGINT if self._presses > 1 else self._stopping or number
    self._limit(0 if self._presses > 1 else self.grace_s)

  def _limit(self, seconds: float) -> None:
    """Sets the moment, `seconds` from now, when all are killed, unless it is earlier already."""
    self._deadline = min(self._deadline, time.monotonic() + seconds)

  def _kill(self) -> None:
    saving = self._stopping or self._growing or any(each.status == SAVED for each in self._ended)
    why = f"did not end within {self.grace_s:g} s of SIGTERM" if saving else "was killed"
    for process in self._processes:
      process.send(signal.SIGKILL, why)
    self._ended += [process for process in self._processes if process.has_ended(wait=True)]

  def _grow_if_due(self) -> None:
    """Has all save and end if lost workers may come back: there is progress since, and a rest."""
    if self._newest_step() > self._lost_step and time.monotonic() > self._lost_s + self.rest_s:
      self._size, self._growing = self.workers, True
      say(f"growing to {self._size} workers: all save at the end of this loop")
      self._limit(self.grace_s)
      for process in self._processes:
        process.send(signal.SIGTERM)

  def _starts_again(self) -> bool:
    status, culprit = self._verdict()
    if self._stopping or culprit is None or status == MISTAKE:
      return self._growing and not self._stopping and status == SAVED
    lost = sum(each.was_killed for each in self._ended) or culprit.has_lost
    if self.least < self.workers and lost:
      self._lost_s, self._lost_step = time.monotonic(), self._newest_step()
      self._size -= lost
      if self._size >= self.least:
        say(f"{culprit.ending}; going on with {self._size} of {self.workers} workers")
        return True
    if self._restarts >= self.max_restarts:
      return False
    self._restarts, self._size = self._restarts + 1, self.workers
    again = f"restarting all processes, attempt {self._restarts} of {self.max_restarts}"
    say(f"{culprit.ending}; {again}")
    return True

  def _newest_step(self) -> int:
    return max(layout.checkpoint_steps(self.model_dir), default=0)

  def _verdict(self) -> tuple[int, Process | None]:
    """Returns the exit status, and who made a mistake or failed first: others may miss a peer."""
    chief = self._processes[0].status
    failed = [each for each in self._ended if each.status not in (0, SAVED)]
    if self._stopping == signal.SIGINT:
      return INTERRUPTED, None
    if failed and not (self.ps and chief in (0, SAVED)):
      culprit = min(failed, key=lambda each: each.status != MISTAKE)
      return MISTAKE if culprit.status == MISTAKE else 1, culprit
    statuses = [chief] if self.ps else [each.status for each in self._ended]
    return SAVED if SAVED in statuses else 0, None

  def _report(self) -> int:
    """Prints what the chief's own output does not contain; returns the exit status."""
    (status, culprit), chief = self._verdict(), self._processes[0]
    if status == INTERRUPTED and chief.status != INTERRUPTED:
      say("interrupted")
    if culprit:
      for line in [*culprit.last_lines][-1 if status == MISTAKE else 0 :]:
        if line not in chief.last_lines:
          say(f"[{culprit.name}] {line}")
    if culprit and status == 1:
      say(f"failed: {culprit.ending}; its log is {culprit.log_path}")
    return status
