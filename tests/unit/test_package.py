"""What is installed: one package, `loopwright`, which no module of a user's can replace."""

import ast
import configparser
import email
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import launch
import loopwright
from loopwright.host import children

ROOT = Path(launch.__file__).parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
BUILD = "from setuptools import build_meta; build_meta.build_wheel('.')"
GIN = """
import loopwright.tasks.image_classification
run.task = @ImageClassification()
ImageClassification.data = @digits()
run.global_batch_size = 64
run.train_steps = 2
run.optimizer = @keras.Adam
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """The wheel of this clone, built in a copy of it."""
  folder = tmp_path_factory.mktemp("clone")
  for name in ("setup.cfg", "pyproject.toml", "PACKAGE.md", "LICENSE", "launch.py"):
    (folder / name).write_bytes((ROOT / name).read_bytes())
  for name in ("framework", "tasks", "configs"):
    subprocess.run(["cp", "-r", ROOT / name, folder], check=True)
  subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
  [file] = folder.glob("*.whl")
  return file


def test_a_wheel_holds_one_package_with_the_tasks_and_the_configs(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  tops = {name.partition("/")[0] for name in names}
  assert {top for top in tops if not top.endswith(".dist-info")} == {"loopwright"}
  for folder, end in (("tasks", "*.py"), ("configs", "*.gin")):
    there = {name for name in names if name.startswith(f"loopwright/{folder}/")}
    assert there == {f"loopwright/{folder}/{file.name}" for file in (ROOT / folder).glob(end)}


def test_the_page_of_an_index_has_no_link_into_the_repository(wheel):
  """It lists all extras; what Orbit brings is only in one."""
  [name] = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".dist-info/METADATA")]
  page = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
  assert page["Author"] == "The maintainers of Loopwright"
  assert page["Requires-Python"] in (">=3.10,<3.14", "<3.14,>=3.10")
  text = page.get_payload()
  assert re.findall(r"\]\((?!https?://)", text) == []
  assert set(page.get_all("Provides-Extra")) <= set(re.findall(r"`([a-z0-9]+)`", text))
  required = [line for line in page.get_all("Requires-Dist") if "extra ==" not in line]
  assert not any(line.startswith("tf-models") for line in required)


@pytest.mark.whole
@pytest.mark.parametrize("installed", [True, False])
def test_a_users_own_tasks_package_is_no_hindrance(wheel, tmp_path, installed):
  """For a shipped config, and for the user's own task."""
  if installed:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
  folder = tmp_path / "mine"
  for package in ("tasks", "launch", "configs"):
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("mine = True")
  (folder / "tasks" / "gan.py").write_text("import tasks\nassert tasks.mine\n")
  (folder / "mine.gin").write_text(f"import tasks.gan\n{GIN}")
  source = tmp_path / "site" if installed else ROOT / "framework"
  path = {**os.environ, "PYTHONPATH": str(source)}
  for file in ("digits_cnn", "mine.gin"):
    done = subprocess.run(
      [*children.PROGRAM, "check", file], cwd=folder, capture_output=True, text=True, env=path
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_task_exists_twice():
  """In a clone, where the folder tasks/ is importable, too."""
  code = "import sys; sys.path.insert(0, sys.argv[1]); import tasks.gan"
  done = subprocess.run(
    [sys.executable, "-c", code, ROOT], capture_output=True, text=True, cwd=os.path.dirname(ROOT)
  )
  line = done.stderr.splitlines()[-1]
  assert line == "ImportError: Loopwright's tasks are loopwright.tasks; import that, not tasks."


def requirements(lines):
  """Returns the requirements of some lines, by the names that an index has."""
  found = [Requirement(line) for line in lines if line.strip()]
  for each in found:
    each.name = canonicalize_name(each.name)
  return found


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_constraints_are_versions_that_are_asked_for(python):
  """What is installed and the groups have a version each; an extra may have none."""
  here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
  pins = requirements((ROOT / "constraints.txt").read_text().splitlines())
  pins = {pin.name: pin for pin in pins if pin.marker is None or pin.marker.evaluate(here)}
  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  groups = re.findall(r"^(?:dev|docs) = (\[.*?\])$", PYPROJECT, re.DOTALL | re.MULTILINE)
  needed = requirements(config["options"]["install_requires"].splitlines())
  needed += requirements(one for group in groups for one in ast.literal_eval(group))
  extras = requirements("\n".join(config["options.extras_require"].values()).splitlines())
  assert {one.name for one in needed} - pins.keys() == set()
  for one in [*needed, *(extra for extra in extras if extra.name in pins)]:
    [version] = pins[one.name].specifier
    assert version.operator == "=="
    assert one.specifier.contains(version.version, prereleases=True), (str(one), version.version)


def test_a_citation_names_this_version():
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  assert citation["license"] == config["metadata"]["license"]
  assert str(citation["version"]) == loopwright.__version__
