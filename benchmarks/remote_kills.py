"""Kills runs whose folder is in a bucket; another machine goes on; compares with a run on disk.

  python -m benchmarks.remote_kills --kills 20 --uploads 20 --outages 5

The bucket is that of an S3 server on loopback (tests/support/s3_server.py). `--kills` are SIGKILLs
at a random moment, `--uploads` at the beginning or the end of a random upload or removal. Before
each next start the local folder is deleted, as if that were on another machine; every fourth time
the same machine goes on. After each kill the bucket must hold a whole newest checkpoint, a log that
is not behind it, and state files that name what is there. In each of `--outages` the server is away
for up to three seconds of a run. In one run more it is away at the end: the status must be 1, and
`loopwright push` must upload the run. In the end every tensor of the checkpoints, of best/ and the
export, every value of metrics.jsonl and the examples of every step must be those of an
uninterrupted run on disk. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import comparison, forks
from tests.support import s3_server

CONFIG = "benchmarks/trials.gin"
LOOP_S = 0.15
"""How long a loop takes at least, so that uploads come beside the training."""
LIMIT_S = 60.0


class Trials:
  """All trials, below `base`."""

  def __init__(self, base: Path, server: s3_server.Server, rng: random.Random) -> None:
    """Makes the uninterrupted run on disk."""
    self._base, self._server, self._rng = base, server, rng
    self.reference = base / "reference"
    began = time.monotonic()
    run = self._start(str(self.reference), "reference")
    if (status := run.wait(LIMIT_S)) != 0:
      raise SystemExit(f"the uninterrupted run ended with {status}: {run.last_line()}")
    self._length_s = time.monotonic() - began
    self.kills = {"time": 0, "upload": 0}

  def _start(self, model_dir: str, name: str, die: Callable[[], None] | None = None) -> forks.Fork:
    def before() -> None:
      _slow_loops()
      _short_patience()
      if die:
        die()

    environment = {**self._server.environment, "XDG_CACHE_HOME": str(self._base / "cache")}
    arguments = [f"--gin_file={CONFIG}", f"--model_dir={model_dir}"]
    return forks.Fork(arguments, self._base / f"{name}.txt", before=before, environment=environment)

  def killed(self, name: str, moments: list[str]) -> list[str]:
    """Kills a run at each of the moments ("time" or "upload"); returns what is wrong at the end."""
    misses = []
    for number, moment in enumerate(moments):
      upload = moment == "upload"
      run = self._start(_url(name), name, _die_in_upload(self._rng) if upload else None)
      if run.wait(LIMIT_S if upload else self._rng.uniform(0.3, self._length_s + 1)) is None:
        run.send(signal.SIGKILL)
      self.kills[moment] += (status := run.wait(LIMIT_S)) == -signal.SIGKILL
      if status not in (-signal.SIGKILL, 0):  # 0: it ended before
        misses.append(f"status {status}: {run.last_line()}")
      misses += self._torn(name)
      if number % 4 != 3:
        shutil.rmtree(self._base / "cache", ignore_errors=True)
    run = self._start(_url(name), name)
    return misses + self._ended(run, name)

  def outage(self, name: str) -> list[str]:
    """Shuts the server for a while in a run; returns what is wrong at the end."""
    run = self._start(_url(name), name)
    time.sleep(self._rng.uniform(2.0, self._length_s))
    self._server.shut()
    time.sleep(self._rng.uniform(0.5, 3.0))
    self._server.open()
    return self._ended(run, name)

  def ends_in_an_outage(self, name: str) -> list[str]:
    """Shuts the server until a run has given up; then pushes; returns what is wrong."""
    run = self._start(_url(name), name)
    time.sleep(self._length_s - 1)
    self._server.shut()
    status, line = run.wait(LIMIT_S), run.last_line()
    self._server.open()
    misses = [] if status == 1 and "loopwright push" in line else [f"status {status}: {line}"]
    push = forks.Fork([], self._base / f"{name}.txt", before=_push(_url(name)), environment={
      **self._server.environment, "XDG_CACHE_HOME": str(self._base / "cache")})  # fmt: skip
    return misses + self._ended(push, name)

  def _ended(self, run: forks.Fork, name: str) -> list[str]:
    if (status := run.wait(LIMIT_S)) != 0:
      run.kill()
      return [f"status {status} at the end: {run.last_line()}"]
    if s3_server.SECRET in (self._base / f"{name}.txt").read_text():
      return ["the secret is in the log"]
    found = comparison.differences(self._downloaded(name), self.reference)
    shutil.rmtree(self._base / "cache", ignore_errors=True)
    return found

  def _torn(self, name: str) -> list[str]:
    """Returns what a reader of the bucket would miss now."""
    folder = self._downloaded(name)
    kept = comparison.kept(folder)
    if not kept:
      return []
    misses = comparison.different_tensors(*[folder / "checkpoints" / kept[-1]] * 2)
    steps = [record["step"] for record in comparison.records(folder, "train")]
    if max(steps, default=0) < int(kept[-1].rpartition("-")[2]):
      misses.append(f"the log ends at {steps[-1:]}, before {kept[-1]}")
    for state in (folder / "checkpoints" / "checkpoint", folder / "best" / "checkpoint"):
      named = state.read_text().split('"')[1] if state.exists() else ""
      if named and not (state.parent / f"{named}.index").exists():
        misses.append(f"{state.parent.name}/checkpoint names {named}, which is missing")
    return misses

  def _downloaded(self, name: str) -> Path:
    """Returns a copy of a run folder in the bucket, made by another process: this one forks."""
    folder = self._base / "downloaded"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    child = os.fork()
    if child == 0:
      from loopwright.host.stores import Store

      os.environ.update(self._server.environment)
      store = Store(_url(name))
      store.get_all([each for each in store.files() if each != "mirrored.json"], str(folder))
      os._exit(0)
    if os.waitpid(child, 0)[1]:
      raise SystemExit("the bucket cannot be read")
    return folder


def _url(name: str) -> str:
  return f"s3://{s3_server.BUCKET}/runs/{name}"


def _slow_loops() -> None:
  from loopwright.trainer import Trainer

  train = Trainer.train

  def slower(*args: object, **kwargs: object) -> object:
    time.sleep(LOOP_S)
    return train(*args, **kwargs)  # type: ignore[arg-type]

  Trainer.train = slower  # type: ignore[method-assign,assignment]


def _short_patience() -> None:
  from loopwright.run_folder import mirror, remote

  remote.BEAT_S, remote.PATIENCE_S, remote.SETTLE_S = 0.1, 1.0, 0.2
  mirror.GIVE_UP_S = 8.0


def _die_in_upload(rng: random.Random) -> Callable[[], None]:
  """Returns what makes a process kill itself in a random upload or removal."""
  left, late = rng.randrange(1, 60), rng.random() < 0.5

  def plant() -> None:
    from loopwright.host.stores import Store

    def dying(method: Callable[..., None]) -> Callable[..., None]:
      def call(self: Store, *args: object) -> None:
        nonlocal left
        left -= 1
        if left == 0 and not late:
          os.kill(os.getpid(), signal.SIGKILL)
        method(self, *args)
        if left == 0:
          os.kill(os.getpid(), signal.SIGKILL)

      return call

    Store.put, Store.remove = dying(Store.put), dying(Store.remove)  # type: ignore[method-assign]

  return plant


def _push(url: str) -> Callable[[], None]:
  def plant() -> None:
    _short_patience()
    sys.argv = ["launch.py", "push", url]

  return plant


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--kills", type=int, default=20, help="at random moments")
  parser.add_argument("--uploads", type=int, default=20, help="at random uploads")
  parser.add_argument("--outages", type=int, default=5)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  forks.warm_up()
  base, rng = Path(tempfile.mkdtemp(prefix="remote_kills_")), random.Random(options.seed)
  missed = 0
  with s3_server.running() as server:
    trials = Trials(base, server, rng)
    number = 0

    def run(told: str, trial: Callable[[str], list[str]]) -> None:
      nonlocal missed, number
      number, began = number + 1, time.monotonic()
      misses = trial(f"trial{number}")
      missed += bool(misses)
      outcome = f"MISS: {'; '.join(misses[:5])}" if misses else "identical"
      print(f"{number}  {told}; {time.monotonic() - began:.1f} s: {outcome}", flush=True)

    wanted = {"time": options.kills, "upload": options.uploads}
    while left := [m for m in wanted for _ in range(wanted[m] - trials.kills[m])]:
      some = rng.sample(left, min(4, len(left)))
      run(", ".join(some), lambda name, some=some: trials.killed(name, some))  # type: ignore[misc]
    for _ in range(options.outages):
      run("outage", trials.outage)
    if options.outages:
      run("ends in an outage", trials.ends_in_an_outage)
  print(f"{trials.kills['time']} kills at a moment, {trials.kills['upload']} in an upload")
  print(f"{missed} of {number} trials missed{f', see {base}' if missed else ''}")
  if not missed:
    shutil.rmtree(base)
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
