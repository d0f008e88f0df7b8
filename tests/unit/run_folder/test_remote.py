"""Run folders behind a URL: what a store has at any moment, and that a run goes on elsewhere."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import s3_server

import loopwright
from benchmarks import comparison, trials_task
from loopwright import commands, configurables
from loopwright.errors import ConfigError
from loopwright.host.files import StorageError
from loopwright.run_folder import folders, places, remote, weight_files
from loopwright.runs.from_config import load
from loopwright.runs.runner import run

URL = "memory://bucket/runs/digits"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  remote.local_copy.cache_clear()
  yield tmp_path / "cache" / "loopwright"
  fsspec.filesystem("memory").store.clear()


@contextlib.contextmanager
def opened(url=URL, *, training=True, export=False):
  folder = places.place(url)
  with folder.opened(training=training, export=export):
    yield folder


def write(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)


def work(top, step):
  """Leaves in a folder what a run has there at a step, of which it keeps one checkpoint."""
  top = Path(top)
  for kind in ("checkpoints", "best"):
    shutil.rmtree(top / kind, ignore_errors=True)
    write(top / kind / f"ckpt-{step}.data-00000-of-00001", f"values {step}")
    write(top / kind / f"ckpt-{step}.index", f"index {step}")
    write(top / kind / "checkpoint", f'model_checkpoint_path: "ckpt-{step}"\n')
  write(top / "best" / "best.json", json.dumps({"checkpoint": f"ckpt-{step}"}))
  for name in ("assets.extra/loopwright", "saved_model.pb", "variables/variables.index"):
    write(top / "export" / name, f"{step:03d}")
  lines = [json.dumps({"step": each, "split": "train"}) for each in range(1, step + 1)]
  write(top / "metrics.jsonl", "".join(f"{line}\n" for line in lines))
  write(top / "checkpoints" / "unfinished" / "ckpt.index", "half")


def contents(url=URL):
  system, root = fsspec.core.url_to_fs(url)
  names = [path.removeprefix(f"{root}/") for path in system.find(root)]
  return {name: system.cat_file(f"{root}/{name}").decode(errors="replace") for name in names}


def require_whole(found):
  """Asserts what a reader may rely on, of the files in a store at one moment."""
  for kind in ("checkpoints", "best"):
    for step in re.findall(rf"{kind}/ckpt-(\d+).index", "\n".join(found)):
      assert found[f"{kind}/ckpt-{step}.data-00000-of-00001"] == f"values {step}"
      if kind == "checkpoints":
        assert f'"step": {step}' in found["metrics.jsonl"]
    if state := found.get(f"{kind}/checkpoint"):
      assert f"{kind}/{state.split()[1][1:-1]}.index" in found
  if best := found.get("best/best.json"):
    assert f"best/{json.loads(best)['checkpoint']}.index" in found
  exported = {name: text for name, text in found.items() if name.startswith("export/")}
  assert not exported or "export/assets.extra/loopwright" in exported
  if "export/saved_model.pb" in exported:
    assert len(exported) == 3
    assert len({*exported.values()}) == 1


def test_at_every_moment_the_store_has_what_is_whole(monkeypatch):
  moments, system = [], type(fsspec.filesystem("memory"))

  def watched(method):
    def call(self, *args, **kwargs):
      method(self, *args, **kwargs)
      moments.append(contents())

    return call

  for name in ("put_file", "rm_file"):
    monkeypatch.setattr(system, name, watched(getattr(system, name)))
  with opened() as at:
    for step in (1, 2, 3):
      work(at.path, step)
      at.send()
      assert re.findall(r"checkpoints/ckpt-(\d)", "".join(contents())) == [str(step)] * 2
  assert len(moments) > 30
  for found in moments:
    require_whole(found)
  assert not [name for name in moments[-1] if "unfinished" in name]


def test_only_what_has_changed_is_sent(monkeypatch):
  sent, system = [], type(fsspec.filesystem("memory"))
  put = system.put_file

  def noted(self, here, there, **kwargs):
    sent.append(there.removeprefix("/bucket/runs/digits/"))
    put(self, here, there, **kwargs)

  with opened() as at:
    work(at.path, 1)
  monkeypatch.setattr(system, "put_file", noted)
  with opened() as at:
    assert (Path(at.path) / "checkpoints" / "ckpt-1.index").read_text() == "index 1"
    write(Path(at.path, "notes.txt"), "mine")
  assert sent == ["notes.txt"]
  assert contents()["notes.txt"] == "mine"


def test_the_local_folder_goes_when_the_store_has_all(cache):
  with opened() as at:
    work(at.path, 1)
  with opened(training=False, export=True) as at:
    write(Path(at.path, "export", "saved_model.pb"), "new")
    write(Path(at.path, "metrics.jsonl"), "")
  assert contents()["export/saved_model.pb"] == "new"
  assert contents()["metrics.jsonl"] != ""
  assert os.listdir(cache) == []


def test_names_that_leave_the_folder_are_not_fetched(monkeypatch):
  system = type(fsspec.filesystem("memory"))
  names = ("metrics.jsonl", "../out.txt", "a/../../out.txt", "a//b", "owner.json")
  monkeypatch.setattr(system, "find", lambda self, root: [f"{root}/{name}" for name in names])
  assert places.place(URL)._names() == ["metrics.jsonl"]


def test_a_store_that_fails_costs_a_line_and_the_next_time_sends_it(monkeypatch, caplog):
  system = type(fsspec.filesystem("memory"))

  def down(*_, **__):
    raise ConnectionError("refused")

  with opened() as at:
    work(at.path, 1)
    with monkeypatch.context() as patch:
      patch.setattr(system, "put_file", down)
      at.send()
    assert f"cannot write to '{URL}' (ConnectionError: refused); the run is whole" in caplog.text
    assert "checkpoints/ckpt-1.index" not in contents()
  assert "checkpoints/ckpt-1.index" in contents()
  monkeypatch.setattr(system, "put_file", down)
  told = "cannot write to .* whole in '(.*)': copy it there, or go on with it as --model_dir"
  with pytest.raises(StorageError, match=told) as raised, opened() as at:
    work(at.path, 2)
  kept = Path(re.search(told, str(raised.value))[1])
  assert (kept / "checkpoints" / "ckpt-2.index").read_text() == "index 2"
  with pytest.raises(KeyError, match="of the run"), opened():
    raise KeyError("of the run")


@pytest.mark.parametrize("gone", [True, False])
def test_a_run_that_is_removed_or_started_elsewhere_ends_and_sends_nothing(gone):
  told = rf"'{URL}' is no longer that of this process \({'it was' if gone else 'process'}"
  with pytest.raises(ConfigError, match=told), opened() as at:  # noqa: PT012
    work(at.path, 1)
    at.send()
    if gone:
      fsspec.filesystem("memory").rm("/bucket/runs/digits", recursive=True)
    else:
      with opened() as other:
        work(other.path, 2)
    before = contents()
    work(at.path, 3)
    with pytest.raises(ConfigError, match=told):
      at.send()
  assert contents() == before


def test_several_processes_are_refused():
  told = f"model_dir is '{URL}', which one process works on, but the run has 2"
  with pytest.raises(ConfigError, match=told):
    places.place(URL).require_one_process(2)


@pytest.mark.parametrize(
  ("path", "url"),
  [("s3:/b/x", "s3://b/x"), ("gs:/b", "gs://b"), ("s3//b/x", "s3://b/x"), ("mine:/x", "mine://x")],
)
def test_a_url_with_a_slash_too_few_is_no_folder(path, url, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  remedy = rf"'{path}' has no '://' and begins like a URL; write '{url}' for a URL, or './{path}' f"
  for use in (places.place, places.local_copy, folders.local):
    with pytest.raises(ConfigError, match=remedy):
      use(path)
  assert os.listdir(tmp_path) == []
  assert type(places.place(f"./{path}")) is places.RunFolder


@pytest.mark.parametrize("path", ["c:/x", "runs/s3:/x", "gs", "gs/x", "s3runs/x", "a:b"])
def test_other_paths_with_a_colon_are_folders(path):
  assert places.place(path).path == path


def test_a_url_that_cannot_be_used_is_one_line(monkeypatch):
  with pytest.raises(ConfigError, match="'host' has a password before '@', which logs") as raised:
    run(task=trials_task.Small, train_steps=1, global_batch_size=8, model_dir="sftp://a:b@host/r")
  assert "a:b" not in str(raised.value)
  with pytest.raises(ConfigError, match=r"cannot use 'foo://b/run' \(ValueError: .*foo.*\); check"):
    run(task=trials_task.Small, train_steps=1, global_batch_size=8, model_dir="foo://b/run")
  with pytest.raises(ConfigError, match=r"the gin file is 's3://b/x.gin', but configs are read"):
    configurables.parse(["s3://b/x.gin"])
  monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
  for scheme, extra in (("s3", "s3"), ("gs", "gcs")):
    told = rf"cannot use '{scheme}://b/run' \(.*\); pip install 'loopwright\[{extra}\]'\."
    with pytest.raises(ConfigError, match=told):
      places.place(f"{scheme}://b/run")


def test_reports_read_runs_in_a_store(capsys, tmp_path):
  for name, loss in (("a", 0.5), ("b", 0.25)):
    line = {"step": 9, "split": "eval", "wall_time": 1.0, "loss": loss}
    with opened(f"memory://bucket/runs/{name}") as at:
      write(Path(at.path, "metrics.jsonl"), f"{json.dumps(line)}\n")
      write(Path(at.path, "operative_config.gin"), "run.train_steps = 9\n")
  pair = [f"memory://bucket/runs/{name}" for name in "ab"]
  assert commands.main(["loopwright", "diff", *pair]) == 0
  assert re.search(r"eval loss +0.5 +0.25", capsys.readouterr().out)
  page = tmp_path / "report.html"
  assert commands.main(["loopwright", "report", pair[0], f"--output={page}"]) == 0
  assert pair[0] in page.read_text()
  assert commands.main(["loopwright", "ls", pair[0]]) == 0
  assert re.search(rf"{pair[0]} +9/9 +done +loss 0.5 @9", capsys.readouterr().out)
  assert commands.main(["loopwright", "ls", "memory://bucket/none"]) == 2
  assert "'memory://bucket/none' has no files" in capsys.readouterr().err


def configured(*bindings):
  configurables.parse(["benchmarks/trials.gin"], bindings)
  return configurables.configured(run)


def test_a_run_trains_in_a_store_and_goes_on_to_the_same_weights(capsys, tmp_path):
  """In two processes' worth of folders, as on two machines; 20 steps against 20 on disk."""
  few = ["run.actions = []", "run.ledger = False"]
  configured(*few, "run.train_steps = 20")(mode="train", model_dir=str(tmp_path / "disk"))
  configured(*few, "run.train_steps = 10")(mode="train", model_dir=URL)
  assert {"checkpoints/ckpt-10.index", "history.jsonl", "assets/manifest.json"} <= {*contents()}
  configured(*few, "run.train_steps = 20")(mode="train", model_dir=URL)
  told = capsys.readouterr()
  assert f"| {URL}" in told.out
  assert f"model_dir   {URL}, worked on in " in told.err
  records = [json.loads(line) for line in contents()["metrics.jsonl"].splitlines()]
  assert [r["step"] for r in records] == [5, 10, 15, 20]
  one, other = load(URL), load(str(tmp_path / "disk"))
  assert (one.step, len(one.model.variables)) == (20, len(other.model.variables))
  for variable, expected in zip(one.model.variables, other.model.variables, strict=True):
    np.testing.assert_array_equal(variable, expected)
  with pytest.raises(ConfigError, match="'evaluate_continuously' needs a folder on disk"):
    configured()(mode="evaluate_continuously", model_dir=URL)


@pytest.fixture
def server(monkeypatch):
  with s3_server.running() as running:
    for name, value in running.environment.items():
      monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield running


def different(path, reference):
  """Returns names of tensors that differ; the names in the graph count up in one process."""
  found = comparison.different_tensors(Path(path), Path(reference))
  return [each for each in found if "_CHECKPOINTABLE_OBJECT_GRAPH" not in each]


@pytest.mark.whole
def test_a_run_in_s3_is_that_on_disk(server, tmp_path, monkeypatch, capsys, caplog):
  """It fails, goes on on another machine, and the server is away when that one ends."""
  url, disk = f"s3://{s3_server.BUCKET}/runs/digits", tmp_path / "disk"
  configured()(model_dir=str(disk))
  actions = "run.actions = [@BestCheckpoint(), @Export(), @Fail()]"
  with pytest.raises(RuntimeError, match="a failure"):
    configured(actions, "Fail.as_mistake = False", "Fail.at_step = 30")(model_dir=url)
  restore = loopwright.runs.session.Session.restore

  def then_shut(session, checkpoint=None):
    restore(session, checkpoint)
    server.shut()

  with monkeypatch.context() as patch:
    patch.setattr(loopwright.runs.session.Session, "restore", then_shut)
    with pytest.raises(StorageError, match=r"cannot write to .*; the run is whole in '.*': copy"):
      configured()(model_dir=url)
  server.open()
  configured()(model_dir=url)
  copy = Path(places.local_copy(url))
  assert comparison.kept(copy) == ["ckpt-40", "ckpt-50", "ckpt-60"]
  for name in ("checkpoints/ckpt-60", "best/ckpt-60", "export/variables/variables"):
    assert different(copy / name, disk / name) == []
  for split in ("train", "eval"):
    assert comparison.records(copy, split) == comparison.records(disk, split)
  assert comparison.different_ledgers(copy, disk) == []

  found = configured()(mode="evaluate", model_dir=url)
  last = comparison.records(disk, "eval")[-1]
  assert found == pytest.approx({name: last[name] for name in found}, rel=1e-6)
  configured()(mode="export", model_dir=url)
  assert "export/saved_model.pb" in contents(url)
  assert isinstance(load(url).task, trials_task.Small)
  newest = weight_files.located(f"{url}/best")
  assert different(newest, disk / "checkpoints/ckpt-60") == []
  with pytest.raises(ConfigError, match=r"cannot use 's3://none/run' \(FileNotFoundError"):
    places.place("s3://none/run")
  told = [*capsys.readouterr(), caplog.text]
  told += [p.read_bytes().decode(errors="replace") for p in tmp_path.rglob("*") if p.is_file()]
  assert not [text for text in told if s3_server.SECRET in text]
