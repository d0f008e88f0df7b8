"""Arrays from files: .npz, folders of .npy, idx. What a header claims is checked first."""

from __future__ import annotations

import math
import os
import zipfile

import numpy as np

from loopwright.declaration import may_change
from loopwright.errors import ConfigError
from loopwright.host import bounded
from loopwright.inputs.sources import READS

_AGAIN, _SAVE = "download it again", "save it again with numpy"
_NUMPY_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str, *, max_bytes: int = bounded.MAX_BYTES) -> np.ndarray:
  """Reads a file in MNIST's idx format, plain or gzipped; returns it in native byte order (host).

  The format: http://yann.lecun.com/exdb/mnist.

  Args:
    path: of the file.
    max_bytes: the most memory that the array may take.

  Raises:
    ConfigError: no such file, not a complete idx file, or an array above `max_bytes`.
  """
  with bounded.Reader(path, "an idx file", _AGAIN, unpack=True) as file:
    return _idx(file, max_bytes)


@may_change(READS)
def load_arrays(path: str, *, max_bytes: int = bounded.MAX_BYTES) -> dict[str, np.ndarray]:
  """Loads an .npz file, or a folder of .npy files, as name -> array, for `ArraySource` (host).

  An .npz is read into memory. The .npy files of a folder are memory-mapped, so they may be larger
  than memory.

  Args:
    path: of the file or folder.
    max_bytes: the most memory that the arrays of an .npz may take.

  Raises:
    ConfigError: no such file or folder, no arrays, damaged files, arrays of Python objects, or an
      .npz above `max_bytes`.
  """
  if os.path.isdir(path):
    names = sorted(name for name in os.listdir(path) if name.endswith(".npy"))
    arrays = {name.removesuffix(".npy"): _mapped(os.path.join(path, name)) for name in names}
  elif path.endswith(".npz"):
    arrays = _unzipped(path, max_bytes)
  else:
    raise ConfigError(f"{path!r} is neither an .npz file nor a folder of .npy files; correct it.")
  if not arrays:
    raise ConfigError(f"{path!r} has no arrays; it must be an .npz file or a folder of .npy files.")
  return arrays


def _idx(file: bounded.Reader, max_bytes: int) -> np.ndarray:
  head = file.read(4)
  if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_DTYPES:
    raise ConfigError(
      f"{file.path!r} is not an idx file: it begins with {head.hex(' ') or 'nothing'}, not with "
      "00 00, a type and a number of axes; download it again."
    )
  dtype, axes = np.dtype(_IDX_DTYPES[head[2]]), head[3]
  sides = file.read(4 * axes)
  begins = 4 + 4 * axes
  if len(sides) < 4 * axes:
    raise _not_as_implied(file.path, 4 + len(sides), f"at least {begins}")
  shape = tuple(map(int, np.frombuffer(sides, ">u4")))
  implied = begins + math.prod(shape) * dtype.itemsize
  if file.size not in (None, implied):
    raise _not_as_implied(file.path, f"{file.size}", implied)
  bounded.require_bytes(file.path, implied, max_bytes)
  with bounded.reading(file.path, _AGAIN):
    array = np.empty(shape, dtype)
  there = begins + file.read_into(array.reshape(-1).view(np.uint8).data)
  if there != implied or file.read(1):
    raise _not_as_implied(file.path, there if there != implied else f"more than {there}", implied)
  return array.astype(dtype.newbyteorder("="), copy=False)


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


def _unzipped(path: str, max_bytes: int) -> dict[str, np.ndarray]:
  bounded.require_file(path, "an .npz file")
  members = bounded.require_archive(path, max_bytes, _SAVE)
  if any(each.compress_type not in _NUMPY_COMPRESSION for each in members):
    raise ConfigError(f"{path!r} is compressed in a way that numpy does not use; {_SAVE}.")
  with bounded.reading(path, _SAVE), np.load(path, allow_pickle=False) as archive:
    arrays: dict[str, np.ndarray] = {name: np.asarray(archive[name]) for name in archive.files}
  # TensorFlow adds 24 bytes to each text.
  sizes = [a.size * (a.itemsize + 24 * (a.dtype.kind in "SU")) for a in arrays.values()]
  bounded.require_bytes(path, sum(sizes), max_bytes)
  return arrays
