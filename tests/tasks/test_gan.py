"""The GAN: its updates against a loop by hand, k to 1, on one replica and on two."""

import keras
import numpy as np
import properties
import pytest
import runs
import tensorflow as tf
from config_data import FOLDER, Witness, fashion_mnist_files
from properties import descended
from runs import make_evaluator

import launch
from loopwright.inputs.sources import ArraySource
from loopwright.tasks import gan
from loopwright.tasks.gan import Gan
from loopwright.tasks.image_classification import ImageData
from loopwright.tasks.samples import main, sheet
from loopwright.tools.exports import export

EXAMPLES, NOISE, WIDTH, RATE = 22, 4, 2, 0.05
RNG = np.random.default_rng(2)
IMAGES = RNG.integers(0, 256, [EXAMPLES, 28, 28, 1]).astype(np.uint8)
NETWORKS = ("generator", "discriminator")
SGD = dict.fromkeys(NETWORKS, lambda: keras.optimizers.SGD(RATE))


def data(images=IMAGES):
  features = {"image": images, "label": np.zeros(len(images), np.int32)}
  source = ArraySource(features=features)
  return ImageData(sources={"train": source, "eval": source}, image_shape=(28, 28, 1), labels=1)


def make_task(cls=Gan, **options):
  """A small GAN without dropout."""
  small = {"data": data(), "noise_size": NOISE, "width": WIDTH, "dropout": 0.0}
  return cls(**{**small, **options})


def make_trainer(task, *, strategy=None, batch=8, dataset_fn=None, **options):
  """Always from the same initial weights."""
  keras.utils.set_random_seed(1)
  strategy = strategy or tf.distribute.get_strategy()
  trainer = runs.make_trainer(task, strategy, batch=batch, optimizer=SGD, **options)
  trainer.dataset_fn = dataset_fn or trainer.dataset_fn
  return trainer


def train(trainer, steps):
  return trainer.train(tf.constant(steps))


def weights(models):
  return {name: models[name].get_weights() for name in NETWORKS}


def assert_close(actual, expected, *, atol):
  for name in NETWORKS:
    for one, other in zip(actual[name], expected[name], strict=True):
      np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=name)


def largest_move(before, after):
  """By network: how far its farthest weight has moved."""
  return [
    max(np.abs(a - b).max() for a, b in zip(before[n], after[n], strict=True)) for n in before
  ]


# ---- The step ----


def cross_entropy(weight, *pairs):
  """The weighted mean over examples of the sum of the cross-entropies of (target, logits)."""
  bce = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
  losses = tf.add_n([bce(tf.fill(logits.shape, target), logits) for target, logits in pairs])
  return tf.reduce_sum(losses * weight) / tf.reduce_sum(weight)


class ByHand:
  """The same two networks, trained by TensorFlow alone as in algorithm 1 of the paper."""

  def __init__(self, task):
    self.networks = {name: keras.models.clone_model(task.model[name]) for name in NETWORKS}
    for name in NETWORKS:
      self.networks[name].set_weights(task.model[name].get_weights())

  def descend(self, name, batch, loss):
    variables = self.networks[name].trainable_variables
    [value] = descended(variables, [batch], lambda batch: loss(**self.networks), RATE)
    return value

  def train_discriminator(self, batch):
    def loss(generator, discriminator):
      drawn = generator(batch["noise"])
      real, fake = discriminator(batch["image"]), discriminator(drawn)
      return cross_entropy(batch["weight"], (1.0, real), (0.0, fake))

    return self.descend("discriminator", batch, loss)

  def train_generator(self, batch):
    def loss(generator, discriminator):
      fake = discriminator(generator(batch["other_noise"]))
      return cross_entropy(batch["weight"], (1.0, fake))

    return self.descend("generator", batch, loss)


def mirrored_batches(steps):
  """Batches a b c c b a, a half of which holds a, b and c once, however it is cut in two."""
  rng = np.random.default_rng(4)
  there_and_back = [0, 1, 2, 2, 1, 0]
  for _ in range(steps):
    batch = {
      "image": rng.uniform(-1, 1, [3, 28, 28, 1]),
      "noise": rng.normal(size=[3, NOISE]),
      "other_noise": rng.normal(size=[3, NOISE]),
      "weight": rng.uniform(0.5, 2.0, 3),
    }
    yield {name: value.astype(np.float32)[there_and_back] for name, value in batch.items()}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.fast(k=[2])
def test_the_updates_are_those_of_a_loop_by_hand(k):
  steps = 3
  batches = list(mirrored_batches(steps))
  stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
  dataset = tf.data.Dataset.from_tensor_slices(stacked)
  task = make_task(discriminator_steps=k)
  trainer = make_trainer(task, batch=6, dataset_fn=lambda position: dataset)
  by_hand, before = ByHand(task), weights(task.model)
  metrics = train(trainer, steps)
  discriminator_losses, generator_losses = [], []
  for batch in batches:
    half = {name: value[: 6 // k] for name, value in batch.items()}
    mass = half["weight"].sum()
    discriminator_losses += [(by_hand.train_discriminator(half), mass) for _ in range(k)]
    generator_losses.append((by_hand.train_generator(batch), batch["weight"].sum()))
  assert_close(weights(task.model), weights(by_hand.networks), atol=1e-6)
  assert min(largest_move(before, weights(task.model))) > 1e-3
  for name, losses in zip(NETWORKS, (generator_losses, discriminator_losses), strict=True):
    means, masses = np.transpose(losses)
    expected = np.average(means, weights=masses)
    assert metrics[f"{name}_loss"] == pytest.approx(expected, rel=1e-5)
  counts = [trainer.parts.optimizers[name].optimizer.iterations.numpy() for name in NETWORKS]
  assert (counts, trainer.global_step.numpy()) == ([steps, k * steps], steps)


class Recording(Gan):
  """Remembers which examples each update is made from; to be run eagerly."""

  def __init__(self, **options):
    super().__init__(**options)
    self.updates = []

  def discriminator_loss(self, batch):
    self.updates.append(("discriminator", batch["example_id"].numpy().tolist()))
    return super().discriminator_loss(batch)

  def generator_loss(self, batch):
    self.updates.append(("generator", batch["example_id"].numpy().tolist()))
    return super().generator_loss(batch)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.fast(k=[2])
def test_each_discriminator_update_has_examples_of_its_own(k):
  task = make_task(Recording, discriminator_steps=k)
  train(make_trainer(task, eager=True), 2)
  assert [name for name, _ in task.updates] == 2 * [*k * ["discriminator"], "generator"]
  for first in (0, k + 1):
    *shares, (_, whole) = task.updates[first : first + k + 1]
    assert [len(ids) for _, ids in shares] == k * [8 // k]
    assert sorted(i for _, ids in shares for i in ids) == sorted(whole)
    assert len(set(whole)) == 8
  assert set(task.updates[k][1]).isdisjoint(task.updates[-1][1])  # 16 of 22: all from one epoch


@pytest.mark.parametrize(("batch", "k"), [(8, 1), (7, 1), (8, 2)])
@pytest.mark.fast(batch=[7])
def test_two_replicas_train_as_one(batch, k, mirrored):
  """To 1e-5, whether the batch divides or is padded; a share is the same on both."""
  one, two = (
    properties.ended(
      make_trainer(make_task(discriminator_steps=k), strategy=mirrored(n), batch=batch), 4
    )
    for n in (1, 2)
  )
  properties.n_replicas_equal_one(one, two, rel=1e-5)
  counts = properties.counts(two.trainer)
  assert counts == {"generator": 4, "discriminator": 4 * k}


@pytest.mark.whole
def test_shares_must_divide(mirrored):
  trainer = make_trainer(make_task(discriminator_steps=2), strategy=mirrored(2), batch=6)
  with pytest.raises(Exception, match="discriminator_steps is 2, but a replica has 3 rows"):
    train(trainer, 1)


# ---- Input ----


def noise_of(seed):
  return tf.random.stateless_normal([NOISE], seed=seed).numpy()


def test_noise_is_a_function_of_the_examples_seed():
  seeds = np.array([[3, -5], [2**31 - 1, 0], [3, -5]], np.int32)
  batch = make_task().preprocess({"image": tf.constant(IMAGES[:3]), "seed": seeds}, training=True)
  for row, seed in enumerate(seeds):
    np.testing.assert_array_equal(batch["noise"][row], noise_of(seed))
    np.testing.assert_array_equal(batch["other_noise"][row], noise_of(seed + np.int32(1)))
  assert not np.intersect1d(batch["noise"], batch["other_noise"]).size


def test_noise_of_evaluation_is_a_function_of_the_example():
  ids = tf.constant([7, -1, 0], tf.int64)
  batch = make_task().preprocess(
    {"image": tf.constant(IMAGES[:3]), "example_id": ids}, training=False
  )
  for row, example in enumerate([7, -1, 0]):
    np.testing.assert_array_equal(batch["noise"][row], noise_of([example, 0]))


def test_images_are_scaled_to_the_range_of_the_generator():
  image = tf.constant([0, 51, 255], tf.uint8)[:, tf.newaxis, tf.newaxis, tf.newaxis]
  batch = {"image": image, "example_id": tf.range(3, dtype=tf.int64), "label": tf.range(3)}
  scaled = make_task().preprocess(batch, training=False)
  np.testing.assert_allclose(scaled["image"][:, 0, 0, 0], [-1.0, -0.6, 1.0], atol=1e-6)
  assert scaled["image"].dtype == tf.float32
  assert scaled["label"] is batch["label"]


# ---- Evaluation and export ----


@pytest.fixture
def trained():
  trainer = make_trainer(make_task(width=3))
  train(trainer, 5)
  return trainer.task


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.fast(replicas=[2])
def test_evaluation_judges_each_image_and_a_drawn_one_once(replicas, mirrored):
  """The same drawn ones each time: 22 images in batches of 5, on two replicas of 6 rows."""
  task = make_task()
  keras.utils.set_random_seed(6)
  evaluator = make_evaluator(task, mirrored(replicas), batch=5)
  bias = task.model["discriminator"].trainable_variables[-1]

  noise = np.stack([noise_of([example, 0]) for example in range(EXAMPLES)])
  discriminator = task.model["discriminator"]
  real = discriminator(IMAGES / np.float32(127.5) - 1).numpy()[:, 0].astype(np.float64)
  fake = discriminator(task.model["generator"](noise)).numpy()[:, 0].astype(np.float64)
  middle = np.median(np.concatenate([real, fake]))
  bias.assign_sub([np.float32(middle)])  # so that the discriminator is right about some only
  real, fake = real - middle, fake - middle

  expected = {
    "loss": np.mean(np.logaddexp(0, -real) + np.logaddexp(0, fake)),
    "real_accuracy": np.mean(real > 0),
    "fake_accuracy": np.mean(fake < 0),
  }
  assert 0 < expected["real_accuracy"] + expected["fake_accuracy"] < 2
  assert evaluator.evaluate() == pytest.approx(expected, rel=1e-5)
  assert evaluator.evaluate() == pytest.approx(expected, rel=1e-5)


@pytest.mark.whole
def test_the_export_draws_images_of_0_to_1(trained, tmp_path):
  export.export(trained, str(tmp_path / "export"))
  serve = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
  noise = RNG.normal(size=[6, NOISE]).astype(np.float32)
  served = serve(noise=tf.constant(noise))
  assert set(served) == {"image"}
  drawn = trained.model["generator"](noise).numpy()
  np.testing.assert_allclose(served["image"], (drawn + 1) / 2, atol=1e-6)
  assert served["image"].shape == (6, 28, 28, 1)
  assert 0 <= served["image"].numpy().min() < served["image"].numpy().max() <= 1


def test_a_sheet_shows_what_the_generator_draws(trained):
  images = sheet(trained, rows=2, columns=3, seed=4)
  noise = tf.random.stateless_normal([6, NOISE], seed=[4, 0])
  drawn = (trained.model["generator"](noise).numpy()[..., 0] + 1) * 127.5
  assert (images.shape, images.dtype) == ((2 * 28, 3 * 28, 1), tf.uint8)
  for number, image in enumerate(drawn):
    row, column = divmod(number, 3)
    part = images[row * 28 : row * 28 + 28, column * 28 : column * 28 + 28, 0].numpy()
    assert np.abs(part.astype(float) - image).max() <= 0.501


@pytest.mark.whole
def test_the_command_writes_the_sheet_of_a_run(tmp_path, monkeypatch, capsys):
  """Of its newest checkpoint; the picture is the last weights' own."""
  fashion_mnist_files(tmp_path)
  config = FOLDER / "fashion_mnist_gan.gin"
  params = [
    f"fashion_mnist.directory = '{tmp_path}'", "Gan.width = 2", "run.train_steps = 2",
    "run.global_batch_size = 4", "run.actions = [@Witness()]",
  ]  # fmt: skip
  arguments = [f"--gin_file={config}", *(f"--gin_param={each}" for each in params)]
  model_dir, output = str(tmp_path / "run"), str(tmp_path / "samples.png")
  assert launch.main(["launch.py", *arguments, f"--model_dir={model_dir}"]) == 0
  [run] = Witness.runs
  given = ["--rows=2", "--columns=2", "--seed=3"]
  try:
    assert main([model_dir, f"--output={output}", *given]) == 0
    picture = tf.io.decode_png(tf.io.read_file(output))
    expected = sheet(run.trainer.task, rows=2, columns=2, seed=3)
    np.testing.assert_array_equal(picture, expected)
    assert main([str(tmp_path / "none"), f"--output={output}"]) == 2
    assert "has no operative_config.gin with a task" in capsys.readouterr().err
    assert main([model_dir, f"--output={output}/inside.png", *given]) == 2
    assert "inside.png" in capsys.readouterr().err
  finally:
    Witness.runs.clear()


# ---- The networks ----


@pytest.mark.parametrize(("noise", "width"), [(64, 32), (4, 2)])
def test_the_networks_have_the_layers_they_say(noise, width):
  """Counted by hand: kernels of 4 x 4, 7 x 7 x 2w features between them and the dense layer."""
  networks = {
    "generator": gan.generator(noise_size=noise, width=width),
    "discriminator": gan.discriminator(width=width, dropout=0.3),
  }
  w, features = width, 7 * 7 * 2 * width
  assert {name: network.count_params() for name, network in networks.items()} == {
    "generator": (noise + 1) * features + (16 * 2 * w + 1) * w + (16 * w + 1),
    "discriminator": (16 + 1) * w + (16 * w + 1) * 2 * w + (features + 1),
  }
  drawn = networks["generator"](tf.random.stateless_normal([3, noise], seed=[1, 2]) * 100)
  assert drawn.shape == (3, 28, 28, 1)
  assert np.abs(drawn).max() <= 1
  assert networks["discriminator"](drawn).shape == (3, 1)


def test_dropout_is_the_discriminators_in_training():
  task = make_task(dropout=0.5)
  task.model = task.build_model()
  noise, image = np.ones([2, NOISE], np.float32), IMAGES[:2] / np.float32(255)
  changed = {
    name: bool(np.abs(network(x, training=True) - network(x, training=False)).max() > 1e-6)
    for (name, network), x in zip(task.model.items(), (noise, image), strict=True)
  }
  assert changed == {"generator": False, "discriminator": True}
