"""Sweeps, with a stub in place of training: what varies, what runs, what survives a kill."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
from scipy import stats

import loopwright
from loopwright import commands
from loopwright.errors import ConfigError, UsageError
from loopwright.run_folder import folders
from loopwright.tools.runs import repetitions
from loopwright.tools.sweep import runner, space

CHECKED, COMMAND = space.checked, runner.command
STUB = Path(__file__).resolve().parents[2] / "support" / "trial_stub.py"
CONFIG = """
import loopwright.tasks.image_classification
run.task = @ImageClassification()
ImageClassification.data = @digits()
ImageClassification.input_shape = (8, 8, 1)
run.train_steps = 10
run.global_batch_size = 8
"""
SWEEP = """if True:
  import os, signal, sys
  from loopwright import commands
  from loopwright.commands import process
  from loopwright.tools.sweep import runner, space
  sys.path.insert(0, {support!r})
  runner.POLL_S = 0.02
  runner.command = lambda files, params, values, model_dir: [
    sys.executable, {stub!r}, "train", "--gin_param=pace = 0.05",
    *(f"--gin_param={{each}}" for each in space.bindings(values)), f"--model_dir={{model_dir}}",
  ]
  space.checked = lambda *_: {{}}
  process.run(commands.main, ["loopwright", "sweep", *sys.argv[1:]])
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(runner, "POLL_S", 0.01)
  monkeypatch.setattr(space, "checked", lambda *_: {"x.y": "0"})
  Path("c.gin").write_text(CONFIG)

  def command(files, params, values, model_dir):
    params = [f"--gin_param={each}" for each in (*params, *space.bindings(values))]
    return [sys.executable, str(STUB), "train", *params, f"--model_dir={model_dir}"]

  monkeypatch.setattr(runner, "command", command)


def sweep(*given):
  return commands.main(["loopwright", "sweep", "c.gin", "--dir=s", *given])


def starts(number, folder="s"):
  lines = Path(folder, f"trial-{number:04d}", "starts").read_text().splitlines()
  return [json.loads(line) for line in lines]


def rows(out):
  """Returns the lines of the table: its cells."""
  lines = out.splitlines()
  first = next(i for i, line in enumerate(lines) if line.startswith("trial  "))
  last = next((i for i, line in enumerate(lines) if i > first and not line), len(lines))
  return [line.split(maxsplit=3) for line in lines[first:last]]


def read(*vary):
  return {each.name: each for each in space.read(vary)}


def test_what_varies_is_a_list_of_gin_values_or_a_range():
  found = read("a.b=[1, @keras.SGD,'x' , 1]", " c/d.e = log(1e-4, 1e-1)", "m = int(1, 3)")
  assert found["a.b"].values == ("1", "@keras.SGD", "'x'")
  assert found["c/d.e"][1:] == ((), 1e-4, 0.1, True)
  assert found["m"][1:] == ((), 1, 3, False)
  assert list(found) == ["c/d.e", "m", "a.b"]  # references last
  assert [str(each) for each in found.values()] == [
    "log(0.0001, 0.1)",
    "int(1, 3)",
    "[1, @keras.SGD, 'x']",
  ]


def test_several_vary_together():
  found = read("a.b ,c= [(1, @keras.SGD()), (2, (3, 'x'))]")
  assert found["a.b, c"].values == ("(1, @keras.SGD())", "(2, (3, 'x'))")
  bindings = [space.bindings({"d": "4", "a.b, c": value}) for value in found["a.b, c"].values]
  assert bindings == [
    ["d = 4", "a.b = 1", "c = @keras.SGD()"],
    ["d = 4", "a.b = 2", "c = (3, 'x')"],
  ]


@pytest.mark.parametrize(
  ("vary", "text"),
  [
    (["x"], "--vary 'x' is not NAME = ...; write a list such as [1, 2], or uniform(low"),
    (["x = 3"], "--vary 'x = 3': 3 is neither a list nor a range"),
    (["x = []"], "--vary 'x = []' has no values"),
    (["x = [1, two]"], "--vary 'x = [1, two]': 'two' is not a value. Quote a string ('two')"),
    (["x = log(0, 1)"], "log(low, high) needs two numbers, low < high, above 0."),
    (["x = int(3, 2)"], "int(low, high) needs two whole numbers, low < high."),
    (["x = int(1, 2.5)"], "int(low, high) needs two whole numbers, low < high."),
    (["x = uniform(0, inf)"], "uniform(low, high) needs two numbers, low < high."),
    (["x = uniform(0, 1, 2.5)"], "uniform(low, high) needs two numbers, low < high."),
    (["x = [1]", "y, x = [(2, 3)]"], "--vary has x twice; remove one."),
    (["x, y = [(1, 2), 3]"], "--vary 'x, y = [(1, 2), 3]': 3 must be 2 values: (1, 2)."),
    (["x, y = int(1, 2)"], "what varies together needs a list: [(1, 2), (3, 4)]."),
    ([], "nothing varies; add --vary='NAME = ...' with a list"),
  ],
)
def test_a_mistake_in_what_varies_is_one_line(vary, text):
  with pytest.raises(ConfigError) as raised:
    space.read(vary)
  assert text in str(raised.value)
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
  ("vary", "text"),
  [
    ("run.train_step = [1]", "--vary: run.train_step = 1: run has no parameter 'train_step'. Did"),
    ("run.seed = [1, 'a']", "--vary: run.seed = 'a': run.seed is 'a'; it must be int."),
    ("run.seed = int(-1, 5)", "--vary: run.seed = -1: run.seed is -1; it must be a whole number"),
    ("mirrored.cpu_replicas = [2]", "nothing uses mirrored.cpu_replicas. Add `run.strategy ="),
  ],
)
def test_each_value_gets_the_check_of_the_config(vary, text):
  with pytest.raises(ConfigError) as raised:
    CHECKED(["c.gin"], [], space.read([vary]))
  assert text in str(raised.value)


def test_what_is_bound_is_told_without_what_varies():
  both = "run.optimizer, run.global_batch_size = [(@keras.SGD, 8), (@keras.Adam, 16)]"
  found = CHECKED(["c.gin"], [], space.read([both]))
  assert found["run.train_steps"] == "10"
  assert not {"run.optimizer", "run.global_batch_size"} & {*found}


def test_trials_run_at_once_and_the_table_has_the_best_first(capsys):
  given = ["--vary=x = [1, 3, 2]", "--metric=score", "--maximize"]
  assert sweep(*given, "--jobs=2") == 0
  out = capsys.readouterr().out
  table = rows(out)
  assert table[0] == ["trial", "score", "x", "status"]
  assert [row[1:] for row in table[1:]] == [
    ["30", "3", "complete"],
    ["20", "2", "complete"],
    ["10", "1", "complete"],
  ]
  assert [row[0] for row in table[1:]] == ["1", "2", "0"]  # trial n is point n
  assert Path("s/best.gin").read_text().splitlines() == [
    "# Trial 1: score 30, with",
    "#   x = 3",
    "",
    "x = 3",
  ]
  assert sorted(each["values"]["x"] for n in range(3) for each in starts(n)) == ["1", "2", "3"]
  cores = sorted(os.sched_getaffinity(0))
  used = {tuple(starts(n)[0]["cores"]) for n in range(3)}
  assert used == {
    tuple(cores[: len(cores) // 2]),
    tuple(cores[len(cores) // 2 :][: len(cores) // 2]),
  }
  # The same command again trains nothing.
  assert sweep(*given) == 0
  assert rows(capsys.readouterr().out) == table
  assert [len(starts(n)) for n in range(3)] == [1, 1, 1]


def test_jobs_share_the_gpus(monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
  assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in runner.slots(2)] == ["4,5", "6,7"]
  with pytest.raises(UsageError, match="--jobs=6 is above the 5 GPUs here; give at most 5"):
    runner.slots(6)
  assert sweep("--vary=x = [1]") == 0
  assert starts(0)[0]["gpus"] == "4,5,6,7,8"
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
  assert runner.slots(1)[0].cores == os.sched_getaffinity(0)
  with pytest.raises(UsageError, match="cores here"):
    runner.slots(len(os.sched_getaffinity(0)) + 1)


def test_a_sweep_waits_for_the_processes_that_a_killed_one_left(capsys):
  with runner.alone("t") as lock:
    line = ["/bin/sh", "-c", "sleep 0.5; date +%s.%N > t/ended"]
    job = runner.Job(line, "t", runner.Slot(frozenset(), {}), lock)
    assert capsys.readouterr().out == ""
  with runner.alone("t"):
    assert float(Path("t/ended").read_text()) > 0
  assert capsys.readouterr().out == "waiting for the trials in t that another process runs\n"
  job.stop()
  while job.status() is None:
    pass
  assert job.status() == 0


def test_a_failed_trial_is_told_and_the_others_go_on(capsys):
  given = ["--vary=x = [1]", "--vary=fails = [0, 1]"]
  assert sweep(*given) == 0
  assert [row[3].split(maxsplit=1)[1] for row in rows(capsys.readouterr().out)[1:]] == [
    "complete",
    "failed: error: it fails",
  ]
  assert sweep("--vary=x = [1]", "--vary=at = ['nan']", "--dir=n",
               "--metric=score", "--maximize") == 1  # fmt: skip
  assert "failed: score is nan" in capsys.readouterr().out


@pytest.mark.whole
def test_trials_worse_than_the_median_are_pruned(capsys):
  # Of a seed's uniform x, those above the median of the first five end at their second evaluation.
  # A trial takes a second, so that it is not complete before the sweep has seen that.
  given = ["--vary=x = uniform(0, 1)", "--vary=pace = [0.1]", "--sampler=random", "--trials=9"]
  assert sweep(*given, "--prune") == 0
  xs = [float(starts(n)[0]["values"]["x"]) for n in range(9)]
  table = {int(row[0]): row for row in rows(capsys.readouterr().out)[1:]}
  median = sorted(xs[:5])[2]
  assert all(table[n][3].endswith("complete") for n in range(5))
  late = [n for n in range(5, 9) if xs[n] > sorted(xs)[6]]
  assert late
  for n in late:
    assert xs[n] > median
    assert "pruned at step" in " ".join(table[n])


def test_a_trial_of_a_seed_is_the_same_after_a_restart():
  given = ["--vary=x = log(0.1, 10)", "--sampler=tpe"]
  for trials in (1, 3):
    assert sweep(*given, f"--trials={trials}") == 0
  assert sweep(*given, "--dir=t", "--trials=3") == 0
  xs = [[starts(n, folder)[0]["values"]["x"] for n in range(3)] for folder in ("s", "t")]
  assert xs[0] == xs[1]
  assert len({*xs[0]}) == 3


@pytest.mark.parametrize(
  ("given", "text"),
  [
    (["--metric=scor", "--maximize"], "unknown metric 'scor'; it must be one of loss, score. Did"),
    (["--metric=score"], "--metric=score: is more better, or less? add --maximize or --minimize"),
    (["--maximize", "--minimize"], "received both --maximize and --minimize; remove one"),
    (["--storage=nosql://u:pw@h/d"], "the storage nosql://***@h/d cannot be opened"),
    (["--dir=c.gin"], "--dir='c.gin' cannot be made or read"),
    (["--jobs=999"], "--jobs=999 is above the"),
  ],
)
def test_a_mistake_is_one_line_and_the_sweep_can_begin_anew(given, text, capsys):
  assert sweep("--vary=x = [1]", *given) == 2
  error = capsys.readouterr().err
  assert text in error
  assert error.count("\n") == 1
  assert "pw" not in error
  assert sweep("--vary=x = [1]", "--metric=score", "--maximize") == 0


def test_a_sweep_never_changes_silently(capsys, monkeypatch):
  given = ["--trials=1"]
  assert sweep("--vary=x = [1, 2]", *given) == 0
  capsys.readouterr()
  assert sweep("--vary=x = [1, 3]", *given) == 2
  assert "the trials in 's' have x = [1, 2], now [1, 3]; give new" in capsys.readouterr().err
  assert sweep("--vary=x = [1, 2]", *given, "--maximize") == 2
  assert "the trials in 's' have --maximize = False, now True" in capsys.readouterr().err
  monkeypatch.setattr(space, "checked", lambda *_: {"x.y": "1"})
  assert sweep("--vary=x = [1, 2]", *given) == 2
  assert "have x.y = 0, now 1" in capsys.readouterr().err


def test_a_sweep_is_known_by_its_folder_not_by_its_name(capsys):
  given = ["--trials=1"]
  assert sweep("--vary=x = [1, 2]", *given) == 0
  Path("s").rename("other")
  capsys.readouterr()
  assert sweep("--vary=x = [1, 3]", *given, "--dir=other") == 2
  assert "the trials in 'other' have x = [1, 2], now [1, 3]" in capsys.readouterr().err
  assert sweep("--vary=x = [1, 2]", "--dir=other") == 0
  assert [row[3] for row in rows(capsys.readouterr().out)[1:]] == ["complete"] * 2
  Path("other/sweep.db").unlink()
  assert sweep("--vary=x = [1, 2]", *given, "--dir=other") == 2
  assert "'other' has trials that 'sweep.db' does not know" in capsys.readouterr().err


def test_a_sweep_of_an_earlier_version_goes_on(capsys):
  Path("s").mkdir()
  study = optuna.create_study(storage="sqlite:///s/sweep.db", study_name="s")
  of = {"--vary": {"x": "[1, 2]"}, "goal": {"--metric": "loss"}, "config": {"x.y": "0"}}
  for part, values in of.items():
    study.set_user_attr(part, json.dumps(values))
  assert sweep("--vary=x = [1, 3]") == 2
  assert "the trials in 's' have x = [1, 2], now [1, 3]" in capsys.readouterr().err
  assert sweep("--vary=x = [1, 2]") == 0
  assert [starts(n)[0]["values"]["x"] for n in range(2)] == ["1", "2"]


def test_machines_share_a_sweep_by_its_storage(capsys, tmp_path):
  given = ["--vary=x = [1, 2, 3]", f"--storage=sqlite:///{tmp_path}/all.db"]
  assert sweep(*given, "--dir=one/s", "--trials=1") == 0
  left = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/all.db").ask()
  left.set_user_attr("folder", Path("one/s/sweep.id").read_text())  # as a kill leaves it
  assert [row[3] for row in rows(capsys.readouterr().out)[1:]] == ["complete"]
  assert sweep(*given, "--dir=two/s") == 0
  assert [row[3] for row in rows(capsys.readouterr().out)[1:]] == ["complete"] * 2 + ["running"]
  assert [path.name for path in Path("two/s").glob("trial-*")] == ["trial-0002"]
  assert sweep(*given, "--dir=one/s") == 0
  assert [row[3] for row in rows(capsys.readouterr().out)[1:]] == ["complete"] * 3
  assert len(starts(1, "one/s")) == 1


def started(*given):
  code = SWEEP.format(support=str(STUB.parent), stub=str(STUB))
  environment = {**os.environ, "PYTHONPATH": str(Path(loopwright.__file__).parents[1])}
  return subprocess.Popen(
    [sys.executable, "-c", code, "c.gin", "--dir=s", *given],
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
  )  # fmt: skip


@pytest.mark.whole
def test_a_trial_is_an_ordinary_run(capsys, monkeypatch):
  monkeypatch.setattr(runner, "command", COMMAND)
  given = ["--vary=run.global_batch_size = [16]", "--vary=auto.cpu_replicas = [2]"]
  more = ["run.train_steps=4", "run.steps_per_loop=2"]
  assert sweep(*given, *more, "--metric=accuracy") == 0
  log = [json.loads(line) for line in Path("s/trial-0000/metrics.jsonl").read_text().splitlines()]
  assert f"{log[-1]['accuracy']:.5g}" in capsys.readouterr().out
  bindings = CHECKED(["s/best.gin"], [], [])
  assert (bindings["run.global_batch_size"], bindings["auto.cpu_replicas"]) == ("16", "2")


@pytest.mark.whole
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75)])
def test_a_killed_sweep_goes_on_with_the_same_command(number, status):
  given = ["--vary=x = uniform(0, 1)", "--sampler=random", "--trials=6", "--jobs=2"]
  first = started(*given)
  said = []
  for line in first.stdout:
    said.append(line)
    if sum("complete" in each for each in said) == 2 and "begins" in line:
      break
  first.send_signal(number)
  said += first.stdout.readlines()
  assert first.wait(timeout=30) == status, "".join(said)
  begun = {int(line.split()[1]) for line in said if "begins" in line}
  complete = {int(line.split()[1]) for line in said if "complete" in line}
  assert begun - complete
  second = started(*given)
  out, _ = second.communicate(timeout=60)
  assert second.returncode == 0, out
  assert "TensorFlow" not in out
  table = rows(out)
  assert sorted(int(row[0]) for row in table[1:]) == [0, 1, 2, 3, 4, 5]
  assert all(row[3].endswith("complete") for row in table[1:])
  for trial in range(6):
    log = Path("s", f"trial-{trial:04d}", "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [*range(1, 11)]
    assert len({each["values"]["x"] for each in starts(trial)}) == 1
    assert len(starts(trial)) <= (1 if trial in complete or trial not in begun else 2)


def repeat(*given):
  return commands.main(["loopwright", "repeat", "c.gin", "--dir=s", *given])


def test_repetitions_tell_mean_deviation_and_interval_and_rank_nothing(capsys):
  assert repeat("--seeds=2") == 0
  capsys.readouterr()
  assert repeat("--seeds=4") == 0  # two more
  assert [starts(n)[0]["values"]["run.seed"] for n in range(4)] == ["0", "1", "2", "3"]
  assert [len(starts(n)) for n in range(4)] == [1] * 4
  out = capsys.readouterr().out
  table = [re.split("  +", line) for line in out.splitlines() if line.startswith(("sc", "lo"))]
  scores = np.arange(4) * 10.0
  for name, values in {"score": scores, "loss": scores / 100}.items():
    mean, deviation = values.mean(), values.std(ddof=1)
    low, high = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values))
    assert [name, f"{mean:.5g}", f"{deviation:.2g}", f"{low:.5g} to {high:.5g}", "4"] in table
  assert "best" not in out


def test_repetitions_need_no_optuna_and_a_sweep_names_the_extra():
  program = (
    "import sys\n"
    "sys.modules['optuna'] = None\n"
    "from loopwright import commands\n"
    "from loopwright.tools.sweep import runner, space\n"
    "runner.command = lambda *_: ['/bin/true']\n"
    "space.checked = lambda *_: {}\n"
    "print(commands.main(['loopwright', 'repeat', 'c.gin', '--seeds=2']))\n"
    "print(commands.main(['loopwright', 'sweep', 'c.gin', '--vary=x = [1]']))\n"
  )
  for number in range(2):
    folder = Path(f"runs/c-repeat/trial-000{number}")
    folder.mkdir(parents=True)
    record = {"step": 1, "split": "eval", "loss": number}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(record)}\n")
  environment = {**os.environ, "PYTHONPATH": str(Path(loopwright.__file__).parents[1])}
  done = subprocess.run(
    [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
  )
  assert "loss    0.5" in done.stdout
  assert done.stdout.split()[-1] == "2"
  assert "\n0\n" in done.stdout
  assert "install the extra: `pip install 'loopwright[sweep]'`" in done.stderr


def test_repetitions_go_on_after_a_failure_and_never_change_silently(capsys, monkeypatch):
  assert repeat("--seeds=3", "fails=1") == 1
  assert "trial 1 failed: error: it fails" in capsys.readouterr().out
  assert repeat("--seeds=3") == 0
  assert [len(starts(n)) for n in range(3)] == [2] * 3
  monkeypatch.setattr(space, "checked", lambda *_: {"x.y": "1"})
  assert repeat("--seeds=4") == 2
  assert "the trials in 's' have x.y = 0, now 1; give new ones" in capsys.readouterr().err


def test_a_sweep_over_seeds_trains_each_once(capsys):
  assert sweep("--vary=run.seed=[3, 1, 2]") == 0
  assert [starts(n)[0]["values"]["run.seed"] for n in range(3)] == ["3", "1", "2"]
  assert not Path("s/trial-0003").exists()


def test_one_complete_repetition_has_no_spread(capsys):
  assert repeat("--seeds=2", "fails=1") == 1
  assert "fewer than two are complete; each has its output in s/trial-*/output.txt" in (
    capsys.readouterr().out
  )


def test_runs_that_differ_in_the_seed_alone_are_found():
  def run(name, config, step=10):
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / "operative_config.gin").write_text(f"run.train_steps = 10\n{config}")
    record = {"step": step, "split": "eval", "loss": 1.0, "odd": "NaN"}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(record)}\n")
    return folders.Run(str(folder))

  found = [
    run("a", "run.seed = 1\nx.y = 2\n"), run("b", "run.seed = 2\nx.y = 3\n"),
    run("c", "run.seed = 3\nx.y = 2\n"), run("d", "x.y = 2\n"),
    run("e", "run.seed = 3\nx.y = 3\n"),
  ]  # fmt: skip
  groups = repetitions.alike(found)
  assert [[each.path for each in group] for group in groups] == [
    ["runs/a", "runs/c"],
    ["runs/b", "runs/e"],
  ]
  assert [*repetitions.rows(groups[0])] == [("loss", "1", "0", "1 to 1", "2")]
