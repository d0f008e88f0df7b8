"""`loopwright push s3://bucket/run`: uploads what a run could not, as its store was down."""

from absl import flags

from framework.commands.arguments import Parsed
from framework.commands.process import say
from framework.errors import ConfigError
from framework.host import stores


def define(values: flags.FlagValues) -> None:
  """Adds the command's flags: none."""


def run(parsed: Parsed) -> int:
  """Uploads the local folders of the URLs; returns the exit status (host)."""
  if not parsed.arguments or not all(map(stores.is_url, parsed.arguments)):
    raise ConfigError("`loopwright push` takes URLs of runs, as in `push s3://bucket/run`.")
  from framework.host.files import StorageError
  from framework.run_folder.remote import Remote

  for url in parsed.arguments:
    try:
      print(f"{url} has all of {Remote(url).push()}")
    except StorageError as error:
      return say(f"failed: {error}", 1)
  return 0
