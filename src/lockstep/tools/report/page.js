
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll(".chart")];
  const figures = charts.map((chart) => JSON.parse(chart.nextElementSibling.textContent));
  const narrow = matchMedia("(max-width: 40rem)");
  // A finger that moves over a chart scrolls the page.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  // Of plotly's buttons those that send nothing anywhere.
  const buttons = [["toImage", "pan2d", "zoom2d", "resetScale2d"]];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const template = () => {
    const axis = {
      gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
      automargin: true, title: { standoff: 8 },
    };
    return {
      layout: {
        colorway: COLOURWAY,
        dragmode,
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--text") },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 8, r: 12, t: 28, b: 8 },
        hoverlabel: { bgcolor: colour("--ground"), bordercolor: colour("--line"), font: { color: colour("--text") }, namelength: -1 },
        legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal", bgcolor: "rgba(0,0,0,0)" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--text") },
        xaxis: axis,
        yaxis: axis,
      },
    };
  };

  const draw = () => {
    const theme = template();
    charts.forEach((chart, k) => {
      const layout = { ...figures[k].layout, template: theme, autosize: true };
      const config = { displaylogo: false, responsive: true, modeBarButtons: buttons };
      Plotly.react(chart, figures[k].data, layout, { ...config, displayModeBar: narrow.matches ? false : "hover" });
    });
  };

  charts.forEach((chart, k) => {
    const log = chart.parentElement.querySelector("input");
    if (log) {
      log.checked = false; // a browser that goes back remembers
      log.addEventListener("change", () => {
        figures[k].layout.yaxis = { ...figures[k].layout.yaxis, type: log.checked ? "log" : "linear" };
        draw();
      });
    }
  });
  draw();
  dark.addEventListener("change", draw);
})();
