"""Part of the group "replicas": learning rates and updates of later steps, on one replica and two.

A rate that is counted in epochs of a replica's own rows is right in the first steps. So the step
runs from the same weights at numbers that grow by powers of two: whatever changes at step n on one
replica and at 2n on two differs at one of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from loopwright import errors
from loopwright.tools.verify.bench import source_lines
from loopwright.tools.verify.bench.bench import Bench, Outcome
from loopwright.tools.verify.bench.comparison import AFTER_STEPS, METHODS, Comparison
from loopwright.tools.verify.report import Group, Result

GROUP, NAME = Group("replicas"), "same rates and updates later on"
NUMBERS = (5, 6, 7, *(2**k for k in range(3, 20)))
"""Numbers of the steps that run."""
RATE_NUMBERS = tuple(sorted({round(1.25**k) for k in range(62)}))
"""Numbers of steps whose learning rate is read."""
CAUSE = "epochs counted in local batches"
REMEDY = (
  "count examples by the global batch, run.global_batch_size for each step, whatever the replicas; "
  "the shape of batch['x'] in a step, and a division by num_replicas_in_sync, are those of one "
  "replica"
)
WORDS = (
  "num_replicas", "per_replica", "].shape[0]", "len(batch", "tf.shape(batch", "epoch",
  "step.number", '"step"',
)  # fmt: skip
_TENSORFLOW = tf.__file__.rpartition("/")[0]

Rates = dict[str, list[float]]


class LaterSteps:
  """Rates and updates of the own optimizer, on each number of replicas that it is given."""

  def __init__(self, compared: Comparison) -> None:
    self.compared = compared
    self._rates: dict[int, Rates] = {}
    self._outcomes: dict[int, list[Outcome]] = {}

  def take(self, replicas: int, here: Bench) -> None:
    """Reads the rates and runs the steps of one bench, after its first steps (host)."""
    step = here.trainer.global_step
    rates: Rates = {name: [] for name in here.trainer.parts.optimizers}
    for name, number in itertools.product(rates, RATE_NUMBERS):
      step.assign(number)
      rates[name].append(float(here.trainer.parts.optimizers[name].learning_rate()))
    self._rates[replicas], self._outcomes[replicas] = rates, []
    for number in NUMBERS:
      here.assign(self.compared.start)
      step.assign(number)
      self._outcomes[replicas].append(here.step(self.compared.batch))

  def result(self) -> Result:
    """Compares two and three replicas with one."""
    if told := self._rate() or self._update():
      return GROUP.failed(NAME, told, CAUSE, REMEDY, self._place())
    detail = f"{len(NUMBERS)} steps up to number {NUMBERS[-1]:,}, on 1, 2 and 3 replicas"
    return GROUP.passed(NAME, detail)

  def _rate(self) -> str:
    for replicas, name in itertools.product((2, 3), self._rates[1]):
      rates = (self._rates[n][name] for n in (1, replicas))
      for number, one, more in zip(RATE_NUMBERS, *rates, strict=True):
        if abs(one - more) > 1e-5 * abs(one):
          told = (
            f"at step {number:,} the learning rate of {name!r} is {one:.4g} on one replica and "
          )
          return f"{told}{more:.4g} on {replicas}"
    return ""

  def _update(self) -> str:
    for replicas in (2, 3):
      pairs = zip(NUMBERS, self._outcomes[1], self._outcomes[replicas], strict=True)
      for number, one, more in pairs:
        found = self.compared.difference(more, one, without=self.compared.noisy)
        if found.worst > AFTER_STEPS:
          told = f"at step {number:,} on {replicas} replicas {found.detail}, "
          return f"{told}in the first steps it does not"
    return ""

  def _place(self) -> str:
    """Returns the line that reads the number of replicas, otherwise one with a word for it."""
    task = self.compared.task
    with _replicas_read() as places:
      here = Bench(self.compared.subject, 2, rows=self.compared.rows)
      here.step(self.compared.batch)
    if places:
      return source_lines.qualified(places[0], task)
    by_words = (source_lines.mention(task, word) for word in WORDS)
    return next(filter(None, by_words), "") or source_lines.find(task, *METHODS)


@contextlib.contextmanager
def _replicas_read() -> Iterator[list[str]]:
  """Notes each line of the user's that reads `num_replicas_in_sync` (host)."""
  places: list[str] = []
  whole = distribute_lib.StrategyBase.num_replicas_in_sync

  def read(strategy: tf.distribute.Strategy) -> int:
    frames = source_lines.frames(but=__file__)
    outside = [frame for frame in frames if not frame[0].startswith(_TENSORFLOW)]
    if outside and errors.is_the_users(outside[-1][0]):
      places.append(source_lines.of_frames(outside, None))
    return whole.fget(strategy)

  with mock.patch.object(distribute_lib.StrategyBase, "num_replicas_in_sync", property(read)):
    yield places
