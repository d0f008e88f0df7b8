
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
// Each at least 3:1 on its background (WCAG 1.4.11).
const onLight = ["#1f77b4", "#c45500", "#1a7f37", "#d62728", "#8250c8",
                 "#8c564b", "#c2378f", "#6b7280", "#7c7a00", "#0e7f8c"];
const onDark = ["#58a6ff", "#ff9e4a", "#56d364", "#ff7b72", "#c297ff",
                "#d3a18f", "#f778ba", "#a8b3bf", "#d4d04a", "#4fd1de"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = index => (dark.matches ? onDark : onLight)[index % onLight.length];
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const over = document.getElementById("over"), log = document.getElementById("log");
const buttons = [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]];  // none uploads
const hidden = new Set();
const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // Plotly reads HTML

function draw(element, plot) {
  const traces = plot.curves.filter(curve => !hidden.has(curve.run)).map(curve => ({
    x: curve[over.value], y: curve.values, name: escaped(`${data.runs[curve.run]}, ${curve.split}`),
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
  over.addEventListener("change", drawAll);
  log.addEventListener("change", drawAll);
  dark.addEventListener("change", drawAll);
  drawAll();
}
