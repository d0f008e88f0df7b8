"""Runs a task of the TensorFlow Model Garden unchanged: its model, data, loss and metrics.

    import loopwright.tasks.model_garden
    run.task = @ModelGarden()
    ModelGarden.experiment = @garden_experiment()
    garden_experiment.name = 'resnet_imagenet'
    run.optimizer = @garden_optimizer
    garden_optimizer.experiment = @garden_experiment()

The Garden's `train_step` runs as written up to `optimizer.apply_gradients`; from there on the
gradients go through this framework's verbs. docs/models-from-elsewhere.md compares the results with
those of the Garden's own trainer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from absl import logging

import loopwright
from loopwright import Batch, ConfigError, EvalStep, Loss, Step, StreamSource, Task
from loopwright.distribution import placement
from loopwright.errors import kind
from loopwright.graphs.autograph import as_written, converted
from loopwright.metrics import Weighted


@loopwright.register
def garden_experiment(
  *,
  name: str,
  modules: Sequence[str] = (),
  overrides: Mapping[str, Any] | None = None,
) -> Any:
  """An experiment registered with the Garden, for `ModelGarden` and `garden_optimizer`.

  Args:
    name: its registered name, such as "resnet_imagenet" or "bert/sentence_prediction".
    modules: modules to import first, because they register the experiment and its task, such as
      "official.vision.tasks.image_classification".
    overrides: options to change, nested as in the Garden's YAML files, such as
      {"task": {"model": {"num_classes": 10}}}.

  Returns:
    An `official.core.config_definitions.ExperimentConfig`.

  Raises:
    ConfigError: a package is missing, or there is no such experiment or option.
  """
  factory = _official("official.core.exp_factory")
  for module in modules:
    _official(module)
  try:
    config = factory.get_exp_config(name)
  except LookupError:
    raise ConfigError(
      f"garden_experiment.name is {name!r}, which no imported module of the Garden registers; "
      "correct it, or add the module that registers it to garden_experiment.modules."
    ) from None
  try:
    config.override(dict(overrides or {}), is_strict=True)
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    reason = str(error.args[0] if error.args else error).partition("\n")[0]
    raise ConfigError(
      f"garden_experiment.overrides do not fit the experiment {name!r}: {reason}"
    ) from error
  return config


@loopwright.register
def garden_optimizer(*, experiment: Any) -> tf_keras.optimizers.Optimizer:
  """The optimizer and learning-rate schedule of an experiment of the Garden.

  The Garden builds tf_keras's legacy optimizers by default; this builds the current one of the same
  rule. Supported types are "sgd" (without decay), "adam", "rmsprop", "adagrad" and those that end
  in "_experimental" or "_keras".

  Args:
    experiment: an `ExperimentConfig`, such as that of `garden_experiment`.

  Raises:
    ConfigError: not an experiment, a type that exists only as a legacy optimizer, or an option that
      belongs to the Trainer here.
  """
  _require_experiment("garden_optimizer", experiment)
  package = _official("official.modeling.optimization")
  config = experiment.trainer.optimizer_config
  if config.ema is not None:
    raise ConfigError(
      "the experiment sets trainer.optimizer_config.ema, which the Trainer does here; override it "
      "with None, and set Trainer.ema_decay."
    )
  if getattr(experiment.task, "differential_privacy_config", None) is not None:
    raise ConfigError(
      "the experiment sets task.differential_privacy_config, which changes gradients inside the "
      "optimizer and is not supported; override it with None."
    )
  config = _without_legacy_decay(config)
  factory = package.OptimizerFactory(config)
  optimizer = factory.build_optimizer(factory.build_learning_rate(), use_legacy_optimizer=False)
  if not isinstance(optimizer, tf_keras.optimizers.Optimizer):
    raise ConfigError(
      f"the experiment's optimizer {config.optimizer.type!r} is {type(optimizer).__name__}, a "
      "legacy one; use 'sgd', 'adam', 'rmsprop', 'adagrad', 'adamw_experimental' or "
      "'adafactor_keras', or give run.optimizer another factory."
    )
  return optimizer


@loopwright.register
class ModelGarden(Task):
  """Runs an `official.core.base_task.Task`.

  The Garden takes a mean over the rows of a replica. It is weighted by their number, so the loss is
  the mean over all rows. Padding rows are removed before the Garden sees the batch.
  """

  def __init__(
    self,
    *,
    experiment: Any = None,
    task: Any = None,
    eval_examples: int | None = None,
    accepted: Mapping[str, str] | None = None,
  ) -> None:
    """Keeps its arguments; makes the Garden's task, which uses no device.

    Args:
      experiment: an `ExperimentConfig` with the task, such as that of `garden_experiment`.
      task: alternatively a Garden task or a factory of one; its `task_config` has `train_data` and
        `validation_data`.
      eval_examples: examples per evaluation; None for all, which requires finite data.
      accepted: see `loopwright.Task.accepted`.

    Raises:
      ConfigError: not exactly one of `experiment` and `task`, not a Garden task, or a package is
        missing.
    """
    if (experiment is None) == (task is None):
      given = "neither" if task is None else "both"
      raise ConfigError(
        f"received {given} of ModelGarden.experiment and ModelGarden.task; set one."
      )
    if task is None:
      _require_experiment("ModelGarden", experiment)
      task = _official("official.core.task_factory").get_task(experiment.task)
    self._garden = _made(task)
    self._eval_examples = eval_examples
    self.accepted = dict(accepted or {})
    self._structures: dict[str, Any] = {}
    self._metrics: dict[str, list[Any]] = {"train": [], "eval": []}
    if _overrides(self._garden, "aggregate_logs"):
      logging.warning(
        "%s aggregates outputs of its evaluation on the host; those values are not reported",
        type(self._garden).__name__,
      )

  def build_model(self) -> tf_keras.Model:
    """Builds the Garden's model and metrics, and loads its `init_checkpoint`.

    A model without variables is called once, on the first batch of the training data.

    Raises:
      ConfigError: under mixed_float16, as the Garden's gradients would lack this loop's loss scale;
        or under central storage, as replicas would share the Garden's metrics.
    """
    if tf_keras.mixed_precision.global_policy().name == "mixed_float16":
      raise ConfigError(
        "run.precision is 'mixed_float16', but a Model Garden task takes its gradients itself, "
        "without the Trainer's loss scale; use 'mixed_bfloat16' or 'float32'."
      )
    if placement.here().shares_variables:
      raise ConfigError(
        "run.strategy is @central_storage, whose replicas share their variables, but the metrics "
        "of a Model Garden task are kept per replica; use mirrored."
      )
    model = self._garden.build_model()
    if not model.built:
      inputs = next(iter(self._garden.build_inputs(self._garden.task_config.train_data)))
      self._garden.inference_step(_features(inputs), model)
    self._garden.initialize(model)
    for split, training in (("train", True), ("eval", False)):
      self._metrics[split] = [*self._garden.build_metrics(training=training), *model.metrics]
    return model

  def source(self, split: str) -> StreamSource:
    """Returns the single examples of the Garden's batches, in order.

    If an element is a pair, the features are named "features/..." and "labels/...".

    Raises:
      ConfigError: `build_inputs` does not return one data set of dense tensors.
    """
    config = self._garden.task_config
    params = config.train_data if split == "train" else config.validation_data
    dataset = self._garden.build_inputs(params)
    if not isinstance(dataset, tf.data.Dataset):
      raise ConfigError(
        f"{type(self._garden).__name__}.build_inputs returns {kind(dataset)}; it must return one "
        "tf.data.Dataset: combine several with tf.data.Dataset.zip."
      )
    structure = dataset.element_spec
    self._structures[split] = structure
    names = _names(structure)

    def named(*element: Any) -> dict[str, Any]:
      return dict(zip(names, tf.nest.flatten(element), strict=True))

    examples = dataset.map(as_written(named), num_parallel_calls=tf.data.AUTOTUNE).unbatch()
    limit = self._eval_examples if split == "eval" else None
    return StreamSource(dataset=examples, num_examples=limit)

  def train_step(self, step: Step, batch: Batch) -> None:
    """Makes one update with the gradients of the Garden's `train_step`."""
    step.update(lambda part: self._local_loss(step, part), batch)

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs loss and metrics of the Garden's `validation_step` over this replica's real rows."""
    rows = tf.math.count_nonzero(batch["weight"] > 0)
    logged: list[str] = []

    def evaluated() -> list[tf.Tensor]:
      metrics = self._metrics["eval"]
      _reset(metrics)
      logs = self._garden.validation_step(
        self._inputs("eval", _real(batch)), model=self.model, metrics=metrics
      )
      pairs = _pairs(metrics)
      if self._garden.loss in logs:
        count = tf.cast(rows, tf.float32)
        pairs["loss"] = (tf.cast(logs[self._garden.loss], tf.float32) * count, count)
      logged[:] = pairs
      return [tf.cast(value, tf.float32) for pair in pairs.values() for value in pair]

    def nothing() -> list[tf.Tensor]:
      return [tf.constant(0.0) for _ in range(2 * len(logged))]

    values = tf.cond(rows > 0, converted(evaluated), nothing)
    step.log(dict(zip(logged, zip(values[::2], values[1::2], strict=True), strict=True)))

  def derived(self, means: Mapping[str, float]) -> dict[str, float]:
    """Reads and resets the metrics that are not means, such as an AUC, over all replicas."""
    split = "train" if "gradient_norm" in means else "eval"
    values: dict[str, float] = {}
    for metric in self._metrics[split]:
      if not _is_mean(metric):
        values |= _numbers(metric.name, metric.result())
        metric.reset_state()
    return values

  def export_signature(self) -> Callable[..., Any]:
    """Serves the Garden's `inference_step` on the features of its training data."""
    features = _features(self._structure("train"))
    if isinstance(features, Mapping):  # it may hold the labels too
      wanted = getattr(self.model, "input_names", None) or [*features]
      features = {name: features[name] for name in wanted}
    named = zip(_paths(features, ""), tf.nest.flatten(features), strict=True)

    @tf.function(input_signature=[_any_rows(spec, name) for name, spec in named])
    def serve(*tensors: tf.Tensor) -> Any:
      packed = tf.nest.pack_sequence_as(features, tensors)
      return self._garden.inference_step(packed, self.model)

    return serve

  def _local_loss(self, step: Step, part: Batch) -> Loss:
    rows = tf.cast(tf.math.count_nonzero(part["weight"] > 0), tf.float32)
    applied, metrics = _Applied(), self._metrics["train"]
    _reset(metrics)
    logs = self._garden.train_step(
      self._inputs("train", _real(part)), model=self.model, optimizer=applied, metrics=metrics
    )
    some = tf.minimum(rows, 1.0)
    step.log({name: (total * some, n * some) for name, (total, n) in _pairs(metrics).items()})
    return applied.loss(logs[self._garden.loss], rows)

  def _inputs(self, split: str, batch: Batch) -> Any:
    structure = self._structure(split)
    return tf.nest.pack_sequence_as(structure, [batch[name] for name in _names(structure)])

  def _structure(self, split: str) -> Any:
    if split not in self._structures:
      with tf.init_scope():  # outside of the graph, if a step is being traced
        self.source(split)
    return self._structures[split]


class _AttributeError(ConfigError, AttributeError):
  """An AttributeError, so that `hasattr` is False; any other use gives the user one line."""


class _Applied:
  """Takes the optimizer's place in a Garden `train_step`; keeps what it would apply."""

  def __init__(self) -> None:
    self._pairs: list[tuple[tf.Tensor, tf.Variable]] | None = None

  def apply_gradients(self, grads_and_vars: Any, **unused: Any) -> None:
    """Keeps this replica's gradients of loss / replicas."""
    if self._pairs is not None:
      raise ConfigError(
        "the Model Garden task applies gradients twice in one train_step, which is not supported; "
        "write a loopwright.Task, and call step.update() for each."
      )
    self._pairs = [(tf.convert_to_tensor(g), v) for g, v in grads_and_vars if g is not None]

  def loss(self, loss: tf.Tensor, rows: tf.Tensor) -> Loss:
    """Returns rows x loss with the kept gradients, instead of those of `loss` itself."""
    if self._pairs is None:
      raise ConfigError(
        "the Model Garden task's train_step did not call optimizer.apply_gradients, so it gives no "
        "gradients; write a loopwright.Task for it."
      )
    # The Garden divides its loss by the number of replicas, as its optimizer sums over them.
    factor = rows * tf.distribute.get_strategy().num_replicas_in_sync
    gradients = [gradient for gradient, _ in self._pairs]

    @tf.custom_gradient
    def attached(total: tf.Tensor, *values: tf.Tensor) -> tuple[tf.Tensor, Any]:
      def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
        scaled = [_times(g, tf.cast(upstream * factor, g.dtype)) for g in gradients]
        return upstream, *scaled

      return tf.identity(total), gradient

    total = tf.stop_gradient(_times(tf.cast(loss, tf.float32), rows))
    values = [tf.convert_to_tensor(variable) for _, variable in self._pairs]
    return Loss(as_written(attached)(total, *values), rows)

  def __getattr__(self, name: str) -> Any:
    raise _AttributeError(
      f"the Model Garden task uses optimizer.{name} in its train_step; only apply_gradients is "
      "supported: write a loopwright.Task for it."
    )


def _official(module: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ConfigError(
      f"{module} of the Model Garden cannot be imported ({error}); run: pip install "
      "--no-deps tf-models-official==2.20.0 && pip install pyyaml tensorflow-datasets. Modules of "
      "official.vision need further packages: see docs/models-from-elsewhere.md."
    ) from error


def _require_experiment(who: str, experiment: Any) -> None:
  if not hasattr(experiment, "task") or not hasattr(experiment, "trainer"):
    raise ConfigError(
      f"{who}.experiment is {kind(experiment)}; it must be an ExperimentConfig of the Garden: "
      "write @garden_experiment(), with its name in garden_experiment.name."
    )


def _made(task: Any) -> Any:
  made = task if isinstance(task, tf.Module) or not callable(task) else task()
  wanted = "build_model build_inputs train_step validation_step task_config aggregate_logs"
  if not all(hasattr(made, name) for name in wanted.split()):
    raise ConfigError(
      f"ModelGarden.task is {kind(made)}; it must be an official.core.base_task.Task, or a factory "
      "of one."
    )
  return made


def _overrides(task: Any, method: str) -> bool:
  return getattr(type(task), method).__module__ != "official.core.base_task"


def _without_legacy_decay(config: Any) -> Any:
  """Replaces "sgd" by the same without `decay`, an option of the legacy optimizer; 0 means none."""
  if config.optimizer.type != "sgd":
    return config
  options = config.optimizer.sgd.as_dict()
  if options.pop("decay"):
    raise ConfigError(
      "the experiment's optimizer 'sgd' sets decay, which only the legacy optimizer has; override "
      "it with 0.0, and use a learning-rate schedule."
    )
  config = type(config)(config.as_dict())
  config.override({"optimizer": {"type": "sgd_experimental", "sgd_experimental": options}})
  return config


def _is_pair(structure: Any) -> bool:
  return isinstance(structure, tuple) and len(structure) == 2


def _features(inputs: Any) -> Any:
  return inputs[0] if _is_pair(inputs) else inputs


def _names(structure: Any) -> list[str]:
  """Returns a name per leaf, in the order of `tf.nest.flatten`."""
  if _is_pair(structure):
    parts = {"features": structure[0], "labels": structure[1]}
    return [name for part, value in parts.items() for name in _paths(value, part)]
  return _paths(structure, "features")


def _paths(structure: Any, path: str) -> list[str]:
  if isinstance(structure, Mapping):
    return [p for key in sorted(structure) for p in _paths(structure[key], f"{path}/{key}")]
  if isinstance(structure, (list, tuple)):
    return [p for i, value in enumerate(structure) for p in _paths(value, f"{path}/{i}")]
  return [path]


def _real(batch: Batch) -> Batch:
  """Returns the rows that are not padding; if all are, the first, which must get weight 0."""
  real = batch["weight"] > 0
  first = tf.range(tf.size(real)) == 0
  real |= first & ~tf.reduce_any(real)
  return {name: tf.boolean_mask(value, real) for name, value in batch.items()}


def _times(value: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
  """Returns 0 where the factor is 0, even if the value is not finite."""
  return tf.math.multiply_no_nan(value, factor)


def _any_rows(spec: tf.TensorSpec, name: str) -> tf.TensorSpec:
  return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype, name.strip("/") or "inputs")


# ---- Keras metrics ----


def _is_mean(metric: Any) -> bool:
  """Whether it is total / count of what it has seen, so that a (total, weight) pair can hold it."""
  return (
    isinstance(metric, tf_keras.metrics.Mean)
    and type(metric).result is tf_keras.metrics.Mean.result
  )


def _reset(metrics: Sequence[Any]) -> None:
  for metric in metrics:
    if _is_mean(metric):
      for variable in (metric.total, metric.count):
        variable.assign(tf.zeros_like(variable))


def _pairs(metrics: Sequence[Any]) -> dict[str, Weighted]:
  means = [metric for metric in metrics if _is_mean(metric)]
  return {m.name: (tf.identity(m.total), tf.identity(m.count)) for m in means}


def _numbers(name: str, result: Any) -> dict[str, float]:
  values = np.asarray(result, np.float64)
  if values.ndim == 0:
    return {name: float(values)}
  return {f"{name}_{i}": float(value) for i, value in enumerate(values.reshape(-1))}
