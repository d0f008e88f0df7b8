"""The matrix of docs/keras-matrix.md: complete, and, in parts, run again.

The whole is run by hand, `python -m benchmarks.keras_matrix`: one of its groups took over
ten minutes.
"""

import itertools

import pytest

from benchmarks import keras_entries, keras_matrix

LIBRARIES = list(keras_matrix.KERAS)
KINDS = list(keras_matrix.GROUPS)


@pytest.mark.parametrize("library", LIBRARIES)
def test_everything_that_keras_exports_has_an_entry(library):
  assert keras_matrix.missing(library) == []


def test_what_is_new_is_missed(monkeypatch):
  known = keras_entries.entries
  monkeypatch.setattr(
    keras_entries,
    "entries",
    lambda *of: [e for e in known(*of) if e.name != "Hinge" and "delta" not in e.arguments],
  )
  assert keras_matrix.missing("keras") == [
    "keras.losses.Hinge has no entry",
    "keras.losses.Huber(delta=) has no entry",
    "keras.metrics.Hinge has no entry",
  ]


def test_each_row_of_the_page_is_an_entry_that_can_be_made():
  rows = [line for line in keras_entries.PAGE.read_text().splitlines() if line.startswith("| ")]
  every = {
    (k, e) for k in KINDS for library in LIBRARIES for e in keras_entries.entries(k, library)
  }
  assert len(rows) - len(KINDS) <= len(every)
  for kind, library in itertools.product(KINDS, LIBRARIES):
    module = getattr(keras_matrix.KERAS[library], kind)
    for entry in keras_entries.entries(kind, library):
      known = keras_entries.INPUTS if kind == "layers" else keras_entries.DATA
      assert entry.data in known, str(entry)
      assert type(entry.made(module)).__name__ == getattr(module, entry.name).__name__
      assert (entry.refused != "") == entry.result.startswith("refused")


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_loss_is_what_its_call_returns(library):
  """Not only the shared models: a loss that no training reaches is compared by its call."""
  losses = [e for e in keras_entries.entries("losses", library) if not e.refused]
  found = [line for entry in losses for line in keras_matrix.of_call(library, entry)]
  assert found == []


def named(library, kind, *names):
  found = [e for e in keras_entries.entries(kind, library) if e.name in names and e.is_shared]
  assert {entry.name for entry in found} == set(names)
  return found


@pytest.mark.parametrize(
  ("library", "kind", "names"),
  [
    ("keras", "losses", ["Huber", "KLDivergence"]),
    pytest.param("tf_keras", "metrics", ["AUC", "R2Score"], marks=pytest.mark.whole),
    ("keras", "layers", ["Normalization", "StringLookup", "IntegerLookup"]),
  ],
)
def test_some_entries_on_replicas_that_do_not_divide_the_batch(library, kind, names):
  entries = named(library, kind, *names)
  assert keras_matrix.disagreements(library, kind, entries, [2]) == []


@pytest.mark.whole
def test_a_mask_of_a_loss_on_replicas():
  masked = [e for e in keras_entries.entries("losses", "keras") if e.masked][:1]
  assert keras_matrix.disagreements("keras", "losses", masked, [3]) == []


def test_another_number_is_noticed(monkeypatch):
  trained = keras_matrix.trained

  def wrong(trial, replicas):
    return {name: value * (1 + 1e-3) for name, value in trained(trial, replicas).items()}

  monkeypatch.setattr(keras_matrix, "trained", wrong)
  lines = keras_matrix.disagreements("keras", "losses", named("keras", "losses", "LogCosh"), [1])
  assert any("on 1: training loss: " in line for line in lines)
