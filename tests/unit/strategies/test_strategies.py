import json
import logging as python_logging

import pytest
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.strategies import factories
from loopwright.strategies.workers import strategy as workers


def test_default_is_no_distribution():
  assert factories.default() is tf.distribute.get_strategy()
  where = placement.of(factories.default())
  assert (where.name, where.devices) == ("default", [])


def test_one_device_takes_the_cpu_where_there_is_no_gpu():
  assert factories.one_device().extended.worker_devices[0].endswith("CPU:0")
  assert factories.one_device(device="CPU:2").extended.worker_devices[0].endswith("CPU:2")


@pytest.mark.parametrize("device", ["CPU:0", "CPU:2"])
def test_one_cpu_reads_the_dataset_itself(device):
  dataset = tf.data.Dataset.range(3)
  strategy = factories.one_device(device=device)
  assert placement.of(strategy).distribute(dataset) is dataset


def test_one_gpu_reads_its_batches_on_the_host_too():
  dataset, strategy = tf.data.Dataset.range(3), tf.distribute.OneDeviceStrategy("GPU:0")
  assert placement.of(strategy).distribute(dataset) is dataset


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_mirrored_splits_the_cpu(replicas):
  strategy = factories.mirrored(cpu_replicas=replicas)
  devices = [device.rpartition("device:")[2] for device in strategy.extended.worker_devices]
  assert devices == [f"CPU:{i}" for i in range(replicas)]


def test_mirrored_takes_named_devices_in_either_spelling():
  strategy = factories.mirrored(devices=["CPU:1", "/device:CPU:3"])
  where = placement.of(strategy)
  assert (where.name, where.devices) == ("MirroredStrategy", ["CPU:1", "CPU:3"])


def test_mirrored_without_arguments_is_one_replica_on_the_cpu():
  assert factories.mirrored().num_replicas_in_sync == 1


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("hierarchical_copy", tf.distribute.HierarchicalCopyAllReduce),
    ("reduction_to_one_device", tf.distribute.ReductionToOneDevice),
    ("auto", tf.distribute.ReductionToOneDevice),
  ],
)
def test_the_named_op_is_the_one_in_use(name, kind):
  strategy = factories.mirrored(cpu_replicas=2, cross_device_ops=name)
  assert isinstance(strategy.extended._get_cross_device_ops(tf.constant(0.0)), kind)


def test_collective_is_tensorflows_own():
  strategy = factories.mirrored(cpu_replicas=2, cross_device_ops="collective")
  ops = strategy.extended._get_cross_device_ops(tf.constant(0.0))
  assert type(ops).__name__ == "CollectiveAllReduce"


def test_auto_says_what_it_took(caplog):
  with caplog.at_level(python_logging.INFO, logger="absl"):
    factories.mirrored(cpu_replicas=2)
    factories.auto(cpu_replicas=3)
    factories.auto()
  said = caplog.text
  assert "cross-device ops auto: reduction_to_one_device, measured fastest on logical CPUs" in said
  assert "strategy auto: mirrored over 3 logical CPUs (auto.cpu_replicas)" in said
  assert "strategy auto: one_device on the CPU, no GPU is visible to TensorFlow" in said


def test_auto_is_one_worker_of_the_several_that_tf_config_names(monkeypatch):
  cluster = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}
  monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
  monkeypatch.setattr(workers, "multi_worker_mirrored", lambda: "two workers")
  assert factories.auto() == "two workers"
  with pytest.raises(
    ConfigError, match=r"auto\.cpu_replicas is 3, but TF_CONFIG names 2 processes"
  ):
    factories.auto(cpu_replicas=3)


def test_auto_on_a_machine_without_gpu():
  assert factories.auto().num_replicas_in_sync == 1
  assert factories.auto(cpu_replicas=3).num_replicas_in_sync == 3


def test_central_storage_keeps_variables_on_the_parameter_device():
  strategy = factories.central_storage(cpu_replicas=3, parameter_device="CPU:2")
  with strategy.scope():
    variable = tf.Variable(1.0)
  assert strategy.num_replicas_in_sync == 3
  assert variable.device.endswith("CPU:2")


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: factories.one_device(device="GPU:0"),
      "unknown device 'GPU:0'; it must be one of CPU:0",
    ),
    (lambda: factories.mirrored(devices=["CPU:0", "CPU:9"]), "unknown device 'CPU:9'"),
    (
      lambda: factories.mirrored(devices=["CPU:0", "CPU:0"]),
      "list at least one device, each once",
    ),
    (lambda: factories.mirrored(devices=[]), r"devices is \[\]; list at least one"),
    (
      lambda: factories.mirrored(devices=["CPU:0"], cpu_replicas=2),
      r"received both devices=\['CPU:0'\] and cpu_replicas=2; choose one",
    ),
    (
      lambda: factories.central_storage(devices=["CPU:0"], cpu_replicas=2),
      "received both devices=.*choose one",
    ),
    (lambda: factories.central_storage(parameter_device="CPU:7"), "unknown device 'CPU:7'"),
    (
      lambda: factories.mirrored(cpu_replicas=2, cross_device_ops="colective"),
      "cross_device_ops 'colective'.*auto, collective.*Did you mean 'collective'",
    ),
    (
      lambda: factories.mirrored(num_packs=0),
      "mirrored.num_packs is 0; it must be a whole number of at least 1",
    ),
    (
      lambda: factories.mirrored(cpu_replicas=0),
      "cpu_replicas is 0; it must be a whole number of at least 1",
    ),
    (
      lambda: factories.mirrored(cpu_replicas=5),
      "cpu_replicas is 5, but TensorFlow is already initialised with fewer logical CPUs",
    ),
    (
      lambda: factories.mirrored(cpu_replicas=3, cross_device_ops="hierarchical_copy"),
      "'hierarchical_copy' with 3 replicas.*use an even number",
    ),
    (
      lambda: factories.mirrored(cpu_replicas=2, cross_device_ops="nccl"),
      "'nccl', but CPU:0 is not a GPU",
    ),
  ],
)
def test_what_cannot_work_is_refused_in_one_line(make, message):
  tf.config.list_logical_devices()  # TensorFlow has started
  with pytest.raises(ConfigError, match=message) as error:
    make()
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_hierarchical_copy_is_let_in_where_it_is_right(replicas):
  strategy = factories.mirrored(cpu_replicas=replicas, cross_device_ops="hierarchical_copy")
  assert strategy.num_replicas_in_sync == replicas


def test_xla_is_refused_under_central_storage_with_several_replicas_only(mirrored):
  with pytest.raises(ConfigError, match=r"received both Trainer.jit_compile=True and .*central"):
    placement.of(factories.central_storage(cpu_replicas=2)).require("jit_compile")
  for strategy in (factories.central_storage(cpu_replicas=1), mirrored(2), factories.default()):
    placement.of(strategy).require("jit_compile")


def test_splitting_the_cpu_again_for_fewer_is_fine():
  assert factories.split_cpu(4) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
  assert factories.split_cpu(2) == ["CPU:0", "CPU:1"]
