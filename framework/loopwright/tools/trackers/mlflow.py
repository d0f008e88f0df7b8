"""`MLflow`: metrics, parameters, pictures and files of a run at an MLflow server or store."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from typing import Any

from loopwright.run_folder.metrics_log import Number
from loopwright.tools.trackers.base import Status, Tracker, allowed, require_no_password

_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_MOST_PARAMS, _MOST_CHARACTERS = 100, 500  # of one request, of one value


class MLflow(Tracker):
  """Logs to MLflow: one run for a run folder, continued after a kill.

  A metric is "train/loss" or "eval/loss". The config is in the parameters; a value that a later
  start changes becomes a tag of the same name, as MLflow's parameters are constant.
  """

  package = "mlflow"

  def __init__(self, *, experiment: str = "loopwright", tracking_uri: str | None = None) -> None:
    """Sets where to log.

    Args:
      experiment: its name; made if it is missing.
      tracking_uri: a server, "file:..." or "sqlite:///..."; None uses MLFLOW_TRACKING_URI, else
        MLflow's default. Passwords and tokens belong in MLFLOW_TRACKING_USERNAME,
        MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_TOKEN.

    Raises:
      ConfigError: the address contains a password.
    """
    require_no_password("MLflow.tracking_uri", tracking_uri)
    self._experiment, self._uri = experiment, tracking_uri
    self._client: Any = None
    self._run_id = ""
    self._pending: collections.deque[Any] = collections.deque(maxlen=1000)

  def connect(self, run_id: str) -> Mapping[str, int]:
    """Finds or makes the run; logs its parameters; returns the last step of each metric."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # else it takes many minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    from mlflow import MlflowClient

    self._client = MlflowClient(tracking_uri=self._uri)
    self._run_id = self._found(run_id)
    self._client.update_run(self._run_id, status="RUNNING")
    found = self._client.get_run(self._run_id)
    self._log_config(found.data.params)
    return {metric.key: metric.step for metric in found.to_proto().data.metrics}

  def log(self, split: str, step: int, wall_time: float, values: Mapping[str, Number]) -> None:
    """Gives the values to MLflow's queue, whose threads send them."""
    from mlflow.entities import Metric

    at = int(wall_time * 1000)
    metrics = [Metric(name, float(value), at, step) for name, value in values.items()]
    self._pending.append(self._client.log_batch(self._run_id, metrics=metrics, synchronous=False))

  def show(self, name: str, step: int, path: str) -> None:
    """Uploads a picture as an artifact below media/."""
    folder = os.path.join("media", os.path.dirname(name)).rstrip("/")
    self._client.log_artifact(self._run_id, path, folder)

  def close(self, status: Status, uploads: Mapping[str, str]) -> None:
    """Waits for the queue, uploads, and sets the run's status."""
    for sent in self._pending:
      sent.wait()
    for name, path in uploads.items():
      if os.path.isdir(path):
        self._client.log_artifacts(self._run_id, path, name)
      else:
        self._client.log_artifact(self._run_id, path)
    self._client.set_terminated(self._run_id, _STATUS[status])

  def _found(self, run_id: str) -> str:
    """Returns the id of this folder's run, made if there is none."""
    experiment = self._client.get_experiment_by_name(self._experiment)
    number = experiment.experiment_id if experiment else None
    number = number or self._client.create_experiment(self._experiment)
    for run in self._client.search_runs([number], f"tags.`loopwright.id` = '{run_id}'"):
      return run.info.run_id
    folder = os.path.abspath(self.run.model_dir)
    tags, name = {"loopwright.id": run_id, "model_dir": folder}, os.path.basename(folder)
    return self._client.create_run(number, tags=tags, run_name=name).info.run_id

  def _log_config(self, logged: Mapping[str, str]) -> None:
    """Logs parameters that the run does not have; those that have changed become tags."""
    from mlflow.entities import Param, RunTag

    config = {allowed(name): value[:_MOST_CHARACTERS] for name, value in self.run.config.items()}
    params = [Param(name, value) for name, value in config.items() if name not in logged]
    for first in range(0, len(params), _MOST_PARAMS):
      self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])
    tags = [RunTag(n, value) for n, value in config.items() if logged.get(n, value) != value]
    self._client.log_batch(self._run_id, tags=tags)
