"""Draws a metric of a run's metrics.jsonl over its steps, as a PNG; needs matplotlib.

python -m benchmarks.learning_curve runs/language_model bits_per_byte curve.png
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_curve", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("model_dir")
  parser.add_argument("metric")
  parser.add_argument("png")
  options = parser.parse_args(arguments)
  draw(read(options.model_dir, options.metric), options.metric, options.png)


def read(model_dir: str, metric: str) -> dict[str, tuple[list[int], list[float]]]:
  """Returns split -> (steps, values)."""
  curves: dict[str, tuple[list[int], list[float]]] = {}
  with open(os.path.join(model_dir, "metrics.jsonl")) as file:
    for record in map(json.loads, file):
      if metric in record:
        steps, values = curves.setdefault(record["split"], ([], []))
        steps.append(record["step"])
        values.append(record[metric])
  return curves


def draw(curves: dict[str, tuple[list[int], list[float]]], metric: str, png: str) -> None:
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
  for split, (steps, values) in curves.items():
    axes.plot(steps, values, label=split, marker="o" if split == "eval" else None)
  axes.set(xlabel="step", ylabel=metric)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  os.makedirs(os.path.dirname(png) or ".", exist_ok=True)
  figure.savefig(png, dpi=110)


if __name__ == "__main__":
  main()
