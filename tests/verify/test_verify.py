"""--mode=verify: planted defects are found and explained, right tasks pass, the table tells it."""

import ast
import dataclasses
import functools
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from defects import gradients as bad_gradients
from defects import kinds, small
from defects import learning as bad_learning
from defects import order as bad_order
from defects import replicas as bad_replicas
from defects.small import accused, failures

import launch
from loopwright.tools import verify
from loopwright.tools.verify import report
from loopwright.tools.verify.bench import recorded_step
from loopwright.tools.verify.checks import gradients, learning, order, replicas


def checked(group, defects, name):
  """The results of a group for a planted task, after a look at what must be found in it."""
  task, (check, cause, method) = getattr(defects, name), defects.DEFECTS[name]
  results = group.check(small.subject(task, **getattr(task, "options", {})))
  result = small.found(results, check)
  assert (result.status, result.cause) == ("failed", cause)
  assert result.remedy
  method = method if "." in method or not method else f"{name}.{method}"
  assert result.place.endswith(f"in {method}" if method else "")
  return results


@pytest.mark.parametrize("name", bad_replicas.DEFECTS)
@pytest.mark.fast(name=["MeanOfMeans"])
def test_a_defect_of_replicas_is_explained(name):
  results = checked(replicas, bad_replicas, name)
  assert {r.cause for r in failures(results)} == {bad_replicas.DEFECTS[name][1]}


@pytest.mark.parametrize("name", bad_order.DEFECTS)
def test_a_step_out_of_order_is_shown(name):
  checked(order, bad_order, name)


@pytest.mark.parametrize("name", ["Surgery", "Projected", "DividesItself", "ClipsSums"])
def test_an_update_that_is_right_is_out_of_no_order(name):
  results = order.check(small.subject(getattr(bad_order, name)))
  assert small.found(results, bad_order.PIPELINE).status == "passed"


@pytest.mark.parametrize("name", bad_gradients.DEFECTS)
def test_a_defect_of_gradients_is_explained(name):
  assert len(failures(checked(gradients, bad_gradients, name))) == 1


@pytest.mark.parametrize("name", bad_learning.DEFECTS)
def test_what_cannot_learn_is_shown(name):
  assert len(failures(checked(learning, bad_learning, name))) == 1


@pytest.mark.parametrize(
  "name", ["Classes", "Clipped", "SameInputs", "Bound", "TwiceSoftmax", "Blind"]
)
@pytest.mark.fast(name=["Classes"])
def test_how_far_a_loss_falls_is_a_note(name):
  results = learning.check(small.subject(getattr(bad_learning, name)))
  assert accused(results) == []
  told = small.found(results, "learns one batch by heart").detail
  assert "if this loss has no floor, look for a loss with the wrong sign" in told


@pytest.mark.parametrize("name", ["Differences", "Critic"])
def test_a_gradient_that_cancels_is_a_note(name):
  results = gradients.check(small.subject(getattr(bad_gradients, name)))
  assert accused(results) == []
  assert "bias cancels" in small.found(results, "no gradient is zero").detail


@pytest.mark.parametrize(
  ("task", "decay", "causes"),
  [
    ("Frozen", 0.1, ["frozen variable that moves"]), ("Frozen", 0.0, []),
    ("FrozenAtFirst", 0.1, []),
  ],
)  # fmt: skip
def test_what_is_frozen_by_zeros_must_not_decay(task, decay, causes):
  adam = functools.partial(keras.optimizers.AdamW, weight_decay=decay)
  found = failures(gradients.check(small.subject(getattr(bad_gradients, task), optimizer=adam)))
  assert [result.cause for result in found] == causes
  where = small.place(small.Written, "step.apply")
  assert [result.place for result in found] == [where] * len(causes)


def test_a_learning_rate_that_is_too_high_is_named():
  subject = small.subject(small.Small, optimizer=lambda: keras.optimizers.SGD(3.0))
  [result] = failures(learning.check(subject))
  assert (result.check, result.cause) == ("own optimizer", "learning rate too high")


def test_a_loss_that_grows_is_a_note():
  note = learning._own_optimizer([0.1, *[0.2] * 18, 9.0])
  assert note.status == "passed"
  assert "0.1 > 9 in 20 steps; if a loss must not grow here, lower the" in note.detail


OPTIMIZERS = {
  "TwoOptimizers": {
    "first": keras.optimizers.Adam, "second": functools.partial(keras.optimizers.SGD, 0.01),
  },
}  # fmt: skip


@pytest.mark.parametrize("task", kinds.RIGHT, ids=lambda task: task.__name__)
@pytest.mark.fast(task=[small.Small])
def test_a_right_task(task):
  subject = small.subject(task, optimizer=OPTIMIZERS.get(task.__name__))
  found = verify.verify(subject, groups=("replicas", "order", "gradients", "learning"))
  assert [(r.check, r.detail) for r in found.failures] == []
  assert sum(r.status == "passed" for r in found.results) >= 9


IN_FLOAT64 = "agree within 0.1% in float64 in 4 variables"


@pytest.mark.parametrize(
  ("task", "precision", "says"),
  [
    (small.Small, "float32", IN_FLOAT64),
    (bad_gradients.CastByHand, "float32", IN_FLOAT64),
    (bad_gradients.CastByHand, "mixed_float16", IN_FLOAT64),
    (bad_gradients.Swish, "float32", IN_FLOAT64),
    (bad_gradients.OfFloat32, "float32", "agree within 10% in float32 in 4 variables"),
  ],
)
@pytest.mark.fast(task=[small.Small])
def test_finite_differences_are_in_float64_if_the_task_can(task, precision, says):
  subject = dataclasses.replace(small.subject(task), precision=precision)
  results = verify.verify(subject, groups=("gradients",)).results
  result = small.found(results, "finite differences")
  assert (result.status, result.detail) == ("passed", says)
  assert keras.config.dtype_policy().name == precision


def test_gradients_that_are_stopped_on_purpose_are_no_failure():
  results = gradients.check(small.subject(bad_gradients.StopsOnPurpose))
  assert small.found(results, "finite differences").status == "not applicable"
  assert accused(results) == []


@pytest.mark.parametrize("name", ["DecaysOnce", "Embedded"])
def test_a_penalty_may_be_shown_and_a_gradient_sparse(name):
  results = gradients.check(small.subject(getattr(bad_gradients, name)))
  assert accused(results) == []
  assert small.found(results, "finite differences").status == "passed"


@pytest.mark.whole
def test_options_of_the_trainer_are_part_of_what_is_compared():
  subject = small.subject(small.Small, accumulation_steps=2, clip_value=0.01, ema_decay=0.9)
  assert failures(replicas.check(subject)) == []
  pipeline = small.found(order.check(subject), bad_order.PIPELINE).detail
  assert "clip (0.01)" in pipeline


@pytest.mark.whole
def test_an_overflow_may_skip_one_update_of_two():
  result = small.found(replicas.check(small.subject(kinds.Shares)), "overflow on one replica")
  assert result.status == "passed"
  assert result.detail.startswith("the step is the same on every replica")


def test_the_pipeline_counts_communication():
  """4 + 3 * 4 weights, 4 + 1 biases, loss and weight: one buffer."""
  results = order.check(small.subject(small.Small))
  numbers = 3 * 4 + 4 + 4 + 1
  assert (
    f"1 communication of {4 * (numbers + 2)} bytes"
    in small.found(results, bad_order.PIPELINE).detail
  )
  assert f"{numbers} numbers" in small.found(results, "communication").detail


class Raises(small.Small):
  def loss(self, outputs, batch):
    raise KeyError("labels")


class CallsADict(small.Small):
  """TensorFlow wraps a dict that it tracks."""

  def build_model(self):
    return {"network": super().build_model()}

  def forward(self, batch, training):
    return self.model(batch["x"])


@pytest.mark.parametrize(
  ("task", "told"), [(Raises, "labels"), (CallsADict, "'dict' object is not callable")]
)
def test_what_a_task_raises_is_a_finding(task, told):
  [result] = verify.verify(small.subject(task), groups=("order",)).results
  assert result.status == "failed"
  assert told in result.detail
  assert f"in {task.__name__}." in result.place


def test_assignments_in_a_row_are_one_of_the_pipeline():
  calls = [recorded_step.Call("assign", name) for name in ("target/a", "target/b", "target/c")]
  told = order.in_order(
    [recorded_step.Call("apply"), *calls, recorded_step.Call("clip"), *calls[:1]]
  )
  assert told == "apply > assign (target/a and 2 more) > clip > assign (target/a)"


def test_numpy_warns_of_no_number(monkeypatch, recwarn):
  def group(subject):
    return [report.Result(group="g", check="c", status="passed", detail=f"{np.ones(1) / 0.0}")]

  monkeypatch.setitem(verify._OWN, "g", group)
  assert verify.verify(small.subject(small.Small), groups=("g",)).results[0].detail == "[inf]"
  assert not [each for each in recwarn if each.category is RuntimeWarning]


class Accepts(bad_replicas.LocalBatchNorm):
  accepted = {"batch-norm statistics": "as in the paper"}


class AcceptsAnother(Accepts, bad_order.NeverReduced):
  pass


@pytest.mark.whole
def test_what_a_task_does_on_purpose_is_accepted():
  report = verify.verify(small.subject(Accepts), groups=("replicas",))
  result = small.found(report.results, bad_replicas.ON_TWO)
  assert (result.status, result.cause, result.place) == ("accepted", "", "")
  assert result.detail.endswith("; accepted: as in the paper")
  assert report.failures == []
  assert ", 2 accepted in " in report.count()  # on two and on three replicas


def test_another_failure_is_not_accepted():
  report = verify.verify(small.subject(AcceptsAnother), groups=("order",))
  assert [result.cause for result in report.failures] == ["never reduced"]


RESULTS = [
  report.Result(group="one", check="first", status="passed", detail="all 3"),
  report.Result(
    group="one", check="second", status="failed", detail="x differs", cause="mean of means",
    remedy="return sums", place="mine.py:3, in Mine.loss",
  ),
  *(
    report.Result(group="two", check=name, status="not applicable", detail="nothing random")
    for name in ("third", "fourth")
  ),
]  # fmt: skip


def test_the_table_says_what_failed_why_and_where():
  table = report.Report(RESULTS, seconds=61.2).table()
  assert [line.split() for line in table.splitlines()] == [
    ["one"],
    ["first", "ok", "all", "3"],
    ["second", "FAILED", "x", "differs"],
    ["likely", "cause:", "mean", "of", "means"],
    ["where:", "mine.py:3,", "in", "Mine.loss"],
    ["remedy:", "return", "sums"],
    [],
    ["not", "applicable"],
    ["two", "third,", "fourth:", "nothing", "random"],
    [],
    ["1", "passed,", "1", "failed,", "2", "not", "applicable", "in", "61", "s"],
  ]
  assert all(len(line) <= 100 for line in table.splitlines())


def test_the_shares_of_the_time_are_shown():
  made = report.Report(RESULTS, seconds=61.2)
  made.shares = {"one": 15.0, "two": 45.0}
  told = [line.split() for line in made.times().splitlines()]
  assert told == [["time"], ["two", "45.0", "s", "75%"], ["one", "15.0", "s", "25%"]]


def test_the_json_holds_every_result():
  told = json.loads(report.Report(RESULTS, seconds=1.0).json())
  assert (told["failed"], told["seconds"]) == (1, 1.0)
  assert [r["status"] for r in told["results"]] == [r.status for r in RESULTS]
  assert told["results"][1]["cause"] == "mean of means"


# ---- Side by side ----

ALONE = """
import os, sys
import tensorflow as tf
from loopwright.tools.verify import report, side_by_side

def run(group):
  if group in sys.argv[2:]:
    os.kill(os.getpid(), 9) if os.getpid() != here else None
  return [report.Result(group=group, check=str(os.getpid() == here), status="passed")]

here = os.getpid()
if sys.argv[1] == "used":
  tf.constant(1)
begin = lambda: float(tf.constant(2))
side_by_side._cores = lambda: 2
done = side_by_side.ran(["a", "order", "c", "replicas"], run, begin, most=2)
print([(each.group, each.results[0].check) for each in done])
"""


@pytest.mark.parametrize(
  ("arguments", "here"),
  [(["clean"], []), (["used"], ["a", "order", "c", "replicas"]), (["clean", "c"], ["c"])],
)
@pytest.mark.ci
def test_groups_run_in_forks_unless_the_process_has_used_tensorflow(arguments, here):
  """Each comes in order; what a fork that is killed has left runs in the process itself."""
  done = subprocess.run(
    [sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, check=True
  )
  told = ast.literal_eval(done.stdout.splitlines()[-1])
  assert [group for group, _ in told] == ["a", "order", "c", "replicas"]
  assert {group for group, in_process in told if in_process == "True"} >= set(here)
  assert bool(here) or "True" not in dict(told).values()


# ---- From the command line ----

CONFIG = """
import defects.gin_tasks
run.task = @{task}()
run.optimizer = @keras.Adam
run.global_batch_size = 12
run.train_steps = 10
"""


def launched(tmp_path, task, *flags):
  """The exit status of `--mode=verify`, in this process."""
  config = tmp_path / "mine.gin"
  config.write_text(CONFIG.format(task=task))
  report = f"--json={tmp_path / 'verify.json'}"
  return launch.main(["launch", f"--gin_file={config}", "--mode=verify", report, *flags])


def written(tmp_path):
  return json.loads((tmp_path / "verify.json").read_text())


@pytest.mark.parametrize(("task", "status"), [("RightTask", 0), ("WrongTask", 1)])
def test_the_exit_status_is_0_only_if_nothing_failed(tmp_path, capsys, task, status):
  assert launched(tmp_path, task, "--only=order", "--time") == status
  assert written(tmp_path)["failed"] == status
  assert {result["group"] for result in written(tmp_path)["results"]} == {"order"}
  *_, time, share, _, count = capsys.readouterr().out.splitlines()
  assert (time, share.split()[0], share.split()[-1]) == ("time", "order", "100%")
  assert f"{status} failed" in count


def test_an_unknown_group_is_refused(tmp_path, capsys):
  assert launched(tmp_path, "RightTask", "--only=order,inptus") == 2
  assert "unknown group of checks 'inptus'; it must" in capsys.readouterr().err


def test_json_is_for_verify_alone(capsys):
  assert launch.main(["launch", "--gin_file=x.gin", "--json=a.json"]) == 2
  assert "is for --mode=verify, not train_and_evaluate" in capsys.readouterr().err
