"""Models x precisions on the GPUs that are there, in one table; without a GPU, on the CPU.

  uv run python -m benchmarks.gpu                  # about an hour on one GPU
  uv run python -m benchmarks.gpu --small          # small models: tries the command on a CPU
  uv run python -m benchmarks.gpu --tests          # also tests/conformance, on the GPU

Each row is a process of its own, which ends after --limit_s. In it Loopwright, on the strategy that
`train` takes, a hand-written compiled loop and what Keras's `fit` calls for each step take turns;
the ratios are medians over rounds. Model FLOP/s count three forward passes a step, as usual for
forward and backward; MFU is their part of the device's peak in this precision, without sparsity.
MiB are the peak of TensorFlow's allocator in the first steps of each of the three, above what the
others had before.

With several GPUs it also shows the cross-device op that `auto` chooses and whether NCCL is in a
trace; with one, replicas on logical GPUs, where TensorFlow allows them (NCCL does not).
"""

from __future__ import annotations

import argparse
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
MODELS = ("mlp", "cnn", "resnet50", "language_model")
BATCHES = {"mlp": (4096, 32), "cnn": (1024, 32), "resnet50": (128, 4), "language_model": (32, 4)}
"""Model -> examples in a batch, and with --small."""
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
    layers, width, heads = (1, 32, 2) if small else (12, 768, 12)
    return language_model.transformer(layers=layers, width=width, heads=heads)

  if name == "language_model":
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


def loopwright(model: Model, precision: Precision, strategy: Any) -> Callable[[int], float]:
  """Returns a function that trains some steps and returns their mean loss."""
  import keras
  import numpy as np
  import tensorflow as tf

  from loopwright.inputs import datasets
  from loopwright.inputs.sources import ArraySource
  from loopwright.metrics import Loss
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
    optimizer=keras.optimizers.Adam, jit_compile=precision.xla,
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


def row(name: str, precision_name: str, *, small: bool, rounds: int, block_s: float) -> str:
  """Measures one row in this process."""
  import keras
  import tensorflow as tf

  from loopwright.strategies import factories, gpus

  precision = PRECISIONS[precision_name]
  tf.config.experimental.enable_tensor_float_32_execution(precision.tf32)
  keras.config.set_dtype_policy(precision.policy)
  model = model_of(name, small=small)
  device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
  strategy = factories.auto()
  makers: dict[str, Callable[[], Callable[[int], float]]] = {
    "Loopwright": lambda: loopwright(model, precision, strategy),
    "hand-written": lambda: hand_written(model, precision),
    "Keras": lambda: keras_fit(model, precision),
  }
  contenders: dict[str, Callable[[int], float]] = {}
  memory = []
  for who, make in makers.items():
    tf.config.experimental.reset_memory_stats(device)
    before = tf.config.experimental.get_memory_info(device)["current"]
    contenders[who] = make()
    contenders[who](2)
    peak = tf.config.experimental.get_memory_info(device)["peak"]
    memory.append(f"{(peak - before) / 2**20:.0f}")
  began = time.perf_counter()
  contenders["Loopwright"](3)
  steps = max(2, round(block_s / ((time.perf_counter() - began) / 3)))
  seconds: dict[str, list[float]] = {who: [] for who in contenders}
  order = list(contenders)
  for number in range(rounds):
    for who in order if number % 2 else order[::-1]:
      began = time.perf_counter()
      contenders[who](steps)
      seconds[who].append(time.perf_counter() - began)
  step_s = statistics.median(seconds["Loopwright"]) / steps
  rate = 3 * forward_flops(model) / step_s
  details = tf.config.experimental.get_device_details
  found = tf.config.list_physical_devices("GPU")
  kind = details(found[0]).get("device_name", "GPU") if found else "CPU"
  dtype = precision.policy.removeprefix("mixed_")
  peak = gpus.peak_flops_of(kind, dtype, tf32=precision.tf32)
  ratios = [
    statistics.median(s / o for s, o in zip(seconds[who], seconds["Loopwright"], strict=True))
    for who in order[1:]
  ]
  mfu = "-" if peak is None else f"{100 * rate / peak:.0f} %"
  cells = [name, precision_name, f"{1e3 * step_s:.4g}", f"{model.batch / step_s:.4g}"]
  cells += [f"{ratio:.2f}" for ratio in ratios] + [f"{rate / 1e12:.3g}", mfu, " / ".join(memory)]
  return f"| {' | '.join(cells)} |"


def replicas(*, small: bool) -> list[str]:
  """Trains on several replicas in this process; returns what was seen, a line each."""
  import tensorflow as tf

  from loopwright.strategies import factories, placement

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
  parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
  parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
  parser.add_argument("--small", action="store_true", help="small models and batches")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--block_s", type=float, default=1.0, help="seconds of each turn")
  parser.add_argument("--tests", action="store_true", help="run tests/conformance too")
  parser.add_argument("--limit_s", type=float, default=300.0, help="seconds of each row")
  parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
  parser.add_argument("--replicas", action="store_true", help=argparse.SUPPRESS)
  given = parser.parse_args()
  if given.one:
    _print_or_say(
      lambda: row(*given.one, small=given.small, rounds=given.rounds, block_s=given.block_s)
    )
    return
  if given.replicas:
    _print_or_say(lambda: "\n".join(replicas(small=given.small)))
    return
  passed = [f"--rounds={given.rounds}", f"--block_s={given.block_s}"]
  passed += ["--small"] if given.small else []
  print("| model | precision | ms a step | examples/s | over hand-written | over Keras | model "
        "TFLOP/s | MFU | MiB |")  # fmt: skip
  print("|---|---|---|---|---|---|---|---|---|", flush=True)
  for model in given.models:
    for precision in given.precisions:
      asked = [*passed, "--one", model, precision]
      _tell(asked, f"| {model} | {precision} | failed: ", limit_s=given.limit_s)
  print(flush=True)
  _tell([*passed, "--replicas"], "replicas: failed: ", limit_s=given.limit_s)
  if given.tests:
    command = [sys.executable, "-m", "pytest", "-q", "tests/conformance"]
    environment = {**os.environ, "TESTS_ON_GPUS": "1"}
    sys.exit(subprocess.run(command, check=False, env=environment).returncode)


def _print_or_say(make: Callable[[], str]) -> None:
  """Prints a text, or ends the process with the one line of its error."""
  try:
    print(make(), flush=True)
  except Exception as error:
    sys.exit(f"{type(error).__name__}: {cause(str(error))}")


def cause(text: str) -> str:
  """Returns the line of TensorFlow's error that has the cause, else the first.

  It begins with "Graph execution error:" and ends with "0 derived errors ignored".
  """
  lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
  return next((line for line in lines if re.search(r"\bOOM\b|^\(0\) ", line)), lines[0])


def _tell(arguments: Sequence[str], otherwise: str, *, limit_s: float) -> None:
  """Prints what a process of its own says, or the last line of its error."""
  command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
  except subprocess.TimeoutExpired:
    print(f"{otherwise}no result within {limit_s:g} s", flush=True)
    return
  lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
  print(done.stdout.strip() if done.returncode == 0 else otherwise + lines[-1][:200], flush=True)


if __name__ == "__main__":
  main()
