"""Group "randomness" of --mode=verify: planted defects are named and placed, right tasks pass."""

import keras
import pytest
from defects import randomness as defects
from defects import right
from defects.small import explained

from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.checks import randomness

STEP = ("repeats with the seed", "differs between steps", "differs between replicas")
AUGMENTATION = (
  "augmentation repeats with the seed",
  "augmentation differs between epochs",
  "augmentation differs between examples",
  "no augmentation in evaluation",
)
MIXES, NORMALISES = "random numbers mix no rows", "batch norm is active"
CHECKS = (*STEP, MIXES, "dropout is active", NORMALISES, "evaluation draws nothing", *AUGMENTATION)


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


DRAWS_NOTHING = dict.fromkeys((*STEP, MIXES, "dropout is active", NORMALISES), "not applicable")
NO_PREPROCESS = dict.fromkeys(AUGMENTATION, "not applicable")
EVALUATED = {"evaluation draws nothing": "passed"}
DROPS = {
  **dict.fromkeys((*STEP, MIXES, "dropout is active"), "passed"), NORMALISES: "not applicable",
  **EVALUATED,
}  # fmt: skip
NOISY = {**DROPS, "dropout is active": "not applicable"}
SAME_EVERY_EPOCH = {**NO_PREPROCESS, "no augmentation in evaluation": "passed"}
EXPECTED = {
  right.Right: {**DRAWS_NOTHING, **EVALUATED, **NO_PREPROCESS},
  right.Dropout: {**DROPS, **NO_PREPROCESS},
  right.OldDropout: {**DROPS, **NO_PREPROCESS},
  right.Augmented: {**DROPS, **dict.fromkeys(AUGMENTATION, "passed")},
  right.Module: {**NOISY, **NO_PREPROCESS},
  right.Weighted: {**DRAWS_NOTHING, **EVALUATED, **NO_PREPROCESS},
  right.TrainOnly: {
    **DROPS, **dict.fromkeys(AUGMENTATION, "passed"),
    **dict.fromkeys(("evaluation draws nothing", AUGMENTATION[3]), "not applicable"),
  },
  right.Streamed: {**DRAWS_NOTHING, **EVALUATED, **SAME_EVERY_EPOCH},
  defects.RandomFeatures: {
    **DRAWS_NOTHING, "repeats with the seed": "passed", MIXES: "passed", **EVALUATED,
    **SAME_EVERY_EPOCH,
  },
  defects.NoiseOfExamples: {**NOISY, **SAME_EVERY_EPOCH, AUGMENTATION[2]: "passed"},
  defects.SeededNumPyFunction: {
    **DRAWS_NOTHING, **EVALUATED, **dict.fromkeys(AUGMENTATION, "passed"),
  },
  defects.Teacher: {**DROPS, **NO_PREPROCESS},
  defects.Normalises: {**DRAWS_NOTHING, NORMALISES: "passed", **EVALUATED, **NO_PREPROCESS},
  defects.FineTuned: {**DRAWS_NOTHING, NORMALISES: "passed", **EVALUATED, **NO_PREPROCESS},
  defects.MixesAllRows: {**NOISY, STEP[2]: "not applicable", **NO_PREPROCESS},
  defects.NoDropout: {**DRAWS_NOTHING, **EVALUATED, **NO_PREPROCESS},
}  # fmt: skip


@pytest.mark.parametrize("task", EXPECTED)
@pytest.mark.fast(task=list(EXPECTED)[:2])
def test_a_right_task(task):
  assert {check: each.status for check, each in results(task).items()} == EXPECTED[task]


def test_micro_batches():
  found = results(right.Dropout, options={"accumulation_steps": 2})
  assert {check: each.status for check, each in found.items()} == EXPECTED[right.Dropout]
