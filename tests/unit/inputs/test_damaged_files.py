"""Files that are damaged, or none at all: one line, or what the format cannot tell."""

import gzip
import io
import os
import struct

import numpy as np
import pytest
import tensorflow as tf
from input_cases import one_line_error
from PIL import Image

from loopwright import ConfigError, TFRecordSource
from loopwright.host import bounded, failures
from loopwright.inputs.array_files import load_arrays, read_idx
from loopwright.inputs.image_folder import ImageFolderSource
from loopwright.inputs.sources import ArraySource
from loopwright.run_folder.warm_start import WarmStart
from loopwright.tasks.language_model import TextFiles
from loopwright.tasks.text_classification import text_files


def saved(save, *args, **options):
  """Returns what `save` writes to a file."""
  file = io.BytesIO()
  save(file, *args, **options)
  return file.getvalue()


def a_record(folder):
  path = str(folder / "made")
  with tf.io.TFRecordWriter(path) as writer:
    writer.write(bytes(range(90)))
  return (folder / "made").read_bytes()


def of_records(folder):
  return TFRecordSource(files=f"{folder}/x", decode=lambda records: {"x": records})


def of_images(folder):
  return ImageFolderSource(directory=str(folder), image_size=(9, 7), resize=False)


IDX = struct.pack(">HBBI", 0, 8, 1, 90) + bytes(range(90))
NUMBERS = np.arange(90, dtype=np.int16)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8))
PROVED = {
  "x.npz": (
    lambda at: saved(np.savez_compressed, x=NUMBERS),
    lambda at: ArraySource(load_arrays(f"{at}/x.npz")),
  ),
  "x.gz": (lambda at: gzip.compress(IDX), lambda at: ArraySource({"x": read_idx(f"{at}/x.gz")})),
  "x": (a_record, of_records),
  "a/x.png": (lambda at: saved(PICTURE.save, format="PNG"), of_images),
}
"""Formats with checksums: what writes a file, and what reads it."""
SIZED = {
  "x.npy": (lambda at: saved(np.save, NUMBERS), lambda at: ArraySource(load_arrays(str(at)))),
  "x.idx": (lambda at: IDX, lambda at: ArraySource({"x": read_idx(f"{at}/x.idx")})),
}
"""Formats that tell their size alone."""


def flipped(data, at):
  return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


@pytest.mark.parametrize("name", [*PROVED, *SIZED])
def test_no_damage_passes_in_silence_where_the_format_can_tell(name, tmp_path):
  write, make = (PROVED | SIZED)[name]
  data = write(tmp_path)
  path, size = tmp_path / name, len(data)
  path.parent.mkdir(exist_ok=True)

  def read(content):
    path.write_bytes(content)
    try:
      return {k: v.numpy().tolist() for k, v in make(tmp_path).fetch(tf.constant([0])).items()}
    except (ConfigError, tf.errors.OpError) as error:
      return failures.mistake(error) or error

  sound, places = read(data), [*range(0, size, max(1, size // 20)), size - 1]
  assert not isinstance(sound, str)
  damaged = [data[:at] for at in places] + [data + bytes(5)]
  if name in PROVED:
    damaged += [flipped(data, at) for at in places]
  found = [read(each) for each in damaged]
  lines = [each for each in found if isinstance(each, str)]
  assert [each for each in found if each != sound and each not in lines] == []
  assert [line for line in lines if "\n" in line] == []
  assert len(lines) > len(found) / 2
  assert name in PROVED or lines == found


READS = {
  "x.idx": lambda folder: read_idx(f"{folder}/x.idx"),
  "x.npz": lambda folder: load_arrays(f"{folder}/x.npz"),
  "x.npy": lambda folder: load_arrays(str(folder)),
  "x.csv": lambda folder: text_files(train=f"{folder}/x.csv"),
  "x.tfrecord": lambda folder: text_files(train=f"{folder}/x.tfrecord"),
  "x.txt": lambda folder: TextFiles(path=f"{folder}/x.txt").documents("train"),
  "a/x.png": lambda folder: ImageFolderSource(directory=str(folder), image_size=(4, 4)),
  "x.weights.h5": lambda folder: WarmStart(path=f"{folder}/x.weights.h5").load(None),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize(
  ("make", "kind"),
  [(os.mkfifo, "a pipe"), (lambda path: os.symlink("/dev/zero", path), "a device")],
)
def test_what_is_no_file_is_refused_before_it_is_opened(name, make, kind, tmp_path):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  make(tmp_path / name)
  with one_line_error(rf"{name}' is {kind}, not a file; give the path of an? "):
    READS[name](tmp_path)


@pytest.mark.parametrize("mapped", [False, True])
def test_numbers_that_are_no_characters(tmp_path, mapped):
  texts = np.array([[0x61, 0x62], [0x110000, 0]], "<u4").view("<U2")[:, 0]
  np.save(tmp_path / "x.npy", texts)
  line = "feature 'x' has text with the number 0x110000, which is no character; write the file"
  if mapped:
    source = ArraySource(features=load_arrays(str(tmp_path)))
    assert source.fetch(tf.constant([0], tf.int64))["x"].numpy().tolist() == [b"ab"]
    with one_line_error(line):
      source.fetch(tf.constant([1], tf.int64))
    return
  with one_line_error(line):
    ArraySource(features={"x": texts})


def with_a_false_length(path):
  path.write_bytes(path.read_bytes() + struct.pack("<QI", 2**40, 0) + b"abc")


def with_what_is_no_example(path):
  with tf.io.TFRecordWriter(str(path)) as writer:
    writer.write(b"\xff" * 9)


@pytest.mark.parametrize("spoil", [with_a_false_length, with_what_is_no_example])
def test_records_of_texts(tmp_path, spoil):
  path = tmp_path / "x.tfrecord"
  path.write_bytes(b"")
  spoil(path)
  with one_line_error(r"cannot be read as TFRecord \(.*\); write it again"):
    text_files(train=str(path))


@pytest.mark.parametrize("content", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n" + bytes(90)])
@pytest.mark.parametrize("name", ["x.weights.h5", "x.keras"])
def test_weights(tmp_path, name, content):
  (tmp_path / name).write_bytes(content)
  with one_line_error(f"{name}' cannot be read .*; it is damaged or not a file of weights"):
    WarmStart(path=str(tmp_path / name)).load(None)


@pytest.mark.parametrize(
  ("error", "reason"),
  [
    (MemoryError(), "MemoryError"),
    (RecursionError("a\nb"), "a"),
    (OSError(5, "Input/output error"), "Input/output error"),
    (ValueError("\x1b[1m"), r"\\x1b\[1m"),
  ],
)
def test_what_the_reading_of_a_file_raises_is_one_line(error, reason):
  with (
    one_line_error(rf"'p' cannot be read \({reason}\); write it again."),
    bounded.reading("p", "write it again"),
  ):
    raise error
