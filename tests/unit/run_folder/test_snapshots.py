"""Copies in memory: when one is taken, and what a full memory costs."""

import errno

import pytest

from loopwright.run_folder import snapshots


class Cluster:
  """One worker, which need not ask others."""

  is_chief = True

  def any(self, flag):
    return flag


class Manager:
  """Counts saves; the third finds that the memory was full in the one before."""

  def __init__(self):
    self.saves = 0

  def save(self):
    self.saves += 1
    if self.saves == 3:
      raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(snapshots.time, "monotonic", lambda: now[0])
  return now


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
  monkeypatch.setenv("LOOPWRIGHT_SNAPSHOTS", str(tmp_path))


def test_a_copy_is_taken_about_once_a_second_until_the_memory_is_full(clock, caplog, tmp_path):
  manager = Manager()
  kept = snapshots.Snapshots(manager, Cluster(), start="s1")
  saves = []
  for now in (100.0, 100.9, 101.0, 101.5, 102.1, 103.2, 999.0):
    clock[0] = now
    kept.take()
    saves.append(manager.saves)
  assert saves == [1, 1, 2, 2, 3, 3, 3]
  assert "no more copies in memory, only checkpoints: " in caplog.text
  assert "No space left on device" in caplog.text
  assert (tmp_path / "starts").read_text() == "s1\n"


def test_another_worker_takes_one_when_the_chief_asks(clock):
  asked, manager = [], Manager()
  cluster = Cluster()
  cluster.is_chief, cluster.any = False, lambda flag: asked.append(flag) or True
  snapshots.Snapshots(manager, cluster, start="s1").take()
  assert (asked, manager.saves) == ([False], 1)
