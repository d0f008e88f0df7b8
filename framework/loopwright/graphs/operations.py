"""The operations of a traced function, with those of all functions inside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

_CALLS = (
  "PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf",
  "Case", "StatelessCase",
)  # fmt: skip


def operations(graph: tf.Graph, seen: set[str] | None = None) -> Iterator[tf.Operation]:
  """Yields the operations of a graph and of all functions, loops and branches in it.

  Args:
    graph: of a concrete function.
    seen: names of functions to leave out.
  """
  seen = set() if seen is None else seen
  for operation in graph.get_operations():
    yield operation
    for name in function_names(operation):
      if name not in seen:
        seen.add(name)
        if inner := function_of(graph, name):
          yield from operations(inner, seen)


def function_names(operation: tf.Operation) -> list[str]:
  """Returns the names of the functions that an operation calls."""
  names = []
  for attribute in operation.op_def.attr:
    if attribute.type == "func":
      names.append(operation.get_attr(attribute.name).name)
    elif attribute.type == "list(func)":
      names += [each.name for each in operation.get_attr(attribute.name)]
  return [name for name in names if name]


def function_of(graph: tf.Graph, name: str) -> Any:
  """Returns the graph of a function called in `graph`; None if unknown."""
  while graph is not None:
    function = graph._functions.get(name) if hasattr(graph, "_functions") else None
    if function is not None:
      return getattr(function, "graph", None)
    graph = getattr(graph, "outer_graph", None)
  return None


def computed_from(source: tf.Tensor) -> set[str]:
  """Returns the names of the operations of a graph that depend on a tensor of it.

  A function, loop or branch depends on all that it captures.
  """
  found = {source.op.name}
  for operation in source.graph.get_operations():  # in the order in which they were made
    if any(each.op.name in found for each in operation.inputs):
      found.add(operation.name)
  return found


def is_constant(tensor: tf.Tensor) -> bool:
  """Whether a tensor of a graph depends on constants only."""
  waiting, seen = [tensor.op], set[str]()
  while waiting:
    operation = waiting.pop()
    if not operation.inputs and operation.type != "Const":
      return False
    waiting += [each.op for each in operation.inputs if each.op.name not in seen]
    seen |= {each.op.name for each in operation.inputs}
  return True


def dtypes(graph: tf.Graph, first: int) -> set[str]:
  """Returns the dtypes of what a graph's operations give, from number `first` on.

  Functions, loops and branches inside count.
  """
  found, seen = set[str](), set[str]()
  made = graph.get_operations()[first:]
  for operation in made:  # grows
    found.update(tensor.dtype.name for tensor in operation.outputs)
    for name in function_names(operation) if operation.type in _CALLS else ():
      if name not in seen and (inner := function_of(graph, name)):
        seen.add(name)
        made += inner.get_operations()
  return found


def resources(graph: Any) -> dict[int, bool]:
  """Returns the id of each resource that a traced function captures -> whether it may change it.

  Of a variable, the resource is its handle. Functions, loops and branches inside count.
  """
  changed: dict[str, set[int]] = {}  # name of an operation -> ids of what it may change
  found = {}
  for outer, inner in graph.captures:
    if outer.dtype != tf.resource:
      continue
    for operation in inner.consumers():
      if operation.name not in changed:
        _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        changed[operation.name] = {id(each) for each in written}
    found[id(outer)] = any(id(inner) in changed[each.name] for each in inner.consumers())
  return found


def fills_a_table(graph: tf.Graph) -> bool:
  """Whether a traced function changes a table; for `resources`, a lookup is a change too."""
  kinds = {operation.type for operation in operations(graph)}
  return bool(kinds & {"LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2"})


def assigned(graph: tf.Graph) -> set[int]:
  """Returns the ids of the variables' handles, and of tables, that a traced function may change."""
  captures = {id(outer): repr(outer) for outer, _ in graph.captures if outer.dtype == tf.resource}
  fills = fills_a_table(graph)
  changed = {handle for handle, changes in resources(graph).items() if changes}
  return {handle for handle in changed if fills or "::lookup::" not in captures[handle]}
