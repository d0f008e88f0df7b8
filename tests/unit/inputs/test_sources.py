"""Arrays, files, image folders and errors of `loopwright.inputs.sources`, against NumPy."""

import gzip
import io
import re
import resource
import struct

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
import toys
from input_cases import arrays, numbered, of_elements, one_line_error, runtime_error, stream
from PIL import Image

import loopwright
from loopwright.host import failures
from loopwright.inputs import datasets
from loopwright.inputs.array_files import load_arrays, read_idx
from loopwright.inputs.datasets import eval_dataset, train_dataset
from loopwright.inputs.image_folder import ImageFolderSource
from loopwright.inputs.sources import ArraySource, eval_sets
from loopwright.inputs.streams import StreamSource


class Frame:
  """As a DataFrame is one: no Mapping, but `dict` makes one of it."""

  iloc = None

  def __init__(self, columns):
    self.keys, self._columns = columns.keys, columns

  def __getitem__(self, name):
    return self._columns[name]


def test_sources_take_their_data_without_a_name():
  data = {"x": np.arange(3.0)}
  read = [ArraySource(dict(Frame(data))), StreamSource(tf.data.Dataset.from_tensor_slices(data))]
  for source in read:
    [batch] = arrays(eval_dataset(source, global_batch_size=3))
    assert batch["x"].tolist() == [0.0, 1.0, 2.0]


def test_columns_of_objects_are_texts_or_rows():
  lists = np.empty([2], object)
  lists[:] = [[1, 2], np.array([3, 4])]
  source = ArraySource({"text": np.array(["a\0", b"\xc3\xa9"], object), "list": lists})
  [batch] = arrays(eval_dataset(source, global_batch_size=2))
  assert batch["text"].tolist() == [b"a\0", "\xe9".encode()]
  assert batch["list"].tolist() == [[1, 2], [3, 4]]


def test_in_memory_arrays_are_captured_not_copied_into_the_graph():
  source = ArraySource(features={"x": np.zeros([1000, 1000], np.uint8)})
  traced = tf.function(source.fetch).get_concrete_function(tf.TensorSpec([4], tf.int64))
  assert traced.graph.as_graph_def().ByteSize() < 10_000
  assert [tuple(outside.shape) for outside, _ in traced.graph.captures] == [(1000, 1000)]


# ---- Memory-mapped arrays ----


def test_memory_mapped_arrays_read_like_arrays_in_memory(tmp_path):
  rng = np.random.default_rng(1)
  features = {
    "image": rng.integers(0, 256, (40, 4, 3), np.uint8),
    "value": rng.normal(size=40).astype(">f4"),
    "text": np.array([f"t{i}" for i in range(40)], "S4"),
  }
  for name, array in features.items():
    np.save(tmp_path / f"{name}.npy", array)
  loaded = load_arrays(str(tmp_path))
  assert {name: type(array) for name, array in loaded.items()} == dict.fromkeys(features, np.memmap)
  for make in (train_dataset, eval_dataset):
    kwargs = {"global_batch_size": 16, "pad_multiple": 3}
    mapped = make(ArraySource(features={**loaded, "id": np.arange(40)}), **kwargs)
    in_memory = make(ArraySource(features={**features, "id": np.arange(40)}), **kwargs)
    assert mapped.element_spec == in_memory.element_spec
    for got, expected in zip(arrays(mapped, 3), arrays(in_memory, 3), strict=True):
      for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


def test_memory_mapped_slices_and_views_stay_mapped(tmp_path):
  np.save(tmp_path / "x.npy", np.arange(100))
  view = np.asarray(np.load(tmp_path / "x.npy", mmap_mode="r")[20:])
  source = ArraySource(features={"x": view})
  assert source._in_memory() == {}
  for batch in arrays(train_dataset(source, global_batch_size=16), 3):
    np.testing.assert_array_equal(batch["x"], batch["example_id"] + 20)


def test_a_file_larger_than_memory_is_never_loaded_whole(tmp_path):
  rows = 2**20  # 64 GiB, of which the file system stores nothing
  mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(rows, 2**16))
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  dataset = train_dataset(ArraySource(features={"x": mapped}), global_batch_size=8)
  assert sum(batch["x"].sum() for batch in arrays(dataset, 3)) == 0
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB
  (tmp_path / "x").unlink()


# ---- Image folders ----


def save_image(path, pixels):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).save(path)
  return pixels


@pytest.fixture
def folder(tmp_path):
  """Two classes of 4x6 PNGs and an empty one; maps each file to its pixels."""
  rng = np.random.default_rng(2)
  pixels = {
    name: save_image(tmp_path / name, rng.integers(0, 256, (4, 6, 3), np.uint8))
    for name in ("cat/1.png", "cat/2.PNG", "dog/it's.png")
  }
  (tmp_path / "bird").mkdir()
  (tmp_path / "cat" / ".hidden").write_text("")
  (tmp_path / "notes.txt").write_text("left out")
  return tmp_path, pixels


def one_batch(source, **kwargs):
  return arrays(eval_dataset(source, global_batch_size=source.num_examples, **kwargs))[0]


def test_image_folder_delivers_pixels_and_labels_of_sorted_classes(folder):
  directory, pixels = folder
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6), resize=False)
  assert source.class_names == ["bird", "cat", "dog"]
  assert source.num_examples == 3
  batch = one_batch(source)
  np.testing.assert_array_equal(batch["image"], np.stack(list(pixels.values())))
  assert batch["image"].dtype == np.uint8
  assert batch["label"].tolist() == [1, 1, 2]
  assert batch["label"].dtype == np.int32


def test_image_folder_trains(folder):
  directory, pixels = folder
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6))
  dataset = train_dataset(source, global_batch_size=5, pad_multiple=2)
  assert dataset.element_spec["image"] == tf.TensorSpec([6, 4, 6, 3], tf.uint8)
  for batch in arrays(dataset, 3):
    expected = np.stack(list(pixels.values()))[batch["example_id"][:5]]
    np.testing.assert_array_equal(batch["image"][:5], expected)


def test_image_folder_shrinks_by_the_mean_over_areas(folder):
  directory, pixels = folder
  source = ImageFolderSource(directory=str(directory), image_size=(1, 2))
  means = np.stack(list(pixels.values())).reshape(3, 1, 4, 2, 3, 3).mean(axis=(2, 4))
  np.testing.assert_array_equal(one_batch(source)["image"], np.rint(means))


def test_image_folder_enlarges_bilinearly(tmp_path):
  save_image(tmp_path / "a" / "x.png", np.array([[0, 100]], np.uint8))
  source = ImageFolderSource(directory=str(tmp_path), image_size=(2, 4), channels=1)
  assert one_batch(source)["image"][0, :, :, 0].tolist() == [[0, 25, 75, 100]] * 2


def test_image_folder_converts_channels_and_formats(tmp_path):
  pixels = np.full((8, 8, 3), 200, np.uint8)
  for name in ("1.bmp", "2.gif", "3.jpeg", "4.jpg", "5.png"):
    save_image(tmp_path / "a" / name, pixels)
  save_image(tmp_path / "a" / "6.png", np.full((8, 8), 200, np.uint8))
  save_image(tmp_path / "a" / "7.png", np.full((8, 8, 4), 200, np.uint8))
  source = ImageFolderSource(directory=str(tmp_path), image_size=(8, 8), resize=False)
  np.testing.assert_allclose(one_batch(source)["image"].astype(int), 200, atol=1)


@pytest.mark.parametrize(
  ("channels", "name", "remedy"),
  [(1, "x.bmp", "JPEG or PNG"), (1, "x.gif", "JPEG or PNG"), (4, "x.jpg", "PNG or BMP")],
)
def test_a_kind_that_does_not_have_the_channels_is_named(tmp_path, channels, name, remedy):
  save_image(tmp_path / "a" / name, np.full((2, 2, 3), 200, np.uint8))
  source = ImageFolderSource(directory=str(tmp_path), image_size=(2, 2), channels=channels)
  line = runtime_error(eval_dataset(source, global_batch_size=1))
  assert line.startswith(f"{tmp_path}/a/{name} cannot be read as an image of {channels} channels;")
  assert line.endswith(f"or replace it by a complete {remedy} file.")


def test_an_image_of_another_size_is_an_error_that_names_it(folder):
  directory, _ = folder
  path = directory / "dog" / "it's.png"
  save_image(path, np.zeros((5, 7, 3), np.uint8))
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6), resize=False)
  line = runtime_error(eval_dataset(source, global_batch_size=2))
  assert line == f"{path} is 5x7 (height x width), not 4x6; set resize=True or correct image_size."


@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("damage", [lambda data: b"GIF is not", lambda data: data[:60]])
@pytest.mark.fast(bad=[[0, 2]])
def test_a_file_that_cannot_be_decoded_is_named(folder, bad, damage):
  directory, pixels = folder
  paths = [directory / list(pixels)[index] for index in bad]
  for path in paths:
    path.write_bytes(damage(path.read_bytes()))
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6))
  for size in (1, 2, 3):
    dataset = eval_dataset(source, global_batch_size=size)
    whole = bad[0] // size  # batches before the damaged file
    before = [image for batch in arrays(dataset, whole) for image in batch["image"]]
    np.testing.assert_array_equal(before, list(pixels.values())[: len(before)])
    line = runtime_error(dataset.skip(whole))
    assert line.startswith(f"{paths[0]} cannot be read as an image of 3 channels;")


def test_a_subclass_of_an_image_folder_may_change_what_it_fetches(folder):
  class Inverted(ImageFolderSource):
    def fetch(self, indices):
      batch = super().fetch(indices)
      return {**batch, "image": 255 - batch["image"]}

  directory, pixels = folder
  source = Inverted(directory=str(directory), image_size=(4, 6))
  inverted = 255 - np.stack(list(pixels.values()))
  np.testing.assert_array_equal(one_batch(source)["image"], inverted)
  [batch] = arrays(train_dataset(source, global_batch_size=3), 1)
  np.testing.assert_array_equal(batch["image"], inverted[batch["example_id"]])


def test_the_users_line_is_found_in_what_a_compiled_loop_raises(folder, mirrored):
  directory, pixels = folder
  for name in pixels:
    (directory / name).write_bytes(b"not an image")
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6))
  strategy = mirrored(2)
  dataset = train_dataset(source, global_batch_size=2)
  iterator = datasets.iterate(strategy.experimental_distribute_dataset(dataset))

  @tf.function
  def loop(iterator):
    for _ in tf.range(3):
      strategy.run(lambda batch: batch["image"], args=(next(iterator),))

  with pytest.raises(tf.errors.InvalidArgumentError) as raised:
    loop(iterator)
  assert "cannot be read as an image of 3 channels;" in failures.user_error(raised.value)


# ---- Files ----


def idx_bytes(array, code):
  head = struct.pack(">HBB", 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
  return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize(
  ("dtype", "code"),
  [("u1", 0x08), ("i1", 0x09), ("i2", 0x0B), ("i4", 0x0C), ("f4", 0x0D), ("f8", 0x0E)],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_read_idx(tmp_path, dtype, code, pack):
  array = np.arange(24).reshape(2, 3, 4).astype(dtype)
  path = tmp_path / "file"
  path.write_bytes(pack(idx_bytes(array, code)))
  read = read_idx(str(path))
  np.testing.assert_array_equal(read, array)
  assert read.dtype == np.dtype(dtype)
  assert read.flags.writeable


GOOD_IDX = idx_bytes(np.zeros((2, 3), np.uint8), 0x08)


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (None, "'.*/file' does not exist; give the path of an idx file."),
    (b"", "is not an idx file: it begins with nothing"),
    (b"\x89PNG....", "is not an idx file: it begins with 89 50 4e 47"),
    (b"\0\0\x07\x01\0\0\0\0", "is not an idx file: it begins with 00 00 07 01"),
    (GOOD_IDX[:-1], "has 17 bytes, but its header implies 18; it is truncated"),
    (GOOD_IDX + b"x", "has 19 bytes, but its header implies 18"),
    (GOOD_IDX[:7], "has 7 bytes, but"),
    (gzip.compress(GOOD_IDX, mtime=0)[:-9], "cannot be read .*; download it again."),
    (gzip.compress(GOOD_IDX, mtime=0)[:-8] + b"xxxxxxxx", "cannot be read .*; download it again."),
  ],
)
def test_read_idx_errors(tmp_path, data, message):
  path = tmp_path / "file"
  if data is not None:
    path.write_bytes(data)
  with one_line_error(message):
    read_idx(str(path))


def test_load_arrays_of_an_npz(tmp_path):
  np.savez(tmp_path / "data.npz", x=np.arange(3), y=np.ones((3, 2)))
  loaded = load_arrays(str(tmp_path / "data.npz"))
  assert sorted(loaded) == ["x", "y"]
  np.testing.assert_array_equal(loaded["y"], np.ones((3, 2)))
  assert ArraySource(features=loaded).num_examples == 3


def npz_of_objects():
  file = io.BytesIO()
  np.savez(file, x=np.array([None, "a"], object))
  return file.getvalue()


def npy_of_zeros():
  file = io.BytesIO()
  np.save(file, np.zeros(3))
  return file.getvalue()


@pytest.mark.parametrize(
  ("name", "data", "message"),
  [
    ("missing.npz", None, "missing.npz' does not exist; give the path of an .npz file."),
    ("missing", None, "missing' is neither an .npz file nor a folder of .npy files; correct it."),
    ("bad.npz", b"PK\x03\x04 not a zip file", "bad.npz' cannot be read"),
    ("text.npz", b"text", "text.npz' cannot be read"),
    ("array.npz", npy_of_zeros(), "array.npz' cannot be read"),
    ("empty.npz", b"", "empty.npz' cannot be read"),
    ("objects.npz", npz_of_objects(), "objects.npz' cannot be read .*pickle"),
  ],
)
def test_load_arrays_errors(tmp_path, name, data, message):
  if data is not None:
    (tmp_path / name).write_bytes(data)
  with one_line_error(message):
    load_arrays(str(tmp_path / name))


def test_load_arrays_of_a_folder_errors(tmp_path):
  with one_line_error("has no arrays; it must be an .npz file or a folder of .npy files."):
    load_arrays(str(tmp_path))
  (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01")
  with one_line_error("x.npy' cannot be read"):
    load_arrays(str(tmp_path))


# ---- The user's mistakes ----


def having(*names):
  """What has these attributes, as objects of libraries that the tests do not have."""
  return type("Theirs", (), dict.fromkeys(names))()


@pytest.mark.parametrize(
  ("data", "made"),
  [
    (tf.data.Dataset.range(2), "StreamSource(dataset=...)"),
    ("a.csv", "ArraySource(features=...) what the file has"),
    ((np.ones(2), np.ones(2)), "ArraySource(features={'x': x, 'y': y})"),
    (np.ones(2), "ArraySource(features={'x': x, 'y': y})"),
    (having("iloc", "__getitem__", "__len__", "shape"), "ArraySource(features=dict(frame))"),
    ({"x": np.ones(2)}, "ArraySource(features=...)"),
    (pa.table({"x": [1]}), "ArraySource(features=dict(table.to_pandas()))"),
    (having("to_table"), "ArraySource(features=dict(dataset.to_table().to_pandas()))"),
    ({"train": having("column_names")}, "IndexedSource(data=splits[split])"),
    (having("batch_sampler", "__iter__", "__len__"), "IndexedSource(data=loader.dataset)"),
    (having("shape", "__getitem__", "__len__", "__iter__"), "IndexedSource(data=...)"),
    ([{"x": 1}], "IndexedSource(data=...)"),
    (iter([{"x": 1}]), "StreamSource(dataset=tf.data.Dataset.from_generator(...))"),
    (having("__iter__", "__getitem__"), "StreamSource(dataset=tf.data.Dataset.from_generator("),
    (None, "ArraySource(features=...)"),
  ],
)
def test_a_task_whose_source_is_none_is_told_what_makes_one(data, made, tmp_path):
  """By a run, which records what the source has before it reads it."""
  task = toys.Regression(lambda: toys.linear([1.0]))
  task.source = lambda split: data
  with one_line_error(re.escape(f"it must be a Source: wrap it in {made}")):
    loopwright.run(
      task=task, mode="train", model_dir=str(tmp_path), train_steps=1, global_batch_size=4
    )


@pytest.mark.parametrize(
  ("features", "message"),
  [
    ({}, "features is a dict; it must be a dict of name -> array"),
    (Frame({"x": [1]}), r"is a Frame; .* name -> array: use ArraySource\(features=dict\(frame"),
    ([1, 2], r"features is a list; .*: use IndexedSource\(data=...\)"),
    ({1: np.zeros(3)}, "features has the name 1; names must be strings"),
    ({"x": np.zeros(0)}, "have no rows; give at least one example"),
    ({"x": np.zeros(3), "y": np.zeros(4)}, "different lengths .'x' 3, 'y' 4."),
    ({"x": np.float32(1)}, "'x' is a single value"),
    ({"x": np.array([[1], [1, 2]], object)}, "'x' has dtype object: row 0 is a list; pad all rows"),
    ({"x": np.array(["a", None])}, r"'x' has dtype object: row 1 is missing \(None\); fill it"),
    ({"x": np.array(["a", np.nan], object)}, r"row 1 is missing \(nan\)"),
    ({"x": np.array([{}, 1])}, r"row 0 is \{\}; convert it"),
    ({"x": np.zeros(3, "M8[s]")}, r"'x' has dtype datetime64\[s\]"),
    ({"x": np.ma.masked_equal([0, 1], 1)}, r"'x' has masked values, .*; fill them"),
    ({"x": np.zeros(3), "seed": np.zeros(3)}, "features has a feature named 'seed'"),
    ({"x": np.zeros(3), "example_id": np.zeros(3)}, "features has a feature named 'example_id'"),
    ({"weight": np.ones(3)}, r"'weight' is float64 of shape \[3\]; it must be float32"),
    ({"weight": np.ones((3, 1), np.float32)}, r"of shape \[3, 1\]; .* of shape \[3\]"),
    ({"weight": np.array([1, -2], np.float32)}, "'weight' is -2.0 at example 1"),
    ({"weight": np.array([np.nan], np.float32)}, "'weight' is nan at example 0"),
  ],
)
def test_array_source_errors(features, message):
  with one_line_error(message):
    ArraySource(features=features)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: [1, 2], r"is a list; it must be a tf.data.Dataset: use IndexedSource\(data=..."),
    (lambda: tf.data.Dataset.range(3), "they must be dicts of feature name -> tensor"),
    (
      lambda: tf.data.Dataset.zip((tf.data.Dataset.range(3),) * 2),
      r"are a tuple; they must be dicts .* dataset.map\(lambda x, y: {'x': x, 'y': y}\)",
    ),
    (lambda: of_elements(x=1).batch(2), r"'x' of the stream is .*\(None,\).*static shape"),
    (lambda: of_elements(x=tf.ragged.constant([[1], []])), "'x' of the stream is RaggedTensorSpec"),
    (lambda: of_elements(x={"y": 1}), "'x' of the stream is .*it must be a dense tensor"),
    (lambda: of_elements(x=1, seed=1), "the stream has a feature named 'seed'"),
    (lambda: of_elements(x=1, example_id=1), "the stream has a feature named 'example_id'"),
    (lambda: of_elements(x=1, weight=1), "'weight' of the stream is .*float32 scalar"),
    (lambda: of_elements(weight=[1.0]), "'weight' of the stream is .*float32 scalar"),
    (lambda: of_elements(x=1).take(0), "the stream's dataset is empty"),
  ],
)
def test_stream_source_errors(make, message):
  with one_line_error(message):
    StreamSource(dataset=make())


def test_stream_source_errors_of_num_examples():
  with one_line_error("num_examples is 0; it must be a whole number of at least 1"):
    stream(3, num_examples=0)
  with one_line_error("num_examples is 4, but the stream's dataset has 3 examples"):
    stream(3, num_examples=4)


def choice(*datasets):
  return tf.data.Dataset.choose_from_datasets(datasets, tf.data.Dataset.range(2).repeat())


@pytest.mark.parametrize(
  ("make", "endless"),
  [
    (lambda passes, some: passes.repeat(), True),
    (lambda passes, some: passes.repeat().filter(some), True),
    (lambda passes, some: passes.repeat().filter(some).batch(1).unbatch().prefetch(1), True),
    (lambda passes, some: passes.filter(some).repeat(), True),
    (lambda passes, some: passes.concatenate(passes.repeat().filter(some)), True),
    (lambda passes, some: passes.repeat().filter(some).take(5), False),
    (lambda passes, some: passes.repeat().take_while(some).prefetch(1), False),
    (lambda passes, some: choice(*[passes.filter(some)] * 2), False),
    (lambda passes, some: passes.filter(some), False),
    (lambda passes, some: passes, False),
  ],
)
def test_an_evaluation_without_an_end_is_refused_where_that_can_be_known(make, endless):
  elements = tf.data.Dataset.from_tensors({"x": [2, 1]}).unbatch()
  stream = StreamSource(dataset=make(elements, lambda element: element["x"] > 1))
  assert stream.endless == endless
  if endless:
    with one_line_error("the stream to evaluate is endless; set num_examples of its StreamSource"):
      eval_dataset(stream, global_batch_size=4)
  batches = eval_dataset(stream, global_batch_size=1, steps=1)
  assert [batch["example_id"] for batch in batches.as_numpy_iterator()] == [[0]]


@pytest.mark.parametrize("sets", [{}, {"a/b": None}, {"": None}, {3: None}])
def test_names_of_evaluation_sets(sets):
  with one_line_error("source\\('eval'\\) (is an empty dict|has a set named)"):
    eval_sets(sets)


@pytest.mark.parametrize(
  ("files", "kwargs", "message"),
  [
    (["a/x.png"], {"directory": "missing"}, "missing' is not a folder"),
    (["x.png"], {}, "has no folders in it; it must hold one folder per class"),
    (["a/.keep", "b/.keep"], {}, "the 2 class folders of .* have no images"),
    (["a/x.png", "a/notes.txt"], {}, "a/notes.txt' is not an image"),
    (["a/x.png", "a/deep/y.png"], {}, "a/deep' is not an image"),
    (["a/x.png"], {"image_size": (0, 4)}, r"image_size is \(0, 4\); it must be \(height, width\)"),
    (["a/x.png"], {"image_size": 4}, "image_size is 4"),
    (["a/x.png"], {"image_size": (4, 4, 3)}, r"image_size is \(4, 4, 3\)"),
    (["a/x.png"], {"channels": 2}, "channels is 2; it must be 1"),
  ],
)
def test_image_folder_errors(tmp_path, files, kwargs, message):
  for name in files:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  directory = str(tmp_path / kwargs.pop("directory", ""))
  with one_line_error(message):
    ImageFolderSource(**{"directory": directory, "image_size": (4, 4), **kwargs})


def test_sources_are_made_without_touching_tensorflow(tmp_path):
  save_image(tmp_path / "a" / "x.png", np.zeros((4, 4, 3), np.uint8))
  images = ImageFolderSource(directory=str(tmp_path), image_size=(4, 4))
  assert images.files._tensors is None
  assert numbered(3)._tensors is None
