"""A real browser without a window: Debian's Chromium, over its DevTools protocol."""

import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time

import pytest
import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")


@contextlib.contextmanager
def opened(url, width=1200, height=900):
  """Opens a page; gives a `Page`. Without Chromium the test is skipped."""
  program = next(filter(None, map(shutil.which, NAMES)), None)
  if program is None:
    pytest.skip("no Chromium: apt-get install chromium")
  flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
  flags += [f"--window-size={width},{height}"]
  with (
    tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
    subprocess.Popen(
      [program, *flags, f"--user-data-dir={home}", "about:blank"],
      stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    ) as process,
  ):  # fmt: skip
    try:
      address = next(x.split()[-1] for x in process.stderr if x.startswith("DevTools listening"))
      with contextlib.closing(
        websocket.create_connection(
          address,
          timeout=30,
          suppress_origin=True,  # newer versions refuse an origin
        )
      ) as connection:
        yield Page(connection, url)
    finally:
      process.kill()


class Page:
  """A page in a browser.

  Attributes:
    requests: the addresses that it asked for.
    problems: errors and warnings on its console, such as of its security policy.
  """

  def __init__(self, connection, url):
    self._connection, self._ids, self._session = connection, itertools.count(1), None
    self.requests, self.problems = [], []
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
    self._session = attached["sessionId"]
    for domain in ("Page", "Runtime", "Network", "Log"):
      self.call(f"{domain}.enable")
    self.call("Page.navigate", url=url)
    self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

  def call(self, method, **parameters):
    number = next(self._ids)
    message = {"id": number, "method": method, "params": parameters}
    if self._session:
      message["sessionId"] = self._session
    self._connection.send(json.dumps(message))
    while True:
      answer = json.loads(self._connection.recv())
      if answer.get("id") == number:
        assert "error" not in answer, answer
        return answer["result"]
      self._note(answer.get("method"), answer.get("params", {}))

  def _note(self, event, about):
    if event == "Network.requestWillBeSent":
      self.requests.append(about["request"]["url"])
    elif event == "Runtime.exceptionThrown":
      self.problems.append(str(about["exceptionDetails"]))
    elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
      self.problems.append(about["entry"]["text"])

  def value(self, expression):
    """Returns the value of a JavaScript expression."""
    found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
    return found["result"].get("value")

  def wait(self, expression, seconds=20):
    """Returns when an expression is true."""
    end = time.monotonic() + seconds
    while not self.value(expression):
      assert time.monotonic() < end, (expression, self.problems)
      time.sleep(0.05)

  def click(self, selector):
    """Clicks with the mouse in the middle of an element."""
    self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    box = self.value(
      f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
      f"(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
      self.call(
        "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1
      )
