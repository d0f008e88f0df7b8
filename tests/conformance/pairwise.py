"""As few cases as show every strategy, op, number of replicas, model and most options (fast tier).

CI adds as few as show every two of them together, and all options.
"""

import dataclasses
import itertools

import cases

PLAIN = cases.Scenario(name="")
SIZES = ("name", "batch_size", "steps", "first_loop", "rate")
ELSEWHERE = (
  *("optimizer", "schedule", "packing", "num_packs", "wire_dtype", "fuse_updates", "fused_below"),
  *("shard", "eager", "jit_compile", "steps_per_program", "framework_inputs"),
)
"""Of these options fast tests of their own show that they change no number."""


def claims(case, together):
  """What a case shows: each option, and each (strategy and op), replicas, model, or each two.

  A narrow wire rounds: its cases show nothing of the place.
  """
  op = case.op if case.strategy == "mirrored" else ""
  shared = case.strategy == "central_storage" and case.replicas > 1
  place = {"place": (case.strategy, op, shared), "replicas": case.replicas, "model": case.model}
  shown = itertools.combinations(place.items(), together)
  left = ELSEWHERE if together == 1 else ()
  set_ = {(name, value) for name, value in options(case.scenario) if name not in left}
  return {*(shown if case.scenario.wire_dtype is None else ()), *set_}


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
