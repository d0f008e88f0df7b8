"""Where progress is live: lines with a bar, drawn again in place, on a terminal or in a notebook.

Both kinds have `show`, `write` and `close`. rich and IPython are imported at first use.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
  from loopwright.reporting.progress import Line

_BAR_COLUMNS = 10
_COLUMNS_IF_UNKNOWN = 100


class Terminal:
  """Lines at the bottom of a terminal; what is written scrolls above them."""

  def __init__(self, stream: TextIO) -> None:
    from rich.live import Live

    self._console = _console(stream)
    self._live = Live(
      console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    self._live.start()

  def show(self, lines: Sequence[Line], *, draw: bool = True) -> None:
    """Replaces the lines; they appear now if `draw`, else with the next change."""
    self._live.update(_drawn(lines, self._console.width), refresh=draw)

  def write(self, text: str) -> None:
    """Writes above the lines."""
    self._live.refresh()  # else those that were not drawn yet would appear as they were before
    self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

  def close(self) -> None:
    """Leaves the lines as they are; what follows is written below."""
    self._live.stop()


class Notebook:
  """Lines in a cell's output, without widgets, so that a saved notebook keeps them."""

  def __init__(self, stream: TextIO) -> None:
    self._stream = stream
    self._handle: Any = None
    self._lines: Sequence[Line] = ()

  def show(self, lines: Sequence[Line], *, draw: bool = True) -> None:
    """Replaces the lines; they appear now if `draw`, else with the next change."""
    self._lines = lines
    if draw:
      self._draw()

  def write(self, text: str) -> None:
    """Writes below the lines."""
    print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Shows the last lines."""
    self._draw()

  def _draw(self) -> None:
    from IPython.display import display

    bars = [
      f"<div>{_html_bar(line.part)} <code>{html.escape(line.text)}</code></div>"
      for line in self._lines
    ]
    text = "\n".join(line.text for line in self._lines)
    data = {"text/plain": text, "text/html": "".join(bars)}
    if self._handle is None:
      self._handle = display(data, raw=True, display_id=True)
    else:
      self._handle.update(data, raw=True)


def _html_bar(part: float | None) -> str:
  return "<progress></progress>" if part is None else f'<progress value="{part:.4f}"></progress>'


def fitted(text: str, columns: int) -> str:
  """Returns a line without its last fields, as far as it is too long; step, loss and eta stay."""
  fields = text.split("  ")
  while len("  ".join(fields)) > columns:
    others = [n for n, field in enumerate(fields) if n > 1 and not field.startswith("eta ")]
    if not others:
      break
    del fields[others[-1]]
  return "  ".join(fields)


def _drawn(lines: Sequence[Line], columns: int) -> Any:
  """Returns rich's text of the lines, for a terminal so wide."""
  from rich.console import Group
  from rich.text import Text

  rows = []
  for part, text in lines:
    done = round((part or 0.0) * _BAR_COLUMNS)
    bar = ("━" * done, "green"), ("─" * (_BAR_COLUMNS - done), "bright_black")
    told = fitted(text, columns - _BAR_COLUMNS - 1)
    rows.append(Text.assemble(*bar, " ", told, no_wrap=True, overflow="ellipsis"))
  return Group(*rows)


def _console(stream: TextIO) -> Any:
  """Returns rich's console on a terminal."""
  from rich.console import Console

  class Steady(Console):
    """Leaves the cursor visible, which a kill would not give back, and outlasts its reader."""

    def show_cursor(self, show: bool = True) -> bool:
      return False

    def on_broken_pipe(self) -> None:
      self.quiet = True

  width = None if _columns(stream) else _COLUMNS_IF_UNKNOWN  # some pseudo-terminals report 0
  return Steady(file=stream, force_terminal=True, width=width)


def _columns(stream: TextIO) -> int:
  try:
    return os.get_terminal_size(stream.fileno()).columns
  except OSError:
    return 0
