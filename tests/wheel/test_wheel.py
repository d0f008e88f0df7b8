"""The wheel as a user has it: installed by uv in a new environment, outside the clone.

On the oldest Python and on the newest, each where it is installed or uv can load it. In an empty
folder `loopwright new` makes a project, and it trains. Then the folder gets a `framework` and
modules with names of the standard library, as a user's folder may have, and all further commands
run beside them. `verify` and `repeat` run on the newest Python alone.

`.ci/run` runs the two Pythons side by side.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import launch
import loopwright

ROOT = Path(launch.__file__).parent
OLDEST, NEWEST = "3.10", "3.13"
STEPS = ("run.train_steps=20", "run.eval_every_steps=20")
THEIRS = ("framework/__init__.py", "types.py", "signal.py", "queue.py")
"""A user's modules; those of the standard library with these names are not replaced by them."""

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]


class Installed(NamedTuple):
  """The wheel in an environment.

  Attributes:
    python: the version that was asked for, such as "3.10".
    bin: the folder of the environment's programs.
    project: the folder that `loopwright new` made.
  """

  python: str
  bin: Path
  project: Path

  def environment(self) -> dict[str, str]:
    """Returns the variables of a user's shell in which the environment is active."""
    ours = ("PYTHON", "VIRTUAL_ENV", "UV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PATH": f"{self.bin}:{kept['PATH']}", "VIRTUAL_ENV": str(self.bin.parent)}

  def run(self, *command: str, cwd: Path | None = None) -> str:
    """Returns what a command printed; one that fails ends the test with that."""
    done = subprocess.run(
      command,
      cwd=cwd or self.project,
      env=self.environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout

  def evaluation(self, run: str) -> dict[str, float]:
    """Returns the last evaluation in a run folder."""
    text = (self.project / run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if line["split"] == "eval"][-1]


def python(version: str) -> str:
  """Returns the program of a Python: beside this one, on the path, or loaded by uv; else skips."""
  beside = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python"))
  for program in (*map(str, beside), f"python{version}"):
    with contextlib.suppress(OSError):
      if subprocess.run([program, "--version"], capture_output=True).returncode == 0:
        return program
  if subprocess.run(["uv", "python", "install", "-q", version], capture_output=True).returncode:
    pytest.skip(f"no Python {version}: it is not installed and uv cannot load it")
  return version


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The folder of an sdist of this clone and of the wheel that is made from it."""
  folder = tmp_path_factory.mktemp("dist")
  subprocess.run(["uv", "build", "-q", "--out-dir", str(folder)], cwd=ROOT, check=True)
  return folder


@pytest.fixture(scope="module", params=[OLDEST, NEWEST], ids=["oldest", "newest"])
def installed(request, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
  """The wheel in a new environment, and a project of `loopwright new`, trained in an empty folder.

  Then come the modules of the user's own.
  """
  folder = tmp_path_factory.mktemp(f"user{request.param.replace('.', '_')}")
  environment = folder / "environment"
  [wheel] = built.glob("*.whl")
  make = ["uv", "venv", "-q", "--python", python(request.param), str(environment)]
  subprocess.run(make, check=True)
  install = ["uv", "pip", "install", "-q", "--python", str(environment / "bin" / "python")]
  subprocess.run([*install, f"{wheel}[sweep,report]"], check=True)
  made = Installed(request.param, environment / "bin", folder / "waves")
  assert "made waves" in made.run("loopwright", "new", "waves", cwd=folder)
  trained = made.run("loopwright", "train", *STEPS)
  assert re.search(r"^done: step 20 \| eval loss \d\.\d+ error ", trained, re.MULTILINE), trained
  for place in (*(made.project / name for name in THEIRS), folder / THEIRS[0]):
    place.parent.mkdir(exist_ok=True)
    place.write_text("mine = True\n")
  task = made.project / "waves.py"
  task.write_text(f"import framework\n\nassert framework.mine\n{task.read_text()}")
  return made


def test_the_sdist_holds_what_the_pages_name(built):
  [file] = built.glob("*.tar.gz")
  with tarfile.open(file) as archive:
    names = {name.partition("/")[2] for name in archive.getnames()}
  there = {"README.md", "docs/README.md", "tests/conftest.py", "tasks/gan.py", "launch.py"}
  assert there <= names


def test_the_versions_are_printed(installed):
  expected = f"loopwright {loopwright.__version__}\n"
  assert installed.run("loopwright", "--version") == expected
  folder = installed.project.parent  # in the project, with a types.py, `python -m` finds no runpy
  assert (folder / "framework").is_dir()
  assert installed.run("python", "-m", "loopwright", "--version", cwd=folder) == expected


def test_two_workers_train_as_one_process(installed):
  """Each replica of its own process has half of each batch; the loss is that of the first run."""
  two = "run.strategy=@multi_worker_mirrored"
  options = ("--local_workers=2", "--model_dir=runs/two")
  said = installed.run("loopwright", "train", *STEPS, two, *options)
  assert "2 replicas" in said
  one, other = (installed.evaluation(run) for run in ("runs/waves", "runs/two"))
  assert other["step"] == one["step"] == 20
  assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)


def test_a_sweep_trains_its_trials(installed):
  said = installed.run("loopwright", "sweep", *STEPS, "--vary=Waves.width = [4, 8]")
  assert len(re.findall(r"^trial \d complete, loss \d\.\d+$", said, re.MULTILINE)) == 2
  trials = [f"runs/waves-sweep/trial-000{number}" for number in range(2)]
  assert len({installed.evaluation(trial)["loss"] for trial in trials}) == 2
  widths = re.findall(r"^\d +\S+ +(4|8) +complete$", said, re.MULTILINE)
  assert sorted(widths) == ["4", "8"]


def test_a_task_is_verified_and_repeated(installed):
  if installed.python != NEWEST:
    pytest.skip(f"on Python {NEWEST} alone, to save CI a minute")
  said = installed.run("loopwright", "verify", "--json=verify.json")
  assert re.search(r"^\d\d passed, 0 failed, ", said, re.MULTILINE), said
  said = installed.run("loopwright", "repeat", *STEPS, "--seeds=2")
  assert re.search(r"^loss +\d\.\d+ .* 2$", said, re.MULTILINE), said
  assert installed.evaluation("runs/waves-repeat/trial-0000")["step"] == 20


def test_a_run_is_exported_and_reported(installed):
  installed.run("loopwright", "export", *STEPS)
  serve = "import tensorflow as tf; print(*tf.saved_model.load('runs/waves/export').signatures)"
  assert "serving_default" in installed.run("python", "-I", "-c", serve)
  assert installed.run("loopwright", "report", "runs/waves") == "report.html\n"
  page = (installed.project / "report.html").read_text()
  assert "runs/waves" in page
  assert "plotly" in page


@contextlib.contextmanager
def served(installed: Installed) -> Iterator[str]:
  """The address of a TensorBoard over the project's runs."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  board = subprocess.Popen(
    ["tensorboard", "--logdir=runs", f"--port={port}"],
    cwd=installed.project,
    env={**installed.environment(), "PYTHONSAFEPATH": "1"},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  try:
    yield f"http://localhost:{port}"
  finally:
    board.kill()
    print(board.communicate()[0])


def test_tensorboard_shows_the_curves(installed):
  with served(installed) as address:
    end = time.monotonic() + 120
    runs: list[str] = []
    while "waves/train" not in runs:
      assert time.monotonic() < end, "no answer of TensorBoard, or no run in it"
      time.sleep(0.5)
      with contextlib.suppress(OSError):
        runs = json.load(urllib.request.urlopen(f"{address}/data/runs", timeout=10))
  assert "waves/eval" in runs


def test_a_checker_of_types_finds_a_users_mistakes():
  """All of them, in the environment of `uv sync`, and nothing in the task without a mistake."""
  file = Path(__file__).with_name("task_with_mistakes.py")
  planted = {
    (number, rule)
    for number, line in enumerate(file.read_text().splitlines(), 1)
    for rule in re.findall(r"# (report\w+)$", line)
  }
  check = ("uvx", "-q", "basedpyright", "--outputjson", "--level=error")
  command = [*check, f"--pythonpath={sys.executable}", file]
  done = subprocess.run(command, capture_output=True, text=True, cwd=file.parent)
  found = {
    (each["range"]["start"]["line"] + 1, each["rule"])
    for each in json.loads(done.stdout)["generalDiagnostics"]
  }
  assert found == planted
