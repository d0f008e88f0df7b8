"""The notebooks run from top to bottom, and what they show is what they were stored with.

nbclient, not nbmake: nbmake collects the notebooks themselves as tests. These have no marks, so
they would be in the fast tier; and it does not compare what is stored.
"""

import re
from pathlib import Path

import nbformat
import notebooks
import pytest

MIGRATIONS = {"from_keras_fit", "from_a_raw_loop", "from_orbit", "from_lightning"}
OTHERS = {"first_steps", "a_trained_run", "fine_tuning"}
each = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


def printed(notebook):
  """Returns what each code cell prints and returns, without numbers, which may differ."""
  found = []
  for cell in notebook.cells:
    outputs = [
      notebooks.text_of(output)
      for output in cell.get("outputs", [])
      if output.output_type == "execute_result" or output.get("name") == "stdout"
    ]
    found.append(re.sub(r"\d[\d.e+-]*|\s+", "", "".join(outputs)))
  return found


@each
def test_links_lead_to_files(path):
  text = "\n".join(
    cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"
  )
  for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
    assert Path(path.parent, target).exists(), target


def test_all_are_here():
  assert {path.stem for path in notebooks.NOTEBOOKS} == MIGRATIONS | OTHERS


@each
def test_it_is_stored_with_its_outputs(path):
  stored = nbformat.read(path, as_version=4)
  assert stored.cells[0].cell_type == "markdown"
  assert stored.cells[0].source.startswith("# ")
  code = [cell for cell in stored.cells if cell.cell_type == "code"]
  assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
  outputs = [output for cell in code for output in cell.outputs]
  assert not [output for output in outputs if output.output_type == "error"]
  shown = "".join(map(notebooks.text_of, outputs))
  assert not re.search(r"(?<![\w.<])/(?:\w+/)+|\x1b\[", shown)  # paths of a machine, colours
  if path.stem in MIGRATIONS:
    assert any("assert" in cell.source for cell in code)
    assert "largest difference" in notebooks.text_of(code[-1].outputs[-1])
  else:
    assert "<progress" in shown  # the live line of the run


@each
@pytest.mark.whole
def test_it_runs_and_shows_what_it_was_stored_with(path):
  assert printed(notebooks.executed(path)) == printed(nbformat.read(path, as_version=4))
