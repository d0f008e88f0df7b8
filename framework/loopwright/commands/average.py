"""`loopwright average runs/a runs/b --to=runs/soup`: the mean of the weights of runs."""

from absl import flags

from loopwright.commands.arguments import Parsed
from loopwright.errors import ConfigError


def define(values: flags.FlagValues) -> None:
  """Adds the command's flags."""
  flags.DEFINE_string("to", None, "The new run folder.", values)
  flags.DEFINE_integer(
    "batches", 100, "Batches for the statistics of batch normalisation.", 1, None, values
  )


def run(parsed: Parsed) -> int:
  """Averages runs; returns the exit status (host)."""
  if not parsed.arguments or not parsed.values.to:
    raise ConfigError(
      "`loopwright average` takes run folders and a new one, as in "
      "`average runs/a runs/b --to=runs/soup`."
    )
  from loopwright.tools.runs.average import average

  print(average(parsed.arguments, parsed.values.to, batches=parsed.values.batches))
  return 0
