"""Keeps secrets out of what a run writes: a digest stands for each, found by its name.

    shown("Upload.api_token", "a1b2c3")        'sha256:b5c6e0d9f0b1' in place of the text
    shown("Upload.api_token", "env:UPLOADS")   the same: the environment has the secret
    shown("Text.pad_token", "<pad>")           the same: it is no secret

A digest tells that a secret changed, not what it is. It is short, and a secret that can be guessed
can be guessed from it too.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shlex
import sys
from collections.abc import Iterable
from typing import Any

ENVIRONMENT = re.compile(r"env:([A-Za-z_]\w*)")
"""A value that stands for a variable of the environment."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{12}")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS = re.compile("secrets?|passw(or)?ds?|passphrase|pwd|credentials?|apikeys?|authorization")
_MAYBE = re.compile("token|key")
_ACCESS = re.compile("api|access|auth|bearer|private|refresh|secret|service|session")
"""Before `tokens` or `keys`: the plural alone is a list of words, or of columns."""
_NO_VALUE = re.compile(
  "columns?|count|dim|dir|field|file|folder|format|length|name|path|prefix|separator|size|suffix|"
  "type"
)
"""A last part that says that the value is about a secret, such as its file."""
_WORDS = re.compile(
  # a token of a text
  "begin|blank|bos|cls|end|eos|fill|first|last|mask|newline|next|oov|pad|padding|sep|separator|"
  "space|special|start|stop|unk|unknown|word|"
  # a key of a table
  "audio|batch|cache|caption|class|column|data|dataset|dict|example|features?|field|group|id|image|"
  "index|inputs?|join|json|labels?|metric|model|outputs?|parent|primary|public|query|record|"
  "sequence|sort|state|target|text|video|weights?"
)
"""Before `token` or `key`: not one that opens something."""
_BRACKETED = re.compile(r"<.*>|\[.*\]|\{.*\}|\|.*\||.")
_NAMED = re.compile(r"([\w./]+)['\"]?\s*[=:]\s*(?=\S)")


def is_secret(name: str) -> bool:
  """Whether the name of a binding, an argument or a macro says that its text is a secret."""
  parts = [part.lower() for part in _PARTS.findall(re.split(r"[./]", name)[-1])]
  if not parts or _NO_VALUE.fullmatch(parts[-1]):
    return False
  before = parts[-2] if len(parts) > 1 else ""
  if any(map(_ALWAYS.fullmatch, parts)):
    return True
  if _MAYBE.fullmatch(parts[-1]):
    return not _WORDS.fullmatch(before)
  return bool(_MAYBE.fullmatch(parts[-1].removesuffix("s")) and _ACCESS.fullmatch(before))


def shown(name: str, value: Any) -> Any:
  """Returns a value as it may be recorded: texts under the name of a secret become digests.

  Args:
    name: of the binding; in a dict, each value is also under its own key.
    value: as gin has it. What is no text, such as a number, stays.
  """
  if type(value) in (list, tuple):
    return type(value)(shown(name, each) for each in value)
  if type(value) is dict:
    return {key: shown(_inner(name, key), each) for key, each in value.items()}
  if not isinstance(value, str | bytes) or not is_secret(name):
    return value
  text = value.decode(errors="replace") if isinstance(value, bytes) else value
  stays = ENVIRONMENT.fullmatch(text) or _DIGEST.fullmatch(text) or _BRACKETED.fullmatch(text)
  return value if stays or not text else digest(text)


def digest(text: str) -> str:
  """Returns the digest that replaces a secret."""
  return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"


def is_digest(value: object) -> bool:
  """Whether a value is a digest in place of a secret."""
  return isinstance(value, str) and bool(_DIGEST.fullmatch(value))


def line(text: str) -> str:
  """Returns a line, such as `--gin_param=Upload.token='a1'`, with a digest for the first secret.

  The secret ends where the line does.
  """
  for found in _NAMED.finditer(text):
    name, rest = found[1], text[found.end() :]
    if is_secret(name) and rest[0] not in "@%":
      try:
        value = ast.literal_eval(rest.strip())
      except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = rest.strip()
        return text[: found.end()] + str(shown(name, value))
      return text[: found.end()] + repr(shown(name, value))
  return text


def command(words: Iterable[str] | None = None) -> str:
  """Returns a command line for a shell, by default that of this process, without secrets."""
  return shlex.join(map(line, sys.orig_argv if words is None else words))


def same(before: str | None, now: str | None) -> bool:
  """Whether two recorded values are equal, or one is the digest of the other's variable."""
  if before == now or before is None or now is None:
    return before == now
  return _digest_of(before) == _digest_of(now) is not None


def _inner(name: str, key: object) -> str:
  return key if isinstance(key, str) and is_secret(key) else name


def _digest_of(recorded: str) -> str | None:
  text = recorded.strip("'\"")
  if found := ENVIRONMENT.fullmatch(text):
    return digest(os.environ[found[1]]) if found[1] in os.environ else None
  return text if is_digest(text) else None
