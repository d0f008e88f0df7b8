"""Splits that disagree in what their sources number or infer, known before the first step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from input_cases import one_line_error
from PIL import Image

from loopwright import (
  ArraySource,
  ImageFolderSource,
  IndexedSource,
  Loss,
  Mixture,
  Packed,
  Sources,
  StreamSource,
)
from loopwright.inputs.parts import Part
from loopwright.runs.runner import run
from loopwright.strategies import factories


class Splits(toys.Regression):
  """Trains on "x" of two sources; an evaluation reads `needs` too."""

  def __init__(self, train, evaluation, needs=()):
    self.sources, self.needs = {"train": train, "eval": evaluation}, needs

  def build_model(self):
    return toys.linear([0.0])

  def source(self, split):
    return self.sources[split]

  def forward(self, batch, training):
    if not training:
      for name in self.needs:
        if batch[name].shape[1:] == [2]:
          raise ValueError(f"{name!r} is {batch[name].shape}")
    rows = tf.shape(batch["weight"])[0]
    return self.model(tf.ones([rows, 1]), training=training)[:, 0]

  def loss(self, outputs, batch):
    return Loss.from_examples(outputs, batch["weight"])


def start(folder, *sources, **given):
  return run(
    task=Splits(*sources, **given), train_steps=1, global_batch_size=2, model_dir=str(folder),
    strategy=factories.default, optimizer=lambda: keras.optimizers.SGD(0.1),
  )  # fmt: skip


def folder_of(path, *classes, **options):
  for name in classes:
    (path / name).mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros([2, 2, 3], np.uint8)).save(path / name / "0.png")
  return ImageFolderSource(directory=str(path), image_size=(2, 2), **options)


def of(**features):
  return ArraySource({name: np.asarray(value) for name, value in features.items()})


class Listed(list):
  """As a data set of Hugging Face: it has the names of a feature's numbers."""

  def __init__(self, *names):
    super().__init__({"x": np.float32(number), "y": number} for number in range(len(names)))
    self.features = {"x": object(), "y": type("ClassLabel", (), {"names": [*names]})()}


def listed(*names):
  return IndexedSource(data=Listed(*names))


def of_keras(path, *classes):
  folder_of(path, *classes)
  files = keras.utils.image_dataset_from_directory(str(path), image_size=(2, 2), verbose=False)
  return StreamSource(files.unbatch().map(lambda image, label: {"x": image, "y": label}))


HALVES, WHOLE = of(x=[0.5, 1.0]), of(x=[0, 255])
REFUSED = {
  "folders": (
    lambda at: (folder_of(at / "a", "cat", "cow", "dog"), folder_of(at / "b", "cat", "dog")),
    r"^'label' 1 is 'dog' in source\('eval'\), which numbers 'cat', 'dog', but 'cow' in "
    r"source\('train'\), which numbers 'cat', 'cow', 'dog'; give both the same names in the same "
    r"order, such as class_names\.$",
  ),
  "a set with one more": (
    lambda at: (listed("a", "b"), {"near": listed("a"), "far": listed("a", "b", "c")}),
    r"'y' 2 is 'c' in source\('eval'\)\['far'\], .* but nothing in source\('train'\)",
  ),
  "keras": (
    lambda at: (of_keras(at / "a", "cat", "dog"), of_keras(at / "b", "ant", "cat")),
    "'class' 0 is 'ant' in .* but 'cat' in",
  ),
  "behind others": (
    lambda at: (
      Sources(listed("a", "b", "c"), more=Part(source=of(x=[1.0]))),
      Packed(listed("a", "c"), lengths=[2], length=2),
    ),
    "'y' 1 is 'c'",
  ),
  "parts": (
    lambda at: (Mixture(parts={"p": listed("a", "b"), "q": listed("b")}, weights={"p": 1}), WHOLE),
    r"^'y' 0 is 'b' in Mixture.parts\['q'\], .* but 'a' in Mixture.parts\['p'\]",
  ),
  "scale": (
    lambda at: (WHOLE, HALVES),
    r"^feature 'x' is int64 in source\('train'\) but float64 in source\('eval'\), where one has "
    r"0\.5; give both the same dtype and scale \(astype\)\.$",
  ),
  "missing values": (lambda at: (WHOLE, of(x=[1.0, np.nan])), "where one has nan"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "line"), REFUSED.values(), ids=REFUSED)
def test_splits_that_disagree_are_refused_before_the_first_step(make, line, tmp_path):
  with one_line_error(line.strip("^$")):
    start(tmp_path / "run", *make(tmp_path))
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


SOUND = {
  "given names": lambda at: (
    folder_of(at / "a", "cat", "cow", "dog"),
    folder_of(at / "b", "cat", "dog", class_names=["cat", "cow", "dog"]),
  ),
  "the first classes": lambda at: (listed("a", "b", "c"), listed("a", "b")),
  "an unlabelled folder": lambda at: (folder_of(at / "a", "cat"), folder_of(at / "b", "all")),
  "no labels": lambda at: (of(x=[1.0, 2.0], y=[0, 1]), of(x=[1.0])),
  "whole floats": lambda at: (WHOLE, of(x=[0.0, 255.0])),
  "other widths": lambda at: (of(x=np.float32([0.5])), HALVES),
  "soft labels": lambda at: (of(x=[1.0], y=[[0.5, 0.5]]), of(x=[1.0], y=[1])),
  "other lengths": lambda at: (of(x=np.zeros([2, 5])), of(x=np.zeros([2, 9]))),
  "texts": lambda at: (of(x=[1.0], y=["a"]), of(x=[1.0], y=[0])),
}  # fmt: skip


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
def test_splits_that_agree_are_trained(make, tmp_path):
  assert "loss" in start(tmp_path / "run", *make(tmp_path))


def test_an_evaluation_that_needs_what_its_split_lacks_ends_before_the_first_step(tmp_path):
  with pytest.raises(KeyError, match="y"):
    start(tmp_path / "run", of(x=[1.0, 2.0], y=[0, 1]), of(x=[1.0]), needs=["y"])
  with pytest.raises(ValueError, match=r"'y' is \(2, 2\)"):
    start(tmp_path / "run", of(y=[[0, 1, 2]]), of(y=[[0, 1]]), needs=["y"])
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_class_names_that_are_given_number_the_folders(tmp_path):
  source = folder_of(tmp_path, "cat", "dog", class_names=["dog", "ant", "cat"])
  assert source.files.fetch(tf.constant([0, 1], tf.int64))["label"].numpy().tolist() == [0, 2]
  with one_line_error("has the folder 'cat', which is none of class_names; add it there, or"):
    folder_of(tmp_path, class_names=["dog"])
