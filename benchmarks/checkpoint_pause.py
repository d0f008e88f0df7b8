"""How long training stands still for a checkpoint that is written beside it, or before it goes on.

    python -m benchmarks.checkpoint_pause  # 100 MB; 300 MB with Adam's state
    python -m benchmarks.checkpoint_pause --megabytes 20

Three kinds of steps take turns in a random order: after `CheckpointManager.save`, after the same
save with the values written before it returns, and without a save. "pause" is the time of the call.
"lost" is what training lost in all: the call and the steps until the file is complete, less what
as many steps take without a save. On few cores the writing thread takes its time from the steps.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

KINDS = ("background", "at once")


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.checkpoint_pause", description=__doc__
  )
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--megabytes", type=int, default=100, help="of weights")
  parser.add_argument("--rounds", type=int, default=10)
  options = parser.parse_args(arguments)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  with tempfile.TemporaryDirectory() as folder:
    measured = measure(options.megabytes, options.rounds, folder)
  for name, values in measured.items():
    low, middle, high = np.quantile(np.array(values) * 1e3, [0.25, 0.5, 0.75])
    print(f"{name:17} {middle:7.1f} ms [{low:.1f}, {high:.1f}]")
  for what in ("pause", "lost"):
    ratios = np.divide(*(measured[f"{what} {kind}"] for kind in KINDS))
    print(f"{what}: median of background / at once {np.median(ratios):.3f}")


def measure(megabytes: int, rounds: int, folder: str) -> dict[str, list[float]]:
  """Returns "step", and "pause" and "lost" of each kind -> seconds, one per round."""
  trainer, manager = made(megabytes, folder)
  step = one()

  def save() -> None:
    manager.save()

  kinds = {"background": save, "at once": lambda: (save(), _written(manager))}

  for _ in range(3):
    trainer.train(step)
    save()
  manager.wait()
  measured: dict[str, list[float]] = {}
  for _ in range(rounds):
    steps = [_seconds(lambda: trainer.train(step)) for _ in range(10)]
    measured.setdefault("step", []).append(float(np.median(steps)))
    for kind, call in random.sample(list(kinds.items()), len(kinds)):
      trainer.train(step)
      pause, steps = _seconds(call), []
      while _is_writing():
        steps.append(_seconds(lambda: trainer.train(step)))
      manager.wait()
      steps += [_seconds(lambda: trainer.train(step)) for _ in range(2)]
      lost = pause + sum(steps) - len(steps) * measured["step"][-1]
      measured.setdefault(f"pause {kind}", []).append(pause)
      measured.setdefault(f"lost {kind}", []).append(lost)
  return measured


def made(megabytes: float, folder: str) -> tuple[Any, Any]:
  """Returns a trainer with so many MB of weights, and the manager of its checkpoints."""
  import keras
  import tensorflow as tf

  from loopwright import ArraySource, Loss, Task
  from loopwright.inputs.datasets import train_dataset
  from loopwright.run_folder.checkpoints import CheckpointManager
  from loopwright.trainer import Trainer

  width = int((megabytes * 1e6 / 4 / 4) ** 0.5)

  class Wide(Task):
    """Four layers of width x width."""

    def build_model(self) -> keras.Model:
      layers = [keras.layers.Dense(width, activation="tanh") for _ in range(4)]
      return keras.Sequential([keras.Input([width]), *layers])

    def forward(self, batch: dict[str, tf.Tensor], training: bool) -> tf.Tensor:
      return self.model(batch["x"], training=training)

    def loss(self, outputs: tf.Tensor, batch: dict[str, tf.Tensor]) -> Loss:
      return Loss.from_examples(tf.reduce_mean(outputs**2, 1), batch["weight"])

  source = ArraySource(features={"x": np.ones([32, width], np.float32)})
  trainer = Trainer(
    task=Wide(),
    strategy=tf.distribute.OneDeviceStrategy("CPU:0"),
    dataset_fn=lambda position: train_dataset(source, global_batch_size=8, position=position),
    global_batch_size=8,
    optimizer=keras.optimizers.Adam,
  )
  manager = CheckpointManager(
    trainer=trainer, directory=folder, experiment={"task": "Wide"}, keep=1
  )
  return trainer, manager


def one() -> Any:
  """Returns the length of a loop of one step."""
  import tensorflow as tf

  return tf.constant(1)


def _is_writing() -> bool:
  """Whether the thread that writes checkpoints is at work."""
  return any(thread.name == "loopwright-files" for thread in threading.enumerate())


def _written(manager: object) -> None:
  """Returns when TensorFlow has written; the thread goes on to move the files."""
  while not os.path.exists(os.path.join(manager.directory, "unfinished", "ckpt.index")):
    if not _is_writing():
      return
    time.sleep(0.001)


def _seconds(call: Callable[[], object]) -> float:
  began = time.perf_counter()
  call()
  return time.perf_counter() - began


if __name__ == "__main__":
  main()
