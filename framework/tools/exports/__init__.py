"""Models in formats that are served elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from framework.task import Task


def write(
  task: Task,
  directory: str,
  *,
  wanted: Sequence[str],
  is_chief: bool,
  message: Callable[[str], None],
) -> None:
  """Writes a SavedModel of a task's model, and makes and compares the formats (host).

  Args:
    task: with the weights to export.
    directory: replaced, if it is an export.
    wanted: the formats, see `Export`.
    is_chief: whether this process writes; every process of a cluster must call it.
    message: is told how the formats compare.

  Raises:
    ConfigError: a format differs or cannot be made.
  """
  from framework.tools.exports import formats
  from framework.tools.exports.export import export

  formats.require(task, wanted, directory)
  export(task, directory, is_chief=is_chief, formats=wanted)
  if wanted and is_chief:
    message(formats.told(directory, formats.prove(task, directory, wanted)))
