"""Does every wrong command line end in status 2 and one line?

  python -m benchmarks.fuzz_commands                    # 3,000 command lines
  python -m benchmarks.fuzz_commands --only 17          # one of them, with its output

Each command line goes through `launch.main` up to where training would begin: flags, gin, the
config, task, strategy, model, optimizer and run folder are made for real. hypothesis makes flags,
bindings and gin files: wrong types, numbers out of range, broken syntax, unknown names, odd
characters, macros, scopes and references in circles, files that are no gin files. It fails if a
status is not 0 or 2, a mistake has not exactly one line, or there is a traceback. A hang or a crash
fails too, see fuzzing.py.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import gin
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import launch
from benchmarks import fuzzing
from loopwright import registry
from loopwright.configurables.table import register_all
from loopwright.session import Session
from loopwright.tools import local_cluster

BASE = """
import tests.support.mistaken
run.task = @Toy()
run.train_steps = 4
run.global_batch_size = 4
run.strategy = @default
"""
WORKPLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"

HUGE = st.sampled_from([2**31, 2**31 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400])
NUMBERS = st.one_of(st.integers(-3, 5), HUGE, HUGE.map(lambda x: -x), st.integers())
FLOATS = st.one_of(
  st.sampled_from(["1e400", "-1e400", "nan", "inf", "-inf", "1e-400", "-0.0", "-1.5", "1e308"]),
  st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
CHARACTERS = st.characters(codec=None, categories=None, exclude_characters="")
TEXT = st.one_of(st.text(CHARACTERS, max_size=12), st.sampled_from(["", " ", "\0", "\n", "\ud800"]))
QUOTED = st.one_of(TEXT.map(repr), TEXT.map(lambda text: f"'{text}'"), TEXT.map(lambda t: f"'{t}"))
EXTRA = [
  "keras.Adam",
  "keras.SGD",
  "keras.Lion",
  "tf_keras.AdamW",
  "tf_keras.SGD",
  "Toy",
  "linear",
  "gin.macro",
]
NAMES = st.sampled_from([*registry.names(*registry.CONFIGURABLE), *EXTRA])
MACROS = st.sampled_from(["a", "b", "c", "run", "x/y", "A.b"])
PLACES = st.sampled_from(
  [
    f"{each.name}.{parameter}"
    for each in registry.entries(*registry.CONFIGURABLE)
    for parameter in inspect.signature(each.load()).parameters
  ]
  + ["keras.Adam.learning_rate", "keras.SGD.momentum", "tf_keras.AdamW.weight_decay"]
)
SETUPS = st.sampled_from(
  [
    "run.optimizer = @keras.SGD",
    "run.optimizer = @keras.Adam",
    "run.optimizer = @keras.SGD\nkeras.SGD.learning_rate = @linear_warmup()\n"
    "linear_warmup.warmup_steps = 3\nlinear_warmup.after = 0.1",
    "run.optimizer = @keras.SGD\nkeras.SGD.learning_rate = @cosine_decay()\n"
    "cosine_decay.initial = 0.1\ncosine_decay.decay_steps = 4",
    "run.optimizer = @keras.Adam\nkeras.Adam.learning_rate = @exponential_decay()\n"
    "exponential_decay.initial = 0.1\nexponential_decay.decay_steps = 4\n"
    "exponential_decay.decay_rate = 0.5",
    "run.optimizer = @keras.Adam\nkeras.Adam.learning_rate = @piecewise_constant()\n"
    "piecewise_constant.boundaries = [3]\npiecewise_constant.values = [0.1, 0.2]",
    "run.optimizer = @keras.Adam\nkeras.Adam.learning_rate = @by_epoch()\nby_epoch.of = 0.1\n"
    "by_epoch.steps_per_epoch = 4",
    "run.optimizer = @tf_keras.AdamW\ntf_keras.AdamW.learning_rate = @scale_by_replicas()\n"
    "scale_by_replicas.schedule = @constant()\nconstant.learning_rate = 0.1",
    "Trainer.loss_scale = @dynamic",
    "Trainer.loss_scale = @fixed\nfixed.value = 8.0",
    "Trainer.reduction = @Reduction()\nReduction.wire_dtype = 'bfloat16'",
    "run.actions = [@EarlyStopping(), @BestCheckpoint()]\nEarlyStopping.patience = 2",
    "run.actions = [@Profile(), @StopOnNonFinite(), @TimeBudget(), @Export()]",
    "run.warm_start = @WarmStart()\nWarmStart.path = 'nowhere'",
    "run.strategy = @mirrored\nmirrored.devices = ('CPU:0',)",
  ]
)


def _with_number(setup: str, value: str, which: int) -> str:
  found = list(re.finditer(r"(?<= = )[\d.]+$", setup, re.MULTILINE))
  if not found:
    return f"{setup}\nrun.seed = {value}"
  place = found[which % len(found)]
  return setup[: place.start()] + value + setup[place.end() :]


def references() -> st.SearchStrategy[str]:
  scope = st.sampled_from(["", "", "inner/", "a/b/"])
  call = st.sampled_from(["()", "()", "", "(", "()()"])
  named = st.builds(lambda s, n, c: f"@{s}{n}{c}", scope, NAMES, call)
  return st.one_of(named, MACROS.map(lambda name: f"%{name}"))


SCALARS = st.one_of(
  NUMBERS.map(str), FLOATS, QUOTED, references(), st.sampled_from(["True", "None", "...", "b'x'"])
)
VALUES = st.one_of(
  SCALARS,
  st.lists(SCALARS, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
  st.lists(SCALARS, max_size=3).map(lambda items: f"({', '.join(items)})"),
  st.lists(st.tuples(SCALARS, SCALARS), max_size=2).map(
    lambda pairs: "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
  ),
  st.integers(1, 5000).map(lambda depth: "[" * depth + "]" * depth),
  st.integers(1, 5000).map(lambda depth: "[" * depth),
)
BINDINGS = st.one_of(
  st.builds(lambda place, value: f"{place} = {value}", PLACES, VALUES),
  st.builds(lambda place, value: f"{place} = {value}", PLACES, NUMBERS.map(str)),
  st.builds(lambda name, value: f"{name} = {value}", MACROS, VALUES),
  st.builds(lambda place, value: f"inner/{place} = {value}", PLACES, VALUES),
  st.builds(lambda place, ref: f"{place} = {ref}", PLACES, references()),
  st.builds(lambda name, word, value: f"{name}.{word} = {value}", NAMES, TEXT, VALUES),
)
STATEMENTS = st.one_of(
  BINDINGS,
  BINDINGS,
  SETUPS,
  TEXT,
  st.builds(lambda text: f"import {text}", TEXT),
  st.sampled_from(
    [
      "import os", "import tasks", "import this.that", "from x import y", "import tests.nothing",
      "import ", "import a as b", "import __gin__.dynamic_registration", "include 'f.gin'",
      "include 'g.gin'", "include ''", "include 'folder'", "include '/dev/zero'", "include 'pipe'",
      "include 'binary.gin'", "include", "include f.gin", "include '\\0'", "include 3",
      "run.train_steps = \\", "x = '''", "# -*- coding: utf-7 -*-", "\t x = 1", "run.seed = 1; x",
      "linear_warmup.after = @linear_warmup()", "by_epoch.of = @by_epoch()",
      "a = %b\nb = %a\nrun.seed = %a", "inner/linear_warmup.after = @inner/linear_warmup()",
      "scale_by_replicas.schedule = @inner/scale_by_replicas()", "run.task = @run()",
    ]
  ),
)  # fmt: skip
FILES = st.sampled_from(
  ["f.gin", "f.gin", "f.gin", "f.gin", "f.gin", "missing.gin", "folder", "binary.gin", "huge.gin",
   "pipe", "/dev/zero", "/dev/null", "", ".", "unreadable.gin", "\0", "\ud800.gin", "link.gin",
   "x" * 5000, "f.gin/f.gin", "/proc/self/mem"]
)  # fmt: skip
MODES = st.sampled_from(
  ["train", "train_and_evaluate", "evaluate", "export", "replay", "check_config", "check_config",
   "evaluate_continuously", "", "verify ", "TRAIN", "\ud800"]
)  # fmt: skip
FLAGS = st.one_of(
  st.builds(lambda mode: f"--mode={mode}", MODES),
  st.builds(lambda text: f"--model_dir={text}", st.one_of(TEXT, st.sampled_from(
    ["", "/dev/null", "/proc/x", "f.gin", "run", "x" * 300, "a/" * 300, "folder", "r[1]", "r\n"]
  ))),
  st.builds(lambda text: f"--json={text}", TEXT),
  st.builds(lambda n: f"--max_restarts={n}", st.one_of(NUMBERS.map(str), TEXT)),
  st.builds(lambda n: f"--local_ps={n}", st.one_of(NUMBERS.map(str), TEXT)),
  st.builds(lambda text: f"--local_workers={text}", TEXT),
  st.builds(lambda text: f"--gin_param={text}", st.one_of(STATEMENTS, BINDINGS)),
  st.sampled_from(["--gin_file", "--mode", "--", "-", "--no", "--=", "--gin_param", "-h", "---x",
                   "--nogin_file", "--flagfile=f.gin", "--flagfile", "--undefok=x", "--help=3"]),
  TEXT,
)  # fmt: skip
WILD = st.tuples(
  st.lists(STATEMENTS, max_size=4),
  st.lists(FILES, max_size=2),
  st.lists(BINDINGS, max_size=2),
  st.lists(FLAGS, max_size=2),
  st.booleans(),
)
COUNTS = st.sampled_from(["3", "3.0", "0", "-1", "(1, 2)", "[3, 5]", "'x'", "None", "True"])
NEARLY_RIGHT = st.tuples(
  st.builds(
    lambda setup, place, value: [setup, f"{place} = {value}"],
    SETUPS,
    PLACES,
    st.one_of(NUMBERS.map(str), FLOATS, COUNTS, references()),
  ),
  st.just([]),
  st.just([]),
  st.lists(FLAGS, max_size=1),
  st.just(True),
)
OWN_NUMBERS = st.builds(  # a setup with one of its own numbers replaced
  lambda setup, value, which: [_with_number(setup, value, which)],
  SETUPS,
  st.one_of(NUMBERS.map(str), FLOATS, COUNTS),
  st.integers(0, 9),
)
NEARLY_RIGHT_NUMBERS = st.tuples(OWN_NUMBERS, st.just([]), st.just([]), st.just([]), st.just(True))
COMMANDS = st.one_of(WILD, NEARLY_RIGHT, NEARLY_RIGHT_NUMBERS)


def command(case: tuple[list[str], list[str], list[str], list[str], bool]) -> tuple[str, list[str]]:
  """Returns the text of f.gin and the arguments."""
  statements, files, params, more, usual = case
  arguments = [f"--gin_file={name}" for name in (["f.gin"] if usual else files)]
  arguments += [f"--gin_param={param}" for param in params]
  return BASE + "\n".join(statements) + "\n", ["--model_dir=run", *arguments, *more]


def examine(rng: random.Random, folder: Path) -> str:
  """Runs one command line up to training; returns the outcome."""
  text, arguments = command(drawn(rng))
  prepare(folder, text)
  status, out, err = run(arguments)
  return judged(status, out, err, arguments, text)


def drawn(rng: random.Random) -> tuple[list[str], list[str], list[str], list[str], bool]:
  """Returns the case that hypothesis makes of `rng`."""
  found = []

  @seeded(rng.getrandbits(64))
  @settings(
    max_examples=2, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
  )  # fmt: skip
  @given(COMMANDS)
  def draw(case):  # type: ignore[no-untyped-def]
    found.append(case)

  draw()
  return found[-1]  # the first is the smallest that there is


def prepare(folder: Path, text: str) -> None:
  """Fills the working directory with gin files, good and bad."""
  os.chdir(folder)
  shutil.rmtree("run", ignore_errors=True)
  with open("f.gin", "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
    file.write(text)
  if os.path.exists("pipe"):
    return
  os.mkfifo("pipe")
  os.mkdir("folder")
  os.symlink("link.gin", "link.gin")
  Path("g.gin").write_text("include 'g.gin'\n")
  Path("binary.gin").write_bytes(bytes(range(256)) * 9)
  Path("unreadable.gin").touch(0)
  with open("huge.gin", "wb") as file:
    file.truncate(2**32)


def run(arguments: Sequence[str]) -> tuple[int, str, str]:
  """Runs `launch.main` without training; returns status, stdout and stderr."""
  out, err = io.StringIO(), io.StringIO()
  with (
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    mock.patch.object(Session, "go", return_value={}),
    mock.patch.object(local_cluster, "run_local", return_value=0),
    mock.patch.object(sys, "path", [*sys.path]),
  ):
    status = launch.main(["launch.py", *arguments])
  gin.clear_config()
  return status, out.getvalue(), err.getvalue()


def judged(status: int, out: str, err: str, arguments: Sequence[str], text: str) -> str:
  """Returns the outcome of a command line."""
  lines = err.splitlines()
  errors = [line for line in lines if line.startswith("error: ")]
  several = "--mode=check_config" in arguments
  right = {
    0: "Traceback" not in err,
    2: bool(errors) and (len(lines) == len(errors) if several else len(lines) == 1),
  }
  if right.get(status):
    return fuzzing.FINE if status == 0 else fuzzing.MISTAKE
  gin_text = text.removeprefix(BASE)
  return f"status {status}\n{arguments!r}\nf.gin: {gin_text!r}\nstdout: {out}\nstderr: {err}"[:4000]


def main() -> int:
  """Runs the trial; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
  parser.add_argument("--inputs", type=int, default=3000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--only", type=int, help="the number of one command line")
  parser.add_argument("--examples", type=int, default=20)
  options = parser.parse_args()
  sys.path.insert(0, os.getcwd())
  register_all()  # before the fork
  one = options.only is not None
  tally = fuzzing.hunt(
    "commands", examine, inputs=1 if one else options.inputs, seed=options.seed, limit_s=30,
    first=options.only or 0,
  )  # fmt: skip
  print(fuzzing.HEAD)
  return fuzzing.report(tally, examples=options.examples)


if __name__ == "__main__":
  sys.exit(main())
