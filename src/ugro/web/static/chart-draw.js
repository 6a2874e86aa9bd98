// @ts-check
// Draws curves on a canvas: axes, bands, lines, marks. Stateless.

import { logTicks, placeTicks, placeWritten, ticks, tickTexts } from "/static/chart-scale.js";

export const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [12, 4], [4, 4], [1, 4], [10, 2, 2, 2, 2, 2]];
const MOST_TICKS = 7;
const MANY = 20; // with more series, lines are thin and pale and have no band

/**
 * @typedef {{left: number, top: number, width: number, height: number}} Box
 * @typedef {{x: [number, number], y: [number, number], isLog: boolean, unit: string, kind: "step"|"samples"|"time"|"seconds", box: Box}} View
 * @typedef {{name: string, key: string, xs: number[], mins: (number|null)[], maxs: (number|null)[],
 *   means: (number|null)[], raw: (number|null)[], odd: number[], gaps: Set<number>, color: number, dash: number, isFaint: boolean}} Series
 * @typedef {{ink: string, faint: string, grid: string, surface: string, lines: string[]}} Colours
 */

/** @param {View} view @param {number} x */
export const toX = (view, x) => view.box.left + ((x - view.x[0]) / (view.x[1] - view.x[0] || 1)) * view.box.width;

/** @param {View} view @param {number} y */
export function toY(view, y) {
  const [low, high] = view.y;
  const share = view.isLog ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
  return view.box.top + (1 - share) * view.box.height;
}

/** @param {View} view @param {number} at */
export const fromX = (view, at) => view.x[0] + ((at - view.box.left) / view.box.width) * (view.x[1] - view.x[0]);

/** The area of the plot, without labels. @param {CanvasRenderingContext2D} pen @param {{y: [number, number], isLog: boolean, unit: string}} axis */
export function boxOf(pen, width, height, axis) {
  const { texts } = marksOf(axis, height - 32);
  const left = Math.ceil(Math.max(...texts.map((text) => pen.measureText(text).width), 20)) + 12;
  return { left, top: 8, width: Math.max(10, width - left - 12), height: Math.max(10, height - 8 - 24) };
}

/** The ticks of the y axis and their texts. */
function marksOf({ y, isLog, unit }, height) {
  const most = Math.min(MOST_TICKS, Math.max(2, Math.floor(height / 36)));
  const marks = isLog ? logTicks(y[0], y[1], most) : ticks(y[0], y[1], most);
  return { marks, texts: tickTexts(marks, unit) };
}

/** @param {CanvasRenderingContext2D} pen @param {View} view @param {Colours} colours */
export function drawAxes(pen, view, colours) {
  const { box } = view;
  pen.lineWidth = 1;
  pen.strokeStyle = colours.grid;
  pen.fillStyle = colours.faint;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const { marks, texts } = marksOf(view, box.height);
  marks.forEach((y, place) => {
    const at = Math.round(toY(view, y)) + 0.5;
    segment(pen, box.left, at, box.left + box.width, at);
    pen.fillText(texts[place], box.left - 6, at);
  });
  pen.textBaseline = "top";
  pen.textAlign = "center";
  const span = view.x[1] - view.x[0];
  const room = view.kind === "time" && span > 20 * 3600 ? 120 : 74;
  for (const x of placeTicks(view.kind, view.x[0], view.x[1], Math.max(1, Math.floor(box.width / room)))) {
    const at = Math.round(toX(view, x)) + 0.5;
    segment(pen, at, box.top + box.height, at, box.top + box.height + 4);
    const text = placeWritten(view.kind, x, span);
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(at, box.left + box.width + 10 - half), box.top + box.height + 7);
  }
  pen.strokeStyle = colours.faint;
  segment(pen, box.left, box.top + box.height + 0.5, box.left + box.width, box.top + box.height + 0.5);
}

/** @param {CanvasRenderingContext2D} pen @param {View} view @param {Series[]} all @param {Colours} colours */
export function drawSeries(pen, view, all, colours, isSmooth) {
  clipped(pen, view.box, () => {
    const isMany = all.length > MANY;
    for (const series of all) {
      pen.fillStyle = pen.strokeStyle = colours.lines[series.color % colours.lines.length];
      if (!isMany && !series.isFaint) drawBand(pen, view, series, isSmooth);
    }
    for (const series of all) {
      pen.strokeStyle = pen.fillStyle = colours.lines[series.color % colours.lines.length];
      if (isSmooth && !isMany) drawLine(pen, view, series, series.raw, { width: 1, alpha: 0.28, dash: [] });
      drawLine(pen, view, series, series.means, styleOf(series, isMany));
      drawOdd(pen, view, series);
    }
  });
}

/** Draws one curve above the others. @param {CanvasRenderingContext2D} pen @param {View} view @param {Series} series */
export function drawChosen(pen, view, series, colours) {
  clipped(pen, view.box, () => {
    pen.strokeStyle = colours.surface;
    drawLine(pen, view, series, series.means, { width: 5, alpha: 0.8, dash: [] });
    pen.strokeStyle = pen.fillStyle = colours.lines[series.color % colours.lines.length];
    drawLine(pen, view, series, series.means, { width: 2.75, alpha: 1, dash: DASHES[series.dash % DASHES.length] });
  });
}

/** Draws the cursor. @param {CanvasRenderingContext2D} pen @param {View} view @param {number} x */
export function drawCursor(pen, view, x, dots, colours) {
  const at = Math.round(toX(view, x)) + 0.5;
  pen.strokeStyle = colours.faint;
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  segment(pen, at, view.box.top, at, view.box.top + view.box.height);
  pen.setLineDash([]);
  for (const { x: dotX, y, color } of dots) {
    pen.fillStyle = colours.lines[color % colours.lines.length];
    pen.strokeStyle = colours.surface;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.arc(toX(view, dotX), toY(view, y), 4, 0, 7);
    pen.fill();
    pen.stroke();
  }
}

/** Draws the range that is being selected for zooming. @param {CanvasRenderingContext2D} pen @param {View} view */
export function drawChoice(pen, view, from, to, colours) {
  pen.globalAlpha = 0.14;
  pen.fillStyle = colours.ink;
  pen.fillRect(Math.min(from, to), view.box.top, Math.abs(to - from), view.box.height);
  pen.globalAlpha = 1;
}

function styleOf(series, isMany) {
  if (isMany) return { width: 1, alpha: 0.35, dash: [] };
  return series.isFaint
    ? { width: 1.25, alpha: 0.4, dash: [3, 3] }
    : { width: 1.75, alpha: 1, dash: DASHES[series.dash % DASHES.length] };
}

function drawBand(pen, view, series, isSmooth) {
  pen.globalAlpha = isSmooth ? 0.1 : 0.18;
  for (const [begin, end] of stretches(series, series.mins, view.isLog)) {
    if (end - begin < 2) continue;
    pen.beginPath();
    for (let at = begin; at < end; at += 1) pen.lineTo(toX(view, series.xs[at]), toY(view, series.maxs[at]));
    for (let at = end - 1; at >= begin; at -= 1) pen.lineTo(toX(view, series.xs[at]), toY(view, series.mins[at]));
    pen.fill();
  }
  pen.globalAlpha = 1;
}

function drawLine(pen, view, series, ys, { width, alpha, dash }) {
  const { xs } = series;
  pen.globalAlpha = alpha;
  pen.lineWidth = width;
  pen.lineJoin = "round";
  pen.setLineDash(dash);
  pen.beginPath();
  for (const [begin, end] of stretches(series, ys, view.isLog)) {
    pen.moveTo(toX(view, xs[begin]), toY(view, ys[begin]));
    for (let at = begin + 1; at < end; at += 1) pen.lineTo(toX(view, xs[at]), toY(view, ys[at]));
    // A single point has no line: draw a dot.
    if (end - begin === 1) pen.arc(toX(view, xs[begin]), toY(view, ys[begin]), 1.5, 0, 7);
  }
  pen.stroke();
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

/** Values that are not numbers: a cross at the upper edge, where it cannot be mistaken for a value. */
function drawOdd(pen, view, series) {
  pen.lineWidth = 1.5;
  for (const x of series.odd) {
    const at = toX(view, x);
    segment(pen, at - 3, view.box.top + 2, at + 3, view.box.top + 8);
    segment(pen, at - 3, view.box.top + 8, at + 3, view.box.top + 2);
  }
}

/** Ranges of indices with numbers that can be drawn, without a gap between them. */
function* stretches({ xs, gaps }, ys, isLog) {
  let begin = -1;
  for (let at = 0; at < xs.length; at += 1) {
    const isShown = ys[at] !== null && ys[at] !== undefined && (!isLog || ys[at] > 0);
    if (begin >= 0 && (!isShown || gaps.has(at))) {
      yield [begin, at];
      begin = -1;
    }
    if (isShown && begin < 0) begin = at;
  }
  if (begin >= 0) yield [begin, xs.length];
}

function segment(pen, fromX, fromY, toX, toY) {
  pen.beginPath();
  pen.moveTo(fromX, fromY);
  pen.lineTo(toX, toY);
  pen.stroke();
}

function clipped(pen, box, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(box.left, box.top - 2, box.width + 2, box.height + 3);
  pen.clip();
  draw();
  pen.restore();
}
