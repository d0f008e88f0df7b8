"""Trials of the trackers: runs that are killed, servers that are killed, and what tracking costs.

  uv run --with mlflow-skinny,alembic,sqlalchemy,wandb,pillow \\
    python -m benchmarks.trackers kill server cost

kill: a run is killed by SIGKILL several times and started again; each tracker is then read back:
every value of metrics.jsonl is there once, in one run. server: the same for an MLflow server that
is killed in the middle (`--mlflow` names the command of a full MLflow). cost: two runs, one
with a tracker and one without, take short turns.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks import forks

Curves = dict[str, list[tuple[int, float]]]
"""split/name -> (step, value), in the order of the tracker."""
CONFIG = "benchmarks/trackers.gin"
LIMIT_S = 300.0
_TURN_S = 0.2
PLAIN, MLFLOW = "[@Export()]", "[@MLflow(), @Export()]"
ALL = "[@CSVFile(), @MLflow(), @WandB(), @Export()]"


def arguments(folder: Path, actions: str, **options: str) -> list[str]:
  params = [f"run.actions = {actions}"]
  params += [f"{name.replace('__', '.')} = {value}" for name, value in options.items()]
  return [f"--gin_file={CONFIG}", f"--model_dir={folder}", *(f"--gin_param={p}" for p in params)]


def logged(folder: Path) -> Curves:
  """Returns what metrics.jsonl has."""
  curves: Curves = {}
  for line in (folder / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    step, split = record.pop("step"), record.pop("split")
    record.pop("wall_time")
    for name, value in record.items():
      curves.setdefault(f"{split}/{name}", []).append((step, float(value)))
  return curves


def kept(folder: Path, tracker: str) -> str:
  return json.loads((folder / "trackers" / f"{tracker}.json").read_text())["run"]


def sent(folder: Path) -> int:
  """Returns the last training step that MLflow got, as the run notes it."""
  path = folder / "trackers" / "MLflow.json"
  return json.loads(path.read_text())["sent"].get("train", 0) if path.exists() else 0


def of_csv(folder: Path) -> Curves:
  curves: Curves = {}
  with (folder / "metrics.csv").open() as file:
    for row in csv.DictReader(file):
      for name in set(row) - {"step", "split", "wall_time"}:
        if row[name]:
          curves.setdefault(f"{row['split']}/{name}", []).append(
            (int(row["step"]), float(row[name]))
          )
  return curves


def of_mlflow(folder: Path, uri: str) -> Curves:
  """Also checks that the folder has one run, with parameters and an export."""
  from mlflow import MlflowClient

  client, run_id = MlflowClient(tracking_uri=uri), kept(folder, "MLflow")
  experiment = client.get_experiment_by_name("loopwright").experiment_id
  model_dir = f"tags.model_dir = '{folder}'"
  runs = client.search_runs([experiment], filter_string=model_dir)
  assert [run.info.run_id for run in runs] == [run_id], runs
  assert runs[0].info.status == "FINISHED"
  assert "run.optimizer" in runs[0].data.params
  assert "export" in [file.path for file in client.list_artifacts(run_id)]
  keys = runs[0].data.metrics
  return {k: [(m.step, m.value) for m in client.get_metric_history(run_id, k)] for k in keys}


def of_wandb(folder: Path) -> Curves:
  """Reads the transaction logs of all processes, which `wandb sync` sends."""
  from loopwright.tools.trackers import wandb

  curves: Curves = {}
  for row in wandb.offline_history(str(folder), kept(folder, "WandB")):
    for name, value in row.items():
      split, _, metric = name.partition("/")
      if metric and metric != "step":
        curves.setdefault(name, []).append((row[f"{split}/step"], float(value)))
  return curves


def differences(found: Curves, expected: Curves) -> list[str]:
  """Returns what a tracker lacks, has twice, or has with another value."""
  wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
  wrong += [f"{name} is not in the log" for name in found.keys() - expected.keys()]
  for name in expected.keys() & found.keys():
    steps, wanted = ([step for step, _ in sorted(c[name])] for c in (found, expected))
    if steps != wanted:
      wrong.append(
        f"{name}: {len(steps)} steps, {len(set(steps))} of them different, not {len(wanted)}"
      )
    elif name.rpartition("/")[2] in ("loss", "accuracy") and any(
      not math.isclose(a, b, rel_tol=1e-9)
      for (_, a), (_, b) in zip(sorted(found[name]), sorted(expected[name]), strict=True)
    ):
      wrong.append(f"{name}: another value")
  return wrong


def lines(folder: Path) -> int:
  log = folder / "metrics.jsonl"
  return log.read_bytes().count(b"\n") if log.exists() else 0


def ended(run: forks.Fork) -> None:
  if (status := run.wait(LIMIT_S)) != 0:
    run.kill()
    raise SystemExit(f"status {status}: {run.log and run.log.read_text()[-3000:]}")


def killed(folder: Path, start: Callable[[], forks.Fork], rng: random.Random) -> None:
  """Kills a run at a random moment after its next line; all its processes but W&B's."""
  before, run = lines(folder), start()
  while lines(folder) <= before and run.poll() is None:
    time.sleep(0.02)
  run.wait(rng.uniform(0, 4))
  run.send(signal.SIGKILL)
  run.wait(LIMIT_S)


def kill_trials(base: Path, trials: int, rng: random.Random) -> int:
  missed = 0
  for number in range(trials):
    folder, log = base / f"killed{number}", base / f"killed{number}.txt"
    uri = f"file:{base}/mlruns{number}"

    def start(folder=folder, log=log, uri=uri) -> forks.Fork:
      options = {"MLflow__tracking_uri": repr(uri), "WandB__mode": "'offline'"}
      given = arguments(folder, ALL, **options)
      return forks.Fork(given, log)

    kills = rng.randint(1, 4)
    for _ in range(kills):
      killed(folder, start, rng)
    ended(start())
    missed += report(f"killed {kills} times", logged(folder), {
      "CSVFile": of_csv(folder),
      "MLflow": of_mlflow(folder, uri),
      "WandB": of_wandb(folder),
    })  # fmt: skip
  return missed


def report(what: str, expected: Curves, found: Mapping[str, Curves]) -> int:
  wrong = {name: differences(curves, expected) for name, curves in found.items()}
  count = sum(len(curve) for curve in expected.values())
  told = "; ".join(f"{name}: {', '.join(w[:3])}" for name, w in wrong.items() if w)
  print(f"{what}: {count} values in {', '.join(found)}: {told or 'each once'}", flush=True)
  return bool(told)


class Server:
  """An MLflow server on a port of its own."""

  def __init__(self, command: str, base: Path) -> None:
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      self.port = free.getsockname()[1]
    self._log = (base / "server.txt").open("ab")
    self._command = [
      *shlex.split(command), "server", "--port", str(self.port), "--workers", "1",
      "--backend-store-uri", f"sqlite:///{base}/server.db",
      "--artifacts-destination", f"{base}/artifacts",
    ]  # fmt: skip
    self.url = f"http://127.0.0.1:{self.port}"

  def start(self) -> None:
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # no processes outside of its session
    self._process = subprocess.Popen(
      self._command, stdout=self._log, stderr=self._log, start_new_session=True,
      env=os.environ | quiet,
    )  # fmt: skip
    end = time.monotonic() + 120
    while time.monotonic() < end:
      with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{self.url}/health", timeout=5)
        return
      time.sleep(0.2)
    raise SystemExit("the MLflow server does not start")

  def kill(self) -> None:
    os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()


def server_trials(base: Path, command: str) -> int:
  """Kills the server twice: it comes back during the run, and only after it."""
  server = Server(command, base)
  folder, log = base / "served", base / "served.txt"
  options = {"MLflow__tracking_uri": repr(server.url), "MLflow__wait_s": "120.0"}
  options |= {"run__train_steps": "30000", "run__eval_every_steps": "10000"}
  given = arguments(folder, MLFLOW, **options)
  server.start()
  run = forks.Fork(given, log)
  wait_for(lambda: sent(folder) >= 200, run)
  server.kill()
  wait_for(lambda: "MLflow fails" in log.read_text(), run)
  server.start()
  wait_for(lambda: "has caught up" in log.read_text(), run)
  server.kill()
  ended(run)
  print("".join(f"  {line}\n" for line in log.read_text().splitlines() if "MLflow" in line), end="")
  server.start()
  ended(forks.Fork(given, log))
  missed = report("server killed twice", logged(folder), {"MLflow": of_mlflow(folder, server.url)})
  server.kill()
  return missed


def wait_for(condition: Callable[[], bool], run: forks.Fork) -> None:
  while not condition() and run.poll() is None:
    time.sleep(0.05)


def cost(base: Path, options: argparse.Namespace) -> None:
  """Prints speed with a tracker over speed without; "none" is the noise."""
  hanging = socket.socket()
  hanging.bind(("127.0.0.1", 0))
  hanging.listen(64)
  silent = f"http://127.0.0.1:{hanging.getsockname()[1]}"
  kinds = {
    "none": (PLAIN, {}),
    "CSVFile": ("[@CSVFile(), @Export()]", {}),
    "MLflow": (MLFLOW, {"MLflow__tracking_uri": repr(f"file:{base}/mlruns")}),
    "WandB": ("[@WandB(), @Export()]", {"WandB__mode": "'offline'"}),
    "MLflow, server down": (MLFLOW, {"MLflow__tracking_uri": "'http://127.0.0.1:9'"}),
    "MLflow, silent server": (MLFLOW, {"MLflow__tracking_uri": repr(silent)}),
  }
  kinds = {name: kinds[name] for name in options.kinds or kinds}
  ratios: dict[str, list[float]] = {name: [] for name in kinds}
  for number in range(options.rounds):
    for kind, (name, (actions, own)) in enumerate(kinds.items()):
      ratios[name].append(in_turns(base / f"cost{number}-{kind}", actions, own, options))
      told = " ".join(f"{ratio:.3f}" for ratio in ratios[name])
      print(
        f"{name:22} {statistics.mean(ratios[name]):.3f} as fast as without ({told})", flush=True
      )


def in_turns(
  base: Path, actions: str, own: Mapping[str, str], options: argparse.Namespace
) -> float:
  """Returns the speed with these actions over the speed without, of two runs that take turns.

  One is stopped while the other trains, so other programs hinder both alike.
  """
  endless = {"run__train_steps": "1000000000", "run__eval_every_steps": "1000000000"}
  endless |= {"run__checkpoint_every_steps": "5000"}
  endless |= {"run__steps_per_loop": str(options.steps_per_line)}
  sides = [(Path(f"{base}-with"), actions, own), (Path(f"{base}-without"), PLAIN, {})]
  runs = []
  for folder, chosen, extra in sides:
    command = arguments(folder, chosen, **endless, **extra)
    runs.append((forks.Fork(command, Path(f"{folder}.txt")), folder))
  for run, folder in runs:
    wait_for(lambda folder=folder: lines(folder) >= 20, run)
    time.sleep(2.0)
    os.killpg(run.pid, signal.SIGSTOP)
  before, end = [lines(folder) for _, folder in runs], time.monotonic() + options.seconds
  turn = 0
  while time.monotonic() < end:
    for run, _ in runs if turn % 2 else runs[::-1]:
      os.killpg(run.pid, signal.SIGCONT)
      time.sleep(_TURN_S)
      os.killpg(run.pid, signal.SIGSTOP)
    turn += 1
  with_tracker, without = (lines(runs[n][1]) - before[n] for n in (0, 1))
  for run, _ in runs:
    run.kill()
  return with_tracker / without


def main(given: Iterable[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("parts", nargs="+", choices=("kill", "server", "cost"))
  parser.add_argument("--trials", type=int, default=5, help="of kill")
  parser.add_argument("--rounds", type=int, default=3, help="of cost")
  parser.add_argument("--seconds", type=float, default=40.0, help="of each pair of runs of cost")
  parser.add_argument("--kinds", nargs="*", help="of cost: which trackers, by the printed name")
  parser.add_argument("--steps_per_line", type=int, default=20, help="of cost")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--mlflow", default="uvx mlflow", help="the command of a full MLflow")
  options = parser.parse_args(given)
  base = Path(tempfile.mkdtemp(prefix="trackers_"))
  os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
  forks.warm_up()
  print(f"in {base}", flush=True)
  missed = 0
  if "kill" in options.parts:
    missed += kill_trials(base, options.trials, random.Random(options.seed))
  if "server" in options.parts:
    missed += server_trials(base, options.mlflow)
  if "cost" in options.parts:
    cost(base, options)
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
