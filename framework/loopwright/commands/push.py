"""`loopwright push s3://bucket/run`: uploads what a run could not, as its store was down."""

from loopwright.commands.arguments import Parsed
from loopwright.commands.process import say
from loopwright.errors import ConfigError
from loopwright.host import urls


def run(parsed: Parsed) -> int:
  """Uploads the local folders of the URLs; returns the exit status (host)."""
  if not parsed.arguments or not all(map(urls.is_url, parsed.arguments)):
    raise ConfigError("`loopwright push` takes URLs of runs, as in `push s3://bucket/run`.")
  from loopwright.host.files import StorageError
  from loopwright.run_folder.remote import Remote

  for url in parsed.arguments:
    try:
      print(f"{url} has all of {Remote(url).push()}")
    except StorageError as error:
      return say(f"failed: {error}", 1)
  return 0
