"""What tests do with a run: make its trainer, read what it logged and what each replica holds."""

import json
import re
from pathlib import Path

import numpy as np

from loopwright.distribution import placement
from loopwright.evaluator import Evaluator
from loopwright.inputs import datasets
from loopwright.models import models
from loopwright.task import preprocess_of
from loopwright.trainer import Trainer

_REMARK = re.compile(r"WARNING: All log messages before absl|[IWE]\d{4} ")


def said(stderr):
  """Returns what a process wrote, without the lines of TensorFlow's C++ code."""
  return "".join(each for each in stderr.splitlines(keepends=True) if not _REMARK.match(each))


def make_trainer(task, strategy, *, batch, optimizer, data=None, **options):
  """Returns the trainer of a task on its training split; `data` are options of train_dataset."""

  def read(position):
    given = {"pad_multiple": trainer.batch_multiple, "preprocess": preprocess_of(task)}
    return datasets.train_dataset(
      task.source("train"), global_batch_size=batch, position=position, **given | (data or {})
    )

  trainer = (placement.of(strategy).trainer or Trainer)(
    task=task, strategy=strategy, dataset_fn=read, global_batch_size=batch, optimizer=optimizer,
    **options,
  )  # fmt: skip
  return trainer


def make_evaluator(task, strategy, *, batch, **options):
  """Returns the evaluator of a task, or of each of its sets; makes the model if there is none."""
  if task.model is None:
    with strategy.scope():
      task.model = task.build_model()

  def read(source):
    return datasets.eval_dataset(
      source, global_batch_size=batch, pad_multiple=strategy.num_replicas_in_sync,
      preprocess=preprocess_of(task),
    )  # fmt: skip

  found = task.source("eval")
  sets = {name: read(each) for name, each in found.items()} if isinstance(found, dict) else None
  return Evaluator(task=task, strategy=strategy, dataset=sets or read(found), **options)


def records(folder, split=None):
  """Returns the records of a run folder's metrics.jsonl, of one split or all."""
  lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
  return [record for record in lines if split in (None, record["split"])]


def copies(strategy, variables):
  """Returns the values of variables on each replica: [replica][variable]."""
  held = [strategy.experimental_local_results(models.raw(v)) for v in variables]
  return [[copy.numpy() for copy in replica] for replica in zip(*held, strict=True)]


def values(model):
  """Returns the values of all weights of a model."""
  return [np.array(models.raw(v)) for v in models.weights(model)]
