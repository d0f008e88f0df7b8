"""README and docs: their code runs, their configs parse, their tables and links are true."""

import configparser
import doctest
import functools
import http.server
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import change_tables
import keras
import numpy as np
import option_tables
import pytest
import tensorflow as tf
from runs import make_trainer, records, values

import launch
import loopwright
from loopwright import ArraySource, configurables
from loopwright.commands import new
from loopwright.optimizers import schedules
from loopwright.runs.runner import run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
  *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "RESULTS.md"),
  *sorted((ROOT / "docs").rglob("*.md")),
]
BASE = """
import loopwright.tasks.image_classification
run.task = @ImageClassification()
ImageClassification.data = @digits()
ImageClassification.input_shape = (8, 8, 1)
run.train_steps = 1
run.global_batch_size = 8
"""


def blocks(page, language):
  return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def _marks(code):
  return [pytest.mark.whole] if "onnxruntime" in code else []  # a fresh process makes the format


def cases(language):
  return [
    pytest.param(page, code, id=f"{page.stem}-{number}", marks=_marks(code))
    for page in PAGES
    for number, code in enumerate(blocks(page, language))
  ]


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  before = set(sys.modules)
  yield
  for name in set(sys.modules) - before:
    if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
      del sys.modules[name]


def module_of(page, code):
  """Writes a block to the file that the text before it names, or to a name of its own."""
  before = page.read_text().split(code)[0]
  named = re.findall(r"(?:[Ss]ave \S+ as|with this task,) `(\w+)\.py`", before)
  name = named[-1] if named and before.count("```python") == 1 else f"{page.stem}_block"
  Path(f"{name}.py").write_text(code)
  return name.replace("-", "_"), Path(f"{name}.py")


def load(page, code):
  name, path = module_of(page, code)
  spec = importlib.util.spec_from_file_location(name, path.resolve())
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def require_served(handler):
  """Asks the page's server, and compares with the SavedModel."""
  images = np.random.default_rng(0).integers(0, 17, [3, 8, 8, 1])
  with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.handle_request).start()
    asked = json.dumps({"instances": images.tolist()}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", asked) as answer:
      found = json.load(answer)["predictions"]
  serve = tf.saved_model.load("runs/digits_cnn/export").signatures["serving_default"]
  expected = serve(image=tf.constant(images, tf.uint8))["probabilities"]
  np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(("page", "code"), cases("python"))
def test_python_blocks_run(page, code, capsys):
  if "runs/digits_cnn" in code or "model.onnx" in code:
    Path("x.gin").write_text(BASE)
    for mode in ("train", "export"):
      assert (
        launch.main(["x", "--gin_file=x.gin", f"--mode={mode}", "--model_dir=runs/digits_cnn"]) == 0
      )
    if "onnx" in code:
      convert = next(line for line in page.read_text().splitlines() if "tf2onnx.convert" in line)
      subprocess.run([sys.executable, *shlex.split(convert)[3:]], check=True)
  module = load(page, code)
  assert vars(module)
  if "folders.Run" in code:
    Path("mine").mkdir()
    Path("mine/metrics.jsonl").write_text(
      '{"step": 5, "split": "train", "loss": 2.0}\n{"step": 5, "split": "eval", "accuracy": 0.5}\n'
    )
    [(path, state, step, best)] = module.table(".")
    assert (path, state, step, str(best)) == ("./mine", "stopped", 5, "accuracy 0.5 @5")
    assert module.losses("mine") == [(5, 2.0)]
  if "onnx" in code:
    require_served(module.Predict)
  elif "runs/digits_cnn/export" in code:
    np.testing.assert_allclose(np.sum(module.probabilities, axis=1), [1, 1, 1], rtol=1e-5)
  elif "lw.load(" in code:
    assert module.logits.shape == (5, 10)
  if "import pyarrow" in code:
    assert module.source.fetch(tf.constant([2, 0]))["fare"].numpy().tolist() == [9.25, 3.5]
  elif "tarfile" in code:
    found = module.source.fetch(tf.constant([2, 0]))
    assert (found["image"][:, 7, 7].numpy() == found["label"].numpy()).all()
    assert found["label"].numpy().tolist() == [2, 0]
  if "text_files" in code:
    assert module.probabilities[0] > 0.6
    assert module.probabilities[1] < 0.4
  if "evaluator.evaluate()" in code:
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(("page", "code"), cases("gin"))
def test_gin_blocks_are_accepted(page, code):
  for python in blocks(page, "python")[:1]:
    if "runs/" not in python:  # it reads a run, and defines nothing for the config
      load(page, python)
  text = code if "run.task" in code else BASE + code
  Path("block.gin").write_text(text)
  configurables.parse(["block.gin"])
  assert configurables.configured(run) is not run


@pytest.mark.parametrize("page", ["README.md", "docs/writing-a-task.md"])
def test_the_complete_task_trains(page, tmp_path):
  path = ROOT / page
  load(path, blocks(path, "python")[0])
  Path("task.gin").write_text(blocks(path, "gin")[0])
  steps = "run.train_steps = 200"
  configurables.parse(["task.gin"], [steps, "run.eval_every_steps = 50"])
  configurables.configured(run)(mode="train_and_evaluate", model_dir=str(tmp_path / "run"))
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  losses = [float(re.search(r'"loss": ([\d.e-]+)', x)[1]) for x in lines if '"eval"' in x]
  assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("language", "file"), [("python", "waves.py"), ("gin", "waves.gin")])
def test_the_task_is_the_one_that_new_makes(language, file):
  assert blocks(ROOT / "README.md", language)[0] == (new.TEMPLATE / file).read_text()


def test_the_examples_of_docstrings_run():
  runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
  given = {"keras": keras, "lw": loopwright, "np": np, "tf": tf}
  for place in (*(getattr(loopwright, name) for name in loopwright.__all__), schedules):
    for test in doctest.DocTestFinder().find(place, place.__name__, globs=given):
      runner.run(test)  # prints what fails
  assert (runner.failures, runner.tries > 35) == (0, True)


def test_a_task_is_short():
  task, control = blocks(ROOT / "README.md", "python")
  assert len([line for line in task.splitlines() if line.strip()]) < 30
  assert len([line for line in control.splitlines() if line.strip()]) < 40


def test_the_option_tables_are_those_of_the_code():
  assert (ROOT / "docs" / "options.md").read_text() == option_tables.render(), (
    "run: python -m tests.support.option_tables > docs/options.md"
  )


def test_the_table_of_changes_is_that_of_the_code():
  assert (ROOT / "docs" / "changing-a-run.md").read_text() == change_tables.render(), (
    "run: python -m tests.support.change_tables"
  )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_named_files_exist(page):
  text = page.read_text()
  for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
    assert (page.parent / target).exists(), target
  for target in re.findall(
    r"(?<![\w/])(?:configs|benchmarks|tasks|framework|tests)/[\w/]+\.(?:gin|py)", text
  ):
    assert (ROOT / target).exists(), target
  for anchor in re.findall(r"architecture\.md#([\w-]+)", text):
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_each_command_of_the_benchmarks_is_listed():
  text = (ROOT / "docs" / "benchmarks.md").read_text()
  files = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
  parts = {"forks", "startup_sides", "elastic_trials"}  # other commands start them
  commands = {name for name, code in files.items() if "__main__" in code} - parts
  assert [name for name in sorted(commands) if not re.search(rf"[./`]{name}\b", text)] == []


def test_the_decisions_are_listed_once_by_number_and_title():
  text = (ROOT / "docs" / "architecture.md").read_text()
  listed = re.findall(r"^\| \[(\d+)\]\(decisions/([\w-]+)\.md\) \| (.*) \|$", text, re.MULTILINE)
  pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
  titles = [page.read_text().partition("\n")[0] for page in pages]
  assert [(name, f"# {number}. {title}") for number, name, title in listed] == [
    (page.stem, title) for page, title in zip(pages, titles, strict=True)
  ]
  assert [page.stem[:4] for page in pages] == [f"{n:04}" for n in range(1, len(pages) + 1)]


def pictured():
  """Returns the paths that the picture in docs/architecture.md names below framework/."""
  text = (ROOT / "docs" / "architecture.md").read_text()
  picture = text.partition("    framework/loopwright/\n")[2].partition("    tasks/<name>.py")[0]
  folders, paths = [], []
  for line in picture.splitlines():
    if line.startswith(" " * 20):
      continue  # the second line of one
    depth, name = (len(line) - len(line.lstrip()) - 6) // 2, line.split()[0]
    folders[depth:] = [name.rstrip("/")]
    paths.append("/".join(folders))
  return paths


def test_the_picture_is_the_folder():
  """The files at the root, and all folders."""
  package = ROOT / "framework" / "loopwright"
  folders = {str(path.parent.relative_to(package)) for path in package.rglob("*.py")} - {"."}
  files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
  assert len(files) < 15
  assert sorted(pictured()) == sorted(files | folders - {"tasks", "configs"})


def test_the_rows_of_the_picture_are_those_of_the_contract():
  contract = configparser.ConfigParser()
  contract.read(ROOT / "setup.cfg")
  rows = contract["importlinter:contract:layers"]["layers"].split("\n")
  rows = [sorted(row.split(" : ")) for row in rows if row]
  text = (ROOT / "docs" / "architecture.md").read_text().partition("there are no cycles:\n\n")[2]
  pictured_rows = text.partition("\n\n")[0].splitlines()
  assert [sorted(row.strip().split(", ")) for row in pictured_rows] == rows


def test_the_walks_pass_what_there_is():
  text = (ROOT / "docs" / "architecture.md").read_text()
  walks = text.partition("## Three walks\n")[2].partition("\n## ")[0]
  rows = re.findall(
    r"\(\.\./framework/loopwright/([\w/]+\.py)\) \| ([^|]+) \|$", walks, re.MULTILINE
  )
  assert len(rows) == sum(map(int, re.findall(r"(\d+) modules", walks)))
  for path, names in rows:
    code = (ROOT / "framework" / "loopwright" / path).read_text()
    for name in re.findall(r"`(\w+)`", names):
      assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), (path, name)


def block_of(name, mark):
  """Loads the first block of a page that has `mark`."""
  page = next(one for one in PAGES if one.stem == name)
  return load(page, next(code for code in blocks(page, "python") if mark in code))


def test_the_sounds_of_serving_are_those_of_stft():
  found = block_of("serving", "class Spectra")
  task, sounds = found.Spectra(), np.random.default_rng(0).normal(size=[5, found.LENGTH])
  sounds = sounds.astype("float32")
  expected = np.abs(tf.signal.stft(sounds, found.FRAME, found.STEP).numpy()) ** 2
  spectra = task.spectrogram(sounds)
  np.testing.assert_allclose(np.exp(spectra) - 1e-6, expected, rtol=1e-3, atol=1e-3)


def test_the_shared_forward_pass_trains_on_two_replicas_as_on_one(mirrored):
  """The batch of 5 has a padded row on two replicas; each replica runs batch normalisation."""
  rng = np.random.default_rng(0)
  features = {name: rng.uniform(-1, 1, [15, 8, 8, 1]) for name in ("image", "target")}
  source = ArraySource(features={k: v.astype("float32") for k, v in features.items()})
  task = block_of("full-control", "class Translation").Translation
  found = []
  for replicas in (1, 2):
    keras.utils.set_random_seed(0)
    made = task()
    made.source = lambda split: source
    sgd = functools.partial(keras.optimizers.SGD, 0.1)
    trainer = make_trainer(
      made, mirrored(replicas), batch=5, optimizer={"generator": sgd, "discriminator": sgd}
    )
    trainer.train(tf.constant(3))
    found.append([v for net in made.model.values() for v in values(net)])
  for one, other in zip(*found, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_on_policy_task_of_inputs_learns_from_what_it_collects(tmp_path, capsys):
  page = next(one for one in PAGES if one.stem == "inputs")
  name, _ = module_of(page, next(code for code in blocks(page, "python") if "class Reach" in code))
  Path("x.gin").write_text(
    f"import {name}\nrun.task = @Reach()\nrun.actions = [@CollectRollout()]\n"
    "run.train_steps = 480\nrun.global_batch_size = 64\n"
    "run.optimizer = @keras.Adam\nkeras.Adam.learning_rate = 0.02\n"
  )
  assert launch.main(["x", "--gin_file=x.gin", "--mode=train", "--model_dir=runs/x"]) == 0
  returns = {record["step"]: record["return"] for record in records("runs/x", "episodes")}
  assert list(returns) == list(range(0, 481, 32))
  assert returns[0] < -2.5
  assert -1.2 < returns[480] < -0.8  # -1 is the noise of the actions
