"""Verifies tasks with a planted mistake of sequences or mixtures, and right ones that look alike.

    python -m benchmarks.sequence_trials
    python -m benchmarks.sequence_trials NotCausal Masked

The tasks are in tests/support/defects/sequences.py. A mistake is named if a check fails with a
right cause and the line of the mistake: of the groups "inputs" and "sequences" and, if it is
another, of that which is responsible. A right task is accused if any check of any group fails.
"""

import argparse
import sys
import time
from pathlib import Path

from loopwright.tools import verify


def main():
  """Prints a line for each task; returns 1 if a right one is accused or a mistake is missed."""
  sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support")]
  from defects import sequences, small

  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("names", nargs="*", help="only these tasks")
  wanted = parser.parse_args().names or [*sequences.DEFECTS, *sequences.RIGHT]
  named, accused = 0, 0
  for name in wanted:
    task, began = getattr(sequences, name), time.monotonic()
    groups = None
    if name in sequences.DEFECTS:
      groups = dict.fromkeys(("inputs", sequences.DEFECTS[name][0], "sequences"))
    failures = verify.verify(small.subject(task), groups=groups and tuple(groups)).failures
    seconds = time.monotonic() - began
    told = "; ".join(f"{each.group}: {each.cause} ({each.place})" for each in failures) or "nothing"
    if name in sequences.DEFECTS:
      _, causes, line = sequences.DEFECTS[name]
      right = [each for each in failures if each.cause in causes and each.place == line]
      named += bool(right)
      outcome = "named" if right else f"NOT named ({' or '.join(causes)}, {line})"
    else:
      accused += bool(failures)
      outcome = "ACCUSED" if failures else "right"
    print(f"{name}: {outcome}; {told}; {seconds:.0f} s", flush=True)
  mistakes = sum(name in sequences.DEFECTS for name in wanted)
  print(f"{named} of {mistakes} mistakes named, {accused} of {len(wanted) - mistakes} accused")
  missed = sum(name in sequences.MISSED for name in wanted)
  return int(named < mistakes - missed or accused > 0)


if __name__ == "__main__":
  sys.exit(main())
