"""Locates a NaN or infinity: the step, the replica, the loss or variable, and the examples.

docs/forensics.md shows its use. A watched trainer (`watch`, called by the action `StopOnNonFinite`)
stops a loop at the first bad step and undoes that step. The batch is a function of the position,
and the random numbers of (seed, step, replica), so the step can be replayed eagerly (`examine`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from loopwright.distribution.placement import Placement
from loopwright.engine import step_record
from loopwright.engine.step_parts import StepParts
from loopwright.errors import ConfigError, is_the_users
from loopwright.graphs.aliases import Batch, Gradient, Variable
from loopwright.graphs.autograph import as_written
from loopwright.inputs.parts import prefixes
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.optimizers.fusion import Fusion, Gradients
from loopwright.optimizers.rollback import Rollback, changed_by, read, write
from loopwright.step import LossFn, Step
from loopwright.trainer import Trainer

MOST_EXAMPLES = 16
"""How many offending examples to look for; each costs about 2 log2(rows) passes of one replica."""
_LOSS, _SUM_OF_LOSSES = "loss", "sum of the losses"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """One loss, gradient or sum that is not finite.

  Attributes:
    number: the backward pass of the step, from 1.
    replica: global replica id, from 0; None for a sum over all replicas.
    what: "loss", "gradient of <variable>", or the name of a sum.
    value: which values are not finite, such as "inf in 1 of 32 elements".
    examples: ids of the offending examples (row numbers of the replica's batch if it has no ids).
    alone: True if each example alone gives the value, False if only all of them together do.
    operation: the first operation that gives such a value, and its place; None if unknown.
  """

  number: int
  replica: int | None
  what: str
  value: str
  examples: tuple[int, ...] = ()
  alone: bool = True
  operation: str | None = None

  @property
  def is_loss(self) -> bool:
    """Whether it is a loss and not a gradient."""
    return self.what in (_LOSS, _SUM_OF_LOSSES)

  def row(self) -> tuple[str, str, str, str]:
    """Returns (replica, what, value, examples) as text."""
    replica = "all" if self.replica is None else str(self.replica)
    ids = ", ".join(map(str, self.examples[:MOST_EXAMPLES]))
    more = " ..." if len(self.examples) > MOST_EXAMPLES else ""
    together = "" if self.alone else " (only together)"
    return replica, self.what, self.value, f"{ids}{more}{together}" if ids else "no single example"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteReport:
  """What `examine` found in the first backward pass that has a finding.

  Attributes:
    step: the bad step, from 1.
    findings: what is not finite on the replicas of this process.
    is_partial: whether other processes have replicas too.
  """

  step: int
  findings: Sequence[Finding]
  is_partial: bool = False

  def __str__(self) -> str:
    """Returns the table and the first bad operation of each replica, as lines."""
    if not self.findings:
      return f"step {self.step}: all values are finite on the replicas here when replayed eagerly"
    rows = [("replica", "not finite", "value", "examples"), *(f.row() for f in self.findings)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    first = dict.fromkeys(
      f"first on replica {f.replica}: {f.operation}" for f in self.findings if f.operation
    )
    table = [f"  {line.rstrip()}" for line in lines]
    elsewhere = self.is_partial and all(f.replica is None for f in self.findings)
    hint = ["nothing on this worker's replicas; see the other workers"] if elsewhere else []
    return "\n".join([f"step {self.step} is not finite:", *table, *first, *hint])


def watch(trainer: Trainer, on_stop: Callable[[], None] = lambda: None) -> None:
  """Makes each later loop of the trainer stop before the first step that is not finite (host).

  That step is undone: the trainer, its global step and its position are as they were before it,
  and `examine` reports where the value came from. See `Rollback`.

  Args:
    trainer: what to watch; its loop is traced again.
    on_stop: called by `Trainer.train` when a loop has stopped.

  Raises:
    ConfigError: under parameter servers.
  """
  trainer.observe(_rollback_of(trainer, on_stop))


def require_replays(place: Placement) -> None:
  """Raises ConfigError where a step cannot be replayed."""
  if not place.replays:
    raise ConfigError(
      "a step cannot be replayed under parameter_server, where other workers change the weights "
      "meanwhile, or model_parallel, where it runs compiled only; use another run.strategy."
    )


def _rollback_of(trainer: Trainer, on_stop: Callable[[], None] = lambda: None) -> Rollback:
  require_replays(trainer.placement)
  rollback = Rollback(
    strategy=trainer.strategy, model=trainer.task.model, loss_scale=trainer.parts.loss_scale,
    counters=[trainer.global_step, trainer.nonfinite_step], ema=trainer.parts.ema, on_stop=on_stop,
  )  # fmt: skip
  rollback.learns(trainer.parts.loss_scale, trainer.state)
  return rollback


def examine(trainer: Trainer) -> NonFiniteReport:
  """Replays the step after `trainer.global_step` eagerly and reports what is not finite (host).

  The state of the trainer stays as it is. Random layers draw the same numbers as in the loop,
  except under `Trainer.jit_compile` and for operations with their own random state; see
  loopwright/graphs/randomness.py.

  Raises:
    ConfigError: under parameter servers, where a step cannot be replayed: other workers have
      changed the weights since.
  """
  rollback = _rollback_of(trainer)
  parts = dataclasses.replace(trainer.parts, observers=(rollback,))
  rollback.step_begins()
  with _replayed(trainer, lambda: _Probe(parts, rollback)) as probes:
    findings = [finding for each in probes for finding in each.findings()]
  return NonFiniteReport(
    step=int(trainer.global_step.numpy()) + 1,
    findings=_first_pass(findings),
    is_partial=trainer.cluster.size > 1,
  )


@contextlib.contextmanager
def _replayed(trainer: Trainer, make: Callable[[], _Probe]) -> Iterator[list[_Probe]]:
  """Runs the step after `trainer.global_step` eagerly; restores all that it changed (host).

  Args:
    make: makes the step of a replica (replica context).

  Yields:
    The step of each replica of this process, while what it changed is there.
  """
  strategy, probes = trainer.strategy, list[_Probe]()

  @as_written
  def probe(batch: Batch) -> None:
    probes.append(made := make())
    step_record.run(made, trainer.task.train_step, batch)

  variables = _all_variables(trainer)
  before = read(strategy, variables)
  try:
    strategy.run(probe, args=(trainer.placement.per_replica(next(trainer.make_iterator())),))
    yield probes
  finally:
    write(strategy, variables, before)


def _all_variables(trainer: Trainer) -> list[tf.Variable]:
  parts = trainer.parts
  found = [*models.all_variables(trainer.task.model), *parts.loss_scale.variables]
  for optimizer in parts.optimizers.values():
    found += changed_by(optimizer, parts.ema)
  return list({id(models.raw(v)): models.raw(v) for v in found}.values())


def _first_pass(findings: Sequence[Finding]) -> list[Finding]:
  """Keeps the findings of the first bad pass; later ones, and sums, mostly follow from them."""
  first = min((f.number for f in findings), default=0)
  found = [f for f in findings if f.number == first]
  local = [f for f in found if f.replica is not None]
  return sorted(local, key=lambda f: f.replica or 0) or found[:1]


class _Probe(Step):
  """A step, run eagerly, that checks each replica's values before they are summed.

  It must not communicate more than the step itself: replicas without a finding would not take part,
  and the others would wait for them forever. So `findings` looks for the examples after the step,
  outside of the strategy.

  Attributes:
    replica: which one.
    names: of each backward pass, the names of its variables.
  """

  def __init__(self, parts: StepParts, rollback: Rollback) -> None:
    """Starts a step, in replica context."""
    self.replica, self.names = int(parts.replica_id()), list[list[str]]()
    super().__init__(dataclasses.replace(parts, replica_id=lambda: tf.constant(self.replica)))
    self._counts_gradients = rollback.counts_gradients
    self._sums: list[Finding] = []
    self._locate: Callable[[], list[Finding]] | None = None

  def gradients(
    self,
    loss_fn: LossFn,
    batch: Batch,
    variables: Sequence[Variable],
    *,
    when: tf.Tensor | bool | None = None,
  ) -> tuple[Gradients, Loss]:
    """See `Step`."""
    self.names.append([models.name(variable) for variable in variables])
    return super().gradients(loss_fn, batch, variables, when=when)

  def gradients_of(
    self, tape: tf.GradientTape, loss: Loss, variables: Sequence[Variable]
  ) -> Gradients:
    """See `Step`."""
    self.names.append([models.name(variable) for variable in variables])
    return super().gradients_of(tape, loss, variables)

  def findings(self) -> list[Finding]:
    """Returns what is not finite and its examples; call it outside of any strategy (host)."""
    return [*(self._locate() if self._locate else []), *self._sums]

  def forward_backward(
    self, loss_fn: LossFn, batch: Batch, fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    begun = self.draws.before
    number, names = len(self.names), self.names[-1]

    def not_finite(rows: Sequence[int]) -> dict[str, str]:
      self.draws.before = begun
      part = _only(batch, rows)
      return self._not_finite(names, *super(_Probe, self).forward_backward(loss_fn, part, fusion))

    gradients, loss = super().forward_backward(loss_fn, batch, fusion)
    bad = self._not_finite(names, gradients, loss)
    if bad and not self._locate:
      self._locate = lambda: _located(bad, batch, not_finite, number, self.replica)
    return gradients, loss

  def all_reduce(self, gradients: Sequence[Gradient], loss: Loss) -> tuple[Gradients, Loss]:
    summed, total = super().all_reduce(gradients, loss)
    if value := _values(total.total):
      self._add_sum(_SUM_OF_LOSSES, value)
    return summed, total

  def check(self, gradients: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    finite, norm = super().check(gradients)
    if not finite and self._counts_gradients:
      bad = [i for i, g in enumerate(gradients) if g is not None and _values(g)]
      for i in bad:
        self._add_sum(f"summed gradient of {self.names[-1][i]}", _values(gradients[i]))
      if not bad:
        self._add_sum("norm of the gradients, which overflows float32", _values(norm))
    return finite, norm

  def _add_sum(self, what: str, value: str) -> None:
    self._sums.append(Finding(number=len(self.names), replica=None, what=what, value=value))

  def _not_finite(self, names: Sequence[str], gradients: Gradients, loss: Loss) -> dict[str, str]:
    """Returns what is not finite -> its values; if the loss is bad, only the loss."""
    if value := _values(loss.total):
      return {_LOSS: value}
    if not self._counts_gradients:
      return {}
    values = [None if g is None else _values(g) for g in gradients]
    return {f"gradient of {n}": value for n, value in zip(names, values, strict=True) if value}


def _located(
  bad: Mapping[str, str],
  batch: Any,
  not_finite: Callable[[Sequence[int]], dict[str, str]],
  number: int,
  replica: int,
) -> list[Finding]:
  """Finds the examples and the operation behind the bad values of one replica."""
  rows, ids = _examples(batch)
  offending = _offending(rows, not_finite)
  clean = [row for row in rows if not any(row in group for group, _ in offending)]
  operation = _first_operation(not_finite, offending[0][0], clean[:1]) if offending else None
  found = []
  for what, value in bad.items():
    groups = [group for group, found_bad in offending if what in found_bad]
    alone = [group for group in groups if len(group) == 1]
    examples = sorted({int(ids[row]) for group in alone or groups for row in group})
    found.append(
      Finding(
        number=number, replica=replica, what=what, value=value, examples=tuple(examples),
        alone=bool(alone) or not groups, operation=operation,
      )
    )  # fmt: skip
  return found


def _values(tensor: tf.Tensor) -> str:
  """Says which values of a tensor are not finite; "" if all are finite."""
  array = tf.cast(tensor, tf.float32).numpy()
  kinds = {"nan": np.isnan(array), "inf": array == np.inf, "-inf": array == -np.inf}
  there = [name for name, mask in kinds.items() if mask.any()]
  if not there or not array.ndim:
    return "".join(there)
  return f"{', '.join(there)} in {(~np.isfinite(array)).sum()} of {array.size} elements"


# ---- The offending examples ----


def _examples(batch: Any) -> tuple[list[int], np.ndarray]:
  """Returns the rows of a batch that are not padding, and the id of each row."""
  if not isinstance(batch, Mapping) or "weight" not in batch:
    return [], np.zeros([0], np.int64)
  rows = int(tf.shape(batch["weight"])[0])
  ids = batch["example_id"].numpy() if "example_id" in batch else np.arange(rows)
  return [row for row in range(rows) if ids[row] >= 0], ids


def _only(batch: Batch, rows: Sequence[int]) -> Batch:
  """Keeps some rows of a batch and replaces the others by padding.

  The rows keep their places, and so their random numbers. Padding repeats a real row, with weight 0
  and id -1.
  """
  count = int(tf.shape(batch["weight"])[0])
  taken = np.full([count], rows[0])
  taken[list(rows)] = rows
  real = np.isin(np.arange(count), rows)
  part = {
    name: tf.gather(value, taken) if value.shape.rank and value.shape[0] == count else value
    for name, value in batch.items()
  }
  for prefix in prefixes(batch):
    weight = part[f"{prefix}weight"]
    kept = real if weight.shape.rank == 1 else real[:, np.newaxis]
    part[f"{prefix}weight"] = tf.where(kept, weight, tf.zeros_like(weight))
  if "example_id" in part:
    part["example_id"] = tf.where(real, part["example_id"], -1)
  return part


def _offending(
  rows: Sequence[int], not_finite: Callable[[Sequence[int]], Mapping[str, str]]
) -> list[tuple[Sequence[int], Mapping[str, str]]]:
  """Bisects `rows` down to single offending rows, or to groups that are bad only together."""
  found: list[tuple[Sequence[int], Mapping[str, str]]] = []

  def search(rows: Sequence[int]) -> None:
    bad = not_finite(rows) if rows and len(found) < MOST_EXAMPLES + 1 else {}
    if not bad:
      return
    already, half = len(found), len(rows) // 2
    if half:
      search(rows[:half])
      search(rows[half:])
    if len(found) == already:
      found.append((rows, bad))

  search(rows)
  return found


# ---- The first operation ----


def _first_operation(
  run: Callable[[Sequence[int]], Any], offending: Sequence[int], clean: Sequence[int]
) -> str | None:
  """Returns the first operation of a pass over `offending` that gives NaN or infinity, or None.

  An operation that gives one for a clean example too, such as an attention mask, is not named.
  """
  found = _checked_pass(run, offending)
  return None if clean and found == _checked_pass(run, clean) else found


def _checked_pass(run: Callable[[Sequence[int]], Any], rows: Sequence[int]) -> str | None:
  try:
    with _check_numerics():
      run(rows)
  except tf.errors.OpError as error:
    if found := re.search(r'of (?:eagerly-executing |graph )?op "(\w+)"', str(error)):
      return f"operation {found[1]}{_place(error)}"
  return None


@contextlib.contextmanager
def _check_numerics() -> Iterator[None]:
  """Checks the result of every operation of this thread; keeps Keras's frames in tracebacks."""
  filtering = keras.config.is_traceback_filtering_enabled()
  keras.config.disable_traceback_filtering()
  tf.debugging.enable_check_numerics()
  try:
    yield
  finally:
    tf.debugging.disable_check_numerics()
    if filtering:
      keras.config.enable_traceback_filtering()


def _place(error: BaseException) -> str:
  """Returns the layer and the line of the user's code, where the traceback has them."""
  layer, place = "", ""
  for frame, line in traceback.walk_tb(error.__traceback__):
    code = frame.f_code
    if isinstance(owner := frame.f_locals.get("self"), (keras.Layer, tf_keras.layers.Layer)):
      layer = f" in layer {owner.name!r}"
    if is_the_users(code.co_filename):
      place = f" ({os.path.basename(code.co_filename)}:{line}, in {code.co_name})"
  return layer + place
