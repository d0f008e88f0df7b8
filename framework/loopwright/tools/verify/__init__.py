"""Verifies a task on the CPU: checks of its step and its inputs.

    loopwright verify mine.gin --json=verify.json

checks/ has one module per group of the registry, with `check(subject) -> results`; docs/verify.md
explains each check. padding.py and own_optimizer.py are parts of the group "replicas",
augmentation.py of "randomness", contents.py of "inputs". report.py holds the results,
and says what follows from what, causes.txt all causes with their remedies.
side_by_side.py runs groups in forks.
bench/ has the tools of the checks:

    bench.py          the user's Trainer on 1 to N logical CPUs, one step at a time
    comparison.py     the step on one replica, and how others differ from it
    explanations.py   causes that several checks name, and the update that some predict
    evaluated.py      a task's evaluation on 1 to N logical CPUs
    recorded_step.py  operations, communications, verbs and new variables of a step
    row_influence.py  the line where one row changes what is computed for another
    changed_rows.py   rows of a source, padded further, or with one document changed
    loss_graph.py     where the loss stops, replaces and passes gradients
    harness.py        a Trainer as `run` makes it, with its input, in loops
    shared_noise.py   noise that does not differ between the steps that are compared
    layer_calls.py    which models a step calls in training mode
    random_draws.py   which operations draw, and where
    survey.py         digests of examples
    held_state.py     state of a task outside of its checkpoint
    source_lines.py   the line of the user's code behind a finding
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from loopwright import errors, registry
from loopwright.host import failures
from loopwright.options.groups import Numerics
from loopwright.runs.builder import made_task, set_globals
from loopwright.runs.from_config import bound, bound_mesh, bound_recipe
from loopwright.strategies import factories
from loopwright.tools.verify import report, side_by_side
from loopwright.tools.verify.bench import source_lines
from loopwright.tools.verify.bench.bench import MOST_REPLICAS, Subject
from loopwright.tools.verify.report import Group, Report, Result

__all__ = ["Report", "Result", "Subject", "register", "subject_of_config", "verify"]

Check: TypeAlias = Callable[[Subject], Sequence[Result]]
_OWN: dict[str, Check] = {}


def register(check: Check) -> Check:
  """Adds a group of checks, named like the function; it runs after those of the registry."""
  _OWN[check.__name__] = check
  return check


def verify(
  subject: Subject,
  *,
  groups: Sequence[str] | None = None,
  together: bool = False,
  show: Callable[[str], None] = lambda text: None,
) -> Report:
  """Runs the checks; the process must not have used TensorFlow's devices before (host).

  Args:
    subject: what to verify.
    groups: names of the registry and of `register`; None runs all.
    together: several at a time, in forks, if the process has not used TensorFlow yet.
    show: called with the text of each group when it is done, in the order of `groups`.

  Raises:
    ConfigError: an unknown group, or TensorFlow has started with too few logical CPUs.
  """
  groups = known_groups(groups)
  checks = {group: _OWN.get(group) or registry.load("check", group) for group in groups}
  began = time.monotonic()
  made = Report([])

  def run(group: str) -> list[Result]:
    with np.errstate(all="ignore"):  # what is not finite is a finding
      return _accepted(_checked(group, checks[group], subject), subject)

  done = side_by_side.ran(
    groups, run, lambda: prepare(subject), most=side_by_side.MOST if together else 1
  )
  for group, results, seconds in done:
    found = report.marked(results, made.results)
    if text := report.section(found):
      show(text)
    made.results += found
    made.shares[group] = seconds
  made.seconds = time.monotonic() - began
  return made


def known_groups(named: Sequence[str] | None = None) -> Sequence[str]:
  """Returns the groups with these names, or all, in the order in which they are shown.

  Raises:
    ConfigError: an unknown name.
  """
  known = (*registry.names("check"), *_OWN)
  for group in named or ():
    if group not in known:
      raise errors.unknown("group of checks", group, known)
  return [group for group in known if named is None or group in named]


def prepare(subject: Subject) -> None:
  """Splits the CPU, hides accelerators, and sets seed and precision as `run` does (host)."""
  logging.getLogger("tensorflow").setLevel(logging.ERROR)  # no warnings about retracing
  if tf.config.get_visible_devices("GPU"):
    with contextlib.suppress(RuntimeError):  # already in use; the bench names its CPUs anyway
      tf.config.set_visible_devices([], "GPU")
  factories.split_cpu(max(MOST_REPLICAS, subject.mesh_size))
  set_globals(Numerics(seed=subject.seed, precision=subject.precision))


def subject_of_config() -> Subject:
  """Returns the subject that the config in force describes."""

  def make_task() -> Any:
    return made_task(bound("task"))

  mesh, size = bound_mesh()
  return Subject(
    task=make_task, precision=bound("precision"), steps_per_loop=bound("steps_per_loop"),
    mesh=mesh, mesh_size=size, **vars(bound_recipe()),
  )  # fmt: skip


def _accepted(results: Sequence[Result], subject: Subject) -> list[Result]:
  """Marks failures as accepted whose cause is in `Task.accepted`."""
  if all(result.status != "failed" for result in results):
    return list(results)
  with contextlib.suppress(Exception):  # if the task cannot be made, another check has failed
    wanted = subject.fresh_task().accepted
    return [
      dataclasses.replace(
        result, status="accepted", detail=f"{result.detail}; accepted: {wanted[result.cause]}",
        **_NO_CAUSE,
      )
      if result.status == "failed" and result.cause in wanted
      else result
      for result in results
    ]  # fmt: skip
  return list(results)


def _checked(group: str, check: Check, subject: Subject) -> list[Result]:
  """Runs one group; an exception of the task or the input becomes a finding."""
  try:
    return list(check(subject))
  except Exception as error:
    return [_raised(group, subject, error)]


_NO_CAUSE: dict[str, Any] = {"cause": "", "remedy": "", "place": ""}
_PLACE = re.compile(r" \(([^()]+:\d+, in [^()]+)\)$")
_LOSS, _METRICS = ("loss", "training_loss", "train_step"), ("metrics", "train_step")
_RETURNED = {"Loss.": _LOSS, "the loss ": _LOSS, "metric ": _METRICS, "the metrics ": _METRICS}
"""How a refusal of what a method has returned begins -> the methods."""


def _raised(group: str, subject: Subject, error: Exception) -> Result:
  """Returns the finding for an exception, with the line of the user's code."""
  refusal = failures.mistake(error)
  detail, place = refusal or failures.failure(error), failures.place_of(error)
  if told := _PLACE.search(detail):
    detail, place = detail[: told.start()], told[1]
  detail = detail.replace("_DictWrapper", "dict").replace("ListWrapper", "list")
  cause = "refused by the framework" if refusal else "exception in the task"
  if "only supports singleton tf.Variables" in detail:
    cause = "variable outside the model"
    detail = "this line makes new variables in each call, which no optimizer has"
  with contextlib.suppress(Exception):  # the task itself may be what fails
    task = subject.fresh_task()
    place = source_lines.qualified(place, task)
    for beginning, methods in _RETURNED.items():
      method = source_lines.method(task, *methods) if detail.startswith(beginning) else ""
      if method and method.partition(", in ")[2] != place.partition(", in ")[2]:
        place = method
  return Group(group).failed(report.RUNS, detail, cause, place)
