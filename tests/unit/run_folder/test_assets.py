"""What a task learns besides weights: fitted once, used everywhere, refused if it is another's."""

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import keras
import learned
import numpy as np
import pytest
import tensorflow as tf
from learned import EXAMPLES, KERNEL, Scaled, Unscaled, Y, scaled
from runs import records

import launch
from loopwright import configurables
from loopwright.distribution.cluster import Cluster
from loopwright.errors import ConfigError
from loopwright.host import files
from loopwright.run_folder import assets
from loopwright.runs.runner import run
from loopwright.tools import tune
from loopwright.tools.verify.bench.bench import Subject

ROOT = Path(launch.__file__).parent
SUPPORT = ROOT / "tests" / "support"
BATCH, STEPS, RATE = 8, 4, 0.125
CONFIG = """
import learned
run.task = @Scaled()
Scaled.folder = '{folder}'
run.optimizer = @keras.SGD
keras.SGD.learning_rate = 0.125
run.train_steps = 4
run.global_batch_size = 8
run.shuffle = False
"""


@pytest.fixture
def start(tmp_path, mirrored):
  """Runs `Scaled` on two replicas, its folder and its run folder below tmp_path."""

  def begin(mode="train", *, task=Scaled, folder=tmp_path, steps=STEPS, **options):
    return run(
      task=functools.partial(task, folder=str(tmp_path), **options),
      train_steps=steps,
      global_batch_size=BATCH,
      mode=mode,
      model_dir=str(folder / "m"),
      strategy=lambda: mirrored(2),
      optimizer=lambda: keras.optimizers.SGD(RATE),
      shuffle=False,
      eval_timeout_s=0.3,
    )

  return begin


def fits(tmp_path):
  return (tmp_path / "fits").read_text().splitlines()


def trained_kernel(steps=STEPS):
  """Gradient descent on the scaled training split, in float64; also the mean loss of the steps."""
  kernel, x, losses = KERNEL[:, 0].astype(np.float64), scaled("train"), []
  for step in range(steps):
    rows = (step * BATCH + np.arange(BATCH)) % EXAMPLES
    error = x[rows] @ kernel - Y["train"][rows]
    losses.append(np.mean(error**2))
    kernel = kernel - RATE * 2 * error @ x[rows] / BATCH
  return kernel, np.mean(losses)


# ---- In the life of a run ----


def test_all_modes_scale_by_what_was_learned_once(start, tmp_path):
  kernel, loss = trained_kernel()
  assert start("train")["loss"] == pytest.approx(loss, rel=1e-5)
  scale = json.loads((tmp_path / "m" / "assets" / "scale.json").read_bytes())
  x = learned.X["train"].astype(np.float64)
  np.testing.assert_allclose(scale["mean"], x.mean(0))
  np.testing.assert_allclose(scale["deviation"], x.std(0))

  wanted = np.mean((scaled("eval") @ kernel - Y["eval"]) ** 2)
  assert start("evaluate")["loss"] == pytest.approx(wanted, rel=1e-5)
  start("export")
  serve = tf.saved_model.load(str(tmp_path / "m" / "export")).signatures["serving_default"]
  served = serve(x=learned.X["eval"])["y"].numpy()
  np.testing.assert_allclose(served, scaled("eval") @ kernel, rtol=1e-5, atol=1e-5)

  more = start("train_and_evaluate", steps=STEPS + 3)
  kernel, _ = trained_kernel(STEPS + 3)
  assert more["loss"] == pytest.approx(
    np.mean((scaled("eval") @ kernel - Y["eval"]) ** 2), rel=1e-5
  )
  assert fits(tmp_path) == ["worker-0"]


@pytest.mark.whole
def test_a_fit_that_was_cut_short_is_made_again(start, tmp_path, monkeypatch):
  write = files.atomic_write

  def killed(path, content):
    if path.endswith("manifest.json"):
      raise KeyboardInterrupt
    write(path, content[:5])

  monkeypatch.setattr(files, "atomic_write", killed)
  with pytest.raises(KeyboardInterrupt):
    start()
  assert (tmp_path / "m" / "assets" / "scale.json").stat().st_size == 5
  monkeypatch.setattr(files, "atomic_write", write)
  assert start()["loss"] == pytest.approx(trained_kernel()[1], rel=1e-5)
  assert len(fits(tmp_path)) == 2


@pytest.mark.whole
def test_initial_weights_do_not_depend_on_who_fitted(start, tmp_path):
  """`fit` draws random numbers here, and the second run does not call it."""
  first = start(random=True)["loss"]
  shutil.rmtree(tmp_path / "m" / "checkpoints")
  (tmp_path / "m" / "metrics.jsonl").unlink()
  assert start(random=True)["loss"] == first
  assert len(fits(tmp_path)) == 1


def test_a_task_without_fit_has_no_assets(start, tmp_path):
  start(task=Unscaled)
  assert not (tmp_path / "m" / "assets").exists()
  assert not (tmp_path / "fits").exists()
  path = tf.train.latest_checkpoint(str(tmp_path / "m" / "checkpoints"))
  assert not [name for name, _ in tf.train.list_variables(path) if "assets" in name]


def test_an_evaluator_waits_for_the_assets(start, tmp_path, monkeypatch):
  monkeypatch.setattr(assets, "_POLL_S", 0.01)
  task, folder = Scaled(folder=str(tmp_path)), tmp_path / "assets"
  later = threading.Timer(0.2, assets.save, [str(folder), task.fit()])
  later.start()
  alone = Cluster()
  provide = functools.partial(
    assets.provide, task, model_dir=str(tmp_path), cluster=alone, training=False
  )
  assert provide(timeout_s=None) == assets.digest(assets.load(str(folder)))
  later.join()
  shutil.rmtree(folder)
  with pytest.raises(ConfigError, match="no assets in "):
    provide(timeout_s=0.05)
  with pytest.raises(ConfigError, match="no assets in "):
    start("evaluate_continuously")


# ---- What is refused ----


@pytest.mark.parametrize("mode", ["evaluate", "export"])
@pytest.mark.fast(mode=["evaluate"])
def test_without_assets_nothing_but_training_begins(mode, start, tmp_path):
  start()
  shutil.rmtree(tmp_path / "m" / "assets")
  with pytest.raises(ConfigError, match=r"no assets in \S+/m/assets, .*; train first"):
    start(mode)


MODES = pytest.mark.parametrize("mode", ["train", "evaluate", "export"])


@MODES
@pytest.mark.fast(mode=["export"])
def test_an_edited_file_is_refused_by_its_name(mode, start, tmp_path):
  start()
  path = tmp_path / "m" / "assets" / "scale.json"
  path.write_bytes(path.read_bytes().replace(b"mean", b"mode"))
  with pytest.raises(ConfigError, match=r"/m/assets/scale.json has changed since this run began"):
    start(mode)
  path.unlink()
  with pytest.raises(ConfigError, match=r"/m/assets/scale.json is missing since this run began"):
    start(mode)
  (path.parent / "manifest.json").write_text("{")
  with pytest.raises(ConfigError, match=r"manifest.json is not a manifest that the fram"):
    start(mode)


@MODES
@pytest.mark.fast(mode=["evaluate"])
def test_the_assets_of_another_run_are_refused_by_the_checkpoint(mode, start, tmp_path):
  start()
  folder, other = tmp_path / "m" / "assets", tmp_path / "other"
  ours = assets.digest(assets.load(str(folder)))[:12]
  start(folder=other, shift=1.0)
  shutil.copytree(other / "m" / "assets", folder, dirs_exist_ok=True)
  theirs = assets.digest(assets.load(str(folder)))[:12]
  line = f"/ckpt-4 was trained with the assets {ours}..., but this run has the assets {theirs}..."
  with pytest.raises(ConfigError) as raised:
    start(mode)
  assert line in str(raised.value)


@pytest.mark.parametrize(("before", "after"), [(Unscaled, Scaled), (Scaled, Unscaled)])
@pytest.mark.fast(before=[Unscaled])
def test_a_checkpoint_of_a_task_that_learned_less_or_more_is_refused(before, after, start):
  start(task=type("Same", (before,), {}))
  with pytest.raises(ConfigError, match=r"trained with .*no assets"):
    start(task=type("Same", (after,), {}))


@pytest.mark.parametrize(
  ("returned", "says"),
  [
    (None, r"Bad.fit\(\) returned None; it must return a dict of file name -> bytes"),
    ({"words.txt": "text"}, r"Bad.fit\(\) returned a str for 'words.txt'; it must be bytes"),
    ({"a/b": b""}, r"Bad.fit\(\) returned a file named 'a/b'"),
    ({"": b""}, r"Bad.fit\(\) returned a file named ''"),
    ({"manifest.json": b""}, r"Bad.fit\(\) returned a file named 'manifest.json'"),
  ],
)
def test_fit_returns_files(returned, says, start, tmp_path):
  class Bad(Scaled):
    def fit(self):
      return returned

  with pytest.raises(ConfigError, match=says):
    start(task=Bad)
  assert not (tmp_path / "m" / "assets").exists()


def test_the_digest_tells_names_and_contents_apart():
  sets = ({}, {"a": b"bc"}, {"ab": b"c"}, {"a": b"", "b": b"c"}, {"a": b"b", "c": b""})
  assert len({assets.digest(each) for each in sets}) == len(sets)
  assert assets.digest({"a": b"1", "b": b"2"}) == assets.digest({"b": b"2", "a": b"1"})


# ---- Where there is no run folder ----


def test_verification_fits_once_in_memory(tmp_path):
  subject = Subject(
    task=lambda: Scaled(folder=str(tmp_path)),
    optimizer=keras.optimizers.SGD,
    global_batch_size=BATCH,
  )
  first, second = subject.fresh_task(), subject.fresh_task()
  assert first is not second
  x = subject.rows(second, EXAMPLES, training=False)["x"]
  np.testing.assert_allclose(x, scaled("eval"), rtol=1e-4, atol=1e-5)
  assert fits(tmp_path) == ["worker-0"]
  assert sorted(path.name for path in tmp_path.iterdir()) == ["fits", "used-worker-0"]


def test_tuning_fits_once_in_memory(tmp_path):
  config = tmp_path / "config.gin"
  config.write_text(CONFIG.format(folder=tmp_path))
  configurables.parse([str(config)], ["run.strategy = @default"])
  bench = tune.Contest([str(config)], [], rounds=1, block_s=0.01)
  tasks = [bench._trainer({}).task for _ in range(2)]
  assert tasks[0] is not tasks[1]
  for task in tasks:
    np.testing.assert_allclose(task._mean, learned.X["train"].mean(0), rtol=1e-6)
  assert fits(tmp_path) == ["worker-0"]


# ---- In a cluster ----


def launched(folder, *flags):
  config = folder / "config.gin"
  config.write_text(CONFIG.format(folder=folder))
  command = [sys.executable, str(ROOT / "launch.py"), f"--gin_file={config}", *flags]
  environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
  return subprocess.run(
    [*command, f"--model_dir={folder / 'm'}"], cwd=SUPPORT, capture_output=True, text=True,
    env=environment, timeout=120,
  )  # fmt: skip


@pytest.mark.whole
def test_of_two_workers_the_chief_fits_and_both_use_its_bytes(tmp_path):
  strategy = "--gin_param=run.strategy = @multi_worker_mirrored"
  done = launched(tmp_path, "--local_workers=2", strategy)
  assert done.returncode == 0, done.stderr
  assert fits(tmp_path) == ["worker-0"]
  written = (tmp_path / "m" / "assets" / "scale.json").read_bytes()
  assert [(tmp_path / f"used-worker-{n}").read_bytes() for n in (0, 1)] == [written, written]
  losses = {record["split"]: record["loss"] for record in records(tmp_path / "m")}
  kernel, loss = trained_kernel()
  assert losses["train"] == pytest.approx(loss, rel=1e-5)
  assert losses["eval"] == pytest.approx(
    np.mean((scaled("eval") @ kernel - Y["eval"]) ** 2), rel=1e-5
  )


@pytest.mark.whole
def test_under_parameter_servers_the_chief_fits_for_workers_that_run_none_of_our_code(tmp_path):
  strategy = "--gin_param=run.strategy = @parameter_server"
  rate = "--gin_param=keras.SGD.learning_rate = 0.0"  # so that the order of updates does not matter
  done = launched(tmp_path, "--local_workers=2", "--local_ps=1", strategy, rate)
  assert done.returncode == 0, done.stderr
  assert fits(tmp_path) == ["chief-0"]
  assert sorted(path.name for path in tmp_path.glob("used-*")) == ["used-chief-0"]
  [loss] = [record["loss"] for record in records(tmp_path / "m", "eval")]
  wanted = np.mean((scaled("eval") @ KERNEL[:, 0].astype(np.float64) - Y["eval"]) ** 2)
  assert loss == pytest.approx(wanted, rel=1e-5)
