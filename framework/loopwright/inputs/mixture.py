"""A source of several sources, each with its share of the examples.

Which part a position reads is a function of the position alone. Of n examples of constant weights,
a part with the share w has n x w, up to less than 1, at every n: example j of the part comes where
n x w is above j - 1 and at most at the first n where it reaches j, and of the examples that may
come the one with the earliest end comes first. Such an order exists because windows that lie
within [s, t] are at most t - s + 1, and the earliest end first finds it (Baruah et al.,
"Proportionate progress", 1996). Weights are whole numbers, so the order repeats after their sum,
the period, at whose end all shares are exact: one period in a table gives every position.

A change of weights counts from the end of a period, so the bound holds through all changes. Each
part counts its own examples, and has an order of its own: a change loses and repeats none.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, is_integer, kind, require_integer, unknown
from loopwright.graphs.aliases import Batch
from loopwright.inputs import fingerprint
from loopwright.inputs.agreement import require_names
from loopwright.inputs.checks import require
from loopwright.inputs.ordering import examples_at, seed_of_part
from loopwright.inputs.plan import Start
from loopwright.inputs.sources import Source
from loopwright.options.declaration import Rule, may_change

LONGEST_PERIOD = 2**16
Weights = Mapping[str, float]
Segments = Sequence[tuple[int, Sequence[int]]]
"""Position -> the whole weights from there on, as they were asked for; the first is at 0."""


@functools.lru_cache(maxsize=256)
def pattern(weights: tuple[int, ...]) -> np.ndarray:
  """Returns which part each position of a period reads, int64 [sum(weights)]."""
  period = sum(weights)
  taken, order = [0] * len(weights), np.empty(period, np.int64)
  waiting = [(1, part) for part, weight in enumerate(weights) if weight]
  ready: list[tuple[int, int]] = []
  for place in range(1, period + 1):
    while waiting and waiting[0][0] <= place:
      _, part = heapq.heappop(waiting)
      heapq.heappush(ready, (-(-(taken[part] + 1) * period // weights[part]), part))
    _, part = heapq.heappop(ready)
    order[place - 1] = part
    taken[part] += 1
    heapq.heappush(waiting, (taken[part] * period // weights[part] + 1, part))
  return order


def ranks(order: np.ndarray) -> np.ndarray:
  """Returns how many of the same part come before each place of a pattern."""
  found = np.empty_like(order)
  for part in np.unique(order):
    here = order == part
    found[here] = np.arange(here.sum())
  return found


@dataclasses.dataclass(frozen=True)
class Shares:
  """Which part each position reads, and which example of it; what a ledger needs of a mixture.

  Attributes:
    counts: name -> number of examples of each part.
    segments: the weights, in the order of `counts`, and the positions from which they were asked.
    limits: the examples that may be read of each part, in that order; None: any number.
  """

  counts: Mapping[str, int]
  segments: Segments
  limits: Sequence[int] | None = None

  @functools.cached_property
  def starts(self) -> list[int]:
    """The position from which the weights of each segment count: the end of a period."""
    found = [0]
    for (_, weights), (asked, _) in zip(self.segments, self.segments[1:], strict=False):
      found.append(found[-1] + max(0, -(-(asked - found[-1]) // sum(weights))) * sum(weights))
    return found

  @functools.cached_property
  def _before(self) -> np.ndarray:
    """Examples of each part before each segment, int64 [segments, parts]."""
    rows = [np.zeros(len(self.counts), np.int64)]
    for begin, end, (_, weights) in zip(self.starts, self.starts[1:], self.segments, strict=False):
      rows.append(rows[-1] + (end - begin) // sum(weights) * np.array(weights))
    return np.stack(rows)

  def before(self, position: int) -> dict[str, int]:
    """Returns name -> examples of each part in the positions before `position`."""
    segment = int(np.searchsorted(self.starts, position, side="right")) - 1
    weights = self.segments[segment][1]
    periods, rest = divmod(position - self.starts[segment], sum(weights))
    since = np.bincount(pattern(tuple(weights))[:rest], minlength=len(weights))
    found = self._before[segment] + periods * np.array(weights) + since
    return dict(zip(self.counts, found.tolist(), strict=True))

  @functools.cached_property
  def firsts(self) -> list[int]:
    """The number of each part's first example in the mixture."""
    return [0, *np.cumsum(list(self.counts.values()))[:-1].tolist()]

  @functools.cached_property
  def _tables(self) -> dict[str, tf.Tensor]:
    orders = [pattern(tuple(weights)) for _, weights in self.segments]
    lengths = [len(order) for order in orders]
    tables = {
      "starts": self.starts, "before": self._before, "period": lengths,
      "weights": [weights for _, weights in self.segments],
      "offset": np.cumsum(lengths) - lengths, "part": np.concatenate(orders),
      "rank": np.concatenate([ranks(order) for order in orders]),
    }  # fmt: skip
    with tf.init_scope(), tf.device("CPU:0"):
      return {name: tf.constant(table, tf.int64) for name, table in tables.items()}

  def places(self, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each position's part, and how many of the part come before it; both int64 [m]."""
    table = self._tables
    segment = tf.searchsorted(table["starts"], positions, side="right", out_type=tf.int64) - 1
    within = positions - tf.gather(table["starts"], segment)
    period = tf.gather(table["period"], segment)
    at = tf.gather(table["offset"], segment) + within % period
    part = tf.gather(table["part"], at)
    both = tf.stack([segment, part], axis=1)
    before = tf.gather_nd(table["before"], both) + tf.gather(table["rank"], at)
    return part, before + within // period * tf.gather_nd(table["weights"], both)

  def ids(self, positions: tf.Tensor, *, seed: int, shuffle: bool) -> tf.Tensor:
    """Returns the example of each position, int64 [m]; -1 - k beyond the limit of part k.

    Args:
      positions: int64 [m], consecutive; m is static.
      seed: of the run; each part has one of its own, made from it and the part's name.
      shuffle: False reads each part in its own order.
    """
    parts, places = self.places(positions)
    found, size = tf.zeros_like(positions), positions.shape[0]
    for part, (name, count) in enumerate(self.counts.items()):
      here = parts == part
      # Less than 1 too few before, less than 1 too many after: at most 2 more than the share.
      share = max(Fraction(weights[part], sum(weights)) for _, weights in self.segments)
      most = min(size, math.floor(size * share) + 2)
      first = tf.reduce_min(tf.where(here, places, tf.int64.max))
      first = tf.where(first == tf.int64.max, tf.constant(0, tf.int64), first)
      examples = places % count
      if shuffle:
        own = seed_of_part(seed, name)
        order = examples_at(first + tf.range(most, dtype=tf.int64), num_examples=count, seed=own)
        examples = tf.gather(order, tf.clip_by_value(places - first, 0, most - 1))
      examples += self.firsts[part]
      if self.limits is not None:
        examples = tf.where(places < self.limits[part], examples, -1 - part)
      found = tf.where(here, examples, found)
    return found

  def described(self) -> str:
    """Returns the weights as a text that a run folder keeps."""
    return json.dumps([[at, self._named(weights)] for at, weights in self.segments])

  def _named(self, weights: Sequence[int]) -> dict[str, int]:
    return {name: weight for name, weight in zip(self.counts, weights, strict=True) if weight}

  def require_same_before(self, position: int, described: str) -> None:
    """Raises a ConfigError unless other weights share out the positions before one like these.

    Args:
      position: the examples that a run has consumed.
      described: what `described` returned for its weights.
    """
    past = [(at, weights) for at, weights in json.loads(described) if at < max(position, 1)]
    names = list(dict.fromkeys([*self.counts, *(name for _, each in past for name in each)]))
    rows = [(at, [each.get(name, 0) for name in names]) for at, each in past]
    now, then = self.before(position), Shares(dict.fromkeys(names, 1), rows).before(position)
    if any(now.get(name, 0) != then[name] for name in names):
      kept = {**dict(past), position: self._named(self.segments[-1][1])}
      raise ConfigError(
        f"Mixture.weights shares out the {position} examples that the run has consumed in another "
        "way, so parts would lose or repeat some; keep what was, and begin the change there: "
        f"weights = {kept}."
      )


@may_change(
  Rule(
    "asked", "reads that from there on, if the weights up to there stay; a part goes on where it is"
  )
)
class Mixture(Source):
  """Several sources, each with its share of the examples; `Task.source` may return it.

  Its examples are numbered through: the first part's, the second's and so on. An evaluation has
  each once, whatever the weights.

  >>> code, prose = (lw.ArraySource({"text": np.zeros(count)}) for count in (90, 50))
  >>> weights = {0: {"code": 3, "prose": 1}, 400: {"code": 1, "prose": 1}}
  >>> mixture = lw.Mixture(parts={"code": code, "prose": prose}, weights=weights)
  >>> mixture.shares.before(400), mixture.shares.before(500)
  ({'code': 300, 'prose': 100}, {'code': 350, 'prose': 150})

  Attributes:
    parts: name -> source.
    shares: which part and example each position of training reads.
  """

  def __init__(
    self,
    *,
    parts: Mapping[str, Source],
    weights: Weights | Mapping[int, Weights],
    examples_per_step: int = 1,
    max_epochs: Mapping[str, float] | None = None,
  ) -> None:
    """Shares out the positions (host).

    Args:
      parts: name -> source with an index; all with the same features. `fetch` gets any number of
        indices.
      weights: name -> weight; or step -> weights from there on, the first at 0. Only their ratios
        count; a part that is missing has 0.
      examples_per_step: of these steps; 1 counts in examples. A run whose batch size changes keeps
        the old number here.
      max_epochs: name -> how often a part may be read at most; reaching it ends the run.

    Raises:
      ConfigError: a wrong argument, or weights whose smallest whole numbers add up to more than
        65536.
    """
    if not isinstance(parts, Mapping) or len(parts) < 2:
      raise ConfigError(f"Mixture.parts is {kind(parts)}; it must be at least two name -> source.")
    for name, part in parts.items():
      if not isinstance(part, Source) or isinstance(part, Mixture):
        raise ConfigError(
          f"Mixture.parts[{name!r}] is {kind(part)}; it must be a source with an index: write the "
          "parts of a Mixture itself here, and a stream's examples into TFRecord files."
        )
    self.parts = dict(parts)
    for name, part in parts.items():
      first, where = next(iter(parts)), "Mixture.parts[{!r}]".format
      require_names(self.parts[first].numbered, part.numbered, where(first), where(name))
      self.numbered = {**part.numbered, **self.numbered}
    counts = {
      name: require_integer(f"Mixture.parts[{name!r}].num_examples", part.num_examples, at_least=1)
      for name, part in self.parts.items()
    }
    self.num_examples = sum(counts.values())
    each = require_integer("Mixture.examples_per_step", examples_per_step, at_least=1)
    segments = [(at * each, _whole(now, list(counts), at)) for at, now in _by_step(weights)]
    limits = _limits(max_epochs, counts) if max_epochs else None
    self.shares = Shares(counts, segments, limits)

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`: each part is asked only for its own examples."""
    names, firsts = list(self.parts), tf.constant(self.shares.firsts, tf.int64)
    lowest = tf.reduce_min(indices)
    over = tf.gather(names, tf.clip_by_value(-1 - lowest, 0, len(names) - 1))
    line = ["the part '", over, "' of the Mixture is read up; raise its max_epochs, or lower its "]
    indices = require(lowest >= 0, indices, [*line, "weight or run.train_steps."])
    parts = tf.searchsorted(firsts, indices, side="right", out_type=tf.int64) - 1
    places: list[tf.Tensor] = []
    batches: list[Batch] = []
    for part, (name, source) in enumerate(self.parts.items()):
      rows = tf.where(parts == part)[:, 0]
      # A source may not know how to read nothing, so it reads its first example.
      wanted = tf.gather(indices, rows) - firsts[part]
      wanted = tf.cond(tf.size(rows) > 0, lambda w=wanted: w, lambda: tf.zeros([1], tf.int64))
      batch = {key: value[: tf.size(rows)] for key, value in source.fetch(wanted).items()}
      _require_alike(batches[0] if batches else batch, batch, names[0], name)
      places.append(rows)
      batches.append(batch)
    back = tf.argsort(tf.concat(places, axis=0))
    joined = {key: tf.concat([batch[key] for batch in batches], axis=0) for key in batches[0]}
    return {
      key: tf.ensure_shape(tf.gather(value, back), [*indices.shape, *value.shape[1:]])
      for key, value in joined.items()
    }

  def examples_of(self, positions: tf.Tensor, start: Start) -> tf.Tensor:
    """See `Source.examples_of`."""
    return self.shares.ids(positions, seed=start.seed, shuffle=start.shuffle)

  def fingerprint(self) -> str:
    """See `Source.fingerprint`: of each part."""
    return ", ".join(f"{name!r}: {part.fingerprint()}" for name, part in self.parts.items())

  def feature_kinds(self) -> dict[str, str]:
    """See `Source.feature_kinds`."""
    return next(iter(self.parts.values())).feature_kinds()

  def mixtures(self) -> dict[str, tuple[Mixture, int]]:
    """See `Source.mixtures`."""
    return {fingerprint.WEIGHTS: (self, 1)}

  def require_enough(self, position: int) -> None:
    """Raises a ConfigError if a part is read up before some position (host)."""
    if self.shares.limits is None:
      return
    for (name, wanted), limit in zip(
      self.shares.before(position).items(), self.shares.limits, strict=True
    ):
      if wanted > limit:
        count = self.shares.counts[name]
        raise ConfigError(
          f"Mixture.max_epochs[{name!r}] allows {limit} examples, {limit / count:g} epochs, but "
          f"the run reads {wanted}, {wanted / count:.3g} epochs, up to its last step; raise it, or "
          "lower the part's weight or run.train_steps."
        )


def _by_step(weights: Any) -> list[tuple[int, Weights]]:
  """Returns (step, weights) of a schedule, or of constant weights."""
  if isinstance(weights, Mapping) and weights and all(isinstance(key, str) for key in weights):
    return [(0, weights)]
  steps = list(weights) if isinstance(weights, Mapping) else []
  whole = all(is_integer(step, at_least=0) for step in steps)
  if not steps or not whole or steps[0] != 0 or steps != sorted(steps):
    raise ConfigError(
      f"Mixture.weights is {weights!r}; it must be name -> weight, or step -> such a dict, in "
      "ascending order from 0."
    )
  return list(weights.items())


def _whole(weights: Any, names: Sequence[str], step: int) -> tuple[int, ...]:
  """Returns the smallest whole numbers in the ratio of some weights, in the order of `names`."""
  if not isinstance(weights, Mapping):
    raise ConfigError(f"Mixture.weights[{step}] is {weights!r}; it must be a dict name -> weight.")
  for name, weight in weights.items():
    if name not in names:
      raise unknown("part in Mixture.weights", name, names)
    if type(weight) not in (int, float) or not 0 <= weight < math.inf:
      raise ConfigError(
        f"Mixture.weights has {weight!r} for {name!r}; it must be a number that is 0 or more."
      )
  exact = [Fraction(str(weights.get(name, 0))) for name in names]
  common = math.lcm(*(each.denominator for each in exact))
  whole = [int(each * common) for each in exact]
  divisor = math.gcd(*whole)
  if not divisor:
    raise ConfigError(f"Mixture.weights is {dict(weights)}; at least one must be above 0.")
  if (period := sum(whole) // divisor) > LONGEST_PERIOD:
    rounded = {n: round(1000 * float(e / sum(exact))) for n, e in zip(names, exact, strict=True)}
    raise ConfigError(
      f"Mixture.weights is {dict(weights)}, whose smallest whole numbers add up to {period}; they "
      f"must to at most {LONGEST_PERIOD}: round them, such as {rounded}."
    )
  return tuple(each // divisor for each in whole)


def _limits(max_epochs: Any, counts: Mapping[str, int]) -> list[int]:
  """Returns the examples that may be read of each part."""
  for name, epochs in max_epochs.items():
    if name not in counts:
      raise unknown("part in Mixture.max_epochs", name, counts)
    if type(epochs) not in (int, float) or not epochs > 0:
      raise ConfigError(f"Mixture.max_epochs[{name!r}] is {epochs!r}; it must be above 0.")
  return [
    min(2**62, int(max_epochs[name] * count)) if name in max_epochs else 2**62
    for name, count in counts.items()
  ]


def _require_alike(first: Batch, batch: Batch, first_name: str, name: str) -> None:
  """Raises a ConfigError unless two parts have features of the same names, types and shapes."""
  kinds = [
    {key: f"{value.dtype.name} {list(value.shape[1:])}" for key, value in sorted(each.items())}
    for each in (first, batch)
  ]
  if kinds[0] != kinds[1]:
    raise ConfigError(
      f"the part {name!r} of the Mixture has the features {kinds[1]}, but {first_name!r} has "
      f"{kinds[0]}; all must have the same."
    )
