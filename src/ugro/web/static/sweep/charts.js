// @ts-check
// All charts of a sweep, in a page of the dashboard or in a file: history, parallel coordinates, importances, contour,
// slices. What is selected in one shows in all of them, and in the table of trials.

import { Axis } from "/static/sweep/axes.js";
import { Contour } from "/static/sweep/contour.js";
import { Importances } from "/static/sweep/importance.js";
import { Model } from "/static/sweep/model.js";
import { Parallel } from "/static/sweep/parallel.js";
import { Scatter } from "/static/sweep/scatter.js";
import { Selection } from "/static/sweep/selection.js";

const REST_MS = 120; // after the last change of a selection the rest follows: while a range is dragged it would be too much
const MOST_SLICES = 24;
const SLICES = "The metric over each parameter.";

export class SweepCharts {
  #place;
  #selection = new Selection();
  /** @type {Model | null} */
  #model = null;
  #isRead = false;
  #timer = 0;
  #history = new Scatter("History");
  #parallel = new Parallel("Parallel coordinates");
  #contour = new Contour("Contour");
  #importances = new Importances();
  /** @type {Map<string, Scatter>} */
  #slices = new Map();
  #sections;
  #slicesGrid = Object.assign(document.createElement("div"), { className: "slices" });
  #look = lookOfAddress();
  #tools = new Tools(this.#look, () => this.#relook());

  /** @param {HTMLElement} place */
  constructor(place) {
    this.#place = place;
    const { section } = panels();
    this.#sections = {
      history: section("history", "History", "Each mark is a trial; the line is the best value so far.", this.#tools.log, this.#history.element),
      parallel: section("parallel", "Parallel coordinates", "Each line is a trial; the better, the stronger. Drag along an axis to select a range.", null, this.#parallel.element),
      importance: section("importance", "Importance", "The share of the differences between complete trials that each parameter explains (PED-ANOVA).", null, this.#importances.element),
      contour: section("contour", "Contour", "The metric between the trials, for two parameters. Pale: far from any trial.", this.#tools.pair, this.#contour.element),
      slices: section("slices", "Slices", SLICES, null, this.#slicesGrid),
    };
    place.replaceChildren(...Object.values(this.#sections));
    this.#selection.addEventListener("change", () => this.#selected());
  }

  get importances() {
    return this.#importances;
  }

  /** @param {import("./model.js").Given} given */
  show(given) {
    this.#model = new Model(given, this.#selection, this.#look.isLog);
    if (!this.#isRead) this.#selection.read(location.search);
    this.#isRead = true;
    const { parameters, measured, axes, trials } = this.#model;
    this.#sections.history.hidden = measured.length < 2;
    this.#sections.parallel.hidden = axes.length < 2 || !trials.length;
    this.#sections.importance.hidden = given.metric === null || parameters.length < 1;
    this.#sections.contour.hidden = given.metric === null || parameters.length < 2;
    this.#sections.slices.hidden = measured.length < 2;
    this.#tools.show(this.#model);
    const last = trials.reduce((most, trial) => Math.max(most, trial.number), 1);
    const numbers = new Axis({ name: "trial", kind: "int", low: trials[0]?.number ?? 1, high: last });
    this.#history.show(this.#model, numbers, (trial) => trial.number, { hasLine: true });
    if (axes.length > 1) this.#parallel.show(this.#model);
    if (parameters.length > 1) this.#contour.show(this.#model, ...this.#tools.chosen(this.#model));
    this.#showSlices();
    this.refilter();
  }

  #showSlices() {
    const { parameters } = this.#model;
    const shown = parameters.slice(0, MOST_SLICES);
    for (const axis of shown) if (!this.#slices.has(axis.name)) this.#slices.set(axis.name, new Scatter(axis.name));
    const about = parameters.length > shown.length ? ` These are the first ${shown.length} of ${parameters.length} parameters.` : "";
    const words = this.#sections.slices.querySelector("header .muted");
    if (words) words.textContent = SLICES + about;
    const figures = shown.map((axis) => this.#slices.get(axis.name).element);
    if (figures.some((figure, at) => this.#slicesGrid.children[at] !== figure)) this.#slicesGrid.replaceChildren(...figures);
    shown.forEach((axis, at) => this.#slices.get(axis.name).show(this.#model, axis, (trial) => trial.at[at]));
  }

  #relook() {
    writeAddress((query) => {
      this.#look.isLog === null ? query.delete("log") : query.set("log", this.#look.isLog ? "1" : "0");
      for (const [name, value] of [["across", this.#look.across], ["up", this.#look.up]]) value ? query.set(name, value) : query.delete(name);
    });
    this.show(this.#model.given);
  }

  // --- the selection --------------------------------------------------------------------------------------------

  #selected() {
    this.#parallel.selected();
    clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => {
      for (const chart of [this.#history, this.#contour, ...this.#slices.values()]) chart.ask();
      writeAddress((query) => {
        const written = new URLSearchParams(this.#selection.written(query.toString()));
        for (const name of [...query.keys()]) query.delete(name);
        for (const [name, value] of written) query.append(name, value);
      });
      this.refilter();
    }, REST_MS);
  }

  /** Hides the rows of trials that are not selected. */
  refilter() {
    const selected = new Set(this.#model.trials.filter((trial) => this.#selection.holds(trial)).map((trial) => String(trial.number)));
    const rows = [...document.querySelectorAll("tr[data-trial]")];
    for (const row of rows) /** @type {HTMLElement} */ (row).hidden = !this.#selection.isEmpty && !selected.has(row.getAttribute("data-trial") ?? "");
    const count = document.getElementById("selected-trials");
    if (!count) return;
    const shown = rows.filter((row) => !(/** @type {HTMLElement} */ (row).hidden)).length;
    const missing = selected.size - shown;
    count.textContent = this.#selection.isEmpty ? "" : `${selected.size} of ${this.#model.trials.length} are selected: ${this.#selection.words}${missing > 0 ? `; ${missing} of them are not in this table` : ""}`;
  }
}

// --- panels and controls ------------------------------------------------------------------------------------------

function panels() {
  const section = (name, title, says, tools, content) => {
    const made = Object.assign(document.createElement("section"), { className: `panel sweep-${name}` });
    made.setAttribute("aria-labelledby", `sweep-${name}-title`);
    const header = document.createElement("header");
    const about = Object.assign(document.createElement("span"), { className: "muted small", textContent: says });
    header.append(Object.assign(document.createElement("h2"), { id: `sweep-${name}-title`, textContent: title }), about);
    if (tools) header.append(tools);
    made.append(header, content);
    return made;
  };
  return { section };
}

/** The controls: a logarithmic metric, and the two parameters of the contour. */
class Tools {
  log = document.createElement("label");
  pair = Object.assign(document.createElement("span"), { className: "push form" });
  #tick = Object.assign(document.createElement("input"), { type: "checkbox" });
  #selects = ["Horizontal", "Vertical"].map((text) => this.#select(text));
  #look;

  constructor(look, tell) {
    this.#look = look;
    this.log.className = "push";
    this.log.append(this.#tick, " Log scale");
    this.#tick.addEventListener("change", () => {
      look.isLog = this.#tick.checked;
      tell();
    });
    this.#selects.forEach((select, at) => {
      select.addEventListener("change", () => {
        look[at ? "up" : "across"] = select.value;
        // Both the same would be a line: the other one takes what this one had.
        const other = this.#selects[1 - at];
        if (other.value === select.value) look[at ? "across" : "up"] = [...select.options].map((one) => one.value).find((name) => name !== select.value) ?? "";
        tell();
      });
    });
  }

  #select(text) {
    const select = document.createElement("select");
    const label = document.createElement("label");
    label.append(`${text} `, select);
    this.pair.append(label);
    return select;
  }

  /** @param {Model} model */
  show(model) {
    this.#tick.checked = model.metric.isLog;
    this.#tick.disabled = model.metric.low <= 0;
    this.log.title = model.metric.low <= 0 ? "only if all values are above 0" : "";
    const names = model.parameters.map((axis) => axis.name);
    const chosen = this.chosen(model);
    this.#selects.forEach((select, at) => {
      if ([...select.options].map((one) => one.value).join("\n") !== names.join("\n")) select.replaceChildren(...names.map((name) => new Option(name, name)));
      select.value = names[chosen[at]] ?? "";
    });
  }

  /** The places of the two parameters. @param {Model} model @returns {[number, number]} */
  chosen(model) {
    const places = [this.#look.across, this.#look.up].map((name) => model.parameters.findIndex((axis) => axis.name === name));
    const across = places[0] >= 0 ? places[0] : places[1] === 0 ? 1 : 0;
    const up = places[1] >= 0 && places[1] !== across ? places[1] : across === 0 ? 1 : 0;
    return [across, up];
  }
}

function lookOfAddress() {
  const query = new URLSearchParams(location.search);
  const log = query.get("log");
  return { isLog: log === null ? null : log === "1", across: query.get("across") ?? "", up: query.get("up") ?? "" };
}

/** @param {(query: URLSearchParams) => void} change */
function writeAddress(change) {
  const url = new URL(location.href);
  change(url.searchParams);
  try {
    history.replaceState(history.state, "", url);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // browsers allow no other address of some files
  }
}
