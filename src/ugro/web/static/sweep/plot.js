// @ts-check
// What all charts of a sweep share: a figure with two layers, a reading in words, and its trials as a table and as CSV.

import { build, fitted, saveCsv } from "/static/chart-parts.js";
import { coloursOf, onTheme } from "/static/chart-theme.js";
import { csvLine } from "/static/chart-words.js";
import { plainTable } from "/static/tables.js";

const MOST_ROWS = 200;

/** @typedef {{width: number, height: number}} Size */

export class Plot {
  parts = build();
  #colours = null;
  #isAsked = false;

  /** @param {string} label */
  constructor(label) {
    const { plot, legend, tableButton, csv } = this.parts;
    this.label = label;
    this.parts.title.textContent = label;
    legend.hidden = true;
    plot.addEventListener("pointermove", (event) => this.point(this.placeOf(event)));
    plot.addEventListener("pointerleave", () => this.leave());
    plot.addEventListener("keydown", (event) => this.#key(event));
    tableButton.addEventListener("click", () => this.#toggleTable());
    csv.addEventListener("click", () => saveCsv(this.label, this.#csv()));
    new ResizeObserver(() => this.ask()).observe(plot);
    onTheme(() => {
      this.#colours = null;
      this.ask();
    });
  }

  get element() {
    return this.parts.figure;
  }

  /** @param {string} sentence for screen readers */
  describe(sentence) {
    this.parts.plot.setAttribute("aria-label", sentence);
  }

  /** Draws soon, once for all that has changed. */
  ask() {
    if (this.#isAsked) return;
    this.#isAsked = true;
    requestAnimationFrame(() => {
      this.#isAsked = false;
      this.#draw();
    });
  }

  #draw() {
    const { plot, base, over, table } = this.parts;
    const size = { width: plot.clientWidth, height: plot.clientHeight };
    if (!size.width || !size.height) return;
    this.#colours ??= coloursOf(this.parts.figure);
    for (const [canvas, paint] of [[base, this.paint], [over, this.paintOver]]) {
      const pen = fitted(canvas, size.width, size.height);
      pen.font = `12px ${getComputedStyle(plot).fontFamily}`;
      paint.call(this, pen, size, this.#colours);
    }
    if (!table.hidden && this.isTableOld) this.#fillTable();
  }

  /** Draws only what follows the pointer. */
  askOver() {
    const { plot, over } = this.parts;
    if (!this.#colours || !plot.clientWidth) return;
    const pen = fitted(over, plot.clientWidth, plot.clientHeight);
    pen.font = `12px ${getComputedStyle(plot).fontFamily}`;
    this.paintOver(pen, { width: plot.clientWidth, height: plot.clientHeight }, this.#colours);
  }

  /** Says what is pointed at, with a link to the trial's job. @param {string} text @param {string | null} [href] */
  say(text, href = null) {
    const { readout } = this.parts;
    if (readout.dataset.text === text) return;
    readout.dataset.text = text;
    readout.replaceChildren(text);
    if (href) readout.append(" · ", Object.assign(document.createElement("a"), { href, textContent: "open its job" }));
  }

  /** Says why there is nothing to see; null: there is. @param {string | null} text */
  excuse(text) {
    const { empty, tableButton } = this.parts;
    empty.hidden = text === null;
    empty.textContent = text ?? "";
    tableButton.hidden = text !== null;
  }

  placeOf(event) {
    const box = this.parts.plot.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.key(event)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  // --- as a table -----------------------------------------------------------------------------------------------

  isTableOld = true;

  #toggleTable() {
    const { table, tableButton } = this.parts;
    table.hidden = !table.hidden;
    tableButton.setAttribute("aria-expanded", String(!table.hidden));
    if (!table.hidden) this.#fillTable();
  }

  #fillTable() {
    this.isTableOld = false;
    const { header, rows } = this.rows();
    const note = Object.assign(document.createElement("p"), { className: "chart-readout" });
    note.textContent = rows.length > MOST_ROWS ? `Shown: ${MOST_ROWS} of ${rows.length} rows. The CSV has all of them.` : "";
    this.parts.table.replaceChildren(note, this.parts.csv, plainTable(header, rows.slice(0, MOST_ROWS)));
  }

  #csv() {
    const { header, rows } = this.rows();
    return [header, ...rows].map((row) => csvLine(row)).join("");
  }

  // --- for each kind of chart -----------------------------------------------------------------------------------

  /** @param {CanvasRenderingContext2D} pen @param {Size} size @param {import("../chart-draw.js").Colours} colours */
  paint(pen, size, colours) {}

  /** The layer above. @param {CanvasRenderingContext2D} pen @param {Size} size @param {import("../chart-draw.js").Colours} colours */
  paintOver(pen, size, colours) {}

  /** @param {{x: number, y: number}} place */
  point(place) {}

  leave() {}

  /** Whether the key means something here. @param {KeyboardEvent} event @returns {boolean} */
  key(event) {
    return false;
  }

  /** @returns {{header: string[], rows: (string | number)[][]}} */
  rows() {
    return { header: [], rows: [] };
  }
}
