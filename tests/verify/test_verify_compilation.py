"""What a compiled loop does not run as it is written, and what XLA does not compile."""

import pytest
import sound
from defects import compilation as defects
from defects import restore as state
from defects.small import explained, place

from loopwright.tools.verify.checks import compilation


def by_check(subject):
  results = compilation.check(subject)
  assert [r.check for r in results] == list(compilation._ALL)
  assert {r.group for r in results} == {"compilation"}
  return {r.check: r for r in results}


def failed(results):
  return {check: r.cause for check, r in results.items() if r.status == "failed"}


CHANGES = "Python value that changes"
# check, cause, in the detail, line
DEFECTS = {
  "Alternating": (
    compilation.SAME_TRACE, CHANGES, "Alternating.steps", "self.steps += 1"),
  "Decaying": (
    compilation.SAME_TRACE, CHANGES, "Decaying.options", '"strength"] *='),
  "Counted": (compilation.SAME_TRACE, CHANGES, "Counted.calls", "self.calls += 1"),
  "Drawn": (
    compilation.SAME_TRACE, "random numbers of NumPy or Python", "Const", "np.random"),
  "Clocked": (compilation.SAME_TRACE, CHANGES, "another Const", "time.perf_counter"),
  "Averaged": (
    compilation.SAME_TRACE, "tensor kept in Python", "Averaged.average", "self.average ="),
  "InNumpy": (
    compilation.NO_HOST, "Python in the loop", "PyFunc at", "tf.numpy_function"),
  "Printing": (compilation.NO_HOST, "printing in the loop", "PrintV2 at", "tf.print"),
  "Summaries": (
    compilation.NO_HOST, "summaries in the loop", "WriteSummary at", "tf.summary.s"),
  "Files": (compilation.NO_HOST, "files in the loop", "ReadFile at", "tf.io.read_file"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.fast(name=list(DEFECTS)[:3])
def test_a_defect(name, monkeypatch):
  monkeypatch.setattr(compilation, "xla_clean", lambda subject: sound_xla())
  check, cause, told, text = DEFECTS[name]
  kind = getattr(defects, name)
  results = by_check(sound.subject(kind))
  explained(results.values(), kind, {check: cause}, told, text)


def sound_xla():
  return compilation.Result(group="compilation", check=compilation.XLA_CLEAN, status="passed")


def test_variables_that_the_step_makes(monkeypatch):
  monkeypatch.setattr(compilation, "xla_clean", lambda subject: sound_xla())
  results = by_check(sound.subject(state.Late))
  assert failed(results) == {compilation.TRACED_ONCE: "variables created in the step"}
  assert "2 traces; the step made" in results[compilation.TRACED_ONCE].detail
  assert results[compilation.TRACED_ONCE].place.endswith("in Late.build_model")


XLA = {"Strings": ("AsString", "tf.strings.as_string"), "InNumpy": ("PyFunc", "tf.numpy_function")}


@pytest.mark.parametrize("name", XLA)
@pytest.mark.fast(name=list(XLA)[:1])
def test_what_xla_does_not_compile_is_named(name):
  op, text = XLA[name]
  kind = getattr(defects, name)
  where = place(kind, text)
  asked = compilation.xla_clean(sound.subject(kind, options={"jit_compile": True}))
  assert (asked.status, asked.cause) == ("failed", "operations without an XLA kernel")
  assert f"{op} ({where})" in asked.detail
  assert asked.place == where
  if name == "Strings":
    assert "StringToHashBucketFast (" in asked.detail
  unasked = compilation.xla_clean(sound.subject(kind))
  assert unasked.status == "not applicable"
  assert unasked.detail == (f"Trainer.jit_compile is not set; would not compile: {asked.detail}")


def test_another_result_under_xla():
  subject = sound.subject(defects.Negative, options={"jit_compile": True})
  result = compilation.xla_clean(subject)
  assert (result.status, result.cause) == ("failed", "different result under XLA")
  assert result.place == place(defects.Negative, "[-3, -5]")


def test_shapes_that_depend_on_values_are_told():
  result = compilation.xla_clean(sound.subject(defects.Selecting))
  assert result.status == "passed"
  where = place(defects.Selecting, "boolean_mask")
  assert f"with shapes that depend on values: Where ({where})" in result.detail


def test_random_numbers_with_a_state_cannot_be_compared():
  result = compilation.xla_clean(sound.subject(defects.Unseeded, options={"jit_compile": True}))
  assert result.status == "not applicable"
  assert "follow no seed" in result.detail


@pytest.mark.parametrize("name", sound.SUBJECTS)
@pytest.mark.fast(name=["regression"])
def test_a_right_task(name):
  results = by_check(sound.SUBJECTS[name]())
  assert {r.status for r in results.values()} == {"passed"}, results
  assert results[compilation.XLA_CLEAN].values["difference"] < 1e-4


def test_nothing_is_compiled_eagerly():
  results = by_check(sound.subject(sound.Regression, options={"eager": True}))
  assert {r.status for r in results.values()} == {"not applicable"}
