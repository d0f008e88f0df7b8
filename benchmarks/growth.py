"""How cost grows: with replicas, variables, loops, steps, checkpoints and weights.

  python -m benchmarks.growth replicas variables loops memory checkpoints modes

Each part runs for at most a few minutes (`modes` for 10), prints a table and draws
docs/images/growth-<part>.svg.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

Rows = dict[int, dict[str, float]]
"""Size -> name of a column -> figure."""

_ROUNDS, _BLOCK_S = 9, 0.3
_SLOW_TO_TRACE = 100
"""Above so many variables the hand-written loop is left out: it traces for minutes."""


def bytes_a_step(rows: Sequence[tuple[int, int]], warm: float = 0.2) -> float:
  """Returns the slope of a line through (step, bytes), without the part `warm` of the steps."""
  import numpy as np

  late = np.array([row for row in rows if row[0] >= warm * rows[-1][0]], float)
  return float(np.polyfit(late[:, 0], late[:, 1], 1)[0])


def replicas(counts: Sequence[int] = (1, 2, 4, 8)) -> Rows:
  """Microseconds a step of the MLP with 128 examples over all replicas."""
  return {count: _apart(_replicas, count) for count in counts}


def _replicas(count: int) -> dict[str, float]:
  from benchmarks import contenders

  names = {"Loopwright, µs a step": "loopwright", "by hand, µs a step": "hand"}
  blocks = {title: contenders.make(name, "mlp", count, 50).block for title, name in names.items()}
  blocks["bare"] = _bare(count, 50)
  return _in_turns({title: (block, 50) for title, block in blocks.items()})


def _bare(count: int, steps: int) -> Callable[[], object]:
  """Returns a loop of forward and backward pass and gradient norm, without sum and update."""
  import keras
  import tensorflow as tf

  from benchmarks import models
  from loopwright.strategies import factories

  strategy = factories.mirrored(cpu_replicas=count) if count > 1 else tf.distribute.get_strategy()
  with strategy.scope():
    network = models.build("mlp", keras)
  images, labels = (part[: models.BATCH_SIZE // count] for part in next(iter(models.pairs("mlp"))))

  def passes() -> tf.Tensor:
    with tf.GradientTape() as tape:
      losses = models.per_example_loss("mlp", labels, network(images, training=True))
      loss = tf.reduce_sum(losses)
    gradients = tape.gradient(loss, [v.value for v in network.trainable_variables])
    # A value of the gradients, not a control dependency: TensorFlow removes what only orders.
    return loss + tf.add_n([tf.nn.l2_loss(gradient) for gradient in gradients])

  @tf.function(autograph=False)
  def loop(number: tf.Tensor) -> tf.Tensor:
    def step(done: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      losses = strategy.experimental_local_results(strategy.run(passes))
      return done + 1, total + tf.add_n(losses)

    start = (tf.constant(0), tf.constant(0.0))
    return tf.while_loop(lambda done, _: done < number, step, start, parallel_iterations=1)[1]

  return lambda: loop(tf.constant(steps)).numpy()


def variables(counts: Sequence[int] = (10, 100, 1000, 10000)) -> Rows:
  """Seconds to the first step, and microseconds a step, of 4 x 4 matrices in parallel."""
  return {count: _apart(_variables, count) for count in counts}


def _variables(count: int) -> dict[str, float]:
  contenders = {"Loopwright": _matrices_loop(count)}
  if count <= _SLOW_TO_TRACE:
    contenders["by hand"] = _matrices_by_hand(count)
  found: dict[str, float] = {}
  for name, block in contenders.items():
    found[f"{name}, s to the first step"] = _seconds(lambda block=block: block(1))
  steps = max(2, 20_000 // (count + 20))
  blocks = {name: (lambda block=block: block(steps), steps) for name, block in contenders.items()}
  return found | {f"{name}, µs a step": us for name, us in _in_turns(blocks).items()}


def _matrices(count: int) -> Any:
  import keras
  import tensorflow as tf

  class Matrices(keras.layers.Layer):
    """The sum of tanh(x w) over the weights."""

    def build(self, shape: Any) -> None:
      self.ws = [
        self.add_weight(shape=(4, 4), initializer="ones", name=f"w{i}") for i in range(count)
      ]

    def call(self, x: tf.Tensor) -> tf.Tensor:
      return tf.add_n([tf.tanh(tf.matmul(x, w)) for w in self.ws])

  return keras.Sequential([keras.Input([4]), Matrices()])


def _matrices_loop(count: int) -> Callable[[int], object]:
  import keras
  import numpy as np
  import tensorflow as tf

  from loopwright import ArraySource, Loss, Task
  from loopwright.inputs.datasets import train_dataset
  from loopwright.trainer import Trainer

  class Small(Task):
    """Squares of the outputs."""

    def build_model(self) -> Any:
      return _matrices(count)

    def forward(self, batch: dict[str, tf.Tensor], training: bool) -> tf.Tensor:
      return self.model(batch["x"], training=training)

    def loss(self, outputs: tf.Tensor, batch: dict[str, tf.Tensor]) -> Loss:
      return Loss.from_examples(tf.reduce_mean(outputs**2, 1), batch["weight"])

  source = ArraySource(features={"x": np.ones([64, 4], np.float32)})
  trainer = Trainer(
    task=Small(),
    strategy=tf.distribute.get_strategy(),
    dataset_fn=lambda position: train_dataset(source, global_batch_size=8, position=position),
    global_batch_size=8,
    optimizer=keras.optimizers.Adam,
  )
  return lambda steps: trainer.train(tf.constant(steps))


def _matrices_by_hand(count: int) -> Callable[[int], object]:
  import keras
  import tensorflow as tf

  network, optimizer = _matrices(count), keras.optimizers.Adam()
  weights = network.trainable_variables
  optimizer.build(weights)
  iterator = iter(tf.data.Dataset.from_tensors(tf.ones([8, 4])).repeat().prefetch(4))

  @tf.function
  def loop(iterator: Any, number: tf.Tensor) -> tf.Tensor:
    total = 0.0
    for _ in tf.range(number):
      x = next(iterator)
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(network(x, training=True) ** 2)
      optimizer.apply(tape.gradient(loss, [v.value for v in weights]), weights)
      total += loss
    return total

  return lambda steps: float(loop(iterator, tf.constant(steps)))


def loops(lengths: Sequence[int] = (1, 3, 10, 30, 100, 300, 1000)) -> Rows:
  """Microseconds a step of the MLP on one replica, by the steps in one call of the loop."""
  return _apart(_loops, lengths)


def _loops(lengths: Sequence[int]) -> Rows:
  from benchmarks import contenders

  rows: Rows = {}
  for steps in lengths:
    names = {"Loopwright, µs a step": "loopwright", "by hand, µs a step": "hand"}
    made = {t: (contenders.make(n, "mlp", 1, steps).block, steps) for t, n in names.items()}
    rows[steps] = _in_turns(made)
  return rows


def memory(steps: int = 100_000) -> Rows:
  """MiB that the process alone holds, by the step; prints bytes a step."""
  rows = _apart(_memory, steps)
  print(f"{bytes_a_step(rows):.2f} bytes a step over {steps} steps, after the first fifth")
  return {step: {"of the process, MiB": held / 2**20} for step, held in rows}


def _memory(steps: int) -> list[tuple[int, int]]:
  from benchmarks.endurance import usage

  block, rows = _matrices_loop(4), []
  for done in range(100, steps + 1, 100):
    block(100)
    if done % 1000 == 0:
      rows.append((done, usage(os.getpid())[0]))
  return rows


def checkpoints(megabytes: Sequence[int] = (1, 10, 100, 1000)) -> Rows:
  """Milliseconds that a checkpoint stops training, and until it is complete, by its MB."""
  return {size: _apart(_checkpoints, size) for size in megabytes}


def _checkpoints(megabytes: int) -> dict[str, float]:
  from benchmarks import checkpoint_pause

  with tempfile.TemporaryDirectory() as folder:
    trainer, manager = checkpoint_pause.made(megabytes / 3, folder)
    pauses, totals = [], []
    for _ in range(6):
      trainer.train(checkpoint_pause.one())
      began = time.perf_counter()
      manager.save()
      pauses.append(time.perf_counter() - began)
      manager.wait()
      totals.append(time.perf_counter() - began)
  pause, total = (1e3 * statistics.median(x[1:]) for x in (pauses, totals))
  return {"pause, ms": pause, "complete after, ms": total}


def modes(units: Sequence[int] = (128, 4096, 65536)) -> Rows:
  """Seconds of the command `--mode=verify` and `--mode=tune`, by the weights of the digits' CNN."""
  return {18_826 + 267 * count: _modes(count) for count in units}


def _modes(units: int) -> dict[str, float]:
  found = {}
  for mode in ("verify", "tune"):
    with tempfile.TemporaryDirectory() as folder:
      command = [
        *(sys.executable, "launch.py", "--gin_file=configs/digits_cnn.gin", f"--mode={mode}"),
        *(f"--gin_param=cnn.units={units}", f"--model_dir={folder}/run"),
      ]
      run = functools.partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True)
      found[f"{mode}, s"] = _seconds(run)
  return found


# --- measuring --------------------------------------------------------------------------------


def _apart(function: Callable[..., Any], *args: Any) -> Any:
  """Calls `function` in a fork of this process, which has imported TensorFlow and not used it."""
  import multiprocessing

  import benchmarks.contenders  # noqa: F401

  receiver, sender = multiprocessing.Pipe(duplex=False)
  pid = os.fork()
  if pid == 0:
    try:
      sender.send(function(*args))
    finally:
      os._exit(0)
  sender.close()
  try:
    return receiver.recv()
  except EOFError:
    raise SystemExit(f"{function.__name__}{args} failed; the reason is above.") from None
  finally:
    os.waitpid(pid, 0)


def _in_turns(blocks: Mapping[str, tuple[Callable[[], object], int]]) -> dict[str, float]:
  """Returns name -> microseconds a step, the median of rounds in a random order.

  Args:
    blocks: name -> what runs some steps, and how many.
  """
  calls: dict[str, int] = {}
  for name, (block, _) in blocks.items():
    block()  # traces
    calls[name] = max(1, int(_BLOCK_S / _seconds(block)))
  seconds: dict[str, list[float]] = {name: [] for name in blocks}
  for _ in range(_ROUNDS):
    for name in random.sample(list(blocks), len(blocks)):
      block, steps = blocks[name]
      began = time.perf_counter()
      for _ in range(calls[name]):
        block()
      seconds[name].append((time.perf_counter() - began) / calls[name] / steps)
  return {name: 1e6 * statistics.median(values) for name, values in seconds.items()}


def _seconds(call: Callable[[], object]) -> float:
  began = time.perf_counter()
  call()
  return time.perf_counter() - began


# --- reporting --------------------------------------------------------------------------------


def table(rows: Rows, size: str) -> str:
  """Returns the figures as Markdown, a row for each column of figures; "" where there is none."""
  names = list(dict.fromkeys(name for row in rows.values() for name in row))
  lines = [[size, *map(str, rows)], ["---"] * (len(rows) + 1)]
  lines += [[n, *(f"{r[n]:.3g}" if n in r else "" for r in rows.values())] for n in names]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(rows: Rows, size: str, path: Path, *, scale: str) -> None:
  """Writes the columns of figures as SVG, those of each unit in a plot of their own."""
  import matplotlib

  matplotlib.use("svg")
  matplotlib.rcParams["svg.hashsalt"] = "growth"
  from matplotlib import pyplot

  names = list(dict.fromkeys(name for row in rows.values() for name in row))
  units = list(dict.fromkeys(name.rpartition(", ")[2] for name in names))
  figure, plots = pyplot.subplots(
    1, len(units), figsize=(1 + 4 * len(units), 3), layout="constrained", squeeze=False
  )
  for unit, axes in zip(units, plots[0], strict=True):
    for name in names:
      label, _, of = name.rpartition(", ")
      if of == unit:
        points = [(at, row[name]) for at, row in rows.items() if name in row]
        axes.plot(*zip(*points, strict=True), marker="." if len(rows) < 20 else "", label=label)
    axes.set(xscale=scale, yscale=scale, xlabel=size, ylabel=unit)
    if scale == "linear":
      axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
  figure.savefig(path, metadata={"Date": None})


PARTS: Mapping[str, tuple[Callable[..., Rows], str, str]] = {
  "replicas": (replicas, "replicas", "log"),
  "variables": (variables, "variables", "log"),
  "loops": (loops, "steps in a loop", "log"),
  "memory": (memory, "step", "linear"),
  "checkpoints": (checkpoints, "MB of a checkpoint", "log"),
  "modes": (modes, "weights", "log"),
}
"""Name -> what measures it, what the sizes are, the scale of its plot."""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("parts", nargs="+", choices=list(PARTS))
  parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")])
  parser.add_argument("--images", type=Path, help="a folder for the plots; default: none are drawn")
  options = parser.parse_args()
  for name in options.parts:
    measure, size, scale = PARTS[name]
    sizes = options.sizes and (options.sizes[0] if name == "memory" else options.sizes)
    rows = measure(sizes) if sizes else measure()
    if name != "memory":
      print(f"{table(rows, size)}\n", flush=True)
    if options.images:
      draw(rows, size, options.images / f"growth-{name}.svg", scale=scale)


if __name__ == "__main__":
  main()
