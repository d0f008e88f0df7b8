"""NVIDIA's GPUs as the system shows them, without TensorFlow and without CUDA.

[["0", "1"], ["2", "3"]] == divided(visible(), 2)  # of four GPUs
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = "/"
"""Where /dev and /proc are."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def installed() -> list[str]:
  """Returns the signs of GPUs in the machine: their device files, else the driver's folders.

  A container without GPUs has the latter, on a machine with GPUs.
  """
  return _device_files() or [str(path) for path in Path(ROOT, "proc/driver/nvidia/gpus").glob("*")]


def visible(environ: Mapping[str, str] = os.environ) -> list[str]:
  """Returns the GPUs that CUDA shows to a process, as entries of CUDA_VISIBLE_DEVICES.

  Without the variable these are all that it may open, numbered from 0, which a container or the
  cgroup of a Slurm job may limit. In it, what stands behind an entry of -1 does not count.
  """
  given = environ.get(VISIBLE)
  if given is None:
    opened = [name for name in _device_files() if os.access(name, os.R_OK | os.W_OK)]
    return [str(number) for number in range(len(opened))]
  entries = (entry.strip() for entry in given.split(","))
  return [*itertools.takewhile(lambda entry: entry not in ("", "-1"), entries)]


def divided(gpus: Sequence[str], count: int) -> list[Sequence[str]]:
  """Returns `count` disjoint parts of equal size, in order; remaining GPUs are in none."""
  size = len(gpus) // count
  return [gpus[size * index : size * (index + 1)] for index in range(count)]


def _device_files() -> list[str]:
  found = [path for path in Path(ROOT, "dev").glob("nvidia*") if path.name[6:].isdecimal()]
  return [str(path) for path in sorted(found, key=lambda path: int(path.name[6:]))]
