"""The curves of a notebook: where their points are, and how many."""

import itertools
import re

import pytest

from loopwright.reporting.curves import MOST_POINTS, Curves
from loopwright.reporting.progress import Progress


def lines(svg):
  """Returns the points of each curve."""
  found = re.findall(r'<polyline points="([^"]*)"', svg)
  return [[tuple(map(float, p.split(","))) for p in points.split()] for points in found]


def test_points_are_where_step_and_value_put_them():
  curves = Curves()
  for step, value in [(0, 4.0), (50, 1.0), (100, 0.0)]:
    curves.add("train loss", step, value)
  curves.add("eval <loss>", 100, 2.0)
  svg = curves.svg()
  # 480 x 160, 64 for the numbers at the left, 20 for those below, 8 around the curves.
  assert lines(svg) == [[(64.0, 8.0), (268.0, 101.0), (472.0, 132.0)], [(472.0, 70.0)]]
  assert re.findall(r">([^<]+)</text>", svg) == [
    *("4", "0", "step 0", "100", "train loss", "eval &lt;loss&gt;")
  ]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_fewer_than_two_finite_points_draw_nothing(values):
  curves = Curves()
  for step, value in enumerate(values):
    curves.add("loss", step, value)
  assert curves.svg() == ""


def test_a_constant_is_a_line():
  curves = Curves()
  for step in (1, 2):
    curves.add("loss", step, 3.0)
  assert lines(curves.svg()) == [[(64.0, 132.0), (472.0, 132.0)]]


def test_a_long_curve_keeps_few_points_of_its_whole_length():
  curves = Curves()
  for step in range(10_000):
    curves.add("loss", step, 1.0 - step / 10_000)
  (points,) = lines(curves.svg())
  assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
  assert points[0][0] == 64
  steps = [x - 64 for x, _ in points]
  assert max(b - a for a, b in itertools.pairwise(steps)) < 408 * 64 / 10_000


def test_a_notebook_shows_the_losses_of_training_and_evaluations(monkeypatch):
  shown = []

  class Cell:
    def __init__(self, stream):
      self.points = shown

    def point(self, *point):
      self.points.append(point)

    def show(self, lines, *, draw):
      pass

    write = close = lambda self, *text: None

  monkeypatch.setattr("loopwright.reporting.live.Notebook", Cell)
  monkeypatch.setattr("loopwright.reporting.progress.is_notebook", lambda: True)
  with Progress(total_steps=2) as progress:
    progress.update(1, {"loss": 2.0, "accuracy": 0.5})
    progress.evaluation(1, {"near/loss": 3.0, "far/loss": 4.0, "far/accuracy": 0.5})
    progress.update(2, {"loss": 1.0})
  assert shown == [
    ("train loss", 1, 2.0),
    ("eval near/loss", 1, 3.0),
    ("eval far/loss", 1, 4.0),
    ("train loss", 2, 1.0),
  ]
