"""State of a task in each kind of place: right after a restart and without training, or refused.

Straight against a restart, and `lw.load` and an evaluation against training's own, to the bit.
"""

import collections
import dataclasses
import enum
import functools
import importlib
import itertools
import json
import queue
import types
import typing
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from runs import make_trainer

import loopwright as lw
from loopwright.models.reachable import follow, named_before, reachable
from loopwright.models.task_state import TaskState, by_handle, copies_of
from loopwright.trainer import Trainer

X = np.random.default_rng(1).normal(size=[24, 3]).astype("float32")
KEPT = []  # of the module


def v(value=0.0, **options):
  first = tf.VariableAggregation.ONLY_FIRST_REPLICA
  return tf.Variable(value, trainable=False, aggregation=first, **options)


class Held(lw.Task):
  """Name -> `make(holder)`, which returns a function that returns the variables of a place.

  Step k adds 10**i k to number i of each place; the loss depends on all.
  """

  def __init__(self, cases):
    self._cases = cases

  def build_model(self):
    self.places = {name: Plain() for name in self._cases}
    for name, make in self._cases.items():
      self.places[name].all = make(self.places[name])
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])

  @tf.autograph.experimental.do_not_convert
  def all(self):
    return {name: place.all() for name, place in self.places.items()}

  def source(self, split):
    return lw.ArraySource(features={"x": X})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    numbers = [read(state) for found in self.all().values() for state in found]
    scale = tf.add_n([9.0, *(0.1 * tf.sin(tf.cast(each, tf.float32)) for each in numbers)])
    return lw.Loss.from_examples(tf.square(outputs) * scale, batch["weight"])

  def train_step(self, step, batch):
    step.update(lambda part: self.training_loss(step, part), batch)
    for found in self.all().values():
      for number, state in enumerate(found):
        add(state, 10.0**number * tf.cast(step.number + 1, tf.float32))


def add(state, more):
  if isinstance(state, tf.random.Generator):
    state.uniform([])
  elif isinstance(state, keras.metrics.Metric):
    state.update_state(more)
  elif hasattr(state, "lookup"):
    state.insert(tf.cast(more, tf.int64), more)
  else:
    state.assign_add(tf.cast(more, state.dtype))


def read(state):
  if isinstance(state, tf.random.Generator):
    return state.state[0] % 7
  if hasattr(state, "lookup"):
    return state.lookup(tf.constant(1, tf.int64))
  return tf.convert_to_tensor(getattr(state, "total", state))


def value(state):
  """Returns the value of one replica: they have the same."""
  if hasattr(state, "export"):
    keys, values = state.export()
    return sorted(zip(keys.numpy(), values.numpy(), strict=True))
  if isinstance(state, keras.metrics.Metric):
    return state.total.value.read_value().numpy()  # of all replicas
  state = state.state if isinstance(state, tf.random.Generator) else state
  first, *others = [copy.numpy() for copy in copies_of(state)]
  assert all(np.array_equal(first, other) for other in others)
  return first


def values(task):
  return {name: [*map(value, found)] for name, found in task.all().items()}


def table(kind=tf.lookup.experimental.MutableHashTable):
  more = {"empty_key": -1, "deleted_key": -2} if "Dense" in kind.__name__ else {}
  return kind(tf.int64, tf.float32, 0.0, **more)


class Color(enum.Enum):
  RED = 1


class Slots:
  __slots__ = ("__weakref__", "a", "b")

  def __init__(self):
    self.a, self.b = v(), v()


class Hiding(Slots):
  __slots__ = ("a",)

  def __init__(self):
    super().__init__()
    Slots.a.__set__(self, v())

  def both(self):
    return [self.a, Slots.a.__get__(self)]


@dataclasses.dataclass
class Data:
  a: typing.Any
  b: typing.Any


@dataclasses.dataclass(slots=True)
class SlottedData:
  a: typing.Any
  b: typing.Any


Pair = collections.namedtuple("Pair", "a b")


class ListOfMine(list):
  pass


class Plain:
  pass


def setting(task, found, **named):
  vars(task).update(named)
  return lambda: found


def held(make, look=lambda here: list(here)):
  """A case with `task.here = make(a, b)`."""

  def case(task):
    task.here = make(v(), v())
    return lambda: look(task.here)

  return case


def of_dict(*keys):
  return held(lambda *both: dict(zip(keys, both, strict=True)), lambda here: list(here.values()))


def of_object(make):
  return held(make, lambda here: [here.a, here.b])


def closure(task):
  a, b = v(), v()
  return lambda: [a, b]


def defaults(task):
  return lambda a=v(), *, b=v(): [a, b]  # noqa: B008 (is what is tried)


def nested_function(task):
  a, b = v(), v()
  return lambda: (lambda: [a, b])()


def in_partial(task):
  return functools.partial(lambda a, b: [a, b], v(), b=v())


def by_method(task):
  task.here = Plain()
  task.here.both = [v(), v()]
  return types.MethodType(lambda self: self.both, task.here)


def by_tf_function(task):
  a, b = v(), v()
  task.count = tf.function(lambda: [a.read_value(), b.read_value()])
  return lambda: [a, b]


def of_the_module(task):
  KEPT[:] = [v(), v()]
  return lambda: KEPT


class OfClass:
  def __init__(self):
    type(self).a, type(self).b = v(), v()


class Base:
  a = None


class Derived(Base):
  a = None


def two_classes(task):
  Base.a, Derived.a = v(), v()
  task.here = Derived()
  return lambda: [Base.a, Derived.a]


class ByProperty:
  def __init__(self):
    self._a, self._b = v(), v()

  a, b = property(lambda self: self._a), property(lambda self: self._b)


class Cached:
  @functools.cached_property
  def both(self):
    return [v(), v()]


def cached(task):
  task.here = Cached()
  task.here.both  # noqa: B018 (makes them)
  return lambda: task.here.both


def weak(task):
  task.strong = Slots()
  here = weakref.ref(task.strong)
  return lambda: [here().a, here().b]


def weak_dict(task):
  task.strong = Plain()
  task.strong.both = [v(), v()]
  task.here = weakref.WeakValueDictionary(x=task.strong)
  return lambda: task.here["x"].both


def module_inside(task):
  task.here = Plain()
  task.here.inner = tf.Module()
  task.here.inner.both = [v(), {"b": v()}]
  return lambda: [task.here.inner.both[0], task.here.inner.both[1]["b"]]


class Counter(keras.layers.Layer):
  def __init__(self, kind):
    super().__init__()
    if kind == "weight":
      zero = {"shape": (), "initializer": "zeros", "trainable": False}
      self.a, self.b = self.add_weight(**zero), self.add_weight(**zero)
    else:
      self.a, self.b = v(), v()


def of_layer(kind, wrap):
  def case(task):
    layer = Counter(kind)
    task.here = wrap(layer)
    return lambda: [layer.a.value if kind == "weight" else layer.a, layer.b]

  return case


def tf_keras_layer(task):
  task.here = {"layer": tf_keras.layers.Layer()}
  task.here["layer"].a = v()
  return lambda: [task.here["layer"].a]


def queued(task):
  task.here = queue.Queue()
  task.here.put(v())
  return lambda: list(task.here.queue)


def by_global_generator(task):
  tf.random.set_global_generator(tf.random.Generator.from_seed(3))
  return lambda: [tf.random.get_global_generator()]


def in_list_of_mine(task):
  task.here = ListOfMine([v()])
  setattr(task.here, "0", v())
  return lambda: [task.here[0], getattr(task.here, "0")]


def dotted_attribute(task):
  setattr(task, "a.b", v())
  task.a = {"b": v()}
  return lambda: [getattr(task, "a.b"), task.a["b"]]


def mixed(task):
  task.here = {"x": collections.OrderedDict(y=(v(), collections.deque([SlottedData(v(), [v()])])))}
  place = task.here["x"]["y"]
  return lambda: [place[0], place[1][0].a, place[1][0].b[0]]


def shared(task):
  task.here = {"x": v()}
  task.there = [task.here["x"]]
  return lambda: [task.here["x"]]


RIGHT = {
  "a list": held(lambda *both: [*both]),
  "a tuple": held(lambda *both: both),
  "a deque": held(lambda *both: collections.deque(both)),
  "a named tuple": held(Pair),
  "a list of one's own": in_list_of_mine,
  "nested": mixed,
  "two ways": shared,
  "dict": of_dict("a", "b"),
  "keys with dots": held(lambda a, b: {"block.0": a, "block": [b]},
    lambda here: [here["block.0"], here["block"][0]]),
  "0 and '0'": of_dict(0, "0"),
  "'[0]' and 0": of_dict("[0]", 0),
  "'' and '%'": of_dict("", "%"),
  "a slash": of_dict("a/b", "a.Sb"),
  "TensorFlow's key": of_dict(".ATTRIBUTES", "VARIABLE_VALUE"),
  "None and False": of_dict(None, False),
  "tuples": of_dict(("a", 1), "('a', 1)"),
  "numbers of NumPy": of_dict(np.int64(3), b"3"),
  "an enumeration": of_dict(Color.RED, "Color:RED"),
  "a class as key": of_dict(Slots, tf.float32),
  "a defaultdict": held(lambda a, b: collections.defaultdict(list, a=[a], b=[b]),
    lambda here: [here["a"][0], here["b"][0]]),
  "an ordered dict": held(lambda a, b: collections.OrderedDict(a=a, b=b),
    lambda here: [here["a"], here["b"]]),
  "a chain map": held(lambda a, b: collections.ChainMap({"x": a}, {"x": b}),
    lambda here: [here.maps[0]["x"], here.maps[1]["x"]]),
  "a user dict": held(lambda a, b: collections.UserDict(a=a, b=b),
    lambda here: [here["a"], here["b"]]),
  "a mapping proxy": held(lambda a, b: types.MappingProxyType({"a": a, "b": b}),
    lambda here: [here["a"], here["b"]]),
  "attributes": lambda task: setting(task, found := [v(), v()], a=found[0], b=found[1]),
  "an attribute with a dot": dotted_attribute,
  "an object": of_object(lambda a, b: types.SimpleNamespace(a=a, b=b)),
  "a data class": of_object(Data),
  "a data class with slots": of_object(SlottedData),
  "slots": of_object(lambda a, b: Slots()),
  "hidden slots": held(lambda a, b: setattr(here := Hiding(), "a", a) or here,
    lambda here: here.both()),
  "properties": of_object(lambda a, b: ByProperty()),
  "a cached property": cached,
  "attributes of a class": of_object(lambda a, b: OfClass()),
  "attributes of two classes": two_classes,
  "a closure": closure,
  "defaults": defaults,
  "a function in a function": nested_function,
  "a partial": in_partial,
  "a method": by_method,
  "a tf.function": by_tf_function,
  "a global": of_the_module,
  "a weak reference": weak,
  "a weak dict": weak_dict,
  "a tf.Module in an object": module_inside,
  "a layer of Keras in a dict": of_layer("weight", lambda layer: {"x": layer}),
  "a tf.Variable of a layer": of_layer("variable", lambda layer: [layer]),
  "a layer in a closure": of_layer("weight", lambda layer: lambda: layer),
  "a layer of tf_keras": tf_keras_layer,
  "a queue of Python": queued,
  "a table": held(lambda a, b: [table()]),
  "two tables": held(lambda a, b: {"a": table(), "b": table()}, lambda here: [*here.values()]),
  "a dense table in a deque": held(
    lambda a, b: collections.deque([table(tf.lookup.experimental.DenseHashTable)])),
  "a table in a closure": lambda task: (lambda both: lambda: both)([table(), table()]),
  "a generator": held(lambda a, b: [tf.random.Generator.from_seed(1)]),
  "generators in a dict": held(
    lambda a, b: {1: tf.random.Generator.from_seed(1), "1": tf.random.Generator.from_seed(2)},
    lambda here: [*here.values()]),
  "the global generator": by_global_generator,
  "a metric": held(lambda a, b: {"m": keras.metrics.Mean()}, lambda here: [here["m"]]),
  "numbers of several kinds": held(
    lambda a, b: [v(0), v(0, dtype=tf.int64), v(0.0, dtype="float64")]),
}  # fmt: skip


INEXACT = {name for name in RIGHT if "table" in name or "generator" in name or "metric" in name}


def in_set(task):
  task.here = {Plain(), Plain()}
  for each in task.here:
    each.kept = v()
  return lambda: [each.kept for each in task.here]


def by_reference(task):
  a = v()
  task.here = {a.ref(): 1}
  del a
  return lambda: [key.deref() for key in task.here]


def by_object(task):
  task.here = {Plain(): v()}
  return lambda: list(task.here.values())


def in_array(task):
  task.here = np.array([None], dtype=object)
  task.here[0] = v()
  return lambda: list(task.here)


def in_iterator(task):
  task.here = itertools.cycle([v()])
  return lambda: [next(task.here)]


def in_long_list(task):
  task.here = [*range(10_001), v()]
  return lambda: task.here[-1:]


def tensorflows_queue(task):
  task.here = tf.queue.FIFOQueue(9, [tf.float32], [[]])

  def touch():
    task.here.enqueue(1.0)
    return []

  return touch


REFUSED = {
  "a set": in_set, "a reference as key": by_reference, "an object as key": by_object,
  "an array of objects": in_array, "an iterator": in_iterator, "a long list": in_long_list,
  "a queue of TensorFlow": tensorflows_queue,
}  # fmt: skip


def run(task, folder, strategy, steps, **options):
  lw.run(
    task=task, model_dir=str(folder), train_steps=steps, global_batch_size=8, strategy=strategy,
    steps_per_loop=5, checkpoint_every_steps=5, optimizer=lambda: keras.optimizers.SGD(0.01),
    **options,
  )  # fmt: skip
  return task


def evaluations(folder):
  lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  return [line["loss"] for line in lines if line["split"] == "eval"]


def test_each_place_has_one_name_that_leads_there():
  task = Held(RIGHT)
  task.model = task.build_model()
  places = list(reachable(task))
  assert len({place.name for place in places}) == len(places)
  assert all(follow(task, place.name) is place.variable for place in places)
  found = by_handle(place.variable for place in places).keys()
  wanted = [state for states in task.all().values() for state in states]
  wanted = [getattr(each, "total", getattr(each, "state", each)) for each in wanted]
  assert by_handle(wanted).keys() <= found


LIBRARY = """
import loopwright as lw, tensorflow as tf
COUNT = tf.Variable(0)
def add(): COUNT.assign_add(1)
class Kept:
  count = COUNT
class OfTheLibrary(lw.Task):
  def touch(self): add()
"""
MINE = """
import loopwright as lw, of_others
from of_others import Kept, add
class Mine(lw.Task):
  def touch(self): return add(), of_others.add(), Kept
"""


def test_globals_of_a_library_are_looked_through_for_its_own_tasks_alone(tmp_path, monkeypatch):
  """One function leads to all that a library has loaded: here, in an assertion, to pytest's."""
  (tmp_path / "site-packages").mkdir()
  (tmp_path / "site-packages" / "of_others.py").write_text(LIBRARY)
  (tmp_path / "mine.py").write_text(MINE)
  for folder in (tmp_path, tmp_path / "site-packages"):
    monkeypatch.syspath_prepend(folder)
  of_others, mine = map(importlib.import_module, ("of_others", "mine"))
  tasks = mine.Mine(), of_others.OfTheLibrary()
  found = [[p.name for p in reachable(task) if p.variable is of_others.COUNT] for task in tasks]
  assert found == [[], ["touch.<global add>.<global COUNT>"]]


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_state_in_each_place_is_right(replicas, mirrored, tmp_path):
  assert len(RIGHT) + len(REFUSED) >= 48
  strategy = mirrored(replicas)
  expected = values(run(Held(RIGHT), tmp_path / "a", strategy, 10, eval_every_steps=10))
  for name in RIGHT.keys() - INEXACT:
    assert expected[name] == [55 * 10**number for number in range(len(expected[name]))], name
  run(Held(RIGHT), tmp_path / "b", strategy, 5, mode="train")
  found = values(run(Held(RIGHT), tmp_path / "b", strategy, 10, eval_every_steps=10))
  np.testing.assert_equal(found, expected)
  loaded = lw.load(tmp_path / "a", task=Held(RIGHT), optimizer=keras.optimizers.SGD)
  np.testing.assert_equal(values(loaded.task), expected)
  found = values(run(Held(RIGHT), tmp_path / "a", strategy, 10, mode="evaluate"))
  np.testing.assert_equal(found, expected)
  straight, resumed = (evaluations(tmp_path / folder) for folder in "ab")
  assert (len(straight), len({*straight, *resumed})) == (2, 1)
  assert np.isfinite(straight[0])


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("place", REFUSED)
def test_state_without_a_place_is_refused_before_the_first_step(place, replicas, mirrored):
  task = Held({"x": REFUSED[place]})
  trainer = make_trainer(task, mirrored(replicas), batch=8, optimizer=keras.optimizers.SGD)
  with pytest.raises(lw.ConfigError, match=r"the training loop assigns .* keep it in an attribute"):
    trainer.examine()


def counter(place):
  def case(task):
    task.here = {place: v()}
    return lambda: [task.here[place]]

  return case


def aliased(task):
  found = counter("count")(task)
  task.short = task.here["count"]
  return found


def made_by_the_step(task):
  def find():
    if not hasattr(task, "here"):
      task.here = v()
    return [task.here]

  return find


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_another_way_to_a_variable_changes_nothing(replicas, mirrored, tmp_path):
  for make, steps in ((counter("count"), 5), (aliased, 10), (counter("count"), 15)):
    task = run(Held({"x": make}), tmp_path, mirrored(replicas), steps, mode="train")
    assert values(task) == {"x": [steps * (steps + 1) / 2]}


def test_what_nothing_takes_is_asked_about(mirrored, tmp_path, caplog):
  one, line = mirrored(1), "has 'places.x.here.count' of its task, but this task has no variable"
  run(Held({"x": counter("count")}), tmp_path, one, 5, mode="train")
  other = {"x": counter("other")}
  with pytest.raises(lw.ConfigError, match=f"{line}.*add --accept_changes to go on without"):
    run(Held(other), tmp_path, one, 10, mode="train")
  for look in (
    lambda: run(Held(other), tmp_path, one, 5, mode="evaluate"),
    lambda: lw.load(tmp_path, task=Held(other), optimizer=keras.optimizers.SGD),
  ):
    with pytest.raises(lw.ConfigError, match=f"{line} or table there after build_model..[.]$"):
      look()
  task = run(Held(other), tmp_path, one, 10, mode="train", accept_changes=True)
  assert values(task) == {"x": [6 + 7 + 8 + 9 + 10]}
  assert "'places.x.here.count' of checkpoint" in caplog.text


def test_what_the_step_makes_is_there_after_a_restart_and_asked_about_elsewhere(mirrored, tmp_path):
  case = {"x": made_by_the_step}
  for steps in (5, 10):
    task = run(Held(case), tmp_path, mirrored(1), steps, mode="train")
  assert values(task) == {"x": [55]}
  with pytest.raises(lw.ConfigError, match=r"has 'places.x.here' of its task.*build_model\(\)\.$"):
    run(Held(case), tmp_path, mirrored(1), 10, mode="evaluate")


def former(task):
  """What earlier versions found, and what got the name of its variable."""
  task.here = {"a.b": v(), 3: [v()], "module": tf.Module()}
  task.here["module"].kept = v()
  task.slot = SlottedData(v(name="in_slot"), None)
  alone = v(name="alone")
  here = task.here
  return lambda: [here["a.b"], here[3][0], here["module"].kept, task.slot.a, alone]


def ambiguous(task):
  task.here = {"a.b": v(), "a": {"b": v()}}
  return lambda: [task.here["a.b"], task.here["a"]["b"]]


NAMES = ["here.a.b", "here.3.0", "here.module.kept", "other.in_slot", "other.alone"]


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_checkpoints_of_earlier_versions_open_unless_a_name_is_of_two(
  replicas, mirrored, tmp_path, monkeypatch
):
  def former_items(trainer, usual=Trainer.checkpoint_items):
    return {"task" if name == "state" else name: each for name, each in usual(trainer).items()}

  def former_children(state, *_, **__):
    names = {
      place.name: name for name, found in named_before(state._task).items() for place in found
    }
    return {names[place]: item for place, item in reversed(state.kept.items())}

  strategy = mirrored(replicas)
  with monkeypatch.context() as patched:
    patched.setattr(Trainer, "checkpoint_items", former_items)
    patched.setattr(TaskState, "_trackable_children", former_children)
    run(Held({"x": former}), tmp_path / "a", strategy, 5, mode="train")
    run(Held({"x": ambiguous}), tmp_path / "b", strategy, 5, mode="train")
  saved = [name for name, _ in tf.train.list_variables(tmp_path / "a" / "checkpoints" / "ckpt-5")]
  for name in NAMES:
    name = name if name.startswith("other") else f"places.x.{name}"
    assert f"task/{name.replace('.', '..')}/.ATTRIBUTES/VARIABLE_VALUE" in saved
  task = run(Held({"x": former}), tmp_path / "a", strategy, 10, mode="train")
  assert values(task) == {"x": [55 * 10**number for number in range(5)]}
  task = run(Held({"x": former}), tmp_path / "a", strategy, 10, mode="evaluate")
  assert values(task) == {"x": [55 * 10**number for number in range(5)]}
  with pytest.raises(lw.ConfigError, match="an earlier version gave that name to 2 of its places"):
    run(Held({"x": ambiguous}), tmp_path / "b", strategy, 10, mode="train")
