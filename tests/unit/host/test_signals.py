"""The first signal asks, a second Ctrl-C ends; what a run saves is in test_resume.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.host import signals

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def a_shells_foreground():
  before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
  yield
  signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_interrupts_and_the_first_is_explained_once():
  said, stop = [], signals.StopSignals()
  with stop.noticed(said.append):
    os.kill(os.getpid(), signal.SIGINT)
    assert (stop.number, stop.name) == (signal.SIGINT, "Ctrl-C")
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  assert said == [
    "Ctrl-C: saving after this loop of steps or evaluation batch; press it again to end at once"
  ]
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_another_signal_it_takes_two_presses_too():
  """One may come by mistake, 0.1 s later; the run is saving."""
  said, stop = [], signals.StopSignals()
  with stop.noticed(said.append):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGINT)
    assert (stop.number, stop.name) == (signal.SIGTERM, "SIGTERM")
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  assert len(said) == 1


def test_ignored_signals_stay_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    stop = signals.StopSignals()
    with stop.noticed(print):
      os.kill(os.getpid(), signal.SIGHUP)
      assert stop.number is None
  finally:
    signal.signal(signal.SIGHUP, before)


LONG_LOOP = """
import hashlib, signal
from loopwright.host import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.owns_process = True
with signals.StopSignals().noticed(lambda line: print(line, flush=True)):
  print("here", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # in C, as a compiled loop: no handler runs
"""


def test_a_second_ctrl_c_ends_a_process_in_compiled_code():
  process = subprocess.Popen(
    [sys.executable, "-c", LONG_LOOP],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
  )  # fmt: skip
  assert process.stdout.readline() == "here\n"
  began = time.monotonic()
  process.send_signal(signal.SIGINT)
  assert process.stdout.readline().startswith("Ctrl-C: saving after this loop")
  process.send_signal(signal.SIGINT)
  assert process.communicate(timeout=30)[1] == "interrupted\n"
  assert process.returncode == 130
  assert time.monotonic() - began < 20  # the loop takes minutes


def test_a_handler_of_sigterm_outlasts_c_code_that_takes_the_signal():
  code = """
import ctypes, os, signal
from loopwright.host import signals
came, nothing = [], ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
with signals.kept():
  ctypes.CDLL(None).signal(signal.SIGTERM, nothing)
  os.kill(os.getpid(), signal.SIGTERM)
  assert came == []
assert came == [1]
os.kill(os.getpid(), signal.SIGTERM)
assert came == [1, 1]
"""
  subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
