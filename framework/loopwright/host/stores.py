"""Folders and files behind a URL, such as s3://bucket/run: read, listed, written, by fsspec.

store = Store("s3://bucket/runs/digits")
for name, file in store.files().items():
  store.get(name, os.path.join(folder, name))

Imports no TensorFlow, and fsspec only when a URL is used. Credentials and addresses of servers are
those of fsspec's libraries: environment, configuration files, the identity of the machine.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loopwright.errors import ConfigError, first_line, printable
from loopwright.host.urls import EXTRAS

LIMIT_S, SLOWEST = 30.0, 1e6
"""Seconds that a call may take, and bytes that it must transfer in each further one.

The libraries' own limits are not enough: aiohttp waits for "100 Continue" without end.
"""
_WHOLE = (*EXTRAS, "abfs", "abfss", "az", "adl", "memory")
"""Schemes whose stores show an object when it is complete; in others a file is written aside."""
_ASIDE = ".tmp"
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "created")
_MODIFIED = ("LastModified", "mtime", "created")
_AT_ONCE = 8
# By default a server that is down costs 6 s, one that hangs half an hour. Mirror retries itself.
_S3 = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 1}}
_S3_RETRIES = 1


class StoreError(OSError):
  """A store cannot be reached, or refuses; the message is one line without the URL."""


class File(NamedTuple):
  """A file of a store.

  Attributes:
    size: in bytes.
    version: changes when the file is written; "" if the store does not tell.
    modified: seconds since the epoch, by the store's clock; 0 if it does not tell.
  """

  size: int
  version: str
  modified: float


class Store:
  """A folder behind a URL; names of files are relative to it. Any thread may use it (host)."""

  def __init__(self, url: str) -> None:
    """Finds the library; asks the store nothing yet.

    Raises:
      ConfigError: the URL has a scheme that fsspec does not know, a password, or wildcards; or the
        library of its scheme is missing.
    """
    self.url = url.rstrip("/")
    self._scheme = url.partition("://")[0]
    _refuse(url)
    self._system, self._root = _opened(self._scheme, self.url)

  def files(self, under: str = "") -> dict[str, File]:
    """Returns name -> file of everything in the folder, or in one folder of it.

    Raises:
      FileNotFoundError: the bucket does not exist.
      StoreError: see there.
    """
    with _errors():
      self._system.invalidate_cache()
      found = self._call("find", self._path(under), detail=True)
    root = self._system._strip_protocol(self._root).rstrip("/") + "/"  # noqa: SLF001
    return {
      path.removeprefix(root): _file(about)
      for path, about in found.items()
      if path.startswith(root) and not path.endswith(_ASIDE)
    }

  def read(self, name: str) -> bytes:
    """Returns the content of a file; raises FileNotFoundError or StoreError."""
    with _errors():
      return self._call("cat_file", self._path(name))

  def write(self, name: str, content: bytes, *, new: bool = False) -> None:
    """Writes a small file.

    Args:
      new: raise FileExistsError if there is one; exact where the store can create conditionally, as
        S3 and Google's do.
    """
    with _errors():
      self._make_parent(name)
      if not new or not self._created(self._path(name), content):
        self._complete(name, lambda path: self._call("pipe_file", path, content))

  def put(self, name: str, local: str) -> None:
    """Uploads a local file; a reader sees the old one, or all of the new one."""
    with _errors():
      self._make_parent(name)
      size = os.path.getsize(local)
      self._complete(name, lambda path: self._call("put_file", local, path, size=size))

  def put_all(self, names: Iterable[str], folder: str) -> None:
    """Uploads files of a local folder, several at once."""
    _at_once(lambda name: self.put(name, os.path.join(folder, name)), names)

  def get(self, name: str, local: str) -> None:
    """Downloads a file, whole or not at all; raises FileNotFoundError or StoreError."""
    os.makedirs(os.path.dirname(local), exist_ok=True)
    with _errors():
      size = self._call("info", self._path(name))["size"]
      self._call("get_file", self._path(name), local + _ASIDE, size=size)
    os.replace(local + _ASIDE, local)

  def get_all(self, names: Iterable[str], folder: str) -> None:
    """Downloads files to a local folder, several at once."""
    _at_once(lambda name: self.get(name, os.path.join(folder, name)), names)

  def remove(self, names: Sequence[str]) -> None:
    """Removes files; one that is missing is no error."""
    paths = [self._path(name) for name in names]
    for some in [paths, *([path] for path in paths)] if paths else []:
      with contextlib.suppress(FileNotFoundError), _errors():
        self._call("rm", some)
        if some is paths:
          return

  def _call(self, name: str, *args: Any, size: int = 0, **options: Any) -> Any:
    """Calls a method of fsspec; one that does not end in time is cancelled, and an error.

    Args:
      size: bytes to transfer.
    """
    if not self._system.async_impl:
      return getattr(self._system, name)(*args, **options)
    import asyncio

    from fsspec.asyn import sync

    async def bounded() -> Any:
      method = getattr(self._system, f"_{name}")  # the same for a running event loop
      return await asyncio.wait_for(method(*args, **options), LIMIT_S + size / SLOWEST)

    return sync(self._system.loop, bounded)

  def _created(self, path: str, content: bytes) -> bool:
    """Writes a new file; returns False for a store that cannot do so conditionally."""
    try:
      self._call("pipe_file", path, content, mode="create")
      return True
    except FileExistsError:
      raise
    except Exception:  # libraries and servers differ in what they raise
      if self._call("exists", path):
        raise FileExistsError(path) from None
      return False

  def _complete(self, name: str, write: Callable[[str], object]) -> None:
    path = self._path(name)
    if self._scheme in _WHOLE:
      write(path)
      return
    write(path + _ASIDE)
    self._system.mv(path + _ASIDE, path)  # a file system, not an object store

  def _make_parent(self, name: str) -> None:
    if self._scheme not in _WHOLE:  # an object store has no folders
      self._system.makedirs(posixpath.dirname(self._path(name)), exist_ok=True)

  def _path(self, name: str) -> str:
    return posixpath.join(self._root, name) if name else self._root


def read(url: str) -> bytes:
  """Returns the content of one file (host).

  Raises:
    ConfigError: it is missing, or the store cannot be reached.
  """
  store, name = parent(url)
  with reading(url):
    return store.read(name)


def exists(url: str) -> bool:
  """Whether there is a file at a URL; raises a ConfigError if the store cannot be reached."""
  store, name = parent(url)
  with reading(url):
    return bool(name) and name in store.files(name)


def parent(url: str) -> tuple[Store, str]:
  """Returns the folder of a URL, and the last name in it; "" for a bucket."""
  scheme, _, path = url.rstrip("/").partition("://")
  folder, _, name = path.rpartition("/")
  return (Store(f"{scheme}://{folder}"), name) if folder else (Store(url), "")


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
  """Turns what a store raises into a ConfigError with the URL (any context)."""
  try:
    yield
  except FileNotFoundError as error:
    reason = f" ({first_line(error)})" if str(error) else ""
    raise ConfigError(f"{url!r} does not exist{reason}; correct the URL.") from error
  except StoreError as error:
    raise ConfigError(
      f"cannot use {url!r} ({error}); check the URL, the network and the credentials, then start "
      "the same command again."
    ) from error


def cache_folder(url: str, use: str) -> str:
  """Returns the local folder for a URL, the same in each process; its last name is the URL's.

  Args:
    use: what it is for: each use has a folder of its own.
  """
  top = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  url = url.rstrip("/")
  digest = hashlib.sha256(url.encode()).hexdigest()[:16]
  return os.path.join(top, "loopwright", f"{use}-{digest}", posixpath.basename(url) or "root")


def _refuse(url: str) -> None:
  scheme, _, path = url.partition("://")
  place = path.partition("/")[0]
  if not scheme or (scheme in EXTRAS and not place):
    raise ConfigError(
      f"{url!r} has no {'bucket' if scheme else 'scheme'}; write 's3://bucket/run'."
    )
  if ":" in place.rpartition("@")[0]:
    raise ConfigError(
      f"the URL of {url.rpartition('@')[2]!r} has a password before '@', which would appear in "
      "logs; put credentials where its library reads them, such as the environment."
    )
  if set("*?[]") & set(url):
    raise ConfigError(f"{url!r} has one of *, ?, [ and ], which are wildcards; rename it.")


def _opened(scheme: str, url: str) -> tuple[Any, str]:
  try:
    import fsspec
  except ImportError:
    raise _missing(scheme, url, "fsspec") from None
  options: dict[str, Any] = {"use_listings_cache": False}
  if EXTRAS.get(scheme) == "s3" and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
    options["config_kwargs"] = _S3
  try:
    system, root = fsspec.core.url_to_fs(url, **options)
  except ImportError as error:
    raise _missing(scheme, url, first_line(error)) from None
  except ValueError:
    raise ConfigError(
      f"{url!r} has the scheme {scheme!r}, which fsspec does not know; use s3://, gs:// or a local "
      "folder."
    ) from None
  except Exception as error:  # libraries differ in what they raise
    reason = printable(first_line(error))[:200]
    raise ConfigError(f"cannot use {url!r} ({type(error).__name__}: {reason}).") from error
  if "config_kwargs" in options:
    system.retries = _S3_RETRIES
  return system, root


def _missing(scheme: str, url: str, reason: str) -> ConfigError:
  extra = EXTRAS.get(scheme)
  remedy = f"pip install 'loopwright[{extra}]'" if extra else "install the library that it names"
  return ConfigError(f"{url!r} needs a library that is missing ({printable(reason)}): {remedy}.")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
  """Turns whatever a library raises into a StoreError; what says that a file is missing stays."""
  try:
    yield
  except (FileNotFoundError, FileExistsError, StoreError):
    raise
  except Exception as error:
    reason = f"{type(error).__name__}: {printable(first_line(error))[:200]}"
    late = "Timeout" in type(error).__name__
    raise StoreError("it does not answer in time" if late else reason) from error


def _file(about: Mapping[str, Any]) -> File:
  version = next((str(about[key]) for key in _VERSIONS if about.get(key)), "")
  when = next((about[key] for key in _MODIFIED if about.get(key)), 0.0)
  seconds = when.timestamp() if hasattr(when, "timestamp") else when
  return File(int(about["size"]), version, seconds if isinstance(seconds, int | float) else 0.0)


def _at_once(job: Callable[[str], None], names: Iterable[str]) -> None:
  """Does a job for each name, several at once; raises the first error."""
  with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
    jobs = [pool.submit(functools.partial(job, name)) for name in names]
    try:
      for each in concurrent.futures.as_completed(jobs):
        each.result()
    finally:
      for each in jobs:
        each.cancel()
