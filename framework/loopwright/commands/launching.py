"""Trains, evaluates, exports, replays or examines a config: flags -> gin -> loopwright.run."""

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from loopwright import registry
from loopwright.commands.arguments import Parsed, as_flags
from loopwright.commands.process import say
from loopwright.errors import UsageError


def run(parsed: Parsed) -> int:
  """Checks the config before using any device, then does what --mode says (host)."""
  values = parsed.values
  if values.mode == "check_config":
    return check_config(values.gin_file, values.gin_param)
  default = os.path.join("runs", Path(values.gin_file[0]).stem)
  model_dir = default if values.model_dir is None else values.model_dir
  if values.local_workers:
    return launch_local(values, model_dir)
  if values.mode == "tune":
    show = functools.partial(print, flush=True)
    registry.load("tool", "tune")(values.gin_file, values.gin_param, model_dir=model_dir, show=show)
    return 0
  if values.mode == "export" and values.format != "savedmodel":
    print(registry.load("tool", "export_file")(model_dir, values.format))
    return 0
  from loopwright import configurables
  from loopwright.errors import Failed, Preempted, first_line

  configurables.parse(values.gin_file, values.gin_param)
  if values.mode == "verify":
    return verify(values)
  from loopwright.runs import runner

  try:
    configurables.configured(runner.run)(
      mode=values.mode, model_dir=model_dir, accept_changes=values.accept_changes
    )
  except Preempted as stop:
    return say(first_line(stop), 75)
  except Failed as failure:
    return say(f"failed: {first_line(failure)}", 1)
  return 0


def check_config(gin_files: Sequence[str], gin_params: Sequence[str]) -> int:
  """Prints a line for each mistake of a config, or that there is none; returns 2 or 0 (host)."""
  from loopwright.configurables import examine
  from loopwright.configurables.checks import in_force
  from loopwright.errors import first_line, printable

  examination = examine(gin_files, gin_params)
  for mistake in examination.mistakes:
    say(f"error: {printable(first_line(mistake.error))}", 2)
  if examination.mistakes:
    return 2
  files = printable(", ".join(Path(file).name for file in examination.config.files)) or "memory"
  count = len(in_force(examination.history))
  print(f"ok: {files}: {count} binding{'' if count == 1 else 's'}, all used")
  return 0


def verify(values: argparse.Namespace) -> int:
  """Prints the results of the checks of the config in force; returns 1 if any check failed."""
  from loopwright.tools import verify as checks

  groups = checks.known_groups(values.only.split(",") if values.only else None)
  if values.json:
    _require_writable(values.json)
  made = checks.verify(
    checks.subject_of_config(), groups=groups, together=True,
    show=lambda text: print(f"{text}\n", flush=True),
  )  # fmt: skip
  print("\n\n".join(filter(None, [made.left_out(), values.time and made.times(), made.count()])))
  if values.json:
    Path(values.json).write_text(made.json())
  return 1 if made.failures else 0


def _require_writable(path: str) -> None:
  """Makes an empty file, or leaves one that is there; so a mistake shows before the checks run."""
  try:
    Path(path).open("a").close()
  except (OSError, ValueError) as error:  # ValueError: a null character
    reason = getattr(error, "strerror", None) or error
    raise UsageError(
      f"--json={path!r} cannot be written ({reason}); give a file in a folder that exists"
    ) from error


def launch_local(values: argparse.Namespace, model_dir: str) -> int:
  """Runs this command line without LOCAL_FLAGS in each process of a cluster on this machine."""
  from loopwright.host.children import PROGRAM
  from loopwright.tools.local_cluster import LocalCluster

  cluster = LocalCluster(
    command=[*PROGRAM, *as_flags(values)],
    model_dir=model_dir,
    workers=int(values.local_workers),
    least=values.local_workers.least,
    ps=values.local_ps,
    max_restarts=values.max_restarts,
  )
  return cluster.run()
