"""A folder in memory, which is removed when this process ends, however it ends."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from loopwright.run_folder import layout
from loopwright.tools.local_process import say

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


def keep_on_disk(copies: str, model_dir: str) -> None:
  """Copies the newest checkpoint in memory into a run folder, if it has none as new.

  The index file, which makes it count, is the last. No process may use the run folder any more.
  """
  step = max(layout.checkpoint_steps(copies), default=0)
  if step <= max(layout.checkpoint_steps(model_dir), default=0):
    return
  into = os.path.join(model_dir, layout.CHECKPOINTS)
  unfinished = os.path.join(into, layout.UNFINISHED)
  files = glob.glob(os.path.join(copies, layout.CHECKPOINTS, f"{layout.PREFIX}-{step}.*"))
  try:
    os.makedirs(unfinished, exist_ok=True)
    for file in sorted(files, key=lambda name: name.endswith(".index")):
      copy = shutil.copy(file, unfinished)
      with open(copy, "rb") as written:
        os.fsync(written.fileno())
      os.replace(copy, os.path.join(into, os.path.basename(file)))
    shutil.rmtree(unfinished)
  except OSError as error:
    say(f"cannot save the copy in memory of step {step} to {into} ({error.strerror})")
  else:
    say(f"saved the copy in memory of step {step} to {into}")
