"""Writes docs/options.md from the signatures and docstrings of what a gin file configures.

python -m tests.support.option_tables > docs/options.md
"""

import inspect
import sys
import types

from loopwright import running, trainer
from loopwright.actions import best, model_flops, profiling, show, tensorboard, time_budget
from loopwright.configurables import documentation
from loopwright.configurables.table import GIVEN
from loopwright.inputs import mixture, sources
from loopwright.kinds.workers import resolvers
from loopwright.optimizers import adapters, ema, groups, loss_scale, schedules
from loopwright.run_folder import warm_start
from loopwright.strategies import factories, reduction
from loopwright.tools.exports import action as export
from loopwright.tools.forensics import action as nonfinite
from loopwright.tools.forensics import layers, spikes
from loopwright.tools.trackers import csv_file, mlflow, prometheus, wandb

SECTIONS = (
  ("run", running, "run"),
  ("Trainer", trainer, "Trainer"),
  ("Reduction", reduction, "Reduction"),
  (
    "Strategies",
    factories,
    "auto default one_device mirrored central_storage multi_worker_mirrored parameter_server tpu",
  ),
  ("Clusters", resolvers, "tf_config slurm"),
  ("Loss scale", loss_scale, "none fixed dynamic"),
  ("Warm start", warm_start, "WarmStart"),
  ("Inputs", sources, "ImageFolderSource load_arrays"),
  ("Mixtures", mixture, "Mixture"),
  ("Optimizers", adapters, "without_decay"),
  ("Groups of variables", groups, "grouped"),
  ("Averages of weights", ema, "ema_warmup weight_averaging"),
  (
    "Schedules",
    schedules,
    "constant linear_warmup cosine_decay exponential_decay piecewise_constant by_epoch "
    "scale_by_replicas times_replicas",
  ),
  ("Actions", best, "BestCheckpoint EarlyStopping"),
  ("Exports", export, "Export"),
  ("At NaN and infinity", nonfinite, "StopOnNonFinite"),
  ("Spikes", spikes, "Spikes"),
  ("Statistics of layers", layers, "LayerStatistics"),
  ("Time", time_budget, "TimeBudget"),
  ("Model FLOP/s and MFU", model_flops, "ModelFlops"),
  ("Traces", profiling, "Profile"),
  ("Pictures", show, "Show"),
  ("TensorBoard", tensorboard, "TensorBoard"),
  ("A table of the metrics", csv_file, "CSVFile"),
  ("MLflow", mlflow, "MLflow"),
  ("Weights & Biases", wandb, "WandB"),
  ("Prometheus", prometheus, "Prometheus"),
)


def render() -> str:
  text = "# Options\n\nWritten by `python -m tests.support.option_tables`; a test keeps it true.\n"
  for title, module, names in SECTIONS:
    rows = [row for name in names.split() for row in rows_of(name, getattr(module, name))]
    table = "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])
    text += f"\n## {title}\n\n{table}\n"
  return text


def rows_of(name: str, target: type | types.FunctionType) -> list[str]:
  told, summary = documentation.meanings(target), documentation.summary(target)
  parameters = {
    n: p for n, p in inspect.signature(target).parameters.items() if n not in GIVEN.get(name, {})
  }
  rows = [
    f"| `{name}.{n}` | {default(p)} | {(told.get(n) or summary).replace('|', 'or')} |"
    for n, p in parameters.items()
  ]
  return rows or [f"| `@{name}` | | {summary} |"]


def default(parameter: inspect.Parameter) -> str:
  text = documentation.default(parameter)
  return text if text == "required" else f"`{text}`"


if __name__ == "__main__":
  sys.stdout.write(render())
