"""--mode=check_config: the mistakes of a config, named and placed, without a device."""

import os
import subprocess
import sys
from pathlib import Path

import gin
import pytest
from wrong_configs import DEFECTS, LONELY, RIGHT

import launch
from loopwright import configurables

REPOSITORY = Path(launch.__file__).parent
IN_A_PROCESS = """
import sys, time
import tensorflow as tf
import loopwright.runs.runner  # and Orbit
from tensorflow.python.eager import context
import launch
started, cpu = time.perf_counter(), time.process_time()
status = launch.main(["launch.py", "--mode=check_config", *sys.argv[1:]])
print(status, time.perf_counter() - started, time.process_time() - cpu)
print(context.context()._initialized)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("my_lonely_task.py").write_text(LONELY)
  return tmp_path


def written(lines, without="", name="mine.gin"):
  Path(name).write_text("\n".join([RIGHT.replace(without, "").rstrip(), *lines]) + "\n")
  return os.path.abspath(name)


def mistakes(files, params=()):
  return configurables.examine(files, params).mistakes


each_defect = pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.says)


@each_defect
def test_a_defect(defect, folder):
  found = mistakes([written(defect.lines.splitlines(), defect.without)])
  assert {each.kind for each in found} == {defect.kind}
  assert found[0].where.rpartition("/")[2] == defect.place
  assert defect.says.replace("FOLDER", str(folder)) in str(found[0].error)


@each_defect
def test_a_run_ends_with_the_first_of_them(defect, capsys):
  path = written(defect.lines.splitlines(), defect.without)
  status = {}
  for mode in ("check_config", "train"):
    status[mode] = launch.main(["launch.py", f"--gin_file={path}", f"--mode={mode}"])
    status[f"line of {mode}"] = capsys.readouterr().err.splitlines()[0]
  assert status["check_config"] == status["train"] == 2
  assert status["line of check_config"] == status["line of train"]


@pytest.mark.parametrize("name", sorted(path.name for path in REPOSITORY.glob("configs/*.gin")))
def test_the_configs_are_right(name, capsys):
  assert launch.main(["launch.py", f"--gin_file=configs/{name}", "--mode=check_config"]) == 0
  out, err = capsys.readouterr()
  assert out.startswith(f"ok: {name}")
  assert out.endswith(" bindings, all used\n")
  assert err == ""


def test_what_is_counted(capsys):
  Path("base.gin").write_text(RIGHT)
  Path("more.gin").write_text(
    "include 'base.gin'\nrun.seed = %seed\nseed = 3\nrun.train_steps = 9\n"
  )
  params = ["--gin_param=run.train_steps = 5", "--gin_param=run.seed = 4"]
  assert launch.main(["x", "--gin_file=more.gin", *params, "--mode=check_config"]) == 0
  assert capsys.readouterr().out == "ok: more.gin, base.gin: 6 bindings, all used\n"


def test_all_mistakes_at_once(capsys):
  lines = ["run.sed = 3", "run.eager = 'yes'", "cnn.widht = 4", "run.train_steps = 7"]
  path = written([*lines, "keras.SGD.momentum = 0.9"])
  assert launch.main(["launch.py", f"--gin_file={path}", "--mode=check_config"]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  starts = ("6: run has no", "8: cnn has no", "9: run.train_steps is 7, but 100", "7: run.eager is")
  for line, start in zip(err.splitlines(), starts, strict=True):
    assert line.startswith(f"error: {path}:{start}")


def test_names_are_not_blamed_for_a_failed_import():
  assert [each.kind for each in mistakes([written(["import no_such_module"])])] == ["imports"]


def test_a_mistake_in_a_flag():
  [found] = mistakes([written([])], ["run.seed = None"])
  assert (found.kind, found.where) == ("values", "--gin_param 'run.seed = None'")
  assert str(found.error) == "--gin_param 'run.seed = None': run.seed is None; it must be int."


def test_nothing_is_put_in_force():
  configurables.parse([written([])], ["run.seed = 8"])
  mistakes([written(["run.seed = 9"], name="other.gin")])
  assert gin.query_parameter("run.seed") == 8


@pytest.mark.whole
def test_no_device_is_touched_and_it_is_quick():
  path = written([])
  line = [sys.executable, "-c", IN_A_PROCESS, f"--gin_file={path}"]
  environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
  done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
  ok, timed, initialized = done.stdout.splitlines()
  status, _, cpu_s = timed.split()
  assert ok == "ok: mine.gin: 4 bindings, all used"
  assert (status, initialized) == ("0", "False")
  assert float(cpu_s) < 2  # CPU time, so that a busy machine does not fail it
