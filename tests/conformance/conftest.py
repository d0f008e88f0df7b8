"""Runs the cases that were selected, all from one import of TensorFlow: see worker.py."""

import json
import os
import pathlib
import subprocess
import sys

import cases
import compiled
import numpy as np
import pytest

import loopwright

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 3600 if compiled.COMPILED else 540


class Results:
  """What the workers have written, by case."""

  def __init__(self, folder, selected):
    self._folder = folder
    paths = [pathlib.Path(loopwright.__file__).parents[1], HERE.parent / "support"]
    command = [sys.executable, str(HERE / "worker.py"), str(folder), *(c.id for c in selected)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    try:
      done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
      )
    except subprocess.TimeoutExpired as error:
      self._output = f"after {TIMEOUT_S} s: {error.stderr}"
    else:
      self._output = f"status {done.returncode}: {done.stderr[-5000:]}"

  def __getitem__(self, case):
    """Returns (name -> copies on all devices, facts) of one case."""
    error = self._folder / f"{case.id}.error"
    assert not error.exists(), error.read_text()
    path = self._folder / f"{case.id}.npz"
    assert path.exists(), f"the worker of {case.replicas} replicas ended early:\n{self._output}"
    with np.load(path) as arrays:
      values = dict(arrays)
    return values, json.loads(str(values.pop("facts")))


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
  """Indexed by case."""
  parameters = [getattr(item, "callspec", None) for item in request.session.items]
  found = [p.params.get("case") for p in parameters if p is not None]
  selected = dict.fromkeys(case for case in found if isinstance(case, cases.Case))
  return Results(tmp_path_factory.mktemp("conformance"), selected)
