"""Transfer learning: what is frozen stays, the head is NumPy's, fine-tuning moves all of it."""

import urllib.error

import keras
import numpy as np
import properties
import pytest
import runs
import tensorflow as tf
from keras.src.utils import file_utils

import loopwright
from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.runs import runner
from loopwright.strategies import factories
from loopwright.tasks import transfer_learning
from loopwright.tasks.image_classification import ImageData
from loopwright.tasks.transfer_learning import (
  Backbone,
  TransferLearning,
  efficientnet_v2_s,
  mobilenet_v2,
  resnet50,
)
from loopwright.tools.exports import export

EXAMPLES, SIDE, RATE = 8, 32, 0.25
RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, [EXAMPLES, SIDE, SIDE, 3]).astype(np.uint8)
LABELS = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.int32)


def data(side=SIDE, labels=LABELS):
  source = ArraySource(features={"image": IMAGES, "label": labels})
  return ImageData(
    sources={"train": source, "eval": source},
    image_shape=(side, side, 3),
    labels=int(labels.max()) + 1,
  )


def make_task(**options):
  """The narrowest MobileNetV2 with a head of one layer."""
  small = {"input_shape": (SIDE, SIDE, 3), "units": (), "backbone": mobilenet_v2(alpha=0.35)}
  return TransferLearning(**{"data": data(), **small, **options})


def normalised():
  """A backbone of one convolution and batch normalisation, for what does not depend on it."""

  def build(*, include_top, input_shape, weights):
    image = keras.Input(input_shape)
    convolved = keras.layers.Conv2D(4, 3, use_bias=False, name="conv")(image)
    return keras.Model(image, keras.layers.BatchNormalization(momentum=0.5, name="norm")(convolved))

  return Backbone(build=build, preprocess_input=mobilenet_v2().preprocess_input)


def make_trainer(task, strategy, optimizer=lambda: keras.optimizers.SGD(RATE), **options):
  keras.utils.set_random_seed(1)
  return runs.make_trainer(
    task, strategy, batch=EXAMPLES, optimizer=optimizer, data={"shuffle": False}, **options
  )


def backbone_of(model):
  return next(layer for layer in model.layers if isinstance(layer, keras.Model))


def copies(strategy, variable):
  return [np.array(each) for each in strategy.experimental_local_results(variable.value)]


def test_the_backbone_is_trained_from_unfreeze_step_on(mirrored):
  """Its batch normalisation stays frozen."""
  task = make_task(fine_tune=True, unfreeze_step=1, backbone=normalised())
  rates = {"head": lambda: keras.optimizers.SGD(RATE), "all": lambda: keras.optimizers.SGD(0.5)}
  trainer = make_trainer(task, mirrored(2), optimizer=rates)
  backbone = backbone_of(task.model)
  before = backbone.get_weights()
  trainer.train(tf.constant(1))
  for one, other in zip(before, backbone.get_weights(), strict=True):
    np.testing.assert_array_equal(one, other)
  head = task.model.get_layer("logits").get_weights()
  trainer.train(tf.constant(1))
  moved, *same = backbone.get_weights()
  assert np.abs(moved - before[0]).max() > 1e-6
  np.testing.assert_array_equal(same, before[1:])  # batch normalisation
  assert np.abs(task.model.get_layer("logits").get_weights()[0] - head[0]).max() > 1e-6


# ---- Networks ----


MOBILENET = {"backbone": mobilenet_v2(), "units": (512,), "input_shape": (224, 224, 3)}


@pytest.mark.parametrize(
  ("options", "parameters", "trained"),
  [
    (MOBILENET, 2_914_369, 1280 * 512 + 512 + 512 + 1),
    (MOBILENET | {"fine_tune": True}, 2_914_369, 2_880_257),
    ({"backbone": efficientnet_v2_s(), "units": (4080, 4080)}, 42_249_130, 21_917_770),
    ({"backbone": resnet50()}, 23_587_712 + 2048 * 10 + 10, 2048 * 10 + 10),
  ],
  ids=["mobilenet", "fine-tuned", "efficientnet", "resnet"],
)
@pytest.mark.fast(options=[MOBILENET])
def test_the_backbones_have_the_parameters_of_their_papers(options, parameters, trained):
  classes = 2 if "input_shape" in options else 10
  model = make_task(classes=classes, **options).build_model()
  assert model.count_params() == parameters
  assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == trained
  assert model.output_shape == (None, 1 if classes == 2 else 10)


def test_pixels_are_what_each_backbone_takes():
  """Against their definitions; those of keras.applications for arrays are other code."""
  pixels = IMAGES.astype(np.float64)
  expected = {
    mobilenet_v2: (pixels / 127.5 - 1, keras.applications.mobilenet_v2),
    efficientnet_v2_s: (pixels, keras.applications.efficientnet_v2),
    resnet50: (pixels[..., ::-1] - [103.939, 116.779, 123.68], keras.applications.resnet50),
  }
  for backbone, (wanted, application) in expected.items():
    task = make_task(backbone=backbone())
    batch = {"image": IMAGES, "label": LABELS}
    dataset = tf.data.Dataset.from_tensors(batch).map(lambda b, t=task: t.preprocess(b, True))
    image = next(iter(dataset))["image"]
    assert image.dtype == tf.float32
    np.testing.assert_allclose(image, wanted, atol=1e-4)
    of_keras = application.preprocess_input(IMAGES.astype(np.float32))
    np.testing.assert_allclose(image, of_keras, atol=1e-4)


def test_half_of_the_training_images_are_mirrored():
  task = make_task(flip=True, backbone=efficientnet_v2_s())
  seeds = np.stack([np.arange(EXAMPLES), np.zeros(EXAMPLES)], axis=1).astype(np.int32)
  batch = {"image": tf.constant(IMAGES), "seed": tf.constant(seeds)}
  expected = np.where(np.arange(EXAMPLES)[:, None, None, None] % 2, IMAGES[:, :, ::-1], IMAGES)
  np.testing.assert_array_equal(task.preprocess(batch, training=True)["image"], expected)
  np.testing.assert_array_equal(task.preprocess(batch, training=False)["image"], IMAGES)


# ---- Beside Keras ----


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
  """A file of a backbone, with statistics that are not 0 and 1, as after a training."""
  backbone = mobilenet_v2(alpha=0.35).build(
    include_top=False, input_shape=(SIDE, SIDE, 3), weights=None
  )
  _unlike_new(backbone)
  path = str(tmp_path_factory.mktemp("weights") / "backbone.weights.h5")
  backbone.save_weights(path)
  return path


def _unlike_new(backbone):
  for variable in backbone.non_trainable_variables:
    if "moving_mean" in variable.path:
      variable.assign(0.05 * RNG.normal(size=variable.shape))
    elif "moving_variance" in variable.path:
      variable.assign(0.1 + 0.1 * RNG.random(variable.shape))


def fitted(path, frozen):
  """The weights before and after two steps of a plain Keras program."""
  backbone = keras.applications.MobileNetV2(
    input_shape=(SIDE, SIDE, 3), alpha=0.35, include_top=False, weights=path
  )
  for layer in backbone.layers:
    layer.trainable = not (frozen or isinstance(layer, keras.layers.BatchNormalization))
  image = keras.Input([SIDE, SIDE, 3])
  pooled = keras.layers.GlobalAveragePooling2D()(backbone(image, training=False))
  model = keras.Model(image, keras.layers.Dense(1)(pooled))
  before = model.get_weights()
  model.compile(keras.optimizers.SGD(RATE), keras.losses.BinaryCrossentropy(from_logits=True))
  images = keras.applications.mobilenet_v2.preprocess_input(IMAGES.astype(np.float32))
  model.fit(images, LABELS, batch_size=EXAMPLES, epochs=2, shuffle=False, verbose=0)
  return before, model.get_weights()


@pytest.mark.fast(frozen=[True], replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("frozen", [True, False])
def test_it_trains_as_fit_does(weights, frozen, replicas):
  """A frozen backbone stays to the bit; a fine-tuned one keeps its batch normalisation."""
  before, expected = fitted(weights, frozen)
  own = {"head_only": True} if frozen else {"fine_tune": True, "unfreeze_step": 0}
  strategy = factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default()
  task = make_task(weights=weights, **own)
  trainer = make_trainer(task, strategy)
  task.network.get_layer("logits").set_weights(before[-2:])
  trainer.train(tf.constant(2))
  assert min(np.abs(before[n] - expected[n]).max() for n in (-1, -2)) > 1e-3
  for replica in runs.copies(strategy, task.network.weights):
    for new, old, other in zip(replica, before, expected, strict=True):
      np.testing.assert_allclose(new, other, atol=1e-5)
      assert np.array_equal(new, old) or not frozen or old is before[-1] or old is before[-2]


@loopwright.register
def eight_images():
  return data()


@loopwright.register
def of_one_layer():
  return normalised()


def test_a_checkpoint_has_the_head_alone_and_goes_on_to_the_bit(tmp_path):
  backbone = normalised().build(include_top=False, input_shape=(SIDE, SIDE, 3), weights=None)
  _unlike_new(backbone)
  path = tmp_path / "backbone.weights.h5"
  backbone.save_weights(path)

  def train(folder, steps):
    own = {
      "data": "@eight_images()", "backbone": "@of_one_layer()", "input_shape": (SIDE, SIDE, 3),
      "units": (3,), "weights": f"'{path}'", "head_only": True,
    }  # fmt: skip
    lines = [f"TransferLearning.{name} = {value}" for name, value in own.items()]
    run = ["run.task = @TransferLearning()", f"run.train_steps = {steps}"]
    configurables.parse([], [*lines, *run, "run.global_batch_size = 5"])
    configurables.configured(runner.run)(mode="train", model_dir=str(tmp_path / folder))
    return tf.train.load_checkpoint(str(tmp_path / folder / "checkpoints" / f"ckpt-{steps}"))

  whole, names = properties.resumed_equals_uninterrupted(train, steps=6, at=3)
  shapes = whole.get_variable_to_shape_map()
  sizes = sorted(tuple(shapes[name]) for name in names if name.startswith("model"))
  assert sizes == [(1,), (3,), (3, 1), (4, 3)]
  task = loopwright.load(tmp_path / "a").task
  for one, other in zip(backbone_of(task.network).weights, backbone.weights, strict=True):
    np.testing.assert_array_equal(one, other)
  export.export(task, str(tmp_path / "export"))
  serve = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
  x = backbone(IMAGES.astype(np.float32) / 127.5 - 1).numpy().mean(axis=(1, 2))
  one, two = (task.network.get_layer(name).get_weights() for name in ("hidden_0", "logits"))
  logits = np.maximum(x @ one[0] + one[1], 0) @ two[0] + two[1]
  served = serve(image=tf.constant(IMAGES))["probabilities"][:, 1:]
  np.testing.assert_allclose(served, 1 / (1 + np.exp(-logits)), atol=1e-6)
  backbone.layers[1].kernel.assign(0 * backbone.layers[1].kernel)
  backbone.save_weights(path)
  with pytest.raises(ConfigError, match="has other files than when the run began"):
    train("b", 9)


# ---- Export, with any backbone ----


def test_the_export_takes_raw_images(tmp_path):
  task = make_task(backbone=normalised(), classes=3)
  keras.utils.set_random_seed(4)
  task.model = task.build_model()
  kernel = task.model.get_layer("logits").kernel
  kernel.assign(100 * kernel)  # so that the images are told apart
  export.export(task, str(tmp_path / "export"))
  serve = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
  served = serve(image=tf.constant(IMAGES))["probabilities"].numpy()
  logits = task.model(IMAGES.astype(np.float32) / 127.5 - 1, training=False).numpy()
  expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  np.testing.assert_allclose(served, expected, atol=1e-6)
  assert np.ptp(served, axis=0).min() > 1e-4


def test_three_classes_are_judged_as_by_numpy():
  labels = np.array([0, 1, 2, 0, 1, 2, 2, 2], np.int32)
  task = make_task(classes=3, data=data(labels=labels), backbone=normalised())
  logits = RNG.normal(size=[EXAMPLES, 3]).astype(np.float32)
  weight = RNG.uniform(0.5, 2, EXAMPLES).astype(np.float32)
  batch = {"label": tf.constant(labels), "weight": tf.constant(weight)}
  loss = task.loss(tf.constant(logits), batch)
  own = logits[np.arange(EXAMPLES), labels]
  losses = np.log(np.exp(logits).sum(axis=1)) - own
  np.testing.assert_allclose(loss.total, losses @ weight, rtol=1e-5)
  np.testing.assert_allclose(loss.weight, weight.sum(), rtol=1e-6)
  total, weights = task.metrics(tf.constant(logits), batch)["accuracy"]
  np.testing.assert_allclose(total, (logits.max(axis=1) == own) @ weight, rtol=1e-6)
  np.testing.assert_allclose(weights, weight.sum(), rtol=1e-6)


# ---- Fine-tuned ----


def test_fine_tuning_moves_weights_and_statistics_on_two_replicas(mirrored):
  """The first layer's statistics: those of each replica's rows, averaged over both."""
  strategy = mirrored(2)
  momentum = 0.75  # in place of 0.999
  trainer = make_trainer(make_task(fine_tune=True, momentum=momentum), strategy, eager=True)
  model = trainer.task.model
  backbone = backbone_of(model)
  convolution, normalisation = backbone.get_layer("Conv1"), backbone.get_layer("bn_Conv1")
  kernel = convolution.kernel.numpy()
  pixels = (IMAGES.astype(np.float32) / 127.5 - 1).reshape(2, EXAMPLES // 2, SIDE, SIDE, 3)
  outputs = [tf.nn.conv2d(part, kernel, 2, "SAME").numpy() for part in pixels]
  before = [copies(strategy, v)[0] for v in model.variables]
  metrics = trainer.train(tf.constant(1))
  assert np.isfinite(metrics["loss"])
  mean = np.mean([each.mean(axis=(0, 1, 2)) for each in outputs], axis=0)
  variance = np.mean([each.var(axis=(0, 1, 2)) for each in outputs], axis=0)
  for new in copies(strategy, normalisation.moving_mean):
    np.testing.assert_allclose(new, (1 - momentum) * mean, atol=1e-6)
  for new in copies(strategy, normalisation.moving_variance):
    np.testing.assert_allclose(new, momentum + (1 - momentum) * variance, atol=1e-6)
  still = [
    v.path for v, old in zip(model.variables, before, strict=True)
    if np.array_equal(copies(strategy, v)[1], old)
  ]  # fmt: skip
  assert not [path for path in still if "moving" in path or "kernel" in path]
  assert len(model.trainable_variables) == 52 + 2 * 52 + 2


# ---- Weights of a file ----


@pytest.mark.whole
def test_the_weights_may_be_those_of_a_whole_model(tmp_path):
  source = make_task(units=(3,), classes=5).build_model()
  _unlike_new(backbone_of(source))
  path = str(tmp_path / "whole.keras")
  source.save(path)
  model = make_task(weights=path).build_model()
  wanted = backbone_of(source).get_weights()
  for one, other in zip(backbone_of(model).get_weights(), wanted, strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.whole
def test_a_file_of_another_width_is_refused(tmp_path):
  path = str(tmp_path / "wide.weights.h5")
  backbone_of(make_task(backbone=mobilenet_v2(alpha=0.5)).build_model()).save_weights(path)
  with pytest.raises(ConfigError, match=r"strict is True, but .* in it and .* here"):
    make_task(weights=path).build_model()


def test_a_download_that_fails_is_one_line(monkeypatch, tmp_path):
  def offline(*unused, **unused_too):
    raise urllib.error.URLError("no route to host")

  monkeypatch.setattr(file_utils, "urlretrieve", offline)
  monkeypatch.setenv("KERAS_HOME", str(tmp_path))
  monkeypatch.setattr(file_utils.config, "keras_home", lambda: str(tmp_path))
  with pytest.raises(ConfigError, match=r"'imagenet', but Keras cannot download them .*its path"):
    make_task(weights="imagenet").build_model()


# ---- What is refused ----


@pytest.mark.parametrize(
  ("options", "says"),
  [
    (
      {"input_shape": (32, 32, 1)},
      r"input_shape is \(32, 32, 1\); it must be \(height, width, 3\)",
    ),
    ({"classes": 1}, "classes is 1; it must be 2 or more"),
    ({"momentum": 1.0}, "momentum is 1.0; it must be 0 or more and below 1"),
    ({"unfreeze_step": 5}, "unfreeze_step is 5, but fine_tune is False"),
    ({"head_only": True}, "a backbone that begins at random; set head_only = False, or weights"),
    (
      {"head_only": True, "fine_tune": True, "weights": "a"},
      "is trained; set head_only = False or",
    ),
  ],
)
def test_options_that_cannot_be_are_refused(options, says):
  with pytest.raises(ConfigError, match=says):
    make_task(**options)


@pytest.mark.parametrize(
  ("images", "says"),
  [
    (
      data(side=16),
      r"shape \(16, 16, 3\) but TransferLearning.input_shape is \(32, 32, 3\)",
    ),
    (
      data(labels=LABELS + 1),
      "the data has label 2, but TransferLearning.classes is 2; set it to at least 3, or correct",
    ),
  ],
)
def test_data_that_does_not_fit_is_refused(images, says):
  with pytest.raises(ConfigError, match=says):
    make_task(data=images).source("train")


def test_a_size_that_keras_refuses_is_one_line():
  with pytest.raises(ConfigError, match=r"keras.applications rejects the backbone: .*32x32"):
    make_task(input_shape=(16, 16, 3), backbone=mobilenet_v2()).build_model()


def test_only_fine_tuning_accepts_local_statistics():
  assert make_task().accepted == {}
  assert list(make_task(fine_tune=True).accepted) == ["batch-norm statistics"]
  assert transfer_learning.IMAGENET == "imagenet"
