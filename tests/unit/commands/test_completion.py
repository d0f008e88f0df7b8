"""What a shell completes: commands, flags and their values, configs, bindings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.commands import completion
from framework.configurables import table

ROOT = Path(__file__).resolve().parents[3]
CONSOLE = "import sys; from framework.commands import console; console()"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("waves.gin").touch()
  Path("waves.py").write_text(
    "@framework.register\nclass Waves(Task):\n  def __init__(self, *, width=3): pass\n"
    "class Other:\n  def __init__(self, depth): pass\n"
  )
  Path("damaged.py").write_text("class (")


def completed(line):
  """Asks as bash does, in a process that has no TensorFlow to import."""
  environment = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": f"{ROOT}",
    "COMP_LINE": line,
    "COMP_POINT": str(len(line)),
    "_ARGCOMPLETE": "1",
    "_ARGCOMPLETE_IFS": " ",
    "_ARGCOMPLETE_COMP_WORDBREAKS": "\"'><=;|&(:",
    "_ARGCOMPLETE_STDOUT_FILENAME": "answer",
  }
  Path("tensorflow.py").write_text("raise SystemExit('imported')")
  subprocess.run([sys.executable, "-c", CONSOLE, *line.split()[1:]], env=environment, check=True)
  return Path("answer").read_text().split()


@pytest.mark.parametrize(
  ("line", "answer"),
  [
    ("loopwright tr", ["train"]),
    ("loopwright tune --mod", ["--mode", "--model_dir"]),
    ("loopwright evaluate --mode=", ["evaluate", "evaluate_continuously"]),
    ("loopwright train digits_cnn Waves.w", ["Waves.width="]),
  ],
)
def test_a_shell_gets_its_answer(line, answer):
  assert completed(line) == answer


def test_configs_are_the_users_and_the_shipped():
  assert completion.configs_and_bindings("w") == ["waves.gin"]
  assert completion.configs_and_bindings("digits_c") == ["digits_cnn", "digits_contrastive"]
  assert completion.configs_and_bindings("waves.") == ["waves.gin"]


def test_bindings_are_those_that_gin_takes():
  """Read from the source, as importing takes seconds."""
  table.register_all()
  known = [name for _, names in table.TABLE for name in names.split()]
  taken = {f"{name}.{each}=" for name in known for each in table.parameters(table.find(name))}
  assert len(taken) > 100
  assert {*completion.bindings()} == taken | {"Waves.width="}
