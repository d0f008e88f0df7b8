"""Every mistake ends in one clear line and status 2, and damages nothing.

Each goes through the front door, `launch.main`, with a run folder that holds a trained checkpoint.
The tasks are in mistaken.py; a few runs have a process of their own, where its state matters.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import gin
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import debug_mode

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
CLASSIFY = ("import loopwright.tasks.image_classification", "run.task = @ImageClassification()")
TWO_CPUS = "devices = ('CPU:0', 'CPU:1')"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
  """What is wrong, and what the line must say; TMP stands for the test's own folder.

  config: lines that come after CONFIG. says: the offending value, and the words of the remedy.
  flags: after the usual ones. prepare: makes files in TMP, the run folder TMP/run among them.
  fresh: start without a checkpoint, which would be found foreign first. late: it shows when
  training has begun, so that the run folder may have news in it.
  """

  config: Sequence[str] = ()
  says: Sequence[str]
  flags: Sequence[str] = ()
  prepare: Callable[[Path], None] = lambda folder: None
  fresh: bool = False
  late: bool = False


def write_idx(path, array):
  head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
  path.write_bytes(head + array.tobytes())


def idx_files(folder, *, labels=(0, 1, 2, 3)):
  for split in ("train", "t10k"):
    write_idx(folder / f"{split}-images-idx3-ubyte", np.zeros([4, 28, 28], np.uint8))
    write_idx(folder / f"{split}-labels-idx1-ubyte", np.array(labels, np.uint8))


def truncated_idx(folder):
  idx_files(folder)
  path = folder / "train-images-idx3-ubyte"
  path.write_bytes(path.read_bytes()[:-9])


def label_of_eleven(folder):
  idx_files(folder, labels=(0, 1, 2, 11))


def images(folder, *, last_size=(8, 8)):
  for split in ("train", "eval"):
    for name in ("cat", "dog"):
      place = folder / split / name
      place.mkdir(parents=True)
      for number, size in enumerate(((8, 8), last_size)):
        image = tf.io.encode_png(tf.zeros([*size, 3], tf.uint8))
        (place / f"{number}.png").write_bytes(image.numpy())


def corrupt_image(folder):
  images(folder)
  path = folder / "train" / "cat" / "1.png"
  path.write_bytes(path.read_bytes()[:40])


def image_of_another_size(folder):
  images(folder, last_size=(8, 9))


def other_classes(folder):
  images(folder)
  (folder / "eval" / "dog").rename(folder / "eval" / "cow")


def damaged_checkpoint(folder):
  [path] = (folder / "run" / "checkpoints").glob("ckpt-2.data*")
  path.write_bytes(path.read_bytes()[:100])


def unimported_task(folder):
  (folder / "my_tasks.py").write_text("class Lonely(loopwright.Task): ...\n")


def failing_module(folder):
  (folder / "my_broken.py").write_text("import loopwright\nwidth = 1 / 0\n")


IMAGES = (
  *CLASSIFY,
  "ImageClassification.data = @image_folder()",
  "ImageClassification.input_shape = (8, 8, 3)",
  "ImageClassification.network = @mlp",
  "image_folder.train = 'TMP/train'",
  "image_folder.eval = 'TMP/eval'",
  "image_folder.image_size = (8, 8)",
)
IDX = (
  *CLASSIFY,
  "ImageClassification.data = @fashion_mnist()",
  "fashion_mnist.directory = 'TMP'",
)

MISTAKES = {
  # The command line and the config.
  "missing gin file": Mistake(
    flags=["--gin_file=bas.gin"], says=["'bas.gin'", "Did you mean", "base.gin'"]
  ),
  "unknown flag": Mistake(flags=["--model_dri=x"], says=["'model_dri'", "Did you mean: model_dir"]),
  "unknown mode": Mistake(flags=["--mode=trian"], says=["--mode=trian", "train_and_evaluate"]),
  "broken gin": Mistake(config=["run.seed = 3 4"], says=["mistake.gin:1", "3 4"]),
  "unknown parameter": Mistake(
    config=["run.train_step = 3"], says=["mistake.gin:1", "'train_step'", "'train_steps'?"]
  ),
  "unknown name": Mistake(config=["run.task = @Toi()"], says=["'Toi'", "Did you mean 'Toy'?"]),
  "wrong type": Mistake(config=["run.train_steps = '9'"], says=["'9'", "int", "without quotes"]),
  "missing module": Mistake(
    config=["import loopwright.tasks.gann"],
    says=["'loopwright.tasks.gann'", "Did you mean 'loopwright.tasks.gan'?"],
  ),
  "missing task import": Mistake(
    config=["run.task = @Lonely()"],
    prepare=unimported_task,
    says=["'Lonely'", "Add `import my_tasks`"],
  ),
  "module that fails": Mistake(
    config=["import my_broken"],
    prepare=failing_module,
    says=["my_broken.py:2", "ZeroDivisionError: division by zero"],
  ),
  "unused binding": Mistake(
    config=["keras.SGD.momentum = 0.5"],
    says=["nothing uses keras.SGD.momentum", "Add `run.optimizer = @keras.SGD`"],
  ),
  "contradicting bindings": Mistake(
    config=["run.seed = 3", "run.seed = 4"],
    says=["run.seed is 4, but 3", "mistake.gin:1", "Remove one"],
  ),
  # The numbers of a run.
  "train_steps 0": Mistake(
    config=["run.train_steps = 0"], says=["run.train_steps is 0", "at least 1"]
  ),
  "steps_per_loop 0": Mistake(
    config=["run.steps_per_loop = 0"], says=["run.steps_per_loop is 0", "at least 1"]
  ),
  "batch of 0": Mistake(
    config=["run.global_batch_size = 0"], says=["run.global_batch_size is 0", "at least 1"]
  ),
  "eval batch below 0": Mistake(
    config=["run.eval_batch_size = -4"], says=["run.eval_batch_size is -4", "at least 1"]
  ),
  "batch smaller than replicas": Mistake(
    config=["run.strategy = @mirrored", "mirrored.cpu_replicas = 4", "run.global_batch_size = 3"],
    says=["batch_size is 3", "4 replicas", "at least 4"],
  ),
  "negative seed": Mistake(config=["run.seed = -1"], says=["seed is -1", "from 0 to 2147483647"]),
  "unknown precision": Mistake(
    config=["run.precision = 'fp16'"], says=["'fp16'", "'mixed_float16'"]
  ),
  "no accumulation": Mistake(
    config=["Trainer.accumulation_steps = 0"], says=["accumulation_steps is 0", "at least 1"]
  ),
  "clip_norm 0": Mistake(
    config=["Trainer.clip_norm = 0.0"], says=["Trainer.clip_norm is 0.0", "above 0"]
  ),
  "both clips": Mistake(
    config=["Trainer.clip_norm = 1.0", "Trainer.clip_value = 2.0"],
    says=["clip_norm=1.0 and Trainer.clip_value=2.0", "choose one"],
  ),
  "ema_decay 1.5": Mistake(
    config=["Trainer.ema_decay = 1.5"], says=["Trainer.ema_decay is 1.5", "between 0 and 1"]
  ),
  "loss scale that shrinks": Mistake(
    config=["Trainer.loss_scale = @dynamic", "dynamic.factor = 0.5"],
    says=["dynamic.factor is 0.5", "above 1"],
  ),
  "unknown wire dtype": Mistake(
    config=["Trainer.reduction = @Reduction()", "Reduction.wire_dtype = 'fp8'"],
    says=["'fp8'", "'bfloat16'"],
  ),
  "eager and jit_compile": Mistake(
    config=["run.eager = True", "Trainer.jit_compile = True"],
    says=["eager=True and Trainer.jit_compile=True", "choose one"],
  ),
  "no weights to start from": Mistake(
    config=["run.warm_start = @WarmStart()", "WarmStart.path = 'TMP/nowhere'"],
    says=["WarmStart.path is 'TMP/nowhere'", "give a run folder"],
    fresh=True,
  ),
  "two batch sizes": Mistake(
    config=["run.per_replica_batch_size = 2"],
    says=["both run.global_batch_size and run.per_replica_batch_size are set", "keep one"],
  ),
  "no batch size": Mistake(
    config=["run.global_batch_size = None"],
    says=["neither run.global_batch_size nor run.per_replica_batch_size is set", "add one"],
  ),
  # Strategies.
  "unknown strategy": Mistake(
    config=["run.strategy = @mirored"], says=["'mirored'", "Did you mean 'mirrored'?"]
  ),
  "strategy with parentheses": Mistake(
    config=["run.strategy = @mirrored()"], says=["@mirrored()", "without parentheses"]
  ),
  "unknown op": Mistake(
    config=["run.strategy = @mirrored", "mirrored.cross_device_ops = 'ncl'"],
    says=["'ncl'", "Did you mean 'nccl'?"],
  ),
  "nccl on CPUs": Mistake(
    config=[
      "run.strategy = @mirrored",
      f"mirrored.{TWO_CPUS}",
      "mirrored.cross_device_ops = 'nccl'",
    ],
    says=["'nccl'", "CPU:0 is not a GPU", "use 'collective'"],
  ),
  "hierarchical_copy with 3": Mistake(
    config=[
      "run.strategy = @mirrored",
      "mirrored.devices = ('CPU:0', 'CPU:1', 'CPU:2')",
      "mirrored.cross_device_ops = 'hierarchical_copy'",
    ],
    says=["'hierarchical_copy' with 3 replicas", "use an even number"],
  ),
  "a GPU where there is none": Mistake(
    config=["run.strategy = @mirrored", "mirrored.devices = ('GPU:0',)"],
    says=["'GPU:0'", "one of CPU:0"],
  ),
  "more logical CPUs than at the start": Mistake(
    config=["run.strategy = @mirrored", "mirrored.cpu_replicas = 8"],
    says=["cpu_replicas is 8", "already initialised", "start a new process"],
  ),
  "jit_compile with central_storage": Mistake(
    config=[
      "run.strategy = @central_storage",
      f"central_storage.{TWO_CPUS}",
      "Trainer.jit_compile = True",
    ],
    says=["jit_compile=True and run.strategy=@central_storage", "use mirrored"],
  ),
  # The run folder.
  "model_dir is a file": Mistake(
    flags=["--model_dir=TMP/base.gin"], says=["TMP/base.gin", "cannot write", "set --model_dir to"]
  ),
  "model_dir with wildcards": Mistake(
    flags=["--model_dir=TMP/run[1]"], says=["TMP/run[1]", "wildcards", "choose a name without"]
  ),
  "model_dir that cannot be made": Mistake(
    flags=["--model_dir=/proc/loopwright"], says=["'/proc/loopwright'", "a writable folder"]
  ),
  "evaluate without checkpoint": Mistake(
    flags=["--mode=evaluate"], fresh=True, says=["no checkpoint in TMP/run", "train first"]
  ),
  "export without checkpoint": Mistake(
    flags=["--mode=export"], fresh=True, says=["no checkpoint in TMP/run", "train first"]
  ),
  "damaged checkpoint": Mistake(
    prepare=damaged_checkpoint,
    says=["TMP/run/checkpoints", "damaged", "choose another --model_dir"],
  ),
  "checkpoint of another task": Mistake(
    config=["run.task = @WithoutForward()"],
    says=["another experiment", "'mistaken.Toy'", "choose another --model_dir"],
  ),
  "checkpoint of another optimizer": Mistake(
    config=["run.optimizer = @keras.SGD"],
    says=["another experiment", "'default: Adam'", "choose another --model_dir"],
  ),
  "checkpoint of another model": Mistake(
    config=["Toy.model = @wider"], says=["does not fit", "choose another --model_dir"]
  ),
  # Optimizers and actions.
  "optimizer with parentheses": Mistake(
    config=["run.optimizer = @keras.Adam()"], says=["@keras.Adam()", "without parentheses"]
  ),
  "unknown optimizer": Mistake(
    config=["run.optimizer = @keras.Adm"], says=["'keras.Adm'", "Did you mean 'keras.Adam'?"]
  ),
  "what is no optimizer": Mistake(
    config=["run.optimizer = @no_optimizer"], says=["a NoneType", "must be a Keras 3 optimizer"]
  ),
  "Keras's LossScaleOptimizer": Mistake(
    config=["run.optimizer = @scaled_adam"], says=["a LossScaleOptimizer", "Trainer.loss_scale"]
  ),
  "Keras's LossScaleOptimizer in gin": Mistake(
    config=["run.optimizer = @keras.LossScaleOptimizer"],
    says=["'keras.LossScaleOptimizer'", "Trainer.loss_scale = @dynamic"],
  ),
  "gradient_accumulation_steps": Mistake(
    config=["run.optimizer = @keras.Adam", "keras.Adam.gradient_accumulation_steps = 2"],
    fresh=True,
    says=["gradient_accumulation_steps=2", "use Trainer.accumulation_steps"],
  ),
  "learning rate in words": Mistake(
    config=["run.optimizer = @keras.Adam", "keras.Adam.learning_rate = 'fast'"],
    says=["learning_rate=fast", "should be float"],
  ),
  "update of an optimizer that is not there": Mistake(
    config=["run.optimizer = {'a': @keras.Adam, 'b': @keras.SGD}", "Toy.optimizer = 'c'"],
    fresh=True,
    says=["unknown optimizer 'c'", "one of a, b"],
  ),
  "EarlyStopping on an unknown metric": Mistake(
    config=[
      "run.actions = [@EarlyStopping()]",
      "EarlyStopping.metric = 'los'",
      "EarlyStopping.patience = 1",
    ],
    late=True,
    says=["unknown EarlyStopping.metric 'los'", "Did you mean 'loss'?"],
  ),
  # What a task must define.
  "no forward()": Mistake(
    config=["run.task = @WithoutForward()"],
    fresh=True,
    says=["WithoutForward", "forward(batch, training)", "loopwright/task.py"],
  ),
  "build_model() returns None": Mistake(
    config=["Toy.model = @no_model"], says=["build_model() returned a NoneType", "a Keras model"]
  ),
  "unbuilt model": Mistake(
    config=["Toy.model = @unbuilt_model"], says=["no trainable variable", "give it an Input"]
  ),
  "frozen model": Mistake(
    config=["Toy.model = @frozen_model"], says=["no trainable variable", "build_model()"]
  ),
  # Sources and preprocessing.
  "no source": Mistake(config=["Toy.source = @no_source"], says=["source is None", "ArraySource"]),
  "source is a Dataset": Mistake(
    config=["Toy.source = @bare_dataset"], says=["TensorSliceDataset", "StreamSource(dataset=...)"]
  ),
  "features of different lengths": Mistake(
    config=["Toy.source = @unequal_features"], says=["'x' 10, 'y' 7", "one row per example"]
  ),
  "source without rows": Mistake(
    config=["Toy.source = @no_rows"], says=["(x, y) have no rows", "at least one example"]
  ),
  "stream of tuples": Mistake(
    config=["Toy.source = @stream_of_tuples"], says=["a tuple; they must be dicts", "dataset.map"]
  ),
  "stream of batches": Mistake(
    config=["Toy.source = @stream_of_batches"], says=["'x'", "(None, 3)", "static shape"]
  ),
  "empty stream": Mistake(
    config=["Toy.source = @empty_stream"], late=True, says=["no examples", "at least one"]
  ),
  "empty stream to evaluate": Mistake(
    config=["Toy.source = @empty_stream"],
    flags=["--mode=evaluate"],
    late=True,
    says=["source('eval') has no examples", "at least one"],
  ),
  "negative weights": Mistake(
    config=["Toy.source = @negative_weights"], says=["-1.0 at example 0", "not negative"]
  ),
  "all weights zero in the source": Mistake(
    config=["Toy.source = @weightless"], late=True, says=["up to step 4", "above 0 for some"]
  ),
  "all weights zero by preprocess": Mistake(
    config=["Toy.preprocess = @weighting_nothing"], late=True, says=["up to step 4", "above 0 for"]
  ),
  "all weights zero in evaluation": Mistake(
    config=["Toy.source = @weightless"],
    flags=["--mode=evaluate"],
    late=True,
    says=["3 evaluation batches", "weight 0", "above 0 for some"],
  ),
  "preprocess drops rows": Mistake(
    config=["Toy.preprocess = @dropping_rows"], says=["(2, 3)", "4 rows", "its weight to 0"]
  ),
  "preprocess filters rows": Mistake(
    config=["Toy.preprocess = @filtering_rows"], says=["(None, 3)", "tf.ensure_shape"]
  ),
  "preprocess drops the weight": Mistake(
    config=["Toy.preprocess = @dropping_weight"], says=["'weight'", "{**batch, ...}"]
  ),
  "preprocess returns nothing": Mistake(
    config=["Toy.preprocess = @returning_nothing"], says=["returned None", "return a dict"]
  ),
  # Losses and metrics.
  "loss is a mean": Mistake(
    config=["Toy.loss = @mean_of_squares"],
    late=True,
    says=["the loss is a tensor of shape ()", "return Loss.from_examples("],
  ),
  "loss is None": Mistake(
    config=["Toy.loss = @no_loss"], late=True, says=["the loss is None", "Loss.from_examples("]
  ),
  "loss is a column": Mistake(
    config=["Toy.loss = @column_of_squares"], late=True, says=["(4, 1)", "a vector [n]"]
  ),
  "loss is not summed": Mistake(
    config=["Toy.loss = @unsummed_squares"],
    late=True,
    says=["Loss.total has shape (4,)", "use Loss.from_examples("],
  ),
  "weight of another length": Mistake(
    config=["Toy.loss = @short_weight"], late=True, says=["(4,)", "(1,)", "one weight for each"]
  ),
  "loss touches no variable": Mistake(
    config=["Toy.loss = @untouching"],
    late=True,
    says=["none of 2 trainable variables", "kernel", "from the outputs of forward()"],
  ),
  "metric is a mean": Mistake(
    config=["Toy.metrics = @mean_error"],
    late=True,
    says=["'error' is a tensor of shape ()", "a pair (total, weight)"],
  ),
  "metric is not summed": Mistake(
    config=["Toy.metrics = @vector_metric"], late=True, says=["'error'", "(4,)", "sums"]
  ),
  "metrics without names": Mistake(
    config=["Toy.metrics = @unnamed_metric"], late=True, says=["a tuple", "dict of name ->"]
  ),
  "metric named step": Mistake(
    config=["Toy.metrics = @named_step"], late=True, says=["'step'", "rename it"]
  ),
  "metric named loss": Mistake(
    config=["Toy.metrics = @named_loss"], late=True, says=["'loss'", "rename it"]
  ),
  # Files of images and labels.
  "missing idx folder": Mistake(
    config=[*IDX[:-1], "fashion_mnist.directory = 'TMP/none'"],
    says=["TMP/none/train-images", "does not exist"],
  ),
  "idx cut short": Mistake(
    config=IDX, prepare=truncated_idx, says=["images-idx3", "3143 bytes", "download it again"]
  ),
  "label out of range": Mistake(
    config=IDX, prepare=label_of_eleven, says=["label 11", "classes is 10", "at least 12"]
  ),
  "input_shape of other images": Mistake(
    config=[*IDX, "ImageClassification.input_shape = (8, 8, 1)"],
    prepare=idx_files,
    says=["(28, 28, 1)", "input_shape is (8, 8, 1)", "make them equal"],
  ),
  "missing image folder": Mistake(
    config=IMAGES, says=["TMP/train", "not a folder", "one folder per class"]
  ),
  "corrupt image": Mistake(
    config=IMAGES, prepare=corrupt_image, fresh=True, says=["TMP/train/cat/1.png", "remove it"]
  ),
  "image of another size": Mistake(
    config=[*IMAGES, "image_folder.resize = False"],
    prepare=image_of_another_size,
    fresh=True,
    says=["1.png", "8x9 (height x width), not 8x8", "set resize=True"],
  ),
  "classes of another folder": Mistake(
    config=IMAGES, prepare=other_classes, says=["(cat, cow)", "(cat, dog)", "same subfolders"]
  ),
}


@contextlib.contextmanager
def process_restored():
  """Takes back what a run sets for the whole process."""
  path, environment = [*sys.path], dict(os.environ)
  try:
    yield
  finally:
    gin.clear_config()
    debug_mode.toggle_debug_mode(False)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run folder with the checkpoint of step 2."""
  folder = tmp_path_factory.mktemp("trained")
  with process_restored():
    assert launch.main(command(folder, ["run.train_steps = 2"])) == 0
  return folder / "run"


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with process_restored():
    yield tmp_path


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


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name, trained, folder, capsys):
  mistake = MISTAKES[name]
  if not mistake.fresh:
    shutil.copytree(trained, folder / "run")
  mistake.prepare(folder)
  before = contents(folder / "run")

  status = launch.main(command(folder, mistake.config, mistake.flags))

  out, err = capsys.readouterr()
  *others, line = err.splitlines()
  assert (status, out) == (2, "")
  assert line.startswith("error: ")
  assert line.count("[") == line.count("]")  # no remains of what TensorFlow wraps it in
  assert not [other for other in others if re.match("error|failed|Traceback", other)]
  for words in mistake.says:
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
def test_the_line_is_all_there_is_beside_the_description(folder):
  done = in_its_own_process(folder, ["Toy.loss = @column_of_squares"])
  assert (done.returncode, done.stdout) == (2, "")
  *description, line = done.stderr.splitlines()
  assert [row.partition("  ")[0] for row in description] == [
    *("task", "model", "strategy", "batch", "reduction", "precision", "loss scale", "optimizer"),
    *("steps", "model_dir"),
  ]
  assert line.startswith("error: per-example values must be a vector [n]")


@pytest.mark.whole
def test_a_traceback_is_all_there_is_after_an_error_in_a_task(folder):
  done = in_its_own_process(folder, ["Toy.outputs = @crashing"])
  assert (done.returncode, done.stdout) == (1, "")
  [line] = [n for n, text in enumerate(mistaken_lines(), 1) if 'outputs["logits"]' in text]
  assert f'mistaken.py", line {line}, in crashing' in done.stderr
  assert done.stderr.count("Traceback") == 1
  assert "WARNING" not in done.stderr


@pytest.mark.whole
def test_logical_cpus_after_tensorflow_has_started(folder):
  (folder / "my_early.py").write_text("import tensorflow as tf\nONE = tf.constant(1)\n")
  config = ["import my_early", "run.strategy = @auto", "auto.cpu_replicas = 2"]
  done = in_its_own_process(folder, config)
  assert (done.returncode, done.stdout) == (2, "")
  [line] = done.stderr.splitlines()
  assert line.startswith("error: cpu_replicas is 2, but TensorFlow is already initialised")


def test_no_gin_file(folder, capsys):
  assert launch.main(["launch.py"]) == 2
  assert capsys.readouterr().err.startswith("error: no gin file; add one, for example --gin_file=")
