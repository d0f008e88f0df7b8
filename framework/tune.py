"""The fastest way to run a task on these devices: `--mode=tune` measures it and writes a gin file.

    python launch.py --gin_file=mine.gin --mode=tune
    python launch.py --gin_file=mine.gin --gin_file=runs/mine/tuned.gin

What is tried is the user's own config with a few bindings on top: task, input, strategy and Trainer
are made from it as `run` makes them. A candidate and the best so far take turns (one, the other,
the other, the one), and it takes the best's place only if it is clearly faster; so what else a
machine does hits both, and what is chosen is not slower than the config as it is.
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

from framework import builder, configurables, errors
from framework import run as runs
from framework.errors import ConfigError
from framework.saving import assets
from framework.strategies import factories, traits
from framework.trainer import Trainer

Bindings: TypeAlias = dict[str, Any]
"""What a candidate adds to the config, name -> value."""

FILE = "tuned.gin"
LOOP = "run.steps_per_loop"
LONGEST_LOOP_S = 2.0
"""A longer loop has nothing to gain: what happens once a loop takes milliseconds."""
MOST_STEPS_PER_LOOP = 1000
CLEARLY = 1.02
"""A candidate must be so much faster, for what differs less is noise."""
OPS: Mapping[str, type | None] = {
  "nccl": tf.distribute.NcclAllReduce,
  "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
  "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
  "collective": None,  # TensorFlow's own choice has no public class
}
"""The cross-device ops of `mirrored` and their classes."""
ROUNDS, BLOCK_S = 9, 0.4
ROUNDS_AT_LEAST = 4
"""What is slower in each of so many rounds is given up."""


class Option(NamedTuple):
  """One thing to try.

  Attributes:
    bindings: on top of the best so far.
    exact: whether gradients keep their precision; else it is measured and never chosen.
  """

  bindings: Bindings
  exact: bool = True

  def __str__(self) -> str:
    """Returns it as gin would write it, on one line."""
    return ", ".join(f"{name} = {value!r}" for name, value in self.bindings.items())


class Ratio(NamedTuple):
  """How many times as fast one is as the other: the median over rounds, and the quartiles."""

  median: float
  low: float
  high: float

  @classmethod
  def of(cls, ratios: Sequence[float]) -> Ratio:
    """Returns that of the ratios of single rounds, at least two."""
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return cls(median, low, high)

  @property
  def is_clear(self) -> bool:
    """Whether it is faster beyond doubt, in three rounds of four."""
    return self.median > CLEARLY and self.low > 1.0

  def __str__(self) -> str:
    """Returns "1.31 [1.25, 1.34]"."""
    return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


Compare: TypeAlias = Callable[[Bindings, Bindings], Ratio]
"""(the best so far, a candidate) -> how many times as fast the candidate is; or ConfigError."""


class Tuned(NamedTuple):
  """What tuning found.

  Attributes:
    bindings: what to add to the config; empty if nothing is faster.
    ratio: how many times as fast the step is with them, measured once more at the end.
    path: of the gin file with them.
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
  """Measures what a config could do otherwise, and writes the fastest to <model_dir>/tuned.gin.

  Nothing is trained for good: no checkpoint is read or written.

  Args:
    gin_files: as `configurables.parse` takes them.
    gin_params: too.
    model_dir: the run folder.
    show: is called with each line as soon as it is known.
    rounds: of turns of a candidate and the best so far, 2 or more; in each, both have two.
    block_s: seconds that each should run in a round at least.

  Raises:
    ConfigError: a mistake in the config; or it is eager, or of several processes.
  """
  logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it regrets each further trace
  configurables.parse(gin_files, gin_params)
  _check_config()
  runs.require_writable(model_dir)
  bench = Bench(gin_files, gin_params, rounds=rounds, block_s=block_s)
  own = bench.contender({})
  show(_described(own))
  best = search(axes(own.trainer, own.step_s), bench.compare, show=show)
  ratio = bench.compare({}, best) if best else Ratio(1.0, 1.0, 1.0)
  if ratio.median < 1.0:  # each was faster than the one before by chance, and not all in all
    best, ratio = {}, Ratio(1.0, 1.0, 1.0)
  configurables.parse(gin_files, gin_params)
  path = os.path.join(model_dir, FILE)
  command = " ".join(
    [f"--gin_file={file}" for file in (*gin_files, path)]
    + [f"--gin_param={shlex.quote(param)}" for param in gin_params]
  )
  with tf.io.gfile.GFile(path, "w") as file:
    file.write(_gin(best, ratio, own, command))
  if best:
    show(f"best: {ratio} times as fast as the config as it is: {Option(best)}")
    show(f"written; use it with {command}")
  else:
    show(f"nothing is clearly faster than the config as it is; {path} says so")
  return Tuned(best, ratio, path)


def search(
  choices: Sequence[Sequence[Option]],
  compare: Compare,
  *,
  show: Callable[[str], None] = lambda text: None,
) -> Bindings:
  """Returns the fastest bindings, found one axis after the other from the config as it is.

  Args:
    choices: the axes; of each, at most one option is taken.
    compare: measures; a ConfigError of it says that a candidate cannot be.
    show: is called with a line for each option.
  """
  best: Bindings = {}
  for options in choices:
    before = best
    for option in options:
      candidate = {**before, **option.bindings}
      try:
        ratio = compare(best, candidate)
      except ConfigError as error:
        show(f"  {option!s:55}  not here: {_first_line(error)}")
        continue
      taken = ratio.is_clear and option.exact
      verdict = "taken" if taken else "" if option.exact else "not chosen: it rounds gradients"
      show(f"  {option!s:55}  {ratio}  {verdict}".rstrip())
      best = candidate if taken else best
  return best


def axes(trainer: Trainer, step_s: float) -> list[list[Option]]:
  """Returns what may be faster than the config in force, for its own trainer.

  Args:
    trainer: made from the config as it is.
    step_s: seconds that a step takes.
  """
  found = [[Option({"Trainer.jit_compile": not trainer.parts.jit_compile})]]
  if trainer.strategy.num_replicas_in_sync > 1:
    found += [_ways(trainer), _wires(trainer)]
  return [*found, _loops(step_s)]


def _ways(trainer: Trainer) -> list[Option]:
  """Every cross-device op with every packing, but for the config's own."""
  packing = trainer.parts.reduction.packing
  packings: list[Bindings] = [{}, {"Reduction.packing": _other(packing)}]
  ops: list[Bindings] = [{}]
  if isinstance(trainer.strategy, tf.distribute.MirroredStrategy):
    name = f"{_strategy_name()}.cross_device_ops"
    own = type(trainer.strategy.extended._cross_device_ops)
    in_use = next((op for op, kind in OPS.items() if kind is own), "collective")
    devices = traits.describe(trainer.strategy)[1]
    ops += [{name: op} for op in OPS if op != in_use and factories.works(op, devices)]
  return [Option({**op, **way}) for op in ops for way in packings if op or way]


def _other(packing: str) -> str:
  return "per_tensor" if packing == "flat" else "flat"


def _wires(trainer: Trainer) -> list[Option]:
  """A narrower dtype is half the bytes; a config that has one may do without."""
  if trainer.parts.reduction.wire_dtype is None:
    return [Option({"Reduction.wire_dtype": "bfloat16"}, exact=False)]
  return [Option({"Reduction.wire_dtype": None})]


def _loops(step_s: float) -> list[Option]:
  """Longer loops, up to where one ends anyway or takes so long that its start is nothing."""
  own = runs.bound("steps_per_loop")
  ends = [runs.bound(name) for name in ("train_steps", "checkpoint_every_steps")]
  most = min([MOST_STEPS_PER_LOOP, *ends, runs.bound("eval_every_steps") or MOST_STEPS_PER_LOOP])
  longer = itertools.takewhile(
    lambda steps: steps <= most and steps * step_s <= LONGEST_LOOP_S,
    (own * 10**power for power in itertools.count(1)),
  )
  return [Option({LOOP: steps}) for steps in longer]


class Contender(NamedTuple):
  """A trainer that has taken its first steps.

  Attributes:
    trainer: made from the config and some bindings.
    step_s: seconds that a step takes.
    start_s: seconds that making it and its first step took, with tracing and compiling.
    input_s: seconds of a step that it waits for input.
  """

  trainer: Trainer
  step_s: float
  start_s: float
  input_s: float


class Bench:
  """Makes contenders from a config and lets two at a time take turns."""

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
    """Returns the trainer of the config with some bindings on top; it is made once."""
    key = _key(bindings)
    if key not in self._made:
      self._made[key] = self._new({n: value for n, value in bindings.items() if n != LOOP})
    return self._made[key]

  def compare(self, best: Bindings, candidate: Bindings) -> Ratio:
    """Lets both take turns; returns how many times as fast the candidate is.

    Raises:
      ConfigError: the candidate cannot be.
    """
    kept = (_key(best), _key(candidate))  # not more than two models at a time
    self._made = {key: made for key, made in self._made.items() if key in kept}
    one = self.contender(best)
    try:
      other = self.contender(candidate)
    except Exception as error:
      raise ConfigError(errors.mistake(error) or errors.failure(error)) from error
    slower, own = max(one.step_s, other.step_s), runs.bound("steps_per_loop")
    loops = [int(bindings.get(LOOP, own)) for bindings in (best, candidate)]
    turn_s = self._block_s / 2  # each has two in a round
    if loops[0] == loops[1]:  # then its length may be any
      loops = [max(1, min(loops[0], int(turn_s / slower)))] * 2
    steps = max(loops) * math.ceil(turn_s / (max(loops) * slower))
    turns = [(one, loops[0]), (other, loops[1])]
    ratios: list[float] = []
    while len(ratios) < self._rounds and not _is_hopeless(ratios):
      seconds, (first, second) = [0.0, 0.0], self._order.sample([0, 1], 2)
      for turn in (first, second, second, first):  # whatever grows in a round hits both alike
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
    builder.set_globals(
      runs.bound("seed"),
      runs.bound("precision"),
      deterministic=runs.bound("deterministic"),
      eager=False,
    )
    strategy = self._strategy(bindings)
    return runs.bound_recipe(strategy.num_replicas_in_sync).trainer(task, strategy)

  def _strategy(self, bindings: Bindings) -> tf.distribute.Strategy:
    """One for each cross-device op: a TPU, for one, can be started only once."""
    key = str([value for name, value in bindings.items() if name.endswith("cross_device_ops")])
    if key not in self._strategies:
      self._strategies[key] = builder.made_strategy(runs.bound("strategy"))
    return self._strategies[key]


def _is_hopeless(ratios: Sequence[float]) -> bool:
  return len(ratios) >= ROUNDS_AT_LEAST and max(ratios) < 1.0


def _key(bindings: Bindings) -> str:
  """Names what needs a trainer of its own: all but the length of loops, which `train` is given."""
  return str(Option({name: value for name, value in bindings.items() if name != LOOP}))


def _seconds(trainer: Trainer, *, steps: int, loop: int) -> float:
  """How long so many steps take, in loops as `run` would call them."""
  began = time.perf_counter()
  for size in _sizes(steps, loop):
    trainer.train(tf.constant(size))
  return time.perf_counter() - began


def _sizes(steps: int, loop: int) -> Iterator[int]:
  for start in range(0, steps, loop):
    yield min(loop, steps - start)


def _check_config() -> None:
  if runs.bound("eager"):
    raise ConfigError("run.eager is True, and nothing eager can be tuned; leave it out.")
  name = _strategy_name().rpartition("/")[2]
  if name in ("multi_worker_mirrored", "parameter_server"):
    raise ConfigError(
      f"run.strategy is @{name}, and tuning is for one process; tune with @auto or @mirrored on "
      "one of the machines."
    )


def _strategy_name() -> str:
  """As the config refers to it: "auto", or "scope/mirrored"."""
  return configurables.bindings()["run.strategy"].removeprefix("@").removesuffix("()")


def _described(own: Contender) -> str:
  strategy, devices = traits.describe(own.trainer.strategy)
  where = f"{strategy} on {', '.join(devices)}" if devices else strategy
  return (
    f"the config as it is: {1e3 * own.step_s:.3g} ms a step, of which it waits for input "
    f"{1e3 * own.input_s:.3g} ms; first step after {own.start_s:.1f} s ({where})\n"
    "times as fast as the best so far, median and quartiles of rounds side by side:"
  )


def _gin(best: Mapping[str, Any], ratio: Ratio, own: Contender, command: str) -> str:
  strategy, devices = traits.describe(own.trainer.strategy)
  lines = [f"# Written by --mode=tune, for {strategy} on {', '.join(devices) or 'its devices'}."]
  if best:
    lines += [f"# {ratio} times as fast as without these lines. Use: {command}"]
  else:
    lines += ["# Nothing that was measured is clearly faster than the config as it is."]
  return "\n".join([*lines, *(f"{name} = {value!r}" for name, value in best.items())]) + "\n"


def _first_line(error: Exception) -> str:
  return str(error).partition("\n")[0]
