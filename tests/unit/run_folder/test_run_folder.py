"""A run writes only to its own folder: not to one that came in its place, nor through a link."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf
from runs import records
from test_history import Slope, go

from loopwright import Action
from loopwright.actions.best import BestCheckpoint
from loopwright.errors import ConfigError
from loopwright.run_folder import history, layout, ownership
from loopwright.runs.loop import Loop
from loopwright.tools.exports.action import Export

REPOSITORY = Path(__file__).parents[3]
REMOVED = r"the run folder '.*/run' was removed or moved while the run used it, so the run has e"
EMPTIED = (
  r"what was in the run folder '.*/run', at least owner\.json, was removed or replaced while"
)


class At(Action):
  """Does something after the loop or the evaluation of a step."""

  def __init__(self, step, do, on="train"):
    self.on, self._step, self._do = on, step, do

  def __call__(self, output):
    if self.run.step == self._step:
      self._do()


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "run"


def train(folder, *actions, steps=8, **options):
  return go(folder, steps, actions=actions, steps_per_loop=2, eval_every_steps=4, **options)


def steps_of(folder):
  return [record["step"] for record in records(folder, "train")]


# ---- Removed, moved, emptied, replaced in the middle ----


def test_a_folder_that_is_removed_ends_the_run_and_stays_away(folder):
  with pytest.raises(ConfigError, match=REMOVED):
    train(folder, At(6, lambda: shutil.rmtree(folder)))
  assert not folder.exists()


def test_a_folder_that_is_moved_ends_the_run_and_goes_on_there(folder):
  there = folder.with_name("there")
  with pytest.raises(ConfigError, match=REMOVED):
    train(folder, At(6, lambda: folder.rename(there)), checkpoint_every_steps=4)
  assert not folder.exists()
  assert steps_of(there) == [2, 4]
  train(there)
  assert steps_of(there) == [2, 4, 6, 8]


@pytest.mark.whole
def test_a_folder_that_is_emptied_ends_the_run(folder):
  def empty():
    for path in folder.iterdir():
      shutil.rmtree(path) if path.is_dir() else path.unlink()

  with pytest.raises(ConfigError, match=EMPTIED):
    train(folder, At(6, empty))


@pytest.mark.whole
def test_a_copy_in_its_place_ends_the_run(folder):

  def replace():
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)

  with pytest.raises(ConfigError, match=EMPTIED):
    train(folder, At(6, replace))
  assert steps_of(folder) == [2, 4]


@pytest.mark.parametrize("lives", [True, False])
def test_another_run_in_its_place_is_left_alone(folder, lives):
  other = ownership.Owner(str(folder))

  def replace():
    shutil.rmtree(folder)
    folder.mkdir()
    other.claim()
    (folder / "metrics.jsonl").write_text("its own\n")
    if not lives:
      other.release()

  line = rf"run' is in use by process {os.getpid()} on" if lives else EMPTIED
  with pytest.raises(ConfigError, match=line):
    train(folder, At(6, replace))
  assert (folder / "metrics.jsonl").read_text() == "its own\n"
  assert sorted(os.listdir(folder)) == [
    "metrics.jsonl", *(["owner.json"] if lives else []), "owner.lock",
  ]  # fmt: skip
  if lives:
    other.release()


@pytest.mark.parametrize("what", ["checkpoint", pytest.param("export", marks=pytest.mark.whole)])
def test_what_is_removed_while_it_is_saved_does_not_come_again(folder, what, monkeypatch):
  """TensorFlow makes all folders above what it writes."""
  owner, name = (tf.train.Checkpoint, "write") if what == "checkpoint" else (tf.saved_model, "save")
  original = getattr(owner, name)

  def write(*args, **options):
    shutil.rmtree(folder)
    return original(*args, **options)

  monkeypatch.setattr(owner, name, write)
  action = Export(metric="loss", mode="min") if what == "export" else At(0, lambda: None)
  with pytest.raises(ConfigError, match=rf"{REMOVED}|{EMPTIED}"):
    train(folder, action)
  left = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
  assert left == []


def test_a_signal_does_not_save_into_a_folder_that_was_removed(folder):
  def end():
    os.kill(os.getpid(), signal.SIGTERM)
    shutil.rmtree(folder)

  with pytest.raises(ConfigError, match=REMOVED):
    train(folder, At(6, end))
  assert not folder.exists()


@pytest.mark.whole
def test_an_evaluation_does_not_make_a_folder_again(folder, monkeypatch):
  train(folder)
  forward = Slope.forward

  def removing(self, batch, training):
    shutil.rmtree(folder, ignore_errors=True)
    return forward(self, batch, training)

  monkeypatch.setattr(Slope, "forward", removing)
  with pytest.raises(ConfigError, match=REMOVED):
    train(folder, mode="evaluate", eager=True)
  assert not folder.exists()


SLOW = """
import sys, time
sys.path += ["tests/unit/run_folder", "tests/support"]
from test_run_folder import At, Path, train
from loopwright.errors import ConfigError
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
slow = [At(step, lambda: time.sleep(0.1)) for step in range(2, 400, 2)]
try:
  train(folder, *slow, steps=int(sys.argv[3]), seed=seed, checkpoint_every_steps=4)
except ConfigError as error:
  sys.exit(str(error))
"""


@pytest.mark.whole
def test_two_processes_one_after_the_folder_of_the_other_was_removed(folder):
  """The second has its own log and its own weights, as alone; killed and started again, too."""

  def start(*arguments):
    command = [sys.executable, "-c", SLOW, *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)

  def wait(step):
    while not (folder / "metrics.jsonl").exists() or max(steps_of(folder), default=0) < step:
      time.sleep(0.05)

  first = start(folder, 0, 400)
  wait(8)
  while folder.exists():
    shutil.rmtree(folder, ignore_errors=True)
  second = start(folder, 1, 40)
  assert re.search(f"{REMOVED}|{EMPTIED}", first.communicate(timeout=120)[1])
  wait(20)
  second.kill()
  second.communicate()
  again = start(folder, 1, 40)
  assert again.communicate(timeout=120) is not None
  alone = folder.with_name("alone")
  train(alone, steps=40, seed=1)
  assert steps_of(folder) == steps_of(alone) == list(range(2, 41, 2))
  assert [r["config"]["seed"] for r in history.records(str(folder))] == ["1", "1"]
  one, other = ([(r["step"], r["loss"]) for r in records(path)] for path in (folder, alone))
  assert one == other


# ---- A checkpoint without its history ----


UNKNOWN = r"ckpt-4 was written by a start that history\.jsonl does not have: the file was removed, "


def lose(folder):
  (folder / "history.jsonl").unlink()


def empty(folder):
  (folder / "history.jsonl").write_text("")


def take_another(folder):
  go(folder.with_name("other"), 2, seed=7)
  shutil.copy(folder.with_name("other") / "history.jsonl", folder / "history.jsonl")


def shorten(folder):
  lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
  (folder / "history.jsonl").write_text(lines[0])


def leave_only_the_checkpoints(folder):
  for path in folder.iterdir():
    if path.name != "checkpoints":
      shutil.rmtree(path) if path.is_dir() else path.unlink()


REST = pytest.mark.whole


@pytest.mark.parametrize(
  ("damage", "seed"),
  [
    (lose, 7), (empty, 0), pytest.param(take_another, 7, marks=REST), (shorten, 0),
    pytest.param(leave_only_the_checkpoints, 7, marks=REST),
  ],
)  # fmt: skip
def test_a_checkpoint_without_its_history_is_refused(folder, damage, seed):
  go(folder, 2)
  go(folder, 4)
  damage(folder)
  (folder / "owner.lock").touch()
  before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
  with pytest.raises(ConfigError, match=UNKNOWN):
    go(folder, 6, seed=seed)
  assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
  with pytest.raises(ConfigError, match=f"{UNKNOWN}.*, to evaluate or export it all the same"):
    go(folder, 4, mode="evaluate")
  named = str(folder / "checkpoints" / "ckpt-4")
  assert go(folder, 4, mode="evaluate", checkpoint=named)["loss"] >= 0  # only reads
  go(folder, 6, seed=seed, accept_changes=True)
  go(folder, 8, seed=seed)
  assert [record["step"] for record in history.records(str(folder))][-2:] == [4, 6]


def test_evaluations_beside_a_run_that_is_started_again_know_its_checkpoints(folder, monkeypatch):
  evaluate, seen = Loop.evaluate, []

  def then_go_on(loop):
    evaluate(loop)
    seen.append(loop.step)
    if len(seen) == 1:
      go(folder, 4, mode="train")

  go(folder, 2, mode="train")
  monkeypatch.setattr(Loop, "evaluate", then_go_on)
  go(folder, 4, mode="evaluate_continuously", eval_timeout_s=5)
  assert seen == [2, 4]


def test_each_checkpoint_names_the_start_that_wrote_it(folder):
  go(folder, 2)
  go(folder, 4, actions=[BestCheckpoint(metric="loss", mode="min")])
  starts = [record["start"] for record in history.records(str(folder))]
  paths = ["checkpoints/ckpt-2", "checkpoints/ckpt-4", "best/ckpt-4"]
  readers = [tf.train.load_checkpoint(str(folder / path)) for path in paths]
  found = [reader.get_tensor("start/.ATTRIBUTES/py_state").decode() for reader in readers]
  assert found == [starts[0], starts[1], starts[1]]
  assert len(set(starts)) == 2


def test_checkpoints_of_a_version_that_named_none_go_on(folder, monkeypatch):
  with monkeypatch.context() as patched:
    patched.setattr(
      "loopwright.runs.start_record.uuid.uuid4", lambda: type("None", (), {"hex": ""})
    )
    go(folder, 2)
  lose(folder)
  go(folder, 4)
  assert len(history.records(str(folder))) == 1


def test_a_run_without_its_checkpoints_says_that_it_begins_again(folder, capsys):
  go(folder, 2)
  count = len((folder / "metrics.jsonl").read_text().splitlines())
  shutil.rmtree(folder / "checkpoints")
  go(folder, 2)
  assert f"begins again; metrics.jsonl.undone has the {count} lines" in capsys.readouterr().err


# ---- Links ----


@pytest.mark.parametrize(
  "name", [*layout.FILES, *layout.FOLDERS, layout.BEST, layout.ledger(0), layout.ledger(12)]
)
def test_no_name_that_a_run_writes_to_may_be_a_link(folder, tmp_path, name):
  folder.mkdir()
  (folder / name).symlink_to(tmp_path / "elsewhere")
  with pytest.raises(ConfigError, match=rf"run/{re.escape(name)}' is a link to '.*/elsewhere', wh"):
    go(folder, 2)
  assert os.listdir(folder) == [name]
  assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", [*layout.FILES, *layout.ALWAYS, layout.ledger(0)])
def test_a_file_in_place_of_a_folder_is_told_before_training(folder, name):
  (folder / name).mkdir(parents=True)
  if name in layout.ALWAYS:
    (folder / name).rmdir()
    (folder / name).touch()
  with pytest.raises(ConfigError, match=rf"{re.escape(name)}' is a f.*, where the run has a f"):
    go(folder, 2)
  assert os.listdir(folder) == [name]


def test_a_folder_of_an_option_may_not_be_a_link_and_the_run_folder_may(folder, tmp_path):
  folder.mkdir()
  (tmp_path / "to").symlink_to(folder)
  (folder / "best_loss").symlink_to(tmp_path)
  (folder / "notes").symlink_to(tmp_path)
  action = BestCheckpoint(metric="loss", mode="min", directory="best_loss")
  with pytest.raises(ConfigError, match="best_loss' is a link to "):
    go(tmp_path / "to", 2, actions=[action])
  (folder / "best_loss").unlink()
  go(tmp_path / "to", 2, actions=[action])
  assert (folder / "best_loss" / "best.json").exists()


def test_all_that_a_run_writes_has_a_name_that_layout_knows(folder):
  actions = [BestCheckpoint(metric="loss", mode="min"), Export(metric="loss", mode="min")]
  train(folder, *actions, ledger=True)
  assert [name for name in os.listdir(folder) if not layout.is_ours(name)] == []


# ---- Versions ----


def test_other_versions_are_told_in_a_line_recorded_and_shown_by_diff(
  folder, monkeypatch, caplog, capsys
):
  from loopwright import commands

  go(folder, 2)
  assert "other versions" not in caplog.text
  now = history.versions()
  monkeypatch.setattr(history, "versions", lambda: {**now, "keras": "9.9", "numpy": "0.1"})
  go(folder, 4)
  line = f"made with other versions: keras {now['keras']}, now 9.9, numpy {now['numpy']}, now 0.1"
  assert caplog.text.count(line) == 1
  assert [r["versions"]["keras"] for r in history.records(str(folder))] == [now["keras"], "9.9"]
  caplog.clear()
  go(folder, 6)
  assert "other versions" not in caplog.text

  go(folder.with_name("new"), 6)  # all of it with the new ones
  capsys.readouterr()
  assert commands.main(["loopwright", "diff", str(folder), str(folder.with_name("new"))]) == 0
  out = capsys.readouterr().out
  assert re.search(rf"  keras +{re.escape(now['keras'])}; from step 2: 9\.9 +9\.9\n", out)


def test_the_framework_itself_is_one_of_the_versions(tmp_path):
  (tmp_path / "a.py").write_text("x = 1")
  before = history._digest(tmp_path)
  (tmp_path / "a.py").write_text("x = 2")
  history._digest.cache_clear()
  assert history._digest(tmp_path) != before
  assert {
    "python",
    "loopwright",
    "tensorflow",
    "keras",
    "tf_keras",
    "numpy",
    "framework's files",
  } == (history.versions().keys())
