"""Preference optimisation: the paper's loss in NumPy on two replicas, and a plain loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from decoder_by_hand import by_hand, with_noise, written_by_hand
from places import PLACES, strategy_of

from loopwright.errors import ConfigError
from loopwright.inputs.datasets import train_dataset
from loopwright.runs.builder import Recipe
from loopwright.tasks import preference
from loopwright.tasks.decoder import decoder

PROMPT, COUNT, BETA = 5, 4, 0.4


class Lines:
  """A corpus of letters, underscores and ends of lines."""

  def documents(self, split):
    random = np.random.default_rng(split == "eval")
    return [bytes(random.choice([97, 98, 95, 10], 60).tolist()) for _ in range(2)]


def network():
  keras.utils.set_random_seed(3)
  made = decoder(layers=1, width=16, heads=2, groups=1)
  with_noise(made)
  return made


@pytest.fixture(scope="module")
def given():
  """The network that training starts from; no test changes it."""
  return network()


@pytest.fixture(scope="module")
def start(given, tmp_path_factory):
  """A checkpoint as a run of the decoder leaves it."""
  path = tmp_path_factory.mktemp("start") / "checkpoints" / "ckpt-1"
  tf.train.Checkpoint(model=given).write(str(path))
  return str(path.parent.parent)


def make_task(start):
  """With other initial weights, so that those of `start` must have been read."""
  task = preference.Preferred(
    corpus=Lines(), start=start, beta=BETA, prompt_bytes=PROMPT, continued_bytes=COUNT,
    network=lambda: decoder(layers=1, width=16, heads=2, groups=1),
  )  # fmt: skip
  task.use(task.fit())
  return task


@pytest.mark.parametrize("split", ["train", "eval"])
def test_of_two_continuations_of_a_prompt_that_with_more_underscores_is_chosen(split):
  documents = Lines().documents(split)
  found = preference.pairs(documents, prompt=PROMPT, count=COUNT)
  begun = []
  for chosen, rejected in zip(found["chosen"], found["rejected"], strict=True):
    assert chosen[:PROMPT].tolist() == rejected[:PROMPT].tolist()
    ends = chosen[PROMPT:].tobytes(), rejected[PROMPT:].tobytes()
    assert ends[0].count(b"_") > ends[1].count(b"_")
    assert chosen[PROMPT - 1] == ord("\n")
    whole = [each.tobytes() in document for each in (chosen, rejected) for document in documents]
    assert any(whole)
    assert all(any(b"\n" + end in document for document in documents) for end in ends)
    begun += ends
  assert len(begun) >= 8


def log_probability(model, row):
  """Of the continuation in a row of bytes, by hand."""
  logits = by_hand(model, row[:-1])[-COUNT:]
  highest = logits.max(axis=1, keepdims=True)
  normalised = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
  return normalised[np.arange(COUNT), row[-COUNT:]].sum()


def test_two_replicas_evaluate_the_loss_of_the_paper(start, given, mirrored):
  """In batches of 4, the last of which has padding."""
  recipe = Recipe(optimizer=keras.optimizers.SGD, global_batch_size=2, eval_batch_size=4)
  trainer = recipe.trainer(make_task(start), mirrored(2))
  policy, reference = (trainer.task.model[name] for name in ("policy", "reference"))
  for one, other in zip(reference.get_weights(), given.get_weights(), strict=True):
    np.testing.assert_array_equal(one, other)
  for number, variable in enumerate(policy.trainable_variables):
    noise = np.random.default_rng([9, number]).normal(size=variable.shape) * 0.1
    variable.assign(variable + noise)
  found = recipe.evaluator(trainer).evaluate()
  made = preference.pairs(Lines().documents("eval"), prompt=PROMPT, count=COUNT)
  chosen, rejected = (
    np.array([log_probability(policy, row) - log_probability(reference, row) for row in made[name]])
    for name in ("chosen", "rejected")
  )
  odds = 1 / (1 + np.exp(-BETA * (chosen - rejected)))
  written, _ = written_by_hand(policy, made["chosen"][:, :PROMPT], COUNT)
  expected = {
    "loss": -np.log(odds).mean(), "margin": BETA * (chosen - rejected).mean(),
    "accuracy": (odds > 0.5).mean(), "chosen_ratio": chosen.mean(),
    "rejected_ratio": rejected.mean(), "underscores": (written == ord("_")).sum(axis=1).mean(),
  }  # fmt: skip
  assert len(odds) % 4
  assert 0 < expected["accuracy"] < 1
  assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def adam():
  return keras.optimizers.Adam(0.01)


def plain_loop(start, steps):
  """Adam of Keras on whole batches; the references' log-probabilities are computed beforehand."""
  task, model, optimizer = make_task(start), network(), adam()

  @tf.function
  def of(model, text):
    text = tf.cast(text, tf.int32)
    position = tf.tile(tf.range(PROMPT + COUNT - 1)[tf.newaxis], [len(text), 1])
    logits = model({"token": text[:, :-1], "position": position})
    each = keras.losses.sparse_categorical_crossentropy(text[:, 1:], logits, from_logits=True)
    return -tf.reduce_sum(each[:, PROMPT - 1 :], axis=1)

  batches = list(train_dataset(task.source("train"), global_batch_size=5, seed=1).take(steps))
  names = ("chosen", "rejected")
  fixed = [[of(model, batch[name]) for name in names] for batch in batches]
  for batch, (chosen, rejected) in zip(batches, fixed, strict=True):
    with tf.GradientTape() as tape:
      gained = of(model, batch["chosen"]) - chosen - of(model, batch["rejected"]) + rejected
      loss = -tf.reduce_mean(tf.math.log_sigmoid(BETA * gained))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply([tf.convert_to_tensor(each) for each in gradients], model.trainable_variables)
  return model.get_weights()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fast(place=["mirrored x2"])
def test_training_is_that_of_a_plain_loop_and_the_reference_stays(place, start, given, mirrored):
  recipe = Recipe(optimizer=adam, global_batch_size=5, seed=1)
  trainer = recipe.trainer(make_task(start), strategy_of(place, mirrored))
  trainer.train(tf.constant(5))
  model = trainer.task.model
  for one, other in zip(model["reference"].get_weights(), given.get_weights(), strict=True):
    np.testing.assert_array_equal(one, other)
  for one, other in zip(model["policy"].get_weights(), plain_loop(start, 5), strict=True):
    assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max()


def test_texts_without_a_preference_are_refused():
  with pytest.raises(ConfigError, match="the documents of 'train' have no two lines with 64 bytes"):
    preference.Preferred(corpus=Lines(), start="runs/none").source("train")
