"""Four groups of --mode=verify report nothing of the configs in configs/."""

import gin
import pytest
import reviews
from config_data import FOLDER, stand_ins

from loopwright import configurables
from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.checks import evaluation, inputs, lengths, randomness

WITHOUT = "no preprocess()"
NO_LABEL = "no integer feature picks one of 10 outputs in the loss"
NO_CLASSES = "forward() returns no float tensor [n, classes]"
NO_NORM = "the model has no batch normalisation to train"
NOTHING_RANDOM = [
  *3 * ["the step draws no random numbers"],
  "the step draws nothing",
  "the model has no random layer",
  NO_NORM,
  *3 * ["preprocess() adds nothing random when training"],
]


@pytest.fixture(autouse=True)
def quick():
  yield
  reviews.forget_package()


def made(reference):
  """What gin gives for a reference, or for a dict of them."""
  if isinstance(reference, dict):
    return {name: made(each) for name, each in reference.items()}
  return reference.scoped_configurable_fn


def subject_of(name, folder):
  """The subject of a config, on a few examples where its data may not be installed."""
  params = stand_ins(name, folder)
  params += ["run.global_batch_size = 4"] * bool(params)
  configurables.parse([str(FOLDER / name)], params)
  task, optimizer = (made(gin.query_parameter(f"run.{each}")) for each in ("task", "optimizer"))
  size = gin.query_parameter("run.global_batch_size")
  return Subject(task=task, optimizer=optimizer, global_batch_size=size)


@pytest.mark.parametrize(
  ("name", "without"),
  [
    ("digits_cnn.gin", [NO_NORM]),
    ("digits_contrastive.gin", ["Contrastive has no forward() and loss()", *NOTHING_RANDOM[:6]]),
    ("digits_distillation.gin", NOTHING_RANDOM),
    ("sinusoid_maml.gin", [WITHOUT, NO_LABEL, *NOTHING_RANDOM[:6], *4 * [WITHOUT]]),
    ("fashion_mnist_gan.gin", ["Gan has no forward() and loss()", NO_NORM]),
    ("imdb.gin", [WITHOUT, NO_CLASSES, NO_NORM, *[WITHOUT] * 4]),
    ("language_model.gin", NOTHING_RANDOM),
  ],
)
@pytest.mark.fast(name=["digits_cnn.gin"])
def test_a_config(name, without, tmp_path):
  subject = subject_of(name, tmp_path)
  results = [*inputs.check(subject), *randomness.check(subject)]
  assert not [each for each in results if each.status == "failed"]
  skipped = [each.detail for each in results if each.status == "not applicable"]
  assert skipped == without
  evaluated = [*evaluation.check(subject), *lengths.check(subject)]
  assert not [each for each in evaluated if each.status == "failed"]
