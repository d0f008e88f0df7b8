"""Soft actor-critic: ten steps against a plain TensorFlow loop on 1, 2 and 3 replicas, resume."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import make_evaluator

from loopwright.actions.base import Action
from loopwright.errors import ConfigError
from loopwright.graphs import randomness
from loopwright.inputs import datasets
from loopwright.inputs.replay import Draws
from loopwright.models import models
from loopwright.run_folder.fitting import START
from loopwright.runs import runner as runs
from loopwright.runs.builder import Recipe
from loopwright.tasks.soft_actor_critic import Collect, SoftActorCritic

pytest.importorskip("gymnasium")
ROWS, STEPS = 12, 10
OPTIMIZERS = {
  "critic": lambda: keras.optimizers.Adam(0.01),
  "actor": lambda: keras.optimizers.Adam(0.02),
  "temperature": lambda: keras.optimizers.SGD(0.5),
}


def task():
  return SoftActorCritic(warm_up_episodes=1, capacity=500, units=[8])


def trainer_of(strategy):
  randomness.seed_everything(5)
  recipe = Recipe(optimizer=OPTIMIZERS, global_batch_size=ROWS, seed=5)
  return recipe.trainer(task(), strategy)


def plain_loop(model, batches):
  """Three optimizers of Keras on whole batches; Pendulum's actions are from -2 to 2."""
  replay = {name: variable.numpy() for name, variable in model["replay"]._rows.items()}
  (q1, q2), (slow1, slow2), actor = model["critic"], model["target"], model["actor"]
  temperature = model["temperature"]
  made = {name: factory() for name, factory in OPTIMIZERS.items()}

  def drawn(observation, noise):
    mean, log_std = tf.split(actor(observation), 2, axis=1)
    z = mean + tf.exp(log_std) * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    squash = tf.math.log(1 - tf.tanh(z) ** 2)
    return 2 * tf.tanh(z), (normal - squash)[:, 0]

  for number, batch in enumerate(batches):
    row = {name: rows[batch["draw"] % 200] for name, rows in replay.items()}
    noise = randomness.normal_each(batch["seed"], [2, 1])
    action, density = drawn(row["next_observation"], noise[:, 0])
    after = tf.concat([row["next_observation"], action], 1)
    future = tf.minimum(slow1(after), slow2(after))[:, 0] - tf.exp(temperature) * density
    wanted = row["reward"] + 0.99 * (1 - row["ended"]) * future
    before = tf.concat([row["observation"], row["action"]], 1)
    weights = q1.trainable_variables + q2.trainable_variables
    with tf.GradientTape() as tape:
      loss = sum(tf.reduce_mean((q(before)[:, 0] - wanted) ** 2) / 2 for q in (q1, q2))
    made["critic"].apply(tape.gradient(loss, [w.value for w in weights]), weights)
    if number % 2 == 1:
      weights = actor.trainable_variables
      with tf.GradientTape() as tape:
        action, density = drawn(row["observation"], noise[:, 1])
        pair = tf.concat([row["observation"], action], 1)
        value = tf.minimum(q1(pair), q2(pair))[:, 0]
        loss = tf.reduce_mean(tf.exp(temperature) * density - value)
      made["actor"].apply(tape.gradient(loss, [w.value for w in weights]), weights)
    if number % 4 == 3:
      _, density = drawn(row["observation"], noise[:, 1])
      temperature.assign_add(0.5 * tf.reduce_mean(density - 1.0))
    for q, slow in ((q1, slow1), (q2, slow2)):
      for new, old in zip(q.variables, slow.variables, strict=True):
        old.assign(0.995 * old + 0.005 * new)


def batches():
  def keep_seed(batch, training):
    return {**batch, "kept": batch["seed"]}

  data = datasets.train_dataset(Draws(), global_batch_size=ROWS, seed=5, preprocess=keep_seed)
  for batch in itertools.islice(data.as_numpy_iterator(), STEPS):
    yield {"draw": batch["draw"], "seed": tf.constant(batch["kept"])}


def learned(model):
  names = ("actor", "critic", "target", "temperature")
  return [models.raw(v).numpy() for name in names for v in models.all_variables(model[name])]


@pytest.fixture(scope="module")
def expected():
  randomness.seed_everything(5)
  model = task().build_model()
  plain_loop(model, batches())
  return learned(model)


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ten_steps_are_those_of_a_plain_loop(replicas, expected, mirrored):
  trainer = trainer_of(mirrored(replicas))
  trainer.train(tf.constant(STEPS))
  for got, wanted in zip(learned(trainer.task.model), expected, strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_densities_and_targets_are_float32_in_mixed_precision(precision, policy, mirrored):
  exact = trainer_of(mirrored(2)).train(tf.constant(1))["critic_loss"]
  policy(precision)
  trainer = trainer_of(mirrored(2))
  assert trainer.train(tf.constant(1))["critic_loss"] == pytest.approx(exact, rel=0.01)
  later = trainer.train(tf.constant(7))
  assert all(np.isfinite(later[f"{name}_loss"]) for name in OPTIMIZERS)


def test_an_evaluation_is_the_mean_return_of_its_episodes(mirrored):
  import gymnasium

  trainer = trainer_of(mirrored(2))
  made, returns = trainer.task, []
  actor = made.model["actor"]
  for episode in range(3):
    environment = gymnasium.make("Pendulum-v1")
    observation, _ = environment.reset(seed=1_000_000 + episode)
    returns.append(0.0)
    for _ in range(200):
      mean = actor(observation[np.newaxis]).numpy()[0, :1]
      observation, reward, *_ = environment.step(2.0 * np.tanh(mean))
      returns[-1] += reward
  made._episodes = 3
  evaluator = make_evaluator(made, trainer.strategy, batch=3)
  assert evaluator.evaluate()["return"] == pytest.approx(np.mean(returns), rel=1e-3)


class Failing(Action):
  """Fails once, in a loop after a checkpoint."""

  on, every_steps, failed = "train", 20, False

  def __call__(self, output):
    if self.run.step == 60 and not Failing.failed:
      Failing.failed = True
      raise RuntimeError("planted")


@pytest.mark.whole
def test_a_resumed_run_goes_on_with_the_same_experience_whatever_its_loops(tmp_path):
  def go(folder, *actions, steps_per_loop=20):
    runs.run(
      task=task(), train_steps=80, global_batch_size=ROWS, model_dir=str(tmp_path / folder),
      mode="train", optimizer=OPTIMIZERS, steps_per_loop=steps_per_loop, checkpoint_every_steps=40,
      actions=[Collect(every_steps=20), *actions],
    )  # fmt: skip

  go("whole")
  with pytest.raises(RuntimeError, match="planted"):
    go("broken", Failing())
  go("broken", Failing(), steps_per_loop=15)
  paths = [str(tmp_path / name / "checkpoints" / "ckpt-80") for name in ("whole", "broken")]
  first, second = map(tf.train.load_checkpoint, paths)
  names = first.get_variable_to_shape_map()
  assert names == second.get_variable_to_shape_map()
  assert sum("replay" in name for name in names) == 6
  for name in set(names) - {
    "_CHECKPOINTABLE_OBJECT_GRAPH",
    START,
    "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
  }:
    assert np.array_equal(first.get_tensor(name), second.get_tensor(name)), name


@pytest.mark.parametrize(
  ("name", "line"),
  [
    ("CartPole-v1", r"acts by Discrete\(2\); both must be vectors, the actions bounded"),
    ("FrozenLake-v1", r"observes Discrete\(16\) and acts by Discrete\(4\); both must be vectors"),
    ("Nothing-v1", "Give a name that gymnasium knows, such as 'Pendulum-v1'"),
  ],
)
def test_environments_that_it_cannot_play_are_one_line(name, line):
  with pytest.raises(ConfigError, match=line):
    SoftActorCritic(environment=name).build_model()
