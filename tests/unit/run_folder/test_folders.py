"""`ls` and `diff` on run folders made by hand."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import filelock
import pytest

from loopwright import commands
from loopwright.run_folder import folders
from loopwright.tools.runs import ls

ROOT = Path(__file__).resolve().parents[3]
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(time, "time", lambda: NOW)


def line(step, split, **values):
  return json.dumps({"step": step, "split": split, "wall_time": 1.0, **values})


@functools.cache
def checkpoint():
  """Returns the files of a real checkpoint of 1,000 variables: ending -> content."""
  import tensorflow as tf

  with tempfile.TemporaryDirectory() as folder:
    names, values = [f"v{n:04d}" for n in range(1000)], [tf.fill([n % 7], 1.0) for n in range(1000)]
    tf.raw_ops.SaveV2(
      prefix=f"{folder}/x", tensor_names=names, shape_and_slices=[""] * 1000, tensors=values
    )
    return {path.name[1:]: path.read_bytes() for path in Path(folder).iterdir()}


def make(path, *log, config="run.train_steps = 30\n", start=None, ago_s=0.0, checkpoints=()):
  folder = Path(path)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "metrics.jsonl").write_text("".join(f"{each}\n" for each in log))
  (folder / "operative_config.gin").write_text(config)
  if start is not None:
    (folder / "history.jsonl").write_text(f"{json.dumps({'step': 0})}\n{json.dumps(start)}\n")
  for step in checkpoints:
    (folder / "checkpoints").mkdir(exist_ok=True)
    for end, content in checkpoint().items():
      (folder / "checkpoints" / f"ckpt-{step}{end}").write_bytes(content)
  for each in [*folder.rglob("*"), folder]:
    os.utime(each, (NOW - ago_s, NOW - ago_s))
  return folder


def listed(capsys, *arguments):
  assert commands.main(["loopwright", "ls", *arguments]) == 0
  head, *rows = capsys.readouterr().out.splitlines()
  assert head.split() == ["name", "step", "status", "best", "age", "size"]
  rows = [row for row in rows if not row.startswith("damaged: ")]
  return [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]


def test_ls_lists_runs_by_name_with_their_best(capsys):
  log = [line(10, "train", loss=2.0), line(10, "eval", loss=0.5, accuracy=0.25)]
  inside = make("runs/b/inside", *log, ago_s=7300)
  make("runs/b", *log, line(30, "eval", loss=0.4, accuracy=0.2), ago_s=7300, checkpoints=[30])
  make("runs/a/trial-1", *log[:1], line(12, "train", loss=1.0), ago_s=90)
  make("runs/a/.hidden/c", *log)
  Path("runs/link").symlink_to(inside.resolve())
  Path("runs/a/trial-1/link").symlink_to(ROOT / "LICENSE")
  config = len("run.train_steps = 30\n")
  checkpointed = sum(map(len, checkpoint().values()))
  third = len(line(30, "eval", loss=0.4, accuracy=0.2)) + 1
  size = 2 * (len(log[0]) + 1 + len(log[1]) + 1 + config) + third
  row = [
    "runs/b",
    "30/30",
    "done",
    "accuracy 0.25 @10",
    "2 h",
    f"{round((size + checkpointed) / 1000)} kB",
  ]
  small = len(log[0]) + 1 + len(line(12, "train", loss=1.0)) + 1 + config
  small += len(str(ROOT / "LICENSE"))  # the link alone
  assert listed(capsys) == [
    ["runs/a/trial-1", "12/30", "stopped", "2 min", f"{small} B"],
    row,
  ]
  assert listed(capsys, "runs/b") == [row]


@pytest.mark.parametrize(
  ("config", "best"),
  [
    ("", "accuracy 0.9 @1"),
    ("EarlyStopping.metric = 'f1'\nEarlyStopping.mode = 'max'\n", "f1 3 @2"),
    ("BestCheckpoint.metric = \"loss\"\nBestCheckpoint.mode = 'min'\n", "loss 0.25 @2"),
    ("BestCheckpoint.metric = 'nothing'\n", "None"),
    ("Export.metric = 'loss'\nExport.mode = None\n", "loss 0.25 @2"),
  ],
)
def test_the_best_evaluation_is_the_one_that_the_config_asks_for(config, best):
  log = [
    line(1, "eval", loss=0.125, accuracy=0.5, f1=2),
    line(1, "eval", loss=0.5, accuracy=0.9, f1=1),  # again, after a restart
    line(2, "eval", loss=0.25, accuracy=0.8, f1=3),
    line(3, "eval", loss="NaN", accuracy="NaN", f1="-Infinity"),
  ]
  make("r", *log, config=config)
  assert str(folders.Run("r").best()) == best


def test_without_accuracy_the_best_is_the_least_loss():
  make("r", line(1, "eval", loss=2.0), line(2, "eval", loss=1.5), line(3, "eval", loss=1.75))
  assert str(folders.Run("r").best()) == "loss 1.5 @2"


def test_the_status_is_what_the_folder_tells():
  def status(name, *log, owner=False, report=False, **options):
    folder = make(name, *log, **options)
    if report:
      (folder / "nonfinite").mkdir()
      (folder / "nonfinite" / "report.txt").touch()
    if owner:
      (folder / "owner.json").touch()
    return folders.Run(name).status()

  last = line(30, "train", loss=1)
  with filelock.FileLock(make("running", last) / "owner.lock"):
    assert folders.Run("running").status() == "running"
  assert status("killed", last, owner=True) == "failed"
  assert status("done", last) == "done"
  assert status("only its checkpoint", checkpoints=[7, 30]) == "done"
  assert status("stopped", line(29, "train", loss=1)) == "stopped"
  assert status("at a NaN", line(29, "train", loss=1), report=True) == "failed"
  assert status("no steps known", last, config="") == "stopped"


def test_the_steps_come_from_the_history_if_there_is_no_config():
  folder = make("r", start={"config": {"run.train_steps": "40"}, "versions": {}})
  (folder / "operative_config.gin").unlink()
  assert folders.Run("r").train_steps == 40


def test_diff_shows_what_differs_and_only_that(capsys):
  start = {"config": {}, "data": {"rows": "10"}, "versions": {"keras": "3.1", "numpy": "2.0"}}
  make("a", line(1, "eval", loss=0.5), config="x.y = 1\nx.z = 'same'\nx.only = 2\n", start=start)
  other = {**start, "versions": {"keras": "3.2", "numpy": "2.0"}, "commit": "12ab"}
  make("b", line(2, "eval", loss=0.5), config=f"x.y = {'7' * 90}\nx.z = 'same'\n", start=other)
  assert commands.main(["loopwright", "diff", "a", "b"]) == 0
  rows = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert rows == [
    ["a", "b"],
    ["bindings"],
    ["x.only", "2", "-"],
    ["x.y", "1", "7" * 30 + "..." + "7" * 30],
    ["data:", "no", "difference"],
    ["versions"],
    ["commit", "of", "the", "task", "-", "12ab"],
    ["keras", "3.1", "3.2"],
    ["results"],
    ["best", "loss", "0.5", "@1", "loss", "0.5", "@2"],
    ["step", "1", "2"],
  ]


@pytest.mark.parametrize(
  ("given", "text"),
  [
    (("diff", "good"), "`loopwright diff` takes two run folders"),
    (("diff", "good", "goods"), "'goods' is no run folder. Did you mean 'good'?"),
    (("diff", "good", "nowhere/x"), "'nowhere/x' is no run folder. It must have metrics.jsonl or"),
    (("ls", "nowhere"), "'nowhere' cannot be read (No such file or directory); give a folder of"),
    (("ls", "a\0b"), "cannot be read (embedded null byte)"),
    (("ls", "good", "--status=dead"), "--status=dead: it must be one or more of running, done"),
  ],
)
def test_a_mistake_is_one_line(capsys, given, text):
  make("good")
  assert commands.main(["loopwright", *given]) == 2
  out, err = capsys.readouterr()
  assert (out, err.count("\n")) == ("", 1)
  assert text in err


HOSTILE = {
  "nested": b'{"step": 1, "split": "eval", "loss": ' + b"[" * 100_000 + b"\n",
  "long number": b'{"step": 1, "split": "eval", "loss": ' + b"9" * 5000 + b"}\n",
  "large number": b'{"step": 1, "split": "eval", "loss": ' + b"9" * 400 + b"}\n",
  "no line end": b'"eval"' + b"x" * 3_000_000,
  "other types": b'{"step": "eval"}\n{"step": true, "split": "eval"}\n["eval"]\n7\n',
  "not text": bytes(range(256)) * 50,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("file", ["metrics.jsonl", "operative_config.gin", "owner.json"])
def test_a_damaged_file_ends_nothing(capsys, name, file):
  folder = make("runs/r", line(5, "eval", loss=1.0))
  (folder / file).write_bytes(HOSTILE[name])
  make("runs/s", line(5, "eval", loss=1.0))
  assert [row[0] for row in listed(capsys)] == ["runs/r", "runs/s"]
  assert commands.main(["loopwright", "diff", "runs/r", "runs/s"]) == 0


def faults(name, capsys, *, status="stopped"):
  """Returns what `ls`, and `diff`, say is damaged in a run."""
  capsys.readouterr()
  [row] = listed(capsys, name)
  assert commands.main(["loopwright", "ls", name]) == 0
  told = [each for each in capsys.readouterr().out.splitlines() if each.startswith("damaged: ")]
  assert row[2] == (f"{status}, damaged" if told else status)
  make("sound", line(5, "eval", loss=1.0))
  assert commands.main(["loopwright", "diff", "sound", name]) == 0
  assert [each for each in capsys.readouterr().out.splitlines() if "damaged: " in each] == told
  return [each.removeprefix(f"damaged: '{name}/").removeprefix("damaged: ") for each in told]


def test_damaged_lines_are_left_out(capsys):
  good = [line(step, "eval", loss=float(step)) for step in (3, 2, 4)]
  folder = make("r", *good, start={"step": 0})
  (folder / "metrics.jsonl").write_text(f'{good[0]}\n{{"step": 7, "lo\n{good[1]}\n{{"step": 8, "sp')
  assert faults("r", capsys) == []
  assert (folders.Run("r").step, str(folders.Run("r").best())) == (2, "loss 2 @2")
  (folder / "history.jsonl").write_text('{"step": 0, "config": {"run.train_steps": "9"}}\n{')
  (folder / "operative_config.gin").unlink()
  assert folders.Run("r").train_steps == 9


def test_a_pipe_in_place_of_a_file_is_told(capsys):
  folder = make("r", line(5, "eval", loss=1.0), start={})
  (folder / "history.jsonl").unlink()
  os.mkfifo(folder / "history.jsonl")
  told = "history.jsonl' is a pipe, not a file; give the path of a file."
  assert faults("r", capsys) == [told]


def test_runs_are_in_the_order_of_their_numbers_and_can_be_chosen(capsys):
  for number, (step, loss) in {1: (5, 0.5), 2: (30, 0.25), 10: (7, 0.75), 100: (6, 0.125)}.items():
    made = make(f"runs/r{number}", line(step, "eval", loss=loss), ago_s=number * 10)
  (made / "history.jsonl").mkdir()

  def names(*given):
    return [row[0].removeprefix("runs/r") for row in listed(capsys, *given)]

  assert names() == ["1", "2", "10", "100"]
  assert names("--sort=best") == ["100", "2", "1", "10"]
  assert names("--sort=step") == ["2", "10", "100", "1"]
  assert names("--sort=age", "runs/r10", "runs/r2") == ["2", "10"]
  assert names("--status=done,damaged") == ["2", "100"]
  assert names("--name=*r1*", "--status=stopped") == ["1", "10", "100"]
  capsys.readouterr()
  assert commands.main(["loopwright", "ls", "--json", "--name=*r2"]) == 0
  [found] = json.loads(capsys.readouterr().out)
  found.pop("bytes")
  assert found == {
    "name": "runs/r2", "step": 30, "train_steps": 30, "status": "done",
    "best": {"metric": "loss", "value": 0.25, "step": 30, "mode": "min"},
    "evaluation": {"loss": 0.25}, "age_s": 20.0,
    "faults": [],
  }  # fmt: skip


def test_none_imports_a_task_or_tensorflow():
  make("r", line(1, "eval", loss=1.0), config="import evil\n\nrun.train_steps = 1\n")
  Path("evil.py").write_text("raise SystemExit('imported')\n")
  code = """if True:
    import sys
    from loopwright import commands
    assert commands.main(["loopwright", "ls", "r"]) == 0
    assert commands.main(["loopwright", "diff", "r", "r"]) == 0
    assert commands.main(["loopwright", "report", "r"]) == 0
    heavy = {"tensorflow", "numpy", "keras", "evil"} & set(sys.modules)
    assert not heavy, heavy
  """
  environment = {**os.environ, "PYTHONPATH": f"{ROOT}:."}
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, env=environment
  )
  assert done.returncode == 0, done.stderr
  assert "r " in done.stdout


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_an_age_is_in_its_largest_unit(seconds, text):
  assert ls.rounded(seconds, ls._TIMES) == text
