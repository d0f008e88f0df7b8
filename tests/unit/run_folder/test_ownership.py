"""One owner of a run folder at a time; after a kill the next one has it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loopwright.errors import ConfigError
from loopwright.run_folder import ownership
from loopwright.run_folder.folders import Run
from loopwright.run_folder.ownership import owned

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.setattr(ownership, "PATIENCE_S", 0.1)


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "metrics.jsonl").touch()
  return str(tmp_path)


def record(folder):
  return json.loads(Path(folder, "owner.json").read_text())


def test_the_second_is_refused_and_told_about_the_first(folder):
  with owned(folder):
    first = record(folder)
    assert (first["host"], first["process"]) == (os.uname().nodename, os.getpid())
    told = rf"{folder}.* is in use by process {os.getpid()} on {first['host']}, started .*; wait "
    with pytest.raises(ConfigError, match=told), owned(folder):
      pass
    assert record(folder) == first
    assert Run(folder).status() == "running"
  assert not Path(folder, "owner.json").exists()
  assert Run(folder).status() == "stopped"
  with owned(folder):
    assert record(folder)["token"] != first["token"]


def test_a_run_that_fails_gives_the_folder_back(folder):
  with pytest.raises(ZeroDivisionError), owned(folder):
    raise ZeroDivisionError
  with owned(folder):
    pass


def test_of_many_at_once_one_owns(folder, monkeypatch):
  """Several threads, as flock tells open files apart; each tries until it has had its turn."""
  monkeypatch.setattr(ownership, "PATIENCE_S", 0)
  owners, most, refusals, done, lock = [0], [0], [0], [0], threading.Lock()

  def turn():
    while True:
      try:
        with owned(folder):
          with lock:
            owners[0] += 1
            most[0] = max(most[0], owners[0])
          time.sleep(0.002)
          with lock:
            owners[0] -= 1
            done[0] += 1
          return
      except ConfigError:
        refusals[0] += 1

  threads = [threading.Thread(target=turn) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert (most[0], done[0]) == (1, 8)
  assert refusals[0] > 0


OWNER = """
import sys, time
from loopwright.run_folder.ownership import owned
with owned(sys.argv[1]):
  print(flush=True)
  time.sleep(60)
"""


@pytest.mark.whole
def test_a_killed_owner_is_followed_at_once(folder):
  process = subprocess.Popen(
    [sys.executable, "-c", OWNER, folder], stdout=subprocess.PIPE, cwd=REPOSITORY
  )
  process.stdout.readline()
  with pytest.raises(ConfigError, match=f"process {process.pid} "), owned(folder):
    pass
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert Run(folder).status() == "failed"
  with owned(folder):
    assert record(folder)["process"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[]", "\0\0", '"x"', '{"process": 1}'])
def test_a_damaged_record_is_no_owner_and_an_owner_without_a_record_has_no_name(folder, content):
  Path(folder, "owner.json").write_text(content)
  with owned(folder):
    assert record(folder)["process"] == os.getpid()
    Path(folder, "owner.json").write_text(content)
    with pytest.raises(ConfigError, match="is in use by another process; wait"), owned(folder):
      pass


def test_a_record_that_another_wrote_ends_the_run(folder):
  with owned(folder) as owner:
    owner.require()
    other = {**record(folder), "token": "t", "process": 7, "host": "far"}
    Path(folder, "owner.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="process 7 on far"):
      owner.require()
  assert record(folder)["host"] == "far"
