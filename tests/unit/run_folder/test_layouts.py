"""Weights with PyTorch's axes: what a layer computes, by PyTorch's definitions in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loopwright.errors import ConfigError
from loopwright.run_folder import safetensors_files
from loopwright.run_folder.matching import Names
from loopwright.run_folder.warm_start import WarmStart

RNG = np.random.default_rng(8)
SIZES, WINDOW, CHANNELS, FILTERS = (5, 6, 4), (2, 3, 2), 4, 6


def places(x, window):
  """Yields an offset in the window, and the input that it sees, for "valid" windows."""
  out = [size - extent + 1 for size, extent in zip(x.shape[1:], window, strict=True)]
  for at in np.ndindex(*window):
    yield at, x[(slice(None), *(slice(a, a + n) for a, n in zip(at, out, strict=True)))]


def convolution(x, w, groups=1):
  """[in, *size], [out, in / groups, *window] -> [out, *]: torch.nn.functional.conv."""
  parts = np.split(x, groups)
  return np.concatenate([
    sum(np.tensordot(kernel[(..., *at)], seen, 1) for at, seen in places(part, w.shape[2:]))
    for part, kernel in zip(parts, np.split(w, groups), strict=True)
  ])  # fmt: skip


def transposed(x, w):
  """[in, *size], [in, out, *window] -> [out, *]: torch.nn.functional.conv_transpose."""
  out = np.zeros([w.shape[1], *(a + b - 1 for a, b in zip(x.shape[1:], w.shape[2:], strict=True))])
  for at in np.ndindex(*w.shape[2:]):
    to = (slice(None), *(slice(a, a + n) for a, n in zip(at, x.shape[1:], strict=True)))
    out[to] += np.tensordot(w[(..., *at)].T, x, 1)
  return out


def depthwise(x, w):
  return convolution(x, w, groups=len(x))


KINDS = {
  **{f"Conv{n}D": (n, [FILTERS, CHANNELS], convolution, {"filters": FILTERS}) for n in (1, 2, 3)},
  **{
    f"Conv{n}DTranspose": (n, [CHANNELS, FILTERS], transposed, {"filters": FILTERS})
    for n in (1, 2, 3)
  },
  **{
    f"DepthwiseConv{n}D": (n, [2 * CHANNELS, 1], depthwise, {"depth_multiplier": 2}) for n in (1, 2)
  },
}


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_pytorch_defines(kind, library, tmp_path):
  axes, channels, defined, options = KINDS[kind]
  weight = RNG.normal(size=[*channels, *WINDOW[:axes]]).astype(np.float32)
  x = RNG.normal(size=[CHANNELS, *SIZES[:axes]]).astype(np.float32)
  layer = getattr(library.layers, kind)(
    kernel_size=WINDOW[:axes], name="c", use_bias=False, **options
  )
  inputs = library.Input([*SIZES[:axes], CHANNELS])
  model = library.Model(inputs, layer(inputs))
  own = model.weights[0].name.split("/")[-1].removesuffix(":0")
  path = str(tmp_path / "model.safetensors")
  safetensors_files.write(path, {"conv.weight": weight})
  rename = {"conv.weight": f"c/{own}.T"}
  WarmStart(path=path, rename=rename, strict=True).load(model)
  made = np.moveaxis(np.asarray(model(np.moveaxis(x, 0, -1)[None]))[0], -1, 0)
  np.testing.assert_allclose(made, defined(x.astype(np.float64), weight), atol=1e-5)
  np.testing.assert_array_equal(Names(model).in_file(rename)["conv.weight"], weight)


def test_both_kernels_of_a_separable_convolution(tmp_path):
  one = RNG.normal(size=[2 * CHANNELS, 1, 2, 3]).astype(np.float32)
  other = RNG.normal(size=[FILTERS, 2 * CHANNELS, 1, 1]).astype(np.float32)
  x = RNG.normal(size=[CHANNELS, 5, 6]).astype(np.float32)
  layer = keras.layers.SeparableConv2D(
    FILTERS, (2, 3), depth_multiplier=2, use_bias=False, name="c"
  )
  model = keras.Sequential([keras.Input([5, 6, CHANNELS]), layer])
  safetensors_files.write(path := str(tmp_path / "a.safetensors"), {"a": one, "b": other})
  rename = {"a": "c/depthwise_kernel.T", "b": "c/pointwise_kernel.T"}
  WarmStart(path=path, rename=rename, strict=True).load(model)
  expected = convolution(depthwise(x.astype(np.float64), one), other)
  np.testing.assert_allclose(
    np.moveaxis(model(np.moveaxis(x, 0, -1)[None])[0], -1, 0), expected, atol=1e-5
  )


def test_other_weights_of_three_axes_are_refused(tmp_path):
  dense = keras.layers.EinsumDense("ab,bcd->acd", [2, 3], name="heads")
  model = keras.Sequential([keras.Input([3]), dense])
  safetensors_files.write(path := str(tmp_path / "a.safetensors"), {"a": np.zeros([3, 2, 3])})
  with pytest.raises(ConfigError, match=r"'.*heads/kernel' has 3 axes and is of no convolution"):
    WarmStart(path=path, rename={"a": "heads/kernel.T"}).load(model)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 0), (2, 3), (1, 1, 1), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", ">f4"])
def test_every_shape_is_read_back_to_the_bit(shape, dtype, tmp_path):
  kind = np.dtype(">f4") if dtype == ">f4" else tf.as_dtype(dtype).as_numpy_dtype
  value = RNG.normal(0, 9, shape).astype(np.float32).astype(kind)
  given = {"a": value, "b": np.moveaxis(value, 0, -1)[..., ::-1] if value.ndim > 1 else value}
  safetensors_files.write(path := str(tmp_path / "a.safetensors"), given)
  safetensors_files.average([path], mean := str(tmp_path / "mean.safetensors"))
  for file in (path, mean):
    with safetensors_files.contents(file) as found:
      for name, expected in given.items():
        read = found[name].read()
        assert (read.shape, found[name].shape) == (expected.shape, expected.shape)
        np.testing.assert_array_equal(read.astype(np.float64), expected.astype(np.float64))
