"""`pytest --changed` on planted trees: what is found, from how far, and how much of it is run."""

import subprocess
import types

import changed
import pytest

TREE = {
  "framework/loopwright/__init__.py": "",
  "framework/loopwright/leaf.py": '"""In a docstring loopwright.lazy is no reference."""\n',
  "framework/loopwright/lazy.py": "",
  "framework/loopwright/table.py": 'TABLE = (("loopwright.lazy", "Lazy"),)\n',
  "framework/loopwright/loader.py": 'load = lambda name: __import__(f"loopwright.checks.{name}")\n',
  "framework/loopwright/checks/__init__.py": "",
  "framework/loopwright/checks/mesh.py": "import loopwright.leaf\n",
  "tasks/gan.py": "def make():\n  from loopwright import leaf\n",
  "configs/gan.gin": "import loopwright.tasks.gan\n",
  "docs/gan.md": "",
  "tests/conftest.py": "",
  "tests/support/helper.py": "from loopwright import table\n",
  "tests/unit/test_leaf.py": "from loopwright.leaf import something\n",
  "tests/unit/test_gan.py": 'CONFIG = "import loopwright.tasks.gan"\n',
  "tests/unit/test_table.py": "import helper\n",
  "tests/unit/test_configs.py": 'FOLDER = ROOT / "configs"\n',
  "tests/unit/test_loader.py": "def test():\n  import loopwright.loader\n",
}
BY_CONFTEST = dict.fromkeys(("leaf", "gan", "table", "configs", "loader"), 1)


def git(root, *arguments):
  name = ["-c", "user.name=a", "-c", "user.email=a@b"]
  subprocess.run(["git", "-C", root, *name, *arguments], check=True, capture_output=True)


@pytest.fixture
def root(tmp_path):
  for name, text in TREE.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  git(tmp_path, "init", "-b", "main")
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-m", "first")
  return tmp_path


@pytest.mark.parametrize(
  ("file", "expected"),
  [
    ("framework/loopwright/leaf.py", {"leaf": 1, "gan": 2, "loader": 3}),
    ("framework/loopwright/lazy.py", {"table": 3}),
    ("framework/loopwright/checks/mesh.py", {"loader": 2}),
    ("tasks/gan.py", {"gan": 1}),
    ("configs/gan.gin", {"configs": 1}),
    ("docs/gan.md", {}),
    ("tests/support/helper.py", {"table": 1}),
    ("tests/unit/test_leaf.py", {"leaf": 0}),
    ("tests/conftest.py", BY_CONFTEST),
  ],
)
def test_the_references_to_a_file_are_found(root, file, expected):
  far = changed.distances(root, {file})
  tests = {f: distance for f, distance in far.items() if "/test_" in f}
  assert tests == {f"tests/unit/test_{name}.py": distance for name, distance in expected.items()}


def test_a_module_that_is_gone_still_breaks_what_imports_it(root):
  git(root, "rm", "framework/loopwright/leaf.py")
  assert changed.distances(root, {"framework/loopwright/leaf.py"})["tests/unit/test_leaf.py"] == 1


def test_all_since_main_counts_committed_or_not(root):
  git(root, "checkout", "-b", "mine")
  (root / "framework/loopwright/leaf.py").write_text("x = 1\n")
  git(root, "commit", "-am", "second")
  (root / "framework/loopwright/lazy.py").write_text("x = 1\n")
  (root / "tests/unit/test_new.py").write_text("")
  git(root, "rm", "docs/gan.md")
  git(root, "checkout", "-b", "other", "main")
  git(root, "checkout", "mine")
  _, found = changed.changes(root)
  mine = {
    "framework/loopwright/leaf.py",
    "framework/loopwright/lazy.py",
    "tests/unit/test_new.py",
    "docs/gan.md",
  }
  assert found == mine


def test_what_main_has_got_since_does_not_count(root):
  git(root, "branch", "mine")
  (root / "framework/loopwright/leaf.py").write_text("x = 1\n")
  git(root, "commit", "-am", "second")
  git(root, "checkout", "mine")
  assert changed.changes(root)[1] == set()


def test_the_nearest_come_first_until_the_time_is_over():
  far = {
    "framework/loopwright/step.py": 0,
    "tests/unit/test_far.py": 3,
    "tests/unit/test_near.py": 1,
    "tests/unit/test_slow.py": 1,
    "tests/unit/test_step.py": 2,
    "tests/support/helper.py": 1,
  }
  seconds = {"tests/unit/test_slow.py": 60, "tests/unit/test_near.py": 30}
  names = ["tests/unit/test_step.py", "tests/unit/test_near.py", "tests/unit/test_slow.py"]
  assert changed.choose(far, seconds, most=90 + changed.GUESS_S) == (
    names,
    ["tests/unit/test_far.py"],
  )
  assert changed.choose(far, seconds, most=89 + changed.GUESS_S) == (
    [*names[:2], "tests/unit/test_far.py"],
    names[2:],
  )
  assert changed.choose(far, {names[0]: 1000}, most=90)[0] == names[:1]  # one in any case


class Cache(dict):
  set = dict.__setitem__


def config(root, **options):
  given = {"everything": False, "ci": False, "keyword": "", "lf": False, **options}
  option = types.SimpleNamespace(**given)
  return types.SimpleNamespace(rootpath=root, cache=Cache(), option=option, args=[])


def test_the_session_says_what_it_runs_and_ends_if_there_is_nothing(root, capsys):
  with pytest.raises(pytest.exit.Exception, match="no test refers to what has changed"):
    changed.files(config(root))
  (root / "tasks/gan.py").write_text("x = 1\n")
  assert changed.files(config(root)) == ["tests/unit/test_gan.py"]
  assert "1 changed since" in capsys.readouterr().out


@pytest.mark.parametrize("option", [{}, {"ci": True}, {"everything": True}, {"keyword": "leaf"}])
def test_what_a_file_takes_is_kept_where_its_fast_tier_ran(root, option):
  made = config(root, **option)
  kept = changed.Seconds(made)
  for duration in (1.0, 2.5):
    report = types.SimpleNamespace(nodeid="tests/unit/test_leaf.py::test", duration=duration)
    kept.pytest_runtest_logreport(report)
  kept.pytest_sessionfinish()
  assert made.cache == ({} if option else {changed.KEY: {"tests/unit/test_leaf.py": 3.5}})
