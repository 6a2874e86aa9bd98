// @ts-check
// What is selected in a sweep: ranges of some axes, which combine, and the states that are shown. It is in the address.

import { holds } from "/static/sweep/axes.js";

const PREFIX = "brush.";
const HIDDEN = "hide";

/** @typedef {{number: number, job: number | null, state: string, at: (number | null)[]}} Trial with its place on each axis */

export class Selection extends EventTarget {
  /** @type {Map<string, [number, number]>} */
  #ranges = new Map();
  /** @type {Set<string>} */
  #hidden = new Set();
  /** @type {import("./axes.js").Axis[]} */
  #axes = [];

  /** @param {import("./axes.js").Axis[]} axes */
  set axes(axes) {
    this.#axes = axes;
  }

  get isEmpty() {
    return !this.#ranges.size && !this.#hidden.size;
  }

  /** @param {string} name */
  range(name) {
    return this.#ranges.get(name) ?? null;
  }

  /** @param {string} name @param {[number, number] | null} range */
  set(name, range) {
    const axis = this.#axes.find((one) => one.name === name);
    const isAll = !range || !axis || (range[0] <= axis.whole[0] && range[1] >= axis.whole[1]);
    const before = JSON.stringify(this.range(name));
    if (isAll) this.#ranges.delete(name);
    else this.#ranges.set(name, range);
    if (JSON.stringify(this.range(name)) !== before) this.#tell();
  }

  /** @param {string} state */
  isHidden(state) {
    return this.#hidden.has(state);
  }

  /** @param {string} state */
  toggle(state) {
    if (!this.#hidden.delete(state)) this.#hidden.add(state);
    this.#tell();
  }

  clear() {
    if (this.isEmpty) return;
    this.#ranges.clear();
    this.#hidden.clear();
    this.#tell();
  }

  /** @param {Trial} trial */
  holds(trial) {
    return !this.#hidden.has(trial.state) && this.#axes.every((axis, at) => {
      const range = this.#ranges.get(axis.name);
      return !range || holds(range, trial.at[at]);
    });
  }

  /** In words: lr 0.001 to 0.1, opt adam. */
  get words() {
    const words = this.#axes.filter((axis) => this.#ranges.has(axis.name)).map((axis) => {
      const [low, high] = this.#ranges.get(axis.name).map((one) => axis.text(one));
      return `${axis.name} ${low === high ? low : `${low} to ${high}`}`;
    });
    return [...words, ...[...this.#hidden].map((state) => `not ${state}`)].join(", ");
  }

  /** @param {string} query */
  read(query) {
    const given = new URLSearchParams(query);
    for (const axis of this.#axes) {
      const [low, high] = (given.get(PREFIX + axis.name) ?? "").split("..").map((text) => (text.trim() ? Number(text) : NaN));
      if (Number.isFinite(low) && Number.isFinite(high) && low <= high) this.#ranges.set(axis.name, [low, high]);
    }
    for (const state of (given.get(HIDDEN) ?? "").split(",")) if (state) this.#hidden.add(state);
  }

  /** The query of an address with this selection and all else that it has. @param {string} query */
  written(query) {
    const found = new URLSearchParams(query);
    for (const name of [...found.keys()]) if (name.startsWith(PREFIX)) found.delete(name);
    for (const [name, [low, high]] of this.#ranges) found.set(PREFIX + name, `${low}..${high}`);
    found.delete(HIDDEN);
    if (this.#hidden.size) found.set(HIDDEN, [...this.#hidden].join(","));
    return found.toString();
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}
