"""Runs a TensorFlow cluster on this machine, for development: one process per task.

status = run_local(command=["python", "launch.py", "--gin_file=x.gin"], model_dir="m", workers=2)

No process outlives the call. Linux only: children die with their parent (prctl), and pidfds show
which process ended first. This module does not import TensorFlow. Workers divide the GPUs.

TensorFlow's servers listen on all interfaces and run what anyone sends. So the processes get a
network of their own that has only loopback (private_network.py), where the system allows it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from loopwright.distribution import cluster as clusters
from loopwright.errors import ConfigError
from loopwright.host import nvidia, urls
from loopwright.host.signals import handled
from loopwright.run_folder import layout, legs
from loopwright.strategies.workers import elastic, wire
from loopwright.tools import private_network, shared_memory, standby
from loopwright.tools.local_process import Environment, Process, Started, say

SAVED = 75
"""The exit status of a process that saved its state on SIGTERM; launch.py lists all of them."""
MISTAKE = 2
INTERRUPTED = 130
GRACE_S = 60.0
"""Seconds from SIGTERM to SIGKILL, in which processes save."""
REST_S = 30.0
"""Seconds until the place of a lost worker is used again; see `elastic.Places`."""
STOPPED_S = 30.0
"""Seconds after which processes that are all stopped, so that none misses another, are killed."""
_POLL_S, _LOOK_S = 0.2, 1.0
_LOST = re.compile(r"failed: (lost )?worker-\d")
"""How the line of a process begins that has lost another (kinds/workers/identity.py), or that
has not met it (meeting.py)."""
PORT_CLASHES = 3
"""How often a cluster restarts, beyond `max_restarts`, because a port was in use."""

Cluster = Mapping[str, Sequence[str]]


def run_local(
  *,
  command: Sequence[str],
  model_dir: str,
  workers: int,
  least: int | None = None,
  ps: int = 0,
  max_restarts: int = 0,
  grace_s: float = GRACE_S,
  rest_s: float = REST_S,
  stopped_s: float = STOPPED_S,
  imports: bool = False,
) -> int:
  """Runs `command` once for each task of a cluster and supervises the processes (main thread).

  Each process reads its task from TF_CONFIG. Without `ps` the cluster is N workers, of which worker
  0 is the chief. With `ps` it is a chief (the coordinator), N workers and M parameter servers.

  Args:
    model_dir: a local folder; output goes to <model_dir>/logs/<name>.log.
    least: go on after the loss of workers while so many are left; None for as many as `workers`.
    ps: the number of parameter servers; they and the workers end with the chief.
    max_restarts: how often to restart after a failure that `least` does not cover.
    grace_s: seconds from SIGTERM, which is forwarded to the processes, to SIGKILL.
    rest_s: seconds until the place of a lost worker is used again.
    stopped_s: seconds until processes are killed that are all stopped.
    imports: whether one process imports the framework for all, which are forks of it (standby.py);
      `command` is a Python file.

  Returns:
    The exit status, as launch.py documents it.

  Raises:
    ConfigError: this is not Linux, or the logs cannot be written.
  """
  if not hasattr(os, "pidfd_open"):
    raise ConfigError("a local cluster needs Linux; leave out --local_workers.")
  log_dir = _made_log_dir(model_dir)
  memory = shared_memory.folder() if least not in (None, workers) else contextlib.nullcontext()
  with private_network.opened(os.environ, say=say) as namespaces, memory as copies:
    cluster = LocalCluster(
      command=command,
      log_dir=log_dir,
      copies=copies,
      imports=imports,
      places=elastic.Places(least=workers if least is None else least, most=workers, rest_s=rest_s),
      ps=ps,
      max_restarts=max_restarts,
      grace_s=grace_s,
      stopped_s=stopped_s,
      namespaces=namespaces,
    )
    status = cluster.run()
    if status and copies is not None:
      shared_memory.keep_on_disk(copies, model_dir)
    return status


def free_ports(count: int) -> list[int]:
  """Returns distinct ports of 127.0.0.1 that are free now; another process may still take one."""
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for one in sockets:
      one.bind(("127.0.0.1", 0))
    return [one.getsockname()[1] for one in sockets]


def make_cluster(*, workers: int, ps: int = 0) -> dict[str, list[str]]:
  """Returns the "cluster" of TF_CONFIG, with free ports; the chief's task is first."""
  counts = {"chief": 1, "worker": workers, "ps": ps} if ps else {"worker": workers}
  ports = iter(free_ports(sum(counts.values())))
  return {
    kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for kind, count in counts.items()
  }


@dataclasses.dataclass(kw_only=True)
class LocalCluster:
  """Starts the processes, waits for a decisive event, stops them, and restarts them if allowed.

      start all -> first failure, mistake, end of the chief, or signal -> stop all -> verdict

  One thread and one selector: the kernel reports process ends in the order they occurred. For the
  arguments, see `run_local`.
  """

  command: Sequence[str]
  log_dir: str
  places: elastic.Places
  ps: int
  max_restarts: int
  grace_s: float
  stopped_s: float = STOPPED_S
  namespaces: Sequence[int] = ()
  copies: str | None = None
  imports: bool = False

  def __post_init__(self) -> None:
    self._restarts = self._clashes = self._presses = 0
    self._selector = selectors.DefaultSelector()
    self._processes: list[Process] = []
    self._ends: collections.deque[Process] = collections.deque()
    self._ended: list[Process] = []
    self._signals: collections.deque[int] = collections.deque()
    self._stopping: int | None = None
    self._deadline: float | None = None
    self._stopped_since: float | None = None
    self._growing = False
    self._standby: standby.Standby | None = None

  def run(self) -> int:
    """Runs until the cluster ends and returns the exit status; stops all processes in any case."""
    with self._noticing_signals(), self._selector, contextlib.ExitStack() as stack:
      if self.imports:
        self._standby = standby.Standby(namespaces=self.namespaces)
        self._wait_for_standby(stack.enter_context(contextlib.closing(self._standby)))
      try:
        self._attempt()
        while self._starts_again():
          self._attempt()
      finally:
        self._kill()
    return self._report()

  def _attempt(self) -> None:
    self._ended, self._deadline, self._growing = [], None, False
    self._processes = self._make_processes(make_cluster(workers=self.places.free, ps=self.ps))
    for process in self._processes:
      process.start()
    while any(process.running for process in self._processes):
      self._supervise()

  def _make_processes(self, cluster: Cluster) -> list[Process]:
    first, secret = next(iter(cluster)), secrets.token_hex(32)
    gpus = _gpus(workers=len(cluster["worker"]))
    varies = {clusters.WORKERS: str(self.places)} if self._is_elastic else {}
    if self.copies is not None:
      varies[clusters.SNAPSHOTS] = self.copies
    if not self._processes:
      varies[legs.BEGAN] = str(time.time() - legs.age_s())
    return [
      Process(
        kind=kind,
        index=index,
        command=self.command,
        environment={**_environment(cluster, kind, index, secret), **varies, **gpus(kind, index)},
        log_dir=self.log_dir,
        leads=kind == first and index == 0,
        selector=self._selector,
        on_end=self._ends.append,
        namespaces=self.namespaces,
        fork=self._forked,
      )
      for kind, hosts in cluster.items()
      for index in range(len(hosts))
    ]

  def _supervise(self) -> None:
    left_s = _POLL_S if self.places.missing else _LOOK_S
    if self._deadline is not None:
      left_s = max(0, self._deadline - time.monotonic())
      if not left_s:
        self._kill()
    elif not self._growing and not self._stopping:
      self._grow_if_due()
    self._kill_if_stopped()
    for key, _ in self._selector.select(left_s):
      key.data()
    while self._signals:
      self._pass_on(self._signals.popleft())
    while self._ends:
      self._answer(self._ends.popleft())

  def _kill_if_stopped(self) -> None:
    """Kills the processes if all have been stopped for too long: none is left to miss another."""
    running, now = [process for process in self._processes if process.running], time.monotonic()
    if not (running and all(process.is_stopped for process in running)):
      self._stopped_since = None
    elif self._stopped_since is None:
      self._stopped_since = now
    elif now - self._stopped_since > self.stopped_s:
      for process in running:
        process.kill(f"had been stopped for {self.stopped_s:g} s, with all others, and was killed")

  def _answer(self, process: Process) -> None:
    if self._restarts_alone(process):
      self._restarts += 1
      say(f"{process.how_it_ended()}; restarting it, {self._attempt_number()}")
      process.start()
      return
    if self._is_dispensable(process):
      say(f"{process.how_it_ended()}; continuing without it")
      return
    self._ended.append(process)
    if process.status == SAVED:
      self._limit(self.grace_s)  # the others either save soon or hang without this one
    failed = process.status not in (0, SAVED)
    if (failed and not self._stopping) or (self.ps and process.leads):
      self._limit(0)

  def _restarts_alone(self, process: Process) -> bool:
    """Whether only this process restarts: a worker beside parameter servers holds no state."""
    return (
      self.ps > 0
      and process.kind == "worker"
      and process.status not in (0, MISTAKE)
      and not process.port_was_taken
      and self._deadline is None
      and self._restarts < self.max_restarts
    )

  def _is_dispensable(self, process: Process) -> bool:
    """Whether the run continues without it: a killed worker beside servers, if not the last."""
    others = any(p.running and p.kind == "worker" for p in self._processes)
    killed = process.status is not None and process.status < 0
    return self.ps > 0 and process.kind == "worker" and killed and others and not self._deadline

  def _starts_again(self) -> bool:
    culprit = self._culprit()
    if self._growing and not self._stopping and self._verdict() == SAVED:
      return True
    if culprit is None or self._stopping or self._verdict() != 1:
      return False
    if culprit.port_was_taken and self._clashes < PORT_CLASHES:
      self._clashes += 1
      say(f"{culprit.name} found its port in use; restarting all processes on other ports")
      return True
    if self._is_elastic and (lost := self._lost(culprit)):
      self.places.lose(lost, now_s=time.monotonic(), step=self._newest_step())
      if self.places.free >= self.places.least:
        say(f"{culprit.how_it_ended()}; going on with {_workers(self.places.free)}")
        return True
    if self._restarts >= self.max_restarts:
      return False
    self._restarts += 1
    self.places.use_all()
    say(f"{culprit.how_it_ended()}; restarting all processes, {self._attempt_number()}")
    return True

  def _wait_for_standby(self, one: standby.Standby) -> None:
    self._selector.register(one.socket, selectors.EVENT_READ, one.noted)
    until = time.monotonic() + standby.IMPORTS_S
    while one.waiting and not self._stopping and time.monotonic() < until:
      self._supervise()
    self._selector.unregister(one.socket)
    if one.waiting:
      one.close()

  def _forked(
    self, command: Sequence[str], environment: Environment, *, merged: bool
  ) -> Started | None:
    if self._standby is None:
      return None
    return self._standby.spawn(command, environment, merged=merged)

  # ---- If the number of workers varies ----

  @property
  def _is_elastic(self) -> bool:
    return self.places.least < self.places.most

  def _lost(self, culprit: Process) -> int:
    """Returns how many workers are lost; 0 for a program that failed, such as with an exception."""
    killed = sum(process.was_killed for process in self._ended)
    overdue = self._growing and (culprit.status or 0) < 0
    return killed or overdue or any(_LOST.match(line) for line in culprit.last_lines)

  def _newest_step(self) -> int:
    folders = [os.path.dirname(self.log_dir), *([self.copies] if self.copies else [])]
    return max((step for each in folders for step in layout.checkpoint_steps(each)), default=0)

  def _grow_if_due(self) -> None:
    """Asks all processes to save and end, if more of them can start."""
    if not (self.places.missing and any(process.running for process in self._processes)):
      return
    if self.places.returned(now_s=time.monotonic(), step=self._newest_step()):
      self._growing = True
      say(f"growing to {_workers(self.places.free)}: all save at the end of this loop")
      self._limit(self.grace_s)
      for process in self._processes:
        process.send(signal.SIGTERM)

  def _attempt_number(self) -> str:
    return f"attempt {self._restarts} of {self.max_restarts}"

  def _verdict(self) -> int:
    if self._stopping == signal.SIGINT:
      return INTERRUPTED
    statuses = [process.status for process in self._ended]
    chief = self._processes[0].status
    if self.ps and chief in (0, SAVED):
      return chief
    if MISTAKE in statuses:
      return MISTAKE
    if self._culprit():
      return 1
    return SAVED if SAVED in statuses else 0

  def _culprit(self) -> Process | None:
    """Returns the first process that failed; later failures may only be lost peers."""
    return next((p for p in self._ended if p.status not in (0, SAVED)), None)

  def _report(self) -> int:
    """Prints what the chief's own output does not contain; returns the exit status."""
    status, culprit = self._verdict(), self._culprit()
    if status == INTERRUPTED and self._processes[0].status != INTERRUPTED:
      say("interrupted")
    elif status == MISTAKE:
      self._report_mistake(next(p for p in self._ended if p.status == MISTAKE))
    elif status == 1 and culprit:
      lines = [] if culprit.leads else culprit.last_lines
      for line in lines:
        say(f"[{culprit.name}] {line}")
      left, least = self.places.free, self.places.least
      short = f", and {_workers(left)} can start, of at least {least}" if left < least else ""
      say(f"failed: {culprit.how_it_ended()}{short}; its log is {culprit.log_path}")
    return status

  def _report_mistake(self, process: Process) -> None:
    line = process.last_lines[-1] if process.last_lines else process.how_it_ended()
    if line not in self._processes[0].last_lines:
      say(f"[{process.name}] {line}")

  def _pass_on(self, number: int) -> None:
    """Handles a signal to this process; a second Ctrl-C kills at once."""
    again, self._stopping = self._stopping is not None, self._stopping or number
    self._presses += number == signal.SIGINT
    if self._presses > 1:
      self._stopping = signal.SIGINT
    self._limit(0 if self._presses > 1 else self.grace_s)
    if again:
      if number == signal.SIGINT and self._presses == 1:
        say("Ctrl-C: the processes are saving; press it again to end at once")
      return
    # The chief saves the variables of the parameter servers, so servers and workers end after it.
    for process in self._processes[:1] if self.ps else self._processes:
      process.send(number)

  def _limit(self, seconds: float) -> None:
    """Sets the deadline, `seconds` from now, unless an earlier one is set; then all are killed."""
    deadline = time.monotonic() + seconds
    self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

  def _kill(self) -> None:
    saving = self._stopping is not None or self._growing
    overdue = saving or any(p.status == SAVED for p in self._ended)
    for process in self._processes:
      process.kill(f"did not end within {self.grace_s:g} s of SIGTERM" if overdue else None)
    for process in self._processes:
      process.reap()

  @contextlib.contextmanager
  def _noticing_signals(self) -> Iterator[None]:
    """Lets signals wake the selector, which also watches the children's output and ends."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    self._selector.register(ours, selectors.EVENT_READ, partial(ours.recv, 4096))
    try:
      with handled(lambda number, _: self._signals.append(number), wakes=theirs):
        yield
    finally:
      ours.close()
      theirs.close()


def _workers(count: int) -> str:
  return f"{count} worker{'' if count == 1 else 's'}"


def _made_log_dir(model_dir: str) -> str:
  urls.require_path("model_dir", model_dir, "a local cluster writes its logs there")
  layout.require_no_links(model_dir)
  log_dir = os.path.join(model_dir, layout.LOGS)
  try:
    os.makedirs(log_dir, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f"cannot make the folder {log_dir!r} for the logs of the local cluster ({error.strerror}); "
      "set --model_dir to a folder that you can write to."
    ) from error
  return log_dir


def _gpus(*, workers: int) -> Callable[[str, int], Environment]:
  """Returns what says which GPUs a process has: each worker its part, others none.

  Raises:
    ConfigError: more workers than GPUs.
  """
  gpus = nvidia.visible()
  if not gpus:
    return lambda kind, index: {}
  if workers > len(gpus):
    raise ConfigError(
      f"--local_workers={workers} is above the {len(gpus)} GPUs here; give at most {len(gpus)}, or "
      f"set {nvidia.VISIBLE}=-1 in the environment for workers on the CPU."
    )
  parts = nvidia.divided(gpus, workers)
  return lambda kind, index: {nvidia.VISIBLE: ",".join(parts[index]) if kind == "worker" else "-1"}


def _environment(cluster: Cluster, kind: str, index: int, secret: str) -> Environment:
  config = {"cluster": cluster, "task": {"type": kind, "index": index}}
  unbuffered = {"PYTHONUNBUFFERED": "1"}  # keeps the last lines of a killed process
  own = {wire.SECRET: secret, "TF_CONFIG": json.dumps(config)}
  foreign = (wire.SECRET_FILE, clusters.WORKERS, clusters.SNAPSHOTS, legs.BEGAN)
  inherited = {name: text for name, text in os.environ.items() if name not in foreign}
  return {**unbuffered, **inherited, **own}
