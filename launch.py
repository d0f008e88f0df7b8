"""Runs what a gin file describes: flags -> gin -> framework.run.

  python launch.py --gin_file=configs/digits_cnn.gin --gin_param="run.train_steps = 200"
  python launch.py --gin_file=my_cluster.gin --local_workers=2  # all processes on this machine
  python launch.py --gin_file=my.gin --mode=verify  # checks the task, in about a minute
  python launch.py --gin_file=my.gin --mode=tune  # finds the fastest settings, in a few minutes

Exit status:
  0    done
  1    a failure: a traceback, then one line with reason and place; or a failed check
  2    a mistake in flags, config, task or data: one line says what to do
  75   SIGTERM or SIGHUP, state saved: start the same command again to continue
  130  Ctrl-C, state saved; or pressed twice: ended at once

Output that nobody reads any more, as after `| head` or a lost terminal, does not end a run.

Set TF_CPP_MIN_LOG_LEVEL=0 in the environment to see TensorFlow's own messages.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags

from framework.modes import LAUNCH_MODES, TRAINING_MODES

LOCAL_FLAGS = ("local_workers", "local_ps", "max_restarts")
LOCAL_MODES = (*TRAINING_MODES, "replay")


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before anything imports TensorFlow.
  logging.getLogger("tensorflow").addFilter(_is_news)
  try:
    return launch(parse_flags(argv))
  except KeyboardInterrupt as interrupt:
    return _say(str(interrupt) or "interrupted", 130)
  except SystemExit as stop:
    from framework.errors import failure

    return _say(f"failed: your code ended the process: {failure(stop)}", 1)
  except Exception as error:
    if line := mistake(error):
      return _say(f"error: {line}", 2)
    from framework.errors import failure

    traceback.print_exc()
    return _say(f"failed: {failure(error)}", 1)


def launch(values: flags.FlagValues) -> int:
  """Checks the config before using any device, then calls `run`; returns the exit status."""
  if values.help:
    print(__doc__, values.module_help(sys.modules[__name__]), sep="\n")
    return 0
  if values.mode == "check_config":
    from framework.verify.checks import configuration

    return configuration.check_config(values.gin_file, values.gin_param)
  default = os.path.join("runs", Path(values.gin_file[0]).stem)
  model_dir = default if values.model_dir is None else values.model_dir
  if values.local_workers:
    return launch_local(values, model_dir)
  if values.mode == "tune":
    from framework.tune import tune

    tune(
      values.gin_file,
      values.gin_param,
      model_dir=model_dir,
      show=lambda line: print(line, flush=True),
    )
    return 0
  from framework import configurables
  from framework.errors import Preempted, first_line

  configurables.parse(values.gin_file, values.gin_param)
  if values.mode == "verify":
    return verify(values.json)
  from framework.actions.nonfinite import NonFiniteLoss
  from framework.backend.files import StorageError
  from framework.run import run
  from framework.strategies.cluster import ClusterError

  try:
    configurables.configured(run)(
      mode=values.mode, model_dir=model_dir, accept_changes=values.accept_changes
    )
  except Preempted as stop:
    return _say(first_line(stop), 75)
  except (NonFiniteLoss, ClusterError, StorageError) as failure:
    return _say(f"failed: {first_line(failure)}", 1)
  return 0


def verify(json_file: str | None) -> int:
  """Prints the results of all checks of the config in force; returns 1 if any check failed."""
  from framework import verify as checks

  if json_file:
    _require_writable(json_file)
  report = checks.verify(
    checks.subject_of_config(), show=lambda text: print(f"{text}\n", flush=True)
  )
  print(report.count())
  if json_file:
    Path(json_file).write_text(report.json())
  return 1 if report.failures else 0


def _require_writable(path: str) -> None:
  """Makes an empty file, or leaves one that is there; so a mistake shows before the checks run."""
  try:
    Path(path).open("a").close()
  except (OSError, ValueError) as error:  # ValueError: a null character
    reason = getattr(error, "strerror", None) or error
    raise flags.Error(
      f"--json={path!r} cannot be written ({reason}); give a file in a folder that exists"
    ) from error


def launch_local(values: flags.FlagValues, model_dir: str) -> int:
  """Runs this command line without LOCAL_FLAGS in each process of a cluster on this machine."""
  from framework.strategies.local_cluster import run_local

  given = {name: values[name].value for name in values if values[name].present}
  arguments = [
    f"--{name}={item}"
    for name, value in given.items()
    if name not in LOCAL_FLAGS
    for item in (value if isinstance(value, list) else [value])
  ]
  return run_local(
    command=[sys.executable, os.path.abspath(__file__), *arguments],
    model_dir=model_dir,
    workers=values.local_workers,
    ps=values.local_ps,
    max_restarts=values.max_restarts,
  )


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
  """Returns the flags.

  Raises:
    flags.Error: a wrong flag, or no gin file.
  """
  values = flags.FlagValues()
  flags.DEFINE_multi_string(
    "gin_file", [], "A gin file; repeatable, later files override earlier ones.", values
  )
  flags.DEFINE_multi_string(
    "gin_param", [], 'A binding such as "run.seed = 3"; repeatable, after the files.', values
  )
  flags.DEFINE_enum("mode", "train_and_evaluate", LAUNCH_MODES, "What to do.", values)
  flags.DEFINE_string(
    "model_dir", None, "The run folder; default: runs/<name of the first gin file>.", values
  )
  flags.DEFINE_integer(
    "local_workers",
    0,
    "Number of workers of a cluster on this machine; 0 for no cluster.",
    0,
    None,
    values,
  )
  flags.DEFINE_integer(
    "local_ps",
    0,
    "Number of parameter servers of that cluster; above 0 it also has a chief.",
    0,
    None,
    values,
  )
  flags.DEFINE_integer(
    "max_restarts", 0, "How often to restart that cluster after a failure.", 0, None, values
  )
  flags.DEFINE_string("json", None, "For --mode=verify: a file to write the report to.", values)
  flags.DEFINE_boolean(
    "accept_changes", False, "Go on with a config or data that the run has not had so far.", values
  )
  flags.DEFINE_boolean("help", False, "Print this help.", values)
  arguments = values(argv)[1:]
  if arguments:
    raise flags.Error(
      f"unexpected argument {arguments[0]!r}; write a gin file as --gin_file={arguments[0]}"
    )
  if not values.gin_file and not values.help:
    raise flags.Error("no gin file; add one, for example --gin_file=configs/digits_cnn.gin")
  if values.model_dir == "":
    raise flags.Error("--model_dir is empty; give a folder, or leave the flag out")
  if values.json is not None and values.mode != "verify":
    raise flags.Error(f"--json={values.json} is for --mode=verify, not {values.mode}; remove it")
  _check_local_flags(values)
  return values


def _check_local_flags(values: flags.FlagValues) -> None:
  for name in LOCAL_FLAGS[1:]:
    if values[name].value and not values.local_workers:
      raise flags.Error(f"--{name}={values[name].value} needs a local cluster; add --local_workers")
  if values.local_workers and values.mode not in LOCAL_MODES:
    raise flags.Error(
      f"received both --mode={values.mode} and --local_workers={values.local_workers}; "
      f"a local cluster supports {', '.join(LOCAL_MODES)}: remove --local_workers"
    )
  if values.local_workers and "TF_CONFIG" in os.environ:
    raise flags.Error(
      f"received both --local_workers={values.local_workers}, which sets TF_CONFIG for each "
      "process, and TF_CONFIG in the environment; remove one"
    )


def mistake(error: Exception) -> str | None:
  """Returns the line of a user's mistake; None for any other error."""
  from framework import errors

  if isinstance(error, flags.Error):
    return errors.printable(f"{' '.join(str(error).split())} (--help lists the flags)")
  return errors.mistake(error)


def _is_news(record: logging.LogRecord) -> bool:
  """False for two warnings that are always expected.

  AutoGraph cannot convert gin's wrapper, which appears with any error in a task. Eager replicas are
  slow, but run.eager and a replay ask for them.
  """
  text = record.getMessage()
  of_gin = "could not transform <function augment_exception_message"
  return of_gin not in text and "eagerly has significant overhead" not in text


def _say(line: str, status: int) -> int:
  print(line, file=sys.stderr)
  return status


# ---- The process ----


def run_process(argv: Sequence[str]) -> NoReturn:
  """Runs the command line as a process of its own, and ends it whatever its threads do."""
  if os.getpid() == 1:
    _leave_process_1()
  from framework.backend import output, signals

  sys.stdout, sys.stderr = output.Lasting(sys.stdout), output.Lasting(sys.stderr)
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:
      signal.signal(number, _end_at_once)
  signals.owns_process = True
  status = main(argv)
  # Python's own way out waits for its lock in destructors, such as a data iterator's: without
  # end, while a tf.numpy_function runs. Here everything is written, so nothing is left to wait for.
  for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
  atexit._run_exitfuncs()
  logging.shutdown()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def _end_at_once(number: int, _: object) -> None:
  """Handles a signal while there is nothing to save; during training, Session handles it."""
  with contextlib.suppress(OSError):
    os.write(2, f"{signal.Signals(number).name}: exited, nothing to save\n".encode())
  os._exit(75)


def _leave_process_1() -> None:
  """Goes on in a child; the parent passes signals on, collects processes, and ends with the child.

  The kernel protects process 1 of a container from SIGKILL of processes in it, so that a run that
  hangs could not be ended.
  """
  child = os.fork()
  if child == 0:
    os.setpgid(0, 0)  # so that a terminal's signals come once, from the parent
    return
  for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(child, number))
  while True:
    process, status = os.wait()
    if process == child:
      code = os.waitstatus_to_exitcode(status)
      os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
  run_process(sys.argv)
