"""Plots a run's metrics.jsonl, one panel per metric.

Needs matplotlib, the extra "plots". A training point is the mean over the loop that ended at its
step; an evaluation point is over the whole evaluation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from framework.errors import ConfigError, unknown

SPLITS = ("train", "eval")
_WIDTH, _HEIGHT, _DPI = 4.0, 3.0, 100  # inches per panel; dots per inch


class Curve(NamedTuple):
  """One metric of one split.

  Attributes:
    steps: in the order of the log.
    values: one per step; NaN and infinities leave a gap.
  """

  steps: list[int]
  values: list[float]


Curves = Mapping[str, Mapping[str, Curve]]
"""Metric -> split -> curve."""


def read(model_dir: str, metrics: Sequence[str]) -> Curves:
  """Returns the curves of a run folder; a split without a metric gets none of it (host).

  Raises:
    ConfigError: the log is empty, or has no metric of a name.
  """
  # Imports TensorFlow, so only after the flags are checked.
  from framework.reporting.metrics_log import MetricsLog

  log = MetricsLog(os.path.join(model_dir, "metrics.jsonl"))
  records = [record for record in log.records() if record["split"] in SPLITS]
  if not records:
    raise ConfigError(f"no metrics in {log.path}; give the --model_dir of a run that has trained.")
  known = {name for record in records for name in record} - {"step", "split", "wall_time"}
  for name in metrics:
    if name not in known:
      raise unknown("metric", name, known)
  return {name: _curves(records, name) for name in metrics}


def _curves(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, Curve]:
  found: dict[str, Curve] = {}
  for record in records:
    if name in record:
      curve = found.setdefault(record["split"], Curve([], []))
      curve.steps.append(record["step"])
      curve.values.append(record[name])
  return found


def draw(curves: Curves) -> Any:
  """Returns a `matplotlib.figure.Figure` with one panel per metric, side by side.

  Raises:
    ConfigError: matplotlib is missing.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ConfigError(
      f"plotting needs the package matplotlib, which cannot be imported ({error}); start with "
      "`uv run --extra plots python -m framework.reporting.curves`, or run "
      "`pip install -e '.[plots]'` first."
    ) from error
  figure = Figure(figsize=(_WIDTH * len(curves), _HEIGHT), dpi=_DPI, layout="constrained")
  for panel, (name, splits) in zip(
    figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
  ):
    for split, curve in splits.items():
      panel.plot(curve.steps, curve.values, label=split, marker="." if split == "eval" else "")
    panel.set(xlabel="step", ylabel=name)
    panel.grid(alpha=0.3)
    panel.legend()
  return figure


def save(figure: Any, path: str) -> None:
  """Writes the figure; the suffix of `path` sets the format: .png, .svg, .pdf.

  Raises:
    ConfigError: another suffix, or the folder does not exist.
  """
  try:
    figure.savefig(path)
  except (ValueError, OSError) as error:
    reason = str(error).partition("\n")[0]
    raise ConfigError(
      f"cannot write {path!r} ({reason}); --output must end in .png, .svg or .pdf, in a folder "
      "that exists."
    ) from error


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  try:
    model_dir, metrics, output = _parsed(sys.argv if arguments is None else arguments)
    save(draw(read(model_dir, metrics)), output)
  except (ConfigError, flags.Error) as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  print(output)
  return 0


def _parsed(arguments: Sequence[str]) -> tuple[str, list[str], str]:
  values = flags.FlagValues()
  flags.DEFINE_list("metrics", ["loss"], "Names in metrics.jsonl, one panel each.", values)
  flags.DEFINE_string("output", None, "Default: MODEL_DIR/curves.png.", values)
  given = values(arguments)[1:]
  if len(given) != 1 or not values.metrics:
    raise ConfigError(
      "usage: python -m framework.reporting.curves MODEL_DIR [--metrics=loss,accuracy] "
      "[--output=FILE.png]"
    )
  return given[0], values.metrics, values.output or os.path.join(given[0], "curves.png")


if __name__ == "__main__":
  sys.exit(main())
