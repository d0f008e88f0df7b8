"""Finds the weights of a file that fit a model, and loads them, for `WarmStart`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, suggest
from loopwright.graphs.aliases import Model, Variable
from loopwright.host import bounded
from loopwright.models import models
from loopwright.run_folder import checkpoints, h5, layouts, weight_files
from loopwright.run_folder.layouts import Layout
from loopwright.run_folder.safetensors_files import INDEX, SUFFIX, Renaming, Stored

if TYPE_CHECKING:
  from loopwright.run_folder.warm_start import WarmStart

MATCHED, DIFFERS, EXCLUDED = "matched", "differs", "excluded"
ONLY_MODEL, ONLY_FILE = "only in the model", "only in the file"
SAFETENSORS = (SUFFIX, INDEX)
_LORA = re.compile(r"/lora_\w+_[ab]$")
_HEAD = "lm_head.weight"
"""Of a language model's file, unless its output layer is its embedding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableMatch:
  """Whether one variable matched.

  Attributes:
    name: in the model; or in the file, renamed, if the model has no such variable.
    status: MATCHED, DIFFERS, EXCLUDED, ONLY_MODEL or ONLY_FILE.
    parameters: number of elements.
    here: dtype and shape in the model, or "".
    there: dtype and shape in the file, or "".
  """

  name: str
  status: str
  parameters: int
  here: str = ""
  there: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartReport:
  """The variables that matched and those that did not; `source` is the file."""

  source: str
  rows: Sequence[VariableMatch]

  def count(self, status: str) -> int:
    """Returns the number of variables with a status."""
    return sum(row.status == status for row in self.rows)

  def parameters(self, *statuses: str) -> int:
    """Returns the number of elements of the variables with one of these statuses."""
    return sum(row.parameters for row in self.rows if row.status in statuses)

  def summary(self) -> str:
    """Returns the counts in one line."""
    here = [row for row in self.rows if row.status != ONLY_FILE]
    others = [
      f"{self.count(status)} {told}"
      for status, told in (
        (DIFFERS, "of another shape or dtype"), (ONLY_MODEL, ONLY_MODEL), (EXCLUDED, EXCLUDED),
        (ONLY_FILE, ONLY_FILE),
      )
      if self.count(status)
    ]  # fmt: skip
    return "; ".join(
      [
        f"warm start from {self.source}: {self.count(MATCHED)} of {len(here)} variables, "
        f"{self.parameters(MATCHED):,} of {sum(row.parameters for row in here):,} parameters",
        *others,
      ]
    )

  def table(self) -> str:
    """Returns the summary and one line per variable, those that did not match first."""
    order = (DIFFERS, ONLY_MODEL, ONLY_FILE, EXCLUDED, MATCHED)
    rows = sorted(self.rows, key=lambda row: order.index(row.status))
    width = max((len(row.name) for row in rows), default=0)
    lines = [
      f"{row.status:17}  {row.name:{width}}  {row.here or '-'}"
      + (f"; in the file {row.there or '-'}" if row.here != row.there else "")
      for row in rows
    ]
    return "\n".join([self.summary(), "", *lines]) + "\n"


def load(of: WarmStart, model: Model, beside: Mapping[str, tf.Variable]) -> WarmStartReport:
  """Loads a file into a model, see `WarmStart.load`."""
  source = weight_files.located(of.path)
  remedy = "it is damaged or not a file of weights: give another"
  with contextlib.ExitStack() as stack:
    with bounded.reading(source, remedy):
      stored = stack.enter_context(weight_files.contents(source, of.match))
    own = getattr(model, "weight_names", {}) if source.endswith(SAFETENSORS) else {}
    names = Names(model, beside)
    report, pairs = _matched(of, source, names, _renamed(of, stored, own, names))
    with bounded.reading(source, remedy):
      values = [(variable, found.read()) for variable, found in pairs]
      if own and not of.rename and _HEAD in stored and _HEAD not in own:
        _require_tied(source, stored, own)
  for variable, value in values:
    if variable.dtype.is_floating and np.isnan(value.astype(np.float32)).any():
      raise ConfigError(
        f"WarmStart.path is {source!r}, which has NaN in the value of {variable.name!r}; give "
        "another file, or name the variable in WarmStart.exclude."
      )
  for variable, value in values:
    variable.assign(tf.cast(tf.constant(value), variable.dtype))
  absent = {row.name for row in report.rows if row.status == ONLY_MODEL}
  _add_nothing(model, {id(names.known[name]) for name in absent}, {id(v) for v, _ in values})
  return report


def _add_nothing(model: Model, absent: set[int], loaded: set[int]) -> None:
  """Sets the product that LoRA adds to a loaded weight to 0, if the file does not have it.

  One factor alone: Keras sets both, whose gradients are 0 from then on.
  """
  for layer in models.layers(model):
    if any(id(models.raw(each)) in loaded for each in models.frozen_by_lora(layer)):
      for each in layer.weights:
        of_lora = each.name.startswith("lora_") and each.name.endswith("_b")
        if of_lora and id(models.raw(each)) in absent:
          each.assign(tf.zeros_like(each))


def _require_tied(source: str, stored: Mapping[str, Stored], own: Mapping[str, str]) -> None:
  """Raises a ConfigError if a file has an output layer of its own, which the model lacks."""
  head = stored[_HEAD]
  alike = (each for name, each in stored.items() if name in own and each.shape == head.shape)
  if not any(np.array_equal(each.read(), head.read()) for each in alike):
    raise ConfigError(
      f"{source!r} has {_HEAD!r}, an output layer of its own; the model's is its embedding. Give "
      "WarmStart.rename, to take the other weights alone, or a file without it."
    )


def _renamed(
  of: WarmStart, stored: Mapping[str, Stored], own: Mapping[str, str], names: Names
) -> dict[str, Stored]:
  renaming = Renaming(of.rename or own)
  used = {key for name in stored for key in renaming.fitting(name)}
  for key in of.rename.keys() - used:
    raise ConfigError(
      f"WarmStart.rename has {key!r}, but no name in {of.path!r} begins with it; its "
      f"names are such as {_some(stored)}."
    )
  renamed: dict[str, Stored] = {}
  for name, value in stored.items():
    new, transposed = renaming.of(name)
    if new in renamed:
      raise ConfigError(f"WarmStart.rename gives two variables the name {new!r}; change it.")
    renamed[new] = names.turned(new, value) if transposed else value
  return renamed


def _matched(
  of: WarmStart, source: str, names: Names, stored: Mapping[str, Stored]
) -> tuple[WarmStartReport, list[tuple[tf.Variable, Stored]]]:
  _require_matches(of, names.known)
  found = {key: (name, stored[name]) for name in stored if (key := names.find(name))}
  rows, pairs = [], []
  for name, variable in names.known.items():
    theirs = found.get(name, ("", None))[1]
    status = _status(of, name, variable, theirs)
    rows.append(_row(name, status, variable, theirs))
    if status == MATCHED and theirs is not None:
      pairs.append((variable, theirs))
  used = {name for name, _ in found.values()}
  rows += [_row(name, ONLY_FILE, None, stored[name]) for name in stored if name not in used]
  report = WarmStartReport(source=source, rows=rows)
  _require(of, report, names.known, stored)
  return report, pairs


def _status(of: WarmStart, name: str, variable: tf.Variable, theirs: Stored | None) -> str:
  included = not of.include or any(re.fullmatch(p, name) for p in of.include)
  if not included or any(re.fullmatch(p, name) for p in of.exclude):
    return EXCLUDED
  if theirs is None:
    return ONLY_MODEL
  return MATCHED if _fits(variable, theirs) else DIFFERS


def _require_matches(of: WarmStart, known: Iterable[str]) -> None:
  for option, patterns in (("include", of.include), ("exclude", of.exclude)):
    for pattern in patterns:
      if not any(re.fullmatch(pattern, name) for name in known):
        raise ConfigError(
          f"WarmStart.{option} has {pattern!r}, which matches the whole name of no variable of "
          f"the model; its names are such as {_some(known)}."
        )


def _require(
  of: WarmStart,
  report: WarmStartReport,
  known: Mapping[str, Variable],
  stored: Mapping[str, Stored],
) -> None:
  differing = [row for row in report.rows if row.status == DIFFERS]
  if differing and not report.count(MATCHED):
    first = differing[0]
    raise ConfigError(
      f"WarmStart.path is {of.path!r}, where {first.name!r} is {first.there}; in the model it is "
      f"{first.here}. Give a file of the same shapes and kinds of numbers."
    )
  if not report.count(MATCHED):
    raise ConfigError(
      f"WarmStart.path is {of.path!r}, but none of its variables has the name of one of the "
      f"model's: it has {_some(stored)}, the model has {_some(known)}; map the names with "
      "WarmStart.rename, or give another file."
    )
  lora = [row.name for row in report.rows if row.status == ONLY_FILE and _LORA.search(row.name)]
  if lora and not (of.include or of.exclude):
    raise ConfigError(
      f"WarmStart.path is {of.path!r}, whose {lora[0]!r} changes what its layer computes, and the "
      "model's layer has no LoRA: call enable_lora() in build_model, or take the other weights "
      "alone with WarmStart.include = ['.*']."
    )
  missing = [row for row in report.rows if row.status in (DIFFERS, ONLY_MODEL)]
  if of.strict and missing:
    first, more = missing[0], f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    text = f"is {first.there} in it and {first.here} here" if first.there else "is not in it"
    near = "" if first.there else suggest(first.name, stored)
    raise ConfigError(
      f"WarmStart.strict is True, but {first.name!r} {text}{more}; use WarmStart.exclude for "
      f"what must keep its initial values, or map its name with WarmStart.rename.{near}"
    )


class Names:
  """The weights of a model by name, and by the other names that a file may use for them."""

  def __init__(
    self, model: Model, beside: Mapping[str, tf.Variable] = MappingProxyType({})
  ) -> None:
    """Indexes a model; `known` has each weight by the name that reports use.

    Args:
      model: as `Task.build_model` returns it.
      beside: see `WarmStart.load`.
    """
    root = tf.train.Checkpoint(model=model, untracked=models.untracked(model))
    paths = {
      id(models.raw(variable)): weight_files.path_of(key)
      for key, variable in checkpoints.variables_of(root).items()
    }
    weights = models.weights(model)
    named = [h5.plain(models.name(weight)) for weight in weights]
    counts = collections.Counter(named)
    self.known: dict[str, tf.Variable] = {}
    self._layouts = layouts.layouts(model)
    self._index: dict[str, list[str]] = {}
    by_id: dict[int, str] = {}
    for weight, name in zip(weights, named, strict=True):
      path = paths.get(id(models.raw(weight)), name)
      chosen = name if counts[name] == 1 else path
      by_id[id(models.raw(weight))] = chosen
      self.known[chosen] = models.raw(weight)
      # TensorFlow's own name is in its checkpoints; for some layers it lacks parts of the path.
      for each in {chosen, path, h5.plain(models.raw(weight).name)}:
        self._index.setdefault(each, []).append(chosen)
    for alias, variable in weight_files.numbered(model):
      if id(variable) in by_id:
        self._index.setdefault(alias, []).append(by_id[id(variable)])
    for alias, variable in beside.items():
      name = by_id.setdefault(id(variable), alias)
      self.known[name] = variable
      self._index[alias] = [name]
    for path in [each for each in self._index if "/_" in each]:  # Keras's attribute is "_kernel"
      self._index.setdefault(path.replace("/_", "/"), self._index[path])
    self._own = f"{model.name}/" if models.is_keras(model) else ""
    for name in self.known:  # a model without a name given is "sequential_2"
      self._index.setdefault(name.removeprefix(self._own), [name])

  def find(self, name: str) -> str | None:
    """Returns the name in `known` for a file's `name`; None if there is none, or more than one."""
    found = self._index.get(name, [])
    return found[0] if len(found) == 1 else None

  def turned(self, name: str, stored: Stored) -> Stored:
    """Returns the weight that a file has under a name, PyTorch's axes as they are here.

    Raises:
      ConfigError: the model's weight has more than two axes, and is of no convolution.
    """
    known = self.find(name)
    return stored if known is None else stored.turned(self._layout(known))

  def _layout(self, name: str) -> Layout:
    if layout := self._layouts.get(id(self.known[name])):
      return layout
    raise ConfigError(
      f"the name {name + '.T'!r} asks for PyTorch's axes, but {name!r} has "
      f"{self.known[name].shape.rank} axes and is of no convolution; leave out '.T', and store the "
      "axes as the model has them."
    )

  def in_file(self, own: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Returns name in a file -> value, with PyTorch's axes if its name here ends in ".T".

    Args:
      own: the model's `weight_names`: names in the file -> names in the model, as for
        `WarmStart.rename`. A variable without one has the name that reports use, without the
        model's own.
    """
    renaming = Renaming(own).inverse()
    named = {name: (name.removeprefix(self._own), False) for name in self.known}
    for alias, found in self._index.items():
      if len(found) == 1 and renaming.fitting(alias):
        named[found[0]] = renaming.of(alias)
    return {
      new: self._layout(name).to_torch(self.known[name].numpy())
      if turned
      else self.known[name].numpy()
      for name, (new, turned) in named.items()
    }


def _fits(variable: tf.Variable, stored: Stored) -> bool:
  """Whether shape and dtype are the same; any float dtype fits any other."""
  floats = variable.dtype.is_floating and tf.as_dtype(stored.dtype).is_floating
  same = floats or variable.dtype.name == stored.dtype
  return same and tuple(variable.shape) == stored.shape


def _row(
  name: str, status: str, variable: tf.Variable | None, stored: Stored | None
) -> VariableMatch:
  shape = tuple(variable.shape) if variable is not None else stored.shape if stored else ()
  here = "" if variable is None else f"{variable.dtype.name} {variable.shape.as_list()}"
  there = "" if stored is None else str(stored)
  return VariableMatch(
    name=name, status=status, parameters=math.prod(shape), here=here, there=there
  )


def _some(names: Iterable[str]) -> str:
  first = sorted(names)[:2]
  return " and ".join(map(repr, first)) or "none at all"
