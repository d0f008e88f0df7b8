"""Prints what the ledgers of a run folder prove."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from loopwright.errors import ConfigError
from loopwright.host import urls
from loopwright.run_folder import layout
from loopwright.tools.ledger.proof import Ledger, Problem, prove, read


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  given = sys.argv[1:] if arguments is None else list(arguments)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  try:
    if len(given) != 1:
      raise ConfigError("usage: python -m loopwright.tools.ledger MODEL_DIR")
    urls.require_path("MODEL_DIR", given[0], "the ledgers are read there")
    newest = max(layout.checkpoint_steps(given[0]), default=None)
    parts = read(given[0])
    in_buckets = "" not in parts
    for part, ledgers in parts.items():
      print(_proven(part, ledgers, None if in_buckets else newest))
    batches = sum(ledgers[0].last_step for ledgers in parts.values())
    if in_buckets and newest is not None and newest > batches:
      raise Problem(
        f"the newest checkpoint is of step {newest}, but worker 0 recorded {batches} batches of "
        "all buckets"
      )
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except Problem as problem:
    print(problem)
    return 1
  return 0


def _proven(part: str, ledgers: Sequence[Ledger], newest: int | None) -> str:
  if not part:
    return str(prove(ledgers, checkpoint_step=newest))
  try:
    return f"part {part!r}:\n{prove(ledgers, checkpoint_step=newest)}"
  except Problem as problem:
    raise Problem(f"part {part!r}, {problem}") from problem


if __name__ == "__main__":
  sys.exit(main())
