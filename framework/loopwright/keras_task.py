"""Trains a compiled Keras model: what `fit` would do, in this framework's loop.

docs/models-from-elsewhere.md compares it with `fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.engine.eval_step import EvalStep
from loopwright.errors import ConfigError, kind
from loopwright.graphs.aliases import AnySource, Batch, HostValue, Model, Structure, TensorLike
from loopwright.graphs.autograph import as_written
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.inputs.sources import ArraySource, wrapping
from loopwright.metrics import Loss, Metric, Sum
from loopwright.models import models
from loopwright.models.compiled_keras import CompiledModel, OutputLoss
from loopwright.optimizers import adapters
from loopwright.options.groups import not_taken
from loopwright.task import Task


def from_keras(
  model: Model,
  x: Structure = None,
  y: Structure = None,
  *,
  sample_weight: Structure = None,
  class_weight: Mapping[int, float] | None = None,
  validation_data: Sequence[Structure] | None = None,
  source: Callable[[str], AnySource] | None = None,
  **of_fit: NoReturn,
) -> KerasTask:
  """Returns a task that trains a compiled model of Keras 3 or tf_keras as its `fit` does (host).

  >>> x = np.linspace(-1, 1, 64)[:, np.newaxis]
  >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
  >>> model.compile(keras.optimizers.SGD(0.1), "mse")
  >>> task = lw.from_keras(model, x, 3 * x, validation_data=(x, 3 * x))
  >>> end = lw.run(task=task, train_steps=200, global_batch_size=16, model_dir="runs/line")
  done: step 200 | eval loss ... | runs/line
  >>> end["loss"] < 1e-9, model.get_weights()[0].round(3).tolist()
  (True, [[3.0]])

  `run` uses the compiled optimizer; give it to a `Trainer` of your own as `task.own_optimizer`. The
  model itself is trained, never a copy.

  Args:
    model: compiled, or a function that returns a compiled model, called in the strategy's scope. On
      several replicas a tf_keras model must come from a function.
    x, y: arrays [examples, ...], or lists or dicts of them for several inputs and outputs.
    sample_weight: float [examples], or a list or dict of them by output.
    class_weight: class -> factor of the training examples of this class; for one output. Labels
      that are no integers are rounded.
    validation_data: (x, y) or (x, y, sample_weight), what evaluations read.
    source: instead of x and y, split -> what `Task.source` returns. Its features are "x" and "y";
      "x/<name>" or "x/0" for several inputs, "y/..." for several outputs; "weight", or "weight/..."
      by output.
    of_fit: other arguments of `fit`, which are refused: each has its place in `run`.

  Raises:
    ConfigError: what cannot be taken, in one line; see docs/models-from-elsewhere.md.
  """
  for name in of_fit:
    raise not_taken("from_keras", name, "see docs/models-from-elsewhere.md.")
  if (x is None) == (source is None):
    raise ConfigError("from_keras() takes either x and y, or source; give one of them.")
  if source is None:
    source = _Arrays(train=(x, y, sample_weight), evaluation=validation_data)
  if not callable(source):
    raise ConfigError(
      f"from_keras() got {kind(source)} as source; it must be a function of the split: "
      "source=lambda split: ..."
    )
  return KerasTask(model=model, source=source, class_weight=class_weight)


class KerasTask(Task):
  """A compiled Keras model as a task; `from_keras` makes it."""

  def __init__(
    self,
    *,
    model: Model,
    source: Callable[[str], AnySource],
    class_weight: Mapping[int, float] | None,
  ) -> None:
    """Checks a model that exists; see `from_keras`."""
    self._given, self._source, self._class_weight = model, source, class_weight
    self._is_weighted = bool(class_weight) or getattr(source, "is_weighted", True)
    self._known: tuple[Any, ...] = (None, None, [])
    self._compiled = None if _makes_model(model) else CompiledModel(model)
    self.own_optimizer = lambda: _optimizer_of(self.compiled)()
    if self._compiled is not None:
      self.own_optimizer = _optimizer_of(self._compiled)

  @property
  def compiled(self) -> CompiledModel:
    """The compiled model.

    Raises:
      ConfigError: `build_model` has not yet called the function that returns it.
    """
    if self._compiled is None:
      raise ConfigError("the compiled model does not exist yet; build_model() makes it.")
    return self._compiled

  def build_model(self) -> Model:
    """Returns the compiled model, its variables made in the scope of the strategy."""
    if _makes_model(self._given):
      self._compiled = CompiledModel(self._given())
    model = self.compiled.model
    if not model.built:
      model(_structure(self.source("train").fetch(tf.constant([0], tf.int64)), "x"))
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
      self.compiled.require_separate_rows()
    if tf.distribute.has_strategy():
      _bring_here(model, strategy, must=placement.of(strategy).makes_variables)
    return model

  has_fit = False

  def fit(self, *args: Any, **given: Any) -> Mapping[str, bytes]:
    """Has nothing to learn; see `Task.fit`. What is meant for Keras's `fit` is refused."""
    if args or given:
      raise ConfigError(
        "a task does not train itself; loopwright.run(task=..., train_epochs=10, "
        "global_batch_size=32, model_dir='runs/mine') trains it."
      )
    return {}

  def source(self, split: str) -> AnySource:
    """Returns the arrays, or what the function `source` returns, of "train" or "eval"."""
    return self._source(split)

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Calls KerasHub's preprocessor; multiplies weights of training examples by their classes'."""
    batch = _preprocessed(self.compiled.model, batch)
    if not training or not self._class_weight:
      return batch
    if "y" not in batch:
      raise ConfigError("class_weight is for a model with one output; use sample_weight.")
    factors = _class_weights(batch["y"], self._class_weight)
    if factors.shape.rank != 1:
      raise ConfigError(
        f"class_weight is for one class of each example, but y has shape {batch['y'].shape}; use "
        "sample_weight."
      )
    return {**batch, "weight": batch["weight"] * factors}

  def forward(self, batch: Batch, training: bool) -> Structure:
    """Returns the outputs of the model for this replica's inputs (replica context)."""
    return self.compiled.outputs(_structure(batch, "x"), training=training)

  def loss(self, outputs: Structure, batch: Batch) -> Loss:
    """Returns the sum of the losses; its weight is the number of examples, or of valid elements."""
    losses, real = self._losses(outputs, batch), _real(batch)
    if len(losses) == 1:
      total, weight = losses[0].sums(real)
      return Loss(losses[0].factor * total, weight)
    totals = [each.factor * each.sums(real)[0] for each in losses]
    return Loss(tf.add_n([tf.cast(t, tf.float32) for t in totals]), tf.reduce_sum(real))

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs what `evaluate` reports: a loss with the layers' penalties, and the metrics."""
    outputs = self.forward(batch, training=False)
    if self.compiled.adds_losses_of_rows():  # which must not see padding
      batch = _rows(batch, _real(batch) > 0)
      outputs = self.forward(batch, training=False)
    loss = Loss.checked(self.loss(outputs, batch)).plus_regularization(self.regularization())
    step.log({"loss": (loss.total, loss.weight), **self.metrics(outputs, batch)})

  def metrics(self, outputs: Structure, batch: Batch) -> dict[str, Metric]:
    """Returns the loss of each of several outputs, and the state of the compiled metrics."""
    real, losses = _real(batch), self._losses(outputs, batch)
    found: dict[str, Metric] = {
      f"{each.name}_loss": Loss(*each.sums(real)) for each in losses if len(losses) > 1
    }
    weight = _structure(batch, "weight") if self._is_weighted else None
    given = _rows((_structure(batch, "y"), outputs, weight), real > 0)
    sums = self.compiled.metrics.added(*given)
    return found | {_variable(number): Sum(value) for number, value in enumerate(sums)}

  def regularization(self) -> tf.Tensor | float:
    """Returns the penalties of the layers, a float scalar (replica context).

    Raises:
      ConfigError: layers add losses of rows, which several replicas would count several times.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
      self.compiled.require_no_losses_of_rows()
    return super().regularization()

  def derived(self, values: Mapping[str, HostValue]) -> dict[str, HostValue]:
    """Returns the compiled metrics under the names that `fit` gives them."""
    sums = [values[_variable(n)] for n in range(len(values)) if _variable(n) in values]
    return self.compiled.metrics.results(sums) if sums else {}

  def _losses(self, outputs: Structure, batch: Batch) -> list[OutputLoss]:
    """Returns the losses; `loss` and `metrics` of the same outputs share them."""
    known_outputs, known_batch, losses = self._known
    if known_outputs is not outputs or known_batch is not batch:
      y, weight = _structure(batch, "y"), _structure(batch, "weight")
      losses = self.compiled.losses(y, outputs, weight)
      self._known = outputs, batch, losses
    return losses


class _Arrays:
  """The arrays of `fit` as sources."""

  def __init__(self, *, train: Sequence[Structure], evaluation: Sequence[Structure] | None) -> None:
    self._splits = {"train": train, "eval": evaluation}
    given = [*train[2:], *(evaluation or ())[2:]]
    self.is_weighted = any(weight is not None for weight in given)

  def __call__(self, split: str) -> ArraySource:
    data = self._splits[split]
    if data is None:
      raise ConfigError(
        "from_keras() got no validation_data, so there is nothing to evaluate; pass "
        'validation_data=(x, y), or run with mode="train".'
      )
    x, y, weight = (*data, None)[:3]
    features = {**_named("x", x), **_named("y", y)}
    if weight is not None:
      features |= {n: np.asarray(w, np.float32) for n, w in _named("weight", weight).items()}
    return ArraySource(features=features)


def _makes_model(given: Model | Callable[[], Model]) -> bool:
  return callable(given) and not models.is_keras(given)


def _optimizer_of(compiled: CompiledModel) -> Callable[[], KerasOptimizer]:
  """Returns a factory of optimizers like the compiled one; raises ConfigError if there is none."""
  if adapters.excludes_from_decay(compiled.given_optimizer):
    raise ConfigError(
      "the model's optimizer excludes variables from weight decay, which its get_config() does not "
      "say; write a loopwright.Task, and set run.optimizer with without_decay."
    )
  factory = compiled.optimizer()
  adapters.require_usable(adapters.DEFAULT, factory())
  return factory


def _bring_here(model: Model, strategy: tf.distribute.Strategy, *, must: bool) -> None:
  """Makes each variable that is not of the strategy anew, in its scope (host).

  Raises:
    ConfigError: a variable that `must` be moved is of tf_keras or TensorFlow itself, to which
      layers refer directly.
  """
  for variable in models.all_variables(model):
    if strategy.extended.variable_created_in_scope(models.raw(variable)):
      continue
    if not isinstance(variable, keras.Variable):
      if not must:  # on one device
        continue
      raise ConfigError(
        f"the model {model.name!r} was made outside of strategy.scope(), and its variable "
        f"{models.name(variable)!r} cannot be moved into it; pass a function that makes and "
        "compiles the model: from_keras(make_model, x, y)."
      )
    variable._initialize(tf.constant(variable.numpy()))  # noqa: SLF001


def _named(name: str, structure: Structure) -> dict[str, np.ndarray]:
  """Returns "x" -> array; of several, "x/<key>" or "x/<index>" -> array."""
  if isinstance(structure, Mapping):
    return {f"{name}/{key}": _array(each) for key, each in structure.items()}
  if isinstance(structure, (list, tuple)):
    return {f"{name}/{index}": _array(each) for index, each in enumerate(structure)}
  if not hasattr(structure, "dtype") and not hasattr(structure, "iloc"):
    raise ConfigError(
      f"from_keras() got {kind(structure)} as {name}; it must be an array, or a list or dict of "
      f"arrays; else give source=lambda split: {wrapping(structure)}, with features 'x' and 'y'."
    )
  return {name: _array(structure)}


def _array(value: TensorLike) -> np.ndarray:
  """Returns an array; floats in Keras's precision, as `fit` casts them."""
  array = np.asarray(value)
  return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _structure(batch: Batch, name: str) -> Structure:
  """Returns what `_named` took apart: a tensor, a list or a dict."""
  parts = {key.partition("/")[2]: batch[key] for key in batch if key.startswith(f"{name}/")}
  if not parts:
    return batch[name]
  if all(part.isdigit() for part in parts):
    return [parts[str(index)] for index in range(len(parts))]
  return parts


def _real(batch: Batch) -> tf.Tensor:
  """Returns 1 for each example and 0 for padding, float32 [n]."""
  return tf.cast(batch["example_id"] >= 0, tf.float32)


def _preprocessed(model: Model, batch: Batch) -> Batch:
  """Returns a batch as the `fit` of KerasHub's models preprocesses it, such as texts as tokens.

  Raises:
    ConfigError: the preprocessor makes the labels too.
  """
  if getattr(model, "preprocessor", None) is None or not hasattr(model, "preprocess_samples"):
    return batch
  made = model.preprocess_samples(_structure(batch, "x"))
  if isinstance(made, tuple):
    raise ConfigError(
      f"the preprocessor of {type(model).__name__} makes labels of x, with a weight for each; use "
      "loopwright.tasks.pretrained.FineTunedLM."
    )
  inputs = (
    {f"x/{k}": each for k, each in made.items()} if isinstance(made, Mapping) else {"x": made}
  )
  return {k: each for k, each in batch.items() if k.partition("/")[0] != "x"} | inputs


@as_written
def _rows(structure: Structure, chosen: tf.Tensor) -> Structure:
  """Returns the chosen rows of each tensor, and of the mask and logits that Keras gave it."""

  def rows_of(tensor: tf.Tensor | None) -> tf.Tensor | None:
    if tensor is None:
      return None
    found = _activated(tensor, chosen)
    for name in ("_keras_mask", "_keras_logits"):
      if (kept := getattr(tensor, name, None)) is not None:
        setattr(found, name, tf.boolean_mask(kept, chosen))
    return found

  return tf.nest.map_structure(rows_of, structure)


def _activated(tensor: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
  """Returns the chosen rows; a softmax stays one, whose logits Keras's crossentropies look for."""
  kind_of = None if tf.executing_eagerly() else tensor.op.type
  for name, activation in (("Softmax", tf.nn.softmax), ("Sigmoid", tf.sigmoid)):
    if kind_of == name:
      return activation(tf.boolean_mask(tensor.op.inputs[0], chosen))
  return tf.boolean_mask(tensor, chosen)


def _variable(number: int) -> str:
  return f"compiled_metrics/{number}"


def _class_weights(y: tf.Tensor, weights: Mapping[int, float]) -> tf.Tensor:
  """Returns each row's weight, float32 [n]; 1 for classes without one."""
  if y.shape.rank > 1:
    y = tf.argmax(y, axis=-1) if y.shape[-1] > 1 else y[..., 0]
  classes = tf.cast(tf.round(y) if y.dtype.is_floating else y, tf.int32)
  table = [weights.get(each, 1.0) for each in range(max(weights) + 1)]
  known = tf.gather(tf.constant(table, tf.float32), tf.clip_by_value(classes, 0, len(table) - 1))
  return tf.where((classes >= 0) & (classes < len(table)), known, 1.0)
