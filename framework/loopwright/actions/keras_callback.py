"""The action `KerasCallback`: a `keras.callbacks.Callback` of your own, in a run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from loopwright.actions.base import Action, Output, Run, StopTraining
from loopwright.errors import ConfigError, kind
from loopwright.optimizers.adapters import Optimizer
from loopwright.run_folder.metrics_log import flatten, scalars

_INSTEAD: Mapping[str, str] = {
  "BackupAndRestore": "nothing, as each run goes on by itself",
  "CSVLogger": "nothing, metrics.jsonl has every value",
  "EarlyStopping": "lw.EarlyStopping(patience=...), with lw.BestCheckpoint() for the best weights",
  "LearningRateScheduler": "a schedule as learning_rate, such as @cosine_decay",
  "ModelCheckpoint": "lw.BestCheckpoint(), and run.checkpoint_every_steps",
  "ProgbarLogger": "nothing, as each run shows its progress",
  "SwapEMAWeights": "Trainer.ema_decay",
  "TensorBoard": "nothing for curves, lw.TensorBoard() for histograms",
  "TerminateOnNaN": "lw.StopOnNonFinite()",
}
"""Callbacks of Keras that need `fit`, and what a run has for them."""
_PLAIN = (bool, int, float, str)
_HONOURED = {
  *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"),
  *("on_train_batch_end", "on_batch_end", "on_test_end"),
}


class KerasCallback(Action):
  """Calls a Keras callback. An epoch ends with each evaluation, a batch with each loop of steps.

  `on_epoch_end` gets the values of the last loop, and those of the evaluation as "val_<name>";
  `on_train_batch_end` the number of the last step and the loop's means. `self.model` is the task's
  model, with the optimizer as `optimizer`; `self.model.stop_training = True` ends training. A
  number or text of the model that it sets counts from the next loop on, which is traced again for
  it, and after a restart. The callback's attributes that are numbers, texts, lists or dicts of them
  survive a restart, except those that are named as an argument of its class: these are its options.
  """

  on = "both"
  changes_training = True

  def __init__(self, callback: Any) -> None:
    """Keeps the callback.

    Args:
      callback: a `keras.callbacks.Callback`.

    Raises:
      ConfigError: it is none, one of Keras's own that a run has something for, or it defines a hook
        that a compiled loop cannot call.
    """
    if not isinstance(callback, keras.callbacks.Callback):
      raise ConfigError(
        f"KerasCallback.callback is {kind(callback)}; it must be a keras.callbacks.Callback."
      )
    name, own = type(callback).__name__, type(callback).__module__
    if own.startswith("keras.") and name in _INSTEAD:
      raise ConfigError(f"keras.callbacks.{name} needs fit; here it is {_INSTEAD[name]}.")
    if refused := sorted(_defined(callback) - _HONOURED):
      raise ConfigError(
        f"{name} defines {refused[0]}, which a compiled loop cannot call at its time; a run calls "
        f"{', '.join(sorted(_HONOURED))}."
      )
    self.callback, self.epoch = callback, 0
    self._last: dict[str, Any] = {}
    self._restored: dict[str, Any] = {}
    self._of_model: dict[str, Any] = {}

  def bind(self, run: Run) -> None:
    """Gives the callback the model and its parameters."""
    super().bind(run)
    updated = run.trainer.parts.optimizers if run.trainer is not None else {}
    self._model = _Model(run.task.model, updated)
    self.callback.set_model(self._model)
    self.callback.set_params({"verbose": 0, "epochs": None, "steps": None})

  def begin(self) -> None:
    """Begins training, and the epoch that is not over."""
    self.callback.on_train_begin()
    vars(self.callback).update(self._restored)
    for name, value in self._of_model.items():
      setattr(self._model, name, value)
    self.callback.on_epoch_begin(self.epoch)
    self._trace_again()

  def __call__(self, output: Output) -> None:
    """Calls the hooks of a loop or an evaluation; raises StopTraining if the callback stops it."""
    values = scalars(flatten(output))
    if self.run.split == "train":
      self._last = dict(values)
      self.callback.on_train_batch_end(self.run.step - 1, dict(values))
    else:
      self.callback.on_test_end(dict(values))
      logs = self._last | {f"val_{name}": value for name, value in values.items()}
      self.callback.on_epoch_end(self.epoch, logs)
      self.epoch += 1
    if self._model.stop_training:
      raise StopTraining(f"{type(self.callback).__name__} stopped it", output)
    if self.run.split == "eval":
      self.callback.on_epoch_begin(self.epoch)
    self._trace_again()

  def _trace_again(self) -> None:
    """Has loop and evaluation traced again if the callback has set what they may have read."""
    if self._model.is_changed and self.run.trainer is not None:
      self.run.trainer.use()
    if self._model.is_changed and self.run.evaluator is not None:
      self.run.evaluator.trace_again()
    self._model.is_changed = False

  def end(self) -> None:
    """Ends training."""
    self.callback.on_train_end(self._last)

  def state(self) -> dict[str, Any]:
    """Returns the number of the epoch and what of the callback JSON can hold."""
    options = inspect.signature(type(self.callback)).parameters
    own = {name: value for name, value in vars(self.callback).items() if name not in options}
    state = {"epoch": self.epoch, "last": self._last, "callback": _plain(own)}
    return {**state, "model": self._model.numbers}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes over what `state` returned; the callback gets it after its `on_train_begin`."""
    self.epoch, self._last = state["epoch"], state["last"]
    self._restored, self._of_model = state["callback"], state.get("model", {})


class _Model:
  """The task's model as a callback sees it: what it sets is set on the model.

  Attributes:
    optimizer: if there is one alone.
    stop_training: whether the callback ends training.
    numbers: what it has set that is a number or a text, and that the model had before.
    is_changed: whether that is so since the last trace, which may have read it.
  """

  def __init__(self, model: Any, updated: Mapping[str, Optimizer]) -> None:
    own = {"_of": model, "stop_training": False, "numbers": {}, "is_changed": False}
    if len(updated) == 1:
      [one] = updated.values()
      own["optimizer"] = one.optimizer
    vars(self).update(own)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._of, name)

  def __setattr__(self, name: str, value: Any) -> None:
    if name == "optimizer" and "optimizer" in vars(self):
      raise ConfigError(
        "a callback set self.model.optimizer, which the compiled loop does not follow; change the "
        "optimizer that is there, such as its learning_rate, or set run.optimizer."
      )
    if name in vars(self) or isinstance(self._of, (Mapping, list, tuple)):
      super().__setattr__(name, value)
      return
    before = getattr(self._of, name, None)
    setattr(self._of, name, value)
    if isinstance(before, _PLAIN) and isinstance(value, _PLAIN):
      self.numbers[name] = value
      self.is_changed |= name != "trainable" and before != value


def _defined(callback: keras.callbacks.Callback) -> set[str]:
  """Returns the hooks that its class, or it itself, defines."""
  base = keras.callbacks.Callback
  hooks = [name for name in vars(base) if name.startswith("on_")]
  own = {name for name in hooks if getattr(type(callback), name) is not getattr(base, name)}
  return own | {name for name in hooks if name in vars(callback)}


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
  found = {}
  for name, value in attributes.items():
    value = value.item() if isinstance(value, np.generic) else value
    try:
      json.dumps(value)
    except (TypeError, ValueError):
      continue
    found[name] = value
  return found
