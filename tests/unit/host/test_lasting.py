"""Output whose reader is closed, gone or stalled; or whose encoding lacks a character."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loopwright.host import files, output

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def pipe(monkeypatch):
  """The reader's descriptor, and a stream that writes to it; nothing has asked to end."""
  monkeypatch.setattr(output, "_hurried", threading.Event())
  reader, writer = os.pipe()
  stream = os.fdopen(writer, "w", encoding="ascii")
  yield reader, output.Lasting(stream)
  os.close(reader)
  stream.close()


def fill(stream):
  os.set_blocking(stream.fileno(), False)
  try:
    while True:
      os.write(stream.fileno(), b"x" * 4096)
  except BlockingIOError:
    os.set_blocking(stream.fileno(), True)


def test_a_slow_reader_gets_everything(pipe):
  reader, stream = pipe
  fill(stream)
  writer = threading.Thread(target=print, args=("y" * 10_000,), kwargs={"file": stream})
  writer.start()
  time.sleep(0.5)
  assert writer.is_alive()
  found = b""
  while not found.endswith(b"\n"):
    found += os.read(reader, 65536)
  writer.join()
  assert found.strip(b"x") == b"y" * 10_000 + b"\n"


def test_a_stalled_reader_does_not_hold_up_an_end(pipe):
  """It gets a second once, nothing afterwards, and again everything when it reads again."""
  reader, stream = pipe
  fill(stream)
  threading.Timer(0.5, output.hurry).start()
  began = time.monotonic()
  for _ in range(20):
    print("lost", file=stream)
  output.put_now(stream.fileno(), b"lost")
  assert 0.9 < time.monotonic() - began < 15  # a second each would be 21
  assert set(os.read(reader, 2**20)) == {ord("x")}  # all of it
  print("read", file=stream)
  assert os.read(reader, 100) == b"read\n"


def test_lines_are_whole_and_what_the_encoding_lacks_is_escaped(pipe):
  reader, stream = pipe
  print("a", "é", "\udcff", file=stream)
  assert os.read(reader, 100) == b"a \\xe9 \\udcff\n"
  stream.write("no end")
  os.set_blocking(reader, False)
  with pytest.raises(BlockingIOError):
    os.read(reader, 100)
  stream.flush()
  assert os.read(reader, 100) == b"no end"


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
