"""Writes some classes of Fashion-MNIST as folders of PNG files, for `ImageFolderSource`.

  python -m benchmarks.image_folders runs/images/shirts --classes 0 6 --train 50 --eval 1000

writes runs/images/shirts/train/0/00001.png and so on, the first images of each class.
"""

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf

from loopwright.tasks.image_classification import fashion_mnist


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder", type=Path)
  parser.add_argument("--classes", type=int, nargs="+", required=True)
  parser.add_argument("--train", type=int, required=True, help="images per class")
  parser.add_argument("--eval", type=int, required=True, help="images per class")
  arguments = parser.parse_args()
  data = fashion_mnist()
  for split, count in (("train", arguments.train), ("eval", arguments.eval)):
    source = data.sources[split]
    everything = source.fetch(tf.range(source.num_examples, dtype=tf.int64))
    images, labels = everything["image"].numpy(), everything["label"].numpy()
    for label in arguments.classes:
      folder = arguments.folder / split / str(label)
      folder.mkdir(parents=True, exist_ok=True)
      for index in np.flatnonzero(labels == label)[:count]:
        path = folder / f"{index:05}.png"
        path.write_bytes(tf.io.encode_png(images[index]).numpy())
    print(f"{arguments.folder / split}: {count} images of each of {len(arguments.classes)} classes")


if __name__ == "__main__":
  main()
