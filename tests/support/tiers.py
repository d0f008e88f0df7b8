"""Which tests a command runs: `pytest` the fast tier, `--ci` that and CI's, `--everything` all.

With `--rest`, `--ci` and `--everything` leave out the fast tier.

A test without a mark is fast. `@pytest.mark.whole`, on a test or on one `pytest.param`, leaves it
to `--everything`, `@pytest.mark.ci` to `--ci`. `@pytest.mark.fast(replicas=[2], library=["keras"])`
leaves to `--everything` all parameters but those with these values; several such marks add up.

tests/ci_tier.txt moves tests to CI, a file, a test or one of its ids a line: from the fast tier
what takes about a second or more and is not the only piece of something; with `+` from
`--everything`. `-` leaves one to `--everything`: another test of CI proves it for another case.
`!` leaves one where its marks put it. tests/unit/test_tiers.py says of what the fast tier must hold
a piece.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]
LIST = TESTS / "ci_tier.txt"
LINES = [n for n in LIST.read_text().splitlines() if n and not n.startswith("#")]
LISTED = {line.lstrip("!+-"): line[0] for line in LINES}


def names(item):
  """The lines that would name a collected test, the most particular first."""
  file = item.path.relative_to(TESTS).as_posix()
  test = f"{file}::{item.nodeid.partition('::')[2]}"
  return test, test.partition("[")[0], file


def tier(item):
  """Returns "fast", "ci" or "everything"."""
  line = next((LISTED[name] for name in names(item) if name in LISTED), "!")
  marked = tier_of_marks(item)
  if line == "-":
    return "everything"
  moved = {"!": None, "+": "everything"}.get(line, "fast")
  return "ci" if marked == moved else marked


def tier_of_marks(item):
  """The same before tests/ci_tier.txt moves it."""
  chosen = [mark.kwargs for mark in item.iter_markers("fast")]
  left = chosen and not any(matches(item.callspec.params, values) for values in chosen)
  if left or item.get_closest_marker("whole"):
    return "everything"
  return "ci" if item.get_closest_marker("ci") else "fast"


def matches(parameters, values):
  """Whether each named parameter has one of its values."""
  return all(any(parameters[name] == each for each in of) for name, of in values.items())


def split(items, *, everything=False, ci=False, rest=False):
  """Returns (the tests to run, the tests to leave out); with `rest` the fast tier is left out."""
  tiers = {"fast", "ci", "everything"} if everything else {"fast", "ci"} if ci else {"fast"}
  if rest:
    tiers.remove("fast")
  run, left = [], []
  for item in items:
    (run if tier(item) in tiers else left).append(item)
  return run, left
