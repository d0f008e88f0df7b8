"""Output whose reader is closed or gone; or whose encoding lacks a character."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright.host import files, output

REPOSITORY = Path(__file__).parents[3]


def test_what_the_encoding_lacks_is_escaped():
  reader, writer = os.pipe()
  with os.fdopen(writer, "w", encoding="ascii") as stream:
    print("a", "é", "\udcff", file=output.Lasting(stream), flush=True)
    assert os.read(reader, 100) == b"a \\xe9 \\udcff\n"
  os.close(reader)


def test_a_reader_that_goes_ends_nothing():
  """As `| head -1`: no traceback, and the status of the work."""
  code = f"from loopwright.commands import process; {LINES}"
  line = f'"$0" -c "{code}" | head -1; exit ${{PIPESTATUS[0]}}'
  done = subprocess.run(
    ["bash", "-c", line, sys.executable], cwd=REPOSITORY, capture_output=True, text=True
  )
  assert (done.returncode, done.stdout, done.stderr) == (7, "0\n", "")


LINES = "process.run(lambda _: [print(n) for n in range(10**5)] and 7, [])"


CLOSED = """
import os, sys
from loopwright.host import files, output
output.open_standard_streams()
print("out"); print("err", file=sys.stderr); sys.stdin.read()
os.open("/", os.O_RDONLY)  # gets none of the three
opened = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
os._exit(0 if "/" not in opened else 9)
"""


@pytest.mark.parametrize(
  ("closed", "both"),
  [(">&-", ("", "err\n")), ("2>&-", ("out\n", "")), ("<&- >&- 2>&-", ("", ""))],
)
def test_closed_streams_are_nowhere(closed, both):
  line = f'exec "$0" -c "$1" {closed}'
  done = subprocess.run(
    ["bash", "-c", line, sys.executable, CLOSED],
    cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL,
  )  # fmt: skip
  last = "".join(done.stderr.splitlines(keepends=True)[-1:])  # TensorFlow 2.21 logs before
  assert (done.returncode, done.stdout, last) == (0, *both)


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_command_without_a_stream_does_its_work(tmp_path, closed):
  """Before, `2>&-` ended with status 120 and `>&-` with a traceback."""
  line = f'exec "$0" "$1" ls . {closed}'
  done = subprocess.run(
    ["bash", "-c", line, sys.executable, REPOSITORY / "launch.py"],
    cwd=tmp_path, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0
  assert done.stdout + done.stderr == ("" if closed == ">&-" else "no runs\n")


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EPERM, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_one_line(number):
  """As by `ulimit -f`, `chattr +i`, `chmod` in the middle of a run, or a full disk."""
  with (
    pytest.raises(files.StorageError) as caught,
    files.storage_errors("m", lambda: "the newest is m/ckpt-2"),
  ):
    raise OSError(number, os.strerror(number), "m/checkpoints/ckpt-4.index")
  assert str(caught.value).startswith(
    f"cannot write to 'm': {os.strerror(number)}; the newest is m/ckpt-2; free space, or mend "
  )
