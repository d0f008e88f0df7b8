"""The modes of a run, and its tools. Imports nothing heavy, so that parsing flags stays fast."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Literal, get_args

Mode = Literal[
  "train", "evaluate", "train_and_evaluate", "evaluate_continuously", "export", "replay"
]
"""What `run` does."""
MODES: tuple[Mode, ...] = get_args(Mode)
TRAINING_MODES: tuple[Mode, ...] = ("train", "train_and_evaluate")
LAUNCH_MODES = (*MODES, "verify", "check_config", "tune", "memory")
"""The values of launch.py's --mode: those of `run`, and four that only examine a config."""

TOOLS: Mapping[str, str] = {
  "export": "loopwright.tools.exports.export",
  "replay": "loopwright.tools.forensics.examine",
  "ledger": "loopwright.tools.ledger.recorder",
}
"""What a mode or an option of `run` loads, by name: the framework imports none of its tools."""


def tool(name: str) -> ModuleType:
  """Returns one of `TOOLS`, loaded."""
  return importlib.import_module(TOOLS[name])
