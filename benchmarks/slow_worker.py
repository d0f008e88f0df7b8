"""Measures how one slow worker affects the other, with parameter servers and synchronously.

  python -m benchmarks.slow_worker            # about 10 minutes
  python -m benchmarks.slow_worker --rounds 3

Two workers on loopback train the small CNN, once with a parameter server and once synchronously.
SIGSTOP and SIGCONT slow worker 1 to a tenth: it runs for one step's time in each ten. The phases
take turns, in a random order every round; a result is the ratio of two phases of a round:

  full     both at full speed
  control  the same again; the distance of its ratio from 1 shows the noise
  slowed   worker 1 is slowed
  busy     the same, and another process uses its core while it is stopped

A step mostly waits 10 ms for its batch, which uses no core, as with a slow disk or an accelerator,
so other programs disturb it little. Each worker is pinned to its own core; chief and server share
worker 1's. When worker 1 is slowed, the server answers worker 0 sooner, which may speed it up.
Therefore the phase "busy" keeps that core in use.

A worker's rate is the number of its own steps in a phase, counted on the server, over the time of
whole loops of `--steps_per_loop` steps, each of which ends when the slower worker's last step ends.
Exit status 1 if, with the server, worker 0 keeps less than 0.8 of its rate or worker 1 more than
0.2.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.tools import local_cluster

PHASES = ("full", "control", "slowed", "busy")
KINDS = {"servers": 1, "in_step": 0}  # parameter servers of each
TITLES = {"servers": "parameter server", "in_step": "in step"}
SLOWED = 1  # the worker
KEPT = 0.8
LEFT = 0.2
ROUNDS = 8
PHASE_S = 5.0
STEPS_PER_LOOP = 100  # the default of run.steps_per_loop
BATCH_SIZE = 8
BATCH_S = 0.01
SLOWDOWN = 10
_PATIENCE_S = 300.0
_TIMEOUT_S = 1500.0
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n  sum(range(10**5))"


def main(arguments: Sequence[str] | None = None) -> int:
  options = _parse(arguments)
  if options.folder:
    return work(options)
  if len(os.sched_getaffinity(0)) < 2:
    raise SystemExit("two workers need two cores.")
  results = {kind: _measure(kind, options) for kind in options.kinds}
  print(report(results))
  return 1 if wrong(results) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_worker", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
  parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default: %(default)s)")
  parser.add_argument("--phase_s", type=float, default=PHASE_S, help="minimum, per phase")
  parser.add_argument(
    "--steps_per_loop", type=int, default=STEPS_PER_LOOP, help="(default: %(default)s)"
  )
  parser.add_argument("--verbose", action="store_true", help="show TensorFlow's logs")
  parser.add_argument("--folder", help=argparse.SUPPRESS)  # makes this process one of a cluster
  return parser.parse_args(arguments)


def _measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
  os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "benchmarks.slow_worker", f"--folder={folder}"]
    command += [f"--kinds={kind}", f"--rounds={options.rounds}", f"--phase_s={options.phase_s}"]
    command += [f"--steps_per_loop={options.steps_per_loop}"]
    command += ["--verbose"] if options.verbose else []
    status = local_cluster.run_local(command=command, model_dir=folder, workers=2, ps=KINDS[kind])
    if status:
      raise SystemExit(f"the cluster ({kind}) ended with status {status}")
    return json.loads(Path(folder, "rates.json").read_text())


# --- a process of a cluster -------------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
  if not options.verbose:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
  warnings.simplefilter("ignore")
  task = json.loads(os.environ["TF_CONFIG"])["task"]
  cores = sorted(os.sched_getaffinity(0))
  worker = task["index"] if task["type"] == "worker" else SLOWED
  os.sched_setaffinity(0, [cores[worker]])  # before TensorFlow starts its threads
  folder = Path(options.folder)
  if task == {"type": "worker", "index": SLOWED}:
    (folder / "pid").write_text(str(os.getpid()))
  faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
  run = _beside_servers if options.kinds == ["servers"] else _in_step
  return run(options, folder, cores[SLOWED])


def _beside_servers(options: argparse.Namespace, folder: Path, core: int) -> int:
  import tensorflow as tf

  from loopwright.kinds.parameter_server import servers
  from loopwright.strategies import factories

  strategy = factories.parameter_server(
    start_timeout_s=_PATIENCE_S, heartbeat_timeout_s=_PATIENCE_S
  )
  if isinstance(strategy, servers.Server):
    strategy.serve()
    return 0
  trainer = _counting_trainer(strategy)
  num_steps = tf.constant(options.steps_per_loop)

  def rates() -> list[float]:
    before, started = trainer.steps_of_workers.numpy(), time.perf_counter()
    while time.perf_counter() - started < options.phase_s:
      trainer.train(num_steps)
    seconds = time.perf_counter() - started
    return ((trainer.steps_of_workers.numpy() - before) / seconds).tolist()

  rates()  # traces
  throttle = Throttle(int((folder / "pid").read_text()), core, step_s=1 / rates()[SLOWED])
  _save(folder, _take_turns(rates, throttle, options.rounds))
  counted, steps = sum(trainer.steps_of_workers.numpy()), int(trainer.global_step.numpy())
  if counted != steps:
    raise RuntimeError(f"the workers counted {counted} steps, the chief {steps}")
  return 0


def _counting_trainer(strategy: Any) -> Any:
  """A trainer whose workers each count their steps in one element of a variable."""
  import keras
  import tensorflow as tf

  from benchmarks import contenders
  from loopwright.kinds.parameter_server.trainer import ParameterServerTrainer

  class CountingTrainer(ParameterServerTrainer):
    def _make_counters(self) -> None:
      super()._make_counters()
      self.steps_of_workers = tf.Variable(tf.zeros([2], tf.int64), trainable=False)

    def finish_step(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
      stands = super().finish_step(finite, loss_finite)
      tf.raw_ops.ResourceScatterAdd(
        resource=self.steps_of_workers.handle,
        indices=[tf.cast(self._worker, tf.int32)],
        updates=[tf.constant(1, tf.int64)],
      )
      return stands

  return CountingTrainer(
    task=contenders.Classification("cnn"),
    strategy=strategy,
    dataset_fn=lambda position, shard: _slow_batches(),
    global_batch_size=BATCH_SIZE,
    optimizer=keras.optimizers.SGD,
  )


def _in_step(options: argparse.Namespace, folder: Path, core: int) -> int:
  import keras
  import tensorflow as tf

  from benchmarks import contenders
  from loopwright.strategies import factories, placement
  from loopwright.trainer import Trainer

  strategy = factories.multi_worker_mirrored(
    start_timeout_s=_PATIENCE_S, heartbeat_timeout_s=_PATIENCE_S
  )
  workers = placement.of(strategy).cluster
  trainer = Trainer(
    task=contenders.Classification("cnn"),
    strategy=strategy,
    dataset_fn=lambda position: _slow_batches(),
    global_batch_size=2 * BATCH_SIZE,  # the same for each worker, as beside servers
    optimizer=keras.optimizers.SGD,
  )
  num_steps = tf.constant(options.steps_per_loop)

  def rates() -> list[float]:
    """All workers go on until the time is up on the chief."""
    steps, started, goes_on = 0, time.perf_counter(), True
    while goes_on:
      trainer.train(num_steps)
      steps += options.steps_per_loop
      left = time.perf_counter() - started < options.phase_s
      goes_on = workers.any(workers.is_chief and left)
    return [steps / (time.perf_counter() - started)] * 2

  rates()  # traces
  step_s = 1 / rates()[SLOWED]
  throttle = None
  if workers.is_chief:
    throttle = Throttle(int((folder / "pid").read_text()), core, step_s=step_s)
  results = _take_turns(rates, throttle, options.rounds)
  if workers.is_chief:
    _save(folder, results)
  workers.barrier()
  return 0


def _slow_batches() -> Any:
  """Returns a dataset whose batches take BATCH_S each, without prefetching."""
  import tensorflow as tf
  from tensorflow.python.data.experimental.ops import testing

  from benchmarks import models

  options = tf.data.Options()
  options.experimental_optimization.inject_prefetch = False
  batches = models.dicts(rows=range(BATCH_SIZE)).apply(testing.sleep(round(BATCH_S * 1e6)))
  return batches.with_options(options)


def _take_turns(
  rates: Callable[[], list[float]], throttle: Throttle | None, rounds: int
) -> dict[str, list[list[float]]]:
  results: dict[str, list[list[float]]] = {phase: [] for phase in PHASES}
  order = random.Random(0)
  for _ in range(rounds):
    for phase in order.sample(PHASES, len(PHASES)):
      slowing = phase in ("slowed", "busy") and throttle is not None
      with throttle.slowing(busy=phase == "busy") if slowing else contextlib.nullcontext():
        results[phase].append(rates())
  return results


def _save(folder: Path, results: Mapping[str, Any]) -> None:
  (folder / "rates.json").write_text(json.dumps(results))


class Throttle:
  """Lets a process run for `step_s` of each SLOWDOWN * `step_s`, inside `with slowing()`."""

  def __init__(self, pid: int, core: int, *, step_s: float) -> None:
    self._pid, self._core, self._step_s = pid, core, step_s

  @contextlib.contextmanager
  def slowing(self, *, busy: bool) -> Iterator[None]:
    """Slows the process.

    Args:
      busy: whether another process uses its core while it is stopped.
    """
    over = threading.Event()
    with self._spinning() if busy else contextlib.nullcontext() as other:
      thread = threading.Thread(target=self._alternate, args=(over, other), daemon=True)
      thread.start()
      try:
        yield
      finally:
        over.set()
        thread.join()

  def _alternate(self, over: threading.Event, other: int | None) -> None:
    while not over.is_set():
      self._switch(other, self._pid)
      time.sleep(self._step_s)
      self._switch(self._pid, other)
      time.sleep((SLOWDOWN - 1) * self._step_s)
    self._switch(other, self._pid)

  def _switch(self, stops: int | None, goes_on: int | None) -> None:
    for pid, number in ((stops, signal.SIGSTOP), (goes_on, signal.SIGCONT)):
      if pid is not None:
        os.kill(pid, number)

  @contextlib.contextmanager
  def _spinning(self) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", _SPIN])
    os.sched_setaffinity(process.pid, [self._core])
    try:
      yield process.pid
    finally:
      process.kill()
      process.wait()


# --- reporting --------------------------------------------------------------------------------

Results = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]


def ratios(rates: Mapping[str, Sequence[Sequence[float]]], phase: str, worker: int) -> np.ndarray:
  """Returns a worker's rate in a phase divided by that in "full", for each round."""
  return np.array(rates[phase])[:, worker] / np.array(rates["full"])[:, worker]


def report(results: Results) -> str:
  header = ("", "phase", "worker 0's rate over that at full speed: median [range]", "worker 1's")
  header = (*header, "steps a second, worker 0", "worker 1")
  lines = [header, ["---"] * len(header)]
  for kind, rates in results.items():
    for phase in PHASES:
      cells = [_shown(ratios(rates, phase, worker)) for worker in (0, 1)] if phase != "full" else []
      steps = [f"{np.median(np.array(rates[phase])[:, worker]):.1f}" for worker in (0, 1)]
      lines.append([TITLES[kind], phase, *(cells or ["", ""]), *steps])
  table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  verdict = "\n".join(f"- WRONG: {line}" for line in wrong(results))
  return f"{table}\n{verdict}"


def _shown(values: np.ndarray) -> str:
  return f"{np.median(values):.2f} [{values.min():.2f}, {values.max():.2f}]"


def wrong(results: Results) -> list[str]:
  """Returns the claims that do not hold, by the medians."""
  lines = []
  for phase in ("slowed", "busy"):
    if "servers" in results:
      kept, left = (np.median(ratios(results["servers"], phase, worker)) for worker in (0, 1))
      if not kept >= KEPT:
        lines.append(f"{phase}: worker 0 keeps {kept:.2f} of its rate, less than {KEPT}")
      if not left <= LEFT:
        lines.append(f"{phase}: worker 1 keeps {left:.2f} of its rate, more than {LEFT}")
  return lines


if __name__ == "__main__":
  sys.exit(main())
