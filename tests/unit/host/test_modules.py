"""A module of the user's that has the name of Python's, or of an installed one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright.configurables import imports
from loopwright.errors import ConfigError
from loopwright.host import children, modules

ROOT = Path(imports.REPOSITORY)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder of the user's, first on the path."""
  before = set(sys.modules)
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
  (tmp_path / "queue.py").write_text("Mine = 1\n")
  (tmp_path / "numpy").mkdir()
  (tmp_path / "numpy" / "__init__.py").touch()
  (tmp_path / "helper_of_mine.py").touch()
  yield tmp_path
  for name in set(sys.modules) - before:
    del sys.modules[name]


def test_the_line_names_the_file_and_what_has_its_name(folder):
  queue = f"{folder}/queue.py has the name of Python's own module 'queue': rename it."
  assert modules.namesake("queue.Queue") == queue
  installed = sys.modules["numpy"].__file__
  assert modules.namesake("numpy.linalg") == (
    f"{folder}/numpy/__init__.py has the name of the module 'numpy' of {installed}: rename it."
  )
  assert [modules.namesake(x) for x in ("helper_of_mine", "json", "keras")] == [None] * 3
  error = ImportError("cannot import name 'Queue' from 'queue' (/x/queue.py)")
  assert modules.namesake_in(error) == f"{queue} (ImportError: {error})"
  missing = AttributeError("module 'numpy' has no attribute 'linalg'")
  assert "rename it. (AttributeError: module 'numpy'" in modules.namesake_in(missing)
  assert modules.namesake_in(ValueError("'queue'")) is None


def test_an_import_that_fails_names_the_file(folder):
  """Python's `queue` is loaded before the folder is on the path."""
  (folder / "shadow.py").write_text("from queue import Mine")
  line = f"import shadow failed: {folder}/queue.py has the name of Python's own module 'queue': "
  with pytest.raises(ConfigError, match=re.escape(line)):
    imports.import_module("shadow")


@pytest.mark.parametrize("name", ["random", "typing"])
def test_in_the_folder_of_launch(tmp_path, name):
  """Python finds it there before anything of ours can run."""
  shutil.copy(ROOT / "launch.py", tmp_path)
  (tmp_path / f"{name}.py").touch()
  done = subprocess.run(
    [sys.executable, "launch.py", "ls"], cwd=tmp_path, capture_output=True, text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )  # fmt: skip
  assert done.returncode == 2
  file = f"{tmp_path}/{name}.py"
  start = f"error: {file} has the name of Python's own module '{name}': rename it. ("
  assert done.stderr.startswith(start), done.stderr


@pytest.mark.whole
def test_what_the_framework_loads_itself_is_not_replaced(tmp_path):
  for name in ("queue", "numpy", "keras", "json"):
    (tmp_path / f"{name}.py").touch()
  (tmp_path / "orbit").mkdir()
  (tmp_path / "orbit" / "__init__.py").touch()
  program = [*children.PROGRAM]
  done = subprocess.run(
    [*program, "train", "digits_cnn", "run.train_steps=2"],
    cwd=tmp_path, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("done: step 2 |")


def test_launch_without_its_packages_is_one_line():
  program = [sys.executable, "-S", str(ROOT / "launch.py"), "train", "digits_cnn"]
  done = subprocess.run(program, capture_output=True, text=True, env={"PATH": ""}, check=False)
  assert done.returncode == 2
  assert re.fullmatch(
    r"error: the package '\w+' is not installed in .*; run: uv run .*\n", done.stderr
  )
