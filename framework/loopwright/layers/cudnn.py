"""cuDNN's fused attention as TensorFlow can call it: modules of StableHLO, written by shape.

XLA knows these kernels as custom calls. The texts in cudnn_*.mlir and cudnn.json are what JAX makes
of `jax.nn.dot_product_attention(..., implementation="cudnn")`; JAX itself is not needed. TensorFlow
compiles a module by XLA, also in a function that is not compiled.
"""

from __future__ import annotations

import functools
import json
import string
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

NAMES = {tf.bfloat16: "bf16", tf.float16: "f16"}
HIDDEN = {tf.bfloat16: -(2.0**41), tf.float16: -(2.0**15)}
"""Dtype -> the bias of what a query does not see; cuDNN subtracts two of them."""
PLATFORM = "CUDA"


class Shape(NamedTuple):
  """What a module is written for.

  Attributes:
    dtype: of query, key, value and bias.
    rows: of a batch.
    to, origin: length of the queries, and of keys and values.
    heads, groups: of the queries, and of keys and values.
    size: of a head.
    scale: of the products of queries and keys.
    causal: whether token i sees tokens up to i alone.
    bias: its first two axes, [1 or rows, 1 or heads]; () for no bias.
    deterministic: whether gradients are summed in one order.
  """

  dtype: tf.DType
  rows: int
  to: int
  origin: int
  heads: int
  groups: int
  size: int
  scale: float
  causal: bool
  bias: tuple[int, ...]
  deterministic: bool

  def refused(self) -> str:
    """Why cuDNN has no kernel for it, or ""."""
    if self.dtype not in NAMES:
      return f"it has float16 and bfloat16, not {self.dtype.name}"
    if self.size % 8 or self.size > 256:
      return f"the size of a head must be a multiple of 8 up to 256, not {self.size}"
    if self.bias and (self.to % 2 or self.origin % 2):
      return f"with a mask lengths must be even, not {self.to} and {self.origin}"
    return ""


def attention(
  query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, bias: tf.Tensor | None, shape: Shape
) -> tf.Tensor:
  """Returns [n, to, heads, size]; the bias is added to the products, and gets no gradient."""
  added = [] if bias is None else [bias]

  @tf.custom_gradient
  def fused(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> Any:
    given = [query, key, value]
    out, sums = _call(shape, [*given, *added], [query.shape, [shape.rows, shape.heads, shape.to]])

    def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
      shapes = [each.shape for each in given]
      return _call(shape, [*given, sums, upstream, *added, out], shapes, backward=True)

    return out, gradient

  return fused(query, key, value)


def _call(
  shape: Shape, given: list[tf.Tensor], shapes: list[Any], *, backward: bool = False
) -> list[tf.Tensor]:
  return xla.call_module(
    given, version=9, module=module(shape, backward=backward), platforms=(PLATFORM,), Sout=shapes,
    Tout=[shape.dtype, shape.dtype if backward else tf.float32, shape.dtype][: len(shapes)],
  )  # fmt: skip


@functools.cache
def module(shape: Shape, *, backward: bool) -> str:
  """Returns the text of a module.

  Forward: query, key, value, bias -> output, float32 [n, heads, to] that the backward one needs.
  Backward: query, key, value, these, the output's gradient, bias, output -> three gradients.
  """
  dtype, (rows, to, origin, heads, groups, size) = NAMES[shape.dtype], shape[1:7]
  bias = [*shape.bias, to, origin] if shape.bias else []

  def tensor(*sizes: int, dtype: str = dtype) -> str:
    return f"tensor<{'x'.join(map(str, sizes))}x{dtype}>"

  def if_biased(text: str) -> str:
    return text if bias else ""

  rowwise = "dense<[3, 2, 1, 0]> : tensor<4xindex>"
  name = "cudnn_backward.mlir" if backward else "cudnn_forward.mlir"
  return string.Template(Path(__file__).with_name(name).read_text()).substitute(
    config=json.dumps(_config(shape, backward=backward)).replace('"', '\\"'),
    kind=if_biased("ScaleBias"), bias=if_biased(", %bias"), bias_layout=if_biased(f", {rowwise}"),
    bias_argument=if_biased(f", %bias: {tensor(*bias)}"), bias_type=if_biased(f", {tensor(*bias)}"),
    query=tensor(rows, to, heads, size), query_turned=tensor(rows, heads, to, size),
    key=tensor(rows, origin, groups, size), key_turned=tensor(rows, groups, origin, size),
    sums=tensor(rows, heads, to, dtype="f32"), results=5 if bias else 4,
    rowwise=rowwise, turned="dense<[3, 1, 2, 0]> : tensor<4xindex>",
  )  # fmt: skip


def _config(shape: Shape, *, backward: bool) -> dict[str, Any]:
  read = json.loads(Path(__file__).with_name("cudnn.json").read_text())
  config = {**read["both"], **read["backward" if backward else "forward"]}
  dimensions = [shape.rows, shape.heads, shape.to, shape.origin]
  config["intermediate_tensor_shape"].update(
    element_type=NAMES[shape.dtype].upper(), dimensions=[str(each) for each in dimensions]
  )
  config |= {"fmha_scale": shape.scale, "mask_type": "CAUSAL" if shape.causal else "NO_MASK"}
  if shape.deterministic:
    config["force_deterministic"] = True
  return {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}
