// @ts-check
// The axes of a sweep's charts: a place between 0 and 1 for each value, and back. No access to the page.

import { logTicks, ticks, written } from "/static/chart-scale.js";

const NEAR_END = 0.004; // a share so near to an end is the end
const DIGITS = 6; // of a place that somebody has chosen

/** @typedef {[number, number]} Range both ends belong to it; of a choice: places in its list */

export class Axis {
  /** @param {{name: string, kind: "choice"|"int"|"float", log?: boolean, low?: number|null, high?: number|null, values?: string[]}} given */
  constructor({ name, kind, log = false, low = 0, high = 1, values = [] }) {
    this.name = name;
    this.isChoice = kind === "choice";
    this.isWhole = kind === "int";
    this.low = low ?? 0;
    this.high = high ?? 1;
    this.isLog = log && this.low > 0;
    this.values = values;
  }

  /** Where a value is; null: nowhere. @param {number | null | undefined} value */
  share(value) {
    if (value === null || value === undefined || (this.isLog && value <= 0)) return null;
    if (this.isChoice) return (value + 0.5) / this.values.length;
    const [low, high, at] = [this.low, this.high, value].map((one) => (this.isLog ? Math.log(one) : one));
    return high === low ? 0.5 : (at - low) / (high - low);
  }

  /** The value at a place; at an end, exactly the end. @param {number} share */
  value(share) {
    if (this.isChoice) return bounded(Math.floor(share * this.values.length), 0, this.values.length - 1);
    if (share <= NEAR_END) return this.low;
    if (share >= 1 - NEAR_END) return this.high;
    const found = this.isLog ? this.low * (this.high / this.low) ** share : this.low + share * (this.high - this.low);
    return this.isWhole ? Math.round(found) : Number(found.toPrecision(DIGITS));
  }

  /** What lies between two places. @param {number} first @param {number} second @returns {Range} */
  range(first, second) {
    const [low, high] = [first, second].sort((left, right) => left - right).map((one) => bounded(one, 0, 1));
    if (!this.isChoice) return [this.value(low), this.value(high)];
    // The choices whose middle lies between them, or the one that is pointed at.
    const count = this.values.length;
    const from = Math.ceil(low * count - 0.5);
    const to = Math.floor(high * count - 0.5);
    return from <= to ? [Math.max(0, from), Math.min(count - 1, to)] : [this.value((low + high) / 2), this.value((low + high) / 2)];
  }

  /** The places of a range's ends. @param {Range} range @returns {[number, number]} */
  ends([low, high]) {
    if (this.isChoice) return [low / this.values.length, (high + 1) / this.values.length];
    return [this.share(low) ?? 0, this.share(high) ?? 1];
  }

  /** @returns {Range} */
  get whole() {
    return this.isChoice ? [0, this.values.length - 1] : [this.low, this.high];
  }

  /** One step further, as by an arrow key. @param {number} value @param {number} by */
  stepped(value, by) {
    const [least, most] = this.whole;
    if (this.isChoice) return bounded(value + Math.sign(by) * Math.ceil(Math.abs(by) / 5), least, most);
    const next = this.value(bounded((this.share(value) ?? 0) + by / 50, 0, 1));
    return this.isWhole && next === value ? bounded(value + Math.sign(by), least, most) : next;
  }

  /** @param {number | null | undefined} value */
  text(value) {
    if (value === null || value === undefined) return "none";
    return this.isChoice ? (this.values[value] ?? "none") : written(value);
  }

  /** Values to write beside the axis. @param {number} most @returns {number[]} */
  marks(most) {
    if (this.isChoice) {
      const every = Math.max(1, Math.ceil(this.values.length / most));
      return this.values.map((_, at) => at).filter((at) => at % every === 0);
    }
    if (this.low === this.high) return [this.low];
    const found = this.isLog ? logTicks(this.low, this.high, most) : ticks(this.low, this.high, most);
    const inside = found.filter((one) => one >= this.low * 0.999999 - 1e-12 && one <= this.high * 1.000001 + 1e-12);
    const whole = this.isWhole ? inside.filter((one) => Number.isInteger(one)) : inside;
    return whole.length > 1 ? whole : [this.low, this.high];
  }
}

/** Whether a value lies in a range. @param {Range} range @param {number | null | undefined} value */
export function holds([low, high], value) {
  return value !== null && value !== undefined && value >= low && value <= high;
}

/** @param {number} value @param {number} low @param {number} high */
export function bounded(value, low, high) {
  return Math.min(high, Math.max(low, value));
}
