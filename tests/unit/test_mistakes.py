"""Every mistake ends in one clear line and status 2, and damages nothing.

Each goes through the front door, `launch.main`, with a run folder that holds a trained checkpoint.
The tasks are in mistaken.py; a few runs have a process of their own, where its state matters.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import gin
import pytest
import tensorflow as tf
from runs import said

import launch

TESTS = Path(__file__).parents[1] / "support"
REPOSITORY = Path(launch.__file__).parent
CONFIG = """
import mistaken
run.task = @Toy()
run.train_steps = 4
run.steps_per_loop = 2
run.global_batch_size = 4
run.strategy = @default
"""
CLASSIFY = """import loopwright.tasks.image_classification
run.task = @ImageClassification()"""
TWO_CPUS = "devices = ('CPU:0', 'CPU:1')"


@dataclasses.dataclass(frozen=True)
class Mistake:
  """What is wrong, and what the line must say; TMP stands for the test's own folder.

  config: lines that come after CONFIG. says: what is in the line, with " ... " between: the
  offending value, and the words of the remedy.
  flags: after the usual ones. prepare: makes files in TMP, the run folder TMP/run among them.
  fresh: start without a checkpoint, which would be found foreign first. late: it shows when
  training has begun, so that the run folder may have news in it.
  """

  config: str
  says: str
  _: dataclasses.KW_ONLY
  flags: Sequence[str] = ()
  prepare: Callable[[Path], None] = lambda folder: None
  fresh: bool = False
  late: bool = False


def images(folder):
  for split in ("train", "eval"):
    for name in ("cat", "dog"):
      place = folder / split / name
      place.mkdir(parents=True)
      for number in range(2):
        image = tf.io.encode_png(tf.zeros([8, 8, 3], tf.uint8))
        (place / f"{number}.png").write_bytes(image.numpy())


def corrupt_image(folder):
  images(folder)
  path = folder / "train" / "cat" / "1.png"
  path.write_bytes(path.read_bytes()[:40])


def other_classes(folder):
  images(folder)
  (folder / "eval" / "dog").rename(folder / "eval" / "cow")


def damaged_checkpoint(folder):
  [path] = (folder / "run" / "checkpoints").glob("ckpt-2.data*")
  path.write_bytes(path.read_bytes()[:100])


IMAGES = f"""{CLASSIFY}
ImageClassification.data = @image_folder()
ImageClassification.input_shape = (8, 8, 3)
ImageClassification.network = @mlp
image_folder.train = 'TMP/train'
image_folder.eval = 'TMP/eval'
image_folder.image_size = (8, 8)"""
MISTAKES = [
  # The command line and the config.
  Mistake("run.train_step = 3", "mistake.gin:1 ... 'train_step' ... 'train_steps'?"),
  Mistake(
    "keras.SGD.momentum = 0.5",
    "nothing uses keras.SGD.momentum ... Add `run.optimizer = @keras.SGD`",
  ),
  # The numbers of a run.
  Mistake("run.train_steps = 0", "run.train_steps is 0 ... at least 1"),
  Mistake("run.eval_batch_size = -4", "run.eval_batch_size is -4 ... at least 1"),
  Mistake(
    "run.strategy = @mirrored\nmirrored.cpu_replicas = 4\nrun.global_batch_size = 3",
    "batch_size is 3 ... 4 replicas ... at least 4",
  ),
  Mistake("run.precision = 'fp16'", "'fp16' ... 'mixed_float16'"),
  Mistake("Trainer.accumulation_steps = 0", "accumulation_steps is 0 ... at least 1"),
  Mistake("Trainer.clip_norm = 0.0", "Trainer.clip_norm is 0.0 ... above 0"),
  Mistake(
    "Trainer.clip_norm = 1.0\nTrainer.clip_value = 2.0",
    "clip_norm=1.0 and Trainer.clip_value=2.0 ... choose one",
  ),
  Mistake("Trainer.ema_decay = 1.5", "Trainer.ema_decay is 1.5 ... between 0 and 1"),
  Mistake(
    "Trainer.loss_scale = @dynamic\ndynamic.factor = 0.5", "dynamic.factor is 0.5 ... above 1"
  ),
  Mistake(
    "run.eager = True\nTrainer.jit_compile = True",
    "eager=True and Trainer.jit_compile=True ... choose one",
  ),
  Mistake(
    "run.warm_start = @WarmStart()\nWarmStart.path = 'TMP/nowhere'",
    "WarmStart.path is 'TMP/nowhere' ... give a run folder",
    fresh=True,
  ),
  Mistake(
    "run.per_replica_batch_size = 2",
    "both run.global_batch_size and run.per_replica_batch_size are set ... keep one",
  ),
  Mistake(
    "run.global_batch_size = None",
    "neither run.global_batch_size nor run.per_replica_batch_size is set ... add one",
  ),
  # Strategies.
  Mistake(
    f"run.strategy = @central_storage\ncentral_storage.{TWO_CPUS}\nTrainer.jit_compile = True",
    "jit_compile=True and run.strategy=@central_storage ... use mirrored",
  ),
  # The run folder.
  Mistake(
    "", "TMP/base.gin ... cannot write ... set --model_dir to", flags=["--model_dir=TMP/base.gin"]
  ),
  Mistake(
    "", "TMP/run[1] ... wildcards ... choose a name without", flags=["--model_dir=TMP/run[1]"]
  ),
  Mistake("", "'/proc/loopwright' ... a writable folder", flags=["--model_dir=/proc/loopwright"]),
  Mistake(
    "", "cannot write to model_dir 'xxx ... a writable folder", flags=[f"--model_dir={'x' * 300}"]
  ),
  Mistake("", "no checkpoint in TMP/run ... train first", flags=["--mode=evaluate"], fresh=True),
  Mistake(
    "", "TMP/run/checkpoints ... damaged ... choose another --model_dir", prepare=damaged_checkpoint
  ),
  Mistake(
    "run.optimizer = @keras.SGD",
    "another experiment ... 'default: Adam' ... choose another --model_dir",
  ),
  # Optimizers and actions.
  Mistake(
    "run.optimizer = @keras.LossScaleOptimizer",
    "'keras.LossScaleOptimizer' ... Trainer.loss_scale = @dynamic",
  ),
  Mistake(
    "run.optimizer = @keras.Adam\nkeras.Adam.learning_rate = 'fast'",
    "learning_rate=fast ... should be float",
  ),
  Mistake(
    "run.optimizer = {'a': @keras.Adam, 'b': @keras.SGD}\nToy.optimizer = 'c'",
    "unknown optimizer 'c' ... one of a, b",
    fresh=True,
  ),
  # What a task must define.
  Mistake(
    "run.task = @WithoutForward()",
    "WithoutForward ... forward(batch, training) ... loopwright/task.py",
    fresh=True,
  ),
  Mistake("Toy.model = @no_model", "build_model() returned a NoneType ... a Keras model"),
  Mistake("Toy.model = @no_instance", "build_model() returned the class Sequential"),
  Mistake("run.optimizer = {}", "are {}; give at least one"),
  # Sources and preprocessing.
  Mistake("Toy.source = @unequal_features", "'x' 10, 'y' 7 ... one row per example"),
  Mistake("Toy.source = @empty_stream", "no examples ... at least one", late=True),
  Mistake("Toy.source = @negative_weights", "-1.0 at example 0 ... not negative"),
  Mistake("Toy.source = @weightless", "up to step 4 ... above 0 for some", late=True),
  Mistake("Toy.preprocess = @dropping_rows", "(2, 3) ... 4 rows ... its weight to 0"),
  # Losses and metrics.
  Mistake(
    "Toy.loss = @mean_of_squares",
    "the loss is a tensor of shape () ... return Loss.from_examples(",
    late=True,
  ),
  Mistake("Toy.loss = @short_weight", "(4,) ... (1,) ... one weight for each", late=True),
  Mistake(
    "Toy.loss = @untouching",
    "none of 2 trainable variables ... kernel ... from the outputs of forward()",
    late=True,
  ),
  Mistake(
    "Toy.metrics = @mean_error",
    "'error' is a tensor of shape () ... a pair (total, weight)",
    late=True,
  ),
  # Files of images and labels.
  Mistake(
    f"{CLASSIFY}\nImageClassification.data = @fashion_mnist()\n"
    "fashion_mnist.directory = 'TMP/none'",
    "TMP/none/train-images ... does not exist",
  ),
  Mistake(IMAGES, "TMP/train/cat/1.png ... remove it", prepare=corrupt_image, fresh=True),
  Mistake(IMAGES, "TMP/eval ... 'cow' ... none of class_names", prepare=other_classes),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run folder with the checkpoint of step 2."""
  folder = tmp_path_factory.mktemp("trained")
  assert launch.main(command(folder, ["run.train_steps = 2"])) == 0
  gin.clear_config()
  return folder / "run"


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def command(folder, config, flags=()):
  """Writes the config; returns the command line that runs it."""
  imports = [line for line in config if line.startswith("import ")]
  bindings = [line for line in config if not line.startswith("import ")]
  (folder / "base.gin").write_text(CONFIG)
  (folder / "mistake.gin").write_text("\n".join([*imports, *bindings]).replace("TMP", str(folder)))
  files = [f"--gin_file={folder / name}" for name in ("base.gin", "mistake.gin")]
  usual = ["launch.py", *files, f"--model_dir={folder / 'run'}", "--accept_changes"]
  return [*usual, *(flag.replace("TMP", str(folder)) for flag in flags)]


def contents(folder):
  return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_undamaged(before, after, *, late):
  """Every file is as it was, but those that a run writes once training or evaluation has begun."""
  if not late:
    assert after == before
  for path, was in before.items():
    if path.name in ("metrics.jsonl", "history.jsonl", "0.jsonl"):
      assert after[path].startswith(was)
    elif not late or path.name not in ("operative_config.gin", "checkpoint"):
      assert after[path] == was


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.says)
def test_a_mistake(mistake, trained, folder, capsys):
  if not mistake.fresh:
    shutil.copytree(trained, folder / "run")
  mistake.prepare(folder)
  before = contents(folder / "run")

  status = launch.main(command(folder, mistake.config.splitlines(), mistake.flags))

  out, err = capsys.readouterr()
  *others, line = err.splitlines()
  assert (status, out) == (2, "")
  assert line.startswith("error: ")
  assert line.count("[") == line.count("]")  # no remains of what TensorFlow wraps it in
  assert not [other for other in others if re.match("error|failed|Traceback", other)]
  for words in mistake.says.split(" ... "):
    assert words.replace("TMP", str(folder)) in line
  check_undamaged(before, contents(folder / "run"), late=mistake.late or mistake.fresh)


def test_a_loss_that_is_not_finite(trained, folder, capsys):
  shutil.copytree(trained, folder / "run")
  before = contents(folder / "run")
  config = ["Toy.loss = @roots", "run.actions = [@StopOnNonFinite()]"]
  assert launch.main(command(folder, config)) == 1
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("failed: the loss became NaN or infinite at step 3. Try a lower learning")
  assert f"{folder}/run/checkpoints" in line
  check_undamaged(before, contents(folder / "run"), late=True)


@pytest.mark.parametrize(
  ("config", "reason", "code"),
  [
    ("Toy.outputs = @crashing", "got 'logits'", 'outputs["logits"]'),
    ("Toy.outputs = @printing", "no attribute 'numpy'", "print(outputs.numpy())"),
    ("Toy.loss = @mismatched", "input shapes: [4,1], [3,1]", "outputs @ tf.ones([3, 1])"),
    ("Toy.loss = @misspelt", "in misspelt); the batch has 'x', 'y', ", 'batch["wieght"]'),
    ("Toy.loss = @class_losses", "label value of 5 which is outside", "losses = tf.nn.sparse"),
    (
      "Toy.source = @narrow_points",
      "value 3, but received input with shape (4, 2)",
      "self.model(batch",
    ),
    (
      "Toy.source = @stream_of_full_batches",
      "has incompatible shape (4, 5, 3)",
      "self.model(batch",
    ),
  ],
)
def test_an_error_in_a_task_points_to_its_line(trained, folder, config, reason, code, capsys):
  shutil.copytree(trained, folder / "run")
  before = contents(folder / "run")
  assert launch.main(command(folder, [config])) == 1
  [line] = [n for n, text in enumerate(mistaken_lines(), 1) if code in text]
  *others, last = capsys.readouterr().err.splitlines()
  assert last.startswith("failed: ")
  assert reason in last
  assert f"(mistaken.py:{line}, in " in last
  assert "Traceback (most recent call last):" in others
  check_undamaged(before, contents(folder / "run"), late=True)


def mistaken_lines():
  return (TESTS / "mistaken.py").read_text().splitlines()


def in_its_own_process(folder, config):
  """Runs launch.py as a user would; returns the finished process."""
  environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
  line = [sys.executable, str(REPOSITORY / "launch.py"), *command(folder, config)[1:]]
  return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=TESTS)


@pytest.mark.whole
def test_the_line_is_all_there_is(folder):
  done = in_its_own_process(folder, ["Toy.loss = @column_of_squares"])
  assert (done.returncode, done.stdout) == (2, "")
  [line] = said(done.stderr).splitlines()
  assert line.startswith("error: per-example values must be a vector [n]")


@pytest.mark.whole
def test_a_traceback_is_all_there_is_after_an_error_in_a_task(folder):
  done = in_its_own_process(folder, ["Toy.outputs = @crashing"])
  assert (done.returncode, done.stdout) == (1, "")
  [line] = [n for n, text in enumerate(mistaken_lines(), 1) if 'outputs["logits"]' in text]
  assert f'mistaken.py", line {line}, in crashing' in done.stderr
  assert done.stderr.count("Traceback") == 1
  assert "WARNING" not in said(done.stderr)


@pytest.mark.whole
@pytest.mark.parametrize(("called", "status"), [("()", 2), ("", 0)])
def test_logical_cpus_with_a_task_that_starts_tensorflow(called, status, folder):
  """Without parentheses the run makes the task once the CPU is split."""
  made = "\n\n\n@register\ndef early() -> Task:\n  tf.constant(1)\n  return mistaken.Toy()\n"
  imports = "import tensorflow as tf\nimport mistaken\nfrom loopwright import Task, register\n"
  (folder / "my_early.py").write_text(imports + made)
  strategy = ["run.strategy = @auto", "auto.cpu_replicas = 2", f"run.task = @early{called}"]
  done = in_its_own_process(folder, ["import my_early", *strategy])
  assert done.returncode == status, done.stderr
  if status:
    [line] = said(done.stderr).splitlines()
    assert line.startswith("error: cpu_replicas is 2, but TensorFlow is already initialised")
    assert "write run.task = @my_task, without parentheses" in line
