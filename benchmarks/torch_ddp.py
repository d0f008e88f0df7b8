"""A DDP loop in PyTorch as its tutorial on torchrun has it, for benchmarks/fault_contenders.py.

As there, a snapshot holds the weights and the number of the epoch it was taken after, the run goes
on with that epoch, and the order of the examples is the same in each epoch. What it did goes into
files for the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Log:
  """What one process did: a file of lines, and a file with the steps since its start."""

  def __init__(self, folder: Path) -> None:
    start = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    self._lines = (folder / f"lines-{start}.jsonl").open("w")
    self._steps = os.open(folder / f"steps-{start}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    self._count = 0

  def line(self, **values: Any) -> None:
    self._lines.write(json.dumps({"time": time.time(), **values}) + "\n")
    self._lines.flush()

  def step(self) -> None:
    self._count += 1
    os.pwrite(self._steps, b"%-12d" % self._count, 0)


def network(units: int) -> nn.Module:
  """Returns the network of benchmarks/elastic_trials.gin, with Keras's initial values."""
  made = nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.SiLU(), nn.Linear(units, 10))
  for layer in made:
    if isinstance(layer, nn.Linear):
      nn.init.xavier_uniform_(layer.weight)
      nn.init.zeros_(layer.bias)
  return made


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("folder", type=Path)
  parser.add_argument("--epochs", type=int, required=True)
  parser.add_argument("--save_every", type=int, required=True, help="epochs")
  options = parser.parse_args()
  log, snapshot = Log(options.folder), options.folder / "snapshot.pt"
  torch.set_num_threads(1)
  torch.manual_seed(0)
  distributed.init_process_group("gloo")
  rank, data = distributed.get_rank(), np.load(options.folder / "data.npz")
  images = torch.from_numpy(data["image"].astype(np.float32) / 255)
  rows = TensorDataset(images, torch.from_numpy(data["label"].astype(np.int64)))
  loader = DataLoader(rows, batch_size=25, sampler=DistributedSampler(rows))
  bare, first = network(units=32), 0
  if snapshot.exists():
    saved = torch.load(snapshot)
    bare.load_state_dict(saved["weights"])
    first = saved["epoch"]
  log.line(pid=os.getpid(), first=first)
  model = DistributedDataParallel(bare)
  optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
  loss_of = nn.CrossEntropyLoss()
  for epoch in range(first, options.epochs):
    began, total = time.perf_counter(), 0.0
    for features, labels in loader:
      optimizer.zero_grad()
      loss = loss_of(model(features), labels)
      loss.backward()
      optimizer.step()
      total += loss.item()
      log.step()
    seconds = time.perf_counter() - began
    saves = rank == 0 and epoch % options.save_every == 0
    if saves:
      torch.save({"weights": bare.state_dict(), "epoch": epoch}, snapshot)
    log.line(epoch=epoch, seconds=seconds, loss=total / len(loader), saves=saves)
  distributed.destroy_process_group()


if __name__ == "__main__":
  main()
