"""Do the tests bite? Which small mistakes in the heart of the framework no fast test notices.

  python -m benchmarks.mutants                                # half an hour or more on two cores
  python -m benchmarks.mutants --files framework/loopwright/metrics/sums.py   # one file
  python -m benchmarks.mutants --again results.json           # but what an earlier run has killed
  python -m benchmarks.mutants --seed 1                       # other mutants

Each mutant is a module with one change (benchmarks/mutations.py), in a copy of the tree. It runs in
a process that is forked after TensorFlow and Keras were imported, so that it starts at once, and
ends at the first test that fails:

  1. First all tests run once on the code as it is, a file at a time, and `coverage` notes which
     lines each test runs. What fails here is left out, and said. The notes are kept in `--notes`.
  2. A mutant runs the tests that run the changed lines, those of the file that runs most of the
     module first. Lines that run at import alone count as run by every test of that file.
  3. What survives runs all files of which any test runs the lines, then `--last`, whose tests run
     the framework in other processes, where `coverage` does not look.

A mutant that takes several times as long as the tests took in step 1 is stopped and counts as
killed, by time. Known equivalent mutants (benchmarks/mutants_equivalent.txt) do not run.
Exit status 1 if fewer than 90 % of the others are killed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

from benchmarks.mutations import Mutant, sample

ROOT = Path(__file__).resolve().parents[1]
QUOTAS = {
  "framework/loopwright/step.py": 18,
  "framework/loopwright/engine/eval_step.py": 6,
  "framework/loopwright/engine/step_parts.py": 6,
  "framework/loopwright/evaluator.py": 16,
  "framework/loopwright/metrics/sums.py": 14,
  "framework/loopwright/metrics/values.py": 8,
  "framework/loopwright/metrics/checks.py": 6,
  "framework/loopwright/inputs/datasets.py": 22,
  "framework/loopwright/inputs/plan.py": 10,
  "framework/loopwright/inputs/streams.py": 4,
  "framework/loopwright/inputs/ordering.py": 26,
  "framework/loopwright/optimizers/adapters.py": 34,
  "framework/loopwright/optimizers/ema.py": 16,
  "framework/loopwright/optimizers/fusion.py": 32,
  "framework/loopwright/optimizers/loss_scale.py": 28,
  "framework/loopwright/optimizers/updates.py": 8,
  "framework/loopwright/run_folder/checkpoint_files.py": 6,
  "framework/loopwright/run_folder/checkpoints.py": 34,
  "framework/loopwright/distribution/proof.py": 12,
  "framework/loopwright/distribution/reduction.py": 16,
}
EQUIVALENT = ROOT / "benchmarks" / "mutants_equivalent.txt"
WARM = ("numpy", "keras", "tensorflow", "tf_keras", "orbit", "gin", "sklearn.datasets", "h5py")
"""Imported before the first fork. None of them touches a device, and none is of the framework."""
WANTED = 0.9
LIMIT = 5  # times what the tests took on the code as it is
_BASIC = ["-q", "-p", "no:cacheprovider", "-n", "0"]
_POLL_S = 0.02
_NOT_COPIED = (".git", ".venv", ".*_cache", "*.egg-info", "__pycache__", "runs", "build", "dist")


@dataclasses.dataclass(frozen=True)
class Result:
  """A mutant's verdict: killed, timeout, survived or equivalent; `by`: the test that noticed."""

  mutant: Mutant
  verdict: str
  by: str = ""
  seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
  """Makes and runs the mutants; prints the table and the survivors."""
  options = _parse(arguments)
  mutants = list(_chosen(options))
  with tempfile.TemporaryDirectory(prefix="mutants") as scratch:
    pool = Pool(Path(options.root), Path(scratch), options.processes)
    notes = take_notes(pool, options)
    known = read_equivalents(Path(options.equivalent))
    results = [Result(m, "equivalent") for m in mutants if m.key in known]
    results += _killed_before(options.again, notes, [m for m in mutants if m.key not in known])
    decided = {result.mutant for result in results}

    def tell(result: Result) -> None:
      results.append(result)
      mutant, by = result.mutant, f" by {result.by}" if result.by else ""
      where = f"{mutant.file}:{mutant.line} {mutant.operator}"
      _say(f"{len(results)}/{len(mutants)} {where}: {result.verdict}{by}, {result.seconds:.0f} s")
      _write(Path(options.out), results)

    for mutant in mutants:
      if mutant not in decided:
        _next(pool, mutant, stages(notes, mutant, options.patience_s), tell)
    pool.wait()
  print(table(results))
  for result in results:
    if result.verdict == "survived":
      print(f"\n{result.mutant.file}:{result.mutant.line}  {result.mutant.operator}")
      print(f"- {result.mutant.before}\n+ {result.mutant.after}")
  return 0 if score(results) >= WANTED else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--files", nargs="*", default=list(QUOTAS), help="modules to change")
  parser.add_argument("--quota", type=int, help="mutants of each file, in place of QUOTAS")
  parser.add_argument("--seed", type=int, default=0, help="which mutants")
  parser.add_argument("--tests", nargs="*", default=["tests/unit"], help="what pytest collects")
  parser.add_argument(
    "--last",
    nargs="*",
    default=["tests/conformance"],
    help="for what survives: arguments of pytest",
  )
  parser.add_argument("--patience_s", type=float, default=60.0, help="beyond LIMIT x the usual")
  parser.add_argument("--processes", type=int, default=2)
  parser.add_argument("--again", help="an earlier --out: what it killed stays killed")
  parser.add_argument("--out", default="runs/mutants/results.json")
  parser.add_argument("--notes", default="runs/mutants/notes.json")
  parser.add_argument("--root", default=str(ROOT))
  parser.add_argument("--equivalent", default=str(EQUIVALENT))
  parser.add_argument(
    "--warm", nargs="*", default=list(WARM), help="imported before the first fork"
  )
  options = parser.parse_args(arguments)
  for name in options.warm:
    importlib.import_module(name)
  return options


def _chosen(options: argparse.Namespace) -> Iterator[Mutant]:
  for file in options.files:
    source = (Path(options.root) / file).read_text()
    yield from sample(file, source, options.quota or QUOTAS.get(file, 30), options.seed)


def _killed_before(path: str | None, notes: Notes, mutants: Sequence[Mutant]) -> list[Result]:
  """Returns what an earlier run says of these mutants, if a test of today killed them.

  A line that occurs twice is tried again, as nothing tells the two apart when lines move.
  """
  rows = json.loads(Path(path).read_text()) if path else []
  killed = {tuple(row["key"]): row for row in rows if row["by"] in notes.seconds}
  times = collections.Counter([m.key for m in mutants])
  found = [(m, killed[m.key]) for m in mutants if m.key in killed and times[m.key] == 1]
  return [Result(mutant, row["verdict"], row["by"], row["seconds"]) for mutant, row in found]


# ---- Processes ----


@dataclasses.dataclass
class _Running:
  pid: int
  tree: Path
  log: Path
  began: float
  limit_s: float
  done: Callable[[int, float, Path], None]


class Pool:
  """Runs pytest in forked processes, each with a copy of the tree of its own."""

  def __init__(self, root: Path, scratch: Path, processes: int) -> None:
    """Copies the tree once for each process."""
    self.root, self._scratch = root, scratch
    self._free: list[Path] = []
    for number in range(processes):
      self._free.append(self._copied(scratch / f"tree{number}"))
    self._running: list[_Running] = []
    self._waiting: collections.deque[tuple[Any, ...]] = collections.deque()

  def submit(
    self,
    arguments: Sequence[str],
    done: Callable[[int, float, Path], None],
    *,
    mutant: Mutant | None = None,
    plugin: Callable[[Path, Path], Any] | None = None,
    limit_s: float = 3600.0,
  ) -> None:
    """Queues a run of pytest; `done` gets its status (-9: too long), seconds and log."""
    self._waiting.append((list(arguments), done, mutant, plugin, limit_s))

  def wait(self) -> None:
    """Runs all that is queued, and what `done` queues meanwhile."""
    try:
      while self._waiting or self._running:
        while self._waiting and self._free:
          self._start(*self._waiting.popleft())
        time.sleep(_POLL_S)
        self._reap()
    finally:
      for each in self._running:
        _kill(each.pid)

  def _start(self, arguments, done, mutant, plugin, limit_s) -> None:
    tree = self._free.pop()
    log = self._scratch / f"{tree.name}.log"
    if mutant:
      (tree / mutant.file).write_text(mutant.source)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
      sys.dont_write_bytecode = mutant is not None
      _become_pytest(tree, log, arguments, plugin, self.root)
    self._running.append(
      _Running(pid, tree, log, time.monotonic(), limit_s, self._restoring(done, tree, mutant))
    )

  def _restoring(self, done, tree: Path, mutant: Mutant | None):
    def restore_and_tell(status: int, seconds: float, log: Path) -> None:
      if mutant:
        shutil.copyfile(self.root / mutant.file, tree / mutant.file)
      self._free.append(tree)
      done(status, seconds, log)

    return restore_and_tell

  def _reap(self) -> None:
    for each in list(self._running):
      seconds = time.monotonic() - each.began
      pid, status = os.waitpid(each.pid, os.WNOHANG)
      late = pid == 0 and seconds > each.limit_s
      if pid or late:
        _kill(each.pid)  # or what it left behind
        if late:
          os.waitpid(each.pid, 0)
        self._running.remove(each)
        each.done(-9 if late else status, seconds, each.log)

  def _copied(self, tree: Path) -> Path:
    if self._free:
      return Path(shutil.copytree(self._free[0], tree))
    shutil.copytree(self.root, tree, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    # By content: a mutant may be as long as the original, and written within the same second.
    compiling = ["-m", "compileall", "-q", "--invalidation-mode=checked-hash", str(tree)]
    subprocess.run([sys.executable, *compiling], check=True)
    return tree


def _kill(group: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(group, signal.SIGKILL)


def _become_pytest(tree: Path, log: Path, arguments: list[str], plugin: Any, root: Path) -> None:
  """Runs pytest in the copy, and ends (in the child, at once after the fork)."""
  status = 3
  try:
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(root)))]
    plugins = [_FirstFailure(log), *([plugin(tree, log)] if plugin else [])]
    status = int(pytest.main([*_BASIC, f"--basetemp={log}.tmp", *arguments], plugins=plugins))
    sys.stdout.flush()
    sys.stderr.flush()
  except BaseException:
    os.write(2, traceback.format_exc().encode())
  finally:
    os._exit(status)


class _FirstFailure:
  """Notes which test failed first, in a file beside the log."""

  def __init__(self, log: Path) -> None:
    self._path = Path(f"{log}.failed")
    self._path.unlink(missing_ok=True)

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.failed and not self._path.exists():
      self._path.write_text(report.nodeid)

  def pytest_collectreport(self, report: pytest.CollectReport) -> None:
    if report.failed and not self._path.exists():
      self._path.write_text(report.nodeid)


# ---- Notes: which test runs which line ----


@dataclasses.dataclass
class Notes:
  """What the tests did on the code as it is."""

  seconds: dict[str, float]
  """Test -> seconds, of those that passed."""
  runs: dict[str, dict[int, set[str]]]
  """Module -> line -> the tests that run it; a file's name where a wider fixture runs it."""
  last: Sequence[str]
  """What survives all these runs with these arguments,"""
  last_s: float
  """which took so long."""

  def of_lines(self, file: str, lines: Iterable[int]) -> set[str]:
    """Returns the tests that run any of a module's lines, and the files whose fixtures do."""
    found: set[str] = set()
    return found.union(*(self.runs.get(file, {}).get(line, ()) for line in lines))

  def passed(self, chosen: Iterable[str]) -> list[str]:
    """Returns the tests chosen, by name or by file, in the order in which they ran."""
    chosen = set(chosen)
    return [test for test in self.seconds if test in chosen or _file(test) in chosen]

  def specific_first(self, file: str, tests: Sequence[str]) -> list[str]:
    """Orders tests: those of the test file that runs most of the module first, quick ones first."""
    lines: collections.Counter[str] = collections.Counter()
    for by in self.runs.get(file, {}).values():
      lines.update({_file(test) for test in by})
    return sorted(tests, key=lambda test: (-lines[_file(test)], self.seconds[test]))


def _file(test: str) -> str:
  return test.partition("::")[0]


class _Notebook:
  """A plugin of pytest: writes which test runs which lines, and how long it takes."""

  def __init__(self, files: Sequence[str], tree: Path, log: Path) -> None:
    self._tree, self._path = tree, Path(f"{log}.notes")
    self._passed: dict[str, float] = {}
    self._failed: set[str] = set()
    include = [str(tree / file) for file in files]
    self._coverage = coverage.Coverage(data_file=None, config_file=False, include=include)
    self._coverage.start()

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> None:
    self._coverage.switch_context(item.nodeid)

  @pytest.hookimpl(wrapper=True)
  def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
    if fixturedef.scope == "function":
      return (yield)
    self._coverage.switch_context(_file(request.node.nodeid) or _file(_current()))
    try:
      return (yield)
    finally:
      self._coverage.switch_context(_current())

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.passed:
      self._passed[report.nodeid] = self._passed.get(report.nodeid, 0.0) + report.duration
    else:
      self._failed.add(report.nodeid)

  def pytest_sessionfinish(self) -> None:
    self._coverage.stop()
    data = self._coverage.get_data()
    runs = {
      str(Path(name).relative_to(self._tree)): {
        line: [test for test in by if test] for line, by in data.contexts_by_lineno(name).items()
      }
      for name in data.measured_files()
    }
    passed = {test: s for test, s in self._passed.items() if test not in self._failed}
    content = {"seconds": passed, "failed": sorted(self._failed), "runs": runs}
    self._path.write_text(json.dumps(content))


def _current() -> str:
  return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def take_notes(pool: Pool, options: argparse.Namespace) -> Notes:
  """Runs every test file once on the code as it is, and `--last`, but for what the kept notes know.

  They hold as long as neither the test file nor any of the modules to change changes.
  """
  path, modules = Path(options.notes), sorted({*QUOTAS, *options.files})
  kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
  taken: dict[str, Any] = {}
  files, last = _test_files(pool.root, options.tests), " ".join(options.last)

  def done(name: str, digest: str, tries: int, status: int, seconds: float, log: Path) -> None:
    notes = Path(f"{log}.notes")
    if not notes.exists() if name != last else status != 0:
      if not tries:
        raise RuntimeError(f"{name} gave status {status}:\n{log.read_text()[:5000]}")
      _say(f"{name} gave status {status}, once more")  # coverage is not proof against every thread
      submit(name, digest, tries - 1)
      return
    content = json.loads(notes.read_text()) if name != last else {"seconds": seconds}
    taken[name] = {"digest": digest, **content}
    notes.unlink(missing_ok=True)
    _say(f"noted {name}, {seconds:.0f} s")
    for test in content.get("failed", ()):
      _say(f"  left out, does not pass on the code as it is: {test}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**kept, **taken}))

  def submit(name: str, digest: str, tries: int) -> None:
    plugin = functools.partial(_Notebook, modules) if name != last else None
    arguments = [name] if name != last else options.last
    pool.submit(arguments, functools.partial(done, name, digest, tries), plugin=plugin)

  for name in [last, *files] if last else files:
    digest = _digest(pool.root, [name, *modules])
    if kept.get(name, {}).get("digest") == digest:
      taken[name] = kept[name]
    else:
      submit(name, digest, 2)
  pool.wait()
  last_s = taken[last]["seconds"] if last else 0.0
  return _combined([taken[file] for file in files], options.last, last_s)


def _test_files(root: Path, tests: Iterable[str]) -> list[str]:
  found: list[Path] = []
  for name in tests:
    path = root / name
    found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
  return [str(path.relative_to(root)) for path in found]


def _digest(root: Path, names: Iterable[str]) -> str:
  digest = hashlib.sha256()
  for path in (root / name for name in names):
    digest.update(path.read_bytes() if path.is_file() else str(path).encode())
  return digest.hexdigest()


def _combined(taken: Iterable[dict[str, Any]], last: Sequence[str], last_s: float) -> Notes:
  notes = Notes({}, {}, last, last_s)
  for each in taken:
    notes.seconds.update(each["seconds"])
    for file, lines in each["runs"].items():
      for line, tests in lines.items():
        notes.runs.setdefault(file, {}).setdefault(int(line), set()).update(tests)
  return notes


# ---- Mutants ----


def stages(notes: Notes, mutant: Mutant, patience_s: float) -> list[tuple[list[str], float]]:
  """Returns what a mutant runs until a test fails: (arguments of pytest, limit in seconds)."""
  first, last = mutant.lines
  touching = notes.of_lines(mutant.file, range(first, last + 1))
  if touching:
    near = notes.passed(touching)
    far = notes.passed(map(_file, touching))
  else:  # a line that runs at import
    far = notes.specific_first(
      mutant.file, notes.passed(notes.of_lines(mutant.file, notes.runs.get(mutant.file, ())))
    )
    near = [test for test in far if _file(test) == _file(far[0])]
  known = set(near)
  far = [test for test in far if test not in known]
  found = [notes.specific_first(mutant.file, tests) for tests in (near, far) if tests]
  runs = [(tests, sum(map(notes.seconds.__getitem__, tests))) for tests in found]
  if notes.last:
    runs.append((list(notes.last), notes.last_s))
  return [(["-x", *tests], patience_s + LIMIT * seconds) for tests, seconds in runs]


def _next(
  pool: Pool,
  mutant: Mutant,
  left: Sequence[tuple[list[str], float]],
  tell: Callable[[Result], None],
  before_s: float = 0.0,
  *,
  crashed: bool = False,
) -> None:
  """Runs the first of the stages that are left, and then the others unless a test fails."""
  if not left:
    tell(Result(mutant, "survived", seconds=before_s))
    return
  (arguments, limit_s), *others = left

  def done(status: int, seconds: float, log: Path) -> None:
    total = before_s + seconds
    failed = Path(f"{log}.failed")
    if status == 0:
      _next(pool, mutant, others, tell, total)
      return
    if os.WIFSIGNALED(status) and status != -9 and not crashed:  # of itself? once more
      _next(pool, mutant, left, tell, total, crashed=True)
      return
    by = failed.read_text() if failed.exists() else f"status {status}"
    tell(Result(mutant, "timeout" if status == -9 else "killed", by, total))

  pool.submit(arguments, done, mutant=mutant, limit_s=limit_s)


# ---- What comes out ----


def read_equivalents(path: Path) -> set[tuple[str, str, str]]:
  """Returns the keys of the mutants that the file lists; raises ValueError for one half told."""
  known = set()
  lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
  for block in filter(str.strip, "\n".join(lines).split("\n\n")):
    parts = block.strip("\n").split("\n")
    if [part[:2] for part in parts[1:]] != ["- ", "+ ", "= "]:
      raise ValueError(f"{path}: expected a file and lines with -, + and =, got:\n{block}")
    known.add((parts[0], parts[1][2:], parts[2][2:]))
  return known


def score(results: Sequence[Result]) -> float:
  """Returns the share killed, by a test or by time, of those that are not equivalent."""
  counts = collections.Counter(result.verdict for result in results)
  tried = counts["killed"] + counts["timeout"] + counts["survived"]
  return (tried - counts["survived"]) / tried if tried else 1.0


def table(results: Sequence[Result]) -> str:
  """Returns the figures of each file and of all, in Markdown."""
  files = sorted({result.mutant.file for result in results})
  rows = [(f"`{file}`", [r for r in results if r.mutant.file == file]) for file in files]
  lines = [
    "| | mutants | equivalent | killed | by time | survived | score |",
    "|---|---|---|---|---|---|---|",
  ]
  for name, part in [*rows, ("all", list(results))]:
    counts = collections.Counter(result.verdict for result in part)
    verdicts = [counts[verdict] for verdict in ("equivalent", "killed", "timeout", "survived")]
    cells = " | ".join(map(str, [len(part), *verdicts]))
    lines.append(f"| {name} | {cells} | {100 * score(part):.0f} % |")
  return "\n".join(lines)


def _write(path: Path, results: Sequence[Result]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = [
    {
      "key": r.mutant.key,
      "line": r.mutant.line,
      "operator": r.mutant.operator,
      "verdict": r.verdict,
      "by": r.by,
      "seconds": round(r.seconds, 1),
    }
    for r in results
  ]
  path.write_text(json.dumps(rows, indent=1))


def _say(text: str) -> None:
  print(text, flush=True)


if __name__ == "__main__":
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
  sys.exit(main())
