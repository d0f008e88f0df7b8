"""Lines for the user in what a pipeline raises: `loopwright.errors`.

Its ConfigErrors are tested where they are raised, in test_sources.py and test_inputs.py.
"""

import os
import sysconfig

import numpy as np
import pytest
import tensorflow as tf
from input_cases import runtime_error

from loopwright import errors
from loopwright.errors import ConfigError
from loopwright.host import failures
from loopwright.inputs import checks


def test_other_errors_have_no_user_error():
  assert failures.user_error(ValueError("user error without a pipeline")) is None


def test_user_error_survives_quotes_and_letters():
  text = 'it\'s "ü" a\\b [x]'
  dataset = tf.data.Dataset.range(1).map(
    lambda i: checks.require(i > 0, i, ["in ", text])  # AutoGraph leaves it alone
  )
  assert runtime_error(dataset) == f"in {text}"


@pytest.mark.parametrize(
  ("value", "bounds", "said"),
  [
    (0, {"at_least": 1}, "n is 0; it must be a whole number of at least 1."),
    (5, {"at_least": 0, "at_most": 4}, "n is 5; it must be a whole number from 0 to 4."),
    (True, {"at_least": 1}, "n is True; it must be a whole number of at least 1."),
    (2.0, {"at_least": 1}, "n is 2.0; it must be a whole number of at least 1."),
    (None, {"at_least": 1}, "n is None; it must be a whole number of at least 1."),
  ],
)
def test_an_integer_out_of_bounds_is_one_line(value, bounds, said):
  with pytest.raises(errors.ConfigError, match=f"^{said}$"):
    errors.require_integer("n", value, **bounds)


def test_an_integer_of_numpy_comes_back_as_one_of_python():
  got = errors.require_integer("n", np.int64(4), at_least=0, at_most=4)
  assert (got, type(got)) == (4, int)


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_number_that_is_not_above_0_is_one_line(value):
  with pytest.raises(errors.ConfigError, match=rf"^t is {value}; it must be above 0 seconds\.$"):
    errors.require_positive("t", value, unit="seconds")


def test_the_first_line_of_an_error():
  assert errors.first_line(ValueError("\none\ntwo")) == "one"
  assert errors.first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(
  ("value", "line"),
  [
    (0, "n is 0; it must be a whole number of at least 1."),
    (2**63, f"n is {2**63}; it must be a whole number from 1 to {2**63 - 1}."),
    (-(2**63) - 1, f"n is {-(2**63) - 1}; it must be a whole number of at least 1."),
    (10**300, f"n is 1{'0' * 99}...{'0' * 50}; it must be a whole number from 1 to {2**63 - 1}."),
  ],
)  # fmt: skip
def test_counts_are_those_that_int64_holds(value, line):
  with pytest.raises(ConfigError) as raised:
    errors.require_integer("n", value, at_least=1)
  assert str(raised.value) == line
  assert errors.require_integer("n", 2**63 - 1, at_least=1) == 2**63 - 1


def test_a_number_that_python_refuses_to_write():
  assert errors.shown(10**9999) == "a number of several thousand digits"


def test_numbers_that_float64_holds():
  assert [errors.is_finite(x) for x in (1, 1.5, 10**308)] == [True] * 3
  assert [errors.is_finite(x) for x in (10**309, float("nan"), "1", True, None)] == [False] * 5
  with pytest.raises(ConfigError, match=r"^s is 1000.*; it must be a number that a float64 can ho"):
    errors.require_positive("s", 10**400)


def test_a_mistake_is_one_printable_line():
  line = "'caf\xe9' \r is\x1b[1m\u2028\ud800\0 x"
  printed = "'caf\xe9' \\r is\\x1b[1m\\u2028\\ud800\\x00 x"
  assert failures.mistake(ConfigError(f"{line}\nmore")) == printed
  assert len(printed.splitlines()) == 1


def test_the_console_script_is_not_the_users():
  assert errors.is_the_users("/home/me/mine.py")
  assert not errors.is_the_users(os.path.join(sysconfig.get_path("scripts"), "loopwright"))
