// @ts-check
// Numbers of a chart: scales, ticks, smoothing and formatting. No access to the page.

const MINUS = "−";
const DAY_S = 86400;

const GAP = 5; // times the usual distance of two points
const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"]];

/** @param {number} value @param {string} [unit] */
export function written(value, unit = "") {
  if (!Number.isFinite(value)) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e15 || size < 1e-3)) {
    return withUnit(value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e"), unit);
  }
  const large = LARGE.find(([least]) => size >= least);
  if (large) return withUnit(`${Number((value / large[0]).toPrecision(4))}${large[1]}`, unit);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
  return withUnit(text, unit);
}

/** The ticks of an axis: all with the same number of decimals. @param {number[]} marks @param {string} unit */
export function tickTexts(marks, unit) {
  const texts = marks.map((mark) => written(mark));
  const isPlain = texts.every((text) => /^−?[\d.]+$/.test(text));
  const decimals = Math.max(0, ...texts.map((text) => text.split(".")[1]?.length ?? 0));
  return marks.map((mark, at) => withUnit(isPlain ? (mark + 0).toFixed(decimals) : texts[at], unit));
}

/** Per cent and degrees as in 87 % and 87 °C. */
function withUnit(text, unit) {
  return text.replaceAll("-", MINUS) + (unit ? ` ${unit}` : "");
}

/**
 * Where a line is interrupted because nothing was recorded: before the point of each index that is returned. A distance
 * is a gap if it is larger than ``gap``; or, if that is not given, than five times both the usual distance and the smaller
 * one of its neighbours. A curve whose points get rarer and rarer has no gaps.
 * @param {ReadonlyArray<number>} xs @param {number} [gap]
 */
export function gapsIn(xs, gap) {
  /** @type {Set<number>} */
  const found = new Set();
  const distances = xs.slice(1).map((x, at) => x - xs[at]);
  if (gap === undefined && distances.length < 3) return found;
  const usual = [...distances].sort((left, right) => left - right)[distances.length >> 1];
  distances.forEach((distance, at) => {
    const beside = Math.min(distances[at - 1] ?? Infinity, distances[at + 1] ?? Infinity);
    if (distance > (gap ?? GAP * Math.max(usual, beside))) found.add(at + 1);
  });
  return found;
}

/** A duration as text: 42 s, 3 m 20 s, 2 h 5 m. @param {number} seconds */
function duration(seconds) {
  const whole = Math.round(Math.abs(seconds));
  const sign = seconds < 0 ? MINUS : "";
  if (Math.abs(seconds) < 10 && seconds % 1 !== 0) return `${sign}${Number(Math.abs(seconds).toFixed(2))} s`;
  if (whole < 60) return `${sign}${whole} s`;
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} m${whole % 60 ? ` ${whole % 60} s` : ""}`;
  if (whole < DAY_S) return `${sign}${Math.floor(whole / 3600)} h${whole % 3600 >= 60 ? ` ${Math.floor((whole % 3600) / 60)} m` : ""}`;
  return `${sign}${Math.floor(whole / DAY_S)} d${whole % DAY_S >= 3600 ? ` ${Math.floor((whole % DAY_S) / 3600)} h` : ""}`;
}

/** A position on the x axis as text. @param {"step"|"samples"|"time"|"seconds"} kind @param {number} x @param {number} [span] */
export function placeWritten(kind, x, span = 0) {
  if (kind === "seconds") return duration(x);
  if (kind !== "time") return Math.abs(x) >= 1e6 && span > 1e5 ? written(x) : withUnit(Math.round(x).toLocaleString("en-US"), "");
  /** @type {Intl.DateTimeFormatOptions} */
  const clock = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (span < 600) clock.second = "2-digit";
  const date = span > 20 * 3600 ? { month: "short", day: "numeric" } : {};
  return new Date(x * 1000).toLocaleString("en-GB", /** @type {any} */ ({ ...date, ...clock }));
}

/** Round values within a range. @param {number} low @param {number} high @param {number} most */
export function ticks(low, high, most, steps = [1, 2, 5, 10]) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const raw = span / Math.max(1, most);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = (steps.find((factor) => factor * unit >= raw) ?? 10) * unit;
  const found = [];
  for (let at = Math.ceil(low / step); at <= Math.floor(high / step + 1e-9); at += 1) found.push(at * step);
  return found;
}

/** Ticks of an x axis; round times for a time axis. @param {string} kind @param {number} low @param {number} high @param {number} most */
export function placeTicks(kind, low, high, most) {
  if (kind === "step" || kind === "samples") return ticks(low, high, most).filter((x) => Number.isInteger(x));
  const raw = (high - low) / Math.max(1, most);
  const round = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, DAY_S];
  const step = round.find((one) => one >= raw);
  if (raw < 1 && kind === "time") return ticks(low, high, most).filter((x) => Number.isInteger(x));
  if (raw < 1 || step === undefined) return ticks(low, high, most);
  const shift = kind === "time" ? new Date(low * 1000).getTimezoneOffset() * 60 : 0;
  const found = [];
  for (let x = Math.ceil((low - shift) / step) * step + shift; x <= high; x += step) found.push(x);
  return found;
}

/** Ticks of a logarithmic axis. @param {number} low @param {number} high @param {number} most */
export function logTicks(low, high, most) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / Math.max(1, most)));
  const factors = Math.log10(high / low) <= 2.5 && every === 1 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length >= 2 ? found : ticks(low, high, most);
}

/**
 * A moving mean that forgets, without the pull towards its first value. What is null stays null.
 * @param {ReadonlyArray<number|null>} values @param {number} weight 0 is none, towards 1 is more
 */
export function smoothed(values, weight) {
  if (!(weight > 0)) return values;
  let mean = 0;
  let share = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share *= weight;
    return mean / (1 - share);
  });
}

/** The index of the value nearest to x in a sorted array. @param {ReadonlyArray<number>} xs @param {number} x */
export function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return high >= 0 && Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

/** Minimum and maximum of all numbers. @param {Iterable<Iterable<number|null>>} columns @param {boolean} isLog */
export function extent(columns, isLog = false) {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (value === null || (isLog && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

/** Adds a margin above and below. @param {number[]} pair @param {boolean} isLog */
export function widened([low, high], isLog) {
  if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
  if (low === high) {
    const room = Math.abs(low) * 0.1 || 1;
    return [low - room, high + room];
  }
  return [low - (high - low) * 0.05, high + (high - low) * 0.05];
}
