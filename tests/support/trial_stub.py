"""What a sweep starts in tests instead of `loopwright train`: no TensorFlow, a step in 10 ms.

python trial_stub.py train --gin_param="x = 0.5" ... --model_dir=FOLDER

An evaluation a step, to metrics.jsonl; goes on after the last one; SIGTERM ends it with status 75.
The log "starts" in the folder has a line for each start. The metrics: `score` is x * step,
`loss` is x / step. Without x it is the seed. With `fails = 1` it fails, with
`at = 'nan'` the score is NaN.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 10


def main(arguments):
  given = dict(
    each.removeprefix("--").split("=", 1) for each in arguments if "gin_param" not in each
  )
  params = [each.split("=", 1)[1] for each in arguments if each.startswith("--gin_param=")]
  values = dict(map(str.strip, each.split("=", 1)) for each in params)
  folder = Path(given["model_dir"])
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "operative_config.gin").write_text("".join(f"{k} = {v}\n" for k, v in values.items()))
  log = folder / "metrics.jsonl"
  done = len(log.read_text().splitlines()) if log.exists() else 0
  about = {"from": done, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "values": values}
  with open(folder / "starts", "a") as file:
    file.write(json.dumps({**about, "cores": sorted(os.sched_getaffinity(0))}) + "\n")
  stopped = []
  signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
  for step in range(done + 1, STEPS + 1):
    if stopped:
      sys.exit(75)
    if values.get("fails") == "1":
      sys.exit("error: it fails")
    time.sleep(float(values.get("pace", "0.01")))
    x = float(values["x"] if "x" in values else values["run.seed"])
    score = "NaN" if values.get("at") == "'nan'" else x * step
    with open(log, "a") as file:
      record = {"step": step, "split": "eval", "wall_time": 1.0, "score": score, "loss": x / step}
      file.write(f"{json.dumps(record)}\n")


if __name__ == "__main__":
  main(sys.argv[2:])
