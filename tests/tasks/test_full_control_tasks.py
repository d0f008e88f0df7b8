"""The research tasks, each against a plain loop of the same algorithm."""

import functools
import itertools
import zipfile

import keras
import numpy as np
import properties
import pytest
import runs
import tensorflow as tf
from places import central_storage
from properties import batches_of, descended, softmax
from shipped import (
  CLASSES,
  CLASSIFIER,
  EXAMPLES,
  RATE,
  RATES,
  SMALL_CNN,
  SMALL_MLP,
  STEPS,
  assert_ends_like,
  diffusion,
  distilled,
  images,
  make_trainer,
  reference,
  sam,
  simclr,
  sines,
  untrained,
  vae,
  wgan_gp,
)

from loopwright.errors import ConfigError
from loopwright.run_folder import assets
from loopwright.step import EvalStep
from loopwright.tasks import contrastive, maml
from loopwright.tasks.diffusion import CLEAREST, NOISIEST, cosine_level
from loopwright.tasks.distillation import Distillation
from loopwright.tasks.gradient_penalty import WassersteinGan
from loopwright.tasks.vae import Vae, negative_log_likelihood

# ---- Contrastive ----


def nt_xent_by_hand(embedded, pairs, temperature):
  """Equation 1, pair by pair, in float64: embedded [2n, d], pairs[i] is the other view of i."""
  z = embedded / np.linalg.norm(embedded, axis=1, keepdims=True)
  similar = np.exp(z @ z.T / temperature)
  np.fill_diagonal(similar, 0)
  return -np.log([similar[i, j] / similar[i].sum() for i, j in enumerate(pairs)])


def test_nt_xent_is_equation_1_without_padded_rows():
  rng = np.random.default_rng(0)
  first, second = rng.normal(size=[2, 6, 3])
  weight = np.float32([1, 2, 0, 1, 0, 1])
  unit = [
    tf.constant(v / np.linalg.norm(v, axis=1, keepdims=True), tf.float32) for v in (first, second)
  ]
  losses = contrastive.nt_xent(EvalStep(), *unit, tf.constant(weight), temperature=0.3).numpy()
  real = weight > 0
  both, count = np.concatenate([first[real], second[real]]), real.sum()
  pairs = [*range(count, 2 * count), *range(count)]
  expected = nt_xent_by_hand(both, pairs, 0.3).reshape(2, count).mean(0)
  np.testing.assert_allclose(losses[real], expected, rtol=1e-5)
  assert np.isfinite(losses).all()


def test_contrastive_updates_are_those_of_a_plain_loop():
  """Which looks at all pairs of the batch at once."""
  task = untrained("contrastive")
  encoder, head = task.model["encoder"], task.model["head"]
  variables = [*encoder.trainable_variables, *head.trainable_variables]

  def loss(batch):
    z = head(encoder(tf.concat([batch["first"], batch["second"]], axis=0)))
    z /= tf.norm(z, axis=1, keepdims=True)
    logits = tf.linalg.set_diag(z @ tf.transpose(z) / 0.5, tf.fill([14], -np.inf))
    other = tf.roll(tf.range(14), 7, axis=0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(other, logits))

  losses = descended(variables, batches_of(task, STEPS, 7), loss, RATE)
  assert_ends_like(variables, "contrastive")
  assert reference("contrastive").metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_nearest_example_is_another_real_one():
  found = tf.constant([[1, 0], [1, 0.1], [0, 1], [0.1, 1], [1, 0.05], [-1, 0.0]])
  label = tf.constant([3, 3, 5, 4, 7, 3])
  weight = tf.constant([1.0, 1, 1, 1, 0, 1])  # row 4, the nearest to 0 and 1, is padding

  def hits(query):
    return contrastive.nearest_agrees(EvalStep(), query, found * 2.0, label, weight).numpy()

  assert hits(found).tolist()[:4] == [True, True, False, False]
  assert not hits(found)[5]  # the angle counts: (0, 1) is the least far from (-1, 0)
  assert hits(-found).tolist()[:2] == [True, True]  # now row 5 is


def turned_by_hand(image, angle, scale, shift):
  """Each output pixel looks where it comes from, in NumPy."""
  height, width = image.shape
  centre = np.array([(width - 1) / 2, (height - 1) / 2])
  back = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) / scale
  out = np.zeros_like(image)
  for row in range(height):
    for column in range(width):
      x, y = back @ (np.array([column, row]) - centre - shift) + centre
      for j, i in ((j, i) for j in range(height) for i in range(width)):
        out[row, column] += image[j, i] * max(0, 1 - abs(x - i)) * max(0, 1 - abs(y - j))
  return out


def test_views_turn_scale_and_shift():
  rng = np.random.default_rng(1)
  image = rng.uniform(size=[3, 6, 7]).astype(np.float32)
  angle, scale = np.float32([np.pi / 2, 0.3, 0.0]), np.float32([1.0, 1.3, 0.8])
  shift = np.float32([[0, 0], [0.5, -1], [1, 2]])
  moved = contrastive.turned(
    tf.constant(image[..., None]), angle=tf.constant(angle), scale=tf.constant(scale),
    shift=tf.constant(shift),
  )  # fmt: skip
  expected = [turned_by_hand(*args) for args in zip(image, angle, scale, shift, strict=True)]
  np.testing.assert_allclose(moved[..., 0], expected, atol=1e-4)


def test_views_are_a_function_of_the_examples_seed():
  task, raw = simclr(), images().sources["train"].fetch(tf.constant([4, 9, 4], tf.int64))
  seeds = tf.constant([[3, -5], [2, 8], [3, -5]])
  batch = task.preprocess({**raw, "seed": seeds}, training=True)
  alone = task.preprocess({k: v[:1] for k, v in {**raw, "seed": seeds}.items()}, training=True)
  for name in contrastive.VIEWS:
    np.testing.assert_array_equal(batch[name][0], batch[name][2])
    np.testing.assert_array_equal(batch[name][:1], alone[name])
  assert np.abs(batch["first"] - batch["second"]).max() > 0.1


# ---- SAM ----


def sam_by_hand(task, batches, rho):
  """Algorithm 1 on one device, on the task's own model; returns (mean loss, mean rise)."""
  network = task.model
  variables, losses, rises = network.trainable_variables, [], []

  def gradient(batch):
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(
          batch["label"], network(batch["image"]), from_logits=True
        )
      )
    return tape.gradient(loss, variables), float(loss)

  for batch in batches:
    here = network.get_weights()
    slopes, loss = gradient(batch)
    length = np.sqrt(sum(np.sum(np.square(s, dtype=np.float64)) for s in slopes))
    network.set_weights([w + rho * s.numpy() / length for w, s in zip(here, slopes, strict=True)])
    slopes, nearby = gradient(batch)
    network.set_weights([w - RATE * s.numpy() for w, s in zip(here, slopes, strict=True)])
    losses.append(loss)
    rises.append(nearby - loss)
  return np.mean(losses), np.mean(rises)


def test_sam_updates_are_those_of_a_plain_loop():
  task, plain = untrained("sam"), untrained("sam")
  loss, rise = sam_by_hand(task, batches_of(task, STEPS, 7), 0.5)
  sam_by_hand(plain, batches_of(task, STEPS, 7), 0.0)
  assert_ends_like(task.model.trainable_variables, "sam")
  metrics = reference("sam").metrics
  assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
  assert metrics["sharpness"] == pytest.approx(rise, rel=1e-3)
  weights = zip(task.model.get_weights(), plain.model.get_weights(), strict=True)
  assert max(np.abs(one - other).max() for one, other in weights) > 1e-3


def test_sam_on_central_storage_trains_as_one():
  """Whose replicas share the variables that are perturbed."""
  training = properties.ended(make_trainer(sam(), central_storage()), STEPS)
  properties.n_replicas_equal_one(reference("sam"), training)


@pytest.mark.parametrize("case", ["first pass", "second pass"])
@pytest.mark.fast(case=["second pass"])
def test_sam_skips_a_step_that_is_not_finite_and_restores_the_weights(case, mirrored):
  """To the bit; an infinite image of the last replica, or a point nearby that overflows."""
  task = sam(rho=0.1 if case == "first pass" else 1e38)
  [batch] = batches_of(task, 1, batch=8)
  image = batch["image"].numpy()
  if case == "first pass":
    image[-1] = np.inf
  rows = {**{k: batch[k].numpy() for k in ("label", "weight", "example_id")}, "image": image}
  dataset = tf.data.Dataset.from_tensors(rows).repeat()
  trainer = make_trainer(task, mirrored(2), batch=8, dataset_fn=lambda _: dataset)
  training = properties.ended(trainer, 2)
  assert training.metrics["skipped_steps"] == 2
  assert len(training.replicas) == 2
  for copy in training.replicas:
    np.testing.assert_array_equal(copy["default"], training.start["default"])


# ---- WGAN-GP ----


class LinearCritic:
  """D(x) = w . x, whose gradient is w everywhere: a penalty of (|w| - 1)^2."""

  def __init__(self, slope):
    self.slope = tf.Variable(slope)

  def __call__(self, image, training):
    del training
    return tf.reshape(image, [image.shape[0], -1]) @ self.slope[:, tf.newaxis]


def test_the_penalty_of_a_linear_critic_is_known():
  task, slope = wgan_gp(), np.float32([3.0, 0.0, -4.0, 0.0])
  critic = LinearCritic(slope)
  task.model = {"discriminator": critic}
  rng = np.random.default_rng(0)
  real, drawn = (tf.constant(rng.normal(size=[5, 2, 2, 1]), tf.float32) for _ in range(2))
  with tf.GradientTape() as tape:
    penalty = task.gradient_penalty(real, drawn, tf.linspace(0.0, 1.0, 5))
    total = tf.reduce_sum(penalty)
  np.testing.assert_allclose(penalty, [16.0] * 5, rtol=1e-6)
  np.testing.assert_allclose(tape.gradient(total, critic.slope), 5 * 8 * slope / 5, rtol=1e-6)


def wgan_by_hand(networks, batches, penalty):
  """Algorithm 1 with one critic update a step, the gradient of D as a Jacobian."""
  generator, critic = networks["generator"], networks["discriminator"]
  rate = RATES[WassersteinGan]
  for batch in batches:

    def critic_loss(batch):
      drawn = generator(batch["noise"])
      between = drawn + batch["mix"][:, None, None, None] * (batch["image"] - drawn)
      with tf.GradientTape() as tape:
        tape.watch(between)
        judged = critic(between)
      length = tf.norm(tf.reshape(tape.batch_jacobian(judged, between), [len(between), -1]), axis=1)
      wasserstein = critic(drawn)[:, 0] - critic(batch["image"])[:, 0]
      return tf.reduce_mean(wasserstein + penalty * tf.square(length - 1.0))

    def generator_loss(batch):
      return -tf.reduce_mean(critic(generator(batch["other_noise"]))[:, 0])

    descended(critic.trainable_variables, [batch], critic_loss, rate)
    descended(generator.trainable_variables, [batch], generator_loss, rate)


@pytest.mark.whole
def test_wgan_gp_updates_are_those_of_a_plain_loop():
  task = untrained("wgan_gp")
  wgan_by_hand(task.model, batches_of(task, STEPS, 7), penalty=2.0)
  names = ("generator", "discriminator")
  assert_ends_like([v for n in names for v in task.model[n].trainable_variables], "wgan_gp")


@pytest.mark.whole
def test_the_mix_is_uniform_and_a_function_of_the_seed():
  count = 500
  raw = {"image": tf.zeros([count, 28, 28, 1], tf.uint8)}
  seeds = tf.random.stateless_uniform([count, 2], [1, 2], -(2**31), 2**31 - 1, tf.int32)
  mix = wgan_gp().preprocess({**raw, "seed": seeds}, training=True)["mix"].numpy()
  assert np.abs(np.sort(mix) - (np.arange(count) + 0.5) / count).max() < 1.63 / np.sqrt(count)
  expected = tf.random.stateless_uniform([], seed=seeds[7] + 2)
  assert mix[7] == expected


# ---- Distillation ----


@pytest.mark.parametrize(("temperature", "hard"), [(3.0, 0.25), (1.0, 0.0), (2.0, 1.0)])
def test_the_distillation_loss_and_its_slope_are_the_papers(temperature, hard):
  """But for a constant. Slopes: h (p - y) + (1 - h) T (p_T - q_T), section 2.1 times T^2."""
  task = distilled(temperature=temperature, hard_weight=hard)
  task.model = task.build_model()
  [batch] = batches_of(task, 1, 7)
  logits = tf.constant(np.random.default_rng(0).normal(size=[7, CLASSES]), tf.float32)
  with tf.GradientTape() as tape:
    tape.watch(logits)
    loss = task.loss(logits, batch)
  taught = task.model["teacher"](batch["image"]).numpy().astype(np.float64)
  student, wanted = logits.numpy().astype(np.float64), np.eye(CLASSES)[batch["label"]]
  p, p_soft, q_soft = (
    softmax(student),
    softmax(student / temperature),
    softmax(taught / temperature),
  )
  losses = -hard * np.sum(wanted * np.log(p), 1)
  losses -= (1 - hard) * temperature**2 * np.sum(q_soft * np.log(p_soft / q_soft), 1)
  assert loss.total.numpy() == pytest.approx(losses.sum(), rel=1e-5)
  slopes = hard * (p - wanted) + (1 - hard) * temperature * (p_soft - q_soft)
  np.testing.assert_allclose(tape.gradient(loss.total, logits), slopes, atol=1e-5)


def test_distillation_updates_are_those_of_a_plain_loop():
  """By Keras's losses."""
  task = untrained("distillation")
  student, teacher = task.model["student"], task.model["teacher"]
  divergence = keras.losses.KLDivergence(reduction="sum_over_batch_size")
  entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  def loss(batch):
    logits = student(batch["image"])
    soft = divergence(tf.nn.softmax(teacher(batch["image"]) / 2), tf.nn.softmax(logits / 2))
    return 0.3 * entropy(batch["label"], logits) + 0.7 * 4 * soft

  descended(student.trainable_variables, batches_of(task, STEPS, 7), loss, RATE)
  assert_ends_like(student.trainable_variables, "distillation")


def test_the_teacher_stays_what_it_was():
  task = distilled()
  trainer = make_trainer(task, ema_decay=0.5)
  held = task.model["teacher"].get_weights()
  trainer.train(tf.constant(2))
  for one, other in zip(task.model["teacher"].get_weights(), held, strict=True):
    np.testing.assert_array_equal(one, other)
  assert len(trainer.parts.ema.averages) == len(task.model["student"].trainable_variables)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
  """A network, and the same one as a run's checkpoints, as a checkpoint, and as Keras files."""
  folder = tmp_path_factory.mktemp("teachers")
  network = SMALL_CNN(input_shape=(8, 8, 1), classes=CLASSES, dropout=0.2)
  saved = tf.train.Checkpoint(model=network, global_step=tf.Variable(7))
  network.save(folder / "whole.keras")
  network.save_weights(folder / "only.weights.h5")
  saved.write(str(folder / "run" / "checkpoints" / "ckpt-20"))
  held = network.get_weights()
  network.set_weights([0 * w for w in held])
  saved.write(str(folder / "run" / "checkpoints" / "ckpt-3"))  # older
  return folder, held


@pytest.mark.parametrize(
  "name", ["run", "run/checkpoints", "run/checkpoints/ckpt-20", "whole.keras", "only.weights.h5"]
)
def test_the_teacher_is_what_was_saved(name, teachers):
  folder, held = teachers
  task = Distillation(
    data=images(), teacher=str(folder / name), network=SMALL_MLP, **CLASSIFIER,
    teacher_network=functools.partial(SMALL_CNN, dropout=0.2),
  )  # fmt: skip
  kept = assets.fitted(task)
  assert kept == assets.fitted(task)  # the same bytes
  task.use(kept)
  model = task.build_model()
  for one, other in zip(model["teacher"].get_weights(), held, strict=True):
    np.testing.assert_array_equal(one, other)
  assert model["teacher"].trainable_variables == []


@pytest.mark.parametrize("name", ["run", "whole.keras", "only.weights.h5"])
def test_a_teacher_of_another_shape_is_refused(name, teachers):
  task = Distillation(
    data=images(), teacher=str(teachers[0] / name), teacher_network=SMALL_MLP, **CLASSIFIER
  )
  with pytest.raises(ConfigError, match=r"must hold the weights of 'mlp' with \d+ parameters"):
    task.fit()


def test_a_teacher_with_more_layers_is_refused(teachers):
  """Keras would load those that both have."""
  deeper = SMALL_MLP(input_shape=(8, 8, 1), classes=CLASSES)
  deeper = keras.Sequential([keras.Input([8, 8, 1]), *deeper.layers, keras.layers.Dense(CLASSES)])
  for name in ("deeper.keras", "deeper.weights.h5"):
    path = teachers[0] / name
    (deeper.save if name.endswith(".keras") else deeper.save_weights)(path)
    task = Distillation(data=images(), teacher=str(path), teacher_network=SMALL_MLP, **CLASSIFIER)
    with pytest.raises(ConfigError, match=r"it has 6 variables, not 4.*the weights of 'mlp' with"):
      task.fit()


def test_the_model_that_a_teachers_file_describes_is_not_built(teachers, tmp_path):
  """A text of 30 bytes can describe gigabytes."""
  path = tmp_path / "huge.keras"
  with zipfile.ZipFile(teachers[0] / "whole.keras") as sound, zipfile.ZipFile(path, "w") as other:
    for name in sound.namelist():
      content = sound.read(name)
      if name == "config.json":
        content = content.replace(b'"filters": ', b'"filters": 999999999')
      other.writestr(name, content)
  task = Distillation(
    data=images(), teacher=str(path), teacher_network=functools.partial(SMALL_CNN, dropout=0.2),
    **CLASSIFIER,
  )  # fmt: skip
  task.use(assets.fitted(task))
  for one, other in zip(task.build_model()["teacher"].get_weights(), teachers[1], strict=True):
    np.testing.assert_array_equal(one, other)


def test_a_teacher_that_is_not_there_is_refused():
  task = Distillation(data=images(), teacher="runs/nothing", **CLASSIFIER)
  with pytest.raises(ConfigError, match="'runs/nothing', where no checkpoint is; train"):
    task.fit()


# ---- MAML ----


def maml_by_hand(task, batches, rate, *, second_order=True, steps=1):
  """Wave by wave, by `stateless_call` with weights of its own; returns the final weights."""
  model = task.model
  values = [tf.Variable(v.numpy()) for v in model.trainable_variables]

  def error(weights, x, y):
    outputs, _ = model.stateless_call(weights, [], x[:, None])
    return tf.reduce_mean(tf.square(outputs[:, 0] - y))

  for batch in batches:
    with tf.GradientTape() as outer:
      losses = []
      for wave in range(len(batch["query_x"])):
        adapted = [tf.convert_to_tensor(v) for v in values]
        for _ in range(steps):
          with tf.GradientTape() as inner:
            inner.watch(adapted)
            loss = error(adapted, batch["support_x"][wave], batch["support_y"][wave])
          slopes = inner.gradient(loss, adapted)
          if not second_order:
            slopes = [tf.constant(s.numpy()) for s in slopes]
          adapted = [w - rate * s for w, s in zip(adapted, slopes, strict=True)]
        losses.append(error(adapted, batch["query_x"][wave], batch["query_y"][wave]))
      loss = tf.add_n(losses) / len(losses)
    for value, slope in zip(values, outer.gradient(loss, values), strict=True):
      value.assign_sub(RATE * slope)
  return values


@pytest.mark.whole
def test_maml_updates_are_those_of_a_plain_loop():
  task = untrained("maml")
  assert_ends_like(maml_by_hand(task, batches_of(task, STEPS, 7), 0.1), "maml")


@pytest.mark.parametrize(("steps", "second_order"), [(1, False), (2, True)])
@pytest.mark.fast(steps=[1])
def test_variants_of_maml_have_the_gradient_of_a_plain_loop(steps, second_order):
  task = sines(inner_steps=steps, second_order=second_order)
  task.model, batches = untrained("maml").model, batches_of(task, 1, 7)
  variables = task.model.trainable_variables
  with tf.GradientTape() as tape:
    loss = task.loss(task.forward(batches[0], training=True), batches[0])
    mean = loss.total / loss.weight
  slopes = tape.gradient(mean, variables)
  moved = [v - RATE * slope for v, slope in zip(variables, slopes, strict=True)]
  expected, other = (
    maml_by_hand(task, batches, 0.1, steps=steps, second_order=order)
    for order in (second_order, not second_order)
  )
  for one, by_hand in zip(moved, expected, strict=True):
    np.testing.assert_allclose(one, by_hand, rtol=0, atol=2e-6)
  gaps = [np.abs(a - b).max() for a, b in zip(expected, other, strict=True)]
  assert max(gaps) > 1e-3  # the second order is there to see


def test_waves_are_those_of_their_ids():
  source = maml.Sinusoids(num_examples=1000, seed=2, support=3, query=2)
  ids = tf.constant([0, 999, 5, 0], tf.int64)
  batch = {name: value.numpy().astype(np.float64) for name, value in source.fetch(ids).items()}
  for row, number in enumerate(ids.numpy()):
    u = tf.random.stateless_uniform([7], seed=[2, number]).numpy().astype(np.float64)
    x = 10 * u[2:] - 5
    y = (0.1 + 4.9 * u[0]) * np.sin(x - np.pi * u[1])
    for part, rows in (("support", slice(0, 3)), ("query", slice(3, None))):
      np.testing.assert_allclose(batch[f"{part}_x"][row], x[rows], atol=1e-5)
      np.testing.assert_allclose(batch[f"{part}_y"][row], y[rows], atol=1e-5)
  other = maml.Sinusoids(num_examples=1000, seed=1, support=3, query=2).fetch(ids)
  assert np.abs(other["query_x"] - batch["query_x"]).min() > 1e-4


@pytest.mark.whole
def test_an_evaluation_logs_the_loss_after_each_number_of_updates():
  task = sines()
  keras.utils.set_random_seed(3)
  results = runs.make_evaluator(task, tf.distribute.get_strategy(), batch=5).evaluate()
  rows = task.source("eval").fetch(tf.range(EXAMPLES, dtype=tf.int64))
  start, expected = task.model.get_weights(), {0: [], 1: [], 2: []}
  for wave in range(EXAMPLES):
    part = {name: value[wave].numpy()[:, None] for name, value in rows.items()}
    task.model.set_weights(start)
    task.model.compile(keras.optimizers.SGD(0.1), loss="mse")
    for done in range(3):
      if done:  # Keras's own update of the whole support set at once
        task.model.train_on_batch(part["support_x"], part["support_y"])
      error = task.model(part["query_x"]).numpy() - part["query_y"]
      expected[done].append(np.mean(error.astype(np.float64) ** 2))
  means = {done: np.mean(values) for done, values in expected.items()}
  named = {"loss_after_0": means[0], "loss": means[1], "loss_after_2": means[2]}
  assert results == pytest.approx(named, rel=1e-4)


# ---- What is served ----


def test_maml_serves_what_it_evaluates():
  task = sines()
  task.model = task.build_model()
  batch = task.source("eval").fetch(tf.constant([1, 2], tf.int64))
  names = ("support_x", "support_y", "query_x")
  served = task.export_signature()(*[batch[name] for name in names])
  np.testing.assert_allclose(served["query_y"], task.forward(batch, training=False), atol=1e-6)


def test_contrastive_serves_representations():
  task = simclr()
  task.model = task.build_model()
  raw = images().sources["eval"].fetch(tf.constant([3, 1], tf.int64))["image"]
  expected = task.model["encoder"](raw.numpy() / np.float32(255))
  np.testing.assert_allclose(task.export_signature()(raw)["representation"], expected, atol=1e-6)


# ---- Diffusion ----


@pytest.mark.whole
def test_diffusion_updates_are_those_of_a_plain_loop():
  """Of the mixture cos(a) image + sin(a) noise, the velocity cos(a) noise - sin(a) image."""
  task = untrained("diffusion")
  variables = task.model.trainable_variables

  def loss(batch):
    place = batch["place"].numpy().astype(np.float64)
    tangent = np.tan(np.pi / 2 * np.maximum(1e-4, (place - 0.25) / 0.75))
    level = np.clip(2 * np.log(tangent), CLEAREST, NOISIEST)
    few = CLEAREST + (NOISIEST - CLEAREST) * place / 0.25
    level = np.where(place < 0.25, few, level).astype(np.float32)
    angle = np.arctan(np.exp(level / 2))
    cos, sin = (f(angle).astype(np.float32).reshape([-1, 1, 1, 1]) for f in (np.cos, np.sin))
    mixture = cos * batch["image"] + sin * batch["noise"]
    velocity = cos * batch["noise"] - sin * batch["image"]
    return tf.reduce_mean(tf.square(task.model([mixture, tf.constant(level)]) - velocity))

  losses = descended(variables, batches_of(task, STEPS, 7), loss, RATE)
  assert_ends_like(variables, "diffusion")
  assert reference("diffusion").metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


class Oracle:
  """In the place of the network: the exact velocity for images that are all of one value."""

  def __init__(self, value):
    self.value, self.calls = value, 0

  def __call__(self, inputs, training):
    mixture, level = inputs
    self.calls += 1
    image = tf.sqrt(tf.sigmoid(-level))[:, None, None, None]
    noise = tf.sqrt(tf.sigmoid(level))[:, None, None, None]
    return (image * mixture - self.value) / noise


def test_the_sampler_keeps_the_noise_and_lowers_its_level():
  task, value = diffusion(), 0.5
  task.model = Oracle(value)
  noise = tf.random.stateless_normal([2, 28, 28, 1], [1, 2])
  drawn = task.export_signature()(noise)["image"].numpy() * 2 - 1
  image = {level: 1 / np.sqrt(1 + np.exp(level)) for level in (CLEAREST, NOISIEST)}
  left = {level: np.sqrt(1 - factor**2) for level, factor in image.items()}
  held = (noise - image[NOISIEST] * value) / left[NOISIEST]
  np.testing.assert_allclose(drawn, image[CLEAREST] * value + left[CLEAREST] * held, atol=1e-5)


def test_the_bound_of_a_network_that_knows_the_image():
  """No bits but those of the prior and of the rounding at the clearest level, by quadrature."""
  task = diffusion()
  value = 2 * 100 / 255 - 1
  task.model, count = Oracle(value), 3
  batch = {
    "image": tf.fill([count, 28, 28, 1], value),
    "noise": tf.random.stateless_normal([count, 28, 28, 1], [1, 2]),
    "place": tf.constant([0.2, 0.5, 0.9]),
  }
  left = 1 / (1 + np.exp(NOISIEST))
  prior = 0.5 * (left * value**2 + (1 - left) - 1 - np.log(1 - left))
  x = np.linspace(-8, 8, 4001)
  density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
  cumulative = np.cumsum(density) * (x[1] - x[0])
  half = 1 / 255 / np.exp(CLEAREST / 2)
  inside = np.interp(x + half, x, cumulative) - np.interp(x - half, x, cumulative)
  rounding = -np.sum(density * np.log(np.maximum(inside, 1e-12))) * (x[1] - x[0])
  bits = (prior + rounding) / np.log(2)
  assert float(np.mean(task._bits(batch))) == pytest.approx(bits, abs=0.01)


def test_levels_fall_from_noise_to_image():
  levels = cosine_level(tf.constant([0.0, 0.25, 0.5, 1.0])).numpy()
  assert levels == pytest.approx([CLEAREST, 2 * np.log(np.tan(np.pi / 8)), 0.0, NOISIEST], abs=1e-5)


def test_places_are_evenly_spread_in_evaluation():
  task = diffusion()
  batch = {
    "image": tf.zeros([100, 28, 28, 1], tf.uint8), "example_id": tf.range(100, dtype=tf.int64),
  }  # fmt: skip
  place = np.sort(task.preprocess(batch, training=False)["place"])
  assert np.abs(place - (np.arange(100) + 0.5) / 100).max() < 0.02


# ---- VAE ----


def test_vae_updates_are_those_of_a_plain_loop():
  """The weight of the divergence is step / 6 up to 1."""
  task, steps = untrained("vae"), itertools.count()
  encoder, decoder = task.model["encoder"], task.model["decoder"]
  variables = [*encoder.trainable_variables, *decoder.trainable_variables]

  def loss(batch):
    code = encoder(batch["image"])
    mean, deviation = code[:, :3], tf.exp(code[:, 3:])
    drawn = decoder(mean + deviation * batch["noise"])
    pixels = negative_log_likelihood(batch["image"], drawn[..., :1], drawn[..., 1:])
    divergence = 0.5 * (mean**2 + deviation**2 - 1 - 2 * tf.math.log(deviation))
    return (tf.reduce_sum(pixels) + min(1, next(steps) / 6) * tf.reduce_sum(divergence)) / 7

  losses = descended(variables, batches_of(task, STEPS, 7), loss, RATES[Vae])
  assert_ends_like(variables, "vae")
  assert reference("vae").metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(("annealing_steps", "weight"), [(6, 0.5), (2, 1.0), (0, 1.0)])
def test_the_divergence_is_annealed(annealing_steps, weight):
  outputs = {"distortion": tf.constant([5.0, 7.0]), "divergence": tf.constant([2.0, 4.0])}
  batch = {"step": tf.constant([3, 3], tf.int64), "weight": tf.constant([1.0, 0.5])}
  loss = vae(annealing_steps=annealing_steps).loss(outputs, batch)
  assert float(loss.total) == 5 + 2 * weight + 0.5 * (7 + 4 * weight)
  elbo, _ = vae().metrics(outputs, batch)["elbo"]
  assert float(elbo) == -(7 + 0.5 * 11)


def test_the_likelihoods_of_all_values_sum_to_one():
  values = np.arange(256) * 2 / 255 - 1
  for mean, log_scale in ((0.1, -2.0), (-1.1, -4.0), (0.9, 0.5)):
    nats = negative_log_likelihood(
      tf.constant(values, tf.float32), tf.constant(mean), tf.constant(log_scale)
    )
    assert np.sum(np.exp(-nats.numpy().astype(np.float64))) == pytest.approx(1, abs=1e-4)
    edges = (values[:-1] + 1 / 255 - mean) / np.exp(log_scale)
    below = np.concatenate([[0], 1 / (1 + np.exp(-edges)), [1]])
    np.testing.assert_allclose(np.exp(-nats), np.diff(below), rtol=1e-2, atol=1e-6)
