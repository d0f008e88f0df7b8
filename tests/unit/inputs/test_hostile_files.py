"""Files that lie about their size, have no end, or are damaged: one line, in bounded memory."""

import gzip
import io
import os
import resource
import signal
import struct
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf
from input_cases import arrays, one_line_error, runtime_error
from PIL import Image

from benchmarks import fuzz_files, fuzzing
from loopwright import ConfigError, TFRecordSource, failures
from loopwright.host import bounded
from loopwright.inputs import image_headers
from loopwright.inputs.array_files import load_arrays, read_idx
from loopwright.inputs.datasets import eval_dataset
from loopwright.inputs.image_folder import ImageFolderSource
from loopwright.inputs.sources import ArraySource
from loopwright.run_folder import h5
from loopwright.run_folder.warm_start import WarmStart
from loopwright.tasks.language_model import TextFiles
from loopwright.tasks.text_classification import text_files


def megabytes():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("name", fuzz_files.READERS)
@pytest.mark.fast(name=["idx", "idx.gz", "npy", "npz", "tfrecord", "csv", "text"])
def test_a_damaged_file_is_one_line_or_is_read(name, tmp_path):
  if name == "gin":
    fuzz_files.register_all()
  for number in range(60):
    outcome = fuzz_files.READERS[name](fuzzing.rng_of(name, 7, number), tmp_path)
    assert outcome in fuzzing.OUTCOMES, f"{name} {number}: {outcome}"


def of_records(folder):
  return TFRecordSource(files=f"{folder}/x", decode=lambda records: {"x": records})


def of_images(folder):
  return ImageFolderSource(directory=str(folder), image_size=(9, 7), resize=False)


IDX = struct.pack(">HBBI", 0, 8, 1, 90) + bytes(range(90))
PROVED = {
  "x.npz": (fuzz_files.NPZ[1], lambda at: ArraySource(load_arrays(f"{at}/x.npz"))),
  "x.gz": (gzip.compress(IDX), lambda at: ArraySource({"x": read_idx(f"{at}/x.gz")})),
  "x": (fuzz_files.record(bytes(range(90))), of_records),
  "a/x.png": (fuzz_files.IMAGES[0], of_images),
}
"""Formats with checksums."""
SIZED = {
  "x.npy": (fuzz_files.NPY[0], lambda at: ArraySource(load_arrays(str(at)))),
  "x.idx": (IDX, lambda at: ArraySource({"x": read_idx(f"{at}/x.idx")})),
}
"""Formats that tell their size alone."""


def flipped(data, at):
  return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


@pytest.mark.parametrize("name", [*PROVED, *SIZED])
def test_no_damage_passes_in_silence_where_the_format_can_tell(name, tmp_path):
  data, make = (PROVED | SIZED)[name]
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


def test_the_changes_of_a_file_depend_on_its_number_alone():
  made = [fuzz_files.mutated(fuzzing.rng_of("npy", 0, n), fuzz_files.NPY) for n in (3, 3, 4)]
  assert made[0] == made[1] != made[2]


def test_sound_files_of_weights_are_read_by_the_process_that_judges_damaged_ones(tmp_path):
  found = []
  for data in fuzz_files.keras_files()[".weights.h5"]:
    path = fuzz_files.written(tmp_path, "x.weights.h5", data)
    found.append(fuzz_files.judged(lambda path=path: fuzz_files.warm_started(path)))
  assert found == [fuzzing.FINE, fuzzing.FINE, fuzzing.MISTAKE, fuzzing.FINE]


# ---- No end ----


def a_pipe(path):
  os.mkfifo(path)


def an_endless_file(path):
  os.symlink("/dev/zero", path)


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
@pytest.mark.parametrize(("make", "kind"), [(a_pipe, "a pipe"), (an_endless_file, "a device")])
def test_what_is_no_file_is_refused_before_it_is_opened(name, make, kind, tmp_path):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  make(tmp_path / name)
  with one_line_error(rf"{name}' is {kind}, not a file; give the path of an? "):
    READS[name](tmp_path)


# ---- Arrays ----


def test_a_header_of_two_gigabytes_is_refused_before_they_are_unpacked(tmp_path):
  path, head = tmp_path / "x.gz", struct.pack(">HBBI", 0, 8, 1, 2**31)
  path.write_bytes(fuzz_files.head_and_zeros(head, zeros=2**28))
  assert path.stat().st_size < 2**19
  before = megabytes()
  with one_line_error(
    "would take 2,147,483,656 bytes of memory, but max_bytes is 1,073,741,824; raise it if you "
    "trust the file"
  ):
    read_idx(str(path))
  assert megabytes() - before < 16


def test_no_more_is_unpacked_than_the_header_says(tmp_path):
  path = tmp_path / "x.gz"
  path.write_bytes(fuzz_files.head_and_zeros(struct.pack(">HBBI", 0, 8, 1, 100), zeros=2**28))
  before = megabytes()
  with one_line_error("has more than 108 bytes, but its header implies 108"):
    read_idx(str(path))
  assert megabytes() - before < 16


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_limit_is_the_size_of_an_idx_file_and_can_be_raised(tmp_path, pack):
  path = tmp_path / "x"
  path.write_bytes(pack(struct.pack(">HBBI", 0, 8, 1, 100) + bytes(100)))
  assert read_idx(str(path), max_bytes=108).tolist() == [0] * 100
  with one_line_error("would take 108 bytes of memory, but max_bytes is 107; raise it"):
    read_idx(str(path), max_bytes=107)


def test_the_limit_is_the_size_of_all_arrays_of_an_npz(tmp_path):
  path = str(tmp_path / "x.npz")
  np.savez_compressed(path, x=np.zeros(2**20, np.uint8), y=np.zeros(2**20, np.uint8))
  assert os.path.getsize(path) < 2**13
  needed = 2 * (2**20 + 128)  # a header each
  assert load_arrays(path, max_bytes=needed)["y"].shape == (2**20,)
  with one_line_error(f"would take {needed:,} bytes of memory, but max_bytes is {needed - 1:,}"):
    load_arrays(path, max_bytes=needed - 1)


def test_texts_count_with_what_tensorflow_adds_to_each(tmp_path):
  path = str(tmp_path / "x.npz")
  np.savez_compressed(path, x=np.zeros(1000, "S1"))
  assert load_arrays(path, max_bytes=25_000)["x"].shape == (1000,)
  with one_line_error("would take 25,000 bytes of memory, but max_bytes is 24,999"):
    load_arrays(path, max_bytes=24_999)


def test_an_npz_is_packed_as_numpy_does_it(tmp_path):
  with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_LZMA) as archive:
    archive.writestr("x.npy", fuzz_files.NPY[0])
  with one_line_error("compressed in a way that numpy does not use; save it again with numpy"):
    load_arrays(str(tmp_path / "x.npz"))


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


# ---- Images ----


def pixels(height=4, width=6):
  return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image, **options):
  file = io.BytesIO()
  image.save(file, **options)
  return file.getvalue()


def top_down_bmp(image):
  """Writes the rows from the top, which the height says by its sign."""
  head = b"BM" + struct.pack("<IIIIiiHH", 54 + 20 * 4, 0, 54, 40, 6, -4, 1, 24) + bytes(24)
  return head + b"".join(row[:, ::-1].tobytes() + bytes(2) for row in np.asarray(image))


FORMATS = {
  "png": lambda image: encoded(image, format="PNG"),
  "grey png": lambda image: encoded(image.convert("L"), format="PNG"),
  "jpeg": lambda image: encoded(image, format="JPEG"),
  "progressive jpeg": lambda image: encoded(image, format="JPEG", progressive=True),
  "bmp": lambda image: encoded(image, format="BMP"),
  "top-down bmp": top_down_bmp,
  "gif": lambda image: encoded(image, format="GIF"),
  "animation": lambda image: encoded(
    image, format="GIF", save_all=True, append_images=[image.rotate(180)], comment=b"c" * 600
  ),
  "webp": lambda image: encoded(image, format="WEBP"),
  "lossless webp": lambda image: encoded(image, format="WEBP", lossless=True),
  "extended webp": lambda image: encoded(image, format="WEBP", exif=b"Exif\0\0notes"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_header_has_the_sides_of_what_is_decoded(name):
  content = FORMATS[name](Image.fromarray(pixels(4, 6)))
  first, sides = image_headers.first_image(tf.constant(content))
  decoded = tf.io.decode_image(content, 3, expand_animations=False)
  assert sides.numpy().tolist() == [4, 6] == decoded.shape[:2].as_list()
  np.testing.assert_array_equal(tf.io.decode_image(first, 3, expand_animations=False), decoded)


def test_of_an_animation_only_the_first_image_is_decoded():
  frames = [Image.fromarray(pixels(40, 60)), Image.fromarray(255 - pixels(40, 60))]
  others = [frames[n % 2] for n in range(1, 21)]
  gif = encoded(frames[0], format="GIF", save_all=True, append_images=others)
  first, _ = image_headers.first_image(tf.constant(gif))
  assert len(first.numpy()) < len(gif) / 10
  webp = encoded(frames[0], format="WEBP", save_all=True, append_images=frames[1:])
  assert image_headers.first_image(tf.constant(webp))[0] == b""


def large_png():
  chunk = b"IHDR" + struct.pack(">IIBBBBB", 20000, 10000, 8, 2, 0, 0, 0)
  return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk


def large_gif():
  """50 bytes, for which TensorFlow's decoder would take 12 GB."""
  screen = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0)
  image = b"," + struct.pack("<HHHHB", 0, 0, 20000, 10000, 0) + b"\x02\x02\x44\x01\0"
  return screen + b"!\xfe\x03abc\0" + image + b";"


@pytest.mark.parametrize("make", [large_png, large_gif])
def test_an_image_is_refused_by_its_header(tmp_path, make):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "x.png").write_bytes(make())
  source = ImageFolderSource(directory=str(tmp_path), image_size=(4, 6))
  before = megabytes()
  assert runtime_error(eval_dataset(source, global_batch_size=1)) == (
    f"{tmp_path}/a/x.png is 10000x20000 (height x width) and would take 600000000 bytes, but "
    "max_bytes is 268,435,456; raise it if you trust the file, or make the image smaller."
  )
  assert megabytes() - before < 64


def test_the_limit_of_an_image_can_be_raised(tmp_path):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "x.png").write_bytes(FORMATS["png"](Image.fromarray(pixels())))
  size = (tmp_path / "a" / "x.png").stat().st_size

  def source(max_bytes):
    return ImageFolderSource(directory=str(tmp_path), image_size=(4, 6), max_bytes=max_bytes)

  assert size > 4 * 6 * 3
  with one_line_error(f"x.png' would take {size} bytes of memory, but max_bytes is {size - 1}"):
    source(size - 1)
  with one_line_error("max_bytes is 0; it must be a whole number of at least 1"):
    source(0)
  batch = arrays(eval_dataset(source(size), global_batch_size=1))[0]
  np.testing.assert_array_equal(batch["image"][0], pixels())


# ---- Texts ----


def test_a_length_beyond_the_file_does_not_end_the_process(tmp_path):
  length = struct.pack("<Q", 2**40)
  record = fuzz_files.record(fuzz_files.EXAMPLES[0])
  (tmp_path / "x.tfrecord").write_bytes(record + length + fuzz_files._masked(length) + b"abc")
  with one_line_error(r"cannot be read as TFRecord \(record 2 ends beyond the file\); write it"):
    text_files(train=str(tmp_path / "x.tfrecord"))


def test_a_record_that_is_no_example(tmp_path):
  (tmp_path / "x.tfrecord").write_bytes(fuzz_files.record(b"\xff" * 9))
  with one_line_error(r"cannot be read as TFRecord \(.*\); write it again"):
    text_files(train=str(tmp_path / "x.tfrecord"))


def test_many_short_texts_count_with_the_objects_of_python(tmp_path):
  (tmp_path / "x.csv").write_bytes(b"text,label\n" + b",\n" * 50)
  path = str(tmp_path / "x.csv")
  assert len(text_files(train=path, max_bytes=10_000).splits["train"][0]) == 40
  with one_line_error("x.csv' would take 10,000 bytes of memory, but max_bytes is 9,999"):
    text_files(train=path, max_bytes=9_999)


def test_a_line_without_end(tmp_path):
  (tmp_path / "x.csv").write_bytes(b"text,label\n" + b"," * 2**24)
  with one_line_error("has a line of 16,777,216 characters or more; it is not CSV"):
    text_files(train=str(tmp_path / "x.csv"))


def test_the_documents_of_a_split_count_together(tmp_path):
  for name in "abcdefgh":
    (tmp_path / name).write_bytes(bytes(100))
  corpus = TextFiles(path=str(tmp_path), eval_fraction=1e-9, max_bytes=800)
  assert len(corpus.documents("train")) == 8
  corpus = TextFiles(path=str(tmp_path), eval_fraction=1e-9, max_bytes=799)
  with one_line_error("would take 800 bytes of memory, but max_bytes is 799"):
    corpus.documents("train")


# ---- Weights ----


def weights_of(folder, write):
  path = folder / "x.weights.h5"
  with h5py.File(path, "w", libver="latest") as file:
    file.create_group("layers/a/vars")
    file["layers/a"].attrs["name"] = "a"
    file["layers/a/vars"].attrs["name"] = "a"
    write(file["layers/a/vars"])
  return WarmStart(path=str(path))


@pytest.mark.parametrize(
  "write",
  [
    lambda group: group.create_dataset("0", data=np.zeros(9), chunks=(3,), compression="gzip"),
    lambda group: group.create_dataset("0", [1 << 28], "f4"),  # none of it is in the file
    lambda group: group.create_dataset("0", (9,), "f4", external=[("/etc/passwd", 0, 36)]),
    lambda group: group.create_dataset("0", data=np.array(["text"], "S4")),
    lambda group: group.attrs.create("name", np.zeros(2**16, "S4")),
  ],
)
def test_weights_are_stored_as_keras_stores_them(tmp_path, write):
  with one_line_error("x.weights.h5' cannot be read .*; it is damaged or not a file of weights"):
    weights_of(tmp_path, write).load(None)


@pytest.mark.parametrize(
  ("end", "line"),
  [
    (signal.SIGSEGV, "the HDF5 library crashed with SIGSEGV"),
    (signal.SIGALRM, "the HDF5 library was not done with it after 30 s"),
  ],
)
def test_a_file_that_crashes_the_library_is_one_line(tmp_path, monkeypatch, end, line):
  script = tmp_path / "crash.py"
  script.write_text("import os, sys; os.kill(os.getpid(), len(sys.stdin.buffer.read()))")
  monkeypatch.setattr(h5, "PROGRAM", [sys.executable, str(script)])
  (tmp_path / "x.weights.h5").write_bytes(bytes(end))
  with one_line_error(rf"x.weights.h5' cannot be read \({line}\); "):
    WarmStart(path=str(tmp_path / "x.weights.h5")).load(None)


def test_a_file_that_the_library_reads_without_end_ends_by_itself():
  program = "import h5, time; h5._LEAST_S = 1; h5.read_all = lambda _: time.sleep(60); h5.main(b'')"
  done = subprocess.run(
    [sys.executable, "-c", program], env={"PYTHONPATH": os.path.dirname(h5.__file__)}, timeout=30
  )
  assert done.returncode == -signal.SIGALRM


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
