"""With TESTS_COMPILED=1, trainers do on CPUs what they do on GPUs: XLA compiles by default.

With TESTS_STEPS_PER_PROGRAM=3, so many of their steps are one program wherever they can be.
"""

import contextlib
import os
from unittest import mock

ON_GPUS = "TESTS_ON_GPUS" in os.environ
COMPILED = ON_GPUS or "TESTS_COMPILED" in os.environ
STEPS = int(os.environ.get("TESTS_STEPS_PER_PROGRAM", "1"))


@contextlib.contextmanager
def in_programs():
  """Inside, trainers have `STEPS` as their default, but for what compiles nothing."""
  from loopwright import trainer
  from loopwright.engine import trainer_checks

  def steps(number, eager, jit_compile):
    return 1 if eager or jit_compile is False else number

  defaults = {**trainer.Trainer.__init__.__kwdefaults__, "steps_per_program": STEPS}
  with (
    mock.patch.object(trainer.Trainer.__init__, "__kwdefaults__", defaults),
    mock.patch.object(trainer_checks, "steps_per_program", steps),
  ):
    yield


@contextlib.contextmanager
def as_on_gpus():
  """Inside, trainers are as on GPUs, but on meshes and under parameter servers."""
  if ON_GPUS:
    yield
    return
  from loopwright.distribution import placement
  from loopwright.strategies import local

  with (
    mock.patch.object(placement.Placement, "on_gpus", True),
    mock.patch.object(placement.Placement, "sends_bfloat16", True),  # between CPUs
    mock.patch.object(local.Default, "devices", ["CPU:0"]),
  ):
    yield
