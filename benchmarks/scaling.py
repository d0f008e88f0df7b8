"""Predicts the step time of a task on 2 to 4,096 workers, and says what to change first.

    python -m benchmarks.scaling --gin_file=mine.gin               # on each of two or more workers
    python -m benchmarks.scaling --gin_file=mine.gin --link=50,10  # on one; 50 us, 10 Gbit/s

On the workers of the config's strategy it times steps with the whole and half the batch, and
all-reduces of several sizes; it fits the compute time and the link to them. On one replica the link
is given. docs/scaling.md has the formulas, the assumptions and how far they were checked.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

WORKERS = tuple(2**power for power in range(1, 13))
GOOD = 0.9
BACKWARD = 2 / 3
"""The share of the backward pass in the time of forward and backward pass."""
ROUNDS, BLOCK_S, LEAST = 3, 0.5, 4
_SMALLEST_BYTES = 4096


class Link(NamedTuple):
  """Time of one message: `latency_s` + bytes x `s_per_byte` (alpha and beta)."""

  latency_s: float
  s_per_byte: float

  @classmethod
  def parsed(cls, text: str) -> Link:
    """Returns the link of "MICROSECONDS,GBIT_PER_SECOND"."""
    latency_us, gbit = map(float, text.split(","))
    return cls(latency_us * 1e-6, 8e-9 / gbit)

  def __str__(self) -> str:
    """Returns "50 us, 10 Gbit/s"."""
    return f"{1e6 * self.latency_s:.3g} us, {8e-9 / self.s_per_byte:.3g} Gbit/s"


class Work(NamedTuple):
  """What one worker computes and sends in a step.

  Attributes:
    fixed_s: seconds that do not depend on the batch, such as the update.
    example_s: seconds of the forward and backward pass per example.
    examples: examples per worker and step.
    size: bytes of the gradients, in the dtype of the wire.
  """

  fixed_s: float
  example_s: float
  examples: float
  size: float

  @property
  def passes_s(self) -> float:
    """Seconds of the forward and backward pass."""
    return self.example_s * self.examples


Reduce: TypeAlias = Callable[[float], float]
"""Bytes -> seconds of an all-reduce, or of what takes its place."""


# ---- The formulas ----


def ring(size: float, workers: int, link: Link) -> float:
  """Reduce-scatter and all-gather in a ring: 2 (n - 1) messages of size / n, one after another.

  Workers of TensorFlow ask for each message; they wait for the first request, not for the others.
  """
  messages = 2 * (workers - 1)
  asks = 1 if messages else 0
  return (messages + asks) * link.latency_s + messages * size / workers * link.s_per_byte


def halving(size: float, workers: int, link: Link) -> float:
  """Rabenseifner's recursive halving and doubling: fewer, larger messages than a ring."""
  messages = 2 * math.ceil(math.log2(workers)) * link.latency_s
  return messages + 2 * (workers - 1) / workers * size * link.s_per_byte


def hierarchical(size: float, hosts: int, per_host: int, inside: Link, between: Link) -> float:
  """Reduce-scatter in each host, rings over the hosts, all-gather in each host.

  The devices of a host send their parts at the same time and share its link, so the rings over the
  hosts take as long as one ring of the whole.
  """
  return ring(size, per_host, inside) + ring(size, hosts, between)


def parameter_server(size: float, workers: int, servers: int, link: Link) -> float:
  """All workers push their gradients at the same time and then pull the weights."""
  return 2 * (link.latency_s + size * link.s_per_byte * max(1.0, workers / servers))


def asynchronous_s(work: Work, workers: int, servers: int, link: Link) -> float:
  """Seconds per step of a worker that waits for no other: the longer of its own and the servers'.

  In a step it pulls, computes and pushes. Links carry both directions at once.
  """
  own = work.fixed_s + work.passes_s + parameter_server(work.size, 1, 1, link)
  return max(own, work.size * link.s_per_byte * workers / servers)


def step_s(
  work: Work, reduce: Reduce, *, accumulation: int = 1, buckets: int = 1, every: int = 1
) -> float:
  """Seconds of one update.

  Args:
    work: of one worker; `examples` and `passes_s` are those of a micro-batch.
    reduce: the time of communication.
    accumulation: micro-batches per update.
    buckets: equal parts of the gradients; each is sent as soon as the (last) backward pass has
      computed it and the part before it is there. 1 sends all after the backward pass.
    every: updates between two communications, as in local SGD.
  """
  passes = accumulation * work.passes_s
  part = reduce(work.size / buckets)
  late_link = passes + part  # the last bucket waits for the backward pass
  late_passes = passes - BACKWARD * work.passes_s * (1 - 1 / buckets) + buckets * part
  waits = max(late_link, late_passes) - passes
  return work.fixed_s + passes + waits / every


def efficiency(work: Work, step: float, *, times: float = 1.0) -> float:
  """Examples per second and worker, relative to one worker alone, if a step has `times` as many."""
  return times * (work.fixed_s + work.passes_s) / step


# ---- What to change ----


class Change(NamedTuple):
  """A way to lose less time, with its predicted efficiency."""

  what: str
  efficiency: float


class Cluster(NamedTuple):
  """So many workers on links; `per_host` of them share a host, joined by `inside`."""

  workers: int
  link: Link
  per_host: int = 1
  inside: Link | None = None

  def ring(self, size: float) -> float:
    """Returns the seconds of a flat ring."""
    return ring(size, self.workers, self.link)

  def hierarchical(self, size: float) -> float:
    """Returns the seconds of rings in the hosts and one over them."""
    assert self.inside is not None
    hosts = max(1, self.workers // self.per_host)
    return hierarchical(size, hosts, min(self.per_host, self.workers), self.inside, self.link)


def changes(work: Work, cluster: Cluster) -> list[Change]:
  """Returns what can be changed, from what leaves the result as it is to what changes most."""
  link, workers, reduce = cluster.link, cluster.workers, cluster.ring
  sent, count = min((step_s(work, reduce, buckets=count), count) for count in (2, 4, 8))
  found = [(f"{count} buckets: Reduction.packing and bytes_per_pack (same sums)", sent, 1.0)]
  if cluster.inside:
    found += [("hierarchical all-reduce (same sums)", step_s(work, cluster.hierarchical), 1.0)]
  tree = step_s(work, lambda size: halving(size, workers, link))
  found += [("halving and doubling, or a tree, as NCCL can (same sums)", tree, 1.0)]
  half = step_s(work._replace(size=work.size / 2), reduce)
  found += [("Reduction.wire_dtype = 'bfloat16' (rounds gradients)", half, 1.0)]
  larger = work._replace(examples=2 * work.examples)
  found += [("twice the batch per worker (memory; larger global batch)", step_s(larger, reduce), 2)]
  more = step_s(work, reduce, accumulation=4)
  found += [("4 times the batch, by accumulation_steps (larger global batch)", more, 4)]
  return [Change(what, efficiency(work, seconds, times=times)) for what, seconds, times in found]


def algorithms(work: Work, cluster: Cluster) -> list[Change]:
  """Returns other algorithms: their examples per second do not say how well they learn."""
  servers = max(1, cluster.workers // 4)
  alone = asynchronous_s(work, cluster.workers, servers, cluster.link)
  seldom = step_s(work, cluster.ring, every=8)
  return [
    Change(f"asynchronous, {servers} parameter servers", efficiency(work, alone)),
    Change("local SGD, a sum every 8 steps (not in Loopwright)", efficiency(work, seldom)),
  ]


def first(own: float, found: Sequence[Change]) -> Change | None:
  """Returns the first change that reaches GOOD, or GOOD of the best; None if `own` reaches it."""
  enough = GOOD * min(1.0, max(own, *(change.efficiency for change in found)))
  return None if own >= enough else next(each for each in found if each.efficiency >= enough)


# ---- The fit ----


def fitted_link(sizes: Sequence[float], seconds: Sequence[float], workers: int) -> Link:
  """Fits a link to ring all-reduces (bytes, seconds) by the least squares of relative errors."""
  sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
  slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
  if start < 0:  # noise: a message cannot take less than no time
    start, slope = 0.0, np.sum(sizes / seconds) / np.sum((sizes / seconds) ** 2)
  messages = 2 * (workers - 1)
  return Link(start / (messages + 1), slope * workers / messages)


def fitted_work(
  examples: Sequence[float], seconds: Sequence[float], *, size: float, communication_s: float
) -> Work:
  """Fits the compute time to steps with two batches, the first of which is the config's."""
  (own, other), (own_s, other_s) = examples, seconds
  compute = max(own_s - communication_s, 0.0)
  example_s = min(max((own_s - other_s) / (own - other), 0.0), compute / own)
  return Work(compute - own * example_s, example_s, own, size)


class Fitted(NamedTuple):
  """What was measured on the user's task and links.

  Attributes:
    work: of one worker.
    link: of a ring over the replicas; None on one replica.
    replicas: of the strategy, when it was measured.
    sizes: bytes of the all-reduces that were timed.
    seconds: of each.
    cluster: the processes that measured.
  """

  work: Work
  link: Link | None
  replicas: int
  sizes: list[int]
  seconds: list[float]
  cluster: Any


def fitted(files: Sequence[str], params: Sequence[str]) -> Fitted:
  """Measures a config on its strategy; every worker of a cluster calls it (host).

  Raises:
    ConfigError: a mistake in the config.
  """
  from loopwright import configurables
  from loopwright.runs import from_config as runs
  from loopwright.tools import tune

  configurables.parse(files, params)
  per_replica = runs.bound("per_replica_batch_size")
  name = "per_replica_batch_size" if per_replica else "global_batch_size"
  batch = per_replica or runs.bound("global_batch_size")
  contest = tune.Contest(files, params, rounds=2, block_s=0)  # 0: all workers run as many steps
  own = contest.contender({}).trainer
  replicas, size = own.strategy.num_replicas_in_sync, gradient_bytes(own)
  link, sizes, reduced = None, [], []
  if replicas > 1:
    sizes = sizes_up_to(size)
    reduced = [reduce_s(own, s) for s in sizes]
    link = fitted_link(sizes, reduced, replicas)
  other = batch // 2 or 2
  trainers = [own, contest.contender({f"run.{name}": other}).trainer]
  examples = [b if per_replica else b / replicas for b in (batch, other)]
  work = fitted_work(
    examples,
    [measured_step_s(trainer) for trainer in trainers],
    size=size,
    communication_s=float(np.interp(size, sizes, reduced)) if link else 0.0,
  )
  return Fitted(work, link, replicas, sizes, reduced, own.cluster)


def sizes_up_to(size: int) -> list[int]:
  """Returns the bytes of the all-reduces to time, for gradients of `size` bytes."""
  return [int(s) for s in np.geomspace(_SMALLEST_BYTES, max(size, 16 * _SMALLEST_BYTES), 5)]


def gradient_bytes(trainer: Any) -> int:
  """Returns the bytes of all gradients on the wire."""
  wire = trainer.parts.reduction.wire_dtype
  variables = [v for o in trainer.parts.optimizers.values() for v in o.variables]
  return sum(math.prod(v.shape) * (wire or _dtype(v)).size for v in variables)


def _dtype(variable: Any) -> Any:
  import tensorflow as tf

  return tf.as_dtype(variable.dtype)


def measured_step_s(trainer: Any) -> float:
  """Returns the seconds of a step; every worker calls it (host)."""
  import tensorflow as tf

  return _seconds(trainer.cluster, lambda steps: trainer.train(tf.constant(steps)))


def reduce_s(trainer: Any, size: int) -> float:
  """Returns the seconds of an all-reduce of so many bytes; every worker calls it (host)."""
  import tensorflow as tf

  strategy, reduction = trainer.strategy, trainer.parts.reduction
  elements = size // (reduction.wire_dtype or tf.float32).size

  def replica(value: tf.Tensor) -> tf.Tensor:
    [summed], _ = reduction.all_reduce([tf.fill([elements], value)], [])
    return 0.0 * summed[0]

  @tf.function
  def loop(count: tf.Tensor) -> tf.Tensor:
    value = tf.constant(0.0)
    for _ in tf.range(count):  # each waits for the one before
      value = strategy.experimental_local_results(strategy.run(replica, args=(value,)))[0]
    return value

  return _seconds(trainer.cluster, lambda count: float(loop(tf.constant(count))))


def _seconds(cluster: Any, run: Callable[[int], Any]) -> float:
  """Returns the median seconds of one more in `run(count)`, without what each call costs once."""

  def timed(count: int) -> float:
    cluster.barrier()
    began = time.perf_counter()
    run(count)
    return time.perf_counter() - began

  timed(1)  # traces
  wanted = max(LEAST, round(BLOCK_S / (timed(3) - timed(1)) * 2))
  count = cluster.sum(wanted if cluster.is_chief else 0)
  return statistics.median((timed(1 + count) - timed(1)) / count for _ in range(ROUNDS))


# ---- The report ----


def report(work: Work, link: Link, *, workers: int, per_host: int, inside: Link | None) -> str:
  """Returns the table of workers and the changes at `workers`, as text."""
  at = {n: Cluster(n, link, per_host, inside) for n in (*WORKERS, workers)}
  lines = [
    f"compute {1e3 * work.fixed_s:.3g} ms + {1e3 * work.passes_s:.3g} ms for {work.examples:g} "
    f"examples per worker; gradients {work.size / 1e6:.3g} MB; link {link}",
    "",
    "| workers | step, ms | communication, ms | efficiency |",
    "|---|---|---|---|",
  ]
  for n in WORKERS:
    step = step_s(work, at[n].ring)
    sent = at[n].ring(work.size)
    lines += [f"| {n} | {1e3 * step:.4g} | {1e3 * sent:.4g} | {efficiency(work, step):.2f} |"]
  own = efficiency(work, step_s(work, at[workers].ring))
  found = changes(work, at[workers])
  lines += ["", f"efficiency at {workers} workers:", f"  {own:.2f}  as configured, one ring"]
  lines += [f"  {change.efficiency:.2f}  {change.what}" for change in found]
  lines += ["another algorithm:"]
  lines += [f"  {each.efficiency:.2f}  {each.what}" for each in algorithms(work, at[workers])]
  best = first(own, found)
  lines += [f"change first: {best.what if best else f'nothing, it is {GOOD} or more'}"]
  return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
  """Measures, fits and prints; returns 0."""
  options = _parse(arguments)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  found = fitted(options.gin_file, options.gin_param)
  link = options.link or found.link
  if link is None:
    raise SystemExit(
      "the config's strategy has one replica, so there is no link to measure; start this on the "
      "workers of a multi_worker_mirrored config, or give --link=MICROSECONDS,GBIT_PER_SECOND."
    )
  if found.cluster.is_chief:
    for size, seconds in zip(found.sizes, found.seconds, strict=True):
      fit = ring(size, found.replicas, found.link)
      print(f"all-reduce of {size} bytes: {1e3 * seconds:.3g} ms, fit {1e3 * fit:.3g} ms")
    where = {"per_host": options.per_host, "inside": options.inside}
    print(report(found.work, link, workers=options.workers, **where), flush=True)
  found.cluster.leave()
  return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--gin_file", action="append", required=True, help="as for launch.py")
  parser.add_argument("--gin_param", action="append", default=[], help="as for launch.py")
  pair = "MICROSECONDS,GBIT_PER_SECOND"
  parser.add_argument("--link", type=Link.parsed, metavar=pair, help="instead of measuring")
  parser.add_argument("--inside", type=Link.parsed, metavar=pair, help="the link inside a host")
  parser.add_argument("--per_host", type=int, default=8, help="workers on a host, with --inside")
  parser.add_argument("--workers", type=int, default=64, help="for which changes are compared")
  return parser.parse_args(arguments)


if __name__ == "__main__":
  sys.exit(main())
