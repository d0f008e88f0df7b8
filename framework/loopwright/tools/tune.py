"""`--mode=tune`: measures how to run a task fastest on these devices; writes a gin file.

docs/tune.md describes how candidates are measured. Each is the user's config with a few more
bindings; task, input, strategy and Trainer are made from it as `run` makes them.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from loopwright import configurables, errors
from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.host import failures, redaction, urls
from loopwright.options import Gpus, Numerics
from loopwright.run_folder import assets, places
from loopwright.runs import builder
from loopwright.runs import from_config as runs
from loopwright.strategies import factories
from loopwright.trainer import Trainer

Bindings: TypeAlias = dict[str, Any]
"""What a candidate adds to the config: name -> value."""

FILE = "tuned.gin"
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


class Option(NamedTuple):
  """One candidate.

  Attributes:
    bindings: added to those of the best so far.
    exact: True if gradients keep their precision; otherwise it is measured but never chosen.
  """

  bindings: Bindings
  exact: bool = True

  def __str__(self) -> str:
    """Returns the bindings as gin writes them, on one line."""
    return ", ".join(f"{name} = {value!r}" for name, value in self.bindings.items())


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


Compare: TypeAlias = Callable[[Bindings, Bindings], Ratio]
"""(best so far, candidate) -> relative speed of the candidate; may raise ConfigError."""


class Tuned(NamedTuple):
  """What tuning found.

  Attributes:
    bindings: what to add to the config; empty if nothing is faster.
    ratio: speed with them relative to the original config, measured again at the end.
    path: the gin file with the bindings.
  """

  bindings: Bindings
  ratio: Ratio
  path: str


def tune(
  gin_files: Sequence[str],
  gin_params: Sequence[str] = (),
  *,
  model_dir: str,
  show: Callable[[str], None] = lambda text: None,
  rounds: int = ROUNDS,
  block_s: float = BLOCK_S,
) -> Tuned:
  """Measures alternatives to a config and writes the fastest to <model_dir>/tuned.gin (host).

  It reads and writes no checkpoint.

  Args:
    gin_files: as for `configurables.parse`, like `gin_params`.
    rounds: rounds per candidate, 2 or more; in each, candidate and best have two turns.
    block_s: minimum seconds that each runs in a round.

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
  show(_described(own))
  best = search(axes(own.trainer, own.step_s), contest.compare, show=show)
  ratio = contest.compare({}, best) if best else Ratio(1.0, 1.0, 1.0)
  if ratio.median < 1.0:  # each step seemed faster only by chance
    best, ratio = {}, Ratio(1.0, 1.0, 1.0)
  configurables.parse(gin_files, gin_params)
  path = os.path.join(model_dir, FILE)
  command = " ".join(
    [f"--gin_file={file}" for file in (*gin_files, path)]
    + [f"--gin_param={shlex.quote(redaction.line(param))}" for param in gin_params]
  )
  with tf.io.gfile.GFile(path, "w") as file:
    file.write(_gin(best, ratio, own, command))
  if best:
    show(f"best: {ratio} times as fast as the original config: {Option(best)}")
    show(f"written; use it with {command}")
  else:
    show(f"nothing is clearly faster than the original config; {path} has no bindings")
  return Tuned(best, ratio, path)


def search(
  choices: Sequence[Sequence[Option]],
  compare: Compare,
  *,
  show: Callable[[str], None] = lambda text: None,
) -> Bindings:
  """Returns the fastest bindings; tries one axis after the other, from the original config on.

  Args:
    choices: the axes; at most one option of each is taken.
    compare: measures; a ConfigError means that the candidate cannot run.
  """
  best: Bindings = {}
  for options in choices:
    before = best
    for option in options:
      candidate = {**before, **option.bindings}
      try:
        ratio = compare(best, candidate)
      except ConfigError as error:
        show(f"  {option!s:55}  cannot run here: {errors.first_line(error)}")
        continue
      taken = ratio.is_clear and option.exact
      verdict = "taken" if taken else "" if option.exact else "not chosen: it rounds gradients"
      show(f"  {option!s:55}  {ratio}  {verdict}".rstrip())
      best = candidate if taken else best
  return best


def axes(trainer: Trainer, step_s: float) -> list[list[Option]]:
  """Returns the options that may be faster than the config in force, whose trainer this is."""
  found = [[Option({"Trainer.jit_compile": not trainer.parts.jit_compile})]]
  if trainer.strategy.num_replicas_in_sync > 1:
    found += [_ways(trainer), _wires(trainer)]
  return [*found, _loops(step_s)]


def _ways(trainer: Trainer) -> list[Option]:
  """Returns every cross-device op with every packing, except the config's own pair."""
  packing = trainer.parts.reduction.packing
  packings: list[Bindings] = [
    {},
    {"Reduction.packing": "per_tensor" if packing == "flat" else "flat"},
  ]
  ops: list[Bindings] = [{}]
  own = trainer.placement.cross_device_op
  if own is not None:
    name = f"{_strategy_name()}.cross_device_ops"
    in_use = next((op for op, kind in OPS.items() if kind is own), "collective")
    ops += [
      {name: op} for op in OPS if op != in_use and factories.works(op, trainer.placement.devices)
    ]
  return [Option({**op, **way}) for op in ops for way in packings if op or way]


def _wires(trainer: Trainer) -> list[Option]:
  """Returns a narrower dtype (half the bytes), or none if the config already has one."""
  if trainer.parts.reduction.wire_dtype is None:
    return [Option({"Reduction.wire_dtype": "bfloat16"}, exact=False)]
  return [Option({"Reduction.wire_dtype": None})]


def _loops(step_s: float) -> list[Option]:
  """Returns longer loops, up to where a loop ends anyway or its overhead no longer matters."""
  own = runs.bound("steps_per_loop")
  ends = [runs.bound(name) for name in ("train_steps", "checkpoint_every_steps")]
  most = min([MOST_STEPS_PER_LOOP, *ends, runs.bound("eval_every_steps") or MOST_STEPS_PER_LOOP])
  longer = itertools.takewhile(
    lambda steps: steps <= most and steps * step_s <= LONGEST_LOOP_S,
    (own * 10**power for power in itertools.count(1)),
  )
  return [Option({LOOP: steps}) for steps in longer]


class Contender(NamedTuple):
  """A trainer that has run its first steps.

  Attributes:
    trainer: made from the config and some bindings.
    step_s: seconds per step.
    start_s: seconds to make it and run its first step, with tracing and compiling.
    input_s: seconds per step spent waiting for input.
  """

  trainer: Trainer
  step_s: float
  start_s: float
  input_s: float


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
    began = time.perf_counter()
    trainer = self._trainer(bindings)
    trainer.train(tf.constant(1))
    start_s = time.perf_counter() - began
    began = time.perf_counter()
    trainer.train(tf.constant(1))
    few = max(1, min(20, int(self._block_s / (time.perf_counter() - began))))
    began = time.perf_counter()
    metrics = trainer.train(tf.constant(few))
    step_s = (time.perf_counter() - began) / few
    return Contender(trainer, step_s, start_s, metrics["input_wait_s"] / few)

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
  return str(Option({name: value for name, value in bindings.items() if name != LOOP}))


def _seconds(trainer: Trainer, *, steps: int, loop: int) -> float:
  began = time.perf_counter()
  for size in _sizes(steps, loop):
    trainer.train(tf.constant(size))
  return time.perf_counter() - began


def _sizes(steps: int, loop: int) -> Iterator[int]:
  for start in range(0, steps, loop):
    yield min(loop, steps - start)


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


def _described(own: Contender) -> str:
  strategy, devices = own.trainer.placement.name, own.trainer.placement.devices
  where = f"{strategy} on {', '.join(devices)}" if devices else strategy
  where += f"; XLA compiles {compiled}" if (compiled := own.trainer.compiled) else ""
  return (
    f"original config: {1e3 * own.step_s:.3g} ms a step, with {1e3 * own.input_s:.3g} ms of "
    f"waiting for input; first step after {own.start_s:.1f} s ({where})\n"
    "speed relative to the best so far, median and quartiles over rounds:"
  )


def _gin(best: Mapping[str, Any], ratio: Ratio, own: Contender, command: str) -> str:
  strategy, devices = own.trainer.placement.name, own.trainer.placement.devices
  lines = [f"# Written by --mode=tune, for {strategy} on {', '.join(devices) or 'its devices'}."]
  if best:
    lines += [f"# {ratio} times as fast as without these lines. Use: {command}"]
  else:
    lines += ["# Nothing that was measured is clearly faster than the original config."]
  return "\n".join([*lines, *(f"{name} = {value!r}" for name, value in best.items())]) + "\n"
