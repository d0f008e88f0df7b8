"""The local cluster: tiny children in the place of launch.py, and no TensorFlow."""

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
from loopwright.host.children import with_parent
from loopwright.tools import local_cluster
from loopwright.tools.local_cluster import LocalCluster

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


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("TF_CONFIG", raising=False)


def child(body):
  Path("child.py").write_text(PRELUDE + body)
  return [sys.executable, "-S", "child.py"]


@pytest.fixture
def run(capsys):
  """Runs children in a cluster; returns the status and what was shown, seconds as "N"."""

  def run(body, *, workers=2, **options):
    options = {"workers": workers, "least": workers, **options}
    status = LocalCluster(command=child(body), model_dir="m", **options).run()
    out, err = capsys.readouterr()
    return status, out, re.sub(SECONDS, "after N s", err)

  return run


class Parent:
  """Runs children in a cluster of another process, which is to get signals."""

  def __init__(self, body, *, stdout=subprocess.PIPE, **options):
    options = {"workers": 2, "least": options.get("workers", 2), **options}
    arguments = {"command": child(body), "model_dir": "m", **options}
    code = (
      "import json, signal, sys\n"
      "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
      "from loopwright.tools.local_cluster import LocalCluster\n"
      "sys.exit(LocalCluster(**json.loads(sys.argv[1])).run())"
    )
    self.popen = subprocess.Popen(
      [sys.executable, "-c", code, json.dumps(arguments)],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdout=stdout,
      stderr=subprocess.PIPE,
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
    (-9, 1, FAILED.format("was killed by SIGKILL")),
    (-11, 1, FAILED.format("was killed by SIGSEGV")),
    (2, 2, ""),
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
  assert one.end() == (130, "", "interrupted\n")
  assert all_end(pids)


def test_no_child_survives_kill_9_of_the_parent(parent):
  one = parent("here(); forever()", workers=2, ps=1)
  pids = one.pids("chief-0", "worker-0", "worker-1", "ps-0")
  one.send(signal.SIGKILL)
  assert one.popen.wait(10) == -signal.SIGKILL
  assert all_end(pids)


def test_no_child_starts_under_a_parent_that_is_dead():
  wrapper = with_parent()
  own = wrapper.index(str(os.getpid()))
  done = subprocess.run([*wrapper[:own], "1", *wrapper[own + 1 :], "touch", "started"])
  assert (done.returncode, Path("started").exists()) == (0, False)
  done = subprocess.run([*wrapper, "touch", "started"])
  assert (done.returncode, Path("started").exists()) == (0, True)


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


def test_nothing_of_ours_is_left_in_the_process(run):
  numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  before = [signal.getsignal(number) for number in numbers]
  descriptors = sorted(os.listdir("/proc/self/fd"))
  assert run(FAIL_TWICE, max_restarts=2)[0] == 0
  assert [signal.getsignal(number) for number in numbers] == before
  assert signal.set_wakeup_fd(-1) == -1
  assert sorted(os.listdir("/proc/self/fd")) == descriptors


def one(model_dir):
  LocalCluster(command=["true"], model_dir=model_dir, workers=1, least=1).run()


def test_a_folder_that_cannot_hold_logs():
  with pytest.raises(ConfigError) as caught:
    one(model_dir="gs://bucket/x")
  assert str(caught.value) == (
    "model_dir is 'gs://bucket/x', but a local cluster writes its logs there: give a folder on "
    "disk."
  )
  Path("file").touch()
  with pytest.raises(ConfigError) as caught:
    one(model_dir="file")
  assert str(caught.value) == (
    "cannot make the folder 'file/logs' for the logs of the local cluster (Not a directory); "
    "set --model_dir to a folder that you can write to."
  )


def test_not_on_linux(monkeypatch):
  monkeypatch.setattr(sys, "platform", "darwin")
  with pytest.raises(ConfigError) as caught:
    one(model_dir="m")
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
ON_WITH_2 = f"{KILLED}; going on with 2 of 3 workers\n"
# what each process runs, options, the status, what is shown of it, the numbers of workers
VARYING = {
  "a lost worker comes back": (
    "if starts == 1 and me == 'worker-1': die(-9)\nif starts == 2 and me == 'worker-0': saved(1)\n"
    "if starts < 3: forever()", {"workers": 3, "least": 2, "rest_s": 0.0}, 0, ON_WITH_2 + GROWS,
    "3 2 3 ",
  ),
  "fewer than the least are a failure": (  # no checkpoint: nobody comes back
    "if me == 'worker-1': die(-9)\nforever()", {"workers": 3, "least": 2, "rest_s": 0.0}, 1,
    f"{ON_WITH_2}failed: {KILLED}; its log is m/logs/worker-1.log\n", "3 2 ",
  ),
  "a program that fails loses no worker": (
    "if me == 'worker-1': sys.exit('Boom')\nforever()", {"workers": 3, "least": 1}, 1,
    "[worker-1] Boom\n" + FAILED.format("ended with status 1"), "3 ",
  ),
  **{
    f"a worker that others miss: {lost[8:14]}": (
      f"if size == 2 and me == 'worker-0': sys.exit({lost!r})\nif size == 2: forever()",
      {"least": 1, "rest_s": 99.0}, 0,
      f"{lost}\nworker-0 ended with status 1 after N s; going on with 1 of 2 workers\n", "2 1 ",
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
def test_a_restart_with_fewer_than_the_least_uses_all_places(run):
  body = f"{SIZES}\nif starts == 2: sys.exit()\nif me == 'worker-1': die(-9)\nforever()"
  status, out, err = run(body, workers=2, least=1, rest_s=99.0, max_restarts=1)
  assert (status, out, err) == (0, "", f"{KILLED}; going on with 1 of 2 workers\n")
  body = f"{SIZES}\nif starts == 5: sys.exit()\nif me == 'worker-0': die(-9)\nforever()"
  status, out, err = run(body, workers=2, least=1, rest_s=99.0, max_restarts=1)
  killed = KILLED.replace("-1", "-0")
  assert (status, out) == (0, "")
  assert err == (
    f"{killed}; going on with 1 of 2 workers\n{killed}; restarting all processes, attempt 1 of 1\n"
  )
  assert Path("sizes").read_text() == "2 1 2 1 2 "


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
  assert one.end() == (75, "", f"{ON_WITH_2}{GROWS}")
  assert Path("sizes").read_text() == "3 2 "
