"""The commands that README and docs print: those that take seconds run, the others are checked.

The commands of a page come in order, in a folder where README's first command has run before. `RUN`
says which ones run, `SHORTER` how they are shortened. Of the others the test checks the program,
the flags, the files and the bindings. It fails at a command of a kind that `check` does not know.
"""

import argparse
import ast
import configparser
import contextlib
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from config_data import forget_garden
from runs import records

import launch
import loopwright
from loopwright.commands import new
from loopwright.commands.arguments import COMMANDS, config_of, parse
from loopwright.commands.arguments import page as help_page
from loopwright.options.modes import LAUNCH_MODES
from loopwright.tools.sweep import space

ROOT = Path(launch.__file__).parent
PAGES = [
  *(ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"),
  *sorted((ROOT / "docs").glob("*.md")),
]

# What begins a command, in an indented line or in inline code. Other fenced blocks than those of
# Python, gin, TOML and YAML hold commands only.
PROGRAM = (
  r"(?:loopwright|uvx?|pip3?|python3?|tensorboard|pytest|ruff|mypy|bash|sh|sudo|apt|apt-get|docker|kubectl|ray"
  r"|sbatch|srun|git|curl|wget|make|cd|eval|export|source|\$|[A-Z_]+=[^\s`]*) +"
)
CODE = re.compile(r"^```(?:python|gin|toml|yaml)\n.*?^```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(
  r"^```\w*\n(?P<block>.*?)^```"
  rf"|^ {{4,}}(?:[^\n`]*: )?(?P<line>{PROGRAM}(?:\\\n|[^\n]|\n {{20,}}\[)*)"
  rf"|`(?P<span>{PROGRAM}[^`]*)`",
  re.DOTALL | re.MULTILINE,
)
# A command of an earlier commit, whose figures stay on the page.
EARLIER = re.compile(
  r"`[^`]*` \(?at [0-9a-f]{7}\b|^ +at [0-9a-f]{7}: (?:[^\n]*\\\n)*[^\n]*", re.MULTILINE
)
UNSEEN = re.compile(r"uv run \S|loopwright [a-z]+ |uvx \S|pip install \S|python3? (?:-m |\S+\.py)")
SAVED = re.compile(
  r"`(\w+\.(?:py|gin))`[^`]*\n\n```(?:python|gin)\n(.*?)^```", re.DOTALL | re.MULTILINE
)

# What the reader puts in, and what comes of a command that is not run here.
PUT_IN = {
  "--gin_file=FILE [--gin_file=FILE ...]": "--gin_file=configs/digits_cnn.gin",
  '[--gin_param="x.y = value" ...]': '--gin_param="run.seed = 1"',
  "[--mode=MODE]": "--mode=train",
  "[--model_dir=FOLDER]": "--model_dir=runs/folder",
  "[--local_workers=N [--max_restarts=K]]": "--local_workers=2 --max_restarts=1",
  "--gin_file=...": "--gin_file=configs/digits_cnn.gin",
  "--model_dir=...": "--model_dir=runs/digits_cnn",
  "<model_dir>": "runs/digits_cnn",
}
MENTIONED = ("uv run", "pip install")  # without saying what
MADE = {
  "mine.gin": "include 'configs/digits_cnn.gin'\n",
  "runs/mine/tuned.gin": "Trainer.jit_compile = False\n",
  "runs/digits_cnn-sweep/best.gin": "include 'configs/digits_cnn.gin'\n",
  "runs/soup/operative_config.gin": "include 'configs/digits_cnn.gin'\n",
  "runs/planted/operative_config.gin": "include 'configs/digits_cnn.gin'\n",
}

# What takes seconds, without `uv run` and its options; and how it comes to take no more.
FIRST = r"loopwright train digits_cnn$"
RUN = (
  FIRST,
  r"loopwright new waves$",
  r"cd waves$",
  r"loopwright ls$",
  r"loopwright goodput runs/digits_cnn$",
  r"loopwright options digits_cnn ",
  r"loopwright (\w+ )?--help$",
  r"loopwright train( auto\.cpu_replicas=2 --model_dir=/tmp/two)?$",
  r"loopwright (train|evaluate) digits_cnn (cosine_decay|run\.ledger|run\.checkpoint)",
  r"loopwright train digits_cnn --model_dir=runs/other ",
  r"loopwright train digits\.gin( (auto|run)\.|$)",
  r"loopwright report runs/digits_cnn( --output=report\.html)?$",
  r"python -m [\w.]+\.ledger runs/ledger$",
  r"python -m tests\.support\.option_tables$",
)
STEPS = 4
SHORTER = (
  (
    r"(loopwright (?:train|evaluate)\b.*)",
    rf'\1 --gin_param="run.train_steps = {STEPS}" --gin_param="run.steps_per_loop = 2"',
  ),
  (r"/ckpt-\d+", f"/ckpt-{STEPS}"),
  (r"=/tmp/", "=tmp/"),
)
# Programs without a parser of flags, and how many arguments they take.
NO_FLAGS = {"ledger": 1, "steps": 1, "option_tables": 0, "change_tables": 0, "cause_tables": 0}
SPLITS = ("train", "eval")


def text_of(page):
  return CODE.sub("", EARLIER.sub("", page.read_text()))


def commands(page):
  """Returns what a page prints, each in one line, as the reader would type it."""
  text = text_of(page)
  lines = []
  for found in PRINTED.finditer(text):
    printed = found["line"] or found["span"] or re.sub(r"\\\n", " ", found["block"] or "")
    lines += printed.splitlines() if found["block"] else [re.sub(r"\\?\n", " ", printed)]
  for there, instead in PUT_IN.items():
    lines = [line.replace(there, instead) for line in lines]
  typed = [shlex.join(shlex.split(part, comments=True)) for x in lines for part in x.split(" && ")]
  return [line.removeprefix("'$' ") for line in typed if line and line not in MENTIONED]


def extras():
  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  return {*config["options.extras_require"]}


def without_uv(command):
  """Returns what `uv run` would run in this environment; its extras must be setup.cfg's."""
  words = shlex.split(command)
  while len(words) > 1 and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
    words = words[1:]
  if words[:2] != ["uv", "run"]:
    return shlex.join(words)
  words = words[2:]
  while words[0].startswith("-"):
    option, value, *words = words
    assert option in ("--extra", "--with", "--group"), (
      f"{command}: give `uv run {option}` a place here"
    )
    assert option != "--extra" or value in extras(), command
  return shlex.join(words)


def shorter(command):
  for there, instead in SHORTER:
    command = re.sub(there, instead, command)
  return command


def runs(command):
  return any(re.match(pattern, unquoted(command)) for pattern in RUN)


def unquoted(command):
  return command.replace("'", "").replace('"', "")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """The repository's folder as the reader has it, with the pages' files, and README's first run."""
  folder = tmp_path_factory.mktemp("commands")
  for name in ("launch.py", "configs", "benchmarks", "deploy"):
    (folder / name).symlink_to(ROOT / name)
  saved = [each for page in PAGES for each in SAVED.findall(page.read_text())]
  made_by_new = {path.name for path in new.TEMPLATE.iterdir()}
  for name, text in [*(x for x in saved if x[0] not in made_by_new), *MADE.items()]:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
  first = next(x for x in map(without_uv, commands(PAGES[0])) if x.startswith("loopwright train "))
  _, *arguments = shlex.split(shorter(first))
  done = subprocess.run(
    [sys.executable, "launch.py", *arguments],
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(f"done: step {STEPS} | eval loss "), done.stdout
  return folder


@pytest.fixture
def at_the_place(place, monkeypatch):
  monkeypatch.chdir(place)
  monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
  with mock.patch.dict("os.environ"):
    yield
  forget_garden()
  shutil.rmtree(place / "waves", ignore_errors=True)  # several pages make it
  for name, module in list(sys.modules.items()):
    if str(place) in (getattr(module, "__file__", None) or ""):
      del sys.modules[name]


class ParsedError(BaseException):
  """Ends a program when it has parsed its flags: the known `options`, and the `rest`."""

  def __init__(self, options, rest):
    self.options, self.rest = options, rest


@contextlib.contextmanager
def ended_by_its_parser():
  known = argparse.ArgumentParser.parse_known_args

  def parse_known_args(parser, args=None, namespace=None):
    raise ParsedError(*known(parser, args, namespace))

  def parse_args(parser, args=None, namespace=None):
    options, rest = known(parser, args, namespace)
    if rest:
      parser.error(f"unrecognized arguments: {' '.join(rest)}")
    raise ParsedError(options, [])

  with (
    mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args),
    mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
  ):
    yield


def run_module(name, arguments):
  """What `python -m` does, but for a second import of a module that is known already."""
  module = importlib.import_module(name)
  with mock.patch.object(sys, "argv", [module.__file__, *arguments]):
    if hasattr(module, "__path__"):
      runpy.run_module(name, run_name="__main__")
      return
    tree = ast.parse(Path(module.__file__).read_text())
    [main] = [x for x in tree.body if isinstance(x, ast.If) and "__main__" in ast.unparse(x.test)]
    exec(compile(ast.Module(main.body, []), module.__file__, "exec"), vars(module))


def run(command):
  """Runs a command in this process; it must end with status 0."""
  words = shlex.split(shorter(command))
  if words[0] == "cd":
    os.chdir(words[1])
    return
  if words[0] == "loopwright":
    assert launch.main(words) == 0, command
    return
  status = 0
  try:
    run_module(words[2], words[3:])
  except SystemExit as end:
    status = end.code
  assert not status, command


def check(command):
  """Checks what can be checked of a command without its work."""
  match shlex.split(command):
    case ["loopwright", "--version"]:
      assert parse(["loopwright", "--version"]).values.version, command
    case ["loopwright", *name] if len(name) < 2:
      assert {*name} <= {*COMMANDS}, command
    case ["loopwright", *_]:
      parsed = parse(shlex.split(command))
      if parsed.known.modes:
        check_config(parsed.values.gin_file, parsed.values.gin_param)
      if parsed.command == "sweep":
        files, params = config_of(parsed.arguments, needed=True)
        varied = space.read(parsed.values.vary)
        space.checked(files, params, varied)
    case ["python", "-m", name, *arguments]:
      check_module(name, arguments)
    case ["python", script, *arguments] if script.endswith(".py"):
      assert (ROOT / script).exists(), command
      check_module(script.removesuffix(".py").replace("/", "."), arguments)
    case ["uv", "add", "--editable", "../loopwright"]:  # from a project beside the clone
      assert (ROOT / "pyproject.toml").exists(), command
    case ["pip", "install", *what] | ["uv", "add", *what]:
      check_installed(command, what)
    case ["..."]:  # any command, after `uv run` with an extra
      return
    case ["export", assignment]:
      assert {*json.loads(assignment.removeprefix("TF_CONFIG="))} == {"cluster", "task"}, command
    case ["sbatch", "--nodes=2-4", script, "..."]:
      assert (ROOT / script).exists(), command
    case ["tensorboard", "--logdir", folder]:
      assert Path(folder).is_dir(), command
    case ["pytest", *options]:
      assert {*options} <= {"--everything", "--ci"}, command
    case ["sphinx-build", "-W", "--keep-going", "-c", "docs", ".", "build/site"]:
      assert (ROOT / "docs" / "conf.py").exists(), command
    case ["make", target]:
      assert f"\n{target}:" in (ROOT / "Makefile").read_text(), command
    case [program] if program == "lint-imports":
      assert (Path(sys.executable).parent / program).exists(), command
    case _:
      pytest.fail(f"a command of a kind that this test does not know: {command}")


def check_installed(command, what):
  """That a command installs this project, its wheel, or what setup.cfg names."""
  setup = (ROOT / "setup.cfg").read_text()
  version = loopwright.__version__
  wheel = f"./loopwright-{version}-py3-none-any.whl"
  ends = ("", *(f"[{extra}]" for extra in extras()))
  ours = {
    "uv",
    "pip",
    "-U",
    "-e",
    "--no-deps",
    *(f"{of}{end}" for of in (".", wheel) for end in ends),
  }
  named = {re.split(r"[^\w-]", line.strip(" #"))[0] for line in setup.splitlines()} | {"setuptools"}
  for each in what:
    assert each in ours or re.split(r"[^\w-]", each)[0] in named - {""}, command


def check_launch(arguments):
  values = launch.parse_flags(["launch.py", *arguments])
  check_config(values.gin_file, values.gin_param)


def check_config(files, params):
  config = [*(f"--gin_file={x}" for x in files), *(f"--gin_param={x}" for x in params)]
  assert launch.main(["launch.py", *config, "--mode=check_config"]) == 0, config


def check_module(name, arguments):
  if (count := NO_FLAGS.get(name.rpartition(".")[2])) is not None:
    assert importlib.util.find_spec(name), name
    assert len(arguments) == count, (name, arguments)
    return
  with ended_by_its_parser(), pytest.raises(ParsedError) as parsed:
    run_module(name, arguments)
  if parsed.value.rest:
    check_launch(parsed.value.rest)
  if files := getattr(parsed.value.options, "gin_file", None):
    check_config(files, parsed.value.options.gin_param)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("at_the_place")
def test_the_commands_of_a_page(page):
  for command in map(without_uv, commands(page)):
    (run if runs(command) else check)(command)


def test_the_commands_of_a_new_project(at_the_place):
  assert launch.main(["loopwright", "new", "waves"]) == 0
  os.chdir("waves")
  listed = re.findall(r"^ {4}(.*)$", Path("README.md").read_text(), re.MULTILINE)
  assert len(listed) > 7
  for command in listed:
    check(without_uv(shlex.join(shlex.split(command, comments=True))))


def test_the_examples_of_the_help(at_the_place):
  Path("my.gin").write_text(MADE["mine.gin"])
  for name in ("", *COMMANDS):
    shown = help_page(name, loopwright.commands.__doc__)
    examples = re.findall(r"^(?:  |example: )(loopwright .*?)(?:   .*)?$", shown, re.MULTILINE)
    assert examples, name
    for example in examples:
      check(example)


def test_every_command_is_found_and_every_pattern_is_used():
  for page in PAGES:
    left = PRINTED.sub("", text_of(page))
    assert not UNSEEN.findall(left), f"{page.name} prints a command that is not found"
    assert {*re.findall(r"--mode=(\w+)", left)} <= {*LAUNCH_MODES}
  everything = [unquoted(without_uv(each)) for page in PAGES for each in commands(page)]
  for pattern in RUN:
    assert any(re.match(pattern, each) for each in everything), f"nothing is like {pattern}"
  text = "".join(page.read_text() for page in PAGES)
  assert [each for each in (*PUT_IN, *MADE) if each not in text] == []


def test_tensorboard_shows_a_run(place):
  command = "tensorboard --logdir runs"
  assert command in map(without_uv, commands(ROOT / "docs" / "trackers.md"))
  program, *arguments = shlex.split(command)
  with subprocess.Popen(
    [Path(sys.executable).parent / program, *arguments, "--port=0"],
    cwd=place,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      address = served_at(process)
      both = {f"digits_cnn/{split}" for split in SPLITS}
      tags = answer(f"{address}data/plugin/scalars/tags", until=both.issubset)
      for split in SPLITS:
        run_name = f"digits_cnn/{split}"
        lines = written(place / "runs" / "digits_cnn", split)
        assert {*tags[run_name]} == {name for line in lines.values() for name in line}
        for tag in tags[run_name]:
          query = urllib.parse.urlencode({"tag": tag, "run": run_name})
          points = answer(f"{address}data/plugin/scalars/scalars?{query}", until=bool)
          shown = [(step, np.float32(value)) for _, step, value in points]
          assert shown == [(step, np.float32(line[tag])) for step, line in lines.items()]
    finally:
      process.terminate()
      process.wait(timeout=30)


def served_at(process):
  """Returns the address that TensorBoard tells; fails with what it says instead."""
  said = []
  for line in process.stderr:
    said.append(line)
    if found := re.search(r"TensorBoard \S+ at (http://\S+:\d+/)", line):
      return found[1]
  return pytest.fail("".join(said))


def answer(address, until, seconds=60):
  """Asks until the answer is there: TensorBoard serves before it has read all."""
  end = time.monotonic() + seconds
  while True:
    with urllib.request.urlopen(address, timeout=30) as reply:
      found = json.load(reply)
    if until(found) or time.monotonic() > end:
      return found
    time.sleep(0.2)


def written(model_dir, split):
  """Returns the values of metrics.jsonl by step; the last line counts where a step is repeated."""
  about = ("step", "split", "wall_time")
  return {
    record["step"]: {name: value for name, value in record.items() if name not in about}
    for record in records(model_dir, split)
  }
