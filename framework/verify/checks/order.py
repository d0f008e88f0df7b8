"""The order of operations in the traced step, shown as a pipeline with its communications."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from framework.metrics import Loss
from framework.optimizers.fusion import Gradients
from framework.step import Step
from framework.verify.bench import bench, source_lines
from framework.verify.bench.bench import Bench, Subject
from framework.verify.report import Result

GROUP = "order"
REPLICAS = 2


@dataclasses.dataclass
class Call:
  """One call of a verb, with a description of its input."""

  verb: str
  what: str = ""
  communications: list[int] = dataclasses.field(default_factory=list)
  """Bytes of each communication."""

  def __str__(self) -> str:
    """Returns the text for the pipeline."""
    parts = [part for part in (self.what, _communicated(self.communications)) if part]
    return f"{self.verb} ({', '.join(parts)})" if parts else self.verb


class Recording:
  """Records what the first replica's step calls while it is traced."""

  def __init__(self) -> None:
    """Begins with no calls."""
    self.calls: list[Call] = []
    self._owner: Step | None = None

  def begins(self, step: Step, call: Call) -> None:
    """Records a call of the first step made; calls within the call do not count."""
    self._owner = self._owner or step
    if step is self._owner:
      self.calls.append(call)

  def communicates(self, tensors: Sequence[tf.Tensor]) -> None:
    """Records a communication as part of the latest call."""
    context = tf.distribute.get_replica_context()
    if tf.get_static_value(context.replica_id_in_sync_group) not in (0, None):
      return
    if not self.calls or self.calls[-1].verb not in ("all_reduce", "all_gather", "apply"):
      self.calls.append(Call("own communication"))
    self.calls[-1].communications.append(sum(_bytes(t) for t in tensors))

  def step_class(self) -> type[Step]:
    """Returns a Step that reports to this recording."""
    recording = self

    class Recorded(Step):
      def gradients(
        self, loss_fn: Any, batch: Any, variables: Sequence[Any], *, when: Any = None
      ) -> Any:
        recording.begins(self, Call("gradients", f"{len(variables)} variables"))
        return super().gradients(loss_fn, batch, variables, when=when)

      def all_reduce(self, gradients: Sequence[Any], loss: Loss) -> tuple[Gradients, Loss]:
        there = [g for g in gradients if g is not None]
        recording.begins(self, Call("all_reduce", f"{len(there)} gradients, loss and weight"))
        return super().all_reduce(gradients, loss)

      def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        recording.begins(self, Call("all_gather", f"{tuple(tf.convert_to_tensor(tensor).shape)}"))
        return super().all_gather(tensor)

      @contextlib.contextmanager
      def perturbed(self, variables: Sequence[Any], offsets: Sequence[Any]) -> Iterator[None]:
        recording.begins(self, Call("perturbed"))
        with super().perturbed(variables, offsets):
          yield

      def unscale(self, gradients: Sequence[Any], loss: Loss) -> Gradients:
        recording.begins(self, Call("unscale"))
        return super().unscale(gradients, loss)

      def check(self, gradients: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
        recording.begins(self, Call("check finite"))
        return super().check(gradients)

      def clip(self, gradients: Sequence[Any], norm: tf.Tensor) -> Gradients:
        recording.begins(self, Call("clip", _clipping(self._parts)))
        return super().clip(gradients, norm)

      def apply(
        self, gradients: Sequence[Any], finite: tf.Tensor, optimizer: str = "default"
      ) -> None:
        recording.begins(self, Call("apply", "" if optimizer == "default" else optimizer))
        super().apply(gradients, finite, optimizer)

    return Recorded


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  recording, here = record(subject)
  pipeline = " > ".join(map(str, recording.calls))
  counted = [b for call in recording.calls for b in call.communications]
  mistake = next(mistakes(recording.calls), None)
  shown = Result(
    group=GROUP, check="pipeline of the step", status="passed", detail=pipeline,
    values={"calls": [str(call) for call in recording.calls]},
  )  # fmt: skip
  if mistake is not None:
    cause, remedy, containing = mistake
    shown = dataclasses.replace(
      shown, status="failed", cause=cause, remedy=remedy,
      place=source_lines.find(here.task, "train_step", containing=containing),
    )  # fmt: skip
  gradients = sum(here.trainable)
  total = Result(
    group=GROUP, check="communication", status="passed",
    detail=f"{_communicated(counted) or 'none'} a step on {REPLICAS} replicas, for {gradients} "
    f"variables of {here.parameters:,} numbers ({here.trainer.parts.reduction.describe()})",
    values={"bytes": counted},
  )  # fmt: skip
  return [shown, total]


def record(subject: Subject) -> tuple[Recording, Bench]:
  """Traces one step on two replicas; returns its calls and the bench."""
  recording = Recording()
  all_reduce = distribute_lib.ReplicaContextBase.all_reduce

  def counted(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    recording.communicates(tf.nest.flatten(value))
    return all_reduce(self, reduce_op, value, options)

  rows = subject.divisible_rows
  here = Bench(subject, REPLICAS, rows=rows, optimizer=bench.gradient_descent)
  with (
    mock.patch("framework.trainer.Step", recording.step_class()),
    mock.patch.object(distribute_lib.ReplicaContextBase, "all_reduce", counted),
  ):
    here.step(subject.rows(here.task, rows))
  return recording, here


def mistakes(calls: Sequence[Call]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
  """Yields (cause, remedy, words to look for in the line) for each call out of order."""
  verbs = [call.verb for call in calls]
  made = reduced = 0
  fresh = False  # whether there are gradients that have not been reduced
  for call in calls:
    if call.verb == "gradients":
      made, fresh = made + 1, True
    elif call.verb == "all_reduce":
      reduced, fresh = reduced + 1, False
      if reduced > made:
        yield "reduced twice", "call step.all_reduce once for each step.gradients", ("all_reduce",)
    elif call.verb == "clip" and fresh:
      yield (
        "clipped before the reduction",
        "clip reduced gradients: step.clip after step.all_reduce and step.unscale",
        (".clip(",),
      )
    elif call.verb == "check finite" and fresh and "all_reduce" in verbs[calls.index(call) :]:
      yield (
        "finite check before the reduction",
        "call step.check on the reduced gradients, so that all replicas decide alike",
        (".check(",),
      )
    elif call.verb == "apply":
      if fresh:
        yield (
          "never reduced",
          "call step.all_reduce(gradients, loss) before step.unscale and step.apply",
          (".apply(",),
        )
      if call.communications:
        yield (
          "reduced twice",
          "step.apply does not reduce, and your own optimizer must not either",
          (".apply(",),
        )
    elif call.verb == "own communication" and not fresh and reduced:
      yield (
        "reduced twice",
        "something communicates after step.all_reduce: the optimizer's apply() reduces again",
        (".apply(", "apply_gradients", ".all_reduce("),
      )
  if "unscale" not in verbs and "apply" in verbs:
    yield (
      "never unscaled",
      "call step.unscale after step.all_reduce: it divides by the global weight and the loss scale",
      (".apply(",),
    )


def _clipping(parts: Any) -> str:
  if parts.clip_value is not None:
    return f"value {parts.clip_value:g}"
  return "off" if parts.clip_norm is None else f"norm {parts.clip_norm:g}"


def _bytes(tensor: tf.Tensor) -> int:
  return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _communicated(counted: Sequence[int]) -> str:
  if not counted:
    return ""
  plural = "communication" if len(counted) == 1 else "communications"
  return f"{len(counted)} {plural} of {sum(counted):,} bytes"
