"""Kills training at random moments, restarts it, and compares with an uninterrupted run.

  python -m benchmarks.kill_trials --trials 20 --seed 0

Each trial runs the same `launch.py` command repeatedly, killed one to `--most_kills` times, until
it ends by itself. Then every tensor of the kept checkpoints, including the digest of the stream of
example ids, and every value of metrics.jsonl that is not a time must be bit-identical to the
uninterrupted run's. Exit status 1 if any trial differs.

  time     SIGKILL at any moment, also while starting and restoring
  write    SIGKILL while a checkpoint is being written
  sigterm  SIGTERM; the command must save, end with status 75, and continue
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from benchmarks.stream_digest import digest
from framework.inputs import datasets
from framework.saving import checkpoints
from tasks.image_classification import digits

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "benchmarks/kill_trials.gin"
STEPS, STEPS_PER_LOOP, EVAL_EVERY, BATCH = 600, 10, 150, 50  # as in CONFIG
KINDS = ("time", "write", "sigterm")
STATUS = {"time": -signal.SIGKILL, "write": -signal.SIGKILL, "sigterm": 75}
TIMES = ("wall_time", "input_wait_s", "examples_per_second", "steps_per_second")
DIGEST = "model/stream/value/.ATTRIBUTES/VARIABLE_VALUE"


@dataclasses.dataclass(frozen=True)
class Uninterrupted:
  """The run to compare with, and the duration of its parts."""

  folder: Path
  starting_s: float
  training_s: float


@dataclasses.dataclass
class Trial:
  kills: list[str] = dataclasses.field(default_factory=list)
  during_write: int = 0
  starts: int = 0
  misses: list[str] = dataclasses.field(default_factory=list)


class Command:
  """One process of the command under test, observed through its run folder."""

  def __init__(self, folder: Path, replicas: int) -> None:
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    self._log = folder / "log.txt"
    self.started = time.time()
    self._first_step: int | None = None
    arguments = [f"--gin_file={CONFIG}", f"--model_dir={folder}"]
    if replicas > 1:
      arguments.append(f"--gin_param=auto.cpu_replicas = {replicas}")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    with self._log.open("a") as log:
      self.process = subprocess.Popen(
        [sys.executable, "launch.py", *arguments],
        cwd=REPOSITORY, env=environment, stdout=log, stderr=log,
      )  # fmt: skip

  def wait_until(self, happened: Callable[[], bool], *, poll_s: float = 0.002) -> bool:
    """Returns True when the condition holds, False if the process ended before."""
    while self.process.poll() is None:
      if happened():
        return True
      time.sleep(poll_s)
    return False

  def wait(self, seconds: float) -> bool:
    end = time.time() + seconds
    return self.wait_until(lambda: time.time() >= end)

  def is_training(self) -> bool:
    """Whether the first loop is done: its record follows the config, which is written first."""
    config = self._folder / "operative_config.gin"
    if not config.exists() or config.stat().st_mtime < self.started:
      return False
    if self._first_step is None:
      self._first_step = self.step()
    return self.step() > self._first_step

  def is_writing(self) -> bool:
    """Whether a checkpoint is begun and not finished."""
    folder = self._folder / "checkpoints"
    if (folder / checkpoints.UNFINISHED).is_dir():
      return True
    names = {file.name for file in folder.glob("ckpt-*")}
    return any(f"{name.partition('.')[0]}.index" not in names for name in names)

  def freeze(self) -> None:
    """Stops the process and returns when it is stopped."""
    self.process.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{self.process.pid}/stat")
    while status.read_text().rpartition(")")[2].split()[0] not in "TZ":
      time.sleep(0.0005)

  def step(self) -> int:
    steps = [record["step"] for record in records(self._folder, "train")]
    return max(steps, default=0)

  def end(self) -> int:
    return self.process.wait()

  def last_words(self) -> str:
    return (self._log.read_text().strip().splitlines() or [""])[-1]


def records(folder: Path, split: str) -> list[dict]:
  path = folder / "metrics.jsonl"
  lines = path.read_text().split("\n")[:-1] if path.exists() else []
  parsed = [json.loads(line) for line in lines]
  return [
    {k: v for k, v in record.items() if k not in TIMES}
    for record in parsed
    if record["split"] == split
  ]


def uninterrupted(folder: Path, replicas: int) -> Uninterrupted:
  command = Command(folder, replicas)
  command.wait_until(command.is_training, poll_s=0.05)
  starting_s = time.time() - command.started
  if command.end():
    raise SystemExit(f"the uninterrupted run failed: {command.last_words()}")
  return Uninterrupted(folder, starting_s, time.time() - command.started - starting_s)


def run_trial(
  folder: Path,
  reference: Uninterrupted,
  kind: str,
  rng: random.Random,
  *,
  replicas: int,
  most_kills: int,
) -> Trial:
  """Runs and kills the command until it ends by itself, then compares."""
  trial = Trial()
  wanted_kills = rng.randint(1, most_kills)
  while True:
    command = Command(folder, replicas)
    trial.starts += 1
    killed = len(trial.kills) < wanted_kills and interrupt(command, reference, kind, rng)
    status = command.end()
    if not killed or status != STATUS[kind]:
      break
    note_kill(trial, command)
  if status:
    trial.misses.append(f"exit status {status}: {command.last_words()}")
  elif not trial.kills:
    shutil.rmtree(folder)  # it ended before the first kill, so the trial does not count
    return run_trial(folder, reference, kind, rng, replicas=replicas, most_kills=most_kills)
  else:
    trial.misses += differences(folder, reference.folder, same_steps=kind != "sigterm")
  return trial


def interrupt(command: Command, reference: Uninterrupted, kind: str, rng: random.Random) -> bool:
  """Waits for the moment and sends the signal; False if the process ended before."""
  if kind == "time" and rng.random() < 0.25:
    reached = command.wait(rng.uniform(0, reference.starting_s))
  else:
    reached = command.wait_until(command.is_training) and command.wait(
      rng.uniform(0, reference.training_s * (1 - command.step() / STEPS))
    )
  if kind == "write":
    reached = reached and caught_writing(command, rng)
  if reached:
    command.process.send_signal(signal.SIGTERM if kind == "sigterm" else signal.SIGKILL)
  return reached


def caught_writing(command: Command, rng: random.Random) -> bool:
  """Stops the process during a write; False if it ended before."""
  while command.wait_until(command.is_writing, poll_s=0.0005):
    command.wait(rng.choice([0, rng.uniform(0, 0.01)]))
    command.freeze()
    if command.is_writing():
      return True
    command.process.send_signal(signal.SIGCONT)
  return False


def note_kill(trial: Trial, command: Command) -> None:
  writing = command.is_writing()
  trial.during_write += writing
  trial.kills.append(f"{command.step()}{' (writing)' if writing else ''}")


def differences(folder: Path, reference: Path, *, same_steps: bool) -> list[str]:
  """Returns the differences to the uninterrupted run; `same_steps`: both must save at the same."""
  ours, theirs = ([Path(p).name for p in saved(f)] for f in (folder, reference))
  found = [] if ours == theirs or not same_steps else [f"checkpoints {ours}, not {theirs}"]
  for name in ours if same_steps else ours[-1:]:
    found += different_tensors(folder / "checkpoints" / name, reference / "checkpoints" / name)
  for split, every in (("train", STEPS_PER_LOOP), ("eval", EVAL_EVERY)):
    if records(folder, split) != records(reference, split):
      found.append(f"{split} records of metrics.jsonl differ")
    if [r["step"] for r in records(folder, split)] != list(range(every, STEPS + 1, every)):
      found.append(f"{split} steps of metrics.jsonl are not every {every}")
  if (got := tensor(folder / "checkpoints" / f"ckpt-{STEPS}", DIGEST)) != expected_digest():
    found.append(f"the digest of the example ids is {got}, not {expected_digest()}")
  return found


def saved(folder: Path) -> list[str]:
  return checkpoints.list_checkpoints(str(folder / "checkpoints"))


def tensor(path: Path, key: str) -> int:
  return int(tf.train.load_checkpoint(str(path)).get_tensor(key))


def different_tensors(path: Path, reference: Path) -> list[str]:
  """Returns the names of tensors that are not bit-identical, including the object graph."""
  readers = [tf.train.load_checkpoint(str(p)) for p in (path, reference)]
  names = [set(reader.get_variable_to_shape_map()) for reader in readers]
  values = [{n: bits(reader.get_tensor(n)) for n in names[0] & names[1]} for reader in readers]
  unequal = [n for n in values[0] if values[0][n] != values[1][n]]
  return [f"{path.name}: {name}" for name in sorted({*unequal, *(names[0] ^ names[1])})]


def bits(value: object) -> bytes:
  return value if isinstance(value, bytes) else value.tobytes()  # type: ignore[attr-defined]


def expected_digest() -> int:
  """Computes the digest in Python from the documented order of the input."""
  source = digits().sources["train"]
  batches = datasets.train_dataset(source, global_batch_size=BATCH, seed=0).take(STEPS)
  return digest(i for batch in batches.as_numpy_iterator() for i in batch["example_id"])


def report(number: int, trials: int, kind: str, trial: Trial, seconds: float) -> None:
  outcome = "identical" if not trial.misses else "MISS: " + "; ".join(trial.misses[:5])
  kills = ", ".join(trial.kills)
  print(
    f"trial {number + 1}/{trials}  {kind:7}  at step {kills}; "
    f"{trial.starts} starts, {seconds:.0f} s: {outcome}",
    flush=True,
  )


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--replicas", type=int, default=1)
  parser.add_argument("--most_kills", type=int, default=3, help="per trial")
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["time", "write"])
  options = parser.parse_args()
  base = Path(tempfile.mkdtemp(prefix="kill_trials_"))
  reference = uninterrupted(base / "uninterrupted", options.replicas)
  print(f"uninterrupted: {reference.starting_s:.1f} s to start, {reference.training_s:.1f} s more")
  done = []
  for number in range(options.trials):
    rng, began = random.Random(f"{options.seed}/{number}"), time.time()
    kind = options.kinds[number % len(options.kinds)]
    folder = base / f"trial{number}"
    trial = run_trial(
      folder, reference, kind, rng, replicas=options.replicas, most_kills=options.most_kills
    )
    done.append(trial)
    report(number, options.trials, kind, done[-1], time.time() - began)
    if not done[-1].misses:
      shutil.rmtree(folder)
  return summarize(done, base)


def summarize(done: list[Trial], base: Path) -> int:
  kills, writing = sum(len(t.kills) for t in done), sum(t.during_write for t in done)
  missed = sum(bool(trial.misses) for trial in done)
  outcome = f"{missed} missed, see {base}" if missed else "all identical to the uninterrupted run"
  print(f"{len(done)} trials, {kills} kills, {writing} of them during a write: {outcome}")
  if not missed:
    shutil.rmtree(base)
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
