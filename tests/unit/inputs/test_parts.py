"""Several training sources at once, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from input_cases import (
  arrays,
  numbered,
  one_line_error,
  reference_hash,
  stream,
)
from places import PLACES, strategy_of

from loopwright import ArraySource, Part, Sources, part, with_part
from loopwright.inputs.datasets import eval_dataset, train_dataset
from loopwright.inputs.ordering import seed_of_part
from loopwright.runs.builder import Recipe
from loopwright.tools.ledger import __main__
from loopwright.tools.ledger.recorder import Recorder

RATIO, BATCH = 3, 4


def two(main=7, other=10):
  """Sources of 7 and 10 examples; the values of the further one are negative."""
  unlabelled = ArraySource(features={"y": -np.arange(other, dtype=np.int64)})
  return Sources(numbered(main), unlabelled=Part(source=unlabelled, ratio=RATIO))


@pytest.mark.parametrize("position", [0, 3, 8])
@pytest.mark.parametrize("multiple", [1, 3])
def test_each_row_brings_its_examples_of_every_part(position, multiple):
  batches = train_dataset(
    two(), global_batch_size=BATCH, pad_multiple=multiple, position=position, shuffle=False
  )
  padding = -BATCH % multiple
  for step, batch in enumerate(arrays(batches, 6)):
    rows = position + step * BATCH + np.arange(BATCH)
    others = (rows[:, np.newaxis] * RATIO + np.arange(RATIO)) % 10
    np.testing.assert_array_equal(batch["x"][:BATCH], rows % 7)
    np.testing.assert_array_equal(batch["unlabelled/y"][:BATCH], -others)
    np.testing.assert_array_equal(batch["unlabelled/example_id"][:BATCH], others)
    np.testing.assert_array_equal(batch["weight"], [1] * BATCH + [0] * padding)
    np.testing.assert_array_equal(
      batch["unlabelled/weight"], [[1] * RATIO] * BATCH + [[0] * RATIO] * padding
    )
    assert (batch["unlabelled/example_id"][BATCH:] == -1).all()
    assert len(batch) == 6


def test_each_part_has_epochs_and_an_order_of_its_own():
  both = Sources(numbered(12), other=Part(source=numbered(12)))
  batches = arrays(train_dataset(both, global_batch_size=4, seed=5), 6)
  ids = [np.concatenate([np.ravel(b[name]) for b in batches]) for name in ("x", "other/x")]
  for of_source in ids:
    for epoch in of_source.reshape([2, 12]):
      assert sorted(epoch) == list(range(12))
  assert not np.array_equal(*ids)
  alone = train_dataset(numbered(12), global_batch_size=4, seed=5)
  np.testing.assert_array_equal(ids[0], np.concatenate([b["x"] for b in arrays(alone, 6)]))


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_make_the_whole_batch_together(workers):
  options = {"global_batch_size": BATCH, "pad_multiple": 6, "seed": 3}
  whole = arrays(train_dataset(two(), **options), 5)
  shares = [
    arrays(train_dataset(two(), **options, rows=range(i, i + 6 // workers)), 5)
    for i in range(0, 6, 6 // workers)
  ]
  for batch, *parts in zip(whole, *shares, strict=True):
    for name, value in batch.items():
      np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), value)


def test_a_stream_may_be_a_part():
  both = Sources(numbered(5), other=Part(source=stream(6), ratio=2))
  batches = arrays(train_dataset(both, global_batch_size=2, position=4, shuffle=False), 2)
  assert [b["x"].tolist() for b in batches] == [[4, 0], [1, 2]]
  assert [b["other/x"].tolist() for b in batches] == [[[2, 3], [4, 5]], [[0, 1], [2, 3]]]


def test_preprocess_sees_the_parts_and_their_seeds():
  def preprocess(batch, training):
    assert training
    assert batch["step"].shape == [6]
    assert batch["unlabelled/seed"].shape == [6, RATIO, 2]
    other = part(batch, "unlabelled")
    assert sorted(other) == ["example_id", "seed", "weight", "y"]
    return with_part(batch, "unlabelled", {"z": 2 * other["y"], "drawn": other["seed"]})

  options = {"pad_multiple": 6, "position": 8, "seed": 9, "preprocess": preprocess}
  [batch] = arrays(train_dataset(two(), global_batch_size=BATCH, **options), 1)
  np.testing.assert_array_equal(batch["unlabelled/z"], 2 * batch["unlabelled/y"])
  drawn = batch["unlabelled/drawn"][:BATCH].reshape([-1, 2]).copy().view(np.uint64)[:, 0]
  seed = seed_of_part(9, "unlabelled")
  assert drawn.tolist() == [reference_hash(p, seed, "seeds") for p in range(24, 36)]
  assert sorted(batch) == [
    "example_id", "unlabelled/drawn", "unlabelled/example_id", "unlabelled/weight",
    "unlabelled/y", "unlabelled/z", "weight", "x",
  ]  # fmt: skip
  assert (batch["unlabelled/weight"][BATCH:] == 0).all()


def test_mistakes():
  with one_line_error("Sources has one source; return it alone, or add a part"):
    Sources(numbered(3))
  with one_line_error("Sources has the part 'other', a ArraySource; it must be a Part"):
    Sources(numbered(3), other=numbered(3))
  with one_line_error("Part.ratio is 0.5; it must be a whole number of at least 1"):
    Part(source=numbered(3), ratio=0.5)
  with one_line_error("the source is a list; it must be a Source"):
    Part(source=[1])
  with one_line_error("source\\('eval'\\) is a Sources, which only source\\('train'\\) may return"):
    eval_dataset(two(), global_batch_size=2)
  with one_line_error("unknown part of the batch 'labelled'; it must be one of unlabelled"):
    part(arrays(train_dataset(two(), global_batch_size=2), 1)[0], "labelled")
  taken = ArraySource(features={"other/x": np.arange(3)})
  with one_line_error("the main source has a feature named 'other/x', like one of the part"):
    train_dataset(Sources(taken, other=Part(source=numbered(3))), global_batch_size=2)

  def dropping(batch, training):
    return {name: value for name, value in batch.items() if name != "unlabelled/weight"}

  with one_line_error("dropping dropped 'unlabelled/weight'; return it with the others"):
    train_dataset(two(), global_batch_size=2, preprocess=dropping)


# ---- Training ----

RNG = np.random.default_rng(4)
X, U = RNG.normal(size=[7, 2]).astype("float32"), RNG.normal(size=[10, 2]).astype("float32")
Y = RNG.normal(size=7).astype("float32")
RATE, KERNEL = 0.1, np.array([0.5, -1.0])


class Both(toys.Regression):
  """The mean of (x k - y)^2 + 0.5 * the mean of (u k)^2 over a row's unlabelled examples."""

  def build_model(self):
    return toys.linear(KERNEL)

  def source(self, split):
    labelled = ArraySource(features={"x": X, "y": Y})
    return Sources(labelled, other=Part(source=ArraySource(features={"u": U}), ratio=RATIO))

  def forward(self, batch, training):
    return self.model(batch["x"])[:, 0], self.model(part(batch, "other")["u"])[:, 0]

  def losses(self, outputs, batch):
    labelled, other = outputs
    other = tf.reduce_mean(tf.reshape(tf.square(other), [-1, RATIO]), axis=1)
    return tf.square(labelled - batch["y"]) + 0.5 * other


def expected(steps, batch):
  kernel = KERNEL.copy()
  for step in range(steps):
    rows = step * batch + np.arange(batch)
    x, y = X[rows % 7].astype(float), Y[rows % 7]
    u = U[np.ravel(rows[:, np.newaxis] * RATIO + np.arange(RATIO)) % 10].astype(float)
    gradient = 2 * (x @ kernel - y) @ x / batch + (u @ kernel) @ u / (batch * RATIO)
    kernel = kernel - RATE * gradient
  return kernel


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fast(place=["mirrored x3"])
def test_training_is_that_of_numpy_and_the_ledger_proves_it(place, mirrored, tmp_path, capsys):
  """A batch of 4 has 2 rows of padding on 3 replicas of 2 micro-batches."""
  strategy = strategy_of(place, mirrored)
  recipe = Recipe(
    optimizer=lambda: keras.optimizers.SGD(RATE), global_batch_size=BATCH, shuffle=False,
    options={"accumulation_steps": 2},
  )  # fmt: skip
  trainer = recipe.trainer(
    Both(), strategy, observers=[Recorder(model_dir=str(tmp_path), strategy=strategy)]
  )
  trainer.train(tf.constant(3))
  trainer.reset_input()  # as after a restart
  trainer.train(tf.constant(5))
  assert trainer.traces == 1
  kernel = trainer.task.model.get_weights()[0][:, 0]
  np.testing.assert_allclose(kernel, expected(8, BATCH), rtol=1e-5)
  assert __main__.main([str(tmp_path)]) == 0
  said = capsys.readouterr().out.splitlines()
  assert said[1] == "epochs: 4 complete, 7 distinct examples in each; 4 examples of the next"
  assert said[2] == "part 'other':"
  assert said[3].startswith("steps 1 to 8: each consumed exactly once (1 worker, 2 starts")
  assert said[4] == "epochs: 9 complete, 10 distinct examples in each; 6 examples of the next"
  spoiled = (
    (tmp_path / "ledger-0.jsonl").read_text().replace('"num_examples": 10', '"num_examples": 9')
  )
  (tmp_path / "ledger-0.jsonl").write_text(spoiled)
  assert __main__.main([str(tmp_path)]) == 1
  assert capsys.readouterr().out.splitlines()[2].startswith("part 'other', step 1, worker 0: ")
