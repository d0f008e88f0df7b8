"""The command `loopwright`: `python -m loopwright`, which is also how children start."""

import os
import sys

if __name__ == "__main__":
  # Without -P Python puts the working directory first: a user's file could replace a module.
  sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())] or sys.path

  from loopwright.commands import console

  console()
