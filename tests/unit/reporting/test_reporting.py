import io
import json
import math
import os
import re
import sys
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loopwright.errors import ConfigError
from loopwright.host import files
from loopwright.reporting import live, reports
from loopwright.reporting.progress import Choice, Progress, format_number
from loopwright.reporting.reports import Reporter, Reports
from loopwright.reporting.summary import (
  ParameterCount,
  count_parameters,
  describe,
  result_line,
)
from loopwright.run_folder.metrics_log import MetricsLog, flatten
from loopwright.task import Task
from loopwright.trainer import Trainer


class Clock:
  def __init__(self, now=0.0):
    self.now = now

  def __call__(self):
    return self.now


@pytest.fixture
def path(tmp_path):
  (tmp_path / "run").mkdir()
  return str(tmp_path / "run" / "metrics.jsonl")


@pytest.fixture
def log(path):
  return MetricsLog(path, clock=Clock(1234.5))


def read(path):
  with open(path, "rb") as file:
    return file.read()


def write(path, content):
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, "wb") as file:
    file.write(content)


# -- flatten


def test_flatten_gives_python_numbers_under_joined_names():
  flat = flatten(
    {
      "loss": tf.constant(0.5),
      "count": np.int64(7),
      "flag": np.bool_(True),
      "half": tf.constant(1.5, tf.bfloat16),
      "variable": tf.Variable(2, dtype=tf.int64),
      "a": {"b": {"c": np.float32(0.25)}, "d": 3},
    }
  )
  assert flat == {
    "loss": 0.5, "count": 7, "flag": 1, "half": 1.5, "variable": 2, "a/b/c": 0.25, "a/d": 3,
  }  # fmt: skip
  assert [type(value) for value in flat.values()] == [float, int, int, float, int, float, int]


@pytest.mark.parametrize(
  ("value", "text"),
  [
    ("high", "metric 'a/b' is of type <U4 and shape (); it must be a number, or an array"),
    (None, "metric 'a/b' is of type object and shape (); it must be a number, or an array"),
    (["a"], "metric 'a/b' is of type <U1 and shape (1,); it must be a number, or an array"),
  ],
)
def test_flatten_names_what_is_not_a_number(value, text):
  with pytest.raises(ConfigError, match=re.escape(text)):
    flatten({"a": {"b": value}})


# -- MetricsLog


def test_append_writes_one_object_a_line(log, path):
  log.append(100, "train", {"loss": np.float32(0.25), "steps_per_second": 12.5})
  log.append(np.int64(100), "eval", {"accuracy": 0.5})
  assert read(path).decode() == (
    '{"step": 100, "split": "train", "wall_time": 1234.5, "loss": 0.25, "steps_per_second": 12.5}\n'
    '{"step": 100, "split": "eval", "wall_time": 1234.5, "accuracy": 0.5}\n'
  )


def test_records_reads_back_by_split(log):
  assert log.records() == []
  log.append(1, "train", {"loss": 0.1})
  log.append(1, "eval", {"loss": 0.2})
  log.append(2, "train", {"loss": 0.3})
  assert [(r["step"], r["loss"]) for r in log.records("train")] == [(1, 0.1), (2, 0.3)]
  assert [(r["step"], r["loss"]) for r in log.records("eval")] == [(1, 0.2)]
  assert len(log.records()) == 3


def test_not_finite_values_are_json_and_come_back_as_floats(log, path):
  log.append(1, "train", {"a": math.nan, "b": math.inf, "c": np.float32(-np.inf)})

  def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")

  written = json.loads(read(path), parse_constant=refuse)
  assert (written["a"], written["b"], written["c"]) == ("NaN", "Infinity", "-Infinity")
  record = log.records()[0]
  assert math.isnan(record["a"])
  assert (record["b"], record["c"]) == (math.inf, -math.inf)
  assert record["split"] == "train"


def test_floats_come_back_to_the_bit(log):
  values = np.random.default_rng(0).standard_normal(50).astype(np.float32)
  for step, value in enumerate(values):
    log.append(step, "train", {"x": value})
  np.testing.assert_array_equal([np.float32(r["x"]) for r in log.records()], values)


@pytest.mark.parametrize("name", ["step", "split", "wall_time"])
def test_a_reserved_name_is_refused(log, path, name):
  with pytest.raises(ConfigError, match=f"a metric is named '{name}'"):
    log.append(1, "train", {name: 1.0})
  assert not os.path.exists(path)


def test_trim_drops_what_comes_after_the_step(log):
  for step in (100, 200, 300):
    log.append(step, "train", {"loss": step})
    log.append(step, "eval", {"loss": step})
  assert log.trim(200) == 2
  assert [(r["step"], r["split"]) for r in log.records()] == [
    (100, "train"), (100, "eval"), (200, "train"), (200, "eval"),
  ]  # fmt: skip
  log.append(300, "train", {"loss": 1})
  assert [r["step"] for r in log.records("train")] == [100, 200, 300]


def test_trim_of_a_missing_file_makes_none(log, path):
  assert log.trim(0) == 0
  assert not os.path.exists(path)


WHOLE = b'{"step": 1, "split": "train", "wall_time": 0.5, "loss": 2.0}'
TORN = [b'{"step": 2, "split": "tr', b"{", b'{"step": 2, "x": 1e', b"\x00\x00\x00", b"\xff\xc3"]


@pytest.mark.parametrize("torn", TORN)
def test_trim_mends_a_torn_last_line(log, path, torn):
  write(path, WHOLE + b"\n" + torn)
  assert [r["loss"] for r in log.records()] == [2.0]
  log.trim(10)
  assert read(path) == WHOLE + b"\n"


@pytest.mark.parametrize("torn", TORN)
def test_append_does_not_write_behind_a_torn_line(log, path, torn):
  write(path, WHOLE + b"\n" + torn)
  log.append(3, "train", {"loss": 1.0})
  assert [(r["step"], r["loss"]) for r in log.records()] == [(1, 2.0), (3, 1.0)]
  assert read(path).startswith(WHOLE + b'\n{"step": 3')


def test_a_last_line_that_lacks_only_its_newline_is_kept(log, path):
  write(path, WHOLE + b"\n" + WHOLE)
  assert len(log.records()) == 2
  log.trim(10)
  assert read(path) == (WHOLE + b"\n") * 2


def test_trim_keeps_everything_else_to_the_byte(log, path):
  odd = b'# a note\n{ "split":"eval",  "step":2 , "loss":1e-1}\n\xff\xfe?\n\n'
  late = b'{"step": 9, "split": "eval"}\n'
  write(path, odd + late + odd)
  log.trim(5)
  assert read(path) == odd + odd


def test_trim_is_atomic(log, path, monkeypatch):
  log.append(1, "train", {"loss": 1.0})
  log.append(2, "train", {"loss": 1.0})
  before = read(path)

  def killed(*_, **__):
    raise KeyboardInterrupt

  monkeypatch.setattr(tf.io.gfile, "rename", killed)
  with pytest.raises(KeyboardInterrupt):
    log.trim(1)
  assert read(path) == before


def test_trim_leaves_a_file_alone_that_needs_nothing(log, path, monkeypatch):
  log.append(1, "train", {"loss": 1.0})
  monkeypatch.setattr(files, "atomic_write", lambda *_: pytest.fail("rewritten"))
  assert log.trim(1) == 0


def test_appends_beside_a_restarting_run_lose_no_line(path):
  """Three guests append while the owner removes its own later records again and again."""
  count = 200

  def evaluate(guest):
    log = MetricsLog(path)
    for number in range(count):
      log.append(0, "eval", {"guest": guest, "number": number})

  guests = [threading.Thread(target=evaluate, args=(guest,)) for guest in range(3)]
  for guest in guests:
    guest.start()
  owner, undone, alive = MetricsLog(path), 0, True
  while alive:
    alive = any(guest.is_alive() for guest in guests)
    owner.append(5, "train", {"loss": 1.0})
    undone += owner.trim(0)
  found = sorted((record["guest"], record["number"]) for record in owner.records("eval"))
  assert found == [(guest, number) for guest in range(3) for number in range(count)]
  assert undone > 0
  assert len(read(f"{path}.undone").splitlines()) == undone


@pytest.mark.parametrize("value", [1, 2.5, np.float32(1), tf.constant(3)])
def test_no_python_number_becomes_a_tensor(tmp_path, monkeypatch, value):
  """TensorFlow keeps a copy of each, 0.5 kB, as long as the process lives."""
  given = []
  monkeypatch.setattr(tf.summary, "scalar", lambda name, data, step: given.append((name, data)))
  reporter = Reporter(split="train", global_step=tf.Variable(1), model_dir=str(tmp_path))
  reporter.report({"x": value, "nested": {"y": value}})
  assert [(name, float(data), type(data)) for name, data in given] == [
    ("x", float(value), np.ndarray), ("nested/y", float(value), np.ndarray),
  ]  # fmt: skip


def test_arrays_are_nested_lists_with_their_infinities(tmp_path):
  log = MetricsLog(str(tmp_path / "metrics.jsonl"))
  confusion = np.array([[3, 1], [0, 2**40]])
  log.append(4, "eval", {"confusion": confusion, "bins": [0.5, math.nan, -math.inf], "loss": 1.0})
  [record] = log.records("eval")
  assert record["confusion"] == [[3, 1], [0, 2**40]]
  assert record["bins"][0] == 0.5
  assert math.isnan(record["bins"][1])
  assert record["bins"][2] == -math.inf
  assert '"bins": [0.5, "NaN", "-Infinity"]' in (tmp_path / "metrics.jsonl").read_text()


# -- Progress


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_loop_on_cpus_has_the_share_of_the_cores_that_it_used(tmp_path, monkeypatch, on_gpus):
  clocks = {"process_time": 1.0, "monotonic": 10.0}
  read = {name: lambda name=name: clocks[name] for name in clocks}
  monkeypatch.setattr(reports, "time", types.SimpleNamespace(**read))
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
  trainer = types.SimpleNamespace(
    task=Task(), cluster=types.SimpleNamespace(is_chief=True), global_batch_size=4,
    global_step=tf.Variable(5, dtype=tf.int64), placement=types.SimpleNamespace(on_gpus=on_gpus),
  )  # fmt: skip
  folder = types.SimpleNamespace(
    path=str(tmp_path), file=lambda name: str(tmp_path / name), require=lambda: None
  )
  made = Reports(trainer, folder=folder, train_steps=10, evaluates=True)
  made.loop_begins(0)
  clocks |= {"process_time": 7.0, "monotonic": 12.0}
  made.loop_ends(5, {"loss": 1.0}, 1)
  clocks |= {"process_time": 99.0, "monotonic": 100.0}
  made.after("train", {"loss": 1.0})
  made.after("eval", {"loss": 2.0})
  train, evaluation = made.log.records()
  assert train.get("cpu_utilization") == (None if on_gpus else 6 / 2 / 4)
  assert "cpu_utilization" not in evaluation


class Terminal(io.StringIO):
  encoding = "utf-8"

  def isatty(self):
    return True


VALUES = {
  "accuracy": 0.9312, "loss": 0.2134, "steps_per_second": 12.7, "examples_per_second": 812.4,
  "nonfinite_step": -1,
}  # fmt: skip


def test_a_plain_line_is_readable():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(total_steps=1000, stream=stream, clock=clock)
  progress.update(300, VALUES)
  assert stream.getvalue() == (
    "step 300/1000  loss 0.2134  accuracy 0.9312  12.7 steps/s  812 examples/s  eta 0:00:55\n"
  )


def test_eta_is_the_pace_since_the_first_loop():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(total_steps=1000, stream=stream, clock=clock, every_secs=0)
  progress.update(100, {"steps_per_second": 0.5})  # traced: slow
  clock.now = 50.0
  progress.update(200, {"steps_per_second": 7.0})
  clock.now = 400.0
  progress.update(1000, {"steps_per_second": 7.0})
  etas = re.findall(r"eta (\S+)", stream.getvalue())
  assert etas == ["0:30:00", "0:06:40", "0:00:00"]  # 900 / 0.5; 800 * 50 / 100


def test_without_a_rate_there_is_no_eta_at_first():
  stream = io.StringIO()
  Progress(total_steps=10, stream=stream, clock=Clock()).update(5, {"loss": 1.0})
  assert stream.getvalue() == "step 5/10  loss 1.0000\n"


def test_plain_lines_are_rate_limited_but_for_the_first_and_the_last():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(total_steps=100, stream=stream, clock=clock, every_secs=10)
  for step in range(1, 101):
    clock.now = float(step)
    progress.update(step, {})
  assert re.findall(r"step (\d+)/", stream.getvalue()) == [
    "1", "11", "21", "31", "41", "51", "61", "71", "81", "91", "100",
  ]  # fmt: skip


def test_close_prints_the_line_that_was_held_back_once():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(total_steps=100, stream=stream, clock=clock)
  progress.update(1, {})
  progress.update(2, {})
  progress.update(3, {})
  progress.close()
  progress.close()
  assert re.findall(r"step (\d+)/", stream.getvalue()) == ["1", "3"]


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_an_evaluation_has_a_line_of_its_own(stream_type):
  stream = stream_type()
  with Progress(total_steps=10, stream=stream, clock=Clock()) as progress:
    progress.update(5, {"loss": 1.0})
    progress.evaluation(5, {"accuracy": 0.5, "loss": 0.25})
  assert "eval at step 5  loss 0.2500  accuracy 0.5000" in screen(stream)


def test_a_name_sends_no_command_to_a_terminal():
  stream = io.StringIO()
  with Progress(total_steps=2, stream=stream) as progress:
    progress.update(2, {"\x1b]0;owned\x07": 1.0})
    progress.evaluation(2, {"\x1b[31m": 1.0})
  assert r"step 2/2  \x1b]0;owned\x07 1.0000" in stream.getvalue()
  assert r"eval at step 2  \x1b[31m 1.0000" in stream.getvalue()


def test_a_long_evaluation_shows_how_far_it_is():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(total_steps=20, stream=stream, clock=clock, every_secs=10)
  for evaluation, seconds in enumerate((9, 21)):
    for batch in range(1, seconds + 1):
      clock.now += 1.0
      progress.evaluating(10, "test" if evaluation else "", batch, 50 if batch > 15 else None)
    progress.evaluation(10, {"loss": 1.0})
  assert stream.getvalue().splitlines() == [
    "eval at step 10  loss 1.0000",
    "step 10/20  evaluating test  batch 11  0:00:10",
    "step 10/20  evaluating test  batch 21/50  0:00:20",
    "eval at step 10  loss 1.0000",
  ]


def screen(stream):
  """Returns the lines that a terminal shows in the end."""
  lines, row = [""], 0
  for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", stream.getvalue()):
    if part == "\n":
      row += 1
      lines += [""] * (row == len(lines))
    elif part == "\x1b[1A":
      row -= 1
    elif part == "\x1b[2K":
      lines[row] = ""
    elif not part.startswith(("\x1b", "\r")):
      lines[row] += part
  return [line.rstrip() for line in lines]


@pytest.fixture
def no_colors(monkeypatch):
  monkeypatch.setenv("NO_COLOR", "1")
  monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("no_colors")
def test_a_long_evaluation_has_a_live_line_below_that_of_training():
  stream, clock = Terminal(), Clock()
  with Progress(total_steps=20, stream=stream, clock=clock) as progress:
    progress.update(10, {"loss": 3.0})
    progress.evaluating(10, "", 1, 8)
    clock.now = 1.0
    progress.evaluating(10, "", 4, 8)
    assert screen(stream) == [
      "━━━━━───── step 10/20  loss 3.0000", "━━━━━───── evaluating  batch 4/8  0:00:01"
    ]  # fmt: skip
    progress.evaluation(10, {"loss": 1.0})
  assert screen(stream) == [
    "eval at step 10  loss 1.0000", "━━━━━───── step 10/20  loss 3.0000", ""
  ]  # fmt: skip


@pytest.mark.usefixtures("no_colors")
def test_a_terminal_shows_one_live_line():
  stream, clock, threads = Terminal(), Clock(), threading.active_count()
  with Progress(total_steps=1000, stream=stream, clock=clock) as progress:
    for step in (100, 200, 300):
      clock.now += 1.0
      progress.update(step, VALUES | {"long": 123})
    assert threading.active_count() == threads
    assert screen(stream) == [
      "━━━─────── step 300/1000  loss 0.2134  12.7 steps/s  812 examples/s  eta 0:00:07  accuracy "
      "0.9312"  # and no "long 123", which has no place
    ]
    progress.update(400, VALUES)  # in the same moment: drawn by what comes next
    progress.evaluation(400, {"loss": 0.5})
    assert screen(stream)[1].startswith("━━━━────── step 400/1000")
    progress.update(1000, VALUES)
  first, second, end = screen(stream)
  assert (first, end) == ("eval at step 400  loss 0.5000", "")
  assert second.startswith("━━━━━━━━━━ step 1000/1000  loss 0.2134")
  assert "\x1b[?25l" not in stream.getvalue()  # the cursor stays, as a kill would not bring it back


@pytest.mark.usefixtures("no_colors")
def test_short_loops_are_drawn_ten_times_a_second():
  stream, clock = Terminal(), Clock()
  with Progress(total_steps=1000, stream=stream, clock=clock) as progress:
    for step in range(1, 1001):
      clock.now += 0.001
      progress.update(step, {"loss": 1.0})
  assert stream.getvalue().count("step ") == pytest.approx(11, abs=1)  # 1 s, and the end


@pytest.mark.usefixtures("no_colors")
def test_text_with_brackets_is_written_as_it_is():
  stream = Terminal()
  with Progress(total_steps=10, stream=stream, clock=Clock()) as progress:
    progress.update(5, {"[bold]": 1.0})
    progress.message("warning: [red]x[/] :smile: " + "long " * 40)
  first, second, _ = screen(stream)
  assert first == "warning: [red]x[/] :smile: " + ("long " * 40).rstrip()
  assert "[bold] 1.0000" in second


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_draw_again_gets_plain_lines(term, monkeypatch):
  monkeypatch.setenv("TERM", term)
  stream = Terminal()
  with Progress(total_steps=10, stream=stream, clock=Clock()) as progress:
    progress.update(5, {"loss": 1.0})
  assert stream.getvalue() == "step 5/10  loss 1.0000\n"


@pytest.mark.usefixtures("no_colors")
def test_a_narrow_terminal_drops_whole_fields_and_keeps_the_eta():
  line = "step 300/1000  loss 0.2134  12.7 steps/s  812 examples/s  eta 0:00:55  accuracy 0.93"
  assert live.fitted(line, 100) == line
  assert live.fitted(line, 70) == line.replace("  accuracy 0.93", "")
  for columns in (49, 10):  # 60 columns with the bar
    assert live.fitted(line, columns) == "step 300/1000  loss 0.2134  eta 0:00:55"


def test_a_terminal_that_is_gone_does_not_end_a_run():
  class Gone(Terminal):
    def write(self, text):
      raise BrokenPipeError

  with Progress(total_steps=10, stream=Gone(), clock=Clock()) as progress:
    progress.update(5, {"loss": 1.0})
    progress.message("text")


def test_a_notebook_has_the_lines_in_its_cell(monkeypatch, capsys):
  shown = []

  class Handle:
    def update(self, data, raw):
      shown.append(data)

  def display(data, *, raw, display_id):
    shown.append(data)
    return Handle()

  python = types.ModuleType("IPython")
  python.get_ipython = lambda: types.SimpleNamespace(kernel=object())
  python.display = types.ModuleType("IPython.display")
  python.display.display = display
  monkeypatch.setitem(sys.modules, "IPython", python)
  monkeypatch.setitem(sys.modules, "IPython.display", python.display)
  with Progress(total_steps=10, clock=Clock()) as progress:
    progress.update(5, {"a<b": 1.0})
    progress.evaluation(5, {"loss": 0.5})
    progress.update(10, {"loss": 0.25})
  assert shown[0] == {
    "text/plain": "step 5/10  a<b 1.0000",
    "text/html": '<div><progress value="0.5000"></progress> '
    "<code>step 5/10  a&lt;b 1.0000</code></div>",
  }
  assert shown[-1]["text/plain"] == "step 10/10  loss 0.2500"
  assert "svg" not in shown[-1]["text/html"]  # no curve has two points yet
  assert capsys.readouterr().err == "eval at step 5  loss 0.5000\n"


def test_hidden_values_are_left_out():
  stream = io.StringIO()
  progress = Progress(total_steps=10, stream=stream, clock=Clock(), choice=Choice(hidden={"b"}))
  progress.update(5, {"a": 1, "b": 2, "loss": math.nan})
  assert stream.getvalue() == "step 5/10  loss nan  a 1\n"


LOGGED = {"loss": 1.0, "a/accuracy": 0.5, "learning_rate": 0.1, "accuracy": 0.25, "b": 2}


@pytest.mark.parametrize(
  ("shown", "line"),
  [
    (None, "loss 1.0000 a/accuracy 0.5000 accuracy 0.2500 b 2"),
    (["b", "*accuracy", "a/*"], "b 2 a/accuracy 0.5000 accuracy 0.2500"),
    (["learning_rate", "b"], "learning_rate 0.1000 b 2"),
    (["accuracy"], "a/accuracy 0.5000 accuracy 0.2500"),  # that of the set "a" too
    (["a/accuracy", "loss"], "a/accuracy 0.5000 loss 1.0000"),
  ],
)
def test_a_task_chooses_what_the_lines_show(shown, line):
  stream, choice = io.StringIO(), Choice(shown, hidden=["learning_rate"])
  progress = Progress(total_steps=10, stream=stream, clock=Clock(), choice=choice)
  progress.update(5, {**LOGGED, "steps_per_second": 2.0})
  progress.evaluation(5, LOGGED)
  first, second = stream.getvalue().replace("  ", " ").splitlines()
  assert first == f"step 5/10 {line} 2 steps/s eta 0:00:02"
  assert second == f"eval at step 5 {line}"
  results = result_line(step=5, seconds=1.0, evaluation=LOGGED, choice=choice)
  assert results == f"done: step 5 | eval {line} | 1.0 s"


def test_a_name_to_show_that_no_split_has_gets_one_line():
  stream = io.StringIO()
  choice = Choice(["loss", "acuracy", "*_recall"], who="Digits.shown")
  progress = Progress(
    total_steps=10, stream=stream, clock=Clock(), choice=choice, splits=("train", "eval"),
  )  # fmt: skip
  progress.update(10, {"loss": 1.0})
  assert "warning" not in stream.getvalue()
  for _ in range(2):
    progress.evaluation(10, {"loss": 1.0, "accuracy": 0.5})
  warnings = [line for line in stream.getvalue().splitlines() if "warning" in line]
  assert warnings == [
    "warning: Digits.shown has 'acuracy', but no metric has this name. Did you mean 'accuracy'?"
  ]


@pytest.mark.parametrize("shown", ["loss", [1]])
def test_what_to_show_is_a_list_of_names(shown):
  with pytest.raises(ConfigError, match=r"^Task\.shown is .*; it must be a list of names"):
    Choice(shown)


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (0.0, "0.0000"), (0.93124, "0.9312"), (-2.5, "-2.5000"), (1e-3, "0.0010"), (1.5e-5, "1.5e-05"),
    (12345.6, "1.23e+04"), (9999.0, "9999.0000"), (37, "37"), (math.nan, "nan"), (math.inf, "inf"),
  ],
)  # fmt: skip
def test_format_number(value, text):
  assert format_number(value) == text


# -- Reporter


def scalars(directory):
  found = []
  for name in sorted(os.listdir(directory)):
    for event in tf.compat.v1.train.summary_iterator(os.path.join(directory, name)):
      for value in event.summary.value:
        found.append((event.step, value.tag, float(tf.make_ndarray(value.tensor))))
  return found


def test_each_reporter_writes_its_split_to_all_places(tmp_path, capsys):
  stream, step = io.StringIO(), tf.Variable(0, dtype=tf.int64)
  log = MetricsLog(str(tmp_path / "metrics.jsonl"))
  common = {
    "global_step": step, "model_dir": str(tmp_path), "metrics_log": log,
    "progress": Progress(total_steps=4, stream=stream, clock=Clock()),
  }  # fmt: skip
  train, evaluation = (Reporter(split=split, **common) for split in ("train", "eval"))
  for now in (2, 4):
    step.assign(now)
    train.report({"loss": tf.constant(1.0) / now, "a": {"b": 2}})
  evaluation.report({"accuracy": tf.constant(0.75), "table": np.eye(2)})
  assert [(r["step"], r["loss"], r["a/b"]) for r in log.records("train")] == [
    (2, 0.5, 2), (4, 0.25, 2),
  ]  # fmt: skip
  assert [(r["step"], r["accuracy"], r["table"]) for r in log.records("eval")] == [
    (4, 0.75, [[1.0, 0.0], [0.0, 1.0]])
  ]
  assert "eval at step 4  accuracy 0.7500\n" in stream.getvalue()
  assert stream.getvalue().startswith("step 2/4  loss 0.5000  a/b 2")
  assert capsys.readouterr().out == ""
  assert scalars(tmp_path / "train") == [
    (2, "loss", 0.5), (2, "a/b", 2.0), (4, "loss", 0.25), (4, "a/b", 2.0),
  ]  # fmt: skip
  assert scalars(tmp_path / "eval") == [(4, "accuracy", 0.75)]


def test_both_rates_are_the_loops(tmp_path):
  log = MetricsLog(str(tmp_path / "metrics.jsonl"))
  step = tf.Variable(1, dtype=tf.int64)
  reporter = Reporter(split="train", global_step=step, metrics_log=log, global_batch_size=32)
  reporter.report({"examples_per_second": 80.0})
  [record] = log.records("train")
  assert (record["examples_per_second"], record["steps_per_second"]) == (80.0, 2.5)


def test_a_reporter_without_places_writes_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  reporter = Reporter(split="train", global_step=tf.Variable(1, dtype=tf.int64))
  reporter.report({"loss": 1.0})
  assert os.listdir(tmp_path) == []


# -- parameters and the texts


def network(library):
  layers = library.layers
  batch_norm = layers.BatchNormalization()  # 8 and 8 more that no gradient moves
  dropout = layers.Dropout(0.5)  # in Keras 3 with a seed, no weight
  return library.Sequential([layers.Input([3]), layers.Dense(4), dropout, batch_norm], name="three")


def module():
  made = tf.Module(name="mod")
  made.weight = tf.Variable(tf.zeros([5, 2]))
  made.frozen = tf.Variable(1.0, trainable=False)
  return made


@pytest.mark.parametrize(
  ("make", "expected"),
  [
    (lambda: network(keras), (24, 32)),
    (lambda: network(tf_keras), (24, 32)),
    (module, (10, 11)),
    (lambda: {"a": network(keras), "b": [module(), network(tf_keras)]}, (58, 75)),
  ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_count_parameters(make, expected, replicas, mirrored):
  with mirrored(replicas).scope():
    model = make()
  assert count_parameters(model) == ParameterCount(*expected)


def test_a_shared_model_counts_once():
  shared = module()
  assert count_parameters([shared, {"again": shared}]) == ParameterCount(10, 11)


@pytest.mark.parametrize("generation", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_model_that_is_not_built_has_no_count(generation):
  assert count_parameters([generation.Sequential([generation.layers.Dense(3)])]) is None


class Digits(Task):
  def __init__(self, make=lambda: network(keras)):
    self.build_model = make


def described(strategy, task, *, start_step=0, **options):
  trainer = Trainer(
    task=task, strategy=strategy, dataset_fn=None, global_batch_size=128,
    optimizer=keras.optimizers.Adam, **options,
  )  # fmt: skip
  return describe(
    trainer, precision="float32", start_step=start_step, train_steps=1000, model_dir="runs/digits"
  )


def test_describe_aligns_what_there_is(mirrored):
  text = described(mirrored(2), Digits(), accumulation_steps=4, start_step=500)
  lines = text.splitlines()
  assert lines.pop(6).startswith("batch norm  batch_normalization")
  assert lines == [
    "task        Digits",
    "model       three, 32 parameters, 24 trainable",
    "strategy    MirroredStrategy, 2 replicas on CPU:0, CPU:1",
    "batch       128 examples a step, 64 a replica, in 4 micro-batches",
    "reduction   flat, own dtype",
    "precision   float32",
    "loss scale  none",
    "optimizer   default: Adam",
    "steps       1000, continuing from 500",
    "model_dir   runs/digits",
  ]


def test_describe_names_each_of_several_models():
  make = lambda: {"g": module(), "d": keras.Sequential()}  # noqa: E731
  text = described(tf.distribute.get_strategy(), Digits(make))
  assert "model g     mod, 11 parameters, 10 trainable" in text
  assert "model d     sequential" in text
  assert "not built yet" in text
  assert "batch       128 examples a step, 128 a replica\n" in text
  assert "steps       1000\n" in text


EVALUATED = {"accuracy": 0.98333, "loss": tf.constant(0.0571), "steps_per_second": 3.0}
RESULTS = [
  (
    {"step": 1000, "seconds": 23.41, "model_dir": "runs/digits_cnn", "evaluation": EVALUATED},
    "done: step 1000 | eval loss 0.0571 accuracy 0.9833 | 23.4 s | runs/digits_cnn",
  ),
  (
    {"step": 7, "seconds": 0.1, "evaluation": {"loss": 0.5}, "of_step": 4, "status": "stopped"},
    "stopped: step 7 | eval at step 4 loss 0.5000 | 0.1 s",
  ),
  ({"step": 7, "seconds": 0.06, "status": "stopped"}, "stopped: step 7 | 0.1 s"),
  (
    {"step": 7, "seconds": 0.1, "evaluation": {"red\x1b[31m\n": 0.5}},
    r"done: step 7 | eval red\x1b[31m\n 0.5000 | 0.1 s",
  ),
]


@pytest.mark.parametrize(("given", "line"), RESULTS)
def test_result_line(given, line):
  assert result_line(**given) == line


def test_result_line_tells_many_skipped_steps():
  line = result_line(step=200, seconds=0.1, evaluation={"loss": 0.5}, skipped=3, more=["best"])
  expected = "done: step 200 | eval loss 0.5000 | skipped 3 of 200 steps, not finite | best | 0.1 s"
  assert line == expected
  assert "skipped" not in result_line(step=200, seconds=0.1, skipped=2)  # as a loss scale does
