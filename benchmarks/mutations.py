"""Small changes to a module's source, each of which a good test notices.

The changes are cosmic-ray's, one operator or number at a time, and one of our own: a statement left
out. What cannot matter is left alone: annotations, messages of errors and logs, `TYPE_CHECKING`
blocks, and the decorators in `KEPT_DECORATORS`. Of the many ways to replace an operator only those
stay that a person might write by mistake; `a << b` for `a + b` fails at once and proves nothing.
`strict=True` of `zip` stays too: it asserts what holds for every input.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import random
from collections.abc import Iterator, Sequence

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import (
  binary_operator_replacement,
  boolean_replacer,
  break_continue,
  comparison_operator_replacement,
  exception_replacer,
  number_replacer,
  operator,
  remove_decorator,
  unary_operator_replacement,
  zero_iteration_for_loop,
)

KEPT_DECORATORS = ("as_written", "functools.cache", "tf.custom_gradient", "overload")
"""Without `as_written` AutoGraph converts code that has nothing to convert: slower, the same
values. Without `cache` a value is computed again. Without `custom_gradient` nothing is callable."""
_BINARY = {
  "Add": ("Sub",),
  "Sub": ("Add",),
  "Mul": ("Div",),
  "Div": ("Mul",),
  "FloorDiv": ("Mul",),
  "Mod": ("FloorDiv",),
  "Pow": ("Mul",),
  "BitAnd": ("BitOr",),
  "BitOr": ("BitAnd",),
  "BitXor": ("BitOr",),
}
_COMPARISONS = {
  "Eq": ("NotEq",),
  "NotEq": ("Eq",),
  "Lt": ("LtE", "GtE"),
  "LtE": ("Lt", "Gt"),
  "Gt": ("GtE", "LtE"),
  "GtE": ("Gt", "Lt"),
  "Is": ("IsNot",),
  "IsNot": ("Is",),
}


class DeleteStatement(operator.Operator):
  """Puts `pass` in place of a call, an assignment to an attribute or item, or a `+=`."""

  def mutation_positions(self, node):
    if node.type == "simple_stmt" and self._is_deletable(node.children[0]):
      yield node.start_pos, node.end_pos

  def mutate(self, node, index):
    first = node.children[0]
    prefix = first.get_first_leaf().prefix
    node.children[0] = parso.python.tree.Name("pass", first.start_pos, prefix)
    return node

  @classmethod
  def examples(cls):
    return (operator.Example("f(x)\n", "pass\n"), operator.Example("a.b = 1\n", "pass\n"))

  @staticmethod
  def _is_deletable(statement):
    if statement.type == "expr_stmt":
      target, sign = statement.children[:2]
      plain = sign.type == "operator" and sign.value == "="
      return target.type in ("atom_expr", "power") if plain else sign.type != "annassign"
    return statement.type == "atom_expr" and statement.children[-1].children[0].value == "("


def _replacing(module, kind, pairs):
  names = [f"Replace{kind}Operator_{a}_{b}" for a, others in pairs.items() for b in others]
  return [getattr(module, name)() for name in names]


OPERATORS = [
  *_replacing(binary_operator_replacement, "Binary", _BINARY),
  *_replacing(comparison_operator_replacement, "Comparison", _COMPARISONS),
  unary_operator_replacement.ReplaceUnaryOperator_Delete_Not(),
  unary_operator_replacement.ReplaceUnaryOperator_Delete_USub(),
  unary_operator_replacement.ReplaceUnaryOperator_Delete_Invert(),
  boolean_replacer.AddNot(),
  boolean_replacer.ReplaceTrueWithFalse(),
  boolean_replacer.ReplaceFalseWithTrue(),
  boolean_replacer.ReplaceAndWithOr(),
  boolean_replacer.ReplaceOrWithAnd(),
  break_continue.ReplaceBreakWithContinue(),
  break_continue.ReplaceContinueWithBreak(),
  exception_replacer.ExceptionReplacer(),
  number_replacer.NumberReplacer(),
  remove_decorator.RemoveDecorator(),
  zero_iteration_for_loop.ZeroIterationForLoop(),
  DeleteStatement(),
]


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One changed source. `lines`: of the statement that changes, first and last."""

  file: str
  line: int
  operator: str
  before: str
  after: str
  lines: tuple[int, int]
  source: str = dataclasses.field(repr=False)

  @property
  def key(self) -> tuple[str, str, str]:
    """What stays the same when lines move."""
    return self.file, self.before, self.after


def sample(file: str, source: str, count: int, seed: int) -> list[Mutant]:
  """Returns up to `count` mutants of a file, the same for the same seed, by line.

  Every position is changed once before any is changed in a second way.
  """
  mutants: dict[str, Mutant] = {}
  for operation, occurrence, position in _drawn(source, f"{seed} {file}"):
    if len(mutants) == count:
      break
    try:
      changed = mutate_code(source, operation, occurrence)
    except AttributeError:  # ExceptionReplacer, of a name with dots
      continue
    if changed not in mutants and _differs(source, changed):
      name = type(operation).__name__
      mutants[changed] = _mutant(file, source, changed, position[0], name)
  return sorted(mutants.values(), key=lambda mutant: (mutant.line, mutant.after))


def _drawn(source: str, seed: str) -> Iterator[tuple[operator.Operator, int, tuple[int, int]]]:
  by_position: dict[tuple[int, int], list[tuple[operator.Operator, int]]] = {}
  skipped = list(_skipped(ast.parse(source)))
  nodes = list(ast_nodes(get_ast(source)))
  for operation in OPERATORS:
    found = ((n, p) for n in nodes for p, _ in operation.mutation_positions(n))
    for occurrence, (node, position) in enumerate(found):
      in_signature = node.parent is not None and node.parent.type == "parameters"  # its bare *
      if not in_signature and not any(first <= position < last for first, last in skipped):
        by_position.setdefault(position, []).append((operation, occurrence))
  draw = random.Random(seed)
  positions = sorted(by_position)
  draw.shuffle(positions)
  for ways in by_position.values():
    draw.shuffle(ways)
  for way in range(max(map(len, by_position.values()), default=0)):
    for position in positions:
      if way < len(by_position[position]):
        yield *by_position[position][way], position


def _differs(source: str, changed: str | None) -> bool:
  if changed is None:
    return False
  try:
    return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
  except SyntaxError:  # such as of the bare * in a signature
    return False


def _mutant(file: str, source: str, changed: str, line: int, name: str) -> Mutant:
  old, new = source.splitlines(), changed.splitlines()
  before, after = [], []
  for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
    if tag != "equal":
      before += old[i:j]
      after += new[k:m]
  span = _statement(ast.parse(source), line)
  return Mutant(file, line, name, _joined(before), _joined(after), span, changed)


def _joined(lines: Sequence[str]) -> str:
  return " ".join(line.strip() for line in lines)


def _statement(tree: ast.Module, line: int) -> tuple[int, int]:
  """Returns the lines of the innermost statement there; of a compound one, those of its head."""
  span = (line, line)
  for node in ast.walk(tree):
    if not isinstance(node, ast.stmt):
      continue
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    if first <= line <= last:
      span = (first, last)  # `walk` goes from outside inwards
  return span


def _skipped(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
  """Yields the (start, end) of what is left alone."""
  for node in itertools.chain.from_iterable(map(_without_meaning, ast.walk(tree))):
    yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
  for node in tree.body:  # what types and exports are called
    is_type = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
    exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    if is_type or exports:
      yield (node.lineno, 0), (node.end_lineno + 1, 0)


def _without_meaning(node: ast.AST) -> Iterator[ast.AST]:
  if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation:
    yield node.annotation
  if isinstance(node, ast.FunctionDef) and node.returns:
    yield node.returns
  if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
    for decorator in node.decorator_list:
      if ast.unparse(decorator).partition("(")[0] in KEPT_DECORATORS:
        yield _with_sign(decorator)
  if isinstance(node, ast.Raise):
    yield node
  if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
    yield node
  if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logging."):
    yield from node.args
  if isinstance(node, ast.keyword) and ast.unparse(node) == "strict=True":
    yield node.value


def _with_sign(decorator: ast.expr) -> ast.expr:
  """The decorator from its @ on."""
  decorator.col_offset -= 1
  return decorator
