"""Writes docs/options.md from what signatures and docstrings declare of all that a config names.

python -m tests.support.option_tables > docs/options.md
"""

import inspect
import sys
from collections.abc import Mapping

import tensorflow as tf

from loopwright.actions.base import Action
from loopwright.configurables import documentation, table
from loopwright.configurables.values import wanted
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.inputs.sources import Source
from loopwright.inputs.streams import StreamSource
from loopwright.optimizers.loss_scale import LossScale
from loopwright.optimizers.schedules import Schedule

KINDS = {
  "Strategies": (tf.distribute.Strategy,),
  "Loss scale": (LossScale,),
  "Inputs": (Source, StreamSource),
  "Optimizers": (KerasOptimizer,),
  "Averages and schedules": (Schedule,),
  "Actions": (Action,),
}
"""Title of a section -> the classes of what is in it; other classes have a section of their own."""


def ours() -> list[str]:
  """Returns what a config can name of the framework: first what `run` always makes."""
  table.register_all()
  names = [name for name in table.selectors() if not name.startswith("gin.")]
  home = {name: table.entry(name).wrapped.__module__ for name in names}
  own = {n for n, of in home.items() if of.startswith("loopwright.") and ".tasks." not in of}
  roots = [name for name in table.ROOTS if name in own and table.parameters(name)]
  return [*roots, *sorted(own - {*table.ROOTS}, key=lambda name: (kind_of(name), name))]


def kind_of(name: str) -> str:
  """Returns the title of the section of a name."""
  made = [each for each, _ in wanted(table.result(name))]
  for title, classes in KINDS.items():
    if any(issubclass(each, classes) for each in made):
      return title
  return name if name == "run" or made == [table.entry(name).wrapped] else "Others"


def render() -> str:
  text = "# Options\n\nWritten by `python -m tests.support.option_tables`; a test keeps it true.\n"
  sections: dict[str, list[str]] = {}
  for name in ours():
    sections.setdefault(kind_of(name), []).extend(rows_of(name))
  for title, rows in sections.items():
    table = "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])
    text += f"\n## {title}\n\n{table}\n"
  return text


def rows_of(name: str) -> list[str]:
  target = table.entry(name).wrapped
  told, summary = documentation.meanings(target), documentation.summary(target)
  parameters: Mapping[str, inspect.Parameter] = table.parameters(name)
  rows = [
    f"| `{name}.{n}` | {default(p)} | {(told.get(n) or summary).replace('|', 'or')} |"
    for n, p in parameters.items()
  ]
  return rows or [f"| `@{name}` | | {summary} |"]


def default(parameter: inspect.Parameter) -> str:
  text = documentation.default(parameter)
  return text if text == "required" else f"`{text}`"


if __name__ == "__main__":
  sys.stdout.write(render())
