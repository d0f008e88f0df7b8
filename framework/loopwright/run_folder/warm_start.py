"""Warm start: initial weights from a run's checkpoint or a Keras file, matched by name.

docs/transfer-learning.md shows its use.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from loopwright.errors import ConfigError, unknown
from loopwright.graphs.aliases import Model
from loopwright.models import models
from loopwright.options.declaration import AT_THE_START

if TYPE_CHECKING:
  from loopwright.run_folder.matching import WarmStartReport
  from loopwright.trainer import Trainer


class WarmStart:
  """Weights for a new run to begin with; a run that continues from its checkpoint ignores them."""

  may_change = AT_THE_START

  def __init__(
    self,
    *,
    path: str,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    match: Literal["name", "path"] = "name",
    strict: bool = False,
  ) -> None:
    """Keeps the arguments; the file is read when the run begins.

    Args:
      path: a run folder (its newest checkpoint), its `checkpoints` or `best`, a checkpoint without
        suffix; a Keras file: .keras or .weights.h5 of Keras 3, or .h5 of tf_keras; a .safetensors
        file, the .safetensors.index.json of several, or a folder with model.safetensors.
      include: regular expressions for whole names of the model's variables; only these are taken,
        () for all.
      exclude: the same, for variables that keep their initial values, such as ['head/.*'].
      rename: prefix of names in the file -> prefix in the model, such as
        {'encoder/': 'backbone/'}; the longest matching prefix counts. Or whole names, if "{}"
        stands for a part of both, or if the matrix must be transposed, as those of PyTorch:
        {'layers.{}.up.weight': 'block_{}/up/kernel.T'}. None for the model's own `weight_names`,
        if it has them and the file is safetensors, else for no change.
      match: "name", such as 'conv1/kernel'; or "path", for checkpoints only: the place inside the
        model, which is also used for names that are not unique.
      strict: raise an error if a variable that is not excluded has no match.

    Raises:
      ConfigError: an argument has the wrong type or value.
    """
    for option, patterns in (("include", include), ("exclude", exclude)):
      _check_patterns(option, patterns)
    if match not in ("name", "path"):
      raise unknown("WarmStart.match", match, ("name", "path"))
    self.path, self.strict = path, strict
    self.include, self.exclude, self.match = tuple(include), tuple(exclude), match
    self.rename = dict(rename or {})

  def digest(self) -> str:
    """Returns a short digest of the file, which all processes of a run must share (host).

    Raises:
      ConfigError: there is no such file.
    """
    from loopwright.run_folder import weight_files

    content = hashlib.sha256()
    for file in weight_files.parts(weight_files.located(self.path)):
      with tf.io.gfile.GFile(file, "rb") as opened:
        while block := opened.read(2**20):
          content.update(block)
    return content.hexdigest()[:12]

  def apply(self, trainer: Trainer) -> WarmStartReport:
    """Loads the file into a trainer's model; optimizers and averages begin there (host).

    Call it before the first step, outside of any scope. Raises what `load` raises.
    """
    with trainer.strategy.scope():
      report = self.load(trainer.task.model, beside=_trained_beside(trainer))
      for optimizer in trainer.parts.optimizers.values():
        optimizer.restart()
    if trainer.parts.ema is not None:
      trainer.parts.ema.restart()
    return report

  def load(
    self, model: Model, *, beside: Mapping[str, tf.Variable] = MappingProxyType({})
  ) -> WarmStartReport:
    """Loads the file into a model, on every replica; changes nothing if it raises (host).

    Call it in the `strategy.scope()` in which the model was built, for example in
    `Task.build_model`.

    Args:
      model: as `Task.build_model` returns it, with its variables built.
      beside: key in a checkpoint -> variable that is trained and is not in the model.

    Raises:
      ConfigError: the file is missing or damaged; nothing matches; a pattern or a prefix matches
        nothing; with `strict`, a variable has no match.
    """
    from loopwright.run_folder import matching  # reads checkpoints and both formats of Keras

    return matching.load(self, model, beside)


def _trained_beside(trainer: Trainer) -> dict[str, tf.Variable]:
  """Returns key in a checkpoint, of this version or an earlier one -> trained variable."""
  of_model = {id(models.raw(each)) for each in models.all_variables(trainer.task.model)}
  optimizers = trainer.parts.optimizers.values()
  trained = {id(models.raw(each)) for one in optimizers for each in one.variables} - of_model
  if not trained:
    return {}
  from loopwright.models.reachable import named_before, reachable

  named = [(f"state/{each.name}", each) for each in reachable(trainer.task)]
  before = named_before(trainer.task).items()
  named += [(f"task/{name}", places[0]) for name, places in before if len(places) == 1]
  found = [(key, models.raw(place.variable)) for key, place in named]
  return {key: raw for key, raw in found if id(raw) in trained}


def _check_patterns(option: str, patterns: Any) -> None:
  if isinstance(patterns, str) or not isinstance(patterns, Sequence):
    raise ConfigError(f"WarmStart.{option} is {patterns!r}; it must be a list such as ['head/.*'].")
  for pattern in patterns:
    try:
      re.compile(pattern)
    except (re.error, TypeError) as error:
      raise ConfigError(
        f"WarmStart.{option} has {pattern!r}, which is not a regular expression ({error}); fix it."
      ) from error
