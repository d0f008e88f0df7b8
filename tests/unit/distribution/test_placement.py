"""One class a kind of strategy; no other code asks which kind it is."""

import ast
import re
import types
from pathlib import Path

import pytest
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.evaluator import Evaluator
from loopwright.strategies import factories, local, mirrored, tpu
from loopwright.strategies.mesh.strategy import Mesh
from loopwright.strategies.parameter_server.strategy import ParameterServer
from loopwright.strategies.parameter_server.trainer import ParameterServerTrainer
from loopwright.strategies.workers.strategy import Workers
from loopwright.trainer import Trainer

ROOT = Path(__file__).resolve().parents[3]
KINDS = [
  placement.Placement,
  local.Default,
  local.OneDevice,
  mirrored.Mirrored,
  mirrored.CentralStorage,
  Workers,
  ParameterServer,
  Mesh,
  tpu.Tpu,
]


# ---- Which placement ----


def test_a_placement_is_made_once_and_ends_with_its_strategy(mirrored):
  strategy = mirrored(2)
  assert placement.of(strategy) is placement.of(strategy)
  assert placement.of(strategy) is not placement.of(mirrored(2))
  with strategy.scope():
    assert placement.here() is placement.of(strategy)


class Unknown(tf.distribute.Strategy):
  """Of a kind that nobody has registered."""

  def __init__(self):
    super().__init__(tf.distribute.OneDeviceStrategy("CPU:0").extended)


def test_an_unknown_kind_gets_answers_that_assume_little():
  assert type(placement.of(Unknown())) is placement.Placement
  assert not placement.of(Unknown()).loops_evaluation


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_classes_that_run_a_kind_exist(kind):
  assert issubclass(kind.trainer or Trainer, Trainer)
  assert issubclass(kind.evaluator or Evaluator, Evaluator)


def test_the_trainer_of_another_kind_is_refused(mirrored):
  line = r"^ParameterServerTrainer is for parameter_server, but the strategy is a MirroredStrategy"
  with pytest.raises(ConfigError, match=line):
    ParameterServerTrainer(strategy=mirrored(2))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("option", ["jit_compile", "shard_optimizer_state", "eager"])
def test_what_is_refused_is_told_in_one_line(option, kind):
  place = kind(types.SimpleNamespace(num_replicas_in_sync=2))
  place.require_options(**{option: False})
  if option not in place.refused:
    place.require_options(**{option: True})
    return
  with pytest.raises(ConfigError, match=rf"\Areceived [^\n]*{option}=True[^\n]*\.\Z"):
    place.require_options(**{option: True})


def test_within_its_own_scope_a_strategy_keeps_its_name():
  strategy = factories.one_device(device="CPU:0")
  with strategy.scope():
    assert placement.of(strategy).name == "OneDeviceStrategy"


# ---- Nobody else asks ----


def asked(source):
  """Yields each question of a file about the kind of a strategy."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Call):
      name = ast.unparse(node.func)
      about = " ".join(ast.unparse(argument) for argument in node.args)
      if name in ("isinstance", "issubclass") and re.search(r"[a-z]Strategy(V\d)?\b", about):
        yield ast.unparse(node)
      if re.fullmatch(r"is_\w+", name.rpartition(".")[2]) and "strategy" in about.lower():
        yield ast.unparse(node)
      if name == "type" and "strategy" in about.lower():
        yield ast.unparse(node)
    if isinstance(node, ast.Compare) and ast.unparse(node).endswith("get_strategy()"):
      yield ast.unparse(node)
    if isinstance(node, ast.ImportFrom | ast.Import):
      names = [each.name for each in node.names] + [getattr(node, "module", None) or ""]
      if any(re.search(r"\btraits\b|ModelParallelStrategy", each) for each in names):
        yield ast.unparse(node)


@pytest.mark.parametrize(
  "line",
  [
    "isinstance(trainer.strategy, tf.distribute.MirroredStrategy)",
    "issubclass(type(s), ParameterServerStrategyV2 | int)",
    "servers.is_asynchronous(strategy)",
    "from loopwright.strategies import traits",
    "from loopwright.strategies.mesh.variables import ModelParallelStrategy",
    "strategy is tf.distribute.get_strategy()",
    "type(strategy).__name__ == 'MirroredStrategy'",
  ],
)
def test_a_question_is_found(line):
  assert len(list(asked(line))) >= 1


def test_no_code_outside_the_strategies_asks_for_the_kind_of_a_strategy():
  found = {}
  for folder in ("framework", "tasks", "benchmarks"):
    for path in (ROOT / folder).rglob("*.py"):
      name = str(path.relative_to(ROOT))
      if not name.startswith(
        ("framework/loopwright/distribution/", "framework/loopwright/strategies/")
      ) and (lines := list(asked(path.read_text()))):
        found[name] = lines
  assert not found
