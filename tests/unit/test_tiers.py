"""The fast tier is the whole in miniature: it holds a piece of whatever the whole proves."""

import pkgutil
from pathlib import Path

import pytest
import tiers
from config_data import FOLDER

from loopwright import registry, tasks

TESTS = Path(__file__).parents[1]
OF_ONE_FILE = {  # group of checks whose tests are in test_verify.py: that of its planted defects
  "replicas": "test_a_defect_of_replicas_is_explained",
  "order": "test_a_step_out_of_order_is_shown",
  "gradients": "test_a_defect_of_gradients_is_explained",
  "learning": "test_what_cannot_learn_is_shown",
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


PIECES = {  # of each strategy, action and source that a config can name
  "auto": "test_strategies.py::test_auto_says_what_it_took",
  "default": "test_update.py::test_weights_equal_the_reference",
  "one_device": "test_update.py::test_weights_equal_the_reference",
  "mirrored": "test_update.py::test_weights_equal_the_reference",
  "central_storage": "test_update.py::test_weights_equal_the_reference",
  "model_parallel": "test_update.py::test_weights_equal_the_reference",
  "multi_worker_mirrored": RUNS["two workers"],
  "parameter_server": RUNS["parameter servers"],
  "tpu": "test_cluster.py::test_a_tpu",
  "grouped": "test_groups.py::test_each_variable_has_the_options_of_its_group",
  "BestCheckpoint": "test_actions.py::test_best_checkpoint_keeps_the_best",
  "KerasCallback": "test_keras_callback.py::",
  "EarlyStopping": "test_actions.py::test_early_stopping_is_the_brute_force_whatever_the_restarts",
  "Export": "test_actions.py::test_export_serves_what_the_model_computes",
  "StopOnNonFinite": FAULTS["an example that is not finite"],
  "ModelFlops": "test_model_flops.py::test_a_step_has_the_flops_of_its_closed_form",
  "Profile": "test_profiling.py::test_steps_at_the_ends_of_loops_and_of_the_run",
  "Show": "test_board.py::test_show_gets_the_metrics_of_the_evaluation_or_loop_before_it",
  "TensorBoard": (
    "test_tensorboard.py::test_histograms_are_of_the_weights_and_gradients_of_their_step"
  ),
  "MLflow": "test_trackers.py::test_mlflow_gets_one_run_however_often_it_is_killed",
  "WandB": "test_trackers.py::test_wandb_gets_one_run_whose_mode_the_environment_says",
  "ArraySource": "test_inputs.py::test_replicas_split_the_same_batches_contiguously",
  "ImageFolderSource": "test_sources.py::test_image_folder_trains",
  "StreamSource": "test_evaluator.py::test_every_example_arrives_exactly_once",
  "load_arrays": "test_sources.py::test_load_arrays_of_an_npz",
  "IndexedSource": "test_indexed.py::test_a_global_shuffle_over_getitem_that_starts_anywhere",
  "TFRecordSource": "test_indexed.py::test_records_are_read_by_index",
  "Buckets": "test_buckets.py::test_training_is_that_of_numpy_with_a_trace_for_each_shape",
  "Sources": "test_parts.py::test_training_is_that_of_numpy_and_the_ledger_proves_it",
  "Mixture": "test_mixture.py::test_training_is_that_of_numpy_and_the_ledger_proves_each_part",
  "ReplayBuffer": "test_replay.py::",
}
KINDS = ("kinds.mesh", "kinds.parameter_server", "kinds.tpu", "kinds.workers.strategy")
LOCAL = ("strategies.local", "strategies.mirrored")
ROOMS = (*LOCAL, *KINDS, "actions", "inputs", "tools.exports", "tools.forensics")
"""Where strategies, actions and sources are, beside trackers."""


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
  return [item for item in everything if tiers.tier(item) == "fast"]


@pytest.fixture(scope="module")
def ci(everything):
  """What CI runs: the fast tier and what it adds."""
  return [item for item in everything if tiers.tier(item) != "everything"]


def of(items, test):
  """The items of one test, given by "file.py::function"."""
  return [i for i in items if f"{i.path.name}::{i.nodeid.partition('::')[2]}".startswith(test)]


def values(items, test, parameter):
  return {item.callspec.params[parameter] for item in of(items, test) if hasattr(item, "callspec")}


def test_each_line_of_the_list_names_a_test(everything):
  found = set().union(*map(tiers.names, everything))
  assert [line for line in tiers.LISTED if line not in found] == []
  assert len(tiers.LISTED) == len(tiers.LINES)


def test_the_list_moves_a_file_a_test_and_one_of_its_ids(everything, monkeypatch):
  def tier(test, *lines):
    monkeypatch.setattr(tiers, "LISTED", {line.lstrip("!+-"): line[0] for line in lines})
    [item, *_] = of(everything, test)
    return tiers.tier(item)

  fast, id_of_it = "test_strategies.py::test_mirrored_splits_the_cpu", "[1]"
  line = f"unit/strategies/{fast}"
  assert tier(fast) == "fast"
  assert tier(fast, "unit/strategies/test_strategies.py") == tier(fast, line) == "ci"
  assert tier(fast + id_of_it, line + id_of_it) == "ci"
  assert tier(fast + id_of_it, line, f"!{line}{id_of_it}") == "fast"
  assert tier(fast + id_of_it, f"-{line}") == "everything"
  assert tier(fast + id_of_it, f"-{line}", line + id_of_it) == "ci"
  assert tier("test_slurm.py") == tier("test_slurm.py", "clusters/test_slurm.py") == "everything"
  assert tier("test_slurm.py", "+clusters/test_slurm.py") == "ci"
  assert tier(fast, "+unit/strategies/test_strategies.py") == "fast"


def test_each_mark_of_values_selects_some(everything, ci):
  names = {item.nodeid.partition("[")[0] for item in everything if item.get_closest_marker("fast")}
  assert names <= {item.nodeid.partition("[")[0] for item in ci}


@pytest.mark.parametrize(
  "test",
  ["test_weights_equal_the_reference", "test_counters_and_loss_scale_equal_the_reference"],
)
@pytest.mark.parametrize(("tier", "together"), [("fast", 1), ("ci", 2)])
def test_the_conformance_cases_are_all_there(everything, request, test, tier, together):
  """Every strategy, op, model, option; in CI every pair of (strategy and op, replicas, model)."""
  import pairwise

  def claims(items):
    found = values(items, f"test_update.py::{test}", "case")
    return set().union(*(pairwise.claims(case, together) for case in found))

  assert claims(request.getfixturevalue(tier)) == claims(everything)


@pytest.mark.parametrize("group", registry.names("check"))
def test_each_group_of_checks_has_a_defect_and_a_right_task(fast, group):
  file = "test_verify.py" if group in OF_ONE_FILE else f"test_verify_{group}.py"
  assert of(fast, f"{file}::{OF_ONE_FILE.get(group, 'test_a_defect')}")
  assert of(fast, f"{file}::test_a_right_task")


def test_each_name_of_a_config_is_known_here():
  rooms = (*(f"loopwright.{room}" for room in ROOMS), "loopwright.tools.trackers")
  named = registry.entries(*registry.CONFIGURABLE)
  assert {each.name for each in named if each.module.startswith(rooms)} <= PIECES.keys()


@pytest.mark.parametrize("kind", [*FAULTS, *RUNS, *PIECES])
def test_each_kind_has_a_piece(fast, kind):
  assert of(fast, {**FAULTS, **RUNS, **PIECES}[kind])


def test_each_config_is_there(fast, ci):
  """Its schedule in the fast tier, two of its steps in CI."""
  configs = {path.name for path in FOLDER.glob("*.gin")}
  schedule = "test_configs.py::test_a_config_ends_its_schedule_with_its_training"
  assert values(fast, schedule, "name") == configs
  assert values(ci, "test_configs.py::test_a_config_builds_and_trains", "name") == configs


def test_each_task_is_there(fast):
  """A module of tasks/ is tested by a file that imports it, or by a config that names it."""
  files = {item.path for item in fast} | set(FOLDER.glob("*.gin"))
  text = "\n".join(path.read_text() for path in files)
  names = [module.name for module in pkgutil.iter_modules(tasks.__path__)]
  assert len(names) > 5
  for name in names:
    assert f"tasks.{name}" in text or f"tasks import {name}" in text, name
