"""Files that are either written completely or not at all."""

from __future__ import annotations

import tensorflow as tf


def atomic_write(path: str, content: bytes | str) -> None:
  """Replaces the file at `path` (local or remote); readers never see a partial file (host)."""
  with tf.io.gfile.GFile(f"{path}.tmp", "w") as file:
    file.write(content)
  tf.io.gfile.rename(f"{path}.tmp", path, overwrite=True)
