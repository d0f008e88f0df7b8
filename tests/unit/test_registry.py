"""The names of a config, of commands and of plug-ins: each loads its module, and no other."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import loopwright
from loopwright import commands, configurables, registry
from loopwright.configurables import table
from loopwright.errors import ConfigError
from loopwright.registry import TABLE, Entry

PLUG_IN = """
from loopwright import Action

class Pager(Action):
  def __init__(self, *, number: int = 112):
    self.number = number

def hello(parsed):
  print("hello", parsed.values.loud, parsed.arguments)
  return 0

def define(parser):
  parser.switch("loud", "Speak up.")

def manners(subject):
  return []
"""
ENTRY_POINTS = """
[loopwright]
Pager = acme_loops.parts:Pager

[loopwright.command]
hello = acme_loops.parts:hello

[loopwright.check]
manners = acme_loops.parts:manners
"""
CONFIG = """
include 'configs/digits_cnn.gin'
run.actions = [@Pager()]
Pager.number = {number}
"""


def test_every_name_is_there():
  for kind in TABLE:
    for entry in registry.entries(kind):
      assert callable(entry.load()), entry


def test_a_name_stands_for_one_thing_of_its_kind():
  for kind in TABLE:
    names = registry.names(kind)
    assert len({*names}) == len(names), kind


def test_what_the_framework_asks_for_is_there():
  asked = re.compile(r"""registry\.load\(\s*"(\w+)",\s*"(\w+)"\s*\)""")
  files = [*Path(loopwright.__file__).parent.rglob("*.py")]
  found = {pair for file in files for pair in asked.findall(file.read_text())}
  assert len(found) > 10
  assert [pair for pair in found if pair[1] not in registry.names(pair[0])] == []


def test_the_public_names_are_those_that_type_checkers_see():
  tree = ast.parse(Path(loopwright.__file__).read_text())
  [block] = [node for node in tree.body if isinstance(node, ast.If)]
  seen = {(node.module, alias.asname) for node in block.body for alias in node.names}
  assert seen == {(each.module, each.name) for each in registry.entries("public")}
  assert [*loopwright.__all__] == [*dict.fromkeys(loopwright.__all__)]


def test_a_wrong_name_is_suggested_without_an_import():
  code = """if True:
    import sys
    from loopwright import registry
    from loopwright.errors import ConfigError
    try:
      registry.load("check", "lenghts")
    except ConfigError as error:
      assert str(error).endswith("Did you mean 'lengths'?"), error
    assert not {"tensorflow", "numpy", "gin"} & {*sys.modules}
    assert not [name for name in sys.modules if name.startswith("loopwright.tools")]
  """
  subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_that_is_missing_is_one_line_with_the_extra():
  missing = Entry("Pager", "no_such_package.pager", "Pager", "pager")
  with pytest.raises(ConfigError, match=r"^Pager needs the module 'no_such_package', which is not "
                     r"installed; run: pip install 'loopwright\[pager\]'\.$"):  # fmt: skip
    missing.load()


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
  """An installed package that adds an action, a command and a group of checks."""
  package = tmp_path / "acme_loops"
  package.mkdir()
  (package / "__init__.py").touch()
  (package / "parts.py").write_text(PLUG_IN)
  told = tmp_path / "acme_loops-1.0.dist-info"
  told.mkdir()
  (told / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-loops\nVersion: 1.0\n")
  (told / "entry_points.txt").write_text(ENTRY_POINTS)
  monkeypatch.syspath_prepend(tmp_path)
  _forget()
  yield
  _forget()
  for name in ("acme_loops", "acme_loops.parts"):
    sys.modules.pop(name, None)
  if "acme_loops.parts.Pager" in table.registry():
    table.registry().pop("acme_loops.parts.Pager")


def _forget():
  importlib.invalidate_caches()
  registry._plugged.cache_clear()
  table.listed.cache_clear()


@pytest.mark.usefixtures("plug_in")
def test_a_package_of_others_adds_names(tmp_path, capsys):
  assert registry.names("check")[-1] == "manners"
  assert registry.find("check", "manners").load()(None) == []
  assert commands.main(["loopwright", "hello", "you", "--loud"]) == 0
  assert commands.main(["loopwright", "--help"]) == 0
  said = capsys.readouterr().out
  assert said.startswith("hello True ['you']\n")
  assert "\n  hello     Of the module acme_loops.parts.\n" in said
  assert commands.main(["loopwright", "helo"]) == 2
  assert "Did you mean 'hello'?" in capsys.readouterr().err
  config = tmp_path / "x.gin"
  config.write_text(CONFIG.format(number=911))
  assert configurables.examine([str(config)]).mistakes == []
  config.write_text(CONFIG.format(number="'911'"))
  [mistake] = configurables.examine([str(config)]).mistakes
  assert "Pager.number is '911'; it must be int. Write 911" in str(mistake.error)


@pytest.mark.usefixtures("plug_in")
def test_what_nobody_names_is_not_loaded(tmp_path):
  config = tmp_path / "x.gin"
  config.write_text(CONFIG.replace("Pager()", "Pagr()").replace("Pager.number = {number}", ""))
  mistake = configurables.examine([str(config)]).mistakes[0]
  assert str(mistake.error).endswith("unknown configurable 'Pagr'. Did you mean 'Pager'?")
  assert "acme_loops.parts" not in sys.modules
