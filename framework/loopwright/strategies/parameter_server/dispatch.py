"""Functions that run on whichever workers are there, and the metric sums that they return."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.distribution.cluster import ClusterError
from loopwright.errors import ConfigError
from loopwright.metrics import PerExample, Summed
from loopwright.metrics.checks import checked
from loopwright.metrics.sums import Layout, MetricSums, Totals
from loopwright.strategies.parameter_server import servers

PIECES_PER_WORKER = 4
"""Pieces per loop: more lose less work with a worker; fewer cost less overhead."""
_POLL_S = 0.002
_PROBE_EVERY_S = 5.0


class ReturnedSums(MetricSums):
  """Metric sums that a closure returns, instead of adding them to a variable.

  A loop of a worker carries them, so their size is fixed before its trace. A trace in which they
  do not fit fails; the next one gets more room: see `until_it_fits`.
  """

  def __init__(self) -> None:
    super().__init__()
    self._layout = Layout()
    self._added: list[tf.Tensor] = []
    self._total = np.zeros([0])
    self.room = 128
    self.rows: dict[str, PerExample] = {}
    """The PerExample metrics of a step, as tensor specs; {} before a trace found any."""
    self.reset()

  @property
  def size(self) -> tuple[int, str]:
    """What a trace fixes; it changes only if a trace found it too small."""
    return self.room, repr(self.rows)

  def add(self, metrics: Mapping[str, Summed]) -> None:
    """Keeps this step's metrics for `taken`, in the graph under trace (worker)."""
    metrics = checked(metrics)
    self._layout.extend(metrics)
    if self._layout.size > self.room:
      self.room = max(2 * self.room, self._layout.size + 64)
      self._outgrown()
    if metrics:
      packed = self._layout.packed(metrics)
      self._added.append(tf.pad(packed, [[0, self.room - packed.shape[0]]]))

  def require_rows(self, rows: Mapping[str, PerExample]) -> None:
    """Ends a trace that expects other PerExample metrics (worker)."""
    found = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), dict(rows))
    if found != self.rows:
      self.rows = found
      self._outgrown()

  def _outgrown(self) -> None:
    self._added = []
    raise RuntimeError("the trace starts again, with room for all metrics")

  def taken(self) -> tf.Tensor:
    """Returns the sums added since the last call, float64 [room] (worker)."""
    added, self._added = self._added, []
    return tf.add_n(added) if added else self.empty()

  def empty(self) -> tf.Tensor:
    """Returns zero sums, float64 [room]."""
    return tf.zeros([self.room], tf.float64)

  def collect(self, sums: np.ndarray) -> None:
    """Adds the sums of a closure, float64 [room] (host)."""
    total = np.zeros([max(len(sums), len(self._total))])  # they grow if the loop is traced again
    total[: len(self._total)] += self._total
    total[: len(sums)] += sums
    self._total = total

  def result(self) -> dict[str, float]:
    """See `MetricSums.result` (host)."""
    total = np.pad(self._total, [0, max(0, self._layout.size - len(self._total))])
    self._totals = Totals()
    self._layout.unpack(total, self._totals)
    self.reset()
    return dict(self._totals.means)

  def reset(self) -> None:
    """Resets the sums to zero (host)."""
    self._total = np.zeros([0])


class Dispatcher:
  """Runs functions on the available workers (host)."""

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    """Gets the strategy's coordinator; TensorFlow makes one per strategy."""
    self._cluster = servers.parameter_servers_of(strategy)
    self._pulse = self._cluster.pulse
    self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

  @property
  def workers(self) -> int:
    """The number of workers in the cluster, including failed ones."""
    return len(self._cluster.workers)

  def datasets(self, make: Callable[[tf.Tensor], tf.data.Dataset]) -> Any:
    """Returns a per-worker dataset: each worker runs `make` with its index, an int64 scalar.

    Raises:
      ConfigError: the dataset runs Python, which workers cannot.
    """

    def made() -> tf.data.Dataset:
      worker = tf.distribute.coordinator.experimental_get_current_worker_index()
      return make(tf.cast(worker, tf.int64))

    function = tf.function(made, autograph=False)
    _refuse_what_stays_here(function.get_concrete_function())
    return self._coordinator.create_per_worker_dataset(function)

  def run(
    self,
    function: Any,
    pieces: Sequence[tuple[Any, ...]],
    *,
    meanwhile: Callable[[], None] = lambda: None,
  ) -> list[Any]:
    """Runs function(*piece) for each piece on any worker; reruns it if the worker fails.

    Args:
      function: compiled.
      pieces: its arguments.
      meanwhile: called several times a second; what it raises leaves the workers at work.

    Returns:
      The result of each piece as NumPy values; None if its worker failed before the fetch.

    Raises:
      ClusterError: all workers failed and none restarted in time, or one does not respond.
    """
    values = [self._coordinator.schedule(function, args=piece) for piece in pieces]
    self._wait(meanwhile)
    self._coordinator.join()  # raises the errors of the workers
    return [_fetched(value) for value in values]

  def _wait(self, meanwhile: Callable[[], None]) -> None:
    answered = probed = time.monotonic()
    while not self._coordinator.done():
      time.sleep(_POLL_S)
      meanwhile()
      self._pulse.check()
      now = time.monotonic()
      if now - probed > _PROBE_EVERY_S:
        probed = now
        if any(map(servers.answers, self._cluster.workers)):
          answered = now
      if now - answered > self._cluster.start_timeout_s + _PROBE_EVERY_S:
        raise ClusterError(
          f"lost all {self.workers} workers, and none restarted within "
          f"{self._cluster.start_timeout_s:g} s"
        )


def until_it_fits(sums: ReturnedSums, run: Callable[[], list[Any]]) -> list[Any]:
  """Returns `run()`; repeats it if its trace found more metrics than `sums` had room for."""
  while True:
    size = sums.size
    try:
      return run()
    except Exception:
      if sums.size == size:
        raise


def _fetched(value: Any) -> Any:
  try:
    return value.fetch()
  except tf.errors.OpError as error:
    if "/job:worker" not in str(error):
      raise
    return None


def _refuse_what_stays_here(function: Any) -> None:
  """Raises ConfigError if an input pipeline needs this process, which its workers cannot reach."""
  if any(tensor.dtype == tf.variant for tensor in function.graph.external_captures):
    raise ConfigError(
      "the input is a StreamSource, whose tf.data.Dataset is made on the chief; the workers of "
      "parameter_server cannot read it: use an ArraySource or your own Source."
    )
  graph = function.graph.as_graph_def()
  nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
  if any(node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc") for node in nodes):
    raise ConfigError(
      "the input runs Python (tf.numpy_function, tf.py_function, a generator or a memory-mapped "
      "array), which parameter_server's workers cannot; use TensorFlow operations and arrays in "
      "memory."
    )
