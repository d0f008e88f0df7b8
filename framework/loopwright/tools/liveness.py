"""The most memory that the tensors of a compiled function need at once, without running it.

TensorFlow's own optimizer rewrites the graph as it does before a run. Then the operations are taken
in the order in which their inputs are ready. A tensor lives from the operation that makes it to its
last reader. Variables are not counted, nor is memory that a kernel needs for itself.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.grappler.cluster import Cluster
from tensorflow.python.ops import handle_data_util
from tensorflow.python.training.saver import export_meta_graph

_NO_MEMORY = {"ReadVariableOp", "Placeholder", "Const"}
"""A variable's value is read without a copy; arguments and constants are not the function's."""
_SAME_MEMORY = {
  "Bitcast", "Enter", "Exit", "ExpandDims", "Identity", "LoopCond", "Merge", "NextIteration",
  "PreventGradient", "Reshape", "Squeeze", "StopGradient", "Switch",
}  # fmt: skip
"""The output is the first input."""
_IN_PLACE = {
  "Abs", "Add", "AddN", "AddV2", "BiasAdd", "Cast", "ClipByValue", "DivNoNan", "Elu", "EluGrad",
  "Erf", "Exp", "Log", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "Pow", "RealDiv",
  "Reciprocal", "Relu", "ReluGrad", "Rsqrt", "RsqrtGrad", "SelectV2", "Selu", "Sigmoid",
  "SigmoidGrad", "Sign", "Softmax", "Softplus", "Sqrt", "SqrtGrad", "Square", "SquaredDifference",
  "Sub", "Tanh", "TanhGrad",
}  # fmt: skip
"""The output takes the memory of an input of its size that nothing else reads."""
_POINTERS = (tf.resource, tf.variant, tf.string)


class Peak(NamedTuple):
  """The moment of a function that needs most memory.

  Attributes:
    size: bytes of all tensors alive.
    largest: (operation, bytes) of these tensors, the largest first.
    unknown: the names of operations whose memory is not counted: outputs of unknown shape, loops.
  """

  size: int
  largest: tuple[tuple[str, int], ...]
  unknown: tuple[str, ...]


class _Buffer:
  """Memory that one or more tensors share.

  Attributes:
    name: the operation that makes it.
    size: bytes; 0 for memory that is not the function's.
    readers: how often it is still read.
  """

  def __init__(self, name: str, size: int) -> None:
    self.name, self.size, self.readers = name, size, 0


def peak(function: Any) -> Peak:
  """Returns when a concrete function needs most memory, and what for (host).

  Args:
    function: a `ConcreteFunction` whose arguments have static shapes.
  """
  graph = _optimized(function)
  operations = graph.get_operations()
  reads = collections.Counter(t.ref() for op in operations for t in op.inputs)
  buffers: dict[Any, _Buffer] = {}
  alive: dict[int, _Buffer] = {}
  size, most = 0, Peak(0, (), ())
  unknown: dict[str, None] = {}
  for operation in _in_order(operations):
    inputs = [buffers[t.ref()] for t in operation.inputs if t.ref() in buffers]
    unknown |= _unknown(operation)
    made = []
    for output in operation.outputs:
      buffer = _buffer(operation, output, inputs)
      buffer.readers += reads[output.ref()]
      buffers[output.ref()] = buffer
      made.append(buffer)
      if id(buffer) not in alive:
        alive[id(buffer)] = buffer
        size += buffer.size
    if size > most.size:
      found = sorted(alive.values(), key=lambda buffer: -buffer.size)
      most = Peak(size, tuple((buffer.name, buffer.size) for buffer in found[:20]), ())
    for buffer in inputs:
      buffer.readers -= 1
    for buffer in (*inputs, *made):
      if buffer.readers == 0 and alive.pop(id(buffer), None) is not None:
        size -= buffer.size
  return most._replace(unknown=tuple(unknown))


def variables_size(function: Any) -> int:
  """Returns the bytes of all variables that a concrete function reads or assigns (host)."""
  handles = (t for t in function.inputs if t.dtype == tf.resource)
  data = filter(None, map(handle_data_util.get_resource_handle_data, handles))
  pairs = [(tf.TensorShape(d.shape_and_type[0].shape), d.shape_and_type[0].dtype) for d in data]
  return sum(shape.num_elements() * tf.as_dtype(dtype).size for shape, dtype in pairs)


def _unknown(operation: tf.Operation) -> dict[str, None]:
  """Returns the name of an operation whose memory is not known, or of the loop that it begins."""
  if operation.type == "Enter":
    return {operation.get_attr("frame_name").decode(): None}
  shapeless = operation.type == "While" or any(_bytes(t) is None for t in operation.outputs)
  return {operation.name: None} if shapeless else {}


def _buffer(operation: tf.Operation, output: tf.Tensor, inputs: list[_Buffer]) -> _Buffer:
  """Returns the memory of an output: new, or that of an input."""
  if operation.type in _SAME_MEMORY and inputs:
    return inputs[0]
  size = 0 if operation.type in _NO_MEMORY else _bytes(output) or 0
  if operation.type in _IN_PLACE:
    for buffer in inputs:
      if buffer.size == size and buffer.readers == inputs.count(buffer):
        return buffer
  return _Buffer(operation.name, size)


def _bytes(tensor: tf.Tensor) -> int | None:
  if tensor.dtype in _POINTERS:
    return 0
  count = tensor.shape.num_elements()
  return None if count is None else count * tensor.dtype.size


def _in_order(operations: list[tf.Operation]) -> Iterator[tf.Operation]:
  """Yields operations as their inputs become ready, those of a loop once."""
  waits, readers = {}, collections.defaultdict(list)
  for operation in operations:
    before = [t.op for t in operation.inputs if t.op.type != "NextIteration"]
    before += operation.control_inputs
    waits[operation] = len(before)
    for op in before:
      readers[op].append(operation)
  ready = collections.deque(op for op in operations if not waits[op])
  while ready:
    operation = ready.popleft()
    yield operation
    for reader in readers[operation]:
      waits[reader] -= 1
      if not waits[reader]:
        ready.append(reader)


def _optimized(function: Any) -> tf.Graph:
  """Returns the graph as TensorFlow would run it: calls and branches inlined, operations fused."""
  exported = export_meta_graph(graph_def=function.graph.as_graph_def(), graph=function.graph)
  kept = exported.collection_def["train_op"].node_list.value
  kept.extend(output.name for output in (*function.outputs, *function.graph.control_outputs))
  config = config_pb2.ConfigProto()
  rewriting = config.graph_options.rewrite_options
  rewriting.min_graph_nodes = -1  # also small graphs
  try:
    return _imported(function, tf_optimizer.OptimizeGraph(config, exported, cluster=_a_cpu()))
  except ValueError:  # there are fused operations that run, but cannot be imported: in bfloat16
    rewriting.remapping = rewriter_config_pb2.RewriterConfig.OFF
    return _imported(function, tf_optimizer.OptimizeGraph(config, exported, cluster=_a_cpu()))


def _a_cpu() -> Cluster:
  """Returns what TensorFlow's optimizer optimizes for; it need not exist."""
  device = device_properties_pb2.NamedDevice(name="/job:localhost/replica:0/task:0/device:CPU:0")
  device.properties.type = "CPU"
  device.properties.num_cores = 1
  device.properties.frequency = 1000
  return Cluster(devices=[device])


def _imported(function: Any, optimized: Any) -> tf.Graph:
  """Returns an optimized graph with the shapes of its tensors."""
  used = {node.name for node in optimized.node}
  graph = tf.Graph()
  with graph.as_default():
    arguments = {}
    for tensor in function.inputs:
      if tensor.op.name in used:
        # Only a placeholder that knows the variable's shape gives shapes to what reads it.
        resource = tensor.dtype == tf.resource
        shape = () if resource else tensor.shape
        argument = tf.raw_ops.Placeholder(dtype=tensor.dtype, shape=shape)
        if resource:
          handle_data_util.copy_handle_data(tensor, argument)
        arguments[tensor.name] = argument
    tf.graph_util.import_graph_def(optimized, input_map=arguments, name="")
  return graph
