"""Lines of the log with their time, or as JSON."""

import datetime
import json
import logging
import sys

from absl import logging as absl_logging

from loopwright import commands
from loopwright.host import stamps


def is_now(text):
  at = datetime.datetime.fromisoformat(text)
  return abs((datetime.datetime.now().astimezone() - at).total_seconds()) < 60


def test_each_line_is_an_object_with_time_stream_and_text(capsys):
  before = sys.stdout, sys.stderr
  with stamps.stamped("json"):
    print("one\ntwo", end=' "')
    print("three\x1b")
    print("four", file=sys.stderr, end="")
    assert not sys.stdout.isatty()
  lines = [[json.loads(line) for line in each.splitlines()] for each in capsys.readouterr()]
  assert [[line["text"] for line in each] for each in lines] == [
    ["one", 'two "three\x1b'],
    ["four"],
  ]
  assert [[line["stream"] for line in each] for each in lines] == [["stdout"] * 2, ["stderr"]]
  assert all(is_now(line["time"]) for each in lines for line in each)
  assert (sys.stdout, sys.stderr) == before


def test_the_time_is_before_each_line_and_plain_changes_nothing(capsys):
  with stamps.stamped("plain"):
    print("as it is")
  with stamps.stamped("time"):
    print("later")
  first, second = capsys.readouterr().out.splitlines()
  assert first == "as it is"
  at, _, text = second.partition(" ")
  assert is_now(at)
  assert text == "later"


def test_a_logger_that_closes_its_stream_does_not_close_ours(capsys):
  with stamps.stamped("time"):
    handler = logging.StreamHandler(sys.stderr)
    absl = absl_logging.PythonHandler(sys.stderr)
  handler.emit(logging.makeLogRecord({"msg": "afterwards"}))
  absl.close()
  print("open", file=sys.stderr)
  assert capsys.readouterr().err.endswith(" afterwards\nopen\n")


def test_the_flag_stamps_the_line_of_an_error_too(capsys):
  status = commands.main(["loopwright", "train", "nothing.gin", "--log_format=json"])
  assert status == 2
  assert json.loads(capsys.readouterr().err)["text"].startswith("error: ")
