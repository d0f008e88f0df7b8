"""The command `loopwright`, from a clone: python launch.py --gin_file=configs/digits_cnn.gin.

framework/loopwright/commands has the code; `python launch.py --help` lists commands and flags.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "framework")
if SOURCE not in sys.path:  # nothing has to be installed, in this process or in its children
  sys.path.insert(0, SOURCE)
  paths = [SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])]
  os.environ["PYTHONPATH"] = os.pathsep.join(paths)

try:
  from loopwright.commands import main, run_process
  from loopwright.commands.arguments import LOCAL_FLAGS, parse_flags
except (AttributeError, ImportError) as error:
  for name in {file.removesuffix(".py") for file in os.listdir(HERE)} & sys.stdlib_module_names:
    if f"'{name}'" in str(error):
      which = f"{HERE}/{name}.py has the name of Python's own module '{name}'"
      print(f"error: {which}: rename it. ({error})", file=sys.stderr)
      sys.exit(2)
  if (
    isinstance(error, ModuleNotFoundError)
    and error.name
    and error.name.split(".")[0] != "loopwright"
  ):
    print(
      f"error: the package {error.name!r} is not installed in {sys.executable}; run: uv run "
      "launch.py, or pip install -e . in this folder, which bring it.",
      file=sys.stderr,
    )
    sys.exit(2)
  raise

__all__ = ["LOCAL_FLAGS", "main", "parse_flags", "run_process"]

if __name__ == "__main__":
  run_process(sys.argv)
