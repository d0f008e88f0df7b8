"""Several training sources at once, such as labelled and unlabelled examples.

    def source(self, split):
      ...
      return Sources(labelled, unlabelled=Part(source=unlabelled, ratio=7))

A batch has the first source's examples under plain names. With each of its rows come `ratio`
examples of every further part, under "<part>/<name>": "unlabelled/x" is [n, 7, ...]. So a strategy,
a worker and a micro-batch get whole rows, whatever they are made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from loopwright.errors import ConfigError, kind, require_integer, unknown
from loopwright.graphs.aliases import Batch
from loopwright.graphs.autograph import as_written
from loopwright.inputs import fingerprint
from loopwright.inputs.ordering import seed_of_part
from loopwright.inputs.plan import Plan, Shard, Start, batches
from loopwright.inputs.sources import Readable, Source, check_source

if TYPE_CHECKING:
  from loopwright.inputs.streams import StreamSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A further training source, with an order and epochs of its own.

  Attributes:
    source: what to read.
    ratio: its examples for each example of the first source, at least 1.
  """

  source: Source | StreamSource
  ratio: int = 1

  def __post_init__(self) -> None:
    """Raises a ConfigError if the source is none, or the ratio not a whole number above 0."""
    check_source(self.source)
    require_integer("Part.ratio", self.ratio, at_least=1)


class Sources(Readable):
  """Several training sources; `Task.source("train")` may return it.

  Attributes:
    main: the source whose examples the batch size and the epochs count.
    parts: name -> `Part`, the others.
  """

  def __init__(self, main: Source | StreamSource, /, **parts: Part) -> None:
    """Raises a ConfigError if one is no source, or a part's name is not a text without "/"."""
    check_source(main)
    if not parts:
      raise ConfigError(
        "Sources has one source; return it alone, or add a part: "
        "Sources(labelled, unlabelled=Part(source=..., ratio=7))."
      )
    for name, part in parts.items():
      if "/" in name or not isinstance(part, Part):
        raise ConfigError(
          f"Sources has the part {name!r}, {kind(part)}; it must be a Part(source=..., ratio=...) "
          "under a name without '/'."
        )
    self.main, self.parts = main, parts

  def main_source(self) -> Source | StreamSource:
    """See `Readable.main_source`."""
    return self.main

  def training_batches(self, plan: Plan, start: Start, shard: Shard | None) -> tf.data.Dataset:
    """See `Readable.training_batches`."""
    elements, read = self.main.training_elements(plan, start)
    plans = {name: _plan_of(part, plan) for name, part in self.parts.items()}
    readings = {
      name: part.source.training_elements(
        plans[name],
        Start(seed_of_part(start.seed, name), start.position * part.ratio, start.shuffle),
      )
      for name, part in self.parts.items()
    }

    def make(main: Any, others: dict[str, Any]) -> Batch:
      parts = {}
      for name, element in others.items():
        features, ids, seeds, _ = readings[name][1](*element)
        examples = plans[name].numbered(features, ids)
        if plan.preprocess:
          examples["seed"] = seeds
        rows = [len(plan.rows), self.parts[name].ratio]
        parts[name] = {
          key: tf.reshape(value, [*rows, *value.shape[1:]]) for key, value in examples.items()
        }
      return plan.completed(*read(*main), parts)

    others = {name: elements for name, (elements, _) in readings.items()}
    zipped = tf.data.Dataset.zip((elements, others))
    given = [self.main, *(part.source for part in self.parts.values())]
    rewrite = all(source.rewrites for source in given)
    return batches(zipped, make, rewrite=rewrite, shard=shard)

  def evaluation_batches(self, plan: Plan, most: int, shard: Shard | None) -> tf.data.Dataset:
    """Raises a ConfigError."""
    raise ConfigError(
      "source('eval') is a Sources, which only source('train') may return; return name -> source "
      "to evaluate several."
    )

  def described(self, global_batch_size: int) -> dict[str, str]:
    """See `Readable.described`: of each part, too."""
    found = self.main.described(global_batch_size)
    for name, part in self.parts.items():
      text = f"{part.source.fingerprint()}, ratio {part.ratio}"
      found[f"{fingerprint.TRAINING} {name}"] = text
      found[f"{fingerprint.TRAINING} {name}{fingerprint.RATIO}"] = str(part.ratio)
    weights = {name: mixture.shares.described() for name, (mixture, _) in self.mixtures().items()}
    return found | weights

  def mixtures(self) -> dict[str, tuple[Any, int]]:
    """See `Readable.mixtures`."""
    found = self.main.mixtures()
    for name, part in self.parts.items():
      for own, (mixture, _) in part.source.mixtures().items():
        found[f"{own} {name}"] = (mixture, part.ratio)
    return found


def prefixes(batch: Mapping[str, object]) -> list[str]:
  """Returns what the names of each source's features begin with: "", then "<part>/"."""
  mark = "/example_id"
  return ["", *(name.removesuffix("example_id") for name in batch if name.endswith(mark))]


@as_written
def part(batch: Mapping[str, tf.Tensor], name: str) -> Batch:
  """Returns a part's examples as a batch of their own, [n x ratio, ...] under plain names.

  >>> batch = {"x": tf.constant([1]), "unlabelled/x": tf.constant([[2, 3]])}
  >>> lw.part(batch, "unlabelled")["x"].numpy().tolist()
  [2, 3]

  Args:
    batch: of `Sources`, with "<name>/..." of shape [n, ratio, ...].
    name: of the part.

  Raises:
    ConfigError: the batch has no such part.
  """
  prefix = f"{name}/"
  taken = {key: value for key, value in batch.items() if key.startswith(prefix)}
  if not taken:
    raise unknown("part of the batch", name, {key.partition("/")[0] for key in batch if "/" in key})
  return {
    key.removeprefix(prefix): tf.reshape(value, [-1, *value.shape[2:]])
    for key, value in taken.items()
  }


@as_written
def with_part(
  batch: Mapping[str, tf.Tensor], name: str, features: Mapping[str, tf.Tensor]
) -> Batch:
  """Returns the batch with features of a part, each [n x ratio, ...], as `part` returns them.

  For a `preprocess`; features of the part that are not given stay.
  """
  rows = batch[f"{name}/weight"].shape
  return dict(batch) | {
    f"{name}/{key}": tf.reshape(value, [*rows, *value.shape[1:]]) for key, value in features.items()
  }


def _plan_of(part: Part, main: Plan) -> Plan:
  """Returns the plan of a part, whose rows come `ratio` to a row of the main plan."""
  rows = range(main.rows.start * part.ratio, main.rows.stop * part.ratio)
  sizes = main.global_batch_size * part.ratio, main.pad_multiple * part.ratio
  return Plan(*sizes, preprocess=None, given_rows=rows, training=True)
