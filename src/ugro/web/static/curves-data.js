// @ts-check
// Curves of one metric, for one job or for many: fetched in bins; when they grow, only their end is fetched again.

const ROOM = 1.6; // how many times the requested bins may accumulate before everything is fetched again

/**
 * @typedef {{owner: string, attempt: number, rank: number, key: string, width: number, steps: number[], times: number[],
 *   lows: (number|null)[], highs: (number|null)[], means: (number|null)[], odd: number[]}} Curve
 * @typedef {{jobs: string[], key: string, rank: number | null, columns?: string[]}} Which
 */

export class Curves {
  /** @type {Map<string, Curve>} */
  #all = new Map();
  /** @type {Map<string, Curve> | null} */
  #near = null;
  #bins = 300;
  #wish = 0;

  /** @param {Which} which */
  constructor(which) {
    this.which = which;
  }

  /** @returns {Curve[]} */
  get shown() {
    return [...(this.#near ?? this.#all).values()];
  }

  /** @param {number} bins */
  async load(bins) {
    this.#bins = bins;
    this.#all = byName(await this.#fetch({ bins }));
  }

  /** Fetches only new bins, from the start of the last one, which may have grown. */
  async grow() {
    const ends = [...this.#all.values()].map((curve) => curve.steps[curve.steps.length - 1]);
    const longest = Math.max(0, ...[...this.#all.values()].map((curve) => curve.steps.length));
    // Curves that end at different steps would each need a request of their own.
    const isApart = ends.length > 1 && Math.max(...ends) - Math.min(...ends) > 0.2 * (Math.max(...ends) || 1);
    if (!ends.length || isApart || longest > ROOM * this.#bins) return this.load(this.#bins);
    const first = Math.min(...ends);
    for (const [name, tail] of byName(await this.#fetch({ bins: this.#bins, first }))) {
      this.#all.set(name, joined(this.#all.get(name), tail));
    }
  }

  /** Fetches finer bins of a range; null: none any more. @param {[number, number] | null} steps */
  async look(steps) {
    const wish = (this.#wish += 1);
    const [first, last] = steps ? [Math.floor(steps[0]), Math.ceil(steps[1])] : [0, 0];
    const found = steps && byName(await this.#fetch({ bins: this.#bins, first, last }));
    // The request may have changed meanwhile: a late answer is ignored.
    if (wish === this.#wish) this.#near = found;
  }

  /** The steps between two times. @param {[number, number]} range @param {(curve: Curve) => number[]} places @returns {[number, number] | null} */
  stepsBetween(range, places) {
    const steps = [...this.#all.values()].flatMap((curve) => {
      const at = places(curve);
      return curve.steps.filter((_, place) => at[place] >= range[0] && at[place] <= range[1]);
    });
    return steps.length ? [least(steps), -least(steps.map((step) => -step))] : null;
  }

  /** @returns {Promise<Curve[]>} */
  async #fetch(more) {
    const { jobs, key, rank } = this.which;
    const query = new URLSearchParams(jobs.map((job) => ["job", job]));
    query.set("key", key);
    if (rank !== null) query.set("rank", String(rank));
    for (const column of this.which.columns ?? []) query.append("column", column);
    if (this.which.columns) query.set("digits", "5");
    for (const [name, value] of Object.entries(more)) query.set(name, String(value));
    const { curves } = await asked(`/v1/metrics?${query}`);
    return this.which.columns ? curves.map(filled) : curves;
  }
}

/** @param {string} path */
export async function asked(path) {
  const response = await fetch(path, { headers: { accept: "application/json" } });
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Error(body?.error?.message ?? `the agent answered ${response.status}`);
  return body;
}

/** The newest attempt of each job. @param {Curve[]} curves */
export function newestOnly(curves) {
  const newest = new Map();
  for (const curve of curves) newest.set(curve.owner, Math.max(curve.attempt, newest.get(curve.owner) ?? 0));
  return curves.filter((curve) => curve.attempt === newest.get(curve.owner));
}

/**
 * Curves of a group as one: at each step the mean of all that have a value, and one standard deviation to either side.
 * On an axis of time it stands where its members were at that step, on average.
 * @param {Curve[]} curves @param {(curve: Curve) => number[]} places
 */
export function meanOf(curves, places) {
  const sums = new Map();
  for (const curve of curves) {
    const xs = places(curve);
    curve.means.forEach((mean, at) => {
      if (mean === null) return;
      const sum = sums.get(curve.steps[at]) ?? [0, 0, 0, 0];
      sums.set(curve.steps[at], [sum[0] + 1, sum[1] + mean, sum[2] + mean * mean, sum[3] + xs[at]]);
    });
  }
  const rows = [...sums.values()].map(([count, sum, squares, places]) => {
    const mean = sum / count;
    const apart = count > 1 ? Math.sqrt(Math.max(0, (squares - count * mean * mean) / (count - 1))) : 0;
    return [places / count, mean - apart, mean + apart, mean];
  });
  rows.sort((left, right) => left[0] - right[0]);
  const column = (at) => rows.map((row) => row[at]);
  return { xs: column(0), mins: column(1), maxs: column(2), means: column(3) };
}

/** Gives a curve without a band one of zero width. */
function filled(curve) {
  return { ...curve, lows: curve.means, highs: curve.means, odd: undefined, times: curve.times ?? [] };
}

function byName(curves) {
  return new Map(curves.map((curve) => [`${curve.owner}/${curve.attempt}/${curve.rank}`, curve]));
}

/** @param {Curve | undefined} head @param {Curve} tail */
function joined(head, tail) {
  if (!head || !tail.steps.length) return head ?? tail;
  let end = head.steps.length;
  while (end > 0 && head.steps[end - 1] >= tail.steps[0]) end -= 1;
  const both = (name) => head[name] && [...head[name].slice(0, end), ...tail[name]];
  const columns = ["steps", "times", "lows", "highs", "means", "odd"].map((name) => [name, both(name)]);
  return { ...head, ...Object.fromEntries(columns) };
}

/** For more values than a call can have arguments. */
function least(values) {
  return values.reduce((best, value) => (value < best ? value : best), Infinity);
}
