"""Tasks of people who do not know the framework: each mistake is explained, what is right passes.

To be quick, a group's checks run in part: `on_two` compares one replica with two, in single steps.
"""

import keras
import pytest
from defects import newcomers
from defects.small import accused, failures, line_of, subject

from loopwright.tools import verify
from loopwright.tools.verify.bench.comparison import Comparison
from loopwright.tools.verify.checks import (
  compilation,
  evaluation,
  gradients,
  inputs,
  learning,
  order,
  own_optimizer,
  padding,
  randomness,
  replicas,
  restore,
)


def on_two(subject):
  compared = Comparison(subject, rows=subject.divisible_rows)
  found = list(padding.on_one(compared))
  if found[0].status == "failed":
    return found
  return [*found, *replicas.same_update(compared, 2)]


def skipped(subject):
  compared = Comparison(subject, rows=subject.divisible_rows)
  return [own_optimizer.run(compared, {}).overflow]


CHECKS = {
  "replicas": on_two,
  "overflow": skipped,
  "evaluation": evaluation.check,
  "inputs": inputs.check,
  "order": order.check,
  "gradients": gradients.check,
  "randomness": randomness.check,
  "restore": restore.check,
  "compilation": compilation.check,
  "learning": learning.check,
}
MIXED, STATE = "examples that depend on one another", "state fed from local rows only"
CLIPPED, DROPOUT = "clipped before the reduction", "other dropout in the backward pass"
PYTHON, RAISED = "Python value that changes", "exception in the task"
REFUSED, STATEFUL = "refused by the framework", "stateful random op"
LOCAL_WEIGHT = "divided by the weight of one replica"
DEFECTS = {
  "IgnoresWeights": ("replicas", "weights are ignored", "from_examples"),
  "HalfWeights": ("replicas", "weights are ignored", "Loss("),
  "LossOfKeras": ("replicas", "padding counts", "Loss(squares"),
  "MaskedMean": ("replicas", "mean of means", "divide_no_nan"),
  "MaskedMeanOfRows": ("replicas", "loss divided by a local count", "divide_no_nan"),
  "MeanOfPenalties": ("replicas", "padding counts", "reduce_mean"),
  "RootOfMean": ("replicas", MIXED, "Loss.from_examples"),
  "FlatShift": ("replicas", "rows run into one another", "x[1:]"),
  "WrongPlaces": ("replicas", MIXED, "replica_id()"),
  "ByTheClock": ("replicas", "a loss by the clock", "tf.timestamp"),
  "ByTheClockOfPython": ("replicas", PYTHON, "time.perf_counter"),
  "FollowsItself": ("order", "average of what never changes", "step.assign"),
  "FollowsFrozen": ("order", "average of what never changes", "step.assign"),
  "LeavesOutStatistics": ("gradients", "average that leaves out variables", "step.assign"),
  "DividedByReplicas": ("replicas", "loss scaled by the number of replicas", "num_replicas"),
  "Broadcast": ("replicas evaluation", MIXED, "reduce_mean"),
  "Accumulated": ("replicas", "batch-norm statistics", "def build_model"),
  "OneOfThree": ("replicas order", "never reduced", "step.apply"),
  "ClippedByHand": ("replicas order", CLIPPED, "step.all_reduce"),
  "NoiseOnGradients": ("order", "an update that differs between replicas", "step.apply"),
  "DividedByOwnWeight": ("replicas order overflow", LOCAL_WEIGHT, "step.unscale"),
  "LocalCondition": ("order", "a condition that differs between replicas", "when="),
  "LocalQueue": ("replicas order", STATE, "step.assign"),
  "LocalAverage": ("replicas order", STATE, "step.assign"),
  "LocalCentre": ("replicas", STATE, "step.assign"),
  "PlainAssign": ("overflow", "state changed by a skipped step", '["average"].assign'),
  "MovesInSkipped": ("overflow", "state changed by a skipped step", "slow.assign"),
  "NoisyTeacher": ("gradients", "training mode of what is never trained", '"teacher"](batch'),
  "PythonCounter": ("replicas compilation", PYTHON, "self.steps +="),
  "TrainedTeacher": ("gradients", "variable without gradient", "tf.stop_gradient"),
  "Recomputed": ("randomness", DROPOUT, "recompute_grad"),
  "Mixup": ("randomness", STATEFUL, "tf.random.shuffle"),
}
"""Name -> groups, the only cause in each of them, and words of the line."""
RAISING = {
  "Branch": (REFUSED, "step.update", "when=step.number % 2 == 0"),
  "NumberInPython": (RAISED, "step.number.numpy()", "AttributeError"),
  "MetricAsMean": (REFUSED, "def metrics", "weighted_sum(per_example, batch['weight'])"),
  "NumPyInPreprocess": (RAISED, "np.clip", "NotImplementedError"),
}
"""Name -> the cause, words of the line, and of the message."""
RIGHT = {
  "ActorCritic": "replicas order gradients randomness",
  "Contrast": "replicas learning",
  "GradientPenalty": "replicas gradients randomness",
  "CadenceInLoss": "replicas gradients learning",
  "SecondHead": "gradients",
  "Annealed": "gradients learning",
  "Curriculum": "randomness",
  "Smoothing": "inputs randomness",
  "ClassWeights": "replicas",
  "MaskedTokens": "replicas",
  "PenaltyOfEach": "replicas",
  "Teacher": "gradients randomness",
  "MeanTeacher": "overflow gradients",
  "Exploring": "replicas order",
  "Averages": "replicas order gradients",
  "Decays": "order gradients",
  "SometimesUpdated": "randomness",
  "FrozenAdapter": "gradients",
  "ReducedStatistics": "replicas order",
}
"""Name -> groups, in which nothing may fail."""
SEVERAL = {
  "ActorCritic": ("actor", "critic", "entropy"),
  "GradientPenalty": ("first", "second"),
  "FrozenAdapter": ("head", "adapter"),
}


def subject_of(name):
  task = getattr(newcomers, name)
  kinds = [kind.__name__ for kind in task.__mro__]
  names = next((SEVERAL[kind] for kind in kinds if kind in SEVERAL), None)
  optimizer = names and dict.fromkeys(names, keras.optimizers.Adam)
  return subject(task, optimizer=optimizer, **getattr(task, "options", {}))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(inputs, "READ_S", 0.1)


def method_of(place):
  return place.partition(", in ")[2]


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.fast(name=["LocalCondition"])
def test_a_mistake_is_explained(name):
  groups, cause, words = DEFECTS[name]
  found = {group: failures(CHECKS[group](subject_of(name))) for group in groups.split()}
  causes = {group: {each.cause for each in of} for group, of in found.items()}
  assert causes == {group: {cause} for group in groups.split()}
  where = method_of(line_of(getattr(newcomers, name), words))
  assert {method_of(each.place) for of in found.values() for each in of} == {where}
  assert all(each.remedy for of in found.values() for each in of)


@pytest.mark.parametrize("name", RAISING)
@pytest.mark.fast(name=["Branch"])
def test_an_exception_is_one_finding(name):
  cause, words, says = RAISING[name]
  report = verify.verify(subject_of(name), groups=("order", "gradients"))
  [found] = report.failures
  assert (found.cause, found.place) == (cause, line_of(getattr(newcomers, name), words))
  assert says in found.detail
  assert report.results[-1].detail == "stops at the error that 'order' reports"


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.fast(name=["SecondHead"])
def test_a_right_task(name):
  results = [r for group in RIGHT[name].split() for r in CHECKS[group](subject_of(name))]
  assert accused(results) == []
  assert sum(each.status == "passed" for each in results) >= 3
  assert {each.status for each in results if each.check == "weights count"} <= {"passed"}


@pytest.mark.whole
def test_what_only_training_has_is_named():
  task = newcomers.StepInEvaluation
  found = failures([r for r in randomness.check(subject(task)) if "augmentation" in r.check])
  assert [(each.check, each.cause) for each in found] == [
    ("no augmentation in evaluation", "augmentation in evaluation")
  ]
  assert "reads batch['step']" in found[0].detail
  assert found[0].place == line_of(task, 'batch["step"]')
