"""What a checkpoint holds, that it is whole or absent, and what is done if it is neither."""

import contextlib
import os
import re
import threading
from pathlib import Path

import everything
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from defects import small
from tensorflow.python.checkpoint import functional_saver

from loopwright import errors
from loopwright.host import files
from loopwright.models import models
from loopwright.optimizers import loss_scale
from loopwright.run_folder import checkpoints
from loopwright.run_folder.checkpoint_files import list_checkpoints
from loopwright.runs.runner import run

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def one_replica():
  return tf.distribute.OneDeviceStrategy("CPU:0")


@pytest.fixture
def strategies(mirrored):
  return {1: one_replica(), 4: mirrored(4)}


@pytest.fixture
def held_writes(monkeypatch):
  """Makes a context in which TensorFlow reads values, but writes none until its end."""
  write = functional_saver._single_shard_save

  @contextlib.contextmanager
  def hold():
    began, go = threading.Event(), threading.Event()

    def late(*args):
      began.set()
      go.wait(60)
      return write(*args)

    with monkeypatch.context() as patched:
      patched.setattr(functional_saver, "_single_shard_save", late)
      try:
        yield
        assert began.wait(60)  # something was held
      finally:
        go.set()

  return hold


@pytest.fixture
def log(caplog):
  """What was logged, as text."""
  return lambda: "\n".join(record.getMessage() for record in caplog.records)


# ---- Exact resume: these compile ----


@pytest.mark.parametrize(("library", "replicas"), [("keras", 1), ("keras", 4), ("tf_keras", 4)])
@pytest.mark.fast(replicas=[1])
def test_resume_is_exact_to_the_bit(strategies, tmp_path, library, replicas, held_writes):
  """Also if training went on before the first value was written."""

  def make(**options):
    """With batch normalisation, whose statistics each replica gathers for itself."""
    made = everything.Everything(library=library, normalized=True)
    return everything.make_trainer(strategies[replicas], library=library, made=made, **options)

  whole = make()
  manager = everything.make_manager(whole, tmp_path)
  everything.train(whole, 3)
  everything.train(whole, 3)
  with held_writes():
    manager.save()
    metrics = everything.train(whole, 6)
    assert not (tmp_path / "ckpt-6.index").exists()
  expected = everything.read(manager.checkpoint.write(str(tmp_path / "whole")))
  averages = [average.numpy().tobytes() for average in whole.parts.ema.averages]
  assert_copies_agree(whole, manager)

  resumed = make(weights_seed=6)
  manager = everything.make_manager(resumed, tmp_path)
  assert manager.restore_or_initialize() == str(tmp_path / "ckpt-6")
  assert everything.train(resumed, 6) == metrics
  got = everything.read(manager.checkpoint.write(str(tmp_path / "resumed")))
  assert everything.differing(got, expected) == []
  assert [average.numpy().tobytes() for average in resumed.parts.ema.averages] == averages

  skipped = [
    int(read["skipped_steps/.ATTRIBUTES/VARIABLE_VALUE"])
    for read in (everything.read(tmp_path / "ckpt-6"), expected)
  ]
  assert 0 < skipped[0] < skipped[1] < 12  # so the loss scale and skipping were at work
  assert resumed.task.model["stream"].seen() == expected_ids(12 * everything.BATCH)


@keras.saving.register_keras_serializable()
class Stack(keras.Model):
  """Holds its layers in a list, into which `tf.train.Checkpoint` does not look."""

  def __init__(self):
    super().__init__()
    self.blocks = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    self.build([None, small.FEATURES])

  def build(self, shape):
    for block in self.blocks:
      block.build(shape)
      shape = block.compute_output_shape(shape)

  def call(self, x, training=False):
    for block in self.blocks:
      x = block(x)
    return x


class Stacked(small.Small):
  def build_model(self):
    return Stack()


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.fast(replicas=[1])
def test_variables_in_a_list_of_layers_are_restored(strategies, tmp_path, replicas):
  def go(mode, seed):
    return run(
      task=Stacked, mode=mode, seed=seed, model_dir=str(tmp_path), train_steps=4,
      global_batch_size=12, steps_per_loop=2, strategy=lambda: strategies[replicas],
    )  # fmt: skip

  with strategies[replicas].scope():
    model = Stack()
  assert len(models.untracked(model)) == len(models.all_variables(model)) == 2 + 4 + 2
  trained = go("train_and_evaluate", seed=3)
  assert go("evaluate", seed=7) == trained


def test_a_tracked_model_has_nothing_untracked():
  for library in (keras, tf_keras):
    layers = [library.layers.Input([2]), library.layers.BatchNormalization()]
    layers += [library.layers.Dropout(0.5), library.layers.Dense(1)]
    assert models.untracked({"a": library.Sequential(layers)}) == {}


def expected_ids(count):
  batches = everything.dataset(everything.Everything(), count, 1, 0)
  return next(batches.as_numpy_iterator())["example_id"].tolist()


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.fast(library=["keras"])
def test_other_numbers_of_replicas_go_on_alike(strategies, tmp_path, library):
  """Without dropout, whose masks are each replica's own."""
  trainers = {
    n: everything.make_trainer(
      strategy, library=library, made=everything.Everything(library=library, dropout=0.0)
    )
    for n, strategy in strategies.items()
  }
  managers = {n: everything.make_manager(t, tmp_path / str(n)) for n, t in trainers.items()}
  saved, final = {}, {}
  for n, trainer in trainers.items():
    everything.train(trainer, 6)
    saved[n] = managers[n].save()
    managers[n].wait()
    everything.train(trainer, 6)
    final[n] = everything.read(managers[n].checkpoint.write(str(tmp_path / f"final{n}")))
  for n, other in ((1, 4), (4, 1)):
    managers[n].restore(saved[other])
    restored = everything.read(managers[n].checkpoint.write(str(tmp_path / f"restored{n}")))
    assert everything.differing(restored, everything.read(saved[other])) == []
    assert_copies_agree(trainers[n], managers[n])
    everything.train(trainers[n], 6)
    got = everything.read(managers[n].checkpoint.write(str(tmp_path / f"again{n}")))
    assert_close(got, final[other])
    assert trainers[n].traces == 1  # restoring does not retrace


def assert_copies_agree(trainer, manager):
  for variable in checkpoints.variables_of(manager.checkpoint).values():
    copies = trainer.strategy.experimental_local_results(models.raw(variable))
    assert all(np.array_equal(copy.numpy(), copies[0].numpy()) for copy in copies)


def assert_close(got, expected):
  for key in expected:
    value = np.asarray(expected[key])
    if value.dtype.kind == "f":
      np.testing.assert_allclose(got[key], value, rtol=2e-5, atol=2e-6, err_msg=key)
    else:
      assert np.array_equal(got[key], value), key


def test_another_batch_size_goes_on_at_the_right_example(tmp_path):
  first = everything.make_trainer(one_replica())
  everything.train(first, 2)
  saver = everything.make_manager(first, tmp_path)
  saver.save()
  saver.wait()
  second = everything.make_trainer(one_replica(), batch=7)
  everything.make_manager(second, tmp_path).restore_or_initialize()
  everything.train(second, 3)
  assert second.task.model["stream"].seen() == expected_ids(2 * everything.BATCH + 3 * 7)
  assert second.position.numpy() == 2 * everything.BATCH + 3 * 7


# ---- What is saved: from here on nothing is trained ----


@pytest.fixture(scope="module")
def trainer():
  return everything.make_trainer(one_replica())


@pytest.fixture
def manager(trainer, tmp_path):
  reset(trainer)
  return everything.make_manager(trainer, tmp_path / "checkpoints")


def reset(trainer):
  """Makes a fresh run of the trainer."""
  for variable in (trainer.global_step, trainer.position):
    variable.assign(0)
  kernel(trainer).assign(tf.zeros([5, 8]))


def kernel(trainer):
  return models.raw(trainer.task.model["network"].layers[0].kernel)


def save(manager, *steps):
  """Pretends to have trained to each of `steps`: the first kernel tells which; returns paths."""
  trainer = manager._trainer
  for step in steps:
    trainer.global_step.assign(step)
    trainer.position.assign(step * everything.BATCH)
    kernel(trainer).assign(tf.fill([5, 8], float(step)))
    manager.save()
  return manager.checkpoints


def restored_step(manager):
  """Restores into a fresh run and returns the step; all must be of the same checkpoint."""
  trainer = manager._trainer
  reset(trainer)
  fresh = everything.make_manager(trainer, manager.directory)
  path = fresh.restore_or_initialize()
  step = int(trainer.global_step.numpy())
  assert path == (os.path.join(manager.directory, f"ckpt-{step}") if step else None)
  assert trainer.position.numpy() == step * everything.BATCH
  assert (kernel(trainer).numpy() == step).all()
  return step


def names(manager):
  return sorted(os.listdir(manager.directory))


def files_of(*steps):
  return [f"ckpt-{s}.{e}" for s in steps for e in ("data-00000-of-00001", "index")]


def test_everything_is_saved(manager):
  [path] = save(manager, 10)
  keys = {key.removesuffix(VALUE) for key in everything.read(path)}
  assert {re.split(r"[/_]", key)[0] for key in keys} == {
    "model", "optimizers", "loss", "ema", "experiment",
    "global", "position", "skipped", "nonfinite", "save",
  }  # fmt: skip
  assert {"loss_scale/_scale", "loss_scale/_good_steps", "model/stream/ids"} <= keys
  assert {f"ema/{i}" for i in range(4)} <= keys
  assert keys == {k.removesuffix(VALUE) for k in checkpoints.variables_of(manager.checkpoint)}


def test_the_keys_are_tensorflows(mirrored, tmp_path):
  """They name differences: both generations of Keras, replicas, what TensorFlow escapes."""
  with mirrored(2).scope():
    made = {
      "a/b.c": keras.Sequential([keras.Input([3, 3]), keras.layers.BatchNormalization()]),
      "d": tf_keras.Sequential([tf_keras.Input([3, 3]), tf_keras.layers.BatchNormalization()]),
      "e": [everything.Stream(), {"f": tf.Variable(1.0)}],
    }
    root = tf.train.Checkpoint(model=made)
  saved = everything.read(root.write(str(tmp_path / "x"))).keys()
  assert checkpoints.variables_of(root).keys() == saved


def test_nothing_is_saved_twice(trainer, manager):
  assert manager.save() is None  # step 0
  save(manager, 10)
  written = os.stat(f"{manager.latest_checkpoint}.index").st_mtime_ns
  assert manager.save() is None
  assert names(manager) == ["checkpoint", *files_of(10)]
  save(manager, 19)
  save(manager, 29)
  assert [os.path.basename(p) for p in manager.checkpoints] == ["ckpt-10", "ckpt-19", "ckpt-29"]
  assert os.stat(f"{manager.checkpoints[0]}.index").st_mtime_ns == written
  assert restored_step(manager) == 29
  saver = everything.make_manager(trainer, manager.directory)
  assert saver.save()
  saver.wait()
  manager.restore(manager.latest_checkpoint)
  assert manager.save() is None


def test_only_the_newest_are_kept(trainer, tmp_path):
  manager = everything.make_manager(trainer, tmp_path)
  assert save(manager, 1) == [f"{tmp_path}/ckpt-1"]
  save(manager, 2, 3, 4)
  assert names(manager) == sorted(["checkpoint", *files_of(2, 3, 4)])
  manager = everything.make_manager(trainer, tmp_path, keep=2)
  save(manager, 5)
  assert names(manager) == sorted(["checkpoint", *files_of(4, 5)])
  manager = everything.make_manager(trainer, tmp_path, keep=1)  # also those of earlier processes
  save(manager, 10)
  assert names(manager) == sorted(["checkpoint", *files_of(10)])


def test_a_damaged_later_one_does_not_push_out_whole_ones(trainer, tmp_path):
  manager = everything.make_manager(trainer, tmp_path, keep=1)
  save(manager, 20)
  for name in files_of(20):
    (tmp_path / name).rename(tmp_path / name.replace("20", "90"))
  (tmp_path / "ckpt-90.index").write_bytes(b"")
  save(manager, 30, 40)
  assert names(manager) == sorted(["checkpoint", *files_of(40, 90)])
  assert restored_step(manager) == 40


def test_tensorflow_finds_them_wherever_the_folder_goes(manager, tmp_path):
  save(manager, 10, 20)
  os.rename(manager.directory, tmp_path / "moved")
  moved = str(tmp_path / "moved")
  assert tf.train.latest_checkpoint(moved) == os.path.join(moved, "ckpt-20")
  assert tf.train.get_checkpoint_state(moved).all_model_checkpoint_paths == list_checkpoints(moved)


# ---- Damage ----


def truncated(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
  path.write_bytes(b"")


def flipped(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 4
  path.write_bytes(content)


DAMAGE = [truncated, emptied, flipped, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["data-00000-of-00001", "index"])
def test_a_damaged_file_is_reported_and_passed_over(manager, log, damage, file):
  save(manager, 10, 20, 30)
  damage(Path(manager.directory) / f"ckpt-30.{file}")
  assert restored_step(manager) == 20
  gone = (file, damage) == ("index", Path.unlink)
  state = "is incomplete, as after a kill" if gone else "is damaged ("
  assert f"checkpoint {manager.directory}/ckpt-30 {state}" in log()
  assert gone or "); skipping it" in log()
  damage(Path(manager.directory) / f"ckpt-20.{file}")
  assert restored_step(manager) == 10


@pytest.mark.whole
def test_every_byte_of_an_index_counts(manager, log):
  """Whatever happens to it: the same values or the checkpoint before, and never a crash."""
  save(manager, 10, 20)
  index = Path(manager.directory) / "ckpt-20.index"
  whole = index.read_bytes()
  for position in range(0, len(whole), 29):
    index.write_bytes(whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :])
    assert restored_step(manager) in (10, 20)
    index.write_bytes(whole[:position])
    assert restored_step(manager) == 10


def test_a_damaged_one_is_written_again(manager):
  save(manager, 10, 20)
  truncated(Path(manager.directory) / "ckpt-20.index")
  manager.restore_or_initialize()
  save(manager, 20)
  assert restored_step(manager) == 20


@pytest.mark.parametrize("damage", DAMAGE[:3])
def test_without_a_whole_one_nothing_is_touched(manager, damage):
  save(manager, 10, 20)
  for name in names(manager)[1:]:
    damage(Path(manager.directory) / name)
  before = contents(manager.directory)
  with pytest.raises(errors.ConfigError) as caught:
    restored_step(manager)
  assert str(caught.value) == (
    f"all 2 checkpoints in {manager.directory} are damaged; restore the folder from a "
    "good copy, or choose another --model_dir to start afresh."
  )
  assert contents(manager.directory) == before


def contents(directory):
  files = [Path(directory) / name for name in os.listdir(directory)]
  return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"\xff\xfe\x00", b'x: "y"\n'])
def test_the_state_file_does_not_matter(manager, content):
  save(manager, 10, 20)
  state = Path(manager.directory) / "checkpoint"
  state.unlink()
  if content is not None:
    state.write_bytes(content)
  assert restored_step(manager) == 20
  save(everything.make_manager(manager._trainer, manager.directory), 30)
  assert tf.train.latest_checkpoint(manager.directory).endswith("ckpt-30")


def test_leftovers_are_reported_and_removed_by_the_next_save(manager, log):
  save(manager, 10, 20)
  folder = Path(manager.directory)
  left = ["ckpt-30.data-00000-of-00001", "ckpt-30.data-00000-of-00001.tempstate7", "ckpt-30_temp/x"]
  left += [f"{checkpoints.UNFINISHED}/ckpt-40_temp/part-00000-of-00001.data-00000-of-00001"]
  for name in left:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"left")
  assert restored_step(manager) == 20
  for name in ("ckpt-30", checkpoints.UNFINISHED):
    assert f"checkpoint {folder}/{name} is incomplete, as after a kill" in log()
  save(manager, 50)
  assert names(manager) == sorted(["checkpoint", *files_of(10, 20, 50)])


class Killed(BaseException):
  """Stands for SIGKILL."""


@pytest.mark.parametrize("damaged_before", [False, True])
@pytest.mark.fast(damaged_before=[True])
def test_a_kill_at_any_operation_of_a_save(manager, monkeypatch, log, damaged_before):
  outcomes = []
  while "whole" not in outcomes:
    for name in names(manager) if os.path.isdir(manager.directory) else []:
      tf.io.gfile.rmtree(os.path.join(manager.directory, name))
    trainer = manager._trainer
    manager = everything.make_manager(trainer, manager.directory, keep=2)
    save(manager, 10, 20)
    if damaged_before:
      save(manager, 30)
      flipped(Path(manager.directory) / "ckpt-30.index")
      manager = everything.make_manager(trainer, manager.directory, keep=2)
      save(manager, 10, 20)
    outcomes.append(save_killed_at(manager, len(outcomes), monkeypatch))
    step = restored_step(manager)
    assert step in (20, 30)
    manager = everything.make_manager(trainer, manager.directory, keep=2)
    manager.restore_or_initialize()
    save(manager, 40)
    assert names(manager) == sorted(["checkpoint", *files_of(step, 40)])
  assert len(outcomes) > 7
  assert damaged_before or "damaged" not in log()  # complete or absent


def save_killed_at(manager, operation, monkeypatch):
  """Saves step 30, but dies just before so many file operations."""
  count = [operation]

  def mortal(function):
    def call(*args, **kwargs):
      if count[0] == 0:
        raise Killed
      count[0] -= 1
      return function(*args, **kwargs)

    return call

  with monkeypatch.context() as patch:
    for name in ("rename", "remove", "rmtree", "makedirs", "GFile"):
      patch.setattr(tf.io.gfile, name, mortal(getattr(tf.io.gfile, name)))
    patch.setattr(manager.checkpoint, "write", mortal(manager.checkpoint.write))
    patch.setattr(files, "sync", mortal(files.sync))
    try:
      save(manager, 30)
    except Killed:
      return "killed"
  return "whole"


class Disk:
  """Notes what has reached the disk: contents by inode, and the names of a folder."""

  def __init__(self, monkeypatch):
    self._contents, self._names, fsync = {}, {}, os.fsync

    def noted(descriptor):
      fsync(descriptor)
      path = os.readlink(f"/proc/self/fd/{descriptor}")
      if os.path.isdir(path):
        self._names[path] = self._listed(path)
      else:
        self._contents[os.stat(path).st_ino] = Path(path).read_bytes()

    monkeypatch.setattr(os, "fsync", noted)

  def _listed(self, folder):
    return {name: os.stat(os.path.join(folder, name)).st_ino for name in os.listdir(folder)}

  def after_power_loss(self, folder):
    """Name -> content, empty if that was never flushed: what ext4 leaves."""
    return {n: self._contents.get(inode, b"") for n, inode in self._names.get(folder, {}).items()}


def test_a_power_loss_leaves_a_checkpoint_whenever_it_comes(manager, tmp_path, monkeypatch):
  """Before each file operation the disk has all of the newest checkpoint or of the one before."""
  manager = everything.make_manager(
    manager._trainer, manager.directory, keep=1, logs=[str(tmp_path / "metrics.jsonl")]
  )
  disk, looks = Disk(monkeypatch), []

  def look():
    kept = disk.after_power_loss(manager.directory)
    there = [step for step in (10, 20, 30) if all(kept.get(name) for name in files_of(step))]
    looks.append(there)
    for step in there:
      for name in files_of(step):
        written = Path(manager.directory, name)
        assert not written.exists() or kept[name] == written.read_bytes()
    if there:
      log = disk._contents[(tmp_path / "metrics.jsonl").stat().st_ino]
      assert log.count(b"step") * 10 >= there[-1]

  def seen(function):
    return lambda *args, **kwargs: look() or function(*args, **kwargs)

  for name in ("rename", "remove", "rmtree", "GFile"):
    monkeypatch.setattr(tf.io.gfile, name, seen(getattr(tf.io.gfile, name)))
  for step in (10, 20, 30):
    with open(tmp_path / "metrics.jsonl", "a") as log:
      log.write("step\n")
    save(manager, step)
    look()
    assert looks[-1][-1] == step
  first = looks.index([10])
  assert all(looks[first:])


def test_a_full_disk_is_reported_by_the_next_save(manager, monkeypatch):
  save(manager, 10)

  def full(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", full)
    manager._trainer.global_step.assign(20)
    manager.save()
    with pytest.raises(OSError, match="No space left"):
      manager.wait()
  assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-10"]
  assert save(manager, 30)[-1].endswith("ckpt-30")


# ---- Checkpoints that belong to something else ----


def refusal(manager, path):
  with pytest.raises(errors.ConfigError) as caught:
    everything.make_manager(manager._trainer, os.path.dirname(path)).restore_or_initialize()
  assert "\n" not in str(caught.value)
  return str(caught.value)


REMEDY = "use the config that it was trained with, or choose another --model_dir."


def other_trainer(**options):
  return everything.make_trainer(one_replica(), **options)


def test_another_task_is_refused(manager):
  [path] = save(manager, 10)
  other = everything.make_manager(other_trainer(made=everything.Other()), manager.directory)
  assert refusal(other, path) == (
    f"checkpoint {path} belongs to another experiment: its task is 'Everything', but this run's is "
    "'Other'; choose another --model_dir."
  )


def test_a_foreign_checkpoint_is_refused(manager, tmp_path):
  path = tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(tmp_path / "ckpt-5"))
  assert refusal(manager, path) == (
    f"checkpoint {path} was not written by this framework; choose another --model_dir."
  )


def test_another_shape_is_named(manager):
  [path] = save(manager, 10)
  wider = other_trainer(made=everything.Everything(units=16))
  other = everything.make_manager(wider, manager.directory)
  assert re.fullmatch(
    rf"checkpoint {path} does not fit this run: 'sequential\w*/hidden/kernel' is float32 \[5, 8\] "
    rf"in it and float32 \[5, 16\] here \(and \d+ more\); {REMEDY}",
    refusal(other, path),
  )


def test_another_shape_is_named_on_several_replicas(manager, mirrored):
  [path] = save(manager, 10)
  wider = everything.make_trainer(mirrored(2), made=everything.Everything(units=16))
  assert "is float32 [5, 8] in it and float32 [5, 16] here" in refusal(
    everything.make_manager(wider, manager.directory), path
  )


def test_another_dtype_is_named(manager):
  [path] = save(manager, 10)
  other = other_trainer()
  other.counters.skipped_steps = tf.Variable(0.5)
  assert refusal(everything.make_manager(other, manager.directory), path) == (
    f"checkpoint {path} does not fit this run: 'Variable:0' is int64 [] in it and float32 [] here; "
    f"{REMEDY}"
  )


def test_what_is_missing_is_named(trainer, tmp_path):
  plain = other_trainer(ema_decay=None, loss_scale=loss_scale.none)
  [path] = save(everything.make_manager(plain, tmp_path), 10)
  assert refusal(everything.make_manager(trainer, tmp_path), path) == (
    f"checkpoint {path} does not fit this run: 'ema_0:0' is missing in it and float32 [5, 8] here "
    f"(and 5 more); {REMEDY}"
  )


class Larger(everything.Everything):
  """The same and one more layer."""

  def build_model(self):
    return {**super().build_model(), "more": keras.Sequential([keras.Input([2]), dense("extra")])}


def dense(name):
  return keras.layers.Dense(3, name=name)


def test_a_larger_model_is_refused(trainer, tmp_path):
  larger = other_trainer(made=Larger(), optimizer=lambda: keras.optimizers.SGD(0.1))
  manager = checkpoints.CheckpointManager(
    trainer=larger, directory=str(tmp_path), experiment={"task": "Everything"}
  )
  [path] = save(manager, 10)
  # The model's differences come first, though the momenta are missing in the checkpoint.
  smaller = other_trainer(optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
  assert re.fullmatch(
    rf"checkpoint {path} does not fit this run: 'model/more/.*/_kernel' is "
    rf"float32 \[2, 3\] in it and missing here \(and \d+ more\); {REMEDY}",
    refusal(everything.make_manager(smaller, tmp_path), path),
  )


def test_a_refusal_does_not_fall_back_on_an_earlier_one(manager, tmp_path):
  save(manager, 10)
  wider = everything.make_manager(
    other_trainer(made=everything.Everything(units=16)), manager.directory
  )
  wider._trainer.global_step.assign(20)
  wider.save()
  wider.wait()
  assert "ckpt-20 does not fit" in refusal(manager, manager.checkpoints[-1])


# ---- Another process that only reads ----


class Sleeper:
  """In the place of `time` for `follow`: each sleep lets the trainer do its next thing."""

  def __init__(self, *happenings):
    self.now, self._happenings = 0.0, list(happenings)

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
    if self._happenings:
      self._happenings.pop(0)()


def followed(manager, monkeypatch, *happenings, timeout_s=5.0):
  reader = everything.make_manager(manager._trainer, manager.directory)
  monkeypatch.setattr(checkpoints, "time", Sleeper(*happenings))
  return [os.path.basename(path) for path in reader.follow(timeout_s=timeout_s)]


def test_follow_restores_each_new_checkpoint(manager, monkeypatch):
  seen = followed(
    manager,
    monkeypatch,
    lambda: None,
    lambda: save(manager, 10),
    lambda: save(manager, 20, 30),
    lambda: None,
    lambda: save(manager, 40),
  )
  assert seen == ["ckpt-10", "ckpt-30", "ckpt-40"]
  assert checkpoints.time.now == pytest.approx(10, abs=1.5)


def test_follow_survives_damage_and_reports_it_once(manager, monkeypatch, log):
  folder = Path(manager.directory)
  save(manager, 10, 20)
  truncated(folder / "ckpt-20.data-00000-of-00001")

  def write_again():
    manager._saved_step = 10
    save(manager, 20)
    os.utime(folder / "ckpt-20.index", (0, 0))  # TensorFlow tells times to the second

  def damaged_third():
    save(manager, 30)
    emptied(folder / "ckpt-30.index")

  happenings = (lambda: None, write_again, damaged_third, lambda: None, lambda: save(manager, 40))
  assert followed(manager, monkeypatch, *happenings) == ["ckpt-10", "ckpt-20", "ckpt-40"]
  assert log().count("ckpt-20 is damaged") == log().count("ckpt-30 is damaged") == 1


def test_a_failed_restore_changes_nothing(trainer, manager):
  save(manager, 10, 20)
  truncated(Path(manager.directory) / "ckpt-20.data-00000-of-00001")
  assert restored_step(manager) == 10
  before = everything.read(manager.checkpoint.write(manager.directory + "/before"))
  with pytest.raises(tf.errors.OpError):
    manager.restore(os.path.join(manager.directory, "ckpt-20"))
  after = everything.read(manager.checkpoint.write(manager.directory + "/after"))
  assert everything.differing(before, after) == []


def test_one_that_is_dropped_while_it_is_read_is_not_damaged(manager, monkeypatch, log):
  save(manager, 10)
  trainer = manager._trainer
  restore = checkpoints.CheckpointManager.restore
  keeper = everything.make_manager(trainer, manager.directory, keep=1)

  def slow(self, path):
    if path.endswith("ckpt-10"):
      save(keeper, 20)  # which drops 10
    restore(self, path)

  monkeypatch.setattr(checkpoints.CheckpointManager, "restore", slow)
  assert restored_step(manager) == 20
  assert "damaged" not in log()


def test_reading_writes_nothing(manager):
  save(manager, 10, 20)
  (Path(manager.directory) / "checkpoint").write_bytes(b"nonsense")
  before = contents(manager.directory)
  assert restored_step(manager) == 20
  assert contents(manager.directory) == before
