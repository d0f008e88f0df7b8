"""`Prometheus`: the newest values of a run as a text file, for an exporter that collects such."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from loopwright.errors import ConfigError
from loopwright.host.json_lines import Record
from loopwright.tools import goodput
from loopwright.tools.trackers.base import Tracker, values


class Prometheus(Tracker):
  """Writes step, metrics, goodput, its parts and the number of starts, each time a loop has ended.

  The file is replaced, so a reader never finds half of it.
  """

  package = "prometheus_client"
  install = "prometheus_client"

  def __init__(self, *, file: str = "metrics.prom") -> None:
    """Sets the file.

    Args:
      file: its path; without a folder it is in the run folder.

    Raises:
      ConfigError: the name does not end in .prom, as the collector wants.
    """
    super().__init__()
    if not file.endswith(".prom"):
      raise ConfigError(f"Prometheus.file is {file!r}; it must be a path that ends in '.prom'.")
    self._file = file
    self._gauges: dict[str, Any] = {}

  def connect(self) -> None:
    """Begins with no value: `log` gets all lines again."""
    from prometheus_client import CollectorRegistry

    self._registry, self._gauges = CollectorRegistry(), {}

  def held(self) -> Mapping[str, int]:
    """Returns nothing, so that the newest values are there after a restart too."""
    return {}

  def log(self, records: Sequence[Record]) -> None:
    """Sets what the records tell, and writes the file."""
    from prometheus_client import write_to_textfile

    for record in records:
      split = str(record["split"])
      self._set("step", record["step"], "Completed steps.", split=split)
      for name, value in values(record).items():
        metric = name.removeprefix(f"{split}/")
        self._set(metric, value, "As in metrics.jsonl.", split=split)
    if found := goodput.read(self.run.model_dir):
      self._set("goodput_ratio", found.share(goodput.PRODUCTIVE), "Of the wall time since step 0.")
      self._set("starts", found.starts, "Processes that have trained in the run folder.")
      self._set("broken", found.broken, "Those that were killed, or failed.")
      for part, seconds in found.parts.items():
        self._set("wall_seconds", seconds, "Wall time over all starts, by part.", part=part)
    write_to_textfile(os.path.join(self.run.model_dir, self._file), self._registry)

  def _set(self, name: str, value: float, about: str, **labels: str) -> None:
    from prometheus_client import Gauge

    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    # To Prometheus a label without a value is none; a client wants the same ones of all.
    labels = {"split": "", "part": "", "metric": "" if name == plain else name, **labels}
    if plain not in self._gauges:
      names = ["run", *labels]
      self._gauges[plain] = Gauge(f"loopwright_{plain}", about, names, registry=self._registry)
    self._gauges[plain].labels(run=self.run_name, **labels).set(value)
