"""Data of other libraries, and the source that reads it: for what a message advises."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf


def wrapping(data: Any) -> str:
  """Returns what makes a source of what another library, or Python, reads examples from."""
  if isinstance(data, tf.data.Dataset):
    return "StreamSource(dataset=...)"
  if isinstance(data, str | os.PathLike):
    return "ArraySource(features=...) what the file has"
  if isinstance(data, tuple) or hasattr(data, "dtype"):
    return "ArraySource(features={'x': x, 'y': y})"
  if hasattr(data, "iloc"):
    return "ArraySource(features=dict(frame))"
  if hasattr(data, "to_table"):  # of Arrow
    return "ArraySource(features=dict(dataset.to_table().to_pandas()))"
  if hasattr(data, "to_pandas") and not hasattr(data, "with_format"):
    return "ArraySource(features=dict(table.to_pandas()))"
  if isinstance(data, Mapping):
    splits = any(hasattr(each, "column_names") for each in data.values())  # of Hugging Face
    return "IndexedSource(data=splits[split])" if splits else "ArraySource(features=...)"
  if hasattr(data, "batch_sampler"):
    return "IndexedSource(data=loader.dataset)"
  if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
    return "IndexedSource(data=...)"
  stream = "StreamSource(dataset=tf.data.Dataset.from_generator(...))"
  return stream if hasattr(data, "__iter__") else "ArraySource(features=...)"
