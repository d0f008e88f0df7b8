"""Knowledge distillation: a small student learns the soft predictions of a frozen teacher.

The teacher is another run or a Keras file. Its weights become an asset of the student's run, so
later starts, evaluations and other workers do not need the teacher's folder.

Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), section 2.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, EvalStep, Loss
from loopwright.host import bounded
from loopwright.metrics import weighted_sum
from loopwright.run_folder import checkpoint_files, weight_files
from loopwright.tasks.image_classification import ImageClassification, ImageData, cnn, mlp

_FILE = "teacher.npz"
_KERAS_FILES = (".keras", ".weights.h5")


@loopwright.register
class Distillation(ImageClassification):
  """Image classification by a student that also imitates a frozen teacher."""

  def __init__(
    self,
    *,
    data: ImageData,
    teacher: str,
    teacher_network: Callable[..., keras.Model] = cnn,
    network: Callable[..., keras.Model] = mlp,
    input_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    temperature: float = 4.0,
    hard_weight: float = 0.1,
    flip: bool = False,
    shift: int = 0,
  ) -> None:
    """Keeps its arguments; those not described here are as for `ImageClassification`.

    Args:
      teacher: where its weights are: the folder of a run of `ImageClassification` (its newest
        checkpoint), a checkpoint's path without suffix, or a Keras file, .keras or .weights.h5.
      teacher_network: makes the teacher; the same `network` as in the teacher's own run.
      network: makes the student.
      temperature: divides the logits of both before the softmax, T in the paper.
      hard_weight: weight of the cross-entropy with the labels, from 0 to 1; the divergence from the
        teacher, times T^2, has the rest. 1 ignores the teacher.

    Raises:
      ConfigError: a value is out of its range.
    """
    if not temperature > 0:
      raise ConfigError(f"Distillation.temperature is {temperature}; it must be above 0.")
    if not 0 <= hard_weight <= 1:
      raise ConfigError(f"Distillation.hard_weight is {hard_weight}; it must be from 0 to 1.")
    super().__init__(
      data=data, network=network, input_shape=input_shape, classes=classes, flip=flip, shift=shift
    )
    self._teacher, self._teacher_network = teacher, teacher_network
    self._temperature, self._hard_weight = temperature, hard_weight
    self.chance_loss = None  # unknown: the divergence depends on the teacher
    self._weights: list[np.ndarray] = []

  def fit(self) -> Mapping[str, bytes]:
    """Reads the teacher's weights; called once per run."""
    buffer = io.BytesIO()
    np.savez(buffer, *trained_weights(self._make_teacher(), self._teacher))
    return {_FILE: buffer.getvalue()}

  def use(self, assets: Mapping[str, bytes]) -> None:
    """Takes the teacher's weights from the run's assets."""
    with np.load(io.BytesIO(assets[_FILE])) as arrays:
      self._weights = [arrays[name] for name in arrays.files]

  def build_model(self) -> dict[str, keras.Model]:
    """Returns both networks; only the student's variables are trainable."""
    teacher = self._make_teacher()
    teacher.set_weights(self._weights)
    teacher.trainable = False
    student = self._network(input_shape=self._shape, classes=self._classes)
    return {"student": student, "teacher": teacher}

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns the student's float32 logits [n, classes]."""
    return tf.cast(self.model["student"](batch["image"], training=training), tf.float32)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Weighted mean of cross-entropy with the labels and divergence from the teacher times T^2.

    The divergence is the paper's soft cross-entropy minus a constant, the teacher's entropy. So it
    is 0 for a student that agrees with the teacher.
    """
    hard = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)
    taught = tf.cast(self.model["teacher"](batch["image"], training=False), tf.float32)
    wanted = tf.nn.log_softmax(taught / self._temperature)
    given = tf.nn.log_softmax(outputs / self._temperature)
    soft = tf.reduce_sum(tf.exp(wanted) * (wanted - given), axis=1) * self._temperature**2
    losses = self._hard_weight * hard + (1.0 - self._hard_weight) * soft
    return Loss.from_examples(losses, batch["weight"])

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Also logs the teacher's accuracy, and how often student and teacher agree."""
    super().eval_step(step, batch)
    student, teacher = (
      tf.argmax(self.model[name](batch["image"], training=False), axis=-1, output_type=tf.int32)
      for name in ("student", "teacher")
    )
    step.log(
      {
        "teacher_accuracy": weighted_sum(teacher == batch["label"], batch["weight"]),
        "agreement": weighted_sum(student == teacher, batch["weight"]),
      }
    )

  def _make_teacher(self) -> keras.Model:
    return self._teacher_network(input_shape=self._shape, classes=self._classes)


def trained_weights(network: keras.Model, path: str) -> list[np.ndarray]:
  """Returns the weights that a file or a run holds for `network`, in its order (host).

  Args:
    network: also gets the weights.
    path: see `Distillation`.

  Raises:
    ConfigError: `path` does not exist, or belongs to another network.
  """
  remedy = (
    f"Distillation.teacher must hold the weights of {network.name!r} with "
    f"{network.count_params()} parameters: give "
    "Distillation.teacher_network, and its options, the values with which the teacher was trained"
  )
  if path.endswith(_KERAS_FILES):
    bounded.require_file(path, "a trained teacher")
    with bounded.reading(path, remedy):
      _load_file(network, path)
  else:
    found = _checkpoint(path)
    with bounded.reading(path, remedy):
      status = tf.train.Checkpoint(model=network).read(found)
      status.assert_existing_objects_matched().expect_partial()
  return network.get_weights()


def _load_file(network: keras.Model, path: str) -> None:
  """Loads only weights: the model that a file describes may be of any size."""
  found = weight_files.h5_variables(path)
  if found and len(found) != len(network.weights):  # Keras leaves out what the network has not
    raise ValueError(f"it has {len(found)} variables, not {len(network.weights)}")
  network.load_weights(path)


def _checkpoint(path: str) -> str:
  found = checkpoint_files.find(path)
  if found is None:
    raise ConfigError(
      f"Distillation.teacher is {path!r}, where no checkpoint is; train the teacher first, for "
      "example by `loopwright train digits_cnn`, and give its folder."
    )
  return found
