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
  single: dict[str, dict[str, Rule]] = {}
  whole: dict[str, Rule] = {}
  for name in ours():
    rules = {f"{name}.{each}": rule(f"{name}.{each}") for each in table.parameters(name)}
    if len({*rules.values()}) == 1:
      whole[name] = next(iter(rules.values()))
    elif rules:
      single.setdefault(kind_of(name), {}).update(rules)
  single[OPTIMIZERS] = dict(sorted(of_keras().items()))
  whole["schedules of Keras"] = rule("keras.optimizers.schedules.CosineDecay.alpha")
  whole["your own actions, unless they set `changes_training`"] = Action.may_change
  sections = [section(title, "option", rules) for title, rules in single.items()]
  return text + MARK + about + "".join(sections) + section("All options of", "of", whole)


def section(title: str, what: str, rules: dict[str, Rule]) -> str:
  """Returns one table, a row for each rule."""
  named: dict[Rule, list[str]] = {}
  for name, each in rules.items():
    named.setdefault(each, []).append(name if " " in name else f"`{name}`")
  rows = [f"| {', '.join(of)} | {ASKED[rule.may]} | {rule.says} |" for rule, of in named.items()]
  head = f"| {what} | may change | what happens |\n|---|---|---|\n"
  return f"\n### {title}\n\n{head}" + "\n".join(rows) + "\n"


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


if __name__ == "__main__":
  PAGE.write_text(render())
