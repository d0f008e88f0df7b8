"""Which tests `uv run pytest` runs (the fast tier), and which only `--everything` does (the rest).

A test without a mark is fast. `@pytest.mark.whole`, on a test or on one `pytest.param`, leaves it
to the rest. `@pytest.mark.fast(replicas=[2], library=["keras"])` leaves all parameters to the rest
but those with these values; several such marks add up. tests/unit/test_tiers.py says of what the
fast tier must hold a piece.
"""


def is_fast(item):
  """Whether a collected test belongs to the fast tier."""
  if item.get_closest_marker("whole"):
    return False
  chosen = [mark.kwargs for mark in item.iter_markers("fast")]
  return not chosen or any(matches(item.callspec.params, values) for values in chosen)


def matches(parameters, values):
  """Whether each named parameter has one of its values."""
  return all(any(parameters[name] == each for each in of) for name, of in values.items())


def split(items, *, everything=False, rest=False):
  """Returns (the tests to run, the tests to leave out)."""
  run, left = [], []
  for item in items:
    wanted = everything or is_fast(item) != rest
    (run if wanted else left).append(item)
  return run, left
