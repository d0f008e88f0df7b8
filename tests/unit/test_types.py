"""Public signatures say what they take: names of loopwright.graphs.aliases, and no bare Any."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import loopwright
from loopwright import observers
from loopwright.graphs import aliases

CLASSES = [
  loopwright.Task,
  loopwright.Trainer,
  loopwright.Step,
  loopwright.EvalStep,
  loopwright.Evaluator,
  observers.Observer,
  observers.StepObserver,
]
SAID_ELSEWHERE = {"Trainer.checkpoint_items"}
"""Their docstrings list what the objects can be."""


def methods(kind):
  for name, function in vars(kind).items():
    if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
      yield f"{kind.__name__}.{name}", function


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_signatures_say_what_they_take(kind):
  vague = {
    f"{name}: {what}"
    for name, function in methods(kind)
    if name not in SAID_ELSEWHERE
    for what, annotation in function.__annotations__.items()
    if re.search(r"\bAny\b", annotation)
  }
  assert not vague


def test_help_shows_the_names():
  text = pydoc.plain(pydoc.render_doc(loopwright.Task))
  assert re.search(r"loss\(self, outputs: 'Structure', batch: 'Batch'\) -> 'Loss'", text)
  assert re.search(r"build_model\(self\) -> 'Model'", text)
  assert "'Batch'" in pydoc.plain(pydoc.render_doc(loopwright.Trainer))
  assert "'Sequence[Variable]'" in pydoc.plain(pydoc.render_doc(loopwright.Step))


def test_each_name_is_described():
  source = inspect.getsource(aliases)
  for name in (*aliases.__annotations__, "Tensor"):
    assert re.search(rf"^ *{name}(: TypeAlias)? = [^\n]*\n *\"\"\"", source, re.MULTILINE), name


def test_the_names_load_no_tensorflow():
  code = "import sys, loopwright; loopwright.Batch; sys.exit('tensorflow' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_type_checker_finds_the_mistakes_of_a_users_file():
  path = Path(__file__).parents[1] / "support" / "typing_mistakes.py"
  command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports"]
  done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
  found = {int(line) for line in re.findall(r"typing_mistakes\.py:(\d+): error", done.stdout)}
  lines = path.read_text().splitlines()
  assert found == {number for number, line in enumerate(lines, 1) if "# wrong: " in line}
