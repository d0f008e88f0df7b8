"""Ten minutes on a machine with a GPU and without a network, of which nothing is lost if cut off.

  python -m benchmarks.gpu_lease OUT                 # all, within ten minutes
  python -m benchmarks.gpu_lease OUT --small         # small models: rehearses it on a CPU
  python -m benchmarks.gpu_lease OUT --only nccl     # one part

The parts come in the order of what they are worth, each in processes of its own with a limit. After
each, a line with its time goes to OUT/lease.txt, on the disk before the next part begins; the whole
output of each process is in OUT. `benchmarks/gpu_carry.py` makes what such a machine needs.

Correctness: the update on parts of the GPU as tests/conformance has it; a run on the GPU beside the
same on the CPU; `run.deterministic` twice, bit for bit; killed and resumed, bit for bit. Then NCCL
with one worker, throughput, a trace of it, and memory beside what `--mode=memory` estimates.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "launch.py", "train", "digits_cnn"]
STEPS, EVERY = 400, 20
ROWS = (
  ("language_model", "TF32"), ("language_model", "mixed_bfloat16"),
  ("language_model", "mixed_bfloat16, XLA"), ("language_model", "mixed_float16"),
  ("mlp", "TF32"), ("cnn", "mixed_bfloat16"), ("resnet50", "mixed_bfloat16"),
)  # fmt: skip
DIGEST = """
import hashlib, sys
import tensorflow as tf
reader, made = tf.train.load_checkpoint(sys.argv[1]), hashlib.sha256()
for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
  if dtype != tf.string:
    made.update(name.encode() + reader.get_tensor(name).tobytes())
print(made.hexdigest()[:12])
"""


class Lease:
  """What the parts have in common: the folder, the time that is left, processes with a limit."""

  def __init__(self, out: Path, *, minutes: float, small: bool) -> None:
    """Begins now."""
    self.out, self.small = out, small
    self._began, self._end = time.monotonic(), time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    # TensorFlow's wheel has no code for Hopper: the driver compiles it from PTX, once for all.
    cache = {"CUDA_CACHE_PATH": str(out / "cuda_cache"), "CUDA_CACHE_MAXSIZE": str(2**32 - 1)}
    self._environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **cache}

  def left_s(self) -> float:
    """Seconds that are left."""
    return self._end - time.monotonic()

  def write(self, line: str) -> None:
    """Writes a line with its time, to the disk too."""
    line = f"{time.monotonic() - self._began:6.1f} s  {line}"
    print(line, flush=True)
    with open(self.out / "lease.txt", "a") as file:
      file.write(line + "\n")
      file.flush()
      os.fsync(file.fileno())

  def run(
    self, name: str, command: Sequence[str | Path], *, limit_s: float, **variables: str
  ) -> str:
    """Runs a process; returns its output. Its name is that of the output's file.

    Raises:
      RuntimeError: it failed, or took longer than `limit_s` or what is left.
    """
    limit_s = min(limit_s, self.left_s())
    path = self.out / f"{name}.txt"
    with open(path, "w") as file:
      started = subprocess.Popen(
        command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, **self._environment, **variables},
      )  # fmt: skip
      try:
        status = started.wait(limit_s)
      except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        raise RuntimeError(f"no end within {limit_s:.0f} s, see {path}") from None
    text = path.read_text(errors="replace")
    if status:
      raise RuntimeError(f"status {status}: {(text.splitlines() or [''])[-1][:200]}")
    return text

  def trained(self, name: str, *bindings: str, **variables: str) -> str:
    """Trains the digits in OUT/<name>; returns the digest of its last checkpoint."""
    self.run(name, self.training(name, *bindings), limit_s=90, **variables)
    return self.digest(name)

  def training(self, name: str, *bindings: str) -> list[str]:
    """Returns the command that does; the same name goes on with the same run."""
    common = [f"run.train_steps={STEPS}", f"run.steps_per_loop={EVERY}", "run.eval_steps=1"]
    common += [f"run.checkpoint_every_steps={EVERY}", "run.tf32=False"]
    return [*TRAIN, *common, *bindings, f"--model_dir={self.out / name}"]

  def digest(self, name: str) -> str:
    """Returns the digest of the numbers in a run's checkpoint at its last step."""
    command = [sys.executable, "-c", DIGEST, self.out / name / "checkpoints" / f"ckpt-{STEPS}"]
    said = self.run(f"digest_{name}", command, limit_s=60, CUDA_VISIBLE_DEVICES="-1")
    return said.splitlines()[-1]

  def losses(self, name: str) -> list[float]:
    """Returns the losses of a run's loops."""
    lines = (self.out / name / "metrics.jsonl").read_text().splitlines()
    return [one["loss"] for one in map(json.loads, lines) if one["split"] == "train"]


def machine(lease: Lease) -> str:
  """What TensorFlow sees."""
  program = (
    "import tensorflow as tf\n"
    "from loopwright.strategies import gpus\n"
    "names = [d.name.removeprefix('/device:') for d in tf.config.list_logical_devices('GPU')]\n"
    "print(tf.__version__, *gpus.described(names), gpus.unseen() or '', sep='; ')"
  )
  return lease.run("machine", [sys.executable, "-c", program], limit_s=120).splitlines()[-1]


def conformance(lease: Lease) -> str:
  """The update of each strategy beside NumPy in float64, replicas on parts of the GPU."""
  command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "tests/conformance/test_update.py"]
  variables = {} if lease.small else {"TESTS_ON_GPUS": "1"}
  few = ["-k", "one_device"] if lease.small else []
  said = lease.run("conformance", [*command, *few], limit_s=240, **variables)
  return said.strip().splitlines()[-1]


def beside_the_cpu(lease: Lease) -> str:
  """The losses of the same run on the GPU and on the CPU."""
  lease.trained("gpu")
  lease.trained("cpu", CUDA_VISIBLE_DEVICES="-1")
  pairs = zip(lease.losses("gpu"), lease.losses("cpu"), strict=True)
  apart = [abs(here - there) / abs(there) for here, there in pairs]
  return (
    f"losses of loops of {EVERY} steps differ by {apart[0]:.1e} at first, {max(apart):.1e} most"
  )


def deterministic(lease: Lease) -> str:
  """The same run twice."""
  found = [lease.trained(name, "run.deterministic=True") for name in ("first", "second")]
  return "equal bit for bit" if found[0] == found[1] else f"DIFFERENT: {found}"


def resumed(lease: Lease) -> str:
  """The same run, killed by SIGKILL after its first checkpoint; needs `deterministic`."""
  command = lease.training("killed", "run.deterministic=True")
  started = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
  )
  until = time.monotonic() + min(90, lease.left_s())
  folder = lease.out / "killed" / "checkpoints"
  while not [*folder.glob("ckpt-*.index")] and started.poll() is None and time.monotonic() < until:
    time.sleep(0.005)
  if started.poll() is None:
    os.killpg(started.pid, signal.SIGKILL)
  started.wait()
  at = max((int(p.stem.partition("-")[2]) for p in folder.glob("ckpt-*.index")), default=0)
  equal = lease.trained("killed", "run.deterministic=True") == lease.digest("first")
  return f"killed at step {at} of {STEPS}, then {'equal bit for bit' if equal else 'DIFFERENT'}"


def nccl(lease: Lease) -> str:
  """One worker whose collectives are NCCL's."""
  cluster = {"cluster": {"worker": ["127.0.0.1:29771"]}, "task": {"type": "worker", "index": 0}}
  of = "ring" if lease.small else "nccl"
  bindings = ["run.strategy=@multi_worker_mirrored"]
  bindings += [f"multi_worker_mirrored.communication='{of}'"]
  lease.trained("nccl", *bindings, TF_CONFIG=json.dumps(cluster), NCCL_DEBUG="INFO")
  text = (lease.out / "nccl.txt").read_text(errors="replace")
  version = re.search(r"NCCL version \S+", text)
  return f"loss {lease.losses('nccl')[-1]:.4f}, {version[0] if version else 'no line of NCCL'}"


def throughput(model: str, precision: str) -> Callable[[Lease], str]:
  """Returns the part that measures a row of `benchmarks.gpu`."""

  def measured(lease: Lease) -> str:
    few = ["--small", "--rounds=1", "--block_s=0.05"] if lease.small else ["--rounds=3"]
    command = [sys.executable, "-m", "benchmarks.gpu", *few, "--one", model, precision]
    name = re.sub(r"\W+", "_", f"row_{model}_{precision}")
    return lease.run(name, command, limit_s=100).strip().splitlines()[-1]

  return measured


def profile(lease: Lease) -> str:
  """A trace of some steps, with the gaps before the update."""
  lease.trained("profile", "run.actions=[@Profile()]", "Profile.steps=(101, 105)")
  traces = [*(lease.out / "profile").rglob("*.xplane.pb")]
  return f"{len(traces)} trace(s) of {sum(p.stat().st_size for p in traces)} bytes, for TensorBoard"


def memory(lease: Lease) -> str:
  """The most that a run of the shipped language model takes, beside the estimate."""
  command = [sys.executable, "launch.py", "memory", "language_model"]
  estimate = lease.run("memory", command, limit_s=120, CUDA_VISIBLE_DEVICES="-1")
  folder = lease.out / "language_model"
  train = [sys.executable, "launch.py", "train", "language_model", "run.train_steps=20"]
  train += ["run.steps_per_loop=10", "run.eval_steps=1", f"--model_dir={folder}"]
  lease.run("language_model", train, limit_s=120)
  last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-2])
  measured = f"{last['gpu_memory_mib']:.0f} MiB" if "gpu_memory_mib" in last else "no GPU"
  total = next(
    (row.split()[-1] for row in estimate.splitlines() if row.startswith("one_device ")), "-"
  )
  return f"measured {measured}; estimated {total} MiB"


PARTS: dict[str, Callable[[Lease], str]] = {
  "machine": machine, "conformance": conformance, "beside_the_cpu": beside_the_cpu,
  "deterministic": deterministic, "resumed": resumed, "nccl": nccl,
  **{f"{model}, {precision}": throughput(model, precision) for model, precision in ROWS},
  "profile": profile, "memory": memory,
}  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("out", type=Path, help="a folder for what is seen")
  parser.add_argument("--minutes", type=float, default=10.0, help="what it may take")
  parser.add_argument("--small", action="store_true", help="small models, for a CPU")
  parser.add_argument("--only", nargs="+", default=[*PARTS], choices=PARTS, metavar="PART")
  given = parser.parse_args()
  lease = Lease(given.out.resolve(), minutes=given.minutes, small=given.small)
  for name in given.only:
    if lease.left_s() < 5:
      lease.write(f"{name}: left out, no time")
      continue
    try:
      lease.write(f"{name}: {PARTS[name](lease)}")
    except Exception as error:
      lease.write(f"{name}: FAILED, {type(error).__name__}: {error}")
  lease.write("end")


if __name__ == "__main__":
  main()
