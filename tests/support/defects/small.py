"""A small task that is right, for defects to derive from: 40 examples, 3 features, 2 layers."""

import contextlib
import inspect
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from toys import network

from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss, weighted_sum
from loopwright.task import Task
from loopwright.tools.verify.bench.bench import Subject

EXAMPLES, FEATURES, SEED = 40, 3, 4


def data(seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=[EXAMPLES, FEATURES]).astype(np.float32)
  y = (x @ [1.5, -0.5, 0.25] + 0.1 * rng.normal(size=EXAMPLES)).astype(np.float32)
  return {"x": x, "y": y}


class Small(Task):
  """Regression by a network of two layers."""

  library = keras

  def build_model(self):
    return network([FEATURES], *self.hidden(), self.library.layers.Dense(1), library=self.library)

  def hidden(self):
    return [keras.layers.Dense(4, activation="tanh")]

  def source(self, split):
    return ArraySource(features=data(seed=0 if split == "train" else 1))

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def errors(self, outputs, batch):
    return tf.square(outputs - batch["y"])

  def loss(self, outputs, batch):
    return Loss.from_examples(self.errors(outputs, batch), batch["weight"])

  def metrics(self, outputs, batch):
    return {"mae": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}


def every_variable(task, optimizer):
  """For `variables_of`: one optimizer updates all networks."""
  return [v for part in task.model.values() for v in part.trainable_variables]


class Written(Small):
  """`step.update` written out, with places for a mistake."""

  def train_step(self, step, batch):
    gradients, local = step.gradients(
      lambda part: self.training_loss(step, part), batch, step.variables()
    )
    gradients, loss = self.reduced(step, gradients, local)
    finite, norm = step.check(gradients)
    step.apply(self.after(step, gradients, norm), finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)

  def reduced(self, step, gradients, local):
    gradients, loss = step.all_reduce(gradients, local)
    return step.unscale(gradients, loss), loss

  def after(self, step, gradients, norm):
    return step.clip(gradients, norm)


def planted():
  """Returns (name of a task -> what must be found in it, a decorator that notes it there).

  Options by name are the last of what is noted.
  """
  findings = {}

  def defect(*finding, **options):
    def note(task):
      findings[task.__name__] = (*finding, options) if options else finding
      return task

    return note

  return findings, defect


def subject(task, *, optimizer=None, **options):
  """What `check` takes, of a task's class or a function that makes one."""
  return Subject(
    task=task, optimizer=optimizer or (lambda: keras.optimizers.Adam(0.01)),
    global_batch_size=12, seed=SEED, options=options,
  )  # fmt: skip


def found(results, check):
  """The only result of that name."""
  [result] = [result for result in results if result.check == check]
  return result


def failures(results):
  """What has failed."""
  return [result for result in results if result.status == "failed"]


def explained(results, task, causes, says, words):
  """Checks that these checks fail, of these causes, all at the line with `words`, and no others."""
  failed = failures(results)
  assert {each.check: each.cause for each in failed} == causes
  assert says in failed[0].detail
  assert {each.place for each in failed} == {line_of(task, words) if words else ""}
  assert all(each.remedy for each in failed)


def accused(results):
  """What is said against a task, for a right one to be compared with nothing."""
  return [(each.check, each.detail) for each in failures(results)]


def place(owner, words):
  """Where the one line of a class with `words` in it is, as results say it."""
  for name, method in vars(owner).items():
    lines, first = inspect.getsourcelines(method) if inspect.isfunction(method) else ([], 0)
    for number, line in enumerate(lines, first):
      if words in line:
        return f"{Path(inspect.getsourcefile(owner)).name}:{number}, in {owner.__name__}.{name}"
  raise AssertionError(words)


def line_of(task, words):
  """As `place`, in the task's class or in the nearest one that it derives from."""
  for kind in task.__mro__:
    with contextlib.suppress(AssertionError):
      return place(kind, words)
  raise AssertionError(words)
