"""`loopwright report runs/a runs/b`: one HTML page about runs, which needs no network.

    data.py     what the page shows of a run, read as data
    page.py     the page's sections
    page.js     draws the curves
    page.css    how it looks

Imports no task and no TensorFlow, and evaluates nothing of a run folder.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from loopwright.errors import ConfigError
from loopwright.run_folder import folders

if TYPE_CHECKING:
  from loopwright.commands.arguments import Parsed
  from loopwright.commands.parser import Parser


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  parser.text("output", "report.html", "The file to write; default: report.html.")
  parser.whole("live_s", 0, "Write it again after so many seconds, until all runs have ended.")


def run(parsed: Parsed) -> int:
  """Writes the page and prints its path; returns the exit status (host).

  Raises:
    ConfigError: a folder has no run, the page cannot be written, or plotly is missing.
  """
  if not parsed.arguments:
    raise ConfigError("`loopwright report` takes run folders, as in `report runs/a runs/b`.")
  tops = {folders.local(top): top for top in parsed.arguments}
  paths = list(dict.fromkeys(path for folder in tops for path in _runs(folder)))
  script = plotly()
  from loopwright.tools.report import data, page

  while True:
    shown = data.read_all(paths)
    for each in shown:
      for folder, top in tops.items():
        each.name = each.name.replace(folder, top)
        each.faults = [fault.replace(folder, top) for fault in each.faults]
    goes_on = any(each.run and each.run.is_running() for each in shown)
    again_s = parsed.values.live_s if goes_on else 0
    place = parsed.arguments[0] if len(parsed.arguments) == 1 else ""
    _write(parsed.values.output, page.html(shown, plotly=script, place=place, again_s=again_s))
    if not again_s:
      break
    time.sleep(again_s)
  print(parsed.values.output)
  return 0


def plotly() -> str:
  """Returns plotly.js.

  Raises:
    ConfigError: plotly is missing.
  """
  try:
    from plotly.offline import get_plotlyjs
  except ImportError as error:
    raise ConfigError(
      f"a report needs plotly ({error}); install the extra: `pip install 'loopwright[report]'`, "
      "with uv `uv run --extra report loopwright report`."
    ) from error
  return get_plotlyjs()


def _runs(top: str) -> list[str]:
  """Returns the run folders in a folder, or itself."""
  found = list(folders.find(top))
  if not found:
    raise ConfigError(f"there is no run in {top!r}; give a run folder, or a folder of runs.")
  return found


def _write(path: str, text: str) -> None:
  """Writes the file whole or not at all."""
  own = Path(f"{path}.{os.getpid()}")
  try:
    own.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(own, path)
  except (OSError, ValueError) as error:
    own.unlink(missing_ok=True)
    reason = getattr(error, "strerror", None) or error
    raise ConfigError(
      f"--output={path!r} cannot be written ({reason}); give a file in a folder that exists."
    ) from error
