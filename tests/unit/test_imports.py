"""Who may import whom: the contracts in setup.cfg hold, and a planted import breaks its own."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loopwright

ROOT = Path(loopwright.__file__).parents[2]
PLANTED = {
  "Layers": ("engine/counters.py", "from loopwright import trainer"),
  "No cycles": ("inputs/ordering.py", "from loopwright.inputs import datasets"),
  "Only loopwright.configurables imports gin": ("trainer.py", "from gin import config_parser"),
  "Only the modes of a run read the config": (
    "engine/counters.py",
    "from loopwright import configurables",
  ),
}


def broken(root):
  """Returns the names of the broken contracts, and of all."""
  command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
  path = {**os.environ, "PYTHONPATH": str(root / "framework")}
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=path)
  found = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
  names = [name for name, verdict in found.items() if verdict == "BROKEN"]
  assert done.returncode == bool(names), done.stdout + done.stderr
  return names, list(found)


def test_every_contract_holds():
  assert broken(ROOT) == ([], list(PLANTED))


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(contract, tmp_path):
  file, line = PLANTED[contract]
  shutil.copy(ROOT / "setup.cfg", tmp_path)
  shutil.copytree(ROOT / "framework" / "loopwright", tmp_path / "framework" / "loopwright")
  path = tmp_path / "framework" / "loopwright" / file
  path.write_text(f"{path.read_text()}\n{line}\n")
  names, _ = broken(tmp_path)
  assert contract in names  # an upward import closes a cycle, too


PATCHES = (
  "replaced",
  "mock.patch",
  "mock.patch.object",
  "mock.patch.dict",
  "patch",
  "patch.object",
)


def patched(source):
  """Yields what each patch in a file replaces, as a name with dots."""
  names = {}
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.ImportFrom):
      names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    if isinstance(node, ast.Call) and ast.unparse(node.func) in PATCHES:
      target = node.args[0]
      named = target.value if isinstance(target, ast.Constant) else ast.unparse(target)
      first, _, rest = named.partition(".")
      yield f"{names.get(first, first)}.{rest}"


@pytest.mark.parametrize(
  "line",
  [
    'mock.patch("loopwright.trainer.Step", None)',
    "mock.patch.object(trainer, 'Step', None)",
    "mock.patch.object(trainer.Trainer, 'loop', None)",
    "replaced(trainer, Step=None)",
  ],
)
def test_a_patch_of_ours_is_found(line):
  [name] = patched(f"from loopwright import trainer\n{line}")
  assert name.startswith("loopwright.trainer")


def test_the_framework_patches_no_module_of_its_own():
  found = [
    f"{path}: {name}"
    for path in sorted((ROOT / "framework" / "loopwright").rglob("*.py"))
    for name in patched(path.read_text())
    if name.startswith(("loopwright.", "tasks."))
  ]
  assert not found


def imported(path):
  """Returns the modules of ours that a module names in its imports."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module.startswith("loopwright"):
      inside = ROOT / "framework" / node.module.replace(".", "/")
      modules = {each.name for each in node.names if (inside / f"{each.name}.py").exists()}
      found |= {f"{node.module}.{name}" for name in modules} or {node.module}
  return found


def test_the_step_and_the_trainer_stay_small():
  step, trainer = (
    ROOT / "framework" / "loopwright" / "step.py",
    ROOT / "framework" / "loopwright" / "trainer.py",
  )
  assert len(step.read_text().splitlines()) <= 550
  assert len(imported(step)) <= 10
  assert len(trainer.read_text().splitlines()) <= 422
