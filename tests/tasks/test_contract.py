"""What every shipped task keeps; what is special to one is in a file of its own."""

import keras
import properties
import pytest
import runs
import shipped
import tensorflow as tf
from shipped import (
  EXAMPLES,
  MAKERS,
  distilled,
  fixmatch,
  moco,
  reference,
  sam,
  simclr,
  sines,
  trained,
  wgan_gp,
)

from loopwright.errors import ConfigError
from loopwright.runs import runner
from loopwright.tasks.decoder import decoder
from loopwright.tasks.gan import Gan
from loopwright.tasks.generation import Continued
from loopwright.tasks.image_classification import ImageData, digits
from loopwright.tasks.language_model import LanguageModel, TextFiles, transformer
from loopwright.tasks.preference import Preferred

each_task = pytest.mark.parametrize("name", MAKERS)


@pytest.mark.parametrize(
  ("name", "replicas"), [*[(name, 2) for name in MAKERS], ("contrastive", 3), ("moco", 3)]
)
@pytest.mark.fast(name=["contrastive", "maml"], replicas=[2])
def test_n_replicas_equal_one(name, replicas, mirrored):
  """To 1e-5 after ten steps of batches of 7: with 1 padded row on 2 replicas, 2 on 3."""
  properties.n_replicas_equal_one(reference(name), trained(name, mirrored(replicas)))


@each_task
@pytest.mark.fast(name=["wgan_gp", "distillation"])
def test_n_replicas_evaluate_as_one(name, mirrored):
  """All 21 examples at once, so that neighbours are the same; a padded row on 2 replicas."""
  results = []
  for replicas in (1, 2):
    keras.utils.set_random_seed(3)
    evaluator = runs.make_evaluator(MAKERS[name](), mirrored(replicas), batch=EXAMPLES)
    results.append(evaluator.evaluate())
  assert results[0] == pytest.approx(results[1], rel=1e-5)
  assert len(results[0]) >= 1 + (name != "histograms")


@each_task
def test_order_is_function_of_seed(name):
  properties.order_is_function_of_seed(MAKERS[name](), 7)


@each_task
@pytest.mark.whole
def test_resumed_equals_uninterrupted(name, tmp_path):
  def train(folder, steps):
    task = MAKERS[name]()
    runner.run(
      task=task, mode="train", model_dir=str(tmp_path / folder), train_steps=steps,
      global_batch_size=7, optimizer=shipped.optimizers(task), steps_per_loop=1,
    )  # fmt: skip
    return tf.train.load_checkpoint(str(tmp_path / folder / "checkpoints" / f"ckpt-{steps}"))

  properties.resumed_equals_uninterrupted(train, steps=5, at=2)


def continued(**options):
  return Continued(corpus=None, context=12, **options)


def preferred(**options):
  return Preferred(corpus=None, start="runs/none", **options)


ANOTHER = ImageData(sources={}, image_shape=(8, 8, 1), labels=1)
DIVIDES = "^decoder.groups is {} and decoder.heads 4; groups must divide heads"
REFUSED = [
  (simclr, {"temperature": 0.0}, "Contrastive.temperature is 0.0; it must be above 0"),
  (simclr, {"zoom": 0.5}, "Contrastive.zoom is 0.5; it must be 1"),
  (simclr, {"contrast": 1.0}, "Contrastive.contrast is 1.0; it must be from 0"),
  (sam, {"rho": -0.1}, "SharpClassification.rho is -0.1; it must be 0 or more"),
  (wgan_gp, {"penalty": -1.0}, "WassersteinGan.penalty is -1.0; it must be 0 or more"),
  (distilled, {"temperature": -1.0}, "Distillation.temperature is -1.0; it must be above 0"),
  (distilled, {"hard_weight": 1.5}, "Distillation.hard_weight is 1.5; it must be from 0 to 1"),
  (sines, {"support": 0}, "SinusoidMaml.support is 0; it must be 1 or more"),
  (sines, {"inner_steps": 0}, "SinusoidMaml.inner_steps is 0; it must be 1 or more"),
  (sines, {"eval_steps": (-1,)}, r"SinusoidMaml.eval_steps is \(-1,\); it must have numbers"),
  (moco, {"queue_size": 0}, "MomentumContrast.queue_size is 0"),
  (moco, {"momentum": 1.0}, "MomentumContrast.momentum is 1.0"),
  (
    Gan,
    {"data": ANOTHER, "discriminator_steps": 0},
    "^Gan.discriminator_steps is 0; it must be 1 or more",
  ),
  (
    Gan,
    {"data": ANOTHER, "discriminator_steps": -1},
    "^Gan.discriminator_steps is -1; it must be 1 or more",
  ),
  (Gan, {"data": ANOTHER}, r"shape \(8, 8, 1\); they must be of shape \(28, 28, 1\)"),
  (
    decoder,
    {"width": 18, "heads": 4},
    "^decoder.width is 18 and decoder.heads 4; width / heads must be an",
  ),
  (decoder, {"groups": 3}, DIVIDES.format(3)),
  (decoder, {"groups": 0}, DIVIDES.format(0)),
  (continued, {"continued_bytes": 0}, "^Continued.continued_bytes is 0; it must be from 1"),
  (continued, {"continued_bytes": 12}, "^Continued.continued_bytes is 12; it must be from 1"),
  (preferred, {"beta": 0}, "^Preferred.beta is 0; it must be above 0"),
  (preferred, {"prompt_bytes": 0}, "^Preferred.prompt_bytes is 0; it must be above 0"),
  (preferred, {"continued_bytes": 0}, "^Preferred.continued_bytes is 0; it must be above 0"),
  (
    LanguageModel,
    {"corpus": None, "context": 0},
    "^LanguageModel.context is 0; it must be 1 byte or more",
  ),
  (
    transformer,
    {"width": 20, "heads": 4},
    "^transformer.width is 20 and transformer.heads 4; .*128",
  ),
  (
    TextFiles,
    {"path": "no/such"},
    "^TextFiles.path is 'no/such', which does not exist; give a file or",
  ),
  (
    TextFiles,
    {"path": ".", "eval_fraction": 1},
    "^TextFiles.eval_fraction is 1; it must be between 0 and 1",
  ),
  (digits, {"train_examples": 0}, "train_examples is 0; it must be from 1 to 1438"),
  (digits, {"train_examples": -1}, "train_examples is -1; it must be from 1 to 1438"),
  (digits, {"train_examples": 1439}, "train_examples is 1439; it must be from 1 to 1438"),
  (digits, {"eval_fraction": 0.0}, "digits.eval_fraction is 0.0; it must be between"),
  (digits, {"eval_fraction": 1.0}, "digits.eval_fraction is 1.0; it must be between"),
  (digits, {"eval_fraction": -0.5}, "digits.eval_fraction is -0.5; it must be between"),
]


@pytest.mark.parametrize(("make", "options", "line"), REFUSED)
def test_a_wrong_option_is_one_line(make, options, line):
  with pytest.raises(ConfigError, match=line):
    make(**options)


@pytest.mark.parametrize(
  ("make", "options", "line"),
  [
    (simclr, {"input_shape": (28, 28, 1)}, r"Contrastive.input_shape is \(28, 28, 1\)"),
    (fixmatch, {"labels": 10}, "FixMatch.labels is 10; it must be a multiple of the 4"),
    (fixmatch, {"labels": 400}, "class 0 has fewer"),
  ],
)
def test_what_does_not_fit_the_data_is_one_line(make, options, line):
  with pytest.raises(ConfigError, match=line):
    make(**options).source("train")
