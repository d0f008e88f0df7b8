"""What Keras, Lightning, PyTorch and transformers call it -> what it is here. Imports nothing."""

from collections.abc import Mapping

_AGAIN = "`loopwright train` with the same config and --model_dir goes on where the run ended"
_FOLDER = "the run folder is --model_dir=..."
_ACTION = "write EarlyStopping.patience=... and, in the gin file, run.actions = [@EarlyStopping()]"

COMMANDS: Mapping[str, str] = {
  **dict.fromkeys(("fit", "run", "start"), "`loopwright train CONFIG` trains"),
  **dict.fromkeys(("resume", "continue", "restart"), _AGAIN),
  **dict.fromkeys(("test", "val", "validate"), "`loopwright evaluate CONFIG` evaluates"),
  **dict.fromkeys(("init", "create", "startproject"), "`loopwright new NAME` makes a project"),
  **dict.fromkeys(("save", "convert", "serve"), "`loopwright export CONFIG` writes the model"),
  **dict.fromkeys(("list", "runs", "status"), "`loopwright ls` lists the runs"),
  **dict.fromkeys(("infer", "inference"), "`loopwright predict RUN` writes predictions"),
  **dict.fromkeys(("search", "hpo"), "`loopwright sweep CONFIG --vary=...` searches"),
  **dict.fromkeys(("help", "version"), "`loopwright --help` and `loopwright --version` tell"),
  "tensorboard": "`tensorboard --logdir=runs` shows the curves",
}
"""Commands that there are not -> the one that does it."""
BINDINGS: Mapping[str, str] = {
  **dict.fromkeys(
    ("epochs", "max_epochs", "num_epochs", "n_epochs", "num_train_epochs"), "run.train_epochs=10"
  ),
  **dict.fromkeys(("steps", "max_steps", "num_steps", "max_iters"), "run.train_steps=1000"),
  **dict.fromkeys(("batch", "batch_size", "train_batch_size"), "run.global_batch_size=64"),
  **dict.fromkeys(
    ("per_device_train_batch_size", "batch_size_per_gpu"), "run.per_replica_batch_size=32"
  ),
  **dict.fromkeys(("lr", "learning_rate"), "keras.Adam.learning_rate=0.001"),
  **dict.fromkeys(("wd", "weight_decay"), "keras.Adam.weight_decay=0.01"),
  **dict.fromkeys(("seed", "random_seed", "seed_everything"), "run.seed=1"),
  **dict.fromkeys(
    ("precision", "fp16", "bf16", "amp", "mixed_precision"), "\"run.precision='mixed_bfloat16'\""
  ),
  **dict.fromkeys(("gpus", "devices", "num_gpus", "n_gpu"), "run.gpus=[0]"),
  **dict.fromkeys(("strategy", "accelerator", "distributed"), "run.strategy=@mirrored"),
  **dict.fromkeys(("optimizer", "optim"), "run.optimizer=@keras.SGD"),
  **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clip_norm"), "Trainer.clip_norm=1.0"),
  **dict.fromkeys(
    ("accumulate_grad_batches", "gradient_accumulation_steps"), "Trainer.accumulation_steps=4"
  ),
  **dict.fromkeys(("val_check_interval", "eval_steps", "eval_every"), "run.eval_every_steps=500"),
  **dict.fromkeys(("save_steps", "save_every"), "run.checkpoint_every_steps=500"),
}
"""Flags and names of options -> a binding of the option that a config has, as in a shell."""
FLAGS: Mapping[str, str] = {
  **dict.fromkeys(("resume", "resume_from_checkpoint", "ckpt_path"), _AGAIN),
  **dict.fromkeys(("output_dir", "log_dir", "logdir", "save_dir", "default_root_dir"), _FOLDER),
  **dict.fromkeys(("config", "cfg", "c"), "a gin file has no flag: `loopwright train my.gin`"),
  **dict.fromkeys(("patience", "early_stopping"), _ACTION),
  **dict.fromkeys(("nodes", "nproc_per_node"), "--local_workers=2 makes a cluster on this machine"),
  **dict.fromkeys(("dry_run", "fast_dev_run"), "`loopwright check CONFIG` checks the config"),
}
"""Flags that are no option of a config either -> what does it."""


def option(word: str) -> str:
  """Returns the option that a config has for a word, or ""."""
  return BINDINGS.get(word, "").partition("=")[0]
