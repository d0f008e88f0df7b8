"""Options by variable: against NumPy on two replicas, and what is refused.

All optimizers of the matrix have groups too: tests/unit/optimizers/test_optimizer_matrix.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from test_optimizers import apply

from benchmarks import optimizer_matrix as matrix
from loopwright.errors import ConfigError
from loopwright.optimizers import adapters, schedules
from loopwright.optimizers.groups import grouped
from loopwright.run_folder.checkpoints import CheckpointManager

KERAS = {"keras": keras.optimizers, "tf_keras": tf_keras.optimizers}
GROUPS = {
  "layer/bias": {"weight_decay": 0.0, "learning_rate_scale": 0.25},
  "layer/k.*": {"beta_1": 0.5, "weight_decay": 0.5},
}
RATES = {"number": lambda: 0.5, "schedule": lambda: schedules.Schedule(lambda s: 0.5 / (1.0 + s))}


def names(**values):
  return [keras.Variable(v, name=n, dtype="float32") for n, v in values.items()]


def made(factory, **options):
  with keras.name_scope("layer"):
    variables = names(kernel=[[1.0, -2.0]], bias=[3.0], gain=[4.0])
  step = tf.Variable(0, dtype=tf.int64)
  built = adapters.build(factory, lambda name: variables, step, **options)["default"]
  return built, variables, step


def adamw(value, gradients, rates, *, decay, beta_1=0.9, scale=1.0):
  m = v = 0.0
  for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
    value = value - rate * scale * decay * value
    m, v = beta_1 * m + (1 - beta_1) * g, 0.999 * v + 0.001 * g * g
    value = value - rate * scale * (m / (1 - beta_1**t)) / np.sqrt(v / (1 - 0.999**t))
  return value


@pytest.mark.parametrize("library", KERAS)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.fast(shard=[False], rate=["schedule"])
def test_each_variable_has_the_options_of_its_group(library, rate, shard, mirrored):
  strategy = mirrored(2)
  with strategy.scope():
    kind = KERAS[library].AdamW
    one, variables, step = made(
      lambda: grouped(
        of=lambda: kind(RATES[rate](), weight_decay=0.1, epsilon=1e-12), groups=GROUPS
      ),
      fuse=True, shard=shard,
    )  # fmt: skip
  given = [[np.array([[0.5, -1.0]]), np.array([2.0]), np.array([-0.25])],
           [np.array([[1.5, 0.5]]), np.array([-1.0]), np.array([-4.0])]]  # fmt: skip
  for number, gradients in enumerate(given):
    step.assign(number)
    apply(strategy, one, [tf.constant(g, tf.float32) for g in gradients])
  rates = [0.5, 0.5 if rate == "number" else 0.25]
  of_each = list(zip(*given, strict=True))
  wanted = [
    adamw(np.array([[1.0, -2.0]]), of_each[0], rates, decay=0.5, beta_1=0.5),
    adamw(np.array([3.0]), of_each[1], rates, decay=0.0, scale=0.25),
    adamw(np.array([4.0]), of_each[2], rates, decay=0.1),
  ]
  for variable, value in zip(variables, wanted, strict=True):
    for copy in strategy.experimental_local_results(variable.value):
      np.testing.assert_allclose(copy, value, rtol=0, atol=1e-5)
  assert one.settings()["groups"] == repr(GROUPS)
  assert one.optimizer.beta_1 == 0.9


ADAMW = lambda: keras.optimizers.AdamW(0.5, weight_decay=0.1)  # noqa: E731


@pytest.mark.parametrize(
  ("groups", "message"),
  [
    (
      {"bias": {"weight_decay": 0.0}},
      "has 'bias', which matches no variable; the names are layer/",
    ),
    (
      {".*/bias": {"beta_1": 0.5}, "layer/b.*": {"beta_1": 0.5}},
      "has '.*/bias' and 'layer/b.*', which both match 'layer/bias'",
    ),
    ({".*": {"learning_rate": 0.1}}, "give 'learning_rate_scale'"),
    ({".*": {"weight_deca": 0.1}}, "did you mean 'weight_decay'"),
    ({".*": {"clipnorm": 0.1}}, "unknown option of grouped.groups"),
    ({".*": {"beta_1": -0.1}}, "has beta_1=-0.1; it must be a finite number of at least 0"),
    ({"*": {"beta_1": 0.1}}, "has '*', which is no regular expression"),
    ({".*": {}}, "it must be a dict such as"),
    ({}, "it must be a dict such as"),
  ],
)
def test_what_cannot_be_a_group_is_refused(groups, message):
  with pytest.raises(ConfigError) as error:
    made(lambda: grouped(of=ADAMW, groups=groups))
  assert message.lower() in str(error.value).lower()
  assert "\n" not in str(error.value)


def test_state_that_an_optimizer_has_not_is_refused():
  plain = lambda: keras.optimizers.SGD(0.5)  # noqa: E731
  with pytest.raises(ConfigError, match="momentum is 0 for the optimizer, which then has no state"):
    made(lambda: grouped(of=plain, groups={".*/bias": {"momentum": 0.5}}))


def test_what_is_no_optimizer_is_refused_as_without_groups():
  with pytest.raises(ConfigError, match="it must be a Keras 3 optimizer"):
    made(lambda: grouped(of=dict, groups={".*": {"beta_1": 0.5}}))


def test_a_checkpoint_fits_other_groups(tmp_path):
  """And an optimizer without groups whose updates are not fused."""

  def opened(groups, **options):
    one = matrix.Entry("keras", "AdamW", {"weight_decay": 0.1}, groups=groups)
    trainer = matrix.trainer_of(matrix.Networks([one]), 1, **options)
    labels = {"task": "t"}
    manager = CheckpointManager(trainer=trainer, directory=str(tmp_path), experiment=labels)
    return trainer, manager, trainer.parts.optimizers["o0"].optimizer

  trainer, manager, optimizer = opened({".*/bias": {"weight_decay": 0.0}})
  trainer.train(tf.constant(2))
  manager.save()
  manager.wait()
  for _, other, found in (
    opened({".*/kernel": {"beta_1": 0.5}, ".*/bias": {"learning_rate_scale": 0.1}}),
    opened({}, fuse_updates=False),
  ):
    other.restore_or_initialize()
    for own, value in zip(optimizer.variables, found.variables, strict=True):
      np.testing.assert_array_equal(own, value)
