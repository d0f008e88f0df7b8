"""The report: what it reads, what it shows, hostile and damaged folders; a real browser's view."""

import html.parser
import json
import os
import re
import sys
from pathlib import Path

import browser
import numpy as np
import pytest

from loopwright import commands
from loopwright.monitoring import goodput
from loopwright.run_folder import folders
from loopwright.tools.report import data, page

ROOT = Path(__file__).resolve().parents[3]
PNG = bytes.fromhex(
  "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
  "0000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)
EVIL = "<img src=x onerror=hacked=1>"
BREAKS_OUT = "</script><script>hacked = 2</script><!--"
METRIC = f"<b>bold</b>{BREAKS_OUT}"
START = {
  "time": "2026-01-02T03:04:05+0000",
  "command": f"train {BREAKS_OUT}",
  "commit": "12ab+changes",
  "versions": {"tensorflow": "2.20.0", "keras": EVIL},
  "config": {},
  "data": {"training": "10 examples"},
}
VERIFY = {
  "seconds": 3.0,
  "failed": 1,
  "results": [
    {"group": "loss", "check": "a mean", "status": "passed", "detail": "", "cause": ""},
    {"group": "loss", "check": EVIL, "status": "failed", "detail": "1 is not 2", "cause": "a sum"},
  ],
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, request):
  monkeypatch.chdir(tmp_path)
  if not request.node.get_closest_marker("whole"):  # these draw in a browser
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")


def line(step, split, wall_time=0.0, **values):
  return json.dumps({"step": step, "split": split, "wall_time": wall_time, **values})


def make(path, *log, config="run.train_steps = 2\n", start=None, verify=None, media=None):
  folder = Path(path)
  (folder / "media").mkdir(parents=True)
  (folder / "metrics.jsonl").write_text("".join(f"{each}\n" for each in log))
  (folder / "operative_config.gin").write_text(config)
  if start:
    (folder / "history.jsonl").write_text(f"{json.dumps(start)}\n")
  if verify:
    (folder / "verify.json").write_text(json.dumps(verify))
  for name, content in (media or {}).items():
    (folder / "media" / name).parent.mkdir(exist_ok=True)
    (folder / "media" / name).write_bytes(content)
  return path


def hostile():
  """Returns two runs: one whose every text is markup, and a plain one."""
  return [
    make(
      f"runs/{EVIL}",
      line(1, "train", 60.0, **{"loss": 2.0, METRIC: 1.0}),
      line(2, "train", 120.0, loss="NaN"),
      line(2, "eval", 120.0, loss=1.5),
      line(2, "time", compute_s=3.0, input_wait_s=1.0),
      config=f"run.train_steps = 2\nt.name = '{BREAKS_OUT}'\n",
      start=START, verify=VERIFY,
      media={f"{EVIL}-2.png": PNG, "a/note-1.txt": BREAKS_OUT.encode()},
    ),
    make("runs/plain", line(1, "train", 7.0, loss=3.0), line(2, "eval", 8.0, loss=0.5)),
  ]  # fmt: skip


def report(*given):
  assert commands.main(["loopwright", "report", *given, "--output=r.html"]) == 0
  return Path("r.html").read_text()


class Parsed(html.parser.HTMLParser):
  """The elements of a page, each with its attributes and the text directly in it."""

  def __init__(self, text):
    super().__init__()
    self.found, self._open = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.found.append([tag, dict(attrs), ""])
    self._open.append(self.found[-1])

  def handle_endtag(self, tag):
    while self._open and self._open.pop()[0] != tag:
      pass

  def handle_data(self, data):
    if self._open:
      self._open[-1][2] += data

  def texts(self, *tags):
    return [text for tag, _, text in self.found if tag in tags]


def rows(parsed_page, head):
  """Returns the cells of the table whose first head this is."""
  after = [x for x in parsed_page.found if x[0] in ("table", "tr", "th", "td")]
  start = next(i for i, x in enumerate(after) if x[0] == "th" and x[2] == head) - 1
  end = next((i for i, x in enumerate(after) if i > start and x[0] == "table"), len(after))
  found = []
  for tag, _, text in after[start:end]:
    found.append([]) if tag == "tr" else found[-1].append(text)
  return found


def test_curves_are_the_lines_of_the_two_splits():
  log = [
    {"step": 10, "split": "train", "wall_time": 600.0, "loss": 2.5, "counts": [1, 2]},
    {"step": 20, "split": "train", "wall_time": 660.0, "loss": "NaN", "other": True},
    {"step": 20, "split": "eval", "wall_time": 690.0, "loss": 1.5},
    {"step": 30, "split": "time", "wall_time": 700.0, "host_s": 4.0},
  ]
  curves = data.logged(log)
  assert {*curves} == {"loss"}
  train, evaluation = curves["loss"]["train"], curves["loss"]["eval"]
  assert (train.steps, train.minutes, train.values) == ([10, 20], [0.0, 1.0], [2.5, None])
  assert (evaluation.steps, evaluation.minutes, evaluation.values) == ([20], [1.5], [1.5])


def test_a_long_curve_keeps_evenly_spaced_points():
  curve, one_of_many = data.Curve(), data.Curve(100)
  for step in range(10_000):
    curve.add(step, 0.0, float(step))
    one_of_many.add(step, 0.0, 1.0)
  assert one_of_many.steps == [*range(0, 10_000, 128)]
  assert curve.every == 8
  assert curve.steps == [*range(0, 10_000, 8)]
  assert curve.values == curve.steps
  assert len(curve.steps) <= data.MOST_POINTS


def test_the_page_shows_results_configs_goodput_verify_samples_and_environment(monkeypatch):
  parts = {"training": 3.0, "input wait": 1.0}
  went = {"runs/a": goodput.Goodput(0.0, parts, 1, 0, 2, 0)}
  monkeypatch.setattr(goodput, "read", went.get)
  one = make(
    "runs/a", line(2, "eval", loss=0.5),
    config="x.y = 1\nx.same = 'z'\n", start={**START, "command": "train"}, verify=VERIFY,
    media={"no-1.png": b"GIF89a"},
  )  # fmt: skip
  two = make("runs/b", line(2, "eval", loss=0.25), config="x.y = 2\nx.same = 'z'\n")
  found = Parsed(report(one, two))
  assert rows(found, "run") == [
    ["run", "x.y", "step", "status", "eval loss", "best"],
    ["a", "1", "2", "stopped", "0.5", "loss 0.5 @2"],
    ["b", "2", "2", "stopped", "0.25", "loss 0.25 @2"],
  ]
  card = ["The best of 2 runs: b, at step 2", "loss 0.25", "x.y = 2"]
  assert found.texts("p")[2:5] == card
  assert rows(found, "bindings")[1:] == [["x.y", "1", "2"]]
  assert rows(found, "part")[1:] == [
    ["training", "3.00 s, 75.0 %"],
    ["input wait", "1.00 s, 25.0 %"],
    ["total", "4.00 s"],
  ]
  assert rows(found, "group")[1:] == [
    ["loss", "a mean", "passed", ""],
    ["loss", EVIL, "failed", "1 is not 2"],
  ]
  assert "1 passed, 1 failed" in found.texts("p")
  assert f"{EVIL}: 1 is not 2; a sum" in found.texts("p")
  assert ["tensorflow", "2.20.0"] in rows(found, "of the last start")
  assert ["command", "train"] in rows(found, "of the last start")
  assert "a: 'runs/a/media/no-1.png' is no PNG file." in found.texts("p")


def test_runs_that_differ_in_the_seed_have_their_mean_and_spread():
  for seed in range(3):
    log = line(2, "eval", loss=float(seed), accuracy=0.5)
    make(f"runs/{seed}", log, config=f"run.train_steps = 2\nrun.seed = {seed}\n")
  make(
    "runs/other", line(2, "eval", loss=9.0), config="run.train_steps = 2\nrun.seed = 9\nx.y = 1\n"
  )
  found = Parsed(report("runs"))
  assert rows(found, "runs that differ in the seed alone")[1:] == [
    ["0, 1, 2", "loss", "1", "1", "-1.4841 to 3.4841", "3"],  # t of 2 degrees is 4.3027
    ["0, 1, 2", "accuracy", "0.5", "0", "0.5 to 0.5", "3"],
  ]


def test_what_never_changes_has_no_plot():
  for run, rate in (("a", 0.5), ("b", 0.25)):
    logs = [line(n, "train", loss=1.0, rate=rate, scale=4.0, norm=float(n)) for n in (1, 2)]
    make(f"runs/{run}", *logs, line(2, "eval", loss=1.0, once=7.0))
  found = Parsed(report("runs"))
  scripts = [(attributes, text) for tag, attributes, text in found.found if tag == "script"]
  plots = [plot["name"] for plot in json.loads(scripts[0][1])["plots"]]
  assert plots == ["loss", "norm", "once"]
  assert "The same at every step: rate = 0.5 or 0.25; scale = 4" in found.texts("p")


def test_the_newest_picture_and_earlier_ones_at_even_distances():
  make("a", line(1, "eval", loss=1.0), media={f"x/faces-{n}.png": PNG for n in range(1, 22)})
  found = Parsed(report("a"))
  assert found.texts("figcaption") == [f"a, step {step}" for step in (21, 17, 13, 9, 5, 1)]
  assert found.texts("h3")[-1] == "x/faces"


def test_of_many_runs_each_has_a_row():
  for number in range(5):
    make(f"runs/{number}", line(1, "eval", loss=1.0), config=f"x.y = {number}\nx.z = 7\n")
  found = Parsed(report("runs"))
  assert rows(found, "bindings") == [["bindings", "x.y"], *([str(n)] * 2 for n in range(5))]


def test_no_text_of_a_run_becomes_markup():
  found = Parsed(report(*hostile()))
  ours = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "section", "div"),
    *("table", "thead", "tbody", "tr", "th", "td", "label", "select", "option", "input", "script"),
    *("details", "summary", "figure", "figcaption", "pre", "img", "code", "main", "nav", "a"),
  }
  assert {tag for tag, _, _ in found.found} <= ours
  names = {name for _, attributes, _ in found.found for name in attributes}
  assert not [name for name in names if name.startswith("on")]
  assert all(a["href"].startswith("#") for tag, a, _ in found.found if tag == "a")
  images = [attributes for tag, attributes, _ in found.found if tag == "img"]
  assert [each["src"][:22] for each in images] == ["data:image/png;base64,"]
  assert images[0]["alt"] == f"{EVIL}.png"
  scripts = [(attributes, text) for tag, attributes, text in found.found if tag == "script"]
  nonces = {attributes["nonce"] for attributes, _ in scripts}
  assert (len(scripts), len(nonces)) == (3, 1)
  assert not any("src" in attributes for attributes, _ in scripts)
  policy = next(a["content"] for t, a, _ in found.found if t == "meta" and "content" in a)
  assert policy.startswith(f"default-src 'none'; script-src 'nonce-{nonces.pop()}';")
  drawn = json.loads(scripts[0][1])
  assert drawn["runs"] == [EVIL, "plain"]
  assert [plot["name"] for plot in drawn["plots"]] == ["loss", METRIC]
  assert drawn["plots"][0]["curves"][0] == {
    "run": 0, "split": "train", "steps": [1, 2], "minutes": [0.0, 1.0], "values": [2.0, None]
  }  # fmt: skip
  assert f"'{BREAKS_OUT}'" in found.texts("td")
  assert found.texts("pre") == [BREAKS_OUT]


def test_a_name_that_is_no_text_is_written_so_that_it_can_be_read():
  make("a\x1b[2J\udcff", line(1, "eval", loss=1.0))
  assert r"a\x1b[2J\udcff" in Parsed(report("a\x1b[2J\udcff")).texts("h1")


def test_a_damaged_run_is_a_line_on_the_page():
  make("runs/good", line(1, "eval", loss=1.0))
  make("runs/history", line(1, "eval", loss=2.0), start=START)
  Path("runs/history/history.jsonl").write_text("{")
  make("runs/pipe")
  Path("runs/pipe/metrics.jsonl").unlink()
  os.mkfifo("runs/pipe/metrics.jsonl")
  make("runs/half", '{"step": 1, "split": "ev')
  Path("runs/half/verify.json").write_text('{"results": [{"che')
  Path("runs/half/operative_config.gin").write_bytes(bytes(range(256)))
  make("runs/odd", line(1, "eval", loss=10**400), line(2, "train", wall_time="x", loss=1e308))
  Path("runs/odd/verify.json").write_text('{"results": 7}')
  found = Parsed(report("runs"))
  told = [attributes.get("class") == "bad" and text for _, attributes, text in found.found]
  told = [text for text in told if text]
  assert [text.partition(" cannot be read (")[0] for text in told] == [
    "half: 'runs/half/verify.json'",
    "odd: 'runs/odd/verify.json'",
    "pipe: 'runs/pipe/metrics.jsonl' is a pipe, not a file; give the path of a log.",
  ]
  assert [row[0] for row in rows(found, "run")[1:]] == ["good", "half", "history", "odd", "pipe"]


HOSTILE = {
  "nested": b'{"step": 1, "split": "eval", "results": ' + b"[" * 100_000 + b"\n",
  "numbers": b'{"step": 1, "split": "time", "wall_time": -1e308, "a_s": 1e308, "b_s": 1e308}\n'
  b'{"step": 9223372036854775808, "split": "eval"}\n'
  b'{"step": 2, "split": "eval", "wall_time": 1e308, "x": 1, "loss": ' + b"9" * 4000 + b"}\n",
  "other types": b'{"step": 1, "split": [], "loss": {}}\n["eval"]\n{"versions": 7, "data": [1]}\n',
  "results": b'{"results": [{"check": [], "status": {"a": null}, "detail": 7}, 8]}',
  "not text": bytes(range(256)) * 50,
  "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_content_of_a_file_ends_the_report(name):
  files = ("metrics.jsonl", "operative_config.gin", "history.jsonl", "verify.json", "owner.json")
  for file in (*files, "media/a-1.png", "media/b-1.txt"):
    folder = make(f"runs/of-{file.replace('/', '-')}", line(5, "eval", loss=1.0), start=START)
    Path(folder, file).write_bytes(HOSTILE[name])
  make("runs/good", line(5, "eval", loss=1.0))
  assert "good" in [row[0] for row in rows(Parsed(report("runs")), "run")]


@pytest.mark.parametrize(
  ("given", "text"),
  [
    ([], "`loopwright report` takes run folders, as in `report runs/a runs/b`."),
    (["nowhere"], "'nowhere' cannot be read (No such file or directory); give a folder of runs"),
    (["empty"], "there is no run in 'empty'; give a run folder, or a folder of runs."),
    (["a", "--output=no/r.html"], "--output='no/r.html' cannot be written (No such file"),
    (["a", "--output=empty"], "--output='empty' cannot be written (Is a directory"),
  ],
)
def test_a_mistake_is_one_line(given, text, capsys):
  Path("empty").mkdir()
  make("a", line(1, "eval", loss=1.0))
  assert commands.main(["loopwright", "report", *given]) == 2
  error = capsys.readouterr().err
  assert text in error
  assert error.count("\n") == 1
  assert sorted(path.name for path in Path().iterdir()) == ["a", "empty"]


def test_without_plotly_the_line_says_how_to_get_it(monkeypatch, capsys):
  make("a", line(1, "eval", loss=1.0))
  monkeypatch.setitem(sys.modules, "plotly.offline", None)
  assert commands.main(["loopwright", "report", "a"]) == 2
  assert "install the extra: `pip install 'loopwright[report]'`" in capsys.readouterr().err


def contrast(one, other):
  """Returns the contrast of two colours, by WCAG 2.1."""

  def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

  low, high = sorted(map(luminance, (one, other)))
  return (high + 0.05) / (low + 0.05)


def test_texts_and_curves_have_contrast_in_light_and_dark():
  folder = Path(page.__file__).parent
  style, script = (folder / "page.css").read_text(), (folder / "page.js").read_text()
  light, dark = (
    dict(re.findall(r"--(\w+): (#\w+)", part))
    for part in re.findall(r":root\S* \{([^}]*)\}", style.replace("#fff;", "#ffffff;"))
  )
  for colors, name in ((light, "onLight"), (dark, "onDark")):
    for text in ("text", "soft", "bad"):
      assert contrast(colors[text], colors["page"]) >= 4.5, (name, text)
    drawn = re.findall(r"#\w+", re.search(rf"{name} = \[(.*?)\]", script, re.DOTALL)[1])
    assert len(drawn) == 10
    for color in drawn:
      assert contrast(color, colors["page"]) >= 3, (name, color)


@pytest.mark.whole
def test_201_runs_are_a_page_of_a_few_screens():
  for number in range(201):
    logs = [line(step, "train", loss=1.0 / step, x=float(step)) for step in (1, 2)]
    config = f"run.train_steps = 9\nx.y = {number}\n"
    make(f"runs/r{number}", *logs, line(2, "eval", loss=0.5), config=config, start=START)
  report("runs")
  with browser.opened(Path("r.html").resolve().as_uri()) as opened:
    opened.wait("document.querySelectorAll('#plot-0 .scatterlayer .trace').length === 24")  # colors
    assert opened.value("document.documentElement.scrollHeight") < 5 * 900
    assert opened.value("document.querySelectorAll('.choose input').length") == 205
    start = opened.value("document.querySelector('#results a').getAttribute('href')")
    command = opened.value(f"document.querySelector('{start}').parentElement.textContent")
    assert "tensorboard --logdir runs/r0" in command
    label = opened.value("document.getElementById('plot-1').getAttribute('aria-label')")
    assert label.startswith("x over steps, 201 curves. r0, train: 2 at step 2; r1, train: 2 at")
    assert label.endswith("; and 191 more")


@pytest.mark.whole
def test_many_runs_are_sorted_colored_and_compared_in_a_browser():
  for number in range(12):
    values = [1.0, 0.0, number * 0.1]
    logs = [line(step, "train", loss=value) for step, value in enumerate(values, 1)]
    config = f"run.train_steps = 9\nx.rate = {10.0 ** -(number % 4)}\nx.kind = 'k{number % 2}'\n"
    make(f"runs/r{number}", *logs, line(3, "eval", loss=(number - 6) ** 2), config=config)
  report("runs")
  with browser.opened(Path("r.html").resolve().as_uri(), height=2000) as opened:
    opened.wait("document.querySelectorAll('#against .point').length === 12")
    first = "document.querySelector('#results tbody').rows[0].cells[0].textContent"
    opened.value("document.querySelectorAll('#results thead button')[5].click()")
    assert opened.value(first) == "r6"  # the least loss
    opened.value("document.querySelectorAll('#results thead button')[5].click()")
    assert opened.value(first) == "r0"
    shown = "[...document.querySelectorAll('#results tbody tr')].filter(row => !row.hidden).length"
    box = "document.querySelector('#results .filter input')"
    for text, count in (("r11", 1), ("", 12)):
      opened.value(f"{box}.value = '{text}'; {box}.dispatchEvent(new Event('input'))")
      assert opened.value(shown) == count
      opened.wait(f"against.data[0].x.length === {count}")
    opened.value("binding.value = 'x.rate'; binding.dispatchEvent(new Event('change'))")
    found = opened.value("against.data[0].x")
    assert found == [10.0 ** -(n % 4) for n in range(12)]
    assert opened.value("against.layout.xaxis.type") == "log"
    opened.value("smooth.value = 0.5; smooth.dispatchEvent(new Event('change'))")
    [drawn] = [opened.value("document.getElementById('plot-0').data[0].y")]
    assert drawn == pytest.approx([1.0, 0.25 / 0.75, 0.125 / 0.875])
    assert opened.value("new Set(data.runs.map((_, i) => color(i))).size") == 12
    marks = "[...document.querySelectorAll('#results tbody th')].map(each => each.style.boxShadow)"
    assert len({*opened.value(marks)}) == 12
    opened.value("by.value = 'x.kind'; by.dispatchEvent(new Event('change'))")
    assert len({*opened.value(marks)}) == 2
    assert opened.value("new Set(data.runs.map((_, i) => color(i))).size") == 2
    parts = "ofHue(137.508 * i % 360).match(/\\w\\w/g).map(c => parseInt(c, 16) / 255)"
    all_of_300 = f"[...Array(300).keys()].map(i => contrast(...{parts}))"
    assert opened.value(f"Math.min(...{all_of_300})") >= 3
    ticks = "[...document.querySelectorAll('#against .xtick text')].map(each => each.textContent)"
    opened.wait(f"{ticks}.includes('0.001')")
    assert (
      opened.value("data.plots[0].curves.filter(each => each.values.length === 1).length") == 12
    )
    of_one = "document.getElementById('plot-0').data.filter(each => each.mode === 'lines+markers')"
    assert opened.value(f"{of_one}.length") > 0
    flat = "[...Array(99).keys()].map(i => i / 99)"
    assert opened.value(f"most([...{flat}, 1e6])") == pytest.approx([-0.076, 1.076], abs=0.01)
    assert opened.value(f"most({flat})") is None
    assert opened.problems == []


def seeds_of_two_rates():
  """Makes three runs of each; returns their losses, [rate, seed, evaluation]."""
  losses = np.random.default_rng(0).uniform(1, 2, [2, 3, 4])
  losses[:, 2, 3] = np.nan  # a run that has ended: the mean of the others goes on
  for rate, seed in np.ndindex(2, 3):
    row = [loss for loss in losses[rate, seed] if loss > 0]
    logs = [line(s, "eval", 60.0 * s * (seed + 1), loss=v) for s, v in enumerate(row, 1)]
    config = f"run.train_steps = 9\nrun.seed = {seed}\nx.rate = {rate}\n"
    make(f"runs/a{'-long' * 20}-name-{rate}-{seed}", *logs, config=config)
  return losses


@pytest.mark.whole
def test_runs_of_several_seeds_are_a_mean_and_a_band():
  losses = seeds_of_two_rates()
  report("runs")
  mean, deviation = np.nanmean(losses, axis=1), np.nanstd(losses, axis=1, ddof=1)
  with browser.opened(Path("r.html").resolve().as_uri(), height=2000) as opened:
    opened.wait("document.getElementById('plot-0').data?.length === 4")
    drawn = opened.value("document.getElementById('plot-0').data.map(({x, y}) => ({x, y}))")
    np.testing.assert_allclose([each["y"] for each in drawn[2:]], mean, rtol=1e-12)
    edges = np.concatenate([mean + deviation, (mean - deviation)[:, ::-1]], axis=1)
    np.testing.assert_allclose([each["y"] for each in drawn[:2]], edges, rtol=1e-12)
    opened.value("over.value = 'minutes'; over.dispatchEvent(new Event('change'))")
    found = opened.value("document.getElementById('plot-0').data[2].x")
    np.testing.assert_allclose(found, [0, 2, 4, 4.5], rtol=1e-12)
    opened.value("find('mean').click()")
    assert opened.value("document.getElementById('plot-0').data.length") == 2  # six, by color
    assert opened.problems == []


@pytest.mark.whole
def test_on_paper_a_page_is_light_whole_and_without_controls():
  seeds_of_two_rates()
  report("runs")
  shown = (
    "[...document.querySelectorAll('nav, .modebar, #controls input')].some(e => e.offsetWidth)"
  )
  cut = "[...document.querySelectorAll('.wide')].some(e => e.scrollWidth > e.clientWidth + 1)"
  paper = "document.getElementById('plot-0').layout.paper_bgcolor"
  with browser.opened(Path("r.html").resolve().as_uri(), width=718) as opened:
    for media, when, color in (("screen", "after", "#12181f"), ("print", "before", "#fff")):
      dark = [{"name": "prefers-color-scheme", "value": "dark"}]
      opened.call("Emulation.setEmulatedMedia", media=media, features=dark)
      opened.value(f"scrollTo(0, 1e6); dispatchEvent(new Event('{when}print'))")
      opened.wait(f"{paper} === '{color}'")
      assert opened.value(f"[{shown}, {cut}]") == [media == "screen"] * 2
    assert opened.value("find('against').layout.paper_bgcolor") == "#fff"
    assert opened.problems == []


def test_a_live_page_is_loaded_again_until_the_run_has_ended(monkeypatch):
  make("runs/a", line(1, "train", loss=2.0))
  going = []
  monkeypatch.setattr(folders.Run, "is_running", lambda run: not going)
  monkeypatch.setattr("time.sleep", lambda s: going.append((s, Path("r.html").read_text())))
  text = report("runs/a", "--live_s=7")
  [(seconds, before)] = going
  assert seconds == 7
  assert '<meta http-equiv="refresh" content="7">' in before
  assert '<meta http-equiv="refresh"' not in text


@pytest.mark.whole
def test_in_a_browser_it_draws_and_answers_clicks():
  report(*hostile())
  address = Path("r.html").resolve().as_uri()
  drawn = "document.querySelectorAll('#plot-0 .scatterlayer .trace').length"
  with browser.opened(address) as opened:
    opened.wait(f"{drawn} === 4")
    assert opened.value("[...document.querySelectorAll('#plots .plot')].length") == 2
    assert opened.value("document.getElementById('plot-0').data.map(each => each.y)") == [
      [2.0, None],
      [1.5],
      [3.0],
      [0.5],
    ]
    assert opened.value("document.querySelector('#plot-1 .gtitle').textContent") == METRIC
    buttons = "[...document.querySelectorAll('.modebar-btn')].map(each => each.dataset.title)"
    assert not [each for each in opened.value(buttons) if "Share" in each]
    opened.click("#run-0")
    opened.wait(f"{drawn} === 2")
    assert opened.value("document.getElementById('plot-0').data[0].y") == [3.0]
    opened.click("#run-0")
    opened.wait(f"{drawn} === 4")
    opened.click("#log")
    opened.wait("document.getElementById('plot-0').layout.yaxis.type === 'log'")
    opened.value("over.value = 'minutes'; over.dispatchEvent(new Event('change'))")
    assert opened.value("document.getElementById('plot-0').data[0].x") == [0, 1]
    opened.click("summary")
    opened.wait("document.querySelector('details').open")
    opened.wait("document.querySelector('img').naturalWidth === 1")
    assert opened.value("typeof hacked") == "undefined"
    assert opened.value("document.documentElement.scrollWidth <= window.innerWidth")
    assert [each for each in opened.requests if not each.startswith(("data:", "blob:"))] == [
      address
    ]
    assert opened.problems == []
