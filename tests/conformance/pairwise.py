"""Which cases the fast tier runs: as few as show every pair of places, and every option, once."""

import dataclasses
import itertools

import cases

PLAIN = cases.Scenario(name="")
SIZES = ("name", "batch_size", "steps", "first_loop", "rate")


def claims(case):
  """What a case shows: each pair of (strategy and op, replicas, model), each option it sets.

  A narrow wire rounds: its cases show nothing of the place.
  """
  op = case.op if case.strategy == "mirrored" else ""
  place = {"place": (case.strategy, op), "replicas": case.replicas, "model": case.model}
  pairs = itertools.combinations(place.items(), 2) if case.scenario.wire_dtype is None else ()
  return {*pairs, *options(case.scenario)}


def options(scenario):
  """The options of a scenario that PLAIN leaves out; a number stands for any other."""
  for name, value in dataclasses.asdict(scenario).items():
    if name not in SIZES and value != getattr(PLAIN, name):
      yield name, value if isinstance(value, str) else type(value)


def selection():
  """Takes the case with the most new claims a replica, again and again until nothing is new."""
  missing, chosen = set().union(*map(claims, cases.CASES.values())), []
  while missing:
    best = max(cases.CASES.values(), key=lambda case: len(claims(case) & missing) / case.replicas)
    chosen.append(best)
    missing -= claims(best)
  return chosen


SELECTED = frozenset(selection())
