"""The command `loopwright`, from a clone: python launch.py --gin_file=configs/digits_cnn.gin.

framework/commands has the code; `python launch.py --help` lists commands, flags and exit statuses.
"""

import sys

from framework.commands import main, run_process
from framework.commands.arguments import LOCAL_FLAGS, parse_flags

__all__ = ["LOCAL_FLAGS", "main", "parse_flags", "run_process"]

if __name__ == "__main__":
  run_process(sys.argv)
