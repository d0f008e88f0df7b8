"""Group "configuration" of --mode=verify, and --mode=check_config: mistakes, named and placed."""

import os
import subprocess
import sys
from pathlib import Path

import gin
import pytest
from defects.configuration import DEFECTS, LONELY, RIGHT

import launch
from framework import configurables
from framework.tools.verify.bench.bench import Subject
from framework.tools.verify.checks import configuration

REPOSITORY = Path(launch.__file__).parent
CHECKS = ["reading", "imports", "names", "one value each", "values", "used", "complete"]
IN_A_PROCESS = """
import sys, time
import tensorflow as tf
import framework.run  # and Orbit
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
  monkeypatch.setattr(sys, "path", [*sys.path])
  Path("my_lonely_task.py").write_text(LONELY)
  yield tmp_path
  gin.clear_config()


def written(lines, without="", name="mine.gin"):
  Path(name).write_text("\n".join([RIGHT.replace(without, "").rstrip(), *lines]) + "\n")
  return os.path.abspath(name)


def statuses(results):
  return {result.check: result.status for result in results}


def failures(results):
  return [result for result in results if result.status == "failed"]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect(name, folder):
  defect = DEFECTS[name]
  found = failures(configuration.examine([written(defect.lines, defect.without)]))
  assert {(each.group, each.check, each.cause) for each in found} == {
    ("configuration", defect.check, defect.cause)
  }
  assert found[0].place == defect.place
  assert defect.says.replace("FOLDER", str(folder)) in found[0].detail


@pytest.mark.parametrize("name", DEFECTS)
def test_a_run_ends_with_the_first_of_them(name, capsys):
  defect = DEFECTS[name]
  path = written(defect.lines, defect.without)
  status = {}
  for mode in ("check_config", "train"):
    status[mode] = launch.main(["launch.py", f"--gin_file={path}", f"--mode={mode}"])
    status[f"line of {mode}"] = capsys.readouterr().err.splitlines()[0]
  assert status["check_config"] == status["train"] == 2
  assert status["line of check_config"] == status["line of train"]


@pytest.mark.parametrize("name", sorted(path.name for path in REPOSITORY.glob("configs/*.gin")))
def test_the_configs_are_right(name, capsys):
  found = configuration.examine([f"configs/{name}"])
  assert statuses(found) == dict.fromkeys(CHECKS, "passed")
  assert launch.main(["launch.py", f"--gin_file=configs/{name}", "--mode=check_config"]) == 0
  out, err = capsys.readouterr()
  assert out.startswith(f"ok: {name}")
  assert out.endswith(" bindings, all used\n")
  assert err == ""


def test_what_is_counted():
  Path("base.gin").write_text(RIGHT)
  Path("more.gin").write_text(
    "include 'base.gin'\nrun.seed = %seed\nseed = 3\nrun.train_steps = 9\n"
  )
  found = configuration.examine(["more.gin"], ["run.train_steps = 5", "run.seed = 4"])
  assert {each.check: each.detail for each in found} == {
    "reading": "9 bindings in more.gin, base.gin",
    "imports": "1 module",
    "names": "2 names, all known, and 1 macro",
    "one value each": "2 bindings overridden by a later file or flag: run.train_steps, run.seed",
    "values": "5 values, all of the annotated type",
    "used": "6 bindings, all used",
    "complete": "every required parameter of what gin calls is bound",
  }
  assert statuses(found) == dict.fromkeys(CHECKS, "passed")


def test_all_mistakes_at_once(capsys):
  lines = ["run.sed = 3", "run.eager = 'yes'", "cnn.widht = 4", "run.train_steps = 7"]
  path = written([*lines, "keras.SGD.momentum = 0.9"])
  assert launch.main(["launch.py", f"--gin_file={path}", "--mode=check_config"]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  starts = ("6: run has no", "8: cnn has no", "9: run.train_steps is 7, but 100", "7: run.eager is")
  for line, start in zip(err.splitlines(), starts, strict=True):
    assert line.startswith(f"error: {path}:{start}")
  found = configuration.examine([path])
  wrong = dict.fromkeys(("names", "one value each", "values"), "failed")
  unknown = dict.fromkeys(("used", "complete"), "not applicable")
  assert statuses(found) == {"reading": "passed", "imports": "passed", **wrong, **unknown}
  [used] = [each for each in found if each.check == "used"]
  assert used.detail == "is checked when 'names' is right"


def test_names_are_not_blamed_for_a_failed_import():
  found = configuration.examine([written(["import no_such_module"])])
  assert [each.check for each in failures(found)] == ["imports"]
  assert statuses(found)["names"] == "not applicable"


def test_a_mistake_in_a_flag():
  [found] = failures(configuration.examine([written([])], ["run.seed = None"]))
  assert (found.check, found.place) == ("values", "--gin_param 'run.seed = None'")
  assert found.detail == "run.seed is None; it must be int."


def test_nothing_is_put_in_force():
  configurables.parse([written([])], ["run.seed = 8"])
  configuration.examine([written(["run.seed = 9"], name="other.gin")])
  assert gin.query_parameter("run.seed") == 8


SUBJECT = Subject(task=lambda: None, optimizer=None, global_batch_size=4)


def test_the_config_in_force():
  configurables.parse([written([])], ["run.train_steps = 5"])
  found = configuration.check(SUBJECT)
  assert statuses(found) == dict.fromkeys(CHECKS, "passed")
  details = {each.check: each.detail for each in found}
  assert details["used"] == "4 bindings, all used"
  assert (
    details["one value each"] == "1 binding overridden by a later file or flag: run.train_steps"
  )


def test_a_config_made_through_gin():
  configurables.parse([written([])])
  gin.bind_parameter("keras.SGD.momentum", 0.9)
  [found] = failures(configuration.check(SUBJECT))
  assert (found.check, found.cause, found.place) == (
    *("used", "unused binding"), "the config in force",
  )  # fmt: skip


def test_no_config():
  gin.clear_config()
  [found] = configuration.check(SUBJECT)
  assert (found.status, found.detail) == ("not applicable", "gin configured nothing")


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
