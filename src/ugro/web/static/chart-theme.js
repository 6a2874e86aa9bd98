// @ts-check
// Colours for a canvas. A custom property is text; the colour in the current theme is an element's computed colour.

const NAMES = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => `--series-${number}`);
const SHEET = "/static/chart.css";
const listeners = new Set();

/** @param {Element} near */
export function coloursOf(near) {
  const probe = document.createElement("span");
  probe.hidden = true;
  near.append(probe);
  const resolved = (colour) => {
    probe.style.color = colour;
    return getComputedStyle(probe).color;
  };
  const found = {
    ink: resolved("inherit"),
    faint: resolved("var(--muted)"),
    grid: resolved("var(--line)"),
    surface: backgroundOf(near),
    lines: NAMES.map((name) => resolved(`var(${name})`)),
  };
  probe.remove();
  return found;
}

/** Calls back when the colours have changed. @param {() => void} tell @returns {() => void} ends it */
export function onTheme(tell) {
  listeners.add(tell);
  return () => listeners.delete(tell);
}

/** Adds the chart's style sheet. The content security policy requires a file; a report has all styles in itself. */
export function addSheet() {
  if (document.querySelector(`link[href="${SHEET}"], style[data-complete]`)) return;
  const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: SHEET });
  link.addEventListener("load", tellAll);
  document.head.append(link);
}

function backgroundOf(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (colour && colour !== "rgba(0, 0, 0, 0)" && colour !== "transparent") return colour;
  }
  return "white";
}

function tellAll() {
  for (const tell of listeners) tell();
}

new MutationObserver(tellAll).observe(document.documentElement, { attributeFilter: ["data-theme", "class"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellAll);
