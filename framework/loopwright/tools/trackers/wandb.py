"""`WandB`: metrics, config, pictures and files of a run at Weights & Biases, also offline."""

from __future__ import annotations

import glob
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from loopwright.errors import unknown
from loopwright.host.json_lines import Record
from loopwright.tools.trackers.base import Status, Tracker, newest_checkpoint, values

_EXIT_CODES: Mapping[Status, int] = {"finished": 0, "failed": 1, "killed": 143}
_INIT_TIMEOUT_S = 30.0
_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7


class WandB(Tracker):
  """Logs to Weights & Biases: one run for a run folder, continued after a kill.

  A metric is "train/loss" or "eval/loss" over "train/step" or "eval/step". The key belongs in
  WANDB_API_KEY or where `wandb login` puts it.
  """

  package, install = "wandb", "wandb pillow"

  def __init__(
    self,
    *,
    project: str = "loopwright",
    entity: str | None = None,
    run_name: str | None = None,
    mode: Literal["online", "offline"] = "online",
    upload: Sequence[str] = ("operative_config.gin", "export"),
    wait_s: float = 30.0,
  ) -> None:
    """Sets where to log.

    Args:
      project: its name.
      entity: the user or team; None uses the account's default.
      run_name: None uses the name of the run folder.
      mode: "offline" writes to <model_dir>/wandb, which `wandb sync` sends later.
      upload: files and folders of the run folder to upload as one artifact when training is over.
      wait_s: the most seconds that the end of the run waits for what is not sent yet.

    Raises:
      ConfigError: another `mode`, or another argument is wrong.
    """
    super().__init__(wait_s=wait_s, upload=upload)
    if mode not in ("online", "offline"):
      raise unknown("WandB.mode", mode, ("online", "offline"))
    self._mode = mode
    self._init = {"project": project, "entity": entity, "mode": mode}
    self._name = run_name
    self._run: Any = None

  def connect(self) -> None:
    """Continues the run, or starts it."""
    import wandb

    self.kept.run = self.kept.run or self.kept.id[:16]
    if self._run is not None:
      self._run.finish(exit_code=1)
    settings = wandb.Settings(
      console="off", silent=True, reinit="create_new", init_timeout=_INIT_TIMEOUT_S
    )
    self._run = wandb.init(
      **self._init, id=self.kept.run, resume="allow", name=self._name or self.run_name,
      dir=self.run.model_dir, settings=settings,
    )  # fmt: skip
    self._run.config.update(dict(self.run.config), allow_val_change=True)
    for split in ("train", "eval", "time", "media"):
      self._run.define_metric(f"{split}/step")
      self._run.define_metric(f"{split}/*", step_metric=f"{split}/step")

  def held(self) -> Mapping[str, int]:
    """Returns the last steps at the server, or in the files of an offline run."""
    last: dict[str, int] = {}
    if self._mode == "online":
      rows: Iterator[Mapping[str, Any]] = iter([dict(self._run.summary)])
    else:
      rows = offline_history(self.run.model_dir, self.kept.run)
    for row in rows:
      for name, value in row.items():
        if name.endswith("/step"):
          split = name.removesuffix("/step")
          last[split] = max(last.get(split, -1), int(value))
    return last

  def log(self, records: Sequence[Record]) -> None:
    """Logs each record with its step."""
    for record in records:
      self._run.log({f"{record['split']}/step": record["step"], **values(record)})

  def show(self, name: str, step: int, path: str) -> None:
    """Logs a picture with its step."""
    import wandb

    self._run.log({"media/step": step, f"media/{name}": wandb.Image(path)})

  def close(self, status: Status, uploads: Mapping[str, str]) -> None:
    """Uploads, names the newest checkpoint, and ends the run."""
    import wandb

    if uploads:
      artifact = wandb.Artifact(f"run-{self.kept.run}", type="model")
      for name, path in uploads.items():
        add = artifact.add_dir if os.path.isdir(path) else artifact.add_file
        add(path, name=name)
      self._run.log_artifact(artifact)
    if checkpoint := newest_checkpoint(self.run.model_dir):
      self._run.summary["checkpoint"] = os.path.abspath(checkpoint)
    self._run.finish(exit_code=_EXIT_CODES[status])

  def abandon(self) -> None:
    """Removes W&B's exit hook, which waits for the server; the files stay for the next start."""
    import wandb

    wandb.setup().ensure_service()._cleanup()  # noqa: SLF001


def offline_history(model_dir: str, run_id: str) -> Iterator[dict[str, Any]]:
  """Yields what was logged in all processes of an offline run: name -> value (host)."""
  from wandb.proto import wandb_internal_pb2

  folders = os.path.join(glob.escape(model_dir), "wandb", f"offline-run-*-{run_id}")
  for path in sorted(glob.glob(os.path.join(folders, f"run-{run_id}.wandb"))):
    with open(path, "rb") as file:
      content = file.read()
    for text in _entries(content):
      entry = wandb_internal_pb2.Record.FromString(text)
      if entry.HasField("history"):
        items = entry.history.item
        yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _entries(content: bytes) -> Iterator[bytes]:
  """Yields the whole entries of a file in LevelDB's log format; a kill may have cut off the last.

  Blocks of 32 KiB hold pieces: checksum, length, kind (1 whole, 2 first, 3 middle, 4 last), bytes.
  """
  position, entry = _FILE_HEADER, b""
  while position + _HEADER <= len(content):
    if _BLOCK - position % _BLOCK < _HEADER:
      position += _BLOCK - position % _BLOCK
      continue
    _, length, kind = struct.unpack_from("<IHB", content, position)
    piece = content[position + _HEADER : position + _HEADER + length]
    if len(piece) < length:
      return
    position += _HEADER + length
    entry = piece if kind in (1, 2) else entry + piece
    if kind in (1, 4):
      yield entry
