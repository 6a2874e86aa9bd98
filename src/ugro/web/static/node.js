// @ts-check
// The curves of a node, in a few charts with a common time axis.
import "/static/chart.js";
import { live } from "/static/live.js";

const BINS = 300;
const EVERY_MS = 10000;
const place = document.getElementById("charts");
const node = place?.dataset.node ?? "";
const hours = Number(place?.dataset.hours ?? 1);
const charts = new Map();

// title, keys (the group names the line), and factor.
const GROUPS = [
  ["GPU use, %", /^gpu\/(\d+)\/use_ratio$/, 100],
  ["GPU memory used, %", /^gpu\/(\d+)\/memory_used_ratio$/, 100],
  ["GPU temperature, °C", /^gpu\/(\d+)\/temperature_c$/, 1],
  ["GPU power, W", /^gpu\/(\d+)\/power_w$/, 1],
  ["CPU and memory used, %", /^(cpu|memory)\/use(?:d)?_ratio$/, 100],
  ["Load", /^cpu\/load$/, 1],
  ["Disks used, %", /^disk\/(.*)\/used_ratio$/, 100],
  ["Link latency, ms", /^link\/latency_s$/, 1000],
  ["Health score", /^score$/, 1],
];

function seriesOf(curve, pattern, factor) {
  const name = pattern.exec(curve.key)?.[1] ?? curve.key;
  const times = (values) => values.map((value) => (value === null ? null : value * factor));
  return {
    name: /^\d+$/.test(name) ? `GPU ${name}` : name,
    xs: curve.times, mins: times(curve.lows), maxs: times(curve.highs), means: times(curve.means),
  };
}

function show(curves) {
  for (const [title, pattern, factor] of GROUPS) {
    const series = curves.filter((curve) => pattern.test(curve.key)).map((curve) => seriesOf(curve, pattern, factor));
    if (!series.length) continue;
    chartOf(title).data = { x: "time", series };
  }
  const loading = place?.querySelector(".loading");
  if (charts.size) loading?.remove();
  else if (loading) loading.textContent = "No values for this time.";
}

function chartOf(title) {
  if (!charts.has(title)) {
    const chart = document.createElement("ugro-chart");
    chart.setAttribute("label", title);
    chart.setAttribute("smooth", "0");
    place?.append(chart);
    charts.set(title, chart);
  }
  return charts.get(title);
}

async function read() {
  const now = Math.floor(Date.now() / 1000);
  const asked = `/v1/nodes/${encodeURIComponent(node)}/history?first=${now - hours * 3600}&last=${now}&bins=${BINS}`;
  const answer = await fetch(asked).catch(() => null);
  if (answer?.ok) show((await answer.json()).curves);
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
