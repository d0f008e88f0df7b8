
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
// Each at least 3:1 on its background (WCAG 1.4.11).
const onLight = ["#1f77b4", "#c45500", "#1a7f37", "#d62728", "#8250c8",
                 "#8c564b", "#c2378f", "#6b7280", "#7c7a00", "#0e7f8c"];
const onDark = ["#58a6ff", "#ff9e4a", "#56d364", "#ff7b72", "#c297ff",
                "#d3a18f", "#f778ba", "#a8b3bf", "#d4d04a", "#4fd1de"];
const shades = 24;  // colors of a numeric binding
const isMany = data.runs.length > 20;  // then a binding colors them at first, and training is left out
const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
const isPaper = () => root.classList.contains("paper"), isDark = () => dark.matches && !isPaper();
const find = id => document.getElementById(id);
const style = name => getComputedStyle(root).getPropertyValue(name).trim();
const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // Plotly reads HTML
const buttons = [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]];  // none uploads
const bindings = Object.keys(data.bindings);
const seed = "run.seed", repeated = "all but run.seed";
const others = bindings.filter(each => each !== seed);
const groups = data.runs.map((_, run) =>
  others.map(name => `${name} = ${data.bindings[name][run]}`).join("; ") || "all runs");
const isRepeated = bindings.includes(seed) && new Set(groups).size < data.runs.length;
const valuesOf = name => name === repeated ? groups : data.bindings[name];
const numbers = new Map(data.runs.map((name, index) => [name, index]));
const hidden = new Set(), filtered = new Set();  // runs: without their box, without the filter's text
const isShown = run => !hidden.has(run) && !filtered.has(run);

function make(tag, attributes, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

// Colors

function contrast(red, green, blue) {  // on the page, WCAG 2; parts from 0 to 1
  const [r, g, b] = [red, green, blue].map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const own = 0.2126 * r + 0.7152 * g + 0.0722 * b, page = isDark() ? 0.009 : 1;
  return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
}

function ofHue(hue, least = 3.2) {  // the color of a hue, in degrees, with this contrast on the page
  for (let light = isDark() ? 0.4 : 0.6; light > 0 && light < 1; light += isDark() ? 0.02 : -0.02) {
    const part = n => {
      const k = (n + hue / 30) % 12;
      return light - 0.7 * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1));
    };
    const parts = [part(0), part(8), part(4)];
    if (contrast(...parts) >= least)
      return "#" + parts.map(c => Math.round(255 * c).toString(16).padStart(2, "0")).join("");
  }
}

function ofKinds() {  // value of what colors the runs -> its color, in the order of a legend
  const kinds = [...new Set(by && by.value ? valuesOf(by.value) : data.runs.keys())];
  const numbers = kinds.filter(each => each !== "-");
  if (by && by.value && numbers.every(each => Number.isFinite(Number(each)))) {
    numbers.sort((a, b) => a - b);  // from blue for the least to red
    const count = Math.min(numbers.length, shades), last = Math.max(count - 1, 1);
    const hue = rank => 240 - 240 * Math.floor(rank * count / numbers.length) / last;
    const none = numbers.length < kinds.length ? [["-", style("--soft")]] : [];
    return new Map([...numbers.map((each, rank) => [each, ofHue(hue(rank))]), ...none]);
  }
  if (kinds.length <= onLight.length)
    return new Map(kinds.map((each, place) => [each, (isDark() ? onDark : onLight)[place]]));
  // No two alike, as the golden angle never comes round; neighbors differ in lightness too.
  return new Map(kinds.map((each, place) => [each, ofHue(137.508 * place % 360, [3.2, 5, 8][place % 3])]));
}

let kindColors = new Map();
const kind = run => by && by.value ? valuesOf(by.value)[run] : run;
const color = run => kindColors.get(kind(run));

function drawLegend() {
  const named = by.value ? [...kindColors] : [];
  const parts = named.length > 12 && named.length > new Set(kindColors.values()).size
    ? named.filter((_, n) => n % Math.ceil(named.length / 8) === 0 || n === named.length - 1) : named;
  const chips = parts.slice(0, 40).map(([name, own]) => {
    const mark = make("i");
    mark.style.background = own;
    return make("span", {}, mark, ` ${shortened(name)}`);
  });
  find("legend").replaceChildren(...(chips.length ? [by.value === repeated ? "" : `${by.value}: `, ...chips] : []));
  find("legend").hidden = !chips.length;
}

const shortened = text => text.trim() === "" || !Number.isFinite(Number(text)) ? text : String(+Number(text).toPrecision(4));

// Curves

function smoothed(values) {  // an exponential moving average that starts without a bias
  const keep = Number(smooth.value);
  let sum = 0, weight = 0;
  return keep === 0 ? values : values.map(value => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + 1 - keep;
    return sum / weight;
  });
}

const axis = () => ({gridcolor: style("--line"), zeroline: false, automargin: true, tickformat: "~g"});
const base = () => ({
  font: {color: style("--text"), size: 12}, ...(isPaper() ? {width: 340, height: 250} : {}), paper_bgcolor: style("--page"), plot_bgcolor: style("--page"),
  hovermode: "closest", hoverlabel: {namelength: -1, align: "left"},
});
const options = {responsive: true, displaylogo: false, modeBarButtons: buttons};

function shownOf(plot) {  // without training if it is not wanted and there are evaluations
  const some = plot.curves.filter(curve => isShown(curve.run)), evals = some.filter(curve => curve.split === "eval");
  return training.checked || !evals.length ? some : evals;
}

const isMean = () => by !== null && by.value !== "" && mean.checked;

function average(curves) {  // of the runs that have begun and not ended at a step: mean and deviation of a sample
  const all = curves.map(curve => {
    const values = curve.split === "eval" ? curve.values : smoothed(curve.values);
    return {first: curve.steps[0], last: curve.steps[curve.steps.length - 1],
            at: new Map(curve.steps.map((step, index) => [step, [curve[over.value][index], values[index]]]))};
  });
  const steps = [...new Set(curves.flatMap(curve => curve.steps))].sort((a, b) => a - b), found = [];
  steps.forEach(step => {
    const going = all.filter(each => each.first <= step && step <= each.last), points = going.map(each => each.at.get(step));
    if (points.includes(undefined)) return;  // of another set of runs, the mean would jump
    const [places, values] = [0, 1].map(part => points.map(point => point[part])), count = points.length;
    const of = list => list.reduce((sum, each) => sum + each, 0) / count, center = of(values);
    const squares = values.reduce((sum, each) => sum + (each - center) ** 2, 0);
    found.push(values.includes(null) ? {x: of(places), y: null, count} : {
      x: of(places), y: center, deviation: count > 1 ? Math.sqrt(squares / (count - 1)) : 0, least: Math.min(...values), count});
  });
  return found;
}

function means(plot) {  // of the runs of one color a line, and a band of one deviation on both sides
  const parts = new Map();
  shownOf(plot).forEach(curve => {
    const key = color(curve.run) + curve.split;
    parts.set(key, [...parts.get(key) || [], curve]);
  });
  const drawn = [...parts.values()].map(curves => {
    const isEval = curves[0].split === "eval", own = color(curves[0].run), points = average(curves), x = points.map(each => each.x);
    const known = points.filter(each => each.y !== null), back = [...known].reverse();
    const low = each => log.checked ? Math.max(each.y - each.deviation, each.least) : each.y - each.deviation;  // a logarithm has none of 0
    const line = {
      x, y: points.map(each => each.y), showlegend: false, mode: points.length > 1 ? "lines" : "lines+markers",
      line: {color: own, width: 2, dash: isEval ? "solid" : "dot"}, hovertemplate: "%{text}<br>%{x}: %{y:.6g}<extra></extra>",
      text: points.map(each => escaped(`${kind(curves[0].run)}, ${curves[0].split}: mean of ${each.count}, deviation ${shortened(String(each.deviation))}`)),
    };
    return [{
      x: [...known, ...back].map(each => each.x), y: [...known.map(each => each.y + each.deviation), ...back.map(low)],
      fill: "toself", fillcolor: `${own}${isEval ? "40" : "1c"}`, mode: "lines", line: {width: 0}, hoverinfo: "skip", showlegend: false,
    }, line];
  });
  return [...drawn.map(each => each[0]), ...drawn.map(each => each[1])];  // no band hides a line
}

function traces(plot) {  // curves of one color are one trace, with gaps: a plot of 300 runs stays quick
  const found = new Map();
  shownOf(plot).forEach(curve => {
    const isEval = curve.split === "eval", own = color(curve.run), key = own + curve.split;
    if (!found.has(key)) {
      found.set(key, {
        x: [], y: [], text: [], showlegend: false,
        mode: isEval && !isMany ? "lines+markers" : "lines",
        line: {color: own, width: isEval && !isMany ? 2 : 1, dash: isEval ? "solid" : "dot"}, marker: {size: isEval ? 5 : 1},
        hovertemplate: "%{text}<br>%{x}: %{y:.6g}<extra></extra>",
      });
    }
    if (curve.values.length === 1) Object.assign(found.get(key), {mode: "lines+markers", marker: {size: 6}});
    const {x, y, text} = found.get(key), name = escaped(`${data.runs[curve.run]}, ${curve.split}`);
    if (x.length) {
      x.push(null);
      y.push(null);
      text.push("");
    }
    const values = isEval ? curve.values : smoothed(curve.values);
    curve[over.value].forEach((at, index) => {
      x.push(at);
      y.push(values[index]);
      text.push(name);
    });
  });
  return [...found.values()];
}

function most(values) {  // a range without the few values that would flatten the rest; else undefined
  const sorted = values.filter(each => each !== null).sort((a, b) => a - b);
  const at = part => sorted[Math.round(part * (sorted.length - 1))], low = at(0.02), high = at(0.98);
  const isFar = at(0) < low - 2 * (high - low) || at(1) > high + 2 * (high - low);
  return sorted.length > 50 && isFar && !log.checked ? [1.1 * low - 0.1 * high, 1.1 * high - 0.1 * low] : undefined;
}

function draw(element, plot) {
  const drawn = isMean() ? means(plot) : traces(plot), range = most(drawn.flatMap(each => each.y));
  Plotly.react(element, drawn, {
    ...base(), title: {text: escaped(plot.name), font: {size: 14}, x: 0.02, xanchor: "left"},
    margin: {l: 45, r: 10, t: 35, b: 40}, xaxis: {...axis(), title: {text: over.value, font: {size: 12}}},
    yaxis: {...axis(), type: log.checked ? "log" : "linear", range, autorange: !range},
  }, options);
}

function told(plot) {  // what someone hears who cannot see the plot
  const shown = shownOf(plot);
  const ends = shown.slice(0, 10).map(curve => {
    const last = curve.values[curve.values.length - 1], step = curve.steps[curve.steps.length - 1];
    return `${data.runs[curve.run]}, ${curve.split}: ${last === null ? "not finite" : +last.toPrecision(4)} at step ${step}`;
  });
  const more = shown.length > 10 ? `; and ${shown.length - 10} more` : "";
  return `${plot.name} over ${over.value}, ${shown.length} curves. ${ends.join("; ")}${more}`;
}

function last(plot, run) {  // the last value of an evaluation, else of training
  const of = plot.curves.filter(each => each.run === run), curve = of.find(each => each.split === "eval") || of[0];
  return curve ? curve.values[curve.values.length - 1] : null;
}

function explained(name) {  // how well a binding explains the first metric's last values: F, of their ranks by its quarters or values
  const values = [...data.runs.keys()].map(run => last(data.plots[0], run));
  const runs = [...data.runs.keys()].filter(run => values[run] !== null).sort((a, b) => values[a] - values[b]);
  const ranks = new Map(runs.map((run, rank) => [run, rank])), of = run => data.bindings[name][run];
  const kinds = [...new Set(runs.map(of))], isNumeric = kinds.every(each => Number.isFinite(Number(each)));
  kinds.sort((a, b) => a - b);
  const quarter = isNumeric && kinds.length > 4 ? kinds.length / 4 : 1, groups = new Map();
  runs.forEach(run => {
    const key = Math.floor(kinds.indexOf(of(run)) / quarter);
    groups.set(key, [...groups.get(key) || [], ranks.get(run)]);
  });
  const mean = list => list.reduce((a, b) => a + b, 0) / list.length, all = [...ranks.values()];
  const spread = (list, center) => list.reduce((sum, each) => sum + (each - center) ** 2, 0);
  const within = [...groups.values()].reduce((sum, list) => sum + spread(list, mean(list)), 0);
  const free = runs.length - groups.size;
  return free > 0 && groups.size > 1 ? (spread(all, mean(all)) / (within || 1e-9) - 1) * free / (groups.size - 1) : 0;
}

function drawAgainst() {  // the last value of a metric over a binding, a point for each run
  const [x, y] = [binding.value, metric.value], plot = data.plots.find(each => each.name === y);
  const isNumeric = data.bindings[x].every(each => each === "-" || Number.isFinite(Number(each)));
  const runs = [...data.runs.keys()].filter(i => isShown(i) && !(isNumeric && data.bindings[x][i] === "-"));
  const values = runs.map(i => isNumeric ? Number(data.bindings[x][i]) : data.bindings[x][i]);
  const isSpread = isNumeric && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 50;
  const ticks = new Set(values).size <= 8 && isSpread ? {tickvals: [...new Set(values)]} : {};
  const title = text => ({text: escaped(text), font: {size: 12}});
  Plotly.react(against, [{
    x: values, y: runs.map(run => last(plot, run)), text: runs.map(i => escaped(data.runs[i])), mode: "markers", type: "scatter",
    marker: {size: 9, color: runs.map(color)}, hovertemplate: "%{text}<br>%{x}: %{y:.6g}<extra></extra>",
  }], {
    ...base(), margin: {l: 45, r: 10, t: 10, b: 40},
    xaxis: {...axis(), ...ticks, type: isNumeric ? (isSpread ? "log" : "linear") : "category", title: title(x)},
    yaxis: {...axis(), type: log.checked ? "log" : "linear", title: title(y)},
  }, options);
}

// What is out of sight is drawn when it comes near, or before the page is printed.
const stale = new Map(), near = new Set();
const watcher = new IntersectionObserver(changes => {
  changes.forEach(each => each.isIntersecting ? near.add(each.target) : near.delete(each.target));
  drawStale([...near]);
}, {rootMargin: "400px"});
function drawStale(elements) {
  elements.filter(each => stale.has(each)).forEach(each => {
    const draws = stale.get(each);
    stale.delete(each);
    draws();
  });
}
function turn(paper) {  // on paper a page is light, and everything is drawn
  root.classList.toggle("paper", paper);
  if (!data.plots.length) return;
  drawAll();
  if (paper) drawStale([...stale.keys()]);
}
addEventListener("beforeprint", () => turn(true));
addEventListener("afterprint", () => turn(false));

function drawAll() {
  kindColors = ofKinds();
  document.querySelectorAll("#choose-runs label").forEach((label, run) => {
    label.hidden = filtered.has(run);
    label.querySelector("i").style.background = color(run);
  });
  document.querySelectorAll("#results tbody th").forEach(cell => {
    if (numbers.has(cell.textContent)) cell.style.boxShadow = `inset 4px 0 ${color(numbers.get(cell.textContent))}`;
  });
  if (by) drawLegend();
  data.plots.forEach((plot, index) => {
    const element = find(`plot-${index}`);
    element.setAttribute("aria-label", told(plot));
    stale.set(element, () => draw(element, plot));
  });
  if (find("against")) {
    against.setAttribute("aria-label", `The last ${metric.value} over ${binding.value}, a point for each run`);
    stale.set(against, drawAgainst);
  }
  drawStale([...near]);
}

function choice(id, text, values, first) {
  const choices = values.map(each => make("option", {value: each, textContent: each}));
  if (first) choices.unshift(make("option", {value: "", textContent: first}));
  const select = make("select", {id}, ...choices);
  select.addEventListener("change", drawAll);
  return make("label", {}, `${text} `, select);
}

function option(id, text, attributes) {
  const input = make("input", {id, ...attributes});
  input.addEventListener("change", drawAll);
  return make("label", {}, ...(input.type === "checkbox" ? [input, ` ${text}`] : [`${text} `, input]));
}

const boxes = () => [...document.querySelectorAll("#choose-runs input")];
function readBoxes() {
  hidden.clear();
  boxes().forEach((box, index) => box.checked || hidden.add(index));
  drawAll();
}

function chooseRun(name, index) {
  const box = make("input", {type: "checkbox", checked: true, id: `run-${index}`});
  box.addEventListener("change", readBoxes);
  return make("label", {}, box, " ", make("i"), ` ${name}`);
}

function allOrNone() {
  const button = make("button", {textContent: "all or none"});
  button.addEventListener("click", () => {
    const all = hidden.size > 0;
    boxes().forEach(box => box.checked = all);
    readBoxes();
  });
  return button;
}

function plotElement(id) {
  const element = make("div", {id, className: "plot"});
  element.setAttribute("role", "group");  // no "img": Plotly's buttons are in it
  watcher.observe(element);
  return element;
}

if (data.plots.length) {
  const range = {type: "range", min: 0, max: 0.98, step: 0.02, value: 0};
  find("controls").append(
    make("p", {id: "choose-runs", className: "choose"}, ...(data.runs.length > 2 ? [allOrNone(), " "] : []),
         ...data.runs.map(chooseRun)),
    make("p", {className: "choose"}, choice("over", "over", ["steps", "minutes"]), option("log", "logarithmic", {type: "checkbox"}),
         option("training", "training too", {type: "checkbox", checked: !isMany}),
         ...(bindings.length ? [choice("by", "colors by", [...(isRepeated ? [repeated] : []), ...bindings], "run"),
                               option("mean", "mean and band of each color", {type: "checkbox", checked: isRepeated})] : []), option("smooth", "smoothing of training", range)),
    make("p", {id: "legend", className: "choose", hidden: true}),
    make("p", {className: "about", textContent:
      "Dotted: training, the mean of each loop. Solid: evaluation. A band is one standard deviation of the runs of a color on both sides of their mean."}));
  find("plots").append(...data.plots.map((_, index) => plotElement(`plot-${index}`)));
  if (bindings.length) {
    find("comparison").append(
      make("h3", {textContent: "Results over bindings"}),
      make("p", {className: "choose"}, choice("metric", "the last", data.plots.map(each => each.name)), choice("binding", "over", bindings)),
      plotElement("against"));
  }
}
const [over, by, smooth, log, training, mean] = ["over", "by", "smooth", "log", "training", "mean"].map(find);
if (bindings.length) {
  const first = bindings.map(each => [explained(each), each]).reduce((best, each) => each[0] > best[0] ? each : best)[1];
  binding.value = first;
  if (isMany || isRepeated) by.value = isRepeated && new Set(groups).size <= onLight.length ? repeated : first;
}

// Tables

function sortable(table, number) {  // a click on a head sorts the rows, a text above leaves some out
  const body = table.tBodies[0], rows = [...body.rows];
  if (rows.length < 3) return;
  const value = text => text.trim() === "" || text === "-" ? NaN : Number(text.replace(/[,%]| s$/g, ""));
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = make("button", {}, ...head.childNodes);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const texts = new Map(rows.map(row => [row, row.cells[column].textContent]));
      rows.sort((a, b) => {
        const [one, other] = [texts.get(a), texts.get(b)], [x, y] = [value(one), value(other)];
        const order = Number.isNaN(x) || Number.isNaN(y)
          ? Number.isNaN(x) - Number.isNaN(y) || one.localeCompare(other, "en", {numeric: true}) : x - y;
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
  if (rows.length > (table.closest("#results") ? 8 : 20)) filter(table, rows, number);
}

function filter(table, rows, index) {  // that of the results leaves runs out of the curves too
  const isResults = table.closest("#results") !== null, box = make("input", {type: "search", id: `filter-${index}`});
  let waits = 0;
  table.parentElement.before(make("label", {className: "filter"}, isResults ? "runs with " : "rows with ", box));
  box.addEventListener("input", () => {
    rows.forEach(row => {
      row.hidden = !row.textContent.toLowerCase().includes(box.value.toLowerCase());
      const run = isResults ? numbers.get(row.cells[0].textContent) : undefined;
      if (run !== undefined) filtered[row.hidden ? "add" : "delete"](run);
    });
    clearTimeout(waits);
    if (isResults && data.plots.length) waits = setTimeout(drawAll, 200);
  });
}

function linkStarts() {  // from each run's results to its last start, with the command of TensorBoard
  const heads = document.querySelectorAll("#environment th"), places = new Map([...heads].map(each => [each.textContent, each]));
  document.querySelectorAll("#results tbody th").forEach((cell, index) => {
    const place = places.get(cell.textContent);
    if (!place) return;
    place.id = `start-${index}`;
    cell.replaceChildren(make("a", {href: `#start-${index}`, title: "its last start, and TensorBoard"}, ...cell.childNodes));
  });
}

linkStarts();
document.querySelectorAll("tbody th").forEach(cell => {  // a long name shows its end
  cell.title = cell.textContent;
  if (!cell.firstElementChild) cell.replaceChildren(make("bdi", {}, ...cell.childNodes));
});
document.querySelectorAll("table").forEach(sortable);

// A live page is loaded again, with what was chosen.
const kept = [...document.querySelectorAll("select, .choose input, .filter input")];
const state = each => each.type === "checkbox" ? each.checked : each.value;
const heads = [...document.querySelectorAll("thead th")];
if (document.querySelector("meta[http-equiv=refresh]")) {
  const at = JSON.parse(sessionStorage.getItem("report") || "{}");
  kept.filter(each => at.kept && each.id in at.kept).forEach(each => {
    each[each.type === "checkbox" ? "checked" : "value"] = at.kept[each.id];
    if (each.type === "search") each.dispatchEvent(new Event("input"));
  });
  boxes().forEach((box, index) => box.checked || hidden.add(index));
  (at.sorts || []).filter(([index]) => heads[index]).forEach(([index, clicks]) => {
    for (let n = 0; n < clicks; n++) heads[index].firstChild.click();
  });
  addEventListener("load", () => scrollTo(0, at.scroll || 0));
  addEventListener("pagehide", () => sessionStorage.setItem("report", JSON.stringify({
    scroll: scrollY, kept: Object.fromEntries(kept.map(each => [each.id, state(each)])),
    sorts: heads.map((head, index) => [index, ["ascending", "descending"].indexOf(head.getAttribute("aria-sort")) + 1]).filter(each => each[1]),
  })));
}
dark.addEventListener("change", () => data.plots.length && drawAll());
if (data.plots.length) drawAll();
