"""The coordinate check: changes in closed form, and wrong rates of the decoder, which it names."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import launch
from loopwright.runs.builder import Recipe
from loopwright.tasks import coordinates

CONFIGS = Path(launch.__file__).parent / "configs"
TIMES, RATE, STEPS = (1, 2, 4), 0.1, 3


class Ones(toys.Regression):
  """The output is the sum of n weights: their gradients are 1, so it falls by n rates a step."""

  def __init__(self, width):
    self.width = width
    self.features = {"x": np.ones([8, width], np.float32)}

  def build_model(self):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="sum")
    return keras.Sequential([keras.Input([self.width]), layer], name="model")

  def losses(self, outputs, batch):
    return outputs


@pytest.mark.parametrize("power", [0, 1])
def test_changes_and_slopes_are_those_by_hand(power):
  """A rate in proportion to 1 / width makes them equal."""

  def make(factor):
    recipe = Recipe(
      optimizer=lambda: keras.optimizers.SGD(RATE / factor**power), global_batch_size=4
    )
    return recipe.trainer(Ones(5 * factor), tf.distribute.OneDeviceStrategy("CPU:0"))

  rows, losses = coordinates.compare(make, TIMES, STEPS)
  expected = [5 * factor ** (1 - power) * RATE * STEPS for factor in TIMES]
  assert [row.name for row in rows] == ["model/sum", "model"]
  for row in rows:
    assert row.changes == pytest.approx(expected, rel=1e-5)
    assert row.slope == pytest.approx(1 - power, abs=1e-5)
    assert row.is_flat == (power == 1)
  assert losses == pytest.approx([-each * (STEPS - 1) / STEPS for each in expected], rel=1e-5)
  verdict = coordinates.report(rows, losses, TIMES).splitlines()[-1]
  assert verdict.startswith(
    ("2 of 2 outputs depend on the width; the first: model/sum", "each")[power]
  )


@pytest.fixture
def config():
  return [
    f"--gin_file={CONFIGS / 'language_model_widths.gin'}",
    "--gin_param=LanguageModel.corpus = @TextFiles()",
    f"--gin_param=TextFiles.path = '{CONFIGS}'",
    "--gin_param=LanguageModel.packing = 'cut'",
    "--gin_param=LanguageModel.context = 32",
    "--gin_param=keras.AdamW.learning_rate = 0.003",
    "--gin_param=decoder.layers = 1",
    "--gin_param=run.global_batch_size = 4",
    "--times=1,2,4",
  ]


WIDTHS = "--scaled=decoder.width,decoder.heads,decoder.groups"
BUT_DOWN = "by_width.matrices = '.*/(query|key|value|output|gate|up)/kernel'"


@pytest.mark.whole
@pytest.mark.parametrize(
  ("arguments", "named"),
  [
    ([f"{WIDTHS},by_width.width"], []),
    ([WIDTHS], ["decoder/block_0/attention/output", "decoder/block_0/down"]),
    (
      [f"{WIDTHS},by_width.width", "--gin_param=decoder.base_width = None"],
      ["decoder/embedding 2", "decoder"],
    ),
    ([f"{WIDTHS},by_width.width", f"--gin_param={BUT_DOWN}"], ["decoder/block_0/down"]),
  ],
  ids=["right", "one rate", "no scale of logits", "a matrix forgotten"],
)
def test_what_depends_on_the_width_is_named(arguments, named, config, capsys):
  assert coordinates.main([*config, *arguments]) == bool(named)
  lines = capsys.readouterr().out.splitlines()
  grows = [line.split("  ")[0].strip() for line in lines if line.endswith("grows with the width")]
  if named != ["decoder/block_0/down"]:
    assert set(named) <= set(grows)
  else:
    assert grows[0] == named[0]
  assert bool(grows) == bool(named)


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    (["--scaled=decoder.width", "--times=2"], "--times is '2'; it must be two or more growing"),
    (["--scaled=decoder.width", "--times=a,b"], "--times is 'a,b'; it must be two or more growing"),
    (["--scaled=decoder.width", "--times=0.3,1"], "--times has 0.3, and decoder.width is 64; give"),
    (["--scaled=run.task"], "--scaled has 'run.task', which the config binds to"),
    (["--scaled=decoder.width", "--steps=1"], "--steps is 1; it must be at least 2."),
  ],
)
def test_mistakes_are_one_line(arguments, line, config, capsys):
  assert coordinates.main([*config[:-1], *arguments]) == 2
  assert capsys.readouterr().err.startswith(f"error: {line}")
