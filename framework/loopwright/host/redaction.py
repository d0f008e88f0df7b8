"""Keeps secrets out of what a run writes: a digest stands for each, found by its name.

    shown("Upload.api_token", "a1b2c3")        'sha256:b5c6e0d9f0b1' in place of the text
    shown("Upload.api_token", "env:UPLOADS")   the same: the environment has the secret
    shown("Text.pad_token", "<pad>")           the same: no secret has this name

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
NAMES = (
  *("access_key", "access_token", "api_key", "api_token", "apikey", "auth_token", "authorization"),
  *("bearer_token", "credential", "credentials", "hf_token", "passphrase", "passwd", "password"),
  *("private_key", "pwd", "refresh_token", "secret", "secret_key", "session_token", "wandb_key"),
)
"""How the name of a secret ends. "token" alone is one too; "pad_token" and "label_key" are not."""
_NAMED = re.compile(r"([\w./]+)['\"]?\s*[=:]\s*(?=\S)")


def is_secret(name: str) -> bool:
  """Whether the name of a binding, an argument or a macro says that its text is a secret."""
  last = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.split(r"[./]", name)[-1]).lower()
  return last == "token" or f"_{last}".endswith(tuple(f"_{each}" for each in NAMES))


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
  stays = ENVIRONMENT.fullmatch(text) or _DIGEST.fullmatch(text)
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
  """Whether two recorded values are equal, or one is the digest of the other."""
  if before == now or before is None or now is None:
    return before == now
  texts = [before.strip("'\""), now.strip("'\"")]
  return any(map(is_digest, texts)) and _digest_of(texts[0]) == _digest_of(texts[1])


def _inner(name: str, key: object) -> str:
  return key if isinstance(key, str) and is_secret(key) else name


def _digest_of(text: str) -> str | None:
  if found := ENVIRONMENT.fullmatch(text):
    return digest(os.environ[found[1]]) if found[1] in os.environ else None
  return text if is_digest(text) else digest(text)
