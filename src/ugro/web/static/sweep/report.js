// @ts-check
// A sweep's charts in a file that needs no server.

import { SweepCharts } from "/static/sweep/charts.js";

const given = JSON.parse(document.getElementById("sweep-document")?.textContent ?? "{}");
const charts = new SweepCharts(/** @type {HTMLElement} */ (document.getElementById("sweep-charts")));
charts.show(given);
if (given.importance) charts.importances.show(given.importance);
else charts.importances.say(given.importance_problem ?? "");
