"""The command `loopwright`, from a clone: python launch.py --gin_file=configs/digits_cnn.gin.

framework/commands has the code; `python launch.py --help` lists commands, flags and exit statuses.
"""

import os
import sys

try:
  from framework.commands import main, run_process
  from framework.commands.arguments import LOCAL_FLAGS, parse_flags
except (AttributeError, ImportError) as error:
  here = os.path.dirname(os.path.abspath(__file__))
  for name in {file.removesuffix(".py") for file in os.listdir(here)} & sys.stdlib_module_names:
    if f"'{name}'" in str(error):
      which = f"{here}/{name}.py has the name of Python's own module '{name}'"
      print(f"error: {which}: rename it. ({error})", file=sys.stderr)
      sys.exit(2)
  raise

__all__ = ["LOCAL_FLAGS", "main", "parse_flags", "run_process"]

if __name__ == "__main__":
  run_process(sys.argv)
