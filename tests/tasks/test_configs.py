"""Every config in configs/ parses, builds what it says and trains: two steps of four examples."""

import math
import re

import gin
import keras
import numpy as np
import pytest
import reviews
import tf_keras
from config_data import FOLDER, Witness, forget_garden, stand_ins

import launch
from loopwright import configurables

CONFIGS = sorted(path.name for path in FOLDER.glob("*.gin"))
STEPS, BATCH = 2, 4


def cnn_parameters(side, filters, units, channels=1, classes=10):
  """3 x 3 convolutions and 2 x 2 poolings, then two dense layers."""
  count = 0
  for width in filters:
    count += (9 * channels + 1) * width
    channels, side = width, side // 2
  return count + (side * side * channels + 1) * units + (units + 1) * classes


def transformer_parameters(layers, width, vocabulary=257):
  """Query, key, value, output; an MLP of three matrices, 8/3 as wide; a gain before each, and last.

  The embedding is also the output.
  """
  hidden = math.ceil(width / 3) * 8
  block = 4 * width**2 + 3 * width * hidden + 2 * width
  return vocabulary * width + layers * block + width


def unet_parameters(width):
  """Convolutions, a gain and an offset for each normalised channel, a shift for each block."""
  deep, condition = 2 * width, 4 * width

  def conv(size, channels, filters):
    return (size * size * channels + 1) * filters

  def block(channels, filters):
    both = conv(3, channels, filters) + conv(3, filters, filters) + (condition + 1) * filters
    shortcut = conv(1, channels, filters) if channels != filters else 0
    return 2 * channels + 2 * filters + both + shortcut

  ends = 13 * condition + conv(2, 1, width) + 2 * width + conv(2, width, 1)
  between = conv(2, width, deep) + conv(2, deep, width) + 2 * deep + 4 * conv(1, deep, deep)
  return ends + between + block(width, width) + 2 * block(deep, deep) + block(deep, width)


# By config: features, parameters by optimizer, updates a step, evaluation metrics, schedule.
ONE = {"updates": {"default": 1}}
CLASSIFIER = {**ONE, "metrics": {"loss", "accuracy"}}
TOKENS = {"tokens": ("int32", (500,))}
FLOAT = ("float32", ())
DIGITS = {"image": ("float32", (8, 8, 1))}
LANGUAGE_MODEL = {
  **ONE,
  "features": dict.fromkeys(("token", "position", "target"), ("int32", (256,))),
  "parameters": {"default": transformer_parameters(1, 128)},
  "optimizer": keras.optimizers.AdamW,
  "smaller": ["transformer.layers = 1"],
  "metrics": {"loss", "bits_per_byte", "perplexity"},
  "rates": {0: 0.0, 100: 0.0015, 200: 0.003, 2100: 0.00165, 4000: 0.0003},
  "loss": math.log(256),
}
DECODER = {
  **LANGUAGE_MODEL,
  "parameters": {"default": transformer_parameters(1, 128) + 2 * 32 - 128 * 128},
  "optimizer": keras.optimizers.Muon,
  "smaller": ["decoder.layers = 1"],
  "rates": {0: 0.0, 100: 0.005, 200: 0.01, 2100: 0.0055, 4000: 0.001},
}
FIXMATCH = {
  **CLASSIFIER,
  "features": {
    "image": ("float32", (28, 28, 1)),
    "unlabelled/strong": ("float32", (7, 28, 28, 1)),
  },
  "parameters": {"default": cnn_parameters(28, (32, 64), 128)},
  "rates": {0: 0.003, 2500: 0.0015, 5000: 0.0},
}
EXPECTED = {
  "digits_cnn.gin": {
    **CLASSIFIER,
    "features": {"image": ("float32", (8, 8, 1))},
    "parameters": {"default": cnn_parameters(8, (32, 64), 128)},
    "rates": {0: 0.002, 750: 0.001, 1500: 0.0},
  },
  "digits_contrastive.gin": {
    **ONE,
    "features": dict.fromkeys(("image", "first", "second"), ("float32", (8, 8, 1))),
    # The encoder ends in 128 numbers instead of 10 logits; then 128 -> 128 -> 64.
    "parameters": {"default": cnn_parameters(8, (32, 64), 128) - 1290 + 129 * (128 + 64)},
    "metrics": {"loss", "nearest_accuracy", "nearest_by_pixels"},
    "loss": math.log(2 * 100),
    "rates": {0: 0.002, 500: 0.001, 1000: 0.0},
  },
  "digits_distillation.gin": {
    **ONE,
    "features": DIGITS,
    "parameters": {"default": cnn_parameters(8, (8, 16), 32)},
    "metrics": {"loss", "accuracy", "teacher_accuracy", "agreement"},
    "rates": {0: 0.002, 500: 0.001, 1000: 0.0},
    "loss": 16 * math.log(10),
  },
  "digits_moco.gin": {
    **ONE,
    "features": dict.fromkeys(("image", "first", "second"), ("float32", (8, 8, 1))),
    "parameters": {"default": cnn_parameters(8, (32, 64), 128) - 1290 + 129 * (128 + 64)},
    "metrics": {"loss", "nearest_accuracy", "nearest_by_pixels"},
    "loss": math.log(2 * 100) / 0.2,  # the cosines are divided by the temperature
    "rates": {0: 0.002, 1000: 0.001, 2000: 0.0},
  },
  "digits_sam.gin": {
    **CLASSIFIER,
    "features": DIGITS,
    "parameters": {"default": cnn_parameters(8, (32, 64), 128)},
    "optimizer": keras.optimizers.SGD,
    "rates": {0: 0.05, 500: 0.025, 1000: 0.0},
  },
  "fashion_mnist_cnn.gin": {
    **CLASSIFIER,
    "features": {"image": ("float32", (28, 28, 1))},
    "parameters": {"default": cnn_parameters(28, (32, 64), 128)},
    "rates": {0: 0.0, 100: 0.001, 200: 0.002, 2450: 0.001, 4700: 0.0},
  },
  "fashion_mnist_diffusion.gin": {
    **ONE,
    "features": {**dict.fromkeys(("image", "noise"), ("float32", (28, 28, 1))), "place": FLOAT},
    "parameters": {"default": unet_parameters(32)},
    "metrics": {"loss", "bits_per_dimension"},
    "rates": {0: 0.0, 50: 0.001, 100: 0.002, 3050: 0.0011, 6000: 0.0002},
  },
  "fashion_mnist_fixmatch.gin": FIXMATCH,
  "fashion_mnist_fixmatch_pretrained.gin": FIXMATCH,
  "fashion_mnist_gan.gin": {
    "features": {"image": ("float32", (28, 28, 1))},
    "parameters": {"generator": 237_153, "discriminator": 36_513},
    "updates": {"generator": 1, "discriminator": 2},
    "metrics": {"loss", "real_accuracy", "fake_accuracy"},
    "rates": {step: {"generator": 0.001, "discriminator": 0.0004} for step in (0, 4000)},
  },
  "fashion_mnist_histograms.gin": {
    **ONE,
    "features": {"image": ("float32", (28, 28, 1)), "histograms": ("float32", (1040,))},
    # 1040 histograms instead of 10 logits.
    "parameters": {"default": cnn_parameters(28, (32, 64), 128, classes=1040)},
    "metrics": {"loss"},
    "rates": {0: 0.002, 750: 0.001, 1500: 0.0},
  },
  "fashion_mnist_vae.gin": {
    **ONE,
    "features": {"image": ("float32", (28, 28, 1)), "noise": ("float32", (16,))},
    "parameters": {"default": 844_672 + 844_130},
    "metrics": {"loss", "elbo", "bits_per_dimension", "divergence"},
    "rates": {0: 0.001, 2000: 0.0005, 4000: 0.0},
    "loss": 28 * 28 * math.log(256),
  },
  "fashion_mnist_wgan_gp.gin": {
    "features": {"image": ("float32", (28, 28, 1)), "mix": FLOAT},
    "parameters": {"generator": 237_153, "discriminator": 36_512},
    "updates": {"generator": 1, "discriminator": 2},
    "metrics": {"loss", "distance", "penalty"},
    "rates": {0: 0.0005, 4000: 0.0005},
    "loss": 10.0,  # the penalty alone is below 10 x (1 - 0)^2
  },
  "imdb.gin": {
    **CLASSIFIER,
    "features": TOKENS,
    "parameters": {"default": (20_000 + 2**17) * 16 + 17},
    "rates": {0: 0.005, 1500: 0.005},
  },
  "imdb_lstm.gin": {
    **CLASSIFIER,
    "features": TOKENS,
    "parameters": {"default": 4_137_409},
    "rates": {0: 0.001, 400: 0.001},
  },
  "imdb_lstm_buckets.gin": {
    **CLASSIFIER,
    "parameters": {"default": 4_137_409},
    "rates": {0: 0.001, 400: 0.001},
  },
  "language_model.gin": LANGUAGE_MODEL,
  "language_model_decoder.gin": DECODER,
  "language_model_generation.gin": {
    **DECODER,
    "metrics": {*LANGUAGE_MODEL["metrics"], "byte_accuracy", "exact"},
    "smaller": [*DECODER["smaller"], "run.eval_batch_size = 4", "run.eval_steps = 1"],
  },
  "language_model_preference.gin": {
    **ONE,
    "features": dict.fromkeys(("chosen", "rejected"), ("uint8", (96,))),
    "parameters": DECODER["parameters"],
    "smaller": DECODER["smaller"],
    "metrics": {*("loss", "margin", "accuracy", "chosen_ratio", "rejected_ratio", "underscores")},
    "rates": {0: 0.0, 10: 5e-5, 20: 1e-4, 300: 1e-4},
    "loss": math.log(2),
  },
  "language_model_mixture.gin": {
    **LANGUAGE_MODEL,
    "features": dict.fromkeys(("token", "position", "target"), ("int32", (128,))),
    "parameters": {"default": transformer_parameters(1, 64)},
    "optimizer": keras.optimizers.Adam,
    "rates": {0: 0.003, 200: 0.003},
  },
  "language_model_packed.gin": LANGUAGE_MODEL,
  "language_model_parallel.gin": {
    **LANGUAGE_MODEL,
    "smaller": [*LANGUAGE_MODEL["smaller"], "run.eval_batch_size = 4", "run.eval_steps = 1"],
  },
  "language_model_widths.gin": {
    **LANGUAGE_MODEL,
    "parameters": {"default": transformer_parameters(1, 64) + 2 * 32 - 64 * 64},
    "smaller": DECODER["smaller"],
  },
  "model_garden.gin": {
    **ONE,
    "needs": "tensorflow_datasets",
    "features": {"features": ("float32", (8, 8, 1)), "labels": ("int32", ())},
    "parameters": {"default": (9 + 1) * 32 + (6 * 6 * 32 + 1) * 10},
    "optimizer": tf_keras.optimizers.Adam,
    "metrics": {"loss", "accuracy", "mean_iou"},
    "rates": {0: 0.003, 500: 0.0015, 1000: 0.0},
  },
  "pendulum_sac.gin": {
    "features": {"draw": ("int64", ()), "noise": ("float32", (2, 1))},
    "parameters": {
      "critic": 2 * (5 * 64 + 65 * 64 + 65),
      "actor": 4 * 64 + 65 * 66,
      "temperature": 1,
    },
    "updates": {"critic": 1, "actor": 1 / 2, "temperature": 0},  # of two steps
    "metrics": {"return"},
    "rates": {s: {"critic": 0.001, "actor": 0.001, "temperature": 0.002} for s in (0, 10_000)},
    "needs": "gymnasium",
  },
  "sinusoid_maml.gin": {
    **ONE,
    "features": dict.fromkeys(("support_x", "support_y", "query_x", "query_y"), ("float32", (10,))),
    "parameters": {"default": 2 * 40 + 41 * 40 + 41},
    "metrics": {"loss", *(f"loss_after_{n}" for n in (0, 1, 5, 10))},
    "rates": {0: 0.001, 20000: 0.001},
    "loss": 10.0,
  },
  "transfer_learning.gin": {
    **CLASSIFIER,
    "features": {"image": ("float32", (32, 32, 3))},
    "parameters": {"default": 2_880_257},
    "rates": {0: 1e-5, 62: 1e-5, 63: 1.8e-5, 315: 5e-5, 378: 4.2e-5, 1260: 1e-5 + 4e-5 * 0.8**15},
    "loss": math.log(2),
    "batch": "run.per_replica_batch_size",
  },
}


@pytest.fixture(autouse=True)
def nothing_noted():
  yield
  reviews.forget_package()
  forget_garden()
  Witness.runs.clear()


def small(name, folder):
  """The parameters that make a run of the config a small one, and keep its every other part."""
  params = [
    f"run.train_steps = {STEPS}",
    f"{EXPECTED[name].get('batch', 'run.global_batch_size')} = {BATCH}",
    "run.eval_batch_size = 100",
    "run.actions = [@Witness()]",
    *stand_ins(name, folder),
    *EXPECTED[name].get("smaller", []),
  ]
  return [f"--gin_param={param}" for param in params]


def test_every_config_is_expected_here():
  assert sorted(EXPECTED) == CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_ends_its_schedule_with_its_training(name):
  """The last rate that `EXPECTED` tells is the last step's; each evaluation has its checkpoint."""
  configurables.parse([str(FOLDER / name)])
  bound = {p: gin.query_parameter(f"run.{p}") for p in ("train_steps", "eval_every_steps")}
  assert max(EXPECTED[name]["rates"]) == bound["train_steps"]
  assert gin.query_parameter("run.checkpoint_every_steps") == bound["eval_every_steps"]
  again = configurables.operative_config()
  assert f"run.train_steps = {bound['train_steps']}" in again.splitlines()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_builds_and_trains(name, tmp_path, capsys):
  expected, model_dir = EXPECTED[name], tmp_path / "run"
  if "needs" in expected:
    pytest.importorskip(expected["needs"])
  arguments = [f"--gin_file={FOLDER / name}", *small(name, tmp_path), f"--model_dir={model_dir}"]
  assert launch.main(["launch.py", *arguments]) == 0

  [run] = Witness.runs
  named = run.trainer.parts.optimizers
  for optimizer, parameters in expected["parameters"].items():
    assert sum(int(np.prod(v.shape)) for v in named[optimizer].variables) == parameters
    kind = expected.get("optimizer", keras.optimizers.Adam)
    assert type(named[optimizer].optimizer) is kind
  assert {k: o.optimizer.iterations.numpy() for k, o in named.items()} == {
    k: STEPS * updates for k, updates in expected["updates"].items()
  }

  kept, untrained = run.trainer.state.kept, run.trainer.state.untrained
  logged = ("_metrics", "current_learning_rate")  # of the Model Garden's tasks and optimizers
  assert ([place for place in kept if not any(n in place for n in logged)], untrained) == ([], [])

  for step, rate in expected["rates"].items():
    run.global_step.assign(step)
    rates = {k: float(o.learning_rate()) for k, o in named.items()}
    wanted = rate if isinstance(rate, dict) else dict.fromkeys(named, rate)
    assert rates == pytest.approx(wanted, rel=1e-5, abs=1e-9)

  for feature, (dtype, shape) in expected.get("features", {}).items():
    batch = next(iter(run.trainer.dataset_fn(0)))
    assert (batch[feature].dtype, batch[feature].shape) == (dtype, (BATCH, *shape))

  [done] = capsys.readouterr().out.splitlines()
  assert done.startswith(f"done: step {STEPS} | eval ")
  values = dict(
    re.findall(r"(\w+) (-?[\d.]+(?:e-\d+)?)(?= |$)", done.split(" | ")[1].removeprefix("eval "))
  )
  assert values.keys() == expected["metrics"]
  if "loss" not in values:
    return
  # Nothing much is learnt in two steps.
  assert 0 < float(values["loss"]) < 2 * expected.get("loss", math.log(10))
  assert (model_dir / "operative_config.gin").exists()
