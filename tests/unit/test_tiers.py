"""The fast tier is the whole in miniature: it holds a piece of whatever the whole proves."""

import pkgutil
from pathlib import Path

import pytest
import tiers
from config_data import FOLDER

from framework import tasks
from framework.tools import verify

TESTS = Path(__file__).parents[1]
GROUPS = {  # group of checks: the test of planted defects, that of right tasks
  "configuration": (
    "test_verify_configuration.py::test_a_defect",
    "test_verify_configuration.py::test_the_configs_are_right",
  ),
  "inputs": ("test_verify_inputs.py::test_a_defect", "test_verify_inputs.py::test_a_right_task"),
  "replicas": (
    "test_verify.py::test_a_defect_of_replicas_is_explained",
    "test_verify.py::test_what_is_right_passes",
  ),
  "mesh": (
    "test_verify_mesh.py::test_a_planted_defect_is_named",
    "test_verify_mesh.py::test_what_is_right_passes",
  ),
  "order": (
    "test_verify.py::test_a_step_out_of_order_is_shown",
    "test_verify.py::test_what_is_right_passes",
  ),
  "evaluation": (
    "test_verify_evaluation.py::test_a_defect",
    "test_verify_evaluation.py::test_a_right_task",
  ),
  "lengths": (
    "test_verify_lengths.py::test_a_defect",
    "test_verify_lengths.py::test_a_right_task",
  ),
  "gradients": (
    "test_verify.py::test_a_defect_of_gradients_is_explained",
    "test_verify.py::test_what_is_right_passes",
  ),
  "randomness": (
    "test_verify_randomness.py::test_a_defect",
    "test_verify_randomness.py::test_a_right_task",
  ),
  "restore": (
    "test_verify_restore.py::test_the_defect_is_found_and_named",
    "test_verify_restore.py::test_nothing_is_found_in_a_sound_task",
  ),
  "compilation": (
    "test_verify_compilation.py::test_the_defect_is_found_and_named",
    "test_verify_compilation.py::test_nothing_is_found_in_a_sound_task",
  ),
  "precision": (
    "test_verify_precision.py::test_the_defect_is_found_and_named",
    "test_verify_precision.py::test_nothing_is_found_in_a_sound_task",
  ),
  "learning": (
    "test_verify.py::test_what_cannot_learn_is_shown",
    "test_verify.py::test_what_is_right_passes",
  ),
}
FAULTS = {
  "a mistake in a config": "test_mistakes.py::test_a_mistake",
  "an error in a task": "test_mistakes.py::test_an_error_in_a_task_points_to_its_line",
  "SIGKILL, then a resume": "test_resume.py::test_a_killed_run_goes_on",
  "SIGTERM, then a resume": "test_resume.py::test_a_signal_saves_and_the_same_command_goes_on",
  "a damaged checkpoint": "test_resume.py::test_a_damaged_newest_checkpoint_costs_only_time",
  "a kill while saving": "test_checkpoints.py::test_a_kill_at_any_operation_of_a_save",
  "a silent worker": "test_heartbeat.py::test_a_silent_peer_is_named_among_others",
  "a lost worker under parameter servers": (
    "test_parameter_server.py::test_a_worker_killed_in_training_changes_no_count"
  ),
  "an example that is not finite": (
    "test_forensics.py::test_one_example_is_located_and_its_step_leaves_nothing_behind"
  ),
  "examples read twice or never": "test_ledger.py::test_a_planted_defect_is_named",
}
RUNS = {
  "two workers": "test_multi_worker.py::test_they_learn_what_one_worker_would",
  "parameter servers": "test_parameter_server.py::test_a_regression_comes_near_its_solution",
  "one process, by its command": "test_launch.py::test_the_whole_command_prints_the_one_line",
}


class Collector:
  """Keeps what pytest has collected."""

  def pytest_collection_finish(self, session):
    self.items = session.items


@pytest.fixture(scope="module")
def everything():
  """All tests, none of which is run."""
  collector = Collector()
  options = ["--everything", "--collect-only", "-qq", "-n0", "-p", "no:cacheprovider"]
  assert pytest.main([str(TESTS), *options], plugins=[collector]) == 0
  return collector.items


@pytest.fixture(scope="module")
def fast(everything):
  return [item for item in everything if tiers.is_fast(item)]


def of(items, test):
  """The items of one test, given by "file.py::function"."""
  return [i for i in items if f"{i.path.name}::{i.nodeid.partition('::')[2]}".startswith(test)]


def values(items, test, parameter):
  return {item.callspec.params[parameter] for item in of(items, test) if hasattr(item, "callspec")}


def test_a_part_of_the_tests_is_fast(everything, fast):
  assert 0.5 * len(everything) < len(fast) < 0.9 * len(everything)


def test_each_mark_of_values_selects_some(everything, fast):
  names = {item.nodeid.partition("[")[0] for item in everything if item.get_closest_marker("fast")}
  assert names <= {item.nodeid.partition("[")[0] for item in fast}


@pytest.mark.parametrize(
  "test",
  ["test_weights_equal_the_reference", "test_counters_and_loss_scale_equal_the_reference"],
)
def test_the_conformance_cases_are_pairwise(everything, fast, test):
  """Every pair of (strategy and op, replicas, generation of Keras), every option, every plant."""
  import pairwise

  def claims(items):
    found = values(items, f"test_update.py::{test}", "case")
    return set().union(*map(pairwise.claims, found))

  assert claims(fast) == claims(everything)


def test_each_group_of_checks_has_a_defect_and_a_right_task(fast):
  assert tuple(GROUPS) == tuple(verify.GROUPS)
  missing = [(group, t) for group, both in GROUPS.items() for t in both if not of(fast, t)]
  assert missing == []


@pytest.mark.parametrize("kind", [*FAULTS, *RUNS])
def test_each_fault_and_each_kind_of_run_is_there(fast, kind):
  assert of(fast, {**FAULTS, **RUNS}[kind])


def test_each_config_is_there(fast):
  configs = {path.name for path in FOLDER.glob("*.gin")}
  assert values(fast, "test_configs.py::test_a_config_builds_and_trains", "name") == configs


def test_each_task_is_there(fast):
  """A module of tasks/ is tested by a file that imports it, or by a config that names it."""
  files = {item.path for item in fast} | set(FOLDER.glob("*.gin"))
  text = "\n".join(path.read_text() for path in files)
  names = [module.name for module in pkgutil.iter_modules(tasks.__path__)]
  assert len(names) > 5
  for name in names:
    assert f"tasks.{name}" in text or f"tasks import {name}" in text, name
