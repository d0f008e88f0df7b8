"""`WandB`: metrics, config, pictures and files of a run at Weights & Biases, also offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from loopwright.run_folder.metrics_log import Number
from loopwright.tools.trackers.base import Status, Tracker

_EXIT_CODES: Mapping[Status, int] = {"finished": 0, "failed": 1, "killed": 143}


class WandB(Tracker):
  """Logs to Weights & Biases: one run for a run folder, continued after a kill.

  The metric "train/loss" is over "train/step". The key is that of `wandb login` or WANDB_API_KEY.
  """

  package = "wandb"

  def __init__(
    self,
    *,
    project: str = "loopwright",
    entity: str | None = None,
    mode: Literal["online", "offline"] | None = None,
  ) -> None:
    """Sets where to log.

    Args:
      project: its name.
      entity: the user or team; None uses the account's default.
      mode: "offline" writes to <model_dir>/wandb, for `wandb sync`; None is that of WANDB_MODE.
    """
    self._init = {"project": project, "entity": entity, "mode": mode}
    self._run: Any = None

  def connect(self, run_id: str) -> Mapping[str, int] | None:
    """Continues the run, or starts it; returns the last steps in its summary, None if offline."""
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "30")
    import wandb

    folder = os.path.abspath(self.run.model_dir)
    self._run = wandb.init(
      **self._init, id=run_id[:16], name=os.path.basename(folder), dir=folder, resume="allow",
      settings=wandb.Settings(silent=True, console="off", reinit="create_new", init_timeout=30),
    )  # fmt: skip
    self._run.config.update(dict(self.run.config), allow_val_change=True)
    for split in ("train", "eval", "media"):
      self._run.define_metric(f"{split}/*", step_metric=f"{split}/step")
    if self._run.offline:
      return None
    summary = dict(self._run.summary)
    return {name: int(summary.get(f"{name.split('/')[0]}/step", -1)) for name in summary}

  def log(self, split: str, step: int, wall_time: float, values: Mapping[str, Number]) -> None:
    """Logs the values with their step; W&B's own process sends them."""
    self._run.log({f"{split}/step": step, **values})

  def show(self, name: str, step: int, path: str) -> None:
    """Logs a picture with its step."""
    import wandb

    self._run.log({"media/step": step, f"media/{name}": wandb.Image(path)})

  def close(self, status: Status, uploads: Mapping[str, str]) -> None:
    """Uploads, and ends the run."""
    import wandb

    if uploads:
      artifact = wandb.Artifact(f"run-{self._run.id}", type="model")
      for name, path in uploads.items():
        add = artifact.add_dir if os.path.isdir(path) else artifact.add_file
        add(path, name=name)
      self._run.log_artifact(artifact)
    self._run.finish(exit_code=_EXIT_CODES[status])
