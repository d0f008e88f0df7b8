"""Progress of training: live lines on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import datetime
import fnmatch
import io
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from loopwright import errors
from loopwright.errors import ConfigError, suggest
from loopwright.run_folder.metrics_log import Clock, Number

if TYPE_CHECKING:
  from loopwright.reporting.live import Notebook, Terminal

_REDRAW_SECS = 0.1
_REDRAW_EVALUATION_SECS = 0.5


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


class Silent(io.StringIO):
  """A stream that discards its input, for workers other than the chief."""

  def write(self, text: str) -> int:
    """Discards the text."""
    return len(text)


class Choice:
  """Which values the lines show, and in which order."""

  PACE = frozenset({"steps_per_second", "examples_per_second", "nonfinite_step"})
  """Values that have their own place, or none."""

  def __init__(
    self, shown: Sequence[str] | None = None, *, hidden: Iterable[str] = (), who: str = "Task.shown"
  ) -> None:
    """Sets what to show.

    Args:
      shown: names, or patterns of `fnmatch`, in order; None shows all that are not hidden. One
        without a slash also means the metric of this name in each evaluation set.
      hidden: names to leave out if `shown` is None.
      who: what an error calls `shown`.

    Raises:
      ConfigError: `shown` is not a sequence of texts.
    """
    if isinstance(shown, str) or not all(isinstance(name, str) for name in shown or ()):
      raise ConfigError(
        f"{who} is {errors.shown(shown)}; it must be a list of names or patterns, such as "
        "['loss', '*_accuracy'], or None."
      )
    self._shown = None if shown is None else tuple(shown)
    self._hidden = self.PACE | set(hidden)
    self._who = who
    self.without: Iterable[str] = ()

  def of(self, names: Iterable[str]) -> list[str]:
    """Returns the names to show: in the order of `shown`, else the loss first."""
    names = [name for name in names if name not in self.without]
    if self._shown is None:
      visible = [name for name in names if name not in self._hidden]
      return sorted(visible, key=lambda name: name != "loss")
    known = [name for name in names if name not in self.PACE]
    return list(dict.fromkeys(name for one in self._shown for name in known if _means(one, name)))

  def unknown(self, names: Iterable[str]) -> str:
    """Returns a line about the first name in `shown` that is none of `names`; "" if there is none.

    A pattern may match nothing.
    """
    known = {part for name in names for part in (name, _last(name))}
    for one in self._shown or ():
      if one not in known and not set("*?[") & set(one):
        return f"{self._who} has {one!r}, but no metric has this name.{suggest(one, known)}"
    return ""


def _means(shown: str, name: str) -> bool:
  """Whether a name or pattern means a metric."""
  names = [name] if "/" in shown else [name, _last(name)]
  return any(fnmatch.fnmatchcase(each, shown) for each in names)


def _last(name: str) -> str:
  """Returns the name of a metric without that of its evaluation set."""
  return name.rpartition("/")[2]


class Progress:
  """Progress of training: live lines with a bar, or a plain line from time to time.

      step 300/1000  loss 0.2134  accuracy 0.9312  12.7 steps/s  812 examples/s  eta 0:00:55

  Live on a terminal and in a notebook; a log file gets plain lines. A long evaluation has a live
  line of its own, and each has a line with its values. Use it as a context manager, or call
  `close`.
  """

  def __init__(
    self,
    *,
    total_steps: int,
    stream: TextIO | None = None,
    every_secs: float = 10.0,
    clock: Clock = time.monotonic,
    choice: Choice | None = None,
    splits: Iterable[str] = (),
  ) -> None:
    """Prints nothing yet.

    Args:
      total_steps: the step at which training ends.
      stream: where to print; None is stderr. `isatty()` tells whether it is a terminal. In a
        notebook, stderr's live lines are in the cell's output.
      every_secs: minimum seconds between plain lines, except the first and the last.
      clock: returns seconds, monotonic.
      choice: which values to show; None shows all but those of the pace.
      splits: "train", "eval": when all of these have reported, names in `choice` that no metric has
        get a line. None of them: no line.
    """
    self._total = total_steps
    self._stream = sys.stderr if stream is None else stream
    in_cell = stream is None and is_notebook()
    self._kind: type[Terminal | Notebook] | None = None
    if in_cell or is_terminal(self._stream):
      from loopwright.reporting.live import Notebook, Terminal

      self._kind = Notebook if in_cell else Terminal
    self._live: Terminal | Notebook | None = None
    self._every_secs = every_secs
    self._clock = clock
    self._choice = choice or Choice()
    self._awaited, self._names = set(splits), set[str]()
    self._lines: dict[str, Line] = {}
    self._drawn_at = -math.inf
    self._first: tuple[int, float] | None = None
    self._printed_at = -math.inf
    self._unprinted: str | None = None
    self._evaluating_since: float | None = None
    self._evaluating_shown = -math.inf

  def update(self, step: int, values: Mapping[str, Number]) -> None:
    """Shows the values of one loop; rates come from "steps_per_second", "examples_per_second"."""
    self._notice("train", values)
    now = self._clock()
    self._first = self._first or (step, now)
    line = self._line(step, now, values)
    if self._kind:
      self._draw("train", Line(min(1.0, step / self._total), line))
    elif step >= self._total or now - self._printed_at >= self._every_secs:
      self._printed_at = now
      self._unprinted = None
      self.message(line)
    else:
      self._unprinted = line

  def evaluating(self, step: int, name: str, done: int, total: int | None) -> None:
    """Shows how far a long evaluation is; a short one prints nothing on plain streams.

    Args:
      step: the training step that it evaluates.
      name: of the evaluation set; "" if there is only one.
      done: batches so far; 0 if the number is not known.
      total: batches in all, if known.
    """
    now = self._clock()
    if self._evaluating_since is None:
      self._evaluating_since = self._evaluating_shown = now
    if now - self._evaluating_shown < (_REDRAW_EVALUATION_SECS if self._kind else self._every_secs):
      return
    self._evaluating_shown = now
    of = f"/{total}" if total else ""
    batch = [f"batch {done}{of}"] if done else []
    seconds = datetime.timedelta(seconds=round(now - self._evaluating_since))
    line = "  ".join([f"evaluating {errors.printable(name)}".strip(), *batch, str(seconds)])
    if self._kind:
      self._draw("eval", Line(done / total if total else None, line))
    else:
      self.message(f"step {step}/{self._total}  {line}")

  def evaluation(self, step: int, values: Mapping[str, Number]) -> None:
    """Prints the values of one evaluation."""
    self._evaluating_since = None
    if self._lines.pop("eval", None) and self._live is not None:
      self._live.show([*self._lines.values()], draw=False)
    self._notice("eval", values)
    self.message("  ".join([f"eval at step {step}", *self._shown(values)]))

  def message(self, text: str) -> None:
    """Prints text, above the live lines of a terminal."""
    if self._live is not None:
      self._live.write(text)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Ends the live lines, or prints the last plain line if it has not been printed."""
    if self._live is not None:
      self._live.close()
      self._live = None
    if self._unprinted is not None:
      self.message(self._unprinted)
      self._unprinted = None

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _notice(self, split: str, values: Mapping[str, Number]) -> None:
    """Warns once about names to show that exist in no split."""
    if not self._awaited:
      return
    self._names |= set(values)
    self._awaited.discard(split)
    if not self._awaited and (line := self._choice.unknown(self._names)):
      self.message(f"warning: {line}")

  def _draw(self, name: str, line: Line) -> None:
    """Replaces a live line; draws at most every `_REDRAW_SECS`, as a loop may be shorter."""
    assert self._kind is not None
    self._lines[name] = line
    self._live = self._live or self._kind(self._stream)
    now = self._clock()
    due = now - self._drawn_at >= _REDRAW_SECS
    self._drawn_at = now if due else self._drawn_at
    self._live.show([*self._lines.values()], draw=due)

  def _line(self, step: int, now: float, values: Mapping[str, Number]) -> str:
    shown, pace = self._shown(values), self._pace(step, now, values)
    # A narrow terminal cuts the line off, so the loss and the rates come first.
    ordered = [*shown[:1], *pace, *shown[1:]] if self._kind else [*shown, *pace]
    return "  ".join([f"step {step}/{self._total}", *ordered])

  def _pace(self, step: int, now: float, values: Mapping[str, Number]) -> list[str]:
    rates = {unit: values.get(f"{unit}_per_second") for unit in ("steps", "examples")}
    left = self._seconds_left(step, now, values)
    eta = [] if left is None else [f"eta {datetime.timedelta(seconds=round(left))}"]
    return [f"{_rate(rate)} {unit}/s" for unit, rate in rates.items() if rate is not None] + eta

  def _seconds_left(self, step: int, now: float, values: Mapping[str, Number]) -> float | None:
    """From the mean pace since the end of the first loop, which includes evaluations."""
    first_step, first_time = self._first or (step, now)
    if step > first_step and now > first_time:
      return (self._total - step) * (now - first_time) / (step - first_step)
    pace = values.get("steps_per_second", 0.0)
    return (self._total - step) / pace if 0 < pace < math.inf else None

  def _shown(self, values: Mapping[str, Number]) -> list[str]:
    return [named(name, values[name]) for name in self._choice.of(values)]


def _rate(per_second: Number) -> str:
  return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def named(name: str, value: Number) -> str:
  """Formats a metric: "loss 0.2134"; nothing in its name reaches a terminal as a command."""
  return f"{errors.printable(name)} {format_number(value)}"


def format_number(value: Number) -> str:
  """Formats with four decimals, or three digits for small and large: 0.9312, 1.5e-05, 37, nan."""
  if isinstance(value, int):
    return str(value)
  return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"
