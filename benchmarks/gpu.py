"""Models x precisions x frameworks on the GPU that is there, in one table; without one, on the CPU.

  uv run python -m benchmarks.gpu                  # about an hour on one GPU
  uv run python -m benchmarks.gpu --small          # small models: tries the command on a CPU

Each row is a process of its own, which ends after --limit_s: Loopwright as it comes, on the
strategy that `train` takes, a hand-written compiled loop, what Keras's `fit` calls for each step,
and where the Python of --peers has them PyTorch and JAX (benchmarks/gpu_peers.py). Milliseconds are
the median of some blocks of steps; "first" is from the start of making the model to the end of two
steps. Model FLOP/s count three forward passes a step, as usual for forward and backward; MFU is
their part of the device's peak in this precision, without sparsity. MiB are the peak of the
allocator.

With several GPUs it also shows the cross-device op that `auto` chooses and whether NCCL is in a
trace; with one, replicas on logical GPUs, where TensorFlow allows them (NCCL does not).
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


class Precision(NamedTuple):
  """How to compute: the dtype policy, TF32 for float32, XLA."""

  policy: str
  tf32: bool
  xla: bool


PRECISIONS = {
  "float32": Precision("float32", False, False),
  "TF32": Precision("float32", True, False),
  "mixed_float16": Precision("mixed_float16", True, False),
  "mixed_bfloat16": Precision("mixed_bfloat16", True, False),
  "TF32, XLA": Precision("float32", True, True),
  "mixed_bfloat16, XLA": Precision("mixed_bfloat16", True, True),
}
BATCHES = {
  "mlp": (4096, 32), "cnn": (1024, 32), "resnet50": (128, 4), "language_model": (32, 4),
  "language_model_300m": (16, 4), "language_model_1b": (8, 4),
}  # fmt: skip
"""Model -> examples in a batch, and with --small."""
MODELS = ("mlp", "cnn", "resnet50", "language_model")
TRANSFORMERS = {
  "language_model": (12, 768, 12), "language_model_300m": (24, 1024, 16),
  "language_model_1b": (20, 2048, 16),
}  # fmt: skip
"""Language model -> layers, width, heads."""
COLUMNS = ("model", "precision", "", "ms a step", "examples/s", "first, s", "TFLOP/s", "MFU", "MiB")
PEER_PYTHON = "/opt/torch/.venv/bin/python3"
"""Where some machines with GPUs have PyTorch and JAX."""
DISTINCT = 4
"""Batches in memory, read over and over."""


class Model(NamedTuple):
  """A model and batches for it.

  Attributes:
    build: makes the Keras model, with logits in float32.
    features: [DISTINCT * batch, ...], an array or a dict of arrays.
    labels: int32, one for each logit vector of an example.
    batch: examples.
  """

  build: Callable[[], Any]
  features: Any
  labels: Any
  batch: int


def model_of(name: str, *, small: bool) -> Model:
  import keras
  import numpy as np

  from loopwright.tasks import language_model

  batch = BATCHES[name][small]
  rng, rows = np.random.default_rng(0), DISTINCT * batch
  side, classes = (32, 10) if small or name == "cnn" else (224, 1000)
  context = 16 if small else 512

  def head() -> Any:
    return keras.layers.Dense(10 if name == "mlp" else classes, dtype="float32")

  def mlp() -> Any:
    hidden = [keras.layers.Dense(64 if small else 4096, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input([784]), *hidden, head()])

  def cnn() -> Any:
    layers: list[Any] = [keras.Input([side, side, 3])]
    for width in (8, 16) if small else (64, 128, 256):
      layers += [keras.layers.Conv2D(width, 3, padding="same", activation="relu")]
      layers += [keras.layers.MaxPooling2D()]
    return keras.Sequential([*layers, keras.layers.Flatten(), head()])

  def resnet50() -> Any:
    shape = (side, side, 3)
    net = keras.applications.ResNet50
    base = net(weights=None, include_top=False, input_shape=shape, pooling="avg")
    return keras.Sequential([base, head()])

  def transformer() -> Any:
    layers, width, heads = (1, 32, 2) if small else TRANSFORMERS[name]
    return language_model.transformer(layers=layers, width=width, heads=heads)

  if name in TRANSFORMERS:
    tokens = rng.integers(0, 256, [rows, context], np.int32)
    positions = np.broadcast_to(np.arange(context, dtype=np.int32), tokens.shape).copy()
    labels = rng.integers(0, 256, [rows, context], np.int32)
    return Model(transformer, {"token": tokens, "position": positions}, labels, batch)
  shape = [784] if name == "mlp" else [side, side, 3]
  features = rng.random([rows, *shape], np.float32)
  labels = rng.integers(0, 10 if name == "mlp" else classes, [rows], np.int32)
  return Model({"mlp": mlp, "cnn": cnn, "resnet50": resnet50}[name], features, labels, batch)


def per_example(labels: Any, logits: Any) -> Any:
  """Returns the mean cross entropy of each example."""
  import tensorflow as tf

  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
  return tf.reduce_mean(tf.reshape(losses, [tf.shape(losses)[0], -1]), axis=1)


def loopwright(
  model: Model, precision: Precision, strategy: Any, steps: int = 1, watched: bool = False
) -> Callable[[int], float]:
  """Returns a function that trains some steps and returns their mean loss."""
  import keras
  import numpy as np
  import tensorflow as tf

  from loopwright.inputs import datasets
  from loopwright.inputs.sources import ArraySource
  from loopwright.metrics import Loss
  from loopwright.observers import Observer
  from loopwright.task import Task
  from loopwright.trainer import Trainer

  kept = model.features if isinstance(model.features, dict) else {"x": model.features}
  source = ArraySource(features={**kept, "label": model.labels})

  class Logits(Task):
    def build_model(self) -> Any:
      return model.build()

    def forward(self, batch: Any, training: bool) -> Any:
      given = {name: batch[name] for name in kept}
      return self.model(given if len(given) > 1 else batch["x"], training=training)

    def loss(self, outputs: Any, batch: Any) -> Any:
      losses = per_example(batch["label"], outputs)
      return Loss.from_examples(losses, batch["weight"])

  trainer = Trainer(
    task=Logits(), strategy=strategy, global_batch_size=model.batch,
    optimizer=keras.optimizers.Adam, steps_per_program=steps,
    **({"jit_compile": True} if precision.xla else {}), observers=[Observer()] * watched,
    dataset_fn=lambda position: datasets.train_dataset(
      source, global_batch_size=model.batch, position=position,
      pad_multiple=strategy.num_replicas_in_sync, shuffle=False,
    ),
  )  # fmt: skip

  def run(steps: int) -> float:
    return float(np.float64(trainer.train(tf.constant(steps))["loss"]))

  run.trainer = trainer  # type: ignore[attr-defined]
  return run


def dataset(model: Model) -> Any:
  import tensorflow as tf

  data = tf.data.Dataset.from_tensor_slices((model.features, model.labels))
  return data.batch(model.batch, drop_remainder=True).cache().repeat().prefetch(4)


def hand_written(model: Model, precision: Precision) -> Callable[[int], float]:
  """A loop as an expert writes it, on one device: no weights, no norm, no metrics but the loss."""
  import keras
  import tensorflow as tf

  network, optimizer = model.build(), keras.optimizers.Adam()
  if precision.policy == "mixed_float16":
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
  optimizer.build(network.trainable_variables)
  iterator = iter(dataset(model))

  def step(features: Any, labels: Any) -> Any:
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(per_example(labels, network(features, training=True)))
      scaled = optimizer.scale_loss(loss)
    variables = network.trainable_variables
    optimizer.apply(tape.gradient(scaled, [v.value for v in variables]), variables)
    return loss

  compiled = tf.function(step, jit_compile=precision.xla)

  @tf.function
  def loop(iterator: Any, steps: Any) -> Any:
    total = 0.0
    for _ in tf.range(steps):
      total += compiled(*next(iterator))
    return total

  return lambda steps: float(loop(iterator, tf.constant(steps))) / steps


def keras_fit(model: Model, precision: Precision) -> Callable[[int], float]:
  import keras

  network = model.build()
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  network.compile(optimizer="adam", loss=loss, jit_compile=precision.xla)
  data = dataset(model)
  network.fit(data, steps_per_epoch=1, verbose=0)  # builds all; each `fit` makes an iterator anew
  iterator = iter(data)

  def run(steps: int) -> float:
    for _ in range(steps):
      logs = network.train_function(iterator)
    return float(logs["loss"])

  return run


def forward_flops(model: Model) -> int:
  """Returns the floating-point operations of the forward pass of one batch (multiply-adds as 2)."""
  import tensorflow as tf

  from loopwright.graphs import flops

  network = model.build()
  given = tf.nest.map_structure(lambda a: tf.TensorSpec([model.batch, *a.shape[1:]], a.dtype),
                                model.features)  # fmt: skip
  traced = tf.function(lambda x: network(x, training=False)).get_concrete_function(given)
  return flops.Count(traced.graph.outputs).flops


SEVERAL, IN_TURN = "Loopwright, 16 steps in a program", "Loopwright, no batches ahead"
OWN = {
  "Loopwright": loopwright, SEVERAL: functools.partial(loopwright, steps=16),
  IN_TURN: functools.partial(loopwright, watched=True),
}  # fmt: skip
CONTENDERS = {**OWN, "hand-written": hand_written, "Keras": keras_fit}
PEERS = ("PyTorch", "torch.compile", "JAX")


def row(name: str, precision_name: str, who: str, *, small: bool, block_s: float) -> str:
  """Measures one row in this process."""
  import keras
  import tensorflow as tf

  from loopwright.distribution import gpus
  from loopwright.strategies import factories

  began = time.perf_counter()
  precision = PRECISIONS[precision_name]
  tf.config.experimental.enable_tensor_float_32_execution(precision.tf32)
  keras.config.set_dtype_policy(precision.policy)
  model = model_of(name, small=small)
  found = tf.config.list_physical_devices("GPU")
  given = (factories.auto(),) if who in OWN else ()
  run = CONTENDERS[who](model, precision, *given)  # type: ignore[operator]
  multiple = 16 if who == SEVERAL else 1
  run(max(2, multiple))
  first_s = time.perf_counter() - began
  step_s = timed(run, block_s, multiple=multiple)
  kind = "CPU"
  if found:
    kind = tf.config.experimental.get_device_details(found[0]).get("device_name", "GPU")
  dtype = precision.policy.removeprefix("mixed_")
  peak = gpus.peak_flops_of(kind, dtype, tf32=precision.tf32)
  memory = tf.config.experimental.get_memory_info("GPU:0" if found else "CPU:0")["peak"] / 2**20
  rate = 3 * forward_flops(model) / step_s
  mfu = "-" if peak is None else f"{100 * rate / peak:.0f} %"
  return line(
    name, precision_name, who, step_s, model.batch, first_s, f"{rate / 1e12:.3g}", mfu, memory
  )


def timed(run: Callable[[int], float], block_s: float, *, multiple: int = 1) -> float:
  """Returns the seconds of a step: the median of five blocks of about `block_s`, a `multiple`."""
  run(few := max(3, multiple))
  began = time.perf_counter()
  run(few)
  steps = max(2, round(block_s / ((time.perf_counter() - began) / few)))
  steps += -steps % multiple
  seconds = []
  for _ in range(5):
    began = time.perf_counter()
    run(steps)
    seconds.append((time.perf_counter() - began) / steps)
  return statistics.median(seconds)


def line(
  name: str, precision: str, who: str, step_s: float, batch: int, first_s: float,
  rate: str, mfu: str, mib: float,
) -> str:  # fmt: skip
  """Returns a row of the table."""
  cells = [name, precision, who, f"{1e3 * step_s:.4g}", f"{batch / step_s:.4g}", f"{first_s:.1f}"]
  return f"| {' | '.join([*cells, rate, mfu, f'{mib:.0f}'])} |"


def replicas(*, small: bool) -> list[str]:
  """Trains on several replicas in this process; returns what was seen, a line each."""
  import tensorflow as tf

  from loopwright.distribution import placement
  from loopwright.strategies import factories

  gpus, lines = tf.config.list_physical_devices("GPU"), []
  if len(gpus) == 1:
    half = [tf.config.LogicalDeviceConfiguration(memory_limit=8192) for _ in range(2)]
    tf.config.set_logical_device_configuration(gpus[0], half)
  strategy = factories.mirrored(cpu_replicas=None if gpus else 2)
  op = placement.of(strategy).cross_device_op.__name__
  where = ", ".join(placement.of(strategy).devices)
  run = loopwright(model_of("mlp", small=small), PRECISIONS["float32"], strategy)
  run(2)
  with tempfile.TemporaryDirectory() as folder:
    tf.profiler.experimental.start(folder)
    loss = run(5)
    tf.profiler.experimental.stop()
    traces = [path.read_bytes() for path in Path(folder).rglob("*.xplane.pb")]
  seen = any(b"nccl" in trace.lower() for trace in traces)
  lines.append(f"replicas on {where}: {op}, loss {loss:.4f}")
  lines.append(f"NCCL in {len(traces)} trace: {'yes' if seen else 'no'}")
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--models", nargs="+", default=MODELS, choices=BATCHES)
  parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
  everyone = [*CONTENDERS, *PEERS]
  parser.add_argument("--only", nargs="+", default=everyone, choices=everyone, metavar="WHO")
  parser.add_argument("--peers", default=PEER_PYTHON, help="the Python of PyTorch and JAX")
  parser.add_argument("--small", action="store_true", help="small models and batches")
  parser.add_argument("--block_s", type=float, default=1.0, help="seconds of each of five blocks")
  parser.add_argument("--limit_s", type=float, default=300.0, help="seconds of each row")
  parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
  parser.add_argument("--replicas", action="store_true", help=argparse.SUPPRESS)
  given = parser.parse_args()
  if given.one:
    _print_or_say(lambda: row(*given.one, small=given.small, block_s=given.block_s))
  if given.replicas:
    _print_or_say(lambda: "\n".join(replicas(small=given.small)))
  passed = [f"--block_s={given.block_s}", *(["--small"] if given.small else [])]
  print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
  for model in given.models:
    for precision in given.precisions:
      for who in given.only:
        command = command_of(model, precision, who, given.peers)
        if command:
          _tell([*command, *passed], f"| {model} | {precision} | {who}: ", limit_s=given.limit_s)
  print(flush=True)
  command = [sys.executable, "-m", "benchmarks.gpu", *passed, "--replicas"]
  _tell(command, "replicas: ", limit_s=given.limit_s)


def command_of(model: str, precision: str, who: str, python: str) -> list[str]:
  """Returns the command that prints a row; [] if that framework does not have it."""
  if who in CONTENDERS:
    return [sys.executable, "-m", "benchmarks.gpu", "--one", model, precision, who]
  if precision not in ("TF32", "mixed_bfloat16") or (who == "JAX" and model not in TRANSFORMERS):
    return []
  python = python if Path(python).exists() else sys.executable
  return [python, str(Path(__file__).with_name("gpu_peers.py")), model, precision, who]


def _print_or_say(make: Callable[[], str]) -> None:
  """Prints a text, or the one line of an error, and ends the process, whatever still runs in it."""
  try:
    print(make(), flush=True)
  except Exception as error:
    print(f"{type(error).__name__}: {cause(str(error))}", file=sys.stderr, flush=True)
    os._exit(1)
  os._exit(0)


def cause(text: str) -> str:
  """Returns the line of TensorFlow's error that has the cause, else the first.

  It begins with "Graph execution error:" and ends with "0 derived errors ignored".
  """
  lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
  return next((line for line in lines if re.search(r"\bOOM\b|^\(0\) ", line)), lines[0])


def _tell(command: Sequence[str], otherwise: str, *, limit_s: float) -> None:
  """Prints what a process of its own says, or the last line of its error."""
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
  except subprocess.TimeoutExpired:
    print(f"{otherwise}failed: no result within {limit_s:g} s", flush=True)
    return
  lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
  failed = f"{otherwise}failed: {lines[-1][:200]}"
  print(done.stdout.strip() if done.returncode == 0 else failed, flush=True)


if __name__ == "__main__":
  main()
