// @ts-check
// How trials look by their state: a shape, dashes and a colour together, so that no one of them is needed alone.

/** @typedef {{sign: string, shape: string, dash: number[], color: number}} Look */

/** @type {Record<string, Look>} */
const LOOKS = {
  complete: { sign: "●", shape: "dot", dash: [], color: 0 },
  pruned: { sign: "▽", shape: "triangle", dash: [6, 3], color: 4 },
  failed: { sign: "✕", shape: "cross", dash: [1, 3], color: 6 },
  infeasible: { sign: "◇", shape: "diamond", dash: [9, 3, 1, 3], color: 3 },
  running: { sign: "○", shape: "ring", dash: [3, 2], color: 2 },
};
const OTHER = { sign: "□", shape: "square", dash: [2, 4], color: 7 }; // pending, stopped, cancelled

/** @param {string} state @returns {Look} */
export function lookOf(state) {
  return LOOKS[state] ?? OTHER;
}

/** Draws one trial as a point. @param {CanvasRenderingContext2D} pen @param {string} state */
export function drawMark(pen, state, x, y, size) {
  const { shape } = lookOf(state);
  pen.beginPath();
  if (shape === "dot" || shape === "ring") pen.arc(x, y, size, 0, 7);
  else if (shape === "square") pen.rect(x - size, y - size, 2 * size, 2 * size);
  else if (shape === "cross") {
    pen.moveTo(x - size, y - size);
    pen.lineTo(x + size, y + size);
    pen.moveTo(x - size, y + size);
    pen.lineTo(x + size, y - size);
  } else {
    const corners = shape === "diamond" ? [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]] : [[-1.2, -1], [1.2, -1], [0, 1.2]];
    corners.forEach(([right, down], at) => (at ? pen.lineTo(x + right * size, y + down * size) : pen.moveTo(x + right * size, y + down * size)));
    pen.closePath();
  }
  pen.lineWidth = shape === "cross" ? 2 : 1.4;
  if (shape === "dot") pen.fill();
  else pen.stroke();
}

/** A ring around the best trial, and the word. @param {CanvasRenderingContext2D} pen @param {{ink: string, surface: string}} colours */
export function drawBest(pen, x, y, colours, width) {
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.arc(x, y, 8, 0, 7);
  pen.stroke();
  pen.textAlign = x > width - 50 ? "right" : "left";
  haloed(pen, "best", x + (x > width - 50 ? -12 : 12), y, colours.ink, colours.surface);
}

/** Text that can be read above lines. @param {CanvasRenderingContext2D} pen */
export function haloed(pen, text, x, y, ink, surface) {
  pen.lineWidth = 3.5;
  pen.lineJoin = "round";
  pen.strokeStyle = surface;
  pen.setLineDash([]);
  pen.textBaseline = "middle";
  pen.strokeText(text, x, y);
  pen.fillStyle = ink;
  pen.fillText(text, x, y);
}

/**
 * A button for each state: its sign, its word, how many; pressed while it is shown.
 * @param {HTMLElement} list @param {{state: string}[]} trials @param {import("./selection.js").Selection} selection
 */
export function fillStates(list, trials, selection) {
  const counts = new Map();
  for (const { state } of trials) counts.set(state, (counts.get(state) ?? 0) + 1);
  const names = JSON.stringify([...counts]);
  list.hidden = false;
  list.setAttribute("aria-label", "States");
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...[...counts].map(([state, count]) => entry(state, count, selection)));
  }
  for (const one of list.querySelectorAll("button")) one.setAttribute("aria-pressed", String(!selection.isHidden(one.dataset.state ?? "")));
}

function entry(state, count, selection) {
  const button = Object.assign(document.createElement("button"), { type: "button" });
  button.dataset.state = state;
  const sign = Object.assign(document.createElement("b"), { textContent: lookOf(state).sign });
  sign.setAttribute("aria-hidden", "true");
  sign.style.color = `var(--series-${lookOf(state).color + 1})`;
  button.append(sign, `${state} ${count}`);
  button.addEventListener("click", () => selection.toggle(state));
  const item = document.createElement("li");
  item.append(button);
  return item;
}
