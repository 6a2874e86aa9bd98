// @ts-check
// Parallel coordinates: a line for each trial through its parameters and its metric. Drag along an axis to select a range.

import { AxisStrip } from "/static/sweep/strip.js";
import { fillStates, haloed, lookOf } from "/static/sweep/marks.js";
import { Plot } from "/static/sweep/plot.js";
import { shortened, stroke } from "/static/sweep/scatter.js";

const TOP = 34;
const BOTTOM = 16;
const NONE = 18; // below an axis: trials without a value on it
const SLOT = 104; // the least width of an axis with its texts
const REACH = 10;

/** @typedef {import("./model.js").Model} Model @typedef {import("./selection.js").Trial} Trial */

export class Parallel extends Plot {
  /** @type {Model | null} */
  #model = null;
  /** @type {AxisStrip[]} */
  #strips = [];
  /** @type {Trial[]} */
  #order = []; // the best ones are drawn last
  #hasNone = false;
  #chosen = null;
  #scroll = document.createElement("div");

  /** @param {string} label */
  constructor(label) {
    super(label);
    const { plot, reset } = this.parts;
    plot.before(this.#scroll);
    this.#scroll.className = "parallel-scroll";
    this.#scroll.append(plot);
    plot.classList.add("parallel");
    plot.setAttribute("role", "group");
    plot.removeAttribute("tabindex");
    reset.textContent = "Clear selection";
    reset.addEventListener("click", () => this.#model?.selection.clear());
    plot.addEventListener("dblclick", (event) => {
      if (event.target instanceof HTMLCanvasElement) this.#model?.selection.clear();
    });
  }

  /** @param {Model} model */
  show(model) {
    const before = this.#model?.axes.map((axis) => axis.name).join("\n");
    this.#model = model;
    this.#order = [...model.trials].sort((left, right) => model.goodness(left) - model.goodness(right));
    this.#hasNone = model.trials.some((trial) => trial.at.includes(null));
    this.parts.plot.style.minWidth = `${model.axes.length * SLOT}px`;
    if (before !== model.axes.map((axis) => axis.name).join("\n")) this.#arrange();
    this.#strips.forEach((strip, at) => strip.show(model.axes[at]));
    fillStates(this.parts.legend, model.trials, model.selection);
    this.describe(`${model.trials.length} trials on ${model.axes.length} axes: ${model.axes.map((axis) => axis.name).join(", ")}. ${model.bestWords}`);
    this.isTableOld = true;
    this.selected();
  }

  /** After a change of the selection. */
  selected() {
    const { selection, trials } = this.#model;
    this.parts.reset.hidden = selection.isEmpty;
    const count = trials.filter((trial) => selection.holds(trial)).length;
    this.say(selection.isEmpty ? `${trials.length} trials. Drag along an axis to select a range.` : `${count} of ${trials.length} trials: ${selection.words}`);
    fillStates(this.parts.legend, trials, selection);
    this.isTableOld = true;
    this.ask();
  }

  #arrange() {
    for (const strip of this.#strips) strip.element.remove();
    this.#strips = this.#model.axes.map((axis) => new AxisStrip(axis, this.#model.selection, (by, from) => this.#focus(by, from)));
    this.parts.plot.append(...this.#strips.map((strip) => strip.element));
    this.#strips[0].handles[0].tabIndex = 0; // one stop for Tab; the arrow keys go on from there
  }

  #focus(by, from) {
    const all = this.#strips.flatMap((strip) => strip.handles);
    const next = all[Math.min(all.length - 1, Math.max(0, all.indexOf(from) + by))];
    for (const one of all) one.tabIndex = one === next ? 0 : -1;
    next.focus();
  }

  // --- drawing --------------------------------------------------------------------------------------------------

  #size = { width: 0, height: 0 };

  #x(at) {
    const count = this.#model.axes.length;
    const edge = Math.min(52, this.#size.width / (2 * count));
    return count < 2 ? this.#size.width / 2 : edge + (at * (this.#size.width - edge - SLOT * 0.6)) / (count - 1);
  }

  get #bottom() {
    return this.#size.height - BOTTOM - (this.#hasNone ? NONE : 0);
  }

  #y(at, value) {
    const share = this.#model.axes[at].share(value);
    return share === null ? this.#bottom + NONE : TOP + (1 - share) * (this.#bottom - TOP);
  }

  paint(pen, size, colours) {
    if (!this.#model) return;
    this.#size = size;
    const { trials, selection } = this.#model;
    for (const isSelected of [false, true]) {
      for (const trial of this.#order) {
        if (selection.holds(trial) === isSelected && !selection.isHidden(trial.state)) this.#line(pen, trial, this.#style(trial, isSelected, colours));
      }
    }
    const best = trials.find((trial) => trial.number === this.#model.best);
    if (best && selection.holds(best)) this.#line(pen, best, { colour: colours.ink, alpha: 1, width: 2.75, dash: lookOf(best.state).dash });
    this.#model.axes.forEach((axis, at) => this.#axis(pen, at, axis, colours));
    this.#strips.forEach((strip, at) => strip.place(this.#x(at), TOP, this.#bottom));
  }

  #style(trial, isSelected, colours) {
    const look = lookOf(trial.state);
    const strength = (trial.state === "complete" ? 0.2 : 0.4) + 0.6 * this.#model.goodness(trial) ** 2;
    const alpha = isSelected ? Math.min(0.9, strength * (this.#model.trials.length > 200 ? 0.7 : 1.1)) : 0.07;
    return { colour: isSelected ? colours.lines[look.color] : colours.faint, alpha, width: 1.3, dash: look.dash };
  }

  #line(pen, trial, { colour, alpha, width, dash }) {
    pen.strokeStyle = colour;
    pen.globalAlpha = alpha;
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.setLineDash(dash);
    pen.beginPath();
    trial.at.forEach((value, at) => pen.lineTo(this.#x(at), this.#y(at, value)));
    pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  #axis(pen, at, axis, colours) {
    const [x, bottom] = [Math.round(this.#x(at)) + 0.5, this.#bottom];
    const room = at + 1 < this.#model.axes.length ? this.#x(at + 1) - x - 12 : this.#size.width - x - 8;
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.25;
    stroke(pen, x, TOP, x, bottom);
    pen.textAlign = "left";
    for (const mark of axis.marks(Math.max(2, Math.floor((bottom - TOP) / 34)))) {
      const y = this.#y(at, mark);
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 1.25;
      stroke(pen, x, y, x + 4, y);
      haloed(pen, shortened(pen, axis.text(mark), room), x + 7, y, colours.faint, colours.surface);
    }
    if (this.#hasNone && this.#model.trials.some((trial) => trial.at[at] === null)) {
      haloed(pen, "none", x + 7, bottom + NONE, colours.faint, colours.surface);
    }
    pen.font = pen.font.replace("12px", "600 12px");
    const isFirst = x < 40;
    pen.textAlign = isFirst ? "left" : "center";
    haloed(pen, shortened(pen, axis.name, room + 4), isFirst ? 4 : x, 12, colours.ink, colours.surface);
    pen.font = pen.font.replace("600 12px", "12px");
    this.#range(pen, x, axis, colours);
  }

  #range(pen, x, axis, colours) {
    const range = this.#model.selection.range(axis.name);
    if (!range) return;
    const [low, high] = axis.ends(range).map((share) => TOP + (1 - share) * (this.#bottom - TOP));
    pen.fillStyle = colours.ink;
    pen.globalAlpha = 0.16;
    pen.fillRect(x - 9, high, 18, Math.max(3, low - high));
    pen.globalAlpha = 1;
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(x - 9, high, 18, Math.max(3, low - high));
  }

  paintOver(pen, size, colours) {
    if (this.#chosen === null) return;
    this.#line(pen, this.#chosen, { colour: colours.surface, alpha: 0.85, width: 6, dash: [] });
    this.#line(pen, this.#chosen, { colour: colours.lines[lookOf(this.#chosen.state).color], alpha: 1, width: 3, dash: lookOf(this.#chosen.state).dash });
  }

  // --- reading --------------------------------------------------------------------------------------------------

  point(place) {
    if (!this.#model || this.#strips.some((strip) => strip.isDragged)) return;
    const found = this.#nearest(place);
    if (found === null || found === this.#chosen) return;
    this.#chosen = found;
    this.say(this.#model.words(found), this.#model.hrefOf(found));
    this.askOver();
  }

  #nearest({ x, y }) {
    const { axes, trials, selection } = this.#model;
    let left = 0;
    while (left + 2 < axes.length && this.#x(left + 1) < x) left += 1;
    if (axes.length < 2) return null;
    const share = Math.min(1, Math.max(0, (x - this.#x(left)) / (this.#x(left + 1) - this.#x(left))));
    let best = { distance: REACH, trial: null };
    for (const trial of trials) {
      if (!selection.holds(trial)) continue;
      const at = (1 - share) * this.#y(left, trial.at[left]) + share * this.#y(left + 1, trial.at[left + 1]);
      if (Math.abs(at - y) < best.distance) best = { distance: Math.abs(at - y), trial };
    }
    return best.trial;
  }

  leave() {
    this.#chosen = null;
    this.askOver();
  }

  key(event) {
    if (event.key !== "Escape" || this.#model.selection.isEmpty) return false;
    this.#model.selection.clear();
    return true;
  }

  rows() {
    const { axes, trials, selection } = this.#model;
    const cell = (axis, value) => (value === null ? "" : axis.isChoice ? axis.text(value) : value);
    return {
      header: ["trial", "job", "state", ...axes.map((axis) => axis.name)],
      rows: trials.filter((trial) => selection.holds(trial)).map((trial) => [trial.number, trial.job ?? "", trial.state, ...axes.map((axis, at) => cell(axis, trial.at[at]))]),
    };
  }
}
