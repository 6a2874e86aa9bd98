// @ts-check
// Parts of a page that keep themselves up to date: <section data-part="queue" data-live="jobs nodes">.
// When something in data-live changes, the page is fetched again and the part updated in place, which keeps focus,
// scroll position and open details. Values: jobs, job:ID, nodes, metrics, metrics:ID.
// A <form data-live-form> (GET) puts its fields into the page's address, and the parts follow.
import { live } from "/static/live.js";
import { morph } from "/static/morph.js";

const LEAST_PAUSE_MS = 1000;
const TYPING_MS = 250;
const SHARE = 10; // of the time, at most one tenth is spent on fetching

let timer = 0;
let isWanted = false; // soon
let isUrgent = false; // at once
let running = null;
let nextAt = 0;

function wordsOf(change) {
  if (change.again) return null;
  const words = [];
  if (change.event) words.push("jobs", `job:${change.event.job}`);
  if (change.nodes || change.gone_nodes) words.push("nodes");
  for (const job of change.metrics ?? []) words.push(`metrics:${job}`);
  if (change.metrics) words.push("metrics");
  return words;
}

function isAbout(change) {
  const words = wordsOf(change);
  return [...document.querySelectorAll("[data-part][data-live]")].some(
    (part) => words === null || (part.getAttribute("data-live") ?? "").split(/\s+/).some((word) => words.includes(word)),
  );
}

function later() {
  isWanted = true;
  if (timer || running || document.hidden) return;
  timer = window.setTimeout(run, Math.max(0, nextAt - Date.now()));
}

/** Fetches the page and updates all parts, also if a fetch is already running. */
export function refresh() {
  isUrgent = true;
  return run();
}

function run() {
  clearTimeout(timer);
  timer = 0;
  running ??= fetchAgain().finally(() => {
    running = null;
    if (isWanted) later();
  });
  return running;
}

async function fetchAgain() {
  do {
    isWanted = isUrgent = false;
    const began = Date.now();
    const address = location.href;
    const answer = await fetch(address, { headers: { accept: "text/html" } }).catch(() => null);
    const text = answer?.ok ? await answer.text().catch(() => null) : null;
    if (text !== null && address === location.href) put(text);
    nextAt = Date.now() + Math.max(LEAST_PAUSE_MS, (Date.now() - began) * SHARE);
  } while (isUrgent);
}

function put(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const found = fresh.querySelector(`[data-part="${CSS.escape(part.getAttribute("data-part") ?? "")}"]`);
    if (found) morph(part, found);
  }
  document.title = fresh.title;
  document.dispatchEvent(new CustomEvent("ugro-parts"));
}

live.on((change) => {
  if (isAbout(change)) later();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && isWanted) later();
});

let typing = 0;
function follow(form) {
  const fields = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (typeof value === "string" && value !== "") fields.append(name, value);
  history.replaceState(history.state, "", `${location.pathname}${fields.size ? `?${fields}` : ""}`);
  clearTimeout(typing);
  typing = window.setTimeout(refresh, TYPING_MS);
}
for (const kind of ["input", "change"]) {
  document.addEventListener(kind, (event) => {
    const form = event.target.closest?.("form[data-live-form]");
    if (form) follow(form);
  });
}
document.addEventListener("submit", (event) => {
  if (!event.target.matches("form[data-live-form]")) return;
  event.preventDefault();
  follow(event.target);
});
