"""`loopwright export --format=safetensors`: the weights of a run, for other libraries."""

from __future__ import annotations

import os

from loopwright.errors import ConfigError
from loopwright.run_folder import safetensors_files
from loopwright.run_folder.matching import Names
from loopwright.runs import from_config


def export_weights(model_dir: str) -> str:
  """Writes <model_dir>/model.safetensors; returns a line about it (host).

  It has the weights that the run evaluates, under the model's `weight_names` if it has them.

  Raises:
    ConfigError: the folder has no run, or no complete checkpoint of it, or a folder of that name.
  """
  path = os.path.join(model_dir, f"model{safetensors_files.SUFFIX}")
  if os.path.isdir(path):
    raise ConfigError(f"{path!r} is a folder, where the file must be; move it away.")
  model = from_config.load(model_dir).model
  values = Names(model).in_file(getattr(model, "weight_names", {}))
  safetensors_files.write(path, values)
  return f"{path}: {len(values)} variables, {sum(v.size for v in values.values()):,} parameters"
