"""The contract a user implements: a `Task` says what to learn; the framework says how, in the open.

docs/writing-a-task.md shows examples.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from framework.backend import models
from framework.backend.autograph import as_written, converted
from framework.errors import ConfigError, kind
from framework.inputs.datasets import Batch, Preprocess
from framework.inputs.sources import Source, StreamSource

if TYPE_CHECKING:
  from framework.step import EvalStep, Step

from framework.metrics import REPORTED, Loss, Weighted


class Task:
  """What to learn: a model, its data, its loss. Subclass it; only four methods are required.

  The framework sets `self.model` to what `build_model` returned. A constructor runs before any
  device is touched, so it should only keep its arguments.
  """

  model: Any = None
  chance_loss: float | None = None
  """The loss of guessing, such as log(10) for 10 classes; --mode=verify holds the first against it.
  None: not known."""
  accepted: Mapping[str, str] = types.MappingProxyType({})
  """What this task does on purpose and --mode=verify shall not call a failure: the name of the
  cause in docs/verify.md -> why, such as {"batch-norm statistics": "local, as in the paper"}.
  """

  def fit(self) -> Mapping[str, bytes]:
    """Learns from the training split what is needed besides weights, such as a vocabulary.

    Called once in the life of a run, by the first process of those that train together, on the
    host; what it returns is kept in <model_dir>/assets and given to `use`.

    Returns:
      File name -> content. The same training data must give the same bytes.
    """
    return {}

  def use(self, assets: Mapping[str, bytes]) -> None:
    """Takes what `fit` has learned, now or long ago; before `source` and `build_model`.

    Called in every mode and process, on the host, if the task has a `fit` of its own.
    """

  def build_model(self) -> Any:
    """Makes and returns the model, with its variables built.

    Called once, in `strategy.scope()`. A Keras 3 or tf_keras model, any `tf.Module`, or a dict
    of them (one optimizer can then own each; see `variables_of`).
    """
    raise _missing(self, "build_model()")

  def source(self, split: str) -> Source | StreamSource:
    """Returns what to read for `split` ("train" or "eval"); no batching, shuffling or sharding.

    Called on the host.
    """
    raise _missing(self, "source(split)")

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Maps a whole batch, inside the input pipeline on the host; vectorised.

    When training, `batch["seed"]` is int32 [n, 2], one stateless seed for each example: use it
    with `tf.image.stateless_*` so that augmentation repeats after a restart.
    """
    del training
    return batch

  def forward(self, batch: Batch, training: bool) -> Any:
    """Returns the model's outputs for this replica's part of the batch (replica context)."""
    raise _missing(self, "forward(batch, training)")

  def loss(self, outputs: Any, batch: Batch) -> Loss:
    """Returns this replica's sums (replica context), usually by `Loss.from_examples`."""
    raise _missing(self, "loss(outputs, batch)")

  @as_written
  def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Weighted]:
    """Returns name -> (total, weight), this replica's sums (replica context)."""
    del outputs, batch
    return {}

  def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
    """Returns further metrics, name -> value: functions of the means over a loop or an evaluation.

    For what is no mean itself, such as a perplexity, exp of the mean loss. Called on the host, of
    each loop of training and of each evaluation, after all replicas are summed.

    Args:
      means: name -> total / weight of all that was logged; NaN where the weights sum to 0.
    """
    del means
    return {}

  @as_written
  def regularization(self) -> tf.Tensor | float:
    """Returns the penalty added once to the mean training loss (replica context).

    The default adds up what the layers of a Keras model declare (`kernel_regularizer`, ...).
    """
    return models.regularization(self.model)

  def variables_of(self, optimizer: str) -> list[Any]:
    """Returns the trainable variables that the optimizer of this name updates.

    The default gives all to a single optimizer, or those of `self.model[optimizer]` where the
    model is a dict with that key.
    """
    if isinstance(self.model, Mapping) and optimizer in self.model:
      return models.trainable_variables(self.model[optimizer])
    return models.trainable_variables(self.model)

  @as_written
  def training_loss(self, step: Step, batch: Batch) -> Loss:
    """Returns the regularised local loss of one (micro-)batch: what is differentiated.

    Logs the metrics too, at each call: of several passes over a batch, call it in one.
    """
    outputs = converted(self.forward)(batch, training=True)
    step.log(_metrics(self, outputs, batch))
    loss = Loss.checked(converted(self.loss)(outputs, batch))
    return loss.plus_regularization(converted(self.regularization)())

  @as_written
  def train_step(self, step: Step, batch: Batch) -> None:
    """One training step on one replica: override it for full control of the loop.

    `step` holds the verbs; `step.update` runs them in order. This default is
    `step.update(lambda b: self.training_loss(step, b), batch)`; docs/full-control.md writes
    `step.update` out.
    """
    step.update(lambda part: self.training_loss(step, part), batch)

  @as_written
  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """One evaluation step on one replica: logs the loss and the metrics of its examples."""
    outputs = converted(self.forward)(batch, training=False)
    loss = Loss.checked(converted(self.loss)(outputs, batch))
    step.log({"loss": (loss.total, loss.weight)})
    step.log(_metrics(self, outputs, batch))

  def export_signature(self) -> Callable[..., Any]:
    """Returns the `tf.function`, with an input signature, that a SavedModel serves.

    The default serves a Keras model with one input; override it for anything else.
    """
    return models.serving_function(self.model)


def _missing(task: Task, method: str) -> ConfigError:
  return ConfigError(
    f"{type(task).__name__} does not define {method}, which every Task must; see framework/task.py."
  )


def preprocess_of(task: Task) -> Preprocess | None:
  """Returns the task's own preprocessing, None if it has none, which saves a call a batch."""
  return task.preprocess if type(task).preprocess is not Task.preprocess else None


def derived_metrics(task: Task, means: Mapping[str, float]) -> dict[str, float]:
  """Returns `task.derived(means)` as floats, or raises if it would hide another value (host)."""
  if not means:  # of no batch at all
    return {}
  values = task.derived(types.MappingProxyType(means))
  if not isinstance(values, Mapping):
    raise ConfigError(
      f"{type(task).__name__}.derived() returns {kind(values)}; it must be a dict of name -> float."
    )
  for name in values:
    if name in means or name in REPORTED:
      raise ConfigError(
        f"{type(task).__name__}.derived() returns {name!r}, which is reported already; rename it, "
        f"for example {f'my_{name}'!r}."
      )
  return {name: float(value) for name, value in values.items()}


def _metrics(task: Task, outputs: Any, batch: Batch) -> Mapping[str, Weighted]:
  """Returns `task.metrics(...)`, or raises if it would mix with what the framework reports."""
  metrics = converted(task.metrics)(outputs, batch)
  for name in REPORTED if isinstance(metrics, Mapping) else ():
    if name in metrics:
      raise ConfigError(
        f"{type(task).__name__}.metrics() returns {name!r}, which the framework reports itself; "
        f"rename it, for example {f'my_{name}'!r}."
      )
  return metrics
