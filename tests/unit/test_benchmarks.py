"""Benchmarks that no machine here can run in full do run in small."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import launch
from benchmarks import (
  ecosystems,
  evaluation,
  gpu,
  gpu_carry,
  gpu_lease,
  jpeg_folders,
  models,
  startup,
  startup_sides,
  turns,
)

SMALL = [sys.executable, "-m", "benchmarks.gpu", "--small", "--block_s=0.05", "--models", "cnn"]


@pytest.mark.whole
def test_the_table_of_gpus_in_small():
  command = [
    *SMALL,
    "--precisions",
    "mixed_float16",
    "--only",
    "Loopwright",
    "hand-written",
    "Keras",
  ]
  done = subprocess.run(
    command, capture_output=True, text=True, check=True, cwd=Path(launch.__file__).parent
  )
  rows = [line.split("|")[2:-1] for line in done.stdout.splitlines() if line.startswith("| cnn")]
  assert [row[1].strip() for row in rows] == ["Loopwright", "hand-written", "Keras"]
  for precision, _, step_ms, rate, first_s, flops, mfu, mib in rows:
    assert [precision.strip(), mfu.strip()] == ["mixed_float16", "-"]
    assert float(rate) == pytest.approx(32 / float(step_ms) * 1e3, rel=1e-2)
    # Two convolutions 3x3, to 8 and 16 channels, and the dense layer: multiply-adds count as 2.
    dense = 8 * 8 * 16 * 10
    adds = 32 * (32 * 32 * 9 * 3 * 8 + 16 * 16 * 9 * 8 * 16 + dense)
    assert float(flops) * 1e12 == pytest.approx(3 * 2 * adds / float(step_ms) * 1e3, rel=0.05)
    assert [float(first_s) > 0, float(mib) > 0] == [True, True]
  assert "ReductionToOneDevice" in done.stdout
  assert "NCCL in 1 trace: no" in done.stdout


@pytest.mark.whole
def test_a_row_that_takes_too_long_ends():
  command = [*SMALL, "--limit_s=0.5", "--precisions", "TF32", "--only", "Loopwright"]
  done = subprocess.run(
    command, capture_output=True, text=True, check=True, cwd=Path(launch.__file__).parent
  )
  assert "| cnn | TF32 | Loopwright: failed: no result within 0.5 s\n" in done.stdout


def test_the_cause_of_an_error_of_tensorflow_is_found():
  out = "OOM when allocating tensor with shape[9] on GPU:0"
  ends = "0 successful operations.\n0 derived errors ignored. [Op:f]"
  assert gpu.cause(f"Graph execution error:\n\nDetected at node x\n{out}\n\t[[x]]") == out
  several = f"2 root error(s) found.\n  (0) RESOURCE_EXHAUSTED:  {out}\n  (1) y\n{ends}"
  assert gpu.cause(several) == f"(0) RESOURCE_EXHAUSTED:  {out}"
  assert gpu.cause("run.seed is 'x'") == "run.seed is 'x'"


def test_a_part_of_a_lease_that_hangs_or_fails_loses_nothing(tmp_path):
  lease = gpu_lease.Lease(tmp_path, minutes=1, small=True)
  lease.write("before")
  with pytest.raises(RuntimeError, match=r"no end within 1 s, see .*hangs.txt"):
    lease.run("hangs", ["sh", "-c", "echo said; sleep 60"], limit_s=1)
  assert (tmp_path / "hangs.txt").read_text() == "said\n"
  with pytest.raises(RuntimeError, match="status 3: why"):
    lease.run("fails", ["sh", "-c", "echo why; exit 3"], limit_s=9)
  lease.write("after")
  lines = (tmp_path / "lease.txt").read_text().splitlines()
  assert [line.split(" s  ")[1] for line in lines] == ["before", "after"]


def test_the_code_for_other_chips_is_found():
  """Two groups: PTX for 90 and code for 80, then code for 90 and for 70."""

  def entry(kind, chip, code):
    head = struct.pack("<HHIQ", kind, 1, 64, len(code))
    return head + bytes(12) + struct.pack("<I", chip) + bytes(32) + code

  def group(*entries):
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)

  data = bytes(8) + group(entry(1, 90, b"ptx_"), entry(2, 80, b"eighty__"))
  data += bytes(16) + group(entry(2, 90, b"ninety__"), entry(2, 70, b"seventy_"))
  found = gpu_carry.code_of_others(data, 0, len(data), 90)
  assert [data[at : at + size] for at, size in found] == [b"eighty__", b"seventy_"]


def test_words_are_not_repeated_in_a_batch():
  features, labels = models.examples("embedding")
  batches = features["words"].reshape(models.BATCHES, -1)
  assert batches.shape[1] == 128 * 100
  assert all(len(np.unique(batch)) == len(batch) for batch in batches)
  assert len(np.unique(labels)) > 1


def test_the_loss_of_a_sequence_is_the_mean_over_its_bytes():
  logits = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
  labels = np.array([[0, 1, 2], [3, 3, 0]], np.int32)
  odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  expected = -np.log(np.take_along_axis(odds, labels[..., np.newaxis], -1))[..., 0].mean(axis=1)
  found = models.per_example_loss("language_model", tf.constant(labels), tf.constant(logits))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_every_ecosystem_is_compared_by_round_and_by_its_first_losses():
  ours = {"step_s": [1.0, 2.0, 4.0], "loss": 1.0}
  jax = {"step_s": [2.0, 2.0, 2.0], "loss": 1.0001}
  torch = {"step_s": [1.0, 1.0, 1.0], "loss": 1.01}
  lines = ecosystems.report({"mlp": {"loopwright": ours, "jax": jax, "torch": torch}}).splitlines()
  assert "| JAX, Optax, jitted step | 1.00 [0.75, 1.50] |" in lines
  assert "- NOT THE SAME WORK: mlp: torch's losses differ by 9.9e-03" in lines


def test_contenders_are_compared_round_by_round_with_the_fastest():
  names = [*evaluation.MAKERS]
  hand, other = evaluation.REFERENCES
  times = {name: [4.0, 4.0, 4.0] for name in names} | {
    hand: [1.0, 2.0, 8.0],
    other: [3.0, 3.0, 3.0],
  }
  assert turns.fastest(times, evaluation.REFERENCES) == hand
  first, *_ = evaluation.report({"mlp x1": times}, batches=2).splitlines()[2:]
  assert first == "| **Loopwright** | 0.50 [0.38, 1.25] |"


def test_turns_are_as_many_as_the_rounds_and_each_is_prepared():
  calls = []
  blocks = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
  times = turns.seconds(blocks, 3, before=lambda name: calls.append(f"before {name}"))
  assert [len(times[name]) for name in blocks] == [3, 3]
  assert sorted(calls) == sorted(["a", "b", "before a", "before b"] * 3)
  assert all(calls[i] == f"before {calls[i + 1]}" for i in range(0, len(calls), 2))


def test_made_images_have_the_sizes_and_the_detail_of_photos(tmp_path):
  jpeg_folders.make_files(tmp_path, 12)
  files = sorted(tmp_path.glob("*/*.jpg"))
  images = [tf.io.decode_jpeg(file.read_bytes()).numpy() for file in files]
  assert len(images) == 12
  assert all(256 <= i.shape[0] <= 375 and 256 <= i.shape[1] <= 500 for i in images)
  assert all(20_000 < file.stat().st_size < 100_000 for file in files)


def test_start_up_is_compared_round_by_round():
  def process(imports, step, cpu):
    return {"imports": imports, "first step": step, "cpu": cpu}

  def turn(ours, theirs):
    return dict(zip(startup.WHO, (process(*ours), process(*theirs)), strict=True))

  # 3 over 2, 6 over 8 and 10 over 10 seconds; the ratio of the medians would be 0.75.
  figures = [
    turn((2.0, 1.0, 4.0), (1.0, 1.0, 1.0)),
    turn((2.0, 4.0, 1.0), (4.0, 4.0, 1.0)),
    turn((2.0, 8.0, 1.0), (5.0, 5.0, 2.0)),
  ]
  lines = startup.report({"mlp x2": figures}).splitlines()
  assert "| mlp x2 | 6.00 | 8.00 | 1.00 [0.88, 1.25] | 1.00 [0.75, 2.50] |" in lines
  assert "| mlp x2 | loopwright | 2.00 | 0.00 | 0.00 | 0.00 | 0.00 | 4.00 |" in lines
  assert "| mlp x2 | by hand | 4.00 | 0.00 | 0.00 | 0.00 | 0.00 | 4.00 |" in lines


def test_the_parts_of_a_start_add_up_to_the_time_since_the_command(monkeypatch, tmp_path):
  clock = iter([11.0, 11.5, 14.0])
  monkeypatch.setattr(startup_sides.time, "perf_counter", lambda: next(clock))
  watch = startup_sides.Watch(10.0, str(tmp_path / "seconds.json"))
  for part in ("imports", "proof", "imports"):
    watch.end(part)
  assert watch.seconds == {"imports": 3.5, "proof": 0.5}
  assert startup.total(watch.seconds) == 14.0 - 10.0
