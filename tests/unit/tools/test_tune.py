"""--mode=tune: what it tries, what it takes, and the gin file that it writes."""

import inspect
import itertools
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import launch
import loopwright
from loopwright import configurables
from loopwright.distribution.reduction import Reduction
from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.runs.runner import run
from loopwright.tools import tune
from loopwright.tools.tune import Ratio

REPOSITORY = Path(launch.__file__).parent
SLEEP_S = 0.1
CONFIG = """
run.task = @Line()
run.train_steps = 2000
run.global_batch_size = 4
run.checkpoint_every_steps = 1000
"""
TWO = "auto.cpu_replicas = 2"


@loopwright.register
class Line(toys.Regression):
  """y = 2 x; `of_python` puts an operation into it that XLA cannot compile."""

  def __init__(self, *, of_python: bool = False):
    self.of_python = of_python

  def build_model(self):
    return toys.network([1], keras.layers.Dense(1))

  def source(self, split):
    x = np.linspace(0, 1, 8, dtype=np.float32)
    return ArraySource(features={"x": x[:, None], "y": 2 * x})

  def forward(self, batch, training):
    x = batch["x"]
    if self.of_python:
      x = tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), x.shape)
    return super().forward({"x": x}, training)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
  """Tunes a config with few and short turns; returns what was found, and the lines shown."""
  monkeypatch.setattr(tune, "OPS", {})  # collectives would fix their size for this whole process

  def call(*params, rounds=3, on=TWO):
    (tmp_path / "line.gin").write_text(CONFIG)
    lines = []
    found = tune.tune(
      [str(tmp_path / "line.gin")], [on, *params], model_dir=str(tmp_path / "run"),
      show=lines.append, rounds=rounds, block_s=0.02,
    )  # fmt: skip
    return found, lines

  return call


def line_of(lines, option):
  [line] = [line for line in lines if line.strip().startswith(option)]
  return line


def loop(steps):
  return {"run.steps_per_loop": steps}


# ---- The search ----


def costs(seed):
  """Axes, and a made-up step: compute + a reduction of an op and a packing + what a loop costs."""
  rng = np.random.default_rng(seed)
  compute = {False: 1.0, True: rng.uniform(0.3, 3)}
  ways = {way: rng.uniform(0.1, 2) for way in itertools.product("abc", ("flat", "per_tensor"))}
  host = rng.uniform(0, 5)
  axes = [
    [{"jit": True}],
    [{"op": op, "packing": packing} for op, packing in list(ways)[1:]],
    [{"loop": n} for n in (10, 100)],
  ]

  def cost(bindings):
    way = bindings.get("op", "a"), bindings.get("packing", "flat")
    return compute[bindings.get("jit", False)] + ways[way] + host / bindings.get("loop", 1)

  return axes, cost


@pytest.mark.parametrize("seed", range(20))
def test_the_search_ends_within_5_percent_of_the_best_of_all_combinations(seed):
  axes, cost = costs(seed)
  asked = []

  def compare(best, candidate):
    asked.append(candidate)
    return Ratio(*[cost(best) / cost(candidate)] * 3)

  chosen = tune.search(axes, compare)
  every = [
    {name: value for option in options for name, value in option.items()}
    for options in itertools.product(*([{}, *axis] for axis in axes))
  ]
  assert len(every) == 2 * 6 * 3
  assert cost(chosen) <= 1.05 * min(map(cost, every))
  assert len(asked) == 1 + 5 + 2


def test_what_is_not_clearly_faster_is_left_alone():
  seen = {10: Ratio(1.019, 1.01, 1.1), 100: Ratio(1.5, 0.99, 2.0), 1000: Ratio(0.5, 0.4, 0.6)}
  options = [loop(steps) for steps in seen]
  assert tune.search([options], lambda best, other: seen[other["run.steps_per_loop"]]) == {}


def test_of_one_axis_only_one_option_is_taken():
  ratios = iter([Ratio(1.5, 1.4, 1.6), Ratio(1.2, 1.1, 1.3)])
  pairs = []

  def compare(best, candidate):
    pairs.append((best, candidate))
    return next(ratios)

  found = tune.search([[{"a": 1, "b": 1}, {"a": 2}]], compare)
  assert found == {"a": 2}
  assert pairs == [({}, {"a": 1, "b": 1}), ({"a": 1, "b": 1}, {"a": 2})]


def test_what_is_always_slower_is_given_up():
  assert not tune._is_hopeless([0.9, 0.9, 0.9])
  assert tune._is_hopeless([0.9, 0.99, 0.5, 0.9])
  assert not tune._is_hopeless([0.9, 1.01, 0.5, 0.9])


def test_the_ratio_is_the_median_of_rounds():
  assert Ratio.of([1.0, 8.0, 2.0, 3.0, 4.0]) == Ratio(3.0, 2.0, 4.0)


# ---- On two replicas ----


@pytest.mark.whole
def test_the_planted_slow_reduction_is_found(tuned, monkeypatch, tmp_path):
  reduce_each = Reduction._reduce_each

  def slow(self, context, tensors):
    if self.packing == "per_tensor":
      with tf.control_dependencies([tf.py_function(lambda: time.sleep(SLEEP_S), [], [])]):
        tensors = [tf.identity(tensor) for tensor in tensors]
    return reduce_each(self, context, tensors)

  monkeypatch.setattr(Reduction, "_reduce_each", slow)
  (bindings, ratio), lines = tuned("Reduction.packing = 'per_tensor'", "run.steps_per_loop = 1000")
  assert bindings["Reduction.packing"] == "flat"
  assert ratio.median > 2
  step_ms = float(re.search(r"original config: (\S+) ms a step", lines[0])[1])
  assert step_ms > 1000 * SLEEP_S
  assert line_of(lines, "Reduction.packing").endswith("taken")
  written = (tmp_path / "run" / "tuned.gin").read_text()
  assert "\nReduction.packing = 'flat'\n" in written
  assert f"{ratio} times as fast as without these lines" in written


@pytest.mark.whole
def test_the_gin_file_goes_on_top_of_the_config(tuned, tmp_path):
  (bindings, _), lines = tuned("run.steps_per_loop = 1", rounds=5)
  assert bindings["run.steps_per_loop"] in (10, 100, 1000)  # a call costs more than a step
  command = lines[-1].partition("use it with ")[2]
  flags = re.findall(r"--gin_file=(\S+)", command)
  assert "--gin_param='run.steps_per_loop = 1'" in command
  configurables.parse(flags)
  bound = configurables.bindings()
  assert bound["run.steps_per_loop"] == str(bindings["run.steps_per_loop"])
  configurables.configured(run)(mode="train", model_dir=str(tmp_path / "trained"))
  assert (tmp_path / "trained" / "checkpoints" / "ckpt-2000.index").exists()


@pytest.mark.whole
def test_what_xla_cannot_compile_is_told(tuned):
  (bindings, _), lines = tuned("Line.of_python = True", "run.steps_per_loop = 1000")
  line = line_of(lines, "Trainer.jit_compile")
  assert "cannot run here: " in line
  assert "PyFunc (No registered 'PyFunc' OpKernel for XLA_CPU_JIT" in line
  guilty = inspect.getsourcelines(Line.forward)[1] + 3  # where it says tf.numpy_function
  assert line.endswith(f"(test_tune.py:{guilty}, in forward)")
  assert "Trainer.jit_compile" not in bindings


@pytest.mark.whole
def test_a_longer_loop_ends_where_the_run_saves_or_ends(tuned, monkeypatch):
  monkeypatch.setattr(tune, "LONGEST_LOOP_S", math.inf)  # however slow this machine is just now
  _, lines = tuned("run.checkpoint_every_steps = 250", "run.steps_per_loop = 1")
  tried = [int(n) for line in lines for n in re.findall(r"^  run.steps_per_loop = (\d+)", line)]
  assert tried == [10, 100]


def test_the_config_is_in_force_again_and_nothing_is_trained(tuned, tmp_path):
  tuned("run.steps_per_loop = 1000", rounds=2)
  assert "Trainer.jit_compile" not in configurables.bindings()
  assert [path.name for path in (tmp_path / "run").iterdir()] == ["tuned.gin"]


@pytest.mark.whole
def test_the_gin_file_says_where_it_was_measured(tuned, tmp_path):
  tuned("run.steps_per_loop = 1000", rounds=2)
  text = (tmp_path / "run" / "tuned.gin").read_text()
  assert text.startswith("# Written by --mode=tune, for MirroredStrategy on CPU:0, CPU:1.\n")


@pytest.mark.parametrize(
  ("param", "says"),
  [
    ("run.eager = True", "run.eager is True, but tuning needs compiled loops; remove run.eager."),
    (
      "run.strategy = @parameter_server",
      "run.strategy is @parameter_server, but tuning works in one process only; use @auto or "
      "@mirrored on one of the machines.",
    ),
  ],
)
def test_what_cannot_be_tuned(tuned, param, says):
  with pytest.raises(ConfigError) as caught:
    tuned(on=param)
  assert str(caught.value) == says


EVERY_OP = """
import sys
sys.path[:0] = [{tests!r}, {support!r}, {repository!r}]
import test_tune
from loopwright.tools import tune
from loopwright.strategies import factories
factories.split_cpu(2)
tune.tune(["line.gin"], model_dir="run", show=print, rounds=2, block_s=0.02)
"""


@pytest.mark.whole
def test_every_op_is_tried(tmp_path):
  """In a process of its own, since collectives fix their size for a whole process."""
  (tmp_path / "line.gin").write_text(f"{CONFIG}{TWO}\nrun.steps_per_loop = 1000\n")
  tests = REPOSITORY / "tests"
  code = EVERY_OP.format(
    tests=str(tests / "unit" / "tools"), support=str(tests / "support"), repository=str(REPOSITORY)
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  for op in ("hierarchical_copy", "collective"):
    for packing in ("  ", ", Reduction.packing = 'per_tensor'"):
      line = line_of(lines, f"auto.cross_device_ops = '{op}'{packing}")
      assert re.search(r"  \d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]", line)
  assert "nccl" not in done.stdout  # which needs GPUs
  own = "  auto.cross_device_ops = 'reduction_to_one_device'"  # which auto takes
  assert not [line for line in lines if line.startswith(own)]


def test_the_command_line(tmp_path, monkeypatch, capsys):
  asked = []

  def stand_in(*arguments, model_dir, show):
    asked.append((*arguments, model_dir))
    show("best: none")

  monkeypatch.setattr(tune, "tune", stand_in)
  flags = ["--gin_file=a.gin", "--gin_param=run.seed = 3", "--mode=tune"]
  assert launch.main(["launch.py", *flags]) == 0
  assert launch.main(["launch.py", *flags, f"--model_dir={tmp_path}"]) == 0
  assert asked == [
    (["a.gin"], ["run.seed = 3"], os.path.join("runs", "a")),
    (["a.gin"], ["run.seed = 3"], str(tmp_path)),
  ]
  assert capsys.readouterr().out == "best: none\n" * 2
