"""Writes docs/changing-a-run.md: its text, and a table of the rules that options declare.

python -m tests.support.change_tables
"""

from pathlib import Path

from loopwright.actions.base import Action
from loopwright.configurables import changes, table
from loopwright.options.declaration import Rule
from tests.support.option_tables import kind_of, ours

PAGE = Path(__file__).parents[2] / "docs" / "changing-a-run.md"
MARK = "\n## Every option\n"
ASKED = {"yes": "yes", "asked": "`--accept_changes`", "no": "no"}
OPTIMIZERS = "Optimizers of both Kerases"


def render() -> str:
  """Returns the page with its tables made anew."""
  text, mark, _ = PAGE.read_text().partition(MARK)
  assert mark, f"{PAGE} has lost its text; restore it: the command writes the page itself"
  about = "\nWritten by `python -m tests.support.change_tables`; tests/unit/changes tries each.\n"
  single: dict[str, list[str]] = {}
  whole: dict[Rule, list[str]] = {}
  for name in ours():
    rules = {parameter: rule(f"{name}.{parameter}") for parameter in table.parameters(name)}
    if len({*rules.values()}) == 1:
      whole.setdefault(next(iter(rules.values())), []).append(f"`{name}`")
    elif rules:
      rows = [row(f"`{name}.{parameter}`", each) for parameter, each in rules.items()]
      single.setdefault(kind_of(name), []).extend(rows)
  single[OPTIMIZERS] = [row(f"`{name}`", each) for name, each in sorted(of_keras().items())]
  whole[rule("keras.optimizers.schedules.CosineDecay.alpha")].append("schedules of Keras")
  whole[Action.may_change].append("your own actions, unless they set `changes_training`")
  rows = [row(", ".join(names), each) for each, names in whole.items()]
  sections = [section(title, "option", rows) for title, rows in single.items()]
  return text + MARK + about + "".join(sections) + section("All options of", "of", rows)


def section(title: str, what: str, rows: list[str]) -> str:
  """Returns one table."""
  head = f"| {what} | may change | what happens |\n|---|---|---|\n"
  return f"\n### {title}\n\n{head}" + "".join(rows)


def of_keras() -> dict[str, Rule]:
  """Returns parameter -> rule of all optimizers of both Kerases."""
  return {
    parameter: rule(f"{name}.{parameter}")
    for name in table.selectors()
    if name.startswith(("keras.", "tf_keras.")) and ".schedules." not in name
    for parameter in table.parameters(name)
  }


def rule(option: str) -> Rule:
  """Returns the rule of an option, which must have one."""
  found = changes.rule(option)
  assert found is not None, option
  return found


def row(shown: str, each: Rule) -> str:
  """Returns the line of an option."""
  return f"| {shown} | {ASKED[each.may]} | {each.says} |\n"


if __name__ == "__main__":
  PAGE.write_text(render())
