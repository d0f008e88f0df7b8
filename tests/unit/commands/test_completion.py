"""What a shell completes: commands, flags and their values, configs, bindings."""

import argparse
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.commands import bindings, completion
from framework.configurables import table
from framework.tasks import fixmatch, image_classification, sam

ROOT = Path(__file__).resolve().parents[3]
CONSOLE = "import sys; from framework.commands import console; console()"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("waves.gin").write_text("mild/Waves.width = 3")
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
    (
      "loopwright train digits_cnn --gin_param=ImageClassification.s",
      ["ImageClassification.shift="],
    ),
    (
      "loopwright train --gin_file=waves.gin --gin_file=two.gin --gin_param mild",
      ["mild/Waves.width="],
    ),
    ("loopwright sweep waves --vary='keras.SGD.m", ["keras.SGD.momentum="]),
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


def test_bindings_are_those_that_gin_takes():
  """Read from the source, as importing takes seconds."""
  table.register_all()
  known = [name for _, names in table.TABLE for name in names.split()]
  taken = {f"{name}.{each}" for name in known for each in table.parameters(table.find(name))}
  assert len(taken) > 100
  assert {*bindings.names()} == taken | {"Waves.width"}


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_bindings_of_keras_are_those_that_gin_takes(package):
  table.register_all()
  registered = [name for name, _ in table.registry().items() if name.startswith(f"{package}.")]
  taken = {f"{name}.{each}" for name in registered for each in table.parameters(name)}
  assert {*bindings.of_keras(f"{package}.")} == taken


@pytest.mark.parametrize(
  ("config", "signatures"),
  [
    ("digits_cnn", [image_classification.ImageClassification]),
    ("digits_sam", [sam.SharpClassification]),
    (
      "fashion_mnist_fixmatch",
      [
        fixmatch.FixMatch,
        fixmatch.StronglyChanged,
        image_classification.ImageClassification,
      ],
    ),
  ],
)
def test_bindings_of_a_shipped_task(config, signatures):
  """Also those that it passes to its base class as **options."""
  task = signatures[0].__name__
  taken = {name for each in signatures for name in inspect.signature(each).parameters} - {"options"}
  found = words(f"{task}.", arguments=[config, "run.seed=3"])
  assert found == sorted(f"{task}.{name}=" for name in taken)
  assert "cnn.filters=" in words("cnn.", arguments=[config])


def test_bindings_are_those_of_the_named_configs():
  Path("mine").mkdir()
  Path("mine/__init__.py").write_text("from . import data")
  Path("mine/data.py").write_text(
    "class Base:\n  def __init__(self, *, wind): pass\n"
    "@register\nclass Storm(Base): pass\n@register\nclass Ring(Round): pass\n"
    "class Round(Ring): pass\n@register\ndef rain(*, days, where=None): pass\n"
  )
  Path("sub").mkdir()
  Path("sub/rain.gin").write_text("import mine\ninclude 'base.gin'\ncold/rain.days = 3\nrate = 0.1")
  Path("sub/base.gin").write_text("warm/rain.days = 2")
  Path("damaged.gin").write_text("run.seed = (")
  assert words("rain.") == []
  named = {"gin_file": ["damaged.gin", "sub/rain.gin", "missing.gin"]}
  assert words("rain.", **named) == ["rain.days=", "rain.where="]
  assert words("Storm", **named) == ["Storm.wind="]
  assert words("cold/", **named) == ["cold/rain.days="]
  assert words("warm/", **named) == ["warm/rain.days="]
  assert words("rat", **named) == ["rate="]
  for file in Path("sub").iterdir():
    file.rename(file.name)
  assert words("rain.", arguments=["missing"]) == ["rain.days=", "rain.gin", "rain.where="]
