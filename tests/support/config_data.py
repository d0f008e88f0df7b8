"""Small data in the place of what the configs of configs/ read, and a look at their runs."""

import itertools
from pathlib import Path
from typing import ClassVar

import gin
import numpy as np
import reviews
import tensorflow as tf

import launch
import loopwright
from loopwright.actions.base import Action
from loopwright.tasks.decoder import decoder
from loopwright.tasks.image_classification import cnn

FOLDER = Path(launch.__file__).parent / "configs"
EXAMPLES = 12


@loopwright.register
class Witness(Action):
  """Keeps the run it is bound to."""

  on = "train"
  runs: ClassVar[list] = []

  def begin(self):
    self.runs.append(self.run)

  def __call__(self, output):
    del output


def forget_garden():
  """Takes the Model Garden's names from gin: `Trainer` shall stay a short name for other tests."""
  names = [name for name, _ in gin.config._REGISTRY.items() if name.startswith("official.")]
  for name in names:
    gin.config._REGISTRY.pop(name)


def fashion_mnist_files(folder):
  """Stand-ins for its four files, each with all ten labels."""
  rng = np.random.default_rng(0)
  for split in ("train", "t10k"):
    images = rng.integers(0, 256, [EXAMPLES, 28, 28])
    for name, array in (("images-idx3", images), ("labels-idx1", np.arange(EXAMPLES) % 10)):
      head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
      (folder / f"{split}-{name}-ubyte").write_bytes(head + array.astype(np.uint8).tobytes())


def text_parameters(folder, task="LanguageModel"):
  """Stand-ins for the standard library: parameters that read a few files."""
  rng = np.random.default_rng(0)
  (folder / "texts").mkdir()
  for number in range(EXAMPLES):
    text = rng.integers(32, 127, 600).astype(np.uint8)
    text[::20] = ord("\n")
    (folder / "texts" / f"{number}.py").write_bytes(text)
  return [
    f"{task}.corpus = @TextFiles()",
    f"TextFiles.path = '{folder / 'texts'}'",
    "TextFiles.eval_fraction = 0.3",
  ]


def teacher(folder):
  """Stands in for the run of digits_cnn.gin: its network, not trained."""
  network = cnn(input_shape=(8, 8, 1), classes=10)
  tf.train.Checkpoint(model=network).write(str(folder / "teacher" / "checkpoints" / "ckpt-1"))
  return [f"Distillation.teacher = '{folder / 'teacher'}'"]


def decoder_run(folder):
  """Stands in for the run of language_model_decoder.gin: its network, not trained."""
  tf.train.Checkpoint(model=decoder(layers=1)).write(
    str(folder / "decoder" / "checkpoints" / "ckpt-1")
  )
  return [f"Preferred.start = '{folder / 'decoder'}'"]


def pretrained(folder):
  """Stands in for the run of fashion_mnist_histograms.gin: its network, not trained."""
  network = cnn(input_shape=(28, 28, 1), classes=1040, activation="silu")
  model = {"network": network}
  tf.train.Checkpoint(model=model).write(str(folder / "pretrained" / "checkpoints" / "ckpt-1"))
  return [f"WarmStart.path = '{folder / 'pretrained'}'"]


def image_folder_parameters(folder):
  """Stand-ins for two classes of photographs, and of a size that is quick."""
  rng = np.random.default_rng(0)
  for split, label in itertools.product(("train", "eval"), ("cat", "dog")):
    (folder / split / label).mkdir(parents=True)
    for number in range(EXAMPLES // 2):
      image = tf.io.encode_png(rng.integers(0, 256, [9, 8, 3]).astype(np.uint8))
      (folder / split / label / f"{number}.png").write_bytes(image.numpy())
  return [
    *(f"image_folder.{split} = '{folder / split}'" for split in ("train", "eval")),
    "image_folder.image_size = (32, 32)",
    "TransferLearning.input_shape = (32, 32, 3)",
  ]


def stand_ins(name, folder):
  """Makes small data in the place of what may not be installed; returns the parameters for it."""
  if name.startswith("fashion_mnist"):
    fashion_mnist_files(folder)
    labels = ["FixMatch.labels = 10"] if "fixmatch" in name else []
    start = pretrained(folder) if "pretrained" in name else []
    return [f"fashion_mnist.directory = '{folder}'", *labels, *start]
  if name == "digits_distillation.gin":
    return teacher(folder)
  if name.startswith("imdb"):
    reviews.install_package(folder, count=EXAMPLES * 2)
    return [f"imdb_reviews.eval_examples = {EXAMPLES}"]
  if name in tuple(f"language_model{each}.gin" for each in ("", "_decoder", "_packed", "_widths")):
    return text_parameters(folder)
  if name == "language_model_generation.gin":
    return text_parameters(folder, "Continued")
  if name == "language_model_preference.gin":
    return [*text_parameters(folder, "Preferred"), *decoder_run(folder)]
  if name == "language_model_mixture.gin":
    several = "LanguageModel.corpus = {'code': @TextFiles(), 'prose': @TextFiles()}"
    return [several, "TextFiles.pattern = '*.py'", *text_parameters(folder)[1:]]
  if name == "transfer_learning.gin":
    return image_folder_parameters(folder)
  return []
