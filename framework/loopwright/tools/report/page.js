
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
// Each at least 3:1 on its background (WCAG 1.4.11).
const onLight = ["#1f77b4", "#c45500", "#1a7f37", "#d62728", "#8250c8",
                 "#8c564b", "#c2378f", "#6b7280", "#7c7a00", "#0e7f8c"];
const onDark = ["#58a6ff", "#ff9e4a", "#56d364", "#ff7b72", "#c297ff",
                "#d3a18f", "#f778ba", "#a8b3bf", "#d4d04a", "#4fd1de"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const by = document.getElementById("by"), smooth = document.getElementById("smooth");

function contrast(red, green, blue) {  // on the page, WCAG 2; parts from 0 to 1
  const [r, g, b] = [red, green, blue].map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const own = 0.2126 * r + 0.7152 * g + 0.0722 * b, page = dark.matches ? 0.009 : 1;
  return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
}

function ofHue(hue) {  // the color of a hue, in degrees, that has 3.2 : 1 on the page
  for (let light = dark.matches ? 0.45 : 0.55; light > 0 && light < 1; light += dark.matches ? 0.03 : -0.03) {
    const part = n => {
      const k = (n + hue / 30) % 12;
      return light - 0.65 * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1));
    };
    const parts = [part(0), part(8), part(4)];
    if (contrast(...parts) >= 3.2)
      return "#" + parts.map(c => Math.round(255 * c).toString(16).padStart(2, "0")).join("");
  }
}

function color(index) {  // of a run: its own, or that of its value of a binding
  const values = by && by.value ? data.bindings[by.value] : data.runs.map((_, i) => i);
  const kinds = [...new Set(values)], numbers = kinds.map(Number);
  if (by && by.value && numbers.every(Number.isFinite)) {  // from blue for the least to red
    const rank = numbers.slice().sort((a, b) => a - b).indexOf(Number(values[index]));
    return ofHue(240 - 240 * rank / Math.max(kinds.length - 1, 1));
  }
  const place = kinds.indexOf(values[index]);
  if (kinds.length <= onLight.length) return (dark.matches ? onDark : onLight)[place];
  return ofHue(137.508 * place % 360);  // no two alike, as the golden angle never comes round
}

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
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const over = document.getElementById("over"), log = document.getElementById("log");
const buttons = [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]];  // none uploads
const hidden = new Set();
const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // Plotly reads HTML

function draw(element, plot) {
  const traces = plot.curves.filter(curve => !hidden.has(curve.run)).map(curve => ({
    x: curve[over.value], y: curve.split === "train" ? smoothed(curve.values) : curve.values, name: escaped(`${data.runs[curve.run]}, ${curve.split}`),
    mode: curve.split === "eval" ? "lines+markers" : "lines", showlegend: false,
    line: {color: color(curve.run), width: curve.split === "eval" ? 2 : 1,
           dash: curve.split === "eval" ? "solid" : "dot"},
    hoverlabel: {namelength: -1},
  }));
  const axis = {gridcolor: style("--line"), zeroline: false, automargin: true, exponentformat: "e"};
  Plotly.react(element, traces, {
    font: {color: style("--text")}, paper_bgcolor: style("--page"), plot_bgcolor: style("--page"),
    title: {text: escaped(plot.name), font: {size: 14}, x: 0.02, xanchor: "left"}, margin: {l: 45, r: 10, t: 35, b: 40},
    xaxis: {...axis, title: {text: over.value, font: {size: 12}}},
    yaxis: {...axis, type: log.checked ? "log" : "linear"},
  }, {responsive: true, displaylogo: false, modeBarButtons: buttons});
  element.setAttribute("aria-label", told(plot));
}

function told(plot) {  // what someone hears who cannot see the plot
  const shown = plot.curves.filter(curve => !hidden.has(curve.run));
  const ends = shown.slice(0, 10).map(curve => {
    const last = curve.values[curve.values.length - 1], step = curve.steps[curve.steps.length - 1];
    return `${data.runs[curve.run]}, ${curve.split}: ${last === null ? "not finite" : +last.toPrecision(4)} at step ${step}`;
  });
  const more = shown.length > 10 ? `; and ${shown.length - 10} more` : "";
  return `${plot.name} over ${over.value}, ${shown.length} curves. ${ends.join("; ")}${more}`;
}

function drawAll() {
  document.querySelectorAll("#choose-runs i").forEach((mark, index) => {
    mark.style.background = color(index);
  });
  data.plots.forEach((plot, index) => draw(document.getElementById(`plot-${index}`), plot));
  drawAgainst();
}

function drawAgainst() {  // the last value of a metric over a binding, a point for each run
  const element = document.getElementById("against");
  if (!element) return;
  const [x, y] = ["binding", "metric"].map(name => document.getElementById(name).value);
  const plot = data.plots.find(each => each.name === y);
  const last = index => {
    const of = plot.curves.filter(each => each.run === index);
    const curve = of.find(each => each.split === "eval") || of[0];
    return curve ? curve.values[curve.values.length - 1] : null;
  };
  const runs = data.runs.map((_, i) => i).filter(i => !hidden.has(i));
  const numeric = data.bindings[x].every(each => Number.isFinite(Number(each)));
  const values = runs.map(i => numeric ? Number(data.bindings[x][i]) : data.bindings[x][i]);
  const spread = numeric && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 50;
  const axis = {gridcolor: style("--line"), zeroline: false, automargin: true, exponentformat: "e"};
  Plotly.react(element, [{
    x: values, y: runs.map(last), text: runs.map(i => escaped(data.runs[i])), mode: "markers",
    type: "scatter", marker: {size: 9, color: runs.map(color)}, hovertemplate: "%{text}<br>%{x}: %{y}<extra></extra>",
  }], {
    font: {color: style("--text")}, paper_bgcolor: style("--page"), plot_bgcolor: style("--page"),
    margin: {l: 45, r: 10, t: 10, b: 40}, xaxis: {...axis, type: numeric ? (spread ? "log" : "linear") : "category", title: {text: escaped(x), font: {size: 12}}},
    yaxis: {...axis, type: log.checked ? "log" : "linear", title: {text: escaped(y), font: {size: 12}}},
  }, {responsive: true, displaylogo: false, modeBarButtons: buttons});
  element.setAttribute("aria-label", `${y} over ${x}, ${runs.length} runs`);
}

function sortable(table) {  // a click on a head sorts the rows, a text above leaves some out
  const body = table.tBodies[0], rows = [...body.rows];
  if (rows.length < 3) return;
  const value = text => text.trim() === "" || text === "-" ? NaN : Number(text.replace(/[,%]| s$/g, ""));
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((a, b) => {
        const [one, other] = [a, b].map(row => row.cells[column].textContent);
        const [x, y] = [value(one), value(other)];
        const order = Number.isNaN(x) || Number.isNaN(y)
          ? Number.isNaN(x) - Number.isNaN(y) || one.localeCompare(other, "en", {numeric: true}) : x - y;
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
  if (rows.length <= 8) return;
  const label = document.createElement("label"), box = document.createElement("input");
  box.type = "search";
  label.className = "filter";
  label.append("rows with ", box);
  table.parentElement.before(label);
  box.addEventListener("input", () => rows.forEach(row => {
    row.hidden = !row.textContent.toLowerCase().includes(box.value.toLowerCase());
  }));
}

function chooseRun(name, index) {
  const label = document.createElement("label"), box = document.createElement("input");
  box.type = "checkbox";
  box.checked = true;
  box.id = `run-${index}`;
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(index); else hidden.add(index);
    drawAll();
  });
  label.append(box, " ", document.createElement("i"), ` ${name}`);
  document.getElementById("choose-runs").append(label);
}

if (data.plots.length) {
  data.plots.forEach((_, index) => {
    const element = document.createElement("div");
    element.className = "plot";
    element.setAttribute("role", "img");
    element.id = `plot-${index}`;
    document.getElementById("plots").append(element);
  });
  data.runs.forEach(chooseRun);
  const all = document.createElement("button");
  all.textContent = "all or none";
  all.addEventListener("click", () => {
    const none = hidden.size === 0;
    document.querySelectorAll("#choose-runs input").forEach((box, index) => {
      box.checked = !none;
      if (none) hidden.add(index); else hidden.delete(index);
    });
    drawAll();
  });
  if (data.runs.length > 2) document.getElementById("choose-runs").prepend(all, " ");
  [over, by, smooth, ...document.querySelectorAll("#binding, #metric")].forEach(each => each && each.addEventListener("change", drawAll));
  log.addEventListener("change", drawAll);
  dark.addEventListener("change", drawAll);
  drawAll();
}
document.querySelectorAll("table").forEach(sortable);
const kept = [...document.querySelectorAll("select, .choose input")].filter(each => each.id);
if (document.querySelector("meta[http-equiv=refresh]")) {  // a live page is loaded again
  const at = JSON.parse(sessionStorage.getItem("report") || "{}");
  kept.forEach(each => {
    if (each.id in at && at[each.id] !== (each.type === "checkbox" ? each.checked : each.value)) {
      if (each.type === "checkbox") each.checked = at[each.id]; else each.value = at[each.id];
      each.dispatchEvent(new Event("change"));
    }
  });
  scrollTo(0, at.scroll || 0);
  addEventListener("pagehide", () => sessionStorage.setItem("report", JSON.stringify({scroll: scrollY,
    ...Object.fromEntries(kept.map(each => [each.id, each.type === "checkbox" ? each.checked : each.value]))})));
}
