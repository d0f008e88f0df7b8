"""Compares the predictions of benchmarks/scaling.py with runs on links of several speeds.

    python -m benchmarks.scaling_check speeds   # as root, with iproute2, some minutes each
    python -m benchmarks.scaling_check delays
    python -m benchmarks.scaling_check buckets

Workers run in network namespaces of this machine. With `speeds`, each is on a veth pair to one
bridge, and a token bucket limits both directions of each pair; with `delays`, a switch in this
process delays every packet. Compute time and link are fitted on 2 workers at one speed or delay.
The predictions are for 2, 3 and 4 workers at all of them: a worker has a core for itself if there
are enough, otherwise several share one. Exit status 1 if a prediction is off by more than 15 %.

`buckets` compares, on two workers, one flat buffer with buckets that are sent in backward order
while the backward pass goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import scaling
from benchmarks.network import Network, enter, run
from benchmarks.scaling import Link

CONFIG = str(Path(__file__).with_suffix(".gin"))
FITTED_MBIT, FITTED_MS = 200, 5
ALLOWED = 0.15
HEADERS = 1514 / 1448  # bytes on the wire per byte of a TCP stream
HALF = {"run.per_replica_batch_size": 32}
BUCKETS_BATCH, BUCKETS_MBIT = 512, (200, 400, 1000)
BUCKETS = {"per tensor": 0, "2 MB": 2_000_000, "1 MB": 1_000_000, "0.25 MB": 250_000}
PACK, PER_TENSOR = "Reduction.bytes_per_pack", {"Reduction.packing": "per_tensor"}
_BURST, _QUEUE = "128kb", "200ms"
_PORT = 3333
_numbers = itertools.count()
_PATIENCE_S = 240.0


class Bridge:
  """Network namespaces on one bridge, each behind a link of a limited speed; needs root."""

  def __init__(self, count: int) -> None:
    names = (
      f"lw{os.getpid() % 10000}n{next(_numbers)}"  # a deleted name is free only some time later
    )
    self.bridge = f"{names}b"
    self.names = [f"{names}w{index}" for index in range(count)]
    self.hosts = [f"10.79.0.{index + 1}" for index in range(count)]

  def __enter__(self) -> Bridge:
    run("ip", "link", "add", self.bridge, "type", "bridge")
    run("ip", "link", "set", self.bridge, "up")
    for name, host in zip(self.names, self.hosts, strict=True):
      run("ip", "netns", "add", name)
      run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
      run("ip", "link", "set", name, "master", self.bridge, "up")
      run("ip", "-n", name, "address", "add", f"{host}/24", "dev", "eth0")
      run("ip", "-n", name, "link", "set", "eth0", "up")
      run("ip", "-n", name, "link", "set", "lo", "up")
    return self

  def __exit__(self, *unused: object) -> None:
    for name in self.names:
      run("ip", "netns", "delete", name)  # also deletes the pair
    run("ip", "link", "delete", self.bridge)

  def name(self, index: int) -> str:
    """Returns the name of a namespace."""
    return self.names[index]

  def limit(self, mbit: int) -> None:
    """Sets the speed of both directions of every link."""
    bucket = ["root", "tbf", "rate", f"{mbit}mbit", "burst", _BURST, "latency", _QUEUE]
    for name in self.names:
      run("tc", "qdisc", "replace", "dev", name, *bucket)
      run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", *bucket)


@contextlib.contextmanager
def cluster(bridge: Bridge | Network, params: Sequence[str]) -> Iterator[list[Connection]]:
  """Starts a worker in each namespace; they answer what `ask` asks."""
  pipes, processes = [], []
  fork = multiprocessing.get_context("fork")
  for index in range(len(bridge.hosts)):
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_work, args=(theirs, bridge, index, params), daemon=True)
    process.start()
    pipes.append(ours)
    processes.append(process)
  try:
    yield pipes
  finally:
    for process in processes:
      process.kill()
      process.join()


def ask(pipes: Sequence[Connection], what: str, *arguments: Any, **bindings: Any) -> float:
  """Asks all workers; returns the answer of worker 0."""
  for pipe in pipes:
    pipe.send((what, arguments, bindings))
  for pipe in pipes:
    if not pipe.poll(_PATIENCE_S):
      raise SystemExit(f"a worker does not answer {what} within {_PATIENCE_S:.0f} s")
  answers = [pipe.recv() for pipe in pipes]
  if errors := [answer for answer in answers if isinstance(answer, str)]:
    raise SystemExit(errors[0])
  return answers[0]


def _work(pipe: Connection, bridge: Bridge | Network, index: int, params: Sequence[str]) -> None:
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, [cores[index % len(cores)]])  # before TensorFlow starts its threads
  enter(bridge.name(index))
  addresses = [f"{host}:{_PORT}" for host in bridge.hosts]
  task = {"type": "worker", "index": index}
  os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
  os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
  from loopwright.tools import tune

  answers = {
    "bytes": lambda: scaling.gradient_bytes(contest.contender({}).trainer),
    "step": lambda **bindings: scaling.measured_step_s(contest.contender(bindings).trainer),
    "reduce": lambda size: scaling.reduce_s(contest.contender({}).trainer, size),
  }
  contest = tune.Contest([CONFIG], params, rounds=2, block_s=0)
  while True:
    what, arguments, bindings = pipe.recv()
    try:
      pipe.send(answers[what](*arguments, **bindings))
    except Exception:
      pipe.send(traceback.format_exc())


# ---- The check ----


class Trial(NamedTuple):
  """Links of several values: speeds or delays.

  Attributes:
    network: number of workers -> network, a context manager.
    set: gives all links of a network a value.
    link: (fitted link, value, workers per core) -> the link with that value.
    values: all of them.
    fitted_at: the value at which two workers are measured in parts.
    params: bindings of gin.
  """

  network: Callable[[int], Any]
  set: Callable[[Any, float], None]
  link: Callable[[Link, float, int], Link]
  values: Sequence[float]
  fitted_at: float
  params: Sequence[str] = ()


def measured(trial: Trial, workers: int) -> dict[str, Any]:
  """Returns what the workers measure: seconds of a step at each value; on two also of the parts."""
  with trial.network(workers) as network, cluster(network, trial.params) as pipes:
    size = int(ask(pipes, "bytes"))
    found: dict[str, Any] = {"bytes": size, "steps": {}}
    for value in trial.values:
      trial.set(network, value)
      found["steps"][str(value)] = ask(pipes, "step")
      if (workers, value) == (2, trial.fitted_at):
        found["half"] = ask(pipes, "step", **HALF)
        found["reduce"] = [(s, ask(pipes, "reduce", s)) for s in scaling.sizes_up_to(size)]
  return found


def predicted_s(
  trial: Trial, pair: Mapping[str, Any], workers: int, value: float, *, cores: int
) -> float:
  """Returns the seconds of a step, from what two workers measured at `fitted_at`.

  Compute takes longer where workers share a core.
  """
  sizes, seconds = zip(*pair["reduce"], strict=True)
  steps = pair["steps"][str(trial.fitted_at)], pair["half"]
  sent = float(np.interp(pair["bytes"], sizes, seconds))
  work = scaling.fitted_work((2, 1), steps, size=pair["bytes"], communication_s=sent)
  shared = math.ceil(workers / cores)
  work = work._replace(fixed_s=work.fixed_s * shared, example_s=work.example_s * shared)
  link = trial.link(scaling.fitted_link(sizes, seconds, 2), value, shared)
  return scaling.step_s(work, lambda size: scaling.ring(size, workers, link))


def check(trial: Trial, found: Mapping[str, Any], *, cores: int) -> int:
  """Prints predictions beside measurements; returns how many differ by more than ALLOWED."""
  print("| workers | link | measured, ms | predicted, ms | error |\n|---|---|---|---|---|")
  wrong = 0
  for workers, one in found.items():
    for value in trial.values:
      seconds = one["steps"][str(value)]
      predicted = predicted_s(trial, found["2"], int(workers), value, cores=cores)
      error = predicted / seconds - 1
      print(f"| {workers} | {value} | {1e3 * seconds:.1f} | {1e3 * predicted:.1f} | {error:+.1%} |")
      wrong += abs(error) > ALLOWED
  return wrong


def _wire_s(mbit: float) -> float:
  return HEADERS * 8e-6 / mbit


def _at_speed(link: Link, mbit: float, shared: int) -> Link:
  """Changes the part of the time per byte that follows from the speed; the rest is of the hosts."""
  hosts_s = max(0.0, link.s_per_byte - _wire_s(FITTED_MBIT))
  return link._replace(s_per_byte=_wire_s(mbit) + hosts_s * shared)


def _at_delay(link: Link, delay_ms: float, shared: int) -> Link:
  del shared
  return link._replace(latency_s=link.latency_s + 1e-3 * (delay_ms - FITTED_MS))


def _delay(network: Network, delay_ms: float) -> None:
  for a, b in itertools.combinations(range(len(network.hosts)), 2):
    network.link(a, b, delay_s=1e-3 * delay_ms)


TRIALS = {
  "speeds": Trial(Bridge, Bridge.limit, _at_speed, (50, 200, 1000), FITTED_MBIT),
  "delays": Trial(Network, _delay, _at_delay, (5, 20), FITTED_MS, ["mlp.units = (16,)"]),
}


# ---- Buckets ----


def buckets(rounds: int) -> None:
  """Prints the seconds of a step with buckets over that with one buffer; both take turns."""
  params = [f"run.per_replica_batch_size = {BUCKETS_BATCH}"]
  ways = {way: {**PER_TENSOR, PACK: size} for way, size in BUCKETS.items()}
  print("| Mbit/s | flat, ms | " + " | ".join(ways) + " |\n" + "|---" * (len(ways) + 2) + "|")
  with Bridge(2) as bridge, cluster(bridge, params) as pipes:
    for mbit in BUCKETS_MBIT:
      bridge.limit(mbit)
      flat, ratios = [], {way: [] for way in ways}
      for _ in range(rounds):
        flat.append(ask(pipes, "step"))
        for way, bindings in ways.items():
          ratios[way].append(ask(pipes, "step", **bindings) / flat[-1])
      cells = [f"{np.median(r):.2f} [{min(r):.2f}, {max(r):.2f}]" for r in ratios.values()]
      print(f"| {mbit} | {1e3 * np.median(flat):.1f} | {' | '.join(cells)} |", flush=True)


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_check", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("trial", choices=[*TRIALS, "buckets"])
  parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4])
  parser.add_argument("--rounds", type=int, default=5, help="of buckets (default: %(default)s)")
  parser.add_argument("--json", help="keeps the measurements in this file, and takes those there")
  options = parser.parse_args()
  os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
  import loopwright.tools.tune  # noqa: F401  (the workers are forks of this process)

  if options.trial == "buckets":
    buckets(options.rounds)
    return 0
  trial = TRIALS[options.trial]
  kept = Path(options.json) if options.json else None
  found = json.loads(kept.read_text()) if kept and kept.exists() else {}
  for workers in options.workers:
    if str(workers) not in found:
      found[str(workers)] = measured(trial, workers)
    if kept:
      kept.write_text(json.dumps(found, indent=1))
  return 1 if check(trial, found, cores=len(os.sched_getaffinity(0))) else 0


if __name__ == "__main__":
  sys.exit(main())
