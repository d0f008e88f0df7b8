"""Losses and metrics: what a task returns, its checks, and the sums over replicas and steps.

The device sums (total, weight) pairs and Sums; the host reads them once per loop. PerExample values
go to the host batch by batch, in evaluations only.
"""

from loopwright.metrics.checks import checked
from loopwright.metrics.names import REPORTED, REPORTED_BY_UPDATES, require_free
from loopwright.metrics.sums import MetricSums
from loopwright.metrics.values import (
  Checked,
  Loss,
  Metric,
  PerExample,
  Sum,
  Summed,
  Weighted,
  weighted_sum,
)

__all__ = [
  "REPORTED",
  "REPORTED_BY_UPDATES",
  "Checked",
  "Loss",
  "Metric",
  "MetricSums",
  "PerExample",
  "Sum",
  "Summed",
  "Weighted",
  "checked",
  "require_free",
  "weighted_sum",
]
