"""Image classification: its data, augmentation, networks, loss and export, against NumPy."""

import functools
import gzip
import shutil

import keras
import numpy as np
import properties
import pytest
import tensorflow as tf
from properties import softmax
from runs import make_evaluator, make_trainer

from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.tasks import image_classification
from loopwright.tasks.image_classification import ImageClassification, ImageData, cnn, mlp
from loopwright.tools.exports import export

RNG = np.random.default_rng(8)
SHAPE, CLASSES, EXAMPLES = (3, 2, 1), 4, 10
IMAGES = RNG.integers(0, 256, [EXAMPLES, *SHAPE]).astype(np.uint8)
LABELS = RNG.integers(0, CLASSES, EXAMPLES).astype(np.int32)
LABELS[:CLASSES] = range(CLASSES)


def data(images=IMAGES, labels=LABELS):
  source = ArraySource(features={"image": images, "label": labels})
  sources = {"train": source, "eval": source}
  return ImageData(sources=sources, image_shape=images.shape[1:], labels=int(labels.max()) + 1)


def regression(*, input_shape, classes):
  """Softmax regression, from zeros."""
  model = mlp(input_shape=input_shape, classes=classes, units=())
  model.set_weights([np.zeros_like(w) for w in model.get_weights()])
  return model


def make_task(**options):
  small = {"data": data(), "network": regression, "input_shape": SHAPE, "classes": CLASSES}
  return ImageClassification(**{**small, **options})


def everything_of(source):
  return {k: v.numpy() for k, v in source.fetch(tf.range(source.num_examples)).items()}


# ---- Training ----


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2])
def test_softmax_regression_trains_and_evaluates_as_in_numpy(replicas, mirrored):
  """In batches of 5, which 2 and 3 replicas pad to 6."""
  strategy, task, steps, rate = mirrored(replicas), make_task(), 6, 0.5
  sgd = functools.partial(keras.optimizers.SGD, rate)
  trainer = make_trainer(task, strategy, batch=5, optimizer=sgd, data={"shuffle": False})
  x = IMAGES.reshape([EXAMPLES, -1]) / 255.0
  reference = properties.SoftmaxRegression(x, LABELS, task.model.get_weights())
  properties.update_of_float64_numpy(trainer, reference, batch=5, steps=steps, rate=rate, atol=1e-6)
  evaluator = make_evaluator(task, strategy, batch=4)
  properties.evaluation_of_float64_numpy(evaluator, reference, EXAMPLES)


def test_examples_count_by_their_weights():
  logits = RNG.normal(size=[5, CLASSES]).astype(np.float32) * 3
  labels, weight = LABELS[:5], np.float32([1.0, 0.0, 2.5, 0.5, 1.0])
  batch = {"label": tf.constant(labels), "weight": tf.constant(weight)}
  losses = -np.log(softmax(logits)[np.arange(5), labels])
  loss = make_task().loss(tf.constant(logits), batch)
  assert [float(part) for part in loss] == pytest.approx([losses @ weight, 5.0], rel=1e-5)
  metrics = make_task().metrics(tf.constant(logits), batch)
  hits = logits.argmax(axis=1) == labels
  assert {name: [float(part) for part in pair] for name, pair in metrics.items()} == {
    "accuracy": pytest.approx([hits @ weight, 5.0])
  }


# ---- Preprocessing ----


def augmented(images, seeds, **options):
  batch = {"image": tf.constant(images), "seed": tf.constant(seeds), "label": tf.constant(0)}
  task = make_task(**options)
  return task.preprocess(batch, training=True)["image"].numpy()


def real_seeds(count, seed=0):
  """The seeds of the first positions of a training run."""
  source = ArraySource(features={"x": np.zeros([count], np.float32)})
  seen = datasets.train_dataset(
    source,
    global_batch_size=count,
    seed=seed,
    preprocess=lambda batch, training: {**batch, "kept": batch["seed"]},
  )
  return next(seen.as_numpy_iterator())["kept"]


@pytest.mark.parametrize("training", [True, False])
def test_images_are_scaled_to_0_to_1(training):
  batch = {"image": tf.constant(IMAGES), "label": tf.constant(LABELS), "seed": tf.zeros([10, 2])}
  scaled = make_task().preprocess(batch, training)
  np.testing.assert_allclose(scaled["image"], IMAGES / 255.0, rtol=1e-6)
  assert scaled["image"].dtype == tf.float32
  assert scaled["label"] is batch["label"]


def test_evaluation_sees_images_as_they_are():
  batch = make_task(flip=True, shift=2).preprocess({"image": tf.constant(IMAGES)}, training=False)
  np.testing.assert_allclose(batch["image"], IMAGES / 255.0, rtol=1e-6)


def all_shifts(image, most):
  """(down, right) -> the image moved by so many pixels, zeros coming in."""
  height, width = image.shape[:2]
  moved = {}
  for down in range(-most, most + 1):
    for right in range(-most, most + 1):
      blank = np.zeros_like(image)
      for row in range(height):
        for column in range(width):
          if 0 <= row - down < height and 0 <= column - right < width:
            blank[row, column] = image[row - down, column - right]
      moved[down, right] = blank
  return moved


@pytest.mark.parametrize(("most", "flip"), [(0, True), (1, False), (1, True), (2, True)])
def test_every_flip_and_shift_is_equally_likely(most, flip):
  """One image under the seeds of a run; chi-squared stays below its mean + 5 deviations."""
  image = (np.arange(4 * 5 * 2).reshape([4, 5, 2]) + 100).astype(np.uint8)
  variants = {
    (*place, mirror): (moved[:, ::-1] if mirror else moved) / np.float32(255)
    for place, moved in all_shifts(image, most).items()
    for mirror in ([False, True] if flip else [False])
  }
  count = 4000
  results = augmented(np.stack([image] * count), real_seeds(count), shift=most, flip=flip)
  found = [
    np.isclose(results, variant, atol=1e-6).all(axis=(1, 2, 3)).sum()
    for variant in variants.values()
  ]
  assert sum(found) == count  # each is one of them and, as all differ, of one only
  mean = count / len(variants)
  chi_squared = sum((n - mean) ** 2 / mean for n in found)
  freedom = len(variants) - 1
  assert chi_squared < freedom + 5 * np.sqrt(2 * freedom)


def test_augmentation_is_a_function_of_each_examples_seed():
  seeds = real_seeds(EXAMPLES)
  whole = augmented(IMAGES, seeds, shift=1, flip=True)
  order = RNG.permutation(EXAMPLES)
  np.testing.assert_array_equal(
    augmented(IMAGES[order], seeds[order], shift=1, flip=True), whole[order]
  )
  others = augmented(IMAGES, real_seeds(EXAMPLES, seed=1), shift=1, flip=True)
  assert (others != whole).any()


@pytest.mark.parametrize(
  "given", [{"flip": True, "shift": 2}, {"flip": True}, {"flip": False, "shift": 1}]
)
def test_large_images_move_like_small_ones(given, monkeypatch):
  seeds = tf.constant(real_seeds(EXAMPLES))
  small = image_classification.moved(tf.constant(IMAGES), seeds, **given)
  monkeypatch.setattr(image_classification, "_LARGE", 1)
  np.testing.assert_array_equal(
    image_classification.moved(tf.constant(IMAGES), seeds, **given), small
  )
  assert (small != IMAGES).numpy().any()


# ---- Networks ----


def silu(x):
  return x / (1 + np.exp(-x))


def relu(x):
  return np.maximum(x, 0)


def random_weights(model):
  weights = [RNG.normal(size=w.shape) for w in model.get_weights()]
  model.set_weights(weights)
  return [w.astype(np.float32).astype(np.float64) for w in weights]


def test_the_mlp_is_dense_layers_with_relu():
  model = mlp(input_shape=SHAPE, classes=CLASSES, units=(5, 3), dropout=0.5)
  k1, b1, k2, b2, k3, b3 = random_weights(model)
  x = RNG.normal(size=[6, *SHAPE]).astype(np.float32)
  hidden = relu(relu(x.reshape([6, -1]).astype(np.float64) @ k1 + b1) @ k2 + b2)
  np.testing.assert_allclose(model(x, training=False), hidden @ k3 + b3, rtol=1e-4, atol=1e-4)


def convolved(x, kernel, bias):
  """A 3 x 3 convolution with a border of zeros."""
  padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
  height, width = x.shape[1:3]
  windows = [
    padded[:, i : i + height, j : j + width] @ kernel[i, j] for i in range(3) for j in range(3)
  ]
  return sum(windows) + bias


def pooled(x):
  """The maximum of each 2 x 2 block; an odd row or column at the end is left out."""
  n, height, width, channels = x.shape
  x = x[:, : height // 2 * 2, : width // 2 * 2]
  return x.reshape([n, height // 2, 2, width // 2, 2, channels]).max(axis=(2, 4))


@pytest.mark.parametrize(("activation", "function"), [("relu", relu), ("silu", silu)])
def test_the_cnn_is_convolutions_and_poolings_then_dense_layers(activation, function):
  options = {"filters": (3, 2), "units": 6, "activation": activation, "dropout": 0.5}
  model = cnn(input_shape=(6, 9, 2), classes=CLASSES, **options)
  k1, b1, k2, b2, k3, b3, k4, b4 = random_weights(model)
  x = RNG.normal(size=[3, 6, 9, 2]).astype(np.float32)
  y = x.astype(np.float64)
  for kernel, bias in ((k1, b1), (k2, b2)):
    y = pooled(function(convolved(y, kernel, bias)))
  y = function(y.reshape([3, -1]) @ k3 + b3) @ k4 + b4
  np.testing.assert_allclose(model(x, training=False), y, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("make", [mlp, cnn])
def test_dropout_is_for_training_and_off_by_default(make):
  x = RNG.normal(size=[3, 4, 4, 1]).astype(np.float32)
  changed = []
  for options in ({}, {"dropout": 0.5}):
    model = make(input_shape=(4, 4, 1), classes=CLASSES, **options)
    changed.append(bool(np.abs(model(x, training=True) - model(x, training=False)).max() > 1e-6))
  assert changed == [False, True]


@pytest.mark.parametrize("network", [mlp, cnn])
def test_logits_are_float32_in_mixed_precision(network, policy):
  policy("mixed_bfloat16")
  task = make_task(network=network, input_shape=(4, 4, 1))
  task.model = task.build_model()
  assert task.model.layers[0].compute_dtype == "bfloat16"
  batch = {"image": tf.ones([2, 4, 4, 1])}
  assert task.model(batch["image"]).dtype == tf.float32
  logits = task.forward(batch, training=False)
  assert (logits.dtype, logits.shape) == (tf.float32, (2, CLASSES))


# ---- Data ----


@pytest.mark.parametrize("eval_fraction", [0.2, 0.25])
def test_digits_are_all_of_scikit_learns_each_in_one_split(eval_fraction):
  from sklearn.datasets import load_digits

  bunch = load_digits()
  made = image_classification.digits(eval_fraction=eval_fraction)
  parts = {split: everything_of(source) for split, source in made.sources.items()}
  assert len(parts["eval"]["label"]) == round(1797 * eval_fraction)
  assert (made.image_shape, made.labels) == ((8, 8, 1), 10)

  def rows(images, labels):
    return sorted((label, image.tobytes()) for label, image in zip(labels, images, strict=True))

  scaled = np.rint(bunch.images / 16 * 255).astype(np.uint8)
  assert (scaled.min(), scaled.max()) == (0, 255)
  joined = {k: np.concatenate([parts[s][k] for s in parts]) for k in ("image", "label")}
  assert joined["image"].dtype == np.uint8
  assert rows(joined["image"], joined["label"]) == rows(scaled, bunch.target)


def test_the_split_of_digits_is_random_and_a_function_of_the_seed():
  labels = [
    everything_of(image_classification.digits(seed=seed).sources["eval"])["label"]
    for seed in (0, 0, 1)
  ]
  assert labels[0].tolist() == labels[1].tolist() != labels[2].tolist()
  # The file is in runs of 0 1 2 ... 9; 359 drawn from it hold about 36 of each.
  assert set(np.bincount(labels[0], minlength=10) // 20) <= {1, 2}
  assert (np.diff(labels[0]) == 1).mean() < 0.25


def test_fewer_digits_to_train_on_are_some_of_those_of_more():
  some, more, whole = (
    everything_of(image_classification.digits(train_examples=count).sources["train"])
    for count in (30, 50, None)
  )
  assert [len(each["label"]) for each in (some, more, whole)] == [30, 50, 1438]
  for name in ("image", "label"):
    np.testing.assert_array_equal(some[name], whole[name][:30])
    np.testing.assert_array_equal(more[name], whole[name][:50])
  evaluated = [image_classification.digits(train_examples=n).sources["eval"] for n in (30, None)]
  one, other = (everything_of(source)["image"] for source in evaluated)
  np.testing.assert_array_equal(one, other)


def write_idx(folder, *, labels=None, code=8):
  """Four files like Fashion-MNIST's; returns their content."""
  written = {}
  for split, count in (("train", 6), ("t10k", 3)):
    images = RNG.integers(0, 256, [count, 28, 28]).astype(np.uint8)
    classes = np.arange(count) % 5 if labels is None else np.resize(labels, count)
    for name, array, kind in (("images-idx3", images, 8), ("labels-idx1", classes, code)):
      head = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes()
      (folder / f"{split}-{name}-ubyte").write_bytes(head + array.astype("u1").tobytes())
    written[split] = (images, classes)
  return written


def check_fashion_mnist(made, written):
  assert (made.image_shape, made.labels) == ((28, 28, 1), 5)
  for split, name in (("train", "train"), ("eval", "t10k")):
    found, (images, labels) = everything_of(made.sources[split]), written[name]
    np.testing.assert_array_equal(found["image"][..., 0], images)
    np.testing.assert_array_equal(found["label"], labels)
    assert (found["image"].dtype, found["label"].dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize("zipped", [False, True])
def test_fashion_mnist_of_a_folder(zipped, tmp_path):
  written = write_idx(tmp_path)
  for path in list(tmp_path.iterdir()) if zipped else []:
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as target:
      shutil.copyfileobj(plain, target)
    path.unlink()
  check_fashion_mnist(image_classification.fashion_mnist(directory=str(tmp_path)), written)


def test_fashion_mnist_of_debians_package(tmp_path, monkeypatch):
  monkeypatch.setattr(image_classification, "DEBIAN_FASHION_MNIST", str(tmp_path))
  written = write_idx(tmp_path)
  check_fashion_mnist(image_classification.fashion_mnist(), written)


def test_fashion_mnist_of_keras(tmp_path, monkeypatch):
  written = write_idx(tmp_path)
  monkeypatch.setattr(image_classification, "DEBIAN_FASHION_MNIST", str(tmp_path / "none"))
  downloaded = (written["train"], written["t10k"])
  monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", lambda: downloaded)
  check_fashion_mnist(image_classification.fashion_mnist(), written)


def test_fashion_mnist_from_nowhere(tmp_path, monkeypatch):
  def fail():
    raise OSError("no network")

  monkeypatch.setattr(image_classification, "DEBIAN_FASHION_MNIST", str(tmp_path / "none"))
  monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", fail)
  message = r"not in .*none and cannot be downloaded \(OSError\); .* set fashion_mnist.directory"
  with pytest.raises(ConfigError, match=message):
    image_classification.fashion_mnist()


def test_labels_below_zero_are_refused(tmp_path):
  write_idx(tmp_path, labels=[0, -3], code=9)  # signed bytes
  with pytest.raises(ConfigError, match=r"^the labels contain -3; they must be 0 or more"):
    image_classification.fashion_mnist(directory=str(tmp_path))


def test_an_image_folder_has_its_classes_and_sizes(tmp_path):
  grey = {"cat": 10, "dog": 200, "emu": 90}
  for split in ("train", "eval"):
    for name, value in grey.items():
      (tmp_path / split / name).mkdir(parents=True)
      image = tf.io.encode_png(tf.fill([6, 4, 1], tf.constant(value, tf.uint8)))
      (tmp_path / split / name / "0.png").write_bytes(image.numpy())
  folders = {split: str(tmp_path / split) for split in ("train", "eval")}
  made = image_classification.image_folder(**folders, image_size=[3, 2], channels=1)
  assert (made.image_shape, made.labels) == ((3, 2, 1), 3)
  task = make_task(data=made, classes=3)
  for split in folders:
    found = everything_of(task.source(split))
    assert found["label"].tolist() == [0, 1, 2]
    for image, value in zip(found["image"], grey.values(), strict=True):
      np.testing.assert_array_equal(image, np.full([3, 2, 1], value))


def test_data_that_does_not_fit_is_refused():
  with pytest.raises(ConfigError, match=r"have shape \(3, 2, 1\) but .*input_shape is \(2, 3, 1\)"):
    make_task(input_shape=(2, 3, 1)).source("train")
  with pytest.raises(ConfigError, match=r"has label 3, but .*classes is 3; set it to at least 4"):
    make_task(classes=CLASSES - 1).source("train")
  assert make_task(classes=CLASSES).source("eval").num_examples == EXAMPLES
  assert make_task(classes=CLASSES + 1).source("eval").num_examples == EXAMPLES


# ---- Export ----


def test_the_export_takes_raw_images_and_gives_probabilities(tmp_path):
  """As they are: without the augmentation of training."""
  task = make_task(shift=1, flip=True)
  task.model = task.build_model()
  kernel, bias = random_weights(task.model)
  export.export(task, str(tmp_path / "export"))
  serve = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
  served = serve(image=tf.constant(IMAGES))
  assert set(served) == {"probabilities"}
  expected = softmax(IMAGES.reshape([EXAMPLES, -1]) / 255.0 @ kernel + bias)
  np.testing.assert_allclose(served["probabilities"], expected, rtol=1e-4, atol=1e-6)
