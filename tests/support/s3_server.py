"""An S3 server on loopback in a process of its own, behind a door that can be shut and opened.

  with running() as server:
    os.environ.update(server.environment)
    server.shut()  # as if it were killed: connections break, new ones are refused
    server.open()

The server is moto's, which keeps everything in its memory, so it lives on behind the door.
"""

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

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


@dataclasses.dataclass
class Server:
  """A server with an empty bucket."""

  port: int
  behind: int
  door: int = 0

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
    self.door = os.fork()
    if self.door == 0:
      _forward(self.port, self.behind)
    _await(self.port)

  def shut(self):
    """Kills what forwards connections."""
    os.kill(self.door, signal.SIGKILL)
    os.waitpid(self.door, 0)
    self.door = 0

  @contextlib.contextmanager
  def hung(self):
    """Answers nothing in the `with`; connections stay."""
    os.kill(self.door, signal.SIGSTOP)
    yield
    os.kill(self.door, signal.SIGCONT)


@contextlib.contextmanager
def running():
  """Gives a server with an empty bucket, which ends with the `with`."""
  with subprocess.Popen(
    [sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
  ) as process:
    server = Server(_free_port(), int(process.stdout.readline()))
    try:
      server.open()
      _make_bucket(server)
      yield server
    finally:
      if server.door:
        server.shut()
      process.kill()


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


def _await(port):
  while True:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
      return
    time.sleep(0.01)


def _forward(port, behind):
  try:
    with socket.create_server(("127.0.0.1", port)) as door:
      while True:
        inner, outer = socket.create_connection(("127.0.0.1", behind)), door.accept()[0]
        threading.Thread(target=_copy, args=(inner, outer), daemon=True).start()
  finally:
    os._exit(1)


def _copy(one, other):
  to = {one: other, other: one}
  with one, other, contextlib.suppress(OSError):
    while True:
      for readable in select.select([one, other], [], [])[0]:
        data = readable.recv(2**16)
        if not data:
          return
        to[readable].sendall(data)
