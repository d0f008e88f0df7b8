"""Some minutes on a machine with a GPU and without a network, of which nothing is lost if cut off.

  python -m benchmarks.gpu_lease OUT                      # all, within thirteen minutes
  python -m benchmarks.gpu_lease OUT --small              # small models: rehearses it on a CPU
  python -m benchmarks.gpu_lease OUT --only nccl digits   # some parts

The phases come in the order of what they are worth. What is timed runs alone; what is only right or
wrong runs side by side, with memory that grows, as TensorFlow otherwise takes all of it. Each part
is processes of its own with a limit. After each, a line with its time goes to OUT/lease.txt, on the
disk before the next part begins; the whole output of each process is in OUT.
`benchmarks/gpu_carry.py` makes what such a machine needs, and the command that starts this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "launch.py", "train", "digits_cnn"]
STEPS, EVERY = 400, 20
FIRST_ROWS = tuple(
  ("language_model", "mixed_bfloat16", who)
  for who in ("Loopwright", "JAX", "PyTorch", "torch.compile", gpu.IN_TURN, gpu.SEVERAL)
)
ROWS = (
  ("language_model", "mixed_bfloat16", "hand-written"), ("language_model", "TF32", "Loopwright"),
  ("language_model", "TF32", "PyTorch"), ("language_model_300m", "mixed_bfloat16", "Loopwright"),
  ("language_model_300m", "mixed_bfloat16", "JAX"),
  ("language_model_1b", "mixed_bfloat16", "Loopwright"),
  ("language_model_1b", "mixed_bfloat16", "JAX"), ("resnet50", "mixed_bfloat16", "Loopwright"),
  ("resnet50", "mixed_bfloat16", "PyTorch"), ("cnn", "mixed_bfloat16", "Loopwright"),
  ("cnn", "mixed_bfloat16", "hand-written"), ("cnn", "mixed_bfloat16", "PyTorch"),
  ("mlp", "TF32", "Loopwright"), ("mlp", "TF32", gpu.SEVERAL), ("mlp", "TF32", "PyTorch"),
  ("language_model", "mixed_float16", "Loopwright"),
)  # fmt: skip
CONFIGS = {
  "digits": ("digits_cnn",), "digits_bf16": ("digits_cnn", "run.precision='mixed_bfloat16'"),
  "digits_fp16": ("digits_cnn", "run.precision='mixed_float16'"),
  "language_model": ("language_model", "run.precision='mixed_bfloat16'"),
  "decoder": ("language_model_decoder", "run.precision='mixed_bfloat16'"),
  "packed": ("language_model_packed", "run.precision='mixed_float16'"),
  "gan": ("fashion_mnist_gan",), "maml": ("sinusoid_maml",), "sam": ("digits_sam",),
}  # fmt: skip
"""Runs of some steps: config and bindings."""
GROW = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
DIGEST = """
import hashlib, sys
import tensorflow as tf
reader, made = tf.train.load_checkpoint(sys.argv[1]), hashlib.sha256()
for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
  if dtype != tf.string:
    made.update(name.encode() + reader.get_tensor(name).tobytes())
print(made.hexdigest()[:12])
"""


ATTENTION = """
import sys, time
import tensorflow as tf
import loopwright as lw
from loopwright.layers import attention as ways, cudnn
n, length, heads, size = map(int, sys.argv[1:])
device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
for dtype in (tf.bfloat16, tf.float16):
  for bias in ((), (2, 1)):
    shape = cudnn.Shape(dtype, 2, 64, 64, heads, heads, size, 0.125, True, bias, False)
    print(dtype.name, "with a mask:" if bias else "causal:", ways.tried(shape, device) or "right")
given = [tf.random.normal([n, length, heads, size], dtype=tf.bfloat16) for _ in range(4)]
for way in ("plain", "blocks", "cudnn"):
  @tf.function(jit_compile=True)
  def step(query, key, value, upstream):
    with tf.GradientTape() as tape:
      tape.watch([query, key, value])
      out = lw.attention(query, key, value, causal=True, way=way)
    return tape.gradient(out, [query, key, value], output_gradients=upstream)
  try:
    began = time.time(); step(*given)[0].numpy(); first = time.time() - began; began = time.time()
    for _ in range(20): found = step(*given)
    found[0].numpy(); print(f"{way}: first {first:.1f} s, then {(time.time() - began) * 50:.3f} ms")
  except Exception as error:
    print(f"{way}: {str(error).splitlines()[0][:150]}")
"""


class Lease:
  """What the parts have in common: the folder, the time that is left, processes with a limit."""

  def __init__(self, out: Path, *, minutes: float, small: bool) -> None:
    """Begins now."""
    self.out, self.small = out, small
    self._began, self._end = time.monotonic(), time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    self._lock = threading.Lock()
    self._environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}

  def left_s(self) -> float:
    """Seconds that are left."""
    return self._end - time.monotonic()

  def write(self, line: str) -> None:
    """Writes a line with its time, to the disk too."""
    line = f"{time.monotonic() - self._began:6.1f} s  {line}"
    print(line, flush=True)
    with self._lock, open(self.out / "lease.txt", "a") as file:
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
        with contextlib.suppress(ProcessLookupError):
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
    "from loopwright.distribution import gpus\n"
    "names = [d.name.removeprefix('/device:') for d in tf.config.list_logical_devices('GPU')]\n"
    "print(tf.__version__, *gpus.described(names), gpus.unseen() or '', sep='; ')"
  )
  return lease.run("machine", [sys.executable, "-c", program], limit_s=120).splitlines()[-1]


def conformance(lease: Lease) -> str:
  """The update of each strategy beside NumPy in float64, replicas on parts of the GPU."""
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
  command += ["-n", "2" if lease.small else "5", "tests/conformance/test_update.py"]
  variables = {} if lease.small else {"TESTS_ON_GPUS": "1"}
  few = ["-k", "one_device"] if lease.small else []
  said = lease.run("conformance", [*command, *few], limit_s=240, **variables)
  return said.strip().splitlines()[-1]


def beside_the_cpu(lease: Lease) -> str:
  """The losses of the same run on the GPU and on the CPU."""
  lease.trained("gpu", **GROW)
  lease.trained("cpu", CUDA_VISIBLE_DEVICES="-1")
  pairs = zip(lease.losses("gpu"), lease.losses("cpu"), strict=True)
  apart = [abs(here - there) / abs(there) for here, there in pairs]
  return (
    f"losses of loops of {EVERY} steps differ by {apart[0]:.1e} at first, {max(apart):.1e} most"
  )


def deterministic(lease: Lease) -> str:
  """The same run twice."""
  found = [lease.trained(x, "run.deterministic=True", **GROW) for x in ("first", "second")]
  return "equal bit for bit" if found[0] == found[1] else f"DIFFERENT: {found}"


def resumed(lease: Lease) -> str:
  """The same run, killed by SIGKILL after its first checkpoint; needs `deterministic`."""
  command = lease.training("killed", "run.deterministic=True")
  started = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    start_new_session=True, env={**os.environ, **GROW},
  )  # fmt: skip
  until = time.monotonic() + min(90, lease.left_s())
  folder = lease.out / "killed" / "checkpoints"
  while not [*folder.glob("ckpt-*.index")] and started.poll() is None and time.monotonic() < until:
    time.sleep(0.005)
  if started.poll() is None:
    os.killpg(started.pid, signal.SIGKILL)
  started.wait()
  at = max((int(p.stem.partition("-")[2]) for p in folder.glob("ckpt-*.index")), default=0)
  equal = lease.trained("killed", "run.deterministic=True", **GROW) == lease.digest("first")
  return f"killed at step {at} of {STEPS}, then {'equal bit for bit' if equal else 'DIFFERENT'}"


def nccl(lease: Lease) -> str:
  """One worker, which asks NCCL for nothing; and the library itself, on one GPU."""
  cluster = {"cluster": {"worker": ["127.0.0.1:29771"]}, "task": {"type": "worker", "index": 0}}
  of = "ring" if lease.small else "nccl"
  bindings = ["run.strategy=@multi_worker_mirrored"]
  bindings += [f"multi_worker_mirrored.communication='{of}'"]
  lease.trained("nccl", *bindings, TF_CONFIG=json.dumps(cluster))
  program = (
    "import ctypes, pathlib, nvidia.nccl\n"
    "[path] = pathlib.Path(nvidia.nccl.__path__[0]).glob('lib/libnccl.so*')\n"
    "nccl, made = ctypes.CDLL(str(path)), ctypes.c_void_p()\n"
    "print('ncclCommInitAll:', nccl.ncclCommInitAll(ctypes.byref(made), 1, None))"
  )
  loss = f"loss {lease.losses('nccl')[-1]:.4f}"
  if lease.small:
    return loss
  said = lease.run("nccl_itself", [sys.executable, "-c", program], limit_s=30, NCCL_DEBUG="INFO")
  version = re.search(r"NCCL version \S+", said)
  return f"{loss}; {version[0] if version else 'no version'}, {said.splitlines()[-1]}"


def configured(name: str) -> Callable[[Lease], str]:
  """Returns the part that trains a shipped config for some steps."""

  def trained(lease: Lease) -> str:
    steps = 4 if lease.small else 100
    command = [*TRAIN[:-1], *CONFIGS[name], f"run.train_steps={steps}", "run.eval_steps=1"]
    command += [f"run.steps_per_loop={steps // 4}", f"--model_dir={lease.out / name}"]
    return lease.run(name, command, limit_s=100, **GROW).strip().splitlines()[-1]

  return trained


def verified(lease: Lease) -> str:
  """What verify says of a shipped config."""
  command = [sys.executable, "-m", "loopwright", "verify", "digits_cnn"]
  limit_s = 400 if lease.small else 170
  return lease.run("verify", command, limit_s=limit_s, **GROW).strip().splitlines()[-1]


def attention(lease: Lease) -> str:
  """cuDNN's attention beside plain, and milliseconds of each way, forward and backward."""
  size = ["1", "32", "2", "8"] if lease.small else ["32", "512", "12", "64"]
  return lease.run("attention", [sys.executable, "-c", ATTENTION, *size], limit_s=60).strip()[-900:]


def throughput(model: str, precision: str, who: str) -> Callable[[Lease], str]:
  """Returns the part that measures a row of `benchmarks.gpu`."""

  def measured(lease: Lease) -> str:
    few = ["--small", "--block_s=0.05"] if lease.small else ["--block_s=0.5"]
    command = gpu.command_of(model, precision, who, gpu.PEER_PYTHON)
    name = re.sub(r"\W+", "_", f"row_{model}_{precision}_{who}")
    limit_s = 90 if lease.small or model.endswith(("m", "b")) else 30
    # The stand-ins for libraries of CUDA are for TensorFlow alone.
    own = {} if who in gpu.CONTENDERS else {"LD_LIBRARY_PATH": "", "XLA_FLAGS": ""}
    try:
      return lease.run(name, [*command, *few], limit_s=limit_s, **own).strip().splitlines()[-1]
    except RuntimeError as error:
      if "ModuleNotFoundError" in str(error):
        return f"not in {command[0]}"
      raise

  return measured


def together(lease: Lease) -> str:
  """Two processes on one GPU, whose memory grows."""
  names = ("one", "another")
  with futures.ThreadPoolExecutor(2) as pool:
    made = [*pool.map(lambda name: lease.trained(name, "run.gpu_memory='grow'"), names)]
  return f"both trained, {'equal' if made[0] == made[1] else 'different'} weights"


def profile(lease: Lease) -> str:
  """A trace of some steps, with the gaps before the update."""
  lease.trained("profile", "run.actions=[@Profile()]", "Profile.steps=(101, 105)")
  traces = [*(lease.out / "profile").rglob("*.xplane.pb")]
  return f"{len(traces)} trace(s) of {sum(p.stat().st_size for p in traces)} bytes, for TensorBoard"


def rows(names: Sequence[tuple[str, str, str]]) -> dict[str, Callable[[Lease], str]]:
  """Returns the parts of some rows by their names."""
  return {f"{who}, {model}, {precision}": throughput(model, precision, who)
          for model, precision, who in names}  # fmt: skip


def in_turn(*parts: Callable[[Lease], str]) -> Callable[[Lease], str]:
  """Returns a part of several, of which each needs the one before it."""
  return lambda lease: "; ".join(part(lease) for part in parts)


PHASES: tuple[tuple[bool, dict[str, Callable[[Lease], str]]], ...] = (
  (False, {"machine": machine, "attention": attention, **rows(FIRST_ROWS),
           "compiled again": throughput(*FIRST_ROWS[0])}),
  (True, {"conformance": conformance, "verify": verified, "beside_the_cpu": beside_the_cpu,
          "deterministic, resumed": in_turn(deterministic, resumed),
          **{name: configured(name) for name in CONFIGS}}),
  (False, {**rows(ROWS), "profile": profile, "nccl": nccl, "together": together}),
)  # fmt: skip
"""Whether its parts run side by side, and the parts."""
PARTS = {name: part for _, parts in PHASES for name, part in parts.items()}


def carried_out(lease: Lease, name: str) -> None:
  """Carries out a part, and writes its line."""
  if lease.left_s() < 5:
    lease.write(f"{name}: left out, no time")
    return
  try:
    lease.write(f"{name}: {PARTS[name](lease)}")
  except Exception as error:
    lease.write(f"{name}: FAILED, {type(error).__name__}: {error}")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("out", type=Path, help="a folder for what is seen")
  parser.add_argument("--minutes", type=float, default=13.0, help="what it may take")
  parser.add_argument("--small", action="store_true", help="small models, for a CPU")
  parser.add_argument("--only", nargs="+", default=[*PARTS], choices=PARTS, metavar="PART")
  given = parser.parse_args()
  lease = Lease(given.out.resolve(), minutes=given.minutes, small=given.small)
  for beside, parts in PHASES:
    names = [name for name in parts if name in given.only]
    many = (2 if lease.small else 8) if beside else 1
    with futures.ThreadPoolExecutor(many) as pool:
      [*pool.map(lambda name: carried_out(lease, name), names)]
  lease.write("end")


if __name__ == "__main__":
  main()
