"""What a shell completes: commands, flags and their values, configs, their bindings."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright.commands import completion

ROOT = Path(__file__).resolve().parents[3]
CONSOLE = "import sys; from loopwright.commands import console; console()"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("waves.gin").write_text("mild/Waves.width = 3")


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
    ("loopwright evaluate --mod", ["--mode", "--model_dir"]),
    ("loopwright evaluate --mode=", ["evaluate", "evaluate_continuously"]),
    ("loopwright train waves mild/W", ["mild/Waves.width="]),
    (
      "loopwright train digits_cnn --gin_param=ImageClassification.d",
      ["ImageClassification.data="],
    ),
    (
      "loopwright train --gin_file=waves.gin --gin_file=two.gin --gin_param mild",
      ["mild/Waves.width="],
    ),
    ("loopwright sweep digits_cnn --vary='run.tr", ["run.train_steps="]),
  ],
)
def test_a_shell_gets_its_answer(line, answer):
  assert completed(line) == answer


def words(prefix, **parsed):
  return completion.configs_and_bindings(prefix, argparse.Namespace(**parsed))


def test_configs_are_the_users_and_the_shipped():
  assert words("w") == ["waves.gin"]
  assert words("digits_c") == ["digits_cnn", "digits_contrastive"]
  assert words("waves.") == ["waves.gin"]


def test_bindings_are_those_that_the_named_configs_have():
  Path("sub").mkdir()
  Path("sub/rain.gin").write_text("import mine\ninclude 'base.gin'\ncold/rain.days = 3\nrate = 0.1")
  Path("sub/base.gin").write_text("warm/rain.days = 2")
  Path("damaged.gin").write_text("run.seed = (")
  assert words("cold/") == []
  named = {"gin_file": ["damaged.gin", "sub/rain.gin", "missing.gin"]}
  assert words("cold/", **named) == ["cold/rain.days="]
  assert words("warm/", **named) == ["warm/rain.days="]
  assert words("rat", **named) == ["rate="]
  for file in Path("sub").iterdir():
    file.rename(file.name)
  assert words("cold/", arguments=["rain"]) == ["cold/rain.days="]
  assert "cnn.dropout=" in words("cnn.", arguments=["fashion_mnist_cnn", "run.seed=3"])
