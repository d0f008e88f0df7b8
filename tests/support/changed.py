"""Which test files a change can break: what `pytest --changed` runs, the nearest first.

A file refers to another by an import, at the top or in a function; by a string that names its
module ("loopwright.tools.tune", f"loopwright.tools.verify.checks.{group}") or, of a file that is no
code, itself, its path or a folder on its path. How far a test is from a change is the number of
references between them. Nearly all tests are at some distance from step.py, so what takes longer
than a minute is left out at the far end.
"""

import ast
import collections
import re
import subprocess
from pathlib import Path

import pytest

MOST_S = 100
"""The sum of what the chosen files take in three processes: 40 to 50 seconds on two cores."""
GUESS_S = 6
"""What a file takes whose last run is not on record."""


KEY = "tiers/seconds"
"""Where pytest's cache has what each file took in its last run of the fast tier."""


def git(root, *arguments):
  """Returns the lines of its output; none if it fails."""
  done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
  return done.stdout.splitlines() if done.returncode == 0 else []


def changes(root):
  """Returns (the commit at which this branch left main, the files that differ from it)."""
  bases = (git(root, "merge-base", "HEAD", name) for name in ("main", "origin/main"))
  base = next((found[0] for found in bases if found), "HEAD")
  new = git(root, "ls-files", "--others", "--exclude-standard")
  return base, {*git(root, "diff", "--name-only", "--no-renames", base), *new}


def modules(files):
  """Returns the file of each dotted name under which one can be imported."""
  places = {}
  for file in files:
    parts = Path(file).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if parts[0] == "tests":  # its folders are on the path of their tests, support/ of all
      parts = parts[2:] if parts[1] == "support" else parts[-1:]
    places[".".join(parts[1:] if parts[0] == "framework" else parts)] = file
    if parts[0] == "tasks":
      places["loopwright." + ".".join(parts)] = file  # a link
    if parts[0] == "framework" and len(parts) > 2:
      places.setdefault(".".join(parts[2:]), file)  # as `loopwright.commands` names tools
  return places


def references(file, text, places, names):
  """Returns the files to which the code of one refers."""
  tree, found = ast.parse(text), set()

  def module(dotted):
    while dotted and dotted not in places:
      dotted = dotted.rpartition(".")[0]
    return {places[dotted]} if dotted else set()

  prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found.update(*(module(alias.name) for alias in node.names))
    elif isinstance(node, ast.ImportFrom):
      found.update(*(module(f"{node.module}.{alias.name}") for alias in node.names))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
      found.update(names.get(node.value, ()))
      for dotted in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", node.value):
        found |= {places[dotted]} if dotted in places else set()
      if re.fullmatch(r"\w[\w.]*\.", node.value):  # the beginning of an f-string
        found |= {at for name, at in places.items() if name.rpartition(".")[0] == node.value[:-1]}
  return found - {file}


def distances(root, changed):
  """Returns how many references lie between each file of code and the nearest change."""
  files = git(root, "ls-files", "--cached", "--others", "--exclude-standard")
  code = {f for f in {*files, *changed} if f.endswith(".py") and "/template/" not in f}
  names = collections.defaultdict(set)
  for file in {*files, *changed} - code:
    for name in {file, *Path(file).parts}:
      names[name].add(file)
  places, users = modules(code), collections.defaultdict(set)
  for file in code:
    path = Path(root, file)
    for used in references(file, path.read_text(), places, names) if path.exists() else ():
      users[used].add(file)
  for file in code:
    if file.endswith("conftest.py"):
      users[file] |= {f for f in code if Path(file).parent in Path(f).parents}
  far, at = dict.fromkeys(changed, 0), collections.deque(changed)
  while at:
    file = at.popleft()
    for user in users[file] - far.keys():
      far[user] = far[file] + 1
      at.append(user)
  return far


def choose(far, seconds, most=MOST_S):
  """Returns (the test files that `most` seconds allow, those beyond), the nearest first.

  The very first are those named after a changed file, as test_step.py is after step.py.
  """
  tests = [f for f in far if re.fullmatch(r"tests/.*\btest_\w+\.py", f)]
  own = {f"test_{Path(file).stem}" for file, distance in far.items() if distance == 0}
  tests.sort(key=lambda f: (Path(f).stem not in own, far[f], seconds.get(f, GUESS_S), f))
  left, chosen = most, []
  for file in tests:
    if (took := seconds.get(file, GUESS_S)) <= left or not chosen:
      chosen.append(file)
      left -= took
  return chosen, [file for file in tests if file not in chosen]


def files(config):
  """Returns the files to run; the session ends here if there is none."""
  base, found = changes(config.rootpath)
  seconds = config.cache.get(KEY, {}) if hasattr(config, "cache") else {}
  chosen, left = choose(distances(config.rootpath, found), seconds)
  far = f"; {len(left)} farther away are left to `pytest`" if left else ""
  print(f"{len(found)} changed since {base[:10]}; {len(chosen)} files of tests{far}", flush=True)
  if not chosen:
    pytest.exit("no test refers to what has changed", 0)
  return chosen


class Seconds:
  """Keeps what each file takes whose whole fast tier runs."""

  def __init__(self, config):
    self._cache, option = config.cache, config.option
    self._whole = not (option.everything or option.ci or option.keyword or option.lf)
    self._whole &= not any("::" in argument for argument in config.args)
    self._took = collections.Counter()

  def pytest_runtest_logreport(self, report):
    self._took[report.nodeid.partition("::")[0]] += report.duration

  def pytest_sessionfinish(self):
    if self._whole:
      self._cache.set(KEY, {**self._cache.get(KEY, {}), **self._took})
