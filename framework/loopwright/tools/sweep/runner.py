"""Trials as processes of `loopwright train`; a stop or a kill loses none of them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from loopwright.errors import ConfigError, Preempted, UsageError
from loopwright.host import nvidia, signals
from loopwright.host.children import PROGRAM, with_parent
from loopwright.run_folder import folders
from loopwright.tools.sweep import space

POLL_S = 0.5
say = functools.partial(print, flush=True)
GRACE_S = 120.0
"""Seconds from SIGTERM to SIGKILL, in which a trial saves."""
SAVED = 75  # the exit status of a trial that another process has stopped


class Slot(NamedTuple):
  """What one trial at a time uses: cores, and changes of the environment."""

  cores: frozenset[int]
  environment: Mapping[str, str]


def slots(jobs: int) -> list[Slot]:
  """Returns a slot for each job: disjoint parts of the GPUs, or without any of the cores (host).

  Raises a UsageError for more jobs than there are.
  """
  gpus = nvidia.visible()
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
  most, what = (len(gpus), "GPUs") if gpus else (len(cores), "cores")
  if most and jobs > most:
    raise UsageError(f"--jobs={jobs} is above the {most} {what} here; give at most {most}")
  if gpus:
    parts = nvidia.divided(gpus, jobs)
    return [Slot(frozenset(), {nvidia.VISIBLE: ",".join(part)}) for part in parts]
  size = len(cores) // jobs
  return [Slot(frozenset(cores[size * job : size * (job + 1)]), {}) for job in range(jobs)]


def command(
  files: Sequence[str], params: Sequence[str], values: Mapping[str, str], model_dir: str
) -> list[str]:
  """Returns the command that trains one trial of a config."""
  flags = [f"--gin_file={each}" for each in files]
  flags += [f"--gin_param={each}" for each in (*params, *space.bindings(values))]
  return [*PROGRAM, "train", *flags, f"--model_dir={model_dir}"]


@contextlib.contextmanager
def alone(folder: str) -> Iterator[int]:
  """Holds a folder's lock, which its trials inherit; waits for those that a killed sweep left."""
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, "sweep.lock"), "w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      say(f"waiting for the trials in {folder} that another process runs")
      fcntl.flock(file, fcntl.LOCK_EX)
    yield file.fileno()


def require_same(folder: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
  """Raises a ConfigError if trials in a folder were made from other bindings."""
  for name in sorted({*before, *now}):
    if before.get(name) != now.get(name):
      raise ConfigError(
        f"the trials in {folder!r} have {name} = {before.get(name, '(unset)')}, now "
        f"{now.get(name, '(unset)')}; give new ones another --dir, or go on as before."
      )


class Job:
  """A process of `loopwright train`, and whether it was asked to end."""

  def __init__(self, line: Sequence[str], folder: str, slot: Slot, lock: int) -> None:
    """Starts it; its output is appended to <folder>/output.txt."""
    self.slot, self.folder, self.stopped = slot, folder, False
    self._deadline = math.inf
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "output.txt"), "ab") as output:
      self._process = subprocess.Popen(
        [*with_parent(signal.SIGTERM), *line], stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, env={**os.environ, **slot.environment}, pass_fds=[lock],
        start_new_session=True,
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

  def failure(self, status: int) -> str:
    """Returns the last line that the process wrote, the signal that ended it, or ""."""
    if status <= 0:
      return f"signal {-status}" if status else ""
    with open(os.path.join(self.folder, "output.txt"), "rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
      lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Plan(Protocol):
  """The trials to run, by number; `folder_of` is the run folder of one."""

  def folder_of(self, number: int) -> str: ...  # noqa: D102

  def begin(self) -> tuple[int, Mapping[str, str]] | None:
    """Returns the next trial: its number, and binding -> value; None if there is none."""

  def look(self, number: int) -> bool:
    """Reads what a trial has written so far; returns whether it should end early."""

  def end(self, number: int, job: Job, status: int) -> str:
    """Takes how a trial ended; returns what to say of it."""


def run(plan: Plan, files: Sequence[str], params: Sequence[str], free: list[Slot]) -> None:
  """Runs trials of a config, one in each slot at a time, until all have ended (main thread).

  Raises:
    Preempted: SIGTERM or SIGHUP came; the trials have saved.
    KeyboardInterrupt: Ctrl-C; likewise.
  """
  running, stop = dict[int, Job](), signals.StopSignals()
  waiting = "Ctrl-C: the trials are saving; press it again to end at once"
  with alone(os.path.dirname(plan.folder_of(0))) as lock, stop.noticed(lambda _: say(waiting)):
    try:
      while True:
        while free and (found := plan.begin()):
          number, values = found
          folder = plan.folder_of(number)
          text = ", ".join(f"{name} = {value}" for name, value in values.items())
          say(f"trial {number} {'goes on' if folders.is_run(folder) else 'begins'}: {text}")
          running[number] = Job(command(files, params, values, folder), folder, free.pop(), lock)
        if not running:
          return
        _look_at(plan, running, free)
        time.sleep(POLL_S)
        if stop.number == signal.SIGINT:
          raise KeyboardInterrupt
        if stop.number is not None:
          raise Preempted(f"{stop.name}: stopped, the trials are saved; the same command goes on")
    except BaseException:
      say(f"stopping {len(running)}: each saves first")
      for job in running.values():
        job.stop()
      while any(job.status() is None for job in running.values()):
        time.sleep(POLL_S / 5)
      raise


def _look_at(plan: Plan, running: dict[int, Job], free: list[Slot]) -> None:
  for number, job in list(running.items()):
    status = job.status()  # first, so that the log is complete if the process has ended
    worse = plan.look(number)
    if status is not None:
      say(plan.end(number, job, status))
      free.append(running.pop(number).slot)
    elif worse:
      job.stop()
