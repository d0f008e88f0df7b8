"""Length buckets: schedule, batches, training and ledger, against NumPy."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from input_cases import arrays, numbered, one_line_error
from places import PLACES, strategy_of

from loopwright import ArraySource, Buckets, Evaluator, Loss, StreamSource
from loopwright.inputs.buckets import Schedule
from loopwright.inputs.datasets import eval_dataset, train_dataset
from loopwright.inputs.sources import of_one_shape
from loopwright.runs.builder import Recipe
from loopwright.runs.runner import run
from loopwright.strategies import factories
from loopwright.tools.forensics.action import NonFiniteLoss, StopOnNonFinite
from loopwright.tools.ledger import __main__
from loopwright.tools.ledger.recorder import Recorder

ENDS, LONGEST = (2, 4, 8), 8
RNG = np.random.default_rng(6)
LENGTHS = np.array([1, 8, 2, 3, 1, 2, 7, 4, 2, 1, 2, 5, 1])  # 8, 2 and 3 in the buckets
N = len(LENGTHS)
MASK = (np.arange(LONGEST) < LENGTHS[:, np.newaxis]).astype(np.float32)
X = MASK * RNG.normal(size=[N, LONGEST]).astype(np.float32)
OF = np.searchsorted(ENDS, LENGTHS)


def source(**options):
  given = {"lengths": LENGTHS, "boundaries": ENDS, "trim": ("x", "mask")}
  return Buckets(ArraySource(features={"x": X, "mask": MASK}), **{**given, **options})


# ---- The schedule ----


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("in_a_row", [1, 3])
def test_each_epoch_has_the_batches_of_all_buckets_in_random_order(seed, in_a_row):
  rng = np.random.default_rng(seed)
  counts, sizes = rng.integers(1, 40, 3), rng.integers(1, 9, 3)
  schedule = Schedule(
    counts=tuple(map(int, counts)), sizes=tuple(map(int, sizes)), seed=seed, in_a_row=in_a_row
  )
  ends = [int(np.sum(epoch * counts // sizes)) for epoch in range(6)]
  whole = schedule.buckets(0, ends[5])
  for epoch, (begin, end) in enumerate(itertools.pairwise(ends)):
    had = np.bincount(whole[begin:end], minlength=3)
    np.testing.assert_array_equal(had, (epoch + 1) * counts // sizes - epoch * counts // sizes)
  for first in (0, 1, ends[1] - 1, ends[2], ends[5] - 3):
    np.testing.assert_array_equal(schedule.buckets(first, 3), whole[first : first + 3])
    np.testing.assert_array_equal(
      schedule.batches_before(first), np.bincount(whole[:first], minlength=3)
    )
  far = 10**12
  before = schedule.batches_before(far)
  assert sum(before) == far
  np.testing.assert_allclose(np.array(before) * sizes / counts, before[0] * sizes[0] / counts[0])


def test_the_order_is_another_in_each_epoch_and_for_each_seed():
  orders = [
    Schedule(counts=(60, 40), sizes=(2, 2), seed=seed).buckets(first, 50)
    for seed in (0, 1) for first in (0, 50)
  ]  # fmt: skip
  assert len({tuple(order) for order in orders}) == 4
  assert len({tuple(sorted(order)) for order in orders}) == 1
  in_order = Schedule(counts=(60, 40), sizes=(2, 2), shuffle=False).buckets(0, 50)
  np.testing.assert_array_equal(in_order, np.repeat([0, 1], [30, 20]))


def test_batches_in_a_row_stay_together():
  order = Schedule(counts=(120, 80), sizes=(2, 2), in_a_row=5).buckets(0, 100)
  changes = np.flatnonzero(np.diff(order)) + 1
  assert (changes % 5 == 0).all()
  assert len(changes) > 4


# ---- The batches ----


@pytest.mark.parametrize("equal_tokens", [False, True])
def test_batches_have_few_shapes_and_each_example_once_an_epoch(equal_tokens):
  made = train_dataset(
    source(equal_tokens=equal_tokens), global_batch_size=2, pad_multiple=3, seed=3
  )
  sizes = [8, 4, 2] if equal_tokens else [2, 2, 2]
  for bucket, (end, size, data) in enumerate(zip(ENDS, sizes, made.datasets, strict=True)):
    members = np.flatnonzero(bucket == OF)
    padded = -(-size // 3) * 3
    ids = []
    for batch in arrays(data, 6):
      assert {batch["x"].shape, batch["mask"].shape} == {(padded, end)}
      real = batch["example_id"] >= 0
      assert real.sum() == size
      np.testing.assert_array_equal(batch["weight"], real)
      np.testing.assert_array_equal(batch["x"][real], X[batch["example_id"][real], :end])
      ids += batch["example_id"][real].tolist()
    for epoch in range(6 * size // len(members)):
      assert sorted(ids[epoch * len(members) :][: len(members)]) == members.tolist()


def read(scheduled, count):
  iterator = scheduled.iterate(lambda data: data.as_numpy_iterator())
  return [next(iterator) for _ in range(count)]


def test_reading_begins_anywhere():
  def preprocess(batch, training):
    return {**batch, "number": batch["step"], "seeds": batch["seed"]}

  options = {"global_batch_size": 2, "pad_multiple": 2, "seed": 4, "preprocess": preprocess}
  whole = read(train_dataset(source(), **options), 25)
  assert len({batch["x"].shape for batch in whole}) == 3
  assert [set(batch["number"]) for batch in whole] == [{step} for step in range(25)]
  for step in (6, 13):
    later = read(train_dataset(source(), **options, position=2 * step), 3)
    for mine, yours in zip(later, whole[step:], strict=False):
      for name in mine:
        np.testing.assert_array_equal(mine[name], yours[name])
  renumbered = read(train_dataset(source(), **options, position=8, first_step=100), 2)
  assert [set(batch["number"]) for batch in renumbered] == [{100}, {101}]


@pytest.mark.parametrize("equal_tokens", [False, True])
def test_workers_make_the_whole_batch_together(equal_tokens):
  options = {"global_batch_size": 5, "pad_multiple": 2, "seed": 4}
  given = source(equal_tokens=equal_tokens)
  whole = read(train_dataset(given, **options), 8)
  shares = [read(train_dataset(given, **options, rows=range(i, i + 3)), 8) for i in (0, 3)]
  for batch, *parts in zip(whole, *shares, strict=True):
    for name, value in batch.items():
      np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)


def test_evaluation_has_every_example_once():
  made = eval_dataset(source(), global_batch_size=2, pad_multiple=2)
  batches = [batch for data in made for batch in arrays(data)]
  ids = np.concatenate([batch["example_id"] for batch in batches])
  assert sorted(ids[ids >= 0]) == list(range(N))
  assert [batch["x"].shape[1] for batch in batches] == [2] * 4 + [4] + [8] * 2
  few = eval_dataset(source(), global_batch_size=2, steps=3)
  assert [len(arrays(data)) for data in few] == [1, 1, 1]


def test_the_longest_bucket_alone_has_ids_of_its_own():
  """It has the longest examples, not the most: those need most memory, and least padding."""
  [batch] = arrays(eval_dataset(of_one_shape(source()), global_batch_size=8))
  count = np.sum(OF == 2)
  assert count < np.sum(OF == 0)
  np.testing.assert_array_equal(batch["example_id"][:count], np.arange(count))
  np.testing.assert_array_equal(batch["x"][:count], X[OF == 2])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"lengths": LENGTHS[1:]}, r"lengths is int64 of shape \[12\]; it must be a whole number for"),
    ({"lengths": LENGTHS / 2}, "lengths is float64 of shape"),
    ({"boundaries": (2, 4)}, "example 1 has length 8, above the last boundary, 4"),
    ({"boundaries": (4, 2, 8)}, r"boundaries is \(4, 2, 8\); it must be ascending lengths"),
    ({"boundaries": ()}, r"boundaries is \(\); it must be ascending"),
    ({"boundaries": (0, 8)}, "boundaries is 0; it must be a whole number of at least 1"),
    ({"trim": "x"}, "trim is 'x'; it must be the names of features"),
    ({"trim": {"x": 1}}, r"trim\['x'\] is 1; it must be the axes to cut, from 1 on"),
    ({"trim": {"x": (0, 1)}}, r"trim\['x'\] is \(0, 1\); it must be the axes"),
    ({"in_a_row": 0}, "in_a_row is 0"),
  ],
)
def test_mistakes(change, message):
  with one_line_error(message):
    source(**change)


def test_several_axes_are_cut():
  edges = RNG.normal(size=[N, LONGEST, 3, LONGEST]).astype(np.float32)
  given = ArraySource(features={"x": X, "edges": edges})
  made = Buckets(given, lengths=LENGTHS, boundaries=ENDS, trim={"x": (1,), "edges": (1, 3)})
  for place, (bucket, end) in enumerate(zip(made.buckets, ENDS, strict=True)):
    batch = bucket.fetch(tf.range(bucket.num_examples, dtype=tf.int64))
    np.testing.assert_array_equal(batch["edges"], edges[place == OF][:, :end, :, :end])
    np.testing.assert_array_equal(batch["x"], X[place == OF][:, :end])
  narrow = ArraySource(features={"edges": edges[..., :4]})
  made = Buckets(narrow, lengths=LENGTHS, boundaries=ENDS, trim={"edges": (1, 3)})
  with one_line_error("its axes 1, 3 must be there, and padded to at least 8"):
    made.buckets[-1].fetch(tf.constant([0], tf.int64))


def test_mistakes_in_use():
  with one_line_error("Buckets got a StreamSource; it must be a Source"):
    Buckets(
      StreamSource(dataset=tf.data.Dataset.from_tensors({"x": 1})),
      lengths=[1], boundaries=[1], trim=("x",),
    )  # fmt: skip
  with one_line_error("Buckets trims 'y', which is missing in a batch of a ArraySource"):
    train_dataset(source(trim=("y",)), global_batch_size=2)
  whole = Buckets(numbered(3), lengths=[1, 1, 2], boundaries=(2,), trim=("x",))
  with one_line_error(r"Buckets trims 'x', which is \(2,\) in a batch"):
    train_dataset(whole, global_batch_size=2)
  with one_line_error("whose steps follow one schedule, but parameter_server's workers take steps"):
    train_dataset(source(), global_batch_size=2, shard=(2, 0))


# ---- Training ----

RATE, KERNEL = 0.05, 0.25


class Sums(toys.Regression):
  """The mean over tokens of (k x - 1)^2."""

  def build_model(self):
    return toys.linear([KERNEL])

  def source(self, split):
    return source(equal_tokens=True)

  def forward(self, batch, training):
    return self.model(tf.reshape(batch["x"], [-1, 1]))[:, 0]

  def loss(self, outputs, batch):
    mask = tf.reshape(batch["mask"] * batch["weight"][:, tf.newaxis], [-1])
    return Loss(tf.reduce_sum(tf.square(outputs - 1) * mask), tf.reduce_sum(mask))


def mean_loss(kernel, ids):
  return np.sum((kernel * X[ids] - 1) ** 2 * MASK[ids]) / MASK[ids].sum()


def expected(steps):
  kernel, batches = (
    KERNEL,
    read(train_dataset(source(equal_tokens=True), global_batch_size=3), steps),
  )
  for batch in batches:
    x, mask = X[batch["example_id"]].astype(float), MASK[batch["example_id"]]
    kernel -= RATE * np.sum(2 * (kernel * x - 1) * x * mask) / mask.sum()
  return kernel


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fast(place=["mirrored x2"])
def test_training_is_that_of_numpy_with_a_trace_for_each_shape(place, mirrored, tmp_path, capsys):
  """On 2 replicas of 2 micro-batches, batches of 12, 6 and 3 have padding of 0, 2 and 1 rows."""
  strategy = strategy_of(place, mirrored)
  recipe = Recipe(
    optimizer=lambda: keras.optimizers.SGD(RATE), global_batch_size=3,
    options={"accumulation_steps": 2} if place.endswith("x2") else {},
  )  # fmt: skip
  trainer = recipe.trainer(
    Sums(), strategy, observers=[Recorder(model_dir=str(tmp_path), strategy=strategy)]
  )
  for number, steps in enumerate((1, 6, 4, 9)):
    if number == 2:
      trainer.reset_input()  # as after a restart
    trainer.train(tf.constant(steps))
  assert trainer.traces == 3
  kernel = trainer.task.model.get_weights()[0][0, 0]
  np.testing.assert_allclose(kernel, expected(20), rtol=1e-5)
  evaluator = recipe.evaluator(trainer)
  assert evaluator.evaluate() == {"loss": pytest.approx(mean_loss(kernel, np.arange(N)), rel=1e-5)}
  assert isinstance(evaluator, Evaluator)

  assert __main__.main([str(tmp_path)]) == 0
  said = capsys.readouterr().out.splitlines()
  had = source(equal_tokens=True).schedule(3, seed=0, shuffle=True).batches_before(20)
  assert [line for line in said if line.startswith("part")] == [
    "part 'bucket 2':", "part 'bucket 4':", "part 'bucket 8':"
  ]  # fmt: skip
  counted = [line.split(":")[0] for line in said if line.startswith("steps")]
  assert counted == [f"steps 1 to {count}" for count in had]
  epochs = [count * size // n for count, size, n in zip(had, (12, 6, 3), (8, 2, 3), strict=True)]
  assert [int(line.split()[1]) for line in said if line.startswith("epochs")] == epochs
  ledger = tmp_path / "ledger-0.jsonl"
  ledger.write_text(ledger.read_text().replace('"first": 8', '"first": 7'))
  assert __main__.main([str(tmp_path)]) == 1
  assert "part 'bucket 4', step 1, worker 0: " in capsys.readouterr().out


@pytest.mark.whole
def test_a_value_that_is_not_finite_ends_the_run_at_its_step(tmp_path, monkeypatch, capsys):
  """The steps before it are kept, in whichever bucket they were."""
  steps = read(train_dataset(source(equal_tokens=True), global_batch_size=3), 20)
  first = {}
  for step, batch in enumerate(steps):
    first |= {int(i): step for i in batch["example_id"] if int(i) not in first}
  example, bad = max(first.items(), key=lambda item: item[1])
  assert bad > 1
  spoiled = X.copy()
  spoiled[example, 0] = np.nan
  monkeypatch.setitem(globals(), "X", spoiled)
  options = {
    "task": Sums, "train_steps": 20, "global_batch_size": 3, "model_dir": str(tmp_path),
    "strategy": factories.default, "optimizer": lambda: keras.optimizers.SGD(RATE),
  }  # fmt: skip
  with pytest.raises(NonFiniteLoss, match=rf"at step {bad + 1}\."):
    run(**options, mode="train", actions=[StopOnNonFinite()])
  run(**options, mode="replay")
  assert re.search(rf"loss +nan +{example}\n", capsys.readouterr().err)
