"""Arrays from files: .npz, folders of .npy, idx."""

from __future__ import annotations

import gzip
import math
import os

import numpy as np

from loopwright.errors import ConfigError
from loopwright.host import bounded
from loopwright.inputs.sources import READS
from loopwright.options.declaration import may_change

_AGAIN, _SAVE = "download it again", "save it again with numpy"
_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str) -> np.ndarray:
  """Reads a file in MNIST's idx format, plain or gzipped; returns it in native byte order (host).

  The format: http://yann.lecun.com/exdb/mnist.

  Args:
    path: of the file.

  Raises:
    ConfigError: no such file, or not a complete idx file.
  """
  content = bounded.content(path, "an idx file", remedy=_AGAIN)
  if content[:2] == b"\x1f\x8b":
    with bounded.reading(path, _AGAIN):
      content = gzip.decompress(content)
  return _idx(path, content)


@may_change(READS)
def load_arrays(path: str) -> dict[str, np.ndarray]:
  """Loads an .npz file, or a folder of .npy files, as name -> array, for `ArraySource` (host).

  >>> np.savez("pairs.npz", x=[1, 2], y=[3, 4])
  >>> {name: array.tolist() for name, array in lw.load_arrays("pairs.npz").items()}
  {'x': [1, 2], 'y': [3, 4]}

  An .npz is read into memory. The .npy files of a folder are memory-mapped, so they may be larger
  than memory.

  Args:
    path: of the file or folder.

  Raises:
    ConfigError: no such file or folder, no arrays, damaged files, or arrays of Python objects.
  """
  if os.path.isdir(path):
    names = sorted(name for name in os.listdir(path) if name.endswith(".npy"))
    arrays = {name.removesuffix(".npy"): _mapped(os.path.join(path, name)) for name in names}
  elif path.endswith(".npz"):
    arrays = _unzipped(path)
  else:
    raise ConfigError(f"{path!r} is neither an .npz file nor a folder of .npy files; correct it.")
  if not arrays:
    raise ConfigError(f"{path!r} has no arrays; it must be an .npz file or a folder of .npy files.")
  return arrays


def _idx(path: str, content: bytes) -> np.ndarray:
  if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_DTYPES:
    raise ConfigError(
      f"{path!r} is not an idx file: it begins with {content[:4].hex(' ') or 'nothing'}, not with "
      "00 00, a type and a number of axes; download it again."
    )
  dtype, begins = np.dtype(_IDX_DTYPES[content[2]]), 4 + 4 * content[3]
  if len(content) < begins:
    raise _not_as_implied(path, len(content), f"at least {begins}")
  shape = tuple(map(int, np.frombuffer(content[4:begins], ">u4")))
  implied = begins + math.prod(shape) * dtype.itemsize
  if len(content) != implied:
    raise _not_as_implied(path, len(content), implied)
  array = np.frombuffer(content, dtype, offset=begins).reshape(shape)
  return array.astype(dtype.newbyteorder("="))


def _not_as_implied(path: str, size: int | str, implied: int | str) -> ConfigError:
  return ConfigError(
    f"{path!r} has {size} bytes, but its header implies {implied}; it is truncated or damaged: "
    "write or download it again."
  )


def _mapped(path: str) -> np.ndarray:
  size = bounded.require_file(path, "an .npy file")
  with bounded.reading(path, _SAVE):
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
  if not isinstance(array, np.memmap):
    raise ConfigError(f"{path!r} is not an .npy file; save it again with numpy.")
  if size != (implied := array.offset + array.nbytes):
    raise _not_as_implied(path, size, implied)
  return array


def _unzipped(path: str) -> dict[str, np.ndarray]:
  bounded.require_file(path, "an .npz file")
  with bounded.reading(path, _SAVE), np.load(path, allow_pickle=False) as archive:
    return {name: np.asarray(archive[name]) for name in archive.files}
