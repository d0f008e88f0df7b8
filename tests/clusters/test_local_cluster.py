"""The local cluster: tiny children in the place of launch.py, and no TensorFlow."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.errors import ConfigError
from loopwright.run_folder import legs
from loopwright.strategies.workers import elastic, wire
from loopwright.tools import local_cluster, local_process, private_network, shared_memory
from loopwright.tools.local_cluster import free_ports, run_local

ROOT = Path(local_cluster.__file__).parents[2]
PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path

config = json.loads(os.environ["TF_CONFIG"])
me = "{type}-{index}".format(**config["task"])
everyone = [f"{kind}-{i}" for kind, hosts in config["cluster"].items() for i in range(len(hosts))]

def mark(name, text=""):
  Path(f"{name}.part").write_text(str(text))
  os.rename(f"{name}.part", name)

def await_mark(*names):
  while not all(os.path.exists(name) for name in names):
    time.sleep(0.005)

def here():  # by now everyone runs
  mark(f"pid.{me}", os.getpid())
  await_mark(*[f"pid.{name}" for name in everyone])

def times(name):  # how often this was called, by anyone
  with open(name, "a") as file:
    file.write("x")
    return file.tell()

def on(number, answer):
  signal.signal(number, lambda *_: answer())

def die(status):
  sys.exit(status) if status >= 0 else os.kill(os.getpid(), -status)

def forever():
  while True:
    signal.pause()
"""
SECONDS = r"after \d+\.\d s"
MOVED = "it was removed, moved or replaced while the run trained in it"


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("TF_CONFIG", raising=False)
  monkeypatch.setenv(private_network.NETWORK, "shared")


def child(body, python=(sys.executable, "-S")):
  Path("child.py").write_text(PRELUDE + body)
  return [*python, "child.py"]


@pytest.fixture
def run(capsys):
  """Runs children in a cluster; returns the status and what was shown, seconds as "N"."""

  def run(body, *, workers=2, python=(sys.executable, "-S"), **options):
    status = run_local(command=child(body, python), model_dir="m", workers=workers, **options)
    out, err = capsys.readouterr()
    return status, out, re.sub(SECONDS, "after N s", err)

  return run


class Parent:
  """Runs children in a cluster of another process, which is to get signals."""

  def __init__(self, body, *, constants="", stdout=subprocess.PIPE, stderr=None, **options):
    arguments = {"command": child(body), "model_dir": "m", "workers": 2, **options}
    code = (
      "import json, signal, sys\n"
      "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
      f"from loopwright.tools import local_cluster\n{constants}\n"
      "sys.exit(local_cluster.run_local(**json.loads(sys.argv[1])))"
    )
    self.popen = subprocess.Popen(
      [sys.executable, "-c", code, json.dumps(arguments)],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdout=stdout,
      stderr=subprocess.PIPE if stderr is None else stderr,
      start_new_session=True,
      text=True,
    )

  def wait_for(self, *names):
    while not all(os.path.exists(name) for name in names):
      assert self.popen.poll() is None, self.popen.communicate()
      time.sleep(0.005)

  def pids(self, *names):
    self.wait_for(*[f"pid.{name}" for name in names])
    return [int(Path(f"pid.{name}").read_text()) for name in names]

  def send(self, *numbers):
    for number in numbers:
      self.popen.send_signal(number)

  def end(self):
    """Returns the status and what was shown, seconds as "N"."""
    out, err = self.popen.communicate(timeout=20)
    return self.popen.returncode, out, re.sub(SECONDS, "after N s", err)


@pytest.fixture
def parent():
  started = []

  def start(body, **options):
    started.append(Parent(body, **options))
    return started[-1]

  yield start
  for one in started:
    one.popen.kill()
    one.popen.communicate()


def state(pid):
  """Returns the kernel's letter for a process, "Z" once it has ended, even if it is gone."""
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
  except (FileNotFoundError, ProcessLookupError):
    return "Z"


def all_end(pids, *, timeout_s=10):
  until = time.monotonic() + timeout_s
  while {state(pid) for pid in pids} - {"Z", "X"}:
    assert time.monotonic() < until, [state(pid) for pid in pids]
    time.sleep(0.005)
  return True


def headers(name):
  return re.findall(rf"^=== .* {name}: .*$", Path(f"m/logs/{name}.log").read_text(), re.M)


def test_free_ports_are_distinct_and_free():
  ports = free_ports(20)
  assert len(set(ports)) == 20
  assert all(1024 <= port <= 65535 for port in ports)


TELL = """
mark(f"told.{me}", os.environ["TF_CONFIG"])
address = config["cluster"][config["task"]["type"]][config["task"]["index"]]
host, _, port = address.partition(":")
with socket.socket() as mine:
  mine.bind((host, int(port)))
  mine.listen()
"""


def told(name):
  return json.loads(Path(f"told.{name}").read_text())


def hosts(config):
  return [host for one in config["cluster"].values() for host in one]


def test_each_worker_is_told_its_place_and_finds_its_port_free(run):
  assert run(TELL, workers=3) == (0, "", "")
  configs = [told(f"worker-{i}") for i in range(3)]
  assert [c["task"] for c in configs] == [{"type": "worker", "index": i} for i in range(3)]
  assert all(c["cluster"] == configs[0]["cluster"] for c in configs)
  assert list(configs[0]["cluster"]) == ["worker"]
  assert len(set(hosts(configs[0]))) == 3
  assert all(re.fullmatch(r"127\.0\.0\.1:\d+", host) for host in hosts(configs[0]))


def test_one_worker_is_a_cluster_too(run):
  assert run(TELL, workers=1) == (0, "", "")
  assert (told("worker-0")["task"], len(hosts(told("worker-0")))) == (
    {"type": "worker", "index": 0},
    1,
  )


def test_parameter_servers_and_workers_end_with_the_chief(run):
  body = TELL + "here()\nif me != 'chief-0': forever()"
  assert run(body, workers=2, ps=2) == (0, "", "")
  names = ["chief-0", "worker-0", "worker-1", "ps-0", "ps-1"]
  for name in names:
    kind, _, index = name.partition("-")
    assert told(name)["task"] == {"type": kind, "index": int(index)}
  cluster = told("ps-1")["cluster"]
  assert {kind: len(one) for kind, one in cluster.items()} == {"chief": 1, "worker": 2, "ps": 2}
  assert len(set(hosts(told("ps-1")))) == 5
  assert all_end([int(Path(f"pid.{name}").read_text()) for name in names])
  assert sorted(os.listdir("m/logs")) == [
    "chief.log", "ps-0.log", "ps-1.log", "worker-0.log", "worker-1.log",
  ]  # fmt: skip


FAILED = "failed: worker-1 {} after N s; its log is m/logs/worker-1.log\n"
MISTAKE = "error: x is 3; it must be 4."
PORT_TAKEN = "errors_impl.UnknownError: Could not start gRPC server"
OURS = "failed: cannot listen on h:1, this worker's own address: another process uses the port"
MOVES = "worker-1 found its port in use; restarting all processes on other ports\n"
CHIEF = "here()\nif me != 'chief-0': forever()\n"
# what each process runs, options, the status, what is shown of it
ENDS = {
  "all have saved": ("here(); die(75)", {"max_restarts": 3}, 75, ""),
  "one has saved, one was done": ("here(); die(75 if me == 'worker-1' else 0)", {}, 75, ""),
  "one has saved, one fails": (
    "here(); die(75 if me == 'worker-0' else 1)", {}, 1, FAILED.format("ended with status 1"),
  ),
  "one has saved, one hangs": (
    "here(); die(75) if me == 'worker-0' else forever()", {"grace_s": 0.2}, 1,
    FAILED.format("did not end within 0.2 s of SIGTERM"),
  ),
  "the chief's mistake is shown as it is": (
    f"here()\nif me != 'worker-0': forever()\nprint({MISTAKE!r}, file=sys.stderr); die(2)", {}, 2,
    f"{MISTAKE}\n",
  ),
  "the mistake of another is shown with its name": (
    f"here()\nif me != 'worker-1': forever()\nprint('x'); print({MISTAKE!r}); die(2)", {}, 2,
    f"[worker-1] {MISTAKE}\n",
  ),
  "one worker alone is supervised": (
    "die(times('starts') == 1)", {"workers": 1, "max_restarts": 5}, 0,
    "worker-0 ended with status 1 after N s; restarting all processes, attempt 1 of 5\n",
  ),
  **{
    f"a taken port is no failure: {said[:6]}": (
      f"here()\nif me == 'worker-1' and times('n') == 1: sys.exit({said!r})", {}, 0, MOVES,
    )
    for said in (PORT_TAKEN, OURS)
  },
  "a port that is always taken": (
    f"here()\nif me == 'worker-1': sys.exit({PORT_TAKEN!r})\nforever()", {}, 1,
    3 * MOVES + f"[worker-1] {PORT_TAKEN}\n" + FAILED.format("ended with status 1"),
  ),
  "the other workers go on without restarts": (
    "here()\nif me == 'worker-1': mark('dead'); die(-9)\nif me != 'chief-0': forever()\n"
    "await_mark('dead'); time.sleep(0.3)", {"ps": 1}, 0,
    "worker-1 was killed by SIGKILL after N s; continuing without it\n",
  ),
  "the last worker beside parameter servers": (
    "here()\nif me == 'worker-0': die(-9)\nforever()", {"workers": 1, "ps": 1}, 1,
    FAILED.format("was killed by SIGKILL").replace("worker-1", "worker-0"),
  ),
  "a worker beside parameter servers fails": (
    "here()\nif me == 'worker-1': die(1)\nforever()", {"ps": 1}, 1,
    FAILED.format("ended with status 1"),
  ),
  "the mistake of a worker beside parameter servers": (
    f"here()\nif me != 'worker-0': forever()\nprint({MISTAKE!r}); die(2)",
    {"workers": 1, "ps": 1, "max_restarts": 3}, 2, f"[worker-0] {MISTAKE}\n",
  ),
  "the chief fails": (
    f"{CHIEF}die(1)", {"workers": 1, "ps": 1}, 1,
    "failed: chief ended with status 1 after N s; its log is m/logs/chief.log\n",
  ),
  "the chief ends with a mistake": (
    f"{CHIEF}die(2)", {"workers": 1, "ps": 1}, 2, "[chief] chief ended with status 2 after N s\n",
  ),
  "the chief has saved": (f"{CHIEF}die(75)", {"workers": 1, "ps": 1}, 75, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_how_a_run_ends(name, run):
  body, options, status, line = ENDS[name]
  assert run(body, **options) == (status, "", line)
  first = "chief" if "ps" in options else "worker-0"
  assert len(headers(first)) == 1 + line.count("restarting all processes")
  assert all_end([int(path.read_text()) for path in Path().glob("pid.*")])


@pytest.mark.parametrize(
  ("status", "expected", "line"),
  [
    (0, 0, ""),
    (1, 1, FAILED.format("ended with status 1")),
    (3, 1, FAILED.format("ended with status 3")),
    (130, 1, FAILED.format("ended with status 130")),
    (-9, 1, FAILED.format("was killed by SIGKILL")),
    (-11, 1, FAILED.format("was killed by SIGSEGV")),
    (2, 2, "[worker-1] worker-1 ended with status 2 after N s\n"),
  ],
)
def test_the_status_of_one_worker_is_that_of_the_run(run, status, expected, line):
  body = f"""
here()
if me == "worker-1": die({status})
if {status}: forever()
"""
  assert run(body) == (expected, "", line)
  assert all_end([int(Path(f"pid.worker-{i}").read_text()) for i in range(2)])


def test_everyones_mistake_is_shown_once(run):
  body = f"here(); print({MISTAKE!r}, file=sys.stderr); die(2)"
  status, out, err = run(body, workers=3, max_restarts=3)
  assert (status, out) == (2, "")
  assert err in (f"{MISTAKE}\n", f"[worker-1] {MISTAKE}\n", f"[worker-2] {MISTAKE}\n")
  assert len(headers("worker-0")) == 1


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_the_blame_goes_to_the_first_even_if_both_have_ended_when_one_looks(parent, first, second):
  one = parent("here(); await_mark(f'go.{me}'); die(4)")
  pids = one.pids("worker-0", "worker-1")
  one.send(signal.SIGSTOP)
  for number in (first, second):
    Path(f"go.worker-{number}").touch()
    all_end(pids[number : number + 1])
  one.send(signal.SIGCONT)
  line = FAILED.format("ended with status 4").replace("worker-1", f"worker-{first}")
  assert one.end() == (1, "", line)


def test_a_failure_shows_the_last_lines_of_another_but_not_of_the_chief(run):
  body = """
here()
if me != {!r}: forever()
for i in range(30): print("line", i)
sys.exit("Boom: a bug")
"""
  lines = "".join(f"[worker-1] line {i}\n" for i in range(11, 30))
  assert run(body.format("worker-1")) == (
    1, "", f"{lines}[worker-1] Boom: a bug\n" + FAILED.format("ended with status 1"),
  )  # fmt: skip
  Path("pid.worker-0").unlink()
  assert run(body.format("worker-0")) == (
    1,
    "".join(f"line {i}\n" for i in range(30)),
    "Boom: a bug\n" + FAILED.format("ended with status 1").replace("worker-1", "worker-0"),
  )


FAIL_TWICE = """
number = times(f"starts.{me}")
mark(f"told.{me}.{number}", json.dumps(config))
await_mark(*[f"told.{name}.{number}" for name in everyone])
if number < 3:
  if me == "worker-1": die(-9)
  forever()
"""


def test_restarts_are_counted_and_take_fresh_ports(run):
  line = "worker-1 was killed by SIGKILL after N s; restarting all processes, attempt {} of 2\n"
  assert run(FAIL_TWICE, max_restarts=2) == (0, "", line.format(1) + line.format(2))
  ports = [tuple(hosts(told(f"worker-0.{number}"))) for number in (1, 2, 3)]
  assert len(set(ports)) == 3
  assert [told(f"worker-1.{n}")["cluster"]["worker"] for n in (1, 2, 3)] == [*map(list, ports)]
  assert len(headers("worker-0")) == len(headers("worker-1")) == 3


def test_restarts_come_to_an_end(run):
  line = "worker-1 was killed by SIGKILL after N s; restarting all processes, attempt 1 of 1\n"
  assert run(FAIL_TWICE, max_restarts=1) == (
    1,
    "",
    line + FAILED.format("was killed by SIGKILL"),
  )
  assert Path("starts.worker-0").read_text() == "xx"


WORKER_DIES_ONCE = """
number = times(f"starts.{me}")
mark(f"told.{me}.{number}", json.dumps(config))
here()
if me == "worker-1" and number == 1: die(-9)
if me != "chief-0": forever()
await_mark("told.worker-1.2")
"""


def test_a_worker_beside_parameter_servers_is_restarted_alone(run):
  line = "worker-1 was killed by SIGKILL after N s; restarting it, attempt 1 of 1\n"
  assert run(WORKER_DIES_ONCE, ps=1, max_restarts=1) == (0, "", line)
  assert told("worker-1.1") == told("worker-1.2")
  starts = {name: Path(f"starts.{name}").read_text() for name in ("chief-0", "worker-0", "ps-0")}
  assert starts == {"chief-0": "x", "worker-0": "x", "ps-0": "x"}


def test_a_lost_parameter_server_restarts_all(run):
  body = """
number = times(f"starts.{me}")
mark(f"told.{me}.{number}", json.dumps(config))
await_mark(*[f"told.{name}.{number}" for name in everyone])
if me == "ps-0" and number == 1: die(-9)
if me != "chief-0" or number == 1: forever()
"""
  line = "ps-0 was killed by SIGKILL after N s; restarting all processes, attempt 1 of 1\n"
  assert run(body, workers=1, ps=1, max_restarts=1) == (0, "", line)
  assert Path("starts.chief-0").read_text() == Path("starts.worker-0").read_text() == "xx"
  assert not {*hosts(told("chief-0.1"))} & {*hosts(told("chief-0.2"))}


SAVE = """
def save():
  mark(f"saved.{me}", times(f"signals.{me}"))
  print("saved", file=sys.stderr, flush=True)
  die(75)
on(signal.SIGTERM, save)
here()
forever()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_everyone_save(parent, number):
  one = parent(SAVE.replace("SIGTERM", number.name), max_restarts=3)
  pids = one.pids("worker-0", "worker-1")
  one.send(number)
  assert one.end() == (75, "", "saved\n")
  assert all_end(pids)
  assert [Path(f"saved.worker-{i}").read_text() for i in range(2)] == ["1", "1"]


def test_one_that_fails_on_sigterm_does_not_stop_another_that_saves(parent):
  one = parent(
    """
def answer():
  if me == "worker-1": die(1)
  while os.path.exists("/proc/" + Path("pid.worker-1").read_text()): time.sleep(0.005)
  mark("saved")
  die(75)
on(signal.SIGTERM, answer)
here()
forever()
"""
  )
  one.pids("worker-0", "worker-1")
  one.send(signal.SIGTERM)
  assert one.end() == (1, "", FAILED.format("ended with status 1"))
  assert Path("saved").exists()


def test_parameter_servers_outlive_the_chief_that_saves_them(parent):
  one = parent(
    """
def save():
  mark("alive", all(os.path.exists("/proc/" + Path(f"pid.{n}").read_text()) for n in everyone))
  die(75)
if me == "chief-0": on(signal.SIGTERM, save)
else: on(signal.SIGTERM, lambda: mark(f"signalled.{me}"))
here()
forever()
""",
    workers=1,
    ps=1,
  )
  pids = one.pids("chief-0", "worker-0", "ps-0")
  one.send(signal.SIGTERM)
  assert one.end() == (75, "", "")
  assert all_end(pids)
  assert Path("alive").read_text() == "True"
  assert not [name for name in os.listdir() if name.startswith("signalled")]


STUBBORN = "on(signal.SIGINT, lambda: mark(f'heard.{me}')); here(); forever()"
SAYS_SO = "on(signal.SIGINT, lambda: (print('interrupted', file=sys.stderr), die(130)))"
ONE_HANGS = "on(signal.SIGTERM, lambda: die(75) if me == 'worker-0' else mark('heard.worker-1'))"


@pytest.mark.parametrize(
  ("body", "options", "number", "expected", "heard"),
  [
    (STUBBORN, {"grace_s": 0.2}, signal.SIGINT, (130, "interrupted\n"), 2),
    (
      f"{SAYS_SO}; here(); forever()", {"max_restarts": 3}, signal.SIGINT,
      (130, "interrupted\n"), 0,
    ),
    (
      f"{ONE_HANGS}; here(); forever()", {"grace_s": 0.3, "max_restarts": 3}, signal.SIGTERM,
      (1, FAILED.format("did not end within 0.3 s of SIGTERM")), 1,
    ),
  ],
  ids=["an interrupt gives the grace to save", "the chief may say so itself", "one hangs"],
)  # fmt: skip
def test_a_signal_ends_all(body, options, number, expected, heard, parent):
  one = parent(body, **options)
  pids = one.pids("worker-0", "worker-1")
  one.send(number)
  status, line = expected
  assert one.end() == (status, "", line)
  assert all_end(pids)
  assert len(list(Path().glob("heard.*"))) == heard


def test_an_interrupt_stops_everyone_once(parent):
  one = parent("on(signal.SIGINT, lambda: (times(f'n.{me}'), die(1))); here(); forever()")
  pids = one.pids("worker-0", "worker-1")
  os.killpg(one.popen.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
  assert one.end() == (130, "", "interrupted\n")
  assert all_end(pids)
  assert [Path(f"n.worker-{i}").read_text() for i in range(2)] == ["x", "x"]


def test_a_second_interrupt_does_not_wait_at_all(parent):
  one = parent(STUBBORN, grace_s=1000)
  pids = one.pids("worker-0", "worker-1")
  one.send(signal.SIGINT)
  one.wait_for("heard.worker-0", "heard.worker-1")
  one.send(signal.SIGINT)
  assert one.end() == (130, "", "interrupted\n")
  assert all_end(pids)


def test_two_interrupts_after_sigterm_do_not_wait_for_the_grace(parent):
  """One alone must not end it: the processes are saving."""
  one = parent("on(signal.SIGTERM, lambda: mark(f'heard.{me}')); here(); forever()", grace_s=1000)
  pids = one.pids("worker-0", "worker-1")
  one.send(signal.SIGTERM)
  one.wait_for("heard.worker-0", "heard.worker-1")
  one.send(signal.SIGINT)
  time.sleep(0.5)
  assert one.popen.poll() is None
  one.send(signal.SIGINT)
  status, _, err = one.end()
  assert status == 130
  assert err.splitlines()[-2:] == [
    "Ctrl-C: the processes are saving; press it again to end at once",
    "interrupted",
  ]
  assert all_end(pids)


def test_no_child_survives_kill_9_of_the_parent(parent):
  one = parent("here(); forever()", workers=2, ps=1)
  pids = one.pids("chief-0", "worker-0", "worker-1", "ps-0")
  one.send(signal.SIGKILL)
  assert one.popen.wait(10) == -signal.SIGKILL
  assert all_end(pids)


def test_no_child_starts_under_a_parent_that_is_dead():
  wrapper = local_process.with_parent()
  own = wrapper.index(str(os.getpid()))
  done = subprocess.run([*wrapper[:own], "1", *wrapper[own + 1 :], "touch", "started"])
  assert (done.returncode, Path("started").exists()) == (0, False)
  done = subprocess.run([*wrapper, "touch", "started"])
  assert (done.returncode, Path("started").exists()) == (0, True)


def test_a_lost_reader_ends_nothing(parent):
  read, write = os.pipe()
  one = parent("here(); await_mark('go'); print('x' * 99999, flush=True); print('y')", stdout=write)
  os.close(write)
  pids = one.pids("worker-0", "worker-1")
  os.close(read)
  Path("go").touch()
  assert one.end() == (0, None, "")
  assert all_end(pids)


def test_what_a_child_has_started_dies_with_it(run):
  body = """
if me == "worker-1":
  grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
  mark("grandchild", grandchild.pid)
here()
"""
  assert run(body) == (0, "", "")
  assert all_end([int(Path("grandchild").read_text())])


SPEAK = r"""
print("a result of", me)
print("progress of", me, file=sys.stderr)
for line in (
  "WARNING:tensorflow:w1",
  "ERROR:absl:e1",
  "W1121 12:00:00.123456 1234 file.py:12] w2",
  "I1121 12:00:00.123456 1234 file.py:12] i1",
  "E0000 00:00:1795262865.496153    2092 file.cc:466] e2",
  "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
  "2025-11-21 12:00:00.123456: E tensorflow/core/file.cc:1] e3",
  "2025-11-21 12:00:00.123456: I tensorflow/core/file.cc:1] i2",
  "/a/file.py:12: UserWarning: w3",
):
  if me == "worker-1": print(line)
sys.stdout.write("no end")
"""


def test_what_is_shown_and_what_is_kept(run):
  status, out, err = run(SPEAK)
  assert (status, out) == (0, "a result of worker-0\nno end\n")
  own = "progress of worker-0"
  others = [line for line in err.splitlines() if line != own]
  assert len(others) == len(err.splitlines()) - 1
  assert others == [
    "[worker-1] WARNING:tensorflow:w1",
    "[worker-1] ERROR:absl:e1",
    "[worker-1] W1121 12:00:00.123456 1234 file.py:12] w2",
    "[worker-1] E0000 00:00:1795262865.496153    2092 file.cc:466] e2",
    "[worker-1] 2025-11-21 12:00:00.123456: E tensorflow/core/file.cc:1] e3",
    "[worker-1] /a/file.py:12: UserWarning: w3",
  ]
  header, *lines = Path("m/logs/worker-1.log").read_text().splitlines()
  config = re.escape('{"cluster": {"worker": ["127.0.0.1:')
  pattern = rf"=== \d{{4}}-\d\d-\d\dT[\d:]+[+-]\d\d:\d\d worker-1: TF_CONFIG='{config}.*child\.py"
  assert re.fullmatch(pattern, header)
  assert lines[:2] == ["a result of worker-1", "progress of worker-1"]
  assert (len(lines), lines[-1]) == (12, "no end")
  chief = Path("m/logs/worker-0.log").read_text().splitlines()[1:]
  assert sorted(chief) == ["a result of worker-0", "no end", own]


def test_logs_are_appended_to(run):
  for number in (1, 2):
    assert run(f"print('run', {number})", workers=1) == (0, f"run {number}\n", "")
  lines = Path("m/logs/worker-0.log").read_text().splitlines()
  assert [line for line in lines if line[:3] != "==="] == ["run 1", "run 2"]
  assert len(headers("worker-0")) == 2


def test_bytes_that_are_no_text_are_kept(run):
  body = r"if me == 'worker-1': sys.stdout.buffer.write(b'\xff\n'); die(3)"
  status, _, err = run(body)
  assert (status, err) == (1, "[worker-1] \ufffd\n" + FAILED.format("ended with status 3"))
  assert Path("m/logs/worker-1.log").read_bytes().endswith(b"\n\xff\n")


def test_much_output_is_kept_whole(run):
  status, out, _ = run("print('x' * 999 + '\\n' * 1, end='', flush=True)\n" * 300, workers=1)
  assert (status, len(out), set(out)) == (0, 300_000, {"x", "\n"})


def test_nothing_of_ours_is_left_in_the_process(run):
  numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  before = [signal.getsignal(number) for number in numbers]
  descriptors = sorted(os.listdir("/proc/self/fd"))
  assert run(FAIL_TWICE, max_restarts=2)[0] == 0
  assert [signal.getsignal(number) for number in numbers] == before
  assert signal.set_wakeup_fd(-1) == -1
  assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_each_start_has_a_secret_of_its_own(run, monkeypatch):
  """It replaces one of the environment, which may be of another cluster."""
  monkeypatch.setenv(wire.SECRET_FILE, "/no/file")
  body = f"""
number = times(f"starts.{{me}}")
mark(f"secret.{{me}}.{{number}}", os.environ[{wire.SECRET!r}])
assert {wire.SECRET_FILE!r} not in os.environ
await_mark(*[f"secret.{{name}}.{{number}}" for name in everyone])
die(number == 1)
"""
  assert run(body, max_restarts=1)[0] == 0
  first, second = ([Path(f"secret.worker-{i}.{n}").read_text() for i in (0, 1)] for n in (1, 2))
  assert first[0] == first[1] != second[0] == second[1]
  assert len(wire.secret({wire.SECRET: first[0]})) == 64
  assert first[0] not in Path("m/logs/worker-0.log").read_text()


LOOPBACK = """
with open("/proc/net/dev") as file:
  mark(f"interfaces.{me}", [line.split(":")[0].strip() for line in file if ":" in line])
listener = socket.create_server(("127.0.0.1", 0)) if me == "worker-0" else None
if listener:
  mark("port", listener.getsockname()[1])
  listener.accept()
else:
  await_mark("port")
  socket.create_connection(("127.0.0.1", int(Path("port").read_text())))
mark(f"ids.{me}", [os.getuid(), os.getgid()])
"""


def test_the_processes_have_a_network_of_their_own(run, monkeypatch):
  monkeypatch.delenv(private_network.NETWORK)
  status, _, err = run(LOOPBACK)
  assert status == 0
  if err.startswith("WARNING: cannot make a private network"):
    pytest.skip(err)
  assert err == (
    "network: only loopback, in private; for downloads or trackers set "
    "LOOPWRIGHT_LOCAL_NETWORK=shared\n"
  )
  assert Path("interfaces.worker-0").read_text() == Path("interfaces.worker-1").read_text()
  assert "lo" in Path("interfaces.worker-0").read_text()
  assert "eth" not in Path("interfaces.worker-0").read_text()
  assert Path("ids.worker-1").read_text() == str([os.getuid(), os.getgid()])
  assert Path("port").stat().st_uid == os.getuid()


def test_a_private_network_that_cannot_be_made_is_one_line(run, monkeypatch):
  monkeypatch.delenv(private_network.NETWORK)
  monkeypatch.setattr(private_network, "_HOLD", "print('no Operation not permitted')")
  assert run("here()") == (
    0, "",
    "WARNING: cannot make a private network (Operation not permitted): TensorFlow's servers run "
    "what anyone sends who reaches this machine; close its ports by a firewall\n",
  )  # fmt: skip


def test_an_unknown_network(monkeypatch):
  monkeypatch.setenv(private_network.NETWORK, "privat")
  line = "unknown LOOPWRIGHT_LOCAL_NETWORK 'privat'; it must be one of private, shared."
  with pytest.raises(ConfigError, match=line):
    run_local(command=["true"], model_dir="m", workers=1)


def test_a_folder_that_cannot_hold_logs():
  with pytest.raises(ConfigError) as caught:
    run_local(command=["true"], model_dir="gs://bucket/x", workers=1)
  assert str(caught.value) == (
    "model_dir is 'gs://bucket/x', but a local cluster writes its logs there: give a folder on "
    "disk."
  )
  Path("file").touch()
  with pytest.raises(ConfigError) as caught:
    run_local(command=["true"], model_dir="file", workers=1)
  assert str(caught.value) == (
    "cannot make the folder 'file/logs' for the logs of the local cluster (Not a directory); "
    "set --model_dir to a folder that you can write to."
  )


def test_not_on_linux(monkeypatch):
  monkeypatch.delattr(os, "pidfd_open")
  with pytest.raises(ConfigError) as caught:
    run_local(command=["true"], model_dir="m", workers=1)
  assert str(caught.value) == "a local cluster needs Linux; leave out --local_workers."
  assert not Path("m").exists()


def test_the_parent_does_not_import_tensorflow():
  code = "import sys, loopwright.tools.local_cluster; sys.exit('tensorflow' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---- If the number of workers varies ----

SIZES = """
hosts = config["cluster"]["worker"]
size, attempt = len(hosts), hosts[0].rpartition(":")[2]
if me == "worker-0":
  with open("sizes", "a") as file: file.write(f"{size} ")

def saved(step):
  os.makedirs("m/checkpoints", exist_ok=True)
  mark(f"m/checkpoints/ckpt-{step}.index")

on(signal.SIGTERM, lambda: die(75))
mark(f"here.{attempt}.{me}")
await_mark(*[f"here.{attempt}.worker-{i}" for i in range(size)])
starts = len(Path("sizes").read_text().split())
"""
KILLED = "worker-1 was killed by SIGKILL after N s"
GROWS = "growing to 3 workers: all save at the end of this loop\n"
ON_WITH_2 = f"{KILLED}; going on with 2 workers\n"
LATE = "worker-0 did not end within 0.5 s of SIGTERM after N s"
# what each process runs, options, the status, what is shown of it, the numbers of workers
VARYING = {
  "a lost worker comes back": (
    "if starts == 1 and me == 'worker-1': die(-9)\nif starts == 2 and me == 'worker-0': saved(1)\n"
    "if starts < 3: forever()", {"workers": 3, "least": 2, "rest_s": 0.0}, 0, ON_WITH_2 + GROWS,
    "3 2 3 ",
  ),
  "fewer than the least are a failure": (  # no checkpoint: nobody comes back
    "if me == 'worker-1': die(-9)\nforever()", {"workers": 3, "least": 2, "rest_s": 0.0}, 1,
    f"{ON_WITH_2}failed: {KILLED}, and 1 worker can start, of at least 2; its log is "
    "m/logs/worker-1.log\n", "3 2 ",
  ),
  "a program that fails loses no worker": (
    "if me == 'worker-1': sys.exit('Boom')\nforever()", {"workers": 3, "least": 1}, 1,
    "[worker-1] Boom\n" + FAILED.format("ended with status 1"), "3 ",
  ),
  "a worker that does not save for growth is lost": (
    "if starts == 1 and me == 'worker-1': die(-9)\n"
    "if starts == 2 and me == 'worker-0': signal.signal(signal.SIGTERM, signal.SIG_IGN); saved(1)\n"
    "if starts < 3: forever()", {"workers": 3, "least": 1, "rest_s": 0.0, "grace_s": 0.5}, 0,
    f"{ON_WITH_2}{GROWS}{LATE}; going on with 2 workers\n", "3 2 2 ",
  ),
  **{
    f"a worker that others miss: {lost[8:14]}": (
      f"if size == 2 and me == 'worker-0': sys.exit({lost!r})\nif size == 2: forever()",
      {"least": 1, "rest_s": 99.0}, 0,
      f"{lost}\nworker-0 ended with status 1 after N s; going on with 1 worker\n", "2 1 ",
    )
    for lost in (
      "failed: lost worker-1 (127.0.0.1:1), which stopped answering, after step 3",
      "failed: worker-1 (127.0.0.1:1) did not connect within 20 s",
    )
  },
}  # fmt: skip


@pytest.mark.parametrize(
  "name",
  [
    "a lost worker comes back",
    *(pytest.param(name, marks=pytest.mark.ci) for name in list(VARYING)[1:]),
  ],
)
def test_how_a_run_of_varying_size_goes_on(name, run):
  body, options, status, line, sizes = VARYING[name]
  assert run(f"{SIZES}\n{body}\n", **options) == (status, "", line)
  assert Path("sizes").read_text() == sizes


@pytest.mark.ci
def test_two_are_lost_at_once(parent):
  one = parent(
    f"{SIZES}mark(f'pid.{{size}}.{{me}}', os.getpid())\nif size == 4: forever()",
    workers=4, least=2, rest_s=99.0,
  )  # fmt: skip
  one.wait_for(*[f"pid.4.worker-{i}" for i in range(4)])
  one.send(signal.SIGSTOP)
  for index in (1, 3):
    pid = int(Path(f"pid.4.worker-{index}").read_text())
    os.kill(pid, signal.SIGKILL)
    all_end([pid])
  one.send(signal.SIGCONT)
  assert one.end() == (0, "", f"{KILLED}; going on with 2 workers\n")
  assert Path("sizes").read_text() == "4 2 "


@pytest.mark.ci
def test_a_restart_with_fewer_than_the_least_uses_all_places(run):
  body = f"{SIZES}\nif starts == 2: sys.exit()\nif me == 'worker-1': die(-9)\nforever()"
  status, out, err = run(body, workers=2, least=1, rest_s=99.0, max_restarts=1)
  assert (status, out, err) == (0, "", f"{KILLED}; going on with 1 worker\n")
  body = f"{SIZES}\nif starts == 5: sys.exit()\nif me == 'worker-0': die(-9)\nforever()"
  status, out, err = run(body, workers=2, least=1, rest_s=99.0, max_restarts=1)
  killed = KILLED.replace("-1", "-0")
  assert (status, out) == (0, "")
  assert err == (
    f"{killed}; going on with 1 worker\n{killed}; restarting all processes, attempt 1 of 1\n"
  )
  assert Path("sizes").read_text() == "2 1 2 1 2 "


@pytest.mark.ci
def test_workers_that_are_all_stopped_are_killed(run):
  """None is left to miss another; a single one is for the others to judge."""
  body = """
first = not os.path.exists(f"pid.{me}")
here()
if not first: sys.exit()
if me == "worker-1": os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(2.5)
mark("waited")
os.kill(os.getpid(), signal.SIGSTOP)
"""
  status, out, err = run(body, max_restarts=1, stopped_s=0.1)
  stopped = r"worker-[01] had been stopped for 0\.1 s, with all others, and was killed after N s"
  assert (status, out) == (0, "")
  assert re.fullmatch(rf"{stopped}; restarting all processes, attempt 1 of 1\n", err)
  assert os.path.exists("waited")


@pytest.mark.ci
def test_the_first_processes_know_when_the_cluster_began(run):
  body = "\nmark(f'{me}.' + str(times('starts')), os.environ.get('LOOPWRIGHT_BEGAN', ''))\n"
  before = time.time() - legs.age_s()
  run(f"{body}sys.exit(1)", workers=1, max_restarts=1)
  assert abs(float(Path("worker-0.1").read_text()) - before) < 0.1
  assert Path("worker-0.2").read_text() == ""


@pytest.mark.ci
def test_a_signal_while_the_run_grows_ends_it(parent):
  one = parent(
    f"""{SIZES}
on(signal.SIGTERM, lambda: (mark(f"asked.{{me}}"), await_mark("go"), die(75)))
if size == 3 and me == "worker-1": die(-9)
if size == 2 and me == "worker-0": saved(1)
forever()
""",
    workers=3, least=2, rest_s=0.0,
  )  # fmt: skip
  for worker in range(2):
    one.wait_for(f"asked.worker-{worker}")
  one.send(signal.SIGTERM)
  time.sleep(0.3)
  Path("go").touch()
  assert one.end() == (75, "", f"{KILLED}; going on with 2 workers\n{GROWS}")
  assert Path("sizes").read_text() == "3 2 "


@pytest.mark.ci
def test_the_copies_in_memory_go_with_the_cluster(run, parent):
  body = f"{SIZES}\nmark(f'at.{{me}}', os.environ['LOOPWRIGHT_SNAPSHOTS'])\n"
  assert run(body, least=1) == (0, "", "")
  folder = Path("at.worker-0").read_text()
  assert re.fullmatch(r"/dev/shm/loopwright-\w+", folder)
  assert (Path("at.worker-1").read_text(), os.path.exists(folder)) == (folder, False)
  os.remove("at.worker-0")
  one = parent(f"{body}Path(os.environ['LOOPWRIGHT_SNAPSHOTS'], 'x').touch(); forever()", least=1)
  one.wait_for("at.worker-0")
  folder = Path("at.worker-0").read_text()
  assert os.path.isdir(folder)
  one.send(signal.SIGKILL)
  until = time.monotonic() + 10
  while os.path.exists(folder):
    assert time.monotonic() < until
    time.sleep(0.005)


COPIES = f"""{SIZES}
memory = Path(os.environ["LOOPWRIGHT_SNAPSHOTS"])
folder = memory / "checkpoints"
folder.mkdir(exist_ok=True)
for name in ("ckpt-7.data-00000-of-00001", "ckpt-7.index", "ckpt-8.data-00000-of-00001"):
  mark(folder / name, name)
mark(memory / "starts", "first\\nmine\\n")
mark("m/history.jsonl", json.dumps({{"start": "mine"}}) + "\\n")
saved(6)
"""


@pytest.mark.ci
def test_a_newer_copy_in_memory_outlives_a_run_that_fails(run):
  """As after a SIGTERM that comes before the processes can save."""
  status, _, err = run(f"{COPIES}die(1)", workers=2, least=1)
  assert (status, err.splitlines()[-1]) == (
    1,
    "saved the copy in memory of step 7 to m/checkpoints",
  )
  files = {path.name: path.read_text() for path in Path("m/checkpoints").iterdir()}
  kept = {name: name for name in ("ckpt-7.data-00000-of-00001", "ckpt-7.index")}
  assert files == {"ckpt-6.index": "", **kept}
  Path("m/checkpoints/ckpt-7.index").write_text("as new")
  run(f"{COPIES}die(1)", workers=2, least=1)
  assert Path("m/checkpoints/ckpt-7.index").read_text() == "as new"


@pytest.mark.ci
@pytest.mark.parametrize(
  ("meanwhile", "left"),
  [
    ("shutil.rmtree('m')", []),
    ("shutil.rmtree('m'); Path('m').mkdir()", []),
    (
      "Path('m/history.jsonl').write_text(json.dumps({'start': 'other'}))",
      ["checkpoints/ckpt-6.index", "history.jsonl"],
    ),
  ],
)
def test_a_copy_in_memory_does_not_go_to_another_run(parent, meanwhile, left):
  """Nor to a folder that was removed, which would be there again."""
  body = f"{COPIES}import shutil\nif me == 'worker-0':\n  {meanwhile}\ndie(1)"
  status, _, err = parent(body, workers=1, least=0).end()
  line = f"the copy in memory of step 7 is not saved to m: {MOVED}"
  assert (status, err.splitlines()[-1]) == (1, line)
  files = (str(path.relative_to("m")) for path in Path("m").rglob("*") if path.is_file())
  assert sorted(each for each in files if not each.startswith("logs")) == left


def test_a_copy_in_memory_does_not_go_where_another_process_trains(tmp_path, capsys):
  for name in ("copies/checkpoints/ckpt-7.index", "copies/starts", "m/owner.json"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
  (tmp_path / "m/history.jsonl").write_text('{"start": "mine"}\n')
  with open(tmp_path / "m/owner.json") as owner:
    fcntl.flock(owner, fcntl.LOCK_EX)
    shared_memory.keep_on_disk(str(tmp_path / "copies"), str(tmp_path / "m"))
    assert "is not saved to" in (told := capsys.readouterr().err)
    assert told.endswith("m: another process trains there\n")
    assert not (tmp_path / "m/checkpoints").exists()
  shared_memory.keep_on_disk(str(tmp_path / "copies"), str(tmp_path / "m"))
  assert (tmp_path / "m/checkpoints/ckpt-7.index").read_text() == "mine"


def kids(pid):
  return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.ci
def test_the_copies_go_although_their_remover_was_ended(parent):
  """As by a SIGTERM to each process of a job."""
  one = parent(f"{SIZES}\nmark(f'at.{{me}}', os.environ['LOOPWRIGHT_SNAPSHOTS'])", least=1)
  one.wait_for("at.worker-0")
  folder = Path("at.worker-0").read_text()
  one.end()
  assert not os.path.exists(folder)
  with shared_memory.folder() as made:
    for number in (signal.SIGTERM, signal.SIGKILL):
      for pid in kids(os.getpid()):
        os.kill(pid, number)
      assert os.path.isdir(made)
  assert not os.path.exists(made)


def test_copies_that_nobody_locks_are_removed_by_the_next_cluster(tmp_path, monkeypatch):
  monkeypatch.setattr(shared_memory, "_IN_MEMORY", str(tmp_path))
  with shared_memory.folder() as used:
    os.mkdir(tmp_path / "loopwright-old")
    os.mkdir(tmp_path / "another")
    with shared_memory.folder():
      assert (tmp_path / "loopwright-old").exists()  # it is new
    monkeypatch.setattr(shared_memory, "_ABANDONED_S", -1.0)
    with shared_memory.folder() as made:
      there = {str(path) for path in tmp_path.iterdir()}
      assert there == {used, made, str(tmp_path / "another")}


def test_places_rest_longer_after_each_loss_and_until_there_is_a_newer_checkpoint():
  places = elastic.Places(least=1, most=4, rest_s=10.0)
  places.lose(1, now_s=0.0, step=7)
  places.lose(2, now_s=1.0, step=7)
  assert (places.free, str(places)) == (1, "1:4")
  assert [places.returned(now_s=now, step=8) for now in (9.9, 10.0, 20.9, 21.0)] == [0, 1, 0, 2]
  assert (places.free, places.missing) == (4, False)
  places.lose(1, now_s=100.0, step=8)
  assert [places.returned(now_s=now, step=9) for now in (139.9, 140.0)] == [0, 1]
  places.lose(1, now_s=200.0, step=9)
  assert (places.returned(now_s=9e9, step=9), places.free) == (0, 3)
  places.use_all()
  assert (places.free, places.missing) == (4, False)


FORKED = """
told = [sys.argv, "loopwright.runs.runner" in sys.modules, os.getppid()]
told.append(os.getsid(0) == os.getpid())
mark(f"told.{me}.{size}", json.dumps(told + [dict(os.environ)["TF_CONFIG"] == json.dumps(config)]))
print("out", me)
print("err", me, file=sys.stderr)
mark(f"pid.{me}", os.getpid())
"""


@pytest.mark.whole
def test_workers_that_are_forked_are_like_those_that_are_started(run):
  body = f"{SIZES}{FORKED}if starts == 1:\n  die(-9) if me == 'worker-1' else forever()"
  status, out, err = run(
    body, workers=3, least=2, rest_s=99.0, imports=True, python=[sys.executable]
  )
  assert (status, out) == (0, "out worker-0\nout worker-0\n")
  assert err == f"err worker-0\n{KILLED}; going on with 2 workers\nerr worker-0\n"
  for name in ("worker-0.3", "worker-2.3", "worker-0.2", "worker-1.2"):
    assert told(name) == [["child.py"], True, os.getpid(), True, True]
  assert "out worker-1\nerr worker-1\n" in Path("m/logs/worker-1.log").read_text()


@pytest.mark.whole
def test_no_fork_survives_kill_9_of_the_parent(parent):
  one = parent(
    f"{SIZES}{FORKED}forever()", least=1, imports=True, command=[sys.executable, "child.py"]
  )
  pids = one.pids("worker-0", "worker-1")
  one.send(signal.SIGKILL)
  assert one.popen.wait(10) == -signal.SIGKILL
  assert all_end(pids)


@pytest.mark.whole
def test_a_run_goes_on_if_the_process_that_forks_its_workers_is_stopped(parent):
  """Its processes start themselves then, and signals still end them."""
  one = parent(
    f"{SIZES}{FORKED}if starts == 1:\n  die(-9) if me == 'worker-1' else forever()\n"
    "mark(f'again.{me}', ''); on(signal.SIGTERM, lambda: die(75)); forever()",
    least=1, rest_s=99.0, imports=True, command=[sys.executable, "child.py"],
    constants=(
      "import os\nfrom loopwright.tools import standby\nstandby._ANSWERS_S = 0.5\n"
      "spawn, told = standby.Standby.spawn, []\n"
      "def stops(self, *args, **more):\n"
      "  told.append(self)\n"
      "  if len(told) == 3:\n"
      "    os.kill(self._popen.pid, signal.SIGSTOP)\n"
      "  return spawn(self, *args, **more)\n"
      "standby.Standby.spawn = stops"
    ),
  )  # fmt: skip
  one.wait_for("again.worker-0")
  assert told("worker-0.1")[1] is False  # not forked
  one.send(signal.SIGTERM)
  assert one.end()[0] == 75
