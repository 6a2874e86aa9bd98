// @ts-check
// One axis of parallel coordinates, on which a range is selected: by dragging, by touch, or with two sliders and keys.

const EDGE = 9; // pixels around the end of a range, by which it is moved
const LEAST_DRAG = 4;
const MOVES = { ArrowUp: 1, ArrowDown: -1, PageUp: 5, PageDown: -5 };

export class AxisStrip {
  element = Object.assign(document.createElement("div"), { className: "axis-strip" });
  /** @type {HTMLElement[]} its lower and its upper end */
  handles = [0, 1].map((end) => this.#handle(end));
  #axis;
  #selection;
  #go;
  #top = 0;
  #bottom = 1;
  /** @type {{from: number, kind: "low" | "high" | "all" | "new", ends: [number, number], hasMoved: boolean} | null} */
  #drag = null;

  /**
   * @param {import("./axes.js").Axis} axis @param {import("./selection.js").Selection} selection
   * @param {(by: number, from: HTMLElement) => void} go to another handle
   */
  constructor(axis, selection, go) {
    this.#axis = axis;
    this.#selection = selection;
    this.#go = go;
    const { element } = this;
    element.title = `${axis.name}: drag to select a range, double click to clear it`;
    element.append(...this.handles);
    element.addEventListener("pointerdown", (event) => this.#press(event));
    element.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) element.addEventListener(name, () => this.#release());
    element.addEventListener("dblclick", () => selection.set(this.#axis.name, null));
  }

  get isDragged() {
    return this.#drag !== null;
  }

  /** @param {import("./axes.js").Axis} axis */
  show(axis) {
    this.#axis = axis;
    this.handles.forEach((handle, end) => handle.setAttribute("aria-label", `${axis.name}, ${end ? "to" : "from"}`));
  }

  /** Where it stands on the plot. @param {number} x @param {number} top @param {number} bottom */
  place(x, top, bottom) {
    [this.#top, this.#bottom] = [top, bottom];
    Object.assign(this.element.style, { left: `${x}px`, top: `${top - EDGE}px`, height: `${bottom - top + 2 * EDGE}px` });
    const range = this.#range();
    this.#axis.ends(range).forEach((share, end) => {
      const handle = this.handles[end];
      handle.style.top = `${EDGE + (1 - share) * (bottom - top)}px`;
      handle.setAttribute("aria-valuenow", String(Math.round(100 * share)));
      handle.setAttribute("aria-valuetext", this.#axis.text(range[end]));
    });
  }

  #range() {
    return this.#selection.range(this.#axis.name) ?? this.#axis.whole;
  }

  // --- with a pointer -------------------------------------------------------------------------------------------

  #share(event) {
    const y = event.clientY - this.element.getBoundingClientRect().top - EDGE;
    return Math.min(1, Math.max(0, 1 - y / (this.#bottom - this.#top)));
  }

  #press(event) {
    if (event.button !== 0) return;
    const from = this.#share(event);
    const ends = this.#selection.range(this.#axis.name) ? this.#axis.ends(this.#range()) : null;
    const near = EDGE / (this.#bottom - this.#top);
    const kind = !ends ? "new" : Math.abs(from - ends[0]) < near ? "low" : Math.abs(from - ends[1]) < near ? "high" : from > ends[0] && from < ends[1] ? "all" : "new";
    this.#drag = { from, kind, ends: ends ?? [from, from], hasMoved: false };
    this.element.setPointerCapture(event.pointerId);
    event.preventDefault(); // a drag selects no text
  }

  #move(event) {
    const drag = this.#drag;
    if (!drag) return;
    const now = this.#share(event);
    if (!drag.hasMoved && Math.abs(now - drag.from) * (this.#bottom - this.#top) < LEAST_DRAG) return;
    drag.hasMoved = true;
    const [low, high] = drag.ends;
    const by = Math.min(1 - high, Math.max(-low, now - drag.from));
    const ends = { new: [drag.from, now], low: [now, high], high: [low, now], all: [low + by, high + by] }[drag.kind];
    this.#selection.set(this.#axis.name, this.#axis.range(ends[0], ends[1]));
  }

  #release() {
    const drag = this.#drag;
    this.#drag = null;
    if (drag && !drag.hasMoved && drag.kind === "new") this.#selection.set(this.#axis.name, null);
  }

  // --- with keys ------------------------------------------------------------------------------------------------

  #handle(end) {
    const handle = Object.assign(document.createElement("div"), { className: `axis-handle ${end ? "is-upper" : "is-lower"}`, tabIndex: -1 });
    const given = { role: "slider", "aria-orientation": "vertical", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(100 * end) };
    for (const [name, value] of Object.entries(given)) handle.setAttribute(name, value);
    handle.addEventListener("keydown", (event) => this.#key(event, end, handle));
    return handle;
  }

  #key(event, end, handle) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { name, whole } = this.#axis;
    const isSelected = this.#selection.range(name) !== null;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.#go(event.key === "ArrowRight" ? 1 : -1, handle);
    else if (MOVES[event.key]) this.#put(end, this.#axis.stepped(this.#range()[end], MOVES[event.key]));
    else if (event.key === "Home" || event.key === "End") this.#put(end, whole[event.key === "End" ? 1 : 0]);
    else if (isSelected && ["Escape", "Delete", "Backspace"].includes(event.key)) this.#selection.set(name, null);
    else return; // Escape on an axis without a range clears all of them
    event.preventDefault();
    event.stopPropagation();
  }

  #put(end, value) {
    const [low, high] = this.#range();
    this.#selection.set(this.#axis.name, end ? [Math.min(low, value), value] : [value, Math.max(high, value)]);
  }
}
