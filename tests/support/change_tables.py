"""Writes docs/changing-a-run.md: its text, and a table from loopwright/configurables/changes.py.

python -m tests.support.change_tables > docs/changing-a-run.md
"""

import sys
from pathlib import Path

from loopwright.configurables import changes, table

PAGE = Path(__file__).parents[2] / "docs" / "changing-a-run.md"
MARK = "\n## Every option\n"
ASKED = {"yes": "yes", "asked": "`--accept_changes`", "no": "no"}


def render() -> str:
  """Returns the page with its table made anew."""
  table.register_all()
  text = PAGE.read_text().partition(MARK)[0]
  about = "\nWritten by `python -m tests.support.change_tables`; tests/unit/changes tries each.\n"
  return text + MARK + about + "".join(section(*each) for each in rows().items()) + others()


def section(title: str, lines: list[tuple[str, ...]]) -> str:
  """Returns one table."""
  head = "| option | may change | what happens |\n|---|---|---|\n"
  return f"\n### {title}\n\n{head}" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows() -> dict[str, list[tuple[str, ...]]]:
  """Returns title -> rows; of Keras's optimizers one for each name of an option."""
  found: dict[str, list[tuple[str, ...]]] = {}
  ours = {"run": ["run"], "Trainer": ["Trainer", "Reduction"], "Loss scale": ["fixed", "dynamic"]}
  for title, names in ours.items():
    options = [f"{name}.{p}" for name in names for p in table.parameters(name)]
    found[title] = [row(f"`{option}`", option) for option in options]
  of_keras = {
    parameter: name
    for name in table.selectors()
    if name.startswith(("keras.", "tf_keras.")) and ".schedules." not in name
    for parameter in table.parameters(name)
  }
  found["Optimizers of both Kerases"] = [
    row(f"`{parameter}`", f"{name}.{parameter}") for parameter, name in sorted(of_keras.items())
  ]
  found["Schedules"] = [
    row("`without_decay.of`, `.names`", "without_decay.of"),
    row("`grouped.of`, `.groups`", "grouped.of"),
    row("`ema_warmup.decay`", "ema_warmup.decay"),
    row("`weight_averaging.start_step`, `.every_steps`", "weight_averaging.start_step"),
    row("all options, ours and Keras's", "schedules.constant.learning_rate"),
  ]
  return found


def row(shown: str, option: str) -> tuple[str, ...]:
  """Returns the three cells of an option."""
  rule = changes.rule(option)
  assert rule is not None, option
  return shown, ASKED[rule.may], rule.says


def others() -> str:
  """Returns the table of names whose options have one rule."""
  lines = [
    row("strategies and clusters", "mirrored.devices"),
    row("actions, except those that change what is learned", "EarlyStopping.patience"),
    row("`WarmStart`", "WarmStart.path"),
    row("`ImageFolderSource`, `load_arrays`", "load_arrays.path"),
    row("`Mixture`", "Mixture.weights"),
  ]
  return section("All options of", lines).replace("| option |", "| of |")


if __name__ == "__main__":
  sys.stdout.write(render())
