"""Runs what a gin file describes: flags -> gin -> framework.run; nothing else lives here.

  python launch.py --gin_file=configs/digits_cnn.gin --gin_param="run.train_steps = 200"
  python launch.py --gin_file=my_cluster.gin --local_workers=2  # all processes on this machine
  python launch.py --gin_file=my.gin --mode=verify  # is the task right? about a minute
  python launch.py --gin_file=my.gin --mode=tune  # what is fastest here? a few minutes

Exit status:
  0    done
  1    a failure; the traceback, and one line after it, say what and where; or a check that failed
  2    your mistake; one line says what, and what to do instead
  75   SIGTERM came, and nothing is lost: start the same command again to go on from there
  130  interrupted from the keyboard

TF_CPP_MIN_LOG_LEVEL=0 in the environment brings TensorFlow's own messages back.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from absl import flags

LOCAL_FLAGS = ("local_workers", "local_ps", "max_restarts")
LOCAL_MODES = ("train", "train_and_evaluate", "replay")
MODES = (
  *("train", "evaluate", "train_and_evaluate", "evaluate_continuously", "export"),
  *("replay", "verify", "check_config", "tune"),
)


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before anything imports TensorFlow.
  logging.getLogger("tensorflow").addFilter(_is_news)
  try:
    return launch(parse_flags(argv))
  except KeyboardInterrupt:
    return _say("interrupted", 130)
  except Exception as error:
    if line := mistake(error):
      return _say(f"error: {line}", 2)
    from framework.errors import failure

    traceback.print_exc()
    return _say(f"failed: {failure(error)}", 1)


def launch(values: flags.FlagValues) -> int:
  """Reads and checks the config before anything touches a device, then calls `run`."""
  if values.help:
    print(__doc__, values.module_help(sys.modules[__name__]), sep="\n")
    return 0
  if values.mode == "check_config":
    from framework.verify.checks import configuration

    return configuration.check_config(values.gin_file, values.gin_param)
  model_dir = values.model_dir or os.path.join("runs", Path(values.gin_file[0]).stem)
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
  from framework.run import run
  from framework.strategies.cluster import ClusterError

  try:
    configurables.configured(run)(mode=values.mode, model_dir=model_dir)
  except Preempted as stop:
    return _say(first_line(stop), 75)
  except (NonFiniteLoss, ClusterError) as failure:
    return _say(f"failed: {first_line(failure)}", 1)
  return 0


def verify(json_file: str | None) -> int:
  """Prints what the checks of the config in force found; 1 if any failed."""
  from framework import verify as checks

  report = checks.verify(
    checks.subject_of_config(), show=lambda text: print(f"{text}\n", flush=True)
  )
  print(report.count())
  if json_file:
    Path(json_file).write_text(report.json())
  return 1 if report.failures else 0


def launch_local(values: flags.FlagValues, model_dir: str) -> int:
  """Runs this command line, without LOCAL_FLAGS, in each process of a cluster on this machine."""
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
  """Returns the flags, or raises flags.Error if they are wrong or name no gin file."""
  values = flags.FlagValues()
  flags.DEFINE_multi_string("gin_file", [], "A gin file; repeatable, later ones override.", values)
  flags.DEFINE_multi_string("gin_param", [], 'A binding, "run.seed = 3"; repeatable.', values)
  flags.DEFINE_enum("mode", "train_and_evaluate", MODES, "What to do.", values)
  flags.DEFINE_string("model_dir", None, "Default: runs/<name of the first gin file>.", values)
  flags.DEFINE_integer(
    "local_workers", 0, "Start a cluster of this many workers here; 0: no cluster.", 0, None, values
  )
  flags.DEFINE_integer(
    "local_ps", 0, "And of this many parameter servers; a chief comes with them.", 0, None, values
  )
  flags.DEFINE_integer(
    "max_restarts", 0, "How often to restart the cluster after a failure.", 0, None, values
  )
  flags.DEFINE_string("json", None, "Of --mode=verify: write the report here, too.", values)
  flags.DEFINE_boolean("help", False, "Print this.", values)
  arguments = values(argv)[1:]
  if arguments:
    raise flags.Error(f"unexpected {arguments[0]!r}; a gin file is --gin_file={arguments[0]}")
  if not values.gin_file and not values.help:
    raise flags.Error("no gin file; add one, for example --gin_file=configs/digits_cnn.gin")
  if values.json is not None and values.mode != "verify":
    raise flags.Error(f"--json={values.json} is for --mode=verify, not {values.mode}; leave it out")
  _check_local_flags(values)
  return values


def _check_local_flags(values: flags.FlagValues) -> None:
  for name in LOCAL_FLAGS[1:]:
    if values[name].value and not values.local_workers:
      raise flags.Error(f"--{name}={values[name].value} needs a local cluster; add --local_workers")
  if values.local_workers and values.mode not in LOCAL_MODES:
    raise flags.Error(
      f"received both --mode={values.mode} and --local_workers={values.local_workers}; "
      f"a local cluster is for {', '.join(LOCAL_MODES)}: leave out --local_workers"
    )
  if values.local_workers and "TF_CONFIG" in os.environ:
    raise flags.Error(
      f"received both --local_workers={values.local_workers}, which gives each process its "
      "TF_CONFIG, and TF_CONFIG in the environment; leave out one"
    )


def mistake(error: Exception) -> str | None:
  """Returns the one line of a user's mistake, or None for a failure."""
  if isinstance(error, flags.Error):
    return f"{' '.join(str(error).split())} (--help lists the flags)"
  from framework import errors

  return errors.mistake(error)


def _is_news(record: logging.LogRecord) -> bool:
  """False for two regrets of TensorFlow's: that AutoGraph cannot convert gin, which any error in a
  task meets, and that replicas run eagerly, which run.eager and a replay do on purpose.
  """
  text = record.getMessage()
  of_gin = "could not transform <function augment_exception_message"
  return of_gin not in text and "eagerly has significant overhead" not in text


def _say(line: str, status: int) -> int:
  print(line, file=sys.stderr)
  return status


def _end_at_once(*_: object) -> None:
  """SIGTERM while there is nothing to save; from the first step to the last, Session answers it."""
  os.write(2, b"SIGTERM: ended with nothing left to save\n")
  os._exit(75)


if __name__ == "__main__":
  signal.signal(signal.SIGTERM, _end_at_once)
  ended = main(sys.argv)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python would restore the default, and lose it
  sys.exit(ended)
