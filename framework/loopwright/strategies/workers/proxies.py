"""TensorFlow's gRPC takes the proxy of the environment, also for other processes of this machine.

A proxy on the way to a peer answers late, wrongly or never, and TensorFlow then waits in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from absl import logging

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""What gRPC reads, in its order; only in small letters."""
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def avoid(addresses: Iterable[str]) -> None:
  """Takes loopback out of the proxy's reach, and warns of other peers in it (host).

  Call it before TensorFlow connects to "host:port".
  """
  proxy = next((name for name in _PROXIES if os.environ.get(name)), None)
  if proxy is None:
    return
  name = next((name for name in _EXCEPTIONS if os.environ.get(name)), _EXCEPTIONS[-1])
  spared = [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]
  spared += [host for host in LOOPBACK if host not in spared]
  os.environ[name] = ",".join(spared)
  hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
  covered = sorted({host for host in hosts if not host.endswith(tuple(spared))})
  if covered:
    logging.warning(
      "%s in the environment sends TensorFlow's traffic with %s through a proxy, where it mostly "
      "waits in silence; add %s to %s.",
      proxy, ", ".join(covered), ",".join(covered), name,
    )  # fmt: skip
