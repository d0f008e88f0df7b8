"""Whether the splits of a task agree in what each of their sources numbers or infers by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from loopwright.errors import ConfigError
from loopwright.inputs import fingerprint
from loopwright.inputs.sources import Source

_ROWS = 64
Names: TypeAlias = Mapping[str, Sequence[str]]
Rows: TypeAlias = Mapping[str, np.ndarray]


def require_agreement(train: Any, other: Any, where: str, trace: Callable[[], object]) -> None:
  """Raises unless the evaluation can mean what the training does (host).

  Where features differ in names, kinds or shapes, it is traced now, as it may do without.

  Args:
    train, other: the main source of training, and that of an evaluation set.
    where: what an error calls the latter.
    trace: traces the evaluation.

  Raises:
    ConfigError: the same number means another class, or one split has whole numbers and the other
      has fractions.
    Exception: what the trace of the evaluation raises.
  """
  require_names(train.numbered, other.numbered, "source('train')", where)
  if isinstance(train, Source) and isinstance(other, Source):
    _require_kinds(_first_rows(train), _first_rows(other), where)
  if train.feature_kinds() != other.feature_kinds():
    trace()


def require_names(one: Names, other: Names, where: str, there: str) -> None:
  """Raises a ConfigError if two sources number the same names in another order.

  Without a common name, the numbers have nothing to do with one another, as those of a folder of
  pictures that nobody has labelled.
  """
  for feature in one.keys() & other.keys():
    names, others = [*one[feature]], [*other[feature]]
    pairs = zip(others, [*names, *[None] * len(others)], strict=False)
    wrong = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    if wrong and {*names} & {*others}:
      number, found, first = wrong[0]
      raise ConfigError(
        f"{feature!r} {number} is {found!r} in {there}, which numbers {_some(others)}, but "
        f"{'nothing' if first is None else repr(first)} in {where}, which numbers {_some(names)}; "
        "give both the same names in the same order, such as class_names."
      )


def _require_kinds(one: Rows, other: Rows, where: str) -> None:
  """Raises a ConfigError if a feature has whole numbers in one split and fractions in the other."""
  for name in one.keys() & other.keys():
    pair = one[name], other[name]
    whole = any(value.dtype.kind in "iu" for value in pair) and pair[0].ndim == pair[1].ndim
    for value in pair if whole else ():
      if value.dtype.kind == "f" and (parts := value[value % 1 != 0]).size:  # of NaN too
        raise ConfigError(
          f"feature {name!r} is {pair[0].dtype} in source('train') but {pair[1].dtype} in {where}, "
          f"where one has {parts[0]:.4g}; give both the same dtype and scale (astype)."
        )


def _first_rows(source: Source) -> Rows:
  return fingerprint.fetched(source, np.arange(min(_ROWS, source.num_examples)))


def _some(names: Sequence[str]) -> str:
  return ", ".join([*map(repr, names[:6]), *["..."] * (len(names) > 6)])
