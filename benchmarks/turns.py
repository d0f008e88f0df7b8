"""Times functions that take turns, and makes tables of ratios."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Times = dict[str, list[float]]
"""Contender -> seconds of each round."""


def seconds(
  blocks: Mapping[str, Callable[[], object]],
  rounds: int,
  before: Callable[[str], object] = lambda name: None,
) -> Times:
  """Returns the seconds of each block in each round; every round has another random order (host).

  Args:
    blocks: name -> what to time; it returns when its work is done. Call each once before.
    rounds: how often each runs.
    before: called with a block's name before each time, untimed.
  """
  order = random.Random(0)
  times: Times = {name: [] for name in blocks}
  for _ in range(rounds):
    for name in order.sample(list(blocks), len(blocks)):
      before(name)
      started = time.perf_counter()
      blocks[name]()
      times[name].append(time.perf_counter() - started)
  return times


def fastest(times: Times, names: Sequence[str]) -> str:
  """Returns the name with the smallest median."""
  return min((name for name in names if name in times), key=lambda name: np.median(times[name]))


def ratio(times: Times, name: str, reference: str) -> str:
  """Returns how many times faster than `reference`: "median [quartiles]" over the rounds."""
  of_rounds = np.array(times[reference]) / np.array(times[name])
  low, middle, high = np.quantile(of_rounds, [0.25, 0.5, 0.75])
  return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
