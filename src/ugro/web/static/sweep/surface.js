// @ts-check
// A surface between scattered points, and its contour lines. No access to the page.
//
// Each place gets the mean of the points around it, the nearer the more (Franke and Little's form of Shepard's method).
// So the surface goes through the points, and is nowhere better than the best of them or worse than the worst.

const AROUND = 10; // points that decide about a place
const SAME = 1e-9; // so near, points are one
export const LEAST_POINTS = 5; // at different places
export const FAR = 0.2; // of the whole width: further from any point, a value is a guess

/**
 * @typedef {{x: number, y: number, value: number}} Point x and y between 0 and 1
 * @typedef {{xs: number[], ys: number[], values: (number | null)[], distances: number[]}} Surface row after row, from y = 0
 */

/** How many different places the points have. @param {Point[]} points */
export function places(points) {
  return new Set(points.map(({ x, y }) => `${x.toFixed(6)} ${y.toFixed(6)}`)).size;
}

/**
 * The values at all crossings of xs and ys. In a direction of choices only the points of the same choice count, since
 * there is nothing between two choices.
 * @param {Point[]} points @param {number[]} xs @param {number[]} ys @param {{x: boolean, y: boolean}} isChoice
 * @returns {Surface}
 */
export function surface(points, xs, ys, isChoice) {
  const values = [];
  const distances = [];
  for (const y of ys) {
    for (const x of xs) {
      const usable = points.filter((one) => (!isChoice.x || Math.abs(one.x - x) < SAME) && (!isChoice.y || Math.abs(one.y - y) < SAME));
      const { value, distance } = valueAt(usable, x, y);
      values.push(value);
      distances.push(distance);
    }
  }
  return { xs, ys, values, distances };
}

/** @param {Point[]} points @param {number} x @param {number} y @returns {{value: number | null, distance: number}} */
export function valueAt(points, x, y) {
  const near = nearestOf(points, x, y);
  if (!near.length) return { value: null, distance: Infinity };
  const distance = near[0].distance;
  const same = near.filter((one) => one.distance < SAME);
  if (same.length) return { value: mean(same.map((one) => one.value)), distance };
  // The furthest of them counts nothing, so that the surface has no step where another point takes its place.
  const reach = near[near.length - 1].distance * (near.length > AROUND ? 1 : 1.5);
  let [sum, weights] = [0, 0];
  for (const one of near) {
    const weight = (Math.max(0, reach - one.distance) / (reach * one.distance)) ** 2;
    sum += weight * one.value;
    weights += weight;
  }
  return { value: weights > 0 ? sum / weights : mean(near.map((one) => one.value)), distance };
}

/** One more than decide, the nearest first; all points of the nearest place. */
function nearestOf(points, x, y) {
  /** @type {{value: number, distance: number}[]} */
  const found = [];
  for (const one of points) {
    const distance = Math.hypot(one.x - x, one.y - y);
    const isFull = found.length > AROUND;
    if (isFull && distance >= found[found.length - 1].distance && distance >= SAME) continue;
    let at = found.length;
    while (at > 0 && found[at - 1].distance > distance) at -= 1;
    found.splice(at, 0, { value: one.value, distance });
    if (isFull && found[found.length - 1].distance >= SAME) found.pop();
  }
  return found;
}

/**
 * The lines at which a surface has a value: pieces [x1, y1, x2, y2]. Where a value is missing there is none.
 * @param {Surface} from @param {number} level @returns {[number, number, number, number][]}
 */
export function contour({ xs, ys, values }, level) {
  /** @type {[number, number, number, number][]} */
  const pieces = [];
  for (let row = 0; row + 1 < ys.length; row += 1) {
    for (let column = 0; column + 1 < xs.length; column += 1) {
      const corners = [[0, 0], [1, 0], [1, 1], [0, 1]].map(([right, up]) => ({
        x: xs[column + right], y: ys[row + up], value: values[(row + up) * xs.length + column + right],
      }));
      if (corners.some((one) => one.value === null)) continue;
      const crossed = crossings(corners, level);
      for (let at = 0; at + 1 < crossed.length; at += 2) pieces.push([...crossed[at], ...crossed[at + 1]]);
    }
  }
  return pieces;
}

/** Where the sides of a cell cross the level: none, two, or four of them. */
function crossings(corners, level) {
  const found = [];
  corners.forEach((from, at) => {
    const to = corners[(at + 1) % 4];
    if (from.value >= level === to.value >= level) return;
    const share = (level - from.value) / (to.value - from.value);
    found.push([from.x + share * (to.x - from.x), from.y + share * (to.y - from.y)]);
  });
  return found;
}

/** Levels at equal distances, without the ends. @param {number} low @param {number} high @param {number} count */
export function levels(low, high, count) {
  return Array.from({ length: count - 1 }, (_, at) => low + ((at + 1) / count) * (high - low));
}

function mean(values) {
  return values.reduce((sum, one) => sum + one, 0) / values.length;
}
