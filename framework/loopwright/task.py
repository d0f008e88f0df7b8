"""The class that a user implements: a `Task` defines what to learn, the framework how.

docs/writing-a-task.md shows examples.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from absl import logging

from loopwright.errors import ConfigError, kind, shown
from loopwright.graphs.aliases import (
  AnySource,
  Batch,
  HostValue,
  Model,
  Structure,
  TensorLike,
  Variable,
)
from loopwright.graphs.autograph import converted, methods_as_written
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.inputs.plan import Preprocess
from loopwright.models import models
from loopwright.models.orbit import writes_scalars

if TYPE_CHECKING:
  from loopwright.engine.eval_step import EvalStep
  from loopwright.models.task_state import TaskState
  from loopwright.reporting.board import Board
  from loopwright.step import Step

from loopwright.metrics import Loss, Metric
from loopwright.metrics.names import REPORTED, require_free


@methods_as_written
class Task:
  """What to learn: a model, its data, its loss. Subclass it; four methods are required.

  The framework sets `self.model` to the result of `build_model`. A constructor runs before
  TensorFlow uses a device, so it should only store its arguments.
  """

  model: Model = None
  chance_loss: float | None = None
  """The loss of guessing, such as log(10) for 10 classes, or None; --mode=verify compares the
  first loss with it."""
  shown: Sequence[str] | None = None
  """The metrics that the lines of progress and result show, in this order: names, or patterns such
  as "*_accuracy"; None shows all but some of the framework's. metrics.jsonl has them all."""
  accepted: Mapping[str, str] = types.MappingProxyType({})
  """Intended deviations that --mode=verify accepts: cause, as named in docs/verify.md -> reason,
  such as {"batch-norm statistics": "local, as in the paper"}."""
  loop_state: TaskState | None = None
  """What the training loop reads and assigns; the trainer sets it."""
  own_optimizer: Callable[[], KerasOptimizer] | None = None
  """A factory of the optimizer that `run` uses for this task, in place of `run.optimizer`; None for
  most tasks. `loopwright.from_keras` sets it to the compiled optimizer."""

  def fit(self) -> Mapping[str, bytes]:
    """Learns assets other than weights from the training split, such as a vocabulary (host).

    Called once per run, by the chief. The framework stores the result in <model_dir>/assets and
    passes it to `use`.

    Returns:
      File name -> content; the same training data must give the same bytes.
    """
    return {}

  @property
  def has_fit(self) -> bool:
    """Whether the task defines `fit`, and so has assets."""
    return type(self).fit is not Task.fit

  def use(self, assets: Mapping[str, bytes]) -> None:
    """Receives the assets of `fit`, from this or an earlier process (host).

    Called in every mode and process before `source` and `build_model`, if the task defines `fit`.
    """

  def build_model(self) -> Model:
    """Returns the model, with its variables built.

    Called once, in `strategy.scope()`. A Keras 3 or tf_keras model, any `tf.Module`, or a dict
    of them (each can have its own optimizer; see `variables_of`). A dict may also hold a
    `tf.Variable`, such as a queue that `Step.assign` sets (with `trainable=False`).
    """
    raise _missing(self, "build_model()")

  def source(self, split: str) -> AnySource:
    """Returns the source of `split`, "train" or "eval", not batched, shuffled or sharded (host).

    Returns:
      A `Source`, `StreamSource` or `Buckets`. For "train" also `Sources`, several at once. For
      "eval" also name -> source, for several sets, whose metrics are named "<name>/<metric>".
    """
    raise _missing(self, "source(split)")

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Maps a whole batch inside the input pipeline, vectorised (host).

    When training, `batch["seed"]` is int32 [n, 2], one stateless seed per example: use it with
    `tf.image.stateless_*`, so that augmentation is the same after a restart. `batch["step"]` is
    int64 [n], in each row the number of the step that gets this batch, from 0, for a curriculum.
    Both are removed afterwards.
    """
    del training
    return batch

  def forward(self, batch: Batch, training: bool) -> Structure:
    """Returns the model's outputs for this replica's examples (replica context).

    Args:
      batch: the features, "weight", "example_id" and "step", int64 [n]: in each row the number of
        training steps before this one (in evaluation: so far).
      training: False in evaluation.
    """
    raise _missing(self, "forward(batch, training)")

  def loss(self, outputs: Structure, batch: Batch) -> Loss:
    """Returns this replica's loss, usually from `Loss.from_examples` (replica context)."""
    raise _missing(self, "loss(outputs, batch)")

  def metrics(self, outputs: Structure, batch: Batch) -> Mapping[str, Metric]:
    """Returns name -> metric of this replica's examples (replica context).

    A metric is a pair (total, weight) for a mean, a `Sum`, or `PerExample` values. `derived`
    computes what is reported of the last two.
    """
    del outputs, batch
    return {}

  def derived(self, values: Mapping[str, HostValue]) -> Mapping[str, TensorLike]:
    """Returns further metrics, computed from what is logged over all replicas (host).

    For metrics that are not means: a perplexity (exp of the mean loss), an F1, an exact AUC. Called
    after each training loop and each evaluation, of several evaluation sets for each set.

    Args:
      values: every logged metric by name: total / weight as a float, NaN where the weights sum to
        0; a Sum as a float64 array of its shape, or a float; in evaluations, PerExample values as
        an array [m, ...] of the examples with weight, in the same order for all names.

    Returns:
      Name -> float, or an array or nested list of at most 100,000 numbers; metrics.jsonl gets all,
      TensorBoard, Orbit's `summary_dir` and the console get the floats.
    """
    del values
    return {}

  def show(self, board: Board) -> None:
    """Shows pictures, distributions and texts of the current weights (host).

    The action `Show` calls it, on every worker of a cluster, with the weights that evaluations use.
    Draw random numbers with a fixed seed, such as `tf.random.stateless_normal(shape, seed=[0, 1])`,
    so that the pictures of two steps are comparable.

    Args:
      board: `board.image(name, array)`, `board.histogram(name, values)`, `board.text(name, text)`;
        `board.metrics` has the values of the evaluation, or loop, before it.
    """
    del board

  def regularization(self) -> tf.Tensor | float:
    """Returns a float scalar, added once to the mean training loss (replica context).

    The default sums the penalties of a Keras model's layers (`kernel_regularizer`, ...).
    """
    return models.regularization(self.model)

  def variables_of(self, optimizer: str) -> list[Variable]:
    """Returns the trainable variables of the named optimizer.

    The default returns those of `self.model[optimizer]` if the model is a dict with that key,
    else all.
    """
    if isinstance(self.model, Mapping) and optimizer in self.model:
      return models.trainable_variables(self.model[optimizer])
    return models.trainable_variables(self.model)

  def training_loss(self, step: Step, batch: Batch) -> Loss:
    """Returns the regularised local loss of one (micro-)batch, to differentiate (replica context).

    Also logs the metrics: with several passes over a batch, call it in only one of them.
    """
    outputs = converted(self.forward)(batch, training=True)
    step.log(_metrics(self, outputs, batch))
    loss = Loss.checked(converted(self.loss)(outputs, batch))
    penalty = converted(self.regularization)()
    step.record.is_penalised |= tf.is_tensor(penalty)
    return loss.plus_regularization(penalty)

  def train_step(self, step: Step, batch: Batch) -> None:
    """Runs one training step (replica context); override it for full control of the loop.

    `step` has the verbs; `step.update` calls them in order. See docs/full-control.md.
    """
    step.update(lambda part: self.training_loss(step, part), batch)

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs loss and metrics of this replica's evaluation examples (replica context)."""
    outputs = converted(self.forward)(batch, training=False)
    loss = Loss.checked(converted(self.loss)(outputs, batch))
    step.log({"loss": (loss.total, loss.weight)})
    step.log(_metrics(self, outputs, batch))

  def export_signature(self) -> Callable[..., Structure]:
    """Returns the `tf.function`, with an input signature, that a SavedModel serves (host).

    The default supports a Keras model with known inputs; override it for other models.
    """
    return models.serving_function(self.model)


def _missing(task: Task, method: str) -> ConfigError:
  return ConfigError(
    f"{type(task).__name__} does not define {method}, but every Task must; see loopwright/task.py."
  )


def preprocess_of(task: Task) -> Preprocess | None:
  """Returns the task's `preprocess`, or None if it is the default: this saves a call per batch."""
  return task.preprocess if type(task).preprocess is not Task.preprocess else None


MOST_NUMBERS = 100_000
"""Of one derived metric: a line of metrics.jsonl has them all."""


def derived_metrics(
  task: Task,
  means: Mapping[str, float],
  others: Mapping[str, HostValue] = types.MappingProxyType({}),
  *,
  only_evaluated: Collection[str] = (),
) -> dict[str, HostValue]:
  """Returns what `task.derived` makes of the metrics, as floats and arrays (host).

  Args:
    task: the task.
    means: what is reported.
    others: Sums and PerExample values, which are not.
    only_evaluated: PerExample metrics that are missing after a training loop.

  Raises:
    ConfigError: a name is taken, a value is no number or too large, or `derived` reads a metric
      that only evaluations have.
  """
  if not means and not others:  # there was no batch
    return {}
  who = f"{type(task).__name__}.derived()"
  if others and type(task).derived is Task.derived:
    _warn_unused(task, others)
  try:
    values = task.derived(types.MappingProxyType({**means, **others}))
  except KeyError as error:
    if not error.args or error.args[0] not in only_evaluated:
      raise
    name = error.args[0]
    raise ConfigError(
      f"{who} reads {name!r} after a training loop, but a PerExample metric exists only in "
      f"evaluations; write `if {name!r} in values:`."
    ) from error
  if not isinstance(values, Mapping):
    raise ConfigError(f"{who} returns {kind(values)}; it must be a dict of name -> float.")
  taken = {*means, *REPORTED}
  require_free(values, taken, who=f"{who} returns", why="which is already reported")
  found = {name: _finished(who, name, value) for name, value in values.items()}
  return {k: v for k, v in found.items() if isinstance(v, float) or not writes_scalars()}


def _finished(who: str, name: str, value: HostValue) -> float | np.ndarray:
  """Returns a derived value as a float or an array; raises ConfigError if it is no such thing."""
  try:
    array = np.asarray(value)
    if not array.shape:
      return float(value)
  except (TypeError, ValueError):  # a text, None, lists of different lengths
    array = np.asarray(None)
  if array.dtype.kind not in "biuf":
    raise ConfigError(
      f"{who} returns {shown(value)} for {name!r}; it must be a number, or an array of numbers."
    )
  if array.size > MOST_NUMBERS:
    raise ConfigError(
      f"{who} returns an array of shape {array.shape} for {name!r}; metrics.jsonl takes at most "
      f"{MOST_NUMBERS:,} numbers: return a summary of it."
    )
  return array


def _warn_unused(task: Task, names: Iterable[str]) -> None:
  logging.log_first_n(
    logging.WARNING,
    "%s logs %s as Sum or PerExample, which only derived() sees; define derived() to report it",
    1,
    type(task).__name__,
    ", ".join(names),
  )


def _metrics(task: Task, outputs: Structure, batch: Batch) -> Mapping[str, Metric]:
  """Returns `task.metrics(...)`; raises ConfigError if the framework reports one of its names."""
  metrics = converted(task.metrics)(outputs, batch)
  if isinstance(metrics, Mapping):  # else a ConfigError of `step.log` says what it must be
    require_free(metrics, who=f"{type(task).__name__}.metrics() returns")
  return metrics
