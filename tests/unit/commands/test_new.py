"""`loopwright new`: a project that trains and whose test passes."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright import commands
from loopwright.commands import new

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def test_a_project_has_its_name_everywhere(capsys):
  Path("sub").mkdir()
  assert commands.main(["loopwright", "new", "sub/bird_song"]) == 0
  assert "cd sub/bird_song && uv run loopwright train" in capsys.readouterr().out
  made = {path.name: path.read_text() for path in Path("sub/bird_song").iterdir()}
  assert sorted(made) == [
    *(".gitignore", "README.md", "bird_song.gin", "bird_song.py"),
    *("pyproject.toml", "test_bird_song.py"),
  ]
  assert not any("waves" in text.lower() for text in made.values())
  assert "class BirdSong(lw.Task):" in made["bird_song.py"]
  assert "import bird_song\n\nrun.task = @BirdSong()" in made["bird_song.gin"]
  assert 'with_name("bird_song.gin")' in made["test_bird_song.py"]


@pytest.mark.parametrize(
  ("given", "line"),
  [
    (("there",), "'there' exists; choose another name, or remove it."),
    (("a-b",), "'a-b' cannot be the name of a module; write small letters"),
    (("Waves",), "'Waves' cannot be the name of a module"),
    (("class",), "'class' cannot be the name of a module"),
    (("numpy",), "'numpy' is the name of an installed module; choose another."),
    (("trainer",), "'trainer' is the name of an installed module"),
    (("nowhere/x",), "'nowhere/x' cannot be made (No such file or directory); give a folder in"),
    (("a", "b"), "`loopwright new` takes one name, as in `loopwright new waves`."),
    ((), "`loopwright new` takes one name"),
  ],
)
def test_a_mistake_is_one_line_and_writes_nothing(capsys, given, line):
  Path("there").touch()
  assert commands.main(["loopwright", "new", *given]) == 2
  out, err = capsys.readouterr()
  assert (out, err.count("\n")) == ("", 1)
  assert err.startswith(f"error: {line}")
  assert os.listdir() == ["there"]


@pytest.mark.parametrize(
  ("direct", "source"),
  [
    (None, None),
    ('{"url": "file:///a%20b/lw", "dir_info": {}}', '{ path = "UP/a b/lw" }'),
    (
      '{"url": "https://host/lw.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}',
      '{ git = "https://host/lw.git", rev = "12ab" }',
    ),
    ('{"url": "https://host/lw.whl"}', '{ url = "https://host/lw.whl" }'),
  ],
)
def test_uv_finds_loopwright_where_it_was_installed_from(monkeypatch, tmp_path, direct, source):
  """From the folder of the project, also where a link leads to it."""
  Path("far/off").mkdir(parents=True)
  Path("near").symlink_to("far/off")
  up = "/".join([".."] * len((tmp_path / "far/off/x").parts[1:]))
  text = dict(new.files("near/x"))["pyproject.toml"]
  path = re.search(r'^loopwright = \{ path = "(\.\..*)", editable = true \}$', text, re.MULTILINE)[
    1
  ]
  Path("far/off/x").mkdir()
  assert Path("far/off/x", path).resolve() == ROOT.resolve()

  class Installed:
    def read_text(self, name):
      assert name == "direct_url.json"
      return direct

  monkeypatch.setattr(new, "SHIPPED", ROOT / "framework" / "loopwright")  # as in a package
  monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
  text = dict(new.files("near/x"))["pyproject.toml"]
  found = re.findall(r"^\[tool\.uv\.sources\]\nloopwright = (.*)$", text, re.MULTILINE)
  assert found == ([source.replace("UP", up)] if source else [])
  assert "SOURCE" not in text


@pytest.mark.whole
def test_a_project_trains_and_its_test_passes():
  """With fewer checks than the project has, which take 20 s."""
  launch = [sys.executable, str(ROOT / "launch.py")]
  subprocess.run([*launch, "new", "ripples"], check=True)
  test = Path("ripples/test_ripples.py")
  some = test.read_text().replace(
    'with_name("ripples.gin")', "with_name(\"ripples.gin\"), groups=['order']"
  )
  test.write_text(some)
  short = ["run.train_steps=20", "run.eval_every_steps=20"]
  trained = subprocess.run(
    [*launch, "train", *short], cwd="ripples", capture_output=True, text=True, timeout=200
  )
  assert trained.returncode == 0, trained.stderr
  assert trained.stdout.startswith("done: step 20 | eval loss ")
  tested = subprocess.run(
    [sys.executable, "-m", "pytest", "-q"], cwd="ripples", capture_output=True, text=True,
    timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT / "framework")},
  )  # fmt: skip
  assert tested.returncode == 0, tested.stdout
  assert "1 passed" in tested.stdout
