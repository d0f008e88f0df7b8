"""One owner of a run folder at a time: on this machine, on others, after a kill, after a reboot."""

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
from loopwright.host import files
from loopwright.run_folder import ownership
from loopwright.run_folder.ownership import owned

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.setattr(ownership, "BEAT_S", 0.02)
  monkeypatch.setattr(ownership, "PATIENCE_S", 0.3)
  monkeypatch.setattr(ownership, "LEASE_S", 0.3)


@pytest.fixture
def folder(tmp_path):
  return str(tmp_path)


def record(folder):
  return json.loads(Path(folder, "owner.json").read_text())


def write(folder, **changes):
  """Writes the record of an owner on another machine; as it does, never a part of it."""
  values = {"host": "far", "boot": "b", "process": 7, "started": "then", "command": "c",
            "token": "t", "beat": "000000000001"}  # fmt: skip
  path = Path(folder, "owner.json")
  path.touch()
  with path.open("r+b") as file:
    file.write(json.dumps({**values, **changes}).encode())
    file.truncate()


@pytest.fixture(params=["locks", "no locks"])
def locks(request, monkeypatch):
  if request.param == "no locks":
    monkeypatch.setattr(files, "lock", lambda *_, **__: False)


def test_the_second_is_refused_and_told_about_the_first(folder, locks):
  with owned(folder):
    first = record(folder)
    assert (first["host"], first["process"]) == (os.uname().nodename, os.getpid())
    told = rf"{folder}.* is in use by process {os.getpid()} on {first['host']}, started .*; wait "
    with pytest.raises(ConfigError, match=told), owned(folder):
      pass
    assert record(folder)["token"] == first["token"]
  assert not Path(folder, "owner.json").exists()
  with owned(folder):
    assert record(folder)["token"] != first["token"]


def test_a_run_that_fails_gives_the_folder_back(folder):
  with pytest.raises(ZeroDivisionError), owned(folder):
    raise ZeroDivisionError
  with owned(folder):
    pass


def test_of_many_at_once_one_owns(folder):
  """Several threads, as flock tells open files apart; each tries until it has had its turn."""
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
import os, sys, time
from loopwright.run_folder.ownership import owned
with owned(sys.argv[1]):
  if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
  time.sleep(60)
"""


@pytest.mark.whole
def test_a_killed_owner_is_followed_at_once_even_if_its_child_lives(folder):
  process = subprocess.Popen(
    [sys.executable, "-c", OWNER, folder], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
  )
  child = int(process.stdout.readline())
  with pytest.raises(ConfigError, match=f"process {process.pid} "), owned(folder):
    pass
  process.kill()
  process.wait()
  began = time.monotonic()
  with owned(folder):
    assert time.monotonic() - began < ownership.PATIENCE_S
    os.kill(child, 0)  # it is still there
  os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("left", [{}, {"boot": ""}, {"host": os.uname().nodename}])
def test_a_silent_owner_of_another_machine_or_boot_is_dead(folder, locks, left):
  write(folder, **left)
  began = time.monotonic()
  with owned(folder):
    assert time.monotonic() - began >= ownership.PATIENCE_S
    assert record(folder)["process"] == os.getpid()


def test_an_owner_of_another_machine_lives_while_its_beat_grows(folder, locks):
  write(folder)
  timer = threading.Timer(0.1, lambda: write(folder, beat="000000000002"))
  timer.start()
  with pytest.raises(ConfigError, match=r"in use by process 7 on far, started then \(c\)"):
    ownership.Owner(folder).claim()
  assert record(folder)["token"] == "t"


@pytest.mark.parametrize("content", ["", "{", "[]", "\0\0", '"x"'])
def test_a_damaged_record_is_no_owner(folder, content):
  Path(folder, "owner.json").write_text(content)
  with owned(folder):
    assert record(folder)["process"] == os.getpid()


def test_an_owner_that_was_stopped_too_long_notices(folder, monkeypatch):
  """Without locks, another process may take over; then this one must not go on."""
  monkeypatch.setattr(files, "lock", lambda *_, **__: False)
  with owned(folder) as owner:
    owner.require()
    write(folder)
    time.sleep(0.2)
    with pytest.raises(ConfigError, match="process 7 on far"):
      owner.require()
  assert record(folder)["host"] == "far"


def test_the_lock_of_a_silent_owner_elsewhere_is_waited_for(folder):
  """NFS keeps the lock of a dead machine for a while."""
  write(folder)
  with open(os.path.join(folder, "owner.json")) as other:
    assert files.lock(other.fileno())
    with pytest.raises(ConfigError, match="process 7 on far"), owned(folder):
      pass
    timer = threading.Timer(0.1, other.close)
    timer.start()
    with owned(folder):
      assert not timer.is_alive()
