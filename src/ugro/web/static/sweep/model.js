// @ts-check
// A sweep as its charts see it: axes, trials with their places on them, which trial is best, and what is selected.

import { Axis } from "/static/sweep/axes.js";

const MUCH = 50; // values that differ so much have a logarithmic axis

/**
 * @typedef {import("./selection.js").Trial} Trial
 * @typedef {{name: string, metric: string | null, goal: string, best: number | null, axes: any[],
 *   trials: [number, number | null, string, number | null, (number | null)[]][], left_out: number, has_jobs: boolean}} Given
 */

export class Model {
  /** @param {Given} given @param {import("./selection.js").Selection} selection @param {boolean | null} isLog of the metric; null: as it fits */
  constructor(given, selection, isLog) {
    this.given = given;
    this.best = given.best;
    this.selection = selection;
    this.parameters = given.axes.map((one) => new Axis(one));
    const values = given.trials.map(([, , , value]) => value).filter((value) => value !== null);
    this.metric = metricAxis(given.metric ?? "metric", values, isLog);
    this.axes = given.metric === null ? this.parameters : [...this.parameters, this.metric];
    /** @type {Trial[]} */
    this.trials = given.trials.map(([number, job, state, value, at]) => ({ number, job, state, at: given.metric === null ? at : [...at, value] }));
    this.measured = given.metric === null ? [] : this.trials.filter((trial) => this.valueOf(trial) !== null);
    selection.axes = this.axes;
    this.#goodness = new Map(ranked(this.measured, (trial) => this.valueOf(trial) ?? 0, given.goal));
  }

  #goodness;

  /** @param {Trial} trial @returns {number | null} */
  valueOf(trial) {
    return this.given.metric === null ? null : trial.at[trial.at.length - 1];
  }

  /** 1: the best trial; 0: the worst one, or one without a value. @param {Trial} trial */
  goodness(trial) {
    return this.#goodness.get(trial.number) ?? 0;
  }

  isBetter(value, than) {
    return this.given.goal === "maximize" ? value > than : value < than;
  }

  /** @param {Trial} trial */
  isSelected(trial) {
    return this.selection.holds(trial);
  }

  /** @param {Trial} trial */
  hrefOf(trial) {
    return this.given.has_jobs && trial.job !== null ? `/jobs/${trial.job}` : null;
  }

  /** Goes to the trial's job. @param {Trial} trial */
  open(trial) {
    const href = this.hrefOf(trial);
    if (href) location.assign(href);
    return href !== null;
  }

  /** @param {Trial} trial */
  words(trial) {
    const values = this.axes.map((axis, at) => `${axis.name} ${axis.text(trial.at[at])}`);
    return [`trial ${trial.number}${trial.number === this.best ? ", the best" : ""}`, trial.state, ...values].join(" · ");
  }

  get bestWords() {
    const best = this.trials.find((trial) => trial.number === this.best);
    return best ? `Best: ${this.words(best)}.` : "";
  }
}

/** @param {string} name @param {number[]} values @param {boolean | null} isLog */
function metricAxis(name, values, isLog) {
  const low = values.reduce((left, right) => Math.min(left, right), Infinity);
  const high = values.reduce((left, right) => Math.max(left, right), -Infinity);
  const fits = low > 0 && high >= MUCH * low;
  const log = low > 0 && (isLog ?? fits);
  return new Axis({ name, kind: "float", log, low: values.length ? low : 0, high: values.length ? high : 1 });
}

/** Each trial's number with its rank as a share: 1 is the best. */
function ranked(trials, valueOf, goal) {
  const sign = goal === "maximize" ? -1 : 1;
  const order = [...trials].sort((left, right) => sign * (valueOf(left) - valueOf(right)));
  return order.map((trial, at) => [trial.number, order.length > 1 ? 1 - at / (order.length - 1) : 1]);
}
