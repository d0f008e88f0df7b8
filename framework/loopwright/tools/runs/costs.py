"""What training costs, run by run: `loopwright sweep ... --report` prints this table.

It reads metrics.jsonl alone. The first loop of a run, which traces and compiles, does not count.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence

from loopwright.errors import is_finite
from loopwright.run_folder import folders

HEADS = ("device", "s/epoch", "examples/s", "peak MiB", "utilisation")


def rows(runs: Sequence[folders.Run], varied: Sequence[str]) -> list[list[str]]:
  """Returns the table: what varies, what `HEADS` names, the metrics of the last evaluation.

  The rate is the median over the loops, the peak the largest, and the utilisation the mean: of
  GPUs as the driver has it, of CPUs the share of its cores that the process used. What a run has
  not logged is "-".

  Args:
    runs: in the order of the rows.
    varied: names of bindings, or several as "a, b".
  """
  last = [next(reversed(run.evaluations.values()), {}) for run in runs]
  metrics = [*dict.fromkeys(name for values in last for name in values)]
  names = [name for each in varied for name in each.split(", ")]
  table = [[*names, *HEADS, *metrics]]
  for run, values in zip(runs, last, strict=True):
    given = [run.bindings.get(name, "-") for name in names]
    table.append([*given, *_costs(run), *(_text(values.get(name), ".4g") for name in metrics)])
  return table


def _costs(run: folders.Run) -> Iterator[str]:
  loops = [record for record in folders.log(run.path) if record.get("split") == "train"]
  loops = loops[1:] or loops

  def logged(name: str) -> list[float]:
    return [float(loop[name]) for loop in loops if is_finite(loop.get(name))]

  rates, peaks = logged("examples_per_second"), logged("gpu_memory_mib")
  rate = statistics.median(rates) if rates else None
  size = re.match(r"(\d+) examples", run.values("data").get("training", ""))
  yield "GPU" if peaks else "CPU"
  yield _text(int(size[1]) / rate if size and rate else None, ".3g")
  yield _text(rate, ",.0f")
  yield _text(max(peaks, default=None), ",.0f")
  used = logged("gpu_utilization") if peaks else logged("cpu_utilization")
  yield _text(statistics.fmean(used) if used else None, ".0%")


def _text(value: object, form: str) -> str:
  return format(float(str(value)), form) if is_finite(value) else "-"
