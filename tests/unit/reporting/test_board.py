"""Board and Show: pictures, histograms and texts, as files and in TensorBoard."""

import contextlib
import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

from loopwright import Action, Board, ConfigError, Show, Sum, Task
from loopwright.runs.runner import run
from loopwright.strategies import factories


def made(tmp_path, step=3):
  lines = []
  writer = tf.summary.create_file_writer(str(tmp_path / "train"))
  board = Board(str(tmp_path), step=lambda: step, writer=lambda: writer, message=lines.append)
  return board, writer, lines


def picture(path, scale=128):
  """The pixels, each drawn as a square."""
  drawn = tf.io.decode_png(path.read_bytes()).numpy()
  pixels = drawn[::scale, ::scale]
  np.testing.assert_array_equal(drawn, pixels.repeat(scale, axis=0).repeat(scale, axis=1))
  return pixels


def events(folder):
  """(step, tag, plugin, value) of each value that TensorBoard reads."""
  found = []
  for name in sorted(os.listdir(folder)):
    for event in tf.compat.v1.train.summary_iterator(os.path.join(folder, name)):
      for value in event.summary.value:
        plugin = value.metadata.plugin_data.plugin_name
        found.append((event.step, value.tag, plugin, tf.make_ndarray(value.tensor)))
  return found


def test_images_are_a_grid_in_row_order(tmp_path):
  board, writer, _ = made(tmp_path)
  images = np.arange(5, dtype=np.float32)[:, None, None, None] / 5 * np.ones([5, 2, 4, 1])
  board.image("samples/first", images)
  grid = picture(tmp_path / "media" / "samples" / "first-3.png", scale=32)  # 4 pixels to 128
  assert grid.shape == (4, 12, 1)  # two rows of three
  expected = [[0, 51, 102], [153, 204, 0]]  # 255 i / 5; the last place is empty
  np.testing.assert_array_equal(grid[::2, ::4, 0], expected)
  np.testing.assert_array_equal(grid[1::2, 3::4, 0], expected)
  writer.flush()
  [(step, tag, plugin, value)] = events(tmp_path / "train")
  assert (step, tag, plugin) == (3, "samples/first", "images")
  np.testing.assert_array_equal(tf.io.decode_png(value[2])[::32, ::32], grid)


@pytest.mark.parametrize(
  ("shape", "drawn"),
  [([8, 8, 1], 128), ([64, 8, 8, 1], 1024), ([64, 28, 28, 1], 896), ([2, 9, 65, 3], 130)],
)
def test_small_pictures_are_enlarged_by_whole_factors(shape, drawn, tmp_path):
  made(tmp_path)[0].image("x", np.zeros(shape))
  assert tf.io.decode_png((tmp_path / "media" / "x-3.png").read_bytes()).shape[1] == drawn


@pytest.mark.parametrize(
  ("image", "pixels"),
  [
    (np.full([2, 3, 3], 0.5), 128),
    (np.full([2, 3, 4], 7, np.uint8), 7),
    (np.full([2, 3, 1], 200, np.int64), 200),
    (np.full([2, 3, 1], True), 255),
    (tf.fill([2, 3, 3], tf.constant(0.25, tf.bfloat16)), 64),
    (np.full([2, 3, 3], 1.0005), 255),
  ],
  ids=["float", "uint8", "int64", "bool", "bfloat16", "rounding"],
)
def test_every_dtype_has_its_range(image, pixels, tmp_path):
  board, _, lines = made(tmp_path)
  board.image("x", image)
  np.testing.assert_array_equal(
    picture(tmp_path / "media" / "x-3.png", scale=128 // image.shape[1]),
    np.full(image.shape, pixels),
  )
  assert lines == []


@pytest.mark.parametrize(
  ("image", "line", "pixels"),
  [
    ([0.5, np.nan, np.inf], "has 2 of 3 values that are not finite; drawn as 0", [128, 0, 0]),
    ([-1.0, 0.0, 3.0], "has values from -1 to 3; clipped to 0 to 1", [0, 0, 255]),
    ([0, 256, -1], "has values from -1 to 256; clipped to 0 to 255", [0, 255, 0]),
  ],
)
def test_values_out_of_range_get_one_line_and_do_not_end_a_run(image, line, pixels, tmp_path):
  board, _, lines = made(tmp_path)
  for _ in range(2):
    board.image("x", np.reshape(image, [1, 3, 1]))
  assert lines == [f"warning: 'x' at step 3 {line}"]
  assert picture(tmp_path / "media" / "x-3.png", scale=42).ravel().tolist() == pixels


@pytest.mark.parametrize(
  ("show", "line"),
  [
    (lambda b: b.image("x", np.zeros([4, 4])), r"'x' has shape \(4, 4\); it must be \[h, w, c\]"),
    (lambda b: b.image("x", np.zeros([2, 4, 5])), r"has shape \(2, 4, 5\); .* c = 1, 3 or 4"),
    (lambda b: b.image("x", np.zeros([0, 4, 4, 1])), r"'x' is of type float64 and shape \(0, 4"),
    (lambda b: b.image("x", np.zeros([4, 4, 1], complex)), "image 'x' is of type complex128"),
    (lambda b: b.image("x", np.zeros([2, 8192, 8192, 1], bool)), "more than 67,108,864 pixels"),
    (lambda b: b.histogram("x", []), r"histogram 'x' is of type float64 and shape \(0,\)"),
    (lambda b: b.histogram("x", ["a"]), "histogram 'x' is of type <U1"),
    (lambda b: b.text("x", 3), "text 'x' is a int; it must be a str"),
    (lambda b: b.text("../x", ""), r"'../x' is not a name for the board; use letters"),
    (lambda b: b.text("/etc/x", ""), "'/etc/x' is not a name"),
    (lambda b: b.image("a b", np.zeros([4, 4, 1])), "'a b' is not a name"),
    (lambda b: b.histogram(3, [1.0]), "3 is not a name"),
  ],
)
def test_what_cannot_be_shown_is_refused_everywhere(show, line, tmp_path):
  for board in (made(tmp_path)[0], Board()):
    with pytest.raises(ConfigError, match=line):
      show(board)
  assert not (tmp_path / "media").exists()


def test_a_histogram_is_numpys(tmp_path):
  board, writer, lines = made(tmp_path)
  values = np.random.default_rng(1).normal(size=[40, 3])
  values[0, 0] = np.nan
  board.histogram("weights", values, bins=7)
  board.histogram("none", [np.nan])
  saved = np.load(tmp_path / "media" / "weights-3.npz")
  finite = values[np.isfinite(values)]
  counts, edges = np.histogram(finite, bins=7)
  np.testing.assert_array_equal(saved["counts"], counts)
  np.testing.assert_allclose(saved["edges"], edges)
  assert saved["mean"] == pytest.approx(finite.mean())
  assert saved["deviation"] == pytest.approx(finite.std())
  assert (saved["min"], saved["max"], saved["not_finite"]) == (finite.min(), finite.max(), 1)
  assert [line.split(" has ")[1] for line in lines] == [
    "1 of 120 values that are not finite; left out", "1 of 1 values that are not finite; left out",
  ]  # fmt: skip
  writer.flush()
  [(step, tag, plugin, buckets)] = events(tmp_path / "train")
  assert (step, tag, plugin) == (3, "weights", "histograms")
  np.testing.assert_allclose(buckets[:, 2], counts)


def test_a_step_that_is_repeated_replaces_its_files(tmp_path):
  for text in ("first", "second"):
    board, writer, _ = made(tmp_path)
    board.text("notes", text)
    board.histogram("x", [1.0, 2.0])
    board.image("x", np.zeros([1, 1, 1]))
  assert (tmp_path / "media" / "notes-3.txt").read_text() == "second"
  assert sorted(os.listdir(tmp_path / "media")) == ["notes-3.txt", "x-3.npz", "x-3.png"]
  writer.flush()
  assert [e[:3] for e in events(tmp_path / "train")][-3] == (3, "notes", "text")


def test_another_worker_writes_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  board = Board()
  board.image("x", np.zeros([1, 1, 1]))
  board.histogram("x", [1.0, np.nan])
  board.text("x", "")
  assert os.listdir(tmp_path) == []


class Line(toys.Regression):
  """One weight, which moves by 1 a step; the step is shown with it."""

  features = {"x": np.ones([4, 1], np.float32)}

  def build_model(self):
    return toys.linear([0.0])

  def losses(self, outputs, batch):
    return -outputs

  def show(self, board):
    board.text("weight", f"{float(self.model.weights[0].numpy()[0, 0]):g}")


class Stepper(Action):
  on = "eval"

  def __call__(self, output):
    self.run.board.histogram("losses", [output["loss"]])


def start(tmp_path, **options):
  return run(
    **{
      "task": Line, "train_steps": 7, "global_batch_size": 4, "mode": "train_and_evaluate",
      "model_dir": str(tmp_path), "strategy": factories.default, "eval_every_steps": 5,
      "steps_per_loop": 3, "optimizer": lambda: keras.optimizers.SGD(1.0), **options,
    }
  )  # fmt: skip


def shown(tmp_path):
  return {p.name: p.read_text() for p in (tmp_path / "media").iterdir() if p.suffix == ".txt"}


def test_show_ends_loops_at_its_cadence(tmp_path):
  start(tmp_path, actions=[Show(every_steps=2), Stepper()])
  assert shown(tmp_path) == {f"weight-{step}.txt": f"{step}" for step in (2, 4, 6)}
  assert [e[:2] for e in events(tmp_path / "train") if e[1] == "weight"] == [
    (2, "weight"), (4, "weight"), (6, "weight"),
  ]  # fmt: skip
  of_eval = [(step, tag) for step, tag, plugin, _ in events(tmp_path / "eval") if plugin]
  assert [e for e in of_eval if e == (5, "losses")]
  assert (tmp_path / "media" / "losses-5.npz").exists()
  assert len(os.listdir(tmp_path / "train")) == 1  # one writer: TensorBoard reads one at a time


def test_show_after_evaluations_shows_what_they_evaluate(tmp_path):
  start(tmp_path, actions=[Show()])
  assert shown(tmp_path) == {"weight-5.txt": "5", "weight-7.txt": "7"}


def test_show_gets_the_metrics_of_the_evaluation_or_loop_before_it(tmp_path, mirrored):
  seen = []

  class Looks(Line):
    def metrics(self, outputs, batch):
      rows = tf.reduce_sum(batch["weight"])
      return {"counts": Sum(tf.stack([rows, 2 * rows]))}

    def derived(self, values):
      return {"counts": values["counts"]}

    def show(self, board):
      seen.append((board.metrics["loss"], board.metrics["counts"]))

  start(tmp_path / "eval", task=Looks, strategy=lambda: mirrored(2), actions=[Show()])
  assert seen == [(-5.0, [4.0, 8.0]), (-7.0, [4.0, 8.0])]
  seen.clear()
  start(tmp_path / "loop", task=Looks, actions=[Show(every_steps=3)])
  assert seen == [(-1.0, [12.0, 24.0]), (-5.0, [4.0, 8.0])]  # of steps 1 to 3, and of step 6


def test_show_has_the_weights_that_evaluations_use():
  held = []

  class Averaged(Task):
    def show(self, board):
      held.append("shown")

  @contextlib.contextmanager
  def averages():
    held.append("averages")
    yield
    held.append("weights")

  action = Show(every_steps=3)
  action.run = types.SimpleNamespace(
    task=Averaged(), step=6, board=Board(), evaluated_weights=averages
  )
  action({})
  assert held == ["averages", "shown", "weights"]


def test_show_needs_a_task_that_shows(tmp_path):
  class Silent(Line):
    show = Task.show

  with pytest.raises(ConfigError, match=r"has @Show\(\), but Silent does not define show\(board\)"):
    start(tmp_path, task=Silent, actions=[Show()])
  with pytest.raises(ConfigError, match=r"Show.every_steps is 0; it must be a whole number"):
    Show(every_steps=0)
