"""One live line, and whether this process has a place to draw it again."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple, TextIO


class Line(NamedTuple):
  """One live line.

  Attributes:
    part: how much is done, from 0 to 1; None if that is not known.
    text: what stands behind the bar.
  """

  part: float | None
  text: str


def is_terminal(stream: TextIO) -> bool:
  """Whether lines can be drawn again there; False for TERM=dumb, as in an editor."""
  return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def is_notebook() -> bool:
  """Whether this process is the kernel of a notebook."""
  module = sys.modules.get("IPython")
  shell = module.get_ipython() if module is not None else None
  return getattr(shell, "kernel", None) is not None
