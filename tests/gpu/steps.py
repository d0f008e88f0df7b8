"""What a training step asks of the GPUs, counted on the stand-in of tests/support/fake_gpu.

  python tests/gpu/steps.py digits_cnn/float32/1 fashion_mnist_gan/mixed_float16/1

A case is a config, a precision and the number of GPUs, with /plain behind it for
`Trainer.jit_compile = False`, or /4 for `Trainer.steps_per_program = 4`. Prints a line of JSON for
each: what a step asks for, where variables and features lie, and the memory of each GPU in bytes.
With TF_CONFIG in the environment it is one of several workers.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
import weakref
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import fake_gpu  # noqa: E402

FEW, MANY = 12, 52  # loops of both lengths; the difference is that of steps, whatever a loop costs


def main(cases):
  gpus = max(int(case.split("/")[2]) for case in cases)
  if "FAKE_GPU_COUNT" not in os.environ:
    environment = fake_gpu.environment(fake_gpu.library(), count=gpus)
    os.execve(sys.executable, [sys.executable, __file__, *cases], environment)
  for case in cases:
    print(json.dumps({"case": case, **measured(*case.split("/"))}), flush=True)
  os._exit(0)  # the driver's thread never ends


def measured(config, precision, gpus, how=None):
  """Returns name -> what is measured of a case."""
  import tensorflow as tf

  ways = {None: {}, "plain": {"jit_compile": False}}
  options = ways[how] if how in ways else {"steps_per_program": int(how)}
  trainer = made(config, precision, int(gpus), **options)
  names = [f"GPU:{number}" for number in range(int(gpus))]
  held = [tf.config.experimental.get_memory_info(name)["current"] for name in names]
  trainer._iterator = trainer.make_iterator()
  batches = []
  note(weakref.ref(trainer.task), batches)
  step = counted(trainer._run_loop)
  return {"step": step, "places": places(trainer), "batches": batches, "bytes": held}


def counted(run):
  """Returns what a step of `run(number of steps)` asks for."""
  import tensorflow as tf

  def asked(steps):
    run(tf.constant(steps))  # traced, with its constants on the device
    time.sleep(0.2)
    fake_gpu.reset()
    run(tf.constant(steps))
    time.sleep(0.2)  # what the device finishes later
    return fake_gpu.counts()

  few, many = asked(FEW), asked(MANY)
  each = {name: (many[name] - few[name]) / (MANY - FEW) for name in few | many}
  return {name: number for name, number in sorted(each.items()) if number}


def made(config, precision, gpus, **options):
  """Returns a trainer of a shipped config, with small data, on so many GPUs."""
  import config_data

  from loopwright import configurables
  from loopwright.distribution.reduction import Reduction
  from loopwright.options.groups import Numerics
  from loopwright.runs import builder
  from loopwright.runs import from_config as runs
  from loopwright.strategies import factories

  class Unproven(Reduction):
    """The stand-in computes no sum that could be right."""

    def prove(self, strategy, dtypes):
      pass

  folder = Path(tempfile.mkdtemp())
  name = f"{config}.gin"
  configurables.parse([str(config_data.FOLDER / name)], config_data.stand_ins(name, folder))
  builder.set_globals(Numerics(precision=precision))
  if "TF_CONFIG" in os.environ:
    strategy = factories.multi_worker_mirrored()
  elif gpus > 1:
    strategy = factories.mirrored(devices=[f"GPU:{number}" for number in range(gpus)])
  else:
    strategy = factories.one_device()
  recipe = runs.bound_recipe(strategy.num_replicas_in_sync)
  recipe = dataclasses.replace(recipe, options={"reduction": Unproven, **options})
  return recipe.trainer(builder.made_task(runs.bound("task")), strategy)


def note(task, batches):
  """Notes, for each replica's trace, the features' dtypes and the devices that they lie on."""

  def noted(step, batch):
    batches.append({n: [v.dtype.name, v.device.rpartition("device:")[2]] for n, v in batch.items()})
    return type(task()).train_step(task(), step, batch)

  task().train_step = noted


def places(trainer):
  """Returns the devices of all variables of the model and the optimizers, each once."""
  from loopwright.models import models

  kept = [models.raw(v) for v in models.all_variables(trainer.task.model)]
  for optimizer in trainer.parts.optimizers.values():
    kept += [models.raw(v) for v in optimizer.optimizer.variables]
  copies = [c for v in kept for c in trainer.strategy.experimental_local_results(v)]
  return sorted({copy.device.rpartition("device:")[2] for copy in copies})


if __name__ == "__main__":
  main(sys.argv[1:])
