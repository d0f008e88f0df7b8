"""`--mode=tune`: measures how to run a task fastest on these devices; writes a gin file.

docs/tune.md describes how candidates are measured. Each is the user's config with a few more
bindings; task, input, strategy and Trainer are made from it as `run` makes them.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from loopwright import configurables, errors
from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.host import failures, redaction, urls
from loopwright.options.groups import Gpus, Numerics
from loopwright.run_folder import assets, places
from loopwright.runs import builder
from loopwright.runs import from_config as runs
from loopwright.strategies import factories
from loopwright.trainer import Trainer

Bindings: TypeAlias = dict[str, Any]
"""What a candidate adds to the config: name -> value."""

LOOP = "run.steps_per_loop"
LONGEST_LOOP_S = 2.0
"""Longer loops gain nothing: the overhead of a loop is milliseconds."""
MOST_STEPS_PER_LOOP = 1000
CLEARLY = 1.02
"""Minimum speed-up of a candidate; smaller differences are noise."""
OPS: Mapping[str, type | None] = {
  "nccl": tf.distribute.NcclAllReduce,
  "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
  "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
  "collective": None,  # TensorFlow's own choice has no public class
}
"""The cross-device ops of `mirrored` and their classes."""
ROUNDS, BLOCK_S = 9, 0.4
ROUNDS_AT_LEAST = 4
"""A candidate that is slower in each of this many rounds is dropped."""


class Ratio(NamedTuple):
  """Speed of one config relative to another: median and quartiles over rounds."""

  median: float
  low: float
  high: float

  @classmethod
  def of(cls, ratios: Sequence[float]) -> Ratio:
    """Returns median and quartiles of the ratios of single rounds, at least two."""
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return cls(median, low, high)

  @property
  def is_clear(self) -> bool:
    """Whether it is faster by more than CLEARLY, and faster in three rounds of four."""
    return self.median > CLEARLY and self.low > 1.0

  def __str__(self) -> str:
    """Returns "1.31 [1.25, 1.34]"."""
    return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def tune(
  gin_files: Sequence[str],
  gin_params: Sequence[str] = (),
  *,
  model_dir: str,
  show: Callable[[str], None] = lambda text: None,
  rounds: int = ROUNDS,
  block_s: float = BLOCK_S,
) -> tuple[Bindings, Ratio]:
  """Measures alternatives to a config; writes the fastest bindings to <model_dir>/tuned.gin (host).

  Returns the bindings, and the speed with them relative to the original config. It reads and writes
  no checkpoint. There are `rounds` (2 or more) per candidate, in each of which candidate and best
  have two turns, of at least `block_s` seconds together.

  Raises:
    ConfigError: a mistake in the config, or it is eager or for several processes.
  """
  logging.getLogger("tensorflow").setLevel(logging.ERROR)  # no warnings about retracing
  configurables.parse(gin_files, gin_params)
  require_tunable()
  urls.require_path("model_dir", model_dir, "tuned.gin is written there")
  places.require_writable(model_dir)
  contest = Contest(gin_files, gin_params, rounds=rounds, block_s=block_s)
  own = contest.contender({})
  placed, compiled = own.trainer.placement, own.trainer.compiled
  where = f"{placed.name} on {', '.join(placed.devices) or 'its devices'}"
  xla = f"; XLA compiles {compiled}" if compiled else ""
  show(f"original config: {1e3 * own.step_s:.3g} ms a step ({where}{xla})")
  show("speed relative to the best so far, median and quartiles over rounds:")
  best = search(axes(own.trainer, own.step_s), contest.compare, show=show)
  ratio = contest.compare({}, best) if best else Ratio(1.0, 1.0, 1.0)
  if ratio.median < 1.0:  # each step seemed faster only by chance
    best, ratio = {}, Ratio(1.0, 1.0, 1.0)
  configurables.parse(gin_files, gin_params)
  path = os.path.join(model_dir, "tuned.gin")
  command = " ".join(
    [f"--gin_file={file}" for file in (*gin_files, path)]
    + [f"--gin_param={shlex.quote(redaction.line(param))}" for param in gin_params]
  )
  if best:
    about = f"{ratio} times as fast as without these lines. Use: {command}"
    show(f"best: {ratio} times as fast as the original config: {_line(best)}")
    show(f"written; use it with {command}")
  else:
    about = "Nothing that was measured is clearly faster than the original config."
    show(f"nothing is clearly faster than the original config; {path} has no bindings")
  bound = [f"{name} = {value!r}" for name, value in best.items()]
  with tf.io.gfile.GFile(path, "w") as file:
    file.write("\n".join([f"# Written by --mode=tune, for {where}.", f"# {about}", *bound, ""]))
  return best, ratio


def search(
  choices: Sequence[Sequence[Bindings]],
  compare: Callable[[Bindings, Bindings], Ratio],
  *,
  show: Callable[[str], None] = lambda text: None,
) -> Bindings:
  """Returns the fastest bindings; tries one axis after the other, from the original config on.

  At most one option of an axis is taken. `compare` gets the best so far and a candidate, and
  returns the relative speed of the latter; its ConfigError means that the candidate cannot run.
  """
  best: Bindings = {}
  for options in choices:
    before = best
    for option in options:
      candidate = {**before, **option}
      try:
        ratio = compare(best, candidate)
      except ConfigError as error:
        show(f"  {_line(option):55}  cannot run here: {errors.first_line(error)}")
        continue
      show(f"  {_line(option):55}  {ratio}{'  taken' * ratio.is_clear}")
      best = candidate if ratio.is_clear else best
  return best


def axes(trainer: Trainer, step_s: float) -> list[list[Bindings]]:
  """Returns what may be faster than the config in force, whose trainer this is."""
  found: list[list[Bindings]] = [[{"Trainer.jit_compile": not trainer.parts.jit_compile}]]
  if trainer.strategy.num_replicas_in_sync == 1 and not trainer.placement.on_gpus:
    several = trainer.parts.steps_per_program in ("auto", 1)
    found += [[{"Trainer.steps_per_program": 16 if several else 1}]]
  if trainer.strategy.num_replicas_in_sync > 1:
    found += [_ways(trainer)]
  return [*found, _loops(step_s)]


def _ways(trainer: Trainer) -> list[Bindings]:
  """Returns every cross-device op with every packing, except the config's own pair."""
  other = "per_tensor" if trainer.parts.reduction.packing == "flat" else "flat"
  packings: list[Bindings] = [{}, {"Reduction.packing": other}]
  ops: list[Bindings] = [{}]
  own = trainer.placement.cross_device_op
  if own is not None:
    name = f"{_strategy_name()}.cross_device_ops"
    in_use = next((op for op, kind in OPS.items() if kind is own), "collective")
    ops += [
      {name: op} for op in OPS if op != in_use and factories.works(op, trainer.placement.devices)
    ]
  return [{**op, **way} for op in ops for way in packings if op or way]


def _loops(step_s: float) -> list[Bindings]:
  """Returns longer loops, up to where a loop ends anyway or its overhead no longer matters."""
  own = runs.bound("steps_per_loop")
  bound = [runs.bound(name) for name in ("train_steps", "checkpoint_every_steps")]
  ends = [end for end in bound if end is not None]  # train_epochs may be set instead
  most = min([MOST_STEPS_PER_LOOP, *ends, runs.bound("eval_every_steps") or MOST_STEPS_PER_LOOP])
  longer = (own * 10**power for power in range(1, 4))
  return [{LOOP: n} for n in longer if n <= most and n * step_s <= LONGEST_LOOP_S]


class Contender(NamedTuple):
  """A trainer that has run its first steps, and seconds per step."""

  trainer: Trainer
  step_s: float


class Contest:
  """Makes contenders from a config and measures two at a time, in turns."""

  def __init__(
    self, gin_files: Sequence[str], gin_params: Sequence[str], *, rounds: int, block_s: float
  ) -> None:
    """Keeps the config; see `tune`."""
    self._files, self._params = gin_files, gin_params
    self._rounds, self._block_s = rounds, block_s
    self._made: dict[str, Contender] = {}
    self._strategies: dict[str, tf.distribute.Strategy] = {}
    self._assets: assets.Assets | None = None
    self._order = random.Random(0)

  def contender(self, bindings: Bindings) -> Contender:
    """Returns the contender of the config with some bindings added; makes it only once."""
    key = _key(bindings)
    if key not in self._made:
      self._made[key] = self._new({n: value for n, value in bindings.items() if n != LOOP})
    return self._made[key]

  def compare(self, best: Bindings, candidate: Bindings) -> Ratio:
    """Measures both in turns; returns the speed of the candidate relative to the best.

    Raises:
      ConfigError: the candidate cannot run.
    """
    kept = (_key(best), _key(candidate))  # at most two models in memory
    self._made = {key: made for key, made in self._made.items() if key in kept}
    one = self.contender(best)
    try:
      other = self.contender(candidate)
    except Exception as error:
      raise ConfigError(failures.mistake(error) or failures.failure(error)) from error
    slower, own = max(one.step_s, other.step_s), runs.bound("steps_per_loop")
    loops = [int(bindings.get(LOOP, own)) for bindings in (best, candidate)]
    turn_s = self._block_s / 2  # each has two turns in a round
    if loops[0] == loops[1]:  # then any length will do
      loops = [max(1, min(loops[0], int(turn_s / slower)))] * 2
    steps = max(loops) * math.ceil(turn_s / (max(loops) * slower))
    turns = [(one, loops[0]), (other, loops[1])]
    ratios: list[float] = []
    while len(ratios) < self._rounds and not _is_hopeless(ratios):
      seconds, (first, second) = [0.0, 0.0], self._order.sample([0, 1], 2)
      for turn in (first, second, second, first):  # load that grows in a round affects both alike
        contender, loop = turns[turn]
        seconds[turn] += _seconds(contender.trainer, steps=steps, loop=loop)
      ratios.append(seconds[0] / seconds[1])
    return Ratio.of(ratios)

  def _new(self, bindings: Bindings) -> Contender:
    params = [f"{name} = {value!r}" for name, value in bindings.items()]
    configurables.parse(self._files, [*self._params, *params])
    trainer = self._trainer(bindings)
    trainer.train(tf.constant(1))  # traces and compiles
    few = max(1, min(20, int(self._block_s / _seconds(trainer, steps=1, loop=1))))
    return Contender(trainer, _seconds(trainer, steps=few, loop=few) / few)

  def _trainer(self, bindings: Bindings) -> Trainer:
    task = builder.made_task(runs.bound("task"))
    self._assets = assets.provide_in_memory(task, self._assets)
    builder.set_globals(runs.bound_group(Numerics, eager=False), runs.bound_group(Gpus))
    strategy = self._strategy(bindings)
    return runs.bound_recipe(strategy.num_replicas_in_sync).trainer(task, strategy)

  def _strategy(self, bindings: Bindings) -> tf.distribute.Strategy:
    """Returns one per cross-device op: a TPU, for example, can be initialized only once."""
    key = str([value for name, value in bindings.items() if name.endswith("cross_device_ops")])
    if key not in self._strategies:
      self._strategies[key] = placement.made(runs.bound("strategy"))
    return self._strategies[key]


def _is_hopeless(ratios: Sequence[float]) -> bool:
  return len(ratios) >= ROUNDS_AT_LEAST and max(ratios) < 1.0


def _key(bindings: Bindings) -> str:
  """Identifies the trainer of some bindings; the loop length needs no trainer of its own."""
  return _line({name: value for name, value in bindings.items() if name != LOOP})


def _line(bindings: Bindings) -> str:
  """Returns bindings as gin writes them, on one line."""
  return ", ".join(f"{name} = {value!r}" for name, value in bindings.items())


def _seconds(trainer: Trainer, *, steps: int, loop: int) -> float:
  began = time.perf_counter()
  for start in range(0, steps, loop):
    trainer.train(tf.constant(min(loop, steps - start)))
  return time.perf_counter() - began


def require_tunable() -> None:
  """Raises a ConfigError if the config in force is eager or for several processes."""
  if runs.bound("eager"):
    raise ConfigError("run.eager is True, but tuning needs compiled loops; remove run.eager.")
  name = _strategy_name().rpartition("/")[2]
  if name in ("multi_worker_mirrored", "parameter_server"):
    raise ConfigError(
      f"run.strategy is @{name}, but tuning works in one process only; use @auto or @mirrored on "
      "one of the machines."
    )


def _strategy_name() -> str:
  """Returns the strategy's name in the config: "auto", or "scope/mirrored"."""
  return configurables.bindings()["run.strategy"].removeprefix("@").removesuffix("()")
