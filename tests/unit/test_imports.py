"""Who may import whom: the contracts in setup.cfg hold, and a planted import breaks its own."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import framework

ROOT = Path(framework.__file__).parents[1]
PLANTED = {
  "Layers": ("metrics.py", "from framework import trainer"),
  "No cycles": ("inputs/ordering.py", "from framework.inputs import datasets"),
  "Only framework.configurables imports gin": ("run.py", "from gin import config_parser"),
  "Only the modes of a run read the config": ("metrics.py", "from framework import configurables"),
}


def broken(root):
  """Returns the names of the broken contracts, and of all."""
  command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
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
  shutil.copytree(ROOT / "framework", tmp_path / "framework")
  path = tmp_path / "framework" / file
  path.write_text(f"{path.read_text()}\n{line}\n")
  names, _ = broken(tmp_path)
  assert contract in names  # an upward import closes a cycle, too
