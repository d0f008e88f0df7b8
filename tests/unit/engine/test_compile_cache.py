"""What XLA has compiled is kept for the next process, if only this user can have written it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import tensorflow as tf

from loopwright.engine import compile_cache, examination
from loopwright.graphs import xla
from loopwright.runs import runner

PROGRAM = """
import json, resource, sys
from loopwright.engine import compile_cache
cache = compile_cache.opened(sys.argv[1], {})
sys.path[:0] = sys.argv[3:]
import test_on_gpus
before = len(cache._known)
for _ in range(before):
  test_on_gpus.tf.function(lambda: test_on_gpus.tf.constant(1))()  # as a restore does
for path in cache._work.iterdir() if sys.argv[2] == "damaged" else ():  # after it was found whole
  path.unlink()
  path.write_bytes(b"?")
if sys.argv[2] == "full":
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, 2**10))
trainer = test_on_gpus.trained(test_on_gpus.AsOnOneGpu("CPU:0"))
cache.keep()
weights = [each.tolist() for each in test_on_gpus.weights(trainer)]
print(json.dumps([before, len(cache._known), trainer.compiled, weights]))
"""
NAME, CONTENT = "xla_compile_cache__1__2__XLA_GPU_JIT.pb", b"machine code"


@pytest.fixture
def process(tmp_path, monkeypatch):
  """Opens the cache as a new process does; returns it, or None, and TensorFlow's folder."""

  def opened(settings=()):
    monkeypatch.setenv("TF_XLA_FLAGS", "")
    compile_cache._work.cache_clear()
    cache = compile_cache.opened(str(tmp_path / "cache"), dict(settings))
    return cache, cache and cache._work

  return opened


@pytest.fixture
def kept(process):
  """A program that one process has kept: its file."""
  cache, work = process()
  (work / NAME).write_bytes(CONTENT)
  cache.loop_ends(1, {}, 1)
  [file] = cache._store.iterdir()
  return file


def test_the_next_process_has_the_program(kept, process):
  cache, work = process()
  assert (work / NAME).read_bytes() == CONTENT
  assert f"--tf_xla_persistent_cache_directory={work}" in os.environ["TF_XLA_FLAGS"]
  assert kept.stat().st_mode & 0o777 == 0o600
  cache.keep()
  assert [*cache._store.iterdir()] == [kept]


def test_of_a_program_that_several_have_kept_one_is_left(kept, process):
  content = b"the same"
  kept.with_name(f"{compile_cache._digest(content)}-{NAME}").write_bytes(content)
  cache, work = process()
  assert (work / NAME).read_bytes() in (CONTENT, content)
  assert len([*cache._store.iterdir()]) == 1


@pytest.mark.parametrize("change", ["version", "setting", "flag"])
def test_what_a_program_depends_on_is_in_its_key(change, kept, process, monkeypatch):
  monkeypatch.setattr(tf, "__version__", "0" if change == "version" else tf.__version__)
  if change == "flag":
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
  cache, work = process({"tf32": False} if change == "setting" else {})
  assert (cache._store != kept.parent, [*work.iterdir()]) == (True, [])


def linked(file):
  file.rename(file.parents[1] / "elsewhere")
  file.symlink_to(file.parents[1] / "elsewhere")


@pytest.mark.parametrize(
  "spoil",
  [
    lambda file: file.write_bytes(CONTENT[:5]),
    lambda file: file.write_bytes(CONTENT[:-1] + b"\0"),
    lambda file: file.chmod(0o622),
    linked,
  ],
)
def test_a_program_that_is_damaged_or_may_be_anothers_is_not_used(spoil, kept, process):
  spoil(kept)
  cache, work = process()
  assert [*work.iterdir()] == [*cache._store.iterdir()] == []


def test_a_folder_of_another_user_or_that_cannot_be_used_is_one_line(
  kept, process, monkeypatch, caplog
):
  folder = kept.parents[1]
  for says, change in {
    "other users may write to": lambda: folder.chmod(0o777),
    "belongs to another user": lambda: monkeypatch.setattr(os, "getuid", lambda: 1_000_000),
    "fewer than 256 MiB are free": lambda: monkeypatch.setattr(
      shutil, "disk_usage", lambda path: SimpleNamespace(free=2**27)
    ),
    "File exists": lambda: (shutil.rmtree(folder), folder.touch()),
  }.items():
    with monkeypatch.context():
      change()
      assert process() == (None, None)
    monkeypatch.undo()
    assert says in caplog.records[-1].getMessage()
    assert os.environ.get("TF_XLA_FLAGS", "") == ""
    folder.chmod(0o700)


def test_the_oldest_programs_go(kept, process, monkeypatch):
  monkeypatch.setattr(compile_cache, "MOST_BYTES", 2 * len(CONTENT))
  os.utime(kept, (0, 0))
  cache, work = process({"tf32": True})
  for name in ("a.pb", "b.pb"):
    (work / name).write_bytes(CONTENT)
  cache.keep()
  assert not kept.exists()
  assert len([*cache._store.iterdir()]) == 2


def test_only_folders_of_processes_that_are_gone_go(kept, process):
  folder = kept.parents[1]
  own = next(folder.glob("work-*"))
  gone = folder / own.name.replace(f"-{os.getpid()}-", "-999999999-")
  gone.mkdir()
  process()
  assert (own.exists(), gone.exists()) == (True, False)


def ran(cache, spoiled=""):
  """Trains in a process of its own: programs before and after, what XLA compiles, the weights."""
  unit = Path(__file__).parents[1]
  folders = [str(unit / "distribution"), str(unit.parent / "support"), str(unit.parents[1])]
  command = [sys.executable, "-c", PROGRAM, str(cache), spoiled, *folders]
  done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
  """A cache with the program of a first process, and what that returned."""
  folder = tmp_path_factory.mktemp("cache")
  return folder, ran(folder)


@pytest.mark.ci
def test_a_second_process_compiles_nothing(first):
  """And the first one a single program for all steps, with a schedule, dropout and padding."""
  folder, [before, after, compiled, weights] = first
  assert (before, after, compiled) == (0, 1, "the step as one program")
  assert ran(folder) == [1, 1, compiled, weights]


@pytest.mark.whole
@pytest.mark.parametrize("spoiled", ["damaged", "full"])
def test_no_run_fails_as_its_programs_cannot_be_read_or_written(first, spoiled, tmp_path):
  """Where no file can be written at all it runs without XLA, so with other masks of dropout."""
  folder, [*_, compiled, weights] = first
  *_, found, same = ran(folder if spoiled == "damaged" else tmp_path, spoiled)
  assert found == (compiled if spoiled == "damaged" else "")
  assert (same == weights) == (spoiled == "damaged")


@pytest.mark.parametrize("by_itself", [True, False])
@pytest.mark.parametrize("compiled", [f"the step {xla.AS_ONE}", "the forward and backward pass"])
def test_a_step_of_several_programs_begins_without_kept_ones(compiled, by_itself, kept, process):
  """Unless the user asks for them: half a step may have run when one cannot be read."""
  cache, work = process()
  cache.by_itself = by_itself
  trainer = SimpleNamespace(
    compiled=compiled, parts=SimpleNamespace(jit_compile="auto"), global_step=tf.constant(0)
  )
  examination.or_without_xla(trainer, lambda: None)
  given_up = by_itself and compiled != f"the step {xla.AS_ONE}"
  assert ([*work.iterdir()] == [], work.is_symlink()) == (given_up, given_up)
  cache.loop_ends(1, {}, 1)
  assert kept.exists()


@pytest.mark.parametrize(
  ("asked", "visible", "kept"),
  [("auto", "0", True), ("auto", "0,1", False), ("auto", "-1", False), ("x", "-1", True)],
)
def test_by_itself_only_programs_of_one_gpu_are_kept(asked, visible, kept, monkeypatch):
  """There a step that is one program can be run again, if a program cannot be read or written."""
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
  monkeypatch.setattr(compile_cache, "opened", lambda *given: given)
  given = SimpleNamespace(compile_cache=asked, gpus=None, part=lambda kind: kind())
  assert runner._compile_cache(given, training=True) == ([(asked, ANY)] if kept else [])
