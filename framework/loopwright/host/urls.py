"""Whether a path is a URL, such as s3://bucket/run; run_folder/remote.py reads it."""

import re

from loopwright.errors import ConfigError

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Scheme -> the extra that has its library."""
_TORN = re.compile(
  rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?!/)|(?P<known>{'|'.join(EXTRAS)})(:|/?//)(?!//)"
)
"""How a path begins that is a URL but for its "://"."""


def is_url(path: str) -> bool:
  """Whether a path is a URL, not a path of the operating system.

  Raises:
    ConfigError: it is neither, such as "s3:/bucket/run", which would be a folder named "s3:"; or a
      URL with a password.
  """
  if "://" in path:
    place = path.partition("://")[2].partition("/")[0]
    if ":" in place.rpartition("@")[0]:
      raise ConfigError(
        f"the URL of {place.rpartition('@')[2]!r} has a password before '@', which logs would "
        "show; put it where the library of the store reads it, such as the environment."
      )
    return True
  if found := _TORN.match(path):
    scheme, rest = found["scheme"] or found["known"], path[found.end() :].lstrip("/")
    url, folder = f"{scheme}://{'/' * (scheme == 'file')}{rest}", f"./{path}"
    raise ConfigError(
      f"{path!r} has no '://' and begins like a URL; write {url!r} for a URL, or {folder!r} for a "
      "folder on disk."
    )
  return False


def require_path(what: str, path: str, why: str) -> None:
  """Raises a ConfigError for a URL where only a folder on disk will do."""
  if is_url(path):
    raise ConfigError(f"{what} is {path!r}, but {why}: give a folder on disk.")
