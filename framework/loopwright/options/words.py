"""What Keras, Lightning, PyTorch and transformers call it -> what it is here."""

from collections.abc import Container


def _read(text: str) -> dict[str, str]:
  """Returns word -> what is here, of lines such as "word word: here"."""
  rows = [line.strip().split(": ", 1) for line in text.strip().splitlines()]
  return {word: here for words, here in rows for word in words.split()}


COMMANDS = _read("""
  fit run start: `loopwright train CONFIG` trains
  resume continue restart: `loopwright train` with the same config and --model_dir goes on
  test val validate: `loopwright evaluate CONFIG` evaluates
  init create startproject: `loopwright new NAME` makes a project
  save convert serve: `loopwright export CONFIG` writes the model
  list runs status: `loopwright ls` lists the runs
  infer inference: `loopwright predict RUN` writes predictions
  search hpo: `loopwright sweep CONFIG --vary=...` searches
  tensorboard: `tensorboard --logdir=runs` shows the curves
  help version: `loopwright --help` and `loopwright --version` tell
""")
"""Commands that there are not -> the one that does it."""
BINDINGS = _read("""
  epochs max_epochs num_epochs n_epochs num_train_epochs: run.train_epochs=10
  steps max_steps num_steps max_iters: run.train_steps=1000
  batch batch_size train_batch_size: run.global_batch_size=64
  per_device_train_batch_size batch_size_per_gpu: run.per_replica_batch_size=32
  lr learning_rate: keras.Adam.learning_rate=0.001
  wd weight_decay: keras.Adam.weight_decay=0.01
  seed random_seed seed_everything: run.seed=1
  precision fp16 bf16 amp mixed_precision: "run.precision='mixed_bfloat16'"
  gpus devices num_gpus n_gpu: run.gpus=[0]
  strategy accelerator distributed: run.strategy=@mirrored
  optimizer optim: run.optimizer=@keras.SGD
  gradient_clip_val max_grad_norm clip_norm: Trainer.clip_norm=1.0
  accumulate_grad_batches gradient_accumulation_steps: Trainer.accumulation_steps=4
  val_check_interval eval_steps eval_every: run.eval_every_steps=500
  save_steps save_every: run.checkpoint_every_steps=500
""")
"""Flags and names of options -> a binding of the option that a config has, as in a shell."""
FLAGS = _read("""
  resume resume_from_checkpoint ckpt_path: the same command with the same --model_dir goes on
  output_dir log_dir logdir save_dir default_root_dir: the run folder is --model_dir=...
  config cfg c: a gin file has no flag: `loopwright train my.gin`
  patience early_stopping: in the gin file write run.actions = [@EarlyStopping()]
  nodes nproc_per_node: --local_workers=2 makes a cluster on this machine
  dry_run fast_dev_run: `loopwright check CONFIG` checks the config
""")
"""Flags that are no option of a config either -> what does it."""
METHODS = _read("""
  training_step: loss(outputs, batch), or train_step(step, batch) for the whole step
  validation_step test_step: metrics(outputs, batch)
  configure_optimizers: run.optimizer
  train_dataloader val_dataloader: source(split)
""")
"""Methods of Lightning's modules -> what a task has."""


def option(word: str, known: Container[str] = ()) -> str:
  """Returns the option that a config has for a word, or "", of `known` ones by its last part."""
  meant = BINDINGS.get(word, "").partition("=")[0].strip('"')
  last = meant.rpartition(".")[2]
  return last if last in known else meant


def of_methods(kind: type) -> list[str]:
  """Returns what to say of methods of a task's class that the loop does not call."""
  told = "{}.{} is not called by the loop; what a task has is {}."
  found = METHODS.keys() & {*dir(kind)}
  return [told.format(kind.__name__, name, METHODS[name]) for name in sorted(found)]
