// @ts-check
// <ugro-chart label="loss">: curves on a canvas. Its .data is
//   {x: "step" | "samples" | "time" | "seconds", gap?, range?, series: [{name, xs, mins, maxs, means, odd?, key?, color?, isFaint?}]}
// where a null in means is a missing value, and no line crosses more than "gap" (default: see gapsIn); "range"
// is the x axis while it is not zoomed (default: all points). Attributes: smooth (0 to 0.99), log, tall, unit, and min and max of the y axis. Events: "ugro-zoom" {first, last} (or nulls) and
// "ugro-cursor" {x}.

import { boxOf, drawAxes, drawChoice, drawChosen, drawCursor, drawSeries, fromX, toX, toY } from "/static/chart-draw.js";
import { build, fillLegend, fitted, saveCsv } from "/static/chart-parts.js";
import { extent, gapsIn, nearest, placeWritten, smoothed, widened, written } from "/static/chart-scale.js";
import { addSheet, coloursOf, onTheme } from "/static/chart-theme.js";
import { csvOf, leftOut, sentence, tableOf } from "/static/chart-words.js";

const LEAST_DRAG = 6;
const MOST_READ = 8;

class Chart extends HTMLElement {
  static observedAttributes = ["smooth", "log", "label", "tall"];
  #given = { x: "step", series: [] };
  /** @type {import("./chart-draw.js").Series[]} */
  #series = [];
  #hidden = new Set();
  #parts = build();
  #view = null;
  #colours = null;
  #zoom = null;
  #cursor = null;
  #chosen = null;
  #drag = null;
  #isAsked = false;
  #isDrawn = false;
  #sizes = new ResizeObserver(() => this.#ask());
  #endTheme = () => {};

  connectedCallback() {
    addSheet();
    const parts = this.#parts;
    if (!parts.figure.isConnected) {
      this.replaceChildren(parts.figure);
      this.#listen();
    }
    this.#sizes.observe(parts.plot);
    this.#endTheme = onTheme(() => {
      this.#colours = null;
      this.#ask();
    });
    this.#prepare();
  }

  disconnectedCallback() {
    this.#sizes.disconnect();
    this.#endTheme();
  }

  attributeChangedCallback() {
    if (this.isConnected) this.#prepare();
  }

  get data() {
    return this.#given;
  }

  set data(data) {
    this.#given = data;
    if (this.isConnected) this.#prepare();
  }

  get smooth() {
    return Math.min(0.99, Math.max(0, Number(this.getAttribute("smooth")) || 0));
  }

  /** Shows the cursor at the position of another chart; null hides it. */
  set cursor(x) {
    this.#cursor = x;
    this.#ask();
  }

  /** What is drawn now, for code that waits for the drawing. */
  get isReady() {
    return this.#isDrawn && !this.#isAsked;
  }

  // --- from data to drawing -------------------------------------------------------------------------------------

  #prepare() {
    const parts = this.#parts;
    this.#series = this.#given.series.map((one, at) => {
      const means = smoothed(one.means, this.smooth);
      const odd = one.odd ? one.xs.filter((_, place) => one.odd[place] > 0) : one.xs.filter((_, place) => one.means[place] === null);
      const color = one.color ?? at;
      const [key, isFaint] = [one.key ?? one.name, one.isFaint ?? false];
      const gaps = gapsIn(one.xs, this.#given.gap);
      // The ninth curve has the colour of the first, but other dashes.
      return { ...one, key, gaps, raw: one.means, means, odd, color, dash: color + Math.floor(color / 8), isFaint };
    });
    const label = this.getAttribute("label") ?? "";
    parts.title.textContent = label;
    parts.plot.classList.toggle("is-tall", this.hasAttribute("tall"));
    parts.plot.setAttribute("aria-label", sentence(label || "Curves", this.#given.x, this.#shown()));
    fillLegend(parts.legend, this.#series, this.#hidden, this);
    if (!parts.table.hidden) this.#fillTable();
    this.#ask();
  }

  #shown() {
    return this.#series.filter((series) => !this.#hidden.has(series.key));
  }

  #ask() {
    if (this.#isAsked) return;
    this.#isAsked = true;
    requestAnimationFrame(() => {
      this.#isAsked = false;
      if (this.isConnected) this.#draw();
    });
  }

  #draw() {
    const { plot, base, empty } = this.#parts;
    const { clientWidth: width, clientHeight: height } = plot;
    if (!width || !height) return;
    this.#colours ??= coloursOf(this);
    const pen = fitted(base, width, height);
    const shown = this.#shown();
    this.#view = this.#viewOf(pen, shown, width, height);
    empty.hidden = this.#view !== null;
    if (this.#view) {
      pen.font = this.#font();
      drawAxes(pen, this.#view, this.#colours);
      drawSeries(pen, this.#view, shown, this.#colours, this.smooth > 0);
    } else {
      empty.textContent = this.getAttribute("empty") ?? "No values yet.";
    }
    this.#isDrawn = true;
    this.#drawOver();
  }

  #viewOf(pen, shown, width, height) {
    const isLog = this.hasAttribute("log");
    const whole = extent(shown.map((series) => series.xs));
    if (!whole) return null;
    const x = this.#zoom ?? this.#given.range ?? whole;
    const inside = shown.flatMap((series) => {
      const [begin, end] = within(series.xs, x);
      // With many curves no band is drawn, so an outlier in it must not stretch the axis.
      const columns = shown.length > 20 || this.smooth > 0 ? [series.means] : [series.mins, series.maxs, series.means];
      return columns.map((column) => column.slice(begin, end));
    });
    const found = extent(inside, isLog);
    if (!found) return null;
    const y = this.#bounded(widened(found, isLog), found);
    pen.font = this.#font();
    const unit = this.getAttribute("unit") ?? "";
    const box = boxOf(pen, width, height, { y, isLog, unit });
    const wide = x[0] === x[1] ? [x[0] - 0.5, x[1] + 0.5] : x;
    return { x: wide, y, isLog, unit, kind: this.#given.x, box };
  }

  /** The range of an axis whose ends are given; values beyond them are shown all the same. */
  #bounded([low, high], [least, most]) {
    const [from, to] = ["min", "max"].map((name) => this.getAttribute(name));
    return [from === null ? low : Math.min(Number(from), least), to === null ? high : Math.max(Number(to), most)];
  }

  #font() {
    return `12px ${getComputedStyle(this).fontFamily}`;
  }

  #drawOver() {
    const { plot, over, readout } = this.#parts;
    const pen = fitted(over, plot.clientWidth, plot.clientHeight);
    const view = this.#view;
    if (!view) return;
    const chosen = this.#chosen && this.#shown().find((series) => series.key === this.#chosen);
    if (chosen) drawChosen(pen, view, chosen, this.#colours);
    if (this.#drag && this.#drag.to !== null) drawChoice(pen, view, this.#drag.from, this.#drag.to, this.#colours);
    if (this.#cursor === null) {
      readout.textContent = "";
      return;
    }
    const { dots, text } = this.#readAt(this.#cursor);
    drawCursor(pen, view, this.#cursor, dots, this.#colours);
    readout.textContent = text;
  }

  #readAt(x) {
    const view = this.#view;
    const near = this.#shown().map((series) => {
      const at = nearest(series.xs, x);
      return { series, x: series.xs[at], y: series.means[at], low: series.mins[at], high: series.maxs[at], color: series.color };
    });
    const span = view.x[1] - view.x[0];
    const reach = span / 40;
    const usable = near.filter((one) => one.x !== undefined && Math.abs(one.x - x) <= reach);
    const head = `${view.kind === "step" ? "step " : ""}${placeWritten(view.kind, x, span)}${view.kind === "samples" ? " samples" : ""}`;
    const first = usable.filter((one) => one.series.key === this.#chosen);
    if (usable.length > MOST_READ && !first.length) return { dots: [], text: `${head} · ${rangeRead(usable, view.unit)}` };
    const { unit } = view;
    const readings = (usable.length > MOST_READ && first.length ? first : usable.slice(0, MOST_READ)).map((one) => valueRead(one, usable.length > 1, unit));
    const more = usable.length > readings.length ? ` · ${usable.length - readings.length} more` : "";
    const dots = usable.filter((one) => one.y !== null && (!view.isLog || one.y > 0) && (usable.length <= MOST_READ || one.series.key === this.#chosen));
    return { dots, text: `${head} · ${readings.join(" · ")}${more}` };
  }

  // --- interaction ----------------------------------------------------------------------------------------------

  #listen() {
    const { plot, reset, tableButton, csv } = this.#parts;
    plot.addEventListener("pointermove", (event) => this.#pointAt(event));
    plot.addEventListener("pointerleave", () => this.#leave());
    plot.addEventListener("pointerdown", (event) => this.#press(event));
    plot.addEventListener("pointerup", (event) => this.#release(event));
    plot.addEventListener("dblclick", () => this.zoomTo(null));
    plot.addEventListener("keydown", (event) => this.#key(event));
    plot.addEventListener("blur", () => this.#leave());
    reset.addEventListener("click", () => this.zoomTo(null));
    tableButton.addEventListener("click", () => this.#toggleTable());
    csv.addEventListener("click", () => this.#save());
  }

  /** @param {[number, number] | null} range */
  zoomTo(range) {
    this.#zoom = range;
    this.#parts.reset.hidden = range === null;
    this.#tell("ugro-zoom", { first: range?.[0] ?? null, last: range?.[1] ?? null });
    this.#ask();
  }

  /** Highlights one curve, as when pointing at its name; null: none. */
  choose(key) {
    this.#chosen = key;
    this.#drawOver();
  }

  /** Hides a curve, or shows it again. */
  toggle(key) {
    if (!this.#hidden.delete(key)) this.#hidden.add(key);
    this.#prepare();
  }

  #pointAt(event) {
    if (!this.#view) return;
    const place = this.#place(event);
    if (this.#drag) {
      this.#drag.to = Math.abs(place.x - this.#drag.from) >= LEAST_DRAG ? place.x : null;
    }
    this.#chosen = this.#nearestTo(place);
    this.#moveTo(fromX(this.#view, place.x));
  }

  #nearestTo(place) {
    let best = { distance: 24, key: null };
    for (const series of this.#shown()) {
      const at = nearest(series.xs, fromX(this.#view, place.x));
      const y = series.means[at];
      if (y === null || y === undefined || (this.#view.isLog && y <= 0)) continue;
      const distance = Math.hypot(toY(this.#view, y) - place.y, (toX(this.#view, series.xs[at]) - place.x) / 4);
      if (distance < best.distance) best = { distance, key: series.key };
    }
    return best.key;
  }

  #moveTo(x) {
    const xs = this.#shown().map((series) => series.xs[nearest(series.xs, x)]).filter((one) => one !== undefined);
    if (!xs.length) return;
    this.#cursor = xs.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best));
    this.#tell("ugro-cursor", { x: this.#cursor });
    this.#drawOver();
  }

  #leave() {
    this.#cursor = this.#chosen = this.#drag = null;
    this.#tell("ugro-cursor", { x: null });
    this.#drawOver();
  }

  #press(event) {
    if (event.button !== 0 || !this.#view || event.pointerType === "touch") return;
    this.#drag = { from: this.#place(event).x, to: null };
    this.#parts.plot.setPointerCapture(event.pointerId);
  }

  #release() {
    const drag = this.#drag;
    this.#drag = null;
    if (!drag || drag.to === null || !this.#view) return;
    const range = [fromX(this.#view, drag.from), fromX(this.#view, drag.to)].sort((left, right) => left - right);
    this.zoomTo(clamped(range, this.#view.x));
  }

  #key(event) {
    const view = this.#view;
    if (!view || event.ctrlKey || event.metaKey || event.altKey) return;
    const span = view.x[1] - view.x[0];
    const at = this.#cursor ?? view.x[0];
    const actions = {
      ArrowRight: () => this.#step(at, event.shiftKey ? 10 : 1),
      ArrowLeft: () => this.#step(at, event.shiftKey ? -10 : -1),
      Home: () => this.#moveTo(view.x[0]),
      End: () => this.#moveTo(view.x[1]),
      "+": () => this.zoomTo(clamped([at - span / 4, at + span / 4], view.x)),
      "=": () => this.zoomTo(clamped([at - span / 4, at + span / 4], view.x)),
      "-": () => this.#zoomOut(at, span),
      Escape: () => this.zoomTo(null),
    };
    if (!actions[event.key] || (event.key === "Escape" && !this.#zoom)) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  #zoomOut(at, span) {
    const whole = extent(this.#shown().map((series) => series.xs));
    const range = whole && clamped([at - span, at + span], whole);
    this.zoomTo(range && (range[0] > whole[0] || range[1] < whole[1]) ? range : null);
  }

  #step(at, by) {
    const longest = this.#shown().reduce((best, one) => (one.xs.length > (best?.xs.length ?? 0) ? one : best), null);
    if (!longest) return;
    const place = this.#cursor === null ? (by > 0 ? -1 : 1) : nearest(longest.xs, at);
    this.#moveTo(longest.xs[Math.min(longest.xs.length - 1, Math.max(0, place + by))]);
  }

  #place(event) {
    const box = this.#parts.plot.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  #toggleTable() {
    const { table, tableButton } = this.#parts;
    table.hidden = !table.hidden;
    tableButton.setAttribute("aria-expanded", String(!table.hidden));
    if (!table.hidden) this.#fillTable();
  }

  #fillTable() {
    const note = document.createElement("p");
    note.className = "chart-readout";
    note.textContent = leftOut(this.#shown());
    this.#parts.table.replaceChildren(note, this.#parts.csv, tableOf(this.#given.x, this.#shown()));
  }

  #save() {
    saveCsv(this.getAttribute("label") || "curves", csvOf(this.#given.x, this.#series));
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail, bubbles: true }));
  }
}

function valueRead({ series, y, low, high }, isNamed, unit) {
  const name = isNamed ? `${series.name} ` : "";
  if (y === null) return `${name}not a number`;
  const band = low !== null && high !== null && low !== high ? ` (${written(low)} to ${written(high)})` : "";
  return `${name}${written(y, unit)}${band}`;
}

/** The reading for many curves: their range. */
function rangeRead(many, unit) {
  const found = extent([many.map((one) => one.y)]);
  const range = found ? `between ${written(found[0])} and ${written(found[1], unit)}` : "not a number";
  return `${many.length} curves ${range}`;
}

function clamped([low, high], [least, most]) {
  return /** @type {[number, number]} */ ([Math.max(low, least), Math.min(high, most)]);
}

/** The indices within a range, and one more on each side, since lines continue beyond the edge. */
function within(xs, [low, high]) {
  let begin = 0;
  while (begin < xs.length && xs[begin] < low) begin += 1;
  let end = xs.length;
  while (end > begin && xs[end - 1] > high) end -= 1;
  return [Math.max(0, begin - 1), Math.min(xs.length, end + 1)];
}

customElements.define("ugro-chart", Chart);
