"""benchmarks/mutants.py: a planted mistake of each kind gets the right verdict."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
"""A module to change."""

def half(number: int | None) -> int:
  """Rounds down."""
  if number < 0:
    raise ValueError(f"{number + 7} is negative")
  return number // 2

def largest(a, b):
  return a if a > b else b

def emptied(items):
  while items:
    items.pop()
  return items

def untried(number):
  return number * 5
'''
TESTS = """
import pytest
from small import emptied, half, largest

def test_half():
  assert [half(n) for n in (0, 5)] == [0, 2]
  with pytest.raises(ValueError):
    half(-1)

def test_largest():
  assert (largest(1, 2), largest(3, 2)) == (2, 3)

def test_emptied():
  assert emptied([1, 2]) == []
"""
EQUIVALENT = """# Which of two equal numbers it is, nobody can tell.
small.py
- return a if a > b else b
+ return a if a >= b else b
= they are equal
"""


@pytest.mark.whole
def test_verdicts(tmp_path):
  (tmp_path / "tree").mkdir()
  (tmp_path / "tree" / "small.py").write_text(MODULE)
  (tmp_path / "tree" / "test_small.py").write_text(TESTS)
  (tmp_path / "equivalent.txt").write_text(EQUIVALENT)
  command = [sys.executable, "-m", "benchmarks.mutants", f"--root={tmp_path}/tree", "--quota=100"]
  command += [
    "--files",
    "small.py",
    "--tests",
    "test_small.py",
    "--warm",
    "--last",
    "--processes=1",
  ]
  command += [f"--out={tmp_path}/out.json", f"--notes={tmp_path}/notes.json", "--patience_s=10"]
  command += [f"--equivalent={tmp_path}/equivalent.txt"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 1, done.stdout + done.stderr  # too many survive

  verdicts = collections.defaultdict(set)
  for each in json.loads((tmp_path / "out.json").read_text()):
    verdicts[each["verdict"]].add(each["key"][2].replace("  ", " "))
  assert verdicts["equivalent"] == {"return a if a >= b else b"}
  assert verdicts["survived"] == {"return number / 5", "return number * 4", "return number * 6"}
  assert verdicts["timeout"] == {"pass"}
  assert {"return number * 2", "if number <= 0:", "while not items:"} <= verdicts["killed"]
  assert not any("+ 6" in each or "None" in each for each in verdicts["killed"])
  assert "small.py:19" in done.stdout
