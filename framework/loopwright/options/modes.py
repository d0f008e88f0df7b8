"""The modes of a run. Imports nothing heavy, so that parsing flags stays fast."""

from typing import Literal, get_args

Mode = Literal[
  "train", "evaluate", "train_and_evaluate", "evaluate_continuously", "export", "replay"
]
"""What `run` does."""
MODES: tuple[Mode, ...] = get_args(Mode)
TRAINING_MODES: tuple[Mode, ...] = ("train", "train_and_evaluate")
LAUNCH_MODES = (*MODES, "verify", "check_config", "tune")
"""The values of launch.py's --mode: those of `run`, and three that only examine a config."""
