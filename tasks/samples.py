"""A sheet of images drawn by a generative task: `Gan`, `WassersteinGan`, `Diffusion`, `Vae`.

    python -m loopwright.tasks.samples runs/fashion_mnist_vae --output=samples.png

The task has `noise_shape`, and its `export_signature` maps "noise" [n, *noise_shape] to "image"
[n, height, width, 1] in [0, 1].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from loopwright import ConfigError


def sheet(task: Any, *, rows: int, columns: int, seed: int = 0) -> tf.Tensor:
  """Draws rows x columns images, laid side by side, uint8 [height rows, width columns, 1] (host).

  Args:
    task: with its model built.
    rows: number of rows of images.
    columns: number of columns of images.
    seed: of the noise; the same seed gives the same sheet.
  """
  shape = [rows * columns, *task.noise_shape]
  drawn = task.export_signature()(tf.random.stateless_normal(shape, seed=[seed, 0]))["image"]
  _, height, width, _ = drawn.shape
  by_place = tf.transpose(tf.reshape(drawn, [rows, columns, height, width]), [0, 2, 1, 3])
  laid_out = tf.reshape(by_place, [rows * height, columns * width, 1])
  return tf.cast(tf.round(tf.clip_by_value(laid_out, 0.0, 1.0) * 255.0), tf.uint8)


def main(arguments: Sequence[str] | None = None) -> int:
  """Writes a sheet of samples from a run's newest checkpoint; returns the exit status."""
  import loopwright

  parser = argparse.ArgumentParser(prog="python -m loopwright.tasks.samples")
  parser.add_argument("model_dir", help="the folder of a run")
  parser.add_argument("--output", required=True, help="a .png file")
  parser.add_argument("--rows", type=int, default=5, help="rows of images")
  parser.add_argument("--columns", type=int, default=14, help="columns of images")
  parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
  given = parser.parse_args(arguments)
  try:
    task = loopwright.load(given.model_dir).task
    if not hasattr(task, "noise_shape"):
      raise ConfigError(
        f"{given.model_dir!r} is a run of {type(task).__name__}, which draws no images; give a run "
        "of Gan, WassersteinGan, Diffusion or Vae."
      )
    drawn = sheet(task, rows=given.rows, columns=given.columns, seed=given.seed)
    tf.io.write_file(given.output, tf.io.encode_png(drawn))
  except (ConfigError, tf.errors.OpError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(given.output)
  return 0


if __name__ == "__main__":
  sys.exit(main())
