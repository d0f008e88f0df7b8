"""Measures whether poisoned examples are found and named, and what a run without them loses.

    python -m benchmarks.spike_trials                        # 20 random poisonings
    python -m benchmarks.spike_trials --trials=5 --seed=7
    python -m benchmarks.spike_trials --first=18             # the last three of the 20
    python -m benchmarks.spike_trials --false_alarms         # the losses of clean runs
    python -m benchmarks.spike_trials --cost --rounds=60     # judged and unjudged loops

A trial is regression by an MLP on 8,000 examples, 2 to 3 epochs of Adam, on 1 to 3 replicas. One to
six examples, which are first read after the first 64 steps, have targets 20 to 200 times as large
("labels") or features that are numbers of another size ("garbage"). Three runs: one that never had
them (they are padding from the start), one with `Spikes(on_spike="rewind")`, and one with "report",
which learns from them. Named right is: each poisoned example, and no other. The losses are those of
2,000 other examples in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import numpy as np
import tensorflow as tf

from loopwright import ArraySource, Loss, Task
from loopwright.builder import Recipe
from loopwright.graphs import randomness
from loopwright.inputs.ordering import examples_at
from loopwright.running import run
from loopwright.strategies import factories
from loopwright.tools.forensics.spikes import Guard, Spikes

EXAMPLES, HELD_OUT, BATCH, STEPS, WINDOW = 8000, 2000, 32, 600, 64
COLUMNS = "{:>5}  {:8}  {:7}  {:>8}  {:>8}  {:>5}  {:>9}  {:>9}  {:>9}  {:>8}"


class Poisoned(Task):
  """Regression on made-up data, with some examples spoiled."""

  def __init__(
    self, seed: int, labels: Sequence[int] = (), garbage: Sequence[int] = (), factor: float = 100.0
  ) -> None:
    rng = np.random.default_rng(seed)
    self.x = rng.normal(size=[EXAMPLES + HELD_OUT, 8]).astype(np.float32)
    truth = np.sin(self.x[:, :4].sum(axis=1)) + self.x[:, 4] * self.x[:, 5]
    self.y = (truth + 0.3 * rng.normal(size=len(truth))).astype(np.float32)
    self.y[list(labels)] = factor * (1 + np.abs(self.y[list(labels)]))
    self.x[list(garbage)] = rng.normal(size=[len(garbage), 8]) * factor

  def build_model(self) -> keras.Model:
    layers = [keras.layers.Dense(32, activation="silu") for _ in range(2)]
    return keras.Sequential([keras.Input([8]), *layers, keras.layers.Dense(1)])

  def source(self, split: str) -> ArraySource:
    rows = slice(0, EXAMPLES) if split == "train" else slice(EXAMPLES, None)
    return ArraySource(features={"x": self.x[rows], "y": self.y[rows]})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])


class NeverHad(Spikes):
  """Leaves some examples out from the start."""

  def __init__(self, ids: Sequence[int]) -> None:
    super().__init__(on_spike="rewind", deviations=1e30)
    self._ids = frozenset(ids)

  def begin(self) -> None:
    self.run.trainer.left_out = self._ids


def main(arguments: Sequence[str] | None = None) -> int:
  options = _parse(arguments)
  factories.split_cpu(3)
  tf.get_logger().setLevel("ERROR")
  if options.cost:
    for replicas in (1, 2):
      cost(replicas, options.rounds, options.steps)
    return 0
  if options.false_alarms:
    return false_alarms(options.trials, options.seed, options.deviations)
  rng = random.Random(options.seed)
  names = ("trial", "", "poison", "replicas", "examples", "found")
  print(COLUMNS.format(*names, "never had", "rewind", "report", "differs"))
  drawn = [(number, *poisoning(rng)) for number in range(1, options.trials + 1)]
  run_here = drawn[options.first - 1 :]
  good = sum(trial(*each, options.deviations) for each in run_here)
  print(f"{good} of {len(run_here)} found, named and within 1 %")
  return 0 if good == len(run_here) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.spike_trials")
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--first", type=int, default=1, help="the number of the first trial to run")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--deviations", type=float, default=10.0)
  parser.add_argument("--false_alarms", action="store_true", help="clean runs instead")
  parser.add_argument("--cost", action="store_true", help="measure the cost instead")
  parser.add_argument("--rounds", type=int, default=60, help="for the cost")
  parser.add_argument("--steps", type=int, default=50, help="of a block, for the cost")
  return parser.parse_args(arguments)


def poisoning(rng: random.Random) -> tuple[str, int, int, float, list[int]]:
  """Draws one: kind, replicas, seed, factor and the poisoned examples."""
  kind, replicas = rng.choice(("labels", "garbage")), rng.choice((1, 2, 3))
  seed, factor = rng.randrange(10**6), rng.uniform(20, 200)
  late = _first_read_late(seed)
  return kind, replicas, seed, factor, sorted(rng.sample(late, rng.randint(1, 6)))


def trial(
  number: int, kind: str, replicas: int, seed: int, factor: float, ids: list[int], deviations: float
) -> bool:
  """Runs one poisoning three times; prints a line; returns whether all is well."""
  task = {kind: ids, "factor": factor}
  clean, _ = _trained(Poisoned(seed, **task), NeverHad(ids), seed, replicas)
  action = Spikes(on_spike="rewind", deviations=deviations)
  rewound, named = _trained(Poisoned(seed, **task), action, seed, replicas)
  spoiled, _ = _trained(Poisoned(seed, **task), Spikes(), seed, replicas)
  differs = abs(rewound / clean - 1)
  right = sorted(named) == ids and differs < 0.01
  losses = [f"{loss:.4f}" for loss in (clean, rewound, spoiled)]
  found = f"{len(set(named) & set(ids))}/{len(ids)}"
  word = "right" if right else "WRONG"
  print(
    COLUMNS.format(
      number, word, kind, replicas, len(ids), found, *losses, f"{100 * differs:.3f} %"
    ),
    flush=True,
  )
  if not right:
    print(f"      poisoned {ids}, named {sorted(named)}, factor {factor:.0f}")
  return right


def _first_read_late(seed: int) -> list[int]:
  ids = examples_at(tf.range(EXAMPLES, dtype=tf.int64), num_examples=EXAMPLES, seed=seed).numpy()
  return ids[(WINDOW + 1) * BATCH : STEPS * BATCH].tolist()


def _trained(task: Task, action: Spikes, seed: int, replicas: int) -> tuple[float, list[int]]:
  """Returns the loss of the examples that are held out, and which examples were named."""
  with tempfile.TemporaryDirectory() as folder:
    with open(os.devnull, "w") as nothing:
      out, sys.stdout, err, sys.stderr = sys.stdout, nothing, sys.stderr, nothing
      try:
        results = run(
          task=task, train_steps=STEPS, global_batch_size=BATCH, model_dir=folder, seed=seed,
          strategy=lambda: factories.mirrored(cpu_replicas=replicas), steps_per_loop=100,
          optimizer=lambda: keras.optimizers.Adam(2e-3), actions=[action],
        )  # fmt: skip
      finally:
        sys.stdout, sys.stderr = out, err
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    named = [each for line in lines if line["split"] == "spike" for each in line["examples"]]
  return results["loss"], named


def false_alarms(trials: int, seed: int, deviations: float) -> int:
  """Counts the spikes that are found in runs without poison."""
  rng, found = random.Random(seed), 0
  for number in range(1, trials + 1):
    own = rng.randrange(10**6)
    loss, named = _trained(Poisoned(own), Spikes(deviations=deviations), own, rng.choice((1, 2, 3)))
    found += bool(named)
    print(f"run {number}: loss {loss:.4f}, {len(named)} examples named", flush=True)
  print(f"{found} of {trials} clean runs of {STEPS} steps have a spike")
  return found


def cost(replicas: int, rounds: int, steps: int) -> None:
  """Prints the time of a judged step over one that is not, and of two that are not."""
  trainers = [_trainer(replicas, judged=judged) for judged in (False, True, False)]
  order, times = random.Random(0), [[] for _ in trainers]
  for trainer in trainers:
    trainer.train(tf.constant(steps))
  for _ in range(rounds):
    for index in order.sample(range(len(trainers)), len(trainers)):
      began = time.perf_counter()
      trainers[index].train(tf.constant(steps))
      times[index].append((time.perf_counter() - began) / steps)
  plain, judged, again = (np.array(each) for each in times)
  print(
    f"{replicas} replicas: {1e6 * statistics.median(plain):.0f} us a step, judged "
    f"{np.median(judged / plain):.3f}, by chance {np.median(again / plain):.3f}"
  )


def _trainer(replicas: int, *, judged: bool):
  randomness.seed_everything(1)
  recipe = Recipe(optimizer=keras.optimizers.Adam, global_batch_size=128)
  trainer = recipe.trainer(Poisoned(0), factories.mirrored(cpu_replicas=replicas))
  if judged:
    trainer.observe(
      Guard(trainer, window=WINDOW, deviations=1e30, updates=True, on_spike=lambda seen: None)
    )
  return trainer


if __name__ == "__main__":
  sys.exit(main())
