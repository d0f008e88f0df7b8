"""Who is slow, from times written by hand; tests/clusters/test_hangs.py has two real workers."""

import json

import numpy as np
import pytest

from loopwright.monitoring import flights
from loopwright.monitoring.flight import Flight
from loopwright.monitoring.record import Leg, Pace
from loopwright.monitoring.stragglers import LOOPS, WHILE_S, Stragglers


def pace(input_s, compute_s, collective_s):
  return {"input": input_s, "compute": compute_s, "collective": collective_s}


EVEN = {0: pace(0.001, 0.009, 0.002), 1: pace(0.001, 0.010, 0.001), 2: pace(0.001, 0.009, 0.002)}
SLOW = {0: pace(0.001, 0.009, 0.012), 1: pace(0.011, 0.010, 0.001), 2: pace(0.001, 0.009, 0.012)}


def test_a_slow_worker_is_named_with_its_phase_and_what_it_costs():
  assert flights.slow(EVEN) is None
  found = flights.slow(SLOW)
  assert (found.worker, found.phase) == (1, "input")
  assert found.own_s == pytest.approx(0.021)
  assert found.usual_s == pytest.approx(0.010)
  assert found.better_s == pytest.approx(0.022 - 0.011)  # docs/scaling.md: the others' own + wait


@pytest.mark.parametrize(
  ("own_s", "wait_s", "is_slow"),
  [(0.0129, 0.005, False), (0.0131, 0.005, True), (0.0131, 0.05, False)],  # the last: 5 % of a step
)
def test_it_is_slow_from_a_ratio_and_a_share_of_the_step_on(own_s, wait_s, is_slow):
  both = {0: pace(0.0, 0.010, wait_s + own_s - 0.010), 1: pace(0.0, own_s, wait_s)}
  assert (flights.slow(both) is not None) == is_slow


def test_without_times_of_collectives_only_the_input_tells():
  paces_on_gpus = {0: {"input": 0.001, "compute": 0.02}, 1: {"input": 0.001, "compute": 0.05}}
  assert flights.slow(paces_on_gpus) is None
  paces_on_gpus[1] = {"input": 0.02, "compute": 0.001}
  assert flights.slow(paces_on_gpus).worker == 1


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def test_one_line_after_a_while_and_again_only_after_a_recovery():
  clock = Clock()
  watch = Stragglers("runs/a", 3, clock=clock)
  loops = 0

  def judged(times, seconds, more=1):
    nonlocal loops
    loops += more
    clock.now += seconds
    return watch.judged({w: Leg(pace=p, loops=loops, host="b7") for w, p in times.items()})

  assert judged(SLOW, 0) == ""
  assert judged(SLOW, WHILE_S - 1) == ""
  assert judged(EVEN, 0) == ""  # it was for a moment only
  assert judged(SLOW, 1) == ""
  assert judged(SLOW, WHILE_S, more=LOOPS - 1) == ""  # too few loops
  said = judged(SLOW, 1)
  assert said.startswith(
    f"worker 1 on b7 is slow, mostly in input: for {WHILE_S + 1:.0f} s a step of it has taken "
    "21 ms before the collective, 2.1 times the others' 10 ms; all wait for it, and without that "
    "would take 50 % less; "
  )
  assert judged(SLOW, 100, more=100) == ""
  assert judged(EVEN, 1) == judged(SLOW, 1) == ""
  assert judged(SLOW, WHILE_S, more=LOOPS) != ""


def test_nobody_is_judged_before_all_have_told_their_times():
  watch = Stragglers("runs/a", 3, clock=Clock())
  for loops in range(2 * LOOPS):
    watch._clock.now += WHILE_S
    known = {w: Leg(pace=p, loops=loops) for w, p in SLOW.items() if w != 0}
    assert watch.judged(known) == ""
    assert watch.judged({**known, 0: Leg(loops=loops)}) == ""
    assert watch.judged({**known, 0: Leg(pace=SLOW[0], ended="done")}) == ""


def test_percentiles_over_several_legs_are_right_to_2_5_percent():
  draws = np.random.default_rng(0).lognormal(-4, 0.5, 2000)
  worker, counts = [], Pace()
  for part in np.split(draws, 4):
    worker.append(Leg(began=1.0))
    for seconds in part:
      counts.add(worker[-1], 2, 2 * seconds, 0.0, None)
  read_again = flights.of_lines(json.dumps(vars(leg)) for leg in worker)
  found = flights.times(read_again)
  expected = [*np.quantile(draws, [0.5, 0.99], method="inverted_cdf"), draws.max()]
  np.testing.assert_allclose(found["compute"], expected, rtol=0.025)
  assert found["input"] == (0, 0, 0)
  assert worker[-1].pace["compute"] == pytest.approx(np.median(draws[-9:]))
  lines = flights.table({0: read_again}).splitlines()
  assert lines[1].split() == ["worker", "phase", "p50,", "ms", "p99,", "ms", "slowest,", "ms"]
  assert lines[2].split() == ["0", "input", "0", "0", "0"]


def test_counts_that_are_none_are_left_out():
  record = {"began": 1.0, "times": {"input": {"5": 2, "x": 1, "6": -1, "7": "a"}, "b": 3}}
  [leg] = flights.of_lines([json.dumps(record)])
  assert leg.times == {"input": {"5": 2}}


def test_a_flight_counts_only_loops_that_were_not_traced():
  clock = Clock()
  flight = Flight(clock=clock)
  flight._writer = type("Written", (), {"write": lambda self, leg: None})()
  flight.watch.start("host")
  for step, traces in ((0, 1), (4, 1), (8, 2), (12, 2)):
    flight.loop_begins(step)
    with flight.watch.part("training"):
      clock.now += 2.0
    flight.loop_ends(step + 4, {"input_wait_s": 0.4, "communication_s": 0.6}, traces)
  assert flight.leg.pace == pytest.approx({"input": 0.1, "compute": 0.25, "collective": 0.15})
  assert {phase: sum(each.values()) for phase, each in flight.leg.times.items()} == {
    "input": 8, "compute": 8, "collective": 8,
  }  # fmt: skip
