// @ts-check
// Keys: g and a letter goes to a page, / to the filter, j and k along rows, t changes the theme, ? shows help.
import { nextTheme } from "/static/theme.js";

const GO_MS = 1500;
let goUntil = 0;
const help = document.getElementById("help-dialog");

const isTyping = (target) => target.closest?.("input, select, textarea, [contenteditable], dialog[open]") !== null;
const isShown = (element) => element.offsetParent !== null;

function walk(step) {
  const rows = [...document.querySelectorAll("[data-row]")].filter(isShown);
  if (!rows.length) return;
  const here = rows.findIndex((row) => row.contains(document.activeElement));
  const next = here < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(here + step, 0), rows.length - 1);
  rows[next].querySelector("a")?.focus();
}

const ACTIONS = {
  j: () => walk(1),
  k: () => walk(-1),
  t: nextTheme,
  g: () => { goUntil = Date.now() + GO_MS; },
  "?": () => help?.showModal(),
  "/": () => [...document.querySelectorAll("[data-filter]")].find(isShown)?.focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || isTyping(event.target)) return;
  const link = Date.now() < goUntil ? document.querySelector(`[data-go="${CSS.escape(event.key)}"]`) : null;
  goUntil = 0;
  const action = link ? () => link.click() : ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

document.getElementById("help")?.addEventListener("click", () => help?.showModal());
