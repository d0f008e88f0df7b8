"""Log lines of C++ do not land in the middle of a report; all other lines of stderr do."""

import os
import signal
import subprocess
import sys

from loopwright.host.native_log import without_remarks

REMARKS = b"""WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795542754.729421   10107 device_compiler.h:196] Compiled cluster using XLA!
2026-11-24 17:52:36.073331: E tensorflow/core/util/util.cc:131] oneDNN supports DT_HALF only
"""
FATAL = b"2026-11-24 17:52:36.073331: F tensorflow/core/util/x.cc:131] Check failed\n"


def test_remarks_are_left_out_and_other_lines_are_not(capfd):
  os.write(2, b"I0000 before\n")
  with without_remarks():
    os.write(2, REMARKS + b"mine\n" + FATAL + b"no end of line")
  os.write(2, b"; after\n")
  assert (
    capfd.readouterr().err.encode() == b"I0000 before\nmine\n" + FATAL + b"no end of line; after\n"
  )


def test_all_is_shown_if_asked_for(capfd, monkeypatch):
  monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
  with without_remarks():
    os.write(2, REMARKS)
  assert capfd.readouterr().err.encode() == REMARKS


def test_what_is_written_while_the_process_dies_is_shown():
  code = (
    "import os\n"
    "from loopwright.host.native_log import without_remarks\n"
    f"with without_remarks():\n  os.write(2, {REMARKS + FATAL!r})\n  os.abort()\n"
  )
  environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  done = subprocess.run(
    [sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment, check=False
  )
  assert done.returncode == -signal.SIGABRT
  assert done.stderr.endswith(FATAL)
  assert b"Compiled cluster" not in done.stderr


def test_a_module_that_remarks_while_it_is_imported(tmp_path):
  (tmp_path / "talker.py").write_text(f"import os\nos.write(2, {REMARKS + FATAL!r})\n")
  code = (
    "import os, sys\n"
    "from loopwright.host.native_log import import_without_remarks\n"
    "before = len(sys.meta_path)\n"
    "import_without_remarks('talker')\n"
    "import talker, json.tool\n"
    "assert len(sys.meta_path) == before\n"
    f"os.write(2, {REMARKS!r})\n"
  )
  places = os.pathsep.join([str(tmp_path), *sys.path])
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, check=True,
    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": places},
  )  # fmt: skip
  assert done.stderr == FATAL + REMARKS
