"""Trains on two workers in two network namespaces, connected by TLS as deploy/tls.py does.

  python -m benchmarks.tls_workers     (as root; needs iproute2, nftables, stunnel4 and openssl)

    plain     without TLS: a listener on the network finds TensorFlow's methods in its frames
    tls       status 0 and the same checkpoint; the listener finds nothing; TensorFlow's own port is
              closed by nftables; a client without a certificate is refused
    killed    SIGKILL to worker 1: worker 0 names it and ends with status 1
    other_ca  worker 1 has a certificate of another authority: both end with status 1

Exit status 1 if any of this does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.network import Network, available, in_namespace

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "benchmarks/fault_trials.gin"
PORT, FIRST_PORT = 2222, 20000
WORDS = (b"tensorflow.WorkerService", b"/job:worker", b"CollectiveReduce")
FIREWALL = (
  "add table inet lw; add chain inet lw in { type filter hook input priority 0; policy accept; };"
  f'add rule inet lw in iifname != "lo" tcp dport != {PORT} ct state new drop'
)


def openssl(folder: Path, *arguments: str) -> None:
  subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder: Path) -> Path:
  """Makes a certificate authority and the certificate of one worker; returns the folder."""
  folder.mkdir()
  new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj")
  openssl(folder, *new, "/CN=cluster", "-keyout", "ca.key", "-out", "ca.crt")
  openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=worker",
          "-keyout", "tls.key", "-out", "tls.csr")  # fmt: skip
  openssl(folder, "x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days",
          "2", "-CAcreateserial", "-out", "tls.crt")  # fmt: skip
  return folder


def start(network: Network, index: int, folder: Path, steps: int, tls: Path | None):
  addresses = [f"{host}:{PORT}" for host in network.hosts]
  config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
  params = (f"run.train_steps = {steps}", "multi_worker_mirrored.start_timeout_s = 25.0")
  command = [sys.executable, "launch.py", f"--gin_file={CONFIG}", f"--model_dir={folder}/m"]
  command += [f"--gin_param={param}" for param in params]
  if tls:
    command = [sys.executable, "deploy/tls.py", f"--certificates={tls}", "--", *command]
  env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CONFIG": json.dumps(config)}
  with (folder / f"log-{index}").open("w") as log:
    return subprocess.Popen(
      [*network.inside(index), *command], cwd=REPOSITORY, env=env, stdout=log, stderr=log
    )


def probe(network: Network, tls: Path) -> list[str]:
  """Tries worker 0's ports from the other namespace; returns what is wrong."""
  wrong = []
  with in_namespace(network.name(1)):
    try:
      with socket.create_connection((network.hosts[0], FIRST_PORT), timeout=2):
        wrong.append("TensorFlow's port is open")
    except OSError:
      pass
    for certificate in (False, True):
      context = ssl.create_default_context(cafile=str(tls / "ca.crt"))
      context.check_hostname = False
      if certificate:
        context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
      try:
        plain = socket.create_connection((network.hosts[0], PORT), timeout=2)
        with plain, context.wrap_socket(plain) as connection:
          connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
          answered = bool(connection.recv(1))
      except OSError:
        answered = False
      if answered != certificate:
        wrong.append(f"a client {'with' if certificate else 'without'} a certificate: {answered}")
  return wrong


def trial(kind: str, base: Path, steps: int) -> list[str]:
  folder = base / kind
  folder.mkdir()
  tls = [authority(folder / f"tls-{i}") for i in (0, 1)]
  used = {"plain": [None, None], "other_ca": tls}.get(kind, [tls[0]] * 2)
  wrong = []
  with Network(2) as network:
    network.keep = True
    for index in (0, 1) if kind != "plain" else ():
      subprocess.run([*network.inside(index), "nft", FIREWALL], check=True)
    processes = [start(network, index, folder, steps, used[index]) for index in (0, 1)]
    if kind == "tls":
      wait_for(processes[0], folder / "m" / "metrics.jsonl")
      wrong += probe(network, tls[0])
    if kind == "killed":
      wait_for(processes[0], folder / "m" / "metrics.jsonl")
      processes[1].kill()
    status = [process.wait() for process in processes]
    expected = {"other_ca": [1, 1], "killed": [1, -9]}.get(kind, [0, 0])
    if status != expected:
      wrong.append(f"status {status}, not {expected}")
    found = [word.decode() for word in WORDS if word in network.seen]
    print(f"{kind}: status {status}, {len(network.seen) / 1e6:.1f} MB seen, words found: {found}")
  if kind == "killed" and "lost worker-1 (127.0.0.1:20001)" not in (folder / "log-0").read_text():
    wrong.append("worker 0 does not name worker 1")
  if bool(found) != (kind == "plain"):
    wrong.append(f"words found: {found}")
  return wrong


def wait_for(process: subprocess.Popen[bytes], file: Path) -> None:
  while process.poll() is None and not file.exists():
    time.sleep(0.05)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=200)
  options = parser.parse_args()
  if reason := available():
    raise SystemExit(f"cannot make network namespaces: {reason}")
  base = Path(tempfile.mkdtemp(prefix="tls_workers_"))
  kinds = ("plain", "tls", "killed", "other_ca")
  wrong = {kind: trial(kind, base, options.steps) for kind in kinds}
  from benchmarks.comparison import different_tensors

  name = f"m/checkpoints/ckpt-{options.steps}"
  wrong["tls"] += different_tensors(base / "tls" / name, base / "plain" / name)
  for kind, lines in wrong.items():
    print(f"{kind}: {'; '.join(lines[:5]) or 'as expected'}")
  if not any(wrong.values()):
    shutil.rmtree(base)
  return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
  sys.exit(main())
