"""`Trackio`: metrics, config and pictures of a run in a local Trackio database, server or Space."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

from framework.host.json_lines import Record
from framework.tools.trackers.base import Status, Tracker, require_no_password, values


class Trackio(Tracker):
  """Logs to Trackio: one run for a run folder, continued after a kill.

  A metric is "train/loss" or "eval/loss" at the training step. The run's name is that of the run
  folder and a part of an id, which keeps runs of the same name apart.
  """

  package, install = "trackio", "trackio"

  def __init__(
    self,
    *,
    project: str = "loopwright",
    space_id: str | None = None,
    server_url: str | None = None,
    wait_s: float = 30.0,
  ) -> None:
    """Sets where to log.

    Args:
      project: its name.
      space_id: a Hugging Face Space, "user/space"; None uses TRACKIO_SPACE_ID, else this machine,
        in TRACKIO_DIR.
      server_url: a server of one's own; None uses TRACKIO_SERVER_URL. Its token belongs in
        TRACKIO_WRITE_TOKEN.
      wait_s: the most seconds that the end of the run waits for what is not sent yet.

    Raises:
      ConfigError: the address contains a token, or another argument is wrong.
    """
    super().__init__(wait_s=wait_s)
    require_no_password("Trackio.server_url", server_url)
    self._project, self._space, self._server = project, space_id, server_url
    self._run: Any = None

  def connect(self) -> None:
    """Continues the run, or starts it."""
    import trackio

    if self._run is not None:
      self._run.finish()
    self.kept.run = self.kept.run or f"{self.run_name}-{self.kept.id[:8]}"
    self._run = trackio.init(
      project=self._project, name=self.kept.run, resume="allow", embed=False,
      space_id=self._space, server_url=self._server, config=dict(self.run.config),
      auto_log_gpu=False, auto_log_cpu=False,
    )  # fmt: skip

  def held(self) -> Mapping[str, int]:
    """Returns the last steps in the local database; of a server, those that were sent."""
    from trackio.sqlite_storage import SQLiteStorage

    if not self._run._is_local:  # noqa: SLF001
      return self.kept.sent
    last: dict[str, int] = {}
    for row in SQLiteStorage.get_logs(self._project, self.kept.run):
      for split in {name.partition("/")[0] for name in row if "/" in name}:
        last[split] = max(last.get(split, -1), row["step"])
    return last

  def log(self, records: Sequence[Record]) -> None:
    """Logs each record at its step."""
    for record in records:
      self._run.log(values(record), step=record["step"])

  def show(self, name: str, step: int, path: str) -> None:
    """Logs a picture at its step."""
    import trackio

    self._run.log({f"media/{name}": trackio.Image(path)}, step=step)

  def abandon(self) -> None:
    """Removes Trackio's exit hook, which waits for the server."""
    import trackio

    atexit.unregister(trackio._cleanup_current_run)  # noqa: SLF001

  def close(self, status: Status, uploads: Mapping[str, str]) -> None:
    """Writes what is in Trackio's queue."""
    self._run.finish()
