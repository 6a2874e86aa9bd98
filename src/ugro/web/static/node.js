// @ts-check
// The curves of a node, in a few charts with a common time axis.
import "/static/chart.js";
import { smoothing } from "/static/curves-tools.js";
import { live } from "/static/live.js";

const BINS = 300;
const EVERY_MS = 10000;
const GAP_S = 90; // longer than between two probes of an idle node
const place = document.getElementById("charts");
const node = place?.dataset.node ?? "";
const hours = Number(place?.dataset.hours ?? 1);
const charts = new Map();

const look = { smooth: 0 };
const tools = Object.assign(document.createElement("div"), { className: "curves-tools", hidden: true });
tools.append(smoothing(look, () => charts.forEach((chart) => chart.setAttribute("smooth", String(look.smooth)))));
place?.before(tools);
place?.addEventListener("ugro-cursor", (event) => {
  for (const chart of charts.values()) if (chart !== event.target) chart.cursor = /** @type {CustomEvent} */ (event).detail.x;
});

// title, unit, keys (the group names the line), factor, and the ends of the axis.
const GROUPS = [
  ["GPU use", "%", /^gpu\/(\d+)\/use_ratio$/, 100, 0, 100],
  ["GPU memory used", "%", /^gpu\/(\d+)\/memory_used_ratio$/, 100, 0, 100],
  ["GPU temperature", "°C", /^gpu\/(\d+)\/temperature_c$/, 1],
  ["GPU power", "W", /^gpu\/(\d+)\/power_w$/, 1, 0],
  ["CPU and memory used", "%", /^(cpu|memory)\/use(?:d)?_ratio$/, 100, 0, 100],
  ["Load", "", /^cpu\/load$/, 1, 0],
  ["Disks used", "%", /^disk\/(.*)\/used_ratio$/, 100, 0, 100],
  ["Link latency", "ms", /^link\/latency_s$/, 1000, 0],
  ["Health score", "", /^score$/, 1, 0, 100],
];

function seriesOf(curve, pattern, factor) {
  const name = pattern.exec(curve.key)?.[1] ?? curve.key;
  const times = (values) => values.map((value) => (value === null ? null : value * factor));
  const color = /^\d+$/.test(name) ? Number(name) : undefined;
  return {
    name: color === undefined ? name.replace("cpu", "CPU") : `GPU ${name}`, color,
    xs: curve.times, mins: times(curve.lows), maxs: times(curve.highs), means: times(curve.means),
  };
}

function show(curves, range) {
  const width = (range[1] - range[0]) / BINS; // seconds of a bin
  for (const [title, unit, pattern, factor, low, high] of GROUPS) {
    const series = curves.filter((curve) => pattern.test(curve.key)).map((curve) => seriesOf(curve, pattern, factor));
    if (!series.length) continue;
    series.sort((left, right) => left.name.localeCompare(right.name, "en", { numeric: true }));
    chartOf(title, { unit, min: low, max: high }).data = { x: "time", range, gap: Math.max(GAP_S, 2.5 * width), series };
  }
  if (charts.size) tools.hidden = false;
  const loading = place?.querySelector(".loading");
  if (charts.size) loading?.remove();
  else if (loading) loading.textContent = "No values for this time.";
}

function chartOf(title, attributes) {
  if (!charts.has(title)) {
    const chart = document.createElement("ugro-chart");
    chart.setAttribute("label", title);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) chart.setAttribute(name, String(value));
    chart.setAttribute("smooth", String(look.smooth));
    place?.append(chart);
    charts.set(title, chart);
  }
  return charts.get(title);
}

async function read() {
  const now = Math.floor(Date.now() / 1000);
  const range = [now - hours * 3600, now];
  const asked = `/v1/nodes/${encodeURIComponent(node)}/history?first=${range[0]}&last=${range[1]}&bins=${BINS}`;
  const answer = await fetch(asked).catch(() => null);
  if (answer?.ok) show((await answer.json()).curves, range);
}

let readAt = 0;
function readAgain() {
  if (document.hidden || Date.now() - readAt < EVERY_MS) return;
  readAt = Date.now();
  read();
}

readAgain();
live.on((change) => {
  if (change.again || change.nodes?.some((report) => report.name === node)) readAgain();
});
document.addEventListener("visibilitychange", readAgain);
