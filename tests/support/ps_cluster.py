"""Runs cases under parameter servers and writes what came out: one JSON object, name -> result.

    python ps_cluster.py OUTPUT_FILE [CASE...]

One process imports TensorFlow, forks the servers before it touches a device, and is the chief.
"""

import concurrent.futures
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback

from runs import records

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import ctypes
import functools

import keras
import numpy as np
import tensorflow as tf
import tf_keras
import toys
from toys import KERAS

from loopwright.distribution import placement
from loopwright.distribution.cluster import ClusterError
from loopwright.evaluator import Evaluator
from loopwright.host.failures import mistake
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.inputs.streams import StreamSource
from loopwright.metrics import Loss, PerExample, Sum, weighted_sum
from loopwright.models import models
from loopwright.observers import Observer
from loopwright.optimizers import loss_scale
from loopwright.runs import runner as runs
from loopwright.strategies import factories
from loopwright.strategies.parameter_server import servers
from loopwright.strategies.parameter_server.evaluator import ParameterServerEvaluator
from loopwright.strategies.parameter_server.trainer import ParameterServerTrainer
from loopwright.tools import local_cluster
from loopwright.trainer import Trainer

WORKERS, SERVERS = 3, 2
BATCH, EXAMPLES, FEATURES = 8, 203, 3


def data():
  rng = np.random.default_rng(0)
  x = rng.normal(size=[EXAMPLES, FEATURES]).astype(np.float32)
  y = (x @ [1.5, -0.5, 0.25] + 0.1 * rng.normal(size=EXAMPLES)).astype(np.float32)
  return {"x": x, "y": y, "weight": rng.uniform(0.5, 2.0, EXAMPLES).astype(np.float32)}


class Linear(toys.Regression):
  """x @ kernel, in a model of each kind."""

  def __init__(self, *, kind="keras", repeats=1):
    self.kind, self.repeats = kind, repeats

  def build_model(self):
    if self.kind == "module":
      module = tf.Module()
      module.kernel = tf.Variable(tf.zeros([FEATURES, 1]))
      return module
    return toys.linear(np.zeros(FEATURES), KERAS[self.kind])

  def source(self, split):
    return ArraySource(features={n: np.concatenate([v] * self.repeats) for n, v in data().items()})

  def forward(self, batch, training):
    if self.kind == "module":
      return (batch["x"] @ self.model.kernel)[:, 0]
    return super().forward(batch, training)

  def metrics(self, outputs, batch):
    real = tf.cast(batch["example_id"] >= 0, tf.float32)
    first = tf.cast(batch["example_id"] == 0, tf.float32) * real
    return {
      "examples": (tf.reduce_sum(real), tf.reduce_sum(first)),
      "mae": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"]),
    }


class Detailed(Linear):
  """Metrics that are no means, and more of them than a loop has room for at first."""

  def metrics(self, outputs, batch):
    weight = batch["weight"]
    hits = tf.one_hot(batch["example_id"], EXAMPLES, dtype=tf.int32)  # none for padding
    return {
      **{f"{i}": weighted_sum(i * tf.ones_like(outputs), weight) for i in range(60)},
      "seen": Sum(tf.reduce_sum(hits, axis=0)),
      "ids": PerExample(batch["example_id"], weight),
      "errors": PerExample(outputs - batch["y"], weight),
    }

  def derived(self, values):
    return {"seen": values["seen"], **{n: values[n] for n in ("ids", "errors") if n in values}}


class Wide(Linear):
  """A kernel of 64 x 4, large enough to be partitioned."""

  def build_model(self):
    if self.kind == "module":
      module = tf.Module()
      module.kernel = tf.Variable(tf.ones([64, 4]), name="kernel")  # tf_keras numbers parts by it
      return module
    library = KERAS[self.kind]
    dense = library.layers.Dense(4, use_bias=False, kernel_initializer="ones")
    return library.Sequential([library.Input([64]), dense])

  def source(self, split):
    return ArraySource(features={"x": np.eye(64, dtype=np.float32), "y": np.zeros(64, np.float32)})

  def forward(self, batch, training):
    outputs = batch["x"] @ self.model.kernel if self.kind == "module" else self.model(batch["x"])
    return tf.reduce_sum(outputs, axis=1)


class Keeping(Linear):
  """Two updates at two cadences and kept state; the gradients do not depend on the examples."""

  def build_model(self):
    kept = {"slow": tf.Variable(1.0, trainable=False), "count": tf.Variable(0, trainable=False)}
    return {"fast": tf.Variable(1.0), "rare": tf.Variable(1.0), **kept}

  def variables_of(self, optimizer):
    return [self.model[optimizer]]

  def pull(self, name, batch):
    slope = self.model["slow"] * tf.cast(batch["step"] + 1, tf.float32)
    return Loss.from_examples(slope * self.model[name], batch["weight"])

  def train_step(self, step, batch):
    step.update(lambda part: self.pull("fast", part), batch, "fast")
    step.update(lambda part: self.pull("rare", part), batch, "rare", when=step.number % 3 == 1)
    step.assign(self.model["slow"], 0.75 * self.model["slow"] + 0.25 * self.model["fast"])
    rows = tf.size(step.all_gather(batch["weight"]))
    step.assign(self.model["count"], self.model["count"] + rows, when=step.number % 2 == 0)


class Perturbing(Linear):
  """Moves the weights for a while, which other workers would see."""

  def train_step(self, step, batch):
    with step.perturbed(step.variables(), [tf.ones_like(v) for v in step.variables()]):
      super().train_step(step, batch)


def make(strategy, task, *, optimizer=None, **options):
  def train_data(position, shard=None):
    return datasets.train_dataset(
      task.source("train"), global_batch_size=BATCH, position=position, shard=shard
    )

  library = KERAS.get(task.kind, keras)
  return ParameterServerTrainer(
    task=task,
    strategy=strategy,
    dataset_fn=train_data,
    global_batch_size=BATCH,
    optimizer=optimizer or (lambda: library.optimizers.Adam(0.02)),
    **options,
  )


def evaluator_of(strategy, task):
  make_data = functools.partial(datasets.eval_dataset, task.source("eval"), global_batch_size=BATCH)
  return ParameterServerEvaluator(task=task, strategy=strategy, dataset=make_data)


def counts(trainer):
  return {
    "step": int(trainer.global_step.numpy()),
    "position": int(trainer.position.numpy()),
    "iterations": int(trainer.parts.optimizers["default"].optimizer.iterations.numpy()),
  }


def steps(trainer, *sizes):
  return [trainer.train(tf.constant(size)) for size in sizes]


def learns(place, kind):
  task = Linear(kind=kind)
  trainer = make(place.strategy, task)
  logs = steps(trainer, 100, 1, 7, 292)
  kernel = models.raw(models.trainable_variables(task.model)[0]).numpy()
  return {
    **counts(trainer),
    "traces": trainer.traces,
    "kernel": kernel[:, 0].tolist(),
    "logs": logs,
    "eval": evaluator_of(place.strategy, task).evaluate(),
    "detailed": detailed(place.strategy, task.model) if kind == "keras" else None,
    "devices": sorted(models.raw(v).device for v in trainer.parts.optimizers["default"].variables),
  }


def detailed(strategy, model):
  task = Detailed()
  task.model = model
  evaluation = evaluator_of(strategy, task).evaluate()
  [training] = steps(make(strategy, Detailed()), 4)
  return {
    **{name: evaluation[name].tolist() for name in ("seen", "ids", "errors")},
    "59": [evaluation["59"], training["59"]],
    "trained on": training["seen"].sum(),
  }


def partitioned(place, kind):
  task = Wide(kind=kind)
  trainer = make(place.strategy, task, optimizer=lambda: tf_keras.optimizers.SGD(0.5))
  logs = steps(trainer, 8, 8)
  parts = models.trainable_variables(task.model)
  return {
    **counts(trainer),
    "shapes": [v.shape.as_list() for v in parts],
    "devices": [v.device for v in parts],
    "losses": [log["loss"] for log in logs],
  }


def refused(place):
  def message(call):
    try:
      call()
    except Exception as error:  # in AutoGraph's hands a ConfigError becomes another
      return mistake(error)
    return "nothing was raised"

  strategy = place.strategy
  return {
    "keras": message(lambda: make(strategy, Wide(kind="keras"))),
    "eager": message(lambda: make(strategy, Linear(), eager=True)),
    "jit_compile": message(lambda: make(strategy, Linear(), jit_compile=True)),
    "loss_scale": message(lambda: make(strategy, Linear(), loss_scale=loss_scale.dynamic)),
    "dataset": message(
      lambda: ParameterServerEvaluator(
        task=Linear(), strategy=strategy, dataset=tf.data.Dataset.range(3)
      )
    ),
    "plain trainer": message(lambda: plain_trainer(strategy)),
    "plain evaluator": message(lambda: plain_evaluator(strategy)),
    "observer": message(lambda: make(strategy, Linear()).observe(Observer())),
    "python": message(lambda: steps(mapped_by_python(strategy), 1)),
    "stream": message(lambda: steps(streaming(strategy), 1)),
    "perturbed": message(lambda: steps(make(strategy, Perturbing()), 1)),
  }


def plain_trainer(strategy):
  return Trainer(
    task=Linear(),
    strategy=strategy,
    dataset_fn=lambda position, shard=None: None,
    global_batch_size=BATCH,
    optimizer=keras.optimizers.SGD,
  )


def plain_evaluator(strategy):
  return Evaluator(task=Linear(), strategy=strategy, dataset=lambda shard=None: None)


def mapped_by_python(strategy):
  def by_python(batch, training):
    del training
    doubled = tf.numpy_function(lambda y: 2 * y, [batch["y"]], tf.float32)
    return {**batch, "y": tf.ensure_shape(doubled, batch["y"].shape)}

  task = Linear()
  trainer = make(strategy, task)
  trainer.dataset_fn = lambda position, shard: datasets.train_dataset(
    task.source("train"), global_batch_size=BATCH, preprocess=by_python, shard=shard
  )
  return trainer


def streaming(strategy):
  task = Linear()
  trainer = make(strategy, task)
  examples = {"x": np.zeros([8, 2], np.float32), "y": np.zeros([8], np.float32)}
  source = StreamSource(dataset=tf.data.Dataset.from_tensor_slices(examples))
  trainer.dataset_fn = lambda position, shard: datasets.train_dataset(
    source, global_batch_size=BATCH, shard=shard
  )
  return trainer


def kept(place):
  """Loops of one step, so that no worker runs beside another."""
  task = Keeping()
  optimizer = dict.fromkeys(["fast", "rare"], lambda: keras.optimizers.SGD(0.125))
  logs = steps(make(place.strategy, task, optimizer=optimizer), *[1] * 7)
  values = {name: float(variable.numpy()) for name, variable in task.model.items()}
  return {**values, "rare_losses": [log["rare_loss"] for log in logs]}


def exact(place):
  """Ten runs of odd lengths, each cut into odd loops."""
  results = []
  for run in range(10):
    trainer = make(place.strategy, Linear(kind=("keras", "tf_keras")[run % 2]))
    logs = steps(trainer, 11 + run, 1, 20)
    results.append({**counts(trainer), "staleness": logs[-1]["staleness"]})
  return results


def stopped(place):
  """Worker 2 lives and does nothing: first for a while, then for too long."""
  trainer = make(place.strategy, Linear())
  steps(trainer, 10)
  os.kill(place.pids[2], signal.SIGSTOP)
  pool = concurrent.futures.ThreadPoolExecutor(1)
  loop = pool.submit(steps, trainer, 300)
  deadline = time.monotonic() + 60
  while int(trainer.global_step.numpy()) < 309 and time.monotonic() < deadline:
    time.sleep(0.01)
  time.sleep(0.2)
  without = int(trainer.global_step.numpy())
  was_waiting = not loop.done()
  os.kill(place.pids[2], signal.SIGCONT)
  loop.result(60)
  done = counts(trainer)
  os.kill(place.pids[2], signal.SIGSTOP)
  impatient = servers.Pulse(servers.parameter_servers_of(place.strategy).workers, timeout_s=1.0)
  trainer._dispatcher._pulse = impatient
  began = time.monotonic()
  try:
    steps(trainer, 300)
    line = "nothing was raised"
  except ClusterError as error:
    line = str(error)
  seconds = time.monotonic() - began
  os.kill(place.pids[2], signal.SIGCONT)
  impatient.close()
  trainer._dispatcher._coordinator.join()
  return {"without": without, "was_waiting": was_waiting, **done, "line": line, "seconds": seconds}


def killed_in_training(place):
  task = Linear()
  trainer = make(place.strategy, task)
  steps(trainer, 10)
  with place.killing(2, when=lambda: int(trainer.global_step.numpy()) > 100):
    logs = steps(trainer, 1000)
  return {**counts(trainer), "logs": logs, "alive": place.alive()}


def comes_back(place):
  """Workers 1 and 2 were killed; others in their places must be able to finish alone.

  TensorFlow takes none back before all are there.
  """
  trainer = make(place.strategy, Linear())
  place.release_standbys()
  deadline = time.monotonic() + 60
  while steps(trainer, 50)[0]["staleness"] == 0 and time.monotonic() < deadline:
    pass  # one worker alone is never stale
  before = int(trainer.global_step.numpy())
  with place.killing(0, when=lambda: int(trainer.global_step.numpy()) > before + 100):
    steps(trainer, 500)
  return {**counts(trainer), "before": before, "alive": place.alive()}


def alone(place):
  """One worker is left."""
  trainer = make(place.strategy, Linear())
  with place.killing(2, when=lambda: True):
    pass
  steps(trainer, 10)
  return steps(trainer, 500)[0]


def identities(place):
  trainer = make(place.strategy, Linear())

  @tf.function(autograph=False)
  def identity():
    trainer._worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    return trainer._worker, place.strategy.run(trainer.replica_id)

  return [[int(v) for v in pair] for pair in trainer._dispatcher.run(identity, [()] * 60)]


def resumes(place):
  """Two runs of one model_dir, the second from the first one's checkpoint."""
  results = []
  with tempfile.TemporaryDirectory() as folder:
    for train_steps in (20, 45):
      results.append(
        runs.run(
          task=Linear(),
          train_steps=train_steps,
          global_batch_size=BATCH,
          model_dir=folder,
          strategy=lambda: place.strategy,
          optimizer=lambda: keras.optimizers.Adam(0.02),
          steps_per_loop=10,
        )
      )
    lines = records(folder)
    checkpoints = sorted(n for n in os.listdir(f"{folder}/checkpoints") if n.endswith("index"))
  return {"results": results, "lines": lines, "checkpoints": checkpoints}


def killed_in_evaluation(place):
  task = Linear(repeats=100)
  make(place.strategy, task)
  evaluator = evaluator_of(place.strategy, task)
  started = time.monotonic()
  whole = evaluator.evaluate()
  seconds = time.monotonic() - started
  started = time.monotonic()
  with place.killing(1, when=lambda: time.monotonic() - started > seconds / 3):
    results = evaluator.evaluate()
    over = time.monotonic() - started
  return {"eval": results, "before": whole, "seconds": [seconds, over], "alive": place.alive()}


def killed_server(place):
  def killing_one():
    trainer = make(place.strategy, Linear())
    steps(trainer, 10)
    with place.killing("ps-1", when=lambda: True):
      steps(trainer, 10**6)

  try:
    with placement.of(place.strategy).cluster.blaming(lambda: 0):
      killing_one()
  except ClusterError as error:
    return str(error)
  return "nothing was raised"


class Place:
  """The forked processes and the strategy."""

  def __init__(self):
    spec = local_cluster.make_cluster(workers=WORKERS, ps=SERVERS)
    self.pids = {}
    for job, count in (("ps", SERVERS), ("worker", WORKERS)):
      for task in range(count):
        self.pids[task if job == "worker" else f"ps-{task}"] = fork(spec, job, task)
    read, self._gate = os.pipe()
    self._standbys = {worker: fork(spec, "worker", worker, gate=read) for worker in (1, 2)}
    config(spec, "chief", 0)
    self.strategy = factories.parameter_server(start_timeout_s=60, min_shard_bytes=256)

  def alive(self):
    return sorted(
      w
      for w in range(WORKERS)
      if not os.waitid(os.P_PID, self.pids[w], os.WEXITED | os.WNOHANG | os.WNOWAIT)
    )

  def release_standbys(self):
    """Starts another worker 1 and another worker 2."""
    self.pids |= self._standbys
    os.write(self._gate, b"!!")

  def killing(self, who, when):
    return Killing(self.pids[who], when)

  def end(self):
    for pid in {*self.pids.values(), *self._standbys.values()}:
      os.kill(pid, signal.SIGKILL)


class Killing:
  """Kills a process as soon as a condition holds."""

  def __init__(self, pid, when):
    self.thread = threading.Thread(target=self.watch, args=(pid, when), daemon=True)

  def watch(self, pid, when):
    while not when():
      time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)

  def __enter__(self):
    self.thread.start()

  def __exit__(self, *unused):
    self.thread.join(10)


def config(spec, job, task):
  os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": job, "index": task}})


def fork(spec, job, task, gate=None):
  parent = os.getpid()
  pid = os.fork()
  if pid:
    return pid
  ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != parent:
    os._exit(1)
  if gate is not None:
    os.read(gate, 1)
  config(spec, job, task)
  factories.parameter_server(start_timeout_s=60).serve()
  os._exit(0)


CASES = {
  "keras": lambda place: learns(place, "keras"),
  "tf_keras": lambda place: learns(place, "tf_keras"),
  "module": lambda place: learns(place, "module"),
  "partitioned_tf_keras": lambda place: partitioned(place, "tf_keras"),
  "partitioned_module": lambda place: partitioned(place, "module"),
  "refused": refused,
  "identities": identities,
  "resumes": resumes,
  "kept": kept,
  "exact": exact,
  "stopped": stopped,
  "killed_in_training": killed_in_training,
  "killed_in_evaluation": killed_in_evaluation,
  "comes_back": comes_back,
  "alone": alone,
  "killed_server": killed_server,
}


def main(output, *chosen):
  faulthandler.dump_traceback_later(280, exit=True)
  started = time.monotonic()
  place = Place()
  results = {"start_s": time.monotonic() - started}
  for name, case in CASES.items():
    if chosen and name not in chosen:
      continue
    began = time.monotonic()
    try:
      results[name] = case(place)
    except Exception:
      results[name] = {"failed": traceback.format_exc()}
    print(name, f"{time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    with open(output, "w") as file:
      json.dump(results, file)
  place.end()
  os._exit(0)


if __name__ == "__main__":
  main(*sys.argv[1:])
