"""`verify` under model parallelism: mistakes that a mesh shows are named."""

import dataclasses

import pytest
from defects import mesh as planted
from defects.small import Small, accused, explained, subject

from loopwright.errors import ConfigError
from loopwright.strategies import factories
from loopwright.tools.verify.checks import mesh

LAYOUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
SIZES = {"batch": 2, "model": 2}


def checked(task, layouts=LAYOUTS, sizes=SIZES):
  def strategy():
    return factories.model_parallel(mesh=sizes, layouts=layouts)

  return mesh.check(dataclasses.replace(subject(task), mesh=strategy))


DEFECTS = {
  "DividedByShares": (mesh.UPDATE, mesh.FACTOR, "/ shares()"),
  "GradientsOfAllDevices": (mesh.UPDATE, mesh.FACTOR, "def train_step"),
  "FirstPart": (mesh.UPDATE, mesh.ONE_PART, "[:rows]"),
  "MeanOfParts": (mesh.UPDATE, mesh.OF_PARTS, "tf.reduce_mean(means)"),
  "StatisticsOfParts": (mesh.UPDATE, mesh.OF_PARTS, "Loss.from_examples("),
  "PenaltyOfDevices": (mesh.UPDATE, mesh.PENALTY, "penalty * shares()"),
  "LostUpdate": (mesh.UPDATE, mesh.LOST, "def train_step"),
  "NoiseOfParts": (mesh.NOISE, mesh.NUMBERS, "tf.random."),
  "MeanOfOnePart": (mesh.STATE, mesh.PART_STATE, ".assign("),
  "MetricOfOnePart": (mesh.METRICS, mesh.PART_METRIC, "weighted_sum"),
  "NewAxis": (mesh.RUNS, mesh.CRASH, "[:, None]"),
  "ScalarCondition": (mesh.RUNS, mesh.CRASH, "tf.where"),
  "Rolled": (mesh.RUNS, mesh.NO_RULE, "tf.roll"),
}


@pytest.mark.fast(name=["FirstPart"])
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect(name):
  check, cause, words = DEFECTS[name]
  task = getattr(planted, name)
  explained(checked(task), task, {check: cause}, "", words)


@pytest.mark.whole
@pytest.mark.parametrize(
  ("layouts", "sizes", "message"),
  [
    ({"up/kernel": (None, "modle")}, SIZES, "'modle'.*Did you mean 'model'"),
    ({"up/kernal": (None, "model")}, SIZES, "'up/kernal'.*Did you mean 'up/kernel'"),
    ({"up/kernel": ("model",)}, SIZES, r"has shape \(3, 4\); give one entry"),
    ({"up/kernel": ("model", None)}, SIZES, "splits axis 0 .* must be a multiple"),
    ({"up/bia.": ("model",), "up/bias": ("model",)}, SIZES, "both match variable"),
  ],
)
def test_a_layout_that_cannot_be_is_refused(layouts, sizes, message):
  with pytest.raises(ConfigError, match=message):
    checked(planted.Network, layouts, sizes)


@pytest.mark.fast(sizes=[SIZES])
@pytest.mark.parametrize("sizes", [SIZES, {"batch": 4}, {"model": 2}])
def test_a_right_task(sizes):
  layouts = LAYOUTS if "model" in sizes else {}
  results = checked(planted.Network, layouts, sizes)
  assert accused(results) == []
  assert {*(mesh.RUNS, mesh.UPDATE, mesh.METRICS, mesh.NOISE, mesh.OWN)} <= {
    result.check for result in results if result.status == "passed"
  }


def test_without_a_mesh_there_is_nothing_to_check():
  assert mesh.check(subject(Small)) == []
