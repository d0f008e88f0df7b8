"""Compares Loopwright with loops in JAX and PyTorch: the same model, weights, batches, precision.

    uv run --with jax --with optax --with torch --with lightning python -m benchmarks.ecosystems

Each contender has a process of its own; they take turns, a block of steps each, in a new random
order every round. All may use all cores, in float32. A figure is the median over rounds of the
ratio of two blocks of a round. TensorFlow reads its batches from tf.data, the others from memory.
Exit status 1 if the losses of the first steps differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.throughput import LOSS_TOLERANCE

BLOCK_STEPS = {"mlp": 200, "cnn": 25, "many": 200, "embedding": 20, "language_model": 5}
ROUNDS = 15
CHECKED_STEPS = 10
"""Whose losses are compared; more steps would magnify that Keras adds Adam's epsilon elsewhere."""
TITLES = {
  "loopwright": "**Loopwright**",
  "hand": "hand-written TensorFlow loop",
  "jax": "JAX, Optax, jitted step",
  "jax_scan": "JAX, Optax, `lax.scan`",
  "torch": "PyTorch, fused Adam",
  "torch_channels_last": "PyTorch, channels last",
  "torch_compile": "PyTorch, `torch.compile`",
  "fabric": "Lightning Fabric",
}


class Runner(NamedTuple):
  """A contender in its process, ready to run blocks."""

  process: subprocess.Popen[str]

  def block(self) -> dict[str, float]:
    """Returns "seconds" and "loss" of the next block, or raises what the process wrote."""
    assert self.process.stdin
    assert self.process.stdout
    self.process.stdin.write("\n")
    self.process.stdin.flush()
    answer = json.loads(self.process.stdout.readline() or '{"failed": "the process ended"}')
    if "failed" in answer:
      raise RuntimeError(answer["failed"])
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
  options = _parse(arguments)
  if options.serve:
    return _serve(options)
  results = {}
  for model in options.models:
    results[model] = measure(model, options)
    if options.json:
      Path(options.json).write_text(json.dumps(results, indent=1))
  print(report(results))
  return 1 if any(_disagreements(result) for result in results.values()) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.ecosystems", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--models", nargs="+", default=list(BLOCK_STEPS), choices=list(BLOCK_STEPS))
  parser.add_argument("--only", nargs="+", default=list(TITLES), choices=list(TITLES))
  parser.add_argument("--rounds", type=int, default=ROUNDS, help="of blocks (default: %(default)s)")
  parser.add_argument("--json", help="write all figures to this file")
  parser.add_argument(
    "--cpu", action="store_true", help="measure processor time: beside other work"
  )
  parser.add_argument("--verbose", action="store_true", help="show the logs of the processes")
  parser.add_argument("--serve", help=argparse.SUPPRESS)  # a contender: this is its process
  parser.add_argument("--folder", help=argparse.SUPPRESS)
  return parser.parse_args(arguments)


def measure(model: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
  """Returns contender -> seconds of a step of each block, mean loss of the first steps; or why
  it failed.
  """
  names = [name for name in options.only if name != "torch_channels_last" or model == "cnn"]
  results: dict[str, dict[str, Any]] = {name: {"step_s": [], "loss": None} for name in names}
  with tempfile.TemporaryDirectory() as folder:
    _run_to_end(["--serve", "data", "--models", model, "--folder", folder], options.verbose)
    runners = {name: _start(name, model, folder, options) for name in names}
    for name in names:
      _progress(f"{model}: first steps, {name}")
      for _ in range(3):  # the first steps, and two blocks to compile and to fill caches
        _block(runners, name, results, model)
    for name in runners:
      results[name]["step_s"].clear()
    order = random.Random(0)
    for number in range(options.rounds):
      _progress(f"{model}: round {number + 1} of {options.rounds}")
      for name in order.sample(list(runners), len(runners)):
        _block(runners, name, results, model)
    for runner in runners.values():
      runner.process.kill()
      runner.process.wait()
  return results


def _block(runners: dict[str, Runner], name: str, results: dict[str, Any], model: str) -> None:
  if name not in runners:
    return
  try:
    answer = runners[name].block()
  except (RuntimeError, OSError) as error:
    results[name] = {"failed": str(error)}
    runners.pop(name).process.kill()
    return
  results[name]["step_s"].append(answer["seconds"] / BLOCK_STEPS[model])
  if results[name]["loss"] is None:
    results[name]["loss"] = answer["loss"]


def _start(name: str, model: str, folder: str, options: argparse.Namespace) -> Runner:
  command = [sys.executable, "-m", "benchmarks.ecosystems", "--serve", name]
  command += ["--cpu"] if options.cpu else []
  logs = None if options.verbose else subprocess.DEVNULL
  process = subprocess.Popen(
    [*command, "--models", model, "--folder", folder],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=logs, text=True,
  )  # fmt: skip
  return Runner(process)


def _run_to_end(arguments: Sequence[str], verbose: bool) -> None:
  command = [sys.executable, "-m", "benchmarks.ecosystems", *arguments]
  subprocess.run(command, check=True, stderr=None if verbose else subprocess.DEVNULL)


def _progress(text: str) -> None:
  print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# --- the process of a contender -----------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
  """Answers each line of the input with the figures of a block, the first of `CHECKED_STEPS`."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  clock = time.process_time if options.cpu else time.perf_counter
  [model] = options.models
  if options.serve == "data":
    return _write_data(model, Path(options.folder))
  with os.fdopen(os.dup(1), "w", buffering=1) as answers:
    os.dup2(2, 1)  # what libraries print is no answer
    try:
      for _, block in zip(sys.stdin, _blocks(options.serve, model, options.folder), strict=False):
        started = clock()
        loss = block()
        print(json.dumps({"seconds": clock() - started, "loss": loss}), file=answers)
    except Exception as error:
      lines = str(error).strip().splitlines() or [""]
      print(json.dumps({"failed": f"{type(error).__name__}: {lines[-1][:200]}"}), file=answers)
      raise
  return 0


def _write_data(model: str, folder: Path) -> int:
  """Writes the weights, in the order of Keras, and the data, so that others need no TensorFlow."""
  import keras

  from benchmarks import models

  weights = models.build(model, keras).get_weights()
  np.savez(folder / "weights.npz", *weights)
  features, labels = models.examples(model)
  batched = {
    name: array.reshape(models.BATCHES, -1, *array.shape[1:])
    for name, array in {**features, "label": labels}.items()
  }
  np.savez(folder / "data.npz", **batched)
  return 0


def _blocks(name: str, model: str, folder: str) -> Iterator[Callable[[], float]]:
  yield _contender(name, model, Path(folder), CHECKED_STEPS)
  block = _contender(name, model, Path(folder), BLOCK_STEPS[model])
  while True:
    yield block


def _contender(name: str, model: str, folder: Path, steps: int) -> Callable[[], float]:
  if name in ("loopwright", "hand"):
    from benchmarks import contenders

    return contenders.make(name, model, replicas=1, steps=steps).block
  with np.load(folder / "weights.npz") as file:
    weights = [file[key] for key in file.files]
  with np.load(folder / "data.npz") as file:
    data = {key: file[key] for key in file.files}
  labels = data.pop("label")
  batches = (data if len(data) > 1 else next(iter(data.values())), labels)
  if name.startswith("jax"):
    from benchmarks import in_jax as made
  else:
    from benchmarks import in_torch as made  # type: ignore[no-redef]
  return made.make(name, model, weights, batches, steps)


# --- reporting ----------------------------------------------------------------------------------

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def report(results: Results) -> str:
  """Returns tables: ratios of throughput, and milliseconds of a step."""
  tables = [
    _table("Loopwright's throughput over that of others: median [quartiles]", results, _ratio),
    _table("Milliseconds a step, median", results, _milliseconds),
  ]
  lines = [f"{model}, {name} fails: {figures['failed']}" for model, result in results.items()
           for name, figures in result.items() if "failed" in figures]  # fmt: skip
  wrong = [f"NOT THE SAME WORK: {model}: {text}" for model, result in results.items()
           for text in _disagreements(result)]  # fmt: skip
  largest = max((d for r in results.values() for d in _differences(r).values()), default=np.nan)
  lines += wrong or [f"The mean losses of the first {CHECKED_STEPS} steps agree to {largest:.0e}."]
  return "\n\n".join([*tables, "\n".join(f"- {line}" for line in lines)])


def _table(title: str, results: Results, cell: Callable[[Any, str], str]) -> str:
  rows = [["", *results], ["---"] * (len(results) + 1)]
  for name, row_title in TITLES.items():
    if any(name in result for result in results.values()):
      rows.append([row_title, *(cell(result, name) for result in results.values())])
  return f"### {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(result: Mapping[str, Any], name: str) -> str:
  if not (_ran(result, name) and _ran(result, "loopwright")):
    return "fails" if "failed" in result.get(name, {}) else ""
  ratios = np.array(result[name]["step_s"]) / np.array(result["loopwright"]["step_s"])
  low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
  return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _milliseconds(result: Mapping[str, Any], name: str) -> str:
  return f"{1e3 * np.median(result[name]['step_s']):.3g}" if _ran(result, name) else ""


def _ran(result: Mapping[str, Any], name: str) -> bool:
  return bool(result.get(name, {}).get("step_s"))


def _differences(result: Mapping[str, Any]) -> dict[str, float]:
  """Returns contender -> difference of its loss from the median contender's."""
  losses = {name: figures["loss"] for name, figures in result.items() if _ran(result, name)}
  middle = np.median(list(losses.values()))
  return {name: float(np.abs(loss - middle)) for name, loss in losses.items()}


def _disagreements(result: Mapping[str, Any]) -> list[str]:
  found = _differences(result)
  return [f"{n}'s losses differ by {d:.1e}" for n, d in found.items() if not d < LOSS_TOLERANCE]


if __name__ == "__main__":
  sys.exit(main())
