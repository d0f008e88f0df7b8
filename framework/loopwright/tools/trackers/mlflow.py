"""`MLflow`: metrics, parameters, pictures and files of a run at an MLflow server or store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from loopwright.host.json_lines import Record
from loopwright.tools.trackers.base import (
  Status,
  Tracker,
  newest_checkpoint,
  require_no_password,
  values,
)

_OUR_ID = "loopwright.id"
_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request
_MOST_CHARACTERS = 500


class MLflow(Tracker):
  """Logs to MLflow: one run for a run folder, continued after a kill.

  A metric is "train/loss" or "eval/loss", at the training step and time of its line in
  metrics.jsonl. The config is in the parameters; a value that a later start changes becomes a tag
  of the same name, as MLflow's parameters are constant.
  """

  package, install = "mlflow", "mlflow-skinny alembic sqlalchemy"

  def __init__(
    self,
    *,
    experiment: str = "loopwright",
    run_name: str | None = None,
    tracking_uri: str | None = None,
    upload: Sequence[str] = ("operative_config.gin", "export"),
    wait_s: float = 30.0,
  ) -> None:
    """Sets where to log.

    Args:
      experiment: its name; made if it is missing.
      run_name: None uses the name of the run folder.
      tracking_uri: a server, "file:..." or "sqlite:///..."; None uses MLFLOW_TRACKING_URI, else
        MLflow's default. Passwords and tokens belong in MLFLOW_TRACKING_USERNAME,
        MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_TOKEN.
      upload: files and folders of the run folder to upload as artifacts when training is over.
      wait_s: the most seconds that the end of the run waits for what is not sent yet.

    Raises:
      ConfigError: the address contains a password, or another argument is wrong.
    """
    super().__init__(wait_s=wait_s, upload=upload)
    require_no_password("MLflow.tracking_uri", tracking_uri)
    self._experiment, self._name, self._uri = experiment, run_name, tracking_uri
    self._client: Any = None
    self._last: dict[str, int] = {}

  def connect(self) -> None:
    """Finds or makes the run; logs its parameters; asks for the last step of each metric."""
    uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    for name, value in _settings(uri).items():
      os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    self._client = MlflowClient(tracking_uri=self._uri)
    self.kept.run = self.kept.run or self._found()
    self._client.update_run(self.kept.run, status="RUNNING")
    found = self._client.get_run(self.kept.run)
    self._last = {metric.key: metric.step for metric in found.to_proto().data.metrics}
    self._log_config(found.data.params)

  def held(self) -> Mapping[str, int]:
    """Returns nothing: `log` leaves out what `connect` has found, metric by metric."""
    return {}

  def log(self, records: Sequence[Record]) -> None:
    """Sends the metrics that the run does not have."""
    from mlflow.entities import Metric

    metrics = []
    for record in records:
      for name, value in values(record).items():
        key, step = _key(name), record["step"]
        if step > self._last.get(key, -1):
          metrics.append(Metric(key, float(value), int(record["wall_time"] * 1000), step))
    for first in range(0, len(metrics), _MOST_METRICS):
      self._client.log_batch(self.kept.run, metrics=metrics[first : first + _MOST_METRICS])

  def show(self, name: str, step: int, path: str) -> None:
    """Uploads a picture as an artifact below media/."""
    folder = os.path.join("media", os.path.dirname(name)).rstrip("/")
    self._client.log_artifact(self.kept.run, path, folder)

  def close(self, status: Status, uploads: Mapping[str, str]) -> None:
    """Uploads, names the newest checkpoint, and sets the run's status."""
    for name, path in uploads.items():
      if os.path.isdir(path):
        self._client.log_artifacts(self.kept.run, path, name)
      else:
        self._client.log_artifact(self.kept.run, path, os.path.dirname(name) or None)
    if checkpoint := newest_checkpoint(self.run.model_dir):
      self._client.set_tag(self.kept.run, "checkpoint", os.path.abspath(checkpoint))
    self._client.set_terminated(self.kept.run, _STATUS[status])

  def _found(self) -> str:
    """Returns the id of this folder's run, made if there is none."""
    experiment = self._client.get_experiment_by_name(self._experiment)
    number = experiment.experiment_id if experiment else None
    number = number or self._client.create_experiment(self._experiment)
    ours = f"tags.`{_OUR_ID}` = '{self.kept.id}'"
    for run in self._client.search_runs([number], filter_string=ours):
      return run.info.run_id
    tags = {_OUR_ID: self.kept.id, "model_dir": os.path.abspath(self.run.model_dir)}
    made = self._client.create_run(number, tags=tags, run_name=self._name or self.run_name)
    return made.info.run_id

  def _log_config(self, logged: Mapping[str, str]) -> None:
    """Logs parameters that the run does not have; those that have changed become tags."""
    from mlflow.entities import Param, RunTag

    config = {_key(name): value[:_MOST_CHARACTERS] for name, value in self.run.config.items()}
    params = [Param(name, value) for name, value in config.items() if name not in logged]
    for first in range(0, len(params), _MOST_PARAMS):
      self._client.log_batch(self.kept.run, params=params[first : first + _MOST_PARAMS])
    changed = {n: v for n, v in config.items() if logged.get(n, v) != v}
    if changed:
      self._client.log_batch(self.kept.run, tags=[RunTag(n, v) for n, v in changed.items()])


def _settings(uri: str) -> dict[str, str]:
  """Returns MLflow's settings that the user has not made: quiet, quick to fail, files allowed."""
  quick = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
  is_folder = uri.startswith("file:") or "://" not in uri
  folder = {"MLFLOW_ALLOW_FILE_STORE": "true"} if uri and is_folder else {}
  return {"MLFLOW_LOGGING_LEVEL": "WARNING", **quick, **folder}


def _key(name: str) -> str:
  """Returns a name with the characters that MLflow allows."""
  return re.sub(r"[^\w\-. /]", "_", name)[:250]
