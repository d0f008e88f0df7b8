"""The tests over Pythons and TensorFlows, and installs as people make them, as tables.

  python -m benchmarks.versions tests                     the fast tier, 8 cells of 3 to 10 minutes
  python -m benchmarks.versions tests tests/unit/inputs   what pytest is given
  python -m benchmarks.versions installs                  a wheel of this clone, in empty folders

Each cell is an environment of its own in a temporary folder. Needs uv. A Python is a version that
uv finds or installs, or the path of one: `--pythons 3.11 ~/.pyenv/versions/3.13.0/bin/python`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEW = '[project]\nname = "mine"\nversion = "0.1.0"\nrequires-python = ">={}"\n'
ENVIRONMENT = {
  name: value
  for name, value in os.environ.items()
  if not name.startswith(("TF_", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"))
}


def main() -> None:
  """Prints one table, a row as soon as it is known."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("what", choices=["tests", "installs"])
  parser.add_argument("--pythons", nargs="+", default=["3.10", "3.11", "3.12", "3.13"])
  parser.add_argument("--tensorflows", nargs="+", default=["2.20", "2.21"])
  parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
  options, others = parser.parse_known_args()
  if options.what == "tests":
    row("Python", "TensorFlow", "tests", "seconds")
    for python in options.pythons:
      for version in options.tensorflows:
        with tempfile.TemporaryDirectory() as folder:
          test(python, version, others, Path(folder))
    return
  with tempfile.TemporaryDirectory() as folder:
    run(["uv", "build", "-q", "--wheel", "-o", folder], ROOT)
    [wheel] = Path(folder).glob("*.whl")
    row("Python", "with", "packages", "GB", "seconds", "TensorFlow", "trained")
    for python in options.pythons:
      for way in options.ways:
        with tempfile.TemporaryDirectory() as empty:
          install(python, way, wheel, Path(empty))


def test(python: str, tensorflow: str, arguments: Sequence[str], folder: Path) -> None:
  """Runs pytest in an environment with this Python and TensorFlow, and prints the row."""
  program = folder / "bin" / "python"
  run(["uv", "venv", "-q", "--clear", "--python", python, str(folder)], ROOT)
  asked = [f"tensorflow~={tensorflow}.0"]
  command = ["uv", "pip", "install", "-q", "--python", str(program), "--group", "dev"]
  run([*command, "-e", ".", *asked], ROOT)
  started = time.monotonic()
  done = subprocess.run(
    [str(program), "-m", "pytest", "-q", *filter("--".__ne__, arguments)],
    cwd=ROOT, capture_output=True, text=True,
    env={**ENVIRONMENT, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
  )  # fmt: skip
  lines = done.stdout.splitlines() or [done.stderr]
  for line in lines:
    if line.startswith(("FAILED", "ERROR")):
      print(f"{python} {tensorflow} {line}", file=sys.stderr)
  counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", lines[-1]) or [lines[-1]]
  row(version_of(program), tensorflow, ", ".join(counts), f"{time.monotonic() - started:.0f}")


def install(python: str, way: str, wheel: Path, folder: Path) -> None:
  """Installs the wheel in an empty folder, makes a project and trains it there; prints the row."""
  started = time.monotonic()
  program = WAYS[way](python, wheel, folder)
  seconds = time.monotonic() - started
  listed = run(["uv", "pip", "list", "-q", "--python", str(program)], folder).splitlines()[2:]
  [tensorflow] = [line.split()[1] for line in listed if line.startswith("tensorflow ")]
  size = int(run(["du", "-sk", str(program.parents[1])], folder).split()[0])
  command = program.with_name("loopwright")
  run([str(command), "new", "waves"], folder)
  trained = run([str(command), "train", "run.train_steps=20"], folder / "waves")
  row(
    version_of(program), way, str(len(listed)), f"{size / 2**20:.1f}", f"{seconds:.0f}", tensorflow,
    trained.splitlines()[-1].split("|")[0],
  )  # fmt: skip


def _uv_add(python: str, wheel: Path, folder: Path) -> Path:
  """`uv add` in a new project, for this Python and all later ones."""
  run(["uv", "venv", "-q", "--python", python, ".venv"], folder)
  program = folder / ".venv" / "bin" / "python"
  oldest = version_of(program).rpartition(".")[0]
  (folder / "pyproject.toml").write_text(NEW.format(oldest))
  run(["uv", "add", "-q", "--python", python, str(wheel)], folder)
  return program


def _pip(version: str, python: str, wheel: Path, folder: Path) -> Path:
  """`pip install` with a version of pip, "" for the newest, in a new virtual environment."""
  run(["uv", "venv", "-q", "--seed", "--python", python, ".venv"], folder)
  program = folder / ".venv" / "bin" / "python"
  run([str(program), "-m", "pip", "install", "-q", "-U", f"pip{version}"], folder)
  run([str(program), "-m", "pip", "install", "-q", str(wheel)], folder)
  return program


WAYS = {
  "uv add": _uv_add,
  "pip 23.2": lambda *given: _pip("==23.2", *given),
  "newest pip": lambda *given: _pip("", *given),
}
"""How people install it: a function of Python, wheel and empty folder that returns the Python."""


def version_of(program: Path) -> str:
  """Returns the version of a Python, such as 3.11.7."""
  code = "import platform; print(platform.python_version())"
  return run([str(program), "-c", code], ROOT).strip()


def run(command: Sequence[str], folder: Path) -> str:
  """Returns the stdout of a command; ends with its stderr if it fails."""
  done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
  if done.returncode:
    raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}{done.stdout}")
  return done.stdout


def row(*cells: str) -> None:
  """Prints a row of the table."""
  print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
  main()
