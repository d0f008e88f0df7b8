"""A folder in memory, which is removed when this process ends, however it ends."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator

from framework.tools.local_process import say

_IN_MEMORY = "/dev/shm"


@contextlib.contextmanager
def folder() -> Iterator[str | None]:
  """Makes a folder in shared memory; None, with a line that says so, if there is none."""
  try:
    made = tempfile.mkdtemp(prefix="loopwright-", dir=_IN_MEMORY)
  except OSError as error:
    say(f"no folder in {_IN_MEMORY} ({error.strerror}): a fault goes back to the newest checkpoint")
    yield None
    return
  remover = subprocess.Popen(
    ["/bin/sh", "-c", 'cat >/dev/null; rm -rf "$0"', made],
    stdin=subprocess.PIPE,
    start_new_session=True,
  )  # it reads the end of its input also after a SIGKILL of this process
  try:
    yield made
  finally:
    remover.communicate()
