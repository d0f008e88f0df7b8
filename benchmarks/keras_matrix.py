"""Every loss, metric and preprocessing layer of both Kerases: `from_keras` beside `fit`.

  uv run python -m benchmarks.keras_matrix    # says which row of docs/keras-matrix.md is wrong

`fit` and `evaluate` on one device are the reference; here the same steps run on 1, 2 and 3 replicas
(logical CPUs), which do not divide the batch. An entry is equal (weights, history, evaluation), or
refused in one line. Entries that are equal share a model with many outputs, each with weights of
its own, so that all of a kind are traced once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import keras_entries
from benchmarks.keras_entries import Entry
from loopwright.errors import ConfigError
from loopwright.evaluator import Evaluator
from loopwright.inputs import datasets
from loopwright.keras_task import from_keras
from loopwright.models.compiled_losses import ElementLoss
from loopwright.strategies import factories
from loopwright.trainer import Trainer

KERAS = {"keras": keras, "tf_keras": tf_keras}
REPLICAS = (1, 2, 3)
TOLERANCE = 1e-5
"""Of a value of size 1, or relative to a larger one: some hundred roundings of float32, 6e-8 each,
in 6 steps, each with sums over 7 rows."""
ROWS, BATCH, EPOCHS, RATE = 21, 7, 2, 0.02
EVALUATED = 9  # rows in a batch here; `evaluate` takes all at once


# ---- One training, by fit and here ----


@dataclasses.dataclass
class Trial:
  """A function that makes and compiles a model, and what `fit` gets.

  Attributes:
    make: returns the compiled model, always with the same initial weights.
    x, y, weight: as for `fit`.
    batch: rows of a batch.
  """

  make: Callable[[], Any]
  x: Any
  y: Any
  weight: Any = None
  batch: int = BATCH


Outcome = dict[str, np.ndarray]


def fitted(trial: Trial) -> Outcome:
  """Returns what `fit` and `evaluate` report, and the weights, by name."""
  model = trial.make()
  given = {"sample_weight": trial.weight, "verbose": 0}
  history = model.fit(
    trial.x, trial.y, batch_size=trial.batch, epochs=EPOCHS, shuffle=False, **given
  ).history
  evaluation = model.evaluate(trial.x, trial.y, batch_size=ROWS, return_dict=True, **given)
  found = {f"training {name}": np.array(values) for name, values in history.items()}
  return found | _evaluation(evaluation) | _weights(model)


def trained(trial: Trial, replicas: int) -> Outcome:
  """Returns the same of `from_keras` on so many logical CPUs.

  Raises:
    ConfigError: the model is refused.
  """
  strategy = strategy_of(replicas)
  # tf_keras needs a function on several replicas; a Keras 3 model moves into the scope.
  model = trial.make()
  given = trial.make if replicas > 1 and isinstance(model, tf_keras.Model) else model
  validation = (trial.x, trial.y) if trial.weight is None else (trial.x, trial.y, trial.weight)
  task = from_keras(given, trial.x, trial.y, sample_weight=trial.weight, validation_data=validation)

  def dataset_fn(position: Any) -> tf.data.Dataset:
    return datasets.train_dataset(
      task.source("train"), global_batch_size=trial.batch, position=position, shuffle=False,
      preprocess=task.preprocess, pad_multiple=replicas,
    )  # fmt: skip

  trainer = Trainer(
    task=task, strategy=strategy, global_batch_size=trial.batch, optimizer=task.own_optimizer,
    dataset_fn=dataset_fn,
  )  # fmt: skip
  epochs = [trainer.train(tf.constant(ROWS // trial.batch)) for _ in range(EPOCHS)]
  size = ROWS if trial.batch == ROWS else EVALUATED
  dataset = datasets.eval_dataset(
    task.source("eval"), global_batch_size=size, pad_multiple=replicas
  )
  evaluation = Evaluator(task=task, strategy=strategy, dataset=dataset).evaluate()
  found = {f"training {name}": np.array([each[name] for each in epochs]) for name in epochs[0]}
  return found | _evaluation(evaluation) | _weights(task.model)


def _evaluation(results: Mapping[str, Any]) -> Outcome:
  return {f"evaluated {name}": np.asarray(value) for name, value in results.items()}


def _weights(model: Any) -> Outcome:
  weights = [np.asarray(weight) for weight in model.get_weights()]
  numbers = [weight for weight in weights if weight.dtype.kind in "iuf"]  # and no vocabularies
  return {f"weight {number}": weight for number, weight in enumerate(numbers)}


@functools.cache
def strategy_of(replicas: int) -> tf.distribute.Strategy:
  """Returns one strategy for each number of replicas on CPUs."""
  if replicas == 1:
    return factories.default()
  return tf.distribute.MirroredStrategy(
    [f"CPU:{number}" for number in range(replicas)],
    cross_device_ops=tf.distribute.ReductionToOneDevice(),
  )


def differences(reference: Outcome, ours: Outcome, names: Sequence[str] | None = None) -> list[str]:
  """Returns a line for each value that differs by more than the tolerance."""
  lines = []
  for name, expected in reference.items():
    if names is not None and name not in names:
      continue
    value = ours.get(name)
    if value is None or value.shape != expected.shape:
      lines.append(f"{name}: {expected} in Keras, {value} here")
      continue
    limit = TOLERANCE * np.maximum(1.0, np.abs(expected))
    same = (np.abs(value - expected) <= limit) | (value == expected)
    if not np.all(same | (np.isnan(value) & np.isnan(expected))):
      apart = np.nanmax(np.abs(value - expected))
      lines.append(f"{name}: {apart:.2g} apart; {expected.ravel()[:3]} {value.ravel()[:3]}")
  return lines


# ---- Models of many entries ----


def head(k: Any, inputs: Any, shape: Sequence[int], activation: str | None, name: str) -> Any:
  """Returns an output [n, *shape] with weights of its own, in a closed form."""
  count, size = int(inputs.shape[-1]), int(np.prod(shape))
  start = np.sin(1.0 + np.arange(count * size)).reshape(count, size)
  dense = k.layers.Dense(size, kernel_initializer=k.initializers.Constant(start))(inputs)
  shaped = k.layers.Reshape(tuple(shape))(dense)
  return k.layers.Activation(activation or "linear", name=name)(shaped)


def of_losses(k: Any, entries: Sequence[Entry], batch: int = BATCH) -> Trial:
  """Returns a model with an output for each loss."""
  data = [keras_entries.DATA[entry.data] for entry in entries]
  names = [f"out{number}" for number in range(len(entries))]

  def make() -> Any:
    inputs = k.layers.Input([4])
    outputs = [
      head(k, inputs, one.shape, one.activation, name)
      for name, one in zip(names, data, strict=True)
    ]
    model = k.Model(inputs, outputs if len(outputs) > 1 else outputs[0])
    losses = [entry.made(k.losses) for entry in entries]
    model.compile(k.optimizers.SGD(RATE), losses if len(losses) > 1 else losses[0])
    return model

  y = [one.y(ROWS) for one in data]
  # Keras 3 multiplies losses [n, t] by weights [n] wrongly, or not at all.
  weight = keras_entries.weight(ROWS) if all(len(one.shape) == 1 for one in data) else None
  several = len(entries) > 1 and weight is not None
  weights = [weight] * len(entries) if several and k is tf_keras else weight
  return Trial(make, keras_entries.inputs(ROWS), y if len(y) > 1 else y[0], weights, batch)


def of_metrics(k: Any, entries: Sequence[Entry]) -> Trial:
  """Returns a model with an output for each kind of data, and all metrics of this kind at it."""
  kinds = sorted({entry.data for entry in entries})

  def make() -> Any:
    inputs = k.layers.Input([4])
    given: dict[str, dict[str, list[Any]]] = {"metrics": {}, "weighted_metrics": {}}
    outputs = {}
    for kind in kinds:
      one, output = keras_entries.DATA[kind], kind.replace(" ", "_")
      outputs[kind] = head(k, inputs, one.shape, one.activation, output)
      of_kind = [(number, e) for number, e in enumerate(entries) if e.data == kind]
      for which, prefix in (("metrics", "m"), ("weighted_metrics", "w")):
        given[which][output] = [
          e.made(k.metrics, name=f"{prefix}{n}")
          for n, e in of_kind
          if which == "metrics" or not e.is_unweighted(k.__name__)
        ]
    model = k.Model(inputs, list(outputs.values()))
    losses = [_pulled] * len(kinds)
    if len(kinds) == 1:
      given = {which: lists[output] for which, lists in given.items()}  # type: ignore[misc]
    model.compile(k.optimizers.SGD(RATE), losses if len(kinds) > 1 else losses[0], **given)
    return model

  y = [keras_entries.DATA[kind].y(ROWS) for kind in kinds]
  weight = keras_entries.weight(ROWS)
  several = len(kinds) > 1
  weights = [weight] * len(kinds) if several and k is tf_keras else weight
  return Trial(make, keras_entries.inputs(ROWS), y if several else y[0], weights)


def _pulled(y_true: Any, y_pred: Any) -> Any:
  """A loss [n] for outputs of any shape, so that they change from step to step."""
  del y_true
  return tf.reduce_mean(tf.square(y_pred - 0.3), axis=list(range(1, y_pred.shape.rank)))


def of_layers(k: Any, entries: Sequence[Entry]) -> Trial:
  """Returns a model with an input, a preprocessing layer and an output for each entry."""
  names = [f"layer{number}" for number in range(len(entries))]

  def make() -> Any:
    inputs, outputs = [], []
    for name, entry in zip(names, entries, strict=True):
      value = keras_entries.INPUTS[entry.data](ROWS)
      dtype = "string" if value.dtype == object else value.dtype.name
      inputs.append(k.layers.Input(value.shape[1:], dtype=dtype, name=f"in_{name}"))
      layer = entry.made(k.layers)
      if entry.adapt:
        layer.adapt(value)
      found = keras_entries.floats(k, keras_entries.applied(entry, layer, inputs[-1]))
      small = k.layers.Rescaling(0.01 if "pictures" in entry.data else 0.1)(found)
      outputs.append(head(k, k.layers.Flatten()(small), [1], None, name))
    model = k.Model(inputs, outputs if len(outputs) > 1 else outputs[0])
    random = any(entry.random for entry in entries)
    model.compile(k.optimizers.SGD(0.0 if random else 1e-3), "mse")
    return model

  x = {f"in_{n}": keras_entries.INPUTS[e.data](ROWS) for n, e in zip(names, entries, strict=True)}
  x = {name: tf.constant(v) if v.dtype == object else v for name, v in x.items()}
  y = [np.sin(np.arange(ROWS, dtype=np.float32) + n)[:, np.newaxis] for n in range(len(entries))]
  return Trial(make, x, y if len(y) > 1 else y[0])


GROUPS: dict[str, Callable[..., Trial]] = {
  "losses": of_losses, "metrics": of_metrics, "layers": of_layers,
}  # fmt: skip


# ---- The matrix ----


def together(kind: str, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
  """Yields the entries that share a model: of what is refused and what has a mask, each alone."""
  shared: dict[Any, list[Entry]] = {}
  for entry in entries:
    if entry.is_shared:
      over_time = kind == "losses" and len(keras_entries.DATA[entry.data].shape) > 1
      shared.setdefault((entry.random, over_time), []).append(entry)
  yield from shared.values()
  yield from ([entry] for entry in entries if not entry.is_shared)


def of_call(library: str, entry: Entry) -> list[str]:
  """Returns a line if what the framework adds up is not what the loss itself returns."""
  data = keras_entries.DATA[entry.data]
  y_true, y_pred = data.y(ROWS), data.predicted(ROWS)
  loss = entry.made(KERAS[library].losses)
  total, count, _ = ElementLoss("out", loss, KERAS[library])(
    tf.constant(y_true), tf.constant(y_pred)
  )
  if library == "tf_keras" and y_true.ndim == 1:
    y_true = y_true[:, np.newaxis]  # as its `fit` does before the call
  ours, expected = float(tf.reduce_sum(total) / tf.reduce_sum(count)), float(loss(y_true, y_pred))
  if abs(ours - expected) <= TOLERANCE * max(1.0, abs(expected)):
    return []
  return [f"{library} {entry}: {ours} here, {expected} by its call"]


def disagreements(
  library: str, kind: str, entries: Sequence[Entry], replicas: Sequence[int] = REPLICAS
) -> list[str]:
  """Returns a line for each thing that is neither equal to `fit` nor refused as the entry says."""
  k = KERAS[library]
  if entries[0].direct:
    return of_call(library, entries[0])
  options = {"batch": ROWS} if kind == "losses" and entries[0].masked else {}
  trial = GROUPS[kind](k, entries, **options)
  what = f"{library} {kind} {', '.join(map(str, entries)) if len(entries) < 3 else ''}"
  if entries[0].refused:
    return [
      line for count in replicas if count > 1 or not entries[0].alone
      for line in _unrefused(trial, count, entries[0], what)
    ]  # fmt: skip
  reference = fitted(trial)
  names = None
  if entries[0].random:  # training draws other numbers, and the rate is 0
    names = [name for name in reference if not name.startswith("training")]
  lines = []
  for count in replicas:
    try:
      found = differences(reference, trained(trial, count), names)
    except ConfigError as error:
      found = [f"refused: {error}"]
    lines += [f"{what} on {count}: {line}" for line in found]
  return lines


def _unrefused(trial: Trial, count: int, entry: Entry, what: str) -> list[str]:
  try:
    trained(trial, count)
  except ConfigError as error:
    text = str(error)
    wrong = entry.refused not in text or "\n" in text
    return [f"{what} on {count}: refused, but with {text!r}"] if wrong else []
  return [f"{what} on {count}: not refused"]


def missing(library: str) -> list[str]:
  """Returns what Keras exports and no entry covers: a class, or an argument of one."""
  k, lines = KERAS[library], []
  for kind in GROUPS:
    entries = keras_entries.entries(kind, library)
    for name, of in keras_entries.exported(k, kind).items():
      given = [entry for entry in entries if entry.name == name]
      if name in keras_entries.elsewhere(kind):
        continue
      if not given:
        lines.append(f"{library}.{kind}.{name} has no entry")
        continue
      if kind != "losses":
        continue
      known = {argument for entry in given for argument in entry.arguments}
      for argument in inspect.signature(of.__init__).parameters:
        if argument not in known | keras_entries.NO_CHOICE:
          lines.append(f"{library}.{kind}.{name}({argument}=) has no entry")
  return lines


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the whole matrix, and prints what disagrees."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--library", choices=KERAS, help="only this one")
  parser.add_argument("--kind", choices=GROUPS, help="only this kind")
  given = parser.parse_args(arguments)
  devices = [tf.config.LogicalDeviceConfiguration()] * max(REPLICAS)
  tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
  lines = []
  for library in [given.library] if given.library else KERAS:
    lines += missing(library)
    for kind in [given.kind] if given.kind else GROUPS:
      for entries in together(kind, keras_entries.entries(kind, library)):
        found = disagreements(library, kind, entries)
        lines += found
        print(library, kind, len(entries), *map(str, entries[:1]), found or "ok", flush=True)
  print("\n".join(lines) or "all equal or refused as the page says")
  return 1 if lines else 0


if __name__ == "__main__":
  sys.exit(main())
