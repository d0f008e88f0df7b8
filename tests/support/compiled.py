"""With TESTS_COMPILED=1, trainers do on CPUs what they do on GPUs: XLA compiles by default."""

import contextlib
import os
from unittest import mock

ON_GPUS = "TESTS_ON_GPUS" in os.environ
COMPILED = ON_GPUS or "TESTS_COMPILED" in os.environ


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
