"""deploy/slurm.sh under a real Slurm on this machine."""

import itertools
import os
import signal

import clustered
import numpy as np
import pytest
import tensorflow as tf
from runs import records
from test_multi_worker import BATCH, CONFIG, RATE, SUPPORT, reference

from benchmarks import slurm as real
from loopwright import ArraySource
from loopwright.inputs import datasets

STEPS, GATES = 24, (8, 16)
GATED = """
import pathlib
import time
import loopwright

@loopwright.register
class Gated(loopwright.Action):
  on = "train"

  def __call__(self, output):
    time.sleep(0.3)
    for step in {gates}:
      if self.run.step == step:
        pathlib.Path("{folder}/at-%d" % step).touch()
        while not pathlib.Path("{folder}/go-%d" % step).exists():
          time.sleep(0.05)
"""
OPTIONS = ["--nodes=1-2", "--export=ALL,LOOPWRIGHT_WORKERS=1:2,LOOK_S=1"]
"""One node or two; the job looks at them every second."""
WANTS_OTHERS = "this job wants other nodes"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
  if reason := real.available():
    pytest.skip(f"no Slurm can be started: {reason}")
  monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SUPPORT}")
  with real.Slurm(tmp_path / "slurm", nodes=2) as started:
    yield started


def submit(slurm, folder):
  (folder / "gated.py").write_text(GATED.format(folder=folder, gates=GATES))
  text = CONFIG.format(folder=folder, rate=RATE, batch=BATCH, steps=STEPS)
  config = folder / "config.gin"
  config.write_text("import gated\n" + text.replace("@Keeper()", "@Keeper(), @Gated()"))
  return slurm.submit(folder / "run", config, OPTIONS)


def expected():
  source = ArraySource(features={"x": clustered.X, "y": clustered.Y, "weight": clustered.WEIGHT})
  batches = datasets.train_dataset(source, global_batch_size=BATCH, seed=0).as_numpy_iterator()
  return reference([batch["example_id"] for batch in itertools.islice(batches, STEPS)])


@pytest.mark.whole
def test_a_killed_task_and_a_node_that_is_drained_and_returns_cost_nothing(slurm, tmp_path):
  job = submit(slurm, tmp_path)

  def change(step, *words):
    """Changes a node while training waits after a step, until the job has noticed."""
    job.wait((tmp_path / f"at-{step}").exists)
    workers, noticed = len(job.nodes()), job.log().count(WANTS_OTHERS)
    slurm.command("scontrol", "update", *words)
    job.wait(lambda: job.log().count(WANTS_OTHERS) > noticed)
    (tmp_path / f"go-{step}").touch()
    return workers

  job.wait_for_step(3)
  os.kill(job.task(1), signal.SIGKILL)
  real.wait_until(lambda: "restarting all workers, attempt 1" in job.log() or job.ended())
  assert change(8, "NodeName=n2", "State=DRAIN", "Reason=test") == 2
  assert change(16, "NodeName=n2", "State=RESUME") == 1
  assert (job.wait(), job.field("Restarts")) == ("COMPLETED", "2"), job.log()
  assert job.nodes() == [1, 2]
  assert "is in use by" not in job.log()
  assert job.records() == []

  [kernel, *_], losses = expected()
  train = records(job.folder / "m", "train")
  assert [line["step"] for line in train] == list(range(1, STEPS + 1))
  assert [line["loss"] for line in train] == pytest.approx(losses, rel=1e-5)
  checkpoint = tf.train.load_checkpoint(str(job.folder / "m" / "checkpoints" / f"ckpt-{STEPS}"))
  shapes = checkpoint.get_variable_to_shape_map().items()
  [name] = [name for name, shape in shapes if shape == [3, 1] and "slow" not in name]
  np.testing.assert_allclose(checkpoint.get_tensor(name)[:, 0], kernel, rtol=1e-5)
