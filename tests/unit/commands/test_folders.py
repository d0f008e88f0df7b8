"""`ls` and `diff` on run folders made by hand."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework import commands
from framework.commands import folders, ls

ROOT = Path(__file__).resolve().parents[3]
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(time, "time", lambda: NOW)


def line(step, split, **values):
  return json.dumps({"step": step, "split": split, "wall_time": 1.0, **values})


def make(path, *log, config="run.train_steps = 30\n", start=None, ago_s=0.0, checkpoints=()):
  folder = Path(path)
  (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
  (folder / "metrics.jsonl").write_text("".join(f"{each}\n" for each in log))
  (folder / "operative_config.gin").write_text(config)
  if start is not None:
    (folder / "history.jsonl").write_text(f"{json.dumps({'step': 0})}\n{json.dumps(start)}\n")
  for step in checkpoints:
    (folder / "checkpoints" / f"ckpt-{step}.index").touch()
  for each in [*folder.rglob("*"), folder]:
    os.utime(each, (NOW - ago_s, NOW - ago_s))
  return folder


def listed(capsys, *arguments):
  assert commands.main(["loopwright", "ls", *arguments]) == 0
  head, *rows = capsys.readouterr().out.splitlines()
  assert head.split() == ["name", "step", "status", "best", "age", "size"]
  return [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]


def test_ls_lists_runs_by_name_with_their_best(capsys):
  log = [line(10, "train", loss=2.0), line(10, "eval", loss=0.5, accuracy=0.25)]
  inside = make("runs/b/inside", *log, ago_s=7300)
  make("runs/b", *log, line(30, "eval", loss=0.4, accuracy=0.2), ago_s=7300, checkpoints=[20])
  make("runs/a/trial-1", *log[:1], line(12, "train", loss=1.0), ago_s=90)
  make("runs/a/.hidden/c", *log)
  Path("runs/link").symlink_to(inside.resolve())
  Path("runs/a/trial-1/link").symlink_to(ROOT / "LICENSE")
  config = len("run.train_steps = 30\n")
  third = len(line(30, "eval", loss=0.4, accuracy=0.2)) + 1
  size = 2 * (len(log[0]) + 1 + len(log[1]) + 1 + config) + third
  row = ["runs/b", "30/30", "done", "accuracy 0.25 @10", "2 h", f"{size} B"]
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
  def status(name, *log, owner_s=None, report=False, **options):
    folder = make(name, *log, **options)
    if report:
      (folder / "nonfinite").mkdir()
      (folder / "nonfinite" / "report.txt").touch()
    if owner_s is not None:
      (folder / "owner.json").touch()
      os.utime(folder / "owner.json", (NOW - owner_s, NOW - owner_s))
    return folders.Run(name).status()

  last = line(30, "train", loss=1)
  assert status("running", last, owner_s=6) == "running"
  assert status("killed", last, owner_s=25) == "failed"
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
    (("diff", "good", "damaged"), "'damaged/history.jsonl' is damaged; restore it, or move it"),
  ],
)
def test_a_mistake_is_one_line(capsys, given, text):
  make("good")
  make("damaged", start=[])
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


def test_a_damaged_run_is_a_line_among_the_others(capsys):
  folder = make("runs/r")
  (folder / "history.jsonl").write_text("{")
  pipe = make("runs/s")
  (pipe / "metrics.jsonl").unlink()
  os.mkfifo(pipe / "metrics.jsonl")
  make("runs/t\x1b[2J")
  rows = listed(capsys)
  assert rows[0][:3] == [
    *("runs/r", "damaged"),
    "'runs/r/history.jsonl' is damaged; restore it, or move it away.",
  ]
  assert rows[1][:2] == ["runs/s", "damaged"]
  assert "is a pipe, not a file" in rows[1][2]
  assert rows[2][0] == r"runs/t\x1b[2J"


def test_neither_imports_a_task_or_tensorflow():
  make("r", config="import evil\n\nrun.train_steps = 1\n")
  Path("evil.py").write_text("raise SystemExit('imported')\n")
  code = """if True:
    import sys
    from framework import commands
    assert commands.main(["loopwright", "ls", "r"]) == 0
    assert commands.main(["loopwright", "diff", "r", "r"]) == 0
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
