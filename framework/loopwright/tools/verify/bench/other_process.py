"""Whether another process makes the same examples: with another hash seed, folder and time.

A child process makes the task again, and the first batch of each split. This costs some seconds, so
it is asked only if the code of the task has something that may differ between processes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any
from unittest import mock

import keras

from loopwright import configurables
from loopwright.inputs.sources import main_source
from loopwright.task import Task
from loopwright.tools.verify.bench import source_lines
from loopwright.tools.verify.bench.bench import Subject

ROWS, DEEPEST, LIMIT_S = 16, 3, 120.0
HASHED, ELSEWHERE = "another PYTHONHASHSEED", "another working directory and time"
SUSPECTS = {
  HASHED: r"\bhash\(|\b(frozen)?set\(|\{[^:{}]+ for |\bid\(|getpid|uuid",
  ELSEWHERE: r"getcwd|abspath|os\.path\.exists|is_file\(|time\.time|datetime",
}
"""What another process makes differ -> a pattern of the code that may."""
REMEDIES = {
  HASHED: "sort what a set holds, and use zlib.crc32(text.encode()) in place of hash(text)",
  ELSEWHERE: "give the path of a file whole, in the config, and let nothing depend on the time",
}
_ANSWER = "made: "
_CHILD = f"""
from loopwright.host import lazy_keras
lazy_keras.install()  # else the import takes half as long again
from {__name__} import answer
answer()
"""
Made = dict[str, str]


def differs(subject: Subject, task: Task) -> tuple[str, str, str] | None:
  """Returns (feature, what makes it differ, line); None if none does, or it cannot be known."""
  code = list(_reached([*source_lines.nearest_methods(task).values()], DEEPEST))
  places = {why: source_lines.matching(code, pattern) for why, pattern in SUSPECTS.items()}
  if not any(places.values()):
    return None
  ours = made(subject)
  if made(subject) != ours or (theirs := _asked(subject, task)) is None:
    return None
  for why, other in theirs.items():
    if different := [name for name, digest in ours.items() if (other or ours).get(name) != digest]:
      return different[0], why, places[why] or next(filter(None, places.values()))
  return None


def _reached(functions: Sequence[Callable[..., Any]], depth: int) -> Iterator[Callable[..., Any]]:
  for function in functions:
    yield function
    known = inspect.unwrap(function).__globals__
    called = (known.get(name) for name in _names(inspect.unwrap(function).__code__))
    own = [f for f in called if inspect.isfunction(f) and source_lines.is_the_users(f)]
    yield from _reached(own, depth - 1) if depth else ()


def _names(code: CodeType) -> set[str]:
  inner = (each for each in code.co_consts if isinstance(each, CodeType))
  return {*code.co_names}.union(*map(_names, inner))


def made(subject: Subject) -> Made:
  """Returns split and feature -> a digest of the first batch (host)."""
  task = subject.fresh_task()
  rows = min(ROWS, main_source(task.source("train")).num_examples or ROWS)
  found = {}
  for split in ("train", "eval"):
    batch = subject.rows(task, rows, training=split == "train")
    for name, value in batch.items():
      content = repr(value.tolist()).encode() if value.dtype == object else value.tobytes()
      found[f"{split}/{name}"] = hashlib.blake2b(content, digest_size=16).hexdigest()
  return found


def _asked(subject: Subject, task: Task) -> dict[str, Made] | None:
  """Returns what a child process makes; None if it cannot make the task."""
  config = configurables.operative_config() if configurables.bindings() else ""
  kind = f"{type(task).__module__}:{type(task).__qualname__}"
  asked = {"config": config, "task": kind, "seed": subject.seed, "path": sys.path}
  seed = str(int(os.environ.get("PYTHONHASHSEED", "0").replace("random", "0")) + 1)
  environment = {**os.environ, "PYTHONHASHSEED": seed, "TF_CPP_MIN_LOG_LEVEL": "3"}
  answer = subprocess.run(
    [sys.executable, "-c", _CHILD], check=False, text=True,
    input=json.dumps(asked), capture_output=True, env=environment, timeout=LIMIT_S,
  )  # fmt: skip
  lines = [line for line in answer.stdout.splitlines() if line.startswith(_ANSWER)]
  return json.loads(lines[-1].removeprefix(_ANSWER)) if lines else None


def answer() -> None:
  """Answers a parent process: standard input says what to make (host)."""
  from loopwright.tools import verify

  asked = json.load(sys.stdin)
  sys.path[:] = asked["path"]
  if asked["config"]:
    with tempfile.TemporaryDirectory() as folder:
      file = os.path.join(folder, "config.gin")
      with open(file, "w", encoding="utf-8") as written:
        written.write(asked["config"])
      configurables.parse([file])
    subject = verify.subject_of_config()
  else:
    module, _, name = asked["task"].partition(":")
    task = getattr(__import__(module, fromlist=[name]), name)
    subject = Subject(
      task=task, optimizer=keras.optimizers.Adam, global_batch_size=ROWS, seed=asked["seed"]
    )
  verify.prepare(subject)
  found: dict[str, Made | None] = {HASHED: made(subject), ELSEWHERE: None}
  later = mock.patch.object(time, "time", return_value=time.time() + 1e6)
  with tempfile.TemporaryDirectory() as folder, later:
    os.chdir(folder)
    try:
      found[ELSEWHERE] = made(subject)
    except Exception:  # a relative path, such as that of the data: no mistake
      found[ELSEWHERE] = None
    os.chdir("/")
  print(_ANSWER + json.dumps(found), flush=True)
