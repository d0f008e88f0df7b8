"""The control plane with many peers on one machine: seconds, memory and messages at worker 0.

  uv run python -m benchmarks.control_plane --peers 125 250 500 1000

The peers are stand-ins that speak the same protocols, threads of a few processes:

  meeting    all workers meet worker 0, which compares 200 facts of each, with and without a secret
  heartbeat  the process that asks every peer whether it is alive; then one peer falls silent
  ledger     the proof that merges the records of all workers, 2,000 steps each

The agreement on SIGTERM is a sum over all workers by TensorFlow, which needs its own processes; not
measured here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

FACTS = 200
STEPS = 2000
PROCESSES = 4
LIMIT_S = 10.0
HEARTBEAT = (
  Path(__file__).parents[1] / "framework" / "loopwright" / "strategies" / "cluster" / "heartbeat.py"
)


def ports(count: int) -> list[int]:
  """Returns free ports, below those that the system gives to clients."""
  return random.sample(range(12000, 32000), count)


# ---- The meeting ----


def meeting(peers: int, *, secret: bytes | None) -> dict[str, Any]:
  from loopwright.kinds.workers import meeting as meetings
  from loopwright.strategies.cluster import Peer

  cluster = [Peer("worker", n, f"127.0.0.1:{port}") for n, port in enumerate(ports(peers))]
  facts = {f"fact {n}": f"value {n}" for n in range(FACTS)}
  shares = [range(1 + n, peers, PROCESSES) for n in range(PROCESSES)]
  context = multiprocessing.get_context("fork")
  ends = context.Queue()
  others = [context.Process(target=_workers, args=(cluster, each, facts, secret, ends))
            for each in shares]  # fmt: skip
  for other in others:
    other.start()
  sent = _Counted(meetings)
  began = time.perf_counter()
  meetings.meet(cluster, 0, facts, secret=secret, timeout_s=120)
  seconds = time.perf_counter() - began
  wrong = sum(ends.get() for _ in others)
  everyone = time.perf_counter() - began
  for other in others:
    other.join()
  assert wrong == 0, f"{wrong} workers did not meet"
  return {"seconds": seconds, "everyone": everyone, "messages": sent.count, "MiB": _resident()}


def _workers(cluster: Any, indices: range, facts: Any, secret: bytes | None, ends: Any) -> None:
  from loopwright.kinds.workers import meeting as meetings

  failed: list[str] = []

  def one(index: int) -> None:
    try:
      meetings.meet(cluster, index, facts, secret=secret, timeout_s=120)
    except Exception as error:
      failed.append(str(error))

  threading.stack_size(256 * 1024)
  threads = [threading.Thread(target=one, args=(index,)) for index in indices]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  ends.put(len(failed))


class _Counted:
  """Counts the messages that this process sends and receives."""

  def __init__(self, meetings: Any) -> None:
    self.count = 0
    for name in ("send", "receive"):
      setattr(meetings.wire, name, self._counting(getattr(meetings.wire, name)))

  def _counting(self, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
      self.count += 1
      return function(*args, **kwargs)

    return call


def _resident(process: int | str = "self") -> float:
  for line in Path(f"/proc/{process}/status").read_text().splitlines():
    if line.startswith("VmHWM"):
      return int(line.split()[1]) / 1024
  return float("nan")


# ---- The heartbeat ----


def heartbeat(peers: int, *, timeout_s: float = 4.0) -> dict[str, Any]:
  import grpc

  silent, count, release = threading.Event(), [0], threading.Event()

  class Status(grpc.GenericRpcHandler):
    def service(self, call: Any) -> Any:
      if not call.method.endswith("/GetStatus"):
        return None

      def answer(request: bytes, context: Any) -> bytes:
        del request, context
        count[0] += 1
        return b""

      return grpc.unary_unary_rpc_method_handler(answer)

  class Quiet(Status):
    def service(self, call: Any) -> Any:
      handler = super().service(call)

      def answer(request: bytes, context: Any) -> bytes:
        if silent.is_set():
          release.wait()
        return handler.unary_unary(request, context)

      return handler and grpc.unary_unary_rpc_method_handler(answer)

  chosen = ports(peers)
  servers = [grpc.server(futures.ThreadPoolExecutor(8)) for _ in range(2)]
  servers[0].add_generic_rpc_handlers((Status(),))
  servers[1].add_generic_rpc_handlers((Quiet(),))
  for port in chosen[1:]:
    servers[0].add_insecure_port(f"127.0.0.1:{port}")
  servers[1].add_insecure_port(f"127.0.0.1:{chosen[0]}")
  for server in servers:
    server.start()
  names = {f"worker-{n}": f"127.0.0.1:{port}" for n, port in enumerate(chosen)}
  command = [sys.executable, str(HEARTBEAT), str(timeout_s), "600", json.dumps(names)]
  watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  try:
    time.sleep(2 * timeout_s)
    before, began, cpu = count[0], time.perf_counter(), _cpu_s(watcher.pid)
    time.sleep(3 * timeout_s)
    seconds = time.perf_counter() - began
    share = (_cpu_s(watcher.pid) - cpu) / seconds
    asked = (count[0] - before) / seconds
    silent.set()
    began = time.perf_counter()
    assert watcher.stdout is not None
    name = watcher.stdout.readline().strip()
    found_s = time.perf_counter() - began
    assert name == "worker-0", name
    return {"found silent after s": found_s, "limit s": timeout_s, "calls/s": asked,
            "share of a core": share, "MiB": _resident(watcher.pid)}  # fmt: skip
  finally:
    release.set()
    watcher.kill()
    for server in servers:
      server.stop(0)


def _cpu_s(process: int) -> float:
  fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- The ledger ----


def ledger(peers: int) -> dict[str, Any]:
  import numpy as np
  import tensorflow as tf

  from loopwright.graphs.randomness import hashed
  from loopwright.tools.ledger import proof

  examples, batch = 100_000, peers
  with tempfile.TemporaryDirectory() as folder:
    for worker in range(peers):
      start = proof.Start(
        worker=worker, workers=peers, position=0, global_batch_size=batch,
        rows=(worker, worker + 1), num_examples=examples, seed=0, shuffle=False,
      )  # fmt: skip
      ids = (np.arange(STEPS, dtype=np.int64) * batch + worker) % examples
      hashes = hashed(tf.constant(ids), 0, proof.PURPOSE).numpy()
      digests = [int(each) for each in hashes.astype(np.uint64)]
      lines = [proof.start_line(0, start), proof.steps_line(1, [1] * STEPS, digests)]
      Path(folder, proof.file_name(worker)).write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "loopwright.tools.ledger", folder]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
  assert done.returncode == 0, done.stdout + done.stderr[-500:]
  return {"seconds": seconds, "records": peers * STEPS}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--peers", nargs="+", type=int, default=[125, 250, 500, 1000])
  parser.add_argument("--parts", nargs="+", default=["meeting", "secret", "heartbeat", "ledger"])
  given = parser.parse_args()
  parts = {
    "meeting": lambda peers: meeting(peers, secret=None),
    "secret": lambda peers: meeting(peers, secret=b"a secret of the cluster"),
    "heartbeat": heartbeat,
    "ledger": ledger,
  }
  for part in given.parts:
    for peers in given.peers:
      found = parts[part](peers)
      print(
        f"{part:10} {peers:5} ", ", ".join(f"{n} {v:.4g}" for n, v in found.items()), flush=True
      )


if __name__ == "__main__":
  main()
