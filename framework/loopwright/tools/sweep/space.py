"""What varies in a sweep: --vary -> dimensions -> bindings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loopwright.configurables import reading
from loopwright.errors import ConfigError, shown
from loopwright.host import redaction

if TYPE_CHECKING:
  import optuna

  from loopwright.configurables.checks import Examination

_VARY = re.compile(r"\s*([^\s=,]+(?:\s*,\s*[^\s=,]+)*)\s*=\s*(\S.*?)\s*", re.DOTALL)
_RANGE = re.compile(r"(uniform|log|int|log_int)\(([^()]*)\)")
_FORMS = "a list such as [1, 2], or uniform(low, high), log(low, high), int(low, high) or "
_FORMS += "log_int(low, high)"


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


def read(vary: Sequence[str]) -> list[Dimension]:
  """Returns what varies, references last: they may replace what uses another dimension (host).

  Raises:
    ConfigError: nothing varies, or not readable; or a name twice.
  """
  if not vary:
    raise ConfigError(f"nothing varies; add --vary='NAME = ...' with {_FORMS}.")
  found = [_dimension(line) for line in vary]
  names = [name for dimension in found for name in dimension.name.split(", ")]
  if twice := next((name for name in names if names.count(name) > 1), None):
    raise ConfigError(f"--vary has {twice} twice; remove one.")
  return sorted(found, key=lambda each: any("@" in value for value in each.values))


def bindings(values: Mapping[str, str]) -> list[str]:
  """Returns the bindings of a trial, as after --gin_param; "a, b" gets the parts of "(1, 2)"."""
  found: list[str] = []
  for name, value in values.items():
    names = name.split(", ")
    parts = [value] if len(names) == 1 else map(repr, _value(f"{name} = {value}", value))
    found += [f"{each} = {part}" for each, part in zip(names, parts, strict=True)]
  return found


def checked(
  files: Sequence[str], params: Sequence[str], dimensions: Sequence[Dimension]
) -> dict[str, str]:
  """Checks a config with each value of a list and both ends of each range (host).

  Returns name -> value as gin writes it, without what varies.

  Raises:
    ConfigError: the first mistake.
  """
  from loopwright.configurables import recorded

  first = {each.name: each.probes()[0] for each in dimensions}
  examination = _right(files, params, bindings(first))
  for dimension in dimensions:
    for value in dimension.probes()[1:]:
      _right(files, params, bindings(first | {dimension.name: value}))
  found = recorded({str(each): each.value for each in examination.config.bindings})
  varied = {name for each in dimensions for name in each.name.split(", ")}
  return {name: repr(value) for name, value in found.items() if name not in varied}


def _right(files: Sequence[str], params: Sequence[str], varied: Sequence[str]) -> Examination:
  from loopwright.configurables import examine

  examination = examine(files, [*params, *varied])
  for mistake in examination.mistakes:
    text = str(mistake.error)
    for each in varied:
      text = text.replace(f"--gin_param {shown(each)}", f"--vary: {each}", 1)
    raise ConfigError(text)
  return examination


def _dimension(line: str) -> Dimension:
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
  if not (kind := _RANGE.fullmatch(text)):
    raise ConfigError(f"--vary {line!r}: {text} is neither a list nor a range; write {_FORMS}.")
  whole, log = kind[1].endswith("int"), kind[1].startswith("log")
  try:
    low, high = map(int if whole else float, kind[2].split(","))
  except ValueError:
    low = high = math.nan
  if not -math.inf < low < high < math.inf or (log and low <= 0):
    needs = f"two {'whole ' * whole}numbers, low < high{', above 0' * log}"
    raise ConfigError(f"--vary {line!r}: {kind[1]}(low, high) needs {needs}.")
  return Dimension(name, (), low, high, log)


def _values(line: str, text: str, count: int) -> Iterator[str]:
  values = _value(line, text)
  if not isinstance(values, list | tuple) or not values:
    raise ConfigError(f"--vary {line!r} has no values; write {_FORMS}.")
  for value in values if count > 1 else ():
    if not isinstance(value, list | tuple) or len(value) != count:
      raise ConfigError(f"--vary {line!r}: {value!r} must be {count} values: (1, 2).")
  yield from dict.fromkeys(map(repr, values))


def _value(line: str, text: str) -> Any:
  try:
    return reading.read([], [f"values = {text}"]).bindings[0].value
  except ConfigError as error:
    told = str(error).replace(f"--gin_param {shown(f'values = {text}')}", f"--vary {shown(line)}")
    raise ConfigError(told) from None
