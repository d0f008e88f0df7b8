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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from loopwright.errors import require_integer, require_positive, unknown

_OWN = "_rule_of_options"
Target = TypeVar("Target", bound=Callable[..., Any])
Check = Callable[[str, Any], object]
"""Gets an option's name and its value, which is not None; raises a ConfigError if it is wrong."""


class Rule(NamedTuple):
  """Whether an option may change when a run goes on.

  Attributes:
    may: "yes", without a question: what the run learns stays the same; "asked": with
      --accept_changes; "no": it would have no effect, or a wrong one.
    says: what happens from there on; for "no", why not.
  """

  may: Literal["yes", "asked", "no"]
  says: str


def free(says: str) -> Rule:
  """Returns the rule of what may change without a question."""
  return Rule("yes", says)


def asked(says: str) -> Rule:
  """Returns the rule of what may change with --accept_changes."""
  return Rule("asked", says)


def fixed(why: str) -> Rule:
  """Returns the rule of what must not change."""
  return Rule("no", why)


COUNTS = asked("counts from there on")
COMPUTES_THERE = free("computes there")
COMPUTES = "computes with it; the same numbers up to rounding"
AT_THE_START = fixed("it counts only when the run begins")
SCHEDULE = asked("the rate is that of the new schedule at the step of the run")


class Instead(str):
  """What to do instead of binding an option in a config."""


@dataclasses.dataclass(frozen=True)
class Option:
  """What is declared of an option beside its type and default."""

  meaning: str = ""
  may_change: Rule | None = None
  check: Check | None = None
  instead: str = ""


def at_least(least: int, most: int = 2**63 - 1) -> Check:
  """Returns the check of a whole number."""
  return functools.partial(require_integer, at_least=least, at_most=most)


COUNT = at_least(1)
SECONDS: Check = functools.partial(require_positive, unit="seconds")


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
  source = getattr(target, "options", target)
  return {
    name: _option(parameter.annotation.__metadata__)
    for name, parameter in _signature(source).parameters.items()
    if _is_declared(parameter.annotation)
  }


def either_of(target: Callable[..., Any]) -> Sequence[str]:
  """Returns the options of which exactly one must be set, if there are such."""
  names: Sequence[str] = getattr(getattr(target, "options", target), "either", ())
  return names


def rule_of(target: Callable[..., Any], parameter: str) -> Rule | None:
  """Returns the rule of an option: its own, or that of what takes it, or of what that makes.

  None if nothing says it, as for most code of users.
  """
  option = declared(target).get(parameter)
  if option is not None and option.may_change is not None:
    return option.may_change
  made = target if inspect.isclass(target) else signature(target).return_annotation
  found: Rule | None = vars(target).get(_OWN) or getattr(made, "may_change", None)
  return found


def require(name: str, value: Any, annotation: Any, option: Option) -> None:
  """Raises a ConfigError if a value is none of its type's choices, or fails the option's check."""
  plain = _plain(annotation)
  if typing.get_origin(plain) is Literal and value not in (choices := typing.get_args(plain)):
    raise unknown(name, value, choices)
  if option.check is not None and value is not None:
    option.check(name, value)


def documented(doc: str, options: Mapping[str, Option]) -> str:
  """Returns a docstring with the block "Args:" of some options before the block "Returns:"."""
  wrap = functools.partial(textwrap.fill, initial_indent=" " * 4, subsequent_indent=" " * 6)
  said = [wrap(f"{name}: {option.meaning}", 100) for name, option in options.items()]
  return doc.replace("\n  Returns:", "\n".join(["\n  Args:", *said, "\n  Returns:"]), 1)


@functools.cache
def _signature(target: Callable[..., Any]) -> inspect.Signature:
  try:
    return inspect.signature(target, eval_str=True)
  except Exception:  # An annotation that exists only for type checkers.
    return inspect.signature(target)


def _is_declared(annotation: Any) -> bool:
  """Whether it is more than a type; a string alone says which values the type has."""
  metadata = getattr(annotation, "__metadata__", ())
  return any(isinstance(each, Rule | Instead) or callable(each) for each in metadata)


def _plain(annotation: Any) -> Any:
  return annotation.__origin__ if _is_declared(annotation) else annotation


def _option(metadata: Sequence[Any]) -> Option:
  found: dict[str, Any] = {}
  for each in metadata:
    kinds = {"may_change": Rule, "instead": Instead, "meaning": str}
    name = next((name for name, kind in kinds.items() if isinstance(each, kind)), "check")
    found[name] = each
  return Option(**found)
