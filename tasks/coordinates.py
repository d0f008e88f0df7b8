"""The coordinate check: does a step change each layer's output as much at every width?

    python -m loopwright.tasks.coordinates --gin_file=configs/language_model_widths.gin \
      --scaled=decoder.width,decoder.heads,decoder.groups,by_width.width --times=1,2,4

If it does, a learning rate found for a narrow network holds for a wide one. Yang et al., "Tensor
Programs V" (2022), appendix D.1. The config is trained a few steps at each width, and the root mean
square of the change of each layer's output for a fixed batch is compared, and the loss.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Batch
from loopwright.options.groups import Numerics
from loopwright.runs import builder
from loopwright.runs import from_config as runs
from loopwright.task import Task
from loopwright.trainer import Trainer

STEEPEST = 0.25
"""A slope beyond is not flat: of a change in proportion to the width it is 1."""
WORSE = 0.02
"""By this part of it the loss of the widest may exceed that of the narrowest."""


class Row(NamedTuple):
  """What one layer does at each width.

  Attributes:
    name: its path in the model; with " 2" for its second call.
    changes: the root mean square of the change of its output, a width.
    slope: of the logarithms of changes over those of widths, by least squares.
  """

  name: str
  changes: Sequence[float]
  slope: float

  @property
  def is_flat(self) -> bool:
    """Whether it neither grows nor vanishes with the width."""
    return abs(self.slope) <= STEEPEST


def compare(
  make: Callable[[float], Trainer], times: Sequence[float], steps: int
) -> tuple[list[Row], list[float]]:
  """Trains at each width (host).

  Args:
    make: factor of the width -> a new trainer, with the same data and seed for all.
    times: at least two factors.
    steps: of training.

  Returns:
    A row for each Keras layer that changes at all widths, in the order of the calls; the losses of
    the last step, a width.
  """
  found, losses = [], []
  for factor in times:
    trainer = make(factor)
    batch = next(iter(trainer.dataset_fn(0)))
    before = _outputs(trainer.task, batch)
    trainer.train(tf.constant(steps - 1))
    losses.append(trainer.train(tf.constant(1))["loss"])
    after = _outputs(trainer.task, batch)
    found.append({n: np.sqrt(np.mean((after[n] - before[n]) ** 2)) for n in before})
  rows = []
  for name in found[0]:
    changes = [float(each.get(name, 0.0)) for each in found]
    if min(changes) > 0:
      rows.append(Row(name, changes, float(np.polyfit(np.log(times), np.log(changes), 1)[0])))
  return rows, losses


def _outputs(task: Task, batch: Batch) -> dict[str, np.ndarray]:
  """Returns the float output of each call of a Keras layer in a forward pass, in order."""
  outputs: dict[str, np.ndarray] = {}
  call = keras.layers.Layer.__call__

  def noted(layer: Any, *args: Any, **options: Any) -> Any:
    made = call(layer, *args, **options)
    if tf.is_tensor(made) and made.dtype.is_floating:
      number = 1 + sum(name.split()[0] == layer.path for name in outputs)
      outputs[layer.path if number == 1 else f"{layer.path} {number}"] = np.asarray(made, float)
    return made

  with mock.patch.object(keras.layers.Layer, "__call__", noted):
    task.forward(batch, training=False)
  return outputs


def lags(losses: Sequence[float]) -> bool:
  """Whether the widest network has clearly learnt less than the narrowest."""
  return losses[-1] > losses[0] + WORSE * abs(losses[0])


def report(rows: Sequence[Row], losses: Sequence[float], times: Sequence[float]) -> str:
  """Returns the table and the verdict."""
  size = max(len(row.name) for row in rows)
  lines = [
    " ".join([f"{'layer':{size}}", *(f"{f'x{factor:g}':>9}" for factor in times), "   slope"])
  ]
  for row in rows:
    told = "" if row.is_flat else "  grows with the width" if row.slope > 0 else "  vanishes"
    numbers = " ".join(f"{change:9.3g}" for change in row.changes)
    lines.append(f"{row.name:{size}} {numbers} {row.slope:8.2f}{told}")
  lines.append(" ".join([f"{'loss':{size}}", *(f"{loss:9.4g}" for loss in losses)]))
  steep = [row.name for row in rows if not row.is_flat]
  if steep:
    lines.append(f"{len(steep)} of {len(rows)} outputs depend on the width; the first: {steep[0]}")
  if lags(losses):
    lines.append("the widest learns less than the narrowest")
  if not steep and not lags(losses):
    lines.append("each output changes as much at every width, and the widest learns as much")
  return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 if an output depends on the width or the widest lags."""
  parser = argparse.ArgumentParser(prog="python -m loopwright.tasks.coordinates")
  parser.add_argument("--gin_file", action="append", default=[])
  parser.add_argument("--gin_param", action="append", default=[])
  parser.add_argument("--scaled", required=True, help="whole numbers of the config, a,b,c")
  parser.add_argument("--times", default="1,2,4,8", help="by which they are multiplied")
  parser.add_argument("--steps", type=int, default=5, help="of training at each width, from 2 on")
  given = parser.parse_args(arguments)
  try:
    times = _times(given.times)
    if given.steps < 2:
      raise ConfigError(f"--steps is {given.steps}; it must be at least 2.")
    rows, losses = compare(lambda factor: _made(given, factor), times, given.steps)
    if not rows:
      raise ConfigError("no Keras layer of the model changes at all widths; train more --steps.")
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(report(rows, losses, times))
  return int(not all(row.is_flat for row in rows) or lags(losses))


def _times(text: str) -> list[float]:
  try:
    times = [float(each) for each in text.split(",")]
  except ValueError:
    times = []
  if len(times) < 2 or min(times) <= 0 or times != sorted(set(times)):
    raise ConfigError(
      f"--times is {text!r}; it must be two or more growing factors, such as 1,2,4."
    )
  return times


def _made(given: argparse.Namespace, factor: float) -> Trainer:
  """Returns a trainer of the config at a width."""
  configurables.parse(given.gin_file, given.gin_param)
  scaled = [_scaled(binding, factor) for binding in given.scaled.split(",")]
  configurables.parse(given.gin_file, [*given.gin_param, *scaled])
  builder.set_globals(Numerics(seed=runs.bound("seed"), precision=runs.bound("precision")))
  task = builder.made_task(runs.bound("task"))
  return runs.bound_recipe().trainer(task, tf.distribute.OneDeviceStrategy("CPU:0"))


def _scaled(binding: str, factor: float) -> str:
  owner, _, name = binding.rpartition(".")
  value = configurables.bound(owner, name, None)
  if type(value) is not int:
    raise ConfigError(
      f"--scaled has {binding!r}, which the config binds to {value!r}; bind it to a whole number."
    )
  if value * factor != round(value * factor):
    raise ConfigError(f"--times has {factor:g}, and {binding} is {value}; give a whole multiple.")
  return f"{binding} = {round(value * factor)}"


if __name__ == "__main__":
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  sys.exit(main())
