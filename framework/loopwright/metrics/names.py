"""The names of metrics that the framework reports itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from loopwright.errors import ConfigError

REPORTED_BY_UPDATES = ("loss", "gradient_norm", "learning_rate")
"""Metrics of each optimizer, with its prefix if a task has several."""
REPORTED = (
  *REPORTED_BY_UPDATES,
  *("loss_scale", "skipped", "skipped_steps"),
  *("nonfinite_step", "input_wait", "input_wait_s", "examples_per_second", "steps_per_second"),
  *("staleness", "communication", "communication_s"),
  *("gpu_memory_mib", "gpu_utilization", "cpu_utilization"),
  *("model_flops_per_s", "mfu"),
  *("step", "split", "wall_time"),
)
"""Metrics that the framework reports: `Task.metrics` must not use these names."""


def require_free(
  names: Iterable[str],
  taken: Collection[str] = REPORTED,
  *,
  who: str,
  why: str = "which the framework reports itself",
) -> None:
  """Raises a ConfigError for the first name that is taken, or none.

  Args:
    names: of a task's metrics.
    taken: those that are reported.
    who: what an error says before the name, such as "Digits.metrics() returns".
    why: what it says behind it.
  """
  for name in names:
    if not isinstance(name, str) or not name.strip():
      raise ConfigError(f"{who} {name!r}; the name of a metric must be a text that is not empty.")
    if name in taken:
      raise ConfigError(f"{who} {name!r}, {why}; rename it, for example {f'my_{name}'!r}.")
