"""Executes the notebooks of docs/notebooks, each in a kernel and a scratch folder of its own.

`python -m tests.support.notebooks [name ...]` stores what they print.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TIMEOUT_S = 120
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "NO_COLOR": "1"}


def executed(path):
  """Returns the notebook with its outputs; raises nbclient's CellExecutionError if a cell fails."""
  notebook = nbformat.read(path, as_version=4)
  with tempfile.TemporaryDirectory() as scratch:
    for file in FOLDER.iterdir():
      if file.suffix in (".npz", ".py"):
        shutil.copy(file, scratch)
    client = nbclient.NotebookClient(
      notebook, timeout=TIMEOUT_S, kernel_name="python3", coalesce_streams=True,
      record_timing=False, resources={"metadata": {"path": scratch}},
    )  # fmt: skip
    client.execute(env={**os.environ, **_ENVIRONMENT})
  return notebook


def text_of(output):
  """Returns what an output shows, as text and HTML."""
  data = {kind: each for kind, each in output.get("data", {}).items() if kind != "image/png"}
  return "".join([output.get("text", ""), *map(str, data.values())])


def store(path):
  """Executes a notebook and writes it with its outputs."""
  notebook = executed(path)
  notebook.metadata = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
  }
  for number, cell in enumerate(notebook.cells):
    cell.id = f"cell-{number}"
    cell.metadata = {}
    if "outputs" in cell:  # without TensorFlow's remarks about this machine
      cell.outputs = [each for each in cell.outputs if "absl::Init" not in each.get("text", "")]
    for output in cell.get("outputs", []):
      output.pop("transient", None)
  nbformat.write(notebook, path)


if __name__ == "__main__":
  names = sys.argv[1:] or [path.stem for path in NOTEBOOKS]
  for name in names:
    store(FOLDER / f"{re.sub('.ipynb$', '', name)}.ipynb")
