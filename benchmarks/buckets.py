"""Measures what length buckets save: one small transformer, texts of unequal lengths.

    python -m benchmarks.buckets
    python -m benchmarks.buckets --language_model --examples 1024 --epochs 2

Trainers take turns, an epoch each: batches padded to the longest text, buckets with the same batch
size, buckets whose batches have about equal numbers of tokens, and packed rows, as many as have
the tokens of a padded batch. Prints the examples and the tokens, without padding, per second
of CPU time (all threads), which varies less than wall time on a shared machine, the ratio to
padding, and the loss per token after the last epoch. With `--language_model` the network is that of
configs/language_model.gin, and the texts are the paragraphs of Python's library up to 256 bytes.
Exit status 1 if the loss of one network
differs between padded and bucketed evaluation.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time

import numpy as np

LONGEST, VOCABULARY, WIDTH, BATCH = 128, 64, 64, 16


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.buckets", description=__doc__)
  parser.add_argument("--examples", type=int, default=2048)
  parser.add_argument("--epochs", type=int, default=3)
  parser.add_argument("--language_model", action="store_true")
  options = parser.parse_args()
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  sizes = (32, 64, 128, 256) if options.language_model else (16, 32, 64, LONGEST)
  kinds: dict[str, dict | None] = {
    "padded": {"boundaries": sizes[-1:]},
    "buckets": {"boundaries": sizes},
    "equal tokens": {"boundaries": sizes, "equal_tokens": True},
    "equal tokens, 4 in a row": {"boundaries": sizes, "equal_tokens": True, "in_a_row": 4},
    "packed": None,
  }
  make = of_language_model if options.language_model else trained
  made = {name: make(options, how) for name, how in kinds.items()}
  for trainer, source in made.values():
    train(trainer, source, 0)  # every shape is traced
  seconds = dict.fromkeys(made, 0.0)
  for epoch in range(1, options.epochs):
    for name, (trainer, source) in made.items():
      began = time.process_time()
      train(trainer, source, epoch)
      seconds[name] += time.process_time() - began
  examples, padded = options.examples * (options.epochs - 1), made["padded"][1]
  tokens = int(padded.lengths.sum()) * (options.epochs - 1)
  differ = False
  for name, (trainer, source) in made.items():
    rate, base = examples / seconds[name], examples / seconds["padded"]
    loss = evaluated(trainer, source)
    same = evaluated(trainer, padded) if name != "packed" else loss
    differ |= abs(loss - same) > 1e-4 * same
    print(
      f"{name:26} {rate:8.0f} examples/s  {tokens / seconds[name]:8.0f} tokens/s  "
      f"{rate / base:5.2f}  loss {loss:.4f} ({same:.4f})"
    )
  return int(differ)


def train(trainer, source, epoch: int) -> None:
  import tensorflow as tf

  if not hasattr(source, "schedule"):
    before = [number * source.num_examples // BATCH for number in (epoch, epoch + 1)]
    trainer.train(tf.constant(before[1] - before[0]))
    return
  schedule = source.schedule(BATCH, seed=0, shuffle=True)
  trainer.train(tf.constant(schedule.steps_before(epoch + 1) - schedule.steps_before(epoch)))


def evaluated(trainer, source) -> float:
  from loopwright import Evaluator
  from loopwright.inputs.datasets import eval_dataset

  batches = functools.partial(eval_dataset, source, global_batch_size=BATCH)
  evaluator = Evaluator(task=trainer.task, strategy=trainer.strategy, dataset=batches)
  return evaluator.evaluate()["loss"]


def data(count: int):
  """Texts of random lengths, mostly short: each token is the one before plus a step of the text."""
  random = np.random.default_rng(0)
  lengths = np.clip(random.lognormal(3.2, 0.6, count), 4, LONGEST).astype(int)
  start, step = random.integers(0, VOCABULARY, [2, count, 1])
  tokens = (start + (1 + step % 3) * np.arange(LONGEST)) % VOCABULARY
  return tokens.astype(np.int32), lengths


def packed_task(tokens: np.ndarray, mask: np.ndarray, lengths: np.ndarray, kind: type) -> object:
  """Returns the task with several texts to a row."""
  import keras

  from loopwright import ArraySource, Packed, attention_mask

  real = np.arange(LONGEST) < lengths[:, np.newaxis]

  class PackedNext(kind):
    def build_model(self):
      return super().build_model(keras.Input([None, None], dtype="bool"))

    def source(self, split):
      del split
      flat = ArraySource(features={"tokens": tokens[real], "mask": mask[real]})
      return Packed(flat, lengths=lengths, length=LONGEST)

    def forward(self, batch, training):
      seen = attention_mask(batch["segment"])
      return self.model([batch["tokens"], seen], training=training)

  return PackedNext()


def trained(options: argparse.Namespace, how: dict | None):
  """Returns a trainer and its source; `how` makes buckets, None packs."""
  import keras
  import tensorflow as tf

  from loopwright import ArraySource, Buckets, Loss, Task
  from loopwright.builder import Recipe
  from loopwright.graphs import randomness

  tokens, lengths = data(options.examples)
  mask = (np.arange(LONGEST) < lengths[:, np.newaxis] - 1).astype(np.float32)

  class Next(Task):
    def build_model(self, mask=None):
      ids = keras.Input([None], dtype="int32")
      x = keras.layers.Embedding(VOCABULARY, WIDTH)(ids)
      seen = {"use_causal_mask": True} if mask is None else {"attention_mask": mask}
      x = x + keras.layers.MultiHeadAttention(2, WIDTH // 2)(x, x, **seen)
      x = keras.layers.LayerNormalization()(x)
      x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(x))
      return keras.Model(ids if mask is None else [ids, mask], keras.layers.Dense(VOCABULARY)(x))

    def source(self, split):
      del split
      source = ArraySource(features={"tokens": tokens, "mask": mask})
      return Buckets(source, lengths=lengths, trim=("tokens", "mask"), **how)

    def forward(self, batch, training):
      return self.model(batch["tokens"], training=training)

    def loss(self, outputs, batch):
      wanted = tf.roll(batch["tokens"], -1, axis=1)
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, outputs)
      weight = batch["mask"] * batch["weight"][:, tf.newaxis]
      return Loss(tf.reduce_sum(losses * weight), tf.reduce_sum(weight))

  randomness.seed_everything(1)
  recipe = Recipe(optimizer=lambda: keras.optimizers.Adam(1e-3), global_batch_size=BATCH)
  task = packed_task(tokens, mask, lengths, Next) if how is None else Next()
  return recipe.trainer(task, tf.distribute.get_strategy()), task.source("train")


def of_language_model(options: argparse.Namespace, how: dict | None):
  """As `trained`, for the transformer of configs/language_model.gin and paragraphs of bytes."""
  import keras
  import tensorflow as tf

  from loopwright import ArraySource, Buckets, Packed
  from loopwright.builder import Recipe
  from loopwright.graphs import randomness
  from loopwright.tasks import language_model

  library = language_model.python_library().documents("train")
  paragraphs = [each for text in library for each in text.split(b"\n\n") if 4 <= len(each) <= 256]
  chosen = np.random.default_rng(0).choice(len(paragraphs), options.examples, replace=False)
  tokens, lengths = language_model.shifted([paragraphs[i] for i in chosen])

  class Paragraphs(language_model.LanguageModel):
    def source(self, split):
      del split
      flat = ArraySource(features=tokens)
      if how is None:
        return Packed(flat, lengths=lengths, length=256)
      real = np.arange(256) < lengths[:, np.newaxis]
      rows = {name: np.zeros(real.shape, np.int32) for name in tokens}
      for name, value in tokens.items():
        rows[name][real] = value
      rows["target"][~real] = language_model.NO_TARGET
      rows["position"] = np.broadcast_to(np.arange(256, dtype=np.int32), real.shape).copy()
      return Buckets(ArraySource(features=rows), lengths=lengths, trim=tuple(rows), **how)

  randomness.seed_everything(1)
  recipe = Recipe(optimizer=lambda: keras.optimizers.Adam(1e-3), global_batch_size=BATCH)
  task = Paragraphs(corpus=language_model.python_library())
  return recipe.trainer(task, tf.distribute.get_strategy()), task.source("train")


if __name__ == "__main__":
  sys.exit(main())
