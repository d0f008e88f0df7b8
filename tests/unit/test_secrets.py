"""Secrets: a run gets them, and nothing that it writes has them."""

import hashlib
import json
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import toys

import loopwright
from loopwright import commands, configurables
from loopwright.errors import ConfigError
from loopwright.host import redaction
from loopwright.run_folder import history
from loopwright.runs.runner import run
from loopwright.tools.report import data, page
from loopwright.tools.sweep import space

SECRET, OTHER = "hunter2-PLAIN", "swordfish-PLAIN"
SEEN = []


def digest(text):
  return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@loopwright.register
class Uploading(toys.Regression):
  features = {"x": np.ones([8, 1], "float32"), "y": np.zeros(8, "float32")}

  def __init__(
    self, *, api_token: str = "", headers: dict[str, str] | None = None, pad_token="<p>"
  ):
    SEEN.append((api_token, headers, pad_token))

  def build_model(self):
    return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  SEEN.clear()


def config(*lines, steps=2):
  text = "run.task = @Uploading()\nrun.global_batch_size = 4\nrun.strategy = @one_device\n"
  text += "run.actions = [@TensorBoard()]\n"
  Path("c.gin").write_text("\n".join([f"{text}run.train_steps = {steps}", *lines, ""]))
  return "c.gin"


def trained(*lines, params=(), file=None, steps=2, model_dir="runs/r", **options):
  configurables.parse([file or config(*lines, steps=steps)], params)
  configurables.configured(run)(mode="train", model_dir=model_dir, **options)


@pytest.mark.parametrize(
  "name",
  [
    "a.Upload.api_token",
    "token",
    "hf_token",
    "HF_TOKEN",
    "apiKey",
    "APIKey",
    "wandb_key",
    "access_key",
    "password",
    "db_password",
    "my_secret",
    "passwd",
    "credentials",
  ],
)
def test_a_name_of_a_secret(name):
  assert redaction.shown(name, SECRET) == digest(SECRET)
  assert redaction.shown(name, [SECRET, 3, None, ""]) == [digest(SECRET), 3, None, ""]
  assert redaction.shown(name, "env:PLACE") == "env:PLACE"
  assert redaction.shown(name, digest(SECRET)) == digest(SECRET)


@pytest.mark.parametrize(
  "name",
  [
    "key",
    "keys",
    "key_dim",
    "num_tokens",
    "token_length",
    "tokens",
    "tokenizer",
    "monkey",
    "keyboard",
    "pad_token",
    "eos_token",
    "label_key",
    "sort_key",
    "password_file",
    "secret_path",
    "access_key_id",
    "passes",
    "Token.value",
  ],
)
def test_a_name_of_something_else(name):
  assert redaction.shown(name, SECRET) == SECRET


def test_the_keys_of_a_dict():
  found = redaction.shown(
    "headers", {"Authorization": SECRET, "accept": "x", "n": {"token": SECRET}}
  )
  assert found == {"Authorization": digest(SECRET), "accept": "x", "n": {"token": digest(SECRET)}}


def test_a_command_line_shows_none():
  words = ["train", f"--gin_param=U.api_token='{SECRET}'", f"u.api_key={SECRET}", "--gin_param"]
  words += [f"U.headers = {{'token': '{SECRET}'}}", "U.token = %HERE", "run.seed=1"]
  text = redaction.command(words)
  assert SECRET not in text
  assert text.count(digest(SECRET)) == 2
  assert "U.token = %HERE" in text
  assert text.endswith("run.seed=1")


def test_nothing_that_a_run_writes_has_a_secret(monkeypatch, capfd):
  monkeypatch.setattr(sys, "orig_argv", ["train", f"--gin_param=x.api_token='{SECRET}'"])
  trained(
    "HERE = ('" + SECRET + "')",
    "Uploading.api_token = %HERE",
    f"Uploading.headers = {{'Authorization': '{SECRET}'}}",
  )
  assert SEEN[-1] == (SECRET, {"Authorization": SECRET}, "<p>")
  files = [path for path in Path("runs").rglob("*") if path.is_file()]
  assert len(files) > 6
  assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
  written = Path("runs/r/operative_config.gin").read_text()
  assert f"HERE = '{digest(SECRET)}'" in written
  assert "Uploading.pad_token = '<p>'" in written
  [start] = map(json.loads, Path("runs/r/history.jsonl").read_text().splitlines())
  assert start["config"]["Uploading.headers"] == repr({"Authorization": digest(SECRET)})
  assert digest(SECRET) in start["command"]
  assert SECRET not in page.html([data.read("runs/r", "r")], plotly="")
  assert SECRET not in "".join(capfd.readouterr())


def test_a_changed_secret_is_noticed_and_its_digest_is_no_secret(monkeypatch):
  trained(f"Uploading.api_token = '{SECRET}'")
  with pytest.raises(ConfigError) as caught:
    trained(f"Uploading.api_token = '{OTHER}'", steps=4)
  told = f"Uploading.api_token = '{digest(OTHER)}', which was '{digest(SECRET)}'"
  assert told in str(caught.value)
  own = "runs/r/operative_config.gin"
  with pytest.raises(ConfigError) as caught:
    trained(file=own)
  assert re.fullmatch(
    rf"{own}:\d+: Uploading\.api_token is the digest of a secret, which run folders do not keep; "
    r"write 'env:NAME' there, or add --gin_param=\"Uploading\.api_token = 'env:NAME'\"\.",
    str(caught.value),
  )
  monkeypatch.setenv("PLACE", OTHER)
  params = ["Uploading.api_token = 'env:PLACE'", "run.train_steps = 4"]
  with pytest.raises(ConfigError, match=f"api_token = 'env:PLACE', which was '{digest(SECRET)}'"):
    trained(file=own, params=params)
  monkeypatch.setenv("PLACE", SECRET)
  trained(file=own, params=params)
  assert SEEN[-1][0] == SECRET
  assert [each["step"] for each in history.records("runs/r")] == [0, 2]


def test_a_variable_of_the_environment_is_read_when_used_and_recorded_by_its_name(monkeypatch):
  monkeypatch.setenv("PLACE", SECRET)
  lines = ["HERE = 'env:PLACE'", "Uploading.api_token = %HERE"]
  trained(*lines, "Uploading.headers = {'x': 'env:PLACE'}", "Uploading.pad_token = 'env: PLACE'")
  assert SEEN[-1] == (SECRET, {"x": SECRET}, "env: PLACE")
  bound = configurables.bindings()
  assert (bound["HERE"], bound["Uploading.headers"]) == ("'env:PLACE'", "{'x': 'env:PLACE'}")
  written = Path("runs/r/operative_config.gin").read_text()
  assert "HERE = 'env:PLACE'\n" in written
  assert SECRET not in written
  monkeypatch.setenv("PLACE", OTHER)  # another secret at the same place is the same run
  trained(file="runs/r/operative_config.gin", params=["run.train_steps = 4"])
  assert SEEN[-1][0] == OTHER
  monkeypatch.delenv("PLACE")
  with pytest.raises(
    ConfigError, match=r"HERE is 'env:PLACE', but the environment has no variable "
  ):
    trained(file="runs/r/operative_config.gin")


@pytest.mark.parametrize(
  ("line", "told"),
  [
    (f"Uploading.api_token = {SECRET}", "a secret; write it in quotes, or write 'env:NAME'."),
    (f"Uploading.api_token = ['{SECRET}']", f"is ['{digest(SECRET)}']; it must be str."),
    (
      f"Uploading.api_token = '{SECRET}'\nUploading.api_token = '{OTHER}'",
      f"is '{digest(OTHER)}', but '{digest(SECRET)}' at",
    ),
  ],
)
def test_no_message_shows_a_secret(line, told):
  with pytest.raises(ConfigError) as caught:
    configurables.parse([config(line)])
  assert told in str(caught.value)
  assert "PLAIN" not in str(caught.value)
  for each in line.splitlines()[:1]:
    with pytest.raises(ConfigError) as caught:
      configurables.parse([config()], [each, "Uploading.api_token = 3"])
    assert "PLAIN" not in str(caught.value)


@pytest.mark.parametrize(
  ("bindings", "told"),
  [
    (["api_token = 'X'", "run.seed = %api_token"], f"or '{digest(SECRET)}'; it must be int."),
    (["api_token = 'X'", "a = %api_token", "run.seed = [%a]"], f"or ['{digest(SECRET)}']; it mu"),
    (
      ["api_token = 'X'", "run.precision = %api_token"],
      f"or '{digest(SECRET)}'; it must be one of",
    ),
    (["Uploading.api_tokn = 'X'"], "--gin_param 'Uploading.api_tokn': Uploading has no parameter"),
    (["Uplaoding.api_tokn = 'X'"], "--gin_param 'Uplaoding.api_tokn': unknown configurable 'Upl"),
    (["api_tokn = 'X'"], "--gin_param 'api_tokn': nothing uses the macro 'api_tokn'"),
  ],
)
def test_no_message_shows_a_secret_of_a_macro_or_under_a_mistyped_name(bindings, told):
  with pytest.raises(ConfigError) as caught:
    configurables.parse([config()], [line.replace("X", SECRET) for line in bindings])
  assert told in str(caught.value)
  assert "PLAIN" not in str(caught.value)


def test_no_secret_varies_in_a_sweep_and_none_is_in_its_study():
  with pytest.raises(ConfigError, match=r"--vary has U\.api_token, a secret, which a study would"):
    space.read([f"U.api_token = ['{SECRET}', '{OTHER}']"])
  [dimension] = space.read(["run.seed = [0, 1]"])
  found = space.checked([config(f"Uploading.api_token = '{SECRET}'")], [], [dimension])
  assert found["Uploading.api_token"] == repr(digest(SECRET))


def test_options_show_its_digest(capsys):
  path = config(f"Uploading.api_token = '{SECRET}'")
  assert commands.main(["loopwright", "options", path, "--prefix=Uploading."]) == 0
  assert f"Uploading.api_token = '{digest(SECRET)}'\n" in capsys.readouterr().out


def test_a_call_from_python_is_recorded_without_secrets():
  import functools

  task = functools.partial(Uploading, api_token=SECRET)
  assert history.described({"task": task, "token": SECRET}) == {
    "task": f"{__name__}.Uploading(api_token='{digest(SECRET)}')",
    "token": repr(digest(SECRET)),
  }


def test_a_digest_is_the_same_as_its_text_and_nothing_else():
  """A version may show a name that an earlier one hid, and the other way round."""
  hidden = repr(digest(SECRET))
  assert redaction.same(hidden, repr(SECRET))
  assert redaction.same(repr(SECRET), hidden)
  assert not redaction.same(hidden, repr(OTHER))
  assert not redaction.same("3", "'3'")
