"""Every option of `run`, `Trainer`, the loss scale and the reduction, changed in the middle."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

import loopwright
from loopwright import ArraySource, configurables
from loopwright.actions.base import Action
from loopwright.configurables import changes, documentation, table
from loopwright.errors import ConfigError
from loopwright.inputs.buckets import Buckets
from loopwright.inputs.parts import Part, Sources
from loopwright.inputs.replay import Draws, ReplayBuffer
from loopwright.optimizers.loss_scale import DynamicLossScale
from loopwright.run_folder import history
from loopwright.runs.runner import run


@loopwright.register
class Straight(toys.Regression):
  """Regression with dropout, whose initial weights, dropout and loss a config sets."""

  def __init__(self, *, scale=0.5, dropout=0.25, power=2.0, temperature=1.0, examples=24):
    self._scale, self._dropout, self._power = scale, dropout, power
    self._temperature, self._examples = temperature, examples

  def build_model(self):
    first = keras.initializers.RandomNormal(stddev=self._scale, seed=1)
    layers = [keras.layers.Dense(16, kernel_initializer=first), keras.layers.Dropout(self._dropout)]
    temperature = tf.Variable(self._temperature, trainable=False, name="temperature")
    return {
      "network": toys.network([2], *layers, keras.layers.Dense(1)), "temperature": temperature
    }  # fmt: skip

  def source(self, split):
    x = np.random.default_rng(len(split)).normal(size=[self._examples, 2]).astype("float32")
    return ArraySource(features={"x": x, "y": x[:, 0] - 2 * x[:, 1]})

  def forward(self, batch, training):
    outputs = self.model["network"](batch["x"], training=training)[:, 0]
    return tf.cast(outputs, tf.float32) * self.model["temperature"]

  def losses(self, outputs, batch):
    return tf.abs(outputs - batch["y"]) ** self._power


BASE = (
  "run.task = @Straight()", "run.train_steps = 4", "run.steps_per_loop = 2", "run.seed = 3",
  "run.global_batch_size = 8", "run.checkpoint_every_steps = 2",
  "run.optimizer = @keras.SGD", "keras.SGD.learning_rate = 0.03125",
)  # fmt: skip


def start(folder, *bindings, mode="train", **arguments):
  """Trains as launch.py does; the last value of a binding counts. Returns the last metrics."""
  last = {line.partition(" = ")[0]: line for line in (*BASE, *bindings)}
  lines = [line for line in last.values() if not line.endswith(" = ")]
  configurables.parse([], lines)
  return configurables.configured(run)(mode=mode, model_dir=str(folder), **arguments)


def weights(folder, step):
  reader = tf.train.load_checkpoint(f"{folder}/checkpoints/ckpt-{step}")
  found = sorted(k for k in reader.get_variable_to_shape_map() if k.startswith("model/network"))
  return [reader.get_tensor(key) for key in found if reader.get_tensor(key).dtype == np.float32]


def near(one, other):
  return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other, strict=True))


def lines(folder, name="metrics.jsonl"):
  return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
  """Returns a copy of a run of 4 steps with some bindings, and its weights after 8."""
  made = {}

  def copy(to, *bindings):
    if bindings not in made:
      folder = tmp_path_factory.mktemp("begun")
      start(folder / "a", *bindings)
      shutil.copytree(folder / "a", folder / "b")
      start(folder / "b", *bindings, "run.train_steps = 8")
      made[bindings] = folder / "a", weights(folder / "b", 8)
    shutil.copytree(made[bindings][0], to)
    return made[bindings][1]

  return copy


TWO = ("run.strategy = @mirrored", "mirrored.cpu_replicas = 2", "Trainer.reduction = @Reduction()")
FIXED = ("Trainer.loss_scale = @fixed", "fixed.scale = 64.0")
PER_REPLICA = ("run.global_batch_size = ", "run.per_replica_batch_size = 8")

OPTIONS = [  # option, before, what is bound beside it, after, what happens
  ("run.task", "@Straight()", (), "@Other()", "another experiment: its task"),
  ("run.train_steps", "4", (), "8", "same"),
  ("run.global_batch_size", "8", (), "4", "numbers"),
  ("run.per_replica_batch_size", "8", PER_REPLICA, "4", "numbers"),
  ("run.strategy", "@default", (), "@one_device", "same"),
  ("run.optimizer", "@keras.SGD", ("keras.SGD.learning_rate = ",), "@keras.Lion",
   "another experiment: its opt"),
  ("run.steps_per_loop", "2", (), "1", "same"),
  ("run.eval_batch_size", "None", (), "5", "same"),
  ("run.eval_steps", "None", (), "1", "same"),
  ("run.eval_every_steps", "None", (), "2", "same"),
  ("run.eval_timeout_s", "None", (), "9.0", "same"),
  ("run.hang_timeout_s", "None", (), "99.0", "same"),
  ("run.end_if_hung", "False", (), "True", "same"),
  ("run.checkpoint_every_steps", "4", (), "2", "same"),
  ("run.keep_checkpoints", "3", (), "1", "same"),
  ("run.seed", "3", (), "4", "numbers"),
  ("run.shuffle", "True", (), "False", "numbers"),
  ("run.precision", "'float32'", (), "'mixed_bfloat16'", "numbers"),
  ("run.tf32", "None", (), "False", "same"),
  ("run.deterministic", "False", (), "True", "same"),
  ("run.eager", "False", (), "True", "same"),
  ("run.gpus", "None", (), "()", "same"),
  ("run.gpu_memory", "'all'", (), "'grow'", "same"),
  ("run.actions", "()", (), "[@StopOnNonFinite()]", "same"),
  ("run.ledger", "False", (), "True", "same"),
  ("run.compile_cache", "'auto'", (), "None", "same"),
  ("run.checkpoint", "None", (), "'x'", "mode 'train' cannot use it"),
  ("run.warm_start", "None", ("WarmStart.path = 'x'",), "@WarmStart()", "counts only when the run"),
  ("Trainer.loss_scale", "None", ("fixed.scale = 64.0",), "@fixed", "same"),
  ("Trainer.loss_scale", "None", (), "@dynamic", "same"),
  ("Trainer.reduction", "@Reduction", (), "@Reduction()", "same"),
  ("Trainer.clip_norm", "None", (), "0.01", "numbers"),
  ("Trainer.clip_value", "None", (), "0.01", "numbers"),
  ("Trainer.accumulation_steps", "1", ("Straight.dropout = 0.0",), "2", "same"),
  ("Trainer.ema_decay", "None", (), "0.5", "same"),
  ("Trainer.fuse_updates", "True", ("keras.SGD.momentum = 0.5",), "False", "does not fit this run"),
  ("Trainer.shard_optimizer_state", "False", (), "True", "same"),
  ("Trainer.recompute", "()", ("Straight.dropout = 0.0",), "['dense.*']", "same"),
  ("Trainer.jit_compile", "False", ("Straight.dropout = 0.0",), "True", "same"),
  ("Trainer.steps_per_program", "1", ("Straight.dropout = 0.0",), "4", "same"),
  ("fixed.scale", "64.0", FIXED, "32.0", "same"),
  ("Reduction.packing", "'flat'", TWO, "'per_tensor'", "same"),
  ("Reduction.wire_dtype", "None", TWO, "'bfloat16'", "numbers"),
  ("Reduction.bytes_per_pack", "0", TWO, "4096", "same"),
  ("Reduction.timeout_s", "None", TWO, "60.0", "same"),
]  # fmt: skip
FAST = ("Trainer.clip_norm", "run.warm_start")


@loopwright.register
class Other(Straight):
  """Another class of the same model."""


@pytest.mark.parametrize(
  ("option", "before", "beside", "after", "what"),
  [
    pytest.param(*case, id=case[0], marks=() if case[0] in FAST else pytest.mark.whole)
    for case in OPTIONS
  ],
)
def test_an_option_that_changes(option, before, beside, after, what, begun, tmp_path, monkeypatch):
  for module, name in ((tf.config.experimental, "enable_op_determinism"),
                       (tf.config.experimental, "enable_tensor_float_32_execution"),
                       (tf.data.experimental, "enable_debug_mode")):  # fmt: skip
    monkeypatch.setattr(module, name, lambda *_: None)  # for the whole process, without a way back
  folder = tmp_path / "run"
  given = [*(each for each in beside if not each.startswith("WarmStart")), f"{option} = {before}"]
  given = [each for each in given if not (option == "Trainer.loss_scale" and "fixed." in each)]
  unchanged = begun(folder, *given)
  again = [*given, *beside, f"{option} = {after}", "run.train_steps = 8"]
  again = [*again, "run.train_steps = 8"]
  rule = changes.rule(option)
  if rule.may == "asked" and what in ("same", "numbers"):
    with pytest.raises(ConfigError, match=r"would go on with .* add --accept_changes"):
      start(folder, *again)
  if what not in ("same", "numbers"):
    with pytest.raises(ConfigError, match=what):
      start(folder, *again, accept_changes=True)
    assert len(lines(folder, "history.jsonl")) == 1  # nothing was written
    return
  start(folder, *again, accept_changes=rule.may == "asked")
  assert near(weights(folder, 8), unchanged) == (what == "same")
  assert _is_seen(option, after, folder, lines(folder), lines(folder, "history.jsonl")[-1])


def _is_seen(option, after, folder, metrics, record):
  """Whether the new value is in what the run wrote, read from what used it."""
  rows = [line for line in metrics if line["split"] == "train"]
  used = record["in_use"]
  name = option.rpartition(".")[2]
  if name in ("global_batch_size", "per_replica_batch_size"):
    return used["global batch size"] == after
  if name in ("seed", "clip_norm", "clip_value", "accumulation_steps", "ema_decay"):
    return used[name] == after
  if name in ("loss_scale", "scale"):
    wanted = {"@fixed": 64.0, "@dynamic": 2.0**15}.get(after) or float(after)
    return rows[-1]["loss_scale"] == wanted and f"{wanted:g}" in used["loss scale"]
  if name == "steps_per_loop":
    return [row["step"] for row in rows] == [2, 4, 5, 6, 7, 8]
  if name == "checkpoint_every_steps":
    return {path.stem for path in (folder / "checkpoints").glob("*.index")} >= {"ckpt-6"}
  if name == "keep_checkpoints":
    return len([*(folder / "checkpoints").glob("*.index")]) == 1
  if name == "ledger":
    return (folder / "ledger-0.jsonl").exists()
  return True


def test_more_epochs_go_on(tmp_path):
  def epochs(number):
    return "run.train_steps = ", f"run.train_epochs = {number}"

  start(tmp_path / "whole", *epochs(2))
  end = lines(tmp_path / "whole")[-1]["step"]
  start(tmp_path / "parts", *epochs(1))
  assert lines(tmp_path / "parts")[-1]["step"] == -(-end // 2)
  start(tmp_path / "parts", *epochs(2))
  for one, other in zip(*(weights(tmp_path / n, end) for n in ("whole", "parts")), strict=True):
    np.testing.assert_array_equal(one, other)


def test_every_option_has_a_rule_and_is_tried():
  table.register_all()
  tried = {option for option, *_ in OPTIONS} | {"run.train_epochs"}  # the test below
  names = [f"{of}.{p}" for of in ("run", "Trainer", "Reduction", "fixed")
           for p in table.parameters(of)]  # fmt: skip
  assert not {*names} - tried, "add a case to OPTIONS"
  found = documentation.settings(configurables.examine([], []))
  modules = {o.name: table.entry(o.name.rpartition(".")[0]).wrapped.__module__ for o in found}
  of_tasks = {name for name, of in modules.items() if of.startswith("loopwright.tasks.")}
  starts = ("loopwright.", "keras.", "tf_keras.")
  ours = [name for name, of in modules.items() if of.startswith(starts) and name not in of_tasks]
  missing = [name for name in ours if changes.rule(name) is None]
  assert not missing, "declare whether these may change"


# ---- Evaluation and cadence ----


@pytest.mark.whole
def test_how_and_when_it_evaluates_may_change(tmp_path):
  start(tmp_path, mode="train_and_evaluate")
  start(
    tmp_path, "run.train_steps = 8", "run.eval_every_steps = 2", "run.eval_steps = 1",
    "run.eval_batch_size = 3", mode="train_and_evaluate",
  )  # fmt: skip
  rows = [line for line in lines(tmp_path) if line["split"] == "eval"]
  assert [row["step"] for row in rows] == [4, 6, 8]
  x = np.random.default_rng(len("eval")).normal(size=[24, 2]).astype("float32")[:3]
  first, bias, last, shift = _layers(tmp_path)
  error = (x @ first + bias) @ last + shift - (x[:, :1] - 2 * x[:, 1:])
  np.testing.assert_allclose(rows[-1]["loss"], np.mean(error**2), rtol=1e-4)


def _layers(folder):
  found = weights(folder, 8)
  kernel = next(each for each in found if each.shape == (2, 16))
  last = next(each for each in found if each.shape == (16, 1))
  bias = next(each for each in found if each.shape == (16,))
  return kernel, bias, last, next(each for each in found if each.shape == (1,))


# ---- A task's own options ----


@pytest.mark.fast(binding=["Straight.power = 1.0"])
@pytest.mark.parametrize(
  "binding", ["Straight.dropout = 0.0", "Straight.power = 1.0", "Straight.examples = 20"]
)
def test_an_option_of_a_task_counts(binding, begun, tmp_path):
  folder = tmp_path / "run"
  unchanged = begun(folder)
  start(folder, binding, "run.train_steps = 8", accept_changes=True)
  assert not near(weights(folder, 8), unchanged)


# ---- What is recorded is what happened ----


@pytest.mark.fast(to=["0.003"])
@pytest.mark.parametrize("to", ["0.003", "@schedules.constant()", "%RATE"])
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_a_changed_learning_rate_is_used_and_recorded(to, replicas, tmp_path, mirrored):
  del mirrored
  two = [f"auto.cpu_replicas = {replicas}", "Straight.dropout = 0.0"]
  start(tmp_path, *two)
  new = [f"keras.SGD.learning_rate = {to}", "run.train_steps = 5", "run.steps_per_loop = 1"]
  new += ["schedules.constant.learning_rate = 0.003"] if "constant" in to else []
  new += ["RATE = 0.003"] if "%" in to else []
  before = weights(tmp_path, 4)
  start(tmp_path, *two, *new, accept_changes=True)
  last = [line for line in lines(tmp_path) if line["step"] == 5][-1]
  assert last["learning_rate"] == pytest.approx(0.003)
  record = lines(tmp_path, "history.jsonl")[-1]
  assert float(record["in_use"]["learning_rate"]) == pytest.approx(0.003)
  after = weights(tmp_path, 5)
  moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(after, before, strict=True)))
  np.testing.assert_allclose(moved, 0.003 * last["gradient_norm"], rtol=1e-3)
  start(tmp_path, *two, *new, "run.train_steps = 6")  # no question again


def test_a_macro_that_changes_is_a_change_of_what_uses_it(begun, tmp_path):
  folder = tmp_path / "run"
  begun(folder, "keras.SGD.learning_rate = %RATE", "RATE = 0.03125")
  with pytest.raises(ConfigError, match=r"keras\.SGD\.learning_rate = 0\.5, which was 0\.03125: "):
    start(folder, "keras.SGD.learning_rate = 0.5", "run.train_steps = 8")


# ---- Loss scale ----


@pytest.mark.parametrize(
  ("change", "finite", "expected"),
  [
    ({"growth_steps": 3}, True, 32.0),  # two good steps before, and one
    ({"factor": 4.0}, False, 4.0),
    ({"floor": 12.0}, False, 12.0),
    ({}, False, 8.0),
    ({}, True, 16.0),
  ],
)
def test_a_changed_loss_scale_goes_on_from_the_scale_in_force(change, finite, expected, tmp_path):
  usual = {"initial": 16.0, "growth_steps": 5, "factor": 2.0, "floor": 1.0}
  began = DynamicLossScale(**usual)
  for _ in range(2):
    began.update(tf.constant(True))
  path = tf.train.Checkpoint(scale=began).write(str(tmp_path / "c"))
  there = DynamicLossScale(**{**usual, **change})
  tf.train.Checkpoint(scale=there).read(path).assert_consumed()
  there.update(tf.constant(finite))
  assert float(there.value()) == expected


@pytest.mark.whole
def test_the_first_scale_is_refused_later(begun, tmp_path):
  folder = tmp_path / "run"
  dynamic = ("Trainer.loss_scale = @dynamic", "dynamic.initial = 8.0")
  begun(folder, *dynamic)
  with pytest.raises(ConfigError, match=r"with dynamic\.initial = 4\.0, which was 8\.0: it is the"):
    start(folder, *dynamic, "dynamic.initial = 4.0", "run.train_steps = 8", accept_changes=True)


# ---- Sources that count in batches ----


@loopwright.register
class Bucketed(Straight):
  """The same examples in two buckets."""

  def source(self, split):
    whole = super().source(split)
    if split == "eval":
      return whole
    features = {**whole.fetch(tf.range(24)), "z": np.zeros([24, 8], "float32")}
    lengths = np.arange(24) % 8 + 1
    return Buckets(ArraySource(features=features), lengths=lengths, boundaries=(4, 8), trim=("z",))


@loopwright.register
class Mixed(Straight):
  """The same examples beside others."""

  def __init__(self, *, ratio=2):
    super().__init__()
    self._ratio = ratio

  def source(self, split):
    whole = super().source(split)
    return Sources(whole, more=Part(source=whole, ratio=self._ratio)) if split == "train" else whole


@pytest.mark.parametrize(
  ("task", "binding", "why"),
  [
    (
      "@Bucketed()",
      "run.global_batch_size = 4",
      r"global batch size = 4, which was 8: .*`Buckets`",
    ),
    pytest.param(
      "@Mixed()",
      "Mixed.ratio = 3",
      r"ratio = 3, which was 2: the position in that part",
      marks=pytest.mark.whole,
    ),
  ],
)
def test_a_position_that_would_be_another_is_refused(task, binding, why, begun, tmp_path):
  folder = tmp_path / "run"
  begun(folder, f"run.task = {task}")
  for accept in (False, True):
    with pytest.raises(ConfigError, match=why if accept else "would go on with|cannot go on with"):
      start(folder, f"run.task = {task}", binding, "run.train_steps = 8", accept_changes=accept)
  assert len(lines(folder, "history.jsonl")) == 1


# ---- Actions that change what is learned ----


@loopwright.register
class Collecting(Straight):
  """Keeps rows that an action adds; trains as before."""

  def build_model(self):
    replay = ReplayBuffer(capacity=8, features={"x": tf.TensorSpec([2])})
    replay.add({"x": np.ones([1, 2], "float32")})
    return {**super().build_model(), "replay": replay}

  def source(self, split):
    return Draws() if split == "train" else super().source(split)

  def train_step(self, step, batch):
    x = self.model["replay"].rows(batch["draw"])["x"]
    step.update(lambda part: self.training_loss(step, part), {**batch, "x": x, "y": x[:, 0]})


@loopwright.register
class Fill(Action):
  """Adds rows after each loop."""

  on = "train"

  def __init__(self, *, rows=1):
    self._rows = rows

  def __call__(self, output):
    self.run.task.model["replay"].add({"x": np.ones([self._rows, 2], "float32")})


@loopwright.register
class Lower(Action):
  """Halves the rate after each loop."""

  on, changes_training = "train", True

  def __init__(self, *, by=0.5):
    self._by = by

  def __call__(self, output):
    optimizer = self.run.trainer.parts.optimizers["default"].optimizer
    optimizer.learning_rate = float(optimizer.learning_rate) * self._by


FILL = ("run.task = @Collecting()", "run.actions = [@Fill()]")
LOWER = ("run.actions = [@Lower()]",)


@pytest.mark.parametrize(
  ("given", "binding", "name"),
  [
    (FILL, "run.steps_per_loop = 1", "run.steps_per_loop = 1, which was 2"),
    pytest.param(FILL, "Fill.rows = 2", "Fill.rows = 2, which was 1", marks=pytest.mark.whole),
    pytest.param(
      LOWER, "run.eval_every_steps = 3", "run.eval_every_steps = 3, which was None",
      marks=pytest.mark.whole,
    ),
    pytest.param(
      LOWER, "run.checkpoint_every_steps = 1", "run.checkpoint_every_steps = 1, which was 2",
      marks=pytest.mark.whole,
    ),
    pytest.param(
      LOWER, "Lower.by = 0.25", "Lower.by = 0.25, which was 0.5", marks=pytest.mark.whole
    ),
  ],
)  # fmt: skip
def test_what_an_action_that_changes_training_follows_is_asked(
  given, binding, name, begun, tmp_path
):
  folder = tmp_path / "run"
  begun(folder, *given)
  with pytest.raises(ConfigError, match=f"would go on with {name}: .* --accept_changes"):
    start(folder, *given, binding, "run.train_steps = 8")
  start(folder, *given, "run.keep_checkpoints = 1", "run.train_steps = 6")
  start(folder, *given, binding, "run.train_steps = 8", accept_changes=True)


def test_a_rate_that_an_action_sets_survives_a_restart_to_the_bit(tmp_path, capsys):
  start(tmp_path / "whole", *LOWER, "run.train_steps = 8")
  start(tmp_path / "parts", *LOWER)
  assert lines(tmp_path / "parts")[-1]["learning_rate"] == 0.03125 / 2  # logged before the action
  start(tmp_path / "parts", *LOWER, "run.train_steps = 8")
  assert "learning rate of SGD is 0.0078125, as the run has set it" in capsys.readouterr().err
  for one, other in zip(*(weights(tmp_path / n, 8) for n in ("whole", "parts")), strict=True):
    np.testing.assert_array_equal(one, other)
  assert lines(tmp_path / "parts")[-1]["learning_rate"] == 0.03125 / 8
  assert history.records(str(tmp_path / "parts"))[-1]["in_use"]["learning_rate"] == "0.0078125"
