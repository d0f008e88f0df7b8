"""Runs cases and writes what they left behind, one .npz or .error a case.

    python worker.py OUTPUT_FOLDER CASE_ID...

With TESTS_ON_GPUS=1 in the environment replicas are parts of the first GPU, else logical CPUs.
One process imports TensorFlow and, before it touches a device, forks one for each number of
replicas, because TensorFlow can hold one size of collective group only.
"""

import collections
import contextlib
import faulthandler
import functools
import json
import os
import sys
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.update({} if "TESTS_ON_GPUS" in os.environ else {"CUDA_VISIBLE_DEVICES": "-1"})

import cases
import compiled
import keras
import mlp
import numpy as np
import reference
import tensorflow as tf
import tf_keras

from loopwright import evaluator
from loopwright.distribution import placement, reduction
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.models import models
from loopwright.optimizers import fusion, loss_scale, schedules
from loopwright.strategies import factories
from loopwright.trainer import Trainer

ON_GPUS = "TESTS_ON_GPUS" in os.environ


@functools.cache
def make_strategy(name, replicas, op, num_packs, shard):
  """One object a place: two would number their collectives alike, and TensorFlow mix them up."""
  devices = [f"GPU:{number}" for number in range(replicas)] if ON_GPUS else None
  where = {"devices": devices, "cpu_replicas": None if ON_GPUS else replicas}
  if name == "mirrored":
    return factories.mirrored(**where, cross_device_ops=op, num_packs=num_packs)
  if name == "central_storage":
    return factories.central_storage(**where)
  if name == "model_parallel":
    mesh = dict(zip(("batch", "model"), map(int, op.split("x")), strict=True))
    layouts = {} if shard else mlp.LAYOUTS
    return factories.model_parallel(mesh=mesh, layouts=layouts, shard_parameters=shard)
  return {"default": factories.default, "one_device": factories.one_device}[name]()


def split_gpu(parts):
  """Makes logical devices of the first GPU, on which NCCL does not work: TensorFlow's ring does."""
  gpu = tf.config.list_physical_devices("GPU")[0]
  each = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
  tf.config.set_logical_device_configuration(gpu, [each] * parts)


def make_optimizers(scenario, library):
  optimizers = (tf_keras if library.endswith("tf_keras") else keras).optimizers
  if scenario.optimizer == "two":
    return {
      "hidden": lambda: optimizers.Adam(0.01),
      "output": lambda: optimizers.SGD(0.02, momentum=0.9),
    }
  rate = schedules.Schedule(lambda step: 0.04 / (1 + step)) if scenario.schedule else scenario.rate
  return {
    "adam": lambda: optimizers.Adam(rate),
    "adamw": lambda: optimizers.AdamW(rate, weight_decay=0.1),
    "momentum": lambda: optimizers.SGD(rate, momentum=0.9),
    "sgd": lambda: optimizers.SGD(rate),
  }[scenario.optimizer]


def make_loss_scale(given):
  if given is None:
    return loss_scale.none
  if isinstance(given, cases.Dynamic):
    return lambda: loss_scale.DynamicLossScale(
      initial=given.initial,
      growth_steps=given.growth_steps,
      factor=given.factor,
      floor=given.floor,
    )
  return lambda: loss_scale.FixedLossScale(scale=given)


def make_dataset(case, position=0):
  """The case's own batches, padded by hand, or made and padded by inputs/datasets.py."""
  if case.scenario.framework_inputs:
    return datasets.train_dataset(
      ArraySource(features=joined(cases.global_batches(case))),
      global_batch_size=case.scenario.batch_size,
      pad_multiple=case.mesh[0],
      position=position,
      shuffle=False,
    )
  dataset = tf.data.Dataset.from_tensor_slices(joined(cases.padded_batches(case)))
  return dataset.batch(case.padded_batch_size, drop_remainder=True)


def joined(batches):
  return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def make_trainer(case):
  scenario = case.scenario
  on_mesh = scenario.shard and case.strategy == "model_parallel"
  place = (case.strategy, case.replicas, case.op, scenario.num_packs)
  strategy = make_strategy(*place, shard=on_mesh)
  return (placement.of(strategy).trainer or Trainer)(
    task=mlp.make(model=case.model, l2=scenario.l2, two_optimizers=scenario.optimizer == "two"),
    strategy=strategy,
    dataset_fn=lambda position: make_dataset(case, position),
    global_batch_size=scenario.batch_size,
    optimizer=make_optimizers(scenario, case.model),
    loss_scale=make_loss_scale(scenario.loss_scale),
    reduction=reduction.Reduction(packing=scenario.packing, wire_dtype=scenario.wire_dtype),
    clip_norm=scenario.clip_norm,
    clip_value=scenario.clip_value,
    accumulation_steps=scenario.accumulation_steps,
    ema_decay=scenario.ema_decay,
    fuse_updates=scenario.fuse_updates,
    shard_optimizer_state=scenario.shard and not on_mesh,
    jit_compile=scenario.jit_compile,
    steps_per_program=case.steps_per_program,
    eager=scenario.eager,
  )


def evaluations(case, run):
  """Evaluates on the first batches: with the moving averages, then with the weights."""
  if not case.scenario.evaluated:
    return []
  common = {"task": run.task, "strategy": run.strategy, "eager": case.scenario.eager}
  dataset = make_dataset(case).take(cases.EVALUATED_BATCHES)
  return [
    evaluator.Evaluator(dataset=dataset, ema=ema, **common).evaluate()
    for ema in (run.parts.ema, None)
  ]


def run_case(case):
  """Trains in two calls and returns (arrays, everything else)."""
  fusion.SMALL = case.scenario.fused_below or SMALL
  run, scenario = make_trainer(case), case.scenario
  ALIVE.append(run)
  calls = [n for n in (scenario.first_loop, scenario.steps - scenario.first_loop) if n]
  loops = [run.train(tf.constant(n)) for n in calls]
  evaluated = evaluations(case, run)
  facts = {
    "loops": loops,
    "evaluations": evaluated,
    "iterations": {n: int(o.optimizer.iterations.numpy()) for n, o in run.parts.optimizers.items()},
    "traces": run.traces,
    "compiled": run.compiled,
    "global_step": int(run.global_step.numpy()),
    "position": int(run.position.numpy()),
    "skipped_steps": int(run.skipped_steps.numpy()),
    "loss_scale": float(run.parts.loss_scale.value()),
    "replicas": run.strategy.num_replicas_in_sync,
  }
  return copies_of_all(run), facts


def copies_of_all(run):
  """Every trainable variable's copies on all devices, and those of its moving average."""
  model = run.task.model
  model = list(model.values()) if isinstance(model, dict) else model
  names = [*reference.NAMES, "untouched"]
  copies = mlp.copies(run.strategy, models.trainable_variables(model))
  arrays = dict(zip(names, copies, strict=False))
  if run.parts.ema is not None:
    averages = mlp.copies(run.strategy, run.parts.ema.averages)
    arrays |= {f"ema/{name}": average for name, average in zip(names, averages, strict=False)}
  return arrays


DUMP_AFTER_S = 520  # shortly before conftest.py gives up on a worker that hangs

ALIVE = []
"""Trainers, kept to the end: TensorFlow may take as long to stop an iterator as it has been there,
as its autotune thread sleeps in ever longer periods and now and then misses its wake-up call."""

SMALL = fusion.SMALL


AT_ONCE = 2


def main(folder, ids):
  """Runs the cases, those of as many replicas in one process; returns the worst exit status."""
  groups = collections.defaultdict(list)
  for case_id in ids:
    groups[cases.CASES[case_id].devices].append(case_id)
  statuses = []
  for started, replicas in enumerate(sorted(groups, key=lambda n: -n * len(groups[n]))):
    if started >= AT_ONCE:
      statuses.append(os.wait()[1])
    if os.fork() == 0:
      run_group(folder, groups[replicas])
  statuses += [os.wait()[1] for _ in range(len(groups) - len(statuses))]
  return max(map(os.waitstatus_to_exitcode, statuses), key=abs)


def run_group(folder, ids):
  """Runs cases of one number of replicas, and ends the process."""
  faulthandler.dump_traceback_later(DUMP_AFTER_S)
  if ON_GPUS:
    split_gpu(cases.CASES[ids[0]].devices)
  for case_id in ids:
    path = os.path.join(folder, case_id)
    try:
      with compiled.as_on_gpus() if cases.CASES[case_id].compiled else contextlib.nullcontext():
        arrays, facts = run_case(cases.CASES[case_id])
    except Exception:
      with open(f"{path}.error", "w") as file:
        file.write(traceback.format_exc())
    else:
      np.savez(f"{path}.npz", facts=json.dumps(facts), **arrays)
  os._exit(0)  # without stopping the iterators


if __name__ == "__main__":
  sys.exit(main(sys.argv[1], sys.argv[2:]))
