"""Asks the processes of a cluster whether they live, from a process of its own: not to be imported.

A process that is stopped, or whose machine hangs, keeps its connections. TensorFlow waits for it
for ever, and in places, as where it sends a new function to all workers, with Python's lock held,
so that no thread of the waiting process could notice. Hence a process beside it, which needs
neither TensorFlow nor that lock. It ends with its parent, whose pipe is its standard input.

  python heartbeat.py TIMEOUT_S GRACE_S '{"worker-1 (10.0.0.3:2222)": "10.0.0.3:2222", ...}'
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

METHOD = "/tensorflow.WorkerService/GetStatus"
_POLL_S = 0.1


def watch(addresses: dict[str, str], timeout_s: float, grace_s: float) -> None:
  """Writes the name of a peer that is silent for `timeout_s`; kills a parent that cannot read it.

  The parent has `grace_s` to end by itself, or the peer to answer again.

  Silent is who takes a question and does not answer it; TensorFlow itself notices who is gone. Two
  questions in a row must fail, so that nobody is taken for silent when the whole machine, or this
  process, was stopped.
  """
  import grpc

  ask = {
    name: grpc.insecure_channel(address).unary_unary(METHOD) for name, address in addresses.items()
  }
  asked = dict.fromkeys(addresses, (0.0, None))
  silences = dict.fromkeys(addresses, 0)
  told_at: dict[str, float] = {}
  while not select.select([sys.stdin], [], [], _POLL_S)[0]:  # readable once the parent has ended
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
        line = f"failed: lost {name}, which does not answer any more within {timeout_s:g} s"
        print(f"{line}; killed the chief, which waits for it", file=sys.stderr, flush=True)
        os.kill(os.getppid(), signal.SIGKILL)


if __name__ == "__main__":
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # they are for the parent, and this ends with it
  del sys.path[0]  # this folder: its modules are the framework's, not top-level names
  watch(json.loads(sys.argv[3]), timeout_s=float(sys.argv[1]), grace_s=float(sys.argv[2]))
