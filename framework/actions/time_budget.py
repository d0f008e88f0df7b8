"""Where the wall time of a training run went, in a table at its end, and what to do about it.

    run.actions = [@TimeBudget()]

From the first step (or restore) to the last checkpoint, in parts that exclude each other:

    input wait     from asking for a batch to having it, in the step
    communication  from a replica's sums being ready to the sums over all replicas being there, in
                   the step: so it includes waiting for the slowest replica. Mean over replicas.
    compute        the rest of the training loops
    start          from calling a loop to its first operation: at first tracing and optimizing its
                   graph, later next to nothing
    checkpoints, evaluation, reporting, action <name>
                   on the host, between loops; the others wait for them
    host           what is left of it

Input wait and communication are timestamps in the compiled step, two each. Those of communication
are there only with this action, on several replicas, and cost some ten small operations a step.
They tell the truth where an operation is done when it says so, on CPUs; on GPUs it is then only
enqueued, so that the two parts are reported as one, "compute and communication": use `Profile`.
Communication that a task does by itself counts as compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from framework.actions.base import Action, Output, Run
from framework.backend.timing import Stopwatch
from framework.errors import ConfigError
from framework.strategies import traits

if TYPE_CHECKING:
  from framework.trainer import Trainer

TRAINING = "training"
SUGGESTIONS: Mapping[str, str] = {
  "input wait": "make preprocess() and the source cheaper: vectorise, decode and shrink once, "
  "memory-map (docs/inputs.md).",
  "communication": "send less, or less often: Reduction.wire_dtype = 'bfloat16', or a larger "
  "run.global_batch_size; if one replica is slower than the others, they wait for it here.",
  "compute": "nothing else holds it up; try Trainer.jit_compile = True, or look at a trace: "
  "run.actions = [@Profile()].",
  "compute and communication": "look at a trace: run.actions = [@Profile()].",
  "start": "it is paid once a process: a longer run hides it; if it comes again, the log says that "
  "the loop was traced again.",
  "checkpoints": "save less often: a larger run.checkpoint_every_steps.",
  "evaluation": "evaluate less often or in larger batches: run.eval_every_steps, "
  "run.eval_batch_size.",
  "reporting": "report less often: a larger run.steps_per_loop.",
  "host": "come to the host less often: a larger run.steps_per_loop.",
}
"""What to do if a part is the largest."""


class TimeBudget(Action):
  """Prints where the wall time of this process's training went, at its end.

  The same goes to metrics.jsonl as one line of the split "time", a value "<part>_s" for each part.
  """

  on = "train"

  def __init__(self) -> None:
    """Measures nothing before `begin`."""
    self.watch = Stopwatch()
    self._in_step = {"input wait": 0.0, "communication": 0.0, "start": 0.0}

  def bind(self, run: Run) -> None:
    """Has the trainer time its reductions, where that tells the truth.

    Raises:
      ConfigError: training is asynchronous.
    """
    super().bind(run)
    if traits.is_asynchronous(run.strategy):
      raise ConfigError(
        "run.actions has @TimeBudget(), but under parameter_server each worker waits for input and "
        "servers by itself, beside the others; leave it out."
      )
    devices = traits.describe(run.strategy)[1]
    self._separable = not any("GPU" in device or "TPU" in device for device in devices)
    cast("Trainer", run.trainer).time_parts(reductions=self._separable)

  def begin(self) -> None:
    """Starts the clock."""
    self.watch.start()

  def __call__(self, output: Output) -> None:
    """Adds what was measured in the loop's steps."""
    self._in_step["input wait"] += float(output["input_wait_s"])
    self._in_step["communication"] += float(output.get("communication_s", 0.0))
    self._in_step["start"] += float(output["start_s"])

  def end(self) -> None:
    """Prints the table and writes the record."""
    if not self.watch.is_running:
      return
    self.watch.stop()
    parts = self.parts()
    self.run.message(table(parts))
    if self.run.is_chief:
      values = {f"{name.replace(' ', '_')}_s": seconds for name, seconds in parts.items()}
      self.run.metrics_log.append(self.run.step, "time", values)

  def parts(self) -> dict[str, float]:
    """Returns part -> seconds (host)."""
    seconds = dict(self.watch.seconds)
    in_step = {name: value for name, value in self._in_step.items() if value > 0}
    compute = "compute" if self._separable else "compute and communication"
    seconds[compute] = seconds.pop(TRAINING, 0.0) - sum(in_step.values())
    return seconds | in_step


def table(parts: Mapping[str, float]) -> str:
  """Returns the lines to print: parts, seconds and shares, the largest first, and a suggestion."""
  total = sum(parts.values())
  rows = sorted(parts.items(), key=lambda item: -item[1])
  width = max(len(name) for name in parts)
  largest = rows[0][0]
  lines = [f"time budget of {total:.1f} s:"]
  lines += [f"  {name:{width}} {s:9.2f} s {100 * s / total:5.1f} %" for name, s in rows]
  return "\n".join([*lines, f"largest: {largest}; {_suggestion(largest)}"])


def _suggestion(part: str) -> str:
  if part in SUGGESTIONS:
    return SUGGESTIONS[part]
  return "make it cheaper, or call it less often: run.steps_per_loop, run.eval_every_steps."
