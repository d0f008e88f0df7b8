"""`loopwright predict runs/digits_cnn --output=digits.npz`: what a trained run computes, by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from loopwright.errors import ConfigError
from loopwright.host import files

if TYPE_CHECKING:
  from loopwright.commands.arguments import Parsed
  from loopwright.commands.parser import Parser
  from loopwright.graphs.aliases import Batch
  from loopwright.runs.from_config import Loaded

NPZ, PARQUET = ".npz", ".parquet"
ID = "example_id"


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  parser.text("output", "predictions.npz", "The file to write, .npz or .parquet.")
  parser.text("split", "eval", "The split of the task to read; default: eval.")
  parser.text("data", None, "Read this file of features, .npz, in the place of a split.")
  parser.whole("batch_size", 128, "Examples in a batch.", at_least=1)


def run(parsed: Parsed) -> int:
  """Writes the outputs of a run's model for each example; returns 0 (host).

  Raises:
    ConfigError: not one run folder; no such split or file; outputs that are not by row.
  """
  values = parsed.values
  if len(parsed.arguments) != 1:
    raise ConfigError("`loopwright predict` takes one run folder, as in `predict runs/a`.")
  if not values.output.endswith((NPZ, PARQUET)):
    raise ConfigError(f"--output={values.output!r} must end in {NPZ} or {PARQUET}.")
  from loopwright.inputs import array_files, sources
  from loopwright.runs import from_config

  loaded = from_config.load(parsed.arguments[0])
  if values.data:
    source: Any = sources.ArraySource(features=array_files.load_arrays(values.data))
  else:
    source = loaded.task.source(values.split)
  found = predicted(loaded, source, values.batch_size)
  write(values.output, found)
  print(f"{values.output}: {len(found[ID])} examples, {', '.join(sorted(found))}")
  return 0


def predicted(loaded: Loaded, source: Any, batch_size: int = 128) -> dict[str, np.ndarray]:
  """Returns name -> outputs of `Task.forward`, [examples, ...], in the order of a source (host).

  A single output is called "outputs"; the parts of a nest have their keys, with "/" between them.
  "example_id" has the place of each row in the source. Padded rows are left out.

  Raises:
    ConfigError: an output has not a row for each example.
  """
  import tensorflow as tf

  from loopwright.inputs import datasets, sources
  from loopwright.task import preprocess_of

  task = loaded.task
  data = datasets.eval_dataset(
    sources.main_source(source), global_batch_size=batch_size, preprocess=preprocess_of(task)
  )

  @tf.function
  def forward(batch: Batch) -> Any:
    return task.forward(batch, training=False)

  rows: dict[str, list[np.ndarray]] = {}
  for batch in (each for one in (data if isinstance(data, list) else [data]) for each in one):
    real = batch[ID].numpy() >= 0  # others are padding
    outputs = {**dict(_named(forward(batch))), ID: batch[ID]}
    for name, value in outputs.items():
      if value.shape.rank == 0 or value.shape[0] != len(real):
        raise ConfigError(
          f"the output {name!r} of {type(task).__name__}.forward has the shape "
          f"{list(value.shape)}; it must have a row for each of the {len(real)} examples."
        )
      rows.setdefault(name, []).append(tf.convert_to_tensor(value).numpy()[real])
  return {name: np.concatenate(parts) for name, parts in rows.items()}


def write(path: str, found: Mapping[str, np.ndarray]) -> None:
  """Writes arrays of one length as .npz, or as a table of Parquet, whole or not at all (host)."""
  if path.endswith(NPZ):
    import io

    arrays: Mapping[str, Any] = found
    np.savez(content := io.BytesIO(), **arrays)
    files.atomic_write(path, content.getvalue())
    return
  try:
    import pyarrow
    from pyarrow import parquet
  except ModuleNotFoundError as error:
    raise ConfigError(
      f"--output={path!r} needs the package pyarrow; run: pip install pyarrow, or write {NPZ}."
    ) from error
  columns = {name: list(map(np.ndarray.tolist, value)) if value.ndim > 1 else value
             for name, value in found.items()}  # fmt: skip
  parquet.write_table(pyarrow.table(columns), path)


def _named(outputs: Any, name: str = "") -> Iterator[tuple[str, Any]]:
  """Yields the parts of a nest of outputs with their names."""
  parts = outputs._asdict() if hasattr(outputs, "_asdict") else outputs
  if isinstance(parts, list | tuple):
    parts = dict(enumerate(parts))
  if not isinstance(parts, Mapping):
    yield name or "outputs", outputs
    return
  for key, part in parts.items():
    yield from _named(part, f"{name}/{key}".lstrip("/"))
