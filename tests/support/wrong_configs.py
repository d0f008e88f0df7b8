"""Mistakes that people make in gin files; see tests/unit/configurables/test_check.py.

Each is lines after `RIGHT`, whose five lines come first: so the first of them is line 6.
"""

import dataclasses
from collections.abc import Sequence

RIGHT = """
import loopwright.tasks.image_classification
run.task = @ImageClassification()
ImageClassification.data = @digits()
run.global_batch_size = 64
run.train_steps = 100
""".lstrip()
LONELY = "import loopwright\n\nclass Lonely(loopwright.Task): ...\n"
"""my_lonely_task.py, beside the gin file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
  """Lines, and the kind, the place and the words of the remedy that are expected."""

  lines: Sequence[str]
  kind: str
  place: str = "mine.gin:6"
  says: str
  without: str = ""


DEFECTS = {
  "a misspelt parameter": Defect(
    lines=["run.eval_every_step = 10"],
    kind="names",
    says="run has no parameter 'eval_every_step'. Did you mean 'eval_every_steps'?",
  ),
  "a misspelt name": Defect(
    lines=["run.optimizer = @keras.Adamm"],
    kind="names",
    says="unknown configurable 'keras.Adamm'. Did you mean 'keras.Adam'?",
  ),
  "what a flag gives": Defect(
    lines=["run.model_dir = 'runs/mine'"],
    kind="names",
    says="run.model_dir cannot be set in a config; use the flag --model_dir.",
  ),
  "a task whose import was left out": Defect(
    lines=["run.task = @Lonely()"],
    without="run.task = @ImageClassification()\nImageClassification.data = @digits()\n",
    kind="names",
    place="mine.gin:4",
    says="unknown configurable 'Lonely'. Add `import my_lonely_task`, which defines it.",
  ),
  "a misspelt module": Defect(
    lines=["import loopwright.tasks.image_clasification"],
    kind="imports",
    says=(
      "no module named 'loopwright.tasks.image_clasification'. Did you mean "
      "'loopwright.tasks.image_classification'?"
    ),
  ),
  "a bracket that is never closed": Defect(
    lines=["mlp.units = (64, 32"],
    kind="reading",
    says="a bracket or a quote is never closed",
  ),
  "a number in quotes": Defect(
    lines=["run.steps_per_loop = '50'"],
    kind="values",
    says="run.steps_per_loop is '50'; it must be int. Write 50, without quotes.",
  ),
  "a float for a whole number": Defect(
    lines=["run.checkpoint_every_steps = 1e3"],
    kind="values",
    says="run.checkpoint_every_steps is 1000.0; it must be int. Write 1000.",
  ),
  "loops of no steps": Defect(
    lines=["run.steps_per_loop = 0"],
    kind="values",
    says="run.steps_per_loop is 0; it must be a whole number of at least 1.",
  ),
  "an optimizer that is made too early": Defect(
    lines=["run.optimizer = @keras.Adam()"],
    kind="values",
    says="Write @keras.Adam, without parentheses",
  ),
  "a macro that is not there": Defect(
    lines=["run.seed = %sede", "seed = 3"],
    kind="values",
    says="the macro %sede is not defined. Did you mean 'seed'?",
  ),
  "options of an optimizer that is not chosen": Defect(
    lines=["keras.SGD.momentum = 0.9"],
    kind="used",
    says="nothing uses keras.SGD.momentum. Add `run.optimizer = @keras.SGD`, or remove it.",
  ),
  "a parameter without its owner": Defect(
    lines=["shuffle = False"],
    kind="used",
    says="nothing uses the macro 'shuffle'. Did you mean 'run.shuffle'?",
  ),
  "a line that shadows one above": Defect(
    lines=["run.global_batch_size = 32"],
    kind="one value each",
    says="run.global_batch_size is 32, but 64 at FOLDER/mine.gin:4. Remove one of the two lines.",
  ),
  "no number of steps": Defect(
    lines=[],
    without="run.train_steps = 100\n",
    kind="complete",
    place="",
    says="neither run.train_steps nor run.train_epochs is set; add one of them.",
  ),
}
