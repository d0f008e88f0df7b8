"""The table of what training costs, from logs that are written here."""

import json

import pytest

from loopwright.run_folder import folders
from loopwright.tools.runs import costs


def run(folder, config, loops, evaluation, examples="1200 examples, ab"):
  folder.mkdir()
  lines = [{"step": n, "split": "train", "wall_time": n, **loop} for n, loop in enumerate(loops, 1)]
  lines += [{"step": 1, "split": "eval", "loss": 9.0}, {"step": 9, "split": "eval", **evaluation}]
  (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  (folder / "operative_config.gin").write_text(config)
  (folder / "history.jsonl").write_text(
    f"{json.dumps({'step': 0, 'data': {'training': examples}})}\n"
  )
  return folders.Run(str(folder))


def loop(rate, **more):
  return {"examples_per_second": rate, **more}


def test_the_first_loop_does_not_count(tmp_path):
  on_cpu = [loop(1.0, cpu_utilization=0.01)]
  on_cpu += [loop(rate, cpu_utilization=used) for rate, used in [(300, 0.5), (400, 0.6), (900, 1)]]
  one = run(
    tmp_path / "a", "run.global_batch_size = 64\nc.d = 'x'\n", on_cpu, {"accuracy": 0.97125}
  )
  on_gpu = [loop(5.0, gpu_memory_mib=2000.0, gpu_utilization=0.0)]
  on_gpu += [loop(2400.0, gpu_memory_mib=1000.0 * n, gpu_utilization=0.9) for n in (1, 3)]
  two = run(
    tmp_path / "b", "run.global_batch_size = 512\n", on_gpu, {"loss": 0.25, "accuracy": "NaN"}
  )
  assert costs.rows([one, two], ["run.global_batch_size, c.d"]) == [
    ["run.global_batch_size", "c.d", *costs.HEADS, "accuracy", "loss"],
    ["64", "'x'", "CPU", "3", "400", "-", "70%", "0.9712", "-"],
    ["512", "-", "GPU", "0.5", "2,400", "3,000", "90%", "-", "0.25"],
  ]


@pytest.mark.parametrize(
  ("loops", "wanted"),
  [([], ["-", "-", "-", "-"]), ([loop(600.0, cpu_utilization="NaN")], ["2", "600", "-", "-"])],
)
def test_what_is_not_logged_is_a_dash(tmp_path, loops, wanted):
  _, [device, *found] = costs.rows([run(tmp_path / "a", "a.b = 1\n", loops, {})], [])
  assert (device, found) == ("CPU", wanted)
  other = run(tmp_path / "b", "a.b = 1\n", loops, {}, examples="a stream")
  assert costs.rows([other], [])[1][1] == "-"
