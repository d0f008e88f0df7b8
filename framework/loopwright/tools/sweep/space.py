"""What varies in a sweep: --vary -> dimensions -> bindings."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from loopwright.configurables import reading
from loopwright.errors import ConfigError, shown
from loopwright.host import redaction
from loopwright.run_folder.folders import direction

if TYPE_CHECKING:
  import optuna

  from loopwright.configurables.checks import Examination

GOALS = ("BestCheckpoint", "EarlyStopping", "Export")
"""Actions with a metric and a mode."""
_VARY = re.compile(r"\s*([^\s=,]+(?:\s*,\s*[^\s=,]+)*)\s*=\s*(\S.*?)\s*", re.DOTALL)
_RANGE = re.compile(r"(uniform|log|int|log_int)\(([^()]*)\)")
_FORMS = "a list such as [1, 2], or uniform(low, high), log(low, high), int(low, high) or "
_FORMS += "log_int(low, high)"
_MOST_VALUES = 1000
Result = TypeVar("Result")


class Goal(NamedTuple):
  """A metric of the evaluations, and whether more of it is better."""

  metric: str
  maximize: bool


class Dimension(NamedTuple):
  """A binding that varies.

  Attributes:
    name: what the config writes before "="; of several that vary together "a, b".
    values: as the config writes them; empty for a range.
    low, high: the ends of a range, both included; ints for whole numbers.
    log: whether the logarithm is uniform.
  """

  name: str
  values: tuple[str, ...]
  low: float = 0.0
  high: float = 0.0
  log: bool = False

  def __str__(self) -> str:
    """Returns what is on the right of "=" in --vary."""
    if self.values:
      return f"[{', '.join(self.values)}]"
    whole = isinstance(self.low, int)
    kind = ("log_int" if self.log else "int") if whole else ("log" if self.log else "uniform")
    return f"{kind}({self.low!r}, {self.high!r})"

  @property
  def names(self) -> list[str]:
    """Its bindings: one, or those that vary together."""
    return self.name.split(", ")

  def chosen(self, trial: optuna.Trial) -> str:
    """Returns the value of a trial as the config writes it; a new trial gets one."""
    if self.values:
      return str(trial.suggest_categorical(self.name, self.values))
    if isinstance(self.low, int) and isinstance(self.high, int):
      return repr(trial.suggest_int(self.name, self.low, self.high, log=self.log))
    return repr(trial.suggest_float(self.name, self.low, self.high, log=self.log))

  def probes(self) -> Sequence[str]:
    """Returns the values to check: all of a list, the ends of a range."""
    return self.values or (repr(self.low), repr(self.high))


class Facts(NamedTuple):
  """What the check of a config tells.

  Attributes:
    bindings: name -> value as gin writes it, without what varies.
    goal: of the config's actions; None if they have none.
  """

  bindings: dict[str, str]
  goal: Goal | None


def read(vary: Sequence[str], *, listed: bool) -> list[Dimension]:
  """Returns what varies, references last: they may replace what uses another dimension (host).

  Args:
    vary: the values of --vary.
    listed: ranges become lists, as a grid needs it.

  Raises:
    ConfigError: nothing varies, or not readable; or a name twice.
  """
  if not vary:
    raise ConfigError(f"nothing varies; add --vary='NAME = ...' with {_FORMS}.")
  found, names = dict[str, Dimension](), set[str]()
  for line in vary:
    dimension = _dimension(line, listed=listed)
    for name in dimension.names:
      if name in names:
        raise ConfigError(f"--vary has {name} twice; remove one.")
      names.add(name)
    found[dimension.name] = dimension
  return sorted(found.values(), key=lambda each: any("@" in value for value in each.values))


def bindings(values: Mapping[str, str]) -> list[str]:
  """Returns the bindings of a trial, as after --gin_param; "a, b" gets the parts of "(1, 2)"."""
  found: list[str] = []
  for name, value in values.items():
    names = name.split(", ")
    parts = [value] if len(names) == 1 else map(repr, _value(f"{name} = {value}", value))
    found += [f"{each} = {part}" for each, part in zip(names, parts, strict=True)]
  return found


def in_another_process(function: Callable[..., Result], *arguments: Any) -> Result:
  """Returns what a function returns in a forked process, which imports TensorFlow in our place."""
  if "tensorflow" in sys.modules:
    return function(*arguments)
  context = multiprocessing.get_context("fork")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
    return pool.submit(function, *arguments).result()


def checked(files: Sequence[str], params: Sequence[str], dimensions: Sequence[Dimension]) -> Facts:
  """Checks a config with each value of a list and both ends of each range (host).

  Raises:
    ConfigError: the first mistake.
  """
  first = {each.name: each.probes()[0] for each in dimensions}
  examination = _right(files, params, bindings(first))
  for dimension in dimensions:
    for value in dimension.probes()[1:]:
      _right(files, params, bindings(first | {dimension.name: value}))
  from loopwright.configurables import recorded

  found = recorded({str(each): each.value for each in examination.config.bindings})
  kept = {name: repr(value) for name, value in found.items()}
  varied = {name for each in dimensions for name in each.names}
  return Facts({name: kept[name] for name in kept if name not in varied}, _goal(examination))


def _right(files: Sequence[str], params: Sequence[str], varied: Sequence[str]) -> Examination:
  from loopwright.configurables import examine

  examination = examine(files, [*params, *varied])
  for mistake in examination.mistakes:
    text = str(mistake.error)
    for each in varied:
      text = text.replace(f"--gin_param {shown(each)}", f"--vary: {each}", 1)
    raise ConfigError(text)
  return examination


def _goal(examination: Examination) -> Goal | None:
  from loopwright.configurables import table

  graph = examination.graph
  for use in sorted(graph.uses, key=lambda use: GOALS.index(use.name) if use.name in GOALS else 9):
    if use.name in GOALS:
      known = {name: each.default for name, each in table.parameters(use.name).items()}
      known |= graph.values(use.scope, use.name)
      metric = str(known["metric"])
      return Goal(metric, (known["mode"] or direction(metric)) == "max")
  return None


def _dimension(line: str, *, listed: bool) -> Dimension:
  found = _VARY.fullmatch(line)
  if not found:
    raise ConfigError(f"--vary {line!r} is not NAME = ...; write {_FORMS} after the '='.")
  names, text = re.split(r"\s*,\s*", found[1]), found[2]
  if secret := next(filter(redaction.is_secret, names), ""):
    raise ConfigError(f"--vary has {secret}, a secret, which a study would show; bind it instead.")
  name = ", ".join(names)
  if text[0] in "[(":
    return Dimension(name, tuple(_values(line, text, len(names))))
  if len(names) > 1:
    raise ConfigError(f"--vary {line!r}: what varies together needs a list: [(1, 2), (3, 4)].")
  kind = _RANGE.fullmatch(text)
  if not kind:
    raise ConfigError(f"--vary {line!r}: {text} is neither a list nor a range; write {_FORMS}.")
  return _range(line, name, kind[1], kind[2], listed=listed)


def _values(line: str, text: str, count: int) -> Iterator[str]:
  values = _value(line, text)
  if not isinstance(values, list | tuple) or not values:
    raise ConfigError(f"--vary {line!r} has no values; write {_FORMS}.")
  for value in values if count > 1 else ():
    if not isinstance(value, list | tuple) or len(value) != count:
      raise ConfigError(f"--vary {line!r}: {value!r} must be {count} values: (1, 2).")
  yield from dict.fromkeys(map(repr, values))


def _value(line: str, text: str) -> Any:
  """Returns a value as gin reads it; an error names the line."""
  try:
    return reading.read([], [f"values = {text}"]).bindings[0].value
  except ConfigError as error:
    told = str(error).replace(f"--gin_param {shown(f'values = {text}')}", f"--vary {shown(line)}")
    raise ConfigError(told) from None


def _range(line: str, name: str, kind: str, text: str, *, listed: bool) -> Dimension:
  whole, log = kind.endswith("int"), kind.startswith("log")
  numbers = [_number(line, each, whole=whole) for each in text.split(",")]
  low, high = numbers[0], numbers[-1] if len(numbers) < 2 else numbers[1]
  if len(numbers) not in (2, 3) or not low < high or (log and low <= 0):
    above = ", above 0" if log else ""
    raise ConfigError(f"--vary {line!r}: {kind}(low, high) needs two numbers, low < high{above}.")
  dimension = Dimension(name, (), low, high, log)
  if len(numbers) == 2 and not listed:
    return dimension
  if len(numbers) == 2 and (not whole or log or high - low >= _MOST_VALUES):
    raise ConfigError(
      f"--vary {line!r}: a grid needs the number of values; write {str(dimension)[:-1]}, 5)."
    )
  count = numbers[2] if len(numbers) == 3 else high - low + 1
  if count != int(count) or not 2 <= count <= _MOST_VALUES:
    raise ConfigError(
      f"--vary {line!r}: the third number is {count}; it is the number of values, a whole number "
      f"from 2 to {_MOST_VALUES}."
    )
  return Dimension(name, tuple(dict.fromkeys(_spaced(dimension, int(count)))))


def _number(line: str, text: str, *, whole: bool) -> float:
  try:
    number = int(text) if whole else float(text)
  except ValueError:
    number = math.nan
  if not math.isfinite(number):
    kind = "whole number" if whole else "number"
    raise ConfigError(f"--vary {line!r}: {text.strip()!r} is not a {kind}; write {_FORMS}.")
  return number


def _spaced(of: Dimension, count: int) -> Iterator[str]:
  """Yields `count` values from one end to the other, evenly, or evenly in the logarithm."""
  for index in range(count):
    part = index / (count - 1)
    value = of.low * (of.high / of.low) ** part if of.log else of.low + (of.high - of.low) * part
    value = of.high if index == count - 1 else value
    yield repr(round(value)) if isinstance(of.low, int) else repr(float(f"{value:.12g}"))
