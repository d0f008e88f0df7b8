"""Runs a gin config on a Ray cluster: Ray Train places the workers and sets TF_CONFIG.

  python deploy/ray_train.py --workers=2 --max_restarts=3 \
    --gin_file=configs/digits_cnn.gin --model_dir=/shared/runs/digits

All other flags go to launch.py, which each Ray worker runs as a separate process, in the root of
the repository. All nodes need, under the same paths, the repository, its environment with
`ray[train]`, and model_dir. When a worker fails, Ray restarts all, and they continue from the
newest checkpoint.

With --workers=2:4 each start takes as many workers, of 2 to 4, as the nodes have room for. Once in
--look_s seconds Ray looks whether there is room for more: then it ends all, without a signal, and
they continue from the newest checkpoint.

Exit status: 0 done, 1 a failure, 2 a mistake in these flags. Linux only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status (host)."""
  options, arguments = parse(argv)

  from ray.train import TrainingFailedError
  from ray.train.tensorflow import TensorflowTrainer

  trainer = TensorflowTrainer(
    work,
    train_loop_config={"root": str(ROOT), "arguments": arguments, "workers": options.workers},
    **configs(options),
  )
  try:
    trainer.fit()
  except TrainingFailedError as error:
    print(f"failed: {error}", file=sys.stderr)
    return 1
  return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """Returns this script's options and the arguments of launch.py."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,  # would also expand flags of launch.py
  )
  sizes = "Number of workers, or LEAST:MOST."
  parser.add_argument("--workers", type=_workers, required=True, help=sizes)
  parser.add_argument("--look_s", type=float, default=60, help="Seconds between looks for room.")
  parser.add_argument("--cpus", type=_positive, default=1, help="CPUs per worker.")
  parser.add_argument("--gpus", type=int, default=0, help="GPUs per worker.")
  parser.add_argument("--max_restarts", type=int, default=0, help="How often to restart.")
  parser.add_argument("--model_dir", required=True, help="The run folder, shared by all nodes.")
  options, others = parser.parse_known_args(argv[1:])
  options.model_dir = os.path.join(ROOT, options.model_dir)
  strategy = "--gin_param=run.strategy = @multi_worker_mirrored"
  return options, [strategy, *others, f"--model_dir={options.model_dir}"]


def _positive(text: str) -> int:
  if int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text} is below 1; it must be at least 1")
  return int(text)


def _workers(text: str) -> tuple[int, int]:
  found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
  least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
  if least > most:
    raise argparse.ArgumentTypeError(f"{text} is no number from 1, and no LEAST:MOST such as 2:4")
  return least, most


def configs(options: argparse.Namespace) -> dict[str, Any]:
  """Returns Ray's configs: the workers, and what to do when one fails."""
  from ray.train import FailureConfig, RunConfig, ScalingConfig

  least, most = options.workers
  resources = {"CPU": options.cpus, "GPU": options.gpus}
  return {
    "scaling_config": ScalingConfig(
      num_workers=most if least == most else (least, most),
      elastic_resize_monitor_interval_s=options.look_s,
      use_gpu=options.gpus > 0,
      resources_per_worker={kind: count for kind, count in resources.items() if count},
    ),
    "run_config": RunConfig(
      storage_path=os.path.join(options.model_dir, "ray"),
      failure_config=FailureConfig(max_failures=options.max_restarts),
    ),
  }


def work(config: dict[str, Any]) -> None:
  """Runs launch.py on one Ray worker.

  As a process, because Ray calls this in a thread, where Python cannot handle signals. setpriv
  kills it when the Ray worker exits: an orphan could still write to model_dir during the next
  attempt.

  Args:
    config: "root", the repository, "arguments", those of launch.py, and "workers", least and most.

  Raises:
    RuntimeError: launch.py failed; Ray restarts all workers, or gives up.
  """
  launch = [sys.executable, os.path.join(config["root"], "launch.py"), *config["arguments"]]
  # Ray sets tf.keras to Keras 2; here it must be Keras 3, as everywhere else.
  environment = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
  least, most = config["workers"]
  if least < most:
    environment["LOOPWRIGHT_WORKERS"] = f"{least}:{most}"  # refuses what depends on their number
  status = subprocess.call(
    ["setpriv", "--pdeathsig", "KILL", *launch], cwd=config["root"], env=environment
  )
  if status:
    raise RuntimeError(f"launch.py ended with status {status}")


if __name__ == "__main__":
  sys.exit(main(sys.argv))
