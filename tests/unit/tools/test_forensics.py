"""Non-finite values: the loop stops before the first, nothing of it stays, its source is named."""

import re
import shlex
import shutil
import sys
import types
from pathlib import Path

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf
from planted import Planted, example_at, make_trainer

import launch
from loopwright.distribution.reduction import Reduction
from loopwright.errors import ConfigError
from loopwright.metrics import Loss
from loopwright.optimizers import loss_scale
from loopwright.runs import resume_rules
from loopwright.strategies.parameter_server.strategy import ParameterServer
from loopwright.tools.forensics import examine
from loopwright.tools.forensics.action import StopOnNonFinite

STEPS = 8


def stopped(strategy, task, *, steps=STEPS, **options):
  """A watched trainer after one loop, and what the loop returned."""
  trainer = make_trainer(strategy, task, **options)
  examine.watch(trainer)
  return trainer, trainer.train(tf.constant(steps))


def state(trainer):
  """Every value on every replica by name, counters included."""
  local = trainer.strategy.experimental_local_results
  variables = [*examine._all_variables(trainer), trainer.global_step, trainer.position]
  variables += [trainer.skipped_steps, trainer.nonfinite_step]
  return {f"{i} {v.name}": [copy.numpy() for copy in local(v)] for i, v in enumerate(variables)}


def assert_same(one, other):
  assert one.keys() == other.keys()
  for name in one:
    np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def rows(report):
  return [(f.replica, f.what, f.examples) for f in report.findings]


# ---- The step is found, and taken back ----


@pytest.mark.parametrize(
  ("replicas", "where", "step", "replica", "row", "options"),
  [
    (1, "loss", 1, 0, 7, {}),
    (2, "loss", 6, 1, 0, {}),
    (2, "layer", 4, 0, 3, {"loss_scale": loss_scale.dynamic}),
    (2, "norm/gamma", 5, 1, 2, {"accumulation_steps": 2, "clip_norm": 1.0, "fuse_updates": False}),
    (3, "output/bias", 2, 2, 1, {"eager": True, "loss_scale": loss_scale.fixed}),
    (2, "loss", 3, 1, 1, {"library": "tf_keras"}),
  ],
)
@pytest.mark.fast(where=["norm/gamma"])
def test_one_example_is_located_and_its_step_leaves_nothing_behind(
  replicas, where, step, replica, row, options, mirrored
):
  """The state is, to the bit, that of a run which ends before the step."""
  options = dict(options)
  library = {"library": options.pop("library", "keras")}
  micro = options.get("accumulation_steps", 1)
  example = example_at(step=step, replica=replica, row=row, replicas=replicas, micro_batches=micro)
  trainer, results = stopped(
    mirrored(replicas), Planted(example=example, where=where, **library), **options
  )
  assert (results["nonfinite_step"], trainer.global_step.numpy()) == (step, step - 1)
  assert trainer.position.numpy() == (step - 1) * planted.BATCH
  assert trainer.traces == (0 if options.get("eager") else 1)
  before = state(trainer)
  shorter = make_trainer(mirrored(replicas), Planted(**library), **options)
  shorter.train(tf.constant(step - 1))
  assert_same(before, state(shorter))

  report = examine.examine(trainer)
  what = "loss" if where in planted.LOSSES else f"gradient of {where}"
  assert (report.step, rows(report)) == (step, [(replica, what, (example,))])
  assert_same(before, state(trainer))
  [finding] = report.findings
  assert finding.value.startswith("nan" if what == "loss" else "inf in 1 of ")
  line = {"loss": "in loss", "layer": "in call"}.get(where, "in gradient")
  assert line in finding.operation
  assert where != "layer" or finding.operation.startswith("operation Log in layer 'root' (planted")
  assert trainer.train(tf.constant(3))["nonfinite_step"] == step  # it comes again, and stops again


@pytest.mark.whole
def test_a_watched_run_in_which_all_is_well_is_the_unwatched_one(mirrored):
  plain = make_trainer(mirrored(2), Planted())
  expected = [plain.train(tf.constant(n)) for n in (3, 4)]
  watched, results = stopped(mirrored(2), Planted(), steps=3)
  results = [results, watched.train(tf.constant(4))]
  assert_same(state(watched), state(plain))
  assert watched.traces == 1
  for ours, theirs in zip(results, expected, strict=True):
    assert "nonfinite_step" not in ours
    for name in ("loss", "gradient_norm", "skipped_steps"):
      assert ours[name] == theirs[name]


def test_dynamic_loss_scaling_lives_with_gradients_that_are_not_finite(mirrored):
  example = example_at(step=3, replica=1, row=0, replicas=2)
  task = Planted(example=example, where="hidden/bias")
  trainer, results = stopped(mirrored(2), task, loss_scale=loss_scale.dynamic)
  assert "nonfinite_step" not in results
  assert (results["skipped_steps"], trainer.global_step.numpy()) == (1, STEPS)
  assert results["loss_scale"] == 2.0**14


def test_the_examples_of_a_stream(mirrored):
  """Its order is its own: step 3 reads 16 to 23, of which replica 1 of 2 has the last four."""
  trainer, results = stopped(mirrored(2), Planted(example=21, where="hidden/kernel", stream=True))
  assert results["nonfinite_step"] == 3
  assert rows(examine.examine(trainer)) == [(1, "gradient of hidden/kernel", (21,))]


class TwoPlayers(Planted):
  """An update of one half, then one of both by other verbs; the second meets the poison."""

  def variables_of(self, optimizer):
    hidden = [v for v in self.model.trainable_variables if v.path.startswith("hidden")]
    rest = [v for v in self.model.trainable_variables if not v.path.startswith("hidden")]
    return hidden if optimizer == "first" else rest

  def clean_loss(self, batch):
    outputs = self.forward(batch, True)
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

  def train_step(self, step, batch):
    step.update(self.clean_loss, batch, "first")
    step.update(self.clean_loss, batch, "first")
    variables = step.variables("second")
    gradients, local = step.gradients(lambda b: self.training_loss(step, b), batch, variables)
    gradients, loss = step.all_reduce(gradients, local)
    finite, norm = step.check(step.unscale(gradients, loss))
    step.apply(step.unscale(gradients, loss), finite, "second")
    step.log_update(loss, finite, norm, "second")


@pytest.mark.parametrize(("where", "fuse_updates"), [("loss", True), ("output/kernel", False)])
@pytest.mark.whole
def test_earlier_updates_of_the_step_are_taken_back_too(where, fuse_updates, mirrored):
  options = {
    "optimizer": {"first": keras.optimizers.Adam, "second": keras.optimizers.SGD},
    "fuse_updates": fuse_updates,
  }
  example = example_at(step=4, replica=1, row=1, replicas=2)
  trainer, results = stopped(mirrored(2), TwoPlayers(example=example, where=where), **options)
  assert results["nonfinite_step"] == 4
  shorter = make_trainer(mirrored(2), TwoPlayers(), **options)
  shorter.train(tf.constant(3))
  assert_same(state(trainer), state(shorter))
  report = examine.examine(trainer)
  what = "loss" if where == "loss" else "gradient of output/kernel"
  assert rows(report) == [(1, what, (example,))]
  assert report.findings[0].number == 3  # the third backward pass
  assert_same(state(trainer), state(shorter))


# ---- What no single example causes ----


class Together(Planted):
  """Two examples at once, in one replica's batch, make the loss infinite."""

  def loss(self, outputs, batch):
    present = [tf.reduce_any(batch["example_id"] == e) for e in self.pair]
    loss = self.clean(outputs, batch)
    return Loss(loss.total + tf.where(present[0] & present[1], np.inf, 0.0), loss.weight)

  def clean(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])


@pytest.mark.whole
def test_examples_that_are_bad_only_together(mirrored):
  task = Together()
  task.pair = [example_at(step=2, replica=1, row=row, replicas=2) for row in (2, 3)]
  trainer, results = stopped(mirrored(2), task)
  assert results["nonfinite_step"] == 2
  report = examine.examine(trainer)
  assert rows(report) == [(1, "loss", tuple(sorted(task.pair)))]
  assert "(only together)" in str(report)


class Steep(Planted):
  """Gradients of 1e30 and losses near 0: finite, but for the square of their norm."""

  slope = 1e30

  def loss(self, outputs, batch):
    slope = tf.where(batch["example_id"] == self.example, self.slope, 1.0)
    return Loss.from_examples(slope * (outputs - tf.stop_gradient(outputs)), batch["weight"])


@pytest.mark.whole
def test_a_norm_that_overflows(mirrored):
  trainer, results = stopped(
    mirrored(2), Steep(example=example_at(step=2, replica=0, row=1, replicas=2))
  )
  assert results["nonfinite_step"] == 2
  what = "norm of the gradients, which overflows float32"
  assert rows(examine.examine(trainer)) == [(None, what, ())]


@pytest.mark.whole
def test_a_sum_that_overflows_the_wire_dtype(mirrored):
  """1e5 is finite in float32, and infinite in float16."""
  task = Steep(example=example_at(step=2, replica=0, row=1, replicas=2))
  task.slope = 1e5
  trainer, results = stopped(mirrored(2), task, reduction=Reduction(wire_dtype="float16"))
  assert results["nonfinite_step"] == 2
  [(replica, what, examples)] = rows(examine.examine(trainer))
  assert (replica, what[:19], examples) == (None, "summed gradient of ", ())


@pytest.mark.whole
def test_a_step_that_is_finite_has_nothing_to_report(mirrored):
  report = examine.examine(make_trainer(mirrored(2), Planted()))
  assert not report.findings
  assert str(report).startswith("step 1: all values are finite")


# ---- The whole command ----


CONFIG = """
import planted
run.task = @Planted()
Planted.example = {example}
Planted.where = '{where}'
run.train_steps = 12
run.steps_per_loop = 12
run.global_batch_size = 8
run.seed = 3
run.strategy = @mirrored
mirrored.cpu_replicas = 2
mirrored.cross_device_ops = 'reduction_to_one_device'
run.actions = [@StopOnNonFinite()]
"""


@pytest.mark.parametrize("where", ["loss", "hidden/kernel"])
@pytest.mark.fast(where=["loss"])
def test_the_replay_command_shows_the_step_again(where, tmp_path, capsys):
  example = example_at(step=9, replica=1, row=2, replicas=2)
  config, folder = tmp_path / "x.gin", tmp_path / "run of mine"
  config.write_text(CONFIG.format(example=example, where=where))
  arguments = [f"--gin_file={config}", f"--model_dir={folder}", "--mode=train"]
  assert launch.main(["launch.py", *arguments]) == 1
  *table, last = capsys.readouterr().err.splitlines()
  what = "loss" if where == "loss" else "gradients"
  assert last.startswith(f"failed: the {what} became NaN or infinite at step 9. Try a lower")
  report = (folder / "nonfinite" / "report.txt").read_text()
  assert report.splitlines() == table[-len(report.splitlines()) :]
  value = "nan" if where == "loss" else "inf in 1 of 32 elements"
  name = "loss" if where == "loss" else "gradient of hidden/kernel"
  assert re.split("  +", report.splitlines()[2]) == ["", "1", name, value, str(example)]
  assert not (folder / "checkpoints").exists()  # what a checkpoint has is always a step that stands

  reader = tf.train.load_checkpoint(str(folder / "nonfinite" / "before"))
  saved = {
    name: reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")
    for name in ("global_step", "position", "skipped_steps")
  }
  assert saved == {"global_step": 8, "position": 64, "skipped_steps": 0}

  path, *command = shlex.split(last.partition("replay the step: ")[2])
  assert path == f"PYTHONPATH={Path(planted.__file__).parent}"  # where the task's module is
  assert command[:2] == ["loopwright", "replay"]
  assert launch.main(command) == 0
  out, err = capsys.readouterr()
  assert report in err
  assert "reproduced" in out

  shutil.rmtree(folder / "nonfinite")
  assert launch.main(command) == 2
  assert "no step to replay in" in capsys.readouterr().err


def test_the_replay_command_finds_the_task_where_the_run_did(monkeypatch):
  """Beside a gin file elsewhere; the folder has a blank to quote."""
  module = types.SimpleNamespace(__file__="/else where/mine/planted.py")
  monkeypatch.setitem(sys.modules, "mine.planted", module)
  monkeypatch.setattr(resume_rules.configurables, "bindings", lambda: {"run.seed": "3"})
  task = type("Mine", (), {"__module__": "mine.planted"})()
  trainer = types.SimpleNamespace(task=task, cluster=types.SimpleNamespace(is_local=False))
  command = resume_rules.replay_command("runs/x", trainer)
  assert command == (
    "PYTHONPATH='/else where' loopwright replay runs/x/operative_config.gin --model_dir=runs/x"
  )
  command = resume_rules.replay_command("runs/a=1", trainer)  # not a binding
  assert "replay --gin_file=runs/a=1/operative_config.gin --model_dir=runs/a=1" in command
  monkeypatch.setattr(resume_rules.configurables, "bindings", dict)
  command = resume_rules.replay_command("runs/x", trainer)
  assert command == "run(mode='replay', model_dir='runs/x', ...) with the same arguments"


# ---- Where it does not go ----


def test_parameter_servers_are_refused():
  with pytest.raises(ConfigError, match="cannot be replayed under parameter_server"):
    examine.examine(types.SimpleNamespace(placement=ParameterServer(None)))


@pytest.mark.whole
def test_without_forensics_the_loop_goes_on_to_its_end(mirrored):
  trainer = make_trainer(mirrored(2), Planted(example=0))
  action = StopOnNonFinite(forensics=False)
  action.bind(types.SimpleNamespace(trainer=trainer, strategy=trainer.strategy))
  assert trainer.parts.observers == ()
