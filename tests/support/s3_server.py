"""An S3 server on loopback in a process of its own, behind a door that can be shut and opened.

  with running() as server:
    os.environ.update(server.environment)
    server.shut()  # as if it were killed: connections break, new ones are refused
    server.open()

The server is moto's, which keeps everything in its memory, so it lives on behind the door.
"""

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys

BUCKET = "bucket"
SECRET = "a-secret-that-nobody-may-log"
_SERVER = """if True:
  import sys
  from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
  from werkzeug.serving import make_server
  app = DomainDispatcherApplication(create_backend_app)
  server = make_server("127.0.0.1", 0, app, threaded=True)
  print(server.server_port, flush=True)
  server.serve_forever()
"""
_DOOR = """if True:
  import contextlib, select, socket, sys, threading

  def copy(one, other):
    to = {one: other, other: one}
    with one, other, contextlib.suppress(OSError):
      while True:
        for readable in select.select([one, other], [], [])[0]:
          data = readable.recv(2**16)
          if not data:
            return
          to[readable].sendall(data)

  port, behind = map(int, sys.argv[1:])
  with socket.create_server(("127.0.0.1", port)) as door:
    print(flush=True)
    while True:
      outer = door.accept()[0]
      inner = socket.create_connection(("127.0.0.1", behind))
      threading.Thread(target=copy, args=(inner, outer), daemon=True).start()
"""


@dataclasses.dataclass
class Server:
  """A server with an empty bucket."""

  port: int
  behind: int
  door: subprocess.Popen | None = None

  @property
  def environment(self):
    """Variables with which s3fs finds the server."""
    return {
      "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "known",
      "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
      "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip

  def open(self):
    """Lets connections in."""
    self.door = _started(_DOOR, str(self.port), str(self.behind))
    self.door.stdout.readline()

  def shut(self):
    """Kills what forwards connections."""
    self.door.kill()
    self.door.communicate()
    self.door = None

  @contextlib.contextmanager
  def hung(self):
    """Answers nothing in the `with`; connections stay."""
    self.door.send_signal(signal.SIGSTOP)
    yield
    self.door.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running():
  """Gives a server with an empty bucket, which ends with the `with`."""
  with _started(_SERVER) as process:
    server = Server(_free_port(), int(process.stdout.readline()))
    try:
      server.open()
      _make_bucket(server)
      yield server
    finally:
      if server.door:
        server.shut()
      process.kill()


def _started(program, *arguments):
  return subprocess.Popen(
    [sys.executable, "-c", program, *arguments],
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
  )  # fmt: skip


def _make_bucket(server):
  connection = socket.create_connection(("127.0.0.1", server.port))
  request = f"PUT /{BUCKET} HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 0\r\n\r\n"
  with connection:
    connection.sendall(request.encode())
    assert b" 200 " in connection.recv(100)


def _free_port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]
