"""Lines for the user in what a pipeline raises: `framework.errors`.

Its ConfigErrors are tested where they are raised, in test_sources.py and test_inputs.py.
"""

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
