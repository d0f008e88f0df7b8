"""Every optimizer of both Kerases, trained in nine ways, beside a plain loop.

  uv run python -m benchmarks.optimizer_matrix    # says where docs/optimizer-matrix.md is wrong

The plain loop is Keras's own optimizer on one device: the gradient of the whole batch, then
`apply`, step after step, in Python. A cell of the table in docs/optimizer-matrix.md is proved,
which means that the weights after all steps are equal to those of the plain loop (after a restart:
to the bit), or it is refused in one line before the first step. The optimizers of a way train
together, each a network of its own.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.keras_matrix import strategy_of
from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.optimizers import groups, loss_scale
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.warm_start import WarmStart
from loopwright.strategies import factories
from loopwright.task import Task
from loopwright.tasks import optimizers
from loopwright.trainer import Trainer

KERAS = {"keras": keras, "tf_keras": tf_keras}
TOLERANCE = 1e-5
"""Of weights of size 1: some hundred roundings of float32 of 6e-8 each, in 8 steps."""
ROWS, BATCH, STEPS, RATE, DECAY, BAD = 32, 8, 8, 0.02, 0.8, 3
WORDS, WIDTH = 6, 5
SCALE = 1024.0
PAGE = Path(__file__).parent.parent / "docs" / "optimizer-matrix.md"
WAYS = {
  "one": "1 replica",
  "two": "2 replicas",
  "sharded": "sharded",
  "accumulation": "accumulation",
  "float16": "float16, infinity",
  "restart": "restart",
  "warm": "warm start",
  "ema": "EMA",
  "central": "central storage",
}
REFUSED = {
  "central": "whose weight decay cannot be applied to variables that replicas share",
  "sharded": "is not known to treat every element alike",
  "ema": "averages the weights itself",
}
"""What the line of a refused cell says."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """An optimizer with some arguments.

  Attributes:
    library, name: of which Keras, and the class.
    arguments: of the constructor; the learning rate is RATE where they have none.
    refused: in every way, with these words; "" if it trains.
    refuses: the ways in which alone it is refused.
    groups: of `grouped`; the plain loop has an optimizer for each variable instead.
  """

  library: str
  name: str
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  refused: str = ""
  refuses: tuple[str, ...] = ()
  groups: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

  def make(self) -> Any:
    """Returns a new optimizer."""
    return groups.grouped(of=self.single, groups=self.groups) if self.groups else self.single()

  def of_variable(self, name: str) -> Any:
    """Returns a new optimizer for one variable, with the options of its group."""
    found = [options for pattern, options in self.groups.items() if re.fullmatch(pattern, name)]
    own = dict(found[0]) if found else {}
    rate = self.arguments.get("learning_rate", RATE) * own.pop("learning_rate_scale", 1.0)
    return dataclasses.replace(
      self, arguments={**self.arguments, **own, "learning_rate": rate}
    ).single()

  def single(self) -> Any:
    """Returns a new optimizer without groups."""
    if self.name == "LossScaleOptimizer":
      return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE))
    if self.name in ("AdEMAMix", "ADOPT"):
      return getattr(optimizers, self.name)(**{"learning_rate": RATE, **self.arguments})
    if self.name == "MultiOptimizer":
      usual = keras.optimizers.OptimizerMap(keras.optimizers.SGD(RATE))
      return keras.optimizers.MultiOptimizer(usual)
    module: Any = KERAS[self.library].optimizers
    for part in self.name.split("."):
      module = getattr(module, part)
    return module(**{"learning_rate": RATE, **self.arguments})

  def __str__(self) -> str:
    """Returns the call."""
    given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
    home = "" if self.name in ("AdEMAMix", "ADOPT") else f"{self.library}."
    made = f"{home}{self.name}({given})"
    return f"grouped({made}, {dict(self.groups)})" if self.groups else made


REASONS = {
  "LossScaleOptimizer": "use Trainer.loss_scale",
  "MultiOptimizer": "sum gradients a second time",
  "Nadam": "once a variable",
}
"""What the line says of an optimizer that is refused in every way; of others, that it is legacy."""


def entries_of(row: str) -> Iterator[Entry]:
  """Yields what a row of the page says: | `call`; `call` | equal | refused | ..."""
  calls, *cells = (cell.strip(" `") for cell in row.strip("| ").split(" | "))
  refuses = tuple(way for way, cell in zip(WAYS, cells, strict=True) if cell == "refused")
  for call in calls.split("`; `"):
    made: Any = ast.parse(call, mode="eval").body
    groups: dict[str, Any] = {}
    if ast.unparse(made.func) == "grouped":
      made, groups = made.args[0], ast.literal_eval(made.args[1])
    library, _, name = ast.unparse(made.func).rpartition("keras.")
    arguments = {each.arg: ast.literal_eval(each.value) for each in made.keywords}
    some = {"refused": REASONS.get(name, "that is not legacy")}
    if len(refuses) < len(WAYS):
      some = {"refuses": refuses, "groups": groups}
    yield Entry(f"{library}keras", name, arguments, **some)


ROWS_OF_PAGE = PAGE.read_text().partition("| optimizer |")[2].splitlines()[2:]
ENTRIES = [entry for row in ROWS_OF_PAGE for entry in entries_of(row)]


# ---- What they train ----


def rows() -> dict[str, np.ndarray]:
  """Returns the data; most words are several times in a batch."""
  number = np.arange(ROWS)
  words = (number[:, np.newaxis] * np.array([1, 3]) + number[:, np.newaxis] // 5) % (WORDS - 1)
  return {
    "words": words.astype(np.int32),
    "y": np.sin(1.7 * number)[:, np.newaxis].astype(np.float32),
    "weight_of": (0.5 + (number % 3) / 2).astype(np.float32),
    "number": number.astype(np.int32),
  }


def network(k: Any, seed: int = 0) -> Any:
  """Returns words [n, 2] -> [n, 1]: an embedding, a product, a bias and a product."""

  class Start(k.initializers.Initializer):
    def __init__(self, at: int) -> None:
      self.at = at

    def __call__(self, shape: Any, dtype: Any = None, **options: Any) -> tf.Tensor:
      size = int(np.prod(shape))
      value = np.sin(1.0 + self.at + 10 * seed + np.arange(size)) * 0.5
      return tf.constant(value.reshape(tuple(shape)), dtype or tf.float32)

  return k.Sequential(
    [
      k.layers.Input([2], dtype="int32"),
      k.layers.Embedding(WORDS, WIDTH, embeddings_initializer=Start(0), name="embedding"),
      k.layers.Flatten(dtype=None),
      k.layers.Dense(4, "tanh", kernel_initializer=Start(1), bias_initializer=Start(2),
                     name="first"),
      k.layers.Dense(1, kernel_initializer=Start(3), use_bias=False, name="last"),
    ]
  )  # fmt: skip


def loss_of(model: Any, batch: Mapping[str, tf.Tensor], bad: tf.Tensor) -> tuple[Any, Any]:
  """Returns the sums of weighted losses and of weights; infinite where `bad`."""
  error = tf.cast(model(batch["words"], training=True), tf.float32) - batch["y"]
  losses = tf.square(error)[:, 0] * batch["weight_of"]
  return tf.reduce_sum(losses) * tf.where(bad, np.inf, 1.0), tf.reduce_sum(batch["weight_of"])


class Networks(Task):
  """A network and an optimizer for each entry."""

  def __init__(self, entries: Sequence[Entry], *, bad: int = -1, seed: int = 0) -> None:
    """Keeps what to train; the loss of the step after `bad` is infinite."""
    self.entries, self.bad, self.seed = list(entries), bad, seed

  def optimizers(self) -> dict[str, Callable[[], Any]]:
    """Returns the factories by name."""
    return {f"o{number}": entry.make for number, entry in enumerate(self.entries)}

  def build_model(self) -> dict[str, Any]:
    """See `Task`."""
    return {
      f"o{number}": network(KERAS[entry.library], self.seed)
      for number, entry in enumerate(self.entries)
    }

  def source(self, split: str) -> ArraySource:
    """See `Task`."""
    return ArraySource(features=rows())

  def train_step(self, step: Any, batch: Mapping[str, tf.Tensor]) -> None:
    """See `Task`."""
    bad = step.number == self.bad
    for name in self.model:

      def loss(batch: Mapping[str, tf.Tensor], name: str = name) -> Loss:
        return Loss(*loss_of(self.model[name], batch, bad))

      step.update(loss, batch, optimizer=name)


def trainer_of(task: Networks, replicas: int, *, central: bool = False, **options: Any) -> Trainer:
  """Returns a trainer on so many logical CPUs; `central`: whose variables are on one of them."""
  shares = replicas * options.get("accumulation_steps", 1)
  strategy = strategy_of(replicas)
  if central:
    strategy = factories.central_storage(devices=[f"CPU:{at}" for at in range(replicas)])
  return Trainer(
    task=task, strategy=strategy, global_batch_size=BATCH, optimizer=task.optimizers(),
    dataset_fn=lambda position: datasets.train_dataset(
      task.source("train"), global_batch_size=BATCH, position=position, shuffle=False,
      pad_multiple=shares,
    ), **options,
  )  # fmt: skip


def weights_of(task: Networks, copy: int = 0) -> list[list[np.ndarray]]:
  """Returns the weights of each entry, on one replica."""
  return [
    [
      tf.distribute.get_strategy().experimental_local_results(models.raw(v))[copy].numpy()
      if not hasattr(models.raw(v), "values") else models.raw(v).values[copy].numpy()
      for v in models.trainable_variables(model)
    ]
    for model in task.model.values()
  ]  # fmt: skip


def plain(entry: Entry, *, seed: int = 0, bad: int = -1, parts: int = 1) -> list[list[np.ndarray]]:
  """Returns the weights before the first step and after each, then averages, by a plain loop.

  Args:
    bad: the update of the step after this one is left out.
    parts: sum the gradients of so many parts of a batch, as float16 is not exact.
  """
  model, data = network(KERAS[entry.library], seed), rows()
  free = entry.name == "ScheduleFreeAdamW"
  variables = model.trainable_variables
  optimizer = ScheduleFree(entry.arguments) if free else entry.single()
  each = [entry.of_variable(models.name(v)) for v in variables] if entry.groups else []
  found = [[np.array(v) for v in variables]]
  for step in range(STEPS):
    indices = [(step * BATCH + row) % ROWS for row in range(BATCH)]
    sums, weight = [np.zeros(v.shape, np.float32) for v in variables], 0.0
    for part in np.split(np.array(indices), parts):
      batch = {name: tf.constant(values[part]) for name, values in data.items()}
      with tf.GradientTape() as tape:
        total, count = loss_of(model, batch, tf.constant(False))
        scaled = total * SCALE / BATCH if parts > 1 else total
      raw = [models.raw(v) for v in variables]
      gradients = [np.array(tf.convert_to_tensor(g)) for g in tape.gradient(scaled, raw)]
      if parts > 1:
        gradients = [g / (SCALE / BATCH) for g in gradients]
      sums = [s + g for s, g in zip(sums, gradients, strict=True)]
      weight += float(count)
    if step != bad:
      means = [tf.constant(s / np.float32(weight)) for s in sums]
      pairs = list(zip(means, variables, strict=True))
      for own, pair in zip(each, pairs, strict=bool(each)):
        own.apply_gradients([pair])
      if not each:
        optimizer.apply_gradients(pairs)
    found.append([np.array(v) for v in variables])
  return [*found, optimizer.averages if free else []]


class ScheduleFree:
  """Keras's ScheduleFreeAdamW in NumPy, with x and z as they are in its paper.

  Keras's own is no reference: on TensorFlow it reads z after its update where it needs it before.
  """

  def __init__(self, arguments: Mapping[str, Any]) -> None:
    """Keeps the options; the first update begins at the weights."""
    self.warmup, self.decay = (arguments.get(n, 0) for n in ("warmup_steps", "weight_decay"))
    self.step, self.averages = 0, []

  def apply_gradients(self, pairs: Any) -> None:
    """Updates variables."""
    pairs = [(np.array(g, np.float64), v) for g, v in pairs]
    if not self.step:
      self.averages = [np.array(v, np.float64) for _, v in pairs]
      self.z, self.squares = list(self.averages), [0.0 * x for x in self.averages]
    self.step += 1
    rate = RATE * (min(1, self.step / self.warmup) if self.warmup else 1)
    for i, (g, v) in enumerate(pairs):
      self.squares[i] = 0.999 * self.squares[i] + 0.001 * g**2
      self.z[i] = self.z[i] - rate * g / (np.sqrt(self.squares[i] / (1 - 0.999**self.step)) + 1e-8)
      x = self.averages[i] - RATE * self.decay * np.array(v, np.float64) / 0.9  # Keras decays y
      self.averages[i] = x + (self.z[i] - x) / self.step
      v.assign((0.1 * self.z[i] + 0.9 * self.averages[i]).astype(np.float32))


# ---- The ways ----

Weights = list[list[np.ndarray]]


def _trained(task: Networks, replicas: int, **options: Any) -> Trainer:
  trainer = trainer_of(task, replicas, **options)
  trainer.train(tf.constant(STEPS))
  return trainer


def _apart(entries: Sequence[Entry], got: Weights, wanted: Weights, limit: float) -> list[str]:
  lines = []
  for entry, own, other in zip(entries, got, wanted, strict=True):
    apart = max(float(np.abs(a - b).max()) for a, b in zip(own, other, strict=True))
    if not apart <= limit:
      lines.append(f"{entry}: {apart:.2g} apart")
  return lines


def _beside_plain(
  entries: Sequence[Entry], replicas: int, seed: int = 0, **options: Any
) -> list[str]:
  task = Networks(entries)
  trainer = _trained(task, replicas, **options)
  wanted = [plain(entry)[STEPS] for entry in entries]
  lines = []
  for copy in range(1 if options.get("central") else replicas):
    lines += _apart(entries, weights_of(task, copy), wanted, TOLERANCE)
  return lines + _evaluated(trainer, task, entries)


def _evaluated(trainer: Trainer, task: Networks, entries: Sequence[Entry]) -> list[str]:
  """Schedule-free weights are evaluated at their average."""
  free = [number for number, entry in enumerate(entries) if entry.name == "ScheduleFreeAdamW"]
  if not free:
    return []
  if trainer.parts.ema is None:
    return ["ScheduleFreeAdamW is evaluated where it trains"]
  with trainer.parts.ema.in_place():
    got = weights_of(task)
  own = [entries[number] for number in free]
  return _apart(own, [got[number] for number in free], [plain(e)[-1] for e in own], TOLERANCE)


def _float16(entries: Sequence[Entry]) -> list[str]:
  for each in KERAS.values():
    each.mixed_precision.set_global_policy("mixed_float16")
  try:
    task = Networks(entries, bad=BAD)
    trainer = _trained(task, 2, loss_scale=lambda: loss_scale.DynamicLossScale(initial=SCALE * 2))
    wanted = [plain(entry, bad=BAD, parts=2)[STEPS] for entry in entries]
    lines = _apart(entries, weights_of(task), wanted, TOLERANCE)
    skipped = int(trainer.skipped_steps.numpy())
    return lines if skipped == 1 else [*lines, f"{skipped} steps were left out"]
  finally:
    for each in KERAS.values():
      each.mixed_precision.set_global_policy("float32")


def _restart(entries: Sequence[Entry]) -> list[str]:
  options = {"accumulation_steps": 2}
  task = Networks(entries)
  whole = trainer_of(task, 2, **options)
  with tempfile.TemporaryDirectory() as folder:
    manager = CheckpointManager(trainer=whole, directory=folder, experiment={"task": "t"})
    whole.train(tf.constant(BAD))
    manager.save()
    manager.wait()
    whole.train(tf.constant(STEPS - BAD))
    again = Networks(entries, seed=1)
    other = trainer_of(again, 2, **options)
    CheckpointManager(
      trainer=other, directory=folder, experiment={"task": "t"}
    ).restore_or_initialize()
    other.train(tf.constant(STEPS - BAD))
  lines = _apart(entries, weights_of(again), weights_of(task), 0.0)
  return lines + _apart(entries, weights_of(again, 1), weights_of(task), 0.0)


def _warm(entries: Sequence[Entry]) -> list[str]:
  with tempfile.TemporaryDirectory() as folder:
    first = trainer_of(Networks(entries, seed=1), 1)
    manager = CheckpointManager(trainer=first, directory=folder, experiment={"task": "t"})
    first.global_step.assign(1)  # step 0 is not saved
    manager.save()
    manager.wait()
    task = Networks(entries)
    trainer = trainer_of(task, 2)
    WarmStart(path=folder, match="path").apply(trainer)
  trainer.train(tf.constant(STEPS))
  return _apart(
    entries, weights_of(task), [plain(entry, seed=1)[STEPS] for entry in entries], TOLERANCE
  )


def _ema(entries: Sequence[Entry]) -> list[str]:
  task = Networks(entries)
  trainer = _trained(task, 2, ema_decay=DECAY)
  wanted = []
  for entry in entries:
    first, *others, _ = plain(entry)
    average = [w.astype(np.float64) for w in first]
    for weights in others:
      average = [DECAY * a + (1 - DECAY) * w for a, w in zip(average, weights, strict=True)]
    wanted.append(average)
  with trainer.parts.ema.in_place():
    return _apart(entries, weights_of(task), wanted, TOLERANCE)


TRIALS: dict[str, Callable[[Sequence[Entry]], list[str]]] = {
  "one": lambda entries: _beside_plain(entries, 1),
  "two": lambda entries: _beside_plain(entries, 2),
  "sharded": lambda entries: _beside_plain(entries, 2, shard_optimizer_state=True),
  "accumulation": lambda entries: _beside_plain(entries, 2, accumulation_steps=2),
  "float16": _float16,
  "restart": _restart,
  "warm": _warm,
  "ema": _ema,
  "central": lambda entries: _beside_plain(entries, 2, central=True),
}
OPTIONS: dict[str, dict[str, Any]] = {
  "sharded": {"shard_optimizer_state": True}, "ema": {"ema_decay": DECAY},
  "central": {"central": True},
}  # fmt: skip


def _unrefused(entry: Entry, way: str) -> list[str]:
  """Returns a line unless an entry is refused in one line before the first step."""
  words = entry.refused or REFUSED[way]
  try:
    trainer_of(Networks([entry]), 2, **OPTIONS.get(way, {}))
  except ConfigError as error:
    wrong = words not in str(error) or "\n" in str(error)
    return [f"{entry}: refused, but with {str(error)!r}"] if wrong else []
  return [f"{entry}: not refused"]


def disagreements(way: str, entries: Sequence[Entry]) -> list[str]:
  """Returns a line for each entry that is neither equal nor refused as it says."""
  lines = []
  for entry in entries:
    if entry.refused or way in entry.refuses:
      lines += _unrefused(entry, way)
  trained = [e for e in entries if not e.refused and way not in e.refuses]
  return [f"{WAYS[way]}: {line}" for line in lines + (TRIALS[way](trained) if trained else [])]


def missing() -> list[str]:
  """Returns the optimizers that Keras exports and no entry covers."""
  lines = []
  for library, k in KERAS.items():
    base = k.optimizers.Optimizer
    known = {entry.name for entry in ENTRIES if entry.library == library}
    for prefix, module in (("", k.optimizers), ("legacy.", k.optimizers.legacy)):
      if prefix and k is keras:
        continue  # stand-ins that raise an ImportError
      of = module.Optimizer if prefix else base
      lines += [
        f"{library}.{prefix}{name} has no entry"
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, of) and name != "Optimizer"
        and f"{prefix}{name}" not in known
      ]  # fmt: skip
  return lines


def main() -> int:
  """Checks every cell of the page."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
  options = parser.parse_args()
  factories.split_cpu(2)
  lines = missing()
  for way in options.ways:
    for library in KERAS:
      found = disagreements(way, [entry for entry in ENTRIES if entry.library == library])
      print(f"{WAYS[way]}, {library}: {len(found)} differ", flush=True)
      lines += found
  print("\n".join(lines))
  return int(bool(lines))


if __name__ == "__main__":
  sys.exit(main())
