"""The config check, tried on a small table of toys: every mistake, its one line and its place."""

import contextlib
import gc
import importlib
import inspect
import os
import re
import sys
import textwrap
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import gin
import pytest

from loopwright import configurables, registry
from loopwright.configurables import checks, imports, table, values
from loopwright.errors import ConfigError
from loopwright.host import modules, signals
from loopwright.options.declaration import Instead
from loopwright.options.groups import GpuMemory
from loopwright.registry import Entry


class Task:
  pass


class Strategy:
  pass


class Optimizer:
  pass


class Scale:
  pass


class Action:
  def __call__(self, output):
    raise NotImplementedError


class Digits(Task):
  def __init__(self, *, width: int = 128, rate: float = 0.5, path: str | None = None):
    self.width, self.rate, self.path = width, rate, path


class Folder(Task):
  def __init__(self, *, directory: str):
    if directory == "missing":
      raise ConfigError("Folder.directory is 'missing', where there is nothing.")
    self.directory = directory


class Sgd(Optimizer):
  def __init__(self, *, learning_rate: float = 0.01, nesterov: bool = False, name=None):
    self.learning_rate, self.nesterov, self.name = learning_rate, nesterov, name


class Best(Action):
  def __init__(self, *, metric: str = "accuracy"):
    self.metric = metric


def auto(*, cpu_replicas: int = 1) -> Strategy:
  made = Strategy()
  made.cpu_replicas = cpu_replicas
  return made


def mirrored(*, cross_device_ops: Literal["nccl", "collective"] | None = None) -> Strategy:
  del cross_device_ops
  return Strategy()


def none() -> Scale:
  return Scale()


def dynamic(*, growth_steps: int = 2000) -> Scale:
  made = Scale()
  made.growth_steps = growth_steps
  return made


MARKER = object()


class Pair:
  def __init__(self, *, first: Any = None):
    self.first = first


def two() -> int:
  return 2


class Model:
  def __call__(self, x):
    raise NotImplementedError


def dense(*, units: int) -> Model:
  del units
  return Model()


def constant(*, learning_rate: float) -> Callable[[int], float]:
  return lambda step: learning_rate


class Trainer:
  def __init__(
    self,
    *,
    task: Annotated[Task, Instead("set run.task")],
    scale: Callable[[], Scale] = none,
    clip_norm: float | None = None,
    network: Callable[..., Model] | None = None,
    limit: int = None,  # noqa: RUF013
    gain: float = 1.0,
    marker: Any = MARKER,
    hook: Callable[[Any], Any] | None = None,
    anything: Any = None,
    **options: Any,
  ):
    self.task, self.scale, self.clip_norm = task, scale(), clip_norm
    self.anything, self.options = anything, options
    del network, limit, gain, marker, hook


def run(
  *,
  task: Task | Callable[[], Task],
  train_steps: int,
  model_dir: Annotated[str, Instead("use the flag --model_dir")],
  strategy: Callable[[], Strategy] = auto,
  optimizer: Callable[[], Optimizer] | Mapping[str, Callable[[], Optimizer]] = Sgd,
  seed: int = 0,
  eager: bool = False,
  image_size: tuple[int, int] = (28, 28),
  rates: Sequence[float] = (),
  gpu_memory: GpuMemory = "all",
  wire: Literal["float16"] | None = None,
  names: Sequence[str] = (),
  actions: Sequence[Action] = (),
):
  del seed, eager, image_size, rates, names, gpu_memory, wire
  trainer = configurables.configured(Trainer)(task=task)
  makers = optimizer if isinstance(optimizer, dict) else {"default": optimizer}
  optimizers = {name: make() for name, make in makers.items()}
  return {
    "trainer": trainer,
    "strategy": strategy(),
    "optimizers": optimizers,
    "actions": actions,
    "train_steps": train_steps,
    "model_dir": model_dir,
  }


TOYS = {
  f"{__name__}.{name}": Entry(name, __name__, name)
  for name in (
    *("run", "Trainer", "auto", "mirrored", "none", "dynamic", "constant", "dense"),
    *("Sgd", "Best", "Pair", "two", "Digits", "Folder"),
  )
}
SELF = __name__.rpartition(".")[2]
GOOD = "run.task = @Digits()\nrun.train_steps = 5\n"


def is_under(path, folder):
  return path.startswith(folder) and "site-packages" not in path


@pytest.fixture(autouse=True)
def toys(monkeypatch, tmp_path):
  """A registry of the toys alone, in an empty working directory; all of it undone at the end."""
  fresh = type(table.registry())()
  builtins = {name: entry for name, entry in table.registry().items() if name.startswith("gin.")}
  for name, entry in builtins.items():
    fresh[name] = entry
  monkeypatch.setattr(gin.config, "_REGISTRY", fresh)
  known = {entry.wrapped: entry for entry in builtins.values()}
  monkeypatch.setattr(gin.config, "_INVERSE_REGISTRY", known)
  monkeypatch.setattr(table, "listed", lambda: TOYS)
  monkeypatch.setattr(table, "ROOTS", ("run", "Trainer"))
  monkeypatch.setattr(table, "OPTIMIZER_PACKAGES", ())
  repository = str(imports.REPOSITORY)
  monkeypatch.setattr(sys, "path", [p for p in sys.path if p and not is_under(p, repository)])
  monkeypatch.setattr(imports, "REPOSITORY", tmp_path / "repository")
  monkeypatch.setattr(imports, "SHIPPED", tmp_path / "repository")
  monkeypatch.setattr(modules, "FOLDER", tmp_path / "repository" / "tasks")
  before = set(sys.modules)
  monkeypatch.chdir(tmp_path)
  importlib.invalidate_caches()
  gin.clear_config()
  yield
  gin.clear_config()
  for name in set(sys.modules) - before:
    if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
      del sys.modules[name]


def write(name, text):
  path = Path(name)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(textwrap.dedent(text))


def parse(text, *params):
  write("x.gin", text)
  configurables.parse(["x.gin"], params)


def mistake(text, *params):
  """Returns the line that says what is wrong with a config."""
  before = gin.config_str()
  with pytest.raises(ConfigError) as caught:
    parse(text, *params)
  line = str(caught.value)
  assert "\n" not in line
  assert gin.config_str() == before, "a config with a mistake must not be in force"
  return line


def result():
  return configurables.configured(run)(model_dir="m")


# Names.


# By what comes after `GOOD`: the one line that says what is wrong. `MODULES` are beside the file.
MINE = """
  import loopwright.configurables as c
  @c.register
  class {}:
    def __init__(self, *, x: int = 1): self.x = x
"""
MODULES = {
  "mine.py": "import loopwright.configurables as c\n@c.register\ndef auto(): pass\n",
  "tasks_of_mine.py": MINE.format("Mine"),
  "pack/digits.py": MINE.format("Mine"),
  "pack/my_late.py": MINE.format("Late"),
  "my_shy.py": "class Shy:\n  pass\n",
}
LATE = "3: unknown configurable {!r}. Add `import pack.my_late`, which defines it."
LINES = [
  ("Trainr.clip_norm = 1.0", "3: unknown configurable 'Trainr'. Did you mean 'Trainer'?"),
  ("run.task = @digits()", "3: unknown configurable 'digits'. Did you mean 'Digits'?"),
  ("run.strategy = @miror", "3: unknown configurable 'miror'. Did you mean 'mirrored'?"),
  ("run.actions = [@Best(), @Bast()]", "3: unknown configurable 'Bast'. Did you mean 'Best'?"),
  ("q.x = 1", "3: unknown configurable 'q'. If it is yours, import its module: `import my_tasks`."),
  ("run.sed = 1", "3: run has no parameter 'sed'. Did you mean 'seed'?"),
  ("run:\n  seed = 1\n  sed = 2\n", "5: run has no parameter 'sed'. Did you mean 'seed'?"),
  ("auto.zzz = 1", "3: auto has no parameter 'zzz'. It must be one of cpu_replicas."),
  ("none.zzz = 1", "3: none has no parameter 'zzz'. It must be one of none."),
  ("run.model_dir = 'm'", "3: run.model_dir cannot be set in a config; use the flag --model_dir."),
  ("Trainer.task = @Digits()", "3: Trainer.task cannot be set in a config; set run.task."),
  ("run.seed = %sead\nseed = 3", "3: the macro %sead is not defined. Did you mean 'seed'?"),
  ("run.seed = %number", "3: the macro %number is not defined. Add a line `number = ...`."),
  ("run.seed = %a\na = %b\nb = %a", "3: the macro %a is defined by itself; it must have a value."),
  (
    "import mine\nauto.cpu_replicas = 2",
    f"4: 'auto' is ambiguous; it must be mine.auto or {SELF}.auto.",
  ),
  ("import tasks_of_mein", "3: no module named 'tasks_of_mein'. Did you mean 'tasks_of_mine'?"),
  ("import pack.digitz", "3: no module named 'pack.digitz'. Did you mean 'pack.digits'?"),
  ("Trainer.anything = @Late()", LATE.format("Late")),
  ("Trainer.anything = @my_late.Late()", LATE.format("my_late.Late")),
  (
    "import my_shy\nTrainer.anything = @Shy()",
    "4: unknown configurable 'Shy'. "
    "my_shy defines it but does not register it: add @loopwright.register above it.",
  ),
  ("run.seed = 1e4", "3: run.seed is 10000.0; it must be int. Write 10000."),
  ("run.seed = 1e999", "3: run.seed is inf; it must be finite. Use None for no limit."),
  ("n = 'x'\nrun.seed = %n", "4: run.seed is %n, or 'x'; it must be int."),
  ("seed = 3", "3: nothing uses the macro 'seed'. Did you mean 'run.seed'?"),
  ("zz = 3", "3: nothing uses the macro 'zz'. Write %zz where it belongs, or remove it."),
  (
    "constant.learning_rate = 0.1",
    f"3: nothing uses {SELF}.constant.learning_rate. Add a reference to it, "
    f"@{SELF}.constant, or remove it.",
  ),
]


@pytest.mark.parametrize(("text", "line"), LINES)
def test_a_mistake_is_one_line(text, line):
  for name, module in MODULES.items():
    write(name, module)
  assert mistake(GOOD + text) == f"x.gin:{line}"


TASK = "run.task = @Digits()"


@pytest.mark.parametrize(
  ("text", "line"),
  [
    (
      "run.train_steps = 5",
      "run.task is not set; it must be Task | Callable[[], Task]. "
      f"Add {checks.EXAMPLES['run.task']}.",
    ),
    (
      f"{TASK}\ntrain_steps = 5",
      "x.gin:2: nothing uses the macro 'train_steps'. Did you mean 'run.train_steps'?",
    ),
    (TASK, "run.train_steps is not set; it must be int. Add `run.train_steps = ...`."),
    (
      "run.task = @a/Folder()\nrun.train_steps = 5",
      "a/Folder.directory is not set; it must be str. Add `a/Folder.directory = ...`.",
    ),
  ],
)
def test_what_is_missing(text, line):
  assert mistake(text) == line


@pytest.mark.parametrize(
  ("param", "line"),
  [
    ("run.sed=3", "--gin_param 'run.sed=3': run has no parameter 'sed'. Did you mean 'seed'?"),
    ("run.seed='x'", "--gin_param \"run.seed='x'\": run.seed is 'x'; it must be int."),
  ],
)
def test_a_param_is_named_with_its_mistake(param, line):
  assert mistake(GOOD, param) == line


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("@Pair()", "@Pair() needs @Pair()"),
    ("[{'a': @dense()}]\ndense.units = @Pair()", "@dense() needs @Pair() needs @dense()"),
    ("@in/Pair()", "@in/Pair() needs @in/Pair()"),
    ("%again\nagain = @Pair()", "@again/Pair() needs @again/Pair()"),
  ],
)
def test_what_needs_itself(text, line):
  told = (
    f"x.gin:4: Pair.first is {text.partition(chr(10))[0]}, but {line}, without end; give one of "
  )
  told += "them a value that does not need it."
  assert mistake(f"{GOOD}Trainer.anything = @Pair()\nPair.first = {text}") == told


@pytest.mark.parametrize(
  "text", ["Pair.first = @in/Pair()\nin/Pair.first = 1", "Pair.first = @Pair"]
)
def test_what_only_seems_to_need_itself(text):
  parse(f"{GOOD}Trainer.anything = @Pair()\n{text}")
  assert isinstance(result()["trainer"].anything, Pair)


def test_a_double_star_parameter_takes_any_name():
  parse(GOOD + "Trainer.whatever = 3")
  assert result()["trainer"].options == {"whatever": 3}


CHILD = """
import loopwright.configurables as c
class Base:
  def __init__(self, *, width: int = 1, depth=2): self.got = width, depth
class Middle(Base):
  def __init__(self, *, height=3, **options):
    super().__init__(**options)
@c.register
class Child(Middle):
  def __init__(self, *, age=4, **options):
    super().__init__(**options)
@c.register
class Reader(Base):
  def __init__(self, **options):
    super().__init__(width=options.pop("breadth"))
"""


def test_a_name_for_a_base_class_is_checked():
  write("family.py", CHILD)
  text = f"{GOOD}import family\nTrainer.anything = @Child()\n"
  assert (
    mistake(f"{text}Child.widht = 3") == "x.gin:5: Child has no parameter 'widht'. "
    "Did you mean 'width'?"
  )
  assert "Child.width is '3'; it must be int" in mistake(f"{text}Child.width = '3'")
  parse(f"{text}Child.width = 3\nChild.height = 1\nChild.age = 5")
  assert result()["trainer"].anything.got == (3, 2)


def test_a_class_that_reads_its_double_star_parameter_takes_any_name():
  write("family.py", CHILD)
  parse(f"{GOOD}import family\nTrainer.anything = @Reader()\nReader.breadth = 7")
  assert result()["trainer"].anything.got == (7, 2)


def test_a_name_that_gin_has_too_is_ours():
  parse(
    GOOD + "run.optimizer = @Sgd\nTrainer.anything = @constant()\nconstant.learning_rate = 0.25"
  )
  assert result()["trainer"].anything(0) == 0.25


# Hostile text.


@pytest.mark.parametrize(
  "text",
  [
    "run.rates = " + "[" * 300 + "]" * 300,
    "run.rates = " + "[" * 9000,
    "run.seed = " + "9" * 5000,
    "run.seed = 1\0",
    "\0",
    "x = '''",
    "run.seed = \\",
    "\f\v\r\x1a\u2028 = 3",
    "Trainer.anything = @gin.macro()",
    "include 'x.gin\0'",
    "include '" + "a" * 5000 + "'",
    "run.seed = 3\n  run.seed = 4\n run.seed = 5",
  ],
)
def test_text_that_python_itself_cannot_read_is_one_line(text):
  assert len(mistake(GOOD + text)) < 12_000


@pytest.mark.parametrize("param", ["", "\0", "\ud800", "x", "=", "run.seed", "(" * 9])
def test_params_that_are_no_bindings(param):
  write("x.gin", GOOD)
  examination = configurables.examine(["x.gin"], [param])
  assert len(examination.mistakes) == (param != "")


def test_files_that_are_no_text():
  write("x.gin", GOOD + "include 'y.gin'\n")
  Path("y.gin").write_bytes(b"\x1f\x8b\xff")
  with pytest.raises(ConfigError, match=r"^y.gin is not text; a gin file must be UTF-8.$"):
    configurables.parse(["x.gin"])


def test_line_ends_of_any_system():
  good = GOOD.replace("\n", "\r\n").encode()
  Path("x.gin").write_bytes(good + b"run.seed = 4\rrun.eager = 1\r\n")
  with pytest.raises(ConfigError, match=r"^x\.gin:4: run\.eager is 1; it must be bool"):
    configurables.parse(["x.gin"])


# Values.


OPTIMIZERS = "Callable[[], Optimizer] | Mapping[str, Callable[[], Optimizer]]"
LATER = ", without parentheses: the framework calls it later."


@pytest.mark.parametrize(
  ("binding", "must"),
  [
    ("run.seed = 'many'", "int."),
    ("run.seed = '7'", "int. Write 7, without quotes."),
    ("run.seed = 10000.0", "int. Write 10000."),
    ("run.seed = True", "int."),
    ("run.seed = None", "int."),
    ("run.seed = [1]", "int."),
    ("run.seed = @Digits()", "int."),
    ("run.eager = 1", "bool."),
    ("Trainer.clip_norm = True", "float | None."),
    ("Trainer.clip_norm = '0.5'", "float | None. Write 0.5, without quotes."),
    ("run.image_size = 28", "tuple[int, int]."),
    ("run.image_size = (28,)", "tuple[int, int]."),
    ("run.image_size = [1, 2.5]", "tuple[int, int]."),
    ("run.rates = 0.1", "Sequence[float]. Write [0.1]."),
    ("run.names = 'a'", "Sequence[str]. Write ['a']."),
    ("run.names = {'a': 1}", "Sequence[str]."),
    ("run.gpu_memory = 'half'", "one of 'all', 'grow', or a number of MiB."),
    ("run.wire = 'float8'", "one of 'float16', or None. Did you mean 'float16'?"),
    ("run.strategy = 'mirrored'", "Callable[[], Strategy]."),
    ("run.strategy = @Sgd", "Callable[[], Strategy]."),
    ("run.strategy = @mirrored()", f"Callable[[], Strategy]. Write @mirrored{LATER}"),
    ("run.optimizer = @Sgd()", f"{OPTIMIZERS}. Write @Sgd{LATER}"),
    ("run.optimizer = {'a': @g/Sgd()}", f"{OPTIMIZERS}. Write {{'a': @g/Sgd}}{LATER}"),
    ("run.actions = [@Best]", "Sequence[Action]. Write [@Best()], with parentheses."),
    ("run.actions = @Best()", "Sequence[Action]. Write [@Best()]."),
    ("run.actions = [@Digits()]", "Sequence[Action]."),
    ("dense.units = 3\nTrainer.network = @dense()",
     f"Callable[..., Model] | None. Write @dense{LATER}"),
    ("run.strategy = @mirrored\nmirrored.cross_device_ops = 'ncl'",
     "one of 'nccl', 'collective', or None. Did you mean 'nccl'?"),
  ],
)  # fmt: skip
def test_a_value_of_the_wrong_type(binding, must):
  *before, last = binding.split("\n")
  name, _, value = last.partition(" = ")
  told = f"x.gin:{3 + len(before)}: {name} is {value}; it must be {must}"
  assert mistake(GOOD + binding) == told


@pytest.mark.parametrize(
  "text",
  [
    "run.seed = 3",
    "Trainer.clip_norm = 1",
    "Trainer.clip_norm = None",
    "Trainer.anything = {'a': [1, @Digits()]}",
    "run.image_size = [32, 32]",
    "run.rates = (1, 0.5)",
    "run.names = ['a', 'b']",
    "run.names = ()",
    "run.actions = (@Best(), @Best())",
    "run.optimizer = {'a': @Sgd, 'b': @g/Sgd}",
    "n = 7\nrun.seed = %n",
    "one = @Best()\nrun.actions = [%one]",
    "make = @Sgd\nrun.optimizer = %make",
    "Trainer.scale = @dynamic",
    "Trainer.network = @dense",
    "Trainer.hook = @Best()",
    "Trainer.gain = @two()",
    "Trainer.limit = None",
    # And something uses it.
    "auto.cpu_replicas = 2",
    "Sgd.learning_rate = 0.1",
    "Trainer.clip_norm = 1.0",
    "run.optimizer = {'a': @a/b/Sgd}\na/Sgd.learning_rate = 0.1\nSgd.nesterov = True",
    "Trainer.anything = [{'x': @Folder()}]\nFolder.directory = %where\nwhere = 'd'",
    "Trainer.anything = @outer/gin.singleton()\nouter/gin.singleton.constructor = @Best",
  ],
)
def test_a_sound_config(text):
  parse(GOOD + text)
  result()


def test_annotations_that_are_strings():
  write(
    "my_strings.py",
    """
    from __future__ import annotations
    import loopwright.configurables as c
    @c.register
    def known(n: int = 1, m: list[str] = ()): return n
    @c.register
    def unknown(n: int = 1, m: NotThere = ()): return n
    """,
  )
  text = GOOD + "import my_strings\nTrainer.anything = [@known(), @unknown()]\n"
  assert mistake(text + "known.n = 'x'") == "x.gin:5: known.n is 'x'; it must be int."
  assert mistake(text + "known.m = 'x'") == (
    "x.gin:5: known.m is 'x'; it must be list[str]. Write ['x']."
  )
  parse(text + "unknown.n = 'x'")


@pytest.mark.parametrize(
  ("value", "annotation", "fits"),
  [
    (1, "an unresolved annotation", True),
    (1, inspect.Parameter.empty, True),
    (1, object, True),
    (1, int | str, True),
    (1.5, int | str, False),
    ("a", Literal["a", "b"], True),
    (True, Literal[1], False),
    ({"a": 1}, dict[str, int], True),
    ({"a": "b"}, Mapping[str, int], False),
    ({}, int, False),
    ((1, 2, 3), tuple[int, ...], True),
    ((1, "a"), tuple[int, ...], False),
    ([1], list, True),
    ([1], str, False),
    (None, None, True),
    (0, None, False),
    (b"a", Sequence[int], False),
  ],
)
def test_fits(value, annotation, fits):
  assert values.fits(value, annotation) is fits


# What is missing, contradicts or is of no use.


def test_a_factory_may_get_the_rest_from_its_caller():
  parse("run.task = @Folder\nrun.train_steps = 5")


def test_required_in_a_base_file():
  write("base.gin", GOOD + "run.seed = %gin.REQUIRED\n")
  assert (
    mistake("include 'base.gin'")
    == "base.gin:3: run.seed is %gin.REQUIRED; a later line or --gin_param must set it."
  )
  parse("include 'base.gin'", "run.seed = 1")


def test_a_parameter_bound_twice_in_a_file():
  assert mistake(GOOD + "run.seed = 1\nrun.rates = [1]\nrun.seed = 2") == (
    "x.gin:5: run.seed is 2, but 1 at x.gin:3. Remove one of the two lines."
  )
  parse(GOOD + "run.seed = 1\nrun.seed = 1")


def test_a_value_is_read_as_gin_would_make_it():
  parse("run.task = @Folder()\nFolder.directory = 'here'\nrun.train_steps = 5\n")
  assert configurables.bound("run", "task", None).directory == "here"
  assert configurables.bound("run", "seed", 3) == 3
  parse("run.task = @Folder()\nFolder.directory = 'missing'\nrun.train_steps = 5\n")
  with pytest.raises(ConfigError, match="'missing', where there is nothing"):
    configurables.bound("run", "task", None)


def test_a_later_file_and_a_flag_override():
  write("base.gin", GOOD + "run.seed = 1\n")
  write("more.gin", "run.train_steps = 7\n")
  write("x.gin", "include 'base.gin'\nrun.seed = 2\n")
  configurables.parse(["x.gin", "more.gin"], ["run.seed = 3", "run.seed = 4"])
  assert gin.query_parameter("run.seed") == 4
  assert result()["train_steps"] == 7


@pytest.mark.parametrize(
  ("binding", "needed"),
  [
    ("mirrored.cross_device_ops = 'nccl'", "run.strategy = @mirrored"),
    ("dynamic.growth_steps = 1", "Trainer.scale = @dynamic"),
    ("Best.metric = 'loss'", "run.actions = [@Best()]"),
    ("Folder.directory = 'd'", "run.task = @Folder()"),
    ("g/Sgd.learning_rate = 0.1", "run.optimizer = @g/Sgd"),
    ("run.strategy = @mirrored\nauto.cpu_replicas = 2", "run.strategy = @auto"),
    ("run.optimizer = {'a': @a/Sgd}\nb/Sgd.learning_rate = 0.1", "run.optimizer = @b/Sgd"),
  ],
)
def test_a_binding_that_nothing_uses(binding, needed):
  *before, last = binding.split("\n")
  told = (
    f"x.gin:{3 + len(before)}: nothing uses {last.partition(' = ')[0]}. Add `{needed}`, or remove"
  )
  assert mistake(GOOD + binding) == f"{told} it."


def test_scopes_reach_what_is_called_in_them():
  parse(
    GOOD
    + """
Trainer.anything = [@outer/Pair(), %best]
Pair.first = @Best()
outer/Best.metric = 'a'
best = @Best()
best/Best.metric = 'b'
"""
  )
  pair, best = result()["trainer"].anything
  assert (pair.first.metric, best.metric) == ("a", "b")


def test_an_override_may_leave_bindings_of_what_it_replaced():
  text = "run.strategy = @mirrored\nmirrored.cross_device_ops = 'nccl'\n"
  parse(GOOD + text, "run.strategy = @auto")
  assert "mirrored" not in configurables.operative_config()
  assert "nothing uses mirrored.cross_device_ops" in mistake(
    GOOD + "run.strategy = @mirrored",
    "run.strategy = @auto",
    "mirrored.cross_device_ops = 'nccl'",
  )


def test_what_gin_configures_in_place_counts_as_used():
  write(
    "mine.py",
    """
    import gin
    @gin.configurable
    def width(n: int = 1): return n
    @gin.configurable
    class Deep:
      def __init__(self, n: int = 1): self.n = n
    """,
  )
  parse(GOOD + "import mine\nwidth.n = 4\nany/Deep.n = 5\nDeep.n = 6")
  assert sys.modules["mine"].width() == 4
  assert sys.modules["mine"].Deep().n == 6
  assert "run.seed" not in mistake(GOOD + "import mine\nwidth.n = 'x'")


# Reading.


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("run.seed 3", "cannot read 'run.seed 3': couldn't parse statement, expected ':' or '='."),
    ("run.seed = 1 2", "cannot read 'run.seed = 1 2': expected newline."),
    ("run.seed=", "cannot read 'run.seed=': unable to parse value."),
    ("run.rates = [1,", "cannot read 'run.rates = [1,': a bracket or a quote is never closed."),
    ("run.eager = true", "'true' is not a value. Write True."),
    ("run.seed = fifty", "'fifty' is not a value. It must be int."),
    ("run.names = CartPole-v1", "'CartPole-v1' is not a value. Quote a string ('CartPole-v1')."),
    ("run.compile_cache = /a/b", "'/a/b' is not a value. Quote a path ('/a/b')."),
    (
      "run.names = [mixed]",
      "'mixed' is not a value. "
      "Quote a string ('mixed'); write @mixed for a configurable, %mixed for a macro.",
    ),
    ("include 3", "cannot read 'include 3': expected file path as string."),
    (
      "from __gin__ import dynamic_registration",
      "__gin__.dynamic_registration is not supported. "
      "Import modules; they register their own names.",
    ),
  ],
)
def test_a_line_that_gin_cannot_read(text, line):
  assert mistake(GOOD + text).lower() == f"x.gin:3: {line}".lower()
  if text.startswith("run."):
    shown = repr(text).replace("\\'", "'")
    more = " In a shell, quote the whole binding too." if "Quote" in line else ""
    assert mistake(GOOD, text).lower() == f"--gin_param {shown}: {line}{more}".lower()


def test_a_missing_file():
  write("configs/digits.gin", GOOD)
  with pytest.raises(ConfigError) as caught:
    configurables.parse(["configs/digit.gin"])
  assert str(caught.value) == (
    f"there is no gin file 'configs/digit.gin' in configs or {imports.REPOSITORY}/configs. "
    "Did you mean 'digits.gin'?"
  )


def test_includes_are_looked_for_beside_the_file_then_here_then_in_the_repository():
  write("configs/sub/x.gin", "include 'beside.gin'\ninclude 'here.gin'\ninclude 'shipped.gin'\n")
  write("configs/sub/beside.gin", "run.task = @Digits()\n")
  write("beside.gin", "run.task = 3\n")
  write("here.gin", "run.train_steps = 3\n")
  write("repository/here.gin", "run.train_steps = 4\n")
  write("repository/shipped.gin", "run.seed = 3\n")
  configurables.parse(["configs/sub/x.gin"])
  assert (gin.query_parameter("run.train_steps"), gin.query_parameter("run.seed")) == (3, 3)
  write("configs/sub/beside.gin", "run.task = 'x'\n")
  with pytest.raises(ConfigError, match=r"^configs/sub/beside\.gin:1: run\.task is 'x'; "):
    configurables.parse(["configs/sub/x.gin"])


def test_a_missing_include():
  assert mistake(GOOD + "include 'bse.gin'").startswith(
    "x.gin:3: there is no gin file 'bse.gin' in"
  )
  write("repository/configs/shipped.gin", "")
  assert mistake(GOOD + "include 'shipped.gin'").endswith(
    ". Did you mean 'configs/shipped.gin', which comes with Loopwright?"
  )


def test_a_file_that_includes_itself():
  write("a.gin", "include 'x.gin'\n")
  assert mistake("include 'a.gin'") == (
    "a.gin:1: x.gin includes a.gin includes x.gin; a file must not include itself. "
    "Remove one of the includes."
  )


def test_includes_without_end():
  for number in range(1100):
    write(f"{number}.gin", f"include '{number + 1}.gin'\n")
  assert mistake("include '0.gin'") == (
    "98.gin:1: 99.gin is included 100 deep; end the chain, or join files."
  )


# Modules of the user's own.


def test_a_module_here_or_beside_the_gin_file():
  write("here_mine.py", MINE.format("Mine"))
  write("far/beside_mine.py", MINE.format("Other"))
  text = "import here_mine\nimport beside_mine\n"
  text += "Trainer.anything = [@Mine(), @beside_mine.Other()]\nMine.x = 3\n"
  write("far/x.gin", GOOD + text)
  configurables.parse(["far/x.gin"])
  mine, other = result()["trainer"].anything
  assert (mine.x, other.x) == (3, 1)


def test_direct_calls_of_a_registered_class_stay_as_they_are():
  write("my_direct.py", MINE.format("Mine"))
  parse(GOOD + "import my_direct\nTrainer.anything = @Mine()\nMine.x = 3")
  plain = sys.modules["my_direct"].Mine
  assert plain().x == 1
  assert configurables.configured(plain)().x == 3
  assert type(result()["trainer"].anything) is plain


@pytest.mark.parametrize(
  ("source", "line"),
  [
    ("import os\n1 / 0\n", "{}:2 with ZeroDivisionError: division by zero"),
    ("import not_there\n", "{}:1 with ModuleNotFoundError: No module named 'not_there'"),
    ("x = (\n", "{}:1 with SyntaxError: '(' was never closed ({name}, line 1)"),
  ],
)
def test_a_module_that_raises(source, line, tmp_path):
  write("my_broken.py", source)
  where = line.format(tmp_path / "my_broken.py", name="my_broken.py")
  assert mistake(GOOD + "import my_broken") == f"x.gin:3: import my_broken failed at {where}"


def test_a_second_definition_replaces_the_first():
  for x in (1, 2):
    made = type("Again", (), {"__module__": "notebook", "__init__": lambda self, x=x: None, "x": x})
    assert configurables.register(made) is made
  parse(GOOD + "Trainer.anything = @Again()")
  assert result()["trainer"].anything.x == 2


# The table.


def test_a_name_that_the_module_lacks(monkeypatch):
  monkeypatch.setattr(table, "listed", lambda: {"x.run": Entry("run", __name__, "nothing_such")})
  with pytest.raises(AttributeError, match="nothing_such"):
    configurables.register_all()


@pytest.mark.parametrize(("owned", "imported"), [(True, False), (False, False), (True, True)])
def test_the_search_for_garbage_rests_while_a_command_imports_tensorflow(
  owned, imported, monkeypatch
):
  monkeypatch.setattr(signals, "owns_process", owned)
  loaded = {"tensorflow": sys} if imported else {}
  monkeypatch.setattr(imports, "sys", types.SimpleNamespace(modules=loaded))
  rests = owned and not imported
  gc.unfreeze()
  try:
    with contextlib.suppress(ImportError), imports.uncollected():
      assert gc.isenabled() is not rests
      raise ImportError
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) is rests
  finally:
    gc.enable()
    gc.unfreeze()


def test_register_all_twice_keeps_what_is_registered():
  configurables.register_all()
  before = {name: entry.wrapper for name, entry in table.registry().items()}
  configurables.register_all()
  assert before == {name: entry.wrapper for name, entry in table.registry().items()}


def test_the_optimizers_of_both_kerases(monkeypatch):
  monkeypatch.setattr(table, "OPTIMIZER_PACKAGES", ("keras", "tf_keras"))
  configurables.register_all()
  known = {name for name, _ in table.registry().items() if "keras." in name}
  assert {"keras.Adam", "tf_keras.Adam", "keras.SGD", "keras.Lion", "tf_keras.AdamW"} <= known
  assert not {name for name in known if name.endswith(("Optimizer", "legacy"))}
  import keras
  import tf_keras

  text = "Trainer.anything = {'a': @keras.Adam, 'b': @s/tf_keras.Adam}\n"
  text += "keras.Adam.learning_rate = 0.125\ns/tf_keras.Adam.learning_rate = 0.5"
  parse(GOOD + text)
  made = {name: make() for name, make in result()["trainer"].anything.items()}
  assert type(made["a"]) is keras.optimizers.Adam
  assert type(made["b"]) is tf_keras.optimizers.Adam
  assert float(made["a"].learning_rate) == 0.125
  assert float(made["b"].learning_rate) == 0.5
  assert (
    mistake(GOOD + "run.optimizer = @Adam")
    == "x.gin:3: 'Adam' is ambiguous; it must be keras.Adam or tf_keras.Adam."
  )
  assert mistake(GOOD + "Trainer.anything = @keras.Adam\nkeras.Adam.lr = 1.0").startswith(
    "x.gin:4: keras.Adam has no parameter 'lr'."
  )
  assert (
    mistake(GOOD + "Trainer.anything = @tf_keras.Adam\ntf_keras.Adam.learnig_rate = 1.0")
    == "x.gin:4: tf_keras.Adam has no parameter 'learnig_rate'. Did you mean 'learning_rate'?"
  )


@pytest.mark.parametrize(
  ("schedule", "rate"),
  [
    ("keras.optimizers.schedules.CosineDecay", 0.25),
    ("tf_keras.optimizers.schedules.ExponentialDecay", 0.5 * 0.1**0.5),
  ],
)
def test_the_schedules_of_both_kerases(schedule, rate, monkeypatch):
  monkeypatch.setattr(table, "OPTIMIZER_PACKAGES", ("keras", "tf_keras"))
  configurables.register_all()
  import tensorflow as tf

  from loopwright.optimizers.schedule import bind

  library = schedule.partition(".")[0]
  text = f"Trainer.anything = @{library}.SGD\n{library}.SGD.learning_rate = @{schedule}()\n"
  text += f"{schedule}.initial_learning_rate = 0.5\n{schedule}.decay_steps = 8\n"
  parse(GOOD + text + (f"{schedule}.decay_rate = 0.1\n" if "Exponential" in schedule else ""))
  optimizer = result()["trainer"].anything()
  bind(optimizer, tf.Variable(4, dtype=tf.int64))
  assert float(optimizer._learning_rate(0)) == pytest.approx(rate, rel=1e-6)
  wrong = f"{schedule}.decay = 8"
  assert mistake(GOOD + text + wrong).startswith(f"x.gin:7: {schedule} has no parameter 'decay'.")


def test_gin_still_has_the_private_parts_that_the_table_reads():
  configurables.register_all()
  entry = table.registry().get_match("auto")
  assert entry.wrapped is auto
  assert {"wrapper", "wrapped", "allowlist", "denylist", "selector", "is_method"} <= {
    *entry._fields
  }


def test_configured_leaves_the_unregistered_alone():
  assert configurables.configured(Task) is Task


def test_a_gin_constant_is_a_value(monkeypatch):
  monkeypatch.setattr(gin.config, "_CONSTANTS", gin.config._CONSTANTS.copy())
  gin.constant("toys.SEVEN", 7)
  gin.constant("toys.WORD", "x")
  parse(GOOD + "run.seed = %SEVEN\nTrainer.anything = %toys.WORD")
  assert result()["trainer"].anything == "x"
  assert "run.seed = %toys.SEVEN\n" in configurables.operative_config()
  assert mistake(GOOD + "run.seed = %WORD") == "x.gin:3: run.seed is %WORD, or 'x'; it must be int."


def test_bindings_reach_what_is_called():
  parse(
    GOOD
    + """
run.optimizer = {'g': @g/Sgd, 'd': @d/Sgd}
Sgd.nesterov = True
g/Sgd.learning_rate = 0.25
d/Sgd.learning_rate = %rate
rate = 0.5
auto.cpu_replicas = 2
Trainer.scale = @dynamic
dynamic.growth_steps = 7
Digits.width = 3
run.actions = [@Best(), @loss/Best()]
loss/Best.metric = 'loss'
"""
  )
  got = result()
  assert got["strategy"].cpu_replicas == 2
  assert {n: (o.learning_rate, o.nesterov) for n, o in got["optimizers"].items()} == {
    "g": (0.25, True),
    "d": (0.5, True),
  }
  assert got["trainer"].scale.growth_steps == 7
  assert got["trainer"].task.width == 3
  assert [action.metric for action in got["actions"]] == ["accuracy", "loss"]


def test_a_second_config_leaves_nothing_of_the_first():
  parse(GOOD + "run.seed = 3\nrun.strategy = @mirrored")
  parse(GOOD)
  text = configurables.operative_config()
  assert "run.seed = 0\n" in text
  assert "mirrored" not in text


# The operative config.

RICH = """
import my_rich
include 'base.gin'
run.seed = 3
run.image_size = (32, 48)
run.rates = [1e-05, 0.1, -2.5]
run.names = ['it\\'s', "two words", 'back\\\\slash', 'a very long string of more than eighty '
             'characters, so that gin would break it over lines']
run.optimizer = {'g': @g/Sgd, 'd': @d/e/Sgd}
g/Sgd.learning_rate = %rate
d/Sgd.learning_rate = 2e-4
d/e/Sgd.name = 'd'
rate = 0.25
run.actions = [@Best(), @loss/Best()]
loss/Best.metric = 'loss'
Trainer.anything = {'a': [None, True, (1,)], 'b': @Rich(), 'c': %box}
box = @Rich
"""


@pytest.fixture
def rich():
  write("base.gin", GOOD + "run.seed = 1\nrun.strategy = @mirrored\n")
  write("my_rich.py", MINE.format("Rich"))
  parse(RICH, "run.strategy = @auto")


def used():
  """Returns everything that reached the toys, as text."""
  got = result()
  trainer = vars(got.pop("trainer"))
  trainer["task"] = vars(trainer["task"])
  trainer["anything"] = {**trainer["anything"], "b": vars(trainer["anything"]["b"])}
  trainer["scale"] = type(trainer["scale"])
  got["strategy"] = vars(got["strategy"])
  got["optimizers"] = {name: vars(each) for name, each in got["optimizers"].items()}
  got["actions"] = [vars(each) for each in got["actions"]]
  return re.sub(r" at 0x\w+", "", repr([trainer, got]))


def test_the_operative_config_reads_back_as_the_same_config(rich):
  text, before = configurables.operative_config(), used()
  write("operative.gin", text)
  configurables.parse(["operative.gin"])
  assert configurables.operative_config() == text
  assert used() == before


def test_the_operative_config_has_defaults_of_what_is_yet_to_be_called(rich):
  lines = configurables.operative_config().splitlines()
  assert {
    "import my_rich",
    "rate = 0.25",
    "run.seed = 3",
    "run.eager = False",
    "run.strategy = @auto",
    "auto.cpu_replicas = 1",
    "Trainer.scale = @none",
    "Trainer.clip_norm = None",
    "Trainer.limit = None",
    "Digits.width = 128",
    "Digits.path = None",
    "Sgd.nesterov = False",
    "Best.metric = 'accuracy'",
    "Rich.x = 1",
    "run.image_size = (32, 48)",
  } <= {*lines}
  assert not [
    line for line in lines if line.startswith(("run.model_dir", "Sgd.learning", "Trainer.marker"))
  ]


def test_the_operative_config_of_a_run_without_gin():
  assert configurables.operative_config() == "# Nothing was configured by gin.\n"


def test_the_whole_table_is_there(monkeypatch):
  pytest.importorskip("loopwright.inputs")
  monkeypatch.undo()
  configurables.register_all()
  for name in registry.names(*registry.CONFIGURABLE):
    assert table.entry(table.find(name)).wrapped.__name__ == name
  imported, used = re.findall(r"`(.*?)`", checks.EXAMPLES["run.task"])
  importlib.import_module(imported.split()[1])
  table.find(used.partition("@")[2].removesuffix("()"))


def test_a_gin_file_with_a_byte_order_mark(tmp_path):
  write("x.gin", "\ufeff" + textwrap.dedent(GOOD))
  configurables.parse(["x.gin"])
  assert result()


@pytest.mark.parametrize(
  ("make", "kind"), [(os.mkdir, "a folder"), (os.mkfifo, "a pipe")], ids=["folder", "pipe"]
)
def test_a_gin_file_that_is_no_file(make, kind):
  """A pipe, as of `<(...)`, can be read once, and each process of a run reads the config."""
  make("y.gin")
  with pytest.raises(ConfigError) as caught:
    configurables.parse(["y.gin"])
  assert str(caught.value) == f"'y.gin' is {kind}, not a file; give the path of a gin file."


def test_very_many_bindings():
  """None takes time that grows with the number of the others."""
  lines = [f"m{i} = {i}" for i in range(3000)]
  write("x.gin", "\n".join([GOOD, *lines]))
  began = time.monotonic()
  mistakes = configurables.examine(["x.gin"]).mistakes
  assert time.monotonic() - began < 20
  assert len(mistakes) == 101
  assert "nothing uses the macro 'm0'" in str(mistakes[0].error)
  assert str(mistakes[-1].error).endswith(": nothing uses this and 2,899 more.")
