"""The process that asks whether others live; servers that answer, or not, stand for theirs."""

import concurrent.futures
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest

from loopwright.distribution.cluster import ClusterError, Peer
from loopwright.strategies.parameter_server import servers
from loopwright.strategies.workers import heartbeat as probes

TIMEOUT_S = 0.6


class Answering:
  """Answers GetStatus while `awake` is set."""

  def __init__(self):
    self.awake = threading.Event()
    self.awake.set()

  def service(self, call):
    if call.method != "/tensorflow.WorkerService/GetStatus":
      return None

    def answer(request, context):
      del request, context
      self.awake.wait()
      return b""

    return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def peer():
  """A peer that answers, and what puts it to sleep."""
  answering = Answering()
  server = grpc.server(concurrent.futures.ThreadPoolExecutor(8), handlers=(answering,))
  port = server.add_insecure_port("127.0.0.1:0")
  server.start()
  yield Peer("worker", 1, f"127.0.0.1:{port}"), answering.awake
  answering.awake.set()
  server.stop(None).wait()


@contextlib.contextmanager
def pulse_of(*peers, grace_s=60.0):
  pulse = servers.Pulse(peers, timeout_s=TIMEOUT_S, grace_s=grace_s)
  try:
    yield pulse
  finally:
    pulse.close()


def watched(pulse, seconds):
  """The line that check() raises within so many seconds, or None."""
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    try:
      pulse.check()
    except ClusterError as error:
      return str(error)
    time.sleep(0.01)
  return None


def test_a_peer_that_answers_is_not_named(peer):
  with pulse_of(peer[0]) as pulse:
    assert watched(pulse, 4 * TIMEOUT_S) is None


@pytest.mark.whole
def test_who_is_gone_is_left_to_tensorflow(peer):
  """A refused connection is no silence: a closure there fails at once, and runs elsewhere."""
  with pulse_of(Peer("worker", 0, "127.0.0.1:9")) as pulse:
    assert watched(pulse, 4 * TIMEOUT_S) is None


def test_a_silent_peer_is_named_among_others(peer):
  silent, awake = peer
  with pulse_of(silent, Peer("ps", 0, "127.0.0.1:9")) as pulse:
    assert watched(pulse, 2 * TIMEOUT_S) is None
    awake.clear()
    line = watched(pulse, 60)
  assert line == (
    f"lost {silent}, which has not answered for 0.6 s; start again to continue from the "
    "newest checkpoint"
  )


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()  # it waits, and does not look
"""


@contextlib.contextmanager
def parent_of(peer, *, grace_s):
  """A process with a heartbeat beside it that it does not listen to, and the heartbeat's pid."""
  heartbeat = [
    *servers._HEARTBEAT[1:],
    str(TIMEOUT_S),
    str(grace_s),
    json.dumps({str(peer): peer.address}),
  ]
  with subprocess.Popen(
    [sys.executable, "-c", PARENT, *heartbeat],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  ) as process:  # fmt: skip
    yield process, int(process.stdout.readline())
    process.kill()


def has_ended(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return True


def test_a_parent_that_waits_for_a_silent_peer_is_ended_with_its_name(peer):
  silent, awake = peer
  with parent_of(silent, grace_s=0.5) as (parent, _):
    awake.clear()
    assert parent.wait(60) == -signal.SIGKILL
    assert parent.stderr.read().splitlines()[-1] == (
      f"failed: lost {silent}, which has not answered for 0.6 s; killing the chief, which waits "
      "for it"
    )


FIRST_PROCESS = """
import ctypes, subprocess, sys
from loopwright.strategies.workers import heartbeat

if sys.argv.pop(1) == "endable":
  heartbeat.endable()
subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE)
ctypes.PyDLL(None).pause()  # holds Python's lock
"""
NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


@contextlib.contextmanager
def first_process(peer, kind):
  """A parent that is process 1 of its namespace, as in a container without an init."""
  done = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
  if done.returncode:
    pytest.skip(f"this system allows no namespace of processes: {done.stderr.strip()}")
  arguments = ["0.6", "0.5", json.dumps({str(peer): peer.address})]
  command = [
    *NAMESPACE,
    sys.executable,
    "-c",
    FIRST_PROCESS,
    kind,
    *servers._HEARTBEAT[1:],
    *arguments,
  ]
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
    yield process
    process.kill()


def test_a_parent_that_is_process_1_is_ended_too(peer):
  silent, awake = peer
  awake.clear()
  with first_process(silent, "endable") as parent:
    assert parent.wait(20) == signal.SIGRTMAX
    [line] = parent.stderr.read().splitlines()
  assert line.endswith("0.6 s; killing the chief, which waits for it")


@pytest.mark.whole
def test_a_process_1_that_cannot_be_ended_is_named_once(peer, monkeypatch, tmp_path):
  silent, awake = peer
  awake.clear()
  short = tmp_path / "heartbeat.py"
  with open(probes.__file__) as file:
    short.write_text(file.read().replace("_END_S = 10.0", "_END_S = 0.5"))
  monkeypatch.setattr(servers, "_HEARTBEAT", [sys.executable, str(short)])
  with first_process(silent, "not") as parent:
    lines = [parent.stderr.readline() for _ in range(2)]
    assert "killing the chief" in lines[0]
    assert lines[1].startswith("process 1, the chief, still runs 0.5 s after SIGRTMAX; end it from")
    time.sleep(1)
    parent.kill()
    assert parent.stderr.read() == ""


ENDING = """
import sys, time
from loopwright.strategies.parameter_server import servers
from loopwright.distribution.cluster import Peer

class Remote:
  def __del__(self):
    time.sleep(60)  # as TensorFlow does that frees what a silent worker holds

remote = Remote()
servers.Pulse([Peer("worker", 1, sys.argv[1])], timeout_s=0.6, grace_s=0.5)
print("ends", flush=True)
"""


@pytest.mark.whole
def test_a_parent_that_waits_for_a_silent_peer_while_it_ends_is_ended_too(peer):
  silent, awake = peer
  awake.clear()
  with subprocess.Popen(
    [sys.executable, "-c", ENDING, silent.address], stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout.readline() == "ends\n"
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.whole
def test_a_peer_that_answers_again_in_time_is_forgiven(peer):
  lively, awake = peer
  with parent_of(lively, grace_s=3.0) as (parent, _):
    awake.clear()
    time.sleep(4 * TIMEOUT_S)  # it has been named
    awake.set()
    with pytest.raises(subprocess.TimeoutExpired):
      parent.wait(5)


def test_it_ends_with_its_parent_however_that_ends(peer):
  for end in (signal.SIGKILL, None):
    with parent_of(peer[0], grace_s=60.0) as (parent, heartbeat):
      parent.send_signal(end) if end else parent.stdin.close()
      parent.wait(60)
      deadline = time.monotonic() + 10
      while not has_ended(heartbeat) and time.monotonic() < deadline:
        time.sleep(0.05)
      assert has_ended(heartbeat)


def test_it_needs_no_tensorflow():
  """A process of 10 MB beside a chief of a thousand."""
  command = [sys.executable, "-X", "importtime", *servers._HEARTBEAT[1:], "1", "1", json.dumps({})]
  done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
  assert done.returncode == 0
  assert "grpc" in done.stderr
  assert "tensorflow" not in done.stderr
