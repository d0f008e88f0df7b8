"""Simulates the goodput of 16 to 4,096 workers with faults and slow workers.

  python -m benchmarks.fleet

Synchronous data parallelism with a fixed global batch and the step time of benchmarks/scaling.py. A
fault comes to each worker by a Poisson process of a published rate. Goodput is the time that the
steps which count take on a whole, even cluster, divided by the wall time. docs/scaling.md has the
assumptions and the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math

import numpy as np

from benchmarks.scaling import Link, Work, ring, step_s

SIZES = (16, 64, 256, 1024, 4096)
LLAMA = 419 / (54 * 24 * 3600 * 16384)
"""Faults per worker (one GPU) and second of Llama 3's training: 419 in 54 days on 16,384 GPUs."""
RATES = {"Llama 3's": LLAMA, "ten times that": 10 * LLAMA}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
  """What happens at a fault; times in seconds.

  Attributes:
    detect_s: until all processes have ended.
    import_s: what a process that stands by has done already.
    start_s: meeting, building, tracing.
    read_s: restoring from disk; `copy_s` from memory.
    save_s: a save's pause.
    copy_every_s: between copies in memory.
    replace_s: until another machine takes the lost one's place.
  """

  copies: bool = False
  standby: bool = False
  elastic: bool = False
  detect_s: float = 10.0
  import_s: float = 15.0
  start_s: float = 30.0
  read_s: float = 30.0
  copy_s: float = 3.0
  save_s: float = 2.0
  copy_every_s: float = 5.0
  replace_s: float = 600.0

  @property
  def restart_s(self) -> float:
    """From the end of the processes to the first step."""
    imports_s = 0.0 if self.standby else self.import_s
    return imports_s + self.start_s + (self.copy_s if self.copies else self.read_s)

  def save_every_s(self, rate: float) -> float:
    """Returns Young's interval for a rate of faults of the whole cluster."""
    return math.sqrt(2 * self.save_s / rate)


FEATURES = {
  "none": Fleet(),
  "copies": Fleet(copies=True),
  "copies, standby": Fleet(copies=True, standby=True),
  "copies, standby, elastic": Fleet(copies=True, standby=True, elastic=True),
}


def goodput(
  fleet: Fleet, *, rate: float, slower: float, wall_s: float, rng: np.random.Generator
) -> float:
  """Returns the goodput of one simulated run.

  Args:
    rate: faults per second of the whole cluster.
    slower: step time with a worker less, relative to that of the whole cluster.
    wall_s: how long it trains.
  """
  every_s = fleet.save_every_s(rate)
  pace = 1 / (1 + fleet.save_s / every_s)  # saves pause training
  now = useful_s = back_at = 0.0
  while now < wall_s:
    fault_at = now + rng.exponential(1 / rate)
    end = min(fault_at, wall_s)
    if fleet.elastic and now < back_at < end:  # it grows: saved, so nothing is repeated
      useful_s += (back_at - now) / slower * pace
      now = min(back_at + fleet.restart_s, end)
    here = pace / (slower if fleet.elastic and now < back_at else 1.0)
    trained_s = end - now
    useful_s += trained_s * here
    if fault_at >= wall_s:
      break
    lost_s = rng.uniform(0, fleet.copy_every_s if fleet.copies else every_s)
    useful_s -= min(lost_s, trained_s) * here
    waits_s = 0.0 if fleet.elastic else fleet.replace_s
    now = end + fleet.detect_s + waits_s + fleet.restart_s
    back_at = end + fleet.replace_s
  return useful_s / max(now, wall_s)


def waits_for_slowest(work: Work, reduce_s: float, *, slow: float) -> float:
  """Returns the step time with one worker whose passes take `slow` times as long, relative."""
  even = step_s(work, lambda _: reduce_s)
  return (even + (slow - 1) * work.passes_s) / even


def slowest_of(workers: int, spread: float, rng: np.random.Generator, *, steps: int = 200) -> float:
  """Returns the mean of the slowest of `workers`, of normal times with mean 1 (at least 0)."""
  times = rng.normal(1.0, spread, [steps, workers])
  return float(np.maximum(times, 0.0).max(axis=1).mean())


def main() -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--days", type=float, default=54.0)
  parser.add_argument("--runs", type=int, default=10)
  parser.add_argument("--examples", type=float, default=16384.0, help="of a global batch")
  parser.add_argument("--link", default="10,400", help="microseconds,Gbit/s")
  asked = parser.parse_args()
  link = Link.parsed(asked.link)

  def work(workers: int) -> Work:
    return Work(fixed_s=0.02, example_s=0.1, examples=asked.examples / workers, size=2e9)

  def step(workers: int) -> float:
    return step_s(work(workers), functools.partial(ring, workers=workers, link=link))

  print("| faults | workers | " + " | ".join(FEATURES) + " |")
  print("|---|---|" + "---|" * len(FEATURES))
  for source, each in RATES.items():
    for workers in SIZES:
      row = []
      for fleet in FEATURES.values():
        slower, rng = step(workers - 1) / step(workers), np.random.default_rng(0)
        options = {"rate": each * workers, "slower": slower, "wall_s": asked.days * 86400}
        found = [goodput(fleet, rng=rng, **options) for _ in range(asked.runs)]
        row.append(f"{100 * np.mean(found):.2f} %")
      print(f"| {source} | {workers} | " + " | ".join(row) + " |")
  print("\n| workers | one 1.3 times slower | spread of 2 % | spread of 10 % |")
  print("|---|---|---|---|")
  for workers in SIZES:
    rng, reduce_s = np.random.default_rng(0), ring(2e9, workers, link)
    slow = [1.3, *(slowest_of(workers, spread, rng) for spread in (0.02, 0.1))]
    found = [1 / waits_for_slowest(work(workers), reduce_s, slow=each) for each in slow]
    print(f"| {workers} | " + " | ".join(f"{100 * one:.1f} %" for one in found) + " |")


if __name__ == "__main__":
  main()
