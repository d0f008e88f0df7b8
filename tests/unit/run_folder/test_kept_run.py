"""A run folder that version 0.1 wrote: its checkpoint restores, its ledger proves.

tests/support/kept_run_0_1 holds 30 steps of metrics and ledger, and the checkpoint of step 20.
"""

import re
import shutil
from pathlib import Path

import kept_run
import numpy as np
import pytest
from runs import records

import launch
from loopwright.tools.ledger.proof import prove, read

FOLDER = Path(kept_run.__file__).parent / "kept_run_0_1"


@pytest.fixture
def kept(tmp_path):
  return Path(shutil.copytree(FOLDER, tmp_path / "kept"))


def values(folder, name):
  """Step -> a value of the training log."""
  return {record["step"]: record[name] for record in records(folder, "train")}


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_goes_on_as_it_did_then(kept, replicas):
  """From step 20 to 30, to the losses that it logged then, dropout included.

  Its config names actions and options that are gone: its user takes them out, and accepts that.
  """
  before = {name: values(kept, name) for name in ("loss", "gradient_norm", "loss_scale")}
  written = (kept / "operative_config.gin").read_text().splitlines()
  gone = re.compile(r"run\.actions|LayerStatistics|image_folder\.max_bytes")
  (kept / "mine.gin").write_text("\n".join(each for each in written if not gone.match(each)))
  config = f"--gin_file={kept / 'mine.gin'}"
  on = f"--gin_param=auto.cpu_replicas = {replicas}"
  accepted = "--accept_changes"
  assert launch.main(["x", config, on, "--mode=train", f"--model_dir={kept}", accepted]) == 0
  for name, expected in before.items():
    found = values(kept, name)
    assert sorted(found) == [5, 10, 15, 20, 25, 30]
    if replicas == 1:  # on two, other examples meet other dropout masks
      np.testing.assert_allclose(found[25], expected[25], rtol=1e-5, err_msg=name)
      np.testing.assert_allclose(found[30], expected[30], rtol=1e-5, err_msg=name)
    assert found[20] == expected[20]
  proof = prove(read(str(kept))[""], checkpoint_step=30)
  assert (proof.last_step, proof.reruns) == (30, 10)  # steps 21 to 30 were made twice


def test_its_ledger_proves_what_it_read(kept):
  proof = prove(read(str(kept))[""], checkpoint_step=20)
  assert (proof.last_step, proof.reruns, proof.parts[""].epochs) == (30, 0, 30 * 12 // 50)
