"""How an option is declared: once, in the signature of what takes it.

    def step(*, rate: Annotated[float, "metres per step.", asked("counts from there on")] = 0.5):

Its type and default are those of the parameter. Help, docs, checks and the rules of a run that goes
on read the rest, `declared(step)["rate"]`: its meaning (with the unit; a docstring may have it
instead), whether it may change, a check of values other than None, and what to do `Instead` if a
config cannot bind it. What holds for all options of a class or function stands on it, as
`may_change`.
"""

import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from loopwright.errors import require_integer, require_positive, unknown

_OWN, _GROUP = "_rule_of_options", "_group_of_options"
Target = TypeVar("Target", bound=Callable[..., Any])


class Rule(NamedTuple):
  """Whether an option may change when a run goes on.

  Attributes:
    may: "yes", without a question: what the run learns stays the same; "asked": with
      --accept_changes; "no": it would have no effect, or a wrong one.
    says: what happens from there on; for "no", why not.
  """

  may: Literal["yes", "asked", "no"]
  says: str


free = functools.partial(Rule, "yes")
asked = functools.partial(Rule, "asked")
fixed = functools.partial(Rule, "no")

COUNTS = asked("counts from there on")
COMPUTES_THERE = free("computes there")
COMPUTES = "computes with it; the same numbers up to rounding"
AT_THE_START = fixed("it counts only when the run begins")
SCHEDULE = asked("the rate is that of the new schedule at the step of the run")


class Check(functools.partial[object]):
  """A function of an option's name and its value, not None, that raises a ConfigError."""


class Instead(NamedTuple):
  """What to do instead of binding an option in a config."""

  says: str


@dataclasses.dataclass(frozen=True)
class Option:
  """What is declared of an option beside its type and default."""

  meaning: str = ""
  may_change: Rule | None = None
  check: Check | None = None
  instead: Instead | None = None


COUNT = Check(require_integer, at_least=1)
SEED = Check(require_integer, at_least=0, at_most=2**31 - 1)
SECONDS = Check(require_positive, unit="seconds")


def may_change(rule: Rule) -> Callable[[Target], Target]:
  """Decorates a class or function that a config can name: its options have this rule.

  Those of subclasses do not; for these too, set the attribute `may_change` of the class.
  """

  def decorate(target: Target) -> Target:
    setattr(target, _OWN, rule)
    return target

  return decorate


def signature(target: Callable[..., Any]) -> inspect.Signature:
  """Returns a signature with annotations as types, without what is declared beside them."""
  found = _signature(target)
  plain = [p.replace(annotation=_plain(p.annotation)) for p in found.parameters.values()]
  return found.replace(parameters=plain)


def declared(target: Callable[..., Any]) -> dict[str, Option]:
  """Returns what is declared of the options of a class or function, by name."""
  return {
    name: _option(parameter.annotation.__metadata__)
    for name, parameter in _signature(_group(target)).parameters.items()
    if _is_declared(parameter.annotation)
  }


def either_of(target: Callable[..., Any]) -> list[Sequence[str]]:
  """Returns groups of options, of each of which exactly one must be set."""
  group = _group(target)
  kinds = () if group is target else getattr(group, "__mro__", ())
  return [vars(each)["either"] for each in kinds if "either" in vars(each)]


def rule_of(target: Callable[..., Any], parameter: str) -> Rule | None:
  """Returns the rule of an option: its own, or that of what takes it, or of what that makes.

  None if nothing says it, as for most code of users.
  """
  option = declared(target).get(parameter)
  if option is not None and option.may_change is not None:
    return option.may_change
  made = target if inspect.isclass(target) else signature(target).return_annotation
  found = getattr(target, "__dict__", {}).get(_OWN) or getattr(made, "may_change", None)
  return found if isinstance(found, Rule) else None


def require(name: str, value: Any, annotation: Any, option: Option) -> None:
  """Raises a ConfigError if a value is none of its type's choices, or fails the option's check."""
  plain = _plain(annotation)
  if typing.get_origin(plain) is Literal and value not in (choices := typing.get_args(plain)):
    raise unknown(name, value, choices)
  if option.check is not None and value is not None:
    option.check(name, value)


def take(function: Callable[..., Any], group: Callable[..., Any]) -> None:
  """Gives a function the signature of a class, with "Args:" before "Returns:" in its docstring."""
  wrap = textwrap.TextWrapper(
    100, initial_indent=" " * 4, subsequent_indent=" " * 6, break_on_hyphens=False
  )
  said = [wrap.fill(f"{name}: {option.meaning}") for name, option in declared(group).items()]
  args = "\n".join(["\n  Args:", *said, "\n  Returns:"])
  function.__doc__ = (function.__doc__ or "").replace("\n  Returns:", args, 1)
  returns = inspect.signature(function).return_annotation
  taken = signature(group).replace(return_annotation=returns)
  vars(function).update({"__signature__": taken, _GROUP: group})
  vars(function).pop("__wrapped__", None)  # gin would take the parameters of that
  vars(group)["__init__"].__qualname__ = function.__name__  # in errors of a wrong call


def _group(target: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the class whose options a function takes; itself for all others."""
  group: Callable[..., Any] = getattr(target, "__dict__", {}).get(_GROUP, target)
  return group


@functools.cache
def _signature(target: Callable[..., Any]) -> inspect.Signature:
  try:
    return inspect.signature(target, eval_str=True)
  except Exception:  # An annotation that exists only for type checkers.
    return inspect.signature(target)


def _is_declared(annotation: Any) -> bool:
  """Whether it is more than a type; a string alone says which values the type has."""
  metadata = getattr(annotation, "__metadata__", ())
  return any(isinstance(each, Rule | Check | Instead) for each in metadata)


def _plain(annotation: Any) -> Any:
  return annotation.__origin__ if _is_declared(annotation) else annotation


def _option(metadata: Sequence[Any]) -> Option:
  kinds = {"may_change": Rule, "check": Check, "instead": Instead, "meaning": str}
  found: dict[str, Any] = {}
  for each in metadata:
    found |= {name: each for name, kind in kinds.items() if isinstance(each, kind)}
  return Option(**found)
