// @ts-check
// The curves of an experiment's report, in a file that needs no server.

import "/static/chart.js";

const given = JSON.parse(document.getElementById("experiment-curves")?.textContent ?? "[]");
for (const { place, label, x, series } of given) {
  const chart = /** @type {any} */ (document.createElement("ugro-chart"));
  chart.setAttribute("label", label);
  chart.setAttribute("tall", "");
  chart.data = { x, series };
  document.getElementById(place)?.append(chart);
}
