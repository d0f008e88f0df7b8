"""Weights in safetensors files: what a network computes with them, by NumPy; where they go."""

import json
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import runs
import safetensors.numpy
import safetensors.tensorflow
import tensorflow as tf
import toys

import loopwright
from loopwright import commands, configurables
from loopwright.errors import ConfigError
from loopwright.run_folder import safetensors_files
from loopwright.run_folder.warm_start import WarmStart
from loopwright.runs import runner
from loopwright.strategies import factories
from loopwright.tasks.decoder import decoder
from loopwright.tools.exports import one_file

RNG = np.random.default_rng(4)
HEADS, GROUPS, SIZE = 4, 2, 4
X = RNG.normal(size=[8, 3]).astype(np.float32)


def network(layers=1):
  made = decoder(layers=layers, width=HEADS * SIZE, heads=HEADS, groups=GROUPS)
  for weight in made.weights:
    weight.assign(weight + RNG.normal(0, 0.2, weight.shape))
  return made


def save(model, path):
  one_file._safetensors(types.SimpleNamespace(model=model), str(path))


def computed(weights, config, tokens):
  """Logits [length, 256] of Qwen3's architecture, from Hugging Face's names, in float64."""
  size, base, epsilon = (config[name] for name in ("head_dim", "rope_theta", "rms_norm_eps"))
  shared = config["num_attention_heads"] // config["num_key_value_heads"]

  def norm(x, name):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * w[f"{name}.weight"]

  def turned(x):  # [length, heads, size]
    rates = base ** -(np.arange(size // 2) / (size // 2))
    pair = x[..., : size // 2] + 1j * x[..., size // 2 :]
    pair = pair * np.exp(1j * np.arange(len(x))[:, None, None] * rates)
    return np.concatenate([pair.real, pair.imag], axis=-1)

  def linear(x, name):
    return x @ w[f"{name}.weight"].T

  w = {name: value.astype(np.float64) for name, value in weights.items()}
  x = w["model.embed_tokens.weight"][tokens]
  hidden = np.tri(len(tokens)) == 0
  for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
    own, y = f"{layer}.self_attn", norm(x, f"{layer}.input_layernorm")
    q, k, v = (linear(y, f"{own}.{n}_proj").reshape(len(tokens), -1, size) for n in "qkv")
    q, k = turned(norm(q, f"{own}.q_norm")), turned(norm(k, f"{own}.k_norm"))
    k, v = (np.repeat(each, shared, axis=1) for each in (k, v))
    scores = np.where(hidden, -np.inf, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
    x = x + linear(mixed.reshape(len(tokens), -1), f"{own}.o_proj")
    y = norm(x, f"{layer}.post_attention_layernorm")
    gate = linear(y, f"{layer}.mlp.gate_proj")
    y = gate / (1 + np.exp(-gate)) * linear(y, f"{layer}.mlp.up_proj")
    x = x + linear(y, f"{layer}.mlp.down_proj")
  return (norm(x, "model.norm") @ w["model.embed_tokens.weight"].T)[:, :256]


def test_a_decoder_has_the_names_of_hugging_face_both_ways(tmp_path):
  given, tokens = network(2), np.array([3, 1, 4, 1, 5, 9])
  save(given, tmp_path / "model.safetensors")
  weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  read = decoder(layers=2, width=HEADS * SIZE, heads=HEADS, groups=GROUPS)
  report = WarmStart(path=str(tmp_path), strict=True).load(read)
  assert report.count("matched") == len(weights) == 24
  batch = {"token": tokens[None], "position": np.arange(len(tokens))[None]}
  config = json.loads((tmp_path / "config.json").read_text())
  np.testing.assert_allclose(read(batch)[0], computed(weights, config, tokens), atol=2e-5)
  shapes = {name: list(value.shape) for name, value in weights.items()}
  assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
  assert shapes["model.layers.0.mlp.up_proj.weight"][0] == config["intermediate_size"]


def test_shards_are_read_by_their_index_and_half_precision_is_cast(tmp_path):
  given = network()
  save(given, tmp_path / "model.safetensors")
  weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  (tmp_path / "model.safetensors").unlink()
  names, index = sorted(weights), {}
  for number, some in enumerate((names[:10], names[10:])):
    of = {name: tf.cast(weights[name], tf.bfloat16) for name in some}
    safetensors.tensorflow.save_file(dict(of), tmp_path / f"{number}.safetensors")
    index |= dict.fromkeys(some, f"{number}.safetensors")
  file = tmp_path / "model.safetensors.index.json"
  file.write_text(json.dumps({"weight_map": index}))
  read = network()
  digest = WarmStart(path=str(tmp_path)).digest()
  WarmStart(path=str(tmp_path), strict=True).load(read)
  for one, other in zip(given.weights, read.weights, strict=True):
    np.testing.assert_array_equal(tf.cast(tf.cast(one, tf.bfloat16), tf.float32), other)
  safetensors.tensorflow.save_file(dict(of), tmp_path / "1.safetensors", {"changed": "yes"})
  assert WarmStart(path=str(tmp_path)).digest() != digest
  (tmp_path / "0.safetensors").unlink()
  for name in ("0.safetensors", "../a.safetensors"):
    with pytest.raises(ConfigError, match=rf"index.json' names the file '{name}'; it must be one"):
      WarmStart(path=str(tmp_path)).digest()
    file.write_text('{"weight_map": {"a": "../a.safetensors"}}')


@pytest.mark.parametrize("part", [slice(0, 20), slice(0, -4), slice(8, None)])
def test_a_damaged_file_is_one_line(tmp_path, part):
  path, model = tmp_path / "model.safetensors", toys.network([3], keras.layers.Dense(4))
  save(model, path)
  path.write_bytes(path.read_bytes()[part])
  with pytest.raises(ConfigError, match=r"^'.*' cannot be read \(.*\); it is damaged or"):
    WarmStart(path=str(path)).load(model)


KERNEL, BIAS = np.ones([3, 1], np.float32), np.zeros(1, np.float32)


@pytest.mark.parametrize(
  ("held", "line"),
  [
    ({"kernel": KERNEL * np.nan}, r"has NaN in the value of '.*head/kernel:0'; give another"),
    ({"kernel": KERNEL.astype(np.int8)}, r"head/kernel' is int8 \[3, 1\]; in the model it is f"),
    (
      {"kernel": KERNEL, "lora_kernel_a": KERNEL},
      r"'head/lora_kernel_a' changes what its layer computes, and the model's layer has no LoRA",
    ),
  ],
)
def test_a_file_that_would_give_another_model_is_refused(held, line, tmp_path):
  path = tmp_path / "a.safetensors"
  safetensors.numpy.save_file({f"head/{name}": value for name, value in held.items()}, path)
  model = toys.network([3], keras.layers.Dense(1, name="head"))
  before = [weight.numpy() for weight in model.weights]
  with pytest.raises(ConfigError, match=line):
    WarmStart(path=str(path)).load(model)
  for weight, value in zip(model.weights, before, strict=True):
    np.testing.assert_array_equal(weight, value)


def test_an_output_layer_of_its_own_does_not_fit_a_tied_model(tmp_path):
  path, given = tmp_path / "model.safetensors", network()
  save(given, path)
  weights, read = safetensors.numpy.load_file(path), network()
  weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  safetensors.numpy.save_file(weights, path)
  assert WarmStart(path=str(path)).load(read).count("only in the file") == 1
  weights["lm_head.weight"] = weights["lm_head.weight"] + 1
  safetensors.numpy.save_file(weights, path)
  with pytest.raises(ConfigError, match=r"'lm_head\.weight', an output layer of its own"):
    WarmStart(path=str(path)).load(read)


def test_the_index_says_which_file_counts(tmp_path):
  for number, value in enumerate((0, 1)):
    held = {"head/kernel": KERNEL + value, "head/bias": BIAS + value}
    safetensors.numpy.save_file(held, tmp_path / f"{number}.safetensors")
  index = tmp_path / "model.safetensors.index.json"
  model = toys.network([3], keras.layers.Dense(1, name="head"))
  index.write_text(
    json.dumps({"weight_map": {"head/kernel": "0.safetensors", "head/bias": "1.safetensors"}})
  )
  WarmStart(path=str(tmp_path), strict=True).load(model)
  np.testing.assert_array_equal(np.concatenate([np.ravel(w) for w in model.weights]), [1, 1, 1, 1])
  index.write_text(json.dumps({"weight_map": {"gone": "0.safetensors"}}))
  with pytest.raises(
    ConfigError, match=r"has 'gone' in '0\.safetensors', which lacks it; give the"
  ):
    WarmStart(path=str(tmp_path)).load(model)
  safetensors.numpy.save_file({"head/kernel": KERNEL + 7}, tmp_path / "model.safetensors")
  WarmStart(path=str(tmp_path)).load(model)  # as transformers does
  np.testing.assert_array_equal(model.weights[0], KERNEL + 7)


@loopwright.register
class OneLayer(toys.Regression):
  """y = x @ kernel + bias."""

  features = {"x": X, "y": X[:, 0]}

  def build_model(self):
    return toys.network([3], keras.layers.Dense(1, name="head"))


SGD = ("run.task = @OneLayer()", "run.optimizer = @keras.SGD", "run.global_batch_size = 4")


def trained(folder, *more):
  configurables.parse([], [*SGD, "run.train_steps = 3", *more])
  configurables.configured(runner.run)(mode="train", model_dir=str(folder))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_is_exported_and_another_begins_with_it(tmp_path, replicas, capsys):
  trained(tmp_path / "a", f"run.seed = {replicas}")
  gin = tmp_path / "a" / "operative_config.gin"
  arguments = ["loopwright", "export", str(gin), f"--model_dir={tmp_path / 'a'}"]
  assert commands.main([*arguments, "--format=safetensors"]) == 0
  assert "model.safetensors: 2 variables, 4 parameters" in capsys.readouterr().out
  held = safetensors.numpy.load_file(tmp_path / "a" / "model.safetensors")
  reader = tf.train.load_checkpoint(str(tmp_path / "a" / "checkpoints" / "ckpt-3"))
  keys = [key for key in reader.get_variable_to_shape_map() if key.startswith("model/")]
  kernel, bias = (
    reader.get_tensor(next(key for key in keys if name in key)) for name in ("kernel", "bias")
  )
  np.testing.assert_array_equal([*held["head/kernel"][:, 0], *held["head/bias"]],
                                [*kernel[:, 0], *bias])  # fmt: skip
  # One step of SGD on all rows from there.
  error = 2 * (X @ kernel[:, 0] + bias - X[:, 0])
  expected = kernel[:, 0] - 0.01 * error @ X / len(X)
  strategy = factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default()
  trainer = runs.make_trainer(OneLayer(), strategy, batch=len(X), optimizer=keras.optimizers.SGD)
  WarmStart(path=str(tmp_path / "a" / "model.safetensors"), strict=True).apply(trainer)
  trainer.train(tf.constant(1))
  for replica in runs.copies(strategy, trainer.task.model.trainable_variables):
    np.testing.assert_allclose(replica[0][:, 0], expected, rtol=1e-6)


def test_the_mean_of_files(tmp_path):
  values = [RNG.normal(size=[3, 2]).astype(np.float32) for _ in range(3)]
  files = [str(tmp_path / f"{number}.safetensors") for number in range(3)]
  for value, file in zip(values, files, strict=True):
    safetensors.numpy.save_file({"kernel": value, "seen": np.array([7])}, file)
  to = str(tmp_path / "mean.safetensors")
  assert safetensors_files.average(files, to).startswith(to)
  held = safetensors.numpy.load_file(to)
  np.testing.assert_allclose(held["kernel"], np.mean(values, axis=0, dtype=np.float64), rtol=1e-7)
  assert held["seen"] == [7]
  safetensors.numpy.save_file({"kernel": values[0].T.copy()}, files[1])
  line = r"^'kernel' is float32 \[3, 2\] in '.*0.*' and float32 \[2, 3\] in '.*1.*'; average files"
  with pytest.raises(ConfigError, match=line):
    safetensors_files.average(files, f"{to}2.safetensors")


def test_without_the_package_it_is_one_line(tmp_path):
  safetensors.numpy.save_file({"a": np.ones(1)}, tmp_path / "a.safetensors")
  program = (
    "import sys; sys.modules['safetensors'] = None\n"
    "from loopwright.run_folder import safetensors_files\n"
    f"safetensors_files.average([{str(tmp_path / 'a.safetensors')!r}], 'b.safetensors')"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert "run: pip install 'loopwright[safetensors]'." in done.stderr
