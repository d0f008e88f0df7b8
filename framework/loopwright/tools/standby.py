"""A process that has imported what a run needs, and forks the processes of a local cluster.

Importing takes most of the time of a start, and every worker has to. Nothing here uses a device or
starts a thread, so that a fork can go on as a new process does.

A fork becomes a child of the supervisor: its parent, in between, ends at once, and the kernel gives
it to the next process above that collects orphans, which the supervisor has asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from loopwright.host import lazy_keras
from loopwright.host.children import PROGRAM, SOURCE
from loopwright.tools.local_process import Environment, with_parent

_IMPORTED = ("loopwright.runs.runner", "tensorboard.summary.v2")
"""What takes long: TensorFlow and Keras; also what the first report imports."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_BYTES = 1 << 20
IMPORTS_S = 300.0
"""Seconds after which a process that has not imported everything is not waited for."""
_ANSWERS_S = 10.0
"""A fork takes milliseconds: a process that has not answered for so long is stopped."""
_SERVE = """
import sys
sys.path[0], descriptor, supervisor = sys.argv[1:]  # before a file named socket.py can be found
import socket
from loopwright.tools.standby import serve
serve(socket.socket(fileno=int(descriptor)), int(supervisor))
"""


class Forked:
  """What `subprocess.Popen` has of a process, of one that was forked."""

  def __init__(self, pid: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
    """Takes its id, and the pipes that it writes to."""
    self.pid, self.stdout, self.stderr = pid, stdout, stderr

  def wait(self) -> int:
    """Waits for the end; returns the status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Standby:
  """Starts it, in the supervisor, and asks it for processes; close it at the end."""

  def __init__(self, *, namespaces: Sequence[int] = ()) -> None:
    """Starts importing; `namespaces` are descriptors of those of the processes."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self.waiting = True
    python = [sys.executable, "-c", _SERVE, str(SOURCE), str(theirs.fileno()), str(os.getpid())]
    with theirs:
      self._popen = subprocess.Popen(
        [*with_parent(namespaces=namespaces), *python],
        env={"PYTHONUNBUFFERED": "1", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(*namespaces, theirs.fileno()),
      )

  def noted(self) -> None:
    """Reads that it is ready, or has ended; call it when there is something to read."""
    self.waiting = False
    if not self.socket.recv(64):
      self.close()

  def spawn(
    self, command: Sequence[str], environment: Environment, *, merged: bool
  ) -> Forked | None:
    """Returns a new process of a command, `PROGRAM` or a Python file; None if this cannot.

    Args:
      merged: its standard error goes to its output.
    """
    out, err = os.pipe(), None if merged else os.pipe()
    theirs = [out[1], err[1] if err else out[1]]
    request = {"arguments": command[1:], "environment": dict(environment)}
    answer = b""
    with contextlib.suppress(OSError):
      self.socket.settimeout(_ANSWERS_S)
      socket.send_fds(self.socket, [json.dumps(request).encode()], theirs)
      answer = self.socket.recv(64)
    for each in {*theirs, *(() if answer else (out[0], err[0] if err else out[0]))}:
      os.close(each)
    if not answer:
      self.close()
      return None
    return Forked(
      int(answer), os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0) if err else None
    )

  def close(self) -> None:
    """Ends it; its forks stay."""
    self.socket.close()
    self._popen.kill()
    self._popen.wait()


def serve(requests: socket.socket, supervisor: int) -> None:
  """Imports, then forks a process for each request, until the supervisor is gone."""
  lazy_keras.install()
  for name in _IMPORTED:
    importlib.import_module(name)
  gc.freeze()  # else the first collection of a fork copies all that was imported
  requests.send(b"ready")
  while True:
    data, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
    if not data:
      return
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
      child = os.fork()
      if child == 0:
        _go_on(json.loads(data), descriptors, supervisor)
      os.write(write, str(child).encode())
      os._exit(0)
    os.waitpid(middle, 0)
    requests.send(os.read(read, 64))
    for each in (read, write, *descriptors):
      os.close(each)


def _go_on(request: Mapping[str, Any], descriptors: Sequence[int], supervisor: int) -> NoReturn:
  """Becomes a process of the supervisor, as one that it has started itself."""
  os.setsid()
  os.dup2(descriptors[0], 1)
  os.dup2(descriptors[1], 2)
  os.closerange(3, 1024)
  while os.getppid() != supervisor:
    if os.getppid() == 1:
      os._exit(1)
    time.sleep(0.001)
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != supervisor:
    os._exit(1)
  os.environ.clear()
  os.environ.update(request["environment"])
  start, given = [*PROGRAM[1:]], request["arguments"]
  if given[: len(start)] == start:
    sys.argv = ["loopwright", *given[len(start) :]]
    runpy.run_module("loopwright", run_name="__main__")
  else:
    sys.argv = given
    runpy.run_path(sys.argv[0], run_name="__main__")
  os._exit(0)
