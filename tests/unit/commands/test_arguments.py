"""Commands become flags; a config is found by its name."""

import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import loopwright
from loopwright import commands, configurables
from loopwright.commands import arguments, launching, shipped
from loopwright.errors import ConfigError, UsageError
from loopwright.host import children
from loopwright.options import words
from loopwright.tools import local_cluster

ROOT = Path(__file__).resolve().parents[3]
SIZE = "run.global_batch_size"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  """An empty folder, as a user's project."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("TF_CONFIG", raising=False)


def parsed(*given):
  values = arguments.parse_flags(["loopwright", *given])
  return values.mode, values.gin_file, values.gin_param


@pytest.mark.parametrize(
  ("command", "mode"),
  [
    *(("train", "train_and_evaluate"), ("evaluate", "evaluate"), ("export", "export")),
    *(("replay", "replay"), ("verify", "verify"), ("tune", "tune"), ("check", "check_config")),
  ],
)
def test_a_command_is_a_mode(command, mode):
  assert parsed(command, "a.gin") == (mode, ["a.gin"], [])
  assert parsed("--gin_file=a.gin", f"--mode={mode}") == (mode, ["a.gin"], [])


def test_a_command_may_have_a_mode_that_is_its_own():
  assert parsed("train", "a.gin", "--mode=train")[0] == "train"
  assert parsed("evaluate", "a.gin", "--mode=evaluate_continuously")[0] == "evaluate_continuously"
  with pytest.raises(UsageError, match="--mode=train: it must be one of evaluate, evaluate_cont"):
    parsed("evaluate", "a.gin", "--mode=train")


def test_arguments_follow_flags_of_the_same_kind():
  given = ["train", "b.gin", "run.seed=3", "--gin_file=a.gin", "lr = 1", "--gin_param=x.y=2"]
  assert parsed(*given)[1:] == (["a.gin", "b.gin"], ["x.y=2", "run.seed=3", "lr = 1"])


def test_a_config_by_its_name_is_the_users_before_the_shipped():
  assert parsed("train", "digits_cnn")[1] == ["configs/digits_cnn.gin"]
  Path("configs").mkdir()
  Path("configs/mine.gin").touch()
  assert parsed("train", "mine")[1] == ["configs/mine.gin"]
  Path("digits_cnn.gin").touch()
  assert parsed("train", "digits_cnn")[1] == ["digits_cnn.gin"]
  assert parsed("train", "sub/digits_cnn")[1] == ["sub/digits_cnn"]


def test_a_shipped_config_parses_in_any_folder(capsys):
  assert commands.main(["loopwright", "check", "imdb_lstm", "run.train_steps=1"]) == 0
  assert capsys.readouterr().out.startswith("ok: imdb_lstm.gin, imdb.gin: ")


def test_the_only_config_of_a_folder_needs_no_name():
  with pytest.raises(ConfigError, match="no config: name a gin file, or a shipped config such as"):
    parsed("verify")
  Path("waves.gin").touch()
  assert parsed("verify", "run.seed=1") == ("verify", ["waves.gin"], ["run.seed=1"])
  Path("other.gin").touch()
  with pytest.raises(ConfigError, match=r"several configs; name one of other, waves\."):
    parsed("verify")
  assert parsed("verify", "--gin_file=x.gin")[1] == ["x.gin"]


@pytest.mark.parametrize(
  ("given", "line"),
  [
    (("trian", "x"), "Did you mean 'train'?"),
    (("digits_cnn",), "write a command before it, such as `train digits_cnn`, or a gin file as"),
    (("train", "digits_cn"), "there is no config 'digits_cn'. Did you mean 'digits_cnn'?"),
    (("train", "qqq"), "there is no config 'qqq'. It must be a gin file, or one of digits_cnn, "),
    (("train", "digits_cnn", "--model_dri=x"), "unknown flag --model_dri. Did you mean '--model"),
    (("train", "digits_cnn", "--mode", "trian"), "--mode=trian: it must be one of train_and_evalu"),
    (("train", "digits_cnn", "--json=x"), "`train` has no flag --json, but `verify`"),
    (
      ("train", "digits_cnn", "--x=0.01"),
      "bindings have no dashes, as in keras.Adam.learning_rate=",
    ),
    (
      ("train", "digits_cnn", "--lr", "0.1"),
      "--lr; write a binding: keras.Adam.learning_rate=0.001",
    ),
    (("train", "--max-epochs=3"), "no flag --max_epochs; write a binding: run.train_epochs=10"),
    (("train", "--output-dir=x"), "no flag --output_dir; the run folder is --model_dir=..."),
    (("fit", "digits_cnn"), "no command 'fit'; `loopwright train CONFIG` trains"),
    (("resume",), "no command 'resume'; `loopwright train` with the same config and --model_dir"),
    (
      ("verify", "digits_cnn", "--time=0.01"),
      "--time is a switch, which takes no value; write --time alone",
    ),
    (("sweep", "digits_cnn", "--jobs=0"), "--jobs=0: it must be a whole number of at least 1"),
    (
      ("sweep", "digits_cnn", "--seed=x"),
      "--seed=x: it must be a whole number from 0 to 2",
    ),
    (("ls", "--status=done,x"), "--status=done,x: it must be one or more of running, done, "),
  ],
)
def test_a_mistake_is_one_line(capsys, given, line):
  assert commands.main(["loopwright", *given]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.count("\n") == 1
  assert line in err


def test_what_is_suggested_for_the_words_of_others_is_there():
  told = [*words.COMMANDS.values(), *words.FLAGS.values()]
  named = {found for text in told for found in re.findall(r"`loopwright (\w+)", text)}
  assert named <= arguments.COMMANDS.keys()
  for binding in {*words.BINDINGS.values()}:
    [word] = shlex.split(binding)
    alone = {"run.train_epochs=10": "run.train_steps", "run.per_replica_batch_size=32": SIZE}
    rest = [f"{alone[word]} = None"] if word in alone else []
    assert not configurables.examine([shipped.find("digits_cnn")], [word, *rest]).mistakes
  assert not {*words.BINDINGS} & {*words.FLAGS}


@pytest.mark.parametrize(
  ("command", "mode"), [("train", "train_and_evaluate"), ("replay", "replay")]
)
def test_a_local_cluster_gets_flags_alone(monkeypatch, command, mode):
  given = {}

  def cluster(**options):
    given.update(options)
    return types.SimpleNamespace(run=lambda: 0)

  monkeypatch.setattr(local_cluster, "LocalCluster", cluster)
  line = ["loopwright", command, "digits_cnn", "a.b=1", "--local_workers=2", "--model_dir=m"]
  assert launching.run(arguments.parse(line)) == 0
  count = len(children.PROGRAM)
  program, rest = given["command"][:count], given["command"][count:]
  assert (*program,) == children.PROGRAM
  assert sorted(rest) == [
    *("--gin_file=configs/digits_cnn.gin", "--gin_param=a.b=1", f"--mode={mode}", "--model_dir=m"),
  ]


def test_the_forms_of_a_flag():
  forms = [["--model_dir=m"], ["--model_dir", "m"], ["-model_dir=m"]]
  for form in forms:
    line = ["loopwright", "train", *form, "digits_cnn", "--accept_changes=true", "run.seed=-1"]
    values = arguments.parse_flags(line)
    assert (values.model_dir, values.accept_changes) == ("m", True)
    assert values.gin_param == ["run.seed=-1"]
  line = ["loopwright", "train", "digits_cnn", "--accept_changes=false"]
  assert not arguments.parse_flags(line).accept_changes


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_of_a_command_has_what_it_takes_and_an_example(capsys, flag):
  assert commands.main(["loopwright", "train", flag]) == 0
  told = capsys.readouterr().out
  assert "example: loopwright train digits_cnn run.train_steps=200" in told
  assert {*re.findall(r"--(\w+)", told.partition("\n\nexample")[0])} == {
    *("help", "gin_file", "gin_param", "mode", "model_dir", "local_workers", "local_ps"),
    *("max_restarts", "accept_changes"),
  }


def test_every_example_of_the_help_is_a_command_line():
  for name, command in arguments.COMMANDS.items():
    assert arguments.parse(["loopwright", *shlex.split(command.example)]).command == name


def test_the_version(capsys):
  assert commands.main(["loopwright", "--version"]) == 0
  assert capsys.readouterr().out == f"loopwright {loopwright.__version__}\n"


def test_help_is_fast_and_names_everything():
  code = """if True:
    import sys
    from loopwright import commands, configurables
    assert commands.main(["loopwright", "--help"]) == 0
    assert commands.main(["loopwright", "train", "--help"]) == 0
    heavy = {"tensorflow", "numpy", "keras", "absl"} & set(sys.modules)
    assert not heavy, heavy
  """
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ)
  )
  assert done.returncode == 0, done.stderr
  assert all(f"\n  {name} " in done.stdout for name in arguments.COMMANDS)
  every, one = done.stdout.split("usage: loopwright train [CONFIG] [NAME=VALUE ...]")
  assert "Exit status" in every
  assert "--local_workers" in one


def test_the_shipped_configs_are_those_of_the_repository():
  """In a clone; loopwright/configs, which a package has instead, is a link, as is that of tasks."""
  assert [f"{name}.gin" for name in shipped.names()] == sorted(os.listdir(ROOT / "configs"))
  for name in ("configs", "tasks"):
    assert (ROOT / "framework" / "loopwright" / name).resolve() == ROOT / name
