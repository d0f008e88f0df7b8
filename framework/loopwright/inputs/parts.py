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

import tensorflow as tf

from loopwright.aliases import AnySource, Batch
from loopwright.errors import ConfigError, kind, require_integer, unknown
from loopwright.graphs.autograph import as_written
from loopwright.inputs.buckets import Buckets
from loopwright.inputs.sources import Source, StreamSource, check_source


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


class Sources:
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


def main_source(source: Source | StreamSource | Sources | Buckets) -> Source | StreamSource:
  """Returns the source whose examples have plain names; of buckets the longest."""
  if isinstance(source, Buckets):
    return source.longest
  return source.main if isinstance(source, Sources) else source


def of_one_shape(source: AnySource) -> AnySource:
  """Returns the longest of several buckets, or the source itself."""
  return source.longest if isinstance(source, Buckets) else source


def prefixes(batch: Mapping[str, object]) -> list[str]:
  """Returns what the names of each source's features begin with: "", then "<part>/"."""
  mark = "/example_id"
  return ["", *(name.removesuffix("example_id") for name in batch if name.endswith(mark))]


@as_written
def part(batch: Mapping[str, tf.Tensor], name: str) -> Batch:
  """Returns a part's examples as a batch of their own, [n x ratio, ...] under plain names.

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
