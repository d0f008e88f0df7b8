"""No file and no function of the framework is long, and the whole does not grow."""

import ast
from pathlib import Path

import pytest

import loopwright

FRAMEWORK, REPOSITORY = Path(loopwright.__file__).parent, Path(__file__).parents[2]
LONGEST_FILE, LONGEST_BODY = 550, 60
LINES = {"framework": 44_825, "tests": 53_165, "benchmarks": 9_034}
"""Of Python in each folder. These numbers go down: what adds lines removes as many. Twice they went
up with what was added: docs/decisions/0040 and 0041; 0042 and 0043 say what was left out since."""


def long_parts(name, text):
  """Lists a file, and the functions in it, that are too long."""
  found = [name] if len(text.splitlines()) > LONGEST_FILE else []
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > LONGEST_BODY:
      found.append(f"{name}: {node.name}")
  return found


def lines_of(function):
  """The lines of a function without its signature and its docstring."""
  body = function.body[1:] if ast.get_docstring(function) is not None else function.body
  return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_no_file_and_no_function_is_long():
  found = []
  for file in sorted(FRAMEWORK.rglob("*.py")):  # does not follow the links to tasks and configs
    found += long_parts(file.relative_to(FRAMEWORK).as_posix(), file.read_text())
  assert found == []


@pytest.mark.parametrize("folder", LINES)
def test_no_folder_grows(folder):
  files = [f for f in (REPOSITORY / folder).rglob("*.py") if not f.is_symlink()]
  assert sum(len(file.read_text().splitlines()) for file in files) <= LINES[folder]


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("x = 1\n" * 550, []),
    ("x = 1\n" * 551, ["a.py"]),
    ("def f():\n" + "  x = 1\n" * 60, []),
    ("def f():\n" + "  x = 1\n" * 61, ["a.py: f"]),
    ("def f(\n  a,\n  b,\n):\n  '''One.\n\n  Two.\n  '''\n" + "  x = 1\n" * 60, []),
    ("class A:\n  async def f(self):\n" + "    x = 1\n" * 61, ["a.py: f"]),
  ],
)
def test_lengths_are_counted_without_signature_and_docstring(text, found):
  assert long_parts("a.py", text) == found
