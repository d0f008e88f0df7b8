"""Preference optimisation: a language model learns which of two continuations is preferred.

    import loopwright.tasks.preference
    run.task = @Preferred()
    Preferred.corpus = @python_library()
    Preferred.start = 'runs/language_model_decoder'

Rafailov et al., "Direct Preference Optimization" (2023), equation 7: with p and q the probabilities
of a continuation by the trained model and by the one that training starts from, the loss of a pair
is -log sigmoid(beta (log p/q of the chosen one - log p/q of the rejected one)). The preference is
made up: of two continuations the one with more underscores is chosen.

The weights at the start become an asset of the run, so later starts do not need the other run.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, ConfigError, EvalStep, Loss, Task
from loopwright.metrics import Weighted, weighted_sum
from loopwright.run_folder.warm_start import WarmStart
from loopwright.tasks.decoder import Decoder, decoder
from loopwright.tasks.generation import continued
from loopwright.tasks.language_model import TextFiles

LIKED = ord("_")
_FILE = "start.npz"


def pairs(
  documents: Sequence[bytes], *, prompt: int, count: int, seed: int = 0
) -> dict[str, np.ndarray]:
  """Returns prompts, each with two continuations of which one has more underscores (host).

  A continuation begins where a line does. One of the two is that of the text, the other one that of
  another place in the same document; each line begins at most one of them.

  Args:
    documents: texts.
    prompt: bytes before a continuation.
    count: bytes of a continuation.
    seed: of the order in which lines meet.

  Returns:
    uint8 [pairs, prompt + count] "chosen" and "rejected".
  """
  rng = np.random.default_rng(seed)
  found: dict[str, list[np.ndarray]] = {"chosen": [], "rejected": []}
  for document in documents:
    text = np.frombuffer(document, np.uint8)
    lines = np.flatnonzero(text == ord("\n")) + 1
    lines = rng.permutation(lines[(lines >= prompt) & (lines + count <= len(text))])
    for here, there in zip(lines[::2], lines[1::2], strict=False):
      ends = [text[at : at + count] for at in (here, there)]
      more = [int((end == LIKED).sum()) for end in ends]
      if more[0] != more[1]:
        for name, end in zip(found, ends if more[0] > more[1] else ends[::-1], strict=True):
          found[name].append(np.concatenate([text[here - prompt : here], end]))
  return {
    name: np.array(rows, np.uint8).reshape(-1, prompt + count) for name, rows in found.items()
  }


@loopwright.register
class Preferred(Task):
  """A decoder that learns a preference, beside a frozen copy of what it was."""

  chance_loss = float(np.log(2.0))

  def __init__(
    self,
    *,
    corpus: TextFiles,
    start: str,
    network: Callable[[], keras.Model] = decoder,
    prompt_bytes: int = 64,
    continued_bytes: int = 32,
    beta: float = 0.1,
  ) -> None:
    """Keeps its arguments.

    Args:
      corpus: the documents of each split.
      start: the weights to begin with: a run of `LanguageModel` with the same `network`, or another
        path of `WarmStart`. Read once per run.
      network: makes a `Decoder`.
      prompt_bytes: the network reads before a continuation.
      continued_bytes: of a continuation.
      beta: how far training may go from the start: the smaller, the farther.

    Raises:
      ConfigError: a number is not above 0.
    """
    for name, value in (
      ("prompt_bytes", prompt_bytes), ("continued_bytes", continued_bytes), ("beta", beta)
    ):  # fmt: skip
      if not value > 0:
        raise ConfigError(f"Preferred.{name} is {value}; it must be above 0.")
    self._corpus, self._start, self._network = corpus, start, network
    self._prompt, self._count, self._beta = prompt_bytes, continued_bytes, beta
    self._weights: list[np.ndarray] = []

  def fit(self) -> Mapping[str, bytes]:
    """Reads the weights to begin with."""
    network, buffer = self._network(), io.BytesIO()
    WarmStart(path=self._start, strict=True).load(network)
    np.savez(buffer, *network.get_weights())
    return {_FILE: buffer.getvalue()}

  def use(self, assets: Mapping[str, bytes]) -> None:
    """Takes them from the run."""
    with np.load(io.BytesIO(assets[_FILE])) as arrays:
      self._weights = [arrays[name] for name in arrays.files]

  def build_model(self) -> dict[str, Decoder]:
    """Returns two networks of equal weights; only the first is trained."""
    model = {name: self._network() for name in ("policy", "reference")}
    for network in model.values():
      network.set_weights(self._weights)
    model["reference"].trainable = False
    return model

  def source(self, split: str) -> ArraySource:
    """Returns the pairs of a split's documents."""
    documents = self._corpus.documents(split)
    made = pairs(documents, prompt=self._prompt, count=self._count)
    if not len(made["chosen"]):
      raise ConfigError(
        f"the documents of {split!r} have no two lines with {self._prompt} bytes before and "
        f"{self._count} after and another number of underscores; give other texts or fewer bytes."
      )
    return ArraySource(features=made)

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns log p/q of the chosen and the rejected continuations, float32 [n, 2]."""
    text = tf.cast(tf.concat([batch["chosen"], batch["rejected"]], axis=0), tf.int32)
    policy, reference = (
      self._log_probability(self.model[name], text, training) for name in ("policy", "reference")
    )
    ratio = policy - tf.stop_gradient(reference)
    return tf.transpose(tf.reshape(ratio, [2, -1]))

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """The weighted mean over the pairs."""
    return Loss.from_examples(tf.nn.softplus(-self._margin(outputs)), batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """The margin, in how many pairs it is above 0, and its two parts before they meet beta."""
    margin = self._margin(outputs)
    values = {
      "margin": margin, "accuracy": margin > 0,
      "chosen_ratio": outputs[:, 0], "rejected_ratio": outputs[:, 1],
    }  # fmt: skip
    return {name: weighted_sum(value, batch["weight"]) for name, value in values.items()}

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Also logs the underscores in what the model itself writes after a prompt."""
    super().eval_step(step, batch)
    prompt = tf.cast(batch["chosen"][:, : self._prompt], tf.int32)
    written, _ = continued(self.model["policy"], prompt, self._count)
    liked = tf.reduce_sum(tf.cast(written == LIKED, tf.float32), axis=1)
    step.log({"underscores": weighted_sum(liked, batch["weight"])})

  def _margin(self, ratios: tf.Tensor) -> tf.Tensor:
    return self._beta * (ratios[:, 0] - ratios[:, 1])

  def _log_probability(self, network: Decoder, text: tf.Tensor, training: bool) -> tf.Tensor:
    """Returns the logarithm of the probability of each continuation, float32 [2 n]."""
    token, target = text[:, :-1], text[:, 1:]
    position = tf.broadcast_to(tf.range(tf.shape(token)[1]), tf.shape(token))
    logits = network({"token": token, "position": position}, training=training)
    nats = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
    return -tf.reduce_sum(nats[:, -self._count :], axis=1)
