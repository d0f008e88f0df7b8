"""The size of an encoded image, from its header, in TensorFlow operations: before it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

Image: TypeAlias = tuple[tf.Tensor, tf.Tensor]
"""What to decode, and int64 [2]: height and width."""

_MOST_BLOCKS = 2**17
"""Blocks of a GIF's first image, of up to 255 bytes each; hostile ones are of one byte."""


def first_image(content: tf.Tensor) -> Image:
  """Returns what to decode, and int64 [2]: height and width of the result (any context).

  Args:
    content: string scalar, the bytes of a JPEG, PNG, GIF, BMP or WebP. Of a GIF only the first
      image is returned: TensorFlow's decoder would first expand all of them, each of any size.

  Raises:
    tf.errors.InvalidArgumentError: when it runs, a header that is cut off.
  """
  return tf.cond(
    tf.strings.substr(content, 0, 3) == b"\xff\xd8\xff",
    lambda: (content, tf.io.extract_jpeg_shape(content, tf.int64)[:2]),
    lambda: _of_other_kinds(content),
  )


def _apart(function: Callable[[tf.Tensor], Image]) -> Any:
  """Decorator: TensorFlow runs the function as one operation, so that a JPEG does not pass it."""
  return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


@_apart
def _of_other_kinds(content: tf.Tensor) -> Image:
  kinds: dict[tuple[int, bytes], Callable[[], Image]] = {
    (0, b"\x89PNG"): lambda: (content, _sides(content, [19, 18, 17, 16], [23, 22, 21, 20])),
    (0, b"GIF8"): lambda: _first_of_gif(content),
    (0, b"BM"): lambda: (content, _sides_of_bmp(content)),
    (8, b"WEBPVP8X"): lambda: _of_extended_webp(content),
    (8, b"WEBPVP8L"): lambda: (content, _sides_of_lossless_webp(content)),
    (8, b"WEBPVP8 "): lambda: (content, _sides(content, [26, 27], [28, 29]) % 2**14),
  }
  places, magics = zip(*kinds, strict=True)
  lengths = [len(magic) for magic in magics]
  begin = tf.fill([len(kinds)], tf.strings.substr(content, 0, 16))
  there = tf.strings.substr(begin, places, lengths) == tf.constant(magics)
  # An empty text stands for what is none of these, as no decoder accepts it.
  none = lambda: (tf.constant(b""), tf.constant([1, 1], tf.int64))  # noqa: E731
  which = tf.argmax(tf.concat([there, [True]], 0), output_type=tf.int32)
  return tf.switch_case(which, [*kinds.values(), none])


def _sides(content: tf.Tensor, width: list[int], height: list[int]) -> tf.Tensor:
  """Returns int64 [2]: height and width, made of the bytes at these indices, the lowest first."""
  data = tf.io.decode_raw(tf.strings.substr(content, 0, max(*width, *height) + 1), tf.uint8)
  return _numbers(data, tf.constant([height, width]))


def _numbers(data: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
  """Returns int64 [n] made of the bytes at `indices`, int32 [n, bytes], the lowest first."""
  digits = tf.cast(tf.gather(data, indices), tf.int64)
  return tf.reduce_sum(digits * 256 ** tf.range(indices.shape[1], dtype=tf.int64), axis=1)


def _sides_of_bmp(content: tf.Tensor) -> tf.Tensor:
  """The height is negative if the first row is at the top."""
  sides = _sides(content, [18, 19, 20, 21], [22, 23, 24, 25])
  return tf.minimum(sides, 2**32 - sides)


def _of_extended_webp(content: tf.Tensor) -> Image:
  """Returns no content for an animation, whose frames the decoder would all expand."""
  flags = tf.io.decode_raw(tf.strings.substr(content, 20, 1), tf.uint8)[0]
  one = tf.where(flags & 2 > 0, b"", content)
  return one, _sides(content, [24, 25, 26], [27, 28, 29]) + 1


def _sides_of_lossless_webp(content: tf.Tensor) -> tf.Tensor:
  """Two numbers of 14 bits, each less by one, after the signature 0x2f."""
  data = tf.io.decode_raw(tf.strings.substr(content, 0, 25), tf.uint8)
  bits = _numbers(data, tf.constant([[21, 22, 23, 24]]))[0]
  return tf.stack([bits // 2**14 % 2**14, bits % 2**14]) + 1


def _first_of_gif(content: tf.Tensor) -> Image:
  """Returns a GIF that ends after its first image; see the format's section 18 to 23."""
  data = tf.io.decode_raw(content, tf.uint8)
  image = tf.while_loop(
    lambda at: data[at] == 0x21,  # an extension
    lambda at: (_after_blocks(data, at + 2),),
    (13 + _palette_bytes(data[10]),),
    maximum_iterations=_MOST_BLOCKS,
  )[0]
  sides = _numbers(data, image + tf.constant([[7, 8], [5, 6]]))
  end = _after_blocks(data, image + 11 + _palette_bytes(data[image + 9]))
  return tf.strings.substr(content, 0, end) + b";", sides


def _palette_bytes(flags: tf.Tensor) -> tf.Tensor:
  flags = tf.cast(flags, tf.int32)
  return tf.where(flags >= 0x80, 3 * 2 ** (flags % 8 + 1), 0)


def _after_blocks(data: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
  """Returns the index after a chain of blocks, each a length and as many bytes; 0 ends it."""
  end = tf.while_loop(
    lambda at: data[at] > 0,
    lambda at: (at + 1 + tf.cast(data[at], tf.int32),),
    (at,),
    maximum_iterations=_MOST_BLOCKS,
  )[0]
  return end + 1
