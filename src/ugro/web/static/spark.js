// @ts-check
// <ugro-spark values="1,2,null,3" max="100" label="CPU use">: a small curve in a line of text. Or set .values = [..].
// Its scale begins at zero, or with "fit" at its smallest value.

import { addSheet, coloursOf, onTheme } from "/static/chart-theme.js";

class Spark extends HTMLElement {
  static observedAttributes = ["values", "max", "min", "label"];
  #values = null;
  #canvas = document.createElement("canvas");
  #sizes = new ResizeObserver(() => this.#draw());
  #endTheme = () => {};

  connectedCallback() {
    addSheet();
    this.replaceChildren(this.#canvas);
    this.setAttribute("role", "img");
    this.#sizes.observe(this);
    this.#endTheme = onTheme(() => this.#draw());
    this.#draw();
  }

  disconnectedCallback() {
    this.#sizes.disconnect();
    this.#endTheme();
  }

  attributeChangedCallback(name) {
    if (name === "values") this.#values = null;
    if (this.isConnected) this.#draw();
  }

  /** @returns {(number|null)[]} */
  get values() {
    this.#values ??= numbers(this.getAttribute("values"));
    return this.#values;
  }

  set values(values) {
    this.#values = values;
    if (this.isConnected) this.#draw();
  }

  #draw() {
    const shown = this.values.filter((value) => value !== null);
    const label = this.getAttribute("label") ?? "";
    const last = shown.length ? `now ${round(shown[shown.length - 1])}` : "no values yet";
    const range = shown.length ? `, between ${round(Math.min(...shown))} and ${round(Math.max(...shown))}` : "";
    this.setAttribute("aria-label", `${label ? `${label}: ` : ""}${last}${range}`);
    const { clientWidth: width, clientHeight: height } = this;
    if (!width || !height) return;
    const scale = devicePixelRatio || 1;
    this.#canvas.width = width * scale;
    this.#canvas.height = height * scale;
    const pen = this.#canvas.getContext("2d");
    if (!pen || !shown.length) return;
    pen.scale(scale, scale);
    this.#line(pen, width, height, shown);
  }

  #line(pen, width, height, shown) {
    const low = Number(this.getAttribute("min") ?? Math.min(...(this.hasAttribute("fit") ? [] : [0]), ...shown));
    const high = Number(this.getAttribute("max") ?? Math.max(...shown, low + 1e-9));
    const last = Math.max(1, this.values.length - 1);
    const place = (value, at) => [
      1 + (at / last) * (width - 4),
      height - 2 - ((Math.min(Math.max(value, low), high) - low) / (high - low || 1)) * (height - 4),
    ];
    const colour = coloursOf(this).lines[0];
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.beginPath();
    let isDown = false;
    this.values.forEach((value, at) => {
      if (value === null) isDown = false;
      else if (isDown) pen.lineTo(...place(value, at));
      else {
        pen.moveTo(...place(value, at));
        isDown = true;
      }
    });
    pen.stroke();
    const end = this.values.findLastIndex((value) => value !== null);
    pen.beginPath();
    pen.arc(...place(this.values[end], end), 2, 0, 7);
    pen.fill();
  }
}

function numbers(text) {
  if (!text) return [];
  return text.split(",").map((part) => (part.trim() && Number.isFinite(Number(part)) ? Number(part) : null));
}

const round = (value) => Number(value.toPrecision(3));

customElements.define("ugro-spark", Spark);
