"""A common interface to models: Keras 3, tf_keras, tf.Module, variables, a dict or list of them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Layer, Model, Variable
from loopwright.host.lazy_keras import tf_keras_classes


def parts(model: Model) -> Iterator[Model]:
  """Yields the single models inside a model, a dict or a list.

  A `tf.Module` does not track Keras 3 variables, so the Keras models among its attributes follow
  it.
  """
  if isinstance(model, Mapping):
    for value in model.values():
      yield from parts(value)
  elif isinstance(model, (list, tuple)):
    for value in model:
      yield from parts(value)
  else:
    yield model
    if isinstance(model, tf.Module) and not is_keras(model):
      yield from _keras_inside(model, set())


def _keras_inside(holder: Model, seen: set[int]) -> Iterator[Layer]:
  """Yields each outermost Keras layer that TensorFlow tracks below a `tf.Module`, once."""
  for child in tf.train.TrackableView.children(holder).values():
    if id(child) not in seen:
      seen.add(id(child))
      yield from [child] if is_keras(child) else _keras_inside(child, seen)


TABLES = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
"""Tables that can be changed."""


class Hidden:
  """A base class of objects in which nothing is looked for."""


def layers(model: Model) -> Iterator[Layer]:
  """Yields the layers of a model's Keras parts, with those inside others and the parts themselves.

  Keras has no public call for it: `Model.layers` has the direct ones alone.
  """
  for part in parts(model):
    yield from part._flatten_layers() if is_keras(part) else ()


def frozen_by_lora(layer: Layer) -> list[Variable]:
  """Returns the weights of a layer of Keras 3 to which LoRA adds a product; [] without LoRA."""
  if not getattr(layer, "lora_enabled", False):
    return []
  added = {each.name.split("_")[1] for each in layer.weights if each.name.startswith("lora_")}
  return [each for each in layer.weights if each.name in added]


def passing_states(model: Model) -> list[Variable]:
  """Returns what an evaluation may assign and gives back: of recurrent layers, of metrics."""
  metrics = (each for part in parts(model) for each in getattr(part, "metrics", ()))
  return [*recurrent_states(model), *(raw(v) for each in metrics for v in each.variables)]


def recurrent_states(model: Model) -> list[Variable]:
  """Returns the states that recurrent layers keep from batch to batch."""
  kept = [getattr(each, "states", ()) for each in layers(model) if getattr(each, "stateful", 0)]
  return [state for state in tf.nest.flatten(kept) if is_variable(state)]


def compute_dtypes(model: Model) -> set[str]:
  """Returns those of a model's layers, or else of the global policy, and of what it trains."""
  policy = keras.config.dtype_policy().compute_dtype
  trained = {raw(variable).dtype.name for variable in trainable_variables(model)}
  return ({layer.compute_dtype for layer in layers(model)} or {policy}) | trained


def raw(variable: Variable) -> tf.Variable:
  """Returns the `tf.Variable` inside a Keras 3 variable, or the variable itself."""
  return variable.value if isinstance(variable, keras.Variable) else variable


def trainable_variables(model: Model) -> list[Variable]:
  """Returns the trainable variables of a model, each once, in the model's order.

  Each is a `keras.Variable` or `tf.Variable`, as in the model, which keeps constraints and names.
  `raw` returns the `tf.Variable` to differentiate.
  """
  return _variables(model, "trainable_variables")


def all_variables(model: Model) -> list[Variable]:
  """Returns all variables of a model, trainable or not, each once; see `trainable_variables`."""
  return _variables(model, "variables")


def is_variable(part: Model | Variable) -> bool:
  """Whether `part` is a single variable, of TensorFlow (distributed or not) or of Keras 3."""
  kinds = (tf.Variable, tf.distribute.DistributedValues, keras.Variable)
  return isinstance(part, kinds)


def weights(model: Model) -> list[Variable]:
  """Returns `all_variables` except those that Keras does not save: the state of random layers."""
  found = {
    id(raw(weight)): weight
    for part in parts(model)
    for weight in (part.weights if is_keras(part) else _of(part, "variables"))
  }
  return list(found.values())


def _variables(model: Model, attribute: str) -> list[Variable]:
  found: dict[int, Variable] = {}
  for part in parts(model):
    for variable in _of(part, attribute):
      found.setdefault(id(raw(variable)), variable)
  return list(found.values())


def _of(part: Model, attribute: str) -> Iterable[Any]:
  """Returns `part.variables` or `part.trainable_variables`; a variable has itself."""
  if is_variable(part):
    return [part] if attribute == "variables" or part.trainable else []
  if isinstance(part, type) or not hasattr(part, attribute):
    what = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
    raise ConfigError(
      f"build_model() returned {what}, which has no {attribute}; "
      "return a Keras model, a tf.Module, a tf.Variable, or a dict or list of them."
    )
  return getattr(part, attribute)


def require_in_scope(variables: Iterable[Variable], strategy: tf.distribute.Strategy) -> None:
  """Raises a ConfigError if a variable is on one device, not on each replica (host)."""
  if strategy.num_replicas_in_sync == 1:
    return
  for variable in variables:
    if not strategy.extended.variable_created_in_scope(raw(variable)):
      raise ConfigError(
        f"the model's variable {name(variable)!r} was not made in strategy.scope(), so the "
        f"{strategy.num_replicas_in_sync} replicas have no copies of it; make the model and its "
        "variables in build_model(), not in __init__ or at the top of a module."
      )


def untracked(model: Model) -> dict[str, Any]:
  """Returns the weights that `tf.train.Checkpoint` does not find in a model, by number.

  For example those of layers in a list that is an attribute of a Keras 3 subclassed model. The
  state of random layers is not a weight; see loopwright/graphs/randomness.py.
  """
  root = tf.train.Checkpoint(model=model)
  known = {id(each) for each in tf.train.TrackableView(root).descendants()}
  return {
    str(number): raw(weight)
    for number, weight in enumerate(weights(model))
    if not known & {id(weight), id(raw(weight))}
  }


def name(variable: Variable) -> str:
  """Returns the name of a variable as users know it, such as `dense/kernel`."""
  return getattr(variable, "path", None) or variable.name


def regularization(model: Model) -> tf.Tensor | float:
  """Returns the sum of the penalties of all Keras layers, a float32 scalar; 0.0 without any."""
  penalties = [p for part in parts(model) if is_keras(part) for p in part.losses]
  return tf.add_n([tf.cast(p, tf.float32) for p in penalties]) if penalties else 0.0


def is_keras(model: Model) -> bool:
  """Whether `model` is a layer or model of either Keras generation."""
  return isinstance(model, (keras.Layer, *tf_keras_classes("layers.Layer")))


def serving_function(model: Model) -> Any:
  """Returns a `tf.function` that calls a Keras model: [n, ...] -> outputs; several by their names.

  Raises:
    ConfigError: not a Keras model with known inputs.
  """
  given = getattr(model, "inputs", None) if is_keras(model) else None
  if not given:
    raise ConfigError(
      f"cannot derive the signature of a SavedModel of {type(model).__name__}; override "
      "Task.export_signature() and return a tf.function with an input_signature."
    )

  def spec(tensor: Any, name: str) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tf.as_dtype(tensor.dtype), name)

  specs: Any = spec(given[0], "inputs")
  if len(given) > 1 and isinstance(model.input, Mapping):
    specs = {name: spec(tensor, name) for name, tensor in model.input.items()}
  elif len(given) > 1:
    specs = [spec(tensor, tensor.name) for tensor in given]

  @tf.function(input_signature=[specs])
  def serve(inputs: Any) -> Any:
    return model(inputs, training=False)

  return serve


def is_local(layer: Layer) -> bool:
  """Whether a layer of batch normalisation uses statistics of a replica's rows."""
  synchronized = getattr(layer, "synchronized", False) or type(layer).__name__.startswith("Sync")
  return bool(layer.trainable) and not synchronized


def locally_normalised(model: Model) -> Iterator[Layer]:
  """Yields the layers of batch normalisation that use statistics of a replica's rows."""
  for layer in layers(model):
    if "BatchNormalization" in type(layer).__name__ and is_local(layer):
      yield layer
