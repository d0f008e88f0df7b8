"""Network namespaces of this machine, joined by a switch that can lose, delay and cut.

  with Network(3) as network:
    process = subprocess.Popen([*network.inside(0), "python", "launch.py", ...])
    network.link(0, 1, loss=0.3, delay_s=0.05)
    network.cut(2)

Each namespace has one address, `network.hosts[i]`, on a TAP device whose frames this process
forwards in a thread. So it needs neither netem nor a bridge in the kernel; it needs root, iproute2
and /dev/net/tun. Only addresses of these namespaces are reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000
CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Link:
  """One direction between two namespaces."""

  loss: float = 0.0
  delay_s: float = 0.0


class Network:
  """So many namespaces on one switch."""

  def __init__(self, count: int, *, seed: int = 0) -> None:
    self.hosts = [f"10.77.0.{index + 1}" for index in range(count)]
    self._names = [f"lw{os.getpid()}n{next(_numbers)}" for _ in range(count)]
    self._links: dict[tuple[int, int], Link] = {}
    self._rng = random.Random(seed)
    self._ended = threading.Event()
    self.seen = bytearray()  # the last frames, if `keep` is set
    self.keep = False

  def __enter__(self) -> Network:
    for name in self._names:
      run("ip", "netns", "add", name)
    self._taps = [self._tap(index) for index in range(len(self._names))]
    self._thread = threading.Thread(target=self._forward, daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *unused: object) -> None:
    self._ended.set()
    self._thread.join()
    for tap in self._taps:
      os.close(tap)
    for name in self._names:
      run("ip", "netns", "delete", name)

  def name(self, index: int) -> str:
    """Returns the name of a namespace."""
    return self._names[index]

  def inside(self, index: int) -> list[str]:
    """Returns the beginning of a command that runs in a namespace."""
    return ["ip", "netns", "exec", self._names[index]]

  def link(self, a: int, b: int, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
    """Sets both directions between two namespaces."""
    self._links[a, b] = self._links[b, a] = Link(loss, delay_s)

  def one_way(self, source: int, target: int, *, loss: float) -> None:
    self._links[source, target] = Link(loss)

  def cut(self, index: int) -> None:
    """Loses everything from and to a namespace."""
    for other in range(len(self.hosts)):
      if other != index:
        self.link(index, other, loss=1.0)

  def heal(self) -> None:
    self._links.clear()

  def _tap(self, index: int) -> int:
    with in_namespace(self._names[index]):
      tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
      fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"tap0", IFF_TAP | IFF_NO_PI))
    inside = self.inside(index)
    run(*inside, "ip", "address", "add", f"{self.hosts[index]}/24", "dev", "tap0")
    run(*inside, "ip", "link", "set", "tap0", "mtu", "9000", "up")
    run(*inside, "ip", "link", "set", "lo", "up")
    return tap

  def _forward(self) -> None:
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    places: dict[bytes, int] = {}  # MAC address -> namespace
    while not self._ended.is_set():
      now = time.monotonic()
      while waiting and waiting[0][0] <= now:
        _, _, target, frame = heapq.heappop(waiting)
        with contextlib.suppress(OSError):
          os.write(self._taps[target], frame)
      left = min(0.2, waiting[0][0] - now) if waiting else 0.2
      for tap in select.select(self._taps, [], [], max(left, 0))[0]:
        source = self._taps.index(tap)
        with contextlib.suppress(OSError):
          frame = os.read(tap, 65536)
          places[frame[6:12]] = source
          known = places.get(frame[:6])
          others = [i for i in range(len(self._taps)) if i != source]
          for target in others if known is None else [known]:
            link = self._links.get((source, target), Link())
            if self._rng.random() >= link.loss:
              self._keep(frame)
              heapq.heappush(waiting, (now + link.delay_s, next(order), target, frame))

  def _keep(self, frame: bytes) -> None:
    if self.keep:
      self.seen += frame


def enter(name: str, *, folder: str = "/run/netns") -> None:
  """Puts the calling thread into a namespace."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f"{folder}/{name}") as there:
    if libc.setns(there.fileno(), CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def in_namespace(name: str):
  """Puts the calling thread into a namespace for a while."""
  with open("/proc/thread-self/ns/net") as before:
    enter(name)
    try:
      yield
    finally:
      enter(str(before.fileno()), folder="/proc/self/fd")


def run(*command: str) -> None:
  subprocess.run(command, check=True)


def available() -> str:
  """Returns why there can be no such network, or ""."""
  if os.geteuid():
    return "it needs root"
  if not shutil.which("ip"):
    return "there is no ip command (iproute2)"
  if not Path("/dev/net/tun").exists():
    return "there is no /dev/net/tun"
  return ""
