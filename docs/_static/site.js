// What scrolls can be reached with the keyboard (WCAG 2.1.1).
function makeReachable() {
  document.querySelectorAll("pre, .table-wrapper, .math, .cell_output, .output").forEach(each => {
    if (each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight + 1) each.tabIndex = 0;
  });
}
addEventListener("load", makeReachable);
addEventListener("resize", makeReachable);
