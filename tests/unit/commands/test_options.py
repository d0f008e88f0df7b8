"""What a config can set, with type, default, meaning and value."""

import re
import sys
from pathlib import Path

import pytest

from loopwright import commands
from loopwright.configurables import table

TASK = '''
import loopwright


def double():
  """Doubles."""


@loopwright.register
class Birds(loopwright.Task):
  """Tells birds by their song."""

  def __init__(self, data: str, *, width: int = 64, names: tuple[str, ...] = (), better=double):
    """Makes nothing yet.

    Args:
      data: a folder; it
        must have sounds.
      width, names: of the layers.
    """
'''
CONFIG = """
import birds

run.task = @Birds()
run.train_steps = %steps
run.global_batch_size = 8
steps = 300
Birds.data = "songs"
small/Birds.width = 8
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("birds.py").write_text(TASK)
  Path("birds.gin").write_text(CONFIG)
  before = dict(table.registry().items())
  yield
  sys.modules.pop("birds", None)
  for name in {*dict(table.registry().items())} - {*before}:
    table.registry().pop(name)


def printed(capsys, *arguments):
  assert commands.main(["loopwright", "options", *arguments]) == 0
  return capsys.readouterr().out


def test_the_users_task_has_its_options_with_values(capsys):
  assert printed(capsys, "--prefix=Birds.", "--prefix=small/Birds.w") == (
    "Birds.data = 'songs'\n"
    "    str, required. a folder; it must have sounds.\n"
    "Birds.width = 64 (default)\n"
    "    int. of the layers.\n"
    "Birds.names = () (default)\n"
    "    tuple[str, ...]. of the layers.\n"
    "Birds.better = @double (default)\n"
    "    any. Tells birds by their song.\n"
    "small/Birds.width = 8\n"
    "    int, default 64. of the layers.\n"
  )


def test_values_are_those_of_files_and_bindings(capsys):
  out = printed(capsys, "birds", "run.seed=4", "--gin_param=run.shuffle = False", "--prefix=run.s")
  values = dict(re.findall(r"^run\.(\w+) = (.*)$", out, re.MULTILINE))
  assert values == {
    "strategy": "@auto (default)",
    "steps_per_loop": "100 (default)",
    "seed": "4",
    "shuffle": "False",
  }
  said = printed(capsys, "--prefix=run.train")
  assert "run.train_steps = 300\n    int | None, default None." in said


def test_all_of_the_framework_is_there_the_used_first(capsys):
  names = re.findall(r"^(\S+) (?:= |is not set)", printed(capsys), re.MULTILINE)
  assert len(names) == len({*names})
  assert names[0] == "run.task"
  registered = {n for n in table.selectors() if not n.startswith(("gin.", "official."))}
  assert {name.rpartition(".")[0] for name in names} - {"small/Birds"} == {
    name for name in registered if table.parameters(name)
  }
  assert names.index("keras.Adam.beta_1") < names.index("WarmStart.path")
  assert names.index("WarmStart.path") < names.index("tf_keras.Adam.beta_1")


def test_a_config_with_mistakes_elsewhere_still_shows_its_options(capsys):
  Path("birds.gin").write_text("import birds\nBirds.wdith = 3\nrun.task = @Birds()\n")
  assert "Birds.data is not set\n    str, required." in printed(capsys, "--prefix=Birds.d")


@pytest.mark.parametrize(
  ("given", "line"),
  [
    (("--prefix=Brids.",), "no option begins with 'Brids.'"),
    (("brids",), "there is no config 'brids'. Did you mean 'birds'?"),
    (("x.gin",), "there is no gin file 'x.gin' in . or "),
    (("import nowhere = 1",), "error: --gin_param"),
  ],
)
def test_a_mistake_is_one_line(capsys, given, line):
  assert commands.main(["loopwright", "options", *given]) == 2
  out, err = capsys.readouterr()
  assert (out, err.count("\n")) == ("", 1)
  assert line in err
