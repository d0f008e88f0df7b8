"""The names of metrics that the framework reports itself."""

from __future__ import annotations

REPORTED_BY_UPDATES = ("loss", "gradient_norm", "learning_rate")
"""Metrics of each optimizer, with its prefix if a task has several."""
REPORTED = (
  *REPORTED_BY_UPDATES,
  *("loss_scale", "skipped", "skipped_steps"),
  *("nonfinite_step", "input_wait", "input_wait_s", "examples_per_second", "steps_per_second"),
  *("staleness", "communication", "communication_s", "start_s", "gpu_memory_mib", "noise_scale"),
  *("model_flops_per_s", "mfu"),
  *("step", "split", "wall_time"),
)
"""Metrics that the framework reports: `Task.metrics` must not use these names."""
