"""What a config can bind, read from source files: importing the modules would take seconds."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from framework.configurables import reading
from framework.configurables.imports import REPOSITORY
from framework.configurables.table import GIVEN, OPTIMIZER_PACKAGES, TABLE
from framework.errors import ConfigError, is_the_frameworks

Definition = ast.ClassDef | ast.FunctionDef


def names(gin_files: Sequence[str] = ()) -> Iterator[str]:
  """Yields "run.seed" and all others that gin files can bind (host).

  These are the framework's options, those of registered names in the files' modules, in what these
  import and in *.py here, and what the files bind themselves, with scopes and macros. A file that
  cannot be read adds nothing.

  Args:
    gin_files: paths, searched as `configurables.parse` does.
  """
  defined: dict[str, Definition] = {}
  for module, _ in TABLE:
    defined |= _definitions(_tree(_found(module, [REPOSITORY])))
  for _, listed in TABLE:
    yield from _parameters(listed.split(), defined)
  config, registered = _read(gin_files), []
  for tree in _trees(config):
    own = _definitions(tree)
    registered += [name for name, each in own.items() if _is_registered(each)]
    defined |= own
  yield from _parameters(registered, defined)
  yield from (str(binding) for binding in config.bindings)


def of_keras(prefix: str) -> Iterator[str]:
  """Yields "keras.Adam.epsilon" and all others of the Keras package that a prefix begins with."""
  for package in OPTIMIZER_PACKAGES:
    spec = importlib.util.find_spec(package) if prefix.startswith(f"{package}.") else None
    if spec and spec.origin:
      folder = Path(spec.origin).parent / "src" / "optimizers"
      for file in folder.glob("*.py"):  # adamw.py defines AdamW
        yield from _of_classes(file, f"{package}.", file.stem.replace("_", ""))
      schedules = folder / "schedules" / "learning_rate_schedule.py"
      yield from _of_classes(schedules, f"{package}.optimizers.schedules.", "")


def _of_classes(file: Path, place: str, wanted: str) -> Iterator[str]:
  for name, each in _definitions(_tree(file)).items():
    is_base = name.endswith("Optimizer") or not getattr(each, "bases", ())
    if name.lower().endswith(wanted) and not is_base:
      yield from (f"{place}{name}.{parameter}" for parameter in _arguments(each, {}))


def _read(gin_files: Sequence[str]) -> reading.Config:
  config = reading.Config([], [], [])
  for file in gin_files:
    with contextlib.suppress(ConfigError):
      part = reading.read([file], [])
      config = reading.Config(
        config.files + part.files, config.imports + part.imports, config.bindings + part.bindings
      )
  return config


def _trees(config: reading.Config) -> Iterator[ast.Module]:
  """Yields the modules of a config, what they import, and those of this folder, each once."""
  folders = [Path(), *(Path(file).parent for file in config.files), REPOSITORY]
  waiting = [*Path().glob("*.py")]
  waiting += [_found(statement.module, folders) for _, statement in config.imports]
  seen = set()
  while waiting:
    file = waiting.pop()
    if file not in seen and not is_the_frameworks(str(file.absolute())):
      seen.add(file)
      tree = _tree(file)
      waiting += _imported(file, tree, folders)
      yield tree


def _found(module: str, folders: Iterable[Path]) -> Path:
  """Returns the file of a module in one of the folders, or a file that does not exist."""
  path = module.replace(".", "/")
  files = [folder / end for folder in folders for end in (f"{path}.py", f"{path}/__init__.py")]
  return next((file for file in files if file.is_file()), files[0])


def _imported(file: Path, tree: ast.Module, folders: Sequence[Path]) -> Iterator[Path]:
  for node in tree.body:
    if isinstance(node, ast.Import):
      yield from (_found(each.name, folders) for each in node.names)
    elif isinstance(node, ast.ImportFrom):
      start = [node.module] if node.module else []
      places = [file.resolve().parents[node.level - 1]] if node.level else folders
      yield from (_found(".".join([*start, each.name]), places) for each in node.names)
      yield from (_found(module, places) for module in start)


def _tree(file: Path) -> ast.Module:
  with contextlib.suppress(OSError, SyntaxError, ValueError):
    return ast.parse(file.read_text(encoding="utf-8"))
  return ast.Module([], [])


def _definitions(tree: ast.Module) -> dict[str, Definition]:
  return {node.name: node for node in tree.body if isinstance(node, Definition)}


def _is_registered(node: Definition) -> bool:
  return any(re.search(r"\bregister\b", ast.unparse(each)) for each in node.decorator_list)


def _parameters(names: Iterable[str], defined: Mapping[str, Definition]) -> Iterator[str]:
  for name in names:
    for each in _arguments(defined[name], defined):
      if each not in GIVEN.get(name, ()):
        yield f"{name}.{each}"


def _arguments(node: Definition, defined: Mapping[str, Definition]) -> Iterator[str]:
  """Yields the arguments of a function, or those that make a class, with inherited ones."""
  if isinstance(node, ast.FunctionDef):
    yield from (each.arg for each in (*node.args.args, *node.args.kwonlyargs))
    return
  made_by = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
  for init in made_by:
    yield from itertools.islice(_arguments(init, defined), 1, None)
  if not made_by or made_by[0].args.kwarg:
    above = {name: each for name, each in defined.items() if name != node.name}
    for base in node.bases:
      if (name := ast.unparse(base).rpartition(".")[2]) in above:
        yield from _arguments(above[name], above)
