"""Transfer learning: a backbone of keras.applications under a new head, frozen or fine-tuned.

import loopwright.tasks.transfer_learning
run.task = @TransferLearning()
TransferLearning.data = @image_folder()
TransferLearning.backbone = @mobilenet_v2()
TransferLearning.fine_tune = False
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

import loopwright
from loopwright import Batch, ConfigError, Loss, Source, Step, Task
from loopwright.errors import first_line
from loopwright.metrics import Weighted, weighted_sum
from loopwright.run_folder.warm_start import WarmStart
from loopwright.tasks.image_classification import ImageData, moved

IMAGENET = "imagenet"
_LOCAL_STATISTICS = {
  "batch-norm statistics": "a fine-tuned backbone normalises each replica's rows separately, as "
  "the layers of keras.applications do"
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
  """A network of keras.applications, and how to scale its input.

  Attributes:
    build: makes it, with the options of keras.applications.
    preprocess_input: maps float32 RGB images in [0, 255], [n, height, width, 3], to its input.
  """

  build: Callable[..., keras.Model]
  preprocess_input: Callable[[tf.Tensor], tf.Tensor]


@loopwright.register
def mobilenet_v2(*, alpha: float = 1.0) -> Backbone:
  """MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381); its input is in [-1, 1].

  Args:
    alpha: width factor; ImageNet weights exist for 0.35, 0.5, 0.75, 1, 1.3 and 1.4.
  """
  return Backbone(
    build=functools.partial(keras.applications.MobileNetV2, alpha=alpha),
    preprocess_input=keras.applications.mobilenet_v2.preprocess_input,
  )


@loopwright.register
def efficientnet_v2_s() -> Backbone:
  """EfficientNetV2-S (Tan and Le 2021, arXiv:2104.00298); its input is in [0, 255]."""
  return Backbone(
    build=keras.applications.EfficientNetV2S,
    preprocess_input=keras.applications.efficientnet_v2.preprocess_input,
  )


@loopwright.register
def resnet50() -> Backbone:
  """ResNet-50 (He et al. 2015, arXiv:1512.03385); its input is BGR minus ImageNet's mean."""
  return Backbone(
    build=keras.applications.ResNet50,
    preprocess_input=keras.applications.resnet50.preprocess_input,
  )


class ReadAtEachStart(Task):
  """A task whose model is what it trains; the rest is read from files, of which runs keep a digest.

  Attributes:
    read_from: the option that names the files, and its value.
    network: the whole, once `build_model` has run.
  """

  read_from: tuple[str, str]
  network: Any

  def digest(self) -> str:
    """Returns a digest of the files (host)."""
    raise NotImplementedError

  def trained_alone(self) -> dict[str, Any]:
    """Returns the trainable variables of the network by name: a model, for checkpoints too."""
    return {variable.path: variable for variable in self.network.trainable_variables}

  def fit(self) -> dict[str, bytes]:
    """Returns the digest, as a checkpoint of a part needs the same files again."""
    return {f"{self.read_from[0]}.txt": self.digest().encode()}

  def use(self, assets: Mapping[str, bytes]) -> None:
    """Raises a ConfigError if the files are others than those that the run began with."""
    option, path = self.read_from
    if assets[f"{option}.txt"] != self.digest().encode():
      raise ConfigError(
        f"{type(self).__name__}.{option} {path!r} has other files than when the run began; restore "
        "them, or choose another --model_dir."
      )


@loopwright.register
class TransferLearning(ReadAtEachStart):
  """Classification of RGB images: backbone, global average pooling, dense layers with ReLU, logits.

  Two classes use one logit and a sigmoid, more use one logit each and a softmax.
  """

  def __init__(
    self,
    *,
    data: ImageData,
    backbone: Backbone,
    input_shape: Sequence[int] = (224, 224, 3),
    classes: int = 2,
    fine_tune: bool = False,
    unfreeze_step: int | None = None,
    momentum: float | None = None,
    weights: str | None = None,
    head_only: bool = False,
    units: Sequence[int] = (512,),
    dropout: float = 0.5,
    flip: bool = False,
  ) -> None:
    """Keeps its arguments.

    Args:
      data: "train" and "eval" sources of RGB images.
      backbone: such as `mobilenet_v2()`.
      input_shape: height, width, 3.
      classes: labels are 0 .. classes - 1.
      fine_tune: False freezes the backbone: its weights do not change, and its batch normalisation
        uses and keeps its statistics. True trains all of it, with each replica's own statistics.
      unfreeze_step: with `fine_tune`: an optimizer "head" trains the layers after the backbone
        for this many steps, then an optimizer "all" trains everything but the backbone's batch
        normalisation, which stays in inference mode. 0 trains so from the start, with one
        optimizer; None trains everything from the start.
      momentum: of its moving statistics, when fine-tuned. None keeps that of keras.applications,
        0.999 for MobileNetV2: after 1,000 steps from scratch, 37 % of a statistic is still its
        initial value.
      weights: of the backbone: None for random ones, "imagenet" for Keras's download, or a path as
        for `WarmStart`; read whenever the model is built, in every mode.
      head_only: of a frozen backbone with `weights`: checkpoints and averages have the head alone,
        and a run needs the same weights to go on.
      units: of the dense layers after the pooling.
      dropout: rate after each of them.
      flip: mirror half of the training images, left to right.

    Raises:
      ConfigError: images without three channels, fewer than two classes, an invalid momentum,
        `unfreeze_step` of a backbone that stays frozen, or `head_only` of another.
    """
    if len(input_shape) != 3 or input_shape[2] != 3:
      raise ConfigError(
        f"TransferLearning.input_shape is {tuple(input_shape)}; it must be (height, width, 3), as "
        "the backbones need RGB; image_folder.channels = 3 turns grey files into RGB."
      )
    if classes < 2:
      raise ConfigError(f"TransferLearning.classes is {classes}; it must be 2 or more.")
    if momentum is not None and not 0 <= momentum < 1:
      raise ConfigError(
        f"TransferLearning.momentum is {momentum}; it must be 0 or more and below 1, such as 0.9."
      )
    if unfreeze_step is not None and not fine_tune:
      raise ConfigError(
        f"TransferLearning.unfreeze_step is {unfreeze_step}, but fine_tune is False, which never "
        "trains the backbone; set TransferLearning.fine_tune = True."
      )
    if head_only and (fine_tune or not weights):
      raise ConfigError(
        "TransferLearning.head_only is True, but checkpoints must have a backbone that "
        f"{'is trained' if fine_tune else 'begins at random'}; set head_only = False"
        f"{' or fine_tune = False' if fine_tune else ', or weights'}."
      )
    self._momentum, self._unfreeze_step, self._head_only = momentum, unfreeze_step, head_only
    self._data, self._backbone, self._weights = data, backbone, weights
    self.read_from = ("weights", weights or "")
    self._shape, self._classes, self._fine_tune = tuple(input_shape), classes, fine_tune
    self._units, self._dropout, self._flip = tuple(units), dropout, flip
    self.chance_loss = math.log(classes)
    local = fine_tune and unfreeze_step is None
    self.accepted: Mapping[str, str] = _LOCAL_STATISTICS if local else {}

  @property
  def has_fit(self) -> bool:
    """Whether the run keeps a digest of the weights."""
    return self._head_only

  def digest(self) -> str:
    """Returns the digest of the weights, or the name of Keras's."""
    weights = self.read_from[1]
    return weights if weights == IMAGENET else WarmStart(path=weights).digest()

  def build_model(self) -> keras.Model | dict[str, Any]:
    """Returns the network, with logits [n, 1] for two classes, otherwise [n, classes].

    With `head_only`, it returns the variables of the head, by name.

    Raises:
      ConfigError: the weights cannot be downloaded or read.
    """
    backbone = self._built_backbone()
    if not self._fine_tune:
      backbone.trainable = False
    image = keras.Input(self._shape, name="image")
    features = keras.layers.GlobalAveragePooling2D(name="pooling")(backbone(image))
    for number, width in enumerate(self._units):
      features = keras.layers.Dense(width, activation="relu", name=f"hidden_{number}")(features)
      features = keras.layers.Dropout(self._dropout, name=f"dropout_{number}")(features)
    outputs = 1 if self._classes == 2 else self._classes
    small = keras.initializers.RandomNormal(stddev=0.01)  # so that training begins at chance
    last = keras.layers.Dense(outputs, kernel_initializer=small, dtype="float32", name="logits")
    self.network = keras.Model(image, last(features), name="transfer_learning")
    return self.trained_alone() if self._head_only else self.network

  def source(self, split: str) -> Source:
    """Returns the images and labels of a split.

    Raises:
      ConfigError: they do not fit `input_shape` or `classes`.
    """
    return self._data.source(
      split, task=type(self).__name__, input_shape=self._shape, classes=self._classes
    )

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales to the backbone's input; augments when training."""
    image = batch["image"]
    if training and self._flip:
      image = moved(image, batch["seed"], flip=True)
    image = self._backbone.preprocess_input(tf.cast(image, tf.float32))
    return {**batch, "image": image}

  def variables_of(self, optimizer: str) -> list[Any]:
    """Returns all trainable variables; those after the backbone for the optimizer "head"."""
    if optimizer != "head":
      return super().variables_of(optimizer)
    layers = [layer for layer in self.network.layers if not isinstance(layer, keras.Model)]
    return [variable for layer in layers for variable in layer.trainable_variables]

  def train_step(self, step: Step, batch: Batch) -> None:
    """Updates everything; with `unfreeze_step`, only the head before that step."""
    if not self._unfreeze_step:
      super().train_step(step, batch)
      return
    frozen = step.number < self._unfreeze_step
    step.update(lambda part: self.training_loss(step, part), batch, "head", when=frozen)
    step.update(lambda part: self.training_loss(step, part), batch, "all", when=~frozen)

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns float32 logits."""
    return tf.cast(self.network(batch["image"], training=training), tf.float32)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Cross-entropy."""
    label = batch["label"]
    if self._classes == 2:
      losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(label, tf.float32), outputs[:, 0])
    else:
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=outputs)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """Accuracy."""
    if self._classes == 2:
      guess = tf.cast(outputs[:, 0] > 0, batch["label"].dtype)
    else:
      guess = tf.argmax(outputs, axis=-1, output_type=batch["label"].dtype)
    return {"accuracy": weighted_sum(tf.equal(guess, batch["label"]), batch["weight"])}

  def export_signature(self) -> Any:
    """Serves raw images, uint8 -> class probabilities [n, classes]."""

    @tf.function(input_signature=[tf.TensorSpec((None, *self._shape), tf.uint8, "image")])
    def serve(image: tf.Tensor) -> dict[str, tf.Tensor]:
      batch = self.preprocess({"image": image}, training=False)
      logits = self.forward(batch, training=False)
      if self._classes == 2:
        second = tf.nn.sigmoid(logits)
        return {"probabilities": tf.concat([1.0 - second, second], axis=-1)}
      return {"probabilities": tf.nn.softmax(logits)}

    return serve

  def _built_backbone(self) -> keras.Model:
    download = self._weights == IMAGENET
    try:
      backbone = self._backbone.build(
        include_top=False, input_shape=self._shape, weights=IMAGENET if download else None
      )
    except ValueError as error:  # from Keras, about its options
      raise ConfigError(f"keras.applications rejects the backbone: {_line(error)}") from error
    except Exception as error:
      if not download:
        raise
      raise ConfigError(
        f"TransferLearning.weights is 'imagenet', but Keras cannot download them ({_line(error)}); "
        "download the file elsewhere and give its path, or remove weights to start at random."
      ) from error
    for layer in backbone.layers:
      if isinstance(layer, keras.layers.BatchNormalization):
        layer.momentum = layer.momentum if self._momentum is None else self._momentum
        layer.trainable = self._unfreeze_step is None  # False is inference mode too
    if self._weights and not download:
      try:
        report = WarmStart(path=self._weights, strict=True).load(backbone)
      except ConfigError as error:
        raise ConfigError(f"TransferLearning.weights: {error}") from error
      logging.info(report.summary())
    return backbone


def _line(error: Exception) -> str:
  return first_line(error)[:200]
