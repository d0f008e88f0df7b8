"""The shipped tasks, each a small one, and a trainer that always begins from the same weights."""

import functools
import io

import keras
import numpy as np
import properties
import runs
import tensorflow as tf

from loopwright.inputs.sources import ArraySource
from loopwright.tasks.contrastive import Contrastive
from loopwright.tasks.diffusion import Diffusion
from loopwright.tasks.distillation import Distillation
from loopwright.tasks.fixmatch import FixMatch
from loopwright.tasks.gradient_histograms import GradientHistograms
from loopwright.tasks.gradient_penalty import WassersteinGan
from loopwright.tasks.image_classification import ImageData, cnn, mlp
from loopwright.tasks.maml import SinusoidMaml
from loopwright.tasks.momentum_contrast import MomentumContrast
from loopwright.tasks.sam import SharpClassification
from loopwright.tasks.vae import Vae

EXAMPLES, CLASSES, RATE, STEPS = 21, 4, 0.05, 10
# Their losses are large: of a larger rate, ten steps amplify rounding.
RATES = {WassersteinGan: 0.01, Vae: 1e-5}
SMALL_CNN = functools.partial(cnn, filters=(3,), units=6, activation="silu")
SMALL_MLP = functools.partial(mlp, units=(5,))


def images(side=8):
  rng = np.random.default_rng(side)
  features = {
    "image": rng.integers(0, 256, [EXAMPLES, side, side, 1]).astype(np.uint8),
    "label": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32),
  }
  source = ArraySource(features=features)
  shape = (side, side, 1)
  return ImageData(sources={"train": source, "eval": source}, image_shape=shape, labels=CLASSES)


SHAPES = {"input_shape": (8, 8, 1)}
CLASSIFIER = {**SHAPES, "classes": CLASSES}


def simclr(**options):
  small = {"filters": (3,), "units": 6, "projection": 4}
  return Contrastive(data=images(), **{**SHAPES, **small, **options})


def sam(rho=0.5):
  return SharpClassification(data=images(), network=SMALL_CNN, rho=rho, **CLASSIFIER)


def wgan_gp(**options):
  small = {"discriminator_steps": 1, "noise_size": 4, "width": 2, "penalty": 2.0}
  return WassersteinGan(data=images(28), **{**small, **options})


def distilled(temperature=2.0, hard_weight=0.3):
  """With a teacher of fixed weights, far from uniform answers."""
  task = Distillation(
    data=images(), teacher="unused", teacher_network=SMALL_CNN, network=SMALL_MLP,
    temperature=temperature, hard_weight=hard_weight, **CLASSIFIER,
  )  # fmt: skip
  rng, buffer = np.random.default_rng(5), io.BytesIO()
  teacher = SMALL_CNN(input_shape=(8, 8, 1), classes=CLASSES)
  np.savez(buffer, *[rng.normal(size=w.shape).astype(np.float32) for w in teacher.get_weights()])
  kept = {"teacher.npz": buffer.getvalue()}
  task.use(kept)
  task.fit = lambda: kept
  return task


def sines(**options):
  small = {"units": (6, 5), "activation": "tanh", "support": 4, "query": 3, "inner_rate": 0.1}
  small["eval_steps"] = (0, 2)
  return SinusoidMaml(**{"train_waves": EXAMPLES, "eval_waves": EXAMPLES, **small, **options})


def diffusion(**options):
  return Diffusion(data=images(28), **{"width": 8, "sampling_steps": 4, **options})


def vae(**options):
  small = {"code_size": 3, "width": 2, "annealing_steps": 6}
  return Vae(data=images(28), **{**small, **options})


def moco(**options):
  small = {"filters": (3,), "units": 6, "projection": 4, "queue_size": 16, "momentum": 0.8}
  return MomentumContrast(data=images(), **SHAPES, **{**small, **options})


def by_brightness():
  """48 images of four classes that differ in brightness; an image's label is its index mod 4."""
  rng = np.random.default_rng(8)
  label = np.arange(48).astype(np.int32) % 4
  image = rng.integers(0, 128, [48, 8, 8, 1]) + 30 * label[:, None, None, None]
  source = ArraySource(features={"image": image.astype(np.uint8), "label": label})
  return ImageData(sources={"train": source, "eval": source}, image_shape=(8, 8, 1), labels=4)


MOVED = {"network": SMALL_CNN, "flip": True, "shift": 1, "cutout": 3, **SHAPES}


def fixmatch(**options):
  small = {"labels": 12, "ratio": 3, "threshold": 0.268, "memory": 0.9, "classes": CLASSES}
  return FixMatch(data=by_brightness(), **{**MOVED, **small, **options})


def histograms(**options):
  return GradientHistograms(data=by_brightness(), **{**MOVED, **options})


MAKERS = {
  "contrastive": simclr,
  "sam": sam,
  "wgan_gp": wgan_gp,
  "distillation": distilled,
  "maml": sines,
  "diffusion": diffusion,
  "vae": vae,
  "moco": moco,
  "fixmatch": fixmatch,
  "histograms": histograms,
}


def optimizers(task):
  def sgd():
    return keras.optimizers.SGD(RATES.get(type(task), RATE))

  several = isinstance(task, WassersteinGan)
  return dict.fromkeys(("generator", "discriminator"), sgd) if several else sgd


def make_trainer(task, strategy=None, *, batch=7, dataset_fn=None, **options):
  """A batch of 7 is padded on 2 replicas, and on 3."""
  keras.utils.set_random_seed(1)
  strategy = strategy or tf.distribute.get_strategy()
  options = {"optimizer": optimizers(task), **options}
  trainer = runs.make_trainer(task, strategy, batch=batch, **options)
  trainer.dataset_fn = dataset_fn or trainer.dataset_fn
  return trainer


def trained(name, strategy=None, steps=STEPS):
  return properties.ended(make_trainer(MAKERS[name](), strategy), steps)


@functools.cache
def reference(name):
  """Ten steps on one replica."""
  return trained(name)


def untrained(name):
  """A task with the model that `reference` starts from."""
  task = MAKERS[name]()
  keras.utils.set_random_seed(1)
  task.model = task.build_model()
  return task


def assert_ends_like(variables, name):
  """Weights trained by hand for ten steps against those of the task."""
  properties.has_moved(reference(name))
  by_hand = np.concatenate([v.numpy().ravel() for v in variables])
  end = np.concatenate([*reference(name).replicas[0].values()])
  np.testing.assert_allclose(end, by_hand, rtol=0, atol=1e-5)
