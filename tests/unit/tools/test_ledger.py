"""The ledger against ids that the model itself recorded, and against planted defects."""

import json

import everything
import numpy as np
import pytest
import tensorflow as tf
from input_cases import ledger_digest, one_line_error, stream

from loopwright.distribution import placement
from loopwright.inputs.sources import ArraySource
from loopwright.observers import Reading
from loopwright.options.groups import Cadence
from loopwright.run_folder.places import RunFolder
from loopwright.runs.session import Session
from loopwright.strategies.parameter_server.strategy import ParameterServer
from loopwright.tools.ledger import __main__
from loopwright.tools.ledger import proof as proofs
from loopwright.tools.ledger.proof import Ledger, Problem, prove
from loopwright.tools.ledger.recorder import Recorder

N, BATCH = everything.EXAMPLES, everything.BATCH


def recorded_trainer(folder, strategy, *, spoil=None, batch=BATCH, **options):
  """A trainer with a ledger; `spoil(dataset, position)` plants a defect in what it reads."""
  recorder = Recorder(model_dir=str(folder), strategy=strategy)
  trainer = everything.make_trainer(strategy, observers=[recorder], batch=batch, **options)
  made = trainer.task

  def read(position):
    recorder.reads(Reading(
      source=made.source("train"), position=position, seed=everything.SEED, shuffle=True,
      global_batch_size=batch, rows=None, padded_batch_size=trainer.padded_batch_size,
    ))  # fmt: skip
    data = everything.dataset(made, batch, trainer.batch_multiple, position)
    return spoil(data, position) if spoil else data

  trainer.dataset_fn = read
  return trainer


def entries(folder, worker=0):
  lines = (folder / f"ledger-{worker}.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines if line]


def check(folder, capsys):
  """Runs the command; returns its status and what it printed."""
  capsys.readouterr()
  status = __main__.main([str(folder)])
  return status, capsys.readouterr().out.strip()


# ---- What is recorded ----


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("batch", [12, 7])
@pytest.mark.fast(replicas=[2], batch=[7])
def test_each_step_has_the_hash_of_the_ids_it_trained_on(
  replicas, batch, tmp_path, mirrored, capsys
):
  """7 examples on 2 and 3 replicas are padded to 8 and 9 rows."""
  strategy = tf.distribute.get_strategy() if replicas == 1 else mirrored(replicas)
  trainer = recorded_trainer(tmp_path, strategy, batch=batch)
  loops = (1, 4, 2, 3)
  for steps in loops:
    everything.train(trainer, steps)
  assert trainer.traces == 1
  seen = np.reshape(trainer.task.model["stream"].seen(), [sum(loops), batch])
  start, *lines = entries(tmp_path)
  assert start == {
    "after_step": 0, "worker": 0, "workers": 1, "position": 0, "global_batch_size": batch,
    "rows": [0, batch], "num_examples": N, "seed": everything.SEED, "shuffle": True,
  }  # fmt: skip
  assert [line["first_step"] for line in lines] == [1, 2, 6, 8]
  assert [count for line in lines for count in line["counts"]] == [batch] * 10
  hashes = [value for line in lines for value in line["hashes"]]
  assert hashes == [f"{ledger_digest(ids):016x}" for ids in seen]
  status, text = check(tmp_path, capsys)
  examples = 10 * batch
  assert status == 0
  assert text == (
    "steps 1 to 10: each consumed exactly once (1 worker, 1 start, 0 steps rerun with the "
    f"same examples)\nepochs: {examples // N} complete, {N} distinct examples in each; "
    f"{examples % N} examples of the next"
  )


@pytest.mark.whole
def test_there_is_one_record_a_replica_and_none_without_a_ledger(tmp_path, mirrored):
  def records(trainer):
    everything.train(trainer, 1)
    definitions = trainer.graph().as_graph_def().library.function
    return sum(node.op == "ResourceScatterUpdate" for f in definitions for node in f.node_def)

  assert records(everything.make_trainer(mirrored(2))) == 0
  assert records(recorded_trainer(tmp_path, mirrored(2))) == 2  # one a replica


@pytest.fixture
def one_device():
  return tf.distribute.OneDeviceStrategy("CPU:0")


def test_parameter_servers_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "of", lambda _: ParameterServer(None))
  with one_line_error("run.ledger is True, but under parameter_server"):
    Recorder(model_dir=str(tmp_path), strategy=tf.distribute.get_strategy())


# ---- Stopped and gone on ----


def session(trainer, folder, steps):
  cadence = Cadence(train_steps=steps, steps_per_loop=2, checkpoint_every_steps=4)
  made = Session(
    trainer=trainer, folder=RunFolder(str(folder)), cadence=cadence, keep_checkpoints=10
  )
  made.restore()
  return made


def forget(folder, *, after_step):
  for path in (folder / "checkpoints").glob("ckpt-*"):
    if int(path.name.split("-")[1].split(".")[0]) > after_step:
      path.unlink()


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.fast(torn=[True])
def test_what_is_done_again_after_a_kill_supersedes(torn, tmp_path, one_device, capsys):
  """Killed after step 10 and again after 8, when checkpoints of step 4 and then none were whole."""
  session(recorded_trainer(tmp_path, one_device), tmp_path, 10).go("train")
  for kept, end in ((4, 8), (0, 14)):
    forget(tmp_path, after_step=kept)
    if torn:
      with (tmp_path / "ledger-0.jsonl").open("a") as file:
        file.write('{"first_step": 11, "counts": [12')
    session(recorded_trainer(tmp_path, one_device), tmp_path, end).go("train")
  status, text = check(tmp_path, capsys)
  assert status == 0
  assert text == (
    "steps 1 to 14: each consumed exactly once (1 worker, 3 starts, 14 steps rerun with "
    f"the same examples)\nepochs: {14 * BATCH // N} complete, {N} distinct examples in each; "
    f"{14 * BATCH % N} examples of the next"
  )


@pytest.mark.whole
def test_a_restart_on_other_replicas_goes_on_with_the_same_path(tmp_path, mirrored, capsys):
  session(recorded_trainer(tmp_path, mirrored(3)), tmp_path, 6).go("train")
  forget(tmp_path, after_step=4)
  session(recorded_trainer(tmp_path, mirrored(2)), tmp_path, 8).go("train")
  assert check(tmp_path, capsys)[0] == 0
  rows = [entry["hashes"] for entry in entries(tmp_path) if "hashes" in entry]
  assert rows[2] == rows[3]  # steps 5 and 6, on three replicas and on two


@pytest.mark.whole
def test_a_restart_that_does_other_examples_is_told(tmp_path, one_device, capsys):
  """The position that was restored is one example off."""
  session(recorded_trainer(tmp_path, one_device), tmp_path, 6).go("train")
  forget(tmp_path, after_step=4)
  trainer = recorded_trainer(
    tmp_path, one_device, spoil=lambda _, at: everything.dataset(made, BATCH, 1, at + 1)
  )
  made = trainer.task
  session(trainer, tmp_path, 8).go("train")
  assert check(tmp_path, capsys) == (
    1, "step 5, worker 0: rerun after a restart, with other examples than the first time",
  )  # fmt: skip


def test_a_restart_that_skips_steps_is_told(tmp_path, one_device, capsys):
  """The same, where nothing was done again: the run ended at its checkpoint."""
  session(recorded_trainer(tmp_path, one_device), tmp_path, 4).go("train")
  trainer = recorded_trainer(
    tmp_path, one_device, spoil=lambda _, at: everything.dataset(made, BATCH, 1, at + 1)
  )
  made = trainer.task
  session(trainer, tmp_path, 8).go("train")
  assert check(tmp_path, capsys) == (
    1,
    "step 5, worker 0: differs: its 12 examples are not the 12 of its positions",
  )


# ---- Planted defects ----


def repeated_batch(data, position):
  """The fourth batch is the third once more; then it goes on with the fourth."""
  return data.take(3).concatenate(data.skip(2))


def replayed_batch(data, position):
  """The fourth batch is the third once more, and the fourth is lost."""
  return data.take(3).concatenate(data.skip(2).take(1)).concatenate(data.skip(4))


def lost_batch(data, position):
  return data.take(3).concatenate(data.skip(4))


def changed(change):
  """In the fourth batch."""

  def spoil(data, position):
    fourth = data.skip(3).take(1).map(lambda b: {**b, "example_id": change(b["example_id"])})
    return data.take(3).concatenate(fourth).concatenate(data.skip(4))

  return spoil


def one_wrong(ids):
  return tf.concat([ids[:5], (ids[5:6] + 1) % N, ids[6:]], 0)


def one_lost(ids):
  return tf.concat([ids[:5], [-1], ids[6:]], 0)


def two_wrong(ids):
  return tf.concat([[29, 29], ids[2:]], 0)


@pytest.mark.parametrize(
  ("spoil", "examples"),
  [
    (repeated_batch, 12),
    (replayed_batch, 12),
    (lost_batch, 12),
    (changed(one_wrong), 12),
    (changed(one_lost), 11),
    (changed(two_wrong), 12),
  ],
)
@pytest.mark.fast(spoil=[repeated_batch, lost_batch])
def test_a_planted_defect_is_named(spoil, examples, tmp_path, mirrored, capsys):
  trainer = recorded_trainer(tmp_path, mirrored(2), spoil=spoil)
  everything.train(trainer, 3)
  everything.train(trainer, 4)
  line = f"differs: its {examples} examples are not the 12 of its positions"
  assert check(tmp_path, capsys) == (1, f"step 4, worker 0: {line}")


# ---- Two workers, written by hand ----


ORDER = np.concatenate([np.arange(N)] * 10)  # unshuffled
START = {
  "workers": 2, "position": 0, "global_batch_size": 7, "num_examples": N, "seed": 0,
  "shuffle": False,
}  # fmt: skip
ROWS = {0: [0, 4], 1: [4, 8]}  # the last row is padding


def lines_of(worker, first, last, *, after=None, ids=ORDER, **changes):
  """A start and one line a step, with the ids that NumPy says."""
  start = {"worker": worker, "rows": ROWS[worker], **START, **changes}
  at = first - 1 if after is None else after
  start["position"] = start["global_batch_size"] * at
  lines = [json.dumps({"after_step": at, **start})]
  for step in range(first, last + 1):
    begin, end = (
      (step - 1) * start["global_batch_size"] + min(row, start["global_batch_size"])
      for row in start["rows"]
    )
    lines.append(proofs.steps_line(step, [end - begin], [ledger_digest(ids[begin:end])]))
  return lines


def proof(*lines, **options):
  return prove([Ledger(part) for part in lines], **options)


def problem(*lines, **options):
  with pytest.raises(Problem) as caught:
    proof(*lines, **options)
  return str(caught.value)


def both(first, last, **changes):
  return [lines_of(worker, first, last, **changes) for worker in (0, 1)]


def test_two_workers_together_read_everything_once():
  found = proof(*both(1, 13))
  assert (found.parts[""].epochs, found.parts[""].left_over, found.workers) == (3, 1, 2)
  assert str(found).startswith("steps 1 to 13: each consumed exactly once (2 workers, 1 start, ")


@pytest.mark.parametrize("worker", [0, 1])
def test_the_worker_that_lacks_a_step_is_named(worker):
  lines = both(1, 6)
  del lines[worker][3]
  assert problem(*lines) == f"step 3, worker {worker}: skipped, no line records it"


@pytest.mark.parametrize("worker", [0, 1])
def test_the_worker_that_differs_is_named(worker):
  lines, wrong = both(1, 6), ORDER.copy()
  first, size = 4 * 7 + 4 * worker, (4, 3)[worker]
  wrong[first] = 11
  lines[worker] = lines_of(worker, 1, 6, ids=wrong)
  assert problem(*lines) == (
    f"step 5, worker {worker}: differs: its {size} examples are not the {size} of its positions"
  )


def test_a_worker_that_goes_back_is_named():
  lines = both(1, 6)
  lines[1] = lines_of(1, 1, 3) + lines_of(1, 4, 6, ids=np.roll(ORDER, 2))[1:]
  assert problem(*lines) == (
    "step 4, worker 1: differs: its 3 examples are not the 3 of its positions"
  )


@pytest.mark.parametrize("said", [True, False])
def test_what_a_start_leaves_out_must_be_padding(said):
  """Of ledgers that earlier versions wrote, whose rows of an example became padding."""
  out, lines = int(ORDER[8]), []
  for worker in (0, 1):
    head = lines_of(worker, 1, 1, **({"left_out": [out]} if said else {}))[0]
    lines.append([head])
    for step in (1, 2):
      begin, end = ((step - 1) * 7 + min(row, 7) for row in ROWS[worker])
      ids = ORDER[begin:end][ORDER[begin:end] != out]
      lines[worker].append(proofs.steps_line(step, [len(ids)], [ledger_digest(ids)]))
  if said:
    assert proof(*lines).left_out == int((ORDER[:14] == out).sum())
  else:
    assert problem(*lines) == (
      "step 2, worker 0: differs: its 3 examples are not the 4 of its positions"
    )


def test_a_missing_file_is_a_worker_that_recorded_nothing():
  assert problem(lines_of(0, 1, 2)) == "step 1, worker 1: skipped, no line records it"


def test_workers_killed_at_different_steps_and_a_smaller_cluster_later():
  """Worker 0 got to step 9, worker 1 to step 8; on from 4; then worker 0 alone, from 6."""
  lines = [lines_of(0, 1, 9) + lines_of(0, 5, 8), lines_of(1, 1, 8) + lines_of(1, 5, 8)]
  assert proof(*lines).reruns == 4
  lines[0] += lines_of(0, 7, 12, workers=1, rows=[0, 7])
  assert (proof(*lines).last_step, proof(*lines).workers) == (12, 1)
  lines[0] += lines_of(0, 11, 14)
  lines[1] += lines_of(1, 11, 14)
  assert (proof(*lines).last_step, proof(*lines).workers) == (14, 2)


def test_steps_without_a_ledger_are_a_gap():
  lines = both(1, 4)
  for worker in (0, 1):
    lines[worker] += lines_of(worker, 7, 8)
  assert problem(*lines) == "step 5, worker 0: skipped, no line records it"


def test_a_ledger_begun_later_says_so():
  found = proof(*both(6, 20))  # positions 35 to 140: the third and fourth epoch
  assert (found.first_step, found.parts[""].epochs, found.parts[""].left_over) == (6, 2, 20)
  assert "steps 1 to 5: unknown, the ledger was switched on later" in str(found)


def test_a_checkpoint_beyond_the_ledger_is_told():
  assert proof(*both(1, 4), checkpoint_step=4).last_step == 4
  assert problem(*both(1, 4), checkpoint_step=6) == (
    "step 5: the newest checkpoint is of step 6, but worker 0 recorded no step after 4"
  )


def test_two_runs_in_one_folder_are_told():
  lines = both(1, 4)
  lines[0].append(lines[0][-1])
  assert problem(*lines) == (
    "step 4, worker 0: recorded twice without a restart in between; do two runs share this folder?"
  )


def test_another_order_within_an_epoch_is_told():
  whole = {"workers": 1, "rows": [0, 7]}
  lines = lines_of(0, 1, 4, **whole) + lines_of(0, 5, 8, num_examples=N - 1, **whole)
  ids = np.concatenate([ORDER[:28], np.arange(28, 70) % (N - 1)])
  lines = lines_of(0, 1, 4, **whole) + lines_of(0, 5, 8, num_examples=N - 1, ids=ids, **whole)
  assert problem(lines) == (
    "step 5: a restart changed the order of the examples (num_examples, seed) from (30, None) to "
    "(29, None) within an epoch"
  )


def test_a_stream_of_unknown_length_has_its_steps_counted():
  found = proof(*both(1, 4, num_examples=None))
  assert "examples: not compared, the length of the stream is unknown" in str(found)


def test_a_stream_of_known_length_is_compared(tmp_path, mirrored):
  strategy = mirrored(2)
  recorder = Recorder(model_dir=str(tmp_path), strategy=strategy)
  options = {"position": 0, "seed": 3, "global_batch_size": 7, "rows": None, "shuffle": True}
  options["padded_batch_size"] = 8
  recorder.reads(Reading(source=stream(N), **options))
  recorder.loop_begins(after_step=0, steps=5)
  for step in range(5):
    ids = tf.constant(ORDER[step * 7 : step * 7 + 7])
    parts = [ids[:4], tf.concat([ids[4:], [-1]], 0)]
    batch = strategy.experimental_distribute_values_from_function(
      lambda context, parts=parts: parts[context.replica_id_in_sync_group]
    )
    recorder.batch_taken({"example_id": batch}, tf.constant(step, tf.int64))
  recorder.loop_ends({}, done=5, ran=5)
  [found] = proofs.read(str(tmp_path))[""]
  assert prove([found]).parts[""].epochs == 1


def test_an_order_of_many_examples_is_compared_in_parts(monkeypatch):
  """Against the permutation that the input gives, 3 steps at a time."""
  monkeypatch.setattr(proofs, "_AT_ONCE", 21)
  source = ArraySource(features={"x": np.zeros(5000, np.int8)})
  from loopwright.inputs.datasets import train_dataset

  data = train_dataset(source, global_batch_size=7, seed=4).take(30).as_numpy_iterator()
  ids = np.concatenate([batch["example_id"] for batch in data])
  options = {"num_examples": 5000, "seed": 4, "shuffle": True}
  assert proof(*both(1, 30, ids=ids, **options)).parts[""].left_over == 210
  ids[100] = 4999
  assert problem(*both(1, 30, ids=ids, **options)).startswith(
    "step 15, worker 0: differs: its 4 ex"
  )


# ---- The command; after kills in a cluster: tests/clusters/test_multi_worker.py ----


def test_without_a_ledger_the_command_says_what_to_do(tmp_path, capsys):
  assert __main__.main([str(tmp_path)]) == 2
  out, err = capsys.readouterr()
  assert (out, err.count("\n")) == ("", 1)
  assert "train with `run.ledger = True`" in err
  assert __main__.main([]) == 2
  assert "usage: python -m loopwright.tools.ledger MODEL_DIR" in capsys.readouterr().err
