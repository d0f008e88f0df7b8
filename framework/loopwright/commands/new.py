"""`loopwright new waves`: a project of one's own, from loopwright/template."""

import importlib.metadata
import importlib.util
import json
import keyword
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopwright import registry
from loopwright.commands.arguments import Parsed
from loopwright.configurables.imports import REPOSITORY, SHIPPED
from loopwright.errors import ConfigError

TEMPLATE = Path(__file__).resolve().parents[1] / "template"
_RENAMED = {"gitignore": ".gitignore", "project.toml": "pyproject.toml"}
"""Else git, ruff and uv take them for their own."""
_SOURCE = '[tool.uv.sources]\nloopwright = "SOURCE"\n\n'
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def run(parsed: Parsed) -> int:
  """Makes the project and prints what to do next; returns the exit status (host)."""
  if len(parsed.arguments) != 1:
    raise ConfigError("`loopwright new` takes one name, as in `loopwright new waves`.")
  [folder] = parsed.arguments
  make(folder)
  print(f"made {folder}: next, cd {folder} && uv run loopwright train")
  return 0


def make(folder: str) -> None:
  """Writes a project to a new folder, whose last part is its name.

  Raises:
    ConfigError: the folder exists or cannot be made; or its name is not one for a module.
  """
  name = os.path.basename(os.path.normpath(folder))
  _require_name(name)
  if os.path.lexists(folder):
    raise ConfigError(f"{folder!r} exists; choose another name, or remove it.")
  try:
    os.mkdir(folder)
    for file, text in files(folder):
      Path(folder, file).write_text(text)
  except OSError as error:
    raise ConfigError(
      f"{folder!r} cannot be made ({error.strerror}); give a folder in one that exists."
    ) from error


def files(folder: str) -> Iterator[tuple[str, str]]:
  """Yields the files of a project in `folder`: name, content."""
  name = os.path.basename(os.path.normpath(folder))
  words = {"waves": name, "Waves": _class(name)}
  for file in sorted(TEMPLATE.iterdir()):
    if file.is_file():
      text = file.read_text().replace(_SOURCE, _source(folder))
      renamed = _RENAMED.get(file.name, file.name).replace("waves", name)
      yield renamed, re.sub(r"waves|Waves", lambda found: words[found[0]], text)


def _class(name: str) -> str:
  return "".join(part.capitalize() for part in name.split("_"))


def _require_name(name: str) -> None:
  if not _NAME.fullmatch(name) or keyword.iskeyword(name):
    raise ConfigError(
      f"{name!r} cannot be the name of a module; write small letters, digits and underscores, a "
      "letter first."
    )
  if importlib.util.find_spec(name) or _class(name) in registry.names(*registry.CONFIGURABLE):
    raise ConfigError(f"{name!r} is the name of an installed module; choose another.")


def _source(folder: str) -> str:
  """Returns the part of pyproject.toml that says where uv finds this Loopwright.

  A place on this machine is relative to the project, which holds on others that have both.
  """

  def path(of: str | Path) -> str:
    return os.path.relpath(os.path.realpath(of), os.path.realpath(folder))

  if SHIPPED == REPOSITORY:
    return _part(path=path(REPOSITORY), editable=True)
  direct = _direct_url()
  url = direct.get("url", "")
  if commit := direct.get("vcs_info", {}).get("commit_id"):
    return _part(git=url, rev=commit)
  if url.startswith("file://"):
    return _part(path=path(urllib.request.url2pathname(url.removeprefix("file://"))))
  return _part(url=url) if url else ""  # from an index, which uv asks anyway


def _part(**source: str | bool) -> str:
  pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in source.items())
  return _SOURCE.replace('"SOURCE"', f"{{ {pairs} }}")


def _direct_url() -> dict[str, Any]:
  """Returns the address from which pip or uv installed Loopwright; {} if it was an index."""
  return json.loads(
    importlib.metadata.distribution("loopwright").read_text("direct_url.json") or "{}"
  )
