"""Trials as processes of `loopwright train`, each on its part of the cores or GPUs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loopwright.errors import UsageError
from loopwright.host import nvidia
from loopwright.host.children import PROGRAM
from loopwright.tools.local_process import with_parent
from loopwright.tools.sweep import space

OUTPUT, LOCK = "output.txt", "sweep.lock"
GRACE_S = 120.0
"""Seconds from SIGTERM to SIGKILL, in which a trial saves."""


class Slot(NamedTuple):
  """What one trial at a time uses: cores, and changes of the environment."""

  cores: frozenset[int]
  environment: Mapping[str, str]


class Command(NamedTuple):
  """The config of all trials."""

  files: Sequence[str]
  params: Sequence[str]

  def of(self, values: Mapping[str, str], model_dir: str) -> list[str]:
    """Returns the command that trains one trial."""
    files = [f"--gin_file={each}" for each in self.files]
    params = [f"--gin_param={each}" for each in (*self.params, *space.bindings(values))]
    return [*PROGRAM, "train", *files, *params, f"--model_dir={model_dir}"]


def slots(jobs: int) -> list[Slot]:
  """Returns a slot for each job: disjoint parts of the GPUs, or without any of the cores (host).

  Raises:
    UsageError: more jobs than GPUs, or than cores.
  """
  gpus, cores = nvidia.visible(), _cores()
  if gpus:
    _require(jobs, len(gpus), "GPUs", "; CUDA_VISIBLE_DEVICES=-1 in the environment uses the cores")
    parts = nvidia.divided(gpus, jobs)
    return [Slot(frozenset(), {nvidia.VISIBLE: ",".join(part)}) for part in parts]
  if cores:
    _require(jobs, len(cores), "cores", "")
  size = len(cores) // jobs
  return [Slot(frozenset(cores[size * job : size * (job + 1)]), {}) for job in range(jobs)]


def _require(jobs: int, most: int, what: str, more: str) -> None:
  if jobs > most:
    raise UsageError(f"--jobs={jobs} is above the {most} {what} here; give at most {most}{more}")


def _cores() -> list[int]:
  return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class Lock:
  """The right to run a trial: held while this process or the trial's process lives.

  The trial's process inherits the descriptor. So after a kill of the sweep its trials, which then
  save and end, are not started a second time meanwhile.
  """

  def __init__(self, folder: str) -> None:
    """Opens the lock's file in a trial's folder; makes both."""
    os.makedirs(folder, exist_ok=True)
    self.descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o666)

  def take(self) -> bool:
    """Returns whether the lock is ours now; True where the file system has no locks."""
    with contextlib.suppress(OSError):
      try:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        return False
    return True

  def close(self) -> None:
    """Gives the lock back, once the trial's process has ended."""
    os.close(self.descriptor)


class Job:
  """A trial that runs.

  Attributes:
    slot: what it uses.
    stopped: whether it was asked to end.
  """

  def __init__(self, command: Sequence[str], folder: str, slot: Slot, lock: Lock) -> None:
    """Starts the process; its output is appended to <folder>/output.txt."""
    self.slot, self.stopped = slot, False
    self._folder, self._lock, self._deadline = folder, lock, float("inf")
    with open(os.path.join(folder, OUTPUT), "ab") as output:
      self._process = subprocess.Popen(
        [*with_parent(signal.SIGTERM), *command],
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        env={**os.environ, **slot.environment}, pass_fds=[lock.descriptor], start_new_session=True,
      )  # fmt: skip
    if slot.cores:
      with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(self._process.pid, slot.cores)

  def status(self) -> int | None:
    """Returns the exit status; None while it runs. Kills a process that does not end in time."""
    if time.monotonic() > self._deadline:
      self._process.kill()
    return self._process.poll()

  def stop(self) -> None:
    """Asks the process to save and end."""
    if not self.stopped:
      self.stopped, self._deadline = True, time.monotonic() + GRACE_S
      self._process.send_signal(signal.SIGTERM)

  def close(self) -> None:
    """Gives the trial back, after the process has ended."""
    self._lock.close()

  def last_line(self) -> str:
    """Returns the last line that the process wrote."""
    with open(os.path.join(self._folder, OUTPUT), "rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
      lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
