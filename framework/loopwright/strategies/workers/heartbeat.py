"""Probes the processes of a cluster from a separate process, in which this module is the script.

A process that is stopped, or whose machine hangs, keeps its connections open. TensorFlow then waits
without a time limit, sometimes holding Python's lock, so no thread of the waiting process can act.
Therefore this process needs neither TensorFlow nor that lock. It ends with its parent, which holds
the other end of its standard input.

The kernel ignores SIGKILL to process 1 of a container, and every signal that it has no handler for.
So a parent that is process 1 calls `endable` first.

  python -P -m loopwright.strategies.workers.heartbeat TIMEOUT_S GRACE_S \
    '{"worker-1 (10.0.0.3:2222)": "10.0.0.3:2222", ...}'
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time

METHOD = "/tensorflow.WorkerService/GetStatus"
_POLL_S = 0.1
_END_S = 10.0
_END = signal.SIGRTMAX


def endable() -> None:
  """Lets a signal end this process if it is process 1, even while Python's lock is held.

  The handler is the C library's `_exit`, which gets the signal's number as the status.
  """
  if os.getpid() == 1:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(_END, ctypes.cast(libc._exit, ctypes.c_void_p))  # noqa: SLF001


def watch(addresses: dict[str, str], timeout_s: float, grace_s: float) -> None:
  """Prints the name of each peer that does not answer for `timeout_s`, and may kill the parent.

  The parent is killed if it still runs `grace_s` later and the peer still does not answer.

  A probe fails if the peer accepts the call and does not answer; TensorFlow itself detects a peer
  that exited. Two probes in a row must fail, so that a pause of this machine or process is not
  reported as the peer's failure.
  """
  import grpc

  ask = {
    name: grpc.insecure_channel(address).unary_unary(METHOD) for name, address in addresses.items()
  }
  asked = dict.fromkeys(addresses, (0.0, None))
  silences = dict.fromkeys(addresses, 0)
  told_at: dict[str, float] = {}
  parent = os.getppid()
  while not select.select([sys.stdin], [], [], _POLL_S)[0]:  # readable when the parent has exited
    now = time.monotonic()
    for name, (at, answer) in asked.items():
      if answer is not None and answer.done():
        silent = answer.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        silences[name] = silences[name] + 1 if silent else 0
        if not silent:
          told_at.pop(name, None)
        elif silences[name] > 1 and name not in told_at:
          told_at[name] = now
          print(name, flush=True)
        asked[name] = (at, None)
      elif answer is None and now - at >= timeout_s / 2:
        asked[name] = (now, ask[name].future(b"", timeout=timeout_s / 2))
    for name, at in told_at.items():
      if now - at > grace_s:
        line = f"failed: lost {name}, which has not answered for {timeout_s:g} s"
        print(f"{line}; killing the chief, which waits for it", file=sys.stderr, flush=True)
        end(parent)
        return


def end(parent: int) -> None:
  """Kills the parent, and says so if it has not ended within `_END_S`."""
  number = _END if parent == 1 else signal.SIGKILL
  if os.getppid() == parent:  # else it has ended, and this process has another parent
    os.kill(parent, number)
  if not select.select([sys.stdin], [], [], _END_S)[0]:
    print(
      f"process {parent}, the chief, still runs {_END_S:g} s after {signal.Signals(number).name}; "
      "end it from outside, and start it under an init, such as tini or docker run --init",
      file=sys.stderr,
      flush=True,
    )


if __name__ == "__main__":
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # the parent handles them, and this process ends with it
  del sys.path[0]  # this folder, whose modules must not be imported as top-level names
  watch(json.loads(sys.argv[3]), timeout_s=float(sys.argv[1]), grace_s=float(sys.argv[2]))
