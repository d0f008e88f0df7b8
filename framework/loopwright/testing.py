"""The checks of `--mode=verify`, for your own tests; docs/verify.md shows their use.

They need three logical CPUs, made before TensorFlow's first operation: if other tests run first,
call `loopwright.strategies.factories.split_cpu(3)` in conftest.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras

from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.task import Task
from loopwright.tools import verify
from loopwright.tools.verify import Report, Result, Subject

__all__ = ["Report", "Result", "assert_right", "check", "found"]


def check(
  task: Callable[[], Task] | str | os.PathLike[str],
  *,
  groups: Sequence[str] | None = None,
  gin_params: Sequence[str] = (),
  **options: Any,
) -> list[Result]:
  """Runs checks of a task and returns their results (host).

    testing.check("waves.gin", groups=["replicas"])
    testing.check(Waves, global_batch_size=50, clip_norm=1.0)

  Args:
    task: a gin file, checked as `loopwright verify` does; or a class, or a function without
      arguments, that returns a task.
    groups: names of the registry's "check"; None runs all.
    gin_params: bindings after those of the gin file.
    options: without a gin file: optimizer (default Adam), global_batch_size (default 64), seed
      and precision, as `run` takes them, and options of `Trainer`, such as clip_norm=1.0.

  Raises:
    ConfigError: unknown group, options beside a gin file, or TensorFlow started with fewer than
      three logical CPUs.
  """
  return verify.verify(_subject(task, gin_params, options), groups=groups).results


def _subject(task: Any, gin_params: Sequence[str], options: dict[str, Any]) -> Subject:
  if isinstance(task, str | os.PathLike):
    if options:
      raise ConfigError(
        f"received both {os.fspath(task)!r} and {', '.join(options)}; the gin file says all: "
        "write bindings as gin_params"
      )
    configurables.parse([os.fspath(task)], gin_params)
    return verify.subject_of_config()
  if gin_params:
    raise ConfigError("gin_params belong to a gin file; give its name in place of the task")
  defaults: dict[str, Any] = {
    "optimizer": keras.optimizers.Adam, "global_batch_size": 64, "seed": 0, "precision": "float32",
  }  # fmt: skip
  given = {name: options.pop(name, value) for name, value in defaults.items()}
  return Subject(task=task, options=options, **given)


def assert_right(task: Callable[[], Task] | str | os.PathLike[str], **options: Any) -> None:
  """Asserts that no check of a gin file or a task fails; takes the options of `check` (host).

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
