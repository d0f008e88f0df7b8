"""What a run tells its user: metrics.jsonl, TensorBoard, one line of progress, a summary.

log = MetricsLog("runs/digits/metrics.jsonl")
log.append(100, "train", {"loss": 0.25})
log.records("train")  # [{"step": 100, "split": "train", "wall_time": ..., "loss": 0.25}]
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
import orbit
import tensorflow as tf
from absl import logging
from tqdm import tqdm

from framework import models
from framework.errors import ConfigError
from framework.timing import timed

Number = int | float
Record = dict[str, Any]
Clock = Callable[[], float]

_RESERVED = ("step", "split", "wall_time")
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Number]:
  """Turns nested dicts of scalars into one dict of Python numbers, names joined by "/".

  Args:
    values: numbers, NumPy scalars or TensorFlow scalars of any dtype, and dicts of them.
    prefix: put before every name.

  Raises:
    ConfigError: a value is not a scalar number.
  """
  flat: dict[str, Number] = {}
  for key, value in values.items():
    name = f"{prefix}{key}"
    flat.update(
      flatten(value, f"{name}/") if isinstance(value, Mapping) else {name: _number(name, value)}
    )
  return flat


def _number(name: str, value: Any) -> Number:
  array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
  if array.shape or array.dtype.kind not in "biufV":  # V: bfloat16
    raise ConfigError(
      f"metric {name!r} is of type {array.dtype} and shape {array.shape}; it must be one number."
    )
  return int(array) if array.dtype.kind in "biu" else float(array)


def atomic_write(path: str, content: bytes | str) -> None:
  """Replaces the file at `path` (local or remote), which is never seen half written."""
  with tf.io.gfile.GFile(f"{path}.tmp", "w") as file:
    file.write(content)
  tf.io.gfile.rename(f"{path}.tmp", path, overwrite=True)


class MetricsLog:
  """metrics.jsonl: one JSON object a line, which survives kills, restarts and torn writes.

  A line holds "step" (int), "split" ("train" or "eval"), "wall_time" (float, seconds since the
  epoch), then the values under plain names. JSON has no NaN or infinities: they are written as the
  strings "NaN", "Infinity" and "-Infinity", as protobuf's JSON does; `records` gives floats again.
  """

  def __init__(self, path: str | os.PathLike[str], *, clock: Clock = time.time) -> None:
    """Writes nothing yet; the folder is made by the first `append`."""
    self.path = os.fspath(path)
    self._clock = clock
    self._checked = False

  def append(self, step: int, split: str, values: Mapping[str, Any]) -> None:
    """Adds one line, complete on return; see `flatten` for what `values` may hold.

    Raises:
      ConfigError: a value is not a number, or its name is "step", "split" or "wall_time".
    """
    flat = flatten(values)
    for name in _RESERVED:
      if name in flat:
        raise ConfigError(f"a metric is named {name!r}, which metrics.jsonl keeps; rename it.")
    record = {"step": int(step), "split": split, "wall_time": self._clock()}
    line = json.dumps({**record, **{k: _encode(v) for k, v in flat.items()}}, allow_nan=False)
    self._prepare()
    with tf.io.gfile.GFile(self.path, "a") as file:
      file.write(line + "\n")

  def records(self, split: str | None = None) -> list[Record]:
    """Returns the records of one split, or all, in the order written, without unreadable lines."""
    parsed = (_parse(line) for line in self._lines())
    return [r for r in parsed if r is not None and split in (None, r.get("split"))]

  def trim(self, step: int) -> int:
    """Drops the records after `step`, which a run restarted at `step` will write again.

    Also mends a last line torn by a kill. Every other line is kept to the byte.

    Returns:
      How many records were dropped.
    """
    lines = self._lines()
    kept = [line for line in lines if (_parse(line) or {"step": 0})["step"] <= step]
    self._replace(kept)
    return len(lines) - len(kept)

  def _prepare(self) -> None:
    """Before the first append: a folder to write in, and no torn line to write behind."""
    if not self._checked:
      tf.io.gfile.makedirs(os.path.dirname(self.path) or ".")
      self._replace(self._lines())
      self._checked = True

  def _replace(self, lines: Sequence[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    if content != self._content():
      atomic_write(self.path, content)

  def _content(self) -> bytes:
    if not tf.io.gfile.exists(self.path):
      return b""
    with tf.io.gfile.GFile(self.path, "rb") as file:
      return file.read()

  def _lines(self) -> list[bytes]:
    """The lines, without a torn last one."""
    *lines, last = self._content().split(b"\n")
    return lines if _parse(last) is None else [*lines, last]


def _encode(value: Number) -> Number | str:
  if math.isfinite(value):
    return value
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _parse(line: bytes) -> Record | None:
  """Returns the record, or None if the line is not one."""
  try:
    record = json.loads(line)
  except ValueError:
    return None
  if not isinstance(record, dict) or not isinstance(record.get("step"), int):
    return None
  return {k: float(v) if v in _NON_FINITE else v for k, v in record.items()}


class Reporter(orbit.utils.SummaryManagerInterface):
  """Where Orbit's Controller sends the values of one split: TensorBoard, metrics.jsonl, progress.

  Give the Controller different `summary_dir` and `eval_summary_dir` beside the two managers:
  where these are equal (None included) it sends evaluations to the training manager.
  """

  def __init__(
    self,
    *,
    split: str,
    global_step: tf.Variable,
    model_dir: str | None = None,
    metrics_log: MetricsLog | None = None,
    progress: Progress | None = None,
    global_batch_size: int | None = None,
  ) -> None:
    """Reports to whichever of the three is given.

    Args:
      split: "train" or "eval".
      global_step: int64 scalar, the step that values belong to.
      model_dir: TensorBoard files go to <model_dir>/<split>; None writes none.
      metrics_log: None writes no metrics.jsonl (workers other than the chief).
      progress: None prints nothing.
      global_batch_size: makes "steps_per_second" the rate of the loop alone, as
        "examples_per_second" is; None leaves Orbit's, which counts the time between loops too.
    """
    directory = None if model_dir is None else os.path.join(model_dir, split)
    self._tensorboard = orbit.utils.SummaryManager(directory, tf.summary.scalar, global_step)
    self._split = split
    self._global_step = global_step
    self._metrics_log = metrics_log
    self._progress = progress
    self._global_batch_size = global_batch_size

  def summary_writer(self, relative_path: str = "") -> tf.summary.SummaryWriter:
    """Returns the TensorBoard writer, for `tf.summary` calls inside a loop."""
    return self._tensorboard.summary_writer(relative_path)

  @timed("reporting")
  def flush(self) -> None:
    """Flushes TensorBoard; metrics.jsonl needs none."""
    self._tensorboard.flush()

  @timed("reporting")
  def write_summaries(self, summary_dict: Mapping[str, Any]) -> None:
    """Reports one loop's or one evaluation's values (host); nested names are joined by "/"."""
    values = flatten(summary_dict)
    if self._global_batch_size and "examples_per_second" in values:
      values["steps_per_second"] = values["examples_per_second"] / self._global_batch_size
    step = int(self._global_step.numpy())
    self._tensorboard.write_summaries(values)
    if self._metrics_log is not None:
      self._metrics_log.append(step, self._split, values)
    if self._progress is not None:
      report = self._progress.update if self._split == "train" else self._progress.evaluation
      report(step, values)


class Silent(io.StringIO):
  """A stream that drops what is written: for the workers beside the chief."""

  def write(self, text: str) -> int:
    """Drops it."""
    return len(text)


class Progress:
  """How far training is: one live line on a terminal, plain lines every so often elsewhere.

      step 300/1000  loss 0.2134  accuracy 0.9312  12.7 steps/s  812 examples/s  eta 0:00:55

  Evaluations get a line of their own in both. Use it as a context manager, or call `close`.
  """

  HIDDEN = frozenset({"steps_per_second", "examples_per_second", "nonfinite_step"})

  def __init__(
    self,
    *,
    total_steps: int,
    stream: TextIO | None = None,
    every_secs: float = 10.0,
    clock: Clock = time.monotonic,
    hidden: Iterable[str] = HIDDEN,
  ) -> None:
    """Prints nothing yet.

    Args:
      total_steps: the step at which training ends.
      stream: where to; None is stderr. It is a terminal if `isatty()` says so.
      every_secs: plain lines are at least this far apart, but for the first and the last.
      clock: seconds, monotonic.
      hidden: names of values to leave out of the line.
    """
    self._total = total_steps
    self._stream = sys.stderr if stream is None else stream
    self._live = self._stream.isatty()
    self._every_secs = every_secs
    self._clock = clock
    self._hidden = frozenset(hidden)
    self._bar: _Bar | None = None
    self._first: tuple[int, float] | None = None
    self._printed_at = -math.inf
    self._unprinted: str | None = None

  def update(self, step: int, values: Mapping[str, Number]) -> None:
    """Shows one loop's values; "steps_per_second" and "examples_per_second" become the rates."""
    now = self._clock()
    self._first = self._first or (step, now)
    line = self._line(step, now, values)
    if self._live:
      self._draw(step, line)
    elif step >= self._total or now - self._printed_at >= self._every_secs:
      self._printed_at = now
      self._unprinted = None
      self.message(line)
    else:
      self._unprinted = line

  def evaluation(self, step: int, values: Mapping[str, Number]) -> None:
    """Prints one evaluation's values."""
    self.message("  ".join([f"eval at step {step}", *self._shown(values)]))

  def message(self, text: str) -> None:
    """Prints one line, above the live line if there is one."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Ends the live line, or prints the last plain line if it was held back."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None
    if self._unprinted is not None:
      self.message(self._unprinted)
      self._unprinted = None

  def __enter__(self) -> Progress:
    """Returns itself."""
    return self

  def __exit__(self, *_: object) -> None:
    """Closes it."""
    self.close()

  def _draw(self, step: int, line: str) -> None:
    if self._bar is None:
      self._bar = _bar(self._stream, total=self._total, initial=step, desc=line)
    self._bar.n = step
    self._bar.set_description_str(line)

  def _line(self, step: int, now: float, values: Mapping[str, Number]) -> str:
    shown, pace = self._shown(values), self._pace(step, now, values)
    # A terminal may be too narrow for all; the loss and the pace matter most.
    ordered = [*shown[:1], *pace, *shown[1:]] if self._live else [*shown, *pace]
    return "  ".join([f"step {step}/{self._total}", *ordered])

  def _pace(self, step: int, now: float, values: Mapping[str, Number]) -> list[str]:
    rates = {unit: values.get(f"{unit}_per_second") for unit in ("steps", "examples")}
    left = self._seconds_left(step, now, values)
    eta = [] if left is None else [f"eta {datetime.timedelta(seconds=round(left))}"]
    return [f"{_rate(rate)} {unit}/s" for unit, rate in rates.items() if rate is not None] + eta

  def _seconds_left(self, step: int, now: float, values: Mapping[str, Number]) -> float | None:
    """From the pace since the first loop, which also traced; evaluations count."""
    first_step, first_time = self._first or (step, now)
    if step > first_step and now > first_time:
      return (self._total - step) * (now - first_time) / (step - first_step)
    pace = values.get("steps_per_second", 0.0)
    return (self._total - step) / pace if 0 < pace < math.inf else None

  def _shown(self, values: Mapping[str, Number]) -> list[str]:
    names = sorted((n for n in values if n not in self._hidden), key=lambda name: name != "loss")
    return [f"{name} {format_number(values[name])}" for name in names]


class _Bar(tqdm):
  monitor_interval = 0  # no thread behind the user's back


def _bar(stream: TextIO, **options: Any) -> _Bar:
  known = _columns(stream) > 0  # some pseudo-terminals say 0
  width = {"dynamic_ncols": True} if known else {"ncols": 100}
  return _Bar(file=stream, bar_format="|{bar:10}| {desc}", **width, **options)


def _columns(stream: TextIO) -> int:
  try:
    return os.get_terminal_size(stream.fileno()).columns
  except OSError:
    return 0


def _rate(per_second: Number) -> str:
  return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def format_number(value: Number) -> str:
  """Four decimals where they say something, three digits elsewhere: 0.9312, 1.5e-05, 37, nan."""
  if isinstance(value, int):
    return str(value)
  return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


@contextlib.contextmanager
def quiet_orbit() -> Iterator[None]:
  """While it lasts, Orbit's Controller logs at debug level instead of printing to stdout."""
  loud = orbit.controller._log
  orbit.controller._log = logging.debug
  try:
    yield
  finally:
    orbit.controller._log = loud


class ParameterCount(NamedTuple):
  """How many numbers a model holds."""

  trainable: int
  total: int


def count_parameters(model: Any) -> ParameterCount | None:
  """Counts the weights of a Keras 3 model, a tf_keras model, a `tf.Module`, or a dict/list of them.

  A variable that two of them share counts once; the state of Keras's random generators and metrics
  is not a weight.

  Returns:
    None if a Keras model is not built yet, so that nobody knows.
  """
  parts = list(models.parts(model))
  if any(getattr(part, "built", True) is False for part in parts):
    return None
  return ParameterCount(_count(parts, "trainable_"), _count(parts, ""))


def _count(parts: Sequence[Any], kind: str) -> int:
  sizes: dict[int, int] = {}
  for part in parts:
    names = f"{kind}weights" if models.is_keras(part) else f"{kind}variables"
    sizes.update({id(models.raw(v)): math.prod(v.shape) for v in getattr(part, names)})
  return sum(sizes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
  """What a run is made of, in plain values; None or empty is left out of the text.

  Attributes:
    task: the task's name.
    model: what `build_model` returned: a model, or a dict or list of them.
    strategy: the strategy's name.
    replicas: how many there are in sync.
    devices: their names.
    global_batch_size: examples in one training step.
    per_replica_batch_size: rows of one replica, padding included.
    accumulation_steps: micro-batches in one step.
    reduction: how gradients are summed over replicas.
    precision: the dtype policy.
    loss_scale: how the loss is scaled.
    optimizer: the optimizer's name, or several.
    start_step: where training goes on from.
    train_steps: where it ends.
    model_dir: the run folder.
  """

  task: str
  model: Any = None
  strategy: str | None = None
  replicas: int = 1
  devices: Sequence[str] = ()
  global_batch_size: int | None = None
  per_replica_batch_size: int | None = None
  accumulation_steps: int = 1
  reduction: str | None = None
  precision: str | None = None
  loss_scale: str | None = None
  optimizer: str | None = None
  start_step: int = 0
  train_steps: int | None = None
  model_dir: str | None = None


def describe(description: Description) -> str:
  """Returns the lines to show before training: `what  value`, aligned."""
  d = description
  known = [
    ("task", d.task),
    *_model_rows(d.model),
    ("strategy", _strategy_text(d)),
    ("batch", _batch_text(d)),
    ("reduction", d.reduction),
    ("precision", d.precision),
    ("loss scale", d.loss_scale),
    ("optimizer", d.optimizer),
    ("steps", _steps_text(d)),
    ("model_dir", d.model_dir),
  ]
  rows = [(name, value) for name, value in known if value]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _model_rows(model: Any) -> list[tuple[str, str]]:
  if model is None:
    return []
  if isinstance(model, Mapping):
    rows = [(f"model {name}", _model_text(part)) for name, part in model.items()]
    return [*rows, ("all models", _parameters_text(model))]
  return [("model", _model_text(model))]


def _model_text(model: Any) -> str:
  return f"{getattr(model, 'name', None) or type(model).__name__}, {_parameters_text(model)}"


def _parameters_text(model: Any) -> str:
  count = count_parameters(model)
  if count is None:
    return "not built yet"
  if count.trainable == count.total:
    return f"{count.total:,} parameters"
  return f"{count.total:,} parameters, {count.trainable:,} trainable"


def _strategy_text(d: Description) -> str:
  replicas = f"{d.replicas} replica{'' if d.replicas == 1 else 's'}"
  where = f" on {', '.join(d.devices)}" if d.devices else ""
  return f"{d.strategy or 'default'}, {replicas}{where}"


def _batch_text(d: Description) -> str | None:
  if d.global_batch_size is None:
    return None
  text = f"{d.global_batch_size} examples a step"
  if d.per_replica_batch_size is not None:
    text += f", {d.per_replica_batch_size} a replica"
  if d.accumulation_steps > 1:
    text += f", in {d.accumulation_steps} micro-batches"
  return text


def _steps_text(d: Description) -> str | None:
  if d.train_steps is None:
    return None
  return (
    f"{d.train_steps}" if not d.start_step else f"{d.train_steps}, going on from {d.start_step}"
  )


def result_line(
  *,
  step: int,
  seconds: float,
  model_dir: str | None = None,
  evaluation: Mapping[str, Any] | None = None,
  split: str = "eval",
  status: str = "done",
) -> str:
  """Returns the last line: `done: step 1000 | eval loss 0.0571 accuracy 0.9833 | 23.4 s | runs/x`.

  Args:
    step: the global step reached.
    seconds: how long the run took.
    model_dir: the run folder.
    evaluation: the last evaluation's values, if there was one, or the last loop's.
    split: which of the two, "eval" or "train".
    status: such as "done" or "stopped".
  """
  shown = {n: v for n, v in flatten(evaluation or {}).items() if n not in Progress.HIDDEN}
  names = sorted(shown, key=lambda name: name != "loss")
  values = " ".join(f"{name} {format_number(shown[name])}" for name in names)
  parts = [f"step {step}", values and f"{split} {values}", f"{seconds:.1f} s", model_dir]
  return f"{status}: " + " | ".join(part for part in parts if part)
