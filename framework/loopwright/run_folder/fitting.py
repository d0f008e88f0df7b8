"""Fits a checkpoint to a run; one of another task, another run or another model is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from loopwright.errors import ConfigError, first_line
from loopwright.models import models
from loopwright.optimizers.saved_layout import saved_shape
from loopwright.run_folder import layout
from loopwright.run_folder.checkpoints import ASSETS, VALUE, variables_of

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

_NEW = ("ema", "loss_scale")
"""What a changed config may add: it begins where the run goes on."""
_STATES = ("actions", "start")
STATE, BEFORE = "state/", "task/"
"""How the keys of a task's state begin, and began in earlier versions, which named it otherwise."""
START = "start/.ATTRIBUTES/py_state"
"""Key of the id of the line in history.jsonl that tells how a checkpoint was trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitting:
  """Restores checkpoints into a trainer; for the other attributes see `CheckpointManager`."""

  checkpoint: tf.train.Checkpoint
  trainer: Trainer
  experiment: Mapping[str, str]
  assets: str
  start: str
  starts: Callable[[], Collection[str]] | None
  changed: str

  def restore(self, path: str) -> None:
    """Restores one, see `CheckpointManager.restore` (host)."""
    reader = tf.train.load_checkpoint(path)
    self._refuse_foreign(path, reader)
    try:
      with self._fitted(reader), self.trainer.strategy.scope():
        status = self.checkpoint.restore(path)
        status.assert_existing_objects_matched().expect_partial()  # see `_refuse_larger`
        self._refuse_larger(path, reader, status)
    except (AssertionError, ValueError, tf.errors.InvalidArgumentError) as error:
      self._explain(path, reader, error)
      raise
    if not self.start:  # else the step makes what it makes, and `renew` asks
      self.trainer.state.require_taken(path)

  @contextlib.contextmanager
  def _fitted(self, reader: tf.train.CheckpointReader) -> Iterator[None]:
    """Gives what is restored the parts that a checkpoint has; what it has not begins here."""
    keys, ema = reader.get_variable_to_shape_map(), self.trainer.parts.ema
    follows = ema is not None and ema.decay is None  # from the rest
    new = _NEW if self.changed else ("ema",) if follows else ()
    absent = {
      name: getattr(self.checkpoint, name)
      for name in (*_STATES, *new)
      if hasattr(self.checkpoint, name) and not any(key.startswith(f"{name}/") for key in keys)
    }
    for name in absent:
      delattr(self.checkpoint, name)
    before = any(key.startswith(BEFORE) for key in keys)
    top = BEFORE if before else STATE
    of_task = [key.removeprefix(top) for key in keys if key.startswith(top)]
    if before:
      del self.checkpoint.state
      self.checkpoint.task = self.trainer.state
    try:
      with self.trainer.state.fitted(of_task, self.checkpoint, before=before):
        yield
    finally:
      if before:
        del self.checkpoint.task
        self.checkpoint.state = self.trainer.state
      for name, item in absent.items():
        setattr(self.checkpoint, name, item)
      for optimizer in self.trainer.parts.optimizers.values():
        optimizer.saved.settle()
    if "ema" in absent and ema is not None:
      ema.restart()
    for state in map(absent.get, _STATES):
      if state is not None:
        state.deserialize("")

  def _refuse_foreign(self, path: str, reader: tf.train.CheckpointReader) -> None:
    for name, value in self.experiment.items():
      saved = _label(reader, name)
      if not saved:
        raise ConfigError(
          f"checkpoint {path} was not written by this framework; choose another --model_dir."
        )
      if value != saved:
        raise ConfigError(
          f"checkpoint {path} belongs to another experiment: its {name} is {saved!r}, but this "
          f"run's is {value!r}; choose another --model_dir."
        )

    self._refuse_unknown(path, reader)
    saved = _label(reader, ASSETS)
    if saved != self.assets:
      raise ConfigError(
        f"checkpoint {path} was trained with {_named(saved)}, but this run has "
        f"{_named(self.assets)}; restore the assets folder of the checkpoint, or choose another "
        "--model_dir."
      )

  def _refuse_unknown(self, path: str, reader: tf.train.CheckpointReader) -> None:
    """Raises a ConfigError for a checkpoint of a start that history.jsonl does not have."""
    start = reader.get_tensor(START).decode() if reader.has_tensor(START) else ""
    if start and self.starts and start not in {*self.starts(), self.start}:
      remedy = (
        "choose another --model_dir, or add --accept_changes to go on with this config and data"
        if self.start
        else f"name it, to evaluate or export it all the same: run.checkpoint={path!r}"
      )
      raise ConfigError(
        f"checkpoint {path} was written by a start that {layout.HISTORY} does not have: the file "
        "was removed, shortened or is another run's, so it is not known what the checkpoint was "
        f"trained with; restore {layout.HISTORY}, or {remedy}."
      )

  def _refuse_larger(self, path: str, reader: tf.train.CheckpointReader, status: Any) -> None:
    """Raises if the checkpoint has more variables than this run, which TensorFlow would ignore."""
    try:
      status.assert_consumed()
    except AssertionError as error:
      if differences := self._differences(reader):
        raise self._misfit(path, differences) from error

  def _explain(self, path: str, reader: tf.train.CheckpointReader, error: Exception) -> None:
    if isinstance(error, ConfigError):
      return
    differences = self._differences(reader)
    if differences or not isinstance(error, tf.errors.InvalidArgumentError):
      raise self._misfit(path, differences or [first_line(error)[:300]]) from error

  def _differences(self, reader: tf.train.CheckpointReader) -> list[str]:
    """Returns where model and optimizers differ from a checkpoint's; the model's lines first."""
    here, there = variables_of(self.checkpoint), _kinds(reader)
    of_model = {id(models.raw(v)) for v in models.all_variables(self.trainer.task.model)}
    found: list[tuple[int, str]] = []
    for key, variable in here.items():
      raw = models.raw(variable)
      wanted, got = f"{raw.dtype.name} {saved_shape(raw).as_list()}", there.get(key, "missing")
      if wanted != got:
        rank = 0 if id(raw) in of_model else 2
        found.append((rank, f"{models.name(variable)!r} is {got} in it and {wanted} here"))
    for key in sorted(there.keys() - here.keys()):
      if key.startswith(("model/", "optimizers/")):
        name = key.removesuffix(VALUE)
        rank = 1 if key.startswith("model/") else 3
        found.append((rank, f"{name!r} is {there[key]} in it and missing here"))
    return [text for _, text in sorted(found, key=lambda item: item[0])]

  def _misfit(self, path: str, differences: list[str]) -> ConfigError:
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    changed = f" with {self.changed}" if self.changed else ""
    remedy = "set it back" if self.changed else "use the config that it was trained with"
    return ConfigError(
      f"checkpoint {path} does not fit this run{changed}: {differences[0]}{more}; {remedy}, or "
      "choose another --model_dir."
    )


def _kinds(reader: tf.train.CheckpointReader) -> dict[str, str]:
  dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
  return {k: f"{dtypes[k].name} {list(shapes[k])}" for k in shapes if k.endswith(VALUE)}


def _label(reader: tf.train.CheckpointReader, name: str) -> str:
  key = f"experiment/{name}{VALUE}"
  return reader.get_tensor(key).decode() if reader.has_tensor(key) else ""


def _named(assets: str) -> str:
  return f"the assets {assets[:12]}..." if assets else "no assets"
