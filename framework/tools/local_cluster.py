"""Runs a TensorFlow cluster on this machine, for development: one process per task.

status = run_local(command=["python", "launch.py", "--gin_file=x.gin"], model_dir="m", workers=2)

No process outlives the call. Linux only: children die with their parent (prctl), and pidfds show
which process ended first. This module does not import TensorFlow. Every process sees all GPUs.

TensorFlow's servers listen on all interfaces and run what anyone sends. So the processes get a
network of their own that has only loopback (private_network.py), where the system allows it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import os
import re
import secrets
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, TextIO

from framework.errors import ConfigError
from framework.host import redaction, stores
from framework.host.output import Lasting, outlasting
from framework.host.signals import handled
from framework.run_folder import layout
from framework.strategies.cluster import wire
from framework.tools import private_network

SAVED = 75
"""The exit status of a process that saved its state on SIGTERM; launch.py lists all of them."""
MISTAKE = 2
INTERRUPTED = 130
GRACE_S = 60.0
"""Seconds from SIGTERM to SIGKILL, in which processes save."""
SHOWN_LINES = 20
PORT_CLASHES = 3
"""How often a cluster restarts, beyond `max_restarts`, because a port was in use."""

_LOUD = re.compile(
  r"(WARNING|ERROR|CRITICAL|FATAL)\b(?!: All log messages before absl)"  # logging
  r"|[WEF]\d{4} \d\d:\d\d:"  # absl
  r"|\d{4}-\d\d-\d\d [\d:.]+: [WEF] "  # TensorFlow
  r"|\S+:\d+: \w*Warning: "  # Python's warnings
)
_PORT_TAKEN = ("another process uses the port", "Could not start gRPC server")
"""The messages of strategies/cluster/rendezvous.py and of TensorFlow about a port in use."""
_DIE_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
libc = ctypes.CDLL(None, use_errno=True)
for descriptor in map(int, filter(None, sys.argv[2].split(","))):  # before prctl, as it resets it
  if libc.setns(descriptor, 0):
    sys.exit(f"cannot enter the private network: {os.strerror(ctypes.get_errno())}")
libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):  # else the parent died before prctl
  os.execvp(sys.argv[3], sys.argv[3:])
"""

Environment = Mapping[str, str]
Cluster = Mapping[str, Sequence[str]]


def run_local(
  *,
  command: Sequence[str],
  model_dir: str,
  workers: int,
  ps: int = 0,
  max_restarts: int = 0,
  grace_s: float = GRACE_S,
) -> int:
  """Runs `command` once for each task of a cluster and supervises the processes (main thread).

  Each process reads its task from TF_CONFIG. Without `ps` the cluster is N workers, of which worker
  0 is the chief. With `ps` it is a chief (the coordinator), N workers and M parameter servers.

  Args:
    model_dir: a local folder; output goes to <model_dir>/logs/<name>.log.
    ps: the number of parameter servers; they and the workers end with the chief.
    max_restarts: how often to restart after a failure.
    grace_s: seconds from SIGTERM, which is forwarded to the processes, to SIGKILL.

  Returns:
    The exit status, as launch.py documents it.

  Raises:
    ConfigError: this is not Linux, or the logs cannot be written.
  """
  if not hasattr(os, "pidfd_open"):
    raise ConfigError("a local cluster needs Linux; leave out --local_workers.")
  log_dir = _made_log_dir(model_dir)
  with private_network.opened(os.environ, say=_say) as namespaces:
    cluster = LocalCluster(
      command=command,
      log_dir=log_dir,
      workers=workers,
      ps=ps,
      max_restarts=max_restarts,
      grace_s=grace_s,
      namespaces=namespaces,
    )
    return cluster.run()


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
  workers: int
  ps: int
  max_restarts: int
  grace_s: float
  namespaces: Sequence[int] = ()

  def __post_init__(self) -> None:
    """Starts nothing yet."""
    self._restarts = self._clashes = self._presses = 0
    self._selector = selectors.DefaultSelector()
    self._processes: list[Process] = []
    self._ends: collections.deque[Process] = collections.deque()
    self._ended: list[Process] = []
    self._signals: collections.deque[int] = collections.deque()
    self._stopping: int | None = None
    self._deadline: float | None = None

  def run(self) -> int:
    """Runs until the cluster ends and returns the exit status; stops all processes in any case."""
    with self._noticing_signals(), self._selector:
      try:
        self._attempt()
        while self._starts_again():
          self._attempt()
      finally:
        self._kill()
    return self._report()

  def _attempt(self) -> None:
    self._ended, self._deadline = [], None
    self._processes = self._make_processes(make_cluster(workers=self.workers, ps=self.ps))
    for process in self._processes:
      process.start()
    while any(process.running for process in self._processes):
      self._supervise()

  def _make_processes(self, cluster: Cluster) -> list[Process]:
    first, secret = next(iter(cluster)), secrets.token_hex(32)
    return [
      Process(
        kind=kind,
        index=index,
        command=self.command,
        environment=_environment(cluster, kind, index, secret),
        log_dir=self.log_dir,
        leads=kind == first and index == 0,
        selector=self._selector,
        on_end=self._ends.append,
        namespaces=self.namespaces,
      )
      for kind, hosts in cluster.items()
      for index in range(len(hosts))
    ]

  def _supervise(self) -> None:
    left_s = None if self._deadline is None else self._deadline - time.monotonic()
    if left_s is not None and left_s <= 0:
      self._kill()
      left_s = 0
    for key, _ in self._selector.select(left_s):
      key.data()
    while self._signals:
      self._pass_on(self._signals.popleft())
    while self._ends:
      self._answer(self._ends.popleft())

  def _answer(self, process: Process) -> None:
    if self._restarts_alone(process):
      self._restarts += 1
      _say(f"{process.how_it_ended()}; restarting it, {self._attempt_number()}")
      process.start()
      return
    if self._is_dispensable(process):
      _say(f"{process.how_it_ended()}; continuing without it")
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
    if culprit is None or self._stopping or self._verdict() != 1:
      return False
    if culprit.port_was_taken and self._clashes < PORT_CLASHES:
      self._clashes += 1
      _say(f"{culprit.name} found its port in use; restarting all processes on other ports")
      return True
    if self._restarts >= self.max_restarts:
      return False
    self._restarts += 1
    _say(f"{culprit.how_it_ended()}; restarting all processes, {self._attempt_number()}")
    return True

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
      _say("interrupted")
    elif status == MISTAKE:
      self._report_mistake(next(p for p in self._ended if p.status == MISTAKE))
    elif status == 1 and culprit:
      lines = [] if culprit.leads else culprit.last_lines
      for line in lines:
        _say(f"[{culprit.name}] {line}")
      _say(f"failed: {culprit.how_it_ended()}; its log is {culprit.log_path}")
    return status

  def _report_mistake(self, process: Process) -> None:
    line = process.last_lines[-1] if process.last_lines else process.how_it_ended()
    if line not in self._processes[0].last_lines:
      _say(f"[{process.name}] {line}")

  def _pass_on(self, number: int) -> None:
    """Handles a signal to this process; a second Ctrl-C kills at once."""
    again, self._stopping = self._stopping is not None, self._stopping or number
    self._presses += number == signal.SIGINT
    if self._presses > 1:
      self._stopping = signal.SIGINT
    self._limit(0 if self._presses > 1 else self.grace_s)
    if again:
      if number == signal.SIGINT and self._presses == 1:
        _say("Ctrl-C: the processes are saving; press it again to end at once")
      return
    # The chief saves the variables of the parameter servers, so servers and workers end after it.
    for process in self._processes[:1] if self.ps else self._processes:
      process.send(number)

  def _limit(self, seconds: float) -> None:
    """Sets the deadline, `seconds` from now, unless an earlier one is set; then all are killed."""
    deadline = time.monotonic() + seconds
    self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

  def _kill(self) -> None:
    overdue = self._stopping is not None or any(p.status == SAVED for p in self._ended)
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


@dataclasses.dataclass(kw_only=True, eq=False)
class Process:
  """One task of the cluster; it can be restarted after it has ended.

  It leads its own session: a terminal's Ctrl-C does not reach it, and its children are killed with
  it.

  The output of the chief, which `leads`, is shown; of others only warnings and errors are.
  """

  kind: str
  index: int
  command: Sequence[str]
  environment: Environment
  log_dir: str
  leads: bool
  selector: selectors.BaseSelector
  on_end: Callable[[Process], object]
  namespaces: Sequence[int] = ()
  status: int | None = None
  seconds: float = 0.0

  def __post_init__(self) -> None:
    """Starts nothing yet."""
    self.name = self.kind if self.kind == "chief" else f"{self.kind}-{self.index}"
    self.log_path = os.path.join(self.log_dir, f"{self.name}.log")
    self._popen: subprocess.Popen[bytes] | None = None
    self._killed_as: str | None = None
    self._outputs: list[_Output] = []
    self._tail: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)

  @property
  def running(self) -> bool:
    """Whether it was started and `reap` has not seen its end."""
    return self._popen is not None

  @property
  def last_lines(self) -> list[str]:
    """The last lines of output since it was started."""
    return list(self._tail)

  @property
  def port_was_taken(self) -> bool:
    """Whether the process could not listen on its address because the port was in use."""
    return self.status == 1 and any(sign in line for sign in _PORT_TAKEN for line in self._tail)

  def start(self) -> None:
    """Starts it; call from the main thread: the process dies with the thread that starts it."""
    self.status, self._killed_as = None, None
    self._tail.clear()
    self._log = open(self.log_path, "ab", buffering=0)  # noqa: SIM115 (closed by reap)
    self._log.write(self._header().encode())
    self._started = time.monotonic()
    self._popen = self.spawn()
    self._pidfd = os.pidfd_open(self._popen.pid)
    self.selector.register(self._pidfd, selectors.EVENT_READ, self.reap)
    self._outputs = [
      _Output(pipe, stream if self.leads else None)
      for pipe, stream in ((self._popen.stdout, sys.stdout), (self._popen.stderr, sys.stderr))
      if pipe
    ]
    for output in self._outputs:
      os.set_blocking(output.pipe.fileno(), False)
      self.selector.register(output.pipe, selectors.EVENT_READ, partial(self._read, output))

  def send(self, number: int) -> None:
    """Sends a signal if the process runs."""
    if self._popen is not None:
      signal.pidfd_send_signal(self._pidfd, number)

  def kill(self, why: str | None = None) -> None:
    """Sends SIGKILL to the process and its children, if it runs; `reap` waits for the end.

    Args:
      why: the reason that `how_it_ended` gives; None for "was killed".
    """
    if self._popen is not None:
      self._killed_as = why
      os.killpg(self._popen.pid, signal.SIGKILL)

  def reap(self) -> None:
    """Waits for its end, if it runs, and reads the rest of its output."""
    if self._popen is None:
      return
    os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
    os.killpg(self._popen.pid, signal.SIGKILL)  # its children; the pid stays reserved until `wait`
    self.status = self._popen.wait()
    self.seconds = time.monotonic() - self._started
    self._popen = None
    self.selector.unregister(self._pidfd)
    os.close(self._pidfd)
    for output in self._outputs:
      self._drain(output)
    self._log.close()
    self.on_end(self)

  def how_it_ended(self) -> str:
    """Returns one phrase, such as "worker-1 was killed by SIGKILL after 12.3 s"."""
    status = self.status or 0
    by_itself = (
      f"was killed by {signal.Signals(-status).name}"
      if status < 0
      else f"ended with status {status}"
    )
    return f"{self.name} {self._killed_as or by_itself} after {self.seconds:.1f} s"

  def spawn(self) -> subprocess.Popen[bytes]:
    """Starts the process."""
    wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    return subprocess.Popen(
      [*wrapper, ",".join(map(str, self.namespaces)), *self.command],
      bufsize=0,
      env=self.environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE if self.leads else subprocess.STDOUT,
      start_new_session=True,
      pass_fds=self.namespaces,
    )

  def _header(self) -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    config = shlex.quote(self.environment["TF_CONFIG"])
    return f"=== {now} {self.name}: TF_CONFIG={config} {redaction.command(self.command)}\n"

  def _read(self, output: _Output) -> None:
    if output.pipe.closed:
      return  # by an event of the same round
    data = output.pipe.read(65536)
    if data:
      *lines, output.rest = (output.rest + data).split(b"\n")
      self._keep(lines, output.stream)
    elif data is not None:  # None: nothing is there yet
      self._close(output)

  def _keep(self, lines: Sequence[bytes], stream: TextIO | None) -> None:
    for line in lines:
      self._log.write(line + b"\n")
      text = line.decode(errors="replace")
      self._tail.append(text)
      if stream is not None:
        _write(stream, line)
      elif _LOUD.match(text):
        _say(f"[{self.name}] {text}")

  def _drain(self, output: _Output) -> None:
    """Reads to the end, for at most 0.5 s: a daemon of the process may keep the pipe open."""
    until = time.monotonic() + 0.5
    pipe = output.pipe
    while not pipe.closed and select.select([pipe], [], [], max(0, until - time.monotonic()))[0]:
      self._read(output)
    self._close(output)

  def _close(self, output: _Output) -> None:
    if output.pipe.closed:
      return
    if output.rest:
      self._keep([output.rest], output.stream)
    self.selector.unregister(output.pipe)
    output.pipe.close()


@dataclasses.dataclass
class _Output:
  """A pipe that a process writes to; its lines are copied to `stream`; `rest` is incomplete."""

  pipe: IO[bytes]
  stream: TextIO | None
  rest: bytes = b""


def _say(line: str) -> None:
  _write(sys.stderr, line.encode())


def _write(stream: TextIO, line: bytes) -> None:
  if isinstance(stream, Lasting):
    stream.put(line + b"\n")
    return
  with outlasting(stream):
    stream.flush()
    stream.buffer.write(line + b"\n")
    stream.buffer.flush()


def _made_log_dir(model_dir: str) -> str:
  stores.require_path("model_dir", model_dir, "a local cluster writes its logs there")
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


def _environment(cluster: Cluster, kind: str, index: int, secret: str) -> Environment:
  config = {"cluster": cluster, "task": {"type": kind, "index": index}}
  unbuffered = {"PYTHONUNBUFFERED": "1"}  # keeps the last lines of a killed process
  own = {wire.SECRET: secret, "TF_CONFIG": json.dumps(config)}
  inherited = {name: text for name, text in os.environ.items() if name != wire.SECRET_FILE}
  return {**unbuffered, **inherited, **own}
