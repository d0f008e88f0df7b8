"""`loopwright average runs/a runs/b --to=runs/soup`: the mean of the weights of runs."""

from loopwright.commands.arguments import Parsed
from loopwright.commands.parser import Parser
from loopwright.errors import ConfigError


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  parser.text("to", None, "The new run folder.")
  parser.whole("batches", 100, "Batches for the statistics of batch normalisation.", at_least=1)


def run(parsed: Parsed) -> int:
  """Averages runs; returns the exit status (host)."""
  if not parsed.arguments or not parsed.values.to:
    raise ConfigError(
      "`loopwright average` takes run folders and a new one, as in "
      "`average runs/a runs/b --to=runs/soup`."
    )
  from loopwright.run_folder import safetensors_files
  from loopwright.tools.runs.average import average

  if any(safetensors_files.SUFFIX in path for path in (parsed.values.to, *parsed.arguments)):
    print(safetensors_files.average(parsed.arguments, parsed.values.to))
  else:
    print(average(parsed.arguments, parsed.values.to, batches=parsed.values.batches))
  return 0
