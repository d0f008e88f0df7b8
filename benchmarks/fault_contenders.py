"""The same model, data and faults: Loopwright elastic, Loopwright with checkpoints, torchrun.

  python -m venv /tmp/torch && /tmp/torch/bin/pip install torch numpy
  python -m benchmarks.fault_contenders --torch=/tmp/torch/bin/python --minutes=20

Two workers on this machine train the network of benchmarks/elastic_trials.gin on digits, and a
minute after the start, and each minute from then on, one of them gets SIGKILL. Each contender then
trains without faults up to where it came, which tells whether its losses are still the same.

  elastic      --local_workers=1:2: copies in memory, and one worker goes on alone
  checkpoints  --local_workers=2 --max_restarts=100: all restart from the newest checkpoint
  torchrun     --nproc-per-node=2 --max-restarts=100, benchmarks/torch_ddp.py

Goodput is the seconds of the steps that the end of the run rests on, over the wall time from the
command to its end. For Loopwright `loopwright goodput` says it, beside a stopwatch here; for
torchrun they are the sum of the epochs'.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks.fault_trials import REPOSITORY, environment, records
from loopwright.run_folder import legs
from loopwright.tasks import image_classification
from loopwright.tools import goodput
from loopwright.tools.ledger import __main__ as ledger

EVERY_S, SAVE_STEPS = 60.0, 1015
BATCH = 50
EPOCH_STEPS = 29  # of 1,438 examples
ENDLESS = 10**8
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, torch 2.13's processes read the addresses of those before them after a restart."""


class Row(NamedTuple):
  """What came of a contender."""

  name: str
  wall_s: float
  faults: int
  goodput: float
  kept: int
  undone: int
  repeated: int
  never: int
  step: int
  loss: float
  off: float

  def __str__(self) -> str:
    return (
      f"| {self.name} | {self.wall_s:.1f} | {self.faults} | {100 * self.goodput:.1f} % "
      f"| {self.kept} | {self.undone} | {self.repeated} | {self.never} | {self.loss:.4f} "
      f"| {self.off:.1e} |"
    )


HEAD = (
  "| contender | seconds | faults | goodput | steps kept | steps repeated | examples used twice | "
  "never read | last loss | off an uninterrupted run's by |\n" + "|---" * 10 + "|"
)


def broken(
  command: Sequence[str], log: Path, minutes: float, alive: Callable[[], list[int]]
) -> tuple[float, int]:
  """Runs a command, kills one of the processes that `alive` returns each minute.

  Returns:
    The seconds until it has ended, by SIGTERM, and the number of faults.
  """
  began, faults = time.monotonic(), 0
  with log.open("w") as file:
    process = subprocess.Popen(
      command, cwd=REPOSITORY, env={**environment(), **OWN_STORE}, stdout=file, stderr=file
    )
  for number in itertools.count(1):
    while time.monotonic() < began + min(EVERY_S * number, 60 * minutes):
      if process.poll() is not None:
        raise SystemExit(f"{command[1:4]} ended with status {process.returncode}; see {log}")
      time.sleep(0.05)
    if EVERY_S * number >= 60 * minutes:
      break
    while not (pids := alive()) and time.monotonic() < began + EVERY_S * (number + 0.5):
      time.sleep(0.05)
    if pids:
      os.kill(pids[number % len(pids)], signal.SIGKILL)
      faults += 1
  process.terminate()
  process.wait()
  return time.monotonic() - began, faults


# ---- Loopwright ----


def loopwright(folder: Path, steps: int, *options: str) -> list[str]:
  bindings = [
    f"run.train_steps={steps}", f"run.checkpoint_every_steps={SAVE_STEPS}",
    f"run.eval_every_steps={ENDLESS}", "run.steps_per_loop=35", "ImageClassification.shift=0",
  ]  # fmt: skip
  config = "benchmarks/elastic_trials.gin"
  return [
    sys.executable, "launch.py", "train", config, *bindings, f"--model_dir={folder}", *options
  ]  # fmt: skip


def living(folder: Path) -> list[int]:
  """Returns the workers that train."""
  pids = [leg.process for leg in legs.last(str(folder)).values() if not leg.ended and leg.loops]
  return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]


def of_loopwright(name: str, base: Path, minutes: float, *options: str) -> tuple[Row, str]:
  folder = base / name
  log = base / f"{name}.log"
  wall_s, faults = broken(
    loopwright(folder, ENDLESS, *options), log, minutes, lambda: living(folder)
  )
  said = io.StringIO()
  with contextlib.redirect_stdout(said):
    if ledger.main([str(folder)]):
      raise SystemExit(f"{folder}: {said.getvalue()}")
  reruns = int((re.findall(r"(\d+) steps rerun", said.getvalue()) or [0])[0])
  found = goodput.read(str(folder))
  assert found is not None
  last = records(folder)[-1]
  row = Row(
    name, wall_s, faults, found.share(goodput.PRODUCTIVE), found.steps, found.repeated, 0, 0,
    last["step"], last["loss"], 0.0,
  )  # fmt: skip
  off = found.seconds / wall_s - 1
  stopwatch = (
    f"| {name} | {found.seconds:.2f} | {wall_s:.2f} | {100 * off:+.2f} % | "
    f"{100 * sum(map(found.share, found.parts)):.6f} % | {found.repeated} | {reruns} |"
  )
  return row, f"{stopwatch}\n{goodput.table(found, every=SAVE_STEPS)}"


def compared(rows: Sequence[Row], base: Path) -> list[Row]:
  """Returns the rows, compared with one run without faults."""
  folder = base / "uninterrupted"
  command = loopwright(folder, max(row.step for row in rows), "--local_workers=2")
  with (base / "uninterrupted.log").open("w") as log:
    subprocess.run(command, cwd=REPOSITORY, env=environment(), stdout=log, stderr=log, check=True)
  losses = {record["step"]: record["loss"] for record in records(folder)}
  return [row._replace(off=abs(row.loss / losses[row.step] - 1)) for row in rows]


# ---- torchrun ----


def torchrun(python: str, folder: Path, epochs: int) -> list[str]:
  """Returns the command, for a new folder."""
  folder.mkdir()
  source = image_classification.digits().sources["train"]
  data = source.fetch(np.arange(source.num_examples))
  np.savez(folder / "data.npz", image=data["image"], label=data["label"])
  return [
    python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
    "--max-restarts=100", "benchmarks/torch_ddp.py", str(folder), f"--epochs={epochs}",
    f"--save_every={SAVE_STEPS // EPOCH_STEPS}",
  ]  # fmt: skip


def attempts(folder: Path) -> list[list[dict]]:
  """Returns what the first process of each start has logged."""
  files = sorted(folder.glob("lines-*-0.jsonl"), key=lambda path: int(path.name.split("-")[1]))
  return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def processes(folder: Path) -> list[int]:
  """Returns those of the newest start that train."""
  number = len(attempts(folder)) - 1
  pids = []
  for rank in (0, 1):
    path = folder / f"lines-{number}-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if len(lines) > 1:
      pids.append(json.loads(lines[0])["pid"])
  return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]


def of_torchrun(python: str, base: Path, minutes: float) -> Row:
  folder = base / "torchrun"
  command = torchrun(python, folder, ENDLESS)
  wall_s, faults = broken(command, base / "torchrun.log", minutes, lambda: processes(folder))
  kept: list[dict] = []
  saved: list[dict] = []
  for _, *epochs in attempts(folder):
    kept = list(saved)
    for epoch in epochs:
      kept.append(epoch)
      saved = list(kept) if epoch["saves"] else saved
  used = collections.Counter(epoch["epoch"] for epoch in kept)
  examples = len(np.load(folder / "data.npz")["label"])
  done = sum(int(path.read_text()) for path in folder.glob("steps-*-0"))
  last = kept[-1]
  whole = base / "torchrun-uninterrupted"
  with (base / "torchrun-uninterrupted.log").open("w") as log:
    subprocess.run(
      torchrun(python, whole, last["epoch"] + 1), cwd=REPOSITORY, env=environment(), stdout=log,
      stderr=log, check=True,
    )  # fmt: skip
  right = attempts(whole)[0][-1]["loss"]
  return Row(
    "torchrun", wall_s, faults, sum(epoch["seconds"] for epoch in kept) / wall_s,
    len(kept) * EPOCH_STEPS, done - len(kept) * EPOCH_STEPS,
    sum(count - 1 for count in used.values()) * examples,
    (last["epoch"] + 1 - len(used)) * examples, last["epoch"], last["loss"],
    abs(last["loss"] / right - 1),
  )  # fmt: skip


def main() -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--minutes", type=float, default=20.0, help="of each contender")
  parser.add_argument("--torch", help="a Python that has torch; without it two contenders")
  options = parser.parse_args()
  base = Path(tempfile.mkdtemp(prefix="fault_contenders_"))
  print(base, flush=True)
  rows = [of_torchrun(options.torch, base, options.minutes)] if options.torch else []
  print(*rows, flush=True)
  elastic, said = of_loopwright(
    "elastic", base, options.minutes, "--local_workers=1:2", "--max_restarts=100"
  )
  print(elastic, said, sep="\n", flush=True)
  disk, also = of_loopwright(
    "checkpoints", base, options.minutes, "--local_workers=2", "--max_restarts=100"
  )
  print(disk, also, sep="\n", flush=True)
  print(HEAD, *compared([elastic, disk], base), *rows, sep="\n")


if __name__ == "__main__":
  main()
