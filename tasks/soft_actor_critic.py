"""Soft actor-critic on a gymnasium environment: experience collected between the training loops.

Three optimizers at three cadences, target networks and a replay buffer, all in `train_step`; the
buffer is part of the model, so a resumed run goes on with the same experience.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with twin critics and a
learned temperature; needs the extra `rl` (gymnasium).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import Action, ArraySource, Batch, ConfigError, EvalStep, Loss, Source, Step, Task
from loopwright.errors import require_integer
from loopwright.graphs.randomness import normal_each
from loopwright.inputs.replay import Draws, ReplayBuffer
from loopwright.metrics import weighted_sum

_FIRST_OF_EVALUATION = 1_000_000
"""Seeds of the evaluation's episodes begin here, those of training at 0."""


@loopwright.register
class SoftActorCritic(Task):
  """Learns a continuous control task; needs optimizers "critic", "actor" and "temperature"."""

  def __init__(
    self,
    *,
    environment: str = "Pendulum-v1",
    warm_up_episodes: int = 5,
    capacity: int = 50_000,
    units: Sequence[int] = (64, 64),
    discount: float = 0.99,
    target_decay: float = 0.995,
    actor_every_steps: int = 2,
    temperature_every_steps: int = 4,
    eval_episodes: int = 10,
  ) -> None:
    """Keeps its arguments.

    Args:
      environment: a name that gymnasium knows, with vectors as observations and bounded actions.
      warm_up_episodes: played with random actions before the first step.
      capacity: transitions in the replay buffer.
      units: hidden units of actor and critics.
      discount: of a reward per environment step.
      target_decay: target = decay * target + (1 - decay) * critic, after each step.
      actor_every_steps: training steps between updates of the actor.
      temperature_every_steps: training steps between updates of the temperature.
      eval_episodes: episodes of an evaluation, with the actor's mean action.
    """
    self._name, self._warm_up, self._capacity = environment, warm_up_episodes, capacity
    self._units, self._discount, self._decay = tuple(units), discount, target_decay
    self._actor_every, self._temperature_every = actor_every_steps, temperature_every_steps
    self._episodes = eval_episodes
    self._evaluated: dict[bytes, list[Any]] = {}

  def build_model(self) -> dict[str, Any]:
    """Returns actor, critics, targets, temperature and a replay buffer with random play."""
    self._begin_play()
    critics, targets = ([self._critic() for _ in range(2)] for _ in range(2))
    for critic, target in zip(critics, targets, strict=True):
      target.set_weights(critic.get_weights())
      target.trainable = False
    row = {
      "observation": tf.TensorSpec([self._observations]), "action": tf.TensorSpec([self._actions]),
      "reward": tf.TensorSpec([]), "next_observation": tf.TensorSpec([self._observations]),
      "ended": tf.TensorSpec([]),
    }  # fmt: skip
    replay = ReplayBuffer(capacity=self._capacity, features=row)
    for _ in range(self._warm_up):
      self._play(replay, None)
    return {
      "actor": _network(self._observations, self._units, 2 * self._actions),
      "critic": critics, "target": targets, "replay": replay,
      "temperature": tf.Variable(0.0, name="log_temperature"),
    }  # fmt: skip

  def source(self, split: str) -> Source:
    """Returns draws from the replay buffer, or the numbers of the episodes to evaluate."""
    self._begin_play()
    if split == "train":
      return Draws()
    return ArraySource(features={"episode": np.arange(self._episodes)})

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Adds the noise of two actions, float32 [n, 2, actions]."""
    if not training:
      return batch
    return {**batch, "noise": normal_each(batch["seed"], [2, self._actions])}

  def train_step(self, step: Step, batch: Batch) -> None:
    """Updates critics, actor and temperature at their cadences, then moves the targets."""
    batch = {**batch, **self.model["replay"].rows(batch["draw"])}
    due = (step.number + 1) % self._actor_every == 0
    temperature_due = (step.number + 1) % self._temperature_every == 0
    step.update(self.critic_loss, batch, "critic")
    step.update(self.actor_loss, batch, "actor", when=due)
    step.update(self.temperature_loss, batch, "temperature", when=temperature_due)
    for critic, target in zip(self.model["critic"], self.model["target"], strict=True):
      for new, old in zip(critic.variables, target.variables, strict=True):
        step.assign(old, self._decay * old + (1.0 - self._decay) * new)

  def critic_loss(self, batch: Batch) -> Loss:
    """Returns the squared errors of both critics (equation 5)."""
    action, log_density = self._sampled(batch["next_observation"], batch["noise"][:, 0])
    future = self._value("target", batch["next_observation"], action)
    future -= tf.exp(self.model["temperature"]) * log_density
    wanted = tf.stop_gradient(batch["reward"] + self._discount * (1 - batch["ended"]) * future)
    inputs = tf.concat([batch["observation"], batch["action"]], 1)
    errors = [critic(inputs)[:, 0] - wanted for critic in self.model["critic"]]
    return Loss.from_examples(sum(tf.square(error) / 2 for error in errors), batch["weight"])

  def actor_loss(self, batch: Batch) -> Loss:
    """Returns temperature * log density - value of the actor's own actions (equation 7)."""
    action, log_density = self._sampled(batch["observation"], batch["noise"][:, 1])
    temperature = tf.stop_gradient(tf.exp(self.model["temperature"]))
    value = self._value("critic", batch["observation"], action)
    return Loss.from_examples(temperature * log_density - value, batch["weight"])

  def temperature_loss(self, batch: Batch) -> Loss:
    """Returns what moves the entropy to -(number of actions) (equation 18)."""
    _, log_density = self._sampled(batch["observation"], batch["noise"][:, 1])
    excess = tf.stop_gradient(log_density - float(self._actions))
    return Loss.from_examples(-self.model["temperature"] * excess, batch["weight"])

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Plays one episode per row with the actor's mean action; logs the mean return."""
    episodes = batch["episode"]
    shape = [episodes.shape[0], self._observations]
    observation = tf.ensure_shape(tf.numpy_function(self._begin, [episodes], tf.float32), shape)
    total, going = tf.zeros([episodes.shape[0]]), tf.constant(True)
    while going:
      action = self._scaled(tf.tanh(self._moments(observation)[0]))
      observation, reward, going = tf.numpy_function(
        self._advance, [episodes, action], [tf.float32, tf.float32, tf.bool]
      )
      observation, going = tf.ensure_shape(observation, shape), tf.ensure_shape(going, [])
      total += tf.ensure_shape(reward, [episodes.shape[0]])
    step.log({"return": weighted_sum(total, batch["weight"])})

  def collect(self) -> None:
    """Plays one episode with the actor's random actions into the replay buffer (host)."""
    self._play(self.model["replay"], tf.function(self._explore, autograph=False))

  def _explore(self, observation: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
    mean, log_deviation = self._moments(observation[tf.newaxis])
    return self._scaled(tf.tanh(mean + tf.exp(log_deviation) * noise))[0]

  def _play(self, replay: ReplayBuffer, act: Any) -> None:
    """Adds an episode whose seed is the number of transitions so far; `act` None is random."""
    seed = int(replay.added.numpy())
    random = np.random.default_rng(seed)
    observation, _ = self._env.reset(seed=seed)
    rows: list[tuple[Any, ...]] = []
    ended = cut_off = False
    while not (ended or cut_off):
      if act is None:
        action = random.uniform(self._low, self._high).astype(np.float32)
      else:
        noise = random.normal(size=[1, self._actions]).astype(np.float32)
        action = act(tf.constant(observation), tf.constant(noise)).numpy()
      following, reward, ended, cut_off, _ = self._env.step(action)
      rows.append((observation, action, reward, following, float(ended)))
      observation = following
    names = ("observation", "action", "reward", "next_observation", "ended")
    columns = zip(names, zip(*rows, strict=True), strict=True)
    replay.add({name: np.array(column, np.float32) for name, column in columns})

  def _begin_play(self) -> None:
    """Makes the environment of training, once."""
    if not hasattr(self, "_env"):
      self._env = self._make()
      self._observations = self._env.observation_space.shape[0]
      self._low, self._high = self._env.action_space.low, self._env.action_space.high
      self._actions = len(self._low)

  def _begin(self, episodes: np.ndarray) -> np.ndarray:
    made = self._evaluated.setdefault(episodes.tobytes(), [self._make() for _ in episodes])
    seeds = [_FIRST_OF_EVALUATION + int(episode) for episode in episodes]
    begun = [each.reset(seed=seed)[0] for each, seed in zip(made, seeds, strict=True)]
    return np.array(begun, np.float32)

  def _advance(self, episodes: np.ndarray, actions: np.ndarray) -> tuple[Any, ...]:
    made = self._evaluated[episodes.tobytes()]
    taken = [each.step(action) for each, action in zip(made, actions, strict=True)]
    observations, rewards, ended, cut_off, _ = zip(*taken, strict=True)
    going = not any(ended) and not any(cut_off)
    return np.array(observations, np.float32), np.array(rewards, np.float32), np.bool_(going)

  def _make(self) -> Any:
    try:
      import gymnasium
    except ImportError:
      raise ConfigError(
        "SoftActorCritic needs gymnasium, which is not installed; pip install 'loopwright[rl]'."
      ) from None
    try:
      made = gymnasium.make(self._name)
    except gymnasium.error.Error as error:
      raise ConfigError(
        f"SoftActorCritic.environment is {self._name!r}: {error} Give a name that gymnasium knows, "
        "such as 'Pendulum-v1'."
      ) from error
    seen, acts = made.observation_space, made.action_space
    bounds = np.array([getattr(acts, "low", np.nan), getattr(acts, "high", np.nan)])
    if len(seen.shape or ()) != 1 or not np.isfinite(bounds).all() or bounds.ndim != 2:
      raise ConfigError(
        f"SoftActorCritic.environment is {self._name!r}, which observes {seen} and acts by {acts}; "
        "both must be vectors, the actions bounded, as those of 'Pendulum-v1'."
      )
    return made

  def _critic(self) -> keras.Model:
    return _network(self._observations + self._actions, self._units, 1)

  def _moments(self, observation: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    mean, log_deviation = tf.split(self.model["actor"](observation), 2, axis=1)
    return mean, tf.clip_by_value(log_deviation, -20.0, 2.0)

  def _scaled(self, action: tf.Tensor) -> tf.Tensor:
    """Maps actions from [-1, 1] to the environment's bounds."""
    return self._low + (self._high - self._low) * (action + 1.0) / 2.0

  def _sampled(self, observation: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns actions [n, actions] and their log densities [n] (appendix C)."""
    mean, log_deviation = self._moments(observation)
    raw = mean + tf.exp(log_deviation) * noise
    densities = -0.5 * tf.square(noise) - log_deviation - 0.5 * math.log(2 * math.pi)
    squashing = 2.0 * (math.log(2.0) - raw - tf.math.softplus(-2.0 * raw))
    return self._scaled(tf.tanh(raw)), tf.reduce_sum(densities - squashing, axis=1)

  def _value(self, critics: str, observation: tf.Tensor, action: tf.Tensor) -> tf.Tensor:
    inputs = tf.concat([observation, action], axis=1)
    first, second = (critic(inputs)[:, 0] for critic in self.model[critics])
    return tf.minimum(first, second)


@loopwright.register
class Collect(Action):
  """Plays with the current weights at a cadence of training steps, into the replay buffer."""

  on, changes_training = "train", True

  def __init__(self, *, episodes: int = 1, every_steps: int = 200) -> None:
    """Keeps its arguments.

    Args:
      episodes: to play each time.
      every_steps: training steps between two times; an episode of Pendulum-v1 has 200.
    """
    self._episodes = episodes
    self.every_steps = require_integer("Collect.every_steps", every_steps, at_least=1)

  def __call__(self, output: Mapping[str, Any]) -> None:
    """Collects (host)."""
    task = self.run.task
    if not isinstance(task, SoftActorCritic):
      raise ConfigError(
        f"Collect is for SoftActorCritic, but run.task is a {type(task).__name__}; remove it from "
        "run.actions."
      )
    for _ in range(self._episodes):
      task.collect()


def _network(inputs: int, units: Sequence[int], outputs: int) -> keras.Model:
  hidden = [keras.layers.Dense(count, activation="relu") for count in units]
  last = keras.layers.Dense(outputs, dtype="float32")  # densities and targets need it
  return keras.Sequential([keras.Input([inputs]), *hidden, last])
