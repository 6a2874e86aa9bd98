// @ts-check
// Importances: the share of the differences between trials that each parameter explains, as bars in a table.

import { saveCsv } from "/static/chart-parts.js";
import { csvLine } from "/static/chart-words.js";

const SPACE = "http://www.w3.org/2000/svg";

export class Importances {
  element = Object.assign(document.createElement("div"), { className: "importances" });
  /** @type {{parameter: string, share: number}[]} */
  #found = [];

  constructor() {
    this.say("Computing…");
  }

  /** @param {{parameter: string, share: number}[]} found the most important first */
  show(found) {
    this.#found = found;
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const text of ["Parameter", "Importance", "Share"]) head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: text }));
    const body = table.createTBody();
    for (const { parameter, share } of found) {
      const row = body.insertRow();
      row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: parameter }));
      row.insertCell().append(bar(share));
      row.insertCell().textContent = share.toFixed(3);
    }
    const csv = Object.assign(document.createElement("button"), { type: "button", className: "button", textContent: "Download CSV" });
    csv.addEventListener("click", () => saveCsv("importances", this.#csv()));
    this.element.replaceChildren(table, csv);
  }

  /** Why there are none. @param {string} text @param {string} [hint] */
  say(text, hint = "") {
    const lines = [text, hint].filter(Boolean).map((line) => Object.assign(document.createElement("p"), { textContent: line }));
    const empty = Object.assign(document.createElement("div"), { className: "empty" });
    empty.append(...lines);
    this.element.replaceChildren(empty);
  }

  #csv() {
    return [["parameter", "importance"], ...this.#found.map(({ parameter, share }) => [parameter, share])].map((row) => csvLine(row)).join("");
  }
}

function bar(share) {
  const svg = document.createElementNS(SPACE, "svg");
  const rectangle = document.createElementNS(SPACE, "rect");
  for (const [name, value] of Object.entries({ viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({ width: Math.max(0.5, 100 * share), height: 8 })) rectangle.setAttribute(name, String(value));
  svg.append(rectangle);
  return svg;
}
