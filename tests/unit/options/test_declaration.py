"""Options that are declared: by users too, beside whatever else their annotations say."""

import inspect
from typing import Annotated

import pytest
from input_cases import one_line_error

import loopwright
from loopwright import configurables
from loopwright.actions.base import Action
from loopwright.configurables import changes
from loopwright.options.declaration import (
  COUNT,
  asked,
  declared,
  fixed,
  free,
  may_change,
  signature,
)
from loopwright.options.groups import Group
from loopwright.runs.runner import Options, run


@loopwright.register
class Warm(Action):
  """An action of a user's own."""

  on = "train"

  def __init__(self, *, first: Annotated[int, "the first step.", fixed("over")] = 1, then=2):
    self.first, self.then = first, then


@loopwright.register
@may_change(free("reads there"))
class Reader:
  """A class with a rule of its own."""

  options = {"not": "a group"}

  def __init__(self, *, rows: Annotated[int, "of the file.", COUNT] = 1):
    self.rows = rows


@loopwright.register
class Other(Reader):
  """Its options are others."""

  def __init__(self, *, more: Annotated[int, "rows", "more"] = 1):
    super().__init__()
    self.more = more


@pytest.mark.parametrize(
  ("option", "rule"),
  [
    ("Warm.first", fixed("over")),
    ("x/Warm.first", fixed("over")),
    ("Warm.then", Action.may_change),
    ("Reader.rows", free("reads there")),
    ("Other.more", None),
    ("Missing.more", None),
    ("global batch size", None),
    ("keras.Adam.not_yet_known", asked("counts from there on")),
  ],
)
def test_the_rule_stands_at_the_option_or_at_what_takes_it(option, rule):
  assert changes.rule(option) == rule


def test_what_is_no_declaration_stays_in_the_annotation():
  assert signature(Other).parameters["more"].annotation == Annotated[int, "rows", "more"]
  assert signature(Reader).parameters["rows"].annotation is int
  assert declared(Reader)["rows"].meaning == "of the file."
  assert not declared(Other)


def test_a_config_is_checked_by_what_is_declared():
  examined = configurables.examine([], ["Reader.rows = 0", "run.hang_timeout_s = -1.0"])
  found = [str(each.error) for each in examined.mistakes if each.kind == "values"]
  assert "Reader.rows is 0; it must be a whole number of at least 1." in found[0]
  assert "run.hang_timeout_s is -1.0; it must be above 0 seconds." in found[1]


def test_run_takes_all_options_and_says_what_they_mean():
  assert {*declared(run)} == {*inspect.signature(run).parameters} == {*declared(Options)}
  for name, option in declared(run).items():
    assert option.meaning.endswith("."), name
    assert option.may_change, name
    assert f"\n    {name}: {option.meaning[:20]}" in run.__doc__


def test_a_wrong_call_of_run_names_run():
  with one_line_error(r"run\(\) takes no modle_dir; see .*Did you mean 'model_dir'\?"):
    run(modle_dir="m")
  with one_line_error(r"run\(\) takes its arguments by name and needs model_dir=..., task=..."):
    loopwright.run(object())
  with one_line_error(r"run\(\) takes no epochs; set run\(train_epochs="):
    run(epochs=3)
  with one_line_error("unknown run.mode 'trian'; it must be one of .* Did you mean 'train'?"):
    run(task=None, model_dir="m", train_steps=1, global_batch_size=1, mode="trian")


def test_a_group_checks_itself():
  assert issubclass(Options, Group)
  with one_line_error("run.seed is -1; it must be a whole number from 0 to 2147483647"):
    run(task=None, model_dir="m", train_steps=1, global_batch_size=1, seed=-1)
