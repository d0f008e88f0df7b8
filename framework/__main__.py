"""The command `loopwright` as a file: `python -m framework`, or by its path, as children start."""

import sys
from pathlib import Path

if __name__ == "__main__":
  sys.path[0] = str(Path(__file__).parents[1])  # neither this folder nor the working directory

  from framework.commands import run_process

  run_process(sys.argv)
