"""How many workers of a cluster start next, if that may vary. This module imports no TensorFlow."""

from __future__ import annotations

_LONGEST_REST_S = 3600.0


class Places:
  """The places of a run's workers; the place of a lost worker rests before it is used again.

  It rests for `rest_s`, and twice as long after each further loss, since a return costs a restart.
  And it rests until there is a newer checkpoint than at the loss: a run that fails at the same step
  again and again comes to an end. If all processes must restart, all places are used again.
  """

  def __init__(self, *, least: int, most: int, rest_s: float) -> None:
    """All places are in use."""
    self.least, self.most = least, most
    self._rest_s, self._losses = rest_s, 0
    self._resting: list[tuple[float, int]] = []

  def __str__(self) -> str:
    """Returns what `cluster.WORKERS` has."""
    return f"{self.least}:{self.most}"

  @property
  def free(self) -> int:
    """The number of workers that can start."""
    return max(0, self.most - len(self._resting))

  @property
  def missing(self) -> bool:
    """Whether a place rests."""
    return bool(self._resting)

  def lose(self, count: int, *, now_s: float, step: int) -> None:
    """Lets `count` places rest; `step` is that of the newest checkpoint, 0 for none."""
    rest_s = min(self._rest_s * 2**self._losses, _LONGEST_REST_S)
    self._losses += 1
    self._resting += [(now_s + rest_s, step)] * count

  def use_all(self) -> None:
    """Ends all rests: the run starts anew."""
    self._resting = []

  def returned(self, *, now_s: float, step: int) -> int:
    """Takes the places that have rested back into use; returns how many there were."""
    resting = [place for place in self._resting if place[0] > now_s or place[1] >= step]
    count = len(self._resting) - len(resting)
    self._resting = resting
    return count
