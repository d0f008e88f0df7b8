"""Trains the network of from_lightning.ipynb with PyTorch Lightning and stores what it gave.

    uv run --no-project --with numpy --with torch --with lightning \
      docs/notebooks/lightning_half.py

writes lightning_half.npz beside this file: data, initial and final weights, losses, versions.
"""

from pathlib import Path

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 32, 60


class Sine(lightning.LightningModule):
  def __init__(self):
    super().__init__()
    self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    self.losses = []

  def training_step(self, batch, index):
    x, y = batch
    loss = torch.nn.functional.mse_loss(self.net(x)[:, 0], y)
    self.losses.append(loss.item())
    return loss

  def configure_optimizers(self):
    return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def weights(module):
  """Returns kernel and bias of each layer, as Keras keeps them: [in, out]."""
  return [p.detach().numpy().T.copy() for p in module.net.parameters()]


rng = np.random.default_rng(0)
x = rng.normal(size=[BATCH * STEPS, 8]).astype("float32")
y = np.sin(x[:, 0]).astype("float32")
lightning.seed_everything(1)
module = Sine()
before = weights(module)
data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
trainer = lightning.Trainer(
  max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
  enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=False))
np.savez_compressed(
  Path(__file__).with_suffix(".npz"),
  x=x, y=y, losses=np.array(module.losses),
  versions=np.array([f"torch {torch.__version__}", f"lightning {lightning.__version__}"]),
  **{f"before_{number}": value for number, value in enumerate(before)},
  **{f"after_{number}": value for number, value in enumerate(weights(module))},
)  # fmt: skip
