"""Run folders in a store: what a reader finds at any moment, who owns them, what a kill leaves."""

import contextlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import fsspec
import pytest
import s3_server
import tensorflow as tf

import loopwright
from benchmarks import comparison, trials_task
from loopwright import commands, configurables
from loopwright.errors import ConfigError
from loopwright.host import stores
from loopwright.host.files import StorageError
from loopwright.host.stores import Store, StoreError
from loopwright.run_folder import folders, mirror, places, remote, weight_files
from loopwright.run_folder.mirror import Mirror, Record
from loopwright.runs.from_config import load
from loopwright.runs.runner import run

URL = "memory://bucket/runs/digits"
EXPORT = (
  "assets.extra/loopwright", "saved_model.pb", "variables/variables.index",
  "variables/variables.data-00000-of-00001",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  for name, value in (("BEAT_S", 0.02), ("PATIENCE_S", 0.3), ("SETTLE_S", 0.05)):
    monkeypatch.setattr(remote, name, value)
  monkeypatch.setattr(mirror, "RETRY_S", 0.02)
  remote.local_copy.cache_clear()
  yield
  fsspec.filesystem("memory").store.clear()


@pytest.fixture
def another_machine(tmp_path, monkeypatch):
  """Moves to a machine with an empty disk each time it is called."""

  def move(name="other"):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

  return move


def folder():
  return Path(stores.cache_folder(URL, "run"))


def write(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.with_suffix(".new").write_text(text)
  path.with_suffix(".new").rename(path)


def work(top, step):
  """Leaves in a folder what a run has there at a step, of which it keeps one checkpoint."""
  for kind in ("checkpoints", "best"):
    for old in (top / kind).glob("ckpt-*"):
      old.unlink()
    write(top / kind / f"ckpt-{step}.data-00000-of-00001", f"values {step}")
    write(top / kind / f"ckpt-{step}.index", f"index {step}")
    write(top / kind / "checkpoint", f'model_checkpoint_path: "ckpt-{step}"\n')
  write(top / "best" / "best.json", json.dumps({"checkpoint": f"ckpt-{step}"}))
  shutil.rmtree(top / "export", ignore_errors=True)
  for name in EXPORT:
    write(top / "export" / name, f"{name} {step}")
  lines = [json.dumps({"step": each, "split": "train"}) for each in range(1, step + 1)]
  write(top / "metrics.jsonl", "".join(f"{line}\n" for line in lines))
  write(top / "operative_config.gin", "run.train_steps = 9\n")
  write(top / "checkpoints" / "unfinished" / "ckpt.index", "half")


def contents(url=URL):
  store = Store(url)
  return {name: store.read(name).decode(errors="replace") for name in store.files()}


def require_whole(found):
  """Asserts what a reader may rely on, of the objects in a store at one moment."""
  for kind in ("checkpoints", "best"):
    kept = {int(m[1]) for name in found if (m := re.fullmatch(rf"{kind}/ckpt-(\d+).index", name))}
    for step in kept:
      assert found[f"{kind}/ckpt-{step}.data-00000-of-00001"] == f"values {step}"
    if state := found.get(f"{kind}/checkpoint"):
      assert int(re.search(r"ckpt-(\d+)", state)[1]) in kept
    if kind == "checkpoints" and kept:
      assert f'"step": {max(kept)}' in found["metrics.jsonl"]
  if best := found.get("best/best.json"):
    assert f"best/{json.loads(best)['checkpoint']}.index" in found
  if any(name.startswith("export/") for name in found):  # else nobody would replace it
    assert "export/assets.extra/loopwright" in found
  if model := found.get("export/saved_model.pb"):
    step = model.split()[1]
    for name in EXPORT[2:]:
      assert found[f"export/{name}"] == f"{name} {step}"


@contextlib.contextmanager
def owned(url=URL):
  with places.place(url).opened(training=True, export=False) as opened:
    yield opened


def test_at_every_moment_a_reader_finds_what_is_whole(monkeypatch):
  moments = []

  def watched(method):
    def call(self, *args):
      method(self, *args)
      moments.append(contents())

    return call

  put, remove = watched(Store.put), watched(Store.remove)

  def put_all(self, names, top):  # as its threads may do it, in the worst order
    for name in sorted(names, reverse=True):
      put(self, name, os.path.join(top, name))

  def remove_all(self, names):
    for name in sorted(names):
      remove(self, [name])

  monkeypatch.setattr(Store, "put_all", put_all)
  monkeypatch.setattr(Store, "remove", remove_all)
  with owned():
    record = Record(str(folder()))
    for step in (1, 2, 3):
      work(folder(), step)
      if step == 2:
        shutil.rmtree(folder() / "export")
      Mirror(Store(URL), record).push()
      last = contents()
      assert "checkpoints/ckpt-1.index" not in last or step == 1
      assert last["checkpoints/checkpoint"] == f'model_checkpoint_path: "ckpt-{step}"\n'
  assert len(moments) > 30
  for found in moments:
    require_whole(found)
  assert not [name for name in last if "unfinished" in name or name.startswith(".")]


@pytest.mark.parametrize("at", [2, 8, 12, 14])
def test_after_a_kill_in_an_upload_another_machine_finds_a_whole_run(
  at, monkeypatch, another_machine
):
  left = at

  def dying(method):
    def call(self, *args):
      nonlocal left
      left -= 1
      if left < 0:
        raise KeyboardInterrupt
      method(self, *args)

    return call

  with owned():
    work(folder(), 1)
  before = folder()
  work(before, 2)
  with monkeypatch.context() as patch:
    patch.setattr(Store, "put", dying(Store.put))
    patch.setattr(Store, "remove", dying(Store.remove))
    patch.setattr(stores, "_AT_ONCE", 1)
    with contextlib.suppress(KeyboardInterrupt):
      Mirror(Store(URL), Record(str(before))).push()
  assert left < 0, "it was not killed"
  another_machine()
  for name in ("variables/variables.index", "assets.extra/loopwright"):
    write(folder() / "export" / name, "as if a download was killed")
  with owned():
    found = {str(p.relative_to(folder())) for p in folder().rglob("*") if p.is_file()}
    assert all(any(p.iterdir()) for p in folder().rglob("*") if p.is_dir())
    texts = {name: Path(folder(), name).read_text() for name in found}
    require_whole(texts)
    assert {"checkpoints/ckpt-1.index", "checkpoints/ckpt-2.index"} & found
    # What is left of an export is none: it would not be replaced.
    assert ("export/saved_model.pb" in found) == ("export/assets.extra/loopwright" in found)
    work(folder(), 3)
  assert contents().keys() == {
    *(f"{kind}/{name}" for kind in ("checkpoints", "best")
      for name in ("checkpoint", "ckpt-3.index", "ckpt-3.data-00000-of-00001")),
    *(f"export/{name}" for name in EXPORT),
    "best/best.json", "metrics.jsonl", "operative_config.gin", "mirrored.json",
  }  # fmt: skip


def test_the_same_machine_goes_on_from_its_disk_and_another_from_the_store(another_machine):
  with owned():
    work(folder(), 1)
  work(folder(), 2)  # as if it were killed before it uploaded this
  with owned():
    assert (folder() / "checkpoints/ckpt-2.index").exists()
  assert "checkpoints/ckpt-2.index" in contents()
  work(folder(), 3)
  first = folder()
  another_machine()
  with owned():
    assert not (folder() / "checkpoints/ckpt-3.index").exists()
    work(folder(), 9)
  another_machine("cache")
  with owned():
    assert folder() == first
    assert [p.name for p in folder().glob("checkpoints/*.index")] == ["ckpt-9.index"]
  assert (first.parent / "set-aside/checkpoints/ckpt-3.index").exists()
  work(folder(), 10)
  another_machine()
  with owned():
    work(folder(), 20)
  another_machine("cache")
  with owned():
    assert (first.parent / "set-aside-2/checkpoints/ckpt-10.index").exists()
  assert (first.parent / "set-aside/checkpoints/ckpt-3.index").exists()


def test_what_a_cleaner_of_caches_removed_comes_back_from_the_store():
  with owned():
    work(folder(), 1)
  for name in ("metrics.jsonl", "checkpoints/ckpt-1.index", "best/best.json"):
    (folder() / name).unlink()
  with owned():
    assert (folder() / "checkpoints/ckpt-1.index").read_text() == "index 1"
  require_whole(contents())
  assert "metrics.jsonl" in contents()
  shutil.rmtree(folder())
  with owned():
    assert (folder() / "metrics.jsonl").exists()
  assert "checkpoints/ckpt-1.index" in contents()


def test_what_someone_changes_in_the_store_counts():
  with owned():
    work(folder(), 1)
  Store(URL).write("export/saved_model.pb", b"of --mode=export")
  Store(URL).write("notes.txt", b"mine")
  with owned():
    assert (folder() / "export/saved_model.pb").read_text() == "of --mode=export"
    assert (folder() / "notes.txt").read_text() == "mine"
  assert contents()["notes.txt"] == "mine"


def test_names_that_leave_the_folder_are_not_downloaded(tmp_path):
  Store(URL).write("metrics.jsonl", b"{}\n")
  listing = Store(URL).files()
  for name in ("../out.txt", "a/../../out.txt", "/out.txt", "a//b", ".mirror.json", "owner.json"):
    assert not mirror.is_kept(name)
    listing[name] = listing["metrics.jsonl"]
  assert mirror.whole(listing) == {"metrics.jsonl"}


@pytest.mark.parametrize("gone", ["store", "local"])
def test_a_run_that_is_removed_in_the_middle_is_not_uploaded_again(gone):
  """Nor is what the store has removed because the local folder is gone."""
  line = "was removed, at least owner.json" if gone == "store" else "was removed while the run used"

  def remove():
    if gone == "store":
      fsspec.filesystem("memory").rm("/bucket/runs/digits", recursive=True)
    else:
      shutil.rmtree(folder())

  opened = places.place(URL).opened(training=True, export=False)
  with pytest.raises(ConfigError, match=line), opened as at:  # noqa: PT012
    work(folder(), 1)
    at.changed()
    while "checkpoints/checkpoint" not in Record(str(folder())).files:  # the last of an upload
      time.sleep(0.02)
    remove()
    at.changed()
    for _ in range(500):
      at.require()
      time.sleep(0.02)
  assert ("checkpoints/ckpt-1.index" in contents()) == (gone == "local")
  assert (folder() / "checkpoints/ckpt-1.index").exists() == (gone == "store")
  assert "owner.json" not in contents()


@pytest.mark.parametrize(
  ("path", "url"),
  [
    ("s3:/b/x", "s3://b/x"), ("gs:/b", "gs://b"), ("s3:b/x", "s3://b/x"), ("s3//b/x", "s3://b/x"),
    ("file:/x", "file:///x"), ("http:/x", "http://x"), ("mine:/x", "mine://x"),
  ],
)  # fmt: skip
def test_a_url_with_a_slash_too_few_is_no_folder(path, url, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  remedy = rf"'{path}' has no '://' and begins like a URL; write '{url}' for a URL, or './{path}' f"
  for use in (places.place, places.local_copy, folders.local):
    with pytest.raises(ConfigError, match=remedy):
      use(path)
  assert os.listdir(tmp_path) == []
  assert type(places.place(f"./{path}")) is places.Place


@pytest.mark.parametrize("path", ["c:/x", "runs/s3:/x", "gs", "gs/x", "s3runs/x", "a:b"])
def test_other_paths_with_a_colon_are_folders(path):
  assert places.place(path).folder == path


def test_a_second_run_is_refused_while_the_first_lives(another_machine):
  with owned():
    assert contents()["owner.json"]
    another_machine()
    told = rf"model_dir '{URL}' is in use by process {os.getpid()} on .*; wait until it ends"
    with pytest.raises(ConfigError, match=told), owned():
      pass
  assert "owner.json" not in contents()
  with owned():
    pass


def test_two_that_start_at_once_do_not_both_own(monkeypatch):
  with owned():
    place = remote.RemoteOwner(Store(URL), str(folder().parent / "second"))
    monkeypatch.setattr(place, "_read", lambda: None)
    (folder().parent / "second").mkdir()
    with pytest.raises(ConfigError, match="is in use by another process"):
      place.claim()


def test_a_store_without_conditional_writes_is_asked_first(monkeypatch):
  system, pipe_file = type(fsspec.filesystem("memory")), fsspec.filesystem("memory").pipe_file

  def refusing(self, path, value, mode="overwrite"):
    if mode == "create":
      raise NotImplementedError
    pipe_file(path, value)

  monkeypatch.setattr(system, "pipe_file", refusing)
  Store(URL).write("owner.json", b"1", new=True)
  with pytest.raises(FileExistsError):
    Store(URL).write("owner.json", b"2", new=True)
  assert contents() == {"owner.json": "1"}


def test_where_a_file_appears_before_it_is_complete_it_is_renamed(tmp_path, monkeypatch):
  written = []
  store = Store(f"file://{tmp_path}/run")
  put_file = type(store._system).put_file
  monkeypatch.setattr(
    type(store._system), "put_file",
    lambda self, here, there, **k: written.append(there) or put_file(self, here, there, **k),
  )  # fmt: skip
  with owned(f"file://{tmp_path}/run"):
    work(Path(stores.cache_folder(f"file://{tmp_path}/run", "run")), 1)
  assert written
  assert all(path.endswith(".tmp") for path in written)
  require_whole(found := contents(f"file://{tmp_path}/run"))
  assert "checkpoints/ckpt-1.index" in found


def test_a_dead_owner_is_followed_and_a_live_one_that_was_followed_uploads_nothing(
  another_machine,
):
  slept = remote.RemoteOwner(Store(URL), str(folder()))
  folder().mkdir(parents=True)
  slept.claim()
  slept._ended.set()  # as if the process were stopped: it counts up nothing
  slept._thread.join()
  work(folder(), 1)
  first, export = Mirror(Store(URL), Record(str(folder())), require=slept.ask), folder() / "export"
  first.push()
  shutil.rmtree(export)
  another_machine()
  began = time.monotonic()
  with owned():
    assert time.monotonic() - began > 0.3
    before = contents()
    for change in (lambda: None, lambda: work(export.parent, 2)):
      change()
      with pytest.raises(ConfigError, match="is in use by"):
        first.push()
      assert contents().keys() == before.keys()
  slept.release()


class Down:
  """Makes uploads fail while `down` is set."""

  def __init__(self, monkeypatch):
    self.down, put = False, Store.put

    def failing(store, name, local):
      if self.down:
        raise StoreError("ConnectionError: refused")
      put(store, name, local)

    monkeypatch.setattr(Store, "put", failing)


def test_a_store_that_is_away_for_a_while_costs_nothing(monkeypatch, caplog):
  server = Down(monkeypatch)
  with owned() as opened:
    server.down = True
    work(folder(), 1)
    opened.changed()
    time.sleep(0.2)
    server.down = False
  require_whole(contents())
  assert "checkpoints/ckpt-1.index" in contents()
  warned = [r.getMessage() for r in caplog.records if URL in r.getMessage()]
  assert len(warned) == 2, warned
  assert f"cannot write to {URL} (ConnectionError: refused); the run goes on in" in warned[0]
  assert "answers again and is up to date" in warned[1]


def test_a_store_that_stays_away_fails_the_run_and_one_command_uploads_it(
  monkeypatch, capsys, another_machine
):
  server = Down(monkeypatch)
  monkeypatch.setattr(mirror, "GIVE_UP_S", 0.1)
  server.down = True
  told = rf"cannot write to '{URL}' .*refused.*; the run is whole in '.*/digits'.*`loopwright push "
  with pytest.raises(StorageError, match=f"{told}{URL}` uploads it"), owned():
    work(folder(), 1)
  with pytest.raises(KeyError, match="the first"), owned():  # an error of the run's own goes first
    raise KeyError("the first")
  assert commands.main(["loopwright", "push", URL]) == 1
  server.down = False
  assert commands.main(["loopwright", "push", URL]) == 0
  assert f"{URL} has all of {folder()}" in capsys.readouterr().out
  assert "checkpoints/ckpt-1.index" in contents()
  work(folder(), 2)
  another_machine()
  assert commands.main(["loopwright", "push", URL]) == 2
  assert "no local folder" in capsys.readouterr().err
  with owned():
    pass
  another_machine("cache")
  assert commands.main(["loopwright", "push", URL]) == 2
  assert "gone on elsewhere" in capsys.readouterr().err


def configured(*bindings):
  configurables.parse(["benchmarks/trials.gin"], bindings)
  return configurables.configured(run)


def test_a_run_trains_in_a_store(capsys, monkeypatch):
  changes, changed = [], Mirror.changed

  def noted(self):
    changes.append(sorted(p.stem for p in folder().glob("checkpoints/*.index")))
    changed(self)

  monkeypatch.setattr(Mirror, "changed", noted)
  few = ["run.train_steps = 20", "run.actions = []", "run.ledger = False"]
  found = configured(*few)(mode="train_and_evaluate", model_dir=URL)
  assert changes[0] == ["ckpt-10"]
  assert len(changes) == 3, "two checkpoints, one evaluation"
  told = capsys.readouterr()
  assert f"| {URL}" in told.out
  assert f"model_dir   {URL}, worked on in {folder()}" in told.err
  kept = contents()
  assert {"checkpoints/ckpt-20.index", "history.jsonl", "assets/manifest.json"} <= kept.keys()
  records = [json.loads(line) for line in kept["metrics.jsonl"].splitlines()]
  assert [r["step"] for r in records] == [5, 10, 15, 20, 20]
  assert {name: records[-1][name] for name in found} == found
  with pytest.raises(ConfigError, match="'evaluate_continuously' needs a folder on disk"):
    configured()(mode="evaluate_continuously", model_dir=URL)


def test_several_processes_are_refused():
  told = f"model_dir is '{URL}', which one process works on, but the run has 2"
  with pytest.raises(ConfigError, match=told):
    remote.Remote(URL).require_one_process(2)


@pytest.mark.parametrize(
  ("url", "told"),
  [
    ("foo://b/run", "has the scheme 'foo', which fsspec does not know; use s3://, gs://"),
    ("sftp://me:word@host/run", "'host/run' has a password before '@', which would appear in logs"),
    ("memory://b/run*", "is a wildcard"),
    ("s3:///x", "'s3:///x' has no bucket"),
    ("gs://", "'gs://' has no bucket"),
    ("://x", "'://x' has no scheme"),
    ("github://a/b", "cannot use 'github://a/b' (TypeError"),
  ],
)
def test_a_url_that_cannot_be_used_is_one_line(url, told):
  with pytest.raises(ConfigError) as raised:
    run(task=trials_task.Small, train_steps=1, global_batch_size=8, model_dir=url)
  assert told.replace("is a wildcard", "which are wildcards; rename it") in str(raised.value)
  assert "word@" not in str(raised.value)


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs")])
def test_a_missing_library_is_one_line_with_the_extra(scheme, extra, monkeypatch):
  def missing(*_, **__):
    raise ImportError("Install it")

  monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
  told = rf"'{scheme}://b/run' needs a library .*: pip install 'loopwright\[{extra}\]'\."
  with pytest.raises(ConfigError, match=told):
    Store(f"{scheme}://b/run")
  monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
  with pytest.raises(ConfigError, match=told.replace("a library", "a library that is missing")):
    Store(f"{scheme}://b/run")


def test_gin_files_are_read_from_a_store():
  system = fsspec.filesystem("memory")
  system.pipe_file("/bucket/configs/base.gin", b"import benchmarks.trials_task\nrun.seed = 1\n")
  top = b"include 'base.gin'\ninclude 'parts/more.gin'\nrun.train_steps = 3\n"
  system.pipe_file("/bucket/configs/top.gin", top)
  system.pipe_file("/bucket/configs/parts/more.gin", b"include '../base.gin'\nrun.ledger = True\n")
  sizes = ["run.task = @Small()", "run.global_batch_size = 8"]
  configurables.parse(["memory://bucket/configs/top.gin"], sizes)
  bound = configurables.bindings()
  assert (bound["run.seed"], bound["run.train_steps"], bound["run.ledger"]) == ("1", "3", "True")
  with pytest.raises(ConfigError, match=r"'memory://bucket/none.gin' does not exist .*; correct"):
    configurables.parse(["memory://bucket/none.gin"])
  system.pipe_file("/bucket/configs/wrong.gin", b"include 'absent.gin'\n")
  told = r"memory://bucket/configs/wrong.gin:1: there is no gin file 'absent.gin' in memory://buck"
  with pytest.raises(ConfigError, match=told):
    configurables.parse(["memory://bucket/configs/wrong.gin"])


def test_ls_and_diff_read_runs_in_a_store(capsys, tmp_path):
  tf.train.Checkpoint(v=tf.Variable(tf.zeros([749_000]))).write(str(tmp_path / "ckpt-9"))
  for name, loss in (("a", 0.5), ("b", 0.25)):
    line = {"step": 9, "split": "eval", "wall_time": 1.0, "loss": loss}
    store = Store(f"memory://bucket/runs/{name}")
    store.write("metrics.jsonl", f"{json.dumps(line)}\n".encode())
    store.write("operative_config.gin", b"run.train_steps = 9\n")
    for path in tmp_path.glob("ckpt-9.*"):
      store.put(f"checkpoints/{path.name}", str(path))
  assert commands.main(["loopwright", "ls", "memory://bucket/runs/"]) == 0
  rows = [re.split(r"  +", row) for row in capsys.readouterr().out.splitlines()[1:]]
  assert [(row[0], *row[1:4], row[5]) for row in rows] == [
    (f"memory://bucket/runs/{name}", "9/9", "done", f"loss {best} @9", "3 MB")
    for name, best in (("a", "0.5"), ("b", "0.25"))
  ]
  assert commands.main(["loopwright", "diff", *(f"memory://bucket/runs/{n}" for n in "ab")]) == 0
  told = capsys.readouterr().out
  assert re.search(r"eval loss +0.5 +0.25", told)
  assert "memory://bucket/runs/a" in told
  page = tmp_path / "report.html"
  top = "memory://bucket/runs/a"
  index = "checkpoints/ckpt-9.index"
  Store(top).write(index, b"cut off")
  assert commands.main(["loopwright", "ls", top]) == 0
  fault = f"damaged: '{top}/{index}' cannot be read."
  assert fault in capsys.readouterr().out
  assert commands.main(["loopwright", "report", top, f"--output={page}"]) == 0
  shown = page.read_text()
  assert top in shown
  assert "/loopwright-" not in shown
  capsys.readouterr()
  assert commands.main(["loopwright", "ls", "memory://bucket/none"]) == 2
  assert "'memory://bucket/none' does not exist" in capsys.readouterr().err


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
def test_a_run_in_s3_is_that_on_disk(
  server, tmp_path, another_machine, monkeypatch, capsys, caplog
):
  """It fails, goes on on another machine, and the server is away when it ends."""
  url, disk = f"s3://{s3_server.BUCKET}/runs/digits", tmp_path / "disk"
  configured()(model_dir=str(disk))
  actions = "run.actions = [@BestCheckpoint(), @Export(), @Fail()]"
  with pytest.raises(RuntimeError, match="a failure"):
    configured(actions, "Fail.as_mistake = False", "Fail.at_step = 30")(model_dir=url)
  another_machine()
  monkeypatch.setattr(mirror, "GIVE_UP_S", 0.5)
  restore = loopwright.runs.session.Session.restore

  def then_shut(session, checkpoint=None):
    restore(session, checkpoint)
    server.shut()

  with monkeypatch.context() as patch:
    patch.setattr(loopwright.runs.session.Session, "restore", then_shut)
    with pytest.raises(StorageError, match="loopwright push"):
      configured()(model_dir=url)
  server.open()
  assert commands.main(["loopwright", "push", url]) == 0
  another_machine("third")
  store, copy = Store(url), tmp_path / "copy"
  store.get_all(store.files(), str(copy))
  assert comparison.kept(copy) == ["ckpt-40", "ckpt-50", "ckpt-60"]
  for name in ("checkpoints/ckpt-60", "best/ckpt-60", "export/variables/variables"):
    assert different(copy / name, disk / name) == []
  for split in ("train", "eval"):
    assert comparison.records(copy, split) == comparison.records(disk, split)
  assert comparison.different_ledgers(copy, disk) == []

  found = configured()(mode="evaluate", model_dir=url)
  last = comparison.records(disk, "eval")[-1]
  assert found == pytest.approx({name: last[name] for name in found}, rel=1e-6)
  store.remove([name for name in store.files() if name.startswith("export/")])
  configured()(mode="export", model_dir=url)
  store.get_all([n for n in store.files() if n.startswith("export/")], str(tmp_path / "again"))
  variables = "export/variables/variables"
  assert different(tmp_path / "again" / variables, disk / variables) == []
  assert isinstance(load(url).task, trials_task.Small)

  newest = weight_files.located(url)
  assert newest.endswith("digits/checkpoints/ckpt-60")
  for path in (newest, *(weight_files.located(f"{url}/{n}") for n in ("best", "best/ckpt-60"))):
    assert different(path, disk / "checkpoints/ckpt-60") == []
  with pytest.raises(ConfigError, match="has no weights"):
    weight_files.located(f"s3://{s3_server.BUCKET}/none")

  told = [*capsys.readouterr(), caplog.text]
  told += [p.read_bytes().decode(errors="replace") for p in tmp_path.rglob("*") if p.is_file()]
  assert not [text for text in told if s3_server.SECRET in text]


@pytest.mark.whole
def test_s3_creates_once_and_tells_what_is_wrong(server, monkeypatch):
  store = Store(f"s3://{s3_server.BUCKET}/x")
  store.write("owner.json", b"1", new=True)
  with pytest.raises(FileExistsError):
    store.write("owner.json", b"2", new=True)
  assert store.read("owner.json") == b"1"
  store.remove(["owner.json", "absent"])
  assert store.files() == {}
  with pytest.raises(ConfigError, match=r"'s3://none/run' does not exist \(The specified bucket"):
    places.place("s3://none/run")
  with monkeypatch.context() as patch, server.hung():
    patch.setattr(stores, "LIMIT_S", 0.5)
    with pytest.raises(StoreError, match="it does not answer in time"):
      store.write("late", b"1")
  assert store.files() == {}
  server.shut()
  with pytest.raises(ConfigError, match=r"cannot use 's3://bucket/run' .*Could not connect"):
    places.place("s3://bucket/run")
  fsspec.get_filesystem_class("s3").clear_instance_cache()
  monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
  monkeypatch.delenv("AWS_ACCESS_KEY_ID")
  with pytest.raises(ConfigError, match=r"cannot use .*credentials"):
    places.place("s3://bucket/run")
  server.open()
