"""Compares the folder of a run that was interrupted with that of one that was not, bit by bit.

  forks.warm_up()
  assert not comparison.differences(folder, reference)

It reads files alone, so a process that has called it can still be forked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from loopwright.run_folder import checkpoints, fitting
from loopwright.tools.ledger.proof import Ledger, Problem

TIMES = ("wall_time", "input_wait_s", "examples_per_second", "steps_per_second", "start_s",
         "communication_s", "cpu_utilization", "model_flops_per_s", "mfu")  # fmt: skip
REMAINS = ("*.tmp", "*.new*", "*.old*", ".writable-*", "owner.json", checkpoints.UNFINISHED)
"""What only a run that was killed may leave."""


def differences(folder: Path, reference: Path, *, same_steps: bool = True) -> list[str]:
  """Returns how `folder` differs from `reference`; `same_steps`: both must keep the same steps."""
  ours, theirs = kept(folder), kept(reference)
  found = [] if ours == theirs or not same_steps else [f"checkpoints {ours}, not {theirs}"]
  if ours[-1:] != theirs[-1:]:
    found.append(f"the last checkpoint is {ours[-1:]}, not {theirs[-1:]}")
  names = [f"checkpoints/{name}" for name in ours if name in theirs]
  found += different_best(folder, reference)
  for name in (*names, "export/variables/variables"):
    found += different_tensors(folder / name, reference / name)
  for split in ("train", "eval"):
    if records(folder, split) != records(reference, split):
      found.append(f"{split} records of metrics.jsonl differ")
  for file in ("operative_config.gin", *_files_of(reference, "assets")):
    if _bytes(folder / file) != _bytes(reference / file):
      found.append(f"{file} differs")
  return found + different_ledgers(folder, reference) + remains(folder)


def kept(folder: Path) -> list[str]:
  """Returns the names of the complete checkpoints, oldest first."""
  paths = checkpoints.list_checkpoints(str(folder / "checkpoints"))
  return [Path(path).name for path in paths]


def records(folder: Path, split: str, *, times: bool = False) -> list[dict]:
  """Returns the complete lines of metrics.jsonl; without `times`, without what depends on those.

  Raises:
    ValueError: a line that is not JSON.
  """
  path = folder / "metrics.jsonl"
  lines = path.read_text().split("\n")[:-1] if path.exists() else []
  parsed = [json.loads(line) for line in lines]
  return [
    {k: v for k, v in record.items() if times or k not in TIMES}
    for record in parsed
    if record["split"] == split
  ]


def reached(folder: Path) -> int:
  """Returns the last step of training in metrics.jsonl, 0 without one."""
  return max((record["step"] for record in records(folder, "train")), default=0)


def different_best(folder: Path, reference: Path) -> list[str]:
  """Compares best.json, but for the checkpoint's name, and the checkpoints that it names."""
  ours, theirs = (best(f) or {} for f in (folder, reference))
  names = [one.pop("checkpoint", "") for one in (ours, theirs)]
  found = [] if ours == theirs else [f"best.json is {ours}, not {theirs}"]
  return found + different_tensors(folder / "best" / names[0], reference / "best" / names[1])


def best(folder: Path) -> dict | None:
  """Returns best.json, or None if there is none, or half of one."""
  try:
    return json.loads((folder / "best" / "best.json").read_text())
  except (OSError, ValueError):
    return None


def different_tensors(path: Path, reference: Path) -> list[str]:
  """Returns the names of tensors that are not bit-identical, including the object graph."""
  if not Path(f"{reference}.index").exists():
    return []
  try:
    values = [tensors(p) for p in (path, reference)]
  except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
    return [f"{path.parent.name}/{path.name} cannot be read: {error}"[:200]]
  unequal = {n for n in values[0] if values[0][n] != values[1].get(n)}
  return [f"{path.name}: {name}" for name in sorted(unequal | (set(values[1]) - set(values[0])))]


def tensors(path: Path) -> dict[str, bytes]:
  """Returns every value in a checkpoint; raises a tf.errors.OpError if it is damaged."""
  reader = tf.train.load_checkpoint(str(path))
  names = reader.get_variable_to_shape_map().keys() - {fitting.START}  # each process's own
  return {name: _bits(reader.get_tensor(name)) for name in names}


def _bits(value: object) -> bytes:
  return value if isinstance(value, bytes) else value.tobytes()  # type: ignore[attr-defined]


def different_ledgers(folder: Path, reference: Path) -> list[str]:
  """Compares the examples of each step on the path to the last weights."""
  found = []
  for file in reference.glob("ledger-*.jsonl"):
    try:
      ours, theirs = (Ledger((f / file.name).read_text().split("\n")) for f in (folder, reference))
    except (OSError, Problem) as problem:
      found.append(f"{file.name}: {problem}")
      continue
    rows = [{s: row[:2] for s, row in ledger.path.items()} for ledger in (ours, theirs)]
    if rows[0] != rows[1]:
      found.append(f"{file.name} does not have the same examples in each step")
  return found


def remains(folder: Path) -> list[str]:
  """Returns what a run that has ended should have removed."""
  found = sorted(path for pattern in REMAINS for path in folder.rglob(pattern))
  return [f"{path.relative_to(folder)} was left behind" for path in found]


def _files_of(folder: Path, name: str) -> list[str]:
  return sorted(f"{name}/{path.name}" for path in (folder / name).glob("*"))


def _bytes(path: Path) -> bytes | None:
  return path.read_bytes() if path.is_file() else None
