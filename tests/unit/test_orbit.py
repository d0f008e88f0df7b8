"""Trainer and Evaluator in a script of one's own, under Orbit's Controller."""

import everything
import orbit
import tensorflow as tf

from framework.evaluator import Evaluator
from framework.inputs import datasets


def made(strategy):
  trainer = everything.make_trainer(strategy)
  source = trainer.task.source("eval")
  evaluator = Evaluator(
    task=trainer.task, strategy=strategy, ema=trainer.parts.ema,
    dataset=datasets.eval_dataset(source, global_batch_size=everything.BATCH),
  )  # fmt: skip
  return trainer, evaluator


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
