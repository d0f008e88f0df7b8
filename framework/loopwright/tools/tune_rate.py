"""`loopwright tune --learning_rate`: a range test of the learning rate, in one short run.

Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3: the rate grows
from step to step by a factor, and the loss tells where the steps become too large.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loopwright import configurables
from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.host import urls
from loopwright.optimizers import adapters
from loopwright.optimizers.schedule import Schedule
from loopwright.optimizers.schedules import exponential_decay, follow
from loopwright.options import Gpus, Numerics
from loopwright.reporting.curves import Curves
from loopwright.run_folder import assets, places
from loopwright.runs import builder
from loopwright.runs import from_config as runs
from loopwright.tools import tune
from loopwright.trainer import Trainer

FILE = "learning_rate.svg"
LOW, HIGH, STEPS = 1e-6, 10.0, 200
WINDOW = 5
"""Losses are replaced by the median of so many around each."""
MARGIN = 10.0
"""The suggested rate is that of the lowest loss divided by it."""
_FAR = 4.0
_SHOWN = 10


class Found(NamedTuple):
  """What a range test found.

  Attributes:
    rates, losses: of each step; the loss is that before the step's update.
    smooth: the losses as medians.
    lowest: the rate at the lowest median; None if the loss never falls.
    diverges: the rate from which on the loss rises until the end; None if it does not.
    suggested: lowest / MARGIN; None like it.
    path: the picture.
  """

  rates: Sequence[float]
  losses: Sequence[float]
  smooth: Sequence[float]
  lowest: float | None
  diverges: float | None
  suggested: float | None
  path: str = ""


def range_test(
  gin_files: Sequence[str],
  gin_params: Sequence[str] = (),
  *,
  model_dir: str,
  show: Callable[[str], None] = lambda text: None,
  low: float = LOW,
  high: float = HIGH,
  steps: int = STEPS,
) -> Found:
  """Trains `steps` steps on the config's strategy with a rate from `low` to `high` (host).

  The rate grows by the same factor in each step. It ends where the loss is not finite or far above
  the first. It reads and writes no checkpoint; the picture is <model_dir>/learning_rate.svg.

  Args:
    gin_files: as for `configurables.parse`, like `gin_params`.

  Raises:
    ConfigError: a mistake in the config; it is eager, for several processes, or has several
      optimizers.
  """
  logging.getLogger("tensorflow").setLevel(logging.ERROR)  # no warnings about retracing
  configurables.parse(gin_files, gin_params)
  tune.require_tunable()
  urls.require_path("model_dir", model_dir, f"{FILE} is written there")
  places.require_writable(model_dir)
  growth = (high / low) ** (1 / (steps - 1))
  trainer = _trainer(exponential_decay(initial=low, decay_steps=1, decay_rate=growth))
  rates, losses = [], list[float]()
  [name] = trainer.parts.optimizers
  for _ in range(steps):
    rates.append(float(trainer.parts.optimizers[name].learning_rate()))
    losses.append(trainer.train(tf.constant(1))[f"{adapters.prefix(name)}loss"])
    if not _is_near(losses):
      break
  found = judged(rates, losses)._replace(path=os.path.join(model_dir, FILE))
  with tf.io.gfile.GFile(found.path, "w") as file:
    file.write(_picture(found))
  for line in _lines(found):
    show(line)
  return found


def judged(rates: Sequence[float], losses: Sequence[float]) -> Found:
  """Finds the lowest loss, and where it begins to rise for good.

  The loss has diverged where its median is above 4 times the lowest and above the first, whichever
  is less, and stays there. The rise began at the last step before that at which it did not rise:
  of the losses there, at the lowest.

  Args:
    rates: of each step, rising.
    losses: those before each update; one that is not finite counts as infinite.
  """
  values = np.where(np.isfinite(losses), losses, np.inf)
  half = WINDOW // 2
  smooth = [float(np.median(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]
  lowest, first = int(np.argmin(smooth)), float(np.median(values[:WINDOW]))
  if lowest < WINDOW:
    return Found(rates, losses, smooth, None, None, None)
  limit = min(_FAR * smooth[lowest], first) if smooth[lowest] > 0 else first
  begin = max(i for i, value in enumerate(smooth) if value <= limit) + 1
  diverges: float | None = None
  if begin < len(smooth):
    while smooth[begin - 1] < smooth[begin]:  # ends at the lowest at the latest
      begin -= 1
    near = range(max(0, begin - half), min(begin + half + 1, len(rates)))
    diverges = rates[min(near, key=lambda i: values[i])]
  best = rates[lowest]
  return Found(rates, losses, smooth, best, diverges, best / MARGIN)


def _is_near(losses: Sequence[float]) -> bool:
  """Whether the last losses are finite and not far above the first."""
  last, first = losses[-WINDOW:], max(map(abs, losses[:WINDOW]))
  return math.isfinite(losses[-1]) and not min(last) > _FAR * first


def _trainer(rate: Schedule) -> Trainer:
  """Returns the trainer of the config in force, with another rate."""
  task = builder.made_task(runs.bound("task"))
  assets.provide_in_memory(task, None)
  builder.set_globals(runs.bound_group(Numerics, eager=False), runs.bound_group(Gpus))
  strategy: tf.distribute.Strategy = placement.made(runs.bound("strategy"))
  recipe = runs.bound_recipe(strategy.num_replicas_in_sync)
  factory = task.own_optimizer or recipe.optimizer
  if not callable(factory):
    if len(factory) > 1:
      raise ConfigError(
        f"the optimizers are {', '.join(map(repr, factory))}, and a range test is for the rate of "
        "one; try rates of each with `loopwright sweep`."
      )
    [(name, factory)] = factory.items()
  else:
    name = ""

  def swept() -> Any:
    optimizer = factory()
    adapters.require_usable(name or adapters.DEFAULT, optimizer)
    follow(optimizer, rate)
    return optimizer

  optimizer = {name: swept} if name else swept
  return dataclasses.replace(recipe, optimizer=optimizer).trainer(task, strategy)


def _lines(found: Found) -> list[str]:
  """Returns the curve in some rows, then what was found."""
  every = max(1, len(found.rates) // _SHOWN)
  rows = zip(found.rates[::every], found.losses[::every], strict=True)
  lines = ["    rate      loss", *(f"{rate:8.2g}  {loss:8.4g}" for rate, loss in rows)]
  if found.lowest is None:
    lines.append(f"the loss does not fall at any rate up to {found.rates[-1]:.2g}: no suggestion")
  else:
    far = f"{found.diverges:.2g}" if found.diverges else f"none up to {found.rates[-1]:.2g}"
    lines += [
      f"the loss is lowest at {found.lowest:.2g}; it diverges from: {far}",
      f"suggested rate: {found.suggested:.2g}, a tenth of that with the lowest loss",
    ]
  return [*lines, f"picture: {found.path}"]


def _picture(found: Found) -> str:
  """Returns the curves over the logarithm of the rate, with losses up to 1.5 times the first."""
  most = found.smooth[0] + 0.5 * abs(found.smooth[0])
  curves, bottom = Curves(), min(found.smooth)
  for step, (loss, smooth) in enumerate(zip(found.losses, found.smooth, strict=True)):
    curves.add("loss", step, min(loss, most))
    curves.add("median", step, min(smooth, most))
  for name, rate in (("diverges", found.diverges), ("suggested", found.suggested)):
    if rate is not None:
      step = int(np.searchsorted(found.rates, rate * (1 - 1e-6)))
      for height in (bottom, most):
        curves.add(f"{name}: {rate:.2g}", step, height)
  return curves.svg((f"rate {found.rates[0]:.2g}", f"{found.rates[-1]:.2g}"))
