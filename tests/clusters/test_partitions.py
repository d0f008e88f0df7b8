"""Workers' meetings over networks that lose, delay and cut."""

import concurrent.futures
import re

import pytest

from benchmarks import network
from benchmarks.hostile_meeting import ALIKE, SECRET
from loopwright.distribution.cluster import Peer
from loopwright.strategies.workers import meeting

pytestmark = pytest.mark.whole


@pytest.fixture
def three():
  if reason := network.available():
    pytest.skip(f"no network namespaces can be made: {reason}")
  with network.Network(3) as joined:
    yield joined


def lines(joined, *, timeout_s):
  """What each of three workers raises, or None; each is a thread in its own namespace."""
  peers = [Peer("worker", index, f"{host}:2222") for index, host in enumerate(joined.hosts)]

  def one(index):
    network.enter(joined.name(index))
    try:
      meeting.meet(peers, index, ALIKE, secret=SECRET, timeout_s=timeout_s)
    except Exception as error:
      return re.sub(r" \([\d.]+:\d+\)", "", str(error))
    return None

  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    return list(pool.map(one, range(3)))


def test_packets_that_are_lost_and_late_are_no_failure(three):
  three.link(0, 1, loss=0.1)
  three.link(0, 2, delay_s=0.1)
  assert lines(three, timeout_s=20.0) == [None] * 3


@pytest.mark.parametrize("one_way", [False, True])
def test_who_is_cut_off_is_named(one_way, three):
  three.one_way(2, 0, loss=1.0) if one_way else three.cut(2)
  missing = "worker-2 did not connect within 1.5 s"
  assert lines(three, timeout_s=1.5) == [missing] * 2 + ["worker-0 did not answer within 1.5 s"]
