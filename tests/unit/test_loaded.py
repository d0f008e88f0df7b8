"""What a run loads: the lines of the files that Python imports, and that none of them is a tool.

The figures go down; docs/decisions/0041 has why they went up. In processes of their own, of a copy
of the package without tools/.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loopwright

PACKAGE = Path(loopwright.__file__).parent
MOST = {"train": 18_215, "parts": 9_676}
"""What `loopwright train digits_cnn` may load; and a trainer, an evaluator, a task, arrays."""
OPTIONAL = (
  "loopwright.tools",
  *(f"loopwright.strategies.{name}" for name in ("mesh", "parameter_server", "tpu", "workers")),
)
"""What neither loads."""
COUNT = """
import json, sys
from pathlib import Path

def loaded():
  files = {module.__name__: getattr(module, "__file__", None) for module in [*sys.modules.values()]}
  own = {name: file for name, file in files.items() if name.split(".")[0] == "loopwright" and file}
  return {name: len(Path(file).read_text().splitlines()) for name, file in own.items()}
"""
TRAIN = """
from loopwright import commands
options = ["run.train_steps=2", "run.eval_steps=1", f"--model_dir={sys.argv[1]}"]
status = commands.main(["loopwright", "train", "digits_cnn", *options])
print(json.dumps([status, loaded()]))
"""
PARTS = """
from loopwright import ArraySource, Evaluator, Task, Trainer
print(json.dumps([0, loaded()]))
"""
REST = """
import importlib, pkgutil
import loopwright
left = ("loopwright.tasks.", "loopwright.template", "loopwright.__main__", "loopwright.testing")

names = [each.name for each in pkgutil.walk_packages(loopwright.__path__, "loopwright.")]
for name in names:
  if not name.startswith(left):
    importlib.import_module(name)
print(json.dumps([0, loaded()]))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
  """The source root of the package without its tools."""
  root = tmp_path_factory.mktemp("core")
  shutil.copytree(PACKAGE, root / "loopwright", ignore=lambda at, names: {"tools", "__pycache__"})
  return root


def run(core, program, *arguments):
  """Returns name -> lines of the modules that a program has loaded."""
  environment = {**os.environ, "PYTHONPATH": str(core), "PYTHONDONTWRITEBYTECODE": "1"}
  done = subprocess.run(
    [sys.executable, "-P", "-c", COUNT + program, *map(str, arguments)],
    cwd=core, env=environment, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  status, loaded = json.loads(done.stdout.splitlines()[-1])
  assert status == 0, done.stderr
  return loaded


def test_what_train_loads(core, tmp_path):
  loaded = run(core, TRAIN, tmp_path / "run")
  assert (tmp_path / "run" / "metrics.jsonl").exists()
  assert [name for name in loaded if name.startswith(OPTIONAL)] == []
  assert sum(loaded.values()) <= MOST["train"], sorted((n, name) for name, n in loaded.items())


def test_what_the_parts_of_a_loop_load(core):
  loaded = run(core, PARTS)
  assert [name for name in loaded if name.startswith(OPTIONAL)] == []
  assert sum(loaded.values()) <= MOST["parts"], sorted((n, name) for name, n in loaded.items())


def test_every_module_of_the_core_can_do_without_tools(core):
  assert len(run(core, REST)) > 100
