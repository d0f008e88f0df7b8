"""Where a value that is not finite came from: which step, replica, variable or loss, and example.

A watched loop (`Trainer.watch_nonfinite`, which `actions.StopOnNonFinite` calls) leaves at the
first bad step and takes back what that step has changed, so that the trainer is as it was before
it. Its batch is a function of the position and its random numbers of (seed, step, replica), so the
step can be made again, eagerly and with a look at everything, here or later from the saved state:

    trainer.watch_nonfinite()
    if "nonfinite_step" in trainer.train(tf.constant(100)):
      print(examine(trainer))

A step is bad if a loss of it is not finite, or a reduced gradient; where the loss scale reacts to
overflows (`LossScale.expects_overflow`), gradients do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from framework.backend import models
from framework.backend.autograph import as_written
from framework.backend.files import atomic_write
from framework.errors import ConfigError, is_the_users
from framework.inputs.datasets import Batch
from framework.metrics import Loss
from framework.optimizers.fusion import Fusion, Gradients
from framework.optimizers.rollback import Watch, _changed_by, read, write
from framework.step import Gradient, LossFn, Step, StepParts
from framework.trainer import Trainer, refuse_parameter_server

FOLDER = "nonfinite"
"""In the run folder: the state before the bad step, and the report."""
MOST_EXAMPLES = 16
"""Guilty examples that are looked for; each costs about 2 log2(rows) passes of one replica."""
_LOSS, _SUM_OF_LOSSES = "loss", "sum of the losses"
_STATE = "before"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """One thing that is not finite.

  Attributes:
    number: which backward pass of the step, from 1.
    replica: whose, from 0 over all workers; None for a sum over all replicas.
    what: "loss", or what is wrong with which variable's gradient.
    value: which values are not finite.
    examples: the ids of the guilty examples (rows of the replica's batch where it has no ids).
    alone: whether each example alone is guilty, not only all of them together.
    operation: the first operation that gives such a value, and where it is, if that is known.
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
    """Whether it is a loss, and no gradient."""
    return self.what in (_LOSS, _SUM_OF_LOSSES)

  def row(self) -> tuple[str, str, str, str]:
    """Returns replica, what, value and examples, as text."""
    replica = "all" if self.replica is None else str(self.replica)
    ids = ", ".join(map(str, self.examples[:MOST_EXAMPLES]))
    more = " ..." if len(self.examples) > MOST_EXAMPLES else ""
    together = "" if self.alone else " (only together)"
    return replica, self.what, self.value, f"{ids}{more}{together}" if ids else "none alone, here"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What `examine` found: of the first backward pass of the step that has a finding.

  Attributes:
    step: the bad step, from 1.
    findings: what is not finite, on the replicas of this process.
    is_partial: whether there are other processes, with replicas of their own.
  """

  step: int
  findings: Sequence[Finding]
  is_partial: bool = False

  def __str__(self) -> str:
    """A table of lines, and the first operations."""
    if not self.findings:
      return f"step {self.step}: all is finite on the replicas here when it is made again, eagerly"
    rows = [("replica", "not finite", "value", "examples"), *(f.row() for f in self.findings)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    first = dict.fromkeys(
      f"first on replica {f.replica}: {f.operation}" for f in self.findings if f.operation
    )
    table = [f"  {line.rstrip()}" for line in lines]
    elsewhere = self.is_partial and all(f.replica is None for f in self.findings)
    hint = ["nothing on this worker's replicas; the others tell theirs"] if elsewhere else []
    return "\n".join([f"step {self.step} is not finite:", *table, *first, *hint])


def examine(trainer: Trainer) -> Report:
  """Makes the step after `trainer.global_step` again, eagerly, and tells what is not finite in it.

  The trainer is left as it was (host). Random layers draw what they drew in the loop, but for
  `Trainer.jit_compile` and operations with a state of their own; see
  framework/backend/randomness.py.

  Raises:
    ConfigError: under parameter servers, where a step cannot be made again: other workers have
      changed the weights meanwhile.
  """
  refuse_parameter_server(trainer)
  strategy, parts = trainer.strategy, trainer.parts
  watch = Watch(
    strategy=strategy, model=trainer.task.model, loss_scale=parts.loss_scale, ema=parts.ema
  )
  probes: list[_Probe] = []

  @as_written
  def probe(batch: Batch) -> None:
    probes.append(_Probe(dataclasses.replace(parts, watch=watch), watch))
    trainer.task.train_step(probes[-1], batch)

  variables = _all_variables(trainer)
  before = read(strategy, variables)
  watch.begin()
  try:
    strategy.run(probe, args=(next(trainer.make_iterator()),))
    findings = [finding for each in probes for finding in each.findings()]
  finally:
    write(strategy, variables, before)
  return Report(
    step=int(trainer.global_step.numpy()) + 1,
    findings=_first_pass(findings),
    is_partial=trainer.cluster.size > 1,
  )


def _all_variables(trainer: Trainer) -> list[tf.Variable]:
  parts = trainer.parts
  found = [*models.all_variables(trainer.task.model), *parts.loss_scale.variables]
  for optimizer in parts.optimizers.values():
    found += _changed_by(optimizer, parts.ema)
  return list({id(models.raw(v)): models.raw(v) for v in found}.values())


def _first_pass(findings: Sequence[Finding]) -> list[Finding]:
  """Those of the first pass with any: later ones, and sums, are mostly what follows from them."""
  first = min((f.number for f in findings), default=0)
  found = [f for f in findings if f.number == first]
  local = [f for f in found if f.replica is not None]
  return sorted(local, key=lambda f: f.replica or 0) or found[:1]


class _Probe(Step):
  """A step, made eagerly, that looks at everything before it is summed over the replicas.

  Nothing more than in the step itself may be communicated, or replicas would wait for each other
  in vain. So the examples are looked for after it (`findings`), outside of the strategy, where a
  replica's passes are nobody else's business.
  """

  def __init__(self, parts: StepParts, watch: Watch) -> None:
    self._replica = int(parts.replica_id())
    super().__init__(dataclasses.replace(parts, replica_id=lambda: tf.constant(self._replica)))
    self._counts_gradients = watch.counts_gradients
    self._number = 0
    self._names: list[str] = []
    self._sums: list[Finding] = []
    self._locate: Callable[[], list[Finding]] | None = None

  def findings(self) -> list[Finding]:
    """Returns what is not finite, located; outside of any strategy (host)."""
    return [*(self._locate() if self._locate else []), *self._sums]

  def gradients(
    self, loss_fn: LossFn, batch: Batch, variables: Sequence[Any]
  ) -> tuple[Gradients, Loss]:
    self._number += 1
    self._names = [models.name(v) for v in variables]
    return super().gradients(loss_fn, batch, variables)

  def _forward_backward(
    self, loss_fn: LossFn, batch: Batch, fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    begun = self._forward_passes, self._seeds
    number, names = self._number, self._names

    def not_finite(rows: Sequence[int]) -> dict[str, str]:
      self._forward_passes, self._seeds = begun
      part = _only(batch, rows)
      return self._not_finite(names, *super(_Probe, self)._forward_backward(loss_fn, part, fusion))

    gradients, loss = super()._forward_backward(loss_fn, batch, fusion)
    bad = self._not_finite(names, gradients, loss)
    if bad and not self._locate:
      self._locate = lambda: _located(bad, batch, not_finite, number, self._replica)
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
        self._add_sum(f"summed gradient of {self._names[i]}", _values(gradients[i]))
      if not bad:
        self._add_sum("norm of the gradients, which overflows float32", _values(norm))
    return finite, norm

  def _add_sum(self, what: str, value: str) -> None:
    self._sums.append(Finding(number=self._number, replica=None, what=what, value=value))

  def _not_finite(self, names: Sequence[str], gradients: Gradients, loss: Loss) -> dict[str, str]:
    """What is not finite -> its values. The gradients of a bad loss are not told: they follow."""
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
  """Looks for the examples, and for the operation, of what is not finite on one replica."""
  rows, ids = _examples(batch)
  guilty = _guilty(rows, not_finite)
  innocent = [row for row in rows if not any(row in group for group, _ in guilty)]
  operation = _first_operation(not_finite, guilty[0][0], innocent[:1]) if guilty else None
  found = []
  for what, value in bad.items():
    groups = [group for group, found_bad in guilty if what in found_bad]
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
  """Which values of a tensor are not finite, in words; "" if all are finite."""
  array = tf.cast(tensor, tf.float32).numpy()
  kinds = {"nan": np.isnan(array), "inf": array == np.inf, "-inf": array == -np.inf}
  there = [name for name, mask in kinds.items() if mask.any()]
  if not there or not array.ndim:
    return "".join(there)
  return f"{', '.join(there)} in {(~np.isfinite(array)).sum()} of {array.size} elements"


# ---- The guilty examples ----


def _examples(batch: Any) -> tuple[list[int], np.ndarray]:
  """The rows of a batch that are no padding, and the id of each row."""
  if not isinstance(batch, Mapping) or "weight" not in batch:
    return [], np.zeros([0], np.int64)
  rows = int(tf.shape(batch["weight"])[0])
  ids = batch["example_id"].numpy() if "example_id" in batch else np.arange(rows)
  return [row for row in range(rows) if ids[row] >= 0], ids


def _only(batch: Batch, rows: Sequence[int]) -> Batch:
  """Some rows in their own places (for their own random numbers), and the rest padded with one.

  As everywhere, padding repeats a real row and has weight 0 and the id -1.
  """
  count = int(tf.shape(batch["weight"])[0])
  taken = np.full([count], rows[0])
  taken[list(rows)] = rows
  real = np.isin(np.arange(count), rows)
  part = {
    name: tf.gather(value, taken) if value.shape.rank and value.shape[0] == count else value
    for name, value in batch.items()
  }
  part["weight"] = tf.where(real, part["weight"], tf.zeros_like(part["weight"]))
  if "example_id" in part:
    part["example_id"] = tf.where(real, part["example_id"], -1)
  return part


def _guilty(
  rows: Sequence[int], not_finite: Callable[[Sequence[int]], Mapping[str, str]]
) -> list[tuple[Sequence[int], Mapping[str, str]]]:
  """Halves what is guilty until single rows are left, or rows that only together are guilty."""
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
  run: Callable[[Sequence[int]], Any], guilty: Sequence[int], innocent: Sequence[int]
) -> str | None:
  """The first operation of a pass over `guilty` that gives nan or infinity; None if not known.

  Not one that does so for an innocent example too, such as the mask of an attention.
  """
  found = _checked_pass(run, guilty)
  return None if innocent and found == _checked_pass(run, innocent) else found


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
  """TensorFlow's check of every operation, in this thread; and Keras's frames in tracebacks."""
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
  """Where in the user's code, and in which layer; nothing of either for a gradient's operation."""
  layer, place = "", ""
  for frame, line in traceback.walk_tb(error.__traceback__):
    code = frame.f_code
    if isinstance(owner := frame.f_locals.get("self"), (keras.Layer, tf_keras.layers.Layer)):
      layer = f" in layer {owner.name!r}"
    if is_the_users(code.co_filename):
      place = f" ({os.path.basename(code.co_filename)}:{line}, in {code.co_name})"
  return layer + place


# ---- On disk ----


def save(checkpoint: tf.train.Checkpoint, model_dir: str, *, is_chief: bool = True) -> str:
  """Writes the state before the bad step, in place of an earlier one; returns its path (host).

  Every worker of a cluster takes part, and the chief's is kept.
  """
  folder = os.path.join(model_dir, FOLDER)
  if not is_chief:
    with tempfile.TemporaryDirectory() as scratch:
      return checkpoint.write(os.path.join(scratch, _STATE))
  if tf.io.gfile.exists(folder):
    tf.io.gfile.rmtree(folder)
  tf.io.gfile.makedirs(folder)
  return checkpoint.write(os.path.join(folder, _STATE))


def save_report(report: Report, model_dir: str) -> None:
  """Writes the table beside the state (host, the chief)."""
  atomic_write(os.path.join(model_dir, FOLDER, "report.txt"), f"{report}\n")


def saved_state(model_dir: str) -> str:
  """Returns the path of the state that `save` has written.

  Raises:
    ConfigError: there is none.
  """
  path = os.path.join(model_dir, FOLDER, _STATE)
  if not tf.io.gfile.exists(f"{path}.index"):
    raise ConfigError(
      f"there is no step to replay in {os.path.join(model_dir, FOLDER)}; a run with run.actions = "
      "[@StopOnNonFinite()] leaves one there when it meets NaN or infinity."
    )
  return path
