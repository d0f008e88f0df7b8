"""Trains, checks and compares what gin files describe.

  loopwright train digits_cnn run.train_steps=200   a shipped config by name, with a binding
  loopwright train my.gin --local_workers=2         a file; all processes on this machine
  loopwright verify                                 the only gin file of this folder

Exit status:
  0    done
  1    a failure: a traceback, then one line with reason and place; or a failed check
  2    a mistake in flags, config, task or data: one line says what to do
  75   SIGTERM or SIGHUP, state saved: start the same command again to continue
  130  Ctrl-C, state saved; or pressed twice: ended at once

Output that nobody reads any more, as after `| head` or a lost terminal, does not end a run.

Set TF_CPP_MIN_LOG_LEVEL=0 in the environment to see TensorFlow's own messages.
"""

# `python launch.py` is the same command. This module imports nothing heavy.

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import loopwright
from loopwright import registry
from loopwright.commands import arguments, process
from loopwright.host import lazy_keras


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv`, the program first, and returns the exit status (host)."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before anything imports TensorFlow.
  lazy_keras.install()
  backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # before keras.json
  if backend != "tensorflow":
    return process.say(
      f"error: KERAS_BACKEND is {backend!r}; set it to tensorflow, or unset it.", 2
    )
  logging.getLogger("tensorflow").addFilter(_is_news)
  try:
    return _run(argv)
  except KeyboardInterrupt as interrupt:
    return process.say(str(interrupt) or "interrupted", 130)
  except SystemExit as stop:
    from loopwright.host.failures import failure

    return process.say(f"failed: your code ended the process: {failure(stop)}", 1)
  except Exception as error:
    from loopwright.host import modules
    from loopwright.host.failures import failure

    if line := mistake(error) or modules.namesake_in(error):
      return process.say(f"error: {line}", 2)

    traceback.print_exc()
    return process.say(f"failed: {failure(error)}", 1)


def run_process(argv: Sequence[str]) -> NoReturn:
  """Runs the command line as a process of its own, and ends it whatever its threads do."""
  process.run(main, argv)


def console() -> NoReturn:
  """Runs the console script `loopwright`; without arguments it prints its help."""
  run_process(sys.argv if sys.argv[1:] else [*sys.argv, "--help"])


def _run(argv: Sequence[str]) -> int:
  parsed = arguments.parse(argv)
  if parsed.values.help:
    print(arguments.page(parsed.command, __doc__ or ""))
    return 0
  if getattr(parsed.values, "version", False):
    print(f"loopwright {loopwright.__version__}")
    return 0
  return registry.load("command", parsed.command or "train")(parsed)


def mistake(error: Exception) -> str | None:
  """Returns the line of a user's mistake; None for any other error."""
  from loopwright import errors
  from loopwright.host import failures

  if isinstance(error, errors.UsageError):
    return errors.printable(f"{' '.join(str(error).split())} (--help lists the flags)")
  return failures.mistake(error)


def _is_news(record: logging.LogRecord) -> bool:
  """False for two warnings that are always expected.

  AutoGraph cannot convert gin's wrapper, which appears with any error in a task. Eager replicas are
  slow, but run.eager and a replay ask for them.
  """
  text = record.getMessage()
  of_gin = "could not transform <function augment_exception_message"
  return of_gin not in text and "eagerly has significant overhead" not in text
