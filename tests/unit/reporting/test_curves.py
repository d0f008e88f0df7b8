"""The curves of a run: what is read, what is drawn, and the user's mistakes."""

import json
import sys

import pytest

from framework.errors import ConfigError
from framework.reporting import curves

LINES = (
  {"step": 10, "split": "train", "wall_time": 1.0, "loss": 2.5, "accuracy": 0.25},
  {"step": 20, "split": "train", "wall_time": 2.0, "loss": "NaN", "accuracy": 0.5},
  {"step": 20, "split": "eval", "wall_time": 3.0, "loss": 1.5},
  {"step": 30, "split": "train", "wall_time": 4.0, "loss": 0.5, "accuracy": 0.75},
  {"step": 30, "split": "time", "wall_time": 5.0, "loss": 99.0},
)


@pytest.fixture
def run_folder(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
  return str(tmp_path)


def test_curves_are_the_lines_of_the_two_splits(run_folder):
  found = curves.read(run_folder, ["accuracy", "loss"])
  assert list(found) == ["accuracy", "loss"]
  assert found["accuracy"] == {"train": ([10, 20, 30], [0.25, 0.5, 0.75])}
  assert found["loss"]["eval"] == ([20], [1.5])
  steps, values = found["loss"]["train"]
  assert steps == [10, 20, 30]
  assert values == pytest.approx([2.5, float("nan"), 0.5], nan_ok=True)


def test_a_figure_has_a_panel_a_metric_and_a_line_a_split(run_folder):
  pytest.importorskip("matplotlib", reason="of the dev group; this environment is older than it")
  panels = curves.draw(curves.read(run_folder, ["loss", "accuracy"])).axes
  assert [panel.get_ylabel() for panel in panels] == ["loss", "accuracy"]
  drawn = [{line.get_label(): [*map(float, line.get_ydata())] for line in p.lines} for p in panels]
  assert drawn[0]["train"] == pytest.approx([2.5, float("nan"), 0.5], nan_ok=True)
  assert drawn[0]["eval"] == [1.5]
  assert drawn[1] == {"train": [0.25, 0.5, 0.75]}


def test_the_command_writes_a_small_png(run_folder, tmp_path, capsys):
  pytest.importorskip("matplotlib", reason="of the dev group; this environment is older than it")
  path = tmp_path / "picture.png"
  arguments = ["curves", run_folder, "--metrics=loss,accuracy", f"--output={path}"]
  assert curves.main(arguments) == 0
  assert capsys.readouterr().out == f"{path}\n"
  assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
  width, height = (int.from_bytes(path.read_bytes()[at : at + 4], "big") for at in (16, 20))
  assert (width, height) == (800, 300)
  assert path.stat().st_size < 60_000
  assert curves.main([*arguments, "--output=picture.txt"]) == 2
  assert "--output must end in .png" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ([], "usage: python -m framework.reporting.curves MODEL_DIR"),
    (["RUN", "--metrics="], "usage: python -m framework.reporting.curves MODEL_DIR"),
    (["RUN", "--metric=loss"], "Unknown command line flag 'metric'"),
    (["RUN", "--metrics=acuracy"], "unknown metric 'acuracy'; it must be one of accuracy, loss."),
    (["RUN/none"], "no metrics in "),
  ],
)
def test_a_mistake_is_one_line(arguments, says, run_folder, capsys):
  given = [each.replace("RUN", run_folder) for each in arguments]
  assert curves.main(["curves", *given]) == 2
  error = capsys.readouterr().err
  assert says in error
  assert error.startswith("error: ")
  assert error.count("\n") == 1


def test_without_matplotlib_the_line_says_how_to_get_it(run_folder, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(ConfigError, match=r"needs the package matplotlib.*uv run --extra plots"):
    curves.draw(curves.read(run_folder, ["loss"]))
