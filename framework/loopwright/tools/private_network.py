"""A network of one group of processes that has only loopback: a Linux network namespace.

  with opened(os.environ, say=print) as descriptors:
    ...  # a process calls setns for each of the descriptors, in order, before it starts

As root it needs CAP_SYS_ADMIN; otherwise a user namespace, in which ids and access to files and
devices stay as they are, but `sudo` and other setuid programs do not work.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from loopwright.errors import unknown

NETWORK = "LOOPWRIGHT_LOCAL_NETWORK"
CHOICES = ("private", "shared")

_HOLD = """
import ctypes, fcntl, os, socket, struct, sys
CLONE_NEWUSER, CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x10000000, 0x40000000, 0x8914, 1
libc = ctypes.CDLL(None, use_errno=True)

def write(file, text):
  with open(f"/proc/self/{file}", "w") as opened:
    opened.write(text)

try:
  uid, gid = os.geteuid(), os.getegid()
  own = libc.unshare(CLONE_NEWNET) == 0
  if not own:
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    write("setgroups", "deny")
    write("uid_map", f"{uid} {uid} 1")
    write("gid_map", f"{gid} {gid} 1")
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any:
    fcntl.ioctl(any, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
except OSError as error:
  print("no", error.strerror, flush=True)
else:
  print("net" if own else "user,net", flush=True)
sys.stdin.read()  # holds the namespaces until they are open
"""


@contextlib.contextmanager
def opened(environ: Mapping[str, str], *, say: Callable[[str], object]) -> Iterator[Sequence[int]]:
  """Gives file descriptors of the namespaces to enter; none if the network is to be shared.

  Args:
    environ: with LOOPWRIGHT_LOCAL_NETWORK: "private" (the default) or "shared".
    say: gets one line that says which network the processes have.

  Raises:
    ConfigError: another value.
  """
  choice = environ.get(NETWORK, CHOICES[0])
  if choice not in CHOICES:
    raise unknown(NETWORK, choice, CHOICES)
  descriptors, why_not = ([], "") if choice == "shared" else _made()
  if descriptors:
    say(f"network: only loopback, in private; for downloads or trackers set {NETWORK}=shared")
  elif why_not:
    say(
      f"WARNING: cannot make a private network ({why_not}): TensorFlow's servers run what anyone "
      "sends who reaches this machine; close its ports by a firewall"
    )
  try:
    yield descriptors
  finally:
    for descriptor in descriptors:
      os.close(descriptor)


def _made() -> tuple[list[int], str]:
  """Returns (descriptors, "") or ([], the reason)."""
  command = [sys.executable, "-I", "-S", "-c", _HOLD]
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as holder:
    answer = (holder.stdout.readline() if holder.stdout else "").strip()
    if not answer or answer.startswith("no "):
      return [], answer.removeprefix("no ") or "the process that makes it ended"
    folder = f"/proc/{holder.pid}/ns"
    try:
      return [os.open(f"{folder}/{name}", os.O_RDONLY) for name in answer.split(",")], ""
    except OSError as error:
      return [], str(error.strerror)
