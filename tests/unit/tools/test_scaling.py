"""The cost model of benchmarks/scaling.py, against simulations and planted values."""

from pathlib import Path

import numpy as np
import pytest

import launch
from benchmarks import scaling
from benchmarks.scaling import Change, Cluster, Link, Work

LINK = Link(latency_s=3e-4, s_per_byte=2e-8)
FAST = Link(latency_s=1e-5, s_per_byte=1e-10)
WORK = Work(fixed_s=0.004, example_s=0.0005, examples=64, size=8e6)


def ring_by_messages(vectors, link):
  """All-reduces in turns, in which all send to the right; returns the results and the seconds.

  A worker asks its left neighbour for all messages at the start.
  """
  workers, seconds = len(vectors), link.latency_s
  chunks = [np.split(vector, workers) for vector in vectors]
  for turn in range(2 * (workers - 1)):
    adds = turn < workers - 1
    first = 0 if adds else workers  # after n - 1 turns, worker w has the sum of chunk w + 1
    places = [(worker + first - turn) % workers for worker in range(workers)]
    sent = [chunks[worker][place] for worker, place in enumerate(places)]
    for worker, (place, chunk) in enumerate(zip(places, sent, strict=True)):
      there = chunks[(worker + 1) % workers]
      there[place] = there[place] + chunk if adds else chunk
    seconds += max(link.latency_s + chunk.nbytes * link.s_per_byte for chunk in sent)
  return [np.concatenate(parts) for parts in chunks], seconds


@pytest.mark.parametrize("workers", [2, 3, 4, 7])
def test_a_ring_takes_as_long_as_its_messages(workers):
  vectors = np.random.default_rng(0).normal(size=[workers, 84 * 1000])
  results, seconds = ring_by_messages(vectors, LINK)
  for result in results:
    np.testing.assert_allclose(result, vectors.sum(axis=0))
  assert scaling.ring(vectors[0].nbytes, workers, LINK) == pytest.approx(seconds)


def test_halving_and_doubling_sends_halves_of_halves():
  halves = [LINK.latency_s + 8e6 * part * LINK.s_per_byte for part in (1 / 2, 1 / 4, 1 / 8)]
  assert scaling.halving(8e6, 8, LINK) == pytest.approx(2 * sum(halves))


def test_the_devices_of_a_host_share_its_link():
  hosts, per_host, size = 3, 4, 12e6
  inside = 7 * FAST.latency_s + 6 * size / per_host * FAST.s_per_byte
  own_part = size / per_host / hosts  # bytes that one device sends to the next host in a turn
  between = 5 * LINK.latency_s + 4 * per_host * own_part * LINK.s_per_byte
  found = scaling.hierarchical(size, hosts, per_host, FAST, LINK)
  assert found == pytest.approx(inside + between)
  assert scaling.hierarchical(size, 1, 4, FAST, LINK) == pytest.approx(inside)


def test_a_server_receives_its_share_from_every_worker():
  received = 6 * 8e6 / 2  # bytes: 6 workers, each with half of its gradients for each of 2 servers
  both_ways = 2 * (3e-4 + received * 2e-8)
  assert scaling.parameter_server(8e6, 6, 2, LINK) == pytest.approx(both_ways)


def test_asynchronous_workers_are_as_fast_as_they_or_the_servers():
  alone = 0.004 + 64 * 0.0005 + 2 * (3e-4 + 8e6 * 2e-8)
  assert scaling.asynchronous_s(WORK, 2, 1, LINK) == pytest.approx(alone)
  assert scaling.asynchronous_s(WORK, 40, 2, LINK) == pytest.approx(40 * 8e6 / 2 * 2e-8)


@pytest.mark.parametrize("size", [1e5, 1e6, 8e6])
@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_buckets_wait_for_the_backward_pass_and_for_each_other(buckets, size):
  work = WORK._replace(size=size)
  forward, backward = 0.032 / 3, 0.032 * 2 / 3
  free_at = 0.0
  for bucket in range(1, buckets + 1):
    ready = forward + backward * bucket / buckets
    free_at = max(free_at, ready) + scaling.ring(size / buckets, 4, LINK)
  cluster = Cluster(4, LINK)
  assert scaling.step_s(work, cluster.ring, buckets=buckets) == pytest.approx(0.004 + free_at)


def test_accumulation_and_local_sgd_send_less_often():
  sent = scaling.ring(8e6, 4, LINK)
  ring = Cluster(4, LINK).ring
  assert scaling.step_s(WORK, ring, accumulation=3) == pytest.approx(0.004 + 3 * 0.032 + sent)
  assert scaling.step_s(WORK, ring, every=8) == pytest.approx(0.004 + 0.032 + sent / 8)


def test_efficiency_counts_examples():
  assert scaling.efficiency(WORK, 0.036) == pytest.approx(1)
  assert scaling.efficiency(WORK, 0.144, times=2) == pytest.approx(0.5)


def test_the_fit_finds_the_planted_link():
  sizes = scaling.sizes_up_to(4_000_000)
  noise = np.random.default_rng(0).uniform(0.98, 1.02, len(sizes))
  exact = np.array([9 * 3e-4 + 8 * size / 5 * 2e-8 for size in sizes])
  assert scaling.fitted_link(sizes, exact, 5) == pytest.approx(LINK)
  assert scaling.fitted_link(sizes, exact * noise, 5) == pytest.approx(LINK, rel=0.03)


def test_a_fitted_latency_is_not_negative():
  link = scaling.fitted_link([1000, 2000, 3000], [0.9e-3, 2e-3, 3.1e-3], 2)
  assert link.latency_s == 0
  assert link.s_per_byte == pytest.approx(1e-6, rel=0.04)


def test_the_fit_finds_the_planted_work():
  sent = 0.16
  seconds = [0.004 + examples * 0.0005 + sent for examples in (64, 32)]
  found = scaling.fitted_work((64, 32), seconds, size=8e6, communication_s=sent)
  assert found == pytest.approx(WORK)


def test_a_change_is_the_least_that_is_nearly_as_good_as_the_best():
  low, good, better = Change("low", 0.5), Change("good", 0.91), Change("better", 1.3)
  assert scaling.first(0.3, [low, good, better]) == good
  assert scaling.first(0.3, [Change("lower", 0.4), low]) == low
  assert scaling.first(0.3, [Change("nearly", 0.46), low]).what == "nearly"
  assert scaling.first(0.9, [good, better]) is None
  assert scaling.first(0.5, [Change("worse", 0.2), Change("same", 0.5)]) is None


def test_changes_are_compared_by_examples_per_second():
  cluster = Cluster(64, LINK, per_host=8, inside=FAST)
  changes = scaling.changes(WORK, cluster) + scaling.algorithms(WORK, cluster)
  found = {change.what.split()[0]: change.efficiency for change in changes}
  two = 0.032 / 3 + 0.032 / 3 + 2 * 127 * 3e-4 + 126 * 8e6 / 64 * 2e-8  # 4 and 8 cost more latency
  assert found["2"] == pytest.approx(0.036 / (0.004 + two))
  ring = 127 * 3e-4 + 126 * 8e6 / 64 * 2e-8
  hosts = 15 * (3e-4 + 1e-5) + 14 * 8e6 / 8 * (2e-8 + 1e-10)
  assert found["hierarchical"] == pytest.approx(0.036 / (0.036 + hosts))
  assert found["halving"] == pytest.approx(0.036 / (0.036 + 12 * 3e-4 + 126 / 64 * 8e6 * 2e-8))
  assert found["Reduction.wire_dtype"] == pytest.approx(0.036 / (0.036 + ring - 126 / 64 * 0.08))
  assert found["twice"] == pytest.approx(2 * 0.036 / (0.068 + ring))
  assert found["asynchronous,"] == pytest.approx(0.036 / (4 * 8e6 * 2e-8))  # 16 servers, 64 workers
  assert found["local"] == pytest.approx(0.036 / (0.036 + ring / 8))
  assert found["4"] == pytest.approx(4 * 0.036 / (0.132 + ring))


@pytest.mark.whole
def test_it_measures_a_config_on_two_replicas(capsys):
  config = Path(launch.__file__).parent / "benchmarks" / "scaling_check.gin"
  params = [
    "run.strategy = @mirrored",
    "mirrored.devices = ('CPU:0', 'CPU:1')",
    "mlp.units = (64,)",
  ]
  params += ["run.per_replica_batch_size = None", "run.global_batch_size = 64"]
  scaling.main([f"--gin_file={config}", *(f"--gin_param={param}" for param in params)])
  printed = capsys.readouterr().out
  weights = 64 * 64 + 64 + 64 * 10 + 10
  assert "for 32 examples per worker; gradients %.3g MB" % (4 * weights / 1e6) in printed
  assert printed.count("all-reduce of") == 5
  assert "| 4096 |" in printed
  assert "change first:" in printed
