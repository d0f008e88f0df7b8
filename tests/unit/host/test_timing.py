"""The stopwatch, by a clock that the test turns."""

import pytest

from loopwright.host.timing import LoopClock, Stopwatch, timed


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now

  def wait(self, seconds):
    self.now += seconds


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def watch(clock):
  watch = Stopwatch(clock=clock)
  watch.start()
  yield watch
  if watch.is_running:
    watch.stop()


def test_parts_exclude_each_other_and_add_up(clock, watch):
  clock.wait(1)
  with watch.part("evaluation"):
    clock.wait(2)
    with watch.part("checkpoints"):
      clock.wait(4)
    clock.wait(8)
  with watch.part("checkpoints"):
    clock.wait(16)
  clock.wait(32)
  watch.stop()
  clock.wait(64)
  assert watch.seconds == {"host": 33, "evaluation": 10, "checkpoints": 20}
  assert not watch.is_running


def test_a_part_that_fails_is_left(clock, watch):
  def fail():
    with watch.part("a"):
      clock.wait(1)
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    fail()
  clock.wait(2)
  watch.stop()
  assert watch.seconds == {"host": 2, "a": 1}


def test_decorated_functions_count_for_the_one_that_runs(clock):
  @timed("slow")
  def slow(seconds, *, more=0):
    """Says how long."""
    clock.wait(seconds + more)
    return seconds

  assert slow(1) == 1
  watch = Stopwatch(clock=clock)
  watch.start()
  assert slow(2, more=1) == 2
  clock.wait(5)
  watch.stop()
  slow(7)
  assert watch.seconds == {"host": 5, "slow": 3}
  assert (slow.__name__, slow.__doc__) == ("slow", "Says how long.")


@pytest.mark.parametrize(
  ("jump", "measured", "expected"),
  [
    (0, 2, 2),  # an ordinary wait
    (0, -0.001, 0),  # rounding
    (0, 20, 20),  # ten workers that wait at the same time
    (-3600, 2 - 3600, 2),  # the clock was set back during the wait
    (3600, 2 + 3600, 2),
    (-3600, 2, 2),  # outside of it
    (-3600, -9000, 0),  # two jumps, of which only the sum is known
    (3600, 9000, 10),
  ],
)
def test_a_jump_of_the_clock_is_no_time(jump, measured, expected):
  system, steady = Clock(), Clock()
  loop = LoopClock(system=system, steady=steady)
  system.wait(10 + jump)
  steady.wait(10)
  assert loop.seconds() == 10
  assert loop.corrected(measured) == pytest.approx(expected, abs=1e-9)
