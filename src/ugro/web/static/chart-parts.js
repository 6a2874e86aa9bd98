// @ts-check
// The elements of a chart, and its legend.

import { DASHES } from "/static/chart-draw.js";

const MOST_NAMED = 20;
let count = 0;

/** Creates all elements of a chart, not yet attached. */
export function build() {
  count += 1;
  const id = `chart-${count}`;
  const figure = made("figure", "chart");
  const head = made("div", "chart-head");
  const title = Object.assign(made("figcaption", "chart-title"), { id: `${id}-title` });
  const reset = button("Whole range", "button");
  reset.hidden = true;
  const tableButton = button("Data table", "button");
  tableButton.setAttribute("aria-expanded", "false");
  const buttons = made("div", "chart-tools");
  buttons.append(reset, tableButton);
  head.append(title, buttons);
  const plot = made("div", "chart-plot");
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  const [base, over] = [document.createElement("canvas"), document.createElement("canvas")];
  const empty = made("div", "chart-empty");
  empty.hidden = true;
  plot.append(base, over, empty);
  const readout = made("div", "chart-readout");
  readout.setAttribute("role", "status");
  const legend = made("ul", "chart-legend");
  legend.setAttribute("aria-label", "Curves");
  const table = Object.assign(made("div", "chart-table"), { hidden: true, tabIndex: 0 });
  table.setAttribute("role", "region");
  table.setAttribute("aria-labelledby", title.id);
  const csv = button("Download CSV", "button");
  figure.append(head, plot, readout, legend, table);
  return { figure, title, reset, tableButton, plot, base, over, empty, readout, legend, table, csv };
}

/**
 * A button for each curve, which takes it away and brings it back. Kept while the names stay: a focus is not lost.
 * @param {HTMLElement} list @param {import("./chart-draw.js").Series[]} all @param {Set<string>} hidden
 */
export function fillLegend(list, all, hidden, chart) {
  const shown = all.slice(0, MOST_NAMED);
  const names = JSON.stringify(shown.map((one) => [one.key, one.name, one.color, one.isFaint]));
  list.hidden = all.length < 2;
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...shown.map((series) => entry(series, chart)));
    if (all.length > shown.length) {
      const more = document.createElement("li");
      more.textContent = `and ${all.length - shown.length} more`;
      list.append(more);
    }
  }
  list.querySelectorAll("button").forEach((one) => {
    one.setAttribute("aria-pressed", String(!hidden.has(one.dataset.key ?? "")));
  });
}

function entry(series, chart) {
  const one = button("");
  one.dataset.key = series.key;
  one.title = series.name;
  const name = document.createElement("span");
  name.textContent = series.name;
  one.append(sample(series), name);
  one.addEventListener("click", () => chart.toggle(series.key));
  for (const event of ["pointerenter", "focus"]) one.addEventListener(event, () => chart.choose(series.key));
  for (const event of ["pointerleave", "blur"]) one.addEventListener(event, () => chart.choose(null));
  const item = document.createElement("li");
  item.append(one);
  return item;
}

function sample(series) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  for (const [name, value] of Object.entries({ width: 22, height: 10, "aria-hidden": "true" })) svg.setAttribute(name, String(value));
  for (const [name, value] of Object.entries({ x1: 0, y1: 5, x2: 22, y2: 5 })) line.setAttribute(name, String(value));
  line.style.stroke = `var(--series-${(series.color % 8) + 1})`;
  line.style.strokeWidth = "2.5";
  line.style.strokeDasharray = (series.isFaint ? [3, 3] : DASHES[series.dash % DASHES.length]).join(" ");
  line.style.opacity = series.isFaint ? "0.5" : "1";
  svg.append(line);
  return svg;
}

/** The pen of a canvas that is as large as its place, in sharp pixels. @param {HTMLCanvasElement} canvas */
export function fitted(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
}

/** Saves a text as a file. @param {string} name @param {string} text */
export function saveCsv(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = `${name.replace(/[^\w.-]+/g, "_")}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function made(name, className) {
  return Object.assign(document.createElement(name), { className });
}

function button(text, className = "") {
  return Object.assign(document.createElement("button"), { type: "button", textContent: text, className });
}
