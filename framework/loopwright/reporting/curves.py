"""Curves over the steps as a small SVG picture, for a notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

MOST_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 480, 160, 64, 20
_XMLNS = 'xmlns="http://www.w3.org/2000/svg"'
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")

Point = tuple[int, float]
"""Step and value."""


class Curves:
  """Some curves, each of at most `MOST_POINTS` points; of a long one every second, fourth, ..."""

  def __init__(self) -> None:
    self._points: dict[str, list[Point]] = {}
    self._every: dict[str, int] = {}
    self._seen: dict[str, int] = {}

  def add(self, name: str, step: int, value: float) -> None:
    """Adds a point; one that is not finite is left out."""
    if not math.isfinite(value):
      return
    points, seen = self._points.setdefault(name, []), self._seen.get(name, 0)
    self._seen[name] = seen + 1
    if seen % self._every.setdefault(name, 1) == 0:
      points.append((step, value))
    if len(points) > MOST_POINTS:
      del points[1::2]
      self._every[name] *= 2

  def svg(self, ends: tuple[str, str] | None = None) -> str:
    """Returns the picture; "" if no curve has two steps.

    Args:
      ends: what is below its left and right end; None for the steps.
    """
    if not any(points[0][0] < points[-1][0] for points in self._points.values()):
      return ""
    return _svg(self._points, ends)


def _svg(curves: Mapping[str, Sequence[Point]], ends: tuple[str, str] | None) -> str:
  steps = [step for points in curves.values() for step, _ in points]
  values = [value for points in curves.values() for _, value in points]
  (left, right), (low, high) = _range(steps), _range(values)
  first, last = ends or (f"step {left}", f"{right}")

  def place(point: Point) -> str:
    x = _LEFT + (point[0] - left) / (right - left) * (_WIDTH - _LEFT - 8)
    y = 8 + (high - point[1]) / (high - low) * (_HEIGHT - _BOTTOM - 16)
    return f"{x:.1f},{y:.1f}"

  drawn = [
    _text(_LEFT - 6, 14, f"{high:.4g}", "end"),
    _text(_LEFT - 6, _HEIGHT - _BOTTOM - 6, f"{low:.4g}", "end"),
    _text(_LEFT, _HEIGHT - 6, first, "start"),
    _text(_WIDTH - 8, _HEIGHT - 6, last, "end"),
  ]
  for number, (name, points) in enumerate(curves.items()):
    color = _COLORS[number % len(_COLORS)]
    line = " ".join(map(place, points))
    drawn.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    if len(points) < 20:
      drawn += [_dot(place(point), color) for point in points]
    drawn.append(_text(_WIDTH - 12, 16 + 14 * number, name, "end", color))
  size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_XMLNS}'
  names = html.escape(", ".join(curves))
  return f'<svg {size} role="img" aria-label="{names}">{"".join(drawn)}</svg>'


def _range(values: Sequence[float]) -> tuple[float, float]:
  low, high = min(values), max(values)
  return (low, high) if low < high else (low, low + 1)


def _dot(place: str, color: str) -> str:
  x, _, y = place.partition(",")
  return f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "currentColor") -> str:
  style = f'font-size="11" font-family="sans-serif" text-anchor="{anchor}" fill="{color}"'
  return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'
