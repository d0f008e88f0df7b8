"""The update that every strategy must make, in float64 NumPy and by hand.

Knows nothing of TensorFlow, and nothing of replicas, micro-batches or padding: one global batch in,
one update out. The model is x [n, 5] -> tanh, 8 units -> 1 unit, with the squared error.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

INPUTS, HIDDEN = 5, 8
NAMES = ("hidden/kernel", "hidden/bias", "output/kernel", "output/bias")


@dataclasses.dataclass
class Trajectory:
  """What a training run leaves behind.

  `loops` has, for each loop, the metrics' means; `applied` counts updates by optimizer.
  """

  weights: list[np.ndarray]
  averages: list[np.ndarray]
  loops: list[dict[str, float]]
  applied: dict[str, int]
  skipped_steps: int
  loss_scale: float
  norms: list[float]


def initial_weights():
  """Four float32 arrays: kernels from a normal distribution, biases that are not zero."""
  rng = np.random.default_rng(7)
  shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
  return [rng.normal(scale=0.5, size=shape).astype(np.float32) for shape in shapes]


def predict(weights, x):
  """Returns (outputs [n], hidden activations [n, 8])."""
  hidden = np.tanh(x @ weights[0] + weights[1])
  return (hidden @ weights[2] + weights[3])[:, 0], hidden


def gradient_sums(weights, x, y, weight):
  """Returns the gradients of sum(weight * (output - y)**2), and that sum."""
  output, hidden = predict(weights, x)
  error = output - y
  d_output = (2 * weight * error)[:, None]
  d_hidden = (d_output @ weights[2].T) * (1 - hidden**2)
  gradients = [x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_output, d_output.sum(0)]
  return gradients, float(weight @ error**2)


def objective(weights, batch, l2):
  """Returns gradients and value of: weighted mean squared error + l2 * |hidden kernel|^2."""
  used = batch["weight"] != 0
  x, y, weight = (batch[name][used] for name in ("x", "y", "weight"))
  total_weight = weight.sum()
  if total_weight == 0:
    return [np.zeros_like(w) for w in weights], 0.0
  sums, total = gradient_sums(weights, x, y, weight)
  gradients = [g / total_weight for g in sums]
  gradients[0] = gradients[0] + 2 * l2 * weights[0]
  return gradients, total / total_weight + l2 * float(np.sum(weights[0] ** 2))


class Adam:
  """Kingma & Ba (2015), Algorithm 1 with the efficient ordering of section 2, as Keras writes it:
  epsilon is added to the root of the *uncorrected* second moment. `decay` is Loshchilov & Hutter's
  (2019) decoupled weight decay, multiplied by the learning rate.
  """

  def __init__(self, decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-7):
    self.decay, self.beta1, self.beta2, self.epsilon = decay, beta1, beta2, epsilon
    self.first = self.second = None
    self.time = 0

  def step(self, weights, gradients, rate):
    if self.first is None:
      self.first = [np.zeros_like(w) for w in weights]
      self.second = [np.zeros_like(w) for w in weights]
    self.time += 1
    self.first = [
      self.beta1 * m + (1 - self.beta1) * g for m, g in zip(self.first, gradients, strict=True)
    ]
    self.second = [
      self.beta2 * v + (1 - self.beta2) * g**2 for v, g in zip(self.second, gradients, strict=True)
    ]
    alpha = rate * math.sqrt(1 - self.beta2**self.time) / (1 - self.beta1**self.time)
    return [
      w - rate * self.decay * w - alpha * m / (np.sqrt(v) + self.epsilon)
      for w, m, v in zip(weights, self.first, self.second, strict=True)
    ]


class Momentum:
  """Heavy ball, as Keras writes it: the velocity already holds the learning rate."""

  def __init__(self, momentum):
    self.momentum, self.velocity = momentum, None
    self.time = 0

  def step(self, weights, gradients, rate):
    if self.velocity is None:
      self.velocity = [np.zeros_like(w) for w in weights]
    self.time += 1
    self.velocity = [
      self.momentum * m - rate * g for m, g in zip(self.velocity, gradients, strict=True)
    ]
    return [w + m for w, m in zip(weights, self.velocity, strict=True)]


class DynamicScale:
  """Micikevicius et al. (2018): up after so many finite steps in a row, down at an overflow."""

  def __init__(self, initial, growth_steps, factor, floor):
    self.value, self.growth_steps, self.factor, self.floor = initial, growth_steps, factor, floor
    self.good = 0

  def update(self, finite):
    self.good = self.good + 1 if finite else 0
    if not finite:
      self.value = max(self.value / self.factor, self.floor)
    elif self.good == self.growth_steps:
      self.value, self.good = self.value * self.factor, 0


class FixedScale:
  def __init__(self, value):
    self.value = value

  def update(self, finite):
    pass


def clipped(gradients, norm, clip_norm, clip_value):
  """Pascanu et al. (2013) by the norm over all gradients, or element by element."""
  if clip_value is not None:
    return [np.clip(g, -clip_value, clip_value) for g in gradients]
  if clip_norm is not None and norm > clip_norm:
    return [g * clip_norm / norm for g in gradients]
  return gradients


def global_norm(gradients):
  return math.sqrt(sum(float(np.sum(g**2)) for g in gradients))


class Means:
  """Weighted means of metrics over a loop."""

  def __init__(self):
    self.sums = {}

  def add(self, name, value, weight):
    total, seen = self.sums.get(name, (0.0, 0.0))
    self.sums[name] = (total + value * weight if weight else total, seen + weight)

  def result(self):
    return {k: total / weight if weight else math.nan for k, (total, weight) in self.sums.items()}


def optimizers_of(scenario):
  """Returns name -> (optimizer, indices of its weights, step -> learning rate)."""
  if scenario.optimizer == "two":
    return {
      "hidden": (Adam(), [0, 1], lambda step: 0.01),
      "output": (Momentum(0.9), [2, 3], lambda step: 0.02),
    }
  rate = (lambda step: 0.04 / (1 + step)) if scenario.schedule else (lambda step: scenario.rate)
  made = {"adam": Adam(), "adamw": Adam(decay=0.1), "momentum": Momentum(0.9), "sgd": Momentum(0)}
  return {"default": (made[scenario.optimizer], [0, 1, 2, 3], rate)}


def scale_of(scenario):
  if dataclasses.is_dataclass(scenario.loss_scale):
    return DynamicScale(**dataclasses.asdict(scenario.loss_scale))
  return FixedScale(scenario.loss_scale or 1.0)


def train(scenario, batches):
  """Trains `scenario` over `batches` (float64; one a step) and returns its Trajectory."""
  weights = [w.astype(np.float64) for w in initial_weights()]
  averages = [w.copy() for w in weights]
  optimizers, scale = optimizers_of(scenario), scale_of(scenario)
  loops, norms, skipped = [], [], 0
  for step, batch in enumerate(batches):
    if step in (0, scenario.first_loop):
      loops.append(Means())
    finite = True
    for name, (optimizer, own, rate) in optimizers.items():
      prefix = "" if name == "default" else f"{name}_"
      weight = float(batch["weight"].sum())
      gradients, loss = objective(weights, batch, scenario.l2)
      loops[-1].add(f"{prefix}loss", loss, weight)
      loops[-1].add("mae", mean_absolute_error(weights, batch), weight)
      gradients = [gradients[i] for i in own]
      norm = global_norm(gradients)
      norms.append(norm)
      if not (math.isfinite(norm) and np.all(np.isfinite(batch["overflow"]))):
        finite = False
        loops[-1].add(f"{prefix}gradient_norm", 0.0, 0.0)
        continue
      if weight == 0:
        loops[-1].add(f"{prefix}gradient_norm", 0.0, 0.0)
        continue
      loops[-1].add(f"{prefix}gradient_norm", norm, 1.0)
      gradients = clipped(gradients, norm, scenario.clip_norm, scenario.clip_value)
      updated = optimizer.step([weights[i] for i in own], gradients, rate(step))
      for i, value in zip(own, updated, strict=True):
        weights[i] = value
        decay = scenario.ema_decay or 0.0
        averages[i] = decay * averages[i] + (1 - decay) * value
    scale.update(finite)
    skipped += not finite
  return Trajectory(
    weights=weights,
    averages=averages,
    loops=[loop.result() for loop in loops],
    applied={name: optimizer.time for name, (optimizer, _, _) in optimizers.items()},
    skipped_steps=skipped,
    loss_scale=scale.value,
    norms=norms,
  )


def mean_absolute_error(weights, batch):
  used = batch["weight"] != 0
  if not used.any():
    return 0.0
  output, _ = predict(weights, batch["x"][used])
  return float(np.average(np.abs(output - batch["y"][used]), weights=batch["weight"][used]))


def evaluate(weights, batches):
  """Returns the weighted mean squared and absolute error over all examples of all batches."""
  joined = {name: np.concatenate([b[name] for b in batches]) for name in ("x", "y", "weight")}
  return {
    "loss": objective(weights, joined, l2=0.0)[1],
    "mae": mean_absolute_error(weights, joined),
  }
