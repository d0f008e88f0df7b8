"""Lines for the user in what a pipeline raises: `framework.errors`.

Its ConfigErrors are tested where they are raised, in test_sources.py and test_inputs.py.
"""

import numpy as np
import pytest
import tensorflow as tf
from input_cases import runtime_error

from framework import errors
from framework.inputs import checks


def test_other_errors_have_no_user_error():
  assert errors.user_error(ValueError("user error without a pipeline")) is None


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
