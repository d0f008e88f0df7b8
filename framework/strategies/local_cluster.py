"""A TensorFlow cluster on this machine, for development: one process a task, none left behind.

status = run_local(command=["python", "launch.py", "--gin_file=x.gin"], model_dir="m", workers=2)

Linux only: children die with their parent (prctl), and a pidfd tells which of them ended first.
Nothing here imports TensorFlow. GPUs are not shared out: every process sees all of them.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import fcntl
import json
import os
import re
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from framework.errors import ConfigError

SAVED = 75
"""The status of a process that saved its state on SIGTERM; see launch.py for all of them."""
MISTAKE = 2
INTERRUPTED = 130
GRACE_S = 60.0
"""How long the processes may take to save after SIGTERM, before SIGKILL."""
INTERRUPT_GRACE_S = 5.0
SHOWN_LINES = 20
PORT_CLASHES = 3
"""How often a cluster is started again, beside `max_restarts`, because a port was taken."""

_LOUD = re.compile(
  r"(WARNING|ERROR|CRITICAL|FATAL)\b(?!: All log messages before absl)"  # logging
  r"|[WEF]\d{4} \d\d:\d\d:"  # absl
  r"|\d{4}-\d\d-\d\d [\d:.]+: [WEF] "  # TensorFlow
  r"|\S+:\d+: \w*Warning: "  # Python's warnings
)
_PORT_TAKEN = ("another process has taken it", "Could not start gRPC server")
"""What framework/strategies/rendezvous.py and TensorFlow say of it."""
_DIE_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):  # else it died before prctl
  os.execvp(sys.argv[2], sys.argv[2:])
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
  """Runs `command` once for each task of a cluster and supervises them (main thread of a host).

  Each process finds its place in TF_CONFIG. Without `ps` the cluster is N workers, of which worker
  0 is the chief; with it a chief (the coordinator), N workers and M parameter servers.

  Args:
    command: what each process runs.
    model_dir: a local folder; the processes' output goes to <model_dir>/logs/<name>.log.
    workers: how many.
    ps: how many parameter servers; they and their workers end with the chief.
    max_restarts: how many failures to answer with a new start.
    grace_s: seconds from SIGTERM, which is passed on for the state to be saved, to SIGKILL.

  Returns:
    The exit status, as launch.py documents it.

  Raises:
    ConfigError: this is not Linux, or the logs cannot be written.
  """
  if not hasattr(os, "pidfd_open"):
    raise ConfigError("a local cluster needs Linux; leave out --local_workers.")
  cluster = LocalCluster(
    command=command,
    log_dir=_made_log_dir(model_dir),
    workers=workers,
    ps=ps,
    max_restarts=max_restarts,
    grace_s=grace_s,
  )
  return cluster.run()


def free_ports(count: int) -> list[int]:
  """Returns distinct ports of 127.0.0.1 that are free now; someone may take one before its use."""
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for one in sockets:
      one.bind(("127.0.0.1", 0))
    return [one.getsockname()[1] for one in sockets]


def make_cluster(*, workers: int, ps: int = 0) -> dict[str, list[str]]:
  """Returns the "cluster" of TF_CONFIG, with fresh ports; the chief's task comes first."""
  counts = {"chief": 1, "worker": workers, "ps": ps} if ps else {"worker": workers}
  ports = iter(free_ports(sum(counts.values())))
  return {
    kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for kind, count in counts.items()
  }


class LocalCluster:
  """Starts the processes, waits for what decides the run, stops them, and perhaps starts again.

      start all -> the first failure, a mistake, the chief's end, a signal -> stop all -> verdict

  One thread and one selector: the kernel queues the ends in the order in which they happen.
  """

  def __init__(
    self,
    *,
    command: Sequence[str],
    log_dir: str,
    workers: int,
    ps: int,
    max_restarts: int,
    grace_s: float,
  ) -> None:
    """Starts nothing yet; see `run_local`."""
    self._command, self._log_dir = command, log_dir
    self._workers, self._ps = workers, ps
    self._max_restarts, self._grace_s = max_restarts, grace_s
    self._restarts = self._clashes = 0
    self._terminal = Terminal()
    self._selector = selectors.DefaultSelector()
    self._processes: list[Process] = []
    self._ends: collections.deque[Process] = collections.deque()
    self._ended: list[Process] = []
    self._signals: collections.deque[int] = collections.deque()
    self._stopping: int | None = None
    self._deadline: float | None = None

  def run(self) -> int:
    """Runs to the end and returns the exit status; no process is left, whatever happens."""
    with self._noticing_signals(), self._selector:
      try:
        self._attempt()
        while self._starts_again():
          self._attempt()
      finally:
        self._kill()
    return self._report()

  def _attempt(self) -> None:
    """Starts all and returns when all have ended."""
    self._ended, self._deadline = [], None
    self._processes = self._make_processes(make_cluster(workers=self._workers, ps=self._ps))
    for process in self._processes:
      process.start()
    while any(process.running for process in self._processes):
      self._supervise()

  def _make_processes(self, cluster: Cluster) -> list[Process]:
    tasks = [(kind, index) for kind, hosts in cluster.items() for index in range(len(hosts))]
    return [
      Process(
        kind=kind,
        index=index,
        command=self._command,
        environment=_environment(cluster, kind, index),
        log_dir=self._log_dir,
        terminal=self._terminal,
        leads=number == 0,
        selector=self._selector,
        on_end=self._ends.append,
      )
      for number, (kind, index) in enumerate(tasks)
    ]

  def _supervise(self) -> None:
    """Waits until something happens, and answers it."""
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
    """Decides what the end of one process means for the others."""
    if self._restarts_alone(process):
      self._restarts += 1
      self._say(f"{process.how_it_ended()}; starting it again, {self._attempt_number()}")
      process.start()
      return
    if self._is_dispensable(process):
      self._say(f"{process.how_it_ended()}; going on without it")
      return
    self._ended.append(process)
    if process.status == SAVED:
      self._limit(self._grace_s)  # the others are about to save, or stuck without this one
    failed = process.status not in (0, SAVED)
    if (failed and not self._stopping) or (self._ps and process.leads):
      self._limit(0)

  def _restarts_alone(self, process: Process) -> bool:
    """Of a cluster with parameter servers, workers alone hold no state."""
    return (
      self._ps > 0
      and process.kind == "worker"
      and process.status not in (0, MISTAKE)
      and not process.port_was_taken
      and self._deadline is None
      and self._restarts < self._max_restarts
    )

  def _is_dispensable(self, process: Process) -> bool:
    """A killed worker beside parameter servers, as long as there is another."""
    others = any(p.running and p.kind == "worker" for p in self._processes)
    killed = process.status is not None and process.status < 0
    return self._ps > 0 and process.kind == "worker" and killed and others and not self._deadline

  def _starts_again(self) -> bool:
    """Counts and announces a new start, if there is to be one."""
    culprit = self._culprit()
    if culprit is None or self._stopping or self._verdict() != 1:
      return False
    if culprit.port_was_taken and self._clashes < PORT_CLASHES:
      self._clashes += 1
      self._say(f"{culprit.name} found its port taken; starting all again with other ports")
      return True
    if self._restarts >= self._max_restarts:
      return False
    self._restarts += 1
    self._say(f"{culprit.how_it_ended()}; starting all again, {self._attempt_number()}")
    return True

  def _attempt_number(self) -> str:
    return f"attempt {self._restarts} of {self._max_restarts}"

  def _verdict(self) -> int:
    """The exit status of an attempt that is over."""
    if self._stopping == signal.SIGINT:
      return INTERRUPTED
    statuses = [process.status for process in self._ended]
    chief = self._processes[0].status
    if self._ps and chief in (0, SAVED):
      return chief
    if MISTAKE in statuses:
      return MISTAKE
    if self._culprit():
      return 1
    return SAVED if SAVED in statuses else 0

  def _culprit(self) -> Process | None:
    """The first process that failed; those after it may only have lost their peer."""
    return next((p for p in self._ended if p.status not in (0, SAVED)), None)

  def _report(self) -> int:
    """Says what the chief's own output does not; returns the exit status."""
    status, culprit = self._verdict(), self._culprit()
    if status == INTERRUPTED and self._processes[0].status != INTERRUPTED:
      self._say("interrupted")
    elif status == MISTAKE:
      self._report_mistake(next(p for p in self._ended if p.status == MISTAKE))
    elif status == 1 and culprit:
      lines = [] if culprit.leads else culprit.last_lines
      for line in lines:
        self._say(f"[{culprit.name}] {line}")
      self._say(f"failed: {culprit.how_it_ended()}; its log is {culprit.log_path}")
    return status

  def _report_mistake(self, process: Process) -> None:
    line = process.last_lines[-1] if process.last_lines else process.how_it_ended()
    if line not in self._processes[0].last_lines:
      self._say(f"[{process.name}] {line}")

  def _pass_on(self, number: int) -> None:
    """Answers a signal to this process; a second Ctrl-C does not wait."""
    if number == signal.SIGWINCH:
      for process in self._processes:
        process.resize()
      return
    if number == self._stopping:
      self._limit(0 if number == signal.SIGINT else self._grace_s)
      return
    self._stopping = number
    self._limit(INTERRUPT_GRACE_S if number == signal.SIGINT else self._grace_s)
    # The chief saves what the parameter servers hold: they and the workers must outlive it.
    for process in self._processes[:1] if self._ps else self._processes:
      process.send(number)

  def _limit(self, seconds: float) -> None:
    """The processes left are killed after so many seconds, if not earlier."""
    deadline = time.monotonic() + seconds
    self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

  def _kill(self) -> None:
    overdue = self._stopping is not None or any(p.status == SAVED for p in self._ended)
    for process in self._processes:
      process.kill(f"did not end within {self._grace_s:g} s of SIGTERM" if overdue else None)
    for process in self._processes:
      process.reap()

  def _say(self, line: str) -> None:
    self._terminal.say(line)

  @contextlib.contextmanager
  def _noticing_signals(self) -> Iterator[None]:
    """SIGINT and SIGTERM wake the selector, which children's own ends and output share."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    self._selector.register(ours, selectors.EVENT_READ, partial(ours.recv, 4096))
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    before = {n: signal.signal(n, lambda n, _: self._signals.append(n)) for n in heeded}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
      signal.set_wakeup_fd(wakeup)
      ours.close()
      theirs.close()


class Process:
  """One task of the cluster; it can be started again once it has ended.

  It leads a session of its own: a terminal's Ctrl-C does not reach it, and what it has started
  dies with it.
  """

  def __init__(
    self,
    *,
    kind: str,
    index: int,
    command: Sequence[str],
    environment: Environment,
    log_dir: str,
    terminal: Terminal,
    leads: bool,
    selector: selectors.BaseSelector,
    on_end: Callable[[Process], object],
  ) -> None:
    """Starts nothing yet.

    Args:
      kind: the task's type in TF_CONFIG.
      index: and its index.
      command: what to run.
      environment: of the process, whole.
      log_dir: where its output is kept.
      terminal: where it is shown: all of it if the process `leads`, else warnings and errors.
      leads: whether it is the chief.
      selector: told to call back when there is output, and when the process ends.
      on_end: called once for each start.
    """
    self.kind, self.leads = kind, leads
    self.name = kind if kind == "chief" else f"{kind}-{index}"
    self.log_path = os.path.join(log_dir, f"{self.name}.log")
    self.status: int | None = None
    self.seconds = 0.0
    self._command, self._environment = command, environment
    self._terminal, self._selector, self._on_end = terminal, selector, on_end
    self._popen: subprocess.Popen[bytes] | None = None
    self._killed_as: str | None = None
    self._lines: dict[int, _Lines] = {}
    self._tail: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)

  @property
  def running(self) -> bool:
    """Whether it has been started and its end has not been noticed yet."""
    return self._popen is not None

  @property
  def last_lines(self) -> list[str]:
    """The last lines of its output since it was started."""
    return list(self._tail)

  @property
  def port_was_taken(self) -> bool:
    """Whether TensorFlow could not listen on the address of this task."""
    return self.status == 1 and any(sign in line for sign in _PORT_TAKEN for line in self._tail)

  def start(self) -> None:
    """Starts it, from the main thread: it dies with the thread that started it."""
    self.status, self._killed_as = None, None
    self._tail.clear()
    self._log = open(self.log_path, "ab", buffering=0)  # noqa: SIM115 (closed by reap)
    self._log.write(self._header().encode())
    streams = [sys.stdout, sys.stderr] if self.leads else [None]
    channels = [(stream, *_channel(stream)) for stream in streams]
    self._started = time.monotonic()
    self._popen = self._spawn(stdout=channels[0][-1], stderr=channels[-1][-1])
    self._pidfd = os.pidfd_open(self._popen.pid)
    self._selector.register(self._pidfd, selectors.EVENT_READ, self.reap)
    for stream, ours, theirs in channels:
      os.close(theirs)
      os.set_blocking(ours, False)
      self._lines[ours] = _Lines(stream)
      self._selector.register(ours, selectors.EVENT_READ, partial(self._read, ours))

  def send(self, number: int) -> None:
    """Sends a signal, if it runs."""
    if self._popen is not None:
      signal.pidfd_send_signal(self._pidfd, number)

  def kill(self, why: str | None = None) -> None:
    """Ends it now, if it runs, and all that it has started; `reap` waits for that.

    Args:
      why: how it is to be said to have ended, if not simply killed.
    """
    if self._popen is not None:
      self._killed_as = why
      os.killpg(self._popen.pid, signal.SIGKILL)

  def reap(self) -> None:
    """Waits for its end, if it runs; takes in the last of its output."""
    if self._popen is None:
      return
    os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
    os.killpg(self._popen.pid, signal.SIGKILL)  # its children; its pid is not free before `wait`
    self.status = self._popen.wait()
    self.seconds = time.monotonic() - self._started
    self._popen = None
    self._selector.unregister(self._pidfd)
    os.close(self._pidfd)
    for fd in list(self._lines):
      self._drain(fd)
    self._log.close()
    self._on_end(self)

  def how_it_ended(self) -> str:
    """Returns such as "worker-1 was killed by SIGKILL after 12.3 s"."""
    status = self.status or 0
    by_itself = (
      f"was killed by {signal.Signals(-status).name}"
      if status < 0
      else f"ended with status {status}"
    )
    return f"{self.name} {self._killed_as or by_itself} after {self.seconds:.1f} s"

  def resize(self) -> None:
    """Tells the process of the terminal's new size."""
    for fd, lines in self._lines.items():
      if lines.stream is not None and os.isatty(fd):
        _copy_size(lines.stream, fd)

  def _spawn(self, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    return subprocess.Popen(
      [*wrapper, *self._command],
      env=self._environment,
      stdin=subprocess.DEVNULL,
      stdout=stdout,
      stderr=stderr,
      start_new_session=True,
    )

  def _header(self) -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    config = shlex.quote(self._environment["TF_CONFIG"])
    return f"=== {now} {self.name}: TF_CONFIG={config} {shlex.join(self._command)}\n"

  def _read(self, fd: int) -> None:
    """Takes in what has come on one channel; at its end the channel is closed."""
    if fd not in self._lines:
      return  # closed by an event of the same round
    with contextlib.suppress(BlockingIOError):
      data = _read_some(fd)
      self._take(self._lines[fd], data)
      if not data:
        self._close(fd)

  def _take(self, lines: _Lines, data: bytes) -> None:
    if lines.stream is not None:
      self._terminal.copy(lines.stream, data)
    self._keep(lines.feed(data))

  def _keep(self, lines: Sequence[bytes]) -> None:
    for line in lines:
      self._log.write(line + b"\n")
      text = line.decode(errors="replace")
      self._tail.append(text)
      if not self.leads and _LOUD.match(text):
        self._terminal.say(f"[{self.name}] {text}")

  def _drain(self, fd: int) -> None:
    """Reads to the end, which does not come while a daemon of the process keeps the channel."""
    until = time.monotonic() + 0.5
    while fd in self._lines and select.select([fd], [], [], max(0, until - time.monotonic()))[0]:
      self._read(fd)
    self._close(fd)

  def _close(self, fd: int) -> None:
    lines = self._lines.pop(fd, None)
    if lines is not None:
      self._keep(lines.end())
      if lines.stream is not None:
        self._terminal.end(lines.stream)
      self._selector.unregister(fd)
      os.close(fd)


class Terminal:
  """Our stdout and stderr: the chief's bytes as they are, and lines of others between its lines."""

  def __init__(self) -> None:
    """Shows nothing yet."""
    self._rest: dict[TextIO, bytes] = {}  # what the chief has begun and not ended

  def copy(self, stream: TextIO, data: bytes) -> None:
    """Shows bytes of the chief's: on a terminal at once, elsewhere when their line is whole."""
    lines, end, rest = (self._rest.get(stream, b"") + data).rpartition(b"\n")
    self._rest[stream] = rest.rpartition(b"\r")[2] if stream.isatty() else rest
    _write(stream, data if stream.isatty() else lines + end)

  def say(self, line: str) -> None:
    """Shows one line on stderr, above the chief's live line if there is one."""
    text = line.encode() + b"\n"
    live = self._rest.get(sys.stderr, b"") if sys.stderr.isatty() else b""
    _write(sys.stderr, b"\r\x1b[K" + text + live if live else text)

  def end(self, stream: TextIO) -> None:
    """Ends the chief's last line if it has not done so."""
    rest = self._rest.pop(stream, b"")
    if rest:
      _write(stream, b"\n" if stream.isatty() else rest + b"\n")


def _write(stream: TextIO, data: bytes) -> None:
  stream.flush()
  stream.buffer.write(data)
  stream.buffer.flush()


class _Lines:
  """Bytes in, whole lines out; of a line redrawn after carriage returns, the last drawing."""

  def __init__(self, stream: TextIO | None) -> None:
    """Takes the stream on which the bytes are to be shown as well, if any."""
    self.stream = stream
    self._rest = b""

  def feed(self, data: bytes) -> list[bytes]:
    *lines, rest = (self._rest + data).split(b"\n")
    self._rest = _last_drawing(rest) + b"\r" * rest.endswith(b"\r")
    return [_last_drawing(line).rstrip() for line in lines]

  def end(self) -> list[bytes]:
    return self.feed(b"\n") if self._rest else []


def _last_drawing(line: bytes) -> bytes:
  return line.rstrip(b"\r").rpartition(b"\r")[2]


def _made_log_dir(model_dir: str) -> str:
  log_dir = os.path.join(model_dir, "logs")
  if "://" in model_dir:
    raise ConfigError(
      f"model_dir is {model_dir!r}; a local cluster keeps its logs there and needs a local folder."
    )
  try:
    os.makedirs(log_dir, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f"cannot make the folder {log_dir!r} for the logs of the local cluster ({error.strerror}); "
      "choose a folder that you may write to with --model_dir."
    ) from error
  return log_dir


def _environment(cluster: Cluster, kind: str, index: int) -> Environment:
  config = {"cluster": cluster, "task": {"type": kind, "index": index}}
  unbuffered = {"PYTHONUNBUFFERED": "1"}  # a killed process takes no line with it
  return {**unbuffered, **os.environ, "TF_CONFIG": json.dumps(config)}


def _channel(stream: Any) -> tuple[int, int]:
  """Returns our end and the child's: a pseudo-terminal if `stream` is a terminal, else a pipe."""
  if stream is None or not stream.isatty():
    return os.pipe()
  ours, theirs = os.openpty()
  tty.setraw(theirs)  # the real terminal does what there is to do
  _copy_size(stream, theirs)
  return ours, theirs


def _copy_size(stream: TextIO, fd: int) -> None:
  size = fcntl.ioctl(stream.fileno(), termios.TIOCGWINSZ, bytes(8))
  fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def _read_some(fd: int) -> bytes:
  """Returns b"" at the end, for which a pseudo-terminal has an error."""
  try:
    return os.read(fd, 65536)
  except BlockingIOError:
    raise
  except OSError:
    return b""
