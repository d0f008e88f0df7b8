"""The page of a report. Every text of a run is escaped; only our own script may run."""

from __future__ import annotations

import base64
import html as escaping
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopwright.errors import printable
from loopwright.monitoring import stragglers
from loopwright.run_folder.folders import texts
from loopwright.tools.report.data import FEW, Shown
from loopwright.tools.runs import diff, repetitions

_FIRST = ("loss", "accuracy")
_LAST = (
  *("gradient_norm", "learning_rate", "loss_scale", "skipped_steps", "staleness", "input_wait_s"),
  *("communication_s", "start_s", "examples_per_second", "steps_per_second"),
  *("model_flops_per_s", "mfu"),
)
_MOST_BINDINGS, _TALL = 8, 20
"""Bindings beside results; rows without scrolling."""
_HERE = Path(__file__).parent


def html(runs: Sequence[Shown], *, plotly: str, place: str = "", again_s: int = 0) -> str:
  """Returns the page.

  Args:
    runs: what it shows; see `data.read`.
    plotly: the text of plotly.js.
    place: the folders that they are in, for the title of many.
    again_s: the browser loads the page again after so many seconds; 0 for never.
  """
  nonce = secrets.token_urlsafe(16)
  policy = (
    f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
  )
  script = f'<script nonce="{nonce}"'
  many = f"{len(runs)} runs{place and ' in '}{place}"
  title = many if len(runs) > 2 else " and ".join(run.name for run in runs)
  again = f", again every {again_s} s until all runs have ended" if again_s else ""
  bodies = [(name, "\n".join(lines(runs))) for name, lines in SECTIONS.items()]
  found = [(name, name.lower().replace(" ", "-"), body) for name, body in bodies if body]
  return "\n".join(
    [
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
      f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      f'<meta http-equiv="refresh" content="{again_s}">' * bool(again_s),
      f"<title>{safe(title)}</title>\n<style>{(_HERE / 'page.css').read_text()}</style></head>",
      f"<body><main><h1>{safe(title)}</h1>",
      f"<p class=about>Written {time.strftime('%Y-%m-%d %H:%M:%S')}{again}</p>",
      "<nav>",
      *(f'<a href="#{anchor}">{name}</a>' for name, anchor, _ in found),
      "</nav>",
      *(
        f'<section id="{anchor}"><h2>{name}</h2>\n{body}\n</section>'
        for name, anchor, body in found
      ),
      f'{script} type="application/json" id="data">{inert(drawn(runs))}</script>',
      f"{script}>{plotly}</script>",
      f"{script}>{(_HERE / 'page.js').read_text()}</script>",
      "</main></body></html>\n",
    ]
  )


def safe(text: object) -> str:
  """Returns a text for HTML, in an element or a quoted attribute; control characters visible."""
  lines = str(text).split("\n")
  return "\n".join(escaping.escape(printable(line)) for line in lines)


def inert(value: object) -> str:
  """Returns JSON that cannot end a script element, whatever its texts are."""
  text = json.dumps(value, allow_nan=False)
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def drawn(runs: Sequence[Shown]) -> dict[str, Any]:
  """Returns what page.js draws: names of runs, plots with their curves, bindings that differ."""
  plots = [{"name": printable(n), "curves": list(_curves(runs, n))} for n in plotted(runs)]
  return {
    "runs": [printable(run.name) for run in runs],
    "plots": plots,
    "bindings": {printable(name): [*map(printable, row)] for name, *row in varied(runs)},
  }


def varied(runs: Sequence[Shown]) -> list[Sequence[str]]:
  """Returns rows of a binding and its value in each run, of those that differ."""
  columns = [diff.sections(run.run)["bindings"] if run.run else {} for run in runs]
  return differing(columns) if len(runs) > 1 else []


def plotted(runs: Sequence[Shown]) -> list[str]:
  """Returns the metrics that have a plot, in its order: those that are not constant."""
  names = {name for run in runs for name in run.curves}
  return sorted((name for name in names if not is_constant(runs, name)), key=_place)


def is_constant(runs: Sequence[Shown], name: str) -> bool:
  """Whether a metric, but a loss or an accuracy, never changes within a run that has two values."""
  curves = [list(run.curves.get(name, {}).values()) for run in runs]
  values = [[value for curve in of_run for value in curve.values] for of_run in curves]
  same = all(len({*each}) < 2 for each in values)
  return same and max(map(len, values)) > 1 and _place(name)[0] > 0


def _curves(runs: Sequence[Shown], name: str) -> Iterator[dict[str, Any]]:
  for index, run in enumerate(runs):
    for split, curve in run.curves.get(name, {}).items():
      points = {"steps": curve.steps, "minutes": curve.minutes, "values": curve.values}
      yield {"run": index, "split": split, **points}


def _place(name: str) -> tuple[int, int | str, str]:
  """The losses and accuracies first, also those of several evaluation sets; the pace last."""
  own = name.rpartition("/")[2]
  if own in _FIRST:
    return 0, _FIRST.index(own), name
  return (2, _LAST.index(name), name) if name in _LAST else (1, 0, name)


def _faults(runs: Sequence[Shown]) -> Iterator[str]:
  faults = [f"{run.name}: {fault}" for run in runs for fault in run.faults]
  paragraphs = "".join(f"<p class=bad>{safe(each)}</p>" for each in faults)
  if faults:
    yield f"<div class=tall tabindex=0>{paragraphs}</div>" if len(faults) > _TALL else paragraphs


def _results(runs: Sequence[Shown]) -> Iterator[str]:
  rows = {run.name: diff.results(run.run) for run in runs if run.run}
  heads = list(dict.fromkeys(name for row in rows.values() for name in row))
  more = [row for row in varied(runs) if "-" not in row][:_MOST_BINDINGS]  # all in "Configs"
  values = {run.name: [_number(row[index]) for row in more] for index, run in enumerate(runs, 1)}
  if rows:
    yield from _best(runs, [name for name, *_ in more], values)
    body = [
      [name, *values[name], *(row.get(head, "") for head in heads)] for name, row in rows.items()
    ]
    yield table(["run", *(name for name, *_ in more), *heads], body, "rows")


def _best(
  runs: Sequence[Shown], names: Sequence[str], values: Mapping[str, Sequence[str]]
) -> Iterator[str]:
  """Yields a card for the run with the best evaluation, if several have the same metric."""
  found = {run.name: best for run in runs if run.run and (best := run.run.best())}
  if len(found) > 1 and len({(best.metric, best.mode) for best in found.values()}) == 1:
    name = min(found, key=lambda name: found[name].place())
    best, of = found[name], f"The best of {len(found)} runs: {name}, at step {found[name].step}"
    told = "; ".join(f"{n} = {value}" for n, value in zip(names, values[name], strict=True))
    yield f"<div class=card><p class=about>{safe(of)}</p>"
    yield f"<p class=value>{safe(f'{best.metric} {best.value:.4g}')}</p><p>{safe(told)}</p></div>"


def _number(value: str | float | None) -> str:
  """Returns a number with six digits, another text as it is."""
  try:
    return "not finite" if value is None else f"{float(value):.6g}"
  except ValueError:
    return str(value)


def _repetitions(runs: Sequence[Shown]) -> Iterator[str]:
  names = {run.run.path: run.name for run in runs if run.run}
  bindings = [name for name, *row in varied(runs) if name != repetitions.SEED and "-" not in row]
  rows: list[Sequence[str]] = []
  for group in repetitions.alike([run.run for run in runs if run.run]):
    told = [f"{name} = {_number(group[0].bindings[name])}" for name in bindings]
    told = told or [names[run.path] for run in group]
    rows += [(_some(told), *row) for row in repetitions.rows(group)]
  if rows:
    yield table(["runs that differ in the seed alone", *repetitions.HEADS], rows)


def _some(names: Sequence[str]) -> str:
  more = [f"and {len(names) - 10} more"] if len(names) > 10 else []
  return ", ".join([*names[:10], *more])


def _plots(runs: Sequence[Shown]) -> Iterator[str]:
  yield from _constants(runs)
  if not plotted(runs):
    return
  yield '<div id="controls"></div><div id="plots"></div><div id="comparison"></div>'
  every = [
    curve.every for run in runs for splits in run.curves.values() for curve in splits.values()
  ]
  if max(every) > 1:
    yield f"<p class=about>Of the longest curve one of {max(every)} points is drawn.</p>"


def _constants(runs: Sequence[Shown]) -> Iterator[str]:
  names = {name for run in runs for name in run.curves if is_constant(runs, name)}
  told = []
  for name in sorted(names, key=_place):
    curves = [next(iter(run.curves[name].values())) for run in runs if name in run.curves]
    first = dict.fromkeys(_number(curve.values[0]) for curve in curves)
    told.append(f"{name} = {' or '.join([*first][:FEW])}{', ...' * (len(first) > FEW)}")
  if told:
    yield f"<p class=about>The same at every step: {safe('; '.join(told))}</p>"


def _configs(runs: Sequence[Shown]) -> Iterator[str]:
  known = [run for run in runs if run.run]
  for title in ("bindings", "data"):
    columns = [diff.sections(run.run)[title] for run in known if run.run]
    if rows := differing(columns):
      yield f"<h3>{title} that differ</h3>" if len(known) > 1 else f"<h3>{title}</h3>"
      yield by_run(title, known, rows)
    elif len(known) > 1:
      yield f"<p>{title}: no difference</p>"


def differing(columns: Sequence[Mapping[str, str]]) -> list[Sequence[str]]:
  """Returns rows of a name and its value in each column, where they differ; of one column all."""
  names = sorted({name for column in columns for name in column})
  rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
  return [row for row in rows if len(columns) == 1 or len({*row[1:]}) > 1]


def _goodput(runs: Sequence[Shown]) -> Iterator[str]:
  found = {run.name: run.goodput for run in runs if run.goodput}
  if found:
    known = [run for run in runs if run.goodput]
    yield by_run("part", known, _shares([each.parts for each in found.values()]))
  if rows := [[run.name, *row] for run in runs for row in run.workers]:
    yield "<h3>A step of each worker</h3>"
    yield table(["run", *stragglers.HEADS], rows)


def _shares(budgets: Sequence[Mapping[str, float]]) -> list[Sequence[str]]:
  """Returns a row for each part, the largest first, and one for the total."""
  names = {name: 0.0 for budget in budgets for name in budget}
  totals = {name: sum(budget.get(name, 0.0) for budget in budgets) for name in names}
  rows = [
    [name, *(_share(budget, name) for budget in budgets)]
    for name in sorted(totals, key=lambda name: -totals[name])
  ]
  return [*rows, ["total", *(f"{sum(budget.values()):.2f} s" for budget in budgets)]]


def _share(budget: Mapping[str, float], name: str) -> str:
  if name not in budget:
    return "-"
  total = sum(budget.values())
  return f"{budget[name]:.2f} s, {100 * budget[name] / total:.1f} %" if total > 0 else "0 s"


def _verify(runs: Sequence[Shown]) -> Iterator[str]:
  known = [run for run in runs if run.verify]
  for run in known:
    results = run.verify["results"]
    statuses = [str(each.get("status")) for each in results]
    counts = ", ".join(f"{statuses.count(each)} {each}" for each in dict.fromkeys(statuses))
    yield f"<h3>{safe(run.name)}</h3><p>{safe(counts)}</p>"
    for each in results:
      if each.get("status") == "failed":
        known_parts = [each.get(part) for part in ("detail", "cause", "place", "remedy")]
        told = "; ".join(str(part) for part in known_parts if part)
        yield f"<p class=bad>{safe(each.get('check'))}: {safe(told)}</p>"
    parts = ("group", "check", "status", "detail")
    rows = [[str(each.get(part, "")) for part in parts] for each in results]
    yield f"<details><summary>All checks</summary>{table(parts, rows)}</details>"


def _samples(runs: Sequence[Shown]) -> Iterator[str]:
  for name in sorted({name for run in runs for name in run.media}):
    yield f"<h3>{safe(name.rpartition('.')[0])}</h3><div class=media>"
    for run in (run for run in runs if name in run.media):
      yield "<div class=strip tabindex=0>"
      yield from (_medium(name, f"{run.name}, step {n}", each) for n, each in run.media[name])
      yield "</div>"
    yield "</div>"


def _medium(name: str, told: str, content: bytes) -> str:
  if name.endswith(".png"):
    data = base64.b64encode(content).decode()
    shown = f'<img alt="{safe(name)}" src="data:image/png;base64,{data}">'
  else:
    shown = f"<pre>{safe(content.decode(errors='replace'))}</pre>"
  return f"<figure>{shown}<figcaption>{safe(told)}</figcaption></figure>"


def _environment(runs: Sequence[Shown]) -> Iterator[str]:
  known = [run for run in runs if run.starts]
  columns = []
  for run in known:
    last = run.starts[-1]
    about = {name: str(last[name]) for name in ("time", "commit", "command") if last.get(name)}
    versions = run.run.values("versions") if run.run else texts(last.get("versions"))
    shown = {"TensorBoard": f"tensorboard --logdir {run.run.path}"} if run.run else {}
    columns.append({**shown, "starts": str(len(run.starts)), **about, **versions})
  names = sorted(dict.fromkeys(name for column in columns for name in column), key="command".__eq__)
  rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
  if len(known) > FEW:
    alike = [f"{name} {row[0]}" for name, *row in rows if len({*row}) == 1]
    rows = [row for row in rows if len({*row[1:]}) > 1]
    yield f"<p>The same in all: {safe(', '.join(alike))}</p>"
  if known:
    yield by_run("of the last start", known, rows)


def by_run(head: str, runs: Sequence[Shown], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table of rows (name, value of each run); of many runs each has a row."""
  whole = [[head, *(run.name for run in runs)], *rows]
  first, *rest = whole if len(runs) <= FEW else list(zip(*whole, strict=True))
  return table(first, rest, "" if len(runs) <= FEW else "rows")


def table(heads: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
  """Returns an HTML table; the first cell of each row is its name. A long one scrolls.

  Args:
    heads: of the columns.
    rows: of texts.
    kind: "rows" if each is of one line, a run's.
  """
  rows = list(rows)
  head = "".join(f"<th>{safe(each)}</th>" for each in heads)
  body = "".join(
    f"<tr><th>{safe(first)}</th>{''.join(f'<td>{safe(each)}</td>' for each in rest)}</tr>"
    for first, *rest in rows
  )
  kinds = f"wide {'tall rows' if len(rows) > _TALL else kind}".strip()
  whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
  return f'<div class="{kinds}" tabindex=0>{whole}</div>'


SECTIONS: Mapping[str, Callable[[Sequence[Shown]], Iterator[str]]] = {
  "Damaged": _faults,
  "Results": _results,
  "Repetitions": _repetitions,
  "Curves": _plots,
  "Configs": _configs,
  "Goodput": _goodput,
  "Verify": _verify,
  "Samples": _samples,
  "Environment": _environment,
}
