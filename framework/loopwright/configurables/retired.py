"""Names that configs of run folders may have, and nothing reads any more: they are left out."""

import dataclasses
from typing import Any

from loopwright.configurables.reading import Config, Reference

ACTIONS = ("LayerStatistics", "NoiseScale", "Spikes", "TimeBudget")
LIMITED = (
  *("ImageFolderSource", "TextFiles", "fashion_mnist", "image_folder", "load_arrays"),
  "text_files",
)
"""What had the parameter "max_bytes"."""


def is_retired(name: str) -> bool:
  """Whether nothing reads "name", or "name.parameter", any more."""
  name, _, parameter = name.rpartition("/")[2].partition(".")
  return name in ACTIONS or (parameter == "max_bytes" and name in LIMITED)


def without(config: Config) -> Config:
  """Returns a config without retired names, of which a line says so (host)."""
  gone = [str(each) for each in config.bindings if is_retired(f"{each.name}.{each.parameter}")]
  kept = [
    dataclasses.replace(each, value=_listed(each.value, gone))
    for each in config.bindings
    if not is_retired(f"{each.name}.{each.parameter}")
  ]
  if gone:
    from absl import logging  # late: no help needs it

    logging.warning("left out, as nothing reads it any more: %s", ", ".join(dict.fromkeys(gone)))
  return config._replace(bindings=kept)


def _listed(value: Any, gone: list[str]) -> Any:
  """Returns a value, of a list or tuple without retired references, which `gone` gets."""
  if type(value) not in (list, tuple):
    return value
  old = [each for each in value if isinstance(each, Reference) and is_retired(each.name)]
  gone += map(repr, old)
  return type(value)(each for each in value if each not in old)
