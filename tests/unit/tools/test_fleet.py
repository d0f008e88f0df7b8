"""The simulation of benchmarks/fleet.py, against closed forms."""

import math

import numpy as np
import pytest

from benchmarks import fleet
from benchmarks.fleet import Fleet
from benchmarks.scaling import Work

DAY_S = 86400.0


def simulated(kind, *, rate, slower=1.0):
  rng = np.random.default_rng(0)
  return fleet.goodput(kind, rate=rate, slower=slower, wall_s=20000 / rate, rng=rng)


@pytest.mark.parametrize("copies", [False, True])
def test_a_cluster_that_waits_loses_what_a_fault_costs(copies):
  kind, rate = Fleet(copies=copies, replace_s=500.0), 1 / (2 * DAY_S)
  every_s = math.sqrt(2 * 2.0 / rate)
  repeated_s = 2.5 if copies else every_s / 2
  down_s = 10.0 + 500.0 + 15.0 + 30.0 + (3.0 if copies else 30.0)
  expected = (1 / rate - repeated_s) / (1 / rate + down_s) / (1 + 2.0 / every_s)
  assert simulated(kind, rate=rate) == pytest.approx(expected, abs=1e-4)


def test_an_elastic_cluster_is_slower_for_a_while_and_restarts_twice():
  kind = Fleet(copies=True, standby=True, elastic=True, replace_s=5000.0)
  rate, slower = 1 / (20 * DAY_S), 4 / 3
  shrunk_s = 5000.0 - 10.0 - 33.0
  up_s = 1 / rate
  pace = 1 / (1 + 2.0 / math.sqrt(2 * 2.0 / rate))
  kept_s = up_s - 33.0 - shrunk_s * (1 - 1 / slower) - 2.5
  assert simulated(kind, rate=rate, slower=slower) == pytest.approx(
    pace * kept_s / (up_s + 10.0 + 33.0), abs=2e-4
  )


def test_without_faults_only_saves_pause():
  rng = np.random.default_rng(0)
  found = fleet.goodput(Fleet(), rate=1e-15, slower=1.0, wall_s=DAY_S, rng=rng)
  assert found == pytest.approx(1.0, abs=1e-6)


def test_all_wait_for_the_passes_of_the_slowest():
  work = Work(fixed_s=1.0, example_s=0.5, examples=8, size=1.0)
  assert fleet.waits_for_slowest(work, 3.0, slow=1.5) == pytest.approx((1 + 6 + 3) / (1 + 4 + 3))


def test_the_slowest_of_two_normal_times():
  found = fleet.slowest_of(2, 0.1, np.random.default_rng(0), steps=200000)
  assert found == pytest.approx(1 + 0.1 / math.sqrt(math.pi), abs=1e-3)
