"""Compares Loopwright with its peers: throughput, time to the first step, peak memory.

    python -m benchmarks.throughput            # everything, some minutes
    python -m benchmarks.throughput --quick    # the MLP alone

Throughput: all contenders of one (model, replicas) run in one process and take turns, one block of
steps each, in a new random order every round. So other programs on a shared machine affect all
alike, and the reliable figure is the median over rounds of the ratio of two blocks of a round. The
first step and the memory are measured in a separate process per contender.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

MODELS = ("mlp", "cnn", "many", "embedding", "mobilenet", "language_model", "cnn_lstm", "wide")
DEFAULT_MODELS = MODELS[:4]
BLOCK_STEPS = {
  "mlp": 100, "cnn": 50, "many": 100, "embedding": 20, "mobilenet": 5, "language_model": 5,
  "cnn_lstm": 10, "wide": 50,
}  # fmt: skip
ROUNDS = {"mlp": 15, "cnn": 9, "many": 11}
OTHER_ROUNDS = 7
REFERENCES = ("hand", "hand_one_device")
LOSS_TOLERANCE = 1e-3
COMPARED_BLOCKS = 2  # later, differences in the last digit have grown, as training is chaotic
TARGET = 0.95
_MEMORY_STEPS = 20
_TIMEOUT_S = 900.0


class Configuration(NamedTuple):
  """The model and number of replicas of a column or row of a table."""

  model: str
  replicas: int

  def __str__(self) -> str:
    return f"{self.model} x{self.replicas}"


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs everything, prints the tables; returns 1 if contenders did different work."""
  options = _parse(arguments)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  started = time.perf_counter()
  results: dict[Configuration, dict[str, Any]] = {}
  for configuration in _configurations(options):
    results[configuration] = _measure(configuration, options)
    if options.json:
      _save(results, options.json)
  seconds = time.perf_counter() - started
  print(report(results))
  print(f"\n{len(results)} configurations in {seconds:.0f} s.")
  return 1 if any(_disagreements(c, r) for c, r in results.items()) else 0


def _save(results: Mapping[Configuration, Any], path: str) -> None:
  with open(path, "w") as file:
    json.dump({str(c): r for c, r in results.items()}, file, indent=1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--models", help=f"of {','.join(MODELS)} (default: the first 4)")
  parser.add_argument("--replicas", default="1,2", help="which numbers of replicas")
  parser.add_argument(
    "--rounds",
    type=int,
    help=f"rounds of blocks (default: {ROUNDS}; others {OTHER_ROUNDS}; 5 if quick)",
  )
  parser.add_argument("--steps", type=int, help=f"steps a block (default: {BLOCK_STEPS})")
  parser.add_argument("--only", help="contenders, as a list of names (default: all)")
  parser.add_argument("--quick", action="store_true", help="the MLP, 5 rounds")
  parser.add_argument("--skip-first-step", action="store_true", help="throughput alone")
  parser.add_argument("--json", help="write all figures to this file")
  parser.add_argument("--verbose", action="store_true", help="show TensorFlow's logs")
  options = parser.parse_args(arguments)
  chosen = "mlp" if options.quick else ",".join(DEFAULT_MODELS)
  options.models = (options.models or chosen).split(",")
  if options.quick and not options.rounds:
    options.rounds = 5
  if unknown := set(options.models) - set(MODELS):
    parser.error(f"unknown model {sorted(unknown)}; choose from {', '.join(MODELS)}")
  return options


def _configurations(options: argparse.Namespace) -> list[Configuration]:
  replicas = [int(number) for number in options.replicas.split(",")]
  return [Configuration(model, number) for model in options.models for number in replicas]


# --- measuring --------------------------------------------------------------------------------


def _measure(configuration: Configuration, options: argparse.Namespace) -> dict[str, Any]:
  steps = options.steps or BLOCK_STEPS[configuration.model]
  # Here, not above: the parent stays small and touches no device.
  names = _in_process(_names, *configuration, steps, options.only, verbose=options.verbose)
  results: dict[str, dict[str, Any]] = {name: {} for name in names}
  if not options.skip_first_step:
    for name in names:
      _progress(f"{configuration}: first step, {name}")
      results[name] = _in_process(first_step, name, *configuration, verbose=options.verbose)
  runners = [name for name in names if "failed" not in results[name]]
  rounds = options.rounds or ROUNDS.get(configuration.model, OTHER_ROUNDS)
  _progress(f"{configuration}: {rounds} rounds")
  sides = _in_process(side_by_side, runners, *configuration, steps, rounds, verbose=options.verbose)
  for name in runners:
    results[name] |= sides if "failed" in sides else sides[name]
  return results


def first_step(name: str, model: str, replicas: int) -> dict[str, float]:
  """Returns seconds from the end of imports to the first loss on the host, and the peak memory."""
  from benchmarks import contenders

  started, cpu_started = time.perf_counter(), time.process_time()
  contender = contenders.make(name, model, replicas, steps=1)
  contender.block()
  figures = {
    "first_step_s": time.perf_counter() - started,
    "first_step_cpu_s": time.process_time() - cpu_started,
  }
  while contender.steps_done() < _MEMORY_STEPS:
    contender.block()
  for _ in range(2):
    contender.block()  # a few more ends of an epoch for those that have one
  figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  return figures


def side_by_side(
  names: Sequence[str], model: str, replicas: int, steps: int, rounds: int
) -> dict[str, dict[str, Any]]:
  """Returns contender -> seconds of each block, one per round; each block's loss; the steps."""
  from benchmarks import contenders

  running, results = {}, {name: _no_figures(steps) for name in names}
  for name in names:
    try:
      contender = contenders.make(name, model, replicas, steps)
      results[name]["losses"].append(contender.block())
      running[name] = contender
    except Exception as error:
      results[name] = {"failed": _in_one_line(error)}
  order = random.Random(0)
  for _ in range(rounds):
    for name in order.sample(list(running), len(running)):
      try:
        _time_block(running[name].block, results[name])
      except Exception as error:
        results[name] = {"failed": _in_one_line(error)}
        del running[name]
  for name, contender in running.items():
    results[name]["steps_done"] = contender.steps_done()
    contender.close()
  return results


def _no_figures(steps: int) -> dict[str, Any]:
  return {"block_steps": steps, "block_s": [], "block_cpu_s": [], "losses": []}


def _time_block(block: Callable[[], float], result: dict[str, Any]) -> None:
  started, cpu_started = time.perf_counter(), time.process_time()
  loss = block()
  result["block_s"].append(time.perf_counter() - started)
  result["block_cpu_s"].append(time.process_time() - cpu_started)
  result["losses"].append(loss)


def _names(model: str, replicas: int, steps: int, only: str | None) -> list[str]:
  from benchmarks import contenders

  names = contenders.names(model, replicas)
  if steps < contenders.STEPS_PER_EXECUTION:
    names.remove("keras_fit_spe")
  return [name for name in names if name in only.split(",")] if only else names


# --- processes --------------------------------------------------------------------------------


def _in_process(function: Callable[..., Any], *args: Any, verbose: bool) -> Any:
  """Calls `function` in a new process; returns its result, or {"failed": reason}.

  The fork server has already done the imports, which take several seconds, and nothing else.
  """
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["benchmarks.contenders"])
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_child, args=(sender, function, args, verbose), daemon=True)
  process.start()
  sender.close()
  try:
    if not receiver.poll(_TIMEOUT_S):
      return {"failed": f"no result within {_TIMEOUT_S:.0f} s"}
    return receiver.recv()
  except EOFError:
    process.join()
    return {"failed": f"the process died, exit status {process.exitcode}"}
  finally:
    process.kill()
    process.join()


def _child(sender: Connection, function: Callable[..., Any], args: Any, verbose: bool) -> None:
  if not verbose:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
  warnings.simplefilter("ignore")
  try:
    sender.send(function(*args))
  except Exception as error:
    sender.send({"failed": _in_one_line(error)})


def _in_one_line(error: Exception) -> str:
  """Returns the line of a long graph error that has the reason."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  telling = [line for line in lines if re.search(r"\b[A-Z]{4,}(_[A-Z]+)*: ", line)]
  return f"{type(error).__name__}: {([*telling[:1], *lines[-1:], ''])[0][:200]}"


def _progress(text: str) -> None:
  print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# --- reporting --------------------------------------------------------------------------------

Results = Mapping[Configuration, Mapping[str, Mapping[str, Any]]]


def report(results: Results) -> str:
  tables = [
    _table("Throughput, ratio to the hand-written loop: median [quartiles] over rounds", results,
           _ratio_cell),
    _table("Steps a second, median", results, _steps_cell),
    _table("CPU time a step, microseconds, median (all threads)", results, _cpu_cell),
    _table("Time to the first step, seconds (CPU seconds)", results, _first_step_cell),
    _table("Peak memory, MiB", results, _memory_cell),
  ]  # fmt: skip
  lines = [*_failures(results), *_references(results), *_checks(results), _verdict(results)]
  return "\n\n".join([*tables, "\n".join(f"- {line}" for line in lines)])


def ratios(result: Mapping[str, Mapping[str, Any]], name: str) -> np.ndarray | None:
  reference = fastest_reference(result)
  if reference is None or not result[name].get("block_s"):
    return None
  return np.array(result[reference]["block_s"]) / np.array(result[name]["block_s"])


def fastest_reference(result: Mapping[str, Mapping[str, Any]]) -> str | None:
  medians = {n: np.median(result[n]["block_s"]) for n in REFERENCES if _ran(result.get(n, {}))}
  return min(medians, key=medians.__getitem__) if medians else None


def _ran(figures: Mapping[str, Any]) -> bool:
  return bool(figures.get("block_s"))


def _table(title: str, results: Results, cell: Callable[[Any, str], str]) -> str:
  from benchmarks.contenders import TITLES

  names = [name for name in TITLES if any(name in result for result in results.values())]
  rows = [["", *map(str, results)], ["---"] * (len(results) + 1)]
  for name in names:
    cells = [cell(result, name) if name in result else "" for result in results.values()]
    rows.append([TITLES[name], *cells])
  return f"### {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio_cell(result: Any, name: str) -> str:
  measured = ratios(result, name)
  if measured is None:
    return "fails" if "failed" in result[name] else ""
  low, middle, high = np.quantile(measured, [0.25, 0.5, 0.75])
  return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _steps_cell(result: Any, name: str) -> str:
  return _median_cell(result[name], lambda f: f["block_steps"] / np.median(f["block_s"]))


def _cpu_cell(result: Any, name: str) -> str:
  return _median_cell(result[name], lambda f: np.median(f["block_cpu_s"]) / f["block_steps"] * 1e6)


def _median_cell(figures: Mapping[str, Any], value: Callable[[Any], float]) -> str:
  return f"{value(figures):.0f}" if _ran(figures) else ""


def _first_step_cell(result: Any, name: str) -> str:
  figures = result[name]
  if "first_step_s" not in figures:
    return ""
  return f"{figures['first_step_s']:.1f} ({figures['first_step_cpu_s']:.1f})"


def _memory_cell(result: Any, name: str) -> str:
  return f"{result[name]['peak_mib']:.0f}" if "peak_mib" in result[name] else ""


def _failures(results: Results) -> list[str]:
  failed = [(c, n, f["failed"]) for c, r in results.items() for n, f in r.items() if "failed" in f]
  return [f"Fails: {name}, {configuration}: `{why}`" for configuration, name, why in failed]


def _references(results: Results) -> list[str]:
  chosen = {c: fastest_reference(r) for c, r in results.items() if len(r) > 1}
  text = ", ".join(f"{c}: {name}" for c, name in chosen.items() if name and c.replicas > 1)
  return [f"The faster hand-written loop, which the ratios are to, is {text}."] if text else []


def _disagreements(configuration: Configuration, result: Any) -> list[str]:
  """Returns who ran another number of steps, or had another loss on one replica."""
  ran = {name: figures for name, figures in result.items() if _ran(figures)}
  reference = fastest_reference(result)
  wrong = []
  for name, figures in ran.items():
    expected = len(figures["losses"]) * figures["block_steps"]
    if figures["steps_done"] != expected:
      wrong.append(f"{configuration}, {name}: {figures['steps_done']} steps, not {expected}")
    if reference and not _loss_difference(figures, ran[reference]) < LOSS_TOLERANCE:
      difference = _loss_difference(figures, ran[reference])
      wrong.append(f"{configuration}, {name}: losses differ by {difference:.1e} from {reference}'s")
  return wrong


def _loss_difference(figures: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
  losses = [f["losses"][:COMPARED_BLOCKS] for f in (figures, reference)]
  return float(np.max(np.abs(np.subtract(*losses))))


def _checks(results: Results) -> list[str]:
  wrong = [text for c, r in results.items() for text in _disagreements(c, r)]
  ran = [(f, r[fastest_reference(r)]) for r in results.values() for f in r.values() if _ran(f)]
  largest = max((_loss_difference(*pair) for pair in ran), default=math.nan)
  good = (
    "Every contender ran the steps asked for; the mean losses of the first "
    f"{COMPARED_BLOCKS} blocks agree to {largest:.0e}."
  )
  return [f"NOT THE SAME WORK: {text}" for text in wrong] or [good]


def _verdict(results: Results) -> str:
  measured = {c: ratios(r, "loopwright") for c, r in results.items() if "loopwright" in r}
  medians = {c: float(np.median(m)) for c, m in measured.items() if m is not None}
  above = [f"{c} ({m:.2f})" for c, m in medians.items() if m > 1]
  below = [f"{c} ({m:.2f})" for c, m in medians.items() if m < TARGET]
  return (
    f"Loopwright over the hand-written loop: above 1 on {', '.join(above) or 'none'}; "
    f"below {TARGET} on {', '.join(below) or 'none'}."
  )


if __name__ == "__main__":
  sys.exit(main())
