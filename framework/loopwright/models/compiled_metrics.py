"""The metrics of a compiled model of Keras 3 or tf_keras, as sums that add up over replicas.

Keras's own containers choose and update them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, first_line
from loopwright.graphs.aliases import Structure
from loopwright.graphs.autograph import as_written
from loopwright.models import synthetic_rows


class CompiledMetrics:
  """The compiled metrics as sums: what one batch adds to each of their variables."""

  def __init__(self, container: Any, package: Any) -> None:
    """Takes the container of Keras's own metrics, or None without any."""
    self._container, self._package = container, package
    self._built = False

  def added(self, y: Structure, outputs: Structure, weight: Structure) -> list[tf.Tensor]:
    """Returns what a batch adds to each metric variable (replica context).

    Args:
      y, outputs: as for `CompiledModel.losses`, rows without padding; maybe none.
      weight: float [n], or a list or dict of them, for `weighted_metrics`; None as in `fit`.

    Raises:
      ConfigError: a metric's state is not a sum over rows.
    """
    if self._container is None:
      return []
    if not self._built:
      self._build(y, outputs, weight)
      self._built = True
    some = tf.shape(tf.nest.flatten(outputs)[0])[0] > 0  # of no rows a mean is not a number
    sums = self._from_zero(y, outputs, weight)
    return [tf.where(some, value, tf.zeros_like(value)) for value in sums]

  def results(self, sums: Sequence[Any]) -> dict[str, Any]:
    """Returns name -> value, as `fit` names and computes them, of summed variables (host)."""
    variables = self._variables()
    values = [tf.cast(v, each.dtype) for v, each in zip(sums, variables, strict=True)]
    if self._package is keras:
      with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
        return _named(self._container.result())
    for variable, value in zip(variables, values, strict=True):
      variable.assign(value)
    return _named({metric.name: metric.result() for metric in self._container.metrics})

  def _variables(self) -> list[Any]:
    return [variable for metric in self._container.metrics for variable in metric.variables]

  def _from_zero(self, y: Structure, outputs: Structure, weight: Structure) -> list[tf.Tensor]:
    zeros = [tf.zeros(v.shape, v.dtype) for v in self._variables()]
    return self._updated(zeros, y, outputs, weight)

  def _updated(
    self, state: Sequence[tf.Tensor], y: Structure, outputs: Structure, weight: Structure
  ) -> list[Any]:
    if self._package is keras:
      return list(self._container.stateless_update_state(state, y, outputs, weight))
    for variable, value in zip(self._variables(), state, strict=True):
      variable.assign(value)
    self._container.update_state(y, outputs, weight)
    return [tf.identity(variable) for variable in self._variables()]

  @as_written
  def _build(self, y: Structure, outputs: Structure, weight: Structure) -> None:
    """Makes the metrics' variables, and checks that they are sums, outside of the step's graph."""
    strategy = tf.distribute.get_strategy()

    def check() -> None:
      rows = synthetic_rows.like((y, outputs, weight))
      try:
        self._run(strategy, lambda: self._container.update_state(*rows))
      except Exception as error:
        raise ConfigError(
          f"the compiled metrics cannot be updated with {synthetic_rows.COUNT} made-up rows "
          f"({first_line(error)}); give each metric a function that returns one value for each "
          "row, or compute it in Task.metrics() of a subclass."
        ) from error
      self._container.reset_state()
      self._require_sums(strategy, rows)

    synthetic_rows.outside(check)

  def _run(self, strategy: tf.distribute.Strategy, function: Callable[[], Any]) -> Any:
    """Returns what a function returns that updates the metrics eagerly.

    Variables that tf_keras made in a strategy's scope change in its replica context only.
    """
    if self._package is keras or not self._is_distributed():
      return function()
    with strategy.scope():
      traced = tf.function(lambda: strategy.run(function), autograph=False)
      found = traced.get_concrete_function()()
    first = strategy.experimental_local_results
    return tf.nest.map_structure(lambda value: first(value)[0], found)

  def _is_distributed(self) -> bool:
    """Whether the user made a metric of tf_keras in the scope of a strategy."""
    given = self._container._user_metrics, self._container._user_weighted_metrics
    found = [
      each for each in tf.nest.flatten(given) if isinstance(each, self._package.metrics.Metric)
    ]
    variables = [variable for metric in found for variable in metric.variables]
    return any(isinstance(each, tf.distribute.DistributedValues) for each in variables)

  def _require_sums(self, strategy: tf.distribute.Strategy, rows: Any) -> None:
    """Checks on made-up rows that parts of them, and one after the other, add up to the whole."""
    begin = [np.asarray(tf.convert_to_tensor(variable)) for variable in self._variables()]
    one, other = synthetic_rows.split(rows)

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
      return self._run(strategy, lambda: function(*arguments))

    whole, first, second = (run(self._from_zero, *part) for part in (rows, one, other))
    before = self.results(first)
    both = run(self._updated, first, *other)
    after = self.results(first)  # the same state, after other updates
    number = 0
    for metric in self._container.metrics:
      known = range(number, number := number + len(metric.variables))
      adds = all(
        not begin[i].any()
        and synthetic_rows.are_close(whole[i], first[i] + second[i])
        and synthetic_rows.are_close(whole[i], both[i])
        for i in known
      )
      if not adds:
        raise ConfigError(
          f"the metric {metric.name!r} ({type(metric).__name__}) keeps a state that is not a sum "
          "over rows, so the parts of N replicas cannot be added; let its function return one "
          "value for each row, or compute it in Task.metrics() of a subclass."
        )
    for name, value in before.items():
      if not synthetic_rows.are_close(value, after[name]):
        raise ConfigError(
          f"the metric {name!r} keeps a state that Keras does not know, so it cannot be added over "
          "N replicas; make each variable of it with add_weight()."
        )


def _named(results: Mapping[str, Any]) -> dict[str, Any]:
  """Returns name -> tensor; the results of one metric may be a dict, as for `fit`."""
  found: dict[str, Any] = {}
  for name, result in results.items():
    found |= _named(result) if isinstance(result, Mapping) else {name: tf.convert_to_tensor(result)}
  return found
