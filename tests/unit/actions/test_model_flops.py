"""Model FLOPs from the traced step, against closed forms, on one replica and two."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from loopwright import ArraySource, ConfigError, Loss, Task
from loopwright.actions.model_flops import ModelFlops
from loopwright.graphs import flops, operations
from loopwright.runs.builder import Recipe
from loopwright.tasks import decoder

HIDDEN, IN, OUT = 7, 5, 3
SIDE, KERNEL, CHANNELS = 8, 3, 4
LENGTH, WIDTH, GROUPS, HEADS, TOKENS = 6, 16, 2, 4, 257


class Given(Task):
  """A network and the shape of its input; the loss is the mean square of what it returns."""

  def __init__(self, network, *shape, dtype=np.float32):
    self.network, self.x = network, np.ones([24, *shape], dtype)

  def build_model(self):
    return self.network()

  def source(self, split):
    return ArraySource(features={"x": self.x})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def loss(self, outputs, batch):
    rows = tf.reshape(tf.cast(outputs, tf.float32), [tf.shape(outputs)[0], -1])
    return Loss.from_examples(tf.reduce_mean(rows**2, axis=1), batch["weight"])


def dense():
  layers = [keras.layers.Dense(HIDDEN, "tanh"), keras.layers.Dense(OUT)]
  return keras.Sequential([keras.Input([IN]), *layers])


def convolutions():
  """Strided, in two groups, of each channel by itself, and transposed."""
  return keras.Sequential([
    keras.Input([SIDE, SIDE, 2]),
    keras.layers.Conv2D(CHANNELS, KERNEL, strides=2, padding="same"),
    keras.layers.Conv2D(CHANNELS, KERNEL, padding="valid", groups=2),
    keras.layers.DepthwiseConv2D(KERNEL, padding="same", depth_multiplier=2),
    keras.layers.Conv2DTranspose(5, KERNEL, strides=2, padding="same"),
  ])  # fmt: skip


def of_convolutions():
  """Multiply-adds of one image."""
  half, valid, tap = SIDE // 2, SIDE // 2 - KERNEL + 1, KERNEL**2
  return sum(
    [
      half**2 * CHANNELS * tap * 2,
      valid**2 * CHANNELS * tap * CHANNELS / 2,
      valid**2 * 2 * CHANNELS * tap,
      valid**2 * 2 * CHANNELS * tap * 5,  # each input is spread over one window of the output
    ]
  )


class OfTokens(Given):
  def forward(self, batch, training):
    position = tf.broadcast_to(tf.range(LENGTH), tf.shape(batch["x"]))
    return self.model({"token": batch["x"], "position": position}, training=training)


def one_block():
  return decoder.decoder(layers=1, width=WIDTH, heads=HEADS, groups=GROUPS)


def of_one_block():
  """Multiply-adds of one document: its matrices for each token, and what attention looks up."""
  model = one_block()
  matrices = sum(v.shape.num_elements() for v in model.trainable_variables if "kernel" in v.path)
  return LENGTH * (matrices + TOKENS * WIDTH) + 2 * LENGTH**2 * WIDTH


KINDS = {
  "dense": (lambda: Given(dense, IN), lambda: IN * HIDDEN + HIDDEN * OUT),
  "convolutions": (lambda: Given(convolutions, SIDE, SIDE, 2), of_convolutions),
  "decoder": (lambda: OfTokens(one_block, LENGTH, dtype=np.int32), of_one_block),
}


def trained(task, strategy, *, batch=8, steps=2, peak=None, **options):
  """Returns what the loop logs, the FLOPs of its mean step, and what the action says."""
  said, action = [], ModelFlops(peak_flops_per_s=peak)
  recipe = Recipe(
    optimizer=lambda: keras.optimizers.SGD(0.1), global_batch_size=batch, options=options
  )
  trainer = recipe.trainer(task, strategy)
  action.bind(types.SimpleNamespace(strategy=strategy, trainer=trainer, message=said.append))
  results = trainer.train(tf.constant(steps))
  action(results)
  action(results)
  rate = results.get("model_flops_per_s", np.nan)
  return results, rate / results["examples_per_second"] * batch, said


@pytest.mark.parametrize(
  ("kind", "replicas", "batch", "options"),
  [
    ("dense", 2, 7, {"accumulation_steps": 2}),  # padded to 8
    ("dense", 2, 8, {"jit_compile": True}),
    ("convolutions", 2, 8, {}),
    pytest.param("decoder", 1, 8, {}, marks=pytest.mark.ci),
    *(
      pytest.param(*case, marks=pytest.mark.whole)
      for case in [
        ("dense", 1, 8, {}),
        ("dense", 3, 8, {"recompute": ["dense.*"]}),
        ("convolutions", 1, 8, {"accumulation_steps": 2}),
        ("decoder", 2, 8, {"accumulation_steps": 2}),
      ]
    ),
  ],
)
def test_a_step_has_the_flops_of_its_closed_form(kind, replicas, batch, options, mirrored):
  """Six times the multiply-adds: two each, and the backward pass as two forward passes."""
  make, multiply_adds = KINDS[kind]
  results, found, said = trained(make(), mirrored(replicas), batch=batch, peak=1e9, **options)
  assert found == pytest.approx(6 * batch * multiply_adds(), rel=1e-9)
  assert results["mfu"] == pytest.approx(results["model_flops_per_s"] / replicas / 1e9, rel=1e-9)
  assert said == []
  assert "forward FLOPs" not in results


class Gathering(Given):
  """Replicas take turns in the middle of each pass; every second step has two passes."""

  def train_step(self, step, batch):
    def loss(batch):
      outputs = self.forward(batch, training=True)
      everywhere = step.all_gather(self.model.layers[-1](tf.ones([len(outputs), HIDDEN])))
      return self.loss(outputs + tf.reduce_mean(everywhere), batch)

    step.update(loss, batch)
    step.log({"twice": step.gradients(loss, batch, step.variables(), when=step.number % 2 == 0)[1]})


def test_each_pass_counts_where_it_is_run(mirrored):
  _, found, _ = trained(Gathering(dense, IN), mirrored(2), steps=4)
  once = IN * HIDDEN + 2 * HIDDEN * OUT
  assert found == pytest.approx(6 * 8 * once * 1.5, rel=1e-9)


def test_weights_are_the_same_to_the_bit(mirrored):
  def weights(*actions):
    keras.utils.set_random_seed(1)
    recipe = Recipe(optimizer=lambda: keras.optimizers.Adam(0.1), global_batch_size=8, options={})
    task, strategy = Given(dense, IN), mirrored(2)
    trainer = recipe.trainer(task, strategy)
    for action in actions:
      action.bind(types.SimpleNamespace(strategy=strategy, trainer=trainer))
    assert ("mfu" in trainer.train(tf.constant(5))) == bool(actions)
    return [v.numpy() for v in task.model.variables]

  for one, other in zip(weights(), weights(ModelFlops(peak_flops_per_s=1.0)), strict=True):
    np.testing.assert_array_equal(one, other)


def count(function, *given):
  return flops.Count(tf.function(function).get_concrete_function(*given).graph.outputs)


def test_a_loop_counts_each_turn():
  lstm = keras.layers.LSTM(HIDDEN)
  found = count(lstm, tf.TensorSpec([2, LENGTH, IN]))
  assert (found.flops, found.unknown) == (2 * 2 * LENGTH * 4 * HIDDEN * (IN + HIDDEN), [])


@pytest.mark.parametrize(
  ("more", "turns"), [(lambda limit: limit, 4), (lambda limit: limit - 1, None)]
)
def test_only_a_constant_limit_tells_the_length_of_a_loop(more, turns):
  """From 1 by 2 to 8: four turns, unless the limit moves."""

  def loop(x):
    return tf.while_loop(
      lambda n, limit, x: n < limit, lambda n, limit, x: (n + 2, more(limit), x @ x), (1, 8, x)
    )[2]

  found = count(loop, tf.TensorSpec([3, 3]))
  assert (found.flops, len(found.unknown)) == ((turns or 0) * 54, turns is None)


class Endless(Given):
  def forward(self, batch, training):
    outputs = self.model(batch["x"])
    return tf.while_loop(
      lambda x: tf.reduce_sum(x) > 1e9, lambda x: [x @ tf.ones([OUT, OUT])], [outputs]
    )[0]


def test_a_loop_of_unknown_length_is_told_once(mirrored):
  results, _, said = trained(Endless(dense, IN), mirrored(2), peak=1.0)
  assert not {"model_flops_per_s", "mfu", "forward FLOPs"} & results.keys()
  [line] = said
  assert line.startswith("ModelFlops logs nothing, as its count is incomplete: of a loop or an op")


@pytest.mark.parametrize(
  ("equation", "shapes", "multiply_adds"),
  [
    ("bqhd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 4, 5)], 2 * 3 * 6 * 4 * 5),
    ("...ij,...jk->...ik", [(7, 2, 3), (7, 3, 5)], 7 * 2 * 3 * 5),
    ("...i,ij", [(7, 2), (2, 3)], 7 * 2 * 3),
    ("ij->ji", [(2, 3)], 0),
  ],
)
def test_an_einsum_multiplies_along_all_its_axes(equation, shapes, multiply_adds):
  found = count(lambda *given: tf.einsum(equation, *given), *map(tf.TensorSpec, shapes))
  assert found.flops == 2 * multiply_adds


def test_functions_branches_dtypes_and_unknown_sizes():
  @tf.function
  def inner(x):
    return tf.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x)

  def outer(x, y):
    return inner(x), inner(x), tf.cast(x, tf.bfloat16) @ tf.ones([3, 4], tf.bfloat16), y @ y

  found = count(outer, tf.TensorSpec([3, 3]), tf.TensorSpec([None, None]))
  assert found.dtypes == {"float32": 2 * 2 * 2 * 27, "bfloat16": 2 * 36}
  [unknown] = found.unknown
  assert "matmul" in unknown.lower()


def test_a_branch_whose_functions_cannot_be_had_is_unknown(monkeypatch):
  monkeypatch.setattr(operations, "function_of", lambda graph, name: None)
  found = count(lambda x: tf.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), tf.TensorSpec([3, 3]))
  assert (found.flops, len(found.unknown)) == (0, 1)


def test_mistakes_are_one_line():
  with pytest.raises(ConfigError, match=r"ModelFlops.peak_flops_per_s is 0; it must be above 0"):
    ModelFlops(peak_flops_per_s=0)
  run = types.SimpleNamespace(
    strategy=tf.distribute.get_strategy(), trainer=types.SimpleNamespace(eager=True)
  )
  with pytest.raises(ConfigError, match=r"run.eager is True, but ModelFlops counts operations"):
    ModelFlops().bind(run)
