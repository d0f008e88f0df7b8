"""The checks of `--mode=verify`, for your own tests; docs/verify.md shows their use.

They need three logical CPUs, made before TensorFlow's first operation: if other tests run first,
call `loopwright.strategies.factories.split_cpu(3)` in conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from loopwright.optimizers import adapters
from loopwright.task import Task
from loopwright.tools import verify
from loopwright.tools.verify import Report, Result, Subject

__all__ = ["Report", "Result", "assert_right", "check", "found"]


def check(
  task: Callable[[], Task],
  *,
  groups: Sequence[str] | None = None,
  optimizer: adapters.OptimizerFactory
  | Mapping[str, adapters.OptimizerFactory] = keras.optimizers.Adam,
  global_batch_size: int = 64,
  seed: int = 0,
  precision: str = "float32",
  **trainer: Any,
) -> list[Result]:
  """Runs checks of a task and returns their results (host).

  Args:
    task: a class, or a function without arguments that returns a task.
    groups: names from `verify.GROUPS`; None runs all.
    optimizer, global_batch_size, seed, precision: see `run`.
    trainer: options of `Trainer`, such as clip_norm=1.0.

  Raises:
    ConfigError: unknown group, or TensorFlow started with fewer than three logical CPUs.
  """
  subject = Subject(
    task=task, optimizer=optimizer, global_batch_size=global_batch_size, seed=seed,
    precision=precision, options=trainer,
  )  # fmt: skip
  return verify.verify(subject, groups=groups).results


def assert_right(task: Callable[[], Task], **options: Any) -> None:
  """Asserts that no check of a task fails; takes the options of `check` (host).

  Raises:
    AssertionError: a check failed; the message is the table of failed checks.
  """
  failed = [result for result in check(task, **options) if result.status == "failed"]
  if failed:
    raise AssertionError("\n" + Report(failed, seconds=0.0).table())


def found(results: Sequence[Result], name: str) -> Result:
  """Returns the result of the check named `name`, such as "same update on 2 replicas".

  Raises:
    KeyError: no check has this name.
  """
  for result in results:
    if result.check == name:
      return result
  raise KeyError(f"no check {name!r}; choose from {', '.join(result.check for result in results)}")
