"""Mixtures: shares at every position, each part's own epochs, and the ledger's proof."""

import json
import os
import re
import signal
import subprocess
import sys
from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from input_cases import arrays, numbered, one_line_error, runtime_error, stream, train_ids
from places import PLACES, strategy_of

from loopwright import ArraySource, Buckets, IndexedSource, Mixture
from loopwright.inputs.datasets import eval_dataset, train_dataset
from loopwright.inputs.mixture import Shares
from loopwright.inputs.ordering import seed_of_part
from loopwright.runs.builder import Recipe
from loopwright.runs.runner import run
from loopwright.tools.ledger import __main__
from loopwright.tools.ledger.recorder import Recorder

SIZES = {"a": 7, "b": 10, "c": 5000}
WEIGHTS = {0: {"a": 0.7, "b": 0.2, "c": 0.1}, 40: {"b": 1, "c": 2}, 45: {"a": 1, "c": 1.5}}


def three(weights=None, **options):
  """Parts of 7, 10 and 5000 examples; "x" is the index in the part, "part" its number."""
  parts = {
    name: numbered(count, part=np.full(count, number, np.int32))
    for number, (name, count) in enumerate(SIZES.items())
  }
  return Mixture(parts=parts, weights=weights or WEIGHTS, **options)


def parts_of(source, count, position=0):
  """The part of each position, from the batches themselves."""
  batches = arrays(train_dataset(source, global_batch_size=5, position=position), -(-count // 5))
  return np.concatenate([batch["part"] for batch in batches])[:count]


def cumulative(segments, count):
  """The weights' exact sums at 0, 1, ..., count: a list of Fractions for each part."""
  ends = [begin for begin, _ in segments[1:]] + [count]
  sums = [[Fraction(0)] * len(segments[0][1])]
  for (begin, weights), end in zip(segments, ends, strict=True):
    for _ in range(begin, min(end, count)):
      sums.append([s + Fraction(w, sum(weights)) for s, w in zip(sums[-1], weights, strict=True)])
  return sums


def worst(parts, sums):
  """The largest distance of a part's examples from its weight's sum, over all n."""
  taken = np.zeros(len(sums[0]), int)
  distance = Fraction(0)
  for n, part in enumerate(parts, 1):
    taken[part] += 1
    distance = max(distance, *(abs(int(t) - s) for t, s in zip(taken, sums[n], strict=True)))
  return distance


def largest_deficit(weights, count):
  """Megatron's rule: the part that has the least for its weight comes next."""
  taken, order = np.zeros(len(weights), int), []
  share = np.array(weights) / sum(weights)
  for n in range(count):
    order.append(int(np.argmax(np.round(share * max(n, 1) - taken, 9))))
    taken[order[-1]] += 1
  return order


# ---- Shares ----


def test_changes_of_weights_count_from_the_end_of_a_period_and_shares_are_within_one():
  """40 is the end of a period of 10; 45 is none of 3 since 40, but 46 is."""
  sums = cumulative([(0, [7, 2, 1]), (40, [0, 1, 2]), (46, [2, 0, 3])], 200)
  parts = parts_of(three(), 200)
  assert worst(parts, sums) < 1
  assert np.bincount(parts[:40]).tolist() == [28, 8, 4]
  assert np.bincount(parts[40:46], minlength=3).tolist() == [0, 2, 4]
  assert np.bincount(parts[46:56]).tolist() == [4, 0, 6]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.fast(seed=[0, 1])
def test_shares_of_any_weights_are_within_one_at_every_position(seed):
  rng = np.random.default_rng(seed)
  count = int(rng.integers(2, 12))
  segments = [(0, rng.integers(1, 60, count).tolist())]
  for _ in range(3):
    begin = segments[-1][0] + int(rng.integers(1, 4)) * sum(segments[-1][1])
    weights = rng.integers(1, 60, count) * (rng.random(count) < 0.7)
    segments.append((begin, [1, *weights[1:].tolist()]))
  shares = Shares({str(part): 3 for part in range(count)}, segments)
  positions = np.arange(segments[-1][0] + 500)
  parts, places = (value.numpy() for value in shares.places(tf.constant(positions)))
  assert worst(parts, cumulative(segments, len(positions))) < 1
  for part in range(count):
    np.testing.assert_array_equal(places[parts == part], np.arange((parts == part).sum()))
  for n in rng.integers(0, len(positions), 20):
    assert list(shares.before(int(n)).values()) == np.bincount(parts[:n], minlength=count).tolist()


def test_any_stretch_of_positions_has_the_same_examples():
  """No more of a part's order is computed than a stretch can need, and no less."""
  shares = Shares({"a": 5, "b": 6000, "c": 3}, [(0, [5, 4, 3]), (24, [1, 50, 5])])
  whole = shares.ids(tf.range(140, dtype=tf.int64), seed=1, shuffle=True).numpy()
  for size in (1, 2, 3, 7, 12):
    for begin in range(100):
      positions = tf.range(begin, begin + size, dtype=tf.int64)
      ids = shares.ids(positions, seed=1, shuffle=True).numpy()
      np.testing.assert_array_equal(ids, whole[begin : begin + size])


def test_the_rule_of_the_largest_deficit_is_further_off():
  weights = [1, 1, 5, 50, 5]
  sums = cumulative([(0, weights)], 124)
  ours = Shares({str(part): 3 for part in range(5)}, [(0, weights)])
  assert worst(ours.places(tf.range(124, dtype=tf.int64))[0].numpy(), sums) < 1
  assert worst(largest_deficit(weights, 124), sums) == pytest.approx(1.548, abs=1e-3)


def test_far_positions_cost_no_more_and_are_exact():
  shares = Shares({"a": 3, "b": 3}, [(0, [1, 2]), (3 * 10**12, [2, 1])])
  assert shares.before(3 * 10**12 + 3 * 10**9) == {"a": 10**12 + 2 * 10**9, "b": 2 * 10**12 + 10**9}


# ---- The examples ----


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_part_goes_through_its_own_epochs_whatever_the_weights(shuffle):
  steps = 300
  source = three({**WEIGHTS, 45: {"a": 1, "b": 1, "c": 1.5}})
  ids = train_ids(source, steps, global_batch_size=4, seed=5, shuffle=shuffle)
  first = 0
  for name, count in SIZES.items():
    own = ids[(ids >= first) & (ids < first + count)] - first
    alone = {"seed": seed_of_part(5, name), "shuffle": shuffle}
    expected = train_ids(numbered(count), len(own) // 4 + 1, global_batch_size=4, **alone)
    np.testing.assert_array_equal(own, expected[: len(own)])
    assert len(own) > 300
    first += count


def test_a_batch_has_the_examples_of_its_ids():
  for batch in arrays(train_dataset(three(), global_batch_size=6, pad_multiple=4), 30):
    firsts = np.array([0, 7, 17])
    real = batch["example_id"] >= 0
    part = np.searchsorted(firsts, batch["example_id"][real], side="right") - 1
    np.testing.assert_array_equal(batch["part"][real], part)
    np.testing.assert_array_equal(batch["x"][real] + firsts[part], batch["example_id"][real])
    assert batch["weight"].tolist() == [1] * 6 + [0] * 2


def test_a_resumed_run_reads_on_and_workers_share_a_batch():
  options = {"global_batch_size": 4, "pad_multiple": 6, "seed": 3}
  whole = arrays(train_dataset(three(), **options), 40)
  for step in (7, 23):
    again = arrays(train_dataset(three(), **options, position=4 * step), 3)
    for batch, expected in zip(again, whole[step:], strict=False):
      np.testing.assert_array_equal(batch["example_id"], expected["example_id"])
  shares = [arrays(train_dataset(three(), **options, rows=range(i, i + 2)), 40) for i in (0, 2, 4)]
  for batch, *parts in zip(whole, *shares, strict=True):
    for name, value in batch.items():
      np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), value)


def test_an_evaluation_has_each_example_once():
  batches = arrays(eval_dataset(three(), global_batch_size=100))
  ids = np.concatenate([batch["example_id"] for batch in batches])
  assert sorted(ids[ids >= 0]) == list(range(5017))


def test_a_part_that_is_read_by_python_gets_only_its_own_examples():
  asked = []

  class Data:
    def __len__(self):
      return 5

    def __getitem__(self, i):
      asked.append(i)
      return {"x": 100 + i}

  parts = {"array": numbered(9), "python": IndexedSource(data=Data())}
  source = Mixture(parts=parts, weights={"array": 3, "python": 1})
  asked.clear()
  fetched = source.fetch(tf.constant([3, 13, 9, 0, 10], tf.int64))
  assert fetched["x"].numpy().tolist() == [3, 104, 100, 0, 101]
  assert asked == [4, 0, 1]


# ---- Limits and mistakes ----


def test_a_part_is_read_no_more_often_than_allowed():
  source = three({"a": 1, "b": 1}, max_epochs={"a": 2})
  source.require_enough(28)
  with one_line_error(
    r"Mixture.max_epochs\['a'\] allows 14 examples, 2 epochs, but the run reads 15, 2.14 epochs"
  ):
    source.require_enough(30)
  dataset = train_dataset(source, global_batch_size=4)
  assert len(arrays(dataset, 7)) == 7
  assert runtime_error(dataset.take(8)) == (
    "the part 'a' of the Mixture is read up; raise its max_epochs, or lower its weight or "
    "run.train_steps."
  )


def test_mistakes():
  parts = {"a": numbered(3), "b": numbered(4)}
  with one_line_error("Mixture.parts is a dict; it must be at least two name -> source"):
    Mixture(parts={"a": numbered(3)}, weights={"a": 1})
  with one_line_error(r"Mixture.parts\['b'\] is a StreamSource; it must be a source with an index"):
    Mixture(parts={**parts, "b": stream(4)}, weights={"a": 1})
  with one_line_error("unknown part in Mixture.weights 'bb'; it must be one of a, b"):
    Mixture(parts=parts, weights={"bb": 1})
  with one_line_error("Mixture.weights has -1 for 'b'; it must be a number that is 0 or more"):
    Mixture(parts=parts, weights={"b": -1})
  with one_line_error("Mixture.weights is {'b': 0}; at least one must be above 0"):
    Mixture(parts=parts, weights={"b": 0})
  with one_line_error("in ascending order from 0"):
    Mixture(parts=parts, weights={5: {"a": 1}})
  with one_line_error("they must to at most 65536: round them, such as {'a': 333, 'b': 667}"):
    Mixture(parts=parts, weights={"a": 2**0.5, "b": 8**0.5 + 1e-9})
  with one_line_error("Buckets got a Mixture"):
    Buckets(Mixture(parts=parts, weights={"a": 1}), lengths=[1] * 7, boundaries=[1], trim=["x"])
  other = ArraySource(features={"x": np.zeros([4, 2])})
  with one_line_error("the part 'b' of the Mixture has the features {'x': 'float64 \\[2\\]'}, but"):
    train_dataset(Mixture(parts={**parts, "b": other}, weights={"a": 1}), global_batch_size=2)


def test_weights_may_change_only_after_what_was_consumed():
  before = three({"a": 1, "b": 3}).shares.described()
  assert json.loads(before) == [[0, {"a": 1, "b": 3}]]
  later = {0: {"a": 2, "b": 6}, 10: {"a": 1, "c": 4}}
  three(later, examples_per_step=4).shares.require_same_before(40, before)
  with one_line_error(r"the 41 examples .*: weights = {0: {'a': 1, 'b': 3}, 41: {'a': 1, 'c': 4}}"):
    three({0: {"a": 1, "b": 3}, 10: {"a": 1, "c": 4}}).shares.require_same_before(41, before)


# ---- Training ----

RNG = np.random.default_rng(4)
X = RNG.normal(size=[16, 2]).astype("float32")
Y = RNG.normal(size=16).astype("float32")
RATE, KERNEL, BATCH = 0.1, np.array([0.5, -1.0]), 5


class Fit(toys.Regression):
  """The mean of (x k - y)^2 over a mixture of 6 and 10 examples."""

  def __init__(self, weights):
    self._weights = weights

  def build_model(self):
    return toys.linear(KERNEL)

  def source(self, split):
    parts = {
      name: ArraySource(features={"x": X[rows], "y": Y[rows]})
      for name, rows in (("few", slice(6)), ("many", slice(6, 16)))
    }
    return Mixture(parts=parts, weights=self._weights, examples_per_step=BATCH)


def trained(weights, folder, strategy, *, changed=None):
  """Trains 4 steps and, with other weights, 8 more; returns the kernel."""
  recipe = Recipe(
    optimizer=lambda: keras.optimizers.SGD(RATE), global_batch_size=BATCH, shuffle=False
  )
  trainer = recipe.trainer(
    Fit(weights), strategy, observers=[Recorder(model_dir=str(folder), strategy=strategy)]
  )
  trainer.train(tf.constant(4))
  if changed:
    trainer.source().shares = Fit(changed).source("train").shares
  trainer.reset_input()  # as after a restart
  trainer.train(tf.constant(8))
  assert trainer.traces == 1
  return trainer.task.model.get_weights()[0][:, 0]


def expected(order):
  kernel, read = KERNEL.copy(), [0, 0]
  examples = []
  for part in order:
    examples.append((read[part] % 6) if part == 0 else 6 + read[part] % 10)
    read[part] += 1
  for rows in np.reshape(examples, [-1, BATCH]):
    x, y = X[rows].astype(float), Y[rows]
    kernel = kernel - RATE * 2 * (x @ kernel - y) @ x / BATCH
  return kernel


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fast(place=["mirrored x3"])
def test_training_is_that_of_numpy_and_the_ledger_proves_each_part(
  place, mirrored, tmp_path, capsys
):
  """1 : 1 for 4 steps of 5, then 3 : 1, whose third example is the last of both."""
  kernel = trained(
    {0: {"few": 1, "many": 1}, 4: {"few": 3, "many": 1}}, tmp_path, strategy_of(place, mirrored)
  )
  order = [0, 1] * 10 + [0, 0, 0, 1] * 10
  np.testing.assert_allclose(kernel, expected(order), rtol=1e-5)
  assert __main__.main([str(tmp_path)]) == 0
  assert capsys.readouterr().out.splitlines()[1:] == [
    "'few': 40 examples, 66.67 %; epochs: 6 complete, 6 distinct examples in each; 4 of the next",
    "'many': 20 examples, 33.33 %; epochs: 2 complete, 10 distinct examples in each; 0 of the next",
  ]


@pytest.mark.parametrize("keep", [True, False])
def test_the_ledger_proves_a_change_in_the_middle_or_names_it(keep, tmp_path, capsys):
  """Weights that change what was consumed lose examples of one part, and repeat another's."""
  first, then = {"few": 1, "many": 1}, {"few": 3, "many": 1}
  changed = {0: first, 4: then} if keep else then
  trained(first, tmp_path, tf.distribute.get_strategy(), changed=changed)
  assert __main__.main([str(tmp_path)]) == (0 if keep else 1)
  said = capsys.readouterr().out
  if not keep:
    assert said == (
      "step 5: a restart changed the weights of what was consumed: part 'few' would go on at its "
      "example 15, but 10 were read\n"
    )


# ---- Whole runs ----

SCRIPT = """
import os, signal, sys, keras
import loopwright
from loopwright import Action
from loopwright.runs.runner import run
from test_mixture import Fit

class Kill(Action):
  on = "train"

  def __call__(self, output):
    if self.run.step >= int(sys.argv[2]):
      os.kill(os.getpid(), signal.SIGKILL)

weights = {0: {"few": 1, "many": 1}, 4: {"few": 3, "many": 1}}
run(
  task=Fit(weights), train_steps=14, steps_per_loop=2, checkpoint_every_steps=4, ledger=True,
  optimizer=lambda: keras.optimizers.Adam(0.1), global_batch_size=5, mode="train", seed=3,
  model_dir=sys.argv[1], actions=[Kill()],
)
"""


def run_script(folder, kill_at):
  paths = os.pathsep.join([*sys.path, os.path.dirname(__file__)])
  command = [sys.executable, "-c", SCRIPT, str(folder), str(kill_at)]
  return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True)


def last_kernel(folder):
  reader = tf.train.load_checkpoint(f"{folder}/checkpoints/ckpt-14")
  [name] = [
    n for n in reader.get_variable_to_shape_map() if n.startswith("model/") and "OPT" not in n
  ]
  return reader.get_tensor(name)


@pytest.mark.whole
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(tmp_path, capsys):
  """SIGKILL after step 10, with the weights changed at 4; checkpoint 8 may be complete or not."""
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  assert run_script(whole, 100).returncode == 0
  assert run_script(killed, 10).returncode == -signal.SIGKILL
  assert run_script(killed, 100).returncode == 0
  np.testing.assert_array_equal(last_kernel(killed), last_kernel(whole))
  assert __main__.main([str(killed)]) == 0
  said = capsys.readouterr().out
  assert re.search("2 starts, [26] steps rerun with the same examples", said)
  assert "'few': 48 examples, 68.57 %; epochs: 8 complete" in said


def goes_on(folder, weights, **options):
  return run(
    task=Fit(weights), train_steps=options.pop("train_steps", 8), steps_per_loop=2, ledger=True,
    optimizer=lambda: keras.optimizers.SGD(RATE), global_batch_size=BATCH, mode="train",
    checkpoint_every_steps=4, model_dir=str(folder), **options,
  )  # fmt: skip


def test_a_run_goes_on_with_other_weights_if_it_keeps_what_was(tmp_path, capsys):
  first, then = {"few": 1, "many": 1}, {"few": 3, "many": 1}
  goes_on(tmp_path, first, train_steps=4)
  with one_line_error('training weights .*"few": 1.* add --accept_changes'):
    goes_on(tmp_path, {0: first, 4: then})
  with one_line_error(r"keep what was.*weights = {0: {'few': 1, 'many': 1}, 20: {'few': 3"):
    goes_on(tmp_path, then, accept_changes=True)
  goes_on(tmp_path, {0: first, 4: then}, accept_changes=True)
  capsys.readouterr()
  assert __main__.main([str(tmp_path)]) == 0
  assert "'few': 25 examples, 62.50 %" in capsys.readouterr().out
