"""`loopwright repeat my.gin --seeds=5`: the same run with several seeds; how its results differ."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loopwright.commands.arguments import Parsed, config_of, define_config_flags
from loopwright.commands.parser import Parser
from loopwright.errors import Preempted, first_line
from loopwright.host import urls
from loopwright.run_folder import folders

if TYPE_CHECKING:
  from loopwright.tools.sweep.runner import Job

SEED = "run.seed"


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  define_config_flags(parser)
  told = "How many, from 0 on; more of them go on with those that are there."
  parser.whole("seeds", 5, told, at_least=2, at_most=10_000)
  parser.whole("jobs", 1, "How many runs at once.", at_least=1)
  parser.text("dir", None, "The folder; default: runs/<config>-repeat.")


class Seeds:
  """The runs of some seeds: trial n has seed n.

  Attributes:
    done: the seeds whose runs are complete; <folder>/repeat.json keeps them.
  """

  def __init__(self, folder: str, count: int, now: Mapping[str, str]) -> None:
    """Reads the file, which must be of the bindings `now`."""
    from loopwright.tools.sweep.runner import require_same

    os.makedirs(folder, exist_ok=True)
    self._folder, self._path = folder, Path(folder, "repeat.json")
    kept = json.loads(self._path.read_text()) if self._path.exists() else {}
    require_same(folder, kept.get("of", now), now)
    self._of, self.done = now, list[int](kept.get("done", ()))
    self._left = [number for number in range(count) if number not in self.done]

  def folder_of(self, number: int) -> str:
    """Returns the run folder of a seed."""
    return os.path.join(self._folder, f"trial-{number:04d}")

  def begin(self) -> tuple[int, Mapping[str, str]] | None:
    """Returns the next seed whose run is not done."""
    if not self._left:
      return None
    number = self._left.pop(0)
    return number, {SEED: str(number)}

  def look(self, number: int) -> bool:
    """No run ends early."""
    del number
    return False

  def end(self, number: int, job: Job, status: int) -> str:
    """Notes a run that is complete; returns a line about it."""
    if status:
      return f"trial {number} failed: {job.failure(status)}"
    self.done = sorted([*self.done, number])
    self._path.write_text(json.dumps({"of": self._of, "done": self.done}))
    return f"trial {number} complete"


def run(parsed: Parsed) -> int:
  """Trains with each seed, or goes on, and prints a table; returns the exit status (host).

  Raises:
    ConfigError: a mistake in flags or config.
  """
  values = parsed.values
  files, params = config_of(parsed.arguments, needed=not values.gin_file)
  files, params = [*values.gin_file, *files], [*values.gin_param, *params]
  urls.require_path("--dir", values.dir or "", "the runs are there")
  from loopwright.tools.runs import ls, repetitions
  from loopwright.tools.sweep import runner, space

  folder = values.dir or os.path.join("runs", f"{Path(files[0]).stem}-repeat")
  free = runner.slots(values.jobs)
  now = space.checked(files, params, [space.Dimension(SEED, ("0", "1"))])
  seeds = Seeds(folder, values.seeds, now)
  try:
    runner.run(seeds, files, params, free)
  except Preempted as stop:
    print(first_line(stop), file=sys.stderr)
    return 75
  found = [*repetitions.rows([folders.Run(seeds.folder_of(number)) for number in seeds.done])]
  if not found:
    print(f"fewer than two are complete; each has its output in {folder}/trial-*/output.txt")
    return 1
  print("\n".join(ls.table([repetitions.HEADS, *found])))
  print(f"\n`loopwright report {folder}` shows the curves")
  return 0
