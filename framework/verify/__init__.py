"""Whether a user's own task is right: checks of the step, its inputs and its config, on the CPU.

    python launch.py --gin_file=mine.gin --mode=verify --json=verify.json

checks/ has a module for each group of `GROUPS`, with `check(subject) -> results`; docs/verify.md
says what each one means. report.py holds what they find. bench/ has what they are made of:

    bench.py          the user's Trainer on 1 to N logical CPUs, one step at a time
    harness.py        the same as `run` makes it, with its input, in loops
    shared_noise.py   the same noise for every row, so that a random task can be compared
    same_draws.py     the same for XLA and every dtype
    random_draws.py   what draws, and where
    survey.py         digests of examples
    labels.py         which feature is the label
    graphs.py         operations of a traced step
    xla.py            those that XLA cannot compile
    held_state.py     what a task remembers outside of its checkpoint
    source_lines.py   the line of the user's code that a finding is about
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from framework import errors
from framework.builder import made_task, set_globals
from framework.run import bound, bound_recipe
from framework.strategies import factories
from framework.verify import report
from framework.verify.bench.bench import MOST_REPLICAS, Subject
from framework.verify.report import Report, Result

__all__ = ["GROUPS", "Report", "Result", "Subject", "subject_of_config", "verify"]

GROUPS = (
  *("configuration", "inputs", "replicas", "order", "gradients", "randomness", "restore"),
  *("compilation", "precision", "learning"),
)


def verify(
  subject: Subject,
  *,
  groups: Sequence[str] | None = None,
  show: Callable[[str], None] = lambda text: None,
) -> Report:
  """Runs the checks, in a process that has not used TensorFlow's devices yet (host).

  Args:
    subject: what to verify.
    groups: which of `GROUPS`; None runs all.
    show: is called with the text of each group as soon as it is done.

  Raises:
    ConfigError: an unknown group, or TensorFlow has started with too few logical CPUs.
  """
  groups = GROUPS if groups is None else groups
  for group in groups:
    if group not in GROUPS:
      raise errors.unknown("group of checks", group, GROUPS)
  prepare(subject)
  began, results = time.monotonic(), []
  for group in groups:
    found = _accepted(_checked(group, subject), subject)
    show(report.section(found))
    results += found
  return Report(results, seconds=time.monotonic() - began)


def prepare(subject: Subject) -> None:
  """Splits the CPU, hides accelerators, and sets seed and precision as `run` does (host)."""
  logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it regrets each further trace
  if tf.config.get_visible_devices("GPU"):
    with contextlib.suppress(RuntimeError):  # in use already: the bench names its CPUs anyway
      tf.config.set_visible_devices([], "GPU")
  factories.split_cpu(MOST_REPLICAS)
  set_globals(subject.seed, subject.precision, deterministic=False, eager=False)


def subject_of_config() -> Subject:
  """Returns what the config in force describes."""

  def make_task() -> Any:
    return made_task(bound("task"))

  return Subject(
    task=make_task, precision=bound("precision"), steps_per_loop=bound("steps_per_loop"),
    **vars(bound_recipe()),
  )  # fmt: skip


def _accepted(results: Sequence[Result], subject: Subject) -> list[Result]:
  """Failures whose cause the task says that it wants are none."""
  if all(result.status != "failed" for result in results):
    return list(results)
  with contextlib.suppress(Exception):  # a task that cannot be made has failed already
    wanted = subject.fresh_task().accepted
    return [
      dataclasses.replace(
        result, status="accepted", detail=f"{result.detail}; accepted: {wanted[result.cause]}",
        cause="", remedy="", place="",
      )
      if result.status == "failed" and result.cause in wanted
      else result
      for result in results
    ]  # fmt: skip
  return list(results)


def _checked(group: str, subject: Subject) -> list[Result]:
  """One group; what a task or an input raises on the bench is a finding like any other."""
  try:
    module = importlib.import_module(f"framework.verify.checks.{group}")
    return module.check(subject)
  except Exception as error:
    line, name = errors.mistake(error), "runs at all"
    detail, cause = line or errors.failure(error), "mistake" if line else "error"
    return [Result(group=group, check=name, status="failed", detail=detail, cause=cause)]
