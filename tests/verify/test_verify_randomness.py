"""Group "randomness" of --mode=verify: planted defects are named and placed, right tasks pass."""

import keras
import pytest
from defects import randomness as defects
from defects import right
from defects.small import explained

from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.checks import randomness

CHECKS = (
  *("repeats with the seed", "differs between steps", "differs between replicas"),
  *("random numbers mix no rows", "dropout is active", "batch norm is active"),
  "evaluation draws nothing",
  *("augmentation repeats with the seed", "augmentation differs between epochs"),
  *("augmentation differs between examples", "no augmentation in evaluation"),
)


def results(task, **options):
  subject = Subject(task=task, optimizer=keras.optimizers.Adam, global_batch_size=16, **options)
  found = randomness.check(subject)
  assert tuple(each.check for each in found) == CHECKS
  assert {each.group for each in found} == {"randomness"}
  return {each.check: each for each in found}


@pytest.mark.parametrize("name", defects.DEFECTS)
@pytest.mark.fast(name=["FixedSeed", "LayerOfKeras", "StatefulFlip"])
def test_a_defect(name):
  causes, says, words = defects.DEFECTS[name]
  task = getattr(defects, name)
  explained(results(task).values(), task, causes, says, words)


EXPECTED = {
  right.Right: "--- --- + ----",
  right.Dropout: "+++ ++- + ----",
  right.OldDropout: "+++ ++- + ----",
  right.Augmented: "+++ ++- + ++++",
  right.Module: "+++ +-- + ----",
  right.Weighted: "--- --- + ----",
  right.TrainOnly: "+++ ++- - +++-",
  right.Streamed: "--- --- + ---+",
  defects.RandomFeatures: "+-- +-- + ---+",
  defects.NoiseOfExamples: "+++ +-- + --++",
  defects.SeededNumPyFunction: "--- --- + ++++",
  right.Normalised: "--- --+ + ----",
  defects.FineTuned: "--- --+ + ----",
  defects.MixesAllRows: "++- +-- + ----",
  defects.NoDropout: "--- --- + ----",
}
"""Task -> which of CHECKS pass (+), and which do not apply (-)."""
MARKS = {"passed": "+", "not applicable": "-", "failed": "failed"}


def marks(results):
  return "".join(MARKS[each.status] for each in results.values())


@pytest.mark.parametrize("task", EXPECTED)
@pytest.mark.fast(task=list(EXPECTED)[:2])
def test_a_right_task(task):
  assert marks(results(task)) == EXPECTED[task].replace(" ", "")


def test_micro_batches():
  found = results(right.Dropout, options={"accumulation_steps": 2})
  assert marks(found) == EXPECTED[right.Dropout].replace(" ", "")
