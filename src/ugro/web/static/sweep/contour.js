// @ts-check
// The metric over two parameters: bands of colour with lines between them, the trials, and the best one.

import { drawBest, drawMark, lookOf } from "/static/sweep/marks.js";
import { Plot } from "/static/sweep/plot.js";
import { shortened, stroke } from "/static/sweep/scatter.js";
import { FAR, LEAST_POINTS, contour, levels, places, surface } from "/static/sweep/surface.js";

const FINE = 44; // places along an axis of numbers
const BANDS = 9;
const SCALE = 74; // the width of the colours with their values
const BOTTOM = 40;

/** @typedef {import("./model.js").Model} Model @typedef {import("./selection.js").Trial} Trial */

export class Contour extends Plot {
  /** @type {Model | null} */
  #model = null;
  #at = [0, 1]; // which axes
  /** @type {{trial: Trial, x: number, y: number, value: number}[]} */
  #points = [];
  /** @type {import("./surface.js").Surface | null} */
  #surface = null;
  /** @type {[number, number, number, number][]} */
  #lines = [];
  #cursor = null; // a cell: [column, row]

  /** @param {Model} model @param {number} across @param {number} up numbers of two parameters */
  show(model, across, up) {
    this.#model = model;
    this.#at = [across, up];
    this.#cursor = null;
    const [x, y] = this.#axes();
    this.#points = model.measured.flatMap((trial) => {
      const [right, high] = [x.share(trial.at[across]), y.share(trial.at[up])];
      return right === null || high === null ? [] : [{ trial, x: right, y: high, value: model.metric.share(model.valueOf(trial)) ?? 0 }];
    });
    const count = places(this.#points);
    this.#surface = count < LEAST_POINTS ? null : surface(this.#points, placesOf(x), placesOf(y), { x: x.isChoice, y: y.isChoice });
    this.#lines = this.#surface && !x.isChoice && !y.isChoice ? levels(0, 1, BANDS).flatMap((level) => contour(this.#surface, level)) : [];
    this.excuse(this.#surface ? null : `Too few trials: ${count} different ${count === 1 ? "place has" : "places have"} a value, and a contour needs ${LEAST_POINTS}.`);
    this.describe(`${model.metric.name} over ${x.name} and ${y.name}, from ${this.#points.length} trials. ${model.bestWords}`);
    this.isTableOld = true;
    this.ask();
  }

  #axes() {
    return this.#at.map((at) => this.#model.axes[at]);
  }

  // --- drawing --------------------------------------------------------------------------------------------------

  #box = { left: 0, top: 10, width: 1, height: 1 };

  paint(pen, size, colours) {
    if (!this.#surface) return;
    const y = this.#axes()[1];
    const widest = Math.max(20, ...y.marks(6).map((one) => pen.measureText(shortened(pen, y.text(one), 110)).width));
    const left = Math.ceil(widest) + 30;
    this.#box = { left, top: 10, width: Math.max(20, size.width - left - SCALE - 14), height: Math.max(20, size.height - 10 - BOTTOM) };
    this.#drawCells(pen, colours);
    this.#drawLines(pen, colours);
    this.#drawAxes(pen, colours);
    this.#drawPoints(pen, colours);
    this.#drawScale(pen, size, colours);
  }

  #place({ x, y }) {
    const { left, top, width, height } = this.#box;
    return { x: left + x * width, y: top + (1 - y) * height };
  }

  #drawCells(pen, colours) {
    const { xs, ys, values, distances } = this.#surface;
    const { left, top, width, height } = this.#box;
    const [wide, high] = [width / xs.length, height / ys.length];
    for (let row = 0; row < ys.length; row += 1) {
      for (let column = 0; column < xs.length; column += 1) {
        const value = values[row * xs.length + column];
        if (value === null) continue;
        pen.globalAlpha = distances[row * xs.length + column] > FAR ? 0.35 : 1;
        pen.fillStyle = this.#colour(value, colours);
        const [x, y] = [left + column * wide, top + (ys.length - 1 - row) * high];
        pen.fillRect(Math.floor(x), Math.floor(y), Math.ceil(x + wide) - Math.floor(x), Math.ceil(y + high) - Math.floor(y));
      }
    }
    pen.globalAlpha = 1;
  }

  /** The better, the stronger. */
  #colour(value, colours) {
    const good = this.#model.given.goal === "maximize" ? value : 1 - value;
    const band = Math.min(BANDS - 1, Math.floor(good * BANDS));
    return mixed(colours.surface, colours.lines[0], 0.06 + (0.84 * band) / (BANDS - 1));
  }

  #drawLines(pen, colours) {
    pen.strokeStyle = colours.ink;
    pen.globalAlpha = 0.35;
    pen.lineWidth = 0.8;
    pen.beginPath();
    for (const [x1, y1, x2, y2] of this.#lines) {
      const [from, to] = [this.#place({ x: x1, y: y1 }), this.#place({ x: x2, y: y2 })];
      pen.moveTo(from.x, from.y);
      pen.lineTo(to.x, to.y);
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  #drawAxes(pen, colours) {
    const { left, top, width, height } = this.#box;
    const [x, y] = this.#axes();
    pen.strokeStyle = colours.faint;
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
    pen.fillStyle = colours.faint;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const mark of y.marks(6)) {
      const at = this.#place({ x: 0, y: y.share(mark) ?? 0 }).y;
      stroke(pen, left - 4, at, left, at);
      pen.fillText(shortened(pen, y.text(mark), 110), left - 7, at);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const marks = x.marks(Math.max(2, Math.floor(width / 76)));
    for (const mark of marks) {
      const at = this.#place({ x: x.share(mark) ?? 0, y: 0 }).x;
      stroke(pen, at, top + height, at, top + height + 4);
      pen.fillText(shortened(pen, x.text(mark), width / marks.length - 6), at, top + height + 7);
    }
    pen.fillStyle = colours.ink;
    pen.fillText(shortened(pen, x.name, width), left + width / 2, top + height + 23);
    pen.save();
    pen.translate(2, top + height / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(shortened(pen, y.name, height), 0, 0);
    pen.restore();
  }

  #drawPoints(pen, colours) {
    for (const one of this.#points) {
      const { state, number } = one.trial;
      if (this.#model.selection.isHidden(state)) continue;
      const { x, y } = this.#place(one);
      pen.globalAlpha = this.#model.isSelected(one.trial) ? 0.95 : 0.2;
      pen.fillStyle = pen.strokeStyle = lookOf(state).shape === "dot" ? colours.ink : colours.lines[lookOf(state).color];
      drawMark(pen, state, x, y, this.#points.length > 300 ? 1.6 : 2.6);
      if (number === this.#model.best) drawBest(pen, x, y, colours, this.#box.left + this.#box.width);
      pen.globalAlpha = 1;
    }
  }

  /** What the colours mean. */
  #drawScale(pen, size, colours) {
    const { top, height } = this.#box;
    const x = size.width - SCALE + 2;
    const metric = this.#model.metric;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (let band = 0; band < BANDS; band += 1) {
      pen.fillStyle = this.#colour((band + 0.5) / BANDS, colours);
      pen.fillRect(x, top + (1 - (band + 1) / BANDS) * height, 12, height / BANDS + 1);
    }
    pen.fillStyle = colours.faint;
    for (const share of [0, 0.5, 1]) {
      const y = Math.min(top + height - 6, Math.max(top + 6, top + (1 - share) * height));
      pen.fillText(metric.text(metric.value(share)), x + 17, y, SCALE - 20);
    }
  }

  paintOver(pen, size, colours) {
    if (!this.#cursor || !this.#surface) return;
    const { xs, ys } = this.#surface;
    const { x, y } = this.#place({ x: xs[this.#cursor[0]], y: ys[this.#cursor[1]] });
    pen.strokeStyle = colours.surface;
    pen.lineWidth = 4;
    pen.strokeRect(x - 6, y - 6, 12, 12);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 2;
    pen.strokeRect(x - 6, y - 6, 12, 12);
  }

  // --- reading --------------------------------------------------------------------------------------------------

  point(place) {
    if (!this.#surface) return;
    const { left, top, width, height } = this.#box;
    const [across, up] = [(place.x - left) / width, 1 - (place.y - top) / height];
    if (across < 0 || across > 1 || up < 0 || up > 1) return;
    this.#moveTo(Math.floor(across * this.#surface.xs.length), Math.floor(up * this.#surface.ys.length));
  }

  leave() {
    this.#cursor = null;
    this.askOver();
  }

  key(event) {
    const by = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!this.#surface) return false;
    const { xs, ys } = this.#surface;
    const [column, row] = this.#cursor ?? [xs.length >> 1, ys.length >> 1];
    const near = this.#nearest(xs[column], ys[row]);
    if (event.key === "Enter" && this.#cursor && near) return this.#model.open(near);
    if (!by) return false;
    const times = event.shiftKey ? 5 : 1;
    this.#moveTo(this.#cursor ? column + times * by[0] : column, this.#cursor ? row + times * by[1] : row);
    return true;
  }

  #moveTo(column, row) {
    const { xs, ys, values, distances } = this.#surface;
    const at = [Math.min(xs.length - 1, Math.max(0, column)), Math.min(ys.length - 1, Math.max(0, row))];
    this.#cursor = at;
    const [x, y] = this.#axes();
    const cell = at[1] * xs.length + at[0];
    const { metric } = this.#model;
    const value = values[cell];
    const guess = value === null ? "no trial" : `about ${metric.text(metric.value(value))}${distances[cell] > FAR ? ", far from any trial" : ""}`;
    const near = this.#nearest(xs[at[0]], ys[at[1]]);
    const where = `${x.name} ${x.text(x.value(xs[at[0]]))} · ${y.name} ${y.text(y.value(ys[at[1]]))} · ${metric.name} ${guess}`;
    this.say(near ? `${where} · nearest: trial ${near.number}, ${metric.text(this.#model.valueOf(near))}` : where, near && this.#model.hrefOf(near));
    this.askOver();
  }

  #nearest(x, y) {
    let best = { distance: Infinity, trial: null };
    for (const one of this.#points) {
      const distance = Math.hypot(one.x - x, one.y - y);
      if (distance < best.distance) best = { distance, trial: one.trial };
    }
    return best.trial;
  }

  rows() {
    const axes = this.#axes();
    const cell = (axis, value) => (axis.isChoice ? axis.text(value) : (value ?? ""));
    return {
      header: ["trial", "state", ...axes.map((axis) => axis.name), this.#model.metric.name],
      rows: this.#points.map(({ trial }) => [trial.number, trial.state, ...axes.map((axis, at) => cell(axis, trial.at[this.#at[at]])), this.#model.valueOf(trial) ?? ""]),
    };
  }
}

/** The middles of the cells along an axis. @param {import("./axes.js").Axis} axis */
function placesOf(axis) {
  const count = axis.isChoice ? axis.values.length : FINE;
  return Array.from({ length: count }, (_, at) => (at + 0.5) / count);
}

/** @param {string} from @param {string} to both as rgb(…) @param {number} share */
function mixed(from, to, share) {
  const [one, other] = [from, to].map((colour) => (colour.match(/[\d.]+/g) ?? ["255", "255", "255"]).slice(0, 3).map(Number));
  return `rgb(${one.map((value, at) => Math.round(value + share * (other[at] - value))).join(" ")})`;
}
