"""`TimeBudget`: where the wall time of a training run goes, as a table at its end.

    run.actions = [@TimeBudget()]

docs/time-budget.md defines the parts. The compiled step takes two timestamps for the input, and two
for communication, on several workers always, on several replicas with this action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.host import timing
from loopwright.host.timing import Stopwatch
from loopwright.observers import AllReduce, Observer, StepObserver, Tensors
from loopwright.strategies import placement

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

TRAINING = "training"
SUGGESTIONS: Mapping[str, str] = {
  "input wait": "make preprocess() and the source cheaper: vectorise, decode and shrink once, "
  "memory-map (docs/inputs.md).",
  "communication": "send less, or less often: Reduction.wire_dtype = 'bfloat16', or a larger "
  "run.global_batch_size; if one replica is slower than the others, they wait for it here.",
  "compute": "try Trainer.jit_compile = True, or look at a trace: run.actions = [@Profile()].",
  "compute and communication": "look at a trace: run.actions = [@Profile()].",
  "start": "paid once per process, so it matters less in a longer run; if it repeats, the log says "
  "that the loop was traced again.",
  "checkpoints": "save less often: a larger run.checkpoint_every_steps.",
  "evaluation": "evaluate less often or in larger batches: run.eval_every_steps, "
  "run.eval_batch_size.",
  "reporting": "report less often: a larger run.steps_per_loop.",
  "host": "return to the host less often: a larger run.steps_per_loop.",
}
"""Part -> what to do if it is the largest."""
_NOTABLE = 0.1
"""The share of the time from which a part that is not the largest gets its suggestion too."""
_OTHERWISE = "make it cheaper, or call it less often: run.steps_per_loop, run.eval_every_steps."


class LoopStart(Observer):
  """Adds "start_s" to a loop's results: until its first operation runs."""

  def __init__(self) -> None:
    """Makes a variable for the time at which a loop starts."""
    self._started = tf.Variable(0.0, dtype=tf.float64, trainable=False)
    self._clock = timing.LoopClock()

  def loop_begins(self, *, after_step: int, steps: int) -> None:
    """Starts the clock."""
    del after_step, steps
    self._clock = timing.LoopClock()

  def loop_starts(self) -> None:
    """Notes the time in the graph."""
    self._started.assign(timing.timestamp())

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Adds "start_s", in seconds."""
    start_s = float(self._started.numpy()) - self._clock.began_s
    results["start_s"] = self._clock.corrected(start_s)


class Communication(Observer):
  """Adds "communication_s" to a loop's results: how long its steps waited in the all-reduce.

  From a replica's own sums being ready to the sums over all replicas being there; the mean over the
  replicas of this process. Where gradients are sent in several buckets, from the last gradient on.
  It holds nothing up, and changes no number.
  """

  def __init__(self, replicas: int) -> None:
    """Makes the variable that adds up; call it outside of a strategy's scope.

    Args:
      replicas: how many of them this process has.
    """
    self._replicas, self._clock = replicas, timing.LoopClock()
    with tf.device("CPU:0"):
      self.sum = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="communication")

  @classmethod
  def of(cls, strategy: tf.distribute.Strategy) -> list[Communication]:
    """Returns one for a strategy; none on GPUs and TPUs, which the host does not wait for."""
    devices = placement.of(strategy).devices
    several = strategy.num_replicas_in_sync > 1
    apart = several and not any("GPU" in name or "TPU" in name for name in devices)
    return [cls(len(devices))] if apart else []

  def of_replica(self) -> StepObserver:
    """Times the all-reduce of a replica."""
    return _Timed(self.sum)

  def loop_begins(self, *, after_step: int, steps: int) -> None:
    """Starts at 0 s."""
    del after_step, steps
    self.sum.assign(0.0)
    self._clock = timing.LoopClock()

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Adds "communication_s", in seconds, the mean over this process's replicas."""
    seconds = float(self.sum.numpy()) / self._replicas
    results["communication_s"] = self._clock.corrected(seconds)


class _Timed(StepObserver):
  def __init__(self, total: tf.Variable) -> None:
    self._sum = total

  def all_reduce(
    self, reduce: AllReduce, gradients: Tensors, scalars: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    with tf.control_dependencies([*gradients, *scalars]), tf.device("CPU:0"):
      began = timing.timestamp()
    sums, scalar_sums = reduce(gradients, scalars)
    with tf.control_dependencies([*sums, *scalar_sums, began]), tf.device("CPU:0"):
      waited_s = tf.maximum(timing.timestamp() - began, 0.0)
      self._sum.assign_add(waited_s, read_value=False)
    return sums, scalar_sums


class TimeBudget(Action):
  """Prints where the wall time of this process's training went, when training ends.

  metrics.jsonl gets the same as one line of the split "time": "<part>_s" -> seconds.
  """

  on = "train"

  def __init__(self) -> None:
    """Measures from `begin` on."""
    self.watch = Stopwatch()
    self._in_step = {"input wait": 0.0, "communication": 0.0, "start": 0.0}

  def bind(self, run: Run) -> None:
    """Makes the trainer time its reductions, unless it runs on GPUs or TPUs.

    Raises:
      ConfigError: training is asynchronous.
    """
    super().bind(run)
    place = placement.of(run.strategy)
    place.require("TimeBudget")
    self._separable = not any("GPU" in name or "TPU" in name for name in place.devices)
    trainer = cast("Trainer", run.trainer)
    trainer.observe(LoopStart())
    if not any(isinstance(each, Communication) for each in trainer.parts.observers):
      for each in Communication.of(run.strategy):
        trainer.observe(each)

  def begin(self) -> None:
    """Starts the clock."""
    self.watch.start()

  def __call__(self, output: Output) -> None:
    """Adds the seconds that the loop measured in its steps."""
    self._in_step["input wait"] += float(output["input_wait_s"])
    self._in_step["communication"] += float(output.get("communication_s", 0.0))
    self._in_step["start"] += float(output["start_s"])

  def end(self) -> None:
    """Prints the table and appends it to metrics.jsonl."""
    if not self.watch.is_running:
      return
    self.watch.stop()
    parts = self.parts()
    self.run.message(table(parts))
    if self.run.is_chief:
      values = {f"{name.replace(' ', '_')}_s": seconds for name, seconds in parts.items()}
      self.run.metrics_log.append(self.run.step, "time", values)

  def parts(self) -> dict[str, float]:
    """Returns part -> seconds (host).

    What is measured in the steps may overlap: the first input is waited for while the loop starts.
    Where that leaves less than no time to compute, these parts share the time in proportion.
    """
    seconds = dict(self.watch.seconds)
    training, inner = seconds.pop(TRAINING, 0.0), sum(self._in_step.values())
    share = min(1.0, training / inner) if inner else 0.0
    in_step = {name: share * value for name, value in self._in_step.items() if value > 0}
    compute = "compute" if self._separable else "compute and communication"
    seconds[compute] = max(0.0, training - inner)
    return seconds | in_step


def table(parts: Mapping[str, float]) -> str:
  """Returns the lines to print: part, seconds and share, largest first; then suggestions."""
  total = sum(parts.values())
  rows = sorted(parts.items(), key=lambda item: -item[1])
  width = max(len(name) for name in parts)
  notable = [(name, s / total) for name, s in rows if s >= _NOTABLE * total] or [(rows[0][0], 1.0)]
  lines = [f"time budget of {total:.1f} s:"]
  lines += [f"  {name:{width}} {s:9.2f} s {100 * s / total:5.1f} %" for name, s in rows]
  for rank, (name, share) in enumerate(notable):
    what = f"largest: {name}" if rank == 0 else f"also {100 * share:.0f} %: {name}"
    lines.append(f"{what}; {SUGGESTIONS.get(name, _OTHERWISE)}")
  return "\n".join(lines)
