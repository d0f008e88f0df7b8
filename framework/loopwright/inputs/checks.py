"""Checks of sources, preprocessing and arguments; each mistake is one line.

Most raise a ConfigError while a dataset is made. A mistake that only the data shows is a
`user_error` of the running pipeline.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from loopwright.errors import USER_ERROR, ConfigError, kind, shown
from loopwright.graphs.aliases import Batch, Structure


def require(
  condition: tf.Tensor, value: Structure, message: Sequence[tf.Tensor | str]
) -> Structure:
  """Returns `value` if a bool scalar holds when the pipeline runs; else raises a `user_error`."""
  line = tf.strings.join([USER_ERROR, *message])
  with tf.control_dependencies([tf.debugging.Assert(condition, [line])]):
    return tf.nest.map_structure(tf.identity, value)


def require_rows(rows: object, padded_rows: int) -> None:
  """Raises a ConfigError unless `rows` is a non-empty range of rows of a padded global batch."""
  fits = isinstance(rows, range) and rows.step == 1 and 0 <= rows.start < rows.stop <= padded_rows
  if not fits:
    raise ConfigError(
      f"rows is {rows!r}; it must be a range of step 1 with at least one of the {padded_rows} rows "
      f"of a padded batch, such as range({padded_rows})."
    )


def refuse_reserved(who: str, names: Iterable[str]) -> None:
  """Raises a ConfigError if a feature of `who` has a name that the framework adds itself."""
  for name in ("example_id", "seed", "step"):
    if name in names:
      raise ConfigError(
        f"{who} has a feature named {name!r}, which the framework adds itself; rename yours."
      )


def check_array(name: object, array: np.ndarray) -> None:
  """Raises unless a feature's name is a string, its dtype TensorFlow's and no value masked."""
  if not isinstance(name, str):
    raise ConfigError(f"features has the name {name!r}; names must be strings.")
  if np.ma.is_masked(array):
    raise ConfigError(
      f"feature {name!r} has masked values, which a batch cannot have; fill them (array.filled), "
      "or give the mask as another feature."
    )
  if array.dtype == object:
    _check_objects(name, array)
    return
  try:
    if array.dtype.hasobject:
      raise TypeError
    tf.as_dtype(array.dtype)
  except TypeError:
    raise ConfigError(
      f"feature {name!r} has dtype {array.dtype}, which TensorFlow does not have; convert it "
      "(array.astype)."
    ) from None


def _check_objects(name: str, array: np.ndarray) -> None:
  """Raises a ConfigError unless all objects are texts, in bytes."""
  for row, value in enumerate(array.flat):
    if isinstance(value, bytes | str):
      continue
    what, remedy = shown(value, most=40), "convert it (array.astype)"
    if isinstance(value, list | np.ndarray):
      what, remedy = "a list", "pad all rows to one length"
    elif value is None or type(value).__name__ == "NAType" or value != value:
      what, remedy = f"missing ({value})", "fill it (frame.fillna), or leave the row out"
    raise ConfigError(f"feature {name!r} has dtype object: row {row} is {what}; {remedy}.")


def check_text(name: str, array: np.ndarray) -> None:
  """Raises a ConfigError if an array of dtype <U has numbers that are no characters."""
  if array.dtype.kind == "U" and array.itemsize:
    points = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).view(np.uint32)
    if bad := points[(points >= 0x110000) | ((points >= 0xD800) & (points < 0xE000))].tolist():
      raise ConfigError(
        f"feature {name!r} has text with the number {bad[0]:#x}, which is no character; write the "
        "file again, or save bytes: np.char.encode(array)."
      )


def common_length(arrays: Mapping[str, np.ndarray]) -> int:
  """Returns the number of examples; a ConfigError if the arrays differ in it or are empty."""
  for name, array in arrays.items():
    if array.ndim == 0:
      raise ConfigError(f"feature {name!r} is a single value; it must have one row per example.")
  lengths = {name: len(array) for name, array in arrays.items()}
  if len(set(lengths.values())) > 1:
    listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
    raise ConfigError(
      f"features have different lengths ({listed}); they must have one row per example."
    )
  length = next(iter(lengths.values()))
  if length == 0:
    raise ConfigError(f"features ({', '.join(arrays)}) have no rows; give at least one example.")
  return length


def check_weights(weight: np.ndarray, num_examples: int) -> None:
  """Raises a ConfigError unless `weight` is float32 [num_examples] of finite values >= 0."""
  if weight.dtype != np.float32 or weight.shape != (num_examples,):
    raise ConfigError(
      f"feature 'weight' is {weight.dtype} of shape {list(weight.shape)}; it must be float32 of "
      f"shape [{num_examples}], one weight per example."
    )
  bad = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
  if bad.size:
    raise ConfigError(
      f"feature 'weight' is {weight[bad[0]]} at example {bad[0]}; weights must be finite and not "
      "negative."
    )


def checked_batch(batch: object, rows: int, who: str) -> Batch:
  """Returns what `who` returned as tensors [rows, ...]; a ConfigError if it is no valid batch."""
  if not isinstance(batch, Mapping) or not batch:
    raise ConfigError(f"{who} returned {kind(batch)}; it must return a dict of name -> tensor.")
  checked = {}
  for name, value in batch.items():
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
      raise ConfigError(
        f"{who} returned {name!r} as a {type(value).__name__}; convert it to a dense tensor."
      )
    checked[name] = _of_rows(tf.convert_to_tensor(value), rows, f"{who} returned {name!r}")
    _check_shape(checked[name].shape, rows, f"{who} returned {name!r}")
  weight = checked.get("weight", tf.ones([rows]))
  if weight.dtype != tf.float32 or weight.shape != [rows]:
    raise ConfigError(
      f"{who} returned 'weight' as {weight.dtype.name} of shape {weight.shape}; it must be float32 "
      f"of shape [{rows}], one weight per row."
    )
  return checked


def _of_rows(value: tf.Tensor, rows: int, what: str) -> tf.Tensor:
  """Returns a tensor whose rows TensorFlow does not count beforehand, compared when it is read."""
  if not value.shape.rank or value.shape[0] is not None:
    return value
  count = tf.strings.as_string(tf.shape(value)[0])
  remedy = f" rows for a batch of {rows}; to leave out a row, set its weight to 0."
  value = require(tf.shape(value)[0] == rows, value, [f"{what} with ", count, remedy])
  return tf.ensure_shape(value, [rows, *value.shape[1:]])


def _check_shape(shape: tf.TensorShape, rows: int, what: str) -> None:
  if shape.rank is None or None in shape.as_list():
    raise ConfigError(
      f"{what} of shape {shape}, which is not static; set all of it with tf.ensure_shape."
    )
  if shape.rank == 0 or shape[0] != rows:
    raise ConfigError(
      f"{what} of shape {shape} for a batch of {rows} rows; its first axis must be {rows}: to "
      "leave out a row, set its weight to 0."
    )


def require_kept(batch: Batch, who: str, prefix: str = "") -> None:
  """Raises a ConfigError unless `who` kept "weight" and the int64 "example_id" of the batch.

  Of a further part, whose names begin with `prefix`, both are [rows, ratio].
  """
  weight, example_id = f"{prefix}weight", f"{prefix}example_id"
  for name in (weight, example_id):
    if name not in batch:
      raise ConfigError(f"{who} dropped {name!r}; return it with the others: {{**batch, ...}}.")
  ids, weights = batch[example_id], batch[weight]
  if ids.dtype != tf.int64 or ids.shape.rank != (2 if prefix else 1):
    raise ConfigError(
      f"{who} returned {example_id!r} as {ids.dtype.name} of shape {ids.shape}; return it "
      "unchanged."
    )
  if weights.dtype != tf.float32 or weights.shape != ids.shape:
    raise ConfigError(
      f"{who} returned {weight!r} as {weights.dtype.name} of shape {weights.shape}; it must be "
      f"float32 of shape {ids.shape}, one weight per example."
    )
