"""Runs the cases that were selected, in one process for each number of replicas, two at a time."""

import collections
import json
import os
import pathlib
import subprocess
import sys
from concurrent import futures

import cases
import numpy as np
import pytest

import framework

HERE = pathlib.Path(__file__).parent
AT_ONCE = 2
TIMEOUT_S = 540


class Results:
  """What the workers have written, by case."""

  def __init__(self, folder, selected):
    self._folder, self._pool = folder, futures.ThreadPoolExecutor(AT_ONCE)
    by_replicas = collections.defaultdict(list)
    for case in selected:
      by_replicas[case.replicas].append(case.id)
    largest_first = sorted(by_replicas, key=lambda n: -n * len(by_replicas[n]))
    self._workers = {n: self._pool.submit(self._run, n, by_replicas[n]) for n in largest_first}

  def __getitem__(self, case):
    """Returns (name -> copies on all devices, facts) of one case; waits for its worker."""
    output = self._workers[case.replicas].result()
    error = self._folder / f"{case.id}.error"
    assert not error.exists(), error.read_text()
    path = self._folder / f"{case.id}.npz"
    assert path.exists(), f"the worker of {case.replicas} replicas ended early:\n{output}"
    with np.load(path) as arrays:
      values = dict(arrays)
    return values, json.loads(str(values.pop("facts")))

  def _run(self, replicas, ids):
    root = pathlib.Path(framework.__file__).parents[1]
    command = [sys.executable, str(HERE / "worker.py"), str(self._folder), *ids]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
      done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
      )
    except subprocess.TimeoutExpired as error:
      return f"after {TIMEOUT_S} s: {error.stderr}"
    return f"status {done.returncode}: {done.stderr[-5000:]}"


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
  """Indexed by case."""
  parameters = [getattr(item, "callspec", None) for item in request.session.items]
  found = [p.params.get("case") for p in parameters if p is not None]
  selected = dict.fromkeys(case for case in found if isinstance(case, cases.Case))
  return Results(tmp_path_factory.mktemp("conformance"), selected)
