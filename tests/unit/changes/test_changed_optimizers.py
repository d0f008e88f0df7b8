"""Every option of every optimizer of both Kerases, changed in the middle of a run, by numbers."""

import inspect
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loopwright.configurables import changes, table
from loopwright.errors import ConfigError
from loopwright.models.task_state import TaskState
from loopwright.optimizers import adapters, schedules
from loopwright.optimizers.fusion import Gradients
from loopwright.run_folder.checkpoints import CheckpointManager

LIBRARIES = {"keras": keras, "tf_keras": tf_keras}

VALUES = {
  "adam_beta_1": (0.9, 0.5),
  "adam_beta_2": (0.999, 0.9),
  "adam_lr_ratio": (1, 0.5),
  "adam_weight_decay": (0.004, 0.2),
  "adaptive_epsilon": (False, True),
  "amsgrad": (False, True),
  "beta": (0.0, 0.5),
  "beta_1": (0.9, 0.5),
  "beta_2": (0.999, 0.9),
  "beta_2_decay": (-0.8, -0.3),
  "centered": (False, True),
  "clip_threshold": (1.0, 0.1),
  "clipnorm": (10.0, 0.01),
  "epsilon": (1e-7, 0.1),
  "epsilon_1": (1e-30, 0.5),
  "epsilon_2": (1e-3, 5.0),
  "exclude_embeddings": (True, False),
  "exclude_layers": ([], ["matrix"]),
  "l1_regularization_strength": (0.0, 0.5),
  "l2_regularization_strength": (0.0, 0.5),
  "l2_shrinkage_regularization_strength": (0.0, 0.5),
  "learning_rate": (0.125, 0.01),
  "learning_rate_power": (-0.5, -0.25),
  "momentum": (0.9, 0.5),
  "muon_a": (3.4445, 3.0),
  "muon_b": (-4.7750, -4.7),
  "muon_c": (2.0315, 1.5),
  "nesterov": (False, True),
  "ns_steps": (6, 2),
  "rho": (0.95, 0.5),
  "rms_rate": (0.2, 0.7),
  "warmup_steps": (0, 8),
  "weight_decay": (0.01, 0.3),
}
"""Parameter -> its value in the first two steps, and from there on."""

NO_FIT = {"amsgrad", "centered", "exclude_layers", "exclude_embeddings"}
"""Which a checkpoint may refuse: the optimizer has other slots."""
NOT_SEEN = {"exclude_embeddings"}
"""Which change nothing for variables that are not of an embedding."""
NEEDS = {"nesterov": {"momentum": 0.9}}


def classes(library):
  own = LIBRARIES[library].optimizers
  found = {
    n: c for n, c in vars(own).items() if inspect.isclass(c) and issubclass(c, own.Optimizer)
  }
  return [name for name in found if name not in table.NOT_OPTIMIZERS]


def options(library, name):
  of = inspect.signature(getattr(LIBRARIES[library].optimizers, name).__init__).parameters
  return [option for option in of if option not in ("self", "kwargs")]


EVERY = [(lib, name) for lib in ("keras", "tf_keras") for name in classes(lib)]
EVERY.remove(("tf_keras", "Nadam"))  # which is refused
CHANGES = [
  pytest.param(
    lib, name, option, marks=() if name in ("SGD", "AdamW") else pytest.mark.whole,
    id=f"{lib}-{name}-{option}",
  )
  for lib, name in EVERY
  for option in options(lib, name)
  if (rule := changes.rule(f"{lib}.{name}.{option}")) and rule.may == "asked"
]  # fmt: skip


class One:
  """An optimizer of a matrix and a vector, trained with gradients that are known."""

  def __init__(self, library, name, **arguments):
    make = getattr(LIBRARIES[library].optimizers, name)
    start = np.random.default_rng(1).normal(size=[4, 3]).astype("float32")
    variable = (
      keras.Variable if library == "keras" else lambda value, name: tf.Variable(value, name=name)
    )
    self.variables = [variable(start, name="matrix"), variable(start[0], name="vector")]
    self.step = tf.Variable(0, dtype=tf.int64)
    made = adapters.build(lambda: make(**arguments), lambda name: self.variables, self.step)
    self.optimizer = made["default"]

  def train(self, steps):
    for _ in range(steps):
      random = np.random.default_rng(int(self.step.numpy()) + 7)
      self.apply(*(tf.constant(random.normal(size=v.shape), tf.float32) for v in self.variables))
      self.step.assign_add(1)
    return [np.array(v) for v in self.variables]

  def apply(self, *gradients):
    fusion = self.optimizer.fusion
    self.optimizer.apply(tf.distribute.get_strategy(), Gradients.of(fusion, gradients))

  def manager(self, folder, changed=""):
    zero = tf.Variable(0, dtype=tf.int64)
    trainer = SimpleNamespace(
      task=SimpleNamespace(model=self.variables),
      parts=SimpleNamespace(optimizers={"default": self.optimizer}, ema=None),
      strategy=tf.distribute.get_strategy(),
      global_step=self.step,
      position=zero,
      cluster=SimpleNamespace(is_chief=True),
      reset_input=lambda: None,
      state=TaskState(None),
      checkpoint_items=lambda: {
        "model": self.variables, "optimizers": {"default": self.optimizer.saved},
        "global_step": self.step,
      },
    )  # fmt: skip
    return CheckpointManager(
      trainer=trainer, directory=str(folder), experiment={"task": "One"}, changed=changed
    )

  def save(self, folder):
    manager = self.manager(folder)
    path = manager.save()
    manager.wait()
    return path

  def take(self, other):
    """Copies the state, but no setting, from another of the same slots."""
    mine, theirs = (each.optimizer for each in (self, other))
    pairs = [
      *zip(self.variables, other.variables, strict=True),
      *zip(slots(mine.optimizer), slots(theirs.optimizer), strict=True),
      (mine.optimizer.iterations, theirs.optimizer.iterations),
      (self.step, other.step),
    ]
    for variable, value in pairs:
      variable.assign(value)


def slots(optimizer):
  others = {id(optimizer.iterations), id(optimizer._learning_rate)}
  return [each for each in optimizer.variables if id(each) not in others]


def equal(one, other):
  return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("library", "name", "option"), CHANGES)
def test_a_changed_option_counts_or_is_refused(library, name, option, tmp_path):
  before, after = VALUES[option]
  own = {k: v for k, v in NEEDS.get(option, {}).items() if k in options(library, name)}
  began = One(library, name, **own, **{option: before})
  began.train(2)
  path = began.save(tmp_path)
  restored = One(library, name, **own, **{option: after})
  try:
    restored.manager(tmp_path, changed=f"{option} = {after}, which was {before}").restore(path)
  except ConfigError as error:
    says = f"does not fit this run with {option} = {after}, which was {before}: "
    if option not in NO_FIT or says not in str(error):
      raise
    return
  expected = One(library, name, **own, **{option: after})
  expected.take(began)
  result = restored.train(3)
  assert equal(result, expected.train(3))
  unchanged = began.train(3)
  assert equal(result, unchanged) == (option in NOT_SEEN)


@pytest.mark.parametrize(("library", "name"), EVERY)
def test_every_option_has_a_rule(library, name):
  for option in options(library, name):
    rule = changes.rule(f"{library}.{name}.{option}")
    assert rule, f"say in configurables/changes.py whether {name}.{option} may change"
    assert rule.may == "no" or option in VALUES


@pytest.mark.parametrize("momentum", [(0.0, 0.9), (0.9, 0.0)])
def test_slots_that_come_or_go_are_refused(momentum, tmp_path):
  before, after = momentum
  began = One("keras", "SGD", learning_rate=0.125, momentum=before)
  began.train(1)
  path = began.save(tmp_path)
  other = One("keras", "SGD", learning_rate=0.125, momentum=after)
  with pytest.raises(ConfigError, match=r"with momentum = new: .* set it back, or choose another"):
    other.manager(tmp_path, changed="momentum = new").restore(path)


# ---- Learning rates ----

RATES = {
  "number": lambda library: 0.125,
  "constant": lambda library: schedules.constant(learning_rate=0.125),
  "Keras's": lambda library: LIBRARIES[library].optimizers.schedules.PolynomialDecay(
    0.125, 4, end_learning_rate=0.125
  ),
}


def keys(path):
  reader = tf.train.load_checkpoint(path)
  return {k: reader.get_tensor(k) for k in reader.get_variable_to_shape_map() if k[:1] != "_"}


@pytest.mark.parametrize(
  ("name", "library"),
  [*((name, each) for name in ("SGD", "Adam") for each in LIBRARIES), ("Nadam", "keras")],
)
def test_a_number_and_a_constant_schedule_are_one_run_and_one_checkpoint(library, name, tmp_path):
  runs = {kind: One(library, name, learning_rate=make(library)) for kind, make in RATES.items()}
  results = {kind: run.train(3) for kind, run in runs.items()}
  paths = {kind: run.save(tmp_path / kind) for kind, run in runs.items()}
  saved = {kind: keys(path) for kind, path in paths.items()}
  for kind in RATES:
    assert equal(results[kind], results["number"])
    assert saved[kind].keys() == saved["number"].keys()
    for key, value in saved["number"].items():
      if "configured" not in key:
        np.testing.assert_array_equal(saved[kind][key], value, err_msg=key)
    [rate] = [v for k, v in saved[kind].items() if "/_learning_rate/" in k]
    assert rate == np.float32(0.125)
  ends = {kind: run.train(2) for kind, run in runs.items()}
  for kind, path in paths.items():
    for other, make in RATES.items():
      there = One(library, name, learning_rate=make(library))
      there.manager(tmp_path).restore(path)
      assert equal(there.train(2), ends["number"]), (kind, other)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rate", [0.125, 0.5])
def test_a_rate_that_a_run_has_set_stays_while_the_configs_stays(library, rate, tmp_path):
  began = One(library, "Adam", learning_rate=0.125)
  began.train(2)
  began.optimizer.optimizer.learning_rate.assign(0.03)  # as an action that lowers it does
  path = began.save(tmp_path)
  again = One(library, "Adam", learning_rate=rate)
  again.manager(tmp_path).restore(path)
  if rate == 0.125:
    assert equal(again.train(2), began.train(2))
    assert "is 0.03, as the run has set it; the config's 0.125 is" in again.optimizer.moved_rate()
    later = again.save(tmp_path)  # the next process too
    third = One(library, "Adam", learning_rate=rate)
    third.manager(tmp_path).restore(later)
    assert equal(third.train(2), began.train(2))
  else:
    assert float(again.optimizer.learning_rate()) == 0.5
    assert again.optimizer.moved_rate() == ""


SCHEDULES = [
  (schedules.linear_warmup, {"warmup_steps": 10, "after": 0.5, "start": 0.0},
   {"warmup_steps": 4, "after": 0.25, "start": 0.125}),
  (schedules.cosine_decay, {"initial": 0.5, "decay_steps": 10, "final": 0.0},
   {"initial": 0.25, "decay_steps": 20, "final": 0.125}),
  (schedules.exponential_decay,
   {"initial": 0.5, "decay_steps": 2, "decay_rate": 0.5, "staircase": False, "final": 0.0},
   {"initial": 0.25, "decay_steps": 4, "decay_rate": 0.25, "staircase": True, "final": 0.125}),
  (schedules.piecewise_constant, {"boundaries": [9], "values": [0.5, 0.25]},
   {"boundaries": [2], "values": [0.125, 0.0]}),
  (schedules.by_epoch,
   {"of": schedules.cosine_decay(initial=0.5, decay_steps=4), "steps_per_epoch": 2,
    "staircase": True},
   {"of": schedules.cosine_decay(initial=0.25, decay_steps=4), "steps_per_epoch": 1,
    "staircase": False}),
  (schedules.constant, {"learning_rate": 0.5}, {"learning_rate": 0.25}),
  (schedules.scale_by_replicas, {"schedule": 0.5}, {"schedule": 0.25}),
]  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("make", "before", "after"), SCHEDULES)
def test_a_changed_schedule_counts_at_the_step_of_the_run(library, make, before, after, tmp_path):
  began = One(library, "SGD", learning_rate=make(**before))
  began.train(3)
  path = began.save(tmp_path)
  for option, value in after.items():
    new = make(**{**before, option: value})
    there = One(library, "SGD", learning_rate=new)
    there.manager(tmp_path).restore(path)
    rate = float(there.optimizer.learning_rate())
    assert rate == float(make(**{**before, option: value}).at(3))
    assert rate != float(make(**before).at(3)), option


def test_every_option_of_a_schedule_is_tried():
  for make, before, after in SCHEDULES:
    assert before.keys() == after.keys() == inspect.signature(make).parameters.keys()
