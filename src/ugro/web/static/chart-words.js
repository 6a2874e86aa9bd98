// @ts-check
// A chart as text, for screen readers and for people who want numbers: a sentence, a table, and CSV.

import { nearest, placeWritten, written } from "/static/chart-scale.js";

const MOST_DESCRIBED = 3;
const MOST_ROWS = 200;
const MOST_COLUMNS = 20;

/** @param {string} label @param {string} kind @param {import("./chart-draw.js").Series[]} all */
export function sentence(label, kind, all) {
  const full = all.filter((series) => series.means.some((value) => value !== null));
  if (!full.length) return `${label}: no values yet.`;
  const sentences = full.slice(0, MOST_DESCRIBED).map((series) => described(series, kind, full.length > 1));
  const more = full.length > MOST_DESCRIBED ? ` And ${full.length - MOST_DESCRIBED} more curves.` : "";
  const over = { step: "steps", samples: "samples", time: "time", seconds: "time since the start" }[kind];
  return `${label} over ${over}. ${sentences.join(" ")}${more}`;
}

/** @param {string} kind @param {import("./chart-draw.js").Series[]} all */
export function tableOf(kind, all) {
  const { shown, places } = chosen(all);
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const text of [headOf(kind), ...shown.map((series) => series.name)]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = text;
    head.append(cell);
  }
  const body = table.createTBody();
  const span = places.length ? places[places.length - 1] - places[0] : 0;
  for (const x of places) {
    const row = body.insertRow();
    const first = document.createElement("th");
    first.scope = "row";
    first.textContent = placeWritten(/** @type {any} */ (kind), x, span);
    row.append(first);
    for (const series of shown) row.insertCell().textContent = cellOf(series, x);
  }
  return table;
}

/** Every bin of every curve, including those that the table omits. */
export function csvOf(kind, all) {
  const lines = [csvLine(["curve", kind, "mean", "min", "max"])];
  for (const series of all) {
    series.xs.forEach((x, at) => {
      const values = [series.raw[at], series.mins[at], series.maxs[at]].map((value) => value ?? "");
      lines.push(csvLine([series.name, x, ...values]));
    });
  }
  return lines.join("");
}

/** @param {(string | number)[]} cells */
export function csvLine(cells) {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return `${cells.map((cell) => quoted(String(cell))).join(",")}\n`;
}

/** A sentence about what the table omits, or an empty string. */
export function leftOut(all) {
  const { shown, places, total } = chosen(all);
  const words = [];
  if (places.length < total) words.push(`${places.length} of ${total} places`);
  if (shown.length < all.length) words.push(`${shown.length} of ${all.length} curves`);
  return words.length ? `Shown: ${words.join(", ")}. The CSV has all of them.` : "";
}

function chosen(all) {
  const shown = all.slice(0, MOST_COLUMNS);
  const xs = [...new Set(shown.flatMap((series) => series.xs))].sort((left, right) => left - right);
  const every = Math.max(1, Math.ceil(xs.length / MOST_ROWS));
  const places = xs.filter((_, at) => at % every === 0 || at === xs.length - 1);
  return { shown, places, total: xs.length };
}

function headOf(kind) {
  return { step: "Step", samples: "Samples", time: "Time", seconds: "Since the start" }[kind];
}

function cellOf(series, x) {
  const at = nearest(series.xs, x);
  if (series.xs[at] !== x) return "";
  return series.raw[at] === null ? "not a number" : written(series.raw[at]);
}

function described(series, kind, isNamed) {
  const values = series.raw.filter((value) => value !== null);
  const [first, last] = [values[0], values[values.length - 1]];
  let low = 0;
  series.raw.forEach((value, at) => {
    if (value !== null && (series.raw[low] === null || value < series.raw[low])) low = at;
  });
  const verb = Math.abs(last - first) <= 0.01 * (Math.abs(first) + Math.abs(last)) ? "stays near" : last < first ? "falls to" : "rises to";
  const begin = verb === "stays near" ? "" : ` from ${written(first)}`;
  const name = isNamed ? `${series.name} ` : "It ";
  const where = kind === "step" || kind === "samples" ? `${kind === "step" ? "step" : "sample"} ${placeWritten(kind, series.xs[low])}` : placeWritten(kind, series.xs[low], 1e5);
  const odd = series.odd.length ? `, and is not a number at ${series.odd.length} ${series.odd.length === 1 ? "place" : "places"}` : "";
  return `${name}${verb.replace(" to", "")}${begin}${verb === "stays near" ? "" : " to"} ${written(last)}, lowest ${written(series.raw[low])} at ${where}${odd}.`;
}
