"""Prints what the ledgers of a run folder prove."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from framework.errors import ConfigError
from framework.ledger.proof import Problem, prove, read

_CHECKPOINT = re.compile(r"ckpt-(\d+)\.index")


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  given = sys.argv[1:] if arguments is None else list(arguments)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  try:
    if len(given) != 1:
      raise ConfigError("usage: python -m framework.ledger MODEL_DIR")
    ledgers = read(given[0])
    print(prove(ledgers, checkpoint_step=_newest_checkpoint(given[0])))
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except Problem as problem:
    print(problem)
    return 1
  return 0


def _newest_checkpoint(model_dir: str) -> int | None:
  import tensorflow as tf

  folder = os.path.join(model_dir, "checkpoints")
  names = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
  steps = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match]
  return max(steps, default=None)


if __name__ == "__main__":
  sys.exit(main())
