"""The workers' meeting among strangers: secrets, addresses, and what is on the wire."""

import concurrent.futures
import re
import socket
import time

import pytest

from benchmarks import hostile_meeting
from benchmarks.hostile_meeting import ALIKE, KINDS, SECRET, meeting_of
from loopwright.distribution.cluster import ClusterError, Peer
from loopwright.errors import ConfigError
from loopwright.strategies.workers import meeting, wire
from loopwright.tools.local_cluster import free_ports

OTHER = {**ALIKE, "run.seed": "4711"}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
  monkeypatch.setattr(meeting, "_ANSWER_S", 1.0)
  monkeypatch.setattr(hostile_meeting, "MANY", 40)


def without_addresses(errors):
  return [re.sub(r" \([\d.]+:\d+\)", "", str(error)) for error in errors]


SOME = [
  "HTTP", "a byte every 0.2 s", "half a body", "index 2**32 - 1", "a false claim for worker 1",
  "a true claim from elsewhere", "another secret", "nested JSON", "facts that are numbers",
]  # fmt: skip


@pytest.mark.parametrize(
  ("secret", "kinds"),
  [(None, SOME)] + [pytest.param(s, list(KINDS), marks=pytest.mark.whole) for s in (None, SECRET)],
)
def test_workers_meet_among_strangers_of_all_kinds(secret, kinds):
  errors, _ = meeting_of([ALIKE] * 3, [secret] * 3, kinds=kinds, late_s=0.1)
  assert errors == [None] * 3


@pytest.mark.parametrize("secret", [None, SECRET])
def test_strangers_do_not_hide_a_difference(secret):
  kinds = ["a true claim from elsewhere", "a false claim for worker 1", "a recorded claim"]
  errors, _ = meeting_of([ALIKE, OTHER], [secret] * 2, kinds=kinds, late_s=0.1)
  assert without_addresses(errors) == [
    f"worker-1 differs from worker-0 in its run.seed, which is {value} here; start all workers "
    "with the same command."
    for value in ("1", "4711")
  ]


@pytest.mark.parametrize(
  ("secrets", "line"),
  [
    ((SECRET, b"x" * 32), "worker-1 has another cluster secret than worker-0"),
    ((SECRET, None), "worker-0 has a cluster secret, but worker-1 has none"),
    ((None, SECRET), "worker-1 has a cluster secret, but worker-0 has none"),
  ],
)
def test_secrets_that_differ_are_one_line_on_both(secrets, line):
  errors, _ = meeting_of([ALIKE] * 2, secrets, late_s=0)
  assert [type(error) for error in errors] == [ConfigError] * 2
  line += "; set the same LOOPWRIGHT_CLUSTER_SECRET on all workers."
  assert without_addresses(errors) == [line] * 2


def test_strangers_do_not_delay_the_time_limit():
  """Worker 1 never comes; a stranger sends a byte now and then, another claims to be worker 1."""
  [port, other] = free_ports(2)
  peers = [Peer("worker", 0, f"127.0.0.1:{port}"), Peer("worker", 1, f"127.0.0.1:{other}")]
  kinds = ["a byte every 0.2 s", "a true claim from elsewhere", "a false claim for worker 1"]
  with (
    hostile_meeting.strangers([peers[0].address], kinds),
    pytest.raises(ClusterError, match=r"worker-1 .* within 0\.5 s"),
  ):
    meeting.meet(peers, 0, ALIKE, secret=None, timeout_s=0.5)


def seconds_until_closed(address, *, count):
  """Connects so often, says nothing, and returns when each connection was closed."""
  silent = [wire.connected(address, deadline=time.monotonic() + 1) for _ in range(count)]
  began = time.monotonic()
  seconds = []
  for connection in silent:
    connection.settimeout(60)
    while connection.recv(4096):
      pass
    seconds.append(time.monotonic() - began)
    connection.close()
  return seconds


@pytest.mark.parametrize(("answer_s", "most", "early"), [(0.2, 128, 4), (60.0, 2, 2)])
def test_silent_strangers_are_hung_up_on_after_a_while_or_for_others(
  answer_s, most, early, monkeypatch
):
  monkeypatch.setattr(meeting, "_ANSWER_S", answer_s)
  monkeypatch.setattr(meeting, "_MOST_CONNECTIONS", most)
  peers = [Peer("worker", index, f"127.0.0.1:{port}") for index, port in enumerate(free_ports(2))]
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    met = pool.submit(meeting.meet, peers, 0, ALIKE, secret=None, timeout_s=2.4)
    seconds = seconds_until_closed(peers[0].address, count=4)
    assert sum(each < 1.8 for each in seconds) == early
    assert isinstance(met.exception(60), ClusterError)


def false_verdict(body):
  """Serves as worker 0 and answers a worker's claim with this body."""

  def serve(connection):
    wire.send(connection, wire.Message(False, 0, bytes(32)), deadline=time.monotonic() + 1)
    claim = wire.receive(connection, deadline=time.monotonic() + 1)
    seal = wire.Seal(None, b"to the worker", meeting._context(bytes(32), claim.nonce, 1))
    answer = wire.Message(False, 0, bytes(32), seal.mac(body), body)
    wire.send(connection, answer, deadline=time.monotonic() + 1)

  return serve


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[]", b"\xff", b'{"fact": 1}'])
def test_a_worker_0_that_says_nonsense_is_none(body):
  ports = free_ports(2)
  peers = [Peer("worker", index, f"127.0.0.1:{port}") for index, port in enumerate(ports)]
  with (
    socket.create_server(("127.0.0.1", ports[0])) as listener,
    meeting._accepting(listener, false_verdict(body)),
    pytest.raises(ClusterError, match=r"worker-0 .* did not accept this worker, or cannot"),
  ):
    meeting.meet(peers, 1, ALIKE, secret=None, timeout_s=0.1)


def test_another_program_at_worker_0s_port_is_no_worker():
  ports = free_ports(2)
  peers = [Peer("worker", index, f"127.0.0.1:{port}") for index, port in enumerate(ports)]
  line = r"worker-0 .* did not answer as a worker within 0\.1 s"
  with socket.create_server(("127.0.0.1", ports[0])), pytest.raises(ClusterError, match=line):
    meeting.meet(peers, 1, ALIKE, secret=None, timeout_s=0.1)


def test_facts_over_the_limit_are_one_line_and_no_timeout():
  many = {f"run.{'x' * 400}{number}": "1" for number in range(3000)}
  errors, _ = meeting_of([ALIKE, many], [SECRET] * 2, late_s=0, timeout_s=0.5)
  assert isinstance(errors[1], ConfigError)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_no_value_is_on_the_wire(secret, monkeypatch):
  sent, send = [], wire.send
  monkeypatch.setattr(
    wire, "send", lambda c, m, deadline: (sent.append(m), send(c, m, deadline=deadline))
  )
  meeting_of([ALIKE, OTHER], [secret] * 2, late_s=0)
  assert len(sent) == 3
  everything = b"".join(message.body for message in sent)
  assert b"run.seed" in everything
  assert b"4711" not in everything
  assert b"3.15.1" not in everything
  hello, claim, _ = sent
  guess = wire.Seal(None, b"", meeting._context(hello.nonce, claim.nonce, 1))
  assert (guess.digest("run.seed", "4711").encode() in everything) == (secret is None)


def test_a_message_opens_only_with_its_secret_direction_and_nonces():
  seal = wire.Seal(SECRET, b"to the chief", b"n" * 68)
  message = seal.close(1, b"n" * 32, {"a": "b"})
  assert seal.open(message) == {"a": "b"}
  for other in (
    seal._replace(secret=b"x" * 32),
    seal._replace(secret=None),
    seal._replace(direction=b"to the worker"),
    seal._replace(nonces=b"m" * 68),
  ):
    assert not other.fits(message)
  changed = message._replace(body=bytes([message.body[0] ^ 1]) + message.body[1:])
  with pytest.raises(ValueError, match="not sealed"):
    seal.open(changed)


def test_a_digest_of_a_value_needs_the_secret_and_tells_connections_and_facts_apart():
  seal = wire.Seal(SECRET, b"to the chief", b"n" * 68)
  same = seal._replace(direction=b"to the worker")
  assert seal.digest("run.seed", "1") == same.digest("run.seed", "1")
  others = {
    seal._replace(secret=None).digest("run.seed", "1"),
    seal._replace(nonces=b"m" * 68).digest("run.seed", "1"),
    seal.digest("run.seed", "2"),
    seal.digest("run.steps", "1"),
    seal.digest("run.seed", "1"),
  }
  assert len(others) == 5


def test_facts_that_are_too_long_are_refused_in_one_line():
  with pytest.raises(ConfigError, match=f"the limit is {wire.LARGEST_BODY}"):
    wire.Seal(None, b"", b"").close(1, bytes(32), {"x": "y" * wire.LARGEST_BODY})


def test_a_long_value_is_shortened():
  long = "x" * 1000
  assert len(meeting._short(long)) < 450
  assert meeting._short(long) != meeting._short(long + "x")
  assert meeting._short("short") == "short"


# ---- The secret ----


def test_the_secret_is_read(tmp_path):
  file = tmp_path / "secret"
  file.write_text("0123456789abcdef\n")
  assert wire.secret({}) is None
  assert wire.secret({wire.SECRET: "0123456789abcdef"}) == b"0123456789abcdef"
  assert wire.secret({wire.SECRET_FILE: str(file)}) == b"0123456789abcdef"


@pytest.mark.parametrize(
  ("environ", "line"),
  [
    ({wire.SECRET: "a" * 16, wire.SECRET_FILE: "f"}, "received both"),
    ({wire.SECRET: ""}, "LOOPWRIGHT_CLUSTER_SECRET has 0 characters; a secret needs at least 16"),
    ({wire.SECRET_FILE: "/no/file"}, r"SECRET_FILE='/no/file' \(No such file or directory\)"),
    ({wire.SECRET_FILE: "/dev/null"}, "LOOPWRIGHT_CLUSTER_SECRET_FILE has 0 characters"),
  ],
)
def test_a_wrong_secret_is_one_line_without_the_secret(environ, line):
  with pytest.raises(ConfigError, match=line) as caught:
    wire.secret(environ)
  assert "aaaa" not in str(caught.value)


# ---- The own address ----


def bound_host(address):
  with meeting.bound(address) as listener:
    return listener.getsockname()[0]


def test_a_worker_listens_on_its_own_address_alone():
  [port] = free_ports(1)
  assert bound_host(f"127.0.0.1:{port}") == "127.0.0.1"
  assert bound_host(f"127.8.9.10:{port}") == "127.8.9.10"
  assert bound_host(f"localhost:{port}") in ("127.0.0.1", "::1")


@pytest.mark.parametrize("found", ["192.0.2.7", "127.0.1.1"])
def test_a_name_of_no_interface_means_all_with_a_warning(found, monkeypatch, caplog):
  """As behind NAT; and as Debian names its own machine."""
  place = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
  monkeypatch.setattr(socket, "getaddrinfo", lambda _, port, **__: [(*place, (found, port))])
  [port] = free_ports(1)
  assert bound_host(f"me:{port}") == "0.0.0.0"
  assert f"has the address me:{port}" in caplog.text
