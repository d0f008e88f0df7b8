"""What a compiled loop does not run as it is written, and what XLA does not compile."""

import dataclasses

import pytest
import sound
from defects import compilation as defects
from defects import restore as state
from defects.small import explained, failures, place

from loopwright.tools.verify.checks import compilation

ONCE, SAME, HOST = compilation.TRACED_ONCE, compilation.SAME_TRACE, compilation.NO_HOST
CHANGES, DREW = "Python value that changes", "random numbers of NumPy or Python"
# check, cause, in the detail, line
DEFECTS = {
  "Alternating": (SAME, CHANGES, "Alternating.steps", "tf.abs(error)"),
  "Counted": (SAME, CHANGES, "Counted.calls", "return x / (calls + 1)"),
  "Drawn": (SAME, DREW, "Const", 'batch["x"] + noise'),
  "Clocked": (SAME, CHANGES, "something changes", "time.perf_counter"),
  "Averaged": (SAME, "tensor kept in Python", "Averaged.average", "self.average ="),
  "InNumpy": (HOST, "Python in the loop", "PyFunc at", "tf.numpy_function"),
  "Printing": (HOST, "printing in the loop", "PrintV2 at", "tf.print"),
  "Summaries": (HOST, "summaries in the loop", "WriteSummary at", "tf.summary.s"),
  "Files": (HOST, "files in the loop", "ReadFile at", "tf.io.read_file"),
  "Late": (ONCE, "variables created in the step", "the step made", "def build_model"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.fast(name=["Alternating", "Counted"])
def test_a_defect(name):
  check, cause, told, text = DEFECTS[name]
  kind = state.Late if name == "Late" else getattr(defects, name)
  results = compilation.check(sound.subject(kind))
  assert [(r.group, r.check) for r in results] == [
    ("compilation", name) for name in compilation.ALL
  ]
  explained(results, kind, {check: cause}, told, text)


def xla(kind):
  return compilation.xla_clean(sound.subject(kind, options={"jit_compile": True}))


XLA = {"Strings": ("AsString", "tf.strings.as_string"), "InNumpy": ("PyFunc", "tf.numpy_function")}


@pytest.mark.parametrize("name", XLA)
@pytest.mark.fast(name=["Strings"])
def test_what_xla_does_not_compile_is_named(name):
  op, text = XLA[name]
  result, where = xla(getattr(defects, name)), place(getattr(defects, name), text)
  assert (result.status, result.cause) == ("failed", "operations without an XLA kernel")
  assert f"{op} ({where})" in result.detail
  assert result.place == where
  assert ("StringToHashBucketFast (" in result.detail) == (name == "Strings")


def test_another_result_under_xla():
  result = xla(defects.Negative)
  assert (result.status, result.cause) == ("failed", "different result under XLA")
  assert result.place == place(defects.Negative, "def forward")


@pytest.mark.parametrize(
  ("kind", "status", "says"),
  [
    (defects.Selecting, "passed", "forward and backward compile"),
    (defects.Unseeded, "not applicable", "follow no seed"),
  ],
)
def test_what_xla_may_do(kind, status, says):
  result = xla(kind)
  assert result.status == status
  assert says in result.detail


@pytest.mark.parametrize("name", sound.SUBJECTS)
@pytest.mark.fast(name=["regression"])
def test_a_right_task(name):
  subject = dataclasses.replace(sound.SUBJECTS[name](), options={"jit_compile": True})
  results = compilation.check(subject)
  assert {r.status for r in results} == {"passed"}, results
  assert results[-1].values["difference"] < 1e-4


@pytest.mark.parametrize(("eager", "skipped"), [(True, 4), (False, 1)])
def test_what_is_not_compiled_is_not_checked(eager, skipped):
  results = compilation.check(sound.subject(sound.Regression, options={"eager": eager}))
  assert [r.status for r in results].count("not applicable") == skipped
  assert failures(results) == []
