"""May an option change when a run goes on? The one place that says it, for every option.

    rule("run.seed")            asked: with --accept_changes, and what happens then
    rule("tiny/dynamic.initial")  no: a scope does not matter
    rule("MyTask.units")        None: asked, and what restores the checkpoint decides

docs/changing-a-run.md has it as a table; tests/unit/test_changing_a_run.py tries each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

May = Literal["yes", "asked", "no"]


class Rule(NamedTuple):
  """Whether an option may change when a run goes on.

  Attributes:
    may: "yes", without a question: what the run learns stays the same; "asked": with
      --accept_changes; "no": it would have no effect, or a wrong one.
    says: what happens from there on; for "no", why not.
  """

  may: May
  says: str


_AT_THE_START = "it counts only when the run begins"
_COMPUTES = "computes with it; the same numbers up to rounding"
_FIT = "counts from there on; from 0 or False and back it does not fit a checkpoint"

_OPTIONS: Mapping[May, Mapping[str, str]] = {
  "yes": {
    "run.train_steps": "the run ends there",
    "run.strategy": "computes there, on any number of replicas; a batch per replica changes "
    "`global batch size`, which is asked",
    "run.steps_per_loop": "loops end there; asked if an action changes what is learned: it "
    "fills a `ReplayBuffer`, or says so (`Action.changes_training`)",
    "run.eval_every_steps": "evaluates there; asked as `run.steps_per_loop` is",
    "run.eval_batch_size": "evaluates with it",
    "run.eval_steps": "evaluates so many batches",
    "run.eval_timeout_s": "waits so long",
    "run.checkpoint_every_steps": "saves there; asked as `run.steps_per_loop` is",
    "run.hang_timeout_s": "says it after so long",
    "run.end_if_hung": "ends then, or goes on waiting",
    "run.keep_checkpoints": "keeps so many from the next save on",
    "run.deterministic": _COMPUTES,
    "run.eager": _COMPUTES,
    "run.gpus": "computes there",
    "run.gpu_memory": "takes so much",
    "run.actions": "they begin there; asked are the options of one that changes what is learned",
    "run.ledger": "records from there on",
  },
  "asked": {
    "run.task": "another class does not fit a checkpoint",
    "run.optimizer": "another class does not fit a checkpoint",
    "run.global_batch_size": "counts from there on, and the order of examples goes on; not with "
    "`Buckets`",
    "run.per_replica_batch_size": "as `run.global_batch_size`",
    "run.seed": "the order of examples, augmentation and dropout are other ones from there on; the "
    "epoch that has begun reads some examples twice and leaves others out; initial weights stay",
    "run.shuffle": "another order from there on; the epoch that has begun reads some examples "
    "twice and leaves others out",
    "run.precision": "computes with it from there on",
    "run.tf32": "computes with it from there on",
    "Trainer.loss_scale": "counts from there on; a dynamic one begins at its first scale",
    "Trainer.reduction": "sums with it from there on",
    "Trainer.clip_norm": "counts from there on",
    "Trainer.clip_value": "counts from there on",
    "Trainer.accumulation_steps": _COMPUTES + ", except what looks at a micro-batch",
    "Trainer.ema_decay": "counts from there on; averages that are new begin at the weights",
    "ema_warmup.decay": "counts from there on",
    "weight_averaging.start_step": "counts from there on; what was averaged keeps its share",
    "weight_averaging.every_steps": "counts from there on; what was averaged keeps its share",
    "Trainer.fuse_updates": "does not fit a checkpoint if it has fused variables",
    "Trainer.shard_optimizer_state": _COMPUTES,
    "Trainer.recompute": _COMPUTES,
    "Trainer.jit_compile": _COMPUTES,
    "fixed.scale": "counts from there on",
    "dynamic.growth_steps": "counts from there on",
    "dynamic.factor": "counts from there on",
    "dynamic.floor": "counts from there on",
    "without_decay.of": "counts from there on",
    "without_decay.names": "counts from there on",
    "grouped.of": "counts from there on",
    "grouped.groups": "counts from there on",
    "global batch size": "as `run.global_batch_size`",
  },
  "no": {
    "run.warm_start": _AT_THE_START,
    "run.checkpoint": "it is not for training",
    "dynamic.initial": "it is the first scale; the checkpoint has the scale in force",
  },
}

_WHOLE: Mapping[str, Rule] = {
  **dict.fromkeys(
    (
      *("auto", "default", "one_device", "mirrored", "central_storage", "model_parallel"),
      *("multi_worker_mirrored", "parameter_server", "tpu"),
      *("tf_config", "slurm"),
    ),
    Rule("yes", "computes there"),
  ),
  **dict.fromkeys(
    (
      *("BestCheckpoint", "EarlyStopping", "Export", "StopOnNonFinite", "TimeBudget", "Profile"),
      *("Show", "Spikes", "NoiseScale", "ModelFlops", "LayerStatistics"),
      *("TensorBoard", "CSVFile", "Prometheus", "MLflow", "WandB"),
    ),
    Rule("yes", "counts from there on, over all evaluations in metrics.jsonl"),
  ),
  "Mixture": Rule(
    "asked",
    "reads that from there on, if the weights up to there stay; a part goes on where it is",
  ),
  "Reduction": Rule("asked", "sums with it from there on"),
  "WarmStart": Rule("no", _AT_THE_START),
  **dict.fromkeys(
    ("ArraySource", "ImageFolderSource", "StreamSource", "load_arrays"),
    Rule("asked", "reads that from there on; the position in the data stays"),
  ),
  **dict.fromkeys(
    (
      *("schedules.constant", "linear_warmup", "cosine_decay", "exponential_decay"),
      *("piecewise_constant", "by_epoch", "scale_by_replicas", "times_replicas"),
    ),
    Rule("asked", "the rate is that of the new schedule at the step of the run"),
  ),
}
"""Of names whose options have one rule."""

_SCHEDULES = "optimizers.schedules."
_OPTIMIZERS = ("keras.", "tf_keras.")
_COUNTS = (
  *("adam_beta_1", "adam_beta_2", "adam_lr_ratio", "adam_weight_decay", "adaptive_epsilon"),
  *("beta", "beta_1", "beta_2", "beta_2_decay", "clip_threshold", "clipnorm", "epsilon"),
  *("epsilon_1", "epsilon_2", "l1_regularization_strength", "l2_regularization_strength"),
  *("l2_shrinkage_regularization_strength", "learning_rate_power", "muon_a", "muon_b", "muon_c"),
  *("nesterov", "ns_steps", "rho", "rms_rate", "warmup_steps", "weight_decay"),
)
_OF_OPTIMIZERS: Mapping[str, Rule] = {
  "learning_rate": Rule(
    "asked",
    "counts from there on: a number for a schedule and back, too. A rate that an action has set "
    "stays if the config's rate stays",
  ),
  **dict.fromkeys(_COUNTS, Rule("asked", "counts from there on")),
  **dict.fromkeys(
    ("momentum", "amsgrad", "centered", "exclude_layers", "exclude_embeddings"), Rule("asked", _FIT)
  ),
  **dict.fromkeys(("jit_compile", "name"), Rule("no", "it has no effect here")),
  "relative_step": Rule("no", "it has no effect in Keras's rule, which takes the smaller rate"),
  "initial_accumulator_value": Rule("no", "it is the first value; the checkpoint has the sums"),
  **dict.fromkeys(
    (
      *("clipvalue", "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
      *("loss_scale_factor", "gradient_accumulation_steps"),
    ),
    Rule("no", "it has no effect here: `Trainer` clips, averages, scales and accumulates itself"),
  ),
}
"""Parameter of an optimizer of either Keras -> its rule."""


def rule(name: str) -> Rule | None:
  """Returns the rule of an option, of a config or of a call of `run`; None if it is a user's."""
  name = name.rpartition("/")[2]
  name = name if "." in name or " " in name else f"run.{name}"
  for may, options in _OPTIONS.items():
    if name in options:
      return Rule(may, options[name])
  owner, _, parameter = name.rpartition(".")
  if owner in _WHOLE:
    return _WHOLE[owner]
  if owner.startswith(_OPTIMIZERS) and _SCHEDULES in owner:
    return _WHOLE["schedules.constant"]
  return _OF_OPTIMIZERS.get(parameter) if owner.startswith(_OPTIMIZERS) else None


def free(of: str) -> list[str]:
  """Returns the parameters of a name that may change without a question."""
  names = [name for name in _OPTIONS["yes"] if name.startswith(f"{of}.")]
  return [name.removeprefix(f"{of}.") for name in names]
