#!/usr/bin/env python
"""Runs a worker of a synchronous cluster whose connections are TLS in both directions, by stunnel.

  python deploy/tls.py --certificates=/tls -- python launch.py --gin_file=...

Start every worker with it, one in a machine, pod or network namespace. TF_CONFIG has the addresses
that others reach, as without TLS. The folder has tls.crt and tls.key of this worker and ca.crt, the
authority that signs the workers' certificates and no other.

    stunnel    accepts TLS at this worker's address from TF_CONFIG -> 127.0.0.1:(first_port + i)
               accepts at 127.0.0.1:(first_port + j)               -> TLS to worker j's address
    training   gets a TF_CONFIG with 127.0.0.1:(first_port + j) as the address of worker j

TensorFlow still listens on all interfaces at first_port + i: a firewall or NetworkPolicy must admit
only the ports of TF_CONFIG. NCCL's connections between GPUs do not pass through stunnel.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
LISTEN = "0A"
LIMIT_S, POLL_S = 30.0, 0.1
COMMON = """\
foreground = yes
pid =
syslog = no
debug = warning
sslVersionMin = TLSv1.3
cert = {folder}/tls.crt
key = {folder}/tls.key
CAfile = {folder}/ca.crt
verifyChain = yes
delay = yes
TIMEOUTidle = 604800
"""


def main(argv: Sequence[str]) -> int:
  """Starts stunnel, then becomes the command; exits with 2 on a wrong flag or TF_CONFIG."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--certificates", required=True, help="folder of tls.crt, tls.key and ca.crt")
  parser.add_argument("--first_port", type=int, default=20000, help="of loopback")
  parser.add_argument("command", nargs="+")
  options = parser.parse_args(argv)
  for name in ("tls.crt", "tls.key", "ca.crt"):
    if not os.access(os.path.join(options.certificates, name), os.R_OK):
      parser.error(f"cannot read {name} in --certificates={options.certificates}")
  try:
    config = json.loads(os.environ["TF_CONFIG"])
    jobs, _ = {*config["cluster"]}, config["task"]["type"]
  except (KeyError, TypeError, ValueError) as error:
    parser.error(f"TF_CONFIG is not a cluster with a task ({error!r})")
  if not jobs <= {"chief", "worker"}:
    parser.error("TF_CONFIG must name chief and worker; parameter servers are not supported")
  conf = stunnel_conf(config, options.certificates, options.first_port)
  if problem := start_stunnel(conf, ports_of(conf)):
    parser.error(problem)
  os.environ["TF_CONFIG"] = json.dumps(on_loopback(config, options.first_port))
  os.execvp(options.command[0], options.command)


def tasks(config: dict[str, Any]) -> list[tuple[str, int, str]]:
  """Returns (job, index, address) of all tasks, in one order in all processes."""
  jobs = sorted(config["cluster"].items())
  return [(job, i, address) for job, addresses in jobs for i, address in enumerate(addresses)]


def on_loopback(config: dict[str, Any], first_port: int) -> dict[str, Any]:
  """Returns the TF_CONFIG of the training."""
  cluster: dict[str, list[str]] = {job: [] for job in config["cluster"]}
  for number, (job, *_) in enumerate(tasks(config)):
    cluster[job].append(f"127.0.0.1:{first_port + number}")
  return {**config, "cluster": cluster}


def stunnel_conf(config: dict[str, Any], folder: str, first_port: int) -> str:
  """Returns stunnel's configuration for this process."""
  own = config["task"]["type"], int(config["task"]["index"])
  text = COMMON.format(folder=os.path.abspath(folder))
  for number, (job, index, address) in enumerate(tasks(config)):
    local = f"127.0.0.1:{first_port + number}"
    if (job, index) == own:
      port = address.rpartition(":")[2]
      text += f"\n[{job}-{index}]\naccept = :::{port}\nconnect = {local}\n"
    else:
      text += f"\n[{job}-{index}]\nclient = yes\naccept = {local}\nconnect = {address}\n"
  return text


def ports_of(conf: str) -> set[int]:
  """Returns the ports at which stunnel accepts."""
  return {int(port) for port in re.findall(r"^accept = .*:(\d+)$", conf, re.MULTILINE)}


def start_stunnel(conf: str, ports: set[int]) -> str:
  """Starts stunnel, which ends with this process, and waits until it listens at all ports.

  Returns:
    What is wrong, in one line; "" if it listens.
  """
  if taken := ports & listening():
    named = ", ".join(map(str, sorted(taken)))
    return f"another program listens at {named}; end it, or give another --first_port"
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "stunnel.conf")
    file.write_text(conf)
    started = subprocess.Popen(["stunnel4", str(file)], preexec_fn=end_with_parent)
    for _ in range(round(LIMIT_S / POLL_S)):
      if ports <= listening():
        return ""
      with contextlib.suppress(subprocess.TimeoutExpired):
        return f"stunnel ended with status {started.wait(POLL_S)}"
    started.kill()
  silent = ", ".join(map(str, sorted(ports - listening())))
  return f"stunnel does not listen at {silent} after {LIMIT_S:g} s; training has not started"


def listening() -> set[int]:
  """Returns the ports at which anything on this machine accepts connections."""
  lines = [
    line.split()
    for table in ("tcp", "tcp6")
    if (file := Path("/proc/net", table)).exists()
    for line in file.read_text().splitlines()[1:]
  ]
  return {int(columns[1].rpartition(":")[2], 16) for columns in lines if columns[3] == LISTEN}


def end_with_parent() -> None:
  """Makes the kernel end this process when its parent ends."""
  ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
