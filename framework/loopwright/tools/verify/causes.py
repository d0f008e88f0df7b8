"""The causes that a check can name, their remedies, and what each follows from: causes.txt."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Cause(NamedTuple):
  """A known mistake, a row of the table.

  Attributes:
    group: the group of checks that names it; in another group, it may have another remedy.
    name: as a result and `Task.accepted` have it.
    remedy: what to do; may have {}, the place of a number.
    follows: earlier causes that explain it.
  """

  group: str
  name: str
  remedy: str
  follows: Sequence[str]


@functools.cache
def table() -> Sequence[Cause]:
  """Returns all causes, in the order of the groups."""
  rows, group, of_group = list[Cause](), "", list[str]()
  text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
  for line in re.sub(r"\n  +", " ", text).splitlines()[1:]:
    name, _, first = line.partition(": ")[0].strip("[]").partition(" < ")
    follows = [each for each in first.split("; ") if each]
    if line.startswith("["):
      group, of_group = name, follows
    else:
      rows.append(Cause(group, name, line.partition(": ")[2], [*of_group, *follows]))
  return rows


def remedy(name: str, group: str) -> str:
  """Returns the remedy of a cause, in a group if several have it; "" if a user's own check does."""
  rows = sorted((row for row in table() if row.name == name), key=lambda row: row.group != group)
  return rows[0].remedy if rows else ""


def follows(name: str, first: str) -> bool:
  """Whether an earlier cause explains another one."""
  return any(first in row.follows for row in table() if row.name == name)
