"""Trainer and Evaluator in a script of one's own: under Orbit's Controller, and without Orbit."""

import json
import subprocess
import sys

import everything
import orbit
import pytest
import tensorflow as tf
from runs import make_evaluator


def made(strategy):
  trainer = everything.make_trainer(strategy)
  ema = trainer.parts.ema
  return trainer, make_evaluator(trainer.task, strategy, batch=everything.BATCH, ema=ema)


def test_orbits_controller_drives_both(tmp_path):
  strategy = tf.distribute.OneDeviceStrategy("CPU:0")
  trainer, evaluator = made(strategy)
  controller = orbit.Controller(
    trainer=trainer, evaluator=evaluator, global_step=trainer.global_step, strategy=strategy,
    steps_per_loop=2, summary_dir=str(tmp_path),
  )  # fmt: skip
  found = controller.train_and_evaluate(train_steps=5, eval_steps=-1, eval_interval=3)
  assert int(trainer.global_step) == 5
  by_hand, its_evaluator = made(strategy)
  for steps in (2, 1, 2):
    by_hand.train(tf.constant(steps))
  assert found == its_evaluator.evaluate(tf.constant(-1))


class Derived(everything.Everything):
  """Also reports an array, which Orbit would give to tf.summary.scalar."""

  def derived(self, values):
    return {"twice": 2 * values["loss"], "both": [values["loss"]] * 2}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_restored_controller_reads_the_examples_of_its_step(replicas, mirrored, tmp_path):
  strategy = mirrored(replicas)
  trainer = everything.make_trainer(strategy, made=Derived())
  checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
  manager = tf.train.CheckpointManager(checkpoint, str(tmp_path / "saved"), 3)
  controller = orbit.Controller(
    trainer=trainer, evaluator=make_evaluator(trainer.task, strategy, batch=everything.BATCH),
    global_step=trainer.global_step, strategy=strategy, steps_per_loop=2,
    summary_dir=str(tmp_path / "summaries"),
    checkpoint_manager=manager,
  )  # fmt: skip
  controller.train(steps=3)
  saved = manager.save()
  controller.train(steps=8, checkpoint_at_completion=False)
  seen = trainer.task.model["stream"].seen()
  assert set(controller.evaluate(-1)) >= {"loss", "twice"}
  controller.restore_checkpoint(saved)
  assert trainer.global_step.numpy() == 3
  controller.train(steps=8, checkpoint_at_completion=False)
  assert trainer.task.model["stream"].seen() == seen
  assert set(trainer.train(tf.constant(1))) >= {"twice", "both"}


WITHOUT = f"""
import json, sys, types
sys.modules["orbit"] = types.ModuleType("orbit")  # as a satellite tracker has it
sys.path[:0] = {sys.path}
import everything, tensorflow as tf
from loopwright import evaluator, trainer
bases = trainer.Trainer.__mro__ + evaluator.Evaluator.__mro__
assert not any(base.__module__.startswith("orbit.") for base in bases)
made = everything.make_trainer(tf.distribute.OneDeviceStrategy("CPU:0"))
made.train(tf.constant(3))
print(json.dumps([float(tf.norm(variable)) for variable in made.task.model['network'].weights]))
"""


def test_training_needs_no_orbit():
  done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  trainer = everything.make_trainer(tf.distribute.OneDeviceStrategy("CPU:0"))
  assert isinstance(trainer, orbit.AbstractTrainer)
  trainer.train(tf.constant(3))
  norms = [float(tf.norm(variable)) for variable in trainer.task.model["network"].weights]
  assert json.loads(done.stdout) == pytest.approx(norms, rel=1e-5)
