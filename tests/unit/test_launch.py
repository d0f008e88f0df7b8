"""The command line: which status, and which one line, for whose mistake."""

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tensorflow as tf
from runs import said

import launch
from loopwright import configurables
from loopwright.errors import ConfigError, Preempted
from loopwright.host import output
from loopwright.host.children import PROGRAM
from loopwright.options.modes import LAUNCH_MODES
from loopwright.runs import runner
from loopwright.tools import local_cluster, verify

REPOSITORY = Path(launch.__file__).parent


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", os.environ["TF_CPP_MIN_LOG_LEVEL"])
  monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.fixture
def stand_in(monkeypatch):
  """Puts a function, wrapped by gin, in the place of `run`; returns what it was given."""
  given = {}

  def put(body=lambda: None):
    def stand_in(**arguments):
      given.update(arguments)
      body()

    configurables.register(stand_in)
    monkeypatch.setattr(runner, "run", stand_in)
    monkeypatch.setattr(configurables, "parse", lambda *args: given.update(parsed=args))
    return given

  return put


def status_and_line(capsys, *arguments):
  status = launch.main(["launch.py", *arguments])
  out, err = capsys.readouterr()
  assert out == ""
  assert err.count("\n") == 1
  return status, err.strip()


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    ((), "no gin file; add one, for example --gin_file=configs/digits_cnn.gin"),
    (("--gin_fil=x",), "unknown flag --gin_fil. Did you mean '--gin_file'?"),
    (
      ("--mode=trian",),
      f"--mode=trian: it must be one of {', '.join(LAUNCH_MODES)}. Did you mean 'train'?",
    ),
    (("--gin_file",), "--gin_file needs a value, as in --gin_file=..."),
    (
      ("--gin_file=x.gin", "--model_dir="),
      "--model_dir is empty; give a folder, or leave the flag out",
    ),
    (
      ("x.gin",),
      "unexpected argument 'x.gin'; write a command before it, such as `train x.gin`, or a gin "
      "file as --gin_file=x.gin",
    ),
    (
      ("--mode=train", "x.gin"),
      "unexpected argument 'x.gin'; a command such as `train` comes before the flags, a gin file "
      "is written as --gin_file=x.gin",
    ),
    (
      ("train", "x.gin", "--mode=tune"),
      "--mode=tune: it must be one of train_and_evaluate, train.",
    ),
  ],
)
def test_a_mistake_in_the_flags(capsys, arguments, line):
  assert status_and_line(capsys, *arguments) == (2, f"error: {line} (--help lists the flags)")


def test_a_mistake_in_the_config(capsys):
  Path("x.gin").write_text("run.train_step = 3\n")
  assert status_and_line(capsys, "--gin_file=x.gin") == (
    2,
    "error: x.gin:1: run has no parameter 'train_step'. Did you mean 'train_steps'?",
  )
  assert status_and_line(capsys, "--gin_file=y.gin") == (
    2,
    f"error: there is no gin file 'y.gin' in . or {REPOSITORY}. Did you mean 'x.gin'?",
  )


def test_a_param_comes_after_the_files(capsys):
  Path("x.gin").write_text("run.train_steps = 3\n")
  assert status_and_line(capsys, "--gin_file=x.gin", "--gin_param=run.train_steps = 'x'") == (
    2,
    "error: --gin_param \"run.train_steps = 'x'\": run.train_steps is 'x'; it must be int | None.",
  )


def test_a_task_module_in_the_working_directory(capsys):
  Path("my_task_here.py").write_text("import loopwright\n@loopwright.register\nclass Here: pass\n")
  Path("x.gin").write_text("import my_task_here\nrun.task = @Here\nrun.train_steps = 3\n")
  status, line = status_and_line(capsys, "--gin_file=x.gin")
  assert (status, line[:45]) == (2, "error: x.gin:2: run.task is @Here; it must be")


def test_the_flags_reach_gin_and_run(stand_in, capsys):
  given = stand_in()
  arguments = ["--gin_file=configs/a.gin", "--gin_file=b.gin", "--gin_param=c.d=1, 2"]
  assert launch.main(["launch.py", *arguments]) == 0
  assert given == {
    "parsed": (["configs/a.gin", "b.gin"], ["c.d=1, 2"]),
    "mode": "train_and_evaluate",
    "model_dir": "runs/a",
    "accept_changes": False,
  }
  more = ["--mode=train", "--model_dir=m", "--accept_changes"]
  assert launch.main(["launch.py", *arguments, *more]) == 0
  assert (given["mode"], given["model_dir"], given["accept_changes"]) == ("train", "m", True)
  assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    *(
      (
        (f"--local_workers={given}",),
        f"--local_workers={given}: it must be a number of workers, such as 4, or the least and "
        "most: 2:4",
      )
      for given in ("-1", "two", "3:2", "0:2", "2:", "1:2:3")
    ),
    (
      ("--local_workers=1:2", "--local_ps=1"),
      "received both --local_workers=1:2 and --local_ps=1; workers beside parameter servers come "
      "and go anyway: give one number of workers",
    ),
    (
      ("--local_workers=1", "--local_ps=-2"),
      "--local_ps=-2: it must be a whole number of at least 0",
    ),
    (
      ("--local_workers=1", "--max_restarts=-1"),
      "--max_restarts=-1: it must be a whole number of at least 0",
    ),
    (("--local_ps=1",), "--local_ps=1 needs a local cluster; add --local_workers"),
    (("--max_restarts=3",), "--max_restarts=3 needs a local cluster; add --local_workers"),
    (
      ("--local_workers=2", "--mode=export"),
      "received both --mode=export and --local_workers=2; a local cluster supports train, "
      "train_and_evaluate, replay: remove --local_workers",
    ),
  ],
)
def test_a_mistake_in_the_flags_of_a_local_cluster(capsys, arguments, line):
  line = f"error: {line} (--help lists the flags)"
  assert status_and_line(capsys, "--gin_file=x.gin", *arguments) == (2, line)


def test_a_local_cluster_inside_a_cluster(capsys, monkeypatch):
  monkeypatch.setenv("TF_CONFIG", "{}")
  assert status_and_line(capsys, "--gin_file=x.gin", "--local_workers=2") == (
    2,
    "error: received both --local_workers=2, which sets TF_CONFIG for each process, and TF_CONFIG "
    "in the environment; remove one (--help lists the flags)",
  )


@pytest.mark.parametrize("mode", ["train", "train_and_evaluate"])
def test_a_local_cluster_runs_the_same_command_line_in_each_process(monkeypatch, mode):
  given = {}

  def cluster(**options):
    given.update(options)
    return types.SimpleNamespace(run=lambda: 75)

  monkeypatch.setattr(local_cluster, "LocalCluster", cluster)
  arguments = ["--gin_file=a.gin", "--local_workers", "2", "--gin_param", "c.d=1, 2", "-local_ps=1"]
  arguments += ["--gin_file", "b.gin", "--max_restarts=3", f"--mode={mode}"]
  assert launch.main(["launch.py", *arguments]) == 75
  command = [*PROGRAM]
  flags = ["--gin_file=a.gin", "--gin_file=b.gin", "--gin_param=c.d=1, 2", f"--mode={mode}"]
  assert given["command"][: len(command)] == command
  assert sorted(given.pop("command")[len(command) :]) == flags
  assert given == {
    "model_dir": "runs/a", "workers": 2, "least": 2, "ps": 1, "max_restarts": 3,
  }  # fmt: skip


@pytest.mark.parametrize(
  ("path", "reason"),
  [("nowhere/r.json", "No such file or directory"), ("x.gin/r.json", "Not a directory")],
)
def test_a_report_that_cannot_be_written_is_noticed_before_the_checks(
  capsys, monkeypatch, path, reason
):
  Path("x.gin").write_text("run.seed = 1\n")
  monkeypatch.setattr(configurables, "parse", lambda *args: None)
  monkeypatch.setattr(verify, "subject_of_config", lambda: pytest.fail("the checks began"))
  assert status_and_line(capsys, "--gin_file=x.gin", "--mode=verify", f"--json={path}") == (
    2,
    f"error: --json='{path}' cannot be written ({reason}); give a file in a folder that exists "
    "(--help lists the flags)",
  )


def refuse():
  raise ConfigError("x is 3; it must be 4.")


@tf.function
def refuse_while_tracing():
  refuse()


def refuse_in_the_pipeline():
  def refuse_file(_):
    raise ValueError("user error: x is 3; it must be 4.")

  dataset = tf.data.Dataset.range(3).map(lambda i: tf.numpy_function(refuse_file, [i], tf.int64))
  next(iter(dataset))


def refuse_in_the_pipeline_by_type():
  dataset = tf.data.Dataset.range(3).map(
    lambda i: tf.numpy_function(lambda _: refuse(), [i], tf.int64)
  )
  next(iter(dataset))


@pytest.mark.parametrize(
  "body",
  [refuse, refuse_while_tracing, refuse_in_the_pipeline, refuse_in_the_pipeline_by_type],
)
def test_a_mistake_found_while_running(stand_in, capsys, body):
  stand_in(body)
  assert status_and_line(capsys, "--gin_file=x.gin") == (2, "error: x is 3; it must be 4.")


def test_a_failure_keeps_its_traceback_and_ends_with_its_line(stand_in, capsys):
  def fail():
    raise ZeroDivisionError("a bug")

  stand_in(fail)
  assert launch.main(["launch.py", "--gin_file=x.gin"]) == 1
  *others, last = capsys.readouterr().err.splitlines()
  assert "ZeroDivisionError: a bug" in others
  number = fail.__code__.co_firstlineno + 1
  assert last == f"failed: ZeroDivisionError: a bug (test_launch.py:{number}, in fail)"


def test_a_clean_stop_on_sigterm(stand_in, capsys):
  def stop():
    raise Preempted("SIGTERM: saved step 3 in m")

  stand_in(stop)
  assert status_and_line(capsys, "--gin_file=x.gin") == (75, "SIGTERM: saved step 3 in m")


def test_an_interrupt(stand_in, capsys):
  def interrupt():
    raise KeyboardInterrupt

  stand_in(interrupt)
  assert status_and_line(capsys, "--gin_file=x.gin") == (130, "interrupted")


def test_an_exit_in_the_users_code_is_a_failure(stand_in, capsys):
  def leave():
    sys.exit(0)

  stand_in(leave)
  status, line = status_and_line(capsys, "--gin_file=x.gin")
  place = f"(test_launch.py:{leave.__code__.co_firstlineno + 1}, in leave)"
  assert (status, line) == (1, f"failed: your code ended the process: SystemExit: 0 {place}")


def test_output_that_nobody_reads_ends_nothing():
  reader, writer = os.pipe()
  stream = output.Lasting(os.fdopen(writer, "w"))
  print("read", file=stream, flush=True)
  assert os.read(reader, 100) == b"read\n"
  os.close(reader)
  for _ in range(3):
    print("unread", file=stream, flush=True)
  os.write(stream.fileno(), b"also from C++")  # as TensorFlow's own messages
  assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_help_lists_flags_and_statuses(capsys):
  assert launch.main(["launch.py", "--help"]) == 0
  out = capsys.readouterr().out
  for word in ("Exit status", "--gin_file", "--gin_param", "--mode", "--model_dir"):
    assert word in out
  assert all(f"--{name}" in out for name in launch.LOCAL_FLAGS)


@pytest.mark.parametrize(("before", "after"), [(None, "3"), ("1", "1")])
def test_tensorflow_is_quiet_unless_told_otherwise(monkeypatch, capsys, before, after):
  monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
  if before:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", before)
  launch.main(["launch.py", "--help"])
  assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == after


def command(*arguments, **options):
  environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
  return subprocess.run(
    [sys.executable, *arguments], capture_output=True, text=True, env=environment, **options
  )


def test_a_mistake_in_the_flags_does_not_wait_for_tensorflow():
  code = "import launch, sys; launch.main(['x']); sys.exit('tensorflow' in sys.modules)"
  assert command("-c", code, cwd=REPOSITORY).returncode == 0


def test_a_local_cluster_prints_the_one_line_and_does_not_import_tensorflow():
  Path("x.gin").write_text("run.seed = 1e3\n")
  arguments = ["x", "--gin_file=x.gin", "--local_workers=2", "--model_dir=m"]
  code = f"import launch, sys; print(launch.main({arguments}), 'tensorflow' in sys.modules)"
  done = command("-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {code}")
  assert (done.returncode, done.stdout) == (0, "2 False\n")
  line = "error: x.gin:1: run.seed is 1000.0; it must be int. Write 1000.\n"
  assert said(done.stderr) in (line, f"[worker-1] {line}")
  assert sorted(os.listdir("m/logs")) == ["worker-0.log", "worker-1.log"]


def test_the_whole_command_prints_the_one_line():
  Path("x.gin").write_text("run.seed = 1e3\n")
  done = command(str(REPOSITORY / "launch.py"), "--gin_file=x.gin")
  assert (done.returncode, done.stdout) == (2, "")
  assert said(done.stderr) == "error: x.gin:1: run.seed is 1000.0; it must be int. Write 1000.\n"


def the_python_of(process):
  """Returns the process itself, or the child of an `unshare`, which is process 1 of a namespace."""
  while "python" not in Path(f"/proc/{process}/comm").read_text():
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    process = int(children[0])
  return process


def as_process_1(arguments):
  return ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", *arguments]


@pytest.mark.whole
@pytest.mark.parametrize(
  ("number", "first"),
  [(signal.SIGTERM, list), (signal.SIGHUP, as_process_1)],
  ids=["a process", "process 1"],
)
def test_a_signal_before_the_first_step_ends_at_once(number, first):
  Path("slow.py").write_text("import time\n\nprint('here', flush=True)\ntime.sleep(60)\n")
  Path("x.gin").write_text("import slow\n")
  process = subprocess.Popen(
    first([sys.executable, str(REPOSITORY / "launch.py"), "--gin_file=x.gin"]),
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  assert process.stdout.readline() == "here\n"
  os.kill(the_python_of(process.pid), number)
  name = signal.Signals(number).name
  out, err = process.communicate(timeout=30)
  assert (out, said(err)) == ("", f"{name}: exited, nothing to save\n")
  assert process.returncode == 75


def test_another_backend_of_keras(capsys, monkeypatch, tmp_path):
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  line = "error: KERAS_BACKEND is 'jax'; set it to tensorflow, or unset it."
  assert status_and_line(capsys, "--gin_file=x.gin") == (2, line)
  monkeypatch.delenv("KERAS_BACKEND")
  (tmp_path / "keras.json").write_text('{"backend": "jax", "floatx": "float16"}')
  Path("x.gin").write_text("run.seed = 1e3\n")
  monkeypatch.setenv("KERAS_HOME", str(tmp_path))
  done = command(str(REPOSITORY / "launch.py"), "--gin_file=x.gin")
  assert said(done.stderr) == "error: x.gin:1: run.seed is 1000.0; it must be int. Write 1000.\n"
