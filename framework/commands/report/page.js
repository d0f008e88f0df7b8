
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colors = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd",
                "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"];
const over = document.getElementById("over"), log = document.getElementById("log");
const buttons = [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]];  // none uploads
const hidden = new Set();
const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // Plotly reads HTML

function draw(element, plot) {
  const traces = plot.curves.filter(curve => !hidden.has(curve.run)).map(curve => ({
    x: curve[over.value], y: curve.values, name: escaped(`${data.runs[curve.run]}, ${curve.split}`),
    mode: curve.split === "eval" ? "lines+markers" : "lines", showlegend: false,
    line: {color: colors[curve.run % colors.length], width: curve.split === "eval" ? 2 : 1,
           dash: curve.split === "eval" ? "solid" : "dot"},
    hoverlabel: {namelength: -1},
  }));
  const axis = {gridcolor: "#eceff2", zeroline: false, automargin: true, exponentformat: "e"};
  Plotly.react(element, traces, {
    title: {text: escaped(plot.name), font: {size: 14}, x: 0.02, xanchor: "left"}, margin: {l: 45, r: 10, t: 35, b: 40},
    xaxis: {...axis, title: {text: over.value, font: {size: 12}}},
    yaxis: {...axis, type: log.checked ? "log" : "linear"},
  }, {responsive: true, displaylogo: false, modeBarButtons: buttons});
}

function drawAll() {
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
  const text = document.createElement("span");
  text.textContent = name;
  text.style.color = colors[index % colors.length];
  label.append(box, " ", text);
  document.getElementById("choose-runs").append(label);
}

if (data.plots.length) {
  data.plots.forEach((_, index) => {
    const element = document.createElement("div");
    element.className = "plot";
    element.id = `plot-${index}`;
    document.getElementById("plots").append(element);
  });
  data.runs.forEach(chooseRun);
  over.addEventListener("change", drawAll);
  log.addEventListener("change", drawAll);
  drawAll();
}
