"""One process of a local cluster: started, watched, ended; its output is kept and shown.

This module does not import TensorFlow.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
import re
import select
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol, TextIO

from loopwright.host import redaction
from loopwright.host.output import outlasting

SHOWN_LINES = 20

_LOUD = re.compile(
  r"(WARNING|ERROR|CRITICAL|FATAL)\b(?!: All log messages before absl)"  # logging
  r"|[WEF]\d{4} \d\d:\d\d:"  # absl
  r"|\d{4}-\d\d-\d\d [\d:.]+: [WEF] "  # TensorFlow
  r"|\S+:\d+: \w*Warning: "  # Python's warnings
)
_PORT_TAKEN = ("another process uses the port", "Could not start gRPC server")
"""The messages of kinds/workers/rendezvous.py and of TensorFlow about a port in use."""
_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
parent, number, namespaces = sys.argv[1:4]
libc = ctypes.CDLL(None, use_errno=True)
for descriptor in map(int, filter(None, namespaces.split(","))):  # before prctl, as it resets it
  if libc.setns(descriptor, 0):
    sys.exit(f"cannot enter the private network: {os.strerror(ctypes.get_errno())}")
getattr(libc, "prctl", lambda *_: 0)(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
if os.getppid() == int(parent):  # else the parent died before prctl
  os.execvp(sys.argv[4], sys.argv[4:])
"""

Environment = Mapping[str, str]


def with_parent(number: int = signal.SIGKILL, namespaces: Sequence[int] = ()) -> list[str]:
  """Returns what starts a command that gets a signal when this process ends, on Linux.

  Args:
    number: the signal.
    namespaces: descriptors of those that it enters.
  """
  program = [sys.executable, "-I", "-S", "-c", _WITH_PARENT]
  return [*program, str(os.getpid()), str(int(number)), ",".join(map(str, namespaces))]


class Started(Protocol):
  """What is used of a `subprocess.Popen`."""

  pid: int
  stdout: IO[bytes] | None
  stderr: IO[bytes] | None

  def wait(self) -> int:
    """Waits for the end; returns the status."""


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
  fork: Callable[..., Started | None] = lambda *_, **__: None
  status: int | None = None
  seconds: float = 0.0

  def __post_init__(self) -> None:
    self.name = self.kind if self.kind == "chief" else f"{self.kind}-{self.index}"
    self.log_path = os.path.join(self.log_dir, f"{self.name}.log")
    self._popen: Started | None = None
    self._killed_as: str | None = None
    self._killed_here = False
    self._outputs: list[_Output] = []
    self._tail: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)

  @property
  def running(self) -> bool:
    """Whether it was started and `reap` has not seen its end."""
    return self._popen is not None

  @property
  def is_stopped(self) -> bool:
    """Whether it runs and a signal has stopped it."""
    if self._popen is None:
      return False
    stat = Path(f"/proc/{self._popen.pid}/stat").read_text()  # there until `reap`
    return stat.rpartition(") ")[2].startswith("T")

  @property
  def last_lines(self) -> list[str]:
    """The last lines of output since it was started."""
    return list(self._tail)

  @property
  def was_killed(self) -> bool:
    """Whether a signal ended it, other than by `kill`."""
    return self.status is not None and self.status < 0 and not self._killed_here

  @property
  def port_was_taken(self) -> bool:
    """Whether the process could not listen on its address because the port was in use."""
    return self.status == 1 and any(sign in line for sign in _PORT_TAKEN for line in self._tail)

  def start(self) -> None:
    """Starts it; call from the main thread: the process dies with the thread that starts it."""
    self.status, self._killed_as, self._killed_here = None, None, False
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
      ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
      self._killed_as, self._killed_here = why, ended is None
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

  def spawn(self) -> Started:
    """Starts the process."""
    forked = self.fork(self.command, self.environment, merged=not self.leads)
    if forked is not None:
      return forked
    return subprocess.Popen(
      [*with_parent(namespaces=self.namespaces), *self.command],
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
        say(f"[{self.name}] {text}")

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


def say(line: str) -> None:
  """Prints a line to stderr."""
  _write(sys.stderr, line.encode())


def _write(stream: TextIO, line: bytes) -> None:
  with outlasting(stream):
    stream.flush()
    stream.buffer.write(line + b"\n")
    stream.buffer.flush()
