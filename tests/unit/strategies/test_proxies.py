"""A proxy in the environment, which gRPC takes: not for loopback, and with a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import logging

from loopwright.strategies.workers import proxies

ROOT = Path(__file__).parents[3]
NAMES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")


@pytest.mark.parametrize(
  ("environment", "after", "warned"),
  [
    ({}, {}, []),
    ({"no_proxy": "a.b"}, {"no_proxy": "a.b"}, []),
    ({"http_proxy": "p"}, {"no_proxy": "127.0.0.1,localhost,::1"}, ["10.0.0.3", "node.a.b"]),
    (
      {"https_proxy": "p", "no_proxy": "localhost, .a.b"},
      {"no_proxy": "localhost,.a.b,127.0.0.1,::1"}, ["10.0.0.3"],
    ),
    (
      {"grpc_proxy": "p", "no_proxy": "10.0.0.3", "no_grpc_proxy": "a.b"},
      {"no_proxy": "10.0.0.3", "no_grpc_proxy": "a.b,127.0.0.1,localhost,::1"}, ["10.0.0.3"],
    ),
    (
      {"http_proxy": "p", "no_proxy": "10.0.0.3,a.b"},
      {"no_proxy": "10.0.0.3,a.b,127.0.0.1,localhost,::1"}, [],
    ),
  ],
)  # fmt: skip
def test_what_the_environment_then_says(monkeypatch, environment, after, warned):
  for name in NAMES:
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  said = []
  monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
  proxies.avoid(["127.0.0.1:1", "[::1]:2", "localhost:3", "10.0.0.3:4", "node.a.b:5"])
  assert {n: os.environ[n] for n in ("no_proxy", "no_grpc_proxy") if n in os.environ} == after
  assert len(said) == bool(warned)
  for line in said:
    assert f" with {', '.join(warned)} through a proxy" in line


CONFIG = """
include 'configs/digits_cnn.gin'
run.strategy = @multi_worker_mirrored
run.train_steps = 2
"""


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_local_cluster_trains_beside_a_proxy_that_nothing_gets_through(tmp_path):
  (tmp_path / "x.gin").write_text(CONFIG)
  command = [sys.executable, ROOT / "launch.py", "train", "x.gin", "--local_workers=2"]
  done = subprocess.run(
    command, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    env={**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("done: step 2 |")
  assert "through a proxy" not in done.stderr
