// @ts-check
// Trials as points: the history of a sweep, and its metric over one parameter.

import { drawBest, drawMark, lookOf } from "/static/sweep/marks.js";
import { Plot } from "/static/sweep/plot.js";

const REACH = 24; // pixels from the pointer to a point
const MARGIN = 0.06; // of the height, so that no mark lies on the frame
const MANY = 300; // points, which then are smaller

/** @typedef {import("./model.js").Model} Model @typedef {import("./selection.js").Trial} Trial */

export class Scatter extends Plot {
  /** @type {{trial: Trial, across: number, up: number, key: number}[]} shares of the axes */
  #points = [];
  /** @type {Model | null} */
  #model = null;
  #x = null;
  #line = [];
  #chosen = null;

  /**
   * @param {Model} model @param {import("./axes.js").Axis} x @param {(trial: Trial) => number | null} valueOf on x
   * @param {{hasLine?: boolean}} [options] the best value so far
   */
  show(model, x, valueOf, { hasLine = false } = {}) {
    this.#model = model;
    this.#x = x;
    this.#points = model.measured.flatMap((trial) => {
      const [across, up] = [x.share(valueOf(trial)), model.metric.share(model.valueOf(trial))];
      return across === null || up === null ? [] : [{ trial, across, up, key: valueOf(trial) ?? 0 }];
    });
    this.#points.sort((left, right) => left.across - right.across || left.trial.number - right.trial.number);
    this.#line = hasLine ? this.#bestSoFar() : [];
    this.excuse(this.#points.length ? null : "No trial has a value yet.");
    this.describe(`${this.label}: ${model.metric.name} of ${this.#points.length} trials over ${x.name}. ${model.bestWords}`);
    this.isTableOld = true;
    this.ask();
  }

  #bestSoFar() {
    const { model, points } = { model: this.#model, points: this.#points };
    let best = null;
    return points.map(({ trial, across, up }) => {
      const value = model.valueOf(trial);
      if (best === null || model.isBetter(value, best.value)) best = { value, up };
      return { across, up: best.up };
    });
  }

  // --- drawing --------------------------------------------------------------------------------------------------

  #box = { left: 0, top: 10, width: 0, height: 0 };

  #fit(pen, { width, height }) {
    const texts = this.#model.metric.marks(5).map((one) => this.#model.metric.text(one));
    const left = Math.ceil(Math.max(20, ...texts.map((text) => pen.measureText(text).width))) + 12;
    this.#box = { left, top: 10, width: Math.max(10, width - left - 14), height: Math.max(10, height - 10 - 26) };
  }

  #at({ across, up }) {
    const { left, top, width, height } = this.#box;
    return { x: left + across * width, y: top + (1 - MARGIN - (1 - 2 * MARGIN) * up) * height };
  }

  paint(pen, size, colours) {
    if (!this.#model || !this.#points.length) return;
    this.#fit(pen, size);
    this.#drawAxes(pen, size, colours);
    const best = this.#points.find(({ trial }) => trial.number === this.#model.best);
    const order = [...this.#points].sort((left, right) => Number(this.#model.isSelected(left.trial)) - Number(this.#model.isSelected(right.trial)));
    for (const one of order) this.#drawPoint(pen, one, colours);
    if (this.#line.length > 1) this.#drawLine(pen, colours);
    if (best) {
      const { x, y } = this.#at(best);
      drawBest(pen, x, y, colours, size.width);
    }
  }

  #drawAxes(pen, size, colours) {
    const { left, top, width, height } = this.#box;
    const { metric } = this.#model;
    pen.strokeStyle = colours.grid;
    pen.fillStyle = colours.faint;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const mark of metric.marks(5)) {
      const y = Math.round(this.#at({ across: 0, up: metric.share(mark) ?? 0 }).y) + 0.5;
      stroke(pen, left, y, left + width, y);
      pen.fillText(metric.text(mark), left - 6, y);
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    let free = -Infinity; // where the last text ends
    for (const mark of this.#x.marks(Math.max(2, Math.floor(width / 70)))) {
      const x = left + (this.#x.share(mark) ?? 0) * width;
      const text = shortened(pen, this.#x.text(mark), Math.max(60, width / 4));
      const half = pen.measureText(text).width / 2;
      const middle = Math.min(Math.max(x, half + 2), size.width - half - 2);
      stroke(pen, x, top + height, x, top + height + 4);
      if (middle - half < free + 6) continue;
      free = middle + half;
      pen.fillText(text, middle, top + height + 8);
    }
    pen.strokeStyle = colours.faint;
    stroke(pen, left, top + height + 0.5, left + width, top + height + 0.5);
  }

  #drawPoint(pen, one, colours) {
    const { state } = one.trial;
    const isSelected = this.#model.isSelected(one.trial);
    if (!isSelected && this.#model.selection.isHidden(state)) return;
    const { x, y } = this.#at(one);
    pen.globalAlpha = isSelected ? (this.#points.length > MANY ? 0.7 : 0.9) : 0.15;
    pen.fillStyle = pen.strokeStyle = colours.lines[lookOf(state).color];
    drawMark(pen, state, x, y, this.#points.length > MANY ? 2.5 : 3.5);
    pen.globalAlpha = 1;
  }

  #drawLine(pen, colours) {
    pen.strokeStyle = colours.lines[0];
    pen.lineWidth = 2;
    pen.beginPath();
    this.#line.forEach((one, at) => {
      const { x, y } = this.#at(one);
      if (at) pen.lineTo(x, this.#at(this.#line[at - 1]).y);
      pen.lineTo(x, y);
    });
    pen.stroke();
  }

  paintOver(pen, size, colours) {
    if (this.#chosen === null || !this.#points[this.#chosen]) return;
    const { x, y } = this.#at(this.#points[this.#chosen]);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 2;
    pen.strokeRect(x - 7, y - 7, 14, 14);
  }

  // --- reading --------------------------------------------------------------------------------------------------

  point(place) {
    let best = { distance: REACH, at: null };
    this.#points.forEach((one, at) => {
      const { x, y } = this.#at(one);
      const distance = Math.hypot(x - place.x, y - place.y);
      if (distance < best.distance) best = { distance, at };
    });
    if (best.at !== null) this.#choose(best.at);
  }

  leave() {
    this.#chosen = null;
    this.askOver(); // what was said stays, with its link
  }

  key(event) {
    const last = this.#points.length - 1;
    const at = this.#chosen;
    const by = event.shiftKey ? 10 : 1;
    const moves = { ArrowRight: (at ?? -1) + by, ArrowLeft: (at ?? last + 1) - by, Home: 0, End: last };
    if (last < 0) return false;
    if (event.key === "Enter" && at !== null) return this.#model.open(this.#points[at].trial);
    if (moves[event.key] === undefined) return false;
    this.#choose(Math.min(last, Math.max(0, moves[event.key])));
    return true;
  }

  #choose(at) {
    this.#chosen = at;
    const { trial } = this.#points[at];
    this.say(this.#model.words(trial), this.#model.hrefOf(trial));
    this.askOver();
  }

  rows() {
    const { metric } = this.#model;
    const isOwn = this.#x.name === "trial";
    return {
      header: ["trial", "state", ...(isOwn ? [] : [this.#x.name]), metric.name],
      rows: this.#points.map(({ trial, key }) => [trial.number, trial.state, ...(isOwn ? [] : [this.#x.isChoice ? this.#x.text(key) : key]), this.#model.valueOf(trial) ?? ""]),
    };
  }
}

/** @param {CanvasRenderingContext2D} pen @param {string} text @param {number} most */
export function shortened(pen, text, most) {
  if (pen.measureText(text).width <= most) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > most) length -= 1;
  return `${text.slice(0, length)}…`;
}

export function stroke(pen, fromX, fromY, toX, toY) {
  pen.beginPath();
  pen.moveTo(fromX, fromY);
  pen.lineTo(toX, toY);
  pen.stroke();
}
