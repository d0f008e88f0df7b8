"""The modes of a run: the one list of them. Imports nothing, so that flags can be read at once."""

from typing import Literal, get_args

Mode = Literal[
  "train", "evaluate", "train_and_evaluate", "evaluate_continuously", "export", "replay"
]
"""What `run` does."""
MODES: tuple[Mode, ...] = get_args(Mode)
TRAINING_MODES: tuple[Mode, ...] = ("train", "train_and_evaluate")
CHECKING_MODES = ("verify", "check_config", "tune")
"""What launch.py does beside them: it looks at a config and trains nothing for good."""
