"""Does every damaged or hostile file end in one line, without a crash, a hang or much memory?

  python -m benchmarks.trials fuzz --trials 100            # 100,000 files a reader
  python -m benchmarks.trials fuzz --only "npz|csv"        # some readers, 1,000 files

Each file is a valid one with bits, bytes, length fields or numbers changed, cut short, or put
together from parts; one in twenty is plain garbage. A reader may return what it reads, or raise a
ConfigError of one line. Anything else is a failure, as are a crash, ten seconds without an answer
and 2 GB of memory, see fuzzing.py.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import io
import os
import random
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from PIL import Image

from benchmarks import fuzzing
from benchmarks.trials import Outcome, Run
from loopwright import configurables, failures
from loopwright.configurables.table import register_all
from loopwright.errors import ConfigError
from loopwright.host import children
from loopwright.inputs.array_files import load_arrays, read_idx
from loopwright.inputs.image_folder import ImageFolderSource
from loopwright.inputs.sources import ArraySource
from loopwright.run_folder import h5
from loopwright.run_folder.warm_start import WarmStart
from loopwright.tasks import language_model, text_classification

EDGES = (
  *(b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80\0\0\0"),
  *(b"\0\0\0\x80", b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff" * 8, b"\0\0\0\0\x01\0\0\0"),
  *(b"\x40\0\0\0", b"\0\0\0\x40", b"\0\xff", b"\xff\xff", b"\x7f"),
)
WORDS = (b"-1", b"0", b"1e9", b"99999999999999999999", b"4294967295", b"(", b"[[[[", b"'", b"O8")


def mutated(rng: random.Random, valid: Sequence[bytes]) -> bytes:
  """Returns a valid file with one to eight changes, or garbage."""
  if rng.random() < 0.05:
    return rng.choice(valid)[: rng.randrange(12)] + rng.randbytes(rng.randrange(400))
  data = bytearray(rng.choice(valid))
  for _ in range(1 + int(rng.expovariate(0.8))):
    rng.choice(CHANGES)(rng, data, valid)
  return bytes(data)


def flip(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Flips a bit."""
  if data:
    data[_place(rng, data)] ^= 1 << rng.randrange(8)


def replace(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Replaces a byte."""
  if data:
    data[_place(rng, data)] = rng.randrange(256)


def edge(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Writes a number such as a length field may have it at its limits."""
  value = rng.choice(EDGES)
  at = _place(rng, data)
  data[at : at + len(value)] = value


def cut(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Ends the file early."""
  del data[rng.randrange(len(data) + 1) :]


def drop(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Takes some bytes out."""
  at = _place(rng, data)
  del data[at : at + rng.randrange(1, 16)]


def repeat(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Repeats some bytes."""
  at = _place(rng, data)
  data[at:at] = data[at : at + rng.randrange(1, 64)] * rng.choice([1, 1, 2, 50])


def splice(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Ends with the end of another file."""
  other = rng.choice(valid)
  data[_place(rng, data) :] = other[_place(rng, other) :]


def word(rng: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
  """Writes text, as in the header of an .npy file."""
  at = _place(rng, data)
  value = rng.choice(WORDS)
  data[at : at + rng.choice([0, len(value)])] = value


CHANGES = (flip, flip, replace, edge, edge, edge, cut, drop, repeat, splice, word)


def _place(rng: random.Random, data: Sequence[int]) -> int:
  """Returns an index, of the first hundred bytes half of the time: there the header is."""
  end = len(data) if rng.random() < 0.5 else min(len(data), 100)
  return rng.randrange(end) if end else 0


# ---- Valid files ----


def idx_files() -> list[bytes]:
  """Arrays of several types and ranks in MNIST's format."""
  kinds = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
  shapes = [(3,), (2, 3), (2, 3, 4), ()]
  made = []
  for code, kind in kinds.items():
    for shape in shapes:
      head = struct.pack(">HBB", 0, code, len(shape)) + struct.pack(f">{len(shape)}I", *shape)
      made.append(head + np.ones(shape, kind).tobytes())
  return made


def npy_files() -> list[bytes]:
  """Arrays of several types in numpy's format, of each version of it."""
  arrays = [
    np.arange(6.0).reshape(2, 3), np.array([b"ab", b"c"]), np.array(["ab", "c"]),
    np.array(3, ">i4"), np.zeros((2, 0)), np.zeros(3, [("a", "<f4"), ("b", "i2", (2,))]),
    np.array([None, 1]), np.zeros(2, "M8[s]"), np.asfortranarray(np.ones((2, 3), "f2")),
  ]  # fmt: skip
  made = []
  for array in arrays:
    for version in ((1, 0), (2, 0), (3, 0)):
      file = io.BytesIO()
      np.lib.format.write_array(file, array, version=version)
      made.append(file.getvalue())
  return made


def npz_files() -> list[bytes]:
  """Archives of such arrays, packed and not."""
  made = []
  for save in (np.savez, np.savez_compressed):
    for arrays in ({"x": np.arange(6.0), "y": np.zeros((6, 2), "u1")}, {"s": np.array(["a", "b"])}):
      file = io.BytesIO()
      save(file, **arrays)
      made.append(file.getvalue())
  return made


def npz_of(rng: random.Random) -> bytes:
  """An archive, damaged; or one of damaged arrays."""
  if rng.random() < 0.5:
    return mutated(rng, NPZ)
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w", rng.choice([0, 8])) as archive:
    for name in ("x.npy", "y.npy", "other")[: rng.randrange(1, 4)]:
      archive.writestr(name, mutated(rng, NPY))
  return file.getvalue()


def idx_gz_of(rng: random.Random) -> bytes:
  """A gzipped file, damaged; or a damaged one that is gzipped; or a bomb."""
  if rng.random() < 0.01:
    head = struct.pack(">HBBI", 0, 8, 1, rng.choice([2**27, 2**30 - 8, 2**31, 2**32 - 1]))
    return head_and_zeros(head)
  if rng.random() < 0.5:
    return mutated(rng, [gzip.compress(each, 1, mtime=0) for each in rng.sample(IDX, 2)])
  return gzip.compress(mutated(rng, IDX), 1, mtime=0)


def head_and_zeros(head: bytes, zeros: int = 2**27) -> bytes:
  """Gzips a header and many zeros, of which the packed half of a megabyte is made once."""
  packer = zlib.compressobj(9, wbits=-15)
  packed = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
  block = zlib.compressobj(9, wbits=-15)
  million = block.compress(bytes(2**20)) + block.flush(zlib.Z_FULL_FLUSH)
  return b"\x1f\x8b\x08" + bytes(7) + packed + million * (zeros // 2**20)


def record(data: bytes) -> bytes:
  """Returns a record of a TFRecord file, with its checksums."""
  length = struct.pack("<Q", len(data))
  return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
  crc = CRC(data)
  return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def CRC(data: bytes) -> int:  # noqa: N802 (the name of the checksum)
  """Returns the CRC-32C."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc = TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
  return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
  table = []
  for number in range(256):
    for _ in range(8):
      number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    table.append(number)
  return table


def examples() -> list[bytes]:
  """Serialised tf.train.Examples."""
  made = []
  for label in (b"pos", 1):
    kind = {"bytes_list": {"value": [label]}} if label != 1 else {"int64_list": {"value": [1]}}
    example = tf.train.Example()
    example.features.feature["text"].bytes_list.value.append(b"fine words")
    feature = example.features.feature["label"]
    getattr(feature, next(iter(kind))).value.append(label)
    made.append(example.SerializeToString())
  return made


def tfrecord_of(rng: random.Random) -> bytes:
  """A damaged file, or records of damaged examples; some end in a wrong length that is checked."""
  if rng.random() < 0.4:
    return mutated(rng, [record(EXAMPLES[0]) + record(EXAMPLES[1])])
  whole = b"".join(record(mutated(rng, EXAMPLES)) for _ in range(rng.randrange(1, 4)))
  if rng.random() < 0.5:
    return whole
  length = struct.pack("<Q", rng.choice([2**63, 2**40, 2**64 - 1, 2**31, 100, 0, 2**64 - 17]))
  return whole + length + _masked(length) + rng.randbytes(rng.randrange(40))


def image_files() -> list[bytes]:
  """Images of each format."""
  pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
  made = []
  frames = [Image.fromarray(pixels), Image.fromarray(255 - pixels)]
  for options in (
    {"format": "PNG"}, {"format": "JPEG"}, {"format": "JPEG", "progressive": True},
    {"format": "BMP"}, {"format": "GIF"}, {"format": "WEBP"}, {"format": "WEBP", "lossless": True},
    {"format": "GIF", "save_all": True, "append_images": frames[1:]},
    {"format": "WEBP", "save_all": True, "append_images": frames[1:]},
  ):  # fmt: skip
    for image in (frames[0], frames[0].convert("L")):
      file = io.BytesIO()
      image.save(file, **options)
      made.append(file.getvalue())
  return made


def image_of(rng: random.Random) -> bytes:
  """A damaged image; a PNG gets its checksums right again half of the time."""
  data = mutated(rng, IMAGES)
  return repaired_png(data) if data[:4] == b"\x89PNG" and rng.random() < 0.5 else data


def repaired_png(data: bytes) -> bytes:
  """Returns a PNG whose chunks have the right checksums."""
  made, at = data[:8], 8
  while at + 12 <= len(data):
    length = min(struct.unpack(">I", data[at : at + 4])[0], len(data) - at - 12)
    body = data[at + 4 : at + 8 + length]
    made += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
    at += 12 + length
  return made


def csv_files() -> list[bytes]:
  """Texts and labels."""
  return [
    b'text,label\n"good, ""fine""",pos\nbad,neg\n',
    b"\xef\xbb\xbflabel,text\r\n1,caf\xc3\xa9\r\n0,x\r\n",
    b"text,label\n" + b",\n" * 50,
    b'a,text,label\n"' + b"x" * 3000 + b'\n",b,c\n',
  ]


def gin_files() -> list[bytes]:
  """Configs."""
  root = Path(__file__).resolve().parents[1]
  return [path.read_bytes() for path in sorted((root / "configs").glob("*.gin"))]


@functools.cache
def keras_files() -> dict[str, list[bytes]]:
  """The weights of a small model, as both Kerases write them; suffix -> files."""
  made: dict[str, list[bytes]] = {".keras": [], ".weights.h5": []}
  with tempfile.TemporaryDirectory() as folder:
    for which in (keras, tf_keras):
      model = small(which)
      for name in ("a.keras", "a.weights.h5", "a.h5"):
        path = os.path.join(folder, name)
        (model.save_weights if "weights" in name else model.save)(path)
        made[".keras" if name == "a.keras" else ".weights.h5"].append(Path(path).read_bytes())
  return made


FORKS = """
import os, sys
from loopwright.run_folder import h5

h5._LEAST_S = 5
stdin = sys.stdin.buffer
while size := stdin.read(8):
  content = stdin.read(int.from_bytes(size, "little"))
  if not os.fork():
    try:
      h5.main(content)
    except BaseException:
      os._exit(1)
    os._exit(0)
  os.write(1, b"01"[bool(os.wait()[1])].to_bytes(1, "little"))
"""


@functools.cache
def forks(_: int) -> subprocess.Popen[bytes]:
  """A process that forks for each file; one for each process that uses it."""
  environment = os.environ | {"PYTHONPATH": str(children.SOURCE)}
  return subprocess.Popen(
    [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
  )


def forked(content: bytes) -> None:
  """Does what `h5.require_readable` does, without the third of a second that Python starts in."""
  process = forks(os.getpid())
  process.stdin.write(len(content).to_bytes(8, "little") + content)
  process.stdin.flush()
  if process.stdout.read(1) != b"0":
    raise ValueError("it was not readable in the fork")


@functools.cache
def model() -> Any:
  """The model that weights are read into."""
  return small(keras)


def small(which: Any) -> Any:
  """A model of two layers."""
  layers = [which.Input([3]), which.layers.Dense(4, name="a"), which.layers.Dense(1, name="b")]
  first, *others = layers
  outputs = first
  for layer in others:
    outputs = layer(outputs)
  return which.Model(first, outputs)


# ---- Readers ----


def written(folder: Path, name: str, data: bytes) -> str:
  """Writes a file in place of the one before; returns its path."""
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(data)
  return str(path)


def judged(read: Callable[[], object]) -> str:
  """Returns the outcome; other errors than the user's mistakes are raised."""
  try:
    read()
  except ConfigError as error:
    line = failures.mistake(error)
    return fuzzing.MISTAKE if line == str(error) else f"not one line: {error!r}"
  except tf.errors.OpError as error:
    if failures.user_error(error):
      return fuzzing.MISTAKE
    raise
  return fuzzing.FINE


def idx(rng: random.Random, folder: Path) -> str:
  """`read_idx` of a plain file."""
  path = written(folder, "x", mutated(rng, IDX))
  return judged(lambda: read_idx(path))


def idx_gz(rng: random.Random, folder: Path) -> str:
  """`read_idx` of a gzipped file."""
  path = written(folder, "x.gz", idx_gz_of(rng))
  return judged(lambda: read_idx(path))


def npy(rng: random.Random, folder: Path) -> str:
  """`load_arrays` of a folder."""
  written(folder, "x.npy", mutated(rng, NPY))
  return judged(lambda: summed(load_arrays(str(folder))))


def npz(rng: random.Random, folder: Path) -> str:
  """`load_arrays` of an archive."""
  path = written(folder, "x.npz", npz_of(rng))
  return judged(lambda: summed(load_arrays(path)))


def summed(arrays: dict[str, np.ndarray]) -> None:
  """Makes a source, and reads the first and last row."""
  source = ArraySource(features=arrays)
  source.fetch(tf.constant([0, source.num_examples - 1], tf.int64))


def tfrecord(rng: random.Random, folder: Path) -> str:
  """`text_files` of TFRecord."""
  path = written(folder, "x.tfrecord", tfrecord_of(rng))
  return judged(lambda: texts(path))


def texts_csv(rng: random.Random, folder: Path) -> str:
  """`text_files` of CSV."""
  path = written(folder, "x.csv", mutated(rng, CSV))
  return judged(lambda: texts(path))


def texts(path: str) -> None:
  """Reads texts."""
  text_classification.read_examples.cache_clear()
  text_classification.read_examples(path, text_classification.stamp_of(path), 2**30)


def corpus(rng: random.Random, folder: Path) -> str:
  """`TextFiles` of a language model."""
  path = written(folder, "x.txt", mutated(rng, CSV))
  return judged(lambda: language_model.TextFiles(path=path).documents("train"))


def image(rng: random.Random, folder: Path) -> str:
  """`ImageFolderSource`."""
  written(folder, f"images/a/x.{rng.choice(['png', 'jpg', 'gif'])}", image_of(rng))
  result = judged(lambda: decoded(folder / "images"))
  for path in (folder / "images" / "a").iterdir():
    path.unlink()
  return result


_fetches: dict[str, Any] = {}


def decoded(folder: Path) -> None:
  """Reads the images of a folder, by a function that is traced once."""
  source = ImageFolderSource(directory=str(folder), image_size=(4, 4))
  if "images" not in _fetches:
    _fetches["images"] = tf.function(source.images, input_signature=[tf.TensorSpec([1], tf.string)])
  _fetches["images"](source.files.fetch(tf.constant([0], tf.int64))["path"])


def gin(rng: random.Random, folder: Path) -> str:
  """A config."""
  path = written(folder, "x.gin", mutated(rng, GIN))

  def examine() -> None:
    for found in configurables.examine([path]).mistakes:
      raise ConfigError(failures.mistake(found.error))

  return judged(examine)


def weights(rng: random.Random, folder: Path) -> str:
  """`WarmStart` of .h5 files."""
  path = written(folder, "x.weights.h5", mutated(rng, keras_files()[".weights.h5"]))
  return judged(lambda: warm_started(path))


def keras_archive(rng: random.Random, folder: Path) -> str:
  """`WarmStart` of .keras files."""
  path = written(folder, "x.keras", keras_of(rng))
  return judged(lambda: warm_started(path))


def warm_started(path: str) -> None:
  """Loads weights into a model."""
  with mock.patch.object(h5, "require_readable", forked):
    WarmStart(path=path).load(model())


def keras_of(rng: random.Random) -> bytes:
  """A damaged archive, or one of damaged weights."""
  if rng.random() < 0.4:
    return mutated(rng, keras_files()[".keras"])
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w", rng.choice([0, 8])) as archive:
    archive.writestr("model.weights.h5", mutated(rng, keras_files()[".weights.h5"]))
  return file.getvalue()


READERS: dict[str, fuzzing.Examine] = {
  "idx": idx, "idx.gz": idx_gz, "npy": npy, "npz": npz, "tfrecord": tfrecord, "csv": texts_csv,
  "text": corpus, "image": image, "gin": gin, "h5": weights, "keras": keras_archive,
}  # fmt: skip
TABLE = _table()
IDX, NPY, NPZ, EXAMPLES = idx_files(), npy_files(), npz_files(), examples()
IMAGES, CSV, GIN = image_files(), csv_files(), gin_files()


KINDS = tuple(READERS)
FILES = 1000
"""In a trial."""


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Returns what runs a trial."""
  del base
  register_all()

  def trial(kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    numbers = range(FILES * number, FILES * (number + 1))
    counts, misses = fuzzing.hunt(kind, READERS[kind], numbers, options.seed)
    return Outcome(misses, str(dict(counts)))

  return trial
