"""The verbs of a step, each alone: closed forms on replicas that hold different examples.

All numbers are small whole ones or halves, so float32 is exact and most comparisons are too.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from places import central_storage
from runs import make_trainer

from loopwright.distribution.reduction import Reduction
from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss, weighted_sum
from loopwright.metrics.sums import MetricSums
from loopwright.models import models
from loopwright.optimizers import adapters, loss_scale
from loopwright.optimizers.ema import Ema
from loopwright.step import EvalStep, Step, StepParts


class Bench:
  """A strategy, variables "kernel" [3], "bias" [] and "unused" [2], and what a step is made of."""

  def __init__(self, strategy, *, optimizer=None, variables=None, ema_decay=None, **options):
    self.strategy = strategy
    with strategy.scope():
      self.variables = variables or [
        tf.Variable([1.0, -2.0, 3.0]), tf.Variable(0.5), tf.Variable([7.0, 8.0]),
      ]  # fmt: skip
      self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
      built = adapters.build(
        optimizer or (lambda: keras.optimizers.SGD(1.0)), self.variables_of, self.global_step,
        fuse=True,
      )  # fmt: skip
      ema = Ema(decay=ema_decay, variables=self.variables) if ema_decay else None
      self.sums = MetricSums()
      self.parts = StepParts(
        optimizers=built,
        reduction=Reduction(),
        global_step=self.global_step,
        ema=ema,
        **{"seed": 3, "loss_scale": loss_scale.none(), **options},
      )

  def variables_of(self, name):
    """All, but for an optimizer of one variable's name."""
    names = ("kernel", "bias", "unused")
    return [self.variables[names.index(name)]] if name in names else self.variables

  def step(self):
    return Step(self.parts)

  def run(self, function, *per_replica):
    """Calls `function(*values)` on each replica; returns one list of results a replica."""
    args = [self.distributed(values) for values in per_replica]
    results = self.strategy.run(function, args)
    flat = [self.strategy.experimental_local_results(r) for r in tf.nest.flatten(results)]
    return [tf.nest.pack_sequence_as(_first(results, self), one) for one in zip(*flat, strict=True)]

  def distributed(self, values):
    """Gives replica i values[i], which may be dicts of arrays."""
    return self.strategy.experimental_distribute_values_from_function(
      lambda context: values[context.replica_id_in_sync_group]
    )

  def values(self):
    """[variable][replica]"""
    local = self.strategy.experimental_local_results
    return [[copy.numpy() for copy in local(models.raw(v))] for v in self.variables]


def _first(results, bench):
  local = bench.strategy.experimental_local_results
  return tf.nest.map_structure(lambda r: local(r)[0], results)


X = np.array([[1, 2, 0], [0, -1, 2], [3, 1, 1], [-2, 0, 1], [1, 1, 1], [0, 2, -1]], np.float32)
WEIGHT = np.array([1, 0.5, 2, 1, 0, 3], np.float32)


def batches(replicas):
  """The six examples, shared out."""
  parts = zip(np.split(X, replicas), np.split(WEIGHT, replicas), strict=True)
  return [{"x": tf.constant(x), "weight": tf.constant(w)} for x, w in parts]


def linear_loss(bench, step=None):
  """The weighted sum of squares of x @ kernel + bias; "unused" is not in it."""

  def loss_fn(batch):
    kernel, bias = (models.raw(v) for v in bench.variables[:2])
    outputs = tf.linalg.matvec(batch["x"], kernel) + bias
    if step is not None:
      step.log({"output": weighted_sum(outputs, batch["weight"])})
      step.log({"seen": (tf.reduce_sum(tf.ones_like(outputs)), tf.constant(1.0))})
    return Loss.from_examples(tf.square(outputs), batch["weight"])

  return loss_fn


def linear_gradients(batch):
  """Returns (gradients, total) of `linear_loss` at the initial weights, in NumPy."""
  x, weight = (np.asarray(batch[name], np.float64) for name in ("x", "weight"))
  outputs = x @ [1.0, -2.0, 3.0] + 0.5
  return [(2 * weight * outputs) @ x, np.sum(2 * weight * outputs), None], weight @ outputs**2


def gradients_of(values):
  return [None if v is None else tf.constant(v, tf.float32) for v in values]


def assert_gradients(got, expected):
  assert [g is None for g in got] == [e is None for e in expected]
  for one, other in zip(got, expected, strict=True):
    if other is not None:
      np.testing.assert_array_equal(one, other)


# ---- gradients ----


def test_a_weight_that_is_a_python_number(mirrored):
  """Each replica's loss is 3 * bias with weight 2.0: the mean is 1.5 * bias."""
  bench = Bench(mirrored(2))

  def replica():
    bias = models.raw(bench.variables[1])
    return bench.step().update(lambda batch: Loss(3.0 * bias, 2.0), {})

  for loss in bench.run(replica):
    assert (float(loss.total), float(loss.weight)) == (3.0, 4.0)
  assert bench.values()[1] == [0.5 - 1.5] * 2


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_gradients_are_of_this_replicas_scaled_sum(scale, mirrored):
  bench = Bench(mirrored(2), loss_scale=loss_scale.fixed(scale=scale))

  def replica(batch):
    step = bench.step()
    gradients, loss = step.gradients(linear_loss(bench), batch, step.variables())
    assert gradients[2] is None
    return list(gradients)[:2], loss

  parts = batches(2)
  for (got, loss), batch in zip(bench.run(replica, parts), parts, strict=True):
    expected, total = linear_gradients(batch)
    assert_gradients(got, [scale * g for g in expected[:2]])
    assert (loss.total.numpy(), loss.weight.numpy()) == (total, batch["weight"].numpy().sum())


def test_gradients_with_respect_to_other_variables():
  """A list that belongs to no optimizer, as for a gradient penalty."""
  bench = Bench(tf.distribute.get_strategy())
  [batch] = batches(1)
  gradients, _ = bench.step().gradients(linear_loss(bench), batch, bench.variables[1::-1])
  expected, _ = linear_gradients(batch)
  assert_gradients(gradients, [expected[1], expected[0]])


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_accumulation_changes_nothing(parts, mirrored):
  """Micro-batches have 1 to 6 examples, and the weights 0 to 3: means of means would be wrong."""
  results = []
  for count in (1, parts):
    bench = Bench(tf.distribute.get_strategy(), accumulation_steps=count)
    step = bench.step()
    gradients, loss = step.gradients(linear_loss(bench, step), batches(1)[0], step.variables())
    step.record.close(bench.sums)
    results.append((list(gradients), loss, bench.sums.result()))
  (whole, loss, logged), (accumulated, other_loss, other_logged) = results
  assert_gradients(accumulated, whole)
  assert_gradients(other_loss, loss)
  assert logged == {"output": pytest.approx(WEIGHT @ (X @ [1, -2, 3] + 0.5) / 7.5), "seen": 6.0}
  assert other_logged == {"output": logged["output"], "seen": 6.0 / parts}


def test_micro_batches_follow_one_another_and_draw_apart():
  bench = Bench(tf.distribute.get_strategy(), accumulation_steps=3)
  seen, noise = [], []

  def loss_fn(batch):
    seen.append(batch["x"].numpy())
    noise.append(keras.layers.Dropout(0.5)(tf.ones([64]), training=True).numpy().tolist())
    return linear_loss(bench)(batch)

  step = bench.step()
  step.gradients(loss_fn, batches(1)[0], step.variables())
  np.testing.assert_array_equal(np.concatenate(seen), X)
  assert [len(x) for x in seen] == [2, 2, 2]
  assert len({tuple(mask) for mask in noise}) == 3


def test_sparse_gradients_are_made_dense():
  """Row 1 is looked up three times: its gradient, and so the norm, counts all three."""
  table = tf.Variable(tf.zeros([3, 2]))
  bench = Bench(tf.distribute.get_strategy(), variables=[table])
  step = bench.step()
  batch = {"ids": tf.constant([1, 2, 1, 1]), "weight": tf.constant([1.0, 2.0, 4.0, 1.0])}

  def loss_fn(batch):
    return Loss.from_examples(tf.reduce_sum(tf.gather(table, batch["ids"]), 1), batch["weight"])

  [gradient], _ = step.gradients(loss_fn, batch, step.variables())
  np.testing.assert_array_equal(gradient, [[0, 0], [6, 6], [2, 2]])
  assert step.check([gradient])[1].numpy() == np.float32(np.sqrt(80))


def test_jit_compile_gives_the_same(mirrored):
  """Gradients, loss and what is logged, out of XLA, with micro-batches."""
  results = []
  for jit_compile in (False, True):
    bench = Bench(mirrored(2), jit_compile=jit_compile, accumulation_steps=3)

    def replica(batch, bench=bench):
      step = bench.step()
      gradients, loss = step.gradients(linear_loss(bench, step), batch, step.variables())
      assert gradients[2] is None
      step.record.close(bench.sums)
      return list(gradients)[:2], loss

    compiled = tf.function(lambda b, replica=replica, bench=bench: bench.strategy.run(replica, [b]))
    local = bench.strategy.experimental_local_results
    flat = tf.nest.flatten(compiled(bench.distributed(batches(2))))
    results.append(([[t.numpy() for t in local(value)] for value in flat], bench.sums.result()))
    if jit_compile:
      functions = compiled.get_concrete_function(bench.distributed(batches(2))).graph
      assert "_XlaMustCompile" in str(functions.as_graph_def())
  (plain, logged), (xla, other_logged) = results
  for one, other in zip(plain, xla, strict=True):
    np.testing.assert_array_equal(one, other)
  assert logged == other_logged
  assert logged["seen"] == 1.0


# ---- all_reduce, unscale, check, clip ----


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_all_reduce_sums_over_replicas(replicas, mirrored):
  bench = Bench(mirrored(replicas))
  per_replica = [float(2**i) for i in range(replicas)]

  def replica(value):
    kernel = value * tf.constant([1.0, 2.0, 3.0])
    loss = Loss(10 * value, 3 * value)
    gradients, loss = bench.step().all_reduce([kernel, None, tf.stack([value, -value])], loss)
    assert gradients[1] is None
    return [gradients[0], gradients[2]], loss

  total = sum(per_replica)
  results = bench.run(replica, [tf.constant(v) for v in per_replica])
  assert len(results) == replicas
  for gradients, loss in results:
    assert_gradients(gradients, [total * np.array([1, 2, 3]), total * np.array([1, -1])])
    assert_gradients(loss, [10 * total, 3 * total])


def test_unscale_divides_by_scale_and_weight_in_each_dtype():
  bench = Bench(tf.distribute.get_strategy(), loss_scale=loss_scale.fixed(scale=4.0))
  dtypes = ("float32", "float64", "float16", "bfloat16")
  gradients = [tf.constant([8.0, -16.0], dtype) for dtype in dtypes]
  unscaled = bench.step().unscale([*gradients, None], Loss(tf.constant(1.0), tf.constant(2.0)))
  assert unscaled[4] is None
  assert [g.dtype.name for g in unscaled[:4]] == list(dtypes)
  assert_gradients(unscaled[:4], [[1.0, -2.0]] * 4)


def test_unscale_with_no_weight_gives_zeros():
  bench = Bench(tf.distribute.get_strategy(), loss_scale=loss_scale.fixed(scale=4.0))
  loss = Loss(tf.constant(0.0), tf.constant(0.0))
  unscaled = bench.step().unscale(gradients_of([[8.0, 0.0]]), loss)
  assert_gradients(unscaled, [[0.0, 0.0]])


def test_check_gives_the_global_norm():
  bench = Bench(tf.distribute.get_strategy())
  gradients = gradients_of([[3.0, -4.0], None, [[12.0]], 84.0])
  finite, norm = bench.step().check(gradients)
  assert (finite.numpy(), norm.numpy(), norm.dtype) == (True, 85.0, tf.float32)


@pytest.mark.parametrize(
  "shape", [[2**16], [2**16 + 1], [3, 2**16], [2**18], [2**18 + 1], [300, 700]]
)
def test_the_norm_of_a_tensor_of_any_size(shape):
  values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  step = Bench(tf.distribute.get_strategy()).step()
  _, norm = step.check([tf.constant(values)])
  assert norm.numpy() == pytest.approx(np.linalg.norm(values.astype(np.float64)), rel=1e-6)
  values.flat[-1] = np.nan
  finite, _ = step.check([tf.constant(values)])
  assert not finite


@pytest.mark.parametrize("where", [(0, 1), (2, 0)])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_check_finds_one_bad_element(value, where):
  bench = Bench(tf.distribute.get_strategy())
  gradients = [np.zeros(2), None, np.zeros(1), np.ones([])]
  gradients[where[0]][where[1]] = value
  finite, _ = bench.step().check(gradients_of(gradients))
  assert not finite


@pytest.mark.parametrize(
  ("dtype", "values", "expected"),
  [
    ("float16", [300.0, 400.0], 500.0),  # their squares overflow float16
    ("bfloat16", [1.0] * 2**12 + [2.0] * 2**12, np.sqrt(5 * 2**12)),  # 0.2 % off in bfloat16
    ("float64", [3e10, 4e10], 5e10),
    ("float32", [1.5e19], 1.5e19),
  ],
)
def test_check_takes_the_norm_in_float32_or_better(dtype, values, expected):
  finite, norm = Bench(tf.distribute.get_strategy()).step().check([tf.constant(values, dtype)])
  assert finite
  assert norm.numpy() == pytest.approx(expected, rel=1e-6)


def test_a_norm_beyond_float32_counts_as_not_finite():
  finite, _ = Bench(tf.distribute.get_strategy()).step().check([tf.constant([2e19])])
  assert not finite


GRADIENTS = [[3.0, -4.0], None, [[12.0]]]  # of norm 13


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, GRADIENTS),
    ({"clip_norm": 26.0}, GRADIENTS),
    ({"clip_norm": 13.0}, GRADIENTS),
    ({"clip_norm": 6.5}, [[1.5, -2.0], None, [[6.0]]]),
    ({"clip_value": 3.5}, [[3.0, -3.5], None, [[3.5]]]),
    ({"clip_value": 0.25}, [[0.25, -0.25], None, [[0.25]]]),
  ],
)
def test_clip(options, expected):
  step = Bench(tf.distribute.get_strategy(), **options).step()
  for dtype in ("float32", "float64", "bfloat16"):
    gradients = [None if g is None else tf.constant(g, dtype) for g in GRADIENTS]
    _, norm = step.check(gradients)
    clipped = step.clip(gradients, norm)
    assert_gradients(clipped, expected)
    assert {g.dtype.name for g in clipped if g is not None} == {dtype}


def test_clip_norm_lets_zero_gradients_pass():
  step = Bench(tf.distribute.get_strategy(), clip_norm=1.0).step()
  _, norm = step.check(gradients_of([[0.0, 0.0]]))
  assert_gradients(step.clip(gradients_of([[0.0, 0.0]]), norm), [[0.0, 0.0]])


# ---- all_gather ----


@pytest.fixture(
  params=[
    "default",
    "one_device",
    "mirrored x1",
    "mirrored x2",
    "mirrored x3",
    "central_storage x2",
  ]
)
def place(request, mirrored):
  """A strategy of each kind, as far as it runs in one process."""
  if request.param.startswith("mirrored"):
    return mirrored(int(request.param[-1]))
  return {
    "default": tf.distribute.get_strategy,
    "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "central_storage x2": central_storage,
  }[request.param]()


def compiled(bench, replica, values):
  """`bench.run`, as one tf.function, as the trainer calls it."""
  values = bench.distributed(values)
  results = tf.function(lambda: bench.strategy.run(replica, (values,)))()
  flat = [bench.strategy.experimental_local_results(r) for r in tf.nest.flatten(results)]
  return [tf.nest.pack_sequence_as(_first(results, bench), one) for one in zip(*flat, strict=True)]


@pytest.mark.parametrize("kind", [EvalStep, Step])
def test_all_gather_gives_the_rows_of_all_replicas_in_their_order(kind, place):
  """Bit for bit, whatever is in them, of any numbers and rank."""
  bench = Bench(place)
  wild = np.float32([2e-38, -0.0, 3e38, np.inf, -np.inf, np.nan])
  rows = {
    "matrix": np.stack([wild, np.float32([1, 2, 3, 4, 5, 6])], axis=1)[:, :, None],
    "id": np.arange(6, dtype=np.int64) - 1,
    "label": np.arange(6, dtype=np.int32) * 7,
  }
  count = place.num_replicas_in_sync
  parts = [
    {k: v[i * 6 // count : (i + 1) * 6 // count] for k, v in rows.items()} for i in range(count)
  ]

  def replica(part):
    step = EvalStep() if kind is EvalStep else bench.step()
    return {name: step.all_gather(value) for name, value in part.items()}

  results = compiled(bench, replica, parts)
  assert len(results) == count
  for result in results:
    for name, value in rows.items():
      np.testing.assert_array_equal(result[name], value, err_msg=name)


def attraction(bench, step):
  """Of each example i: log of the sum over *all* j of w_j exp(z_i z_j / 8), z = x kernel."""

  def loss_fn(batch):
    z = batch["x"] * models.raw(bench.variables[0])
    others, weights = step.all_gather(z), step.all_gather(batch["weight"])
    similar = tf.exp(tf.matmul(z, others, transpose_b=True) / 8.0)
    return Loss.from_examples(tf.math.log(tf.linalg.matvec(similar, weights)), batch["weight"])

  return loss_fn


def attraction_in_numpy(kernel):
  z = X.astype(np.float64) * kernel
  return WEIGHT @ np.log(np.exp(z @ z.T / 8) @ WEIGHT.astype(np.float64))


def test_the_gradient_of_all_gather_is_that_of_the_whole_batch(place):
  """Summed over replicas, against central differences of float64 NumPy on all examples at once."""
  bench = Bench(place)

  def replica(batch):
    step = bench.step()
    variables = step.variables()
    gradients, loss = step.all_reduce(*step.gradients(attraction(bench, step), batch, variables))
    return gradients[0], loss

  kernel, step_size = np.array([1.0, -2.0, 3.0]), 1e-5
  slopes = [
    (attraction_in_numpy(kernel + e) - attraction_in_numpy(kernel - e)) / (2 * step_size)
    for e in step_size * np.eye(3)
  ]
  for gradient, loss in compiled(bench, replica, batches(place.num_replicas_in_sync)):
    np.testing.assert_allclose(loss.total, attraction_in_numpy(kernel), rtol=1e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=2e-6)


def test_all_gather_with_accumulation_is_of_the_same_micro_batch(mirrored):
  bench, seen = Bench(mirrored(2), accumulation_steps=3), []

  def replica(batch):
    step = bench.step()

    def loss_fn(part):
      seen.append(step.all_gather(part["x"]).numpy())
      return linear_loss(bench)(part)

    step.gradients(loss_fn, batch, step.variables())

  bench.run(replica, batches(2))
  assert len(seen) == 2 * 3
  for number in range(3):
    copies = [x for x in seen if (x[0] == X[number]).all()]
    np.testing.assert_array_equal(copies, [X[[number, number + 3]]] * 2)


def test_all_gather_within_xla_is_refused_on_several_replicas_only(mirrored):
  def replica(bench, batch):
    step = bench.step()
    gradients, _ = step.gradients(attraction(bench, step), batch, step.variables())
    return gradients[0]

  [batch] = batches(1)
  plain, xla = (Bench(mirrored(1), jit_compile=jit) for jit in (False, True))
  expected = plain.run(lambda b: replica(plain, b), [batch])
  np.testing.assert_allclose(xla.run(lambda b: replica(xla, b), [batch]), expected, rtol=1e-6)
  several = Bench(mirrored(2), jit_compile=True)
  with pytest.raises(ConfigError, match=r"received Trainer.jit_compile=True, but step.all_gather"):
    several.run(lambda b: replica(several, b), batches(2))


@pytest.mark.parametrize("shape", [[], [None, 2]])
def test_all_gather_of_an_unknown_number_of_rows_is_refused(shape):
  step = Bench(tf.distribute.get_strategy()).step()
  with pytest.raises(ConfigError, match=r"must be \[n, \.\.\.\] with static sizes"):
    tf.function(step.all_gather, input_signature=[tf.TensorSpec(shape)]).get_concrete_function()


# ---- perturbed ----


@pytest.mark.parametrize("far", [0.1, 1e38, np.nan, np.inf])
@pytest.mark.fast(far=[0.1])
@pytest.mark.fast(place=["mirrored x2"], far=[np.inf])
def test_perturbed_is_there_within_and_gone_after(far, place):
  """To the bit: 0.5 + 0.1 - 0.1 would not be 0.5 for sure, and NaN - NaN is not 0."""
  bench = Bench(place)
  start = [0.1, np.float32(1 / 3), 0.7]
  bench.variables[0].assign(start)

  def replica(batch):
    step = bench.step()
    before, _ = step.gradients(linear_loss(bench), batch, step.variables())
    with step.perturbed(step.variables(), [tf.constant([far, 0.25, 0.0]), tf.constant(1.0), None]):
      there = [models.raw(v).read_value() for v in bench.variables]
      inside, _ = step.gradients(linear_loss(bench), batch, step.variables())
    after, _ = step.gradients(linear_loss(bench), batch, step.variables())
    return there, [list(g)[:2] for g in (before, inside, after)]

  count = place.num_replicas_in_sync
  parts = batches(count)
  for part, (there, (before, inside, after)) in zip(
    parts, compiled(bench, replica, parts), strict=True
  ):
    kernel = np.float32(start) + np.float32([far, 0.25, 0.0])
    assert_gradients(there, [kernel, np.float32(1.5), [7.0, 8.0]])
    assert_gradients(after, before)
    if far == 0.1:
      x, weight = (np.asarray(part[name], np.float64) for name in ("x", "weight"))
      outputs = x @ kernel + 1.5
      np.testing.assert_allclose(inside[0], (2 * weight * outputs) @ x, rtol=1e-5)
      np.testing.assert_allclose(inside[1], np.sum(2 * weight * outputs), rtol=1e-5)
  kernel, bias, unused = bench.values()
  for copies, value in ((kernel, np.float32(start)), (bias, 0.5), (unused, [7, 8])):
    np.testing.assert_array_equal(copies, [value] * len(copies))


def test_perturbed_ends_where_an_exception_ends_it():
  bench = Bench(tf.distribute.get_strategy())
  step = bench.step()
  with pytest.raises(KeyError), step.perturbed(step.variables(), [tf.ones([3]), tf.ones([]), None]):
    raise KeyError
  assert [v[0].tolist() for v in bench.values()] == [[1, -2, 3], 0.5, [7, 8]]


# ---- apply ----


@pytest.mark.parametrize("replicas", [1, 2])
def test_apply_changes_everything_or_nothing(replicas, mirrored):
  momentum = {"learning_rate": 0.5, "momentum": 0.5}
  bench = Bench(
    mirrored(replicas), optimizer=lambda: keras.optimizers.SGD(**momentum), ema_decay=0.75
  )
  state = [*bench.variables, *bench.parts.ema.averages]
  state += [models.raw(v) for v in bench.parts.optimizers["default"].optimizer.variables]

  def snapshot():
    local = bench.strategy.experimental_local_results
    return [[copy.numpy().tolist() for copy in local(v)] for v in state]

  def apply(finite):
    gradients = gradients_of([[2.0, 4.0, -2.0], 8.0, None])
    bench.run(lambda: bench.step().apply(gradients, tf.constant(finite)))

  before = snapshot()
  apply(False)
  assert snapshot() == before
  apply(True)
  apply(True)
  # Momentum: -0.5 g, then -0.25 g - 0.5 g; so -1.25 g in all, and averages of weights w:
  # 0.75 (0.75 w + 0.25 (w - 0.5 g)) + 0.25 (w - 1.25 g) = w - 0.40625 g.
  start, slope = [[1, -2, 3], 0.5, [7, 8]], [[2, 4, -2], 8, [0, 0]]
  for values, averages, w, g in zip(
    bench.values(), [_copies(bench, a) for a in bench.parts.ema.averages], start, slope, strict=True
  ):
    assert len(values) == len(averages) == replicas
    w, g = np.array(w, float), np.array(g, float)
    np.testing.assert_array_equal(values, [w - 1.25 * g] * replicas)
    np.testing.assert_array_equal(averages, [w - 0.40625 * g] * replicas)
  assert bench.parts.optimizers["default"].optimizer.iterations.numpy() == 2


def _copies(bench, variable):
  return [c.numpy() for c in bench.strategy.experimental_local_results(variable)]


def test_apply_of_one_optimizer_leaves_the_others_alone(mirrored):
  sgd = lambda rate: lambda: keras.optimizers.SGD(rate)  # noqa: E731
  bench = Bench(mirrored(2), optimizer={"kernel": sgd(1.0), "bias": sgd(0.5)}, ema_decay=0.5)
  assert [v is bench.variables[1] for v in bench.step().variables("bias")] == [True]
  bench.run(lambda: bench.step().apply(gradients_of([3.0]), tf.constant(True), "bias"))
  kernel, bias, _ = bench.values()
  np.testing.assert_array_equal(kernel, [[1, -2, 3]] * 2)
  np.testing.assert_array_equal(bias, [0.5 - 1.5] * 2)
  averages = [_copies(bench, average)[1].tolist() for average in bench.parts.ema.averages]
  assert averages == [[1, -2, 3], 0.5 - 0.75, [7, 8]]
  counts = {n: int(o.optimizer.iterations.numpy()) for n, o in bench.parts.optimizers.items()}
  assert counts == {"kernel": 0, "bias": 1}


# ---- update ----


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_update_is_all_verbs_in_order(replicas, mirrored):
  """SGD with a rate of 1 moves by the clipped mean gradient, which all replicas share."""
  bench = Bench(mirrored(replicas), clip_norm=2.0, loss_scale=loss_scale.fixed(scale=8.0))

  def replica(batch):
    step = bench.step()
    loss = step.update(linear_loss(bench, step), batch)
    step.record.close(bench.sums)
    return loss, step.record.outcome()

  results = bench.run(replica, batches(replicas))
  (kernel, bias, _), total = linear_gradients({"x": X, "weight": WEIGHT})
  norm = np.sqrt(np.sum(kernel**2) + bias**2) / 7.5
  for loss, outcome in results:
    assert_gradients(loss, [total, 7.5])
    assert [bool(flag) for flag in outcome] == [True, True]
  factor = 2.0 / norm / 7.5
  for values, start, gradient in zip(
    bench.values(), [[1, -2, 3], 0.5, [7, 8]], [kernel, bias, 0.0], strict=True
  ):
    expected = np.array(start) - factor * gradient
    np.testing.assert_allclose(values, [expected] * replicas, rtol=1e-6)
  logged = bench.sums.result()
  assert logged.pop("output") == pytest.approx(WEIGHT @ (X @ [1, -2, 3] + 0.5) / 7.5, rel=1e-6)
  assert logged.pop("seen") == 6 / replicas
  assert logged == {
    "loss": pytest.approx(total / 7.5, rel=1e-6), "gradient_norm": pytest.approx(norm, rel=1e-6),
  }  # fmt: skip


def test_update_without_any_weight_changes_nothing():
  bench = Bench(tf.distribute.get_strategy(), optimizer=lambda: keras.optimizers.Adam(0.5))
  [batch] = batches(1)
  step = bench.step()
  step.update(linear_loss(bench), {**batch, "weight": tf.zeros([6])})
  assert [v[0].tolist() for v in bench.values()] == [[1, -2, 3], 0.5, [7, 8]]
  assert bench.parts.optimizers["default"].optimizer.iterations.numpy() == 0
  assert [bool(flag) for flag in step.record.outcome()] == [True, True]  # nothing overflowed


@pytest.mark.parametrize(
  ("losses", "norms_finite", "outcome"),
  [
    ([1.0, 2.0], [True, True], [True, True]),
    ([1.0, np.inf], [True, False], [False, False]),
    ([np.nan, 1.0], [False, True], [False, False]),
    ([1.0, 2.0], [False, True], [False, True]),  # only the backward pass overflowed
  ],
)
def test_outcome_is_of_all_updates(losses, norms_finite, outcome):
  bench = Bench(tf.distribute.get_strategy())
  step = bench.step()
  for loss, finite in zip(losses, norms_finite, strict=True):
    step.log_update(
      Loss(tf.constant(loss), tf.constant(1.0)), tf.constant(finite), tf.constant(4.0)
    )
  assert [bool(flag) for flag in step.record.outcome()] == outcome
  step.record.close(bench.sums)
  assert bench.sums.result()["gradient_norm"] == 4.0  # the mean over those that are finite


def test_a_step_without_an_update_is_a_mistake():
  with pytest.raises(ConfigError, match=r"train_step\(\) made no update; call step.update"):
    Bench(tf.distribute.get_strategy()).step().record.outcome()


# ---- log ----


@pytest.mark.parametrize("kind", [EvalStep, Step])
def test_log_adds_up_over_calls_and_replicas(kind, mirrored):
  bench = Bench(mirrored(2))

  def replica(value):
    step = EvalStep() if kind is EvalStep else bench.step()
    step.log({"mean": (value, 1.0), "other": (tf.constant(1.0), tf.constant(4.0))})
    step.log({"mean": (10 * value, 2.0)})
    step.record.close(bench.sums)

  bench.run(replica, [tf.constant(1.0), tf.constant(3.0)])
  assert bench.sums.result() == {"mean": 44 / 6, "other": 0.25}


# ---- seed ----


def seeds(bench, *, step, calls=2):
  """Returns the seeds [replica][call] of one step."""
  bench.global_step.assign(step)

  def replica():
    made = bench.step()
    return [made.seed() for _ in range(calls)]

  return [[tuple(s.numpy().tolist()) for s in replica] for replica in bench.run(replica)]


def test_seeds_differ_by_call_step_and_replica_and_repeat(mirrored):
  bench = Bench(mirrored(3))
  found = [s for step in (0, 1, 7) for replica in seeds(bench, step=step) for s in replica]
  assert len(found) == len(set(found)) == 3 * 3 * 2
  assert seeds(bench, step=7) == seeds(Bench(mirrored(3)), step=7)
  assert seeds(bench, step=7)[1] != seeds(Bench(mirrored(3), seed=4), step=7)[1]
  # A replica's seeds do not depend on how many there are.
  assert seeds(bench, step=7)[:2] == seeds(Bench(mirrored(2)), step=7)


def test_seeds_do_not_repeat_those_of_forward_passes():
  """Neither may seed() disturb dropout, nor may the two ever meet."""
  bench = Bench(tf.distribute.get_strategy())
  masks = []

  def loss_fn(batch):
    masks.append(keras.layers.Dropout(0.5)(tf.ones([64]), training=True).numpy().tolist())
    return linear_loss(bench)(batch)

  for asked in (0, 2):
    step = bench.step()
    for _ in range(asked):
      step.seed()
    step.gradients(loss_fn, batches(1)[0], step.variables())
    step.gradients(loss_fn, batches(1)[0], step.variables())
  assert masks[:2] == masks[2:]
  assert masks[0] != masks[1]


# ---- update, written out ----


class Regression(toys.Regression):
  """Dropout, a penalty and a metric, so that every verb has something to do."""

  def build_model(self):
    dense, penalty = keras.layers.Dense, keras.regularizers.L2(0.1)
    hidden = dense(4, activation="tanh", kernel_regularizer=penalty)
    return toys.network([3], hidden, keras.layers.Dropout(0.25), dense(1))

  def source(self, split):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[16, 3]).astype(np.float32)
    return ArraySource(features={"x": x, "y": x.sum(1)})

  def metrics(self, outputs, batch):
    return {"mae": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}


class WrittenOut(Regression):
  """What `Step.update` does, verb by verb."""

  def train_step(self, step, batch):
    gradients, local_loss = step.gradients(
      lambda part: self.training_loss(step, part), batch, step.variables()
    )
    gradients, loss = step.all_reduce(gradients, local_loss)
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    gradients = step.clip(gradients, norm)
    step.apply(gradients, finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)


def trained(task, strategy):
  keras.utils.set_random_seed(1)
  trainer = make_trainer(
    task,
    strategy,
    batch=7,
    data={"pad_multiple": 4},
    optimizer=lambda: keras.optimizers.Adam(0.05),
    clip_norm=1.0,
    accumulation_steps=2,
    ema_decay=0.5,
    loss_scale=lambda: loss_scale.DynamicLossScale(initial=64.0, growth_steps=3),
  )
  metrics = trainer.train(tf.constant(12))
  weights = [v.numpy() for v in task.model.trainable_variables]
  return weights, {
    k: v for k, v in metrics.items() if k not in ("input_wait_s", "examples_per_second")
  }


@pytest.mark.whole
def test_the_verbs_written_out_give_the_same_bits(mirrored):
  strategy = mirrored(2)
  weights, metrics = trained(Regression(), strategy)
  written_out, other_metrics = trained(WrittenOut(), strategy)
  for one, other in zip(weights, written_out, strict=True):
    np.testing.assert_array_equal(one, other)
  assert metrics == other_metrics
  assert {"loss", "mae", "gradient_norm"} < set(metrics)
