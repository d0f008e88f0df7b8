"""Every name in a run folder; imports no TensorFlow.

All code that writes into a run folder takes its names from here, so that one module knows all of
them. Readers use them (`loopwright ls`, the ledger), and checks of every name, such as
that none is a link.
"""

from __future__ import annotations

import contextlib
import os
import re

from loopwright.errors import ConfigError

METRICS, HISTORY, CONFIG = "metrics.jsonl", "history.jsonl", "operative_config.gin"
OWNER, LOCK, PROBE = "owner.json", "owner.lock", ".writable"
UNDONE, WARM_START, TUNED = f"{METRICS}.undone", "warm_start.txt", "tuned.gin"
OF_PROCESS = (OWNER, LOCK, PROBE)
"""Files that no copy of a run needs."""
FILES = (METRICS, HISTORY, CONFIG, *OF_PROCESS, UNDONE, WARM_START, TUNED)

CHECKPOINTS, BEST, EXPORT, ASSETS = "checkpoints", "best", "export", "assets"
TRAIN, EVAL, MEDIA, PROFILE = "train", "eval", "media", "profile"
NONFINITE, TRACKERS, WANDB, LOGS, FLIGHT = "nonfinite", "trackers", "wandb", "logs", "flight"
ASKED = "asked"
"""The file in `FLIGHT` that asks the processes of the run for their stacks."""
FOLDERS = (
  *(ASSETS, CHECKPOINTS, EVAL, EXPORT, FLIGHT, LOGS, MEDIA, NONFINITE, PROFILE),
  *(TRACKERS, TRAIN, WANDB),
)
"""All folders with a fixed name; `BEST` is the default of an option."""
ALWAYS = (CHECKPOINTS, EVAL, FLIGHT, TRAIN)
"""Those of every run."""

PREFIX = "ckpt"
"""A checkpoint is ckpt-<step>.index and ckpt-<step>.data-*."""
UNFINISHED = "unfinished"
"""The folder in `CHECKPOINTS` in which a checkpoint is written before its files are moved."""
_INDEX = re.compile(rf"{PREFIX}-(\d+)\.index")
_LEDGER = re.compile(r"ledger-\d+\.jsonl")


def ledger(worker: int) -> str:
  """Returns the name of a worker's ledger."""
  return f"ledger-{worker}.jsonl"


def flight(worker: int) -> str:
  """Returns the name of a worker's flight record."""
  return f"{FLIGHT}/{worker}.jsonl"


def stacks(worker: int) -> str:
  """Returns the name of the file of a worker's stacks."""
  return f"{FLIGHT}/stacks-{worker}.txt"


def checkpoint_steps(model_dir: str) -> list[int]:
  """Returns the steps of the complete checkpoints of a run, in order (host)."""
  with contextlib.suppress(OSError):
    names = os.listdir(os.path.join(model_dir, CHECKPOINTS))
    return sorted(int(found[1]) for found in map(_INDEX.fullmatch, names) if found)
  return []


def is_ours(name: str) -> bool:
  """Whether a run writes to a file or a folder of this name in its folder."""
  return name in (*FILES, *FOLDERS, BEST) or bool(_LEDGER.fullmatch(name))


def require_no_links(model_dir: str) -> None:
  """Raises a ConfigError if what has a name that a run writes to is a link, or of another kind.

  Through a link it would write elsewhere; where each run has a folder, a file would stop it late.
  """
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    for found in sorted(filter(is_ours, os.listdir(model_dir))):
      require_no_link(path := os.path.join(model_dir, found))
      if found not in (BEST, *FOLDERS) and os.path.isdir(path):
        raise ConfigError(f"{path!r} is a folder, where the run has a file; move it away.")
      if found in ALWAYS and not os.path.isdir(path):
        raise ConfigError(f"{path!r} is a file, where the run has a folder; move it away.")


def require_no_link(path: str) -> None:
  """Raises a ConfigError if a path in a run folder is a link."""
  if os.path.islink(path):
    raise ConfigError(
      f"{path!r} is a link to {os.readlink(path)!r}, where the run would write; remove the link, "
      "or choose another --model_dir, which may be a link itself."
    )
