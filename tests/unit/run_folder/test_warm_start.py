"""Weights from elsewhere: the file's, bit by bit, on every replica, and a step after it."""

import functools
import re
import shutil

import h5py
import keras
import numpy as np
import pytest
import runs
import tensorflow as tf
import tf_keras
import toys

from loopwright.errors import ConfigError
from loopwright.models import models
from loopwright.run_folder import matching, safetensors_files, weight_files
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.warm_start import WarmStart
from loopwright.runs import runner
from loopwright.strategies import factories

RNG = np.random.default_rng(5)
X = RNG.normal(size=[12, 3]).astype(np.float32)
Y = RNG.normal(size=[12]).astype(np.float32)
RATE, DECAY = 0.1, 0.9
LIBRARIES = {"keras": keras, "tf_keras": tf_keras}


def network(library=keras, *, inner="norm", head=1, width=4):
  """Two layers and a normalisation in a model of their own, under a head."""
  layers = library.layers
  x = layers.Input([3])
  first = layers.Dense(4, name="first")(x)
  features = layers.Dense(width, name="second")(layers.BatchNormalization(name=inner)(first))
  body = library.Model(x, features, name="features")
  image = layers.Input([3])
  dropped = layers.Dropout(0.5, name="dropout")(body(image))
  return library.Model(image, layers.Dense(head, name="head")(dropped))


class Listed(keras.Model):
  """Layers in a list, which TensorFlow's checkpoints do not find."""

  def __init__(self):
    super().__init__(name="listed")
    self.blocks = [keras.layers.Dense(3, name="one"), keras.layers.Dense(1, name="two")]

  def call(self, x):
    for block in self.blocks:
      x = block(x)
    return x


def listed():
  model = Listed()
  model(X)
  return model


class Late(keras.Model):
  """Whose layers are built when it is called: TensorFlow's names lack those of the layers."""

  def __init__(self):
    super().__init__(name="late")
    self.first, self.second = (keras.layers.Dense(width, name=f"d{width}") for width in (3, 1))
    self.norm = keras.layers.BatchNormalization(name="norm")

  def call(self, x, training=False):
    return self.second(self.norm(self.first(x), training=training))


def late():
  model = Late()
  model(X)
  return model


class Unnamed(tf.Module):
  """Whose variables have all one name."""

  def __init__(self):
    super().__init__()
    self.kernel, self.bias = tf.Variable(RNG.normal(size=[3, 1])), tf.Variable([0.0])

  def __call__(self, x, training=False):
    del training
    return x @ tf.cast(self.kernel, tf.float32) + self.bias


NETWORKS = {
  "keras": network,
  "too large to be fused": lambda: network(width=5000),
  "tf_keras": lambda: network(tf_keras),
  "layers in a list": listed,
  "layers built late": late,
  "tf.Module": Unnamed,
  "dict": lambda: {"a": network(), "b": network(inner="other")},
}


def line():
  """y = x @ kernel + bias: variables small enough to be fused."""
  return keras.Sequential([keras.Input([3]), keras.layers.Dense(1, name="head")], name="line")


class Fit(toys.Regression):
  """Least squares by any network."""

  features = {"x": X, "y": Y}

  def forward(self, batch, training):
    model = self.model["a"] if isinstance(self.model, dict) else self.model
    return model(batch["x"], training=training)[:, 0]


def make_trainer(build=line, *, strategy=None, **options):
  sgd = functools.partial(keras.optimizers.SGD, RATE)
  strategy = strategy or tf.distribute.get_strategy()
  return runs.make_trainer(Fit(build), strategy, batch=12, optimizer=sgd, **options)


def randomise(model):
  """Gives every weight values of its own; returns them."""
  for weight in models.weights(model):
    raw = models.raw(weight)
    raw.assign(RNG.normal(size=raw.shape).astype(raw.dtype.as_numpy_dtype))
  return values(model)


def values(model):
  return [models.raw(weight).numpy() for weight in models.weights(model)]


def copies(strategy, model):
  """[replica][weight]"""
  return runs.copies(strategy, models.weights(model))


def saved(trainer, folder):
  """A run folder with a checkpoint of the trainer, as `run` would write it."""
  trainer.global_step.assign(7)
  manager = CheckpointManager(
    trainer=trainer, directory=str(folder / "checkpoints"), experiment={"task": "any"}
  )
  manager.save()
  manager.wait()
  return str(folder)


def assert_equal(actual, expected):
  assert len(actual) == len(expected) > 0
  for one, other in zip(actual, expected, strict=True):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(one, other)


# ---- The values ----


@pytest.mark.parametrize("kind", NETWORKS)
def test_each_replica_has_the_values_of_a_checkpoint(kind, mirrored, tmp_path):
  source, strategy = make_trainer(NETWORKS[kind]), mirrored(2)
  expected = randomise(source.task.model)
  trainer = make_trainer(NETWORKS[kind], strategy=strategy)
  report = WarmStart(path=saved(source, tmp_path), strict=True).apply(trainer)
  for replica in copies(strategy, trainer.task.model):
    assert_equal(replica, expected)
  assert (report.count(matching.MATCHED), len(report.rows)) == (len(expected), len(expected))
  assert report.parameters(matching.MATCHED) == sum(value.size for value in expected)
  assert trainer.global_step.numpy() == 0


@pytest.mark.parametrize(
  ("library", "file"),
  [("keras", "x.keras"), ("keras", "x.weights.h5"), ("tf_keras", "x.h5"), ("tf_keras", "whole.h5")],
)
def test_each_replica_has_the_values_of_a_file_of_keras(library, file, mirrored, tmp_path):
  library, path, strategy = LIBRARIES[library], str(tmp_path / file), mirrored(2)
  source = network(library)
  expected = randomise(source)
  (source.save if file in ("x.keras", "whole.h5") else source.save_weights)(path)
  for target in (library, keras):  # what tf_keras has learned is of use to Keras 3, too
    trainer = make_trainer(lambda target=target: network(target), strategy=strategy)
    report = WarmStart(path=path, strict=True).apply(trainer)
    assert report.count(matching.ONLY_FILE) == 0
    by_name = dict(zip(map(models.name, models.weights(source)), expected, strict=True))
    weights = models.weights(trainer.task.model)
    wanted = [by_name[name] for name in _as_named(weights, by_name)]
    for replica in copies(strategy, trainer.task.model):
      assert_equal(replica, wanted)


def _as_named(weights, known):
  """The weights' names, with ":0" where `known` has it."""
  suffix = ":0" if any(":" in name for name in known) else ""
  return [models.name(weight).partition(":")[0] + suffix for weight in weights]


def test_a_float_of_another_width_is_cast(tmp_path):
  source = make_trainer(Unnamed)
  kernel = source.task.model.kernel.numpy()

  class Wide(Unnamed):
    def __init__(self):
      super().__init__()
      self.kernel = tf.Variable(tf.zeros([3, 1], tf.float64))

  assert kernel.dtype == np.float64
  trainer = make_trainer(Wide)
  WarmStart(path=saved(source, tmp_path)).apply(trainer)
  np.testing.assert_array_equal(trainer.task.model.kernel, kernel)


# ---- What follows ----


def test_a_step_from_there_is_numpys_and_so_are_the_averages(mirrored, tmp_path):
  """Least squares on 12 examples: w - 2 rate X'(Xw + b - y) / 12, of fused variables."""
  source, strategy = make_trainer(), mirrored(2)
  kernel, bias = randomise(source.task.model)
  trainer = make_trainer(strategy=strategy, ema_decay=DECAY)
  WarmStart(path=saved(source, tmp_path)).apply(trainer)
  [optimizer] = trainer.parts.optimizers.values()
  assert len(optimizer.fusion.flats) == 1
  for average, start in zip(trainer.parts.ema.averages, (kernel, bias), strict=True):
    for copy in strategy.experimental_local_results(average):
      np.testing.assert_array_equal(copy, start)
  trainer.train(tf.constant(1))
  residual = X.astype(np.float64) @ kernel + bias - Y[:, np.newaxis]
  moved = [
    kernel - RATE * 2 * X.T.astype(np.float64) @ residual / 12,
    bias - RATE * 2 * residual.mean(axis=0),
  ]
  assert np.abs(moved[0] - kernel).max() > 0.01
  for replica in copies(strategy, trainer.task.model):
    for one, other in zip(replica, moved, strict=True):
      np.testing.assert_allclose(one, other, atol=1e-6)
  for average, start, end in zip(trainer.parts.ema.averages, (kernel, bias), moved, strict=True):
    np.testing.assert_allclose(average, DECAY * start + (1 - DECAY) * end, atol=1e-6)


def test_a_run_begins_there_and_does_not_go_back(tmp_path):
  """Two steps and two more, though the file has gone meanwhile, are four in one go."""
  source = make_trainer()
  start = randomise(source.task.model)
  folder = saved(source, tmp_path / "source")

  def train(name, steps):
    task = Fit(line)
    runner.run(
      task=task, train_steps=steps, global_batch_size=12, model_dir=str(tmp_path / name),
      strategy=factories.default, optimizer=lambda: keras.optimizers.SGD(RATE), mode="train",
      warm_start=WarmStart(path=folder),
    )  # fmt: skip
    return values(task.model)

  whole = train("whole", 4)
  train("parts", 2)
  assert (tmp_path / "parts" / "warm_start.txt").read_text().splitlines() == [
    f"warm start from {folder}/checkpoints/ckpt-7: 2 of 2 variables, 4 of 4 parameters",
    "",
    "matched            line/head/kernel  float32 [3, 1]",
    "matched            line/head/bias    float32 [1]",
  ]
  shutil.rmtree(folder)
  assert_equal(train("parts", 4), whole)
  assert np.abs(whole[0] - start[0]).max() < 1  # four small steps away from there


# ---- What matches ----


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
  """A run folder with a head of another width, and what it holds."""
  trainer = make_trainer(lambda: network(head=5))
  expected = randomise(trainer.task.model)
  return saved(trainer, tmp_path_factory.mktemp("pretrained")), expected


def statuses(report):
  return {row.name: row.status for row in report.rows}


def test_the_report_tells_what_matched_and_what_did_not(pretrained):
  folder, expected = pretrained
  trainer = make_trainer(lambda: network(inner="renamed"))
  before = values(trainer.task.model)
  report = WarmStart(path=folder, exclude=["second/.*"]).apply(trainer)
  normalisation = ("gamma", "beta", "moving_mean", "moving_variance")
  assert statuses(report) == {
    "first/kernel": "matched",
    "first/bias": "matched",
    "second/kernel": "excluded",
    "second/bias": "excluded",
    "head/kernel": "differs",
    "head/bias": "differs",
    **{f"renamed/{name}": "only in the model" for name in normalisation},
    **{f"norm/{name}": "only in the file" for name in normalisation},
  }
  assert report.summary() == (
    f"warm start from {folder}/checkpoints/ckpt-7: 2 of 10 variables, 16 of 57 parameters; "
    "2 of another shape or dtype; 4 only in the model; 2 excluded; 4 only in the file"
  )
  lines = report.table().splitlines()
  assert len(lines) == 2 + 14
  assert re.fullmatch(
    r"differs +head/kernel +float32 \[4, 1\]; in the file float32 \[4, 5\]",
    next(each for each in lines if "head/kernel" in each),
  )
  changed = [
    not np.array_equal(one, other)
    for one, other in zip(values(trainer.task.model), before, strict=True)
  ]
  names = [models.name(weight) for weight in models.weights(trainer.task.model)]
  assert {n for n, moved in zip(names, changed, strict=True) if moved} == {
    "first/kernel", "first/bias",
  }  # fmt: skip
  np.testing.assert_array_equal(trainer.task.model.get_layer("features").weights[0], expected[0])


def test_names_are_mapped_the_longest_prefix_first(pretrained):
  folder, _ = pretrained
  trainer = make_trainer(lambda: network(inner="renamed"))
  rename = {"norm/": "renamed/", "f": "no/", "first/": "second/", "second/": "first/", "": ""}
  report = WarmStart(path=folder, rename=rename, include=["renamed/.*", "second/b.*"]).apply(
    trainer
  )
  matched = {name for name, status in statuses(report).items() if status == "matched"}
  norm = {f"renamed/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")}
  assert matched == norm | {"second/bias"}
  first = [w for w in models.weights(trainer.task.model) if models.name(w) == "second/bias"]
  np.testing.assert_array_equal(first[0], pretrained[1][1])


def test_by_path_the_names_do_not_matter(pretrained):
  folder, expected = pretrained
  trainer = make_trainer(lambda: network(inner="renamed", head=5))
  report = WarmStart(path=folder, match="path", strict=True).apply(trainer)
  assert report.count("matched") == 10
  assert_equal(values(trainer.task.model), expected)


@pytest.mark.parametrize("where", ["checkpoints", "checkpoints/ckpt-7"])
def test_a_checkpoint_can_be_named_in_several_ways(where, pretrained):
  folder, _ = pretrained
  assert weight_files.located(f"{folder}/{where}") == f"{folder}/checkpoints/ckpt-7"
  assert WarmStart(path=f"{folder}/{where}").digest() == WarmStart(path=folder).digest()


# ---- What is refused ----


def bad_file(folder, name, content=b"nothing"):
  (folder / name).write_bytes(content)
  return str(folder / name)


def nameless(folder):
  with h5py.File(folder / "old.weights.h5", "w") as file:
    file["layers/dense/vars/0"] = np.zeros([3, 1], np.float32)
  return str(folder / "old.weights.h5")


def of_tf_keras(folder):
  network(tf_keras).save(str(folder / "tf.keras"))
  return str(folder / "tf.keras")


def truncated(folder):
  source = make_trainer()
  saved(source, folder)
  [data] = (folder / "checkpoints").glob("*.data*")
  data.write_bytes(data.read_bytes()[:10])
  return str(folder)


@pytest.mark.parametrize(
  ("path", "says"),
  [
    (lambda folder: str(folder / "no"), ["where no weights are", "give a run folder"]),
    (lambda folder: str(folder), ["where no weights are"]),
    (lambda folder: bad_file(folder, "x.keras"), ["x.keras' cannot be read", "give another"]),
    (lambda folder: bad_file(folder, "x.h5"), ["x.h5' cannot be read", "give another"]),
    (lambda folder: bad_file(folder, "ckpt-1.index")[:-6], ["ckpt-1' cannot be read"]),
    (nameless, ["does not name its layers", "save the weights again"]),
    (of_tf_keras, ["does not name its layers", "'x.h5' with tf_keras"]),
    (truncated, ["ckpt-7' cannot be read", "give another"]),
  ],
)
def test_a_file_that_is_none_is_refused_in_one_line(path, says, tmp_path):
  with pytest.raises(ConfigError) as raised:
    WarmStart(path=path(tmp_path)).apply(make_trainer())
  assert "\n" not in str(raised.value)
  for words in says:
    assert words in str(raised.value)


@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"exclude": ["hed/.*"]}, "exclude has 'hed/.*', which matches the whole name of no variable"),
    ({"include": ["first"]}, "include has 'first', which matches the whole name of no variable"),
    ({"rename": {"body/": ""}}, "rename has 'body/', but no name"),
    ({"rename": {"first/": "second/"}}, "gives two variables the name 'second/"),
    ({"rename": {"": "far/"}}, "map the names with WarmStart.rename, or give another"),
    (
      {"strict": True},
      r"'head/kernel' is float32 \[4, 5\] in it and float32 \[4, 1\] here \(and 1",
    ),
  ],
)
def test_what_matches_nothing_is_refused_and_nothing_changes(options, says, pretrained):
  trainer = make_trainer(network)
  before = values(trainer.task.model)
  with pytest.raises(ConfigError, match=says):
    WarmStart(path=pretrained[0], **options).apply(trainer)
  assert_equal(values(trainer.task.model), before)


@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"exclude": "head/.*"}, "exclude is 'head/.*'; it must be a list such as"),
    ({"include": ["("]}, r"include has '\(', which is not a regular expression"),
    ({"match": "nmae"}, "unknown WarmStart.match 'nmae'; it must be one of name, path"),
  ],
)
def test_options_of_another_kind_are_refused(options, says):
  with pytest.raises(ConfigError, match=says):
    WarmStart(path="x", **options)


@pytest.mark.parametrize("file", ["x.keras", "x.weights.h5", "checkpoint", "x.safetensors"])
def test_frozen_weights_under_lora_are_those_of_the_file(file, tmp_path):
  tokens = np.arange(12).reshape(4, 3) % 5

  def network(seed):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    body = [layers.Embedding(5, 4, name="rows"), layers.Flatten(), layers.Dense(3, name="body")]
    return keras.Sequential(
      [keras.Input([3], dtype="int32"), *body, layers.Dense(1, name="head")], name="net"
    )

  source, target = network(1), network(2)
  for name in ("rows", "body"):
    target.get_layer(name).enable_lora(rank=2)
  for weight in target.weights:
    if "lora" in weight.name:
      weight.assign(np.full(weight.shape, 0.5))
  path = str(tmp_path / file)
  if file == "checkpoint":
    path = tf.train.Checkpoint(model=source).write(path)
  elif file.endswith("safetensors"):
    safetensors_files.write(path, matching.Names(source).in_file({}))
  else:
    (source.save if file.endswith(".keras") else source.save_weights)(path)
  report = WarmStart(path=path).load(target)
  assert (report.count(matching.MATCHED), report.count(matching.ONLY_MODEL)) == (5, 4)
  np.testing.assert_array_equal(target(tokens), source(tokens))
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.square(target(tokens)))
  factors = [w.value for w in target.weights if w.name.endswith("_b")]
  assert all(np.abs(each).max() > 0 for each in tape.gradient(loss, factors))


class Weighted(toys.Regression):
  """y = kernel @ x + shift, which is trained and beside the model, in a closure."""

  features = {"x": X, "y": Y}

  def build_model(self):
    shift = tf.Variable(0.0, name="shift")
    self.shift = lambda: shift
    return toys.linear(np.ones(3, np.float32))

  def variables_of(self, optimizer):
    return [*super().variables_of(optimizer), self.shift()]

  def losses(self, outputs, batch):
    return super().losses(outputs + self.shift(), batch)


def test_a_weight_beside_the_model_begins_there_too(mirrored, tmp_path):
  given = {"global_batch_size": 6, "strategy": mirrored(2), "mode": "train"}
  trained = Weighted()
  runner.run(task=trained, model_dir=str(tmp_path / "a"), train_steps=3, **given)
  task = Weighted()
  trainer = runs.make_trainer(task, mirrored(2), batch=6, optimizer=keras.optimizers.Adam)
  report = WarmStart(path=str(tmp_path / "a")).apply(trainer)
  assert "state/shift.<shift>" in {
    row.name for row in report.rows if row.status == matching.MATCHED
  }
  assert trained.shift().numpy() != 0
  assert task.shift().numpy() == trained.shift().numpy()
