"""Each way of attention beside NumPy; what is written for cuDNN beside what JAX lowers."""

import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import fake_gpu
import keras
import numpy as np
import pytest
import tensorflow as tf

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.layers import attention as ways
from loopwright.layers import cudnn
from loopwright.strategies import factories

SUPPORT = Path(__file__).parents[2] / "support"
N, HEADS, SIZE = 2, 4, 8
NEAR = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


# ---- The kernels of cuDNN, in TensorFlow's own operations on a CPU ----


@pytest.fixture
def on_cpu(monkeypatch):
  """Modules with the arguments and results of cuDNN's, which XLA compiles for a CPU."""
  monkeypatch.setattr(cudnn, "PLATFORM", "CPU")
  monkeypatch.setattr(cudnn, "module", functools.cache(lowered))
  monkeypatch.setitem(cudnn.NAMES, tf.float32, "f32")
  monkeypatch.setitem(cudnn.HIDDEN, tf.float32, -(2.0**41))
  monkeypatch.setattr(ways, "_missing", lambda shape: "" if shape else "no shape")


def lowered(shape, *, backward):
  """Returns the text of such a module."""
  of_query = tf.TensorSpec([shape.rows, shape.to, shape.heads, shape.size], shape.dtype)
  of_key = tf.TensorSpec([shape.rows, shape.origin, shape.groups, shape.size], shape.dtype)
  sums = tf.TensorSpec([shape.rows, shape.heads, shape.to])
  bias = [tf.TensorSpec([*shape.bias, shape.to, shape.origin], shape.dtype)] if shape.bias else []
  takes = [of_query, of_key, of_key, *([sums, of_query] if backward else []), *bias]
  takes += [of_query] if backward else []
  kernel = functools.partial(backward_pass if backward else forward_pass, shape)
  made = tf.function(kernel, jit_compile=True, autograph=False)
  text = made.experimental_get_compiler_ir(*takes)(stage="stablehlo")
  return text if isinstance(text, str) else text.decode()


def products(shape, query, key, bias):
  """Scaled, [n, heads, to, from], and the keys of each head of queries."""
  key = tf.repeat(tf.cast(key, tf.float32), shape.heads // shape.groups, axis=2)
  found = tf.einsum("bqhd,bkhd->bhqk", tf.cast(query, tf.float32), key) * shape.scale
  if bias:
    found += tf.cast(bias[0], tf.float32)
  if shape.causal:
    before = np.arange(shape.to)[:, np.newaxis] >= np.arange(shape.origin)
    found = tf.where(before, found, -1e30)
  return found


def forward_pass(shape, query, key, value, *bias):
  logits = products(shape, query, key, bias)
  sums = tf.reduce_logsumexp(logits, axis=-1)
  value = tf.repeat(tf.cast(value, tf.float32), shape.heads // shape.groups, axis=2)
  out = tf.einsum("bhqk,bkhd->bqhd", tf.exp(logits - sums[..., tf.newaxis]), value)
  return tf.cast(out, shape.dtype), sums


def backward_pass(shape, query, key, value, sums, upstream, *rest):
  *bias, out = rest
  share = shape.heads // shape.groups
  weights = tf.exp(products(shape, query, key, bias) - sums[..., tf.newaxis])
  query, upstream, out = (tf.cast(each, tf.float32) for each in (query, upstream, out))
  key, value = (tf.repeat(tf.cast(each, tf.float32), share, axis=2) for each in (key, value))
  of_weights = tf.einsum("bqhd,bkhd->bhqk", upstream, value)
  delta = tf.transpose(tf.reduce_sum(upstream * out, axis=-1), [0, 2, 1])
  inner = weights * (of_weights - delta[..., tf.newaxis]) * shape.scale
  found = [
    tf.einsum("bhqk,bkhd->bqhd", inner, key),
    *(
      tf.reduce_sum(tf.reshape(each, [shape.rows, shape.origin, shape.groups, share, -1]), axis=3)
      for each in (
        tf.einsum("bhqk,bqhd->bkhd", inner, query), tf.einsum("bhqk,bqhd->bkhd", weights, upstream),
      )
    ),
  ]  # fmt: skip
  return [tf.cast(each, shape.dtype) for each in found]


# ---- Numbers ----


def inputs(dtype, to, origin, groups, n=N):
  rng = np.random.default_rng(0)
  shapes = [[n, to, HEADS, SIZE], *[[n, origin, groups, SIZE]] * 2, [n, to, HEADS, SIZE]]
  return [tf.cast(rng.normal(size=shape), dtype) for shape in shapes]


def by_numpy(query, key, value, upstream, visible, scale):
  """Output and gradients in float64; `visible` is bool [n, heads, to, from]."""
  query, key, value, upstream = (
    np.asarray(tf.cast(x, tf.float64)) for x in (query, key, value, upstream)
  )
  share = query.shape[2] // key.shape[2]
  keys, values = (np.repeat(x, share, axis=2) for x in (key, value))
  logits = np.where(visible, np.einsum("bqhd,bkhd->bhqk", query, keys) * scale, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  of_weights = np.einsum("bqhd,bkhd->bhqk", upstream, values)
  mean = (of_weights * weights).sum(-1, keepdims=True)
  inner = weights * (of_weights - mean) * scale
  back = [
    np.einsum("bhqk,bqhd->bkhd", inner, query), np.einsum("bhqk,bqhd->bkhd", weights, upstream),
  ]  # fmt: skip
  back = [x.reshape(*key.shape[:3], share, -1).sum(3) for x in back]
  return [
    np.einsum("bhqk,bkhd->bqhd", weights, values), np.einsum("bhqk,bkhd->bqhd", inner, keys), *back
  ]  # fmt: skip


def with_gradients(function, query, key, value, upstream):
  with tf.GradientTape() as tape:
    tape.watch([query, key, value])
    out = function(query, key, value)
  return [out, *tape.gradient(out, [query, key, value], output_gradients=upstream)]


def assert_near(found, expected, near):
  for one, two in zip(found, expected, strict=True):
    two = np.asarray(tf.cast(two, tf.float64))
    apart = np.abs(np.asarray(tf.cast(one, tf.float64)) - two).max()
    assert apart <= near * np.abs(two).max()


def visible_of(to, origin, *, causal, segments, masked):
  """The arguments, and bool [n, heads, to, from] made pair by pair."""
  rng = np.random.default_rng(1)
  pairs = np.ones([N, HEADS, to, origin], bool)
  given = {}
  if causal:
    given["causal"] = True
    pairs &= np.array([[i >= j for j in range(origin)] for i in range(to)])
  if segments:
    numbers = np.sort(rng.integers(0, 4, [N, to]), axis=1)
    given["segment_ids"] = tf.constant(numbers)
    pairs &= np.array([[[a == b for b in row] for a in row] for row in numbers])[:, np.newaxis]
  if masked:
    mask = rng.random([N, 1, to, origin]) < 0.7
    mask[..., np.arange(min(to, origin)), np.arange(min(to, origin))] = True
    mask[..., 0] |= to > origin
    given["mask"] = tf.constant(mask)
    pairs &= mask
  return given, pairs


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize(
  ("dtype", "to", "origin", "groups", "seen"),
  [
    ("float32", 160, 160, 2, {"causal": True, "segments": True, "masked": False}),
    ("float32", 48, 130, 1, {"causal": False, "segments": False, "masked": True}),
    ("bfloat16", 32, 32, 4, {"causal": True, "segments": False, "masked": False}),
    ("float16", 130, 130, 2, {"causal": True, "segments": True, "masked": True}),
  ],
)
@pytest.mark.parametrize("way", ["plain", "blocks", "cudnn"])
def test_each_way_beside_numpy(way, dtype, to, origin, groups, seen, jit):
  given, pairs = visible_of(to, origin, **seen)
  values = inputs(dtype, to, origin, groups)
  function = functools.partial(lw.attention, **given, scale=0.3, way=way)
  compiled = tf.function(
    functools.partial(with_gradients, function), jit_compile=jit, autograph=False
  )
  assert_near(compiled(*values), by_numpy(*values, pairs, 0.3), NEAR[dtype])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("way", ["plain", "blocks", "cudnn"])
def test_two_replicas_sum_what_one_has(way):
  """Gradients of a projection that both replicas share, of half the rows each."""
  given, _ = visible_of(64, 64, causal=True, segments=True, masked=False)
  values = inputs("float32", 64, 64, 2)
  weights = np.random.default_rng(2).normal(size=[SIZE, SIZE]).astype(np.float32)

  def gradient(strategy):
    with strategy.scope():
      variable = tf.Variable(weights)

    def on_replica(rows):
      query, key, value, upstream, segment = rows
      with tf.GradientTape() as tape:
        query = tf.einsum("bqhd,de->bqhe", query, variable)
        out = lw.attention(query, key, value, causal=True, segment_ids=segment, way=way)
        total = tf.reduce_sum(out * upstream)
      found = tape.gradient(total, variable)
      return tf.distribute.get_replica_context().all_reduce("sum", found)

    count = strategy.num_replicas_in_sync
    parts = [tf.split(each, count) for each in (*values, given["segment_ids"])]
    rows = strategy.experimental_distribute_values_from_function(
      lambda context: tuple(part[context.replica_id_in_sync_group] for part in parts)
    )
    run = tf.function(lambda: strategy.run(on_replica, args=(rows,)), autograph=False)
    return strategy.experimental_local_results(run())

  [alone] = gradient(factories.one_device(device="CPU:0"))
  for each in gradient(factories.mirrored(cpu_replicas=2)):
    np.testing.assert_allclose(each, alone, rtol=1e-5, atol=1e-5 * np.abs(alone).max())


def test_the_memory_of_blocks_grows_with_the_length():
  """The largest tensor of the compiled step, in elements; of plain it grows with the square."""

  def largest(way, length):
    specs = [tf.TensorSpec([1, length, 2, 8])] * 4
    function = functools.partial(lw.attention, causal=True, way=way)
    made = tf.function(functools.partial(with_gradients, function), jit_compile=True)
    text = made.experimental_get_compiler_ir(*specs)(stage="optimized_hlo")
    sizes = re.findall(r"\w+\[([\d,]+)\]", text)
    return max(int(np.prod([int(n) for n in size.split(",")])) for size in sizes)

  # 128 queries, 2 heads; and all queries.
  assert [largest("blocks", n) for n in (512, 1024)] == [2 * 128 * 512, 2 * 128 * 1024]
  assert [largest("plain", n) for n in (512, 1024)] == [2 * 512**2, 2 * 1024**2]


# ---- Keras ----


def test_keras_layers_take_it(monkeypatch):
  from keras.src.backend.tensorflow import nn

  monkeypatch.setattr(nn, "dot_product_attention", nn.dot_product_attention)  # put back at the end
  x = tf.constant(np.random.default_rng(3).normal(size=[2, 6, 8]).astype(np.float32))
  mask = lw.attention_mask(tf.constant([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 2, 2]]))
  usual = keras.layers.MultiHeadAttention(2, 4)
  expected = usual(x, x, attention_mask=mask)
  asked = keras.layers.MultiHeadAttention(2, 4, flash_attention=True)
  asked.build(x.shape, x.shape)
  asked.set_weights(usual.get_weights())
  with pytest.raises(ValueError, match="not supported in tensorflow"):
    asked(x, x, attention_mask=mask)
  calls = []
  own = ways.attention
  monkeypatch.setattr(ways, "attention", lambda *x, **kw: calls.append(kw) or own(*x, **kw))
  ways.use_in_keras()
  ways.use_in_keras()
  np.testing.assert_array_equal(asked(x, x, attention_mask=mask), expected)
  assert len(calls) == 1
  np.testing.assert_array_equal(
    asked(x, x, use_causal_mask=True), usual(x, x, use_causal_mask=True)
  )
  np.testing.assert_array_equal(usual(x, x, attention_mask=mask), expected)
  assert len(calls) == 2
  with pytest.raises(ValueError, match="Dropout is not supported"):
    keras.layers.MultiHeadAttention(2, 4, dropout=0.1, flash_attention=True)


# ---- The modules for cuDNN ----


def parts(text):
  """Returns the configuration of a custom call, and the rest of it without names of values."""
  [config] = re.findall(r'backend_config = "(\{.*?\})", ', " ".join(text.split()))
  rest = re.sub(r'backend_config = "\{.*?\}", |%\w+(:\d+)?(#\d+)?', "", " ".join(text.split()))
  escaped = config.replace("\\22", '"').replace('\\"', '"')
  return json.loads(escaped), rest.replace("{ ", "{").replace(" }", "}").partition("= ")[2]


def of_line(line):
  """Returns a line of the file as (shape, whether backward, custom call)."""
  case, _, call = line.partition(" | ")
  *sizes, causal, masked, dtype = case.split()
  n, to, origin, heads, groups, size = map(int, sizes)
  shape = cudnn.Shape(
    tf.as_dtype(dtype), n, to, origin, heads, groups, size, 1 / math.sqrt(size),
    causal == "True", (n, 1) if masked == "True" else (), False,
  )  # fmt: skip
  return shape, "Backward" in call, call


@pytest.mark.parametrize("line", (SUPPORT / "cudnn_of_jax.txt").read_text().splitlines())
def test_modules_are_what_jax_lowers(line):
  """The file has what JAX 0.10.2 lowers for CUDA: shape | custom call."""
  shape, backward, call = of_line(line)
  made = cudnn.module(shape, backward=backward)
  own = re.search(r"^ +%0:.*?(?=^ +%1 = )", made, re.MULTILINE | re.DOTALL)[0]
  assert parts(own) == parts(call)


def test_tensorflow_knows_the_custom_calls():
  """Every field of the configuration is one of XLA's message, and the names are in the library."""
  library = Path(tf.__file__).parent / "libtensorflow_framework.so.2"
  data = library.read_bytes()
  for line in (SUPPORT / "cudnn_of_jax.txt").read_text().splitlines():
    name = re.search(r"@(\S+?)\(", line)[1]
    fields = parts(line.partition(" | ")[2])[0]["cudnn_fmha_backend_config"]
    missing = [each for each in (name, *fields) if each.encode() not in data]
    assert missing == []


ON_THE_STAND_IN = """
import os, sys
import tensorflow as tf
from loopwright.layers import attention as ways, cudnn
for bias in ((), (2, 1)):
  shape = cudnn.Shape(tf.bfloat16, 2, 64, 64, 4, 2, 64, 0.125, True, bias, bool(bias))
  with tf.device("GPU:0"):
    query, key = tf.zeros([2, 64, 4, 64], shape.dtype), tf.zeros([2, 64, 2, 64], shape.dtype)
    added, sums = [tf.zeros([*bias, 64, 64], shape.dtype)] if bias else [], tf.zeros([2, 4, 64])
    for backward, given in (
      (False, [query, key, key, *added]), (True, [query, key, key, sums, query, *added, query]),
    ):
      shapes = [query.shape, key.shape, key.shape] if backward else [query.shape, sums.shape]
      try:
        cudnn._call(shape, given, shapes, backward=backward)
      except tf.errors.InternalError as error:
        print(str(error).splitlines()[0].rpartition("}} ")[2])
sys.stdout.flush()
os._exit(0)  # the driver's thread never ends
"""


@pytest.mark.skipif(not fake_gpu.can_be_built(), reason="needs g++ and TensorFlow's headers")
def test_xla_for_gpus_hands_the_modules_to_cudnn():
  """It reads them and builds a graph; only then the stand-in, which has no engine, refuses."""
  environment = fake_gpu.environment(fake_gpu.library(), count=1)
  command = [sys.executable, "-c", ON_THE_STAND_IN]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
  assert (
    done.stdout.splitlines()
    == ["[cudnn_frontend] Error: No execution plans support the graph."] * 4
  ), done.stderr[-2000:]


# ---- The choice ----


SHAPE = cudnn.Shape(tf.bfloat16, 2, 64, 64, 4, 2, 8, 0.35, True, (2, 1), False)


@pytest.mark.usefixtures("on_cpu")
def test_a_trial_on_the_device_compares_both():
  assert ways.tried.__wrapped__(SHAPE, "CPU:0") == ""
  assert ways.tried.__wrapped__(SHAPE._replace(dtype=tf.float16, bias=()), "CPU:0") == ""


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
  ("broken", "why"),
  [
    (lambda x: x * 1.1, r"it differs from plain by 0\.\d+ of the largest value"),
    (lambda x: x / 0, "it differs from plain by nan"),
    (lambda x: tf.ones([2])[9], "InvalidArgumentError: .*slice"),
  ],
)
def test_one_line_says_why_the_fused_one_is_not_used(broken, why, monkeypatch, caplog):
  call = cudnn._call

  def wrong(*args, backward=False):
    first, *rest = call(*args, backward=backward)
    return [broken(first) if backward else first, *rest]

  monkeypatch.setattr(cudnn, "_call", wrong)
  assert re.match(why, ways.tried.__wrapped__(SHAPE, "CPU:0"))
  [line] = [each.getMessage() for each in caplog.records]
  assert re.match(
    rf"attention on CPU:0 \(bfloat16, heads of 8\) is not cuDNN's, because {why}", line
  )


@pytest.mark.parametrize(
  ("changed", "why"),
  [
    ({"dtype": tf.float32}, "it has float16 and bfloat16, not float32"),
    ({"size": 12}, "a multiple of 8 up to 256, not 12"),
    ({"origin": 63}, "lengths must be even, not 64 and 63"),
    ({"origin": 63, "bias": ()}, ""),
  ],
)
def test_what_cudnn_has_no_kernel_for(changed, why):
  assert why in SHAPE._replace(**changed).refused()
  assert bool(why) == bool(SHAPE._replace(**changed).refused())


def test_wrong_arguments_are_one_line():
  query, key, value, _ = inputs("float32", 4, 4, 2)
  with pytest.raises(ConfigError, match=r"unknown way 'flash'; it must be one of .*plain"):
    lw.attention(query, key, value, way="flash")
  with pytest.raises(ConfigError, match="cannot take the way 'cudnn': its kernels need a GPU"):
    lw.attention(query, key, value, way="cudnn")
  with pytest.raises(ConfigError, match="a number that divides the queries'"):
    lw.attention(query, key[:, :, :1].numpy().repeat(3, 2), value)
  with pytest.raises(ConfigError, match="give a mask instead"):
    lw.attention(query, key[:, :3], value[:, :3], segment_ids=tf.zeros([2, 4], tf.int64))
  for what, given in {
    r"segment_ids of shape \(2, 3\); it must be \(2, 4\)": {"segment_ids": tf.zeros([2, 3])},
    r"a mask of shape \(2, 1, 3, 4\); it": {"mask": tf.zeros([2, 1, 3, 4], tf.bool)},
    "a mask of .*float32.*; it must be bool": {"mask": tf.zeros([2, 1, 4, 4])},
    "queries of .*int32.*; they must be floats": {"query": tf.zeros([2, 4, 4, 8], tf.int32)},
  }.items():
    with pytest.raises(ConfigError, match=what):
      lw.attention(**{"query": query, "key": key, "value": value, **given})


@pytest.mark.parametrize(
  ("on_gpus", "in_step", "missing", "length", "way"),
  [
    (False, True, "", 64, "plain"),
    (True, True, "", 64, "cudnn"),
    (True, False, "", 64, "plain"),
    (True, True, "no", 64, "plain"),
    (True, True, "no", ways.LONG, "blocks"),
  ],
)
def test_what_auto_takes(on_gpus, in_step, missing, length, way, monkeypatch):
  monkeypatch.setattr(ways.placement.Placement, "on_gpus", on_gpus)
  monkeypatch.setattr(ways, "_missing", lambda shape: missing)
  monkeypatch.setattr(ways.randomness, "entered_stream", lambda: in_step or None)
  assert ways._auto(SHAPE, tf.zeros([1, length, 1, 8])) == way
