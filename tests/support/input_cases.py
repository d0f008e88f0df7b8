"""Small sources, what they are expected to give, and how their mistakes are told."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host.failures import user_error
from loopwright.inputs.datasets import train_dataset
from loopwright.inputs.sources import ArraySource
from loopwright.inputs.streams import StreamSource


def numbered(n, **features):
  """A source whose feature "x" is its example's index."""
  return ArraySource(features={"x": np.arange(n, dtype=np.int64), **features})


def stream(n, **kwargs):
  dataset = tf.data.Dataset.range(n).map(lambda i: {"x": i})
  return StreamSource(dataset=dataset, **kwargs)


def arrays(dataset, count=None):
  return list((dataset if count is None else dataset.take(count)).as_numpy_iterator())


def train_ids(source, steps, **kwargs):
  """The ids of the real rows of the first batches, in order."""
  batches = arrays(train_dataset(source, **kwargs), steps)
  ids = np.concatenate([batch["example_id"] for batch in batches])
  return ids[ids >= 0]


M64 = 2**64 - 1


def reference_hash(value, seed, purpose):
  """SplitMix64 in Python integers."""
  key = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
  mixed = (value * 0x9E3779B97F4A7C15 + int.from_bytes(key, "little")) & M64
  mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & M64
  mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & M64
  return mixed ^ mixed >> 31


def ledger_digest(ids):
  return sum(reference_hash(int(i), 0, "ledger") for i in ids) & M64


def of_elements(**elements):
  return tf.data.Dataset.from_tensors(elements)


def one_line_error(message):
  return pytest.raises(ConfigError, match=rf"\A[^\n]*{message}[^\n]*\Z")


def runtime_error(dataset):
  """The user's line of what iterating over the dataset raises."""
  with pytest.raises(tf.errors.InvalidArgumentError) as raised:
    arrays(dataset)
  line = user_error(raised.value)
  assert line is not None
  assert "\n" not in line
  return line
