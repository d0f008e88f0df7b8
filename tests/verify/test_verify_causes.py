"""One table of causes: it has each that a check names, and docs/verify.md shows it."""

import ast
from pathlib import Path

import cause_tables
import pytest

from loopwright import registry
from loopwright.tools import verify
from loopwright.tools.verify import causes
from loopwright.tools.verify.report import Group

MADE = {f"{kind} outside the checkpoint" for kind in ("variable", "metric", "Python value")}
NAMED = {cause.name for cause in causes.table()}


TREES = [ast.parse(file.read_text()) for file in Path(verify.__file__).parent.rglob("*.py")]


def constants():
  """The values of the names that the modules of verify begin with."""
  found = {}
  for node in (n for tree in TREES for n in tree.body if isinstance(n, ast.Assign)):
    names = getattr(node.targets[0], "elts", node.targets)
    found |= zip(map(ast.unparse, names), getattr(node.value, "elts", [node.value]), strict=False)
  return {name: each.value for name, each in found.items() if isinstance(each, ast.Constant)}


def test_the_table_has_each_cause_that_a_check_names():
  known, seen = constants(), set()
  for call in (n for tree in TREES for n in ast.walk(tree) if isinstance(n, ast.Call)):
    given = [each.value for each in call.keywords if each.arg == "cause"]
    given += call.args[2:3] if getattr(call.func, "attr", "") == "failed" else []
    named = (known.get(ast.unparse(each).rpartition(".")[2]) for each in given)
    literal = (each.value for each in given if isinstance(each, ast.Constant))
    seen |= {*filter(None, (*named, *literal))}
  assert seen - NAMED == set()
  assert len(seen) > 40


def test_each_cause_of_the_table_is_named_by_a_check():
  texts = "".join(file.read_text() for file in Path(verify.__file__).parent.rglob("*.py"))
  assert {name for name in NAMED if f'"{name}"' not in texts} == MADE


def test_the_groups_of_the_table_are_those_of_the_registry():
  assert {cause.group for cause in causes.table()} == {*registry.names("check"), "every group"}


def test_no_group_has_a_cause_twice_and_each_has_a_remedy():
  rows = [(cause.group, cause.name) for cause in causes.table()]
  assert len(rows) == len({*rows})
  assert all(cause.remedy for cause in causes.table())


def test_the_page_shows_the_table():
  page = cause_tables.PAGE.read_text()
  assert cause_tables.with_table(page) == page
  assert all(f"| {name} |" in page for name in NAMED)


def test_what_explains_a_cause_is_in_the_table_too():
  assert {first for cause in causes.table() for first in cause.follows} <= NAMED
  assert causes.follows("cannot learn one batch", "zero gradient")
  assert causes.follows("loss scale too small", "non-finite gradient")
  assert not causes.follows("zero gradient", "cannot learn one batch")
  assert not causes.follows("float32 and half precision mixed", "inputs are not scaled")


@pytest.mark.parametrize(
  ("group", "words"),
  [("replicas", "step.all_gather, in train_step"), ("evaluation", "in derived()"), ("mine", "all")],
)
def test_a_cause_has_the_remedy_of_its_group(group, words):
  result = Group(group).failed("one", "0.1", "examples that depend on one another", "mine.py:3")
  assert words in result.remedy
  assert result.place == "mine.py:3"


def test_a_users_own_cause_needs_no_row():
  assert Group("mine").failed("one", "0.1", "too cold").remedy == ""
  assert Group("mine").failed("one", "0.1", "too cold", remedy="heat it").remedy == "heat it"
