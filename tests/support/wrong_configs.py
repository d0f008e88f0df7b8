"""Mistakes that people make in gin files; see tests/unit/configurables/test_check.py.

Each is lines after `RIGHT`, whose five lines come first: so the first of them is line 6.
"""

import dataclasses

RIGHT = """
import loopwright.tasks.image_classification
run.task = @ImageClassification()
ImageClassification.data = @digits()
run.global_batch_size = 64
run.train_steps = 100
""".lstrip()
LONELY = "import loopwright\n\nclass Lonely(loopwright.Task): ...\n"
"""my_lonely_task.py, beside the gin file."""


@dataclasses.dataclass(frozen=True)
class Defect:
  """Lines, and the kind, the words of the remedy and the place that are expected."""

  lines: str
  kind: str
  says: str
  _: dataclasses.KW_ONLY
  place: str = "mine.gin:6"
  without: str = ""


DEFECTS = [
  Defect(
    "run.eval_every_step = 10",
    "names",
    "run has no parameter 'eval_every_step'. Did you mean 'eval_every_steps'?",
  ),
  Defect(
    "run.optimizer = @keras.Adamm",
    "names",
    "unknown configurable 'keras.Adamm'. Did you mean 'keras.Adam'?",
  ),
  Defect(
    "run.model_dir = 'runs/mine'",
    "names",
    "run.model_dir cannot be set in a config; use the flag --model_dir.",
  ),
  Defect(
    "run.task = @Lonely()",
    "names",
    "unknown configurable 'Lonely'. Add `import my_lonely_task`, which defines it.",
    place="mine.gin:4",
    without="run.task = @ImageClassification()\nImageClassification.data = @digits()\n",
  ),
  Defect(
    "import loopwright.tasks.image_clasification",
    "imports",
    "no module named 'loopwright.tasks.image_clasification'. Did you mean "
    "'loopwright.tasks.image_classification'?",
  ),
  Defect("mlp.units = (64, 32", "reading", "a bracket or a quote is never closed"),
  Defect(
    "run.steps_per_loop = '50'",
    "values",
    "run.steps_per_loop is '50'; it must be int. Write 50, without quotes.",
  ),
  Defect(
    "run.checkpoint_every_steps = 1e3",
    "values",
    "run.checkpoint_every_steps is 1000.0; it must be int. Write 1000.",
  ),
  Defect(
    "run.steps_per_loop = 0",
    "values",
    "run.steps_per_loop is 0; it must be a whole number of at least 1.",
  ),
  Defect("run.optimizer = @keras.Adam()", "values", "Write @keras.Adam, without parentheses"),
  Defect(
    "run.seed = %sede\nseed = 3", "values", "the macro %sede is not defined. Did you mean 'seed'?"
  ),
  Defect(
    "keras.SGD.momentum = 0.9",
    "used",
    "nothing uses keras.SGD.momentum. Add `run.optimizer = @keras.SGD`, or remove it.",
  ),
  Defect(
    "shuffle = False", "used", "nothing uses the macro 'shuffle'. Did you mean 'run.shuffle'?"
  ),
  Defect(
    "run.global_batch_size = 32",
    "one value each",
    "run.global_batch_size is 32, but 64 at FOLDER/mine.gin:4. Remove one of the two lines.",
  ),
  Defect(
    "",
    "complete",
    "neither run.train_steps nor run.train_epochs is set; add one of them.",
    place="",
    without="run.train_steps = 100\n",
  ),
]
