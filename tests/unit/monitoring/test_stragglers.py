"""Who is slow, from times written by hand; tests/clusters/test_hangs.py has two real workers."""

import json

import pytest

from loopwright.monitoring import record, stragglers
from loopwright.monitoring.flight import Flight


def pace(input_s, compute_s, collective_s):
  return {"input": input_s, "compute": compute_s, "collective": collective_s}


EVEN = {0: pace(0.001, 0.009, 0.002), 1: pace(0.001, 0.010, 0.001), 2: pace(0.001, 0.009, 0.002)}
SLOW = {0: pace(0.001, 0.009, 0.012), 1: pace(0.011, 0.010, 0.001), 2: pace(0.001, 0.009, 0.012)}


def test_a_slow_worker_is_named_with_its_phase_and_what_it_costs():
  assert stragglers.slow(EVEN) is None
  found = stragglers.slow(SLOW)
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
  assert (stragglers.slow(both) is not None) == is_slow


def test_without_times_of_collectives_only_the_input_tells():
  paces_on_gpus = {0: {"input": 0.001, "compute": 0.02}, 1: {"input": 0.001, "compute": 0.05}}
  assert stragglers.slow(paces_on_gpus) is None
  paces_on_gpus[1] = {"input": 0.02, "compute": 0.001}
  assert stragglers.slow(paces_on_gpus).worker == 1


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def test_the_table_has_each_worker_and_a_line_about_the_slow_one():
  lines = stragglers.table(SLOW).splitlines()
  assert [line.split() for line in lines[1:4]] == [
    ["worker", "phase", "ms"], ["0", "input", "1"], ["0", "compute", "9"],
  ]  # fmt: skip
  assert lines[-1] == (
    "worker 1 is slow, mostly in input: a step of it takes 21 ms before the collective, 2.1 times "
    "the others' 10 ms; all wait for it, and without that would take 50 % less"
  )
  assert len(stragglers.table(EVEN).splitlines()) == 2 + 9
  assert stragglers.table({0: {}}) == ""


def test_nobody_is_judged_before_all_have_told_their_times():
  assert stragglers.slow({**SLOW, 0: {}}) is None
  assert stragglers.slow({1: SLOW[1]}) is None


def test_a_pace_that_is_no_number_is_left_out():
  line = json.dumps({"began": 1.0, "pace": {"input": 5.0, "compute": "a", "collective": None}})
  [leg] = record.of_lines([line, '{"began": 1.0, "pace": 3}', '{"began": "x"}'])
  assert leg.pace == {"input": 5.0}


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
  for seconds in (9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0):
    step = flight.leg.step
    flight.loop_begins(step)
    with flight.watch.part("training"):
      clock.now += seconds
    flight.loop_ends(step + 1, {}, 2)
  assert flight.leg.pace["compute"] == 5.0  # the median of the last nine loops
