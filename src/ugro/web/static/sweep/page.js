// @ts-check
// The page of a sweep in the dashboard: its charts follow it while it runs.

import { refresh } from "/static/parts.js";
import { SweepCharts } from "/static/sweep/charts.js";

const EVERY_MS = 5000; // a trial's end is recorded a moment after its job's, which is what a page hears of
const source = document.getElementById("sweep-document");
const place = document.getElementById("sweep-charts");
let shown = "";
let explained = "";

if (source && place) {
  const charts = new SweepCharts(place);
  const update = () => {
    const text = source.textContent ?? "{}";
    if (text === shown) charts.refilter();
    else charts.show(JSON.parse(text));
    shown = text;
    explain(charts, JSON.parse(text));
  };
  update();
  document.addEventListener("ugro-parts", update);
  setInterval(() => {
    if (!document.hidden && !JSON.parse(source.textContent ?? "{}").is_over) refresh();
  }, EVERY_MS);
}

/** Asks for importances again when more trials are complete. */
async function explain(charts, given) {
  const now = String(given.trials.filter(([, , state]) => state === "complete").length);
  if (now === explained || given.metric === null) return;
  explained = now;
  try {
    const answer = await fetch(`/sweeps/${given.id}/importance`);
    const found = await answer.json();
    if (answer.ok) charts.importances.show(found.importance);
    else charts.importances.say(found.error.message, found.error.hint ?? "");
  } catch (error) {
    if (!(error instanceof TypeError || error instanceof SyntaxError)) throw error;
    explained = ""; // the next change asks again
    charts.importances.say("The agent does not answer.");
  }
}
