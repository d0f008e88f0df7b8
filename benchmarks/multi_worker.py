"""Compares Loopwright with a hand-written loop on several processes: wall time per step.

    python -m benchmarks.multi_worker            # 1, 2 and 4 processes, half an hour or more
    python -m benchmarks.multi_worker --quick    # the MLP alone, 7 rounds

The processes are workers on loopback, one cluster for each (model, processes). Both loops run under
one MultiWorkerMirroredStrategy and take turns, one block of steps each, in a random order every
round and after a barrier, so other programs on the machine affect both alike.

A figure is the median over rounds of the ratio of two blocks of a round, with its 95 % confidence
interval from the binomial distribution. The hand-written loop runs twice: the distance of the
control's figure from 1 shows the noise. The figure for CPU time, over all processes, does not
include waiting.

The hand-written loop sums over the workers once per step (gradients) and once per block (loss).
Exit status 1 if a cluster fails or the loops do different work.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.throughput import LOSS_TOLERANCE, TARGET, Configuration
from loopwright.tools import local_cluster

MODELS = ("mlp", "cnn", "many")
NAMES = ("hand", "control", "loopwright")
SHOWN = ("hand", "loopwright")
PROCESSES = "1,2,4"
ROUNDS = 51
BLOCK_S = 1.0
TRIAL_STEPS = 20  # which say how many a block must have
_START_TIMEOUT_S = 120.0
_TIMEOUT_S = 900.0


class Loop(NamedTuple):
  """One of the contenders, ready to run.

  Attributes:
    block: runs the given number of steps and returns their mean loss over all workers.
    steps_done: the steps counted so far.
  """

  block: Callable[[Any], float]
  steps_done: Callable[[], int]


def main(arguments: Sequence[str] | None = None) -> int:
  options = _parse(arguments)
  if options.folder:
    return work(options)
  results: dict[Configuration, dict[str, Any]] = {}
  for configuration in _configurations(options):
    results[configuration] = _measure(configuration, options)
    _progress(" | ".join(_row(configuration, results[configuration])))
    if options.json:
      content = {str(configuration): result for configuration, result in results.items()}
      Path(options.json).write_text(json.dumps(content, indent=1))
    if "failed" in results[configuration]:
      break  # perhaps by Ctrl-C or SIGTERM
  print(report(results))
  return 1 if any(_wrong(result) for result in results.values()) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_worker", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--models", default=",".join(MODELS), help="which (default: %(default)s)")
  parser.add_argument("--processes", default=PROCESSES, help="how many (default: %(default)s)")
  parser.add_argument("--rounds", type=int, default=ROUNDS, help="of blocks (default: %(default)s)")
  parser.add_argument(
    "--block_s", type=float, default=BLOCK_S, help="seconds a block (default: %(default)s)"
  )
  parser.add_argument("--quick", action="store_true", help="the MLP, 7 rounds")
  parser.add_argument("--json", help="write all figures to this file")
  parser.add_argument("--verbose", action="store_true", help="show TensorFlow's logs")
  parser.add_argument("--folder", help=argparse.SUPPRESS)  # makes this process a worker
  options = parser.parse_args(arguments)
  if options.quick:
    options.models, options.rounds = "mlp", 7
  options.models = options.models.split(",")
  if unknown := set(options.models) - set(MODELS):
    parser.error(f"unknown model {sorted(unknown)}; choose from {', '.join(MODELS)}")
  return options


def _configurations(options: argparse.Namespace) -> list[Configuration]:
  processes = [int(number) for number in options.processes.split(",")]
  return [Configuration(model, number) for model in options.models for number in processes]


def _measure(configuration: Configuration, options: argparse.Namespace) -> dict[str, Any]:
  os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "benchmarks.multi_worker", f"--folder={folder}"]
    command += [f"--models={configuration.model}", f"--rounds={options.rounds}"]
    command += [f"--block_s={options.block_s}", *(["--verbose"] if options.verbose else [])]
    status = local_cluster.run_local(
      command=command, model_dir=folder, workers=configuration.replicas
    )
    if status:
      return {"failed": f"the cluster ended with status {status}"}
    return _merged([json.loads(path.read_text()) for path in Path(folder).glob("worker-*.json")])


def _progress(text: str) -> None:
  print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _merged(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Merges workers: the time of a block is that of the slowest worker, its CPU time the sum."""
  merged: dict[str, Any] = {}
  for name in NAMES:
    figures = [worker[name] for worker in workers]
    merged[name] = {
      **figures[0],
      "losses": [f["losses"] for f in figures],
      "steps_done": sorted({f["steps_done"] for f in figures}),
      "block_s": np.max([f["block_s"] for f in figures], axis=0).tolist(),
      "block_cpu_s": np.sum([f["block_cpu_s"] for f in figures], axis=0).tolist(),
    }
  return merged


# --- a worker ---------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
  """Runs all loops in turns, in step with all other workers; writes the figures to the folder."""
  if not options.verbose:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
  warnings.simplefilter("ignore")
  from loopwright.strategies import factories, placement

  strategy = factories.multi_worker_mirrored(start_timeout_s=_START_TIMEOUT_S)
  faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)  # no signal ends a hanging collective
  workers = placement.of(strategy).cluster
  loops = {name: _MAKERS[name](options.models[0], workers) for name in NAMES}
  results = _take_turns(loops, workers, options.rounds, options.block_s)
  Path(options.folder, f"worker-{workers.index}.json").write_text(json.dumps(results))
  workers.barrier()
  return 0


def _take_turns(
  loops: Mapping[str, Loop], workers: Any, rounds: int, block_s: float
) -> dict[str, dict[str, Any]]:
  """Returns name -> seconds of each block, one per round; the loss of every block; the steps
  counted.
  """
  import tensorflow as tf

  def run(name: str, steps: int, figures: dict[str, Any]) -> None:
    num_steps = tf.constant(steps)
    workers.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    loss = loops[name].block(num_steps)
    figures["block_s"].append(time.perf_counter() - started)
    figures["block_cpu_s"].append(time.process_time() - cpu_started)
    figures["losses"].append(loss)

  trials = {name: _no_figures() for name in NAMES}
  for name in (*NAMES, *NAMES):  # the first trial traces
    run(name, TRIAL_STEPS, trials[name])
  fastest = min(trials[name]["block_s"][-1] for name in NAMES) / TRIAL_STEPS
  steps = max(TRIAL_STEPS, round(block_s / fastest))
  steps = workers.sum(steps if workers.is_chief else 0)  # all use the chief's numbers
  results, order = {name: _no_figures() for name in NAMES}, random.Random(0)
  for _ in range(rounds):
    for name in order.sample(NAMES, len(NAMES)):
      run(name, steps, results[name])
  for name, figures in results.items():
    figures["losses"][:0] = trials[name]["losses"]
    figures |= {"block_steps": steps, "steps_done": loops[name].steps_done()}
  return results


def _no_figures() -> dict[str, Any]:
  return {"block_s": [], "block_cpu_s": [], "losses": []}


def _loopwright(model: str, workers: Any) -> Loop:
  import keras

  from benchmarks import contenders, models
  from loopwright.trainer import Trainer

  trainer = Trainer(
    task=contenders.Classification(model),
    strategy=workers.strategy,
    dataset_fn=lambda position: models.dicts(model, workers.rows(models.BATCH_SIZE)),
    global_batch_size=models.BATCH_SIZE,
    optimizer=keras.optimizers.Adam,
  )
  return Loop(
    block=lambda num_steps: trainer.train(num_steps)["loss"],
    steps_done=lambda: int(trainer.global_step.numpy()),
  )


def _hand_written(model: str, workers: Any) -> Loop:
  """An expert's loop: one tf.function with a loop in it, and the documented Keras 3 calls.

  It does less than the framework: no weights, no gradient norm, no check for NaN.
  """
  import keras
  import tensorflow as tf

  from benchmarks import contenders, models

  strategy = workers.strategy
  with strategy.scope():
    network, optimizer = models.build(model, keras), keras.optimizers.Adam()
    optimizer.build(network.trainable_variables)
  variables = network.trainable_variables
  dataset = models.pairs(model, workers.rows(models.BATCH_SIZE))
  iterator = iter(strategy.distribute_datasets_from_function(lambda context: dataset))

  def replica_step(images, labels):
    with tf.GradientTape() as tape:
      per_example = models.per_example_loss(model, labels, network(images, training=True))
      loss = tf.reduce_sum(per_example) / models.BATCH_SIZE
    gradients = tape.gradient(loss, [v.value for v in variables])
    optimizer.apply(gradients, variables)  # sums over the workers first, in one collective
    return loss

  @tf.function
  def loop(iterator, num_steps):
    total = 0.0
    for _ in tf.range(num_steps):
      total += strategy.run(replica_step, args=next(iterator))  # one replica a process
    return strategy.reduce(tf.distribute.ReduceOp.SUM, total, axis=None)

  return Loop(
    block=lambda num_steps: float(loop(iterator, num_steps)) / int(num_steps),
    steps_done=lambda: contenders.iterations(optimizer),
  )


_MAKERS: dict[str, Callable[[str, Any], Loop]] = {
  "hand": _hand_written,
  "control": _hand_written,
  "loopwright": _loopwright,
}


# --- reporting --------------------------------------------------------------------------------

Results = Mapping[Configuration, Mapping[str, Any]]


def report(results: Results) -> str:
  header = (
    "",
    "Loopwright's throughput over the hand-written loop's: median [interval]",
    "by CPU time",
    "control: the hand-written loop's over its own",
    "ms a step, hand-written",
    "Loopwright",
    "CPU ms a step, all processes, hand-written",
    "Loopwright",
    "steps a block",
  )
  rows = [header, ["---"] * len(header), *(_row(c, r) for c, r in results.items())]
  table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
  wrong = [f"{c}: {text}" for c, r in results.items() for text in _wrong(r)]
  lines = [f"WRONG: {text}" for text in wrong] or [_agreement(results)]
  return "\n".join([table, "", *(f"- {line}" for line in [*lines, _verdict(results)])])


def _row(configuration: Configuration, result: Mapping[str, Any]) -> list[str]:
  if "failed" in result:
    return [str(configuration), "fails", *[""] * 7]
  steps = result["hand"]["block_steps"]
  columns = [(name, figure) for figure in ("block_s", "block_cpu_s") for name in SHOWN]
  ms = [f"{np.median(result[name][figure]) / steps * 1e3:.2f}" for name, figure in columns]
  ratios = [_ratios(result), _ratios(result, "block_cpu_s"), _ratios(result, name="control")]
  cells = [f"{np.median(r):.2f} [{', '.join(f'{b:.2f}' for b in _interval(r))}]" for r in ratios]
  return [str(configuration), *cells, *ms, str(steps)]


def _ratios(
  result: Mapping[str, Any], figure: str = "block_s", name: str = "loopwright"
) -> np.ndarray:
  return np.array(result["hand"][figure]) / np.array(result[name][figure])


def _interval(ratios: np.ndarray) -> np.ndarray:
  """Returns two of the ratios that enclose the median with 95 % confidence."""
  middle, half = (len(ratios) - 1) / 2, 0.98 * np.sqrt(len(ratios))
  places = [np.floor(middle - half), np.ceil(middle + half)]
  return np.sort(ratios)[np.clip(places, 0, len(ratios) - 1).astype(int)]


def _wrong(result: Mapping[str, Any]) -> list[str]:
  if "failed" in result:
    return [result["failed"]]
  wrong = []
  for name in NAMES:
    figures = result[name]
    expected = 2 * TRIAL_STEPS + len(figures["block_s"]) * figures["block_steps"]
    if figures["steps_done"] != [expected]:
      wrong.append(f"{name} counted {figures['steps_done']} steps, not {expected}")
  if not _loss_difference(result) < LOSS_TOLERANCE:
    wrong.append(f"the first losses differ by {_loss_difference(result):.1e}")
  return wrong


def _loss_difference(result: Mapping[str, Any]) -> float:
  trials = np.concatenate([np.array(result[name]["losses"])[:, :2] for name in NAMES])
  return float(np.max(np.ptp(trials, axis=0)))


def _agreement(results: Results) -> str:
  largest = max(map(_loss_difference, results.values()))
  return (
    "All ran the steps asked for; the mean losses of the first two blocks of "
    f"{TRIAL_STEPS} steps, on all workers, agree to {largest:.0e}."
  )


def _verdict(results: Results) -> str:
  medians = {c: np.median(_ratios(r)) for c, r in results.items() if "failed" not in r}
  below = [f"{c} ({median:.2f})" for c, median in medians.items() if median < TARGET]
  return f"Loopwright over the hand-written loop: below {TARGET} on {', '.join(below) or 'none'}."


if __name__ == "__main__":
  sys.exit(main())
