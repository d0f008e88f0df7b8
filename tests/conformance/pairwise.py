"""As few cases as show every strategy, op, number of replicas, model and option (the fast tier).

CI adds as few as show every two of them together.
"""

import dataclasses
import itertools

import cases

PLAIN = cases.Scenario(name="")
SIZES = ("name", "batch_size", "steps", "first_loop", "rate")


def claims(case, together):
  """What a case shows: each (strategy and op), replicas, model, or each two, each option it sets.

  A narrow wire rounds: its cases show nothing of the place.
  """
  op = case.op if case.strategy == "mirrored" else ""
  place = {"place": (case.strategy, op), "replicas": case.replicas, "model": case.model}
  shown = itertools.combinations(place.items(), together)
  return {*(shown if case.scenario.wire_dtype is None else ()), *options(case.scenario)}


def options(scenario):
  """The options of a scenario that PLAIN leaves out; a number stands for any other."""
  for name, value in dataclasses.asdict(scenario).items():
    if name not in SIZES and value != getattr(PLAIN, name):
      yield name, value if isinstance(value, str) else type(value)


def selection(together):
  """Takes the case with the most new claims a replica, again and again until nothing is new."""
  each = {case: claims(case, together) for case in cases.CASES.values()}
  missing, chosen = set().union(*each.values()), []
  while missing:
    best = max(each, key=lambda case: len(each[case] & missing) / case.replicas)
    chosen.append(best)
    missing -= each[best]
  return chosen


FAST, CI = frozenset(selection(1)), frozenset(selection(2))
